//! A source from which many threads and tasks read. One thread reads at a time, and each item is returned
//! once.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use remanent::{Error, Result};

use crate::errors::{Handle, OrRaise, in_use, to_py};
use crate::gate::{check_process, detached, wait};

/// A source, and an item that was read but not returned yet.
pub struct SharedSource<S, T> {
    opener: u32,
    path: String,
    /// The error message for a caller that calls while another thread reads.
    busy: &'static str,
    /// The kind of the source, which errors state after the source was closed.
    handle: Handle,
    /// `None` after the source was closed. Locked while a thread reads.
    source: Mutex<Option<S>>,
    /// The item, set by the thread that reads from the source. Has a lock of its own, so that a task can take
    /// its item while another thread continues to read.
    kept: Mutex<Option<T>>,
}

impl<S: Send, T: Send> SharedSource<S, T> {
    pub fn new(source: S, path: String, busy: &'static str, handle: Handle) -> Self {
        let opener = std::process::id();
        Self { opener, path, busy, handle, source: Mutex::new(Some(source)), kept: Mutex::new(None) }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns an error if a forked child inherited the source.
    ///
    /// # Errors
    /// `ForkedError` in a forked child.
    pub fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.opener).or_raise(py, Some(&self.path))
    }

    pub fn is_closed(&self) -> bool {
        match self.source.try_lock() {
            Ok(source) => source.is_none(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().is_none(),
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// Locks the source, or returns an error if another thread is reading.
    fn source(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<S>>> {
        self.check_process(py)?;
        match self.source.try_lock() {
            Ok(source) => Ok(source),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(in_use(self.busy)),
        }
    }

    /// Returns the exception for an error. The exception depends on whether the source or its store is
    /// closed.
    pub fn raised(&self, py: Python<'_>, error: &Error) -> PyErr {
        let is_closed = self.source(py).is_ok_and(|source| source.is_none());
        match error {
            Error::Closed if is_closed => self.handle.closed(py, Some(&self.path)),
            _ => to_py(py, error, Some(&self.path)),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Option<T>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the kept item. `note` is called with the item before another caller can take the next one.
    pub fn take(&self, note: impl FnOnce(&T)) -> Option<T> {
        let mut kept = self.kept();
        kept.as_ref().map(note);
        kept.take()
    }

    /// Reads the next item, for at most `timeout`, and keeps it. Returns whether there is an item. An inner
    /// `Err(Closed)` means that the source has ended.
    ///
    /// # Errors
    /// `InUseError` while another thread reads, and errors of `read`.
    pub fn fetch(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        read: impl FnMut(&mut S, Duration) -> Result<Option<T>> + Send,
    ) -> PyResult<Result<bool>> {
        let mut source = self.source(py)?;
        self.fetch_from(py, &mut source, timeout, read)
    }

    fn fetch_from(
        &self,
        py: Python<'_>,
        source: &mut Option<S>,
        timeout: Option<Duration>,
        mut read: impl FnMut(&mut S, Duration) -> Result<Option<T>> + Send,
    ) -> PyResult<Result<bool>> {
        if self.kept().is_some() {
            return Ok(Ok(true));
        }
        let Some(source) = source else { return Ok(Err(Error::Closed)) };
        let mut is_over = false;
        let received = wait(py, timeout, Some(&self.path), |slice| match read(source, slice) {
            Err(Error::Closed) => {
                is_over = true;
                Ok(true)
            }
            item => {
                let item = item?;
                let has_come = item.is_some();
                *self.kept() = item;
                Ok(has_come)
            }
        })?;
        Ok(if is_over { Err(Error::Closed) } else { Ok(received) })
    }

    /// Returns the next item, or `None` if no item arrives in time. An inner `Err(Closed)` means that the
    /// source has ended.
    ///
    /// # Errors
    /// As for [`fetch`](Self::fetch).
    pub fn next(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        mut read: impl FnMut(&mut S, Duration) -> Result<Option<T>> + Send,
        mut note: impl FnMut(&T),
    ) -> PyResult<Result<Option<T>>> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut source = self.source(py)?;
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match self.fetch_from(py, &mut source, left, &mut read)? {
                Err(closed) => return Ok(Err(closed)),
                Ok(false) => return Ok(Ok(None)),
                // A task may have taken the item first.
                Ok(true) => match self.take(&mut note) {
                    Some(item) => return Ok(Ok(Some(item))),
                    None => continue,
                },
            }
        }
    }

    /// Closes the source.
    ///
    /// # Errors
    /// `InUseError` while another thread reads.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        let ended = (self.source(py)?.take(), self.kept().take());
        detached(ended);
        Ok(())
    }
}

impl<S: Send, T: Send> SharedSource<S, T> {
    /// Drops the source without the interpreter's lock when its owner is dropped.
    pub fn end(&mut self) {
        let source = self.source.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        detached(source);
    }
}
