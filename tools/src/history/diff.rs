//! `remanent diff` lists the changes between two kept states, page by page.

use std::collections::BTreeSet;
use std::path::PathBuf;

use comfy_table::Table;
use remanent::StatePoint;
use remanent_format::{Damage, Metadata, PageId, PageInfo, PageTable, Value};
use safetensors::Dtype;

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::cli::table::with_header;
use crate::read::page_bytes::{PageBytes, windows};
use crate::read::states::{KeptStates, damaged};
use crate::read::store_dir::StoreDir;
use crate::weights::dtype;
use crate::weights::versions::SAVED_AT;
use crate::weights::{dtype_of, label};

const EXAMPLES: &str = "\
Compares elements bit by bit. The metadata of a page states the dtype of its elements; a page without a dtype is \
compared byte by byte. For floats, LARGEST is the largest difference between an old and a new value. LARGEST is NaN if \
a value that differs is NaN in either state, and NANS is the number of such values. The last line contains the number \
of changed pages and of bytes that differ. All bytes of a created or deleted page are counted. Exits with 0 if the \
states are equal and with 1 if they differ.

Examples:
  remanent diff store --from lsn:7
  remanent diff store --from snapshot:1 --to lsn:12 --json";

/// Compare two kept states, page by page
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Diff {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Earlier state: lsn:N, snapshot:N or the name of a snapshot
    #[arg(long)]
    from: StatePoint,
    /// Later state: lsn:N, snapshot:N or the name of a snapshot [default: newest]
    #[arg(long)]
    to: Option<StatePoint>,
    /// Print one JSON object per line, for each page and root entry that differs and for the total
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

/// The kind of difference of a page between the two states.
enum Change {
    Created,
    Deleted,
    Content(ContentDiff),
}

/// The differences of one page that exists in both states.
struct ContentDiff {
    /// Length of the page in the earlier state, in bytes. `None` if both states have the same length.
    len_before: Option<u64>,
    metadata: bool,
    /// Number of elements that both states contain.
    elements: u64,
    /// Number of elements that both states contain and whose bytes differ.
    changed: u64,
    /// Largest absolute difference between an old and a new value. NaN if a value that differs is NaN in one of the
    /// states. `None` if the elements are not floats.
    largest: Option<f64>,
    /// Number of elements that differ and are NaN in one of the states. `None` if the elements are not floats.
    nans: Option<u64>,
    /// Number of bytes in elements that differ, plus the number of bytes that only one of the states contains.
    bytes: u64,
}

/// A page that differs between the states.
struct DiffLine {
    info: PageInfo,
    change: Change,
}

/// An entry of the root that differs: its name, its old value and its new value.
type RootLine = (String, Option<Value>, Option<Value>);

impl Diff {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let (pages, root) = KeptStates::with_retry(&dir, |past| self.compare(past))?;
        if self.json {
            for line in &pages {
                out.line(page_json(line))?;
            }
            for (name, from, to) in &root {
                let value = |value: &Option<Value>| value.as_ref().map(json::value);
                out.line(object! { "change": "root", "name": name, "from": value(from), "to": value(to) })?;
            }
            let (count, bytes) = (pages.len(), bytes(&pages));
            out.line(
                object! { "change": "total", "pages": count, "root_entries": root.len(), "bytes": bytes },
            )?;
        } else {
            if !pages.is_empty() {
                out.line(table(&pages).trim_fmt())?;
            }
            for (name, from, to) in &root {
                let value = |value: &Option<Value>| {
                    value.as_ref().map_or("none".to_owned(), |of| json::value(of).to_string())
                };
                out.line(format_args!("root {name}: {} -> {}", value(from), value(to)))?;
            }
            out.line(total(&pages, root.len()))?;
        }
        Ok(if pages.is_empty() && root.is_empty() { Ending::Fine } else { Ending::Difference })
    }

    fn compare(&self, past: &KeptStates<'_>) -> Result<(Vec<DiffLine>, Vec<RootLine>), Failure> {
        let (from, to) = (past.lsn(Some(&self.from))?, past.lsn(self.to.as_ref())?);
        let (old, new) = (past.table(from)?, past.table(to)?);
        // Epochs are never reused, so a page with the same epoch in both states is unchanged.
        let differs = |left: &PageTable, page: PageId, info: &PageInfo| {
            left.get(page).is_some_and(|other| other.epoch != info.epoch)
        };
        let limit = self.memory.given();
        let before = past.bytes(from, limit, |info| differs(&new, info.page, info))?;
        let after = past.bytes(to, limit, |info| differs(&old, info.page, info))?;

        let count = new.pages().filter(|info| differs(&old, info.page, info)).count();
        let bar = progress::bar(count as u64, "comparing");
        let mut lines = Vec::new();
        for info in old.pages().filter(|info| new.get(info.page).is_none()) {
            lines.push(DiffLine { info, change: Change::Deleted });
        }
        for info in new.pages() {
            let change = match old.get(info.page) {
                None => Change::Created,
                Some(old) if old.epoch == info.epoch => continue,
                Some(old) => {
                    bar.inc(1);
                    Change::Content(content(&old, &before, &info, &after).map_err(damaged)?)
                }
            };
            // A page whose changes were reverted differs only in its epoch.
            if !matches!(&change, Change::Content(content) if content.is_same()) {
                lines.push(DiffLine { info, change });
            }
        }
        bar.finish_and_clear();
        lines.sort_by_key(|line| line.info.page);
        Ok((lines, root_lines(old.root(), new.root())))
    }
}

impl ContentDiff {
    fn is_same(&self) -> bool {
        self.len_before.is_none() && !self.metadata && self.changed == 0
    }
}

/// Compares the bytes that a page has in the two states, window by window.
fn content(
    old: &PageInfo,
    before: &PageBytes<'_>,
    new: &PageInfo,
    after: &PageBytes<'_>,
) -> Result<ContentDiff, Damage> {
    // Elements are compared as values only if the page has the same dtype in both states.
    let dtype = dtype_of(new).filter(|dtype| dtype_of(old) == Some(*dtype));
    let width = dtype.map_or(1, |dtype| dtype::width(dtype).bytes());
    let (mut elements, mut changed, mut largest, mut nans) = (0, 0, None, None);
    // Each window but the last contains a whole number of elements.
    for window in windows(old.len.min(new.len)) {
        let (left, right) = (before.window(new.page, &window)?, after.window(new.page, &window)?);
        if left == right {
            elements += (left.len() / width) as u64;
            continue;
        }
        for (left, right) in left.chunks_exact(width).zip(right.chunks_exact(width)) {
            elements += 1;
            if left != right {
                changed += 1;
                if let Some(change) = dtype.and_then(|dtype| value_change(dtype, left, right)) {
                    *nans.get_or_insert(0) += u64::from(change.is_nan());
                    // NaN is the largest change.
                    let beaten = largest.is_none_or(|largest: f64| {
                        !largest.is_nan() && (change.is_nan() || change > largest)
                    });
                    largest = if beaten { Some(change) } else { largest };
                }
            }
        }
    }
    Ok(ContentDiff {
        len_before: (old.len != new.len).then_some(old.len),
        metadata: old.metadata != new.metadata && !old.metadata.is_same(&new.metadata),
        elements,
        changed,
        largest,
        nans,
        bytes: changed * width as u64 + old.len.abs_diff(new.len),
    })
}

/// Returns the absolute difference of two float elements, or `None` if the dtype is not a float.
fn value_change(dtype: Dtype, before: &[u8], after: &[u8]) -> Option<f64> {
    Some((dtype::float(dtype, after)? - dtype::float(dtype, before)?).abs())
}

fn root_lines(old: &Metadata, new: &Metadata) -> Vec<RootLine> {
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let line = |name: &String| (name.clone(), old.get(name).cloned(), new.get(name).cloned());
    names.into_iter().map(line).filter(|(name, from, to)| name != SAVED_AT && from != to).collect()
}

impl Change {
    /// Returns the kind of the change as one word.
    fn word(&self) -> &'static str {
        match self {
            Change::Created => "created",
            Change::Deleted => "deleted",
            Change::Content(ContentDiff { len_before: Some(_), .. }) => "resized",
            Change::Content(ContentDiff { changed: 0, .. }) => "metadata",
            Change::Content(_) => "changed",
        }
    }

    fn content(&self) -> Option<&ContentDiff> {
        match self {
            Change::Content(content) => Some(content),
            _ => None,
        }
    }
}

/// Returns the total number of bytes that differ.
fn bytes(lines: &[DiffLine]) -> u64 {
    let of = |line: &DiffLine| line.change.content().map_or(line.info.len, |content| content.bytes);
    lines.iter().map(of).fold(0, u64::saturating_add)
}

/// Returns the last line of the text output, which contains the totals.
fn total(lines: &[DiffLine], root_entries: usize) -> String {
    let bytes = bytes(lines);
    let root = match root_entries {
        0 => String::new(),
        1 => "; 1 root entry changed".to_owned(),
        count => format!("; {count} root entries changed"),
    };
    format!("total: {} pages changed, {bytes} bytes{root}", lines.len())
}

/// Returns the fraction of elements that changed, from 0 to 1.
fn share(content: &ContentDiff) -> f64 {
    if content.elements == 0 { 0.0 } else { content.changed as f64 / content.elements as f64 }
}

fn page_json(line: &DiffLine) -> serde_json::Value {
    let content = line.change.content();
    object! {
        "change": line.change.word(),
        "page": line.info.page.0,
        "key": json::key(line.info.key.as_ref()),
        "name": label(&line.info),
        "dtype": dtype_of(&line.info).map(|dtype| dtype.to_string()),
        "len": line.info.len,
        "len_before": content.and_then(|content| content.len_before),
        "elements": content.map(|content| content.elements),
        "changed": content.map(|content| content.changed),
        "share": content.map(share),
        "largest": content.and_then(|content| content.largest).map(json::float),
        "nans": content.and_then(|content| content.nans),
        "metadata": content.map(|content| content.metadata),
    }
}

fn table(lines: &[DiffLine]) -> Table {
    let mut table = with_header(
        ["PAGE", "NAME", "DTYPE", "CHANGE", "ELEMENTS", "CHANGED", "SHARE", "LARGEST", "NANS"],
        [0, 4, 5, 6, 7, 8],
    );
    for DiffLine { info, change } in lines {
        let of = |show: fn(&ContentDiff) -> String| change.content().map(show).unwrap_or_default();
        table.add_row([
            info.page.to_string(),
            label(info),
            dtype_of(info).map(|dtype| dtype.to_string()).unwrap_or_default(),
            change.word().to_owned(),
            of(|content| content.elements.to_string()),
            of(|content| content.changed.to_string()),
            of(|content| format!("{:.3} %", 100.0 * share(content))),
            of(|content| content.largest.map(|largest| format!("{largest:.4e}")).unwrap_or_default()),
            of(|content| content.nans.map(|nans| nans.to_string()).unwrap_or_default()),
        ]);
    }
    table
}
