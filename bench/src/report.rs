//! `--report`: the results as a self-contained HTML page.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::replacement::Replacement;

use crate::chart::{self, Axis, Bar, ChartLine, Scale, escape};
use crate::figures::{BETTER, Figure, Findings, Group, Unit};
use crate::latency::Latency;

/// The HTML page, which appears as a whole or not at all.
pub struct HtmlReport {
    path: PathBuf,
    file: Replacement,
}

impl HtmlReport {
    /// Creates the file, so that an unusable path is rejected before anything is measured.
    pub fn begin(path: &Path) -> Result<Self, Failure> {
        let file = Replacement::begin(path).map_err(|error| cannot(path, &error))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes the page.
    pub fn write(self, findings: &Findings) -> Result<(), Failure> {
        let written = self.file.file().write_all(page(findings).as_bytes()).and_then(|()| self.file.put());
        written.map_err(|error| cannot(&self.path, &error))
    }
}

fn cannot(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Environment(format!("cannot write the report {}: {error}", path.display()))
}

/// Returns the whole page.
fn page(findings: &Findings) -> String {
    let title = format!("remanent-bench {}", findings.bench);
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<dl>\n",
        include_str!("report.css")
    );
    for (name, value) in &findings.settings {
        let (name, value) = (escape(name), escape(value));
        html += &format!("<dt>{name}</dt><dd>{value}</dd>\n");
    }
    html += "</dl>\n";
    html += &shares(findings);
    for group in &findings.groups {
        html += &section(group);
    }
    for what in &findings.left_out {
        html += &format!("<p class=\"quiet\">Not measured: {}.</p>\n", escape(what));
    }
    html + "</body>\n</html>\n"
}

/// Draws all figures that have a ceiling in one chart.
fn shares(findings: &Findings) -> String {
    let mut bars = Vec::new();
    for group in &findings.groups {
        for figure in group.figures.iter().filter(|figure| figure.unit.is_rate()) {
            if let Some(share) = group.ratio(figure) {
                let name = format!("{}: {}", group.title, figure.name);
                bars.push(Bar { name, share, value: figure.unit.show(figure.median()) });
            }
        }
    }
    if bars.is_empty() {
        return String::new();
    }
    format!(
        "<h2>Share of the ceiling</h2>\n<p class=\"quiet\">A ceiling is the speed of a loop on the same machine that \
         does only the necessary work. It is measured in turn with the figures below it, round by round. A share is \
         the median over the rounds; higher is better.</p>\n<div class=\"scroll\">{}</div>",
        chart::bars(&bars)
    )
}

fn section(group: &Group) -> String {
    let mut html = format!("<h2>{}</h2>\n{}", escape(&group.title), table(group));
    let timed = |figure: &&Figure| figure.latency.as_ref().is_some_and(|latency| latency.count() > 0);
    if group.figures.iter().any(|figure| timed(&figure)) {
        html += &latencies(group);
    }
    let mut units: Vec<Unit> = Vec::new();
    for course in group.figures.iter().filter_map(|figure| figure.course.as_ref()) {
        if !units.contains(&course.unit) {
            units.push(course.unit);
        }
    }
    for unit in units {
        html += &courses(group, unit);
    }
    html
}

fn table(group: &Group) -> String {
    let mut html =
        "<div class=\"scroll\"><table>\n<tr><th></th><th>median</th><th>x ceiling</th><th>p50</th>\
                    <th>p99</th><th>p99.9</th><th>worst</th></tr>\n"
            .to_owned();
    for figure in &group.figures {
        let time = |of: fn(&Latency) -> f64| {
            figure.latency.as_ref().map_or_else(String::new, |latency| Unit::Seconds.show(of(latency)))
        };
        let cells = [
            figure.name.clone(),
            figure.unit.show(figure.median()),
            group
                .ratio(figure)
                .map_or_else(String::new, |ratio| format!("{ratio:.3} {}", figure.unit.better())),
            time(|latency| latency.quantile(0.5)),
            time(|latency| latency.quantile(0.99)),
            time(|latency| latency.quantile(0.999)),
            time(Latency::worst),
        ];
        let cells: Vec<String> = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        html += &format!("<tr>{}</tr>\n", cells.concat());
    }
    let better = if group.figures.iter().any(|figure| figure.ceiling.is_some()) {
        format!("<p class=\"quiet\">x ceiling: {BETTER}.</p>\n")
    } else {
        String::new()
    };
    html + "</table></div>\n" + &better
}

/// Returns the CSS class of a group's figure: a color by index, or `ceiling`.
fn class(group: &Group, index: usize) -> String {
    let is_ceiling =
        group.figures.iter().any(|other| other.ceiling.as_ref() == Some(&group.figures[index].name));
    if is_ceiling { "ceiling".to_owned() } else { format!("s{}", index % 6) }
}

/// Returns a chart with a heading and a legend.
fn charted(heading: &str, lines: &[ChartLine], svg: &str) -> String {
    let mut html = format!("<h3>{heading}</h3>\n<div class=\"scroll\">{svg}</div><ul class=\"key\">");
    for ChartLine { class, name, points } in lines {
        let is_zero = points.iter().all(|(_, value)| *value == 0.0);
        let zero = if is_zero { " (0 throughout)" } else { "" };
        let name = escape(name);
        write!(html, "<li class=\"{class}\"><span>{name}{zero}</span></li>")
            .expect("a write to a String cannot fail");
    }
    html + "</ul>\n"
}

/// Draws the share of operations that took longer than a time.
fn latencies(group: &Group) -> String {
    let mut lines = Vec::new();
    for (index, figure) in group.figures.iter().enumerate() {
        let Some(latency) = figure.latency.as_ref().filter(|latency| latency.count() > 0) else { continue };
        // The last point has a share of 0, which a logarithmic scale cannot show.
        let points: Vec<(f64, f64)> = latency.curve().into_iter().filter(|(_, above)| *above > 0.0).collect();
        lines.push(ChartLine { class: class(group, index), name: figure.name.clone(), points });
    }
    let all = || lines.iter().flat_map(|line| &line.points);
    let x = Axis {
        label: "time of one operation",
        scale: Scale::log(all().map(|(time, _)| *time)),
        show: Box::new(show_time),
    };
    let y = Axis {
        label: "share that took longer",
        scale: Scale::log(all().map(|(_, above)| *above).chain([1.0])),
        show: Box::new(|share| format!("{} %", rounded(share * 100.0))),
    };
    let svg = chart::lines(&x, &y, &lines, &[]);
    charted("Latency: share of operations that took longer (lower is better)", &lines, &svg)
}

/// Draws figures of one unit over time.
fn courses(group: &Group, unit: Unit) -> String {
    let mut lines = Vec::new();
    let mut marks = Vec::new();
    for (index, figure) in group.figures.iter().enumerate() {
        let Some(course) = figure.course.as_ref().filter(|course| course.unit == unit) else { continue };
        let step = course.step.as_secs_f64();
        let points = course.values.iter().enumerate();
        let points = points.map(|(index, value)| ((index as f64 + 0.5) * step, *value)).collect();
        lines.push(ChartLine { class: class(group, index), name: figure.name.clone(), points });
        marks.extend(course.marks.iter().map(|(at, what)| (at.as_secs_f64(), *what)));
    }
    let all = || lines.iter().flat_map(|line| &line.points);
    let x =
        Axis { label: "time", scale: Scale::linear(all().map(|(time, _)| *time)), show: Box::new(show_time) };
    let values = all().map(|(_, value)| *value);
    let (heading, label, scale) = match unit {
        Unit::Bytes => ("Bytes over time, all rounds", "bytes", Scale::linear(values)),
        _ if unit.is_rate() => {
            ("Throughput over time, all rounds (higher is better)", "throughput", Scale::linear(values))
        }
        _ => ("Latency over time: maximum of each step (lower is better)", "latency", Scale::log(values)),
    };
    let y = Axis { label, scale, show: Box::new(move |value| show_tick(unit, value)) };
    let svg = chart::lines(&x, &y, &lines, &marks);
    charted(heading, &lines, &svg)
}

/// Formats a time as a tick label.
fn show_time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        0.0 => return "0".to_owned(),
        _ if seconds < 0.9e-6 => (seconds * 1e9, "ns"),
        _ if seconds < 0.9e-3 => (seconds * 1e6, "us"),
        _ if seconds < 0.9 => (seconds * 1e3, "ms"),
        _ => (seconds, "s"),
    };
    format!("{} {unit}", rounded(value))
}

fn show_tick(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Seconds => show_time(value),
        _ if value == 0.0 => "0".to_owned(),
        Unit::BytesPerSecond => format!("{} GB/s", rounded(value / 1e9)),
        Unit::PerSecond(_) if value >= 1e6 => format!("{} M/s", rounded(value / 1e6)),
        Unit::PerSecond(_) if value >= 1e3 => format!("{} k/s", rounded(value / 1e3)),
        Unit::PerSecond(_) => format!("{}/s", rounded(value)),
        Unit::Bytes | Unit::Share | Unit::Hits | Unit::Count(_) => unit.show(value),
    }
}

/// Formats a number without the noise of binary fractions.
fn rounded(value: f64) -> String {
    let text = format!("{value:.9}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::figures::TimeSeries;

    #[test]
    fn report_page_is_self_contained_with_all_figures() {
        let mut group = Group::new("1 thread, 4 KiB");
        let mut raw = Figure::new("raw", Unit::PerSecond("commits"));
        let mut latency = Latency::new();
        latency.record(Duration::from_micros(90));
        latency.record(Duration::from_micros(200));
        raw.latency = Some(latency);
        raw.rounds = vec![10_000.0];
        let mut store = Figure::new("store <1>", Unit::PerSecond("commits")).under("raw");
        store.rounds = vec![9_000.0];
        let step = Duration::from_millis(10);
        store.course = Some(TimeSeries { unit: store.unit, step, values: vec![1.0, 2.0], marks: Vec::new() });
        let mut idle = Figure::new("idle", Unit::PerSecond("commits"));
        idle.course = Some(TimeSeries { unit: store.unit, step, values: vec![0.0], marks: Vec::new() });
        group.figures = vec![raw, store, idle];
        let left_out = vec!["a GPU: there is none".to_owned()];
        let settings = vec![("device", "host & all".to_owned())];
        let html = page(&Findings { bench: "commit", settings, groups: vec![group], left_out });
        for expected in [
            "host &amp; all",
            "store &lt;1&gt;",
            "9,000 commits/s",
            "0.900",
            "Latency: share of operations that took longer",
            "Throughput over time",
            "a GPU: there is none",
            "higher is better",
            "lower is better",
            "0.900 \u{2191}",
            "idle (0 throughout)",
        ] {
            assert!(html.contains(expected), "{expected} is not in:\n{html}");
        }
        assert!(!html.contains("http") && !html.contains("<script"), "{html}");
        assert_eq!(html.matches("<svg").count(), 3);
        assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
    }

    #[test]
    fn tick_labels_are_short() {
        for (seconds, shown) in
            [(0.0, "0"), (1e-6, "1 us"), (0.0005, "500 us"), (0.1, "100 ms"), (1.5, "1.5 s")]
        {
            assert_eq!(show_time(seconds), shown);
        }
        assert_eq!(show_tick(Unit::PerSecond("commits"), 25_000.0), "25 k/s");
        assert_eq!((rounded(1e-5).as_str(), rounded(0.1 + 0.2).as_str()), ("0.00001", "0.3"));
        assert_eq!(show_tick(Unit::BytesPerSecond, 0.5e9), "0.5 GB/s");
    }
}
