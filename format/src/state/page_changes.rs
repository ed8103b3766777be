//! What many batches in a row change, summed up for each page.
//!
//! Most batches of a long log change bytes of pages and do nothing else. Of each page only three things of
//! them matter to the table: how many batches changed it, which one last, and how far they reach into it.
//! Several threads sum that up, each for batches of its own, and leave little to the one that follows the
//! log.

use crate::frame::FrameHeader;
use crate::ids::{Lsn, PageId};
use crate::op::{ByteChange, claimed_ops, each_byte_change};

/// What some batches in a row change of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageChange {
    /// The page's id.
    pub page: PageId,
    /// How many of the batches change it.
    pub batches: u64,
    /// The last one that does.
    pub lsn: Lsn,
    /// The end of the furthest range that they change, in bytes from the page's start.
    pub end: u64,
}

/// Batches in a row that change bytes of pages and do nothing else.
#[derive(Debug, PartialEq, Eq)]
pub struct PageChanges {
    /// The first of the batches.
    pub first: Lsn,
    /// The last one.
    pub last: Lsn,
    /// How many they are.
    pub batches: usize,
    /// Bytes of their frames.
    pub frame_bytes: u64,
    /// The pages that they change, ascending.
    pub pages: Vec<PageChange>,
}

impl PageChanges {
    /// Sums up as many of these batches as change bytes and do nothing else, from the first one on; `None` if
    /// the first does not. A batch that is not well-formed, or for which there is no memory, ends them too.
    pub fn of<'b>(batches: impl Iterator<Item = (&'b FrameHeader, &'b [u8])>) -> Option<Self> {
        let mut changes: Option<Self> = None;
        for (header, payload) in batches {
            let lsn = header.lsn;
            let changes = changes.get_or_insert_with(|| Self::none_from(lsn));
            if !changes.add(lsn, payload) {
                break;
            }
            changes.last = lsn;
            changes.batches += 1;
            changes.frame_bytes += header.frame_len();
        }
        let mut changes = changes.filter(|changes| changes.batches > 0)?;
        changes.sum_up();
        Some(changes)
    }

    fn none_from(first: Lsn) -> Self {
        Self { first, last: first, batches: 0, frame_bytes: 0, pages: Vec::new() }
    }

    /// Adds the changes of a batch, each as one of its own; says whether there is no more to the batch than
    /// these. If there is, nothing is added.
    fn add(&mut self, lsn: Lsn, payload: &[u8]) -> bool {
        let before = self.pages.len();
        let has_room = self.pages.try_reserve(claimed_ops(payload)).is_ok();
        let is_whole = has_room
            && each_byte_change(payload, |ByteChange { page, offset, len }| {
                // An end that no page can have is refused later, as the end of one change is.
                self.pages.push(PageChange { page, batches: 1, lsn, end: offset.saturating_add(len) });
            });
        if !is_whole {
            self.pages.truncate(before);
        }
        is_whole
    }

    /// Makes one change of all those of a page.
    fn sum_up(&mut self) {
        self.pages.sort_unstable_by_key(|change| (change.page, change.lsn));
        self.pages.dedup_by(|next, sum| {
            let is_same = next.page == sum.page;
            if is_same {
                sum.batches += u64::from(next.lsn > sum.lsn);
                (sum.lsn, sum.end) = (next.lsn, sum.end.max(next.end));
            }
            is_same
        });
        // They wait for the thread that takes them.
        self.pages.shrink_to_fit();
    }
}
