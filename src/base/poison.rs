//! The first failure of a store. After it, commits and snapshots fail with the same error.
//!
//! A failed write or sync is never retried: the system may have dropped the data that it could not write, and
//! a second sync would report success.

use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};

/// The error that poisons a store: set once, by the first thread that fails.
#[derive(Debug, Default)]
pub(crate) struct Poison {
    cause: OnceLock<Arc<Error>>,
    /// The store's directory.
    store: String,
}

impl Poison {
    /// Creates the state of a store that is not poisoned.
    pub fn none_in(store: String) -> Self {
        Self { cause: OnceLock::new(), store }
    }

    /// Returns an error if the store is poisoned.
    pub fn check(&self) -> Result<()> {
        self.cause.get().map_or(Ok(()), |cause| Err(Error::Poisoned(cause.clone())))
    }

    /// Poisons the store, unless it is already poisoned, and returns the error that every later call returns.
    pub fn set(&self, error: Error) -> Error {
        let error = match error {
            Error::Poisoned(cause) => cause,
            error => Arc::new(error.in_store(&self.store)),
        };
        if self.cause.set(error.clone()).is_ok() {
            tracing::error!(%error, remedy = ?error.remedy(), "the store is poisoned");
        }
        Error::Poisoned(self.cause.get().unwrap_or(&error).clone())
    }

    /// Poisons the store if a device call failed or a thread panicked. Other errors are returned unchanged,
    /// because they concern only the caller.
    pub fn set_by_device(&self, error: Error) -> Error {
        if matches!(error, Error::Device { .. } | Error::Panicked { .. }) { self.set(error) } else { error }
    }
}

/// A guard held by a thread for its lifetime. If the thread panics, the store is poisoned, because it is
/// unknown what work was left incomplete.
pub(crate) struct PoisonOnPanic {
    pub poison: Arc<Poison>,
    pub thread: &'static str,
}

impl Drop for PoisonOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.poison.set(Error::panicked(self.thread));
        }
    }
}
