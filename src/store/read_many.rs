//! Reads many ranges of pages from the same state in one call, without blocking the caller.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use remanent_format::{Lsn, PageId};

use super::Store;
use crate::applier::{ReadOutcome, ReadState};
use crate::base::allocation::collected;
use crate::base::process::ForkGuard;
use crate::base::sync::Instant;
use crate::error::{Error, Result};

/// A read of many ranges in flight, returned by [`Store::read_many`]. Poll, wait for, or await the handle.
///
/// All reads in flight and all results that callers keep share a limit of 256 MiB. The bytes of this read count toward
/// the limit until the result is dropped. If the handle is dropped first, they count until the read completes.
#[derive(Debug)]
#[must_use = "the bytes are in it"]
pub struct ReadMany {
    state: ForkGuard<Arc<ReadState>>,
    ranges: Vec<Range<usize>>,
}

/// The bytes of many ranges of pages from the same state, in one buffer. Returned by [`ReadMany::wait`].
///
/// The buffer is pinned memory that belongs to the store and returns to it on drop. In a forked child, an inherited
/// value is empty.
pub struct ManyBytes {
    outcome: ForkGuard<ReadOutcome>,
    ranges: Vec<Range<usize>>,
}

impl Store {
    /// Starts reading ranges of pages, all from the same state, into one buffer of pinned memory, in the given order.
    /// The state includes every batch submitted before the call; [`ManyBytes::lsn`] returns its newest batch.
    ///
    /// The call returns before the bytes arrive, and waits only for pages that are not loaded. Ranges of one GPU that
    /// total more than 64 KiB are gathered on the GPU first, and then transferred with few copies while commits
    /// continue. Shorter ranges, and ranges of several places, are transferred in batch order.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from(*b"a page", Place::Host);
    /// batch.create_from(*b"another page", Place::Host);
    /// let pages = store.commit(batch)?.pages;
    ///
    /// let read = store.read_many(&[(pages[0], 2..6), (pages[1], 0..7)])?;
    /// // Other work, and then:
    /// let bytes = read.wait()?;
    /// assert_eq!((bytes.get(0), bytes.get(1)), (&b"page"[..], &b"another"[..]));
    /// assert_eq!((bytes.as_bytes(), bytes.range(1)), (&b"pageanother"[..], 4..11));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], with the requested number of bytes, if all such reads in flight and all results still
    /// held would exceed 256 MiB in total; [`Error::Damaged`] as for [`Store::read`]; [`Error::Io`] if the thread
    /// for reads cannot be started. The handle returns [`Error::UnknownPage`], [`Error::OutOfBounds`] and the other
    /// errors of [`Store::read`].
    pub fn read_many(&self, ranges: &[(PageId, Range<u64>)]) -> Result<ReadMany> {
        ranges.iter().for_each(|(page, _)| self.engine().versions.used(*page));
        self.of_device(|| {
            let state = self.parts.reads.begin(collected(ranges.iter().cloned())?)?;
            let mut at = 0;
            let place = |(_, range): &(PageId, Range<u64>)| {
                let begin = at;
                at += range.end.saturating_sub(range.start) as usize;
                begin..at
            };
            Ok(ReadMany { state: ForkGuard::new(state), ranges: collected(ranges.iter().map(place))? })
        })
    }
}

impl ReadMany {
    /// Returns whether the read is done, so that [`wait`](Self::wait) returns immediately.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.state.check()?.is_done())
    }

    /// Waits for at most `timeout`, and returns whether the read is done.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        Ok(self.state.check()?.wait(Instant::now().checked_add(timeout)))
    }

    /// Waits for the bytes and returns them.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Poisoned`] if the device has failed;
    /// [`Error::Closed`] if the store was closed before the read began, or if the handle was already polled
    /// to completion; [`Error::Forked`].
    pub fn wait(self) -> Result<ManyBytes> {
        let state = self.state.check()?;
        state.wait(None);
        ManyBytes::new(state.take().unwrap_or(Err(Error::Closed)), self.ranges)
    }
}

/// Waits for the bytes as a task on any executor. A thread of the store wakes the task. The errors are those of
/// [`ReadMany::wait`].
impl Future for ReadMany {
    type Output = Result<ManyBytes>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = match self.state.check() {
            Ok(state) => state.poll(context),
            Err(error) => Poll::Ready(Err(error)),
        };
        polled.map(|outcome| ManyBytes::new(outcome, std::mem::take(&mut self.ranges)))
    }
}

impl ManyBytes {
    fn new(outcome: Result<ReadOutcome>, ranges: Vec<Range<usize>>) -> Result<Self> {
        outcome.map(|outcome| Self { outcome: ForkGuard::new(outcome), ranges })
    }

    /// Returns the Lsn of the newest batch that the returned bytes reflect. In a child process after `fork`, returns 0.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.outcome.check().map_or(Lsn(0), |outcome| outcome.lsn)
    }

    /// Returns the number of ranges.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// Returns the bytes of all ranges, one after another.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.outcome.check().map_or(&[], ReadOutcome::bytes)
    }

    /// Returns the position of range `index` in the buffer.
    ///
    /// # Panics
    /// If `index` is not less than [`count`](Self::count).
    #[must_use]
    pub fn range(&self, index: usize) -> Range<usize> {
        self.ranges[index].clone()
    }

    /// Returns the bytes of range `index`.
    ///
    /// # Panics
    /// If `index` is not less than [`count`](Self::count).
    #[must_use]
    pub fn get(&self, index: usize) -> &[u8] {
        let range = self.range(index);
        self.as_bytes().get(range).unwrap_or_default()
    }
}

impl std::fmt::Debug for ManyBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManyBytes").field("lsn", &self.lsn()).field("ranges", &self.ranges).finish()
    }
}
