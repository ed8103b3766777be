//! Poison: the first failure of a store. After this failure, all commits and snapshots fail with the same error.
//!
//! A failed write or sync is never retried. The system may have dropped the data that it could not write, and then a
//! second sync would report success.

use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};

/// The error that poisons a store. The first thread that fails sets the error.
#[derive(Debug, Default)]
pub(crate) struct Poison {
    cause: OnceLock<Arc<Error>>,
    /// The directory of the store, for messages.
    store: String,
}

impl Poison {
    pub fn none_in(store: String) -> Self {
        Self { cause: OnceLock::new(), store }
    }

    pub fn check(&self) -> Result<()> {
        self.cause.get().map_or(Ok(()), |cause| Err(Error::Poisoned(cause.clone())))
    }

    /// Poisons the store with `error`, unless the store is already poisoned. Returns the error that every later call
    /// returns.
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

    /// Poisons the store if `error` is a failure of a device call or a panic of a thread. Other errors concern only the
    /// caller, and are returned unchanged.
    pub fn set_by_device(&self, error: Error) -> Error {
        if matches!(error, Error::Device { .. } | Error::Panicked { .. }) { self.set(error) } else { error }
    }
}

/// A guard that a thread of the store holds for its lifetime. If the thread panics, the guard poisons the store,
/// because some of the thread's work may be incomplete.
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
