//! Starting threads: the one place that does, so that a test can refuse them, as a system does that is short
//! of them.

use std::io;
use std::thread::{Scope, ScopedJoinHandle};

use super::thread;
use super::thread::JoinHandle;

/// Starts a thread of this name.
///
/// # Errors
/// What the system says.
pub(crate) fn start(name: &str, life: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    refused(name)?;
    thread::Builder::new().name(name.to_owned()).spawn(life)
}

/// Starts a thread of this name that the scope waits for. It is one of the system's, also under a scheduler.
///
/// # Errors
/// What the system says.
pub(crate) fn start_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    refused(name)?;
    std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work)
}

#[cfg(not(any(test, feature = "testing")))]
fn refused(_name: &str) -> io::Result<()> {
    Ok(())
}

#[cfg(any(test, feature = "testing"))]
fn refused(name: &str) -> io::Result<()> {
    refusals::strike(name)
}

/// Threads that are refused, of all that this process starts: for tests that run alone.
#[cfg(any(test, feature = "testing"))]
pub mod refusals {
    use std::io;
    use std::sync::{Mutex, PoisonError};

    /// "Resource temporarily unavailable": what the system says that has no thread left.
    const EAGAIN: i32 = 11;

    static REFUSED: Mutex<Refused> = Mutex::new(Refused { begin: None, names: Vec::new() });

    struct Refused {
        /// Those whose names begin so.
        begin: Option<String>,
        /// Those that were refused.
        names: Vec<String>,
    }

    /// Refuses all threads from now on whose names begin so; none, if nothing is given. Returns the names of
    /// those that were refused since this was called last.
    pub fn refuse(begin: Option<&str>) -> Vec<String> {
        let mut refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
        refused.begin = begin.map(str::to_owned);
        std::mem::take(&mut refused.names)
    }

    pub(super) fn strike(name: &str) -> io::Result<()> {
        let mut refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.begin.as_deref().is_some_and(|begin| name.starts_with(begin)) {
            refused.names.push(name.to_owned());
            return Err(io::Error::from_raw_os_error(EAGAIN));
        }
        Ok(())
    }
}
