//! Starts all threads of the crate in one place, so that tests can simulate a system that cannot start threads.

use std::io;
use std::thread::{Scope, ScopedJoinHandle};

use super::thread;
use super::thread::JoinHandle;

/// Starts a thread with the given name.
///
/// # Errors
/// The error of the system if the thread cannot be started.
pub(crate) fn start(name: &str, life: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    refused(name)?;
    thread::Builder::new().name(name.to_owned()).spawn(life)
}

/// Starts a scoped thread with the given name. The thread is a system thread even under a test scheduler.
///
/// # Errors
/// The error of the system if the thread cannot be started.
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

/// Simulated failures of thread creation. A test that uses them must be the only test in its process.
#[cfg(any(test, feature = "testing"))]
pub mod refusals {
    use std::io;
    use std::sync::{Mutex, PoisonError};

    /// The error "resource temporarily unavailable", with which a system fails to start a thread.
    const EAGAIN: i32 = 11;

    static REFUSED: Mutex<Refused> = Mutex::new(Refused { begin: None, names: Vec::new() });

    struct Refused {
        /// The prefix of the names of threads whose start fails, or `None` if every start succeeds.
        begin: Option<String>,
        /// The names of threads whose start has failed.
        names: Vec<String>,
    }

    /// Makes the start of every later thread fail if its name starts with `begin`. `None` lets every start
    /// succeed. Returns the names of the threads whose start failed since the last call.
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
