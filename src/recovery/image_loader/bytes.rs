//! Bringing pages that the host has to their memory, whose images were just written.
//!
//! Pieces of a few megabytes go through staging, several at once, by several threads. So staging is bounded,
//! however long a page or a batch is: a GPU pins new staging at 1.5 GB/s, and a batch of 512 MiB that was
//! staged whole took longer for that than for its way over the bus.
//!
//! Where the bytes cross a bus, the device sums them (I12). If a sum is not the image's, the image decides,
//! as for pages that are loaded.

use std::ops::Range;

use super::copies::{Part, PendingCopies};
use super::{ImageLoader, RUN_BYTES};
use crate::base::allocation::push;
use crate::base::parallel;
use crate::device::Span;
use crate::error::Result;
use crate::images::read::ImageRequest;

/// A page with its bytes.
pub(crate) type PageBytes<'a> = (ImageRequest, &'a [u8]);

/// A range of a page, by the page's index: it goes up with others.
type PieceRange = (usize, Range<u64>);

impl ImageLoader<'_> {
    /// Brings the bytes of pages to their memory, and proves them there, as [`load`](Self::load) does.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_bytes(&self, pages: &[PageBytes<'_>], threads: usize) -> Result<()> {
        let pieces = pieces(pages)?;
        let copies = PendingCopies::new(self);
        let load = |_: &mut (), index: usize| self.load_piece(pages, &pieces[index], &copies);
        let loaded = parallel::map_indexed(threads, pieces.len(), || (), load);
        // Also after an error: a caller that gives the memory back must know that no copy writes to it.
        copies.finish_but(0)?;
        loaded?;
        self.load_again(copies.unlike()?, threads)
    }

    fn load_piece(
        &self,
        pages: &[PageBytes<'_>],
        piece: &[PieceRange],
        copies: &PendingCopies<'_>,
    ) -> Result<()> {
        let len: u64 = piece.iter().map(|(_, range)| range.end - range.start).sum();
        let mut staged = self.staging.take(len as usize)?;
        let (mut parts, mut at) = (Vec::new(), 0);
        for (index, range) in piece {
            let (of, bytes) = pages[*index];
            let bytes = &bytes[range.start as usize..range.end as usize];
            staged[at..at + bytes.len()].copy_from_slice(bytes);
            let target = (self.target)(of.page)?;
            assert!(target.len == of.len); // I10: the memory is as long as the page.
            let target = Span { offset: target.offset + range.start, len: bytes.len() as u64, ..target };
            push(&mut parts, Part { at, target, of, offset: range.start })?;
            at += bytes.len();
        }
        copies.upload(staged, &parts)
    }
}

/// Cuts pages into pieces of bounded length: short pages together, a long one in several.
fn pieces(pages: &[PageBytes<'_>]) -> Result<Vec<Vec<PieceRange>>> {
    let (mut pieces, mut piece, mut free) = (Vec::new(), Vec::new(), RUN_BYTES);
    for (index, (of, _)) in pages.iter().enumerate() {
        let mut at = 0;
        while at < of.len {
            let end = of.len.min(at + free);
            push(&mut piece, (index, at..end))?;
            (free, at) = (free - (end - at), end);
            if free == 0 {
                push(&mut pieces, std::mem::take(&mut piece))?;
                free = RUN_BYTES;
            }
        }
    }
    if !piece.is_empty() {
        push(&mut pieces, piece)?;
    }
    Ok(pieces)
}
