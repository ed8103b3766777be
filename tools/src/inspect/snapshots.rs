//! `remanent snapshots` lists the kept snapshots.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use comfy_table::Table;
use indicatif::HumanDuration;
use remanent_format::manifest::Manifest;
use remanent_format::{Damage, SnapshotId};

use crate::cli::exit::{Ending, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::table::with_header;
use crate::read::partial_view::PartialView;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
A snapshot restores the state after batch END. LINKS is the number of files in the snapshot: a base, and one file for \
each later set of changes. BYTES is the total length of the snapshot's images, which other snapshots may share. A \
snapshot is VERIFIED if the log records that its files were read back from the medium.

Examples:
  remanent snapshots store
  remanent snapshots store --json | jq .name";

/// List the snapshots of a store
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Snapshots {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// One line of the output, which describes a snapshot on disk. The snapshot may be unreadable.
struct SnapshotLine {
    snapshot: SnapshotId,
    is_verified: bool,
    /// The merged manifest and the number of its links, or the damage that makes the snapshot unreadable.
    content: Result<(Arc<Manifest>, usize), Damage>,
}

impl Snapshots {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let view = PartialView::take(&dir)?;
        let lines = lines(&view);
        if self.json {
            for line in &lines {
                out.line(line.json())?;
            }
        } else if lines.is_empty() {
            out.line("no snapshots")?;
        } else {
            out.line(table(&lines).trim_fmt())?;
        }
        out.flush()?;
        view.check_undamaged()?;
        Ok(Ending::Fine)
    }
}

/// Returns the snapshots, oldest first.
fn lines(view: &PartialView) -> Vec<SnapshotLine> {
    let survey = &view.survey;
    let verified = view.end().map(|end| &end.verified[..]).unwrap_or_default();
    let is_verified = |snapshot| verified.iter().any(|entry| entry.snapshot == snapshot);
    let content = |snapshot| Ok((survey.snapshot(snapshot)?, survey.chain(snapshot)?.len()));
    let line =
        |snapshot| SnapshotLine { snapshot, is_verified: is_verified(snapshot), content: content(snapshot) };
    view.snapshots().map(line).collect()
}

impl SnapshotLine {
    fn json(&self) -> serde_json::Value {
        let manifest = self.content.as_ref().ok().map(|(manifest, _)| manifest);
        object! {
            "snapshot": self.snapshot.0,
            "name": manifest.and_then(|manifest| manifest.name.clone()),
            "redo": manifest.map(|manifest| manifest.redo.lsn.0),
            "end": manifest.map(|manifest| manifest.end.0),
            "pages": manifest.map(|manifest| manifest.entries.len()),
            "bytes": manifest.map(|manifest| image_bytes(manifest)),
            "links": self.content.as_ref().ok().map(|(_, links)| *links),
            "created_unix_ms": manifest.map(|manifest| manifest.created_unix_ms),
            "verified": self.is_verified,
            "defect": self.content.as_ref().err().map(ToString::to_string),
        }
    }
}

/// Returns the total stored length in bytes of all images that a snapshot names.
pub fn image_bytes(manifest: &Manifest) -> u64 {
    let images = manifest.entries.iter().filter_map(|entry| entry.image);
    images.flat_map(|image| image.files()).map(|(_, stored_len)| stored_len).sum()
}

/// Returns the time since `unix_ms` as text. `unix_ms` is in milliseconds since 1970.
fn age(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{} ago", HumanDuration(now.saturating_sub(Duration::from_millis(unix_ms))))
}

fn table(lines: &[SnapshotLine]) -> Table {
    let mut table = with_header(
        ["SNAPSHOT", "REDO", "END", "PAGES", "BYTES", "LINKS", "VERIFIED", "WRITTEN", "NAME"],
        0..6,
    );
    for line in lines {
        let verified = if line.is_verified { "yes" } else { "no" };
        let cells = match &line.content {
            Ok((manifest, links)) => [
                manifest.redo.lsn.to_string(),
                manifest.end.to_string(),
                manifest.entries.len().to_string(),
                image_bytes(manifest).to_string(),
                links.to_string(),
                verified.to_owned(),
                age(manifest.created_unix_ms),
                manifest.name.as_deref().unwrap_or_default().escape_debug().to_string(),
            ],
            Err(damage) => {
                let mut cells = [""; 8].map(str::to_owned);
                cells[7] = format!("({damage})");
                cells
            }
        };
        table.add_row(std::iter::once(line.snapshot.to_string()).chain(cells));
    }
    table
}
