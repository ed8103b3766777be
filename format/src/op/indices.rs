//! The element indices of a sparse delta: four bytes each, or the gaps between them.
//!
//! At one changed element in a hundred, a gap takes 1.3 bytes where an index takes 4.

use crate::defect::{Defect, check_limit};

/// An index: four little-endian bytes.
pub(super) const PLAIN: u8 = 0;
/// How many elements are skipped before the next one, as a varint.
pub(super) const GAPS: u8 = 1;

/// Bytes of a plain index.
const PLAIN_LEN: usize = size_of::<u32>();
/// Bytes of the longest gap: 32 bits, seven a byte.
const GAP_LEN_MAX: usize = 5;

/// The elements that a sparse delta replaces, in either encoding. A value of this type is whole: gaps are
/// checked when it is made.
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
    /// Indices of four little-endian bytes each, in any order.
    ///
    /// # Panics
    /// If the last one is cut.
    #[must_use]
    pub fn plain(bytes: &'a [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(PLAIN_LEN), "{} bytes of indices", bytes.len());
        let highest = bytes.chunks_exact(PLAIN_LEN).map(plain_index).max();
        Self { encoding: PLAIN, bytes, count: bytes.len() / PLAIN_LEN, highest }
    }

    /// `count` ascending indices as [`gap_coded`] makes them.
    ///
    /// # Errors
    /// A [`Defect`] if the bytes are not exactly that.
    pub fn gaps(bytes: &'a [u8], count: usize) -> Result<Self, Defect> {
        let indices = Self::read_gaps(bytes, count)?;
        match bytes.len() - indices.bytes.len() {
            0 => Ok(indices),
            left => Err(Defect::Field { what: "bytes after the last index gap", found: left as u64 }),
        }
    }

    /// Reads `count` gaps from the start of `bytes`.
    pub(super) fn read_gaps(bytes: &'a [u8], count: usize) -> Result<Self, Defect> {
        let (mut at, mut highest) = (0, None);
        for _ in 0..count {
            let (gap, gap_len) = read_gap(&bytes[at..])?;
            let index = highest.map_or(0, |highest| u64::from(highest) + 1) + gap;
            check_limit("element index", index, u32::MAX.into())?;
            highest = Some(index as u32);
            at += gap_len;
        }
        Ok(Self { encoding: GAPS, bytes: &bytes[..at], count, highest })
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The highest one, if there is any.
    #[must_use]
    pub fn highest(&self) -> Option<u32> {
        self.highest
    }

    /// The lowest one, if there is any. Plain ones are all looked at.
    #[must_use]
    pub fn lowest(&self) -> Option<u32> {
        if self.is_gap_coded() { self.iter().next() } else { self.iter().min() }
    }

    /// Whether they are stored as gaps: a device, which wants four bytes each, then needs a list of its own.
    #[must_use]
    pub fn is_gap_coded(&self) -> bool {
        self.encoding == GAPS
    }

    /// The indices, in the order of their elements.
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
            // Past the highest index of all there is no next one.
            next = index.wrapping_add(1);
            rest = &rest[len..];
            index
        })
    }

    pub(super) fn encoding(&self) -> u8 {
        self.encoding
    }

    pub(super) fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// The gaps of strictly ascending indices, each the number of elements skipped: seven bits a byte, lowest
/// first, the highest bit set in all bytes but the last. `None` if the indices do not ascend.
#[must_use]
pub fn gap_coded(indices: &[u32]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(gap_coded_len(indices)?);
    gap_code(indices, &mut out);
    Some(out)
}

/// How many bytes [`gap_coded`] takes for them. `None` if the indices do not ascend.
#[must_use]
pub fn gap_coded_len(indices: &[u32]) -> Option<usize> {
    let mut next = 0_u64;
    let mut len = 0;
    for &index in indices {
        let gap = u64::from(index).checked_sub(next)?;
        len += (gap | 1).ilog2() as usize / 7 + 1;
        next = u64::from(index) + 1;
    }
    Some(len)
}

/// Adds strictly ascending indices to `out`, coded as [`gap_coded`] does.
pub fn gap_code(indices: &[u32], out: &mut Vec<u8>) {
    let mut next = 0_u64;
    for &index in indices {
        let mut gap = u64::from(index) - next;
        while gap >= 0x80 {
            out.push(gap as u8 | 0x80);
            gap >>= 7;
        }
        out.push(gap as u8);
        next = u64::from(index) + 1;
    }
}

/// The gap at the start of `bytes`, and its length. One gap has one encoding: the shortest.
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
    fn both_encodings_give_the_same_indices() {
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
            assert!(plain.iter().eq(indices.iter().copied()), "{indices:?}");
            assert!(gaps.iter().eq(indices.iter().copied()), "{indices:?}");
            assert_eq!((plain.len(), plain.highest()), (gaps.len(), gaps.highest()), "{indices:?}");
            assert_eq!((plain.lowest(), gaps.lowest()), (indices.first().copied(), indices.first().copied()));
        }
    }

    #[test]
    fn only_ascending_indices_have_gaps() {
        assert_eq!(gap_coded(&[1, 1]), None);
        assert_eq!(gap_coded(&[2, 1]), None);
        let descending = plain(&[2, 1]);
        assert_eq!(Indices::plain(&descending).highest(), Some(2));
    }

    #[test]
    fn gaps_that_no_encoder_makes_are_refused() {
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
        ] {
            assert_eq!(Indices::gaps(bytes, count), Err(defect), "{bytes:x?}");
        }
    }
}
