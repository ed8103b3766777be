//! `remanent snapshot` takes a snapshot of a store that no process has open.

use std::path::PathBuf;

use remanent::SnapshotOptions;
use remanent::options::Create;

use crate::cli::engine;
use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
The store must not be open, because a program that has the store open takes its own snapshots. Ctrl-C waits until the \
snapshot is complete. An exact snapshot can be restored without the log. A named snapshot is exact, and is kept until \
`remanent prune` releases its name.

Examples:
  remanent snapshot store
  remanent snapshot store --exact
  remanent snapshot store --name before-tuning
  remanent snapshot store --json";

/// Take a snapshot of a store
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Snapshot {
    /// Store directory
    dir: PathBuf,
    /// Capture all pages as of one batch, so that the snapshot can be restored without the log
    #[arg(long)]
    exact: bool,
    /// Name of the snapshot. A named snapshot is exact, and is kept until `remanent prune` releases its name
    #[arg(long)]
    name: Option<String>,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Snapshot {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let store = engine::open(&self.dir, Create::Never)?;
        if interrupt.is_noted() {
            return Ok(Ending::Interrupted);
        }
        let taken = match &self.name {
            Some(name) => store.snapshot_with(SnapshotOptions::new().name(name)),
            None if self.exact => store.snapshot_with(SnapshotOptions::new().exact()),
            None => store.snapshot(),
        };
        let info = taken.map_err(engine_failure)?;
        store.close().map_err(engine_failure)?;
        if self.json {
            out.line(object! {
                "snapshot": info.id.0,
                "redo": info.redo.0,
                "end": info.end.0,
                "pages": info.pages,
                "bytes": info.bytes,
                "bytes_written": info.bytes_written,
                "name": info.name,
                "verified": info.verified,
            })?;
        } else {
            let (id, end, pages, bytes) = (info.id, info.end, info.pages, info.bytes);
            out.line(format_args!("snapshot {id}: lsn {end}, {pages} pages, {bytes} bytes"))?;
        }
        Ok(Ending::Fine)
    }
}
