//! `remanent restore`: takes a store back to an earlier state, going forward.

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
This is one more batch: later batches stay in the log, and can be returned to in the same way. \
Pages that change get an epoch that was never given before.

Examples:
  remanent restore store --at lsn:7
  remanent restore store --at before-tuning";

/// Take a store back to an earlier state
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Restore {
    /// The store's directory
    dir: PathBuf,
    /// The state: lsn:N, snapshot:N, or the name of a snapshot
    #[arg(long)]
    at: StatePoint,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

impl Restore {
    /// Runs `remanent restore`.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let dir = StoreDir::open(&self.dir)?;
        // An open takes a store's files further: whether there is such a state is asked before.
        let restored = KeptStates::with_retry(&dir, |past| Ok(past.table(past.lsn(Some(&self.at))?)?.lsn()))?;
        let store = engine::open(&self.dir, Create::Never)?;
        if interrupt.noted() {
            return Ok(Ending::Interrupted);
        }
        let position = store.restore(&StatePoint::Lsn(restored)).map_err(engine_failure)?;
        store.close().map_err(engine_failure)?;
        let lsn = position.lsn;
        if self.json {
            out.line(object! { "lsn": lsn.0, "restored": restored.0 })?;
        } else {
            out.line(format_args!("lsn {lsn}: the state after lsn {restored} again"))?;
        }
        Ok(Ending::Fine)
    }
}
