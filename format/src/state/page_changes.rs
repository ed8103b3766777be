//! Summaries of what consecutive batches change in each page.
//!
//! Most batches of a long log only change bytes of pages. For such batches, the page table needs just three
//! facts about each page: how many batches changed it, which one was last, and how far into the page they
//! reach. Several threads summarize batches in parallel, which leaves little work for the thread that follows
//! the log.

use crate::frame::FrameHeader;
use crate::ids::{Lsn, PageId};
use crate::op::{ByteChange, claimed_ops, for_each_byte_change};

/// The combined change of several batches to one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageChange {
    /// The page's id.
    pub page: PageId,
    /// Number of batches that change the page.
    pub batches: u64,
    /// The last batch that changes it.
    pub lsn: Lsn,
    /// The highest end of a changed range, in bytes from the start of the page.
    pub end: u64,
}

/// A summary of consecutive batches that only change bytes of pages.
#[derive(Debug, PartialEq, Eq)]
pub struct PageChanges {
    /// The first batch.
    pub first: Lsn,
    /// The last batch.
    pub last: Lsn,
    /// Number of batches.
    pub batches: usize,
    /// Total length of their frames in bytes.
    pub frame_bytes: u64,
    /// The changed pages, in ascending order of ids.
    pub pages: Vec<PageChange>,
}

impl PageChanges {
    /// Summarizes batches from the first one on, up to one that does more than change bytes. Returns `None`
    /// if the first one does. A batch that is malformed, or for which there is no memory, also ends the
    /// summary.
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

    /// Adds the changes of a batch without combining them. Returns false, with nothing added, if the batch
    /// does more than change bytes.
    fn add(&mut self, lsn: Lsn, payload: &[u8]) -> bool {
        let before = self.pages.len();
        let has_room = self.pages.try_reserve(claimed_ops(payload)).is_ok();
        let is_whole = has_room
            && for_each_byte_change(payload, |ByteChange { page, offset, len }| {
                // An end past every page's limit is rejected later, like that of a single change.
                self.pages.push(PageChange { page, batches: 1, lsn, end: offset.saturating_add(len) });
            });
        if !is_whole {
            self.pages.truncate(before);
        }
        is_whole
    }

    /// Combines the changes of each page.
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
        // The summaries are kept until another thread takes them.
        self.pages.shrink_to_fit();
    }
}
