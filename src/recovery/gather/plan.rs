//! Plans which rank loads which pages, and the order in which the bytes of the pages are exchanged.
//!
//! The pages are divided in page order into one share for each rank, of about the same number of bytes. The pages of a
//! share, one after another, are the rank's *stream*. Round `j` exchanges bytes `j * L..(j + 1) * L` of each stream, so
//! a long page may take several rounds. The plan depends only on the pages and the number of ranks, so all ranks with
//! the same pages make the same plan.

use std::ops::Range;

use crate::base::allocation::{make_room, push};
use crate::device::{Digest, digest_key, digest_of_bytes};
use crate::error::Result;
use crate::images::read::ImageRequest;

/// The alignment in bytes of pages in a stream. It allows a GPU to copy pages in whole vectors.
const ALIGN: u64 = 256;

/// The pages to exchange, and the share of each rank.
pub(super) struct GatherPlan {
    /// The images of the pages, in page order.
    images: Vec<ImageRequest>,
    /// The offset of each page in the stream of its rank.
    starts: Vec<u64>,
    /// The pages of each rank, by their positions in `images`.
    shares: Vec<Range<usize>>,
    /// The length of the longest stream.
    stream_len: u64,
    /// The total length of all pages.
    bytes: u64,
}

/// A range of a page that a round exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RoundRange {
    /// The page, by its position in the plan.
    pub page: usize,
    /// The offset of the range in its page.
    pub offset: u64,
    /// The offset of the range in the rank's part of the round.
    pub at: u64,
    pub len: u64,
    /// Whether the range ends at the end of the page.
    pub is_last: bool,
}

impl GatherPlan {
    /// Creates the plan for pages that are not empty.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(mut images: Vec<ImageRequest>, ranks: u32) -> Result<Self> {
        images.sort_unstable_by_key(|image| image.page);
        let bytes: u64 = images.iter().map(|image| image.len).sum();
        let (mut starts, mut shares) = (Vec::new(), Vec::new());
        make_room(&mut starts, images.len())?;
        make_room(&mut shares, ranks as usize)?;
        let (mut next, mut before, mut stream_len) = (0, 0, 0);
        for rank in 0..u128::from(ranks) {
            // The share ends with the page whose middle is beyond the rank's part of all bytes.
            let end = (u128::from(bytes) * (rank + 1) / u128::from(ranks)) as u64;
            let (first, mut at) = (next, 0_u64);
            while let Some(image) = images.get(next).filter(|image| before + image.len / 2 < end) {
                starts.push(at);
                at = (at + image.len).next_multiple_of(ALIGN);
                before += image.len;
                next += 1;
            }
            stream_len = stream_len.max(at);
            shares.push(first..next);
        }
        assert!(next == images.len(), "the last share ends with the last page");
        Ok(Self { images, starts, shares, stream_len, bytes })
    }

    /// Returns a digest of the ids, lengths and checksums of all pages. Ranks with equal digests have the same plan and
    /// the same page contents.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn fingerprint(&self) -> Result<Digest> {
        let mut rows = Vec::new();
        make_room(&mut rows, 20 * self.images.len())?;
        for ImageRequest { page, len, image } in &self.images {
            rows.extend_from_slice(&page.0.to_le_bytes());
            rows.extend_from_slice(&len.to_le_bytes());
            rows.extend_from_slice(&image.raw_crc.to_le_bytes());
        }
        // The ranks trust each other, so the key need not be secret.
        digest_of_bytes(&rows, &digest_key(&std::array::from_fn(|at| (29 * at + 7) as u8))?)
    }

    pub fn images(&self) -> &[ImageRequest] {
        &self.images
    }

    /// Returns the positions in the plan of the pages that a rank loads.
    pub fn share(&self, rank: u32) -> Range<usize> {
        self.shares[rank as usize].clone()
    }

    /// Returns the total length of all pages in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the length of the longest stream in bytes.
    pub fn stream_len(&self) -> u64 {
        self.stream_len
    }

    /// Returns the offset of a page in its stream.
    pub fn start_of(&self, page: usize) -> u64 {
        self.starts[page]
    }

    /// Returns the offset in its stream at which a page ends.
    pub fn end_of(&self, page: usize) -> u64 {
        self.starts[page] + self.images[page].len
    }

    /// Returns the number of rounds that exchange `round_len` bytes of each stream.
    pub fn rounds(&self, round_len: u64) -> u64 {
        self.stream_len.div_ceil(round_len)
    }

    /// Returns the ranges of a rank's pages that are exchanged in a round.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn ranges(&self, rank: u32, round: u64, round_len: u64) -> Result<Vec<RoundRange>> {
        let share = self.share(rank);
        let (begin, end) = (round * round_len, (round + 1) * round_len);
        let first = share.start + self.starts[share.clone()].partition_point(|start| *start < begin);
        // The preceding page may extend into the round.
        let first = first.saturating_sub(1).max(share.start);
        let mut ranges = Vec::new();
        for page in first..share.end {
            let (from, to) = (self.starts[page].max(begin), self.end_of(page).min(end));
            if self.starts[page] >= end {
                break;
            }
            if from < to {
                push(
                    &mut ranges,
                    RoundRange {
                        page,
                        offset: from - self.starts[page],
                        at: from - begin,
                        len: to - from,
                        is_last: to == self.end_of(page),
                    },
                )?;
            }
        }
        Ok(ranges)
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::PageId;
    use remanent_format::image::{Codec, ImageRef};

    use super::*;

    fn image(page: u64, len: u64) -> ImageRequest {
        let image = ImageRef {
            file: 1,
            offset: 0,
            stored_len: len,
            stored_crc: 0,
            raw_crc: page as u32,
            codec: Codec::Raw,
        };
        ImageRequest { page: PageId(page), len, image }
    }

    /// Each byte of each page is exchanged exactly once, by one rank, and shares differ by less than the longest page.
    #[test]
    fn rounds_cover_each_byte_once() {
        let lens: [&[u64]; 5] =
            [&[], &[1], &[5, 100_000, 3, 3, 70, 256, 255, 257], &[1000; 37], &[1, 1, 1, 900_000]];
        for lens in lens {
            for ranks in [1, 2, 3, 8] {
                let images =
                    lens.iter().enumerate().rev().map(|(at, len)| image(at as u64 + 1, *len)).collect();
                let plan = GatherPlan::new(images, ranks).unwrap();
                let total: u64 = lens.iter().sum();
                assert_eq!(plan.bytes(), total);
                let longest = lens.iter().max().copied().unwrap_or(0);
                for round_len in [256, 1000, 65_536, 1 << 30] {
                    let mut found = vec![0; lens.len()];
                    for rank in 0..ranks {
                        let share: u64 = lens[plan.share(rank)].iter().sum();
                        assert!(
                            share.abs_diff(total / u64::from(ranks)) <= longest + 1,
                            "{lens:?} {ranks} {rank}"
                        );
                        for round in 0..plan.rounds(round_len) {
                            let mut at = 0;
                            for range in plan.ranges(rank, round, round_len).unwrap() {
                                assert!(plan.share(rank).contains(&range.page));
                                assert!(range.at >= at && range.at + range.len <= round_len);
                                assert_eq!(found[range.page], range.offset, "in order");
                                at = range.at + range.len;
                                found[range.page] += range.len;
                                assert_eq!(range.is_last, found[range.page] == lens[range.page]);
                            }
                        }
                    }
                    assert_eq!(found, lens, "{ranks} ranks, rounds of {round_len}");
                }
            }
        }
    }

    #[test]
    fn fingerprint_tells_pages_apart() {
        let plan = |images: Vec<_>| GatherPlan::new(images, 2).unwrap().fingerprint().unwrap();
        let same = plan(vec![image(1, 5), image(2, 6)]);
        assert_eq!(plan(vec![image(2, 6), image(1, 5)]), same);
        let mut other_sum = image(2, 6);
        other_sum.image.raw_crc = 9;
        for other in [vec![image(1, 5)], vec![image(1, 5), image(2, 7)], vec![image(1, 5), other_sum]] {
            assert_ne!(plan(other), same);
        }
    }
}
