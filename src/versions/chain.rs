//! The chain of versions of a page or of the root, newest first.
//!
//! A version refers to the previous version until no reader can need it. The previous version is then unlinked. If a
//! reader finds no version old enough for its Lsn, either its Lsn is outdated or the page did not exist at that Lsn.

use std::ops::Deref;
use std::sync::Arc;

use remanent_format::state::table::PageShape;
use remanent_format::{Epoch, Key, Lsn, Metadata, PageId, PageInfo, Place};

use crate::base::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use crate::base::sync::{Swap, SwapGuard};

/// The state of a page or of the root after a batch, linked to the previous version.
pub(super) struct Version<T> {
    pub state: T,
    /// The previous version, or `None` if it was unlinked.
    before: Swap<Version<T>>,
}

/// The contents of a [`Version`], including the batch that created the version.
pub(super) trait VersionState {
    /// Returns the batch that created the version.
    fn lsn(&self) -> Lsn;
}

/// The state of a page after one or more batches, or the record of a deleted page.
///
/// Most batches only change the bytes of a page, or move it. Such a batch only updates Lsn, epoch and place in the
/// existing version, so a commit makes no allocation and waits for no cache line of another thread.
pub(super) struct PageState {
    /// The first batch of this version.
    lsn: Lsn,
    /// The properties of the page after batch `lsn`. The page may have moved since. `numbers` contains its places.
    shape: PageShape,
    numbers: Numbers,
}

/// The Lsn, epoch and place of a page after each of its two newest batches.
///
/// The writer overwrites the older of the two states once all readers and views have reached the newer one. A reader
/// uses the newest state whose batch is at or before the reader's Lsn. If both are later, the reader's Lsn is outdated.
///
/// Each state is a sequence lock made of atomics, with the batch as its sequence number. The places of both states
/// share one field, which fills a gap in the memory layout.
struct Numbers {
    states: [NumberPair; 2],
    /// The places of both states, encoded by [`Place::to_bits`].
    places: [AtomicU16; 2],
    is_gone: bool,
}

/// A batch, and the epoch of the page after the batch.
struct NumberPair {
    /// The batch, or [`NO_LSN`] if the state is empty or being changed.
    lsn: AtomicU64,
    epoch: AtomicU64,
}

const NO_LSN: u64 = u64::MAX;

#[cfg(not(shuttle))]
const _: () = assert!(size_of::<Version<PageState>>() == 72);

/// A page with the Lsn, epoch and place that it had after the batch at which a reader or view looks it up.
pub(crate) struct SeenPage<'a> {
    shape: &'a PageShape,
    /// The last batch that changed or moved the page.
    pub lsn: Lsn,
    epoch: Epoch,
    place: Place,
}

impl SeenPage<'_> {
    /// Returns the length, version, key and metadata of the page.
    pub fn info(&self, page: PageId) -> PageInfo {
        let mut info = self.shape.info(page, self.epoch, self.lsn);
        info.place = self.place;
        info
    }

    pub fn key(&self) -> Option<&Key> {
        self.shape.key()
    }

    pub fn place(&self) -> Place {
        self.place
    }

    /// Returns the length of the page in bytes.
    pub fn len(&self) -> u64 {
        self.shape.len()
    }
}

impl Numbers {
    fn new(lsn: Lsn, epoch: Epoch, place: Place, is_gone: bool) -> Self {
        let pair = |lsn, epoch| NumberPair { lsn: AtomicU64::new(lsn), epoch: AtomicU64::new(epoch) };
        let place = || AtomicU16::new(place.to_bits());
        Self { states: [pair(lsn.0, epoch.0), pair(NO_LSN, 0)], places: [place(), place()], is_gone }
    }

    /// Returns state 0 or 1, or `None` while the writer changes that state. A batch is stored at most once, so a state
    /// with the same batch before and after the read is consistent.
    fn read(&self, which: usize) -> Option<(Lsn, Epoch, u16)> {
        let NumberPair { lsn: batch, epoch } = &self.states[which];
        // Acquire: a thread that loads an epoch or place of a write in progress observes a changed batch in the last
        // load.
        let lsn = batch.load(Ordering::Acquire);
        let epoch = epoch.load(Ordering::Acquire);
        let place = self.places[which].load(Ordering::Acquire);
        let is_whole = lsn != NO_LSN && batch.load(Ordering::Acquire) == lsn;
        is_whole.then_some((Lsn(lsn), Epoch(epoch), place))
    }

    fn write(&self, which: usize, lsn: Lsn, epoch: Epoch, place: Place) {
        let pair = &self.states[which];
        pair.lsn.store(NO_LSN, Ordering::Release);
        pair.epoch.store(epoch.0, Ordering::Release);
        self.places[which].store(place.to_bits(), Ordering::Release);
        pair.lsn.store(lsn.0, Ordering::Release);
    }

    /// Returns the newest state whose batch is at or before `at`.
    fn at(&self, at: Lsn) -> Result<(Lsn, Epoch, Place), ReadMiss> {
        let first = &self.states[0].lsn;
        loop {
            // The batch of the first state is read before and after the second state. If it is unchanged, both states
            // are from the same point in time. Otherwise, the required state may have been in the other slot when that
            // slot was read.
            let before = first.load(Ordering::Acquire);
            let states = [self.read(1), self.read(0)];
            if first.load(Ordering::Acquire) != before {
                continue;
            }
            let states = states.into_iter().flatten();
            let earliest = states.clone().map(|(lsn, ..)| lsn).min().unwrap_or(Lsn(0));
            let seen = states.filter(|(lsn, ..)| *lsn <= at).max_by_key(|(lsn, ..)| *lsn);
            let (lsn, epoch, place) = seen.ok_or(ReadMiss::Later(earliest))?;
            return Ok((lsn, epoch, Place::from_bits(place).expect("the bits of a place")));
        }
    }

    /// Returns the index and the batch of the newest state. Only the writer may call this.
    fn newest(&self) -> (usize, Lsn) {
        let [first, second] = [0, 1].map(|which: usize| self.states[which].lsn.load(Ordering::Relaxed));
        if second != NO_LSN && second > first { (1, Lsn(second)) } else { (0, Lsn(first)) }
    }
}

/// The root and the number of pages after batch `lsn`.
pub(super) struct RootState {
    pub lsn: Lsn,
    pub root: Arc<Metadata>,
    pub page_count: u64,
}

/// A guard that keeps a version alive while a reader uses the version.
pub(super) struct SeenVersion<T>(SwapGuard<Version<T>>);

/// The reason why a reader found no version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadMiss {
    /// The page has no version, so it does not exist at the reader's Lsn.
    Absent,
    /// All remaining versions are newer than the reader's Lsn. Contains the batch that created the oldest of them.
    Later(Lsn),
}

impl VersionState for PageState {
    fn lsn(&self) -> Lsn {
        self.lsn
    }
}

impl VersionState for RootState {
    fn lsn(&self) -> Lsn {
        self.lsn
    }
}

impl PageState {
    /// Creates the state of an existing page.
    pub fn present(shape: PageShape, epoch: Epoch, lsn: Lsn) -> Self {
        let numbers = Numbers::new(lsn, epoch, shape.place(), false);
        Self { lsn, shape, numbers }
    }

    /// Creates the record of a page that batch `lsn` deleted. The record contains the page's key, with which
    /// the page is found in the key index.
    pub fn gone(before: &Self, lsn: Lsn) -> Self {
        let shape = before.shape.clone();
        let numbers = Numbers::new(lsn, Epoch(0), shape.place(), true);
        Self { lsn, shape, numbers }
    }

    /// Returns the properties of the page after the first batch of this version, or `None` if the page is deleted.
    pub fn page(&self) -> Option<&PageShape> {
        (!self.numbers.is_gone).then_some(&self.shape)
    }

    /// Returns the properties of the page, or its last properties if the page is deleted.
    pub fn last(&self) -> &PageShape {
        &self.shape
    }

    /// Returns the page as it was after batch `at`. `at` must be a visible Lsn or the Lsn of a view, and at or above
    /// the first batch of this version.
    pub fn seen(&self, at: Lsn) -> Result<SeenPage<'_>, ReadMiss> {
        let shape = self.page().ok_or(ReadMiss::Absent)?;
        let (lsn, epoch, place) = self.numbers.at(at)?;
        Ok(SeenPage { shape, lsn, epoch, place })
    }

    /// Returns the newest batch that changed the page. Only the writer may call this.
    pub fn newest_lsn(&self) -> Lsn {
        self.numbers.newest().1
    }

    /// Overwrites the older state with a newer Lsn, epoch and place. Only the writer may call this, after all readers
    /// and views have reached the newest state.
    pub fn advance(&self, lsn: Lsn, epoch: Epoch, place: Place) {
        let (newest, _) = self.numbers.newest();
        self.numbers.write(1 - newest, lsn, epoch, place);
    }
}

impl<T> Version<T> {
    pub fn new(state: T, before: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { state, before: Swap::new(before) })
    }

    pub fn unlink(&self) {
        self.before.set(None);
    }

    #[cfg(test)]
    pub fn chain_len(&self) -> usize {
        1 + self.before.get().map_or(0, |before| before.chain_len())
    }
}

impl<T> Drop for Version<T> {
    /// Drops a long chain iteratively. Recursive drops would need stack space proportional to the length of the chain.
    fn drop(&mut self) {
        let mut before = self.before.take();
        while let Some(mut version) = before.and_then(Arc::into_inner) {
            before = version.before.take();
        }
    }
}

impl<T> Deref for SeenVersion<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.as_ref().expect("a version was found").state
    }
}

/// Returns the newest version whose batch is at or before `at`.
pub(super) fn visible_at<T: VersionState>(
    newest: &Swap<Version<T>>,
    at: Lsn,
) -> Result<SeenVersion<T>, ReadMiss> {
    let mut guard = newest.load();
    let mut unseen = ReadMiss::Absent;
    loop {
        let before = match guard.as_ref() {
            None => return Err(unseen),
            Some(version) if version.state.lsn() <= at => break,
            Some(version) => {
                unseen = ReadMiss::Later(version.state.lsn());
                version.before.load()
            }
        };
        guard = before;
    }
    Ok(SeenVersion(guard))
}
