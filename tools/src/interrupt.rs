//! Ctrl-C. Commands that only read end at once; commands that drive a store finish what is in hand.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::exit::{Failure, INTERRUPTED};

/// Makes Ctrl-C end the process with the code for it.
pub fn end_at_once() -> Result<(), Failure> {
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), Arc::new(AtomicBool::new(true)))
        .map(drop)
        .map_err(cannot_listen)
}

/// A Ctrl-C that waits to be noticed.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on Ctrl-C is noted here and does nothing else.
    pub fn listen() -> Result<Self, Failure> {
        let noted = Arc::new(AtomicBool::new(false));
        flag::register(SIGINT, noted.clone()).map_err(cannot_listen)?;
        Ok(Self(noted))
    }

    /// Whether Ctrl-C was pressed.
    pub fn noted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

fn cannot_listen(error: io::Error) -> Failure {
    Failure::Environment(format!("cannot listen for Ctrl-C: {error}"))
}
