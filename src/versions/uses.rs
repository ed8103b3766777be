//! Records the uses of pages for eviction policies: the current place of each page, and reads of pages.
//!
//! The writer of versions records all changes of pages, in batch order. Any thread records reads. A read is not
//! recorded if another thread is recording a read at the same time. If too many reads are unprocessed, older records
//! are dropped. A record is only a hint, and must not delay a read.

use std::collections::VecDeque;

use remanent_format::{PageId, Place};

use crate::base::cache_padded::CachePadded;
use crate::base::sync::Mutex;

/// The number of lists of reads. With several lists, threads that read different pages usually use different lists.
const READ_LISTS: usize = 8;
/// The maximum number of reads in a list. In a full list, each new read replaces the oldest read.
const READS_MAX: usize = 4096;

/// A change or a read of a page, recorded for eviction policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// A batch created, changed, moved or deleted the page. Contains the page's place and length in bytes after the
    /// batch, or `None` if the page is deleted.
    Changed(PageId, Option<(Place, u64)>),
    /// The page was read.
    Read(PageId),
}

/// The queue of changes and reads that eviction policies have not processed yet.
#[derive(Default)]
pub(crate) struct PageUses {
    changes: CachePadded<Mutex<Vec<PageUse>>>,
    reads: [CachePadded<Mutex<VecDeque<PageId>>>; READ_LISTS],
}

impl PageUses {
    pub fn changed(&self, page: PageId, at: Option<(Place, u64)>) {
        self.changes.lock().push(PageUse::Changed(page, at));
    }

    /// Records a read of a page. Drops the record if another thread is recording a read in the same list.
    pub fn read(&self, page: PageId) {
        let Some(mut reads) = self.reads[page.0 as usize % READ_LISTS].try_lock() else { return };
        if reads.len() == READS_MAX {
            reads.pop_front();
        }
        reads.push_back(page);
    }

    /// Removes and returns all records. Changes come first, so that a page is known before a read of the page is
    /// processed.
    pub fn take(&self) -> Vec<PageUse> {
        let mut taken = std::mem::take(&mut *self.changes.lock());
        for reads in &self.reads {
            taken.extend(std::mem::take(&mut *reads.lock()).into_iter().map(PageUse::Read));
        }
        taken
    }

    /// Returns the number of changes that were not processed yet.
    pub fn waiting(&self) -> usize {
        self.changes.lock().len()
    }
}
