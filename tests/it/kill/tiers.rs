//! Workers whose store has tiers that are too small for its pages. Commits evict pages, and the worker
//! constantly demotes, promotes and prefetches pages.
//!
//! The store moves pages with its own batches, so the number of a batch in the workload is not its Lsn. The
//! root contains the number.

use remanent::options::MemoryOptions;
use remanent::tiers::Tiers;
use remanent::{Error, Lsn, Metadata, Options, PageId, Place, Result, Store, Value};
use remanent_format::PageTable;

use super::worker::Work;
use super::workload::{Random, Shape, place};

/// Length of the first tier, about half of the total length of all pages, and of the tier below it. Both are
/// longer than the longest page.
const FIRST_BYTES: u64 = 64 << 10;
const SECOND_BYTES: u64 = 32 << 10;

fn places() -> [Place; 3] {
    [place(), Place::Pinned, Place::Disk]
}

/// Returns the options with tiers.
pub fn with_tiers(options: Options) -> Options {
    let [first, second, _] = places();
    let memory = MemoryOptions::new().budget(first, FIRST_BYTES).budget(second, SECOND_BYTES);
    options.memory(memory).tiers(Tiers::new(places()))
}

/// Returns the number of the newest batch of the workload, from the root.
pub fn number(root: &Metadata) -> Lsn {
    match root.get("batch") {
        Some(Value::U64(number)) => Lsn(*number),
        other => {
            assert_eq!(other, None, "the root says its batch");
            Lsn(0)
        }
    }
}

/// Asserts that each page of an opened store is in the place that the log states or in a lower tier, and that
/// no move up to batch `moved` is lost. `logged` is the table that the pure rebuild computed.
pub fn check_places(logged: &PageTable, store: &Store, moved: Lsn, at: &str) {
    assert!(logged.lsn() >= moved, "{moved} moved pages, {} is there; {at}", logged.lsn());
    let rank = |place: Place| places().iter().position(|of| *of == place);
    for info in store.pages().unwrap() {
        let was = logged.get(info.page).unwrap_or_else(|| panic!("{} is not in the log, {at}", info.page));
        let ranks = (rank(info.place).unwrap(), rank(was.place).unwrap());
        assert!(ranks.0 >= ranks.1, "page {} in {}, logged in {}, {at}", info.page, info.place, was.place);
    }
}

impl Work<'_> {
    /// Moves some pages. The number of a batch selects the pages.
    pub fn move_some(&self, number: Lsn) -> Result<()> {
        let mut random = Random(!number.0);
        let pages: Vec<PageId> = self.shape().into_keys().collect();
        if pages.is_empty() {
            return Ok(());
        }
        let picked = (0..1 + random.below(3)).map(|_| pages[random.below(pages.len() as u64) as usize]);
        let picked: Vec<PageId> = picked.collect();
        self.moved(match random.below(5) {
            0 => self.store.promote(&picked),
            1 => self.store.demote(&picked).map(|()| None),
            2 => self.store.ensure(&picked, Place::Disk),
            3 => self.store.prefetch(&picked, place()).and_then(|coming| coming.wait()).map(|()| None),
            _ => self.store.prefetch(&picked, place()).and_then(|coming| coming.cancel()).map(|()| None),
        })
    }

    /// Demotes all pages by one tier, or no page if another thread has just deleted one.
    pub fn demote_all(&self) -> Result<()> {
        let pages: Vec<PageId> = self.shape().into_keys().collect();
        self.moved(self.store.demote(&pages).map(|()| None))
    }

    /// Promotes some pages to the first tier.
    pub fn promote_some(&self) -> Result<()> {
        self.moved(self.store.promote(&some(self.shape())))
    }

    /// Prefetches some pages in another thread.
    pub fn prefetch_some(&self) -> Result<()> {
        let coming = self.store.prefetch(&some(self.shape()), place())?;
        self.moved(coming.wait().map(|()| None))
    }

    /// Records a completed move on the board. The move may have failed because another thread first deleted a
    /// page or used the memory.
    fn moved(&self, moved: Result<Option<remanent::Position>>) -> Result<()> {
        match moved {
            Ok(position) => {
                position.iter().for_each(|position| self.board.set_moved(position.lsn));
                Ok(())
            }
            Err(Error::UnknownPage { .. } | Error::OverBudget { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Returns pages whose total length is half of the first tier.
fn some(shape: Shape) -> Vec<PageId> {
    let mut left = FIRST_BYTES / 2;
    let fits = shape.into_iter().filter(|(_, len)| {
        let fits = *len <= left;
        left -= if fits { *len } else { 0 };
        fits
    });
    fits.map(|(page, _)| page).collect()
}
