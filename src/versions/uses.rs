//! What policies hear of pages: where each lies now, and which are used.
//!
//! Changes of pages are noted by the writer of versions, in the order of batches, and none is left out. Reads
//! are noted by any thread: where another thread notes one just now, or very many wait to be heard, some are
//! left out, for a hint must not hold up a read.

use std::collections::VecDeque;

use remanent_format::{PageId, Place};

use crate::base::own_line::OwnLine;
use crate::base::sync::Mutex;

/// Threads that read different pages mostly note that in different lists.
const READ_LISTS: usize = 8;
/// Reads that wait in a list; the oldest is left out for one more.
const READS_MAX: usize = 4096;

/// A page that changed or was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// A batch made, changed, moved or deleted the page. It has this place and length after it, if it is
    /// there.
    Changed(PageId, Option<(Place, u64)>),
    /// The page was read.
    Read(PageId),
}

/// Changes and reads that no policy has heard of yet.
#[derive(Default)]
pub(crate) struct PageUses {
    changes: OwnLine<Mutex<Vec<PageUse>>>,
    reads: [OwnLine<Mutex<VecDeque<PageId>>>; READ_LISTS],
}

impl PageUses {
    /// Notes what a batch did to a page.
    pub fn changed(&self, page: PageId, at: Option<(Place, u64)>) {
        self.changes.lock().push(PageUse::Changed(page, at));
    }

    /// Notes that a page was read.
    pub fn read(&self, page: PageId) {
        let Some(mut reads) = self.reads[page.0 as usize % READ_LISTS].try_lock() else { return };
        if reads.len() == READS_MAX {
            reads.pop_front();
        }
        reads.push_back(page);
    }

    /// Takes all that was noted: changes first, so that a page is known when a read of it is heard.
    pub fn take(&self) -> Vec<PageUse> {
        let mut taken = std::mem::take(&mut *self.changes.lock());
        for reads in &self.reads {
            taken.extend(std::mem::take(&mut *reads.lock()).into_iter().map(PageUse::Read));
        }
        taken
    }

    /// Number of changes that wait to be heard.
    pub fn waiting(&self) -> usize {
        self.changes.lock().len()
    }
}
