//! `remanent restore` returns a store to an earlier state by committing one more batch, or makes a store from an archive.

use std::path::PathBuf;

use remanent::StatePoint;
use remanent::options::Create;

use crate::cli::engine;
use crate::cli::engine::engine_failure;
#[cfg(not(feature = "archive"))]
use crate::cli::exit::Failure;
use crate::cli::exit::{Ending, Outcome};
#[cfg(feature = "archive")]
use crate::cli::interrupt;
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::read::states::KeptStates;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
Commits one more batch, which replaces the state with an earlier one. The batches in between stay in the log, so their \
states can be restored in the same way. Pages that change get an epoch that was never used before.

Examples:
  remanent restore store --at lsn:7
  remanent restore store --at before-tuning";

#[cfg(feature = "archive")]
const FROM_ARCHIVE: &str = "

From an archive: with --from, the directory must be missing, be empty, or contain an unfinished restore. It becomes \
the store at the end of the archive, with the same id, and continues the archive. As soon as the restore begins, the \
directory that pushed before can no longer continue the archive. A restore that was interrupted leaves a directory \
that cannot be opened; run the same command again. `remanent archive --help` lists URLs and settings.

With --on-demand, the restore fetches the log and the manifests and page tables of snapshots, but no pages. An open with \
the archive (`Options::archive`, or `archive=` in Python) then fetches pages when they are read, and all others in the \
background. Until all pages are fetched, commands that read the directory refuse it.

With --from and --at, the directory becomes a store of its own with a new id, whose history begins at that state: a batch \
from the newest archived snapshots on, or a named snapshot that the archive keeps. The archive and its writer are not \
disturbed.

  remanent restore --from s3://bucket/run-7 store
  remanent restore --from file:///mnt/nas/run-7 store
  remanent restore --from s3://bucket/run-7 --on-demand store
  remanent restore --from s3://bucket/run-7 --at name:before-tuning copy";
#[cfg(not(feature = "archive"))]
const FROM_ARCHIVE: &str = "";

/// Return a store to an earlier state, or restore one from its archive
#[derive(clap::Args)]
#[command(after_help = format!("{EXAMPLES}{FROM_ARCHIVE}"))]
pub struct Restore {
    /// Store directory
    dir: PathBuf,
    /// State to restore: lsn:N, snapshot:N or the name of a snapshot
    #[arg(long, required_unless_present = "from")]
    at: Option<StatePoint>,
    /// URL of an archive: its newest state becomes the store, or with --at, a new store begins at an earlier state
    #[arg(long, value_name = "URL")]
    from: Option<String>,
    /// Leave pages in the archive until the store is opened with it
    #[arg(long, requires = "from", conflicts_with = "at")]
    on_demand: bool,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Restore {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let Some(at) = self.at.as_ref().filter(|_| self.from.is_none()) else {
            return self.run_from_archive(out);
        };
        let interrupt = Interrupt::listen()?;
        let dir = StoreDir::open(&self.dir)?;
        // Check the state first, because an open for writing changes the files of the store.
        let restored = KeptStates::with_retry(&dir, |past| Ok(past.table(past.lsn(Some(at))?)?.lsn()))?;
        let store = engine::open(&self.dir, Create::Never)?;
        if interrupt.is_noted() {
            return Ok(Ending::Interrupted);
        }
        let position = store.restore(StatePoint::Lsn(restored)).map_err(engine_failure)?;
        store.close().map_err(engine_failure)?;
        let lsn = position.lsn;
        if self.json {
            out.line(object! { "lsn": lsn.0, "restored": restored.0 })?;
        } else {
            out.line(format_args!("lsn {lsn}: restored the state after lsn {restored}"))?;
        }
        Ok(Ending::Fine)
    }

    #[cfg(feature = "archive")]
    fn run_from_archive(&self, out: &mut Output) -> Outcome {
        // A restore that was interrupted at any moment can be repeated, so Ctrl-C may end it immediately.
        interrupt::end_at_once()?;
        let url = self.from.as_deref().unwrap_or_default();
        match &self.at {
            Some(at) => crate::archive::restore::restore_at(&self.dir, url, at, self.json, out),
            None => crate::archive::restore::restore(&self.dir, url, self.on_demand, self.json, out),
        }
    }

    #[cfg(not(feature = "archive"))]
    fn run_from_archive(&self, _: &mut Output) -> Outcome {
        let reason = "this build has no archives; build it with the feature `archive`";
        Err(Failure::Environment(reason.to_owned()))
    }
}
