//! The versions of one thing, the newest first.
//!
//! A version names the one before it until no reader can need that one; then it is unlinked. A reader that
//! finds the end of a chain has read an old Lsn, or the thing did not exist then.

use std::ops::Deref;
use std::sync::Arc;

use remanent_format::state::table::PageEntry;
use remanent_format::{Epoch, Key, Lsn, Metadata, PageId, PageInfo, Place};

use crate::base::sync::atomic::{AtomicU64, Ordering};
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
/// Nearly all batches change a page's bytes and nothing else. Then only two numbers are new, and the version
/// stays where it is. So a commit takes no memory for that, and waits for no other thread's cache.
pub(super) struct PageState {
    /// The page as the first of these batches left it.
    entry: PageEntry,
    numbers: Numbers,
}

/// A page's newest batch and epoch, and those before. The writer overwrites the older pair, and only once all
/// readers and views have reached the newer one. So a reader needs the newer of the pairs that its Lsn has
/// reached; if it has reached neither, its Lsn is an old one.
struct Numbers([Pair; 2]);

/// A batch, and the page's epoch by it. A sequence lock whose sequence is the batch, of atomics alone.
struct Pair {
    /// [`NO_LSN`] while the pair changes, or where there is none.
    lsn: AtomicU64,
    epoch: AtomicU64,
}

const NO_LSN: u64 = u64::MAX;

/// A page as a reader sees it.
pub(crate) struct SeenPage<'a> {
    entry: &'a PageEntry,
    /// The batch that changed it last, or moved it.
    pub lsn: Lsn,
    epoch: Epoch,
}

impl SeenPage<'_> {
    /// The page's length, version, key and metadata.
    pub fn info(&self, page: PageId) -> PageInfo {
        let mut info = self.entry.info(page);
        (info.lsn, info.epoch) = (self.lsn, self.epoch);
        info
    }

    /// The user's name for the page.
    pub fn key(&self) -> Option<&Key> {
        self.entry.key()
    }

    /// The place where the page lives.
    pub fn place(&self) -> Place {
        self.entry.place()
    }

    /// The page's length in bytes.
    pub fn len(&self) -> u64 {
        self.entry.len()
    }
}

impl Pair {
    fn new(lsn: u64, epoch: Epoch) -> Self {
        Self { lsn: AtomicU64::new(lsn), epoch: AtomicU64::new(epoch.0) }
    }

    /// The pair, unless it is changing. No pair comes twice, so a pair with the same batch before and after
    /// is whole.
    fn read(&self) -> Option<(Lsn, Epoch)> {
        // Acquire: a reader of an epoch that is being written sees afterwards that the batch is not what it
        // was.
        let lsn = self.lsn.load(Ordering::Acquire);
        let epoch = self.epoch.load(Ordering::Acquire);
        let is_whole = lsn != NO_LSN && self.lsn.load(Ordering::Acquire) == lsn;
        is_whole.then_some((Lsn(lsn), Epoch(epoch)))
    }

    fn write(&self, lsn: Lsn, epoch: Epoch) {
        self.lsn.store(NO_LSN, Ordering::Release);
        self.epoch.store(epoch.0, Ordering::Release);
        self.lsn.store(lsn.0, Ordering::Release);
    }
}

impl Numbers {
    fn new(entry: &PageEntry) -> Self {
        Self([Pair::new(entry.lsn.0, entry.epoch), Pair::new(NO_LSN, Epoch(0))])
    }

    /// The newest pair that is visible at `at`.
    fn at(&self, at: Lsn) -> Result<(Lsn, Epoch), Unseen> {
        let [first, second] = &self.0;
        loop {
            // The first pair is looked at before and after the second one. If it stayed the same, both were
            // there at one moment. Otherwise the second one may have held the wanted pair between the looks.
            let before = first.lsn.load(Ordering::Acquire);
            let pairs = [second.read(), first.read()];
            if first.lsn.load(Ordering::Acquire) != before {
                continue;
            }
            let pairs = pairs.into_iter().flatten();
            let earliest = pairs.clone().map(|(lsn, _)| lsn).min().unwrap_or(Lsn(0));
            let seen = pairs.filter(|(lsn, _)| *lsn <= at).max_by_key(|(lsn, _)| *lsn);
            return seen.ok_or(Unseen::Later(earliest));
        }
    }

    /// For the writer: which pair is the newest, and its batch.
    fn newest(&self) -> (usize, Lsn) {
        let [first, second] = [0, 1].map(|pair: usize| self.0[pair].lsn.load(Ordering::Relaxed));
        if second != NO_LSN && second > first { (1, Lsn(second)) } else { (0, Lsn(first)) }
    }
}

/// The epoch of a deleted page; no page reaches it.
const GONE: Epoch = Epoch(u64::MAX);

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
        self.entry.lsn
    }
}

impl VersionState for RootState {
    fn lsn(&self) -> Lsn {
        self.lsn
    }
}

impl PageState {
    /// The state of a page that is there.
    pub fn present(entry: PageEntry) -> Self {
        Self { numbers: Numbers::new(&entry), entry }
    }

    /// The trace of a page that batch `lsn` deleted. The page's key stays with it, to be found in the index.
    pub fn gone(before: &Self, lsn: Lsn) -> Self {
        let mut entry = before.entry.clone();
        (entry.epoch, entry.lsn) = (GONE, lsn);
        Self::present(entry)
    }

    /// The page as the first batch of this version left it, if it is there.
    pub fn page(&self) -> Option<&PageEntry> {
        (self.entry.epoch != GONE).then_some(&self.entry)
    }

    /// The page, or the page as it was before it was deleted.
    pub fn last(&self) -> &PageEntry {
        &self.entry
    }

    /// The page as it is at a visible Lsn or a view's that this version has reached.
    pub fn seen(&self, at: Lsn) -> Result<SeenPage<'_>, Unseen> {
        let entry = self.page().ok_or(Unseen::Absent)?;
        let (lsn, epoch) = self.numbers.at(at)?;
        Ok(SeenPage { entry, lsn, epoch })
    }

    /// The newest batch that changed the page. For the writer.
    pub fn newest_lsn(&self) -> Lsn {
        self.numbers.newest().1
    }

    /// Gives the page newer numbers in place of those before its newest ones. No reader needs these any more,
    /// because all readers and views have reached the newest. For the writer.
    pub fn advance(&self, lsn: Lsn, epoch: Epoch) {
        let (newest, _) = self.numbers.newest();
        self.numbers.0[1 - newest].write(lsn, epoch);
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
