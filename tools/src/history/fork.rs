//! `remanent fork` creates a store whose first state is a state of another store.

use std::path::PathBuf;

use remanent::{StatePoint, Store};

use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
The new store has its own identity. Its batch numbers and epochs continue from the state. If both directories are on \
the same file system, the stores share image files by hard links. The original store may be open in another process.

Examples:
  remanent fork store trial
  remanent fork store trial --at lsn:7";

/// Create a new store from a state of an existing store
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Fork {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Directory for the new store, which must not exist or must be empty
    new: PathBuf,
    /// State to start from: lsn:N, snapshot:N or the name of a snapshot [default: newest]
    #[arg(long)]
    at: Option<StatePoint>,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Fork {
    pub fn run(&self, out: &mut Output) -> Outcome {
        // A fork that has started is completed, so that no partial store remains.
        let interrupt = Interrupt::listen()?;
        let state = match &self.at {
            Some(at) => Store::open_at(&self.dir, at),
            None => Store::open_read_only(&self.dir),
        }
        .map_err(engine_failure)?;
        if interrupt.is_noted() {
            return Ok(Ending::Interrupted);
        }
        let id = state.fork(&self.new).map_err(engine_failure)?;
        let lsn = state.lsn();
        if self.json {
            out.line(object! { "store": id.to_string(), "lsn": lsn.0 })?;
        } else {
            out.line(format_args!("store {id} begins at lsn {lsn}"))?;
        }
        Ok(Ending::Fine)
    }
}
