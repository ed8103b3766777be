//! `remanent info` prints whether a store is damaged, its identity and state, and the purpose of each of its files.

use std::path::PathBuf;
use std::sync::Arc;

use comfy_table::Table;
use remanent_format::SnapshotId;
use remanent_format::manifest::Manifest;
use serde_json::json;

use crate::cli::engine;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::table::with_header;
use crate::inspect::file_purposes::{Reason, reasons};
use crate::inspect::log::{damage_json, torn_json, torn_line};
use crate::inspect::snapshots::image_bytes;
use crate::read::partial_view::PartialView;
use crate::read::store_dir::StoreDir;

/// Number of successive files of one kind and purpose that are listed one by one. A longer run takes one row.
const LISTED_MAX: usize = 3;

const EXAMPLES: &str = "\
The first line states whether damage was found. `info` reads the indexes of all snapshots and the log after the newest \
snapshot, and checks their checksums. It does not read page data in images or the log before that snapshot; `remanent \
verify` reads and checks all files. `lsn` is the last batch that recovery would find now, and `durable` is the last \
batch that is known to survive a power cut. A torn tail is an incomplete end of the log, which a crash left. No batch \
in it was acknowledged as durable, and the next open for writing removes it. More than three successive files of one \
kind and purpose take one row; `--json` lists every file.

Examples:
  remanent info store
  remanent info store --json";

/// Show what a store contains, and why each of its files is kept
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Info {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Print the report as a JSON object
    #[arg(long)]
    json: bool,
}

/// The contents of the report: the readable parts of the store, and the purposes of its files.
struct InfoReport {
    view: PartialView,
    files: Vec<Reason>,
    holder: Option<u32>,
}

impl Info {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        // Determined before the files are read: a writer that opens the store later removes unneeded files first.
        let holder = dir.holder();
        let view = PartialView::take(&dir)?;
        let unneeded = engine::unneeded(dir.path(), &view.survey, view.undamaged_state(), holder);
        let files = reasons(&dir, &view, unneeded).map_err(|error| {
            Failure::Environment(format!("cannot read {}: {error}", dir.path().display()))
        })?;
        let report = InfoReport { view, files, holder };
        if self.json {
            out.line(report.json())?;
        } else {
            report.print(out)?;
        }
        out.flush()?;
        report.view.check_undamaged()?;
        Ok(Ending::Fine)
    }
}

impl InfoReport {
    /// Returns true if the newest seal lists the snapshot as verified.
    fn is_verified(&self, snapshot: SnapshotId) -> bool {
        let verified = self.view.end().map(|end| &end.verified[..]).unwrap_or_default();
        verified.iter().any(|entry| entry.snapshot == snapshot)
    }

    /// Returns the manifests of all snapshots whose manifests are readable.
    fn snapshots(&self) -> impl Iterator<Item = Arc<Manifest>> {
        self.view.snapshots().filter_map(|snapshot| self.view.survey.snapshot(snapshot).ok())
    }

    fn log_bytes(&self) -> u64 {
        self.view.survey.log.segments().values().map(|segment| segment.file_len).sum()
    }

    fn page_bytes(&self) -> u64 {
        self.view.pages().map(|info| info.len).fold(0, u64::saturating_add)
    }

    fn json(&self) -> serde_json::Value {
        let InfoReport { view, files, holder } = self;
        let record = &view.survey.store.record;
        let incarnation = view.survey.log.newest();
        let root = view.state.as_ref().map(|state| json::metadata(state.resolved.table.root()));
        let fingerprint = record.layout_fingerprint;
        object! {
            "store": view.survey.store.store.to_string(),
            "incarnation": incarnation.map(|incarnation| incarnation.number),
            "incarnation_random": incarnation.map(|incarnation| incarnation.random),
            "lsn": view.lsn().0,
            "durable": view.durable().0,
            "snapshots": self.snapshots().map(|manifest| self.snapshot_json(&manifest)).collect::<Vec<_>>(),
            "log_bytes": self.log_bytes(),
            "pages": view.pages().count(),
            "page_bytes": self.page_bytes(),
            "root": root.unwrap_or_else(|| json!({})),
            "torn_tail": torn_json(view.end().and_then(|end| end.torn.as_ref())),
            "identity": json::bytes(&record.identity),
            "layout_fingerprint": fingerprint.map(|bytes| json::bytes(&bytes)),
            "created_unix_ms": record.created_unix_ms,
            "open_in_process": holder,
            "damage": view.damage.iter().map(damage_json).collect::<Vec<_>>(),
            "files": files.iter().map(file_json).collect::<Vec<_>>(),
        }
    }

    fn snapshot_json(&self, manifest: &Manifest) -> serde_json::Value {
        json!({
            "snapshot": manifest.snapshot.0,
            "name": manifest.name,
            "redo": manifest.redo.lsn.0,
            "end": manifest.end.0,
            "pages": manifest.entries.len(),
            "bytes": image_bytes(manifest),
            "verified": self.is_verified(manifest.snapshot),
            "created_unix_ms": manifest.created_unix_ms,
        })
    }

    /// Returns one line that states whether damage was found.
    fn status(&self) -> String {
        let count = self.view.damage.len();
        let defects = if count == 1 { "1 defect".to_owned() } else { format!("{count} defects") };
        match &self.view.state {
            _ if count == 0 => "no damage found; page data was not read: run `remanent verify`".to_owned(),
            Some(_) => format!("DAMAGED, {defects}; `remanent verify` reports the cost"),
            None => format!("DAMAGED, {defects}; no state can be recovered"),
        }
    }

    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let view = &self.view;
        out.line(format_args!("status       {}", self.status()))?;
        out.line(format_args!("store        {}", view.survey.store.store))?;
        let identity = &view.survey.store.record.identity;
        if !identity.is_empty() {
            out.line(format_args!("identity     {}", identity.escape_ascii()))?;
        }
        if let Some(incarnation) = view.survey.log.newest() {
            out.line(format_args!("incarnation  {incarnation}"))?;
        }
        if let Some(process) = self.holder {
            out.line(format_args!("open         in process {process}; the store may change at any time"))?;
        }
        out.line(format_args!("lsn          {}, durable up to {}", view.lsn(), view.durable()))?;
        out.line(format_args!("pages        {}, {} bytes", view.pages().count(), self.page_bytes()))?;
        for (name, value) in view.state.iter().flat_map(|state| state.resolved.table.root().iter()) {
            out.line(format_args!("root         {name} = {}", json::value(value)))?;
        }
        for manifest in self.snapshots() {
            let verified = if self.is_verified(manifest.snapshot) { ", verified" } else { "" };
            let name = manifest.name.as_ref().map_or(String::new(), |name| format!(", named {name:?}"));
            out.line(format_args!(
                "snapshot {:<3} lsn {} to {}, {} pages, {} bytes{verified}{name}",
                manifest.snapshot,
                manifest.redo.lsn,
                manifest.end,
                manifest.entries.len(),
                image_bytes(&manifest),
            ))?;
        }
        if let Some(torn) = view.end().and_then(|end| end.torn.as_ref()) {
            out.line(torn_line(torn))?;
        }
        out.line("")?;
        out.line(file_table(&self.files).trim_fmt())
    }
}

fn file_json(reason: &Reason) -> serde_json::Value {
    json!({ "file": reason.file, "bytes": reason.bytes, "why": reason.why, "deletable": reason.is_deletable })
}

fn file_table(files: &[Reason]) -> Table {
    let mut files: Vec<&Reason> = files.iter().collect();
    files.sort_by_key(|&reason| kind(reason));
    let is_alike =
        |a: &&Reason, b: &&Reason| kind(a) == kind(b) && a.why == b.why && a.is_deletable == b.is_deletable;
    let mut table = with_header(["FILE", "BYTES", "DELETABLE", "PURPOSE"], [1]);
    for run in files.chunk_by(is_alike) {
        let rows = run.chunks(if run.len() > LISTED_MAX { run.len() } else { 1 });
        for row in rows {
            let (first, last) = (row[0], row[row.len() - 1]);
            let name = match row.len() {
                1 => first.file.clone(),
                count => format!("{} to {} ({count} files)", first.file, last.file),
            };
            let bytes = row.iter().map(|reason| reason.bytes).fold(0, u64::saturating_add);
            let deletable = if first.is_deletable { "yes" } else { "no" };
            table.add_row([&name, &bytes.to_string(), deletable, &first.why]);
        }
    }
    table
}

/// Returns the folder and the extension of a file, by which the table is sorted. Files of the root are one kind.
fn kind(reason: &Reason) -> (&str, &str) {
    match reason.file.split_once('/') {
        Some((folder, name)) => (folder, name.rsplit_once('.').map_or("", |(_, extension)| extension)),
        None => ("", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(file: String, why: &str) -> Reason {
        Reason { file, bytes: 10, why: why.to_owned(), is_deletable: false }
    }

    #[test]
    fn long_runs_of_similar_files_take_one_row() {
        let mut files = vec![reason("STORE".to_owned(), "identity")];
        files.extend((1..=9).map(|n| reason(format!("log/{n}.log"), if n < 4 { "old" } else { "new" })));
        files.insert(2, reason("log/1.spare".to_owned(), "space"));
        let text = file_table(&files).trim_fmt();
        let rows: Vec<Vec<&str>> = text.lines().skip(1).map(|row| row.split_whitespace().collect()).collect();
        let names: Vec<&str> = rows.iter().map(|row| row[0]).collect();
        assert_eq!(names, ["STORE", "log/1.log", "log/2.log", "log/3.log", "log/4.log", "log/1.spare"]);
        assert_eq!(rows[4], ["log/4.log", "to", "log/9.log", "(6", "files)", "60", "no", "new"]);
    }
}
