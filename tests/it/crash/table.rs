//! A table of the counts of all workloads so far. It is printed after each workload, so the last table is
//! complete.

use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

/// The counts of one workload.
pub struct Row {
    pub test: String,
    /// Events of the workload itself.
    pub events: usize,
    /// Numbers of opened images per level: of the workload, of the recoveries from these images, and so on.
    pub images: Vec<usize>,
    /// Numbers of injected faults, and of opened images of crashes after them.
    pub faults: Vec<usize>,
    pub elapsed: Duration,
}

struct Table<'a>(&'a [Row]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns =
            ["events", "crashes", "in recovery", "again", "once more", "faults", "their crashes", "seconds"];
        let heads = columns.map(|column| format!("{column:>14}")).concat();
        writeln!(f, "{:<72}{heads}", "work")?;
        let mut sums = [0; 7];
        for row in self.0 {
            let counts = [&[row.events][..], &row.images, &row.faults].concat();
            let cells: String = counts.iter().map(|count| format!("{count:>14}")).collect();
            writeln!(f, "{:<72}{cells}{:>14.1}", row.test, row.elapsed.as_secs_f64())?;
            sums.iter_mut().zip(&counts).for_each(|(sum, count)| *sum += count);
        }
        let cells = sums.map(|sum| format!("{sum:>14}")).concat();
        writeln!(f, "{:<72}{cells}", format!("{} works", self.0.len()))?;
        let [_, crashes, nested @ .., of_faults] = sums;
        let nested: usize = nested[..3].iter().sum();
        write!(f, "{} images, {nested} of them crashes inside of recoveries", crashes + nested + of_faults)
    }
}

/// Adds a row and prints the table. Cargo shows the output only with `--nocapture`, or if the test fails.
#[expect(clippy::print_stdout, reason = "the figures of the long run")]
pub fn add(row: Row) {
    static ROWS: Mutex<Vec<Row>> = Mutex::new(Vec::new());
    let mut rows = ROWS.lock().unwrap();
    rows.push(row);
    println!("{}", Table(&rows));
}
