//! `remanent restore` returns a store to an earlier state by committing one more batch.

use std::path::PathBuf;

use remanent::StatePoint;
use remanent::options::Create;

use crate::cli::engine;
use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Outcome};
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

/// Return a store to an earlier state
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Restore {
    /// Store directory
    dir: PathBuf,
    /// State to restore: lsn:N, snapshot:N or the name of a snapshot
    #[arg(long)]
    at: StatePoint,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Restore {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let dir = StoreDir::open(&self.dir)?;
        // Check the state first, because an open for writing changes the files of the store.
        let restored = KeptStates::with_retry(&dir, |past| Ok(past.table(past.lsn(Some(&self.at))?)?.lsn()))?;
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
}
