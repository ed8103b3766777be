//! Handling of Ctrl-C. A command that only reads ends immediately. A command that changes a store first finishes its
//! current step.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::SIGINT;
use signal_hook::{SigId, flag, low_level};

use crate::cli::exit::{Failure, INTERRUPTED};

/// Makes Ctrl-C end the process with exit code [`INTERRUPTED`].
pub fn end_at_once() -> Result<(), Failure> {
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), Arc::new(AtomicBool::new(true)))
        .map(drop)
        .map_err(cannot_listen)
}

/// A flag that Ctrl-C sets. A command that changes a store polls the flag between its steps.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<InterruptGuard>);

/// The signal handlers of an [`Interrupt`]. Dropping this value unregisters the handlers.
#[derive(Debug)]
struct InterruptGuard {
    is_noted: Arc<AtomicBool>,
    /// Socket that becomes readable when Ctrl-C is pressed.
    pressed: UnixStream,
    registered: [SigId; 2],
}

impl Drop for InterruptGuard {
    fn drop(&mut self) {
        for id in self.registered {
            low_level::unregister(id);
        }
    }
}

impl Interrupt {
    /// Starts to record Ctrl-C in a flag. Ctrl-C no longer ends the process.
    pub fn listen() -> Result<Self, Failure> {
        let (pressed, writer) = UnixStream::pair().map_err(cannot_listen)?;
        let is_noted = Arc::new(AtomicBool::new(false));
        let first = flag::register(SIGINT, is_noted.clone()).map_err(cannot_listen)?;
        // Handlers run in the order of registration, so the flag is set before the pipe becomes readable.
        let second = low_level::pipe::register(SIGINT, writer).map_err(cannot_listen)?;
        Ok(Self(Arc::new(InterruptGuard { is_noted, pressed, registered: [first, second] })))
    }

    /// Returns true if Ctrl-C was pressed.
    pub fn is_noted(&self) -> bool {
        self.0.is_noted.load(Ordering::Relaxed)
    }

    /// Blocks until `event` is readable or Ctrl-C is pressed.
    pub fn wait_with(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            let pressed = PollFd::from_borrowed_fd(self.0.pressed.as_fd(), PollFlags::IN);
            let mut either = [PollFd::from_borrowed_fd(event, PollFlags::IN), pressed];
            match poll(&mut either, None) {
                Err(rustix::io::Errno::INTR) => {}
                done => return Ok(done.map(drop)?),
            }
        }
    }
}

fn cannot_listen(error: io::Error) -> Failure {
    Failure::Environment(format!("cannot listen for Ctrl-C: {error}"))
}
