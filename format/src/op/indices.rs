//! Element indices of a sparse delta. There are two encodings: four bytes per index, or the gaps between the indices.
//!
//! If one element in a hundred changes, a gap takes 1.3 bytes on average, whereas an index takes 4 bytes.

use crate::defect::{Defect, check_limit};

/// Encoding 0, which stores each index in four little-endian bytes.
pub(super) const PLAIN: u8 = 0;
/// Encoding 1, which stores a gap per index as a varint. A gap is the number of elements between an index and the
/// previous index.
pub(super) const GAPS: u8 = 1;

/// Length of a plain index in bytes.
const PLAIN_LEN: usize = size_of::<u32>();
/// Maximum length of an encoded gap in bytes. Five bytes of seven bits contain 32 bits.
const GAP_LEN_MAX: usize = 5;

/// The encoded indices of the elements that a sparse delta replaces. [`Indices::plain`] and [`Indices::gaps`] wrap the
/// two encodings.
///
/// ```
/// use remanent_format::op::{Indices, gap_coded};
/// let gaps = gap_coded(&[3, 4, 500]).expect("they ascend");
/// assert_eq!(gaps, [3, 0, 0xef, 0x03]);
/// let indices = Indices::gaps(&gaps, 3)?;
/// assert!(indices.iter().eq([3, 4, 500]));
/// assert_eq!(indices.highest(), Some(500));
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indices<'a> {
    encoding: u8,
    bytes: &'a [u8],
    count: usize,
    highest: Option<u32>,
}

impl<'a> Indices<'a> {
    /// Wraps indices that are stored in four little-endian bytes each, in any order.
    ///
    /// # Panics
    /// Panics if the length of `bytes` is not a multiple of four.
    #[must_use]
    pub fn plain(bytes: &'a [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(PLAIN_LEN), "{} bytes of indices", bytes.len());
        let highest = bytes.chunks_exact(PLAIN_LEN).map(plain_index).max();
        Self { encoding: PLAIN, bytes, count: bytes.len() / PLAIN_LEN, highest }
    }

    /// Wraps `count` strictly ascending indices that [`gap_coded`] encoded.
    ///
    /// # Errors
    /// Returns a [`Defect`] if `bytes` is not the encoding of `count` such indices.
    pub fn gaps(bytes: &'a [u8], count: usize) -> Result<Self, Defect> {
        let indices = Self::read_gaps(bytes, count)?;
        match bytes.len() - indices.bytes.len() {
            0 => Ok(indices),
            left => Err(Defect::Field { what: "bytes after the last index gap", found: left as u64 }),
        }
    }

    /// Reads `count` gaps from the start of `bytes`. Bytes after the last gap are ignored.
    pub(super) fn read_gaps(bytes: &'a [u8], count: usize) -> Result<Self, Defect> {
        // `next` is one more than the highest index so far.
        let (mut at, mut next, mut left) = (0, 0, count);
        while left > 0 {
            // At most eight gaps end within a word.
            if left >= WORD_LEN
                && let Some(word) = GapWord::first_in(&bytes[at..])
                && next + word.skipped <= u64::from(u32::MAX)
            {
                (at, next, left) = (at + word.len, next + word.skipped, left - word.count);
                continue;
            }
            let (gap, gap_len) = read_gap(&bytes[at..])?;
            check_limit("element index", next + gap, u32::MAX.into())?;
            (at, next, left) = (at + gap_len, next + gap + 1, left - 1);
        }
        let highest = next.checked_sub(1).map(|highest| highest as u32);
        Ok(Self { encoding: GAPS, bytes: &bytes[..at], count, highest })
    }

    /// Returns the number of indices.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if there are no indices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the highest index, or `None` if there are no indices.
    #[must_use]
    pub fn highest(&self) -> Option<u32> {
        self.highest
    }

    /// Returns the lowest index, or `None` if there are no indices. Reads every index unless the encoding is gaps,
    /// which ascend.
    #[must_use]
    pub fn lowest(&self) -> Option<u32> {
        if self.is_gap_coded() { self.iter().next() } else { self.iter().min() }
    }

    /// Returns true if the indices are encoded as gaps. A device needs four bytes per index, so [`Self::copy_to`] must
    /// decode gaps before they are copied to a device.
    #[must_use]
    pub fn is_gap_coded(&self) -> bool {
        self.encoding == GAPS
    }

    /// Returns an iterator over the indices, in the order of the new values in the delta. [`Self::copy_to`] is faster
    /// if the caller needs all indices.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<'a> {
        let (encoding, mut rest, mut next) = (self.encoding, self.bytes, 0);
        (0..self.count).map(move |_| {
            let (index, len) = match encoding {
                GAPS => {
                    let (gap, len) = read_gap(rest).expect("checked where the gaps were read");
                    (next + gap as u32, len)
                }
                _ => (plain_index(&rest[..PLAIN_LEN]), PLAIN_LEN),
            };
            // The wrapped value is not used, because no index follows the highest possible one.
            next = index.wrapping_add(1);
            rest = &rest[len..];
            index
        })
    }

    /// Writes the indices to `out` in four little-endian bytes each, in the order of the new values in the delta.
    ///
    /// # Panics
    /// Panics if the length of `out` is not four times the number of indices.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert!(out.len() == PLAIN_LEN * self.count, "{} bytes for {} indices", out.len(), self.count);
        if !self.is_gap_coded() {
            out.copy_from_slice(self.bytes);
            return;
        }
        let (mut rest, mut next, mut done) = (self.bytes, 0_u32, 0);
        let (out, _) = out.as_chunks_mut::<PLAIN_LEN>();
        while done < out.len() {
            if let Some(four) = out[done..].first_chunk_mut()
                && let Some((four_len, after)) = four_indices(rest, next, four)
            {
                (rest, next, done) = (&rest[four_len..], after, done + four.len());
                continue;
            }
            let (gap, len) = read_gap(rest).expect("checked where the gaps were read");
            let index = next.wrapping_add(gap as u32);
            out[done] = index.to_le_bytes();
            (rest, next, done) = (&rest[len..], index.wrapping_add(1), done + 1);
        }
    }

    pub(super) fn encoding(&self) -> u8 {
        self.encoding
    }

    /// Returns the bytes of the encoded indices, without padding.
    #[must_use]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Encodes strictly ascending indices as gaps. A gap is the number of elements skipped before an index, in seven bits
/// per byte and lowest bits first. The highest bit is set in all bytes of a gap but the last. Returns `None` if the
/// indices do not ascend.
#[must_use]
pub fn gap_coded(indices: &[u32]) -> Option<Vec<u8>> {
    let mut out = vec![0; gap_coded_len(indices)?];
    gap_code(indices, &mut out);
    Some(out)
}

/// Returns the length in bytes of the encoding that [`gap_coded`] produces, or `None` if the indices do not ascend.
#[must_use]
pub fn gap_coded_len(indices: &[u32]) -> Option<usize> {
    let (mut next, mut len, mut ascend) = (0_u64, indices.len(), true);
    for &index in indices {
        let index = u64::from(index);
        ascend &= index >= next;
        let gap = index.wrapping_sub(next);
        len += [7, 14, 21, 28].map(|bits| usize::from(gap >> bits != 0)).iter().sum::<usize>();
        next = index + 1;
    }
    ascend.then_some(len)
}

/// Writes strictly ascending indices to `out` in the encoding of [`gap_coded`].
///
/// # Panics
/// Panics if `out` is shorter than [`gap_coded_len`], or if the indices do not ascend.
pub fn gap_code(indices: &[u32], out: &mut [u8]) {
    let (mut next, mut at) = (0_u64, 0);
    for &index in indices {
        let mut gap = u64::from(index) - next;
        while gap >= 1 << 14 {
            out[at] = gap as u8 | 0x80;
            (gap, at) = (gap >> 7, at + 1);
        }
        // This code has no branch, because the length of a gap (one byte or two) is unpredictable. For a gap of one
        // byte, the second write replaces the first.
        let more = usize::from(gap >= 0x80);
        out[at + more] = (gap >> 7) as u8;
        out[at] = gap as u8 & 0x7f | (more << 7) as u8;
        (next, at) = (u64::from(index) + 1, at + more + 1);
    }
}

/// Number of bytes that [`GapWord`] decodes in one step.
const WORD_LEN: usize = 8;

/// The gaps that end within one eight-byte word, if each gap has one or two bytes. Nearly all deltas have only such
/// gaps.
struct GapWord {
    /// Total length of the gaps in bytes.
    len: usize,
    count: usize,
    /// Sum of the gaps plus their number. The next index rises by this value.
    skipped: u64,
}

impl GapWord {
    /// Decodes the gaps at the start of `bytes`. Returns `None` if there are fewer than eight bytes, or if a gap is
    /// invalid or longer than two bytes. The caller then uses [`read_gap`].
    fn first_in(bytes: &[u8]) -> Option<Self> {
        const LOW: u64 = u64::from_ne_bytes([0x7f; WORD_LEN]);
        let mut word = u64::from_le_bytes(*bytes.first_chunk()?);
        // A gap that continues past the last byte belongs to the next word.
        let is_cut = word >> 63 != 0;
        if is_cut {
            word &= u64::MAX >> 8;
        }
        let (low, more) = (word & LOW, word & !LOW);
        // The highest bits of `second` mark the bytes that end a gap of two. Those of `nonzero` mark the bytes whose
        // low seven bits are not all zero.
        let (second, nonzero) = (more << 8, (low + LOW) & !LOW);
        if second & (more | !nonzero) != 0 {
            return None;
        }
        let high_digits = low & ((second >> 7) * 0xff);
        let len = WORD_LEN - usize::from(is_cut);
        let count = len - second.count_ones() as usize;
        let skipped = sum_of_bytes(low ^ high_digits) + (sum_of_bytes(high_digits) << 7) + count as u64;
        Some(Self { len, count, skipped })
    }
}

/// Returns the sum of the eight bytes of a word.
fn sum_of_bytes(word: u64) -> u64 {
    const EVEN: u64 = 0x00ff_00ff_00ff_00ff;
    let pairs = (word & EVEN) + (word >> 8 & EVEN);
    pairs.wrapping_mul(0x0001_0001_0001_0001) >> 48
}

/// Decodes four gaps from the start of `bytes`, and writes the four indices to `out`. `next` is one more than the
/// previous index.
///
/// Returns the length of the gaps in bytes, and one more than the last index. Returns `None` if there are fewer than
/// eight bytes, or if a gap has more than two bytes; the content of `out` is then unspecified.
fn four_indices(bytes: &[u8], mut next: u32, out: &mut [[u8; PLAIN_LEN]; 4]) -> Option<(usize, u32)> {
    let mut word = u64::from_le_bytes(*bytes.first_chunk::<WORD_LEN>()?);
    let (mut len, mut is_longer) = (0, 0);
    for out in out {
        let more = word >> 7 & 1;
        is_longer |= word >> 15 & more;
        let gap = word & 0x7f | word >> 1 & 0x3f80 & more.wrapping_neg();
        let index = next.wrapping_add(gap as u32);
        *out = index.to_le_bytes();
        // The wrapped value is not used, because no index follows the highest possible one.
        next = index.wrapping_add(1);
        word = word >> 8 >> (8 * more);
        len += 1 + more as usize;
    }
    (is_longer == 0).then_some((len, next))
}

/// Decodes the gap at the start of `bytes`. Returns the gap and the length of its encoding in bytes. Only the shortest
/// encoding of a gap is valid.
fn read_gap(bytes: &[u8]) -> Result<(u64, usize), Defect> {
    let mut gap = 0;
    for (at, &byte) in bytes.iter().take(GAP_LEN_MAX).enumerate() {
        gap |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return match byte {
                0 if at > 0 => Err(Defect::Field { what: "last byte of an index gap", found: 0 }),
                _ => Ok((gap, at + 1)),
            };
        }
    }
    Err(match bytes.len() {
        have if have < GAP_LEN_MAX => Defect::Truncated { needed: have as u64 + 1, have: have as u64 },
        _ => Defect::Limit { what: "length of an index gap", found: 6, limit: GAP_LEN_MAX as u64 },
    })
}

fn plain_index(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(indices: &[u32]) -> Vec<u8> {
        indices.iter().flat_map(|index| index.to_le_bytes()).collect()
    }

    #[test]
    fn both_encodings_contain_the_same_indices() {
        for indices in [
            vec![],
            vec![0],
            vec![u32::MAX],
            vec![0, 1, 2],
            vec![127, 255, 256, 385, 16_769],
            vec![0, u32::MAX - 1, u32::MAX],
            (0..1000).map(|n| n * n).collect(),
        ] {
            let (plain, gaps) = (plain(&indices), gap_coded(&indices).unwrap());
            assert_eq!(gap_coded_len(&indices), Some(gaps.len()));
            let (plain, gaps) = (Indices::plain(&plain), Indices::gaps(&gaps, indices.len()).unwrap());
            for coded in [plain, gaps] {
                assert!(coded.iter().eq(indices.iter().copied()), "{indices:?}");
                let mut copied = vec![0xaa; 4 * indices.len()];
                coded.copy_to(&mut copied);
                assert_eq!(copied, plain.as_bytes(), "{indices:?}");
            }
            assert_eq!((plain.len(), plain.highest()), (gaps.len(), gaps.highest()), "{indices:?}");
            assert_eq!((plain.lowest(), gaps.lowest()), (indices.first().copied(), indices.first().copied()));
        }
    }

    /// Gaps of every length are decoded at every position of a word.
    #[test]
    fn gaps_decoded_by_word_equal_gaps_decoded_by_byte() {
        const LONG: [u32; 5] = [0, 127, 128, 16_383, 16_384];
        for first in 0..12_usize {
            for digits in 0..5_usize.pow(5) {
                let gap = |at: usize| match at.checked_sub(first) {
                    Some(at @ 0..5) => LONG[digits / 5_usize.pow(at as u32) % 5],
                    _ => 3,
                };
                let next = |next: &mut u32, at| {
                    let index = *next + gap(at);
                    *next = index + 1;
                    Some(index)
                };
                let indices: Vec<u32> = (0..20).scan(0, next).collect();
                let coded = gap_coded(&indices).unwrap();
                let gaps = Indices::gaps(&coded, indices.len()).unwrap();
                assert!(gaps.iter().eq(indices.iter().copied()), "{indices:?}");
                assert_eq!(gaps.highest(), indices.last().copied(), "{indices:?}");
                let mut copied = vec![0xaa; 4 * indices.len()];
                gaps.copy_to(&mut copied);
                assert_eq!(copied, plain(&indices), "{indices:?}");
                assert!(Indices::gaps(&coded, indices.len() - 1).is_err(), "{indices:?}");
            }
        }
    }

    #[test]
    fn gap_encoding_requires_ascending_indices() {
        assert_eq!(gap_coded(&[1, 1]), None);
        assert_eq!(gap_coded(&[2, 1]), None);
        let descending = plain(&[2, 1]);
        assert_eq!(Indices::plain(&descending).highest(), Some(2));
    }

    #[test]
    fn non_canonical_gaps_are_refused() {
        let limit = |what, found, limit| Defect::Limit { what, found, limit };
        let field = |what, found| Defect::Field { what, found };
        for (bytes, count, defect) in [
            (&[][..], 1, Defect::Truncated { needed: 1, have: 0 }),
            (&[0x80], 1, Defect::Truncated { needed: 2, have: 1 }),
            (&[0x80, 0], 1, field("last byte of an index gap", 0)),
            (&[0x85, 0x80, 0], 1, field("last byte of an index gap", 0)),
            (&[0x80, 0x80, 0x80, 0x80, 0x80, 1], 1, limit("length of an index gap", 6, 5)),
            (&[0x80, 0x80, 0x80, 0x80, 0x10], 1, limit("element index", 1 << 32, u32::MAX.into())),
            (&[0xff, 0xff, 0xff, 0xff, 0x0f, 0], 2, limit("element index", 1 << 32, u32::MAX.into())),
            (&[1, 1], 1, field("bytes after the last index gap", 1)),
            (&[0x80, 0, 1, 1, 1, 1, 1, 1, 1, 1], 9, field("last byte of an index gap", 0)),
            (&[1, 1, 1, 1, 1, 1, 0x80, 0, 1, 1], 9, field("last byte of an index gap", 0)),
            (&[1, 1, 1, 1, 1, 1, 1, 0x80, 0, 1], 9, field("last byte of an index gap", 0)),
            (&[1, 1, 1, 1, 1, 1, 1, 0x80], 8, Defect::Truncated { needed: 2, have: 1 }),
            (
                &[0xfe, 0xff, 0xff, 0xff, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0],
                9,
                limit("element index", 1 << 32, u32::MAX.into()),
            ),
        ] {
            assert_eq!(Indices::gaps(bytes, count), Err(defect), "{bytes:x?}");
        }
    }
}
