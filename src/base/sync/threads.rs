//! The only place that starts threads, so that tests can make thread creation fail as on a system that is
//! short of threads.

use std::io;
use std::thread::{Scope, ScopedJoinHandle};

use super::thread;
use super::thread::JoinHandle;

/// Starts a thread of this name.
///
/// # Errors
/// The system's error if it cannot start the thread.
pub(crate) fn start(name: &str, life: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    refused(name)?;
    thread::Builder::new().name(name.to_owned()).spawn(life)
}

/// Starts a scoped thread of this name. It is a system thread even under a test scheduler.
///
/// # Errors
/// The system's error if it cannot start the thread.
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

/// Simulated failures of thread creation, for tests that run alone in their process.
#[cfg(any(test, feature = "testing"))]
pub mod refusals {
    use std::io;
    use std::sync::{Mutex, PoisonError};

    /// "Resource temporarily unavailable": the error of a system that has no thread left.
    const EAGAIN: i32 = 11;

    static REFUSED: Mutex<Refused> = Mutex::new(Refused { begin: None, names: Vec::new() });

    struct Refused {
        /// The prefix of the names of threads to refuse.
        begin: Option<String>,
        /// The names of threads that were refused.
        names: Vec<String>,
    }

    /// Refuses all later threads whose names start with `begin`; `None` refuses none. Returns the names of
    /// the threads refused since the last call.
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
