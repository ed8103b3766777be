//! Charts as SVG: lines over two axes, and bars next to a ceiling. Colors are CSS classes, which the page
//! defines for light and dark mode.

use std::fmt::Write;

/// Width and height of a chart in its own units; the page scales it.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
/// The margins for the labels around the plot.
const LEFT: f64 = 78.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 42.0;

/// One axis of a chart.
pub struct Axis {
    pub label: &'static str,
    pub scale: Scale,
    /// Formats the value of a tick.
    pub show: Box<dyn Fn(f64) -> String>,
}

/// The mapping from values to positions on an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// From 0 to a maximum.
    Linear { max: f64 },
    /// Logarithmic, between two powers of ten.
    Log { min: f64, max: f64 },
}

impl Scale {
    /// Returns a scale from 0 to a round number that is at least the largest value.
    pub fn linear(values: impl Iterator<Item = f64>) -> Self {
        let max = values.fold(0.0, f64::max);
        let max = if max > 0.0 { max } else { 1.0 };
        let step = step_of(max);
        Scale::Linear { max: (max / step).ceil() * step }
    }

    /// Returns a logarithmic scale that ends at the powers of ten around the positive values.
    pub fn log(values: impl Iterator<Item = f64>) -> Self {
        let (mut min, mut max) = (f64::INFINITY, 0.0_f64);
        for value in values.filter(|value| *value > 0.0) {
            (min, max) = (min.min(value), max.max(value));
        }
        if max == 0.0 {
            return Scale::Log { min: 0.1, max: 1.0 };
        }
        let (min, max) = (min.log10().floor(), max.log10().ceil());
        Scale::Log { min: 10_f64.powf(min), max: 10_f64.powf(if max > min { max } else { min + 1.0 }) }
    }

    /// Returns the position of a value: 0 at the beginning of the axis, 1 at its end.
    fn place(self, value: f64) -> f64 {
        match self {
            Scale::Linear { max } => value / max,
            Scale::Log { min, max } => (value.max(min) / min).log10() / (max / min).log10(),
        }
        .clamp(0.0, 1.0)
    }

    fn ticks(self) -> Vec<f64> {
        match self {
            Scale::Linear { max } => {
                let step = step_of(max);
                (0..=(max / step).round() as u32).map(|count| f64::from(count) * step).collect()
            }
            Scale::Log { min, max } => {
                let (first, last) = (min.log10().round() as i32, max.log10().round() as i32);
                (first..=last).map(|power| 10_f64.powi(power)).collect()
            }
        }
    }
}

/// Returns a round step that divides `max` into a few ticks.
fn step_of(max: f64) -> f64 {
    let power = 10_f64.powf(max.log10().floor());
    match max / power {
        share if share < 2.0 => power / 2.0,
        share if share < 5.0 => power,
        _ => power * 2.0,
    }
}

/// One line of a chart.
pub struct ChartLine {
    /// The CSS class that determines the color of the line.
    pub class: String,
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Draws lines over two axes, with marks at moments on the x axis.
pub fn lines(x: &Axis, y: &Axis, lines: &[ChartLine], marks: &[(f64, &str)]) -> String {
    let across = |value: f64| LEFT + x.scale.place(value) * (WIDTH - LEFT - RIGHT);
    let up = |value: f64| HEIGHT - BOTTOM - y.scale.place(value) * (HEIGHT - TOP - BOTTOM);
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let mut svg = open(HEIGHT);
    for tick in y.scale.ticks() {
        let (at, text) = (up(tick), escape(&(y.show)(tick)));
        draw(&mut svg, format_args!(r#"<path class="grid" d="M{LEFT} {at:.1}H{right}"/>"#));
        draw(
            &mut svg,
            format_args!(r#"<text x="{:.1}" y="{:.1}" class="end">{text}</text>"#, LEFT - 8.0, at + 4.0),
        );
    }
    for tick in x.scale.ticks() {
        let (at, text) = (across(tick), escape(&(x.show)(tick)));
        draw(&mut svg, format_args!(r#"<path class="grid" d="M{at:.1} {TOP}V{bottom}"/>"#));
        draw(
            &mut svg,
            format_args!(r#"<text x="{at:.1}" y="{}" class="middle">{text}</text>"#, bottom + 16.0),
        );
    }
    let (middle, base) = ((LEFT + right) / 2.0, HEIGHT - 6.0);
    draw(
        &mut svg,
        format_args!(r#"<text x="{middle}" y="{base}" class="middle axis">{}</text>"#, escape(x.label)),
    );
    let half = (TOP + bottom) / 2.0;
    let turned = format!(r#"transform="rotate(-90 12 {half})""#);
    draw(
        &mut svg,
        format_args!(r#"<text x="12" y="{half}" {turned} class="middle axis">{}</text>"#, escape(y.label)),
    );
    for (index, (at, what)) in marks.iter().enumerate() {
        let at = across(*at);
        draw(&mut svg, format_args!(r#"<path class="mark" d="M{at:.1} {TOP}V{bottom}"/>"#));
        // The labels of adjacent marks must not overlap.
        let y = TOP + 10.0 + 14.0 * (index % 2) as f64;
        draw(
            &mut svg,
            format_args!(r#"<text x="{:.1}" y="{y}" class="end">{}</text>"#, at - 4.0, escape(what)),
        );
    }
    for ChartLine { class, name, points } in lines {
        let mut path = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let command = if index == 0 { 'M' } else { 'L' };
            draw(&mut path, format_args!("{command}{:.1} {:.1}", across(*x), up(*y)));
        }
        // A single point is drawn as a short line, because a path without length is invisible.
        if points.len() == 1 {
            path += "h4";
        }
        let name = escape(name);
        draw(&mut svg, format_args!(r#"<path class="line {class}" d="{path}"><title>{name}</title></path>"#));
    }
    svg + "</svg>\n"
}

/// One bar: its name, its share of the ceiling, and its value as text.
pub struct Bar {
    pub name: String,
    pub share: f64,
    pub value: String,
}

/// Draws bars, and the ceiling as a line at 1.
pub fn bars(bars: &[Bar]) -> String {
    // The name is above its bar, where the whole width is free.
    const ROW: f64 = 44.0;
    const NAMES: f64 = 4.0;
    const VALUES: f64 = 210.0;
    let height = ROW * bars.len() as f64 + 26.0;
    let most = bars.iter().map(|bar| bar.share).fold(1.0, f64::max);
    let across = |share: f64| NAMES + share / most * (WIDTH - NAMES - VALUES);
    let mut svg = open(height);
    for (index, Bar { name, share, value }) in bars.iter().enumerate() {
        let top = 20.0 + ROW * index as f64;
        let base = top + 14.0;
        let end = across(*share);
        draw(&mut svg, format_args!(r#"<text x="{NAMES}" y="{}">{}</text>"#, top - 5.0, escape(name)));
        let width = (end - NAMES).max(1.0);
        draw(
            &mut svg,
            format_args!(
                r#"<rect class="bar" x="{NAMES}" y="{top}" width="{width:.1}" height="18" rx="2"/>"#
            ),
        );
        let text = format!("{share:.2}");
        draw(
            &mut svg,
            format_args!(
                r#"<text x="{:.1}" y="{base}" class="strong">{text}</text>"#,
                end.max(across(1.0)) + 8.0
            ),
        );
        draw(&mut svg, format_args!(r#"<text x="{WIDTH}" y="{base}" class="end">{}</text>"#, escape(value)));
    }
    let (at, bottom) = (across(1.0), height - 20.0);
    draw(&mut svg, format_args!(r#"<path class="mark" d="M{at:.1} 0V{bottom}"/>"#));
    draw(
        &mut svg,
        format_args!(r#"<text x="{at:.1}" y="{}" class="middle axis">ceiling</text>"#, height - 6.0),
    );
    svg + "</svg>\n"
}

fn open(height: f64) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n")
}

/// Appends to a string, which cannot fail.
fn draw(text: &mut String, what: std::fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a write to a String cannot fail");
}

/// Escapes text for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_spans_values_with_round_bounds() {
        assert_eq!(Scale::linear([3.0, 17.0].into_iter()), Scale::Linear { max: 20.0 });
        assert_eq!(Scale::linear([].into_iter()), Scale::Linear { max: 1.0 });
        let log = Scale::log([0.0, 0.004, 3.0].into_iter());
        let Scale::Log { min, max } = log else { panic!("{log:?}") };
        assert!((min - 1e-3).abs() < 1e-12 && (max - 10.0).abs() < 1e-9);
        assert_eq!(log.ticks().len(), 5);
        for (value, place) in [(0.001, 0.0), (0.1, 0.5), (10.0, 1.0), (0.0, 0.0), (99.0, 1.0)] {
            assert!((log.place(value) - place).abs() < 1e-9, "{value}");
        }
        // A single value that is a power of ten.
        assert!(matches!(Scale::log([1.0].into_iter()), Scale::Log { min, max } if min < max));
    }

    #[test]
    fn chart_has_few_ticks() {
        for max in [0.7, 1.0, 1.9, 2.0, 4.9, 5.0, 9.99, 1234.0] {
            let scale = Scale::linear([max].into_iter());
            let ticks = scale.ticks();
            assert!((3..=7).contains(&ticks.len()), "{max}: {ticks:?}");
            assert!(ticks.last().is_some_and(|last| *last >= max), "{max}: {ticks:?}");
        }
    }

    #[test]
    fn chart_keeps_long_names_and_single_points() {
        let name =
            "16 threads, 2 MiB pages, acknowledged as durable, direct log: store and the raw loop".to_owned();
        let svg = bars(&[Bar { name: name.clone(), share: 0.5, value: "1".to_owned() }]);
        let text = svg.split("<text ").find(|text| text.contains(&name)).unwrap();
        let (attributes, _) = text.split_once('>').unwrap();
        assert_eq!(attributes, r#"x="4" y="15""#, "it begins at the left edge");
        let axis =
            || Axis { label: "", scale: Scale::linear([1.0].into_iter()), show: Box::new(|_| String::new()) };
        let one = ChartLine { class: "s0".to_owned(), name: "one".to_owned(), points: vec![(0.5, 0.0)] };
        let svg = lines(&axis(), &axis(), &[one], &[]);
        assert!(svg.contains("h4\"><title>one"), "{svg}");
    }

    #[test]
    fn names_are_escaped() {
        let bar = Bar { name: "<a & \"b\">".to_owned(), share: 0.5, value: "1 < 2".to_owned() };
        let svg = bars(&[bar]);
        assert!(svg.contains("&lt;a &amp; &quot;b&quot;&gt;") && svg.contains("1 &lt; 2"), "{svg}");
    }
}
