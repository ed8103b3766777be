//! The results of a run: figures in groups, each with the ceiling that was measured in turn with it.
//!
//! The table for people, `--json` and the HTML report are three views of these results.

use std::time::Duration;

use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::json::SCHEMA;
use remanent_tools::shared::output::Output;
use remanent_tools::shared::table;
use serde_json::{Value, json};

use crate::latency::Latency;

/// The sign after a ratio if higher is better, for example of a rate.
pub const HIGHER: &str = "\u{2191}";
/// The sign after a ratio if lower is better, for example of a time.
pub const LOWER: &str = "\u{2193}";
/// The legend of the two signs.
pub const BETTER: &str = "\u{2191} higher is better, \u{2193} lower is better";

/// Returns operations per second; 0 if no time passed.
pub fn rate(of: u64, took: Duration) -> f64 {
    if took.is_zero() { 0.0 } else { of as f64 / took.as_secs_f64() }
}

/// The results of one run.
pub struct Findings {
    /// The benchmark's name.
    pub bench: &'static str,
    /// The machine, the directory and the settings, by name.
    pub settings: Vec<(&'static str, String)>,
    pub groups: Vec<Group>,
    /// Measurements that are not possible here, with the reason.
    pub left_out: Vec<String>,
}

/// Figures that were measured in turn.
pub struct Group {
    /// The common title of the figures.
    pub title: String,
    pub figures: Vec<Figure>,
}

/// One measurement, repeated in each round.
pub struct Figure {
    /// The name, unique in its group.
    pub name: String,
    pub unit: Unit,
    /// One value per round, in the base unit.
    pub rounds: Vec<f64>,
    /// The latencies of single operations over all rounds.
    pub latency: Option<Latency>,
    pub course: Option<TimeSeries>,
    /// The name of the ceiling: a figure of the same group and unit that no store can exceed.
    pub ceiling: Option<String>,
}

/// A value over time.
pub struct TimeSeries {
    pub unit: Unit,
    /// The time between two values.
    pub step: Duration,
    pub values: Vec<f64>,
    /// Events: when each began, and its name.
    pub marks: Vec<(Duration, &'static str)>,
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Operations of this name per second.
    PerSecond(&'static str),
    BytesPerSecond,
    Bytes,
    Seconds,
    /// A share, from 0 to 1.
    Share,
    /// A hit rate, from 0 to 1.
    Hits,
    /// A number of things of this name.
    Count(&'static str),
}

impl Unit {
    /// Returns the name in `--json`.
    pub fn name(self) -> String {
        match self {
            Unit::PerSecond(what) => format!("{what}/s"),
            Unit::BytesPerSecond => "bytes/s".to_owned(),
            Unit::Bytes => "bytes".to_owned(),
            Unit::Seconds => "s".to_owned(),
            Unit::Share | Unit::Hits => "share".to_owned(),
            Unit::Count(what) => what.to_owned(),
        }
    }

    /// Returns whether a higher value is better, so that a ceiling is a maximum.
    pub fn is_rate(self) -> bool {
        matches!(self, Unit::PerSecond(_) | Unit::BytesPerSecond | Unit::Hits)
    }

    /// Returns the better direction, as a sign after a ratio to the ceiling.
    pub fn better(self) -> &'static str {
        if self.is_rate() { HIGHER } else { LOWER }
    }

    /// Formats a value for people.
    pub fn show(self, value: f64) -> String {
        match self {
            Unit::PerSecond(what) => format!("{} {what}/s", grouped(value)),
            Unit::BytesPerSecond if value < 1e8 => format!("{:.2} MB/s", value / 1e6),
            Unit::BytesPerSecond => format!("{:.2} GB/s", value / 1e9),
            Unit::Bytes if value < 1e6 => format!("{} B", grouped(value)),
            Unit::Bytes => format!("{:.1} MiB", value / f64::from(1 << 20)),
            Unit::Seconds if value > 0.0 && value < 1e-6 => format!("{:.0} ns", value * 1e9),
            Unit::Seconds if value < 1e-3 => format!("{:.1} us", value * 1e6),
            Unit::Seconds if value < 1.0 => format!("{:.1} ms", value * 1e3),
            Unit::Seconds => format!("{value:.2} s"),
            Unit::Share => format!("{value:.4}"),
            Unit::Hits => format!("{:.2} %", value * 100.0),
            Unit::Count(what) => format!("{} {what}", grouped(value)),
        }
    }
}

/// Formats a number with thousands separators; small ones with one decimal.
fn grouped(value: f64) -> String {
    if value.abs() < 100.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut shown = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) && digit.is_ascii_digit() {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

impl Figure {
    /// Creates a figure without values.
    pub fn new(name: impl Into<String>, unit: Unit) -> Self {
        Self { name: name.into(), unit, rounds: Vec::new(), latency: None, course: None, ceiling: None }
    }

    /// Sets the figure's ceiling.
    #[must_use]
    pub fn under(mut self, ceiling: impl Into<String>) -> Self {
        self.ceiling = Some(ceiling.into());
        self
    }

    /// Adds the value of one more round.
    pub fn push(&mut self, value: f64) {
        self.rounds.push(value);
    }

    /// Returns the median over the rounds.
    pub fn median(&self) -> f64 {
        median(self.rounds.clone())
    }
}

/// Returns the median; for an even number of values, the upper one of the middle two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Group {
    /// Creates a group without figures.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), figures: Vec::new() }
    }

    /// Returns the ceiling of a figure of this group.
    pub fn ceiling(&self, figure: &Figure) -> Option<&Figure> {
        let name = figure.ceiling.as_ref()?;
        self.figures.iter().find(|other| other.name == *name)
    }

    /// Returns a figure as a multiple of its ceiling: the median over the rounds of each round's own ratio,
    /// because a machine that slows down slows both down.
    pub fn ratio(&self, figure: &Figure) -> Option<f64> {
        let ceiling = self.ceiling(figure)?;
        if figure.rounds.is_empty() || ceiling.rounds.len() != figure.rounds.len() {
            return None;
        }
        let rounds = figure.rounds.iter().zip(&ceiling.rounds);
        Some(median(rounds.map(|(value, ceiling)| value / ceiling).collect()))
    }

    /// Returns the median latency of a figure as a multiple of its ceiling's.
    pub fn latency_ratio(&self, figure: &Figure) -> Option<f64> {
        let ceiling = self.ceiling(figure)?.latency.as_ref()?;
        Some(figure.latency.as_ref()?.quantile(0.5) / ceiling.quantile(0.5))
    }
}

impl Findings {
    /// Prints the figures for people.
    pub fn print(&self, out: &mut Output) -> Result<(), Failure> {
        for (name, value) in &self.settings {
            out.line(format_args!("{name:<11} {value}"))?;
        }
        for group in &self.groups {
            out.line(format_args!("\n{}", group.title))?;
            let mut table = table::with_header(
                ["FIGURE", "MEDIAN", "X CEILING", "P50", "P99", "WORST", "P50 X CEILING"],
                1..7,
            );
            for figure in &group.figures {
                let time = |of: fn(&Latency) -> f64| {
                    figure.latency.as_ref().map_or_else(String::new, |all| Unit::Seconds.show(of(all)))
                };
                let ratio = |ratio: Option<f64>, better: &str| {
                    ratio.map_or_else(String::new, |ratio| format!("{ratio:.3} {better}"))
                };
                table.add_row([
                    figure.name.clone(),
                    figure.unit.show(figure.median()),
                    ratio(group.ratio(figure), figure.unit.better()),
                    time(|all| all.quantile(0.5)),
                    time(|all| all.quantile(0.99)),
                    time(Latency::worst),
                    ratio(group.latency_ratio(figure), LOWER),
                ]);
            }
            out.line(table.trim_fmt())?;
        }
        for what in &self.left_out {
            out.line(format_args!("\nnot measured: {what}"))?;
        }
        let is_compared = |group: &Group| group.figures.iter().any(|figure| figure.ceiling.is_some());
        match self.groups.iter().any(is_compared) {
            true => out.line(format_args!("\nx ceiling: {BETTER}")),
            false => Ok(()),
        }
    }

    /// Prints one object per figure, and one for the run at the end.
    pub fn print_json(&self, out: &mut Output) -> Result<(), Failure> {
        for group in &self.groups {
            for figure in &group.figures {
                out.line(self.figure_json(group, figure))?;
            }
        }
        let settings: serde_json::Map<String, Value> =
            self.settings.iter().map(|(name, value)| ((*name).to_owned(), value.as_str().into())).collect();
        out.line(
            json!({ "schema": SCHEMA, "bench": self.bench, "settings": settings, "left_out": self.left_out }),
        )
    }

    fn figure_json(&self, group: &Group, figure: &Figure) -> Value {
        let mut object = json!({
            "schema": SCHEMA,
            "bench": self.bench,
            "group": group.title,
            "figure": figure.name,
            "unit": figure.unit.name(),
            "median": figure.median(),
            "rounds": figure.rounds,
            "ceiling": figure.ceiling,
            "ratio": group.ratio(figure),
            "better": if figure.unit.is_rate() { "higher" } else { "lower" },
        });
        if let Some(latency) = &figure.latency {
            let micros = |seconds: f64| seconds * 1e6;
            object["latency_us"] = json!({
                "count": latency.count(),
                "p50": micros(latency.quantile(0.5)),
                "p90": micros(latency.quantile(0.9)),
                "p99": micros(latency.quantile(0.99)),
                "p999": micros(latency.quantile(0.999)),
                "worst": micros(latency.worst()),
                "p50_ratio": group.latency_ratio(figure),
            });
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(name: &str, rounds: &[f64]) -> Figure {
        let mut figure = Figure::new(name, Unit::BytesPerSecond);
        figure.rounds = rounds.to_vec();
        figure
    }

    #[test]
    fn ratio_is_of_paired_rounds() {
        // The machine was slow in the first round: the ratio of the medians would be 1.
        let raw = figure("raw", &[1.0, 10.0, 8.0]);
        let store = figure("store", &[0.9, 8.0, 20.0]).under("raw");
        let group = Group { title: String::new(), figures: vec![raw, store] };
        assert_eq!(group.ratio(&group.figures[1]), Some(0.9));
        assert_eq!(group.ratio(&group.figures[0]), None);
    }

    #[test]
    fn figure_without_paired_ceiling_has_no_ratio() {
        let figures = vec![figure("raw", &[1.0]), figure("store", &[1.0, 2.0]).under("raw")];
        let group = Group { title: String::new(), figures };
        assert_eq!(group.ratio(&group.figures[1]), None);
    }

    #[test]
    fn values_are_shown_with_their_units() {
        for (unit, value, shown) in [
            (Unit::PerSecond("commits"), 1_234_567.0, "1,234,567 commits/s"),
            (Unit::PerSecond("commits"), 12.34, "12.3 commits/s"),
            (Unit::BytesPerSecond, 2.41e9, "2.41 GB/s"),
            (Unit::BytesPerSecond, 1.5e6, "1.50 MB/s"),
            (Unit::Bytes, 4096.0, "4,096 B"),
            (Unit::Bytes, 41.0 * 1048576.0, "41.0 MiB"),
            (Unit::Seconds, 93e-6, "93.0 us"),
            (Unit::Seconds, 93e-9, "93 ns"),
            (Unit::Seconds, 0.0123, "12.3 ms"),
            (Unit::Seconds, 8.7, "8.70 s"),
            (Unit::Hits, 0.5, "50.00 %"),
            (Unit::Count("blocks"), 12_345.0, "12,345 blocks"),
        ] {
            assert_eq!(unit.show(value), shown);
        }
    }
}
