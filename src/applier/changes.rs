//! Streams that report the changes of each applied batch to callers in this process, such as caches and mirrors of
//! pages.
//!
//! Each stream has a queue. The applier adds changes to the queue, and the caller removes them. The applier never waits
//! for a caller. If the queue is full, batches are omitted until the caller has been notified of the gap. While there
//! are no streams, a batch costs the applier one atomic load.
//!
//! Streams end with the process. To receive the same batches in another process, use a follower.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::op::Op;
use remanent_format::state::table::Changes;
use remanent_format::{Epoch, Lsn, PageId, PageInfo, PageTable, Place};

use super::Applier;
use crate::base::allocation::push;
use crate::base::process::ForkGuard;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Instant, Mutex};
use crate::error::{Error, Result};

/// The maximum number of changes in a queue. Further batches are omitted. Each batch, page and range counts as one
/// change, and takes up to about 100 bytes.
const QUEUED_MAX: usize = 64 << 10;

/// The changes that one batch made, reported by [`ChangeEvent::Applied`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppliedBatch {
    /// The Lsn of the batch.
    pub lsn: Lsn,
    /// The pages that the batch changed, in the order of their ids.
    pub pages: Vec<AppliedPage>,
    /// Whether the batch changed the root.
    pub root_changed: bool,
}

/// The changes of one batch to one page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppliedPage {
    /// The id of the page.
    pub page: PageId,
    /// The page's version after the batch, or its last version if the page was deleted.
    pub epoch: Epoch,
    /// The changes, or an empty list if the batch names the page but leaves it unchanged.
    pub changes: Vec<AppliedChange>,
}

/// A kind of change to a page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AppliedChange {
    /// The page was created. No ranges are reported, because all of its bytes are new.
    Created,
    /// The page was deleted.
    Deleted,
    /// The page has a new length. Bytes beyond its earlier length are zeros, unless the batch wrote them.
    Resized {
        /// The new length in bytes.
        len: u64,
    },
    /// The page moved to another place.
    Moved {
        /// The new place.
        place: Place,
    },
    /// Bytes were written. The ranges ascend and are separated by gaps. Single elements are reported as one range that
    /// contains them.
    Written {
        /// The byte ranges of the page, relative to its state after the batch.
        ranges: Vec<Range<u64>>,
    },
    /// Entries of the metadata were set or removed.
    Metadata,
}

/// An event of a [`ChangeStream`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeEvent {
    /// A batch was applied.
    Applied(Arc<AppliedBatch>),
    /// Batches were omitted, from `from` up to the next batch that is reported. The caller must read all pages again.
    /// Batches are omitted if the caller did not keep up, if there was no memory to report a batch, or after a restore,
    /// which replaces all pages.
    Lagged {
        /// The Lsn of the first omitted batch.
        from: Lsn,
    },
}

/// A stream of the changes that applied batches make, in batch order. The stream reports every batch, or a
/// [`ChangeEvent::Lagged`] where batches are omitted. Returned by [`Store::changes`].
///
/// The stream is also an iterator. Its `next` waits for the next event, and returns `None` when the store is closed or
/// has failed.
///
/// [`Store::changes`]: crate::Store::changes
pub struct ChangeStream {
    feed: ForkGuard<(Arc<Applier>, Arc<ChangeQueue>)>,
    begin: Lsn,
}

/// The open change streams of a store. The applier publishes each batch to all streams.
#[derive(Default)]
pub(crate) struct ChangeFeed {
    /// The number of streams. While there are no streams, a batch only loads this number.
    count: AtomicUsize,
    queues: Mutex<Vec<Arc<ChangeQueue>>>,
}

#[derive(Default)]
struct ChangeQueue {
    state: Mutex<QueueState>,
    more: Condvar,
}

#[derive(Default)]
struct QueueState {
    batches: VecDeque<Arc<AppliedBatch>>,
    /// The total number of changes in `batches`, limited by `QUEUED_MAX`.
    count: usize,
    /// The Lsn of the first omitted batch, until the caller is notified of the gap.
    lagged: Option<Lsn>,
    is_over: bool,
}

/// The ranges that a batch writes, by page.
#[derive(Default)]
pub(super) struct WrittenRanges {
    ranges: BTreeMap<PageId, Vec<Range<u64>>>,
    metadata: Vec<PageId>,
    no_memory: bool,
}

impl WrittenRanges {
    /// Records the range that an operation of the batch writes.
    pub fn note(&mut self, op: &Op<'_>) {
        let Some(page) = op.page() else { return };
        let noted = match (op, op.range()) {
            (_, Some((_, 0))) => Ok(()),
            (_, Some((offset, len))) => push(self.ranges.entry(page).or_default(), offset..offset + len),
            // A page that is truncated and extended again may have its old length, but other bytes.
            (Op::Resize { len, .. }, _) => push(self.ranges.entry(page).or_default(), *len..u64::MAX),
            (Op::SetMetadata { .. } | Op::RemoveMetadata { .. }, _) => push(&mut self.metadata, page),
            _ => Ok(()),
        };
        self.no_memory |= noted.is_err();
    }

    /// Returns the ranges written to a page that has length `len` after the batch.
    fn of(&mut self, page: PageId, len: u64) -> Result<Vec<Range<u64>>> {
        let mut written = self.ranges.remove(&page).unwrap_or_default();
        written.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in written {
            // Another operation may have truncated the page.
            let range = range.start..range.end.min(len);
            match merged.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None if range.is_empty() => {}
                None => push(&mut merged, range)?,
            }
        }
        Ok(merged)
    }
}

impl AppliedBatch {
    /// Collects the changes of a batch. `before` is the page table before the batch. If there is no memory for the
    /// changes, returns the batch's Lsn as the error.
    pub(super) fn of(changes: &Changes, before: &PageTable, mut written: WrittenRanges) -> Result<Self, Lsn> {
        Self::try_of(changes, before, &mut written).ok().filter(|_| !written.no_memory).ok_or(changes.lsn)
    }

    fn try_of(changes: &Changes, before: &PageTable, written: &mut WrittenRanges) -> Result<Self> {
        written.metadata.sort_unstable();
        let mut pages = Vec::new();
        for (page, after) in changes.pages() {
            if let Some(item) = AppliedPage::of(*page, before.get(*page).as_ref(), after.as_ref(), written)? {
                push(&mut pages, item)?;
            }
        }
        pages.sort_unstable_by_key(|page| page.page);
        Ok(Self { lsn: changes.lsn, pages, root_changed: changes.root.is_some() })
    }

    /// Returns the number of changes that the batch adds to a queue.
    fn count(&self) -> usize {
        let ranges = |change: &AppliedChange| match change {
            AppliedChange::Written { ranges } => ranges.len(),
            _ => 1,
        };
        let of_page = |page: &AppliedPage| 1 + page.changes.iter().map(ranges).sum::<usize>();
        1 + self.pages.iter().map(of_page).sum::<usize>()
    }
}

impl AppliedPage {
    /// Returns the changes to a page, or `None` if the batch both creates and deletes the page.
    fn of(
        page: PageId,
        before: Option<&PageInfo>,
        after: Option<&PageInfo>,
        written: &mut WrittenRanges,
    ) -> Result<Option<Self>> {
        let mut changes = Vec::new();
        let epoch = match (before, after) {
            (None, None) => return Ok(None),
            (Some(before), None) => {
                changes.push(AppliedChange::Deleted);
                before.epoch
            }
            (None, Some(after)) => {
                changes.push(AppliedChange::Created);
                after.epoch
            }
            (Some(before), Some(after)) => {
                if before.len != after.len {
                    changes.push(AppliedChange::Resized { len: after.len });
                }
                if before.place != after.place {
                    changes.push(AppliedChange::Moved { place: after.place });
                }
                let ranges = written.of(page, after.len)?;
                if !ranges.is_empty() {
                    changes.push(AppliedChange::Written { ranges });
                }
                if written.metadata.binary_search(&page).is_ok() {
                    changes.push(AppliedChange::Metadata);
                }
                after.epoch
            }
        };
        Ok(Some(Self { page, epoch, changes }))
    }
}

impl ChangeFeed {
    /// Returns whether any stream is open.
    pub fn is_watched(&self) -> bool {
        // Relaxed suffices: streams are added by a closure that runs on the applier's thread, which also calls this
        // function.
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Adds a stream. The stream reports every batch that is applied after this call. Must be called on the applier's
    /// thread.
    fn add(&self, queue: Arc<ChangeQueue>) {
        let mut queues = self.queues.lock();
        queues.push(queue);
        self.count.store(queues.len(), Ordering::Relaxed);
    }

    fn remove(&self, queue: &Arc<ChangeQueue>) {
        let mut queues = self.queues.lock();
        queues.retain(|other| !Arc::ptr_eq(other, queue));
        self.count.store(queues.len(), Ordering::Relaxed);
    }

    /// Adds a batch to the queues of all streams. `Err` contains the Lsn of a batch whose changes could not be
    /// recorded, and each stream reports a gap instead.
    pub fn publish(&self, item: Result<AppliedBatch, Lsn>) {
        let item = item.map(Arc::new);
        self.queues.lock().iter().for_each(|queue| queue.push(&item));
    }

    /// Ends all streams, because no more batches will be applied.
    pub fn end(&self) {
        let queues = {
            let mut queues = self.queues.lock();
            self.count.store(0, Ordering::Relaxed);
            std::mem::take(&mut *queues)
        };
        for queue in queues {
            queue.state.lock().is_over = true;
            queue.more.notify_all();
        }
    }
}

impl ChangeQueue {
    fn push(&self, item: &Result<Arc<AppliedBatch>, Lsn>) {
        let mut state = self.state.lock();
        match item {
            // The caller is notified of a gap before any later event, which would hide the gap.
            _ if state.lagged.is_some() => return,
            Ok(batch) if state.count + batch.count() <= QUEUED_MAX => {
                state.count += batch.count();
                state.batches.push_back(batch.clone());
            }
            Ok(batch) => state.lagged = Some(batch.lsn),
            Err(lsn) => state.lagged = Some(*lsn),
        }
        drop(state);
        self.more.notify_one();
    }

    /// Returns the next event, or `None` if there is no event by `until`. Returns `Err` if the stream has ended.
    fn next(&self, until: Option<Instant>) -> Result<Option<ChangeEvent>, ()> {
        let mut state = self.state.lock();
        loop {
            if let Some(batch) = state.batches.pop_front() {
                state.count -= batch.count();
                return Ok(Some(ChangeEvent::Applied(batch)));
            }
            if let Some(from) = state.lagged.take() {
                return Ok(Some(ChangeEvent::Lagged { from }));
            }
            if state.is_over {
                return Err(());
            }
            match until {
                None => self.more.wait(&mut state),
                Some(until) => {
                    // Checked again, because the event may have arrived just as the time expired.
                    if self.more.wait_until(&mut state, until).timed_out()
                        && state.batches.is_empty()
                        && state.lagged.is_none()
                        && !state.is_over
                    {
                        return Ok(None);
                    }
                }
            }
        }
    }
}

impl ChangeStream {
    /// Begins a stream of the batches that are passed to the applier after this call.
    pub(crate) fn begin(applier: &Arc<Applier>) -> Result<Self> {
        let queue = Arc::new(ChangeQueue::default());
        let (added, feed) = (queue.clone(), applier.changes().clone());
        let begin = applier.turn(move |turn| {
            turn.intact()?;
            feed.add(added);
            Ok(turn.applied.point.lsn)
        })?;
        Ok(Self { feed: ForkGuard::new((applier.clone(), queue)), begin })
    }

    /// Returns the Lsn of the last batch before the stream. The stream reports all later batches.
    #[must_use]
    pub fn begin_lsn(&self) -> Lsn {
        self.begin
    }

    /// Returns the next event, or `None` if there is no event within `timeout`. With a timeout of zero, the call does
    /// not wait.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Poisoned`] if the stream has ended; [`Error::Forked`].
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<ChangeEvent>> {
        let (applier, queue) = self.feed.check()?;
        // A deadline that the clock cannot represent never arrives.
        let until = Instant::now().checked_add(timeout);
        queue.next(until).or_else(|()| applier.poison.check().and(Err(Error::Closed)))
    }
}

impl Iterator for ChangeStream {
    type Item = ChangeEvent;

    fn next(&mut self) -> Option<ChangeEvent> {
        let (_, queue) = self.feed.check().ok()?;
        queue.next(None).ok().flatten()
    }
}

impl Drop for ChangeStream {
    fn drop(&mut self) {
        if let Ok((applier, queue)) = self.feed.check() {
            applier.changes().remove(queue);
        }
    }
}

impl std::fmt::Debug for ChangeStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChangeStream").field("begin", &self.begin).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(lsn: u64, ranges: usize) -> Result<AppliedBatch, Lsn> {
        let ranges = (0..ranges as u64).map(|at| 2 * at..2 * at + 1).collect();
        let changes = vec![AppliedChange::Written { ranges }];
        let page = AppliedPage { page: PageId(1), epoch: Epoch(lsn), changes };
        Ok(AppliedBatch { lsn: Lsn(lsn), pages: vec![page], root_changed: false })
    }

    /// Returns up to `count` events of a queue. A batch is returned as its Lsn, and a gap as its negated Lsn.
    fn events(queue: &ChangeQueue, count: usize) -> Vec<i64> {
        let number = |event: ChangeEvent| match event {
            ChangeEvent::Applied(batch) => batch.lsn.0 as i64,
            ChangeEvent::Lagged { from } => -(from.0 as i64),
        };
        let next = || queue.next(Some(Instant::now())).unwrap().map(number);
        std::iter::from_fn(next).take(count).collect()
    }

    /// A gap is reported in order, between the batches before and after it. Batches that arrive before the caller is
    /// notified are omitted too.
    #[test]
    fn change_stream_reports_gap_once_in_order() {
        let (feed, queue) = (ChangeFeed::default(), Arc::new(ChangeQueue::default()));
        feed.add(queue.clone());
        assert!(feed.is_watched());
        feed.publish(batch(1, 10));
        feed.publish(batch(2, QUEUED_MAX));
        feed.publish(batch(3, 1));
        assert_eq!(events(&queue, 1), [1]);
        feed.publish(batch(4, 1));
        assert_eq!(events(&queue, 9), [-2]);
        feed.publish(batch(5, 1));
        feed.publish(Err(Lsn(6)));
        assert_eq!(events(&queue, 9), [5, -6]);
        assert_eq!(queue.state.lock().count, 0);
        // The first batch exactly fills the queue, and the second exceeds it.
        feed.publish(batch(7, QUEUED_MAX - 2));
        feed.publish(batch(8, 0));
        assert_eq!(events(&queue, 9), [7, -8]);
        feed.remove(&queue);
        assert!(!feed.is_watched());
        feed.publish(batch(9, 1));
        assert_eq!(events(&queue, 9), Vec::<i64>::new());
        feed.add(queue.clone());
        feed.end();
        assert_eq!(queue.next(None), Err(()));
    }
}
