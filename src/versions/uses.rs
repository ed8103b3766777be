//! Page uses for eviction policies: the current place of each page, and which pages are used.
//!
//! The writer of versions records all changes of pages, in batch order. Any thread records reads; some are
//! dropped if another thread is recording one at the same time or if too many are unprocessed, because a hint
//! must not delay a read.

use std::collections::VecDeque;

use remanent_format::{PageId, Place};

use crate::base::cache_padded::CachePadded;
use crate::base::sync::Mutex;

/// The number of lists of reads, so that threads which read different pages usually use different lists.
const READ_LISTS: usize = 8;
/// The maximum number of reads in a list, after which the oldest is dropped for each new one.
const READS_MAX: usize = 4096;

/// A page that was changed or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// A batch created, changed, moved or deleted the page. Afterwards it has this place and length; `None`
    /// if it is deleted.
    Changed(PageId, Option<(Place, u64)>),
    /// The page was read.
    Read(PageId),
}

/// Changes and reads that the policies have not processed yet.
#[derive(Default)]
pub(crate) struct PageUses {
    changes: CachePadded<Mutex<Vec<PageUse>>>,
    reads: [CachePadded<Mutex<VecDeque<PageId>>>; READ_LISTS],
}

impl PageUses {
    /// Records a change of a page by a batch.
    pub fn changed(&self, page: PageId, at: Option<(Place, u64)>) {
        self.changes.lock().push(PageUse::Changed(page, at));
    }

    /// Records a read of a page.
    pub fn read(&self, page: PageId) {
        let Some(mut reads) = self.reads[page.0 as usize % READ_LISTS].try_lock() else { return };
        if reads.len() == READS_MAX {
            reads.pop_front();
        }
        reads.push_back(page);
    }

    /// Takes all records, changes first, so that a page is known when a read of it is processed.
    pub fn take(&self) -> Vec<PageUse> {
        let mut taken = std::mem::take(&mut *self.changes.lock());
        for reads in &self.reads {
            taken.extend(std::mem::take(&mut *reads.lock()).into_iter().map(PageUse::Read));
        }
        taken
    }

    /// Returns the number of unprocessed changes.
    pub fn waiting(&self) -> usize {
        self.changes.lock().len()
    }
}
