//! Reading many ranges of pages by one call, as of one batch, without waiting.

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

/// A read of many ranges that is under way: poll it, wait for it, or await it.
///
/// Made by [`Store::read_many`]. It holds its part of the bytes that such reads may take, and gives it back
/// with the bytes, or when it is dropped and the read is done.
#[derive(Debug)]
#[must_use = "the bytes are in it"]
pub struct ReadMany {
    state: ForkGuard<Arc<ReadState>>,
    ranges: Vec<Range<usize>>,
}

/// The bytes of many ranges of pages, in one buffer, all as of one batch.
///
/// Made by [`ReadMany::wait`]. The buffer is the store's pinned memory, and goes back to it when this is
/// dropped. A forked child that inherits it finds it empty.
pub struct ManyBytes {
    outcome: ForkGuard<ReadOutcome>,
    ranges: Vec<Range<usize>>,
}

impl Store {
    /// Begins to read ranges of pages: all of them as of one batch, into one buffer of pinned memory, in the
    /// order in which they are given. That batch is at least the newest one submitted before the call;
    /// [`ManyBytes::lsn`] says which.
    ///
    /// Returns before the bytes are there; it waits only for unloaded pages. Ranges of one GPU that are
    /// longer than 64 KiB together are gathered there, and come to the host in few copies while commits go
    /// on. Shorter ones, and those of several places, come in the order of batches.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::OutOfMemory`], with the number of bytes asked for, where all such reads that are under way or
    /// whose bytes are held would take more than 256 MiB together; [`Error::Damaged`] as for [`Store::read`];
    /// [`Error::Thread`] where there is no thread. The handle gives [`Error::UnknownPage`] and
    /// [`Error::OutOfBounds`], and what else [`Store::read`] fails with.
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
    /// Whether the read is done, so that [`wait`](Self::wait) waits for nothing.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.state.check()?.is_done())
    }

    /// Waits up to `timeout`; says whether the read is done.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        Ok(self.state.check()?.wait(Instant::now().checked_add(timeout)))
    }

    /// Waits for the bytes.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Poisoned`] if the device failed;
    /// [`Error::Closed`] if the store was closed before the read began, or if the bytes were taken before, as
    /// a task; [`Error::Forked`].
    pub fn wait(self) -> Result<ManyBytes> {
        let state = self.state.check()?;
        state.wait(None);
        ManyBytes::new(state.take().unwrap_or(Err(Error::Closed)), self.ranges)
    }
}

/// Waits for the bytes as a task, on any executor: a thread of the store wakes it. Fails as
/// [`ReadMany::wait`] does.
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

    /// The batch as of which all bytes are; 0 in a forked child.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.outcome.check().map_or(Lsn(0), |outcome| outcome.lsn)
    }

    /// The number of ranges.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// The whole buffer: the ranges, one after the other.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.outcome.check().map_or(&[], ReadOutcome::bytes)
    }

    /// Where range `index` lies in the buffer.
    ///
    /// # Panics
    /// If fewer ranges were asked for.
    #[must_use]
    pub fn range(&self, index: usize) -> Range<usize> {
        self.ranges[index].clone()
    }

    /// The bytes of range `index`.
    ///
    /// # Panics
    /// If fewer ranges were asked for.
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
