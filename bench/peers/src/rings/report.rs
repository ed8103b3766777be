//! Prints medians of measurements and their shares, as a table or as JSON.

use serde_json::{Value, json};

use super::Turns;
use super::sample::Sample;
use crate::commits::median;

/// The results of one measurement.
struct Turn {
    rate: f64,
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    cpu_us_each: f64,
}

impl Turn {
    fn new(mut sample: Sample) -> Self {
        Self {
            rate: sample.megabytes_per_second(),
            p50_us: sample.quantile_us(0.5),
            p99_us: sample.quantile_us(0.99),
            cpu_us_each: sample.cpu_us_each(),
        }
    }
}

/// A method, with its measurements or the reason why there are none.
struct Way {
    name: String,
    has_ring: bool,
    turns: Result<Vec<Turn>, String>,
}

/// A median, and the median of its shares if there is a method to compare with.
struct Figure {
    median: f64,
    share: Option<f64>,
}

impl Way {
    fn new(Turns { name, has_ring, samples }: Turns) -> Self {
        let turns = |samples: Vec<Sample>| samples.into_iter().map(Turn::new).collect();
        Self { name, has_ring, turns: samples.map(turns).map_err(|error| error.to_string()) }
    }

    fn figure(turns: &[Turn], fastest: &[&Turn], of: fn(&Turn) -> Option<f64>) -> Option<Figure> {
        let values: Vec<f64> = turns.iter().map(of).collect::<Option<_>>()?;
        let shares: Option<Vec<f64>> =
            values.iter().zip(fastest).map(|(value, fastest)| Some(value / of(fastest)?)).collect();
        Some(Figure { share: shares.filter(|shares| !shares.is_empty()).map(median), median: median(values) })
    }
}

/// Returns the fastest measurement without a ring of each round. The list is empty if no round is complete.
fn fastest(ways: &[Way]) -> Vec<&Turn> {
    let without: Vec<&Vec<Turn>> =
        ways.iter().filter(|way| !way.has_ring).filter_map(|way| way.turns.as_ref().ok()).collect();
    let rounds = without.first().map_or(0, |turns| turns.len());
    let of_round = |round: usize| without.iter().map(move |turns| &turns[round]);
    (0..rounds)
        .filter_map(|round| of_round(round).max_by(|one, other| one.rate.total_cmp(&other.rate)))
        .collect()
}

type Of = fn(&Turn) -> Option<f64>;

/// The columns of a measurement: the heading, the name of the JSON field, and the value.
const FIGURES: [(&str, &str, Of); 4] = [
    ("MB/s", "mb_per_s", |turn| Some(turn.rate)),
    ("p50, us", "p50_us", |turn| turn.p50_us),
    ("p99, us", "p99_us", |turn| turn.p99_us),
    ("processors, us each", "cpu_us_each", |turn| Some(turn.cpu_us_each)),
];

/// Prints the measurements as a table.
pub fn table(group: &str, turns: Vec<Turns>) {
    let ways: Vec<Way> = turns.into_iter().map(Way::new).collect();
    let fastest = fastest(&ways);
    let headings = FIGURES.map(|(heading, ..)| format!("{heading} | share")).join(" | ");
    println!("\n| {group} | {headings} |\n|---|{}", "---|---|".repeat(FIGURES.len()));
    for way in &ways {
        match &way.turns {
            Ok(turns) => {
                let cells = FIGURES.map(|(.., of)| match Way::figure(turns, &fastest, of) {
                    Some(Figure { median, share: Some(share) }) => format!("{median:.0} | {share:.2}"),
                    Some(Figure { median, share: None }) => format!("{median:.0} |"),
                    None => " |".to_owned(),
                });
                println!("| {} | {} |", way.name, cells.join(" | "));
            }
            Err(reason) => println!("| {} | left out: {reason} |", way.name),
        }
    }
}

/// Prints the measurements as one JSON object for each method.
pub fn objects(group: &str, turns: Vec<Turns>) {
    let ways: Vec<Way> = turns.into_iter().map(Way::new).collect();
    let fastest = fastest(&ways);
    for way in &ways {
        let mut object = json!({ "group": group, "way": way.name });
        match &way.turns {
            Ok(turns) => {
                for (_, field, of) in FIGURES {
                    let figure = Way::figure(turns, &fastest, of);
                    let (median, share) = figure.map_or((None, None), |f| (Some(f.median), f.share));
                    object[field] = Value::from(median);
                    object[format!("{field}_share")] = Value::from(share);
                }
            }
            Err(reason) => object["left_out"] = Value::from(reason.as_str()),
        }
        println!("{object}");
    }
}
