//! Sparse deltas: single elements of a page, sorted by index. The indices have the encoding that takes less log space.

use std::borrow::Cow;

use remanent_format::Width;
use remanent_format::op::{Indices, gap_code, gap_coded_len, scatter_values_at};

use crate::base::allocation::make_room;
use crate::error::{Error, Result};

/// The indices of elements, and the elements' bytes in the same order.
type Elements<'a> = (Cow<'a, [u32]>, Cow<'a, [u8]>);

/// Sorts the elements of a sparse delta by index. Sorting makes duplicate indices adjacent, and allows indices to be
/// stored as gaps.
pub(super) fn ascending<'a>(
    width: Width,
    indices: &'a [u32],
    values: &'a [u8],
    invalid: impl Fn(String) -> Error,
) -> Result<Elements<'a>> {
    let width = width.bytes();
    if values.len() != indices.len() * width {
        return Err(invalid(format!(
            "{} indices of elements of {width} bytes, but {} bytes of values",
            indices.len(),
            values.len()
        )));
    }
    if indices.is_sorted_by(|left, right| left < right) {
        return Ok((indices.into(), values.into()));
    }
    let mut order: Vec<(u32, usize)> = Vec::new();
    make_room(&mut order, indices.len())?;
    order.extend(indices.iter().copied().zip(0..));
    order.sort_unstable();
    if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(invalid(format!("element {} is given twice", pair[0].0)));
    }
    let (mut in_order, mut elements) = (Vec::new(), Vec::new());
    make_room(&mut in_order, indices.len())?;
    make_room(&mut elements, values.len())?;
    for (index, at) in order {
        in_order.push(index);
        elements.extend_from_slice(&values[at * width..][..width]);
    }
    Ok((in_order.into(), elements.into()))
}

/// Ascending indices in the encoding that takes less space in the log, including padding. If both encodings take the
/// same space, four bytes per index are used, because they need no decoding.
#[derive(Clone, Debug)]
pub(super) enum CodedIndices {
    Plain(Vec<u8>),
    Gaps { bytes: Vec<u8>, count: usize },
}

impl CodedIndices {
    pub fn smaller(indices: &[u32]) -> Result<Self> {
        let count = indices.len();
        let len = gap_coded_len(indices).expect("they ascend");
        let mut bytes = Vec::new();
        Ok(if scatter_values_at(len) < scatter_values_at(4 * count) {
            make_room(&mut bytes, len)?;
            bytes.resize(len, 0);
            gap_code(indices, &mut bytes);
            Self::Gaps { bytes, count }
        } else {
            make_room(&mut bytes, 4 * count)?;
            indices.iter().for_each(|index| bytes.extend_from_slice(&index.to_le_bytes()));
            Self::Plain(bytes)
        })
    }

    /// Returns the length of the encoded indices in bytes.
    pub fn byte_len(&self) -> usize {
        match self {
            Self::Plain(bytes) | Self::Gaps { bytes, .. } => bytes.len(),
        }
    }

    pub fn indices(&self) -> Indices<'_> {
        match self {
            Self::Plain(bytes) => Indices::plain(bytes),
            Self::Gaps { bytes, count } => Indices::gaps(bytes, *count).expect("coded just now"),
        }
    }
}

/// Single changed elements of a page, in ascending order of their indices, without the elements' bytes.
#[derive(Clone, Debug)]
pub(crate) struct SparseElements {
    pub indices: Vec<u32>,
    pub(super) coded: CodedIndices,
}

impl SparseElements {
    /// Encodes the indices, which must be ascending.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(indices: Vec<u32>) -> Result<Self> {
        Ok(Self { coded: CodedIndices::smaller(&indices)?, indices })
    }

    /// Returns the number of bytes that elements of width `width` and their indices take in a payload.
    pub fn byte_len(&self, width: Width) -> usize {
        scatter_values_at(self.coded.byte_len()) + self.indices.len() * width.bytes()
    }
}

impl Default for SparseElements {
    /// Returns an empty list of elements.
    fn default() -> Self {
        Self { indices: Vec::new(), coded: CodedIndices::Plain(Vec::new()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Invalid;

    #[test]
    fn elements_are_sorted() {
        const VALUES: [u8; 6] = [1, 1, 2, 2, 3, 3];
        let ascending = |width, indices: &'static [u32], values: &'static [u8]| {
            let invalid = |reason| Error::Invalid(Invalid::Operation { index: 0, reason });
            ascending(width, indices, values, invalid)
                .map(|(indices, values)| (indices.to_vec(), values.to_vec()))
        };
        let (indices, ordered) = ascending(Width::W2, &[9, 2, 5], &VALUES).unwrap();
        assert_eq!((&*indices, &*ordered), (&[2, 5, 9][..], &[2, 2, 3, 3, 1, 1][..]));
        let (indices, kept) = ascending(Width::W2, &[2, 5, 9], &VALUES).unwrap();
        assert_eq!((&*indices, &*kept), (&[2, 5, 9][..], &VALUES[..]));
        let twice = ascending(Width::W1, &[4, 7, 4], &[0; 3]).unwrap_err();
        assert!(twice.to_string().contains("element 4 is given twice"), "{twice}");
        assert!(ascending(Width::W2, &[1], &[0; 3]).is_err());
    }

    #[test]
    fn the_shorter_encoding_is_chosen() {
        let is_gap_coded = |indices: &[u32]| CodedIndices::smaller(indices).unwrap().indices().is_gap_coded();
        // Up to four indices fit in sixteen bytes in either encoding.
        assert!(!is_gap_coded(&[]));
        assert!(!is_gap_coded(&[0, 1, 2, 3]));
        assert!(is_gap_coded(&[0, 1, 2, 3, 4]));
        // Each gap takes five bytes, which is longer than the index itself.
        let far: Vec<u32> = (0..15).map(|n| n * (1 << 28)).collect();
        assert!(!is_gap_coded(&far));
    }
}
