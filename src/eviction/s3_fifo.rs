//! S3-FIFO: an eviction policy with three queues, which keeps no order of use.
//!
//! A page begins in a small queue, which is limited to a tenth of the bytes. At the end of this queue, a page that was
//! used since its arrival moves to the main queue, and any other page is evicted. Thus a scan of many pages does not
//! evict pages that are used repeatedly. The ids of pages evicted from the small queue are remembered. A remembered
//! page that returns soon begins in the main queue. A used page is reinserted into the main queue once per use, up to
//! three times.
//!
//! After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023).

use std::collections::{HashMap, HashSet, VecDeque};

use remanent_format::PageId;

use super::EvictionPolicy;

/// The small queue is limited to the total number of bytes divided by this value.
const SMALL_SHARE: u64 = 10;
/// The maximum number of uses that are counted for a page.
const USES_MAX: u8 = 3;
/// The number of uses after which a page moves from the small queue to the main queue. The use that brings a page to
/// the place counts as its arrival, so one more use suffices.
const USES_TO_STAY: u8 = 1;
/// The maximum number of stale entries that a queue may contain in addition to one for each resident page.
pub(super) const STALE_MAX: usize = 64;

/// An eviction policy with three first-in, first-out queues. The policy separates pages that are used repeatedly from
/// pages that are used once, so that a scan of many pages does not evict the repeatedly used pages.
#[derive(Debug, Default)]
pub struct S3Fifo {
    pub(super) pages: HashMap<PageId, Resident>,
    pub(super) small: Fifo,
    pub(super) main: Fifo,
    pub(super) ghosts: Ghosts,
    /// The number of arrivals so far, from which arrivals are numbered.
    arrivals: u64,
}

/// A page in the place.
#[derive(Debug)]
pub(super) struct Resident {
    pub len: u64,
    uses: u8,
    is_in_main: bool,
    /// The number of the page's arrival. A queue entry with another number belongs to an earlier arrival.
    arrival: u64,
}

/// A first-in, first-out queue of pages. Pages that left the place remain in the queue as stale entries.
#[derive(Debug, Default)]
pub(super) struct Fifo {
    pub entries: VecDeque<(PageId, u64)>,
    /// The number of resident pages in the queue.
    pub count: usize,
    /// The total length in bytes of the resident pages in the queue.
    pub bytes: u64,
}

/// The ids of pages that were evicted from the small queue, from oldest to newest.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    pub order: VecDeque<PageId>,
    known: HashSet<PageId>,
}

impl Fifo {
    fn push(&mut self, page: PageId, resident: &Resident) {
        self.entries.push_back((page, resident.arrival));
        self.count += 1;
        self.bytes += resident.len;
    }

    fn forget(&mut self, len: u64) {
        self.count -= 1;
        self.bytes -= len;
    }
}

impl Ghosts {
    /// Remembers a page. Forgets the oldest remembered pages in excess of `limit`.
    fn remember(&mut self, page: PageId, limit: usize) {
        if self.known.insert(page) {
            self.order.push_back(page);
        }
        while self.order.len() > limit {
            let oldest = self.order.pop_front();
            oldest.iter().for_each(|page| _ = self.known.remove(page));
        }
    }

    /// Returns whether the page is remembered, and forgets the page. The page's entry in `order` is removed later, when
    /// it reaches the front.
    fn recall(&mut self, page: PageId) -> bool {
        self.known.remove(&page)
    }
}

impl S3Fifo {
    fn queue(&mut self, is_in_main: bool) -> &mut Fifo {
        if is_in_main { &mut self.main } else { &mut self.small }
    }

    /// Removes and returns the next page of a queue, skipping stale entries.
    fn next_of(&mut self, is_in_main: bool) -> Option<(PageId, Resident)> {
        loop {
            let (page, arrival) = self.queue(is_in_main).entries.pop_front()?;
            let is_there =
                self.pages.get(&page).is_some_and(|it| it.arrival == arrival && it.is_in_main == is_in_main);
            if is_there {
                let resident = self.pages.remove(&page).expect("it is there");
                self.queue(is_in_main).forget(resident.len);
                return Some((page, resident));
            }
        }
    }

    fn enter(&mut self, page: PageId, resident: Resident) {
        self.queue(resident.is_in_main).push(page, &resident);
        self.pages.insert(page, resident);
    }

    /// Returns the page to evict from the small queue, after moving used pages to the main queue.
    fn victim_of_small(&mut self) -> Option<PageId> {
        loop {
            let (page, resident) = self.next_of(false)?;
            if resident.uses < USES_TO_STAY {
                let limit = self.pages.len().max(1);
                self.ghosts.remember(page, limit);
                return Some(page);
            }
            self.enter(page, Resident { uses: 0, is_in_main: true, ..resident });
        }
    }

    /// Returns the page to evict from the main queue, after reinserting used pages.
    fn victim_of_main(&mut self) -> Option<PageId> {
        loop {
            let (page, resident) = self.next_of(true)?;
            if resident.uses == 0 {
                return Some(page);
            }
            self.enter(page, Resident { uses: resident.uses - 1, ..resident });
        }
    }

    /// Removes stale entries from a queue if there are too many.
    fn tidy(&mut self, is_in_main: bool) {
        let queue = if is_in_main { &mut self.main } else { &mut self.small };
        if queue.entries.len() > 2 * queue.count + STALE_MAX {
            let pages = &self.pages;
            queue.entries.retain(|(page, arrival)| {
                pages.get(page).is_some_and(|it| it.arrival == *arrival && it.is_in_main == is_in_main)
            });
        }
    }
}

impl EvictionPolicy for S3Fifo {
    fn arrived(&mut self, page: PageId, len: u64) {
        self.left(page);
        self.arrivals += 1;
        let is_in_main = self.ghosts.recall(page);
        self.enter(page, Resident { len, uses: 0, is_in_main, arrival: self.arrivals });
    }

    fn used(&mut self, page: PageId) {
        if let Some(resident) = self.pages.get_mut(&page) {
            resident.uses = (resident.uses + 1).min(USES_MAX);
        }
    }

    fn left(&mut self, page: PageId) {
        if let Some(resident) = self.pages.remove(&page) {
            self.queue(resident.is_in_main).forget(resident.len);
            self.tidy(resident.is_in_main);
        }
    }

    fn victim(&mut self) -> Option<PageId> {
        let all = self.small.bytes + self.main.bytes;
        let small_first = self.small.bytes * SMALL_SHARE >= all || self.main.count == 0;
        if small_first {
            self.victim_of_small().or_else(|| self.victim_of_main())
        } else {
            self.victim_of_main().or_else(|| self.victim_of_small())
        }
    }
}
