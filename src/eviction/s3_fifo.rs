//! S3-FIFO: three queues and no order of use.
//!
//! A page begins in a small queue, with a tenth of the bytes. At its end a page that was used since goes on
//! to the main queue, and any other one leaves, so that a scan passes through without driving out what is
//! used again. Ids of pages that left so are remembered: one that comes back soon begins in the main queue.
//! There a page that was used goes round once more for each use, up to three.
//!
//! After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023).

use std::collections::{HashMap, HashSet, VecDeque};

use remanent_format::PageId;

use super::EvictionPolicy;

/// The part of the bytes that the small queue has, one in this number.
const SMALL_SHARE: u64 = 10;
/// The most uses that count.
const USES_MAX: u8 = 3;
/// Uses in the small queue from which on a page goes on to the main queue. Bringing a page to where it is
/// used counts as its arrival, and so one more use is enough.
const USES_TO_STAY: u8 = 1;
/// Entries of pages that left may stay in a queue up to this number, beyond one for each page that is there.
pub(super) const STALE_MAX: usize = 64;

/// Pages in three first-in-first-out queues. It keeps what is used again and again apart from what is used
/// once, which a scan of many pages does not change.
#[derive(Debug, Default)]
pub struct S3Fifo {
    pub(super) pages: HashMap<PageId, Resident>,
    pub(super) small: Fifo,
    pub(super) main: Fifo,
    pub(super) ghosts: Ghosts,
    /// The number of the last arrival.
    arrivals: u64,
}

/// A page that is there.
#[derive(Debug)]
pub(super) struct Resident {
    pub len: u64,
    uses: u8,
    in_main: bool,
    /// The number of its arrival. An entry of a queue with another number is of an earlier one.
    arrival: u64,
}

/// A queue of pages. Those that left stay in it as entries that nothing refers to.
#[derive(Debug, Default)]
pub(super) struct Fifo {
    pub entries: VecDeque<(PageId, u64)>,
    /// Pages in it, and their bytes.
    pub count: usize,
    pub bytes: u64,
}

/// Pages that left the small queue, the newest last.
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
    /// Remembers a page, and no more pages than `limit`.
    fn remember(&mut self, page: PageId, limit: usize) {
        if self.known.insert(page) {
            self.order.push_back(page);
        }
        while self.order.len() > limit {
            let oldest = self.order.pop_front();
            oldest.iter().for_each(|page| _ = self.known.remove(page));
        }
    }

    /// Whether the page is remembered. It is forgotten; its place in the order stays until its turn comes.
    fn recall(&mut self, page: PageId) -> bool {
        self.known.remove(&page)
    }
}

impl S3Fifo {
    fn queue(&mut self, in_main: bool) -> &mut Fifo {
        if in_main { &mut self.main } else { &mut self.small }
    }

    /// The next page of a queue that is still there, taken out of it.
    fn next_of(&mut self, in_main: bool) -> Option<(PageId, Resident)> {
        loop {
            let (page, arrival) = self.queue(in_main).entries.pop_front()?;
            let is_there =
                self.pages.get(&page).is_some_and(|it| it.arrival == arrival && it.in_main == in_main);
            if is_there {
                let resident = self.pages.remove(&page).expect("it is there");
                self.queue(in_main).forget(resident.len);
                return Some((page, resident));
            }
        }
    }

    fn enter(&mut self, page: PageId, resident: Resident) {
        self.queue(resident.in_main).push(page, &resident);
        self.pages.insert(page, resident);
    }

    /// The page that leaves the small queue; those that were used go to the main queue on the way.
    fn victim_of_small(&mut self) -> Option<PageId> {
        loop {
            let (page, resident) = self.next_of(false)?;
            if resident.uses < USES_TO_STAY {
                let limit = self.pages.len().max(1);
                self.ghosts.remember(page, limit);
                return Some(page);
            }
            self.enter(page, Resident { uses: 0, in_main: true, ..resident });
        }
    }

    /// The page that leaves the main queue; those that were used go round.
    fn victim_of_main(&mut self) -> Option<PageId> {
        loop {
            let (page, resident) = self.next_of(true)?;
            if resident.uses == 0 {
                return Some(page);
            }
            self.enter(page, Resident { uses: resident.uses - 1, ..resident });
        }
    }

    /// Takes out entries of pages that left, where there are too many of them.
    fn tidy(&mut self, in_main: bool) {
        let queue = if in_main { &mut self.main } else { &mut self.small };
        if queue.entries.len() > 2 * queue.count + STALE_MAX {
            let pages = &self.pages;
            queue.entries.retain(|(page, arrival)| {
                pages.get(page).is_some_and(|it| it.arrival == *arrival && it.in_main == in_main)
            });
        }
    }
}

impl EvictionPolicy for S3Fifo {
    fn arrived(&mut self, page: PageId, len: u64) {
        self.left(page);
        self.arrivals += 1;
        let in_main = self.ghosts.recall(page);
        self.enter(page, Resident { len, uses: 0, in_main, arrival: self.arrivals });
    }

    fn used(&mut self, page: PageId) {
        if let Some(resident) = self.pages.get_mut(&page) {
            resident.uses = (resident.uses + 1).min(USES_MAX);
        }
    }

    fn left(&mut self, page: PageId) {
        if let Some(resident) = self.pages.remove(&page) {
            self.queue(resident.in_main).forget(resident.len);
            self.tidy(resident.in_main);
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
