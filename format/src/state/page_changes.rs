//! Summaries of the changes that consecutive batches make to pages.
//!
//! Most batches of a long log only change bytes of pages. From such batches, the page table needs three numbers per
//! page: the number of batches that changed the page, the last of these batches, and the end of the last changed range.
//! Several threads summarize batches in parallel, so that the thread that follows the log has little work.

use crate::frame::FrameHeader;
use crate::ids::{Lsn, PageId};
use crate::op::{ByteChange, claimed_ops, for_each_byte_change};

/// The combined changes of several batches to one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageChange {
    /// The id of the page.
    pub page: PageId,
    /// Number of batches that change the page.
    pub batches: u64,
    /// The last batch that changes the page.
    pub lsn: Lsn,
    /// The highest end of a changed range, in bytes from the start of the page.
    pub end: u64,
}

/// A summary of consecutive batches. Each of these batches only changes bytes of pages.
#[derive(Debug, PartialEq, Eq)]
pub struct PageChanges {
    /// The first batch of the summary.
    pub first: Lsn,
    /// The last batch of the summary.
    pub last: Lsn,
    /// Number of batches in the summary.
    pub batches: usize,
    /// Total length of the batches' frames in bytes.
    pub frame_bytes: u64,
    /// The changed pages, in the order of their ids.
    pub pages: Vec<PageChange>,
}

impl PageChanges {
    /// Summarizes the leading batches that only change bytes of pages. Returns `None` if the first batch does anything
    /// else. An invalid batch and a failed allocation also end the summary.
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

    /// Appends the changes of a batch. Returns false, with nothing appended, if the batch does anything other than
    /// change bytes.
    fn add(&mut self, lsn: Lsn, payload: &[u8]) -> bool {
        let before = self.pages.len();
        let has_room = self.pages.try_reserve(claimed_ops(payload)).is_ok();
        let is_whole = has_room
            && for_each_byte_change(payload, |ByteChange { page, offset, len }| {
                // The page table later rejects an end that exceeds the limit of a page.
                self.pages.push(PageChange { page, batches: 1, lsn, end: offset.saturating_add(len) });
            });
        if !is_whole {
            self.pages.truncate(before);
        }
        is_whole
    }

    /// Combines all changes of each page into one change.
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
        // Another thread uses the summaries later, so release unused memory.
        self.pages.shrink_to_fit();
    }
}
