//! The versions of one thing, the newest first.
//!
//! A version names the one before it until no reader can need that one; then it is unlinked. A reader that
//! finds the end of a chain has read an old Lsn, or the thing did not exist then.

use std::ops::Deref;
use std::sync::Arc;

use remanent_format::state::table::PageShape;
use remanent_format::{Epoch, Key, Lsn, Metadata, PageId, PageInfo, Place};

use crate::base::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use crate::base::sync::{Swap, SwapGuard};

/// One version of a page or of the root.
pub(super) struct Version<T> {
    pub state: T,
    /// The version before this one, until it is unlinked.
    before: Swap<Version<T>>,
}

/// The state that a version holds: of a page, or of the root.
pub(super) trait VersionState {
    /// The batch that made the version.
    fn lsn(&self) -> Lsn;
}

/// A page as batches left it, or the trace of a page that a batch deleted.
///
/// Nearly all batches change a page's bytes, or move it, and do nothing else. Then only its two numbers and
/// its place are new, and the version stays where it is. So a commit takes no memory for that, and waits for
/// no other thread's cache.
pub(super) struct PageState {
    /// The first of these batches.
    lsn: Lsn,
    /// The page as that batch left it. A later one may have moved it: `numbers` has the places.
    shape: PageShape,
    numbers: Numbers,
}

/// A page's newest batch, with its epoch and place by it, and those before. The writer overwrites the older
/// of these states, and only once all readers and views have reached the newer one. So a reader needs the
/// newer of the states that its Lsn has reached; if it has reached neither, its Lsn is an old one.
///
/// Each state is a sequence lock whose sequence is the batch, of atomics alone. The places of both fill one
/// gap.
struct Numbers {
    states: [NumberPair; 2],
    /// As [`Place::to_bits`] gives them.
    places: [AtomicU16; 2],
    is_gone: bool,
}

/// A batch, and the page's epoch by it.
struct NumberPair {
    /// [`NO_LSN`] while the state changes, or where there is none.
    lsn: AtomicU64,
    epoch: AtomicU64,
}

const NO_LSN: u64 = u64::MAX;

#[cfg(not(shuttle))]
const _: () = assert!(size_of::<Version<PageState>>() == 72);

/// A page as a reader sees it.
pub(crate) struct SeenPage<'a> {
    shape: &'a PageShape,
    /// The batch that changed it last, or moved it.
    pub lsn: Lsn,
    epoch: Epoch,
    place: Place,
}

impl SeenPage<'_> {
    /// The page's length, version, key and metadata.
    pub fn info(&self, page: PageId) -> PageInfo {
        let mut info = self.shape.info(page, self.epoch, self.lsn);
        info.place = self.place;
        info
    }

    /// The user's name for the page.
    pub fn key(&self) -> Option<&Key> {
        self.shape.key()
    }

    /// The place where the page lives.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The page's length in bytes.
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

    /// One of the states, unless it is changing. No state comes twice, so one with the same batch before and
    /// after is whole.
    fn read(&self, which: usize) -> Option<(Lsn, Epoch, u16)> {
        let NumberPair { lsn: batch, epoch } = &self.states[which];
        // Acquire: a reader of an epoch or a place that is being written sees afterwards that the batch is
        // not what it was.
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

    /// The newest state that is visible at `at`.
    fn at(&self, at: Lsn) -> Result<(Lsn, Epoch, Place), Unseen> {
        let first = &self.states[0].lsn;
        loop {
            // The first state is looked at before and after the second one. If it stayed the same, both were
            // there at one moment. Otherwise the second one may have held the wanted state between the looks.
            let before = first.load(Ordering::Acquire);
            let states = [self.read(1), self.read(0)];
            if first.load(Ordering::Acquire) != before {
                continue;
            }
            let states = states.into_iter().flatten();
            let earliest = states.clone().map(|(lsn, ..)| lsn).min().unwrap_or(Lsn(0));
            let seen = states.filter(|(lsn, ..)| *lsn <= at).max_by_key(|(lsn, ..)| *lsn);
            let (lsn, epoch, place) = seen.ok_or(Unseen::Later(earliest))?;
            return Ok((lsn, epoch, Place::from_bits(place).expect("the bits of a place")));
        }
    }

    /// For the writer: which state is the newest, and its batch.
    fn newest(&self) -> (usize, Lsn) {
        let [first, second] = [0, 1].map(|which: usize| self.states[which].lsn.load(Ordering::Relaxed));
        if second != NO_LSN && second > first { (1, Lsn(second)) } else { (0, Lsn(first)) }
    }
}

/// The root as one batch left it, and how many pages there were.
pub(super) struct RootState {
    pub lsn: Lsn,
    pub root: Arc<Metadata>,
    pub page_count: u64,
}

/// A version that a reader found; it stays while this lives.
pub(super) struct SeenVersion<T>(SwapGuard<Version<T>>);

/// Why a reader found no version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unseen {
    /// There is no version at all.
    Absent,
    /// The oldest version that is left was made by this batch, which is later.
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
    /// The state of a page that is there.
    pub fn present(shape: PageShape, epoch: Epoch, lsn: Lsn) -> Self {
        let numbers = Numbers::new(lsn, epoch, shape.place(), false);
        Self { lsn, shape, numbers }
    }

    /// The trace of a page that batch `lsn` deleted. The page's key stays with it, to be found in the index.
    pub fn gone(before: &Self, lsn: Lsn) -> Self {
        let shape = before.shape.clone();
        let numbers = Numbers::new(lsn, Epoch(0), shape.place(), true);
        Self { lsn, shape, numbers }
    }

    /// The page as the first batch of this version left it, if it is there.
    pub fn page(&self) -> Option<&PageShape> {
        (!self.numbers.is_gone).then_some(&self.shape)
    }

    /// The page, or the page as it was before it was deleted.
    pub fn last(&self) -> &PageShape {
        &self.shape
    }

    /// The page as it is at a visible Lsn or a view's that this version has reached.
    pub fn seen(&self, at: Lsn) -> Result<SeenPage<'_>, Unseen> {
        let shape = self.page().ok_or(Unseen::Absent)?;
        let (lsn, epoch, place) = self.numbers.at(at)?;
        Ok(SeenPage { shape, lsn, epoch, place })
    }

    /// The newest batch that changed the page. For the writer.
    pub fn newest_lsn(&self) -> Lsn {
        self.numbers.newest().1
    }

    /// Gives the page newer numbers, and a place, instead of those before its newest ones. No reader needs
    /// these any more, because all readers and views have reached the newest. For the writer.
    pub fn advance(&self, lsn: Lsn, epoch: Epoch, place: Place) {
        let (newest, _) = self.numbers.newest();
        self.numbers.write(1 - newest, lsn, epoch, place);
    }
}

impl<T> Version<T> {
    /// Makes a version that follows another one.
    pub fn new(state: T, before: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { state, before: Swap::new(before) })
    }

    /// Unlinks the versions before this one.
    pub fn unlink(&self) {
        self.before.set(None);
    }

    /// How many versions there are from this one back.
    #[cfg(test)]
    pub fn chain_len(&self) -> usize {
        1 + self.before.get().map_or(0, |before| before.chain_len())
    }
}

impl<T> Drop for Version<T> {
    /// Drops a long chain one by one: each version's own drop would need as much stack as the chain is long.
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

/// The version that is visible at `at`.
pub(super) fn visible_at<T: VersionState>(
    newest: &Swap<Version<T>>,
    at: Lsn,
) -> Result<SeenVersion<T>, Unseen> {
    let mut guard = newest.look();
    let mut unseen = Unseen::Absent;
    loop {
        let before = match guard.as_ref() {
            None => return Err(unseen),
            Some(version) if version.state.lsn() <= at => break,
            Some(version) => {
                unseen = Unseen::Later(version.state.lsn());
                version.before.look()
            }
        };
        guard = before;
    }
    Ok(SeenVersion(guard))
}
