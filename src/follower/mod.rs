//! Followers: readers of a store's batches in order, as they are logged, in the same or another process.
//!
//! A follower holds no lock and writes nothing. The writer does not track followers, so the data that a follower reads
//! may be unfinished, replaced or recycled at any moment. Three rules make such reads safe:
//!
//! 1. A returned batch is verified: its frame by its checksums, its position and the chain hash of the previous frame
//!    (I3). A file that was recycled during the read fails these checks.
//! 2. An incomplete frame is treated as not yet written. The frame counts as damaged only if the check of the log's end
//!    (I4) finds the same frame damaged twice, without a rename between the two checks. Data that the first check
//!    considered durable was written before the second check began.
//! 3. A missing batch was overtaken if a snapshot states that the batch is no longer needed. The opening of the next
//!    incarnation states which batches of the previous incarnation were lost in a crash. A follower that had read such
//!    a batch has diverged.
//!
//! [`log_follower`] follows these rules. [`tail`] reads the next frame of the log. [`seek`] finds the starting point and the end of an incarnation.
//! [`survey`](mod@survey) distinguishes removed from lost files. [`backoff`] chooses the waiting times. [`replica`]
//! applies the returned batches.

mod batch;
mod seek;
mod backoff;
mod log_follower;
mod position;
mod replica;
mod segment;
mod survey;
mod tail;

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "archive")]
pub(crate) use batch::BatchFrame;
pub use batch::{FollowedBatch, RestoredState};
pub use position::{FollowerPosition, ParsePositionError};
pub use replica::Replica;
#[cfg(feature = "archive")]
pub(crate) use seek::{behind, diverged};

use crate::base::process::Process;
use crate::disk::Disk;
use crate::error::Result;
use log_follower::LogFollower;

/// The point from which a follower reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FollowFrom {
    /// Starts with the first batch of the store.
    Beginning,
    /// Starts after the end of the newest snapshot, or with the first batch if there is no snapshot.
    Snapshot,
    /// Starts after the batch at a position that a follower returned before.
    Position(FollowerPosition),
}

impl From<FollowerPosition> for FollowFrom {
    fn from(position: FollowerPosition) -> Self {
        FollowFrom::Position(position)
    }
}

/// A reader of a store's batches in order, while another process may be writing.
///
/// ```
/// use std::time::Duration;
/// use remanent::follow::{FollowFrom, Follower, Replica};
/// use remanent::{Place, Store};
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("mystore");
/// let store = Store::open(&path)?;
/// let mut follower = Follower::open(&path, FollowFrom::Beginning)?;
/// let mut replica = Replica::default();
/// assert!(follower.next(Duration::ZERO)?.is_none());
///
/// let mut batch = store.batch();
/// let page = batch.create(8, Place::Host).page();
/// batch.write(page, 0, b"remanent").note("first");
/// let committed = store.commit(batch)?;
///
/// let batch = follower.next(Duration::from_secs(10))?.expect("it is logged");
/// assert_eq!(batch.lsn(), committed.position.lsn);
/// assert_eq!(batch.note().as_deref(), Some("first"));
/// replica.apply(&batch)?;
/// assert_eq!(replica.bytes(committed.pages[0]), Some(&b"remanent"[..]));
///
/// // Another process resumes from here.
/// let text = follower.position().to_string();
/// let mut later = Follower::open(&path, FollowFrom::Position(text.parse().unwrap()))?;
/// assert!(later.next(Duration::ZERO)?.is_none());
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct Follower {
    opener: Process,
    source: Box<dyn BatchSource>,
}

/// A source of a store's batches, in order.
pub(crate) trait BatchSource: Send {
    /// Returns the directory or the URL, for messages.
    fn label(&self) -> String;

    /// Returns the position after the last returned batch.
    fn position(&self) -> FollowerPosition;

    /// Returns the next batch, or `None` if there was none within `timeout`.
    fn next(&mut self, timeout: Duration) -> Result<Option<FollowedBatch>>;

    /// Returns the number of checks for a batch so far.
    fn checks(&self) -> u64;
}

impl Follower {
    /// Creates a follower of the batches of `source`.
    pub(crate) fn of(source: Box<dyn BatchSource>) -> Self {
        Self { opener: Process::current(), source }
    }

    /// Creates a follower of a store on any disk, such as a simulated disk in a test. Other callers use
    /// [`Follower::open`].
    ///
    /// # Errors
    /// The errors of [`Follower::open`].
    #[doc(hidden)]
    pub fn open_on(disk: Arc<dyn Disk>, from: FollowFrom) -> Result<Self> {
        Ok(Self::of(Box::new(LogFollower::open(disk, from)?)))
    }

    /// Returns the position after the last returned batch. Another follower can resume from this position.
    #[must_use]
    pub fn position(&self) -> FollowerPosition {
        self.source.position()
    }

    /// Returns the next batch, or `None` if no batch was logged within `timeout`. A timeout of zero checks once.
    ///
    /// Usually, a batch is returned within about 10 ms of being logged. A follower that has been idle for long waits
    /// for a notification from the system. Without a notification, a batch may be delayed by an eighth of the idle
    /// time, up to 4 seconds, or 8 seconds if a notification was expected.
    ///
    /// The system sends no notifications if the user's inotify instances are used up (all followers of a store in a
    /// process share one), if another machine writes the files, or if the writer of a mapped log has no file descriptor
    /// left. In any case, 300 idle followers use about a hundredth of a processor.
    ///
    /// Batches are returned in order, without gaps and exactly once, even if the writer dies and the store is
    /// recovered. A batch is returned once it is logged, so a power cut may still lose it. [`FollowedBatch::durable`]
    /// states which batches are durable.
    ///
    /// # Errors
    /// [`Overtaken`](crate::Error::Overtaken) if batches were recycled before they were read,
    /// [`Diverged`](crate::Error::Diverged) if a crash lost the batch at the follower's position. After either error the
    /// follower cannot continue. [`Damaged`](crate::Error::Damaged) if data under a durable mark is damaged;
    /// [`Forked`](crate::Error::Forked); errors of the file system.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<FollowedBatch>> {
        // A forked child would consume notifications meant for the parent.
        self.opener.check()?;
        self.source.next(timeout)
    }

    /// Returns the number of times that the follower has checked for a batch since it was opened. A test can use this
    /// number to measure the cost of an idle follower.
    #[doc(hidden)]
    #[must_use]
    pub fn checks(&self) -> u64 {
        self.source.checks()
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower")
            .field("source", &self.source.label())
            .field("position", &self.source.position())
            .finish_non_exhaustive()
    }
}

/// An iterator over the batches of a follower, returned by [`Follower::batches`].
#[derive(Debug)]
pub struct Batches<'f> {
    follower: &'f mut Follower,
    /// Whether the iterator has returned an error and therefore ended.
    has_ended: bool,
}

impl Follower {
    /// Returns an iterator over the batches. The iterator waits for each batch like [`Follower::next`] without a
    /// timeout, and ends after the first error.
    ///
    /// ```
    /// use remanent::follow::{FollowFrom, Follower};
    /// use remanent::Store;
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path)?;
    /// for step in 1..=3u64 {
    ///     store.commit(store.batch().set_root("step", step))?;
    /// }
    /// let mut follower = Follower::open(&path, FollowFrom::Beginning)?;
    /// for (lsn, batch) in (1..=3).zip(follower.batches()) {
    ///     assert_eq!(batch?.lsn().0, lsn);
    /// }
    /// assert_eq!(follower.position().lsn, store.lsn());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn batches(&mut self) -> Batches<'_> {
        Batches { follower: self, has_ended: false }
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<FollowedBatch>;

    fn next(&mut self) -> Option<Result<FollowedBatch>> {
        if self.has_ended {
            return None;
        }
        let next = self.follower.next(Duration::MAX).transpose();
        self.has_ended = next.as_ref().is_none_or(Result::is_err);
        next
    }
}

impl<'f> IntoIterator for &'f mut Follower {
    type Item = Result<FollowedBatch>;
    type IntoIter = Batches<'f>;

    fn into_iter(self) -> Batches<'f> {
        self.batches()
    }
}
