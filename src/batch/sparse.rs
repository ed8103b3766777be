//! Floor 4. Sparse deltas: their elements in ascending order, their indices in the shorter encoding.

use std::borrow::Cow;

use remanent_format::Width;
use remanent_format::op::{Indices, gap_coded, scatter_values_at};

/// Indices, and the elements for them in the same order.
type Elements<'a> = (Cow<'a, [u32]>, Cow<'a, [u8]>);

/// A sparse delta's elements with ascending indices: those are found twice by looking at neighbours, and
/// may be stored as gaps.
pub(super) fn ascending<'a>(
    width: Width,
    indices: &'a [u32],
    values: &'a [u8],
) -> Result<Elements<'a>, String> {
    let width = width.bytes();
    if values.len() != indices.len() * width {
        return Err(format!(
            "{} indices of elements of {width} bytes, but {} bytes of values",
            indices.len(),
            values.len()
        ));
    }
    if indices.is_sorted_by(|left, right| left < right) {
        return Ok((indices.into(), values.into()));
    }
    let mut order: Vec<(u32, usize)> = indices.iter().copied().zip(0..).collect();
    order.sort_unstable();
    if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("element {} is given twice", pair[0].0));
    }
    let values: Vec<u8> = order.iter().flat_map(|(_, at)| &values[at * width..][..width]).copied().collect();
    let indices: Vec<u32> = order.into_iter().map(|(index, _)| index).collect();
    Ok((indices.into(), values.into()))
}

/// Ascending indices in the encoding that takes less of the log, padding included; four bytes each where
/// both take the same, for those need no decoding.
pub(super) enum CodedIndices {
    Plain(Vec<u8>),
    Gaps { bytes: Vec<u8>, count: usize },
}

impl CodedIndices {
    pub fn smaller(indices: &[u32]) -> Self {
        let count = indices.len();
        let bytes = gap_coded(indices).expect("they ascend");
        if scatter_values_at(bytes.len()) < scatter_values_at(4 * count) {
            Self::Gaps { bytes, count }
        } else {
            Self::Plain(indices.iter().flat_map(|index| index.to_le_bytes()).collect())
        }
    }

    /// Length of the encoded indices.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_brought_into_order() {
        let values = [1, 1, 2, 2, 3, 3];
        let (indices, ordered) = ascending(Width::W2, &[9, 2, 5], &values).unwrap();
        assert_eq!((&*indices, &*ordered), (&[2, 5, 9][..], &[2, 2, 3, 3, 1, 1][..]));
        let (indices, kept) = ascending(Width::W2, &[2, 5, 9], &values).unwrap();
        assert_eq!((&*indices, &*kept), (&[2, 5, 9][..], &values[..]));
        assert_eq!(ascending(Width::W1, &[4, 7, 4], &[0; 3]).unwrap_err(), "element 4 is given twice");
        assert!(ascending(Width::W2, &[1], &[0; 3]).is_err());
    }

    #[test]
    fn the_shorter_encoding_is_chosen() {
        let is_gap_coded = |indices: &[u32]| CodedIndices::smaller(indices).indices().is_gap_coded();
        // Up to four indices fit sixteen bytes in either encoding.
        assert!(!is_gap_coded(&[]));
        assert!(!is_gap_coded(&[0, 1, 2, 3]));
        assert!(is_gap_coded(&[0, 1, 2, 3, 4]));
        // Five bytes a gap: longer than the indices themselves.
        let far: Vec<u32> = (0..15).map(|n| n * (1 << 28)).collect();
        assert!(!is_gap_coded(&far));
    }
}
