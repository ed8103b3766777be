//! Parts of the errors' messages that may be missing.

use std::fmt;

use remanent_format::{Lsn, SnapshotId};

use crate::layout::BlockLayout;

/// The end of a message on a state that is out of reach: single states that are not.
pub(super) fn single_states(below: &[Lsn]) -> String {
    let batches: Vec<String> = below.iter().map(Lsn::to_string).collect();
    match batches.len() {
        0 => String::new(),
        1 => format!("; of older states it has that at batch {}", batches[0]),
        _ => format!("; of older states it has those at batches {}", batches.join(", ")),
    }
}

/// Shows an offset that may be unknown.
pub(super) struct OffsetDisplay(pub Option<u64>);

impl fmt::Display for OffsetDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |offset| write!(f, " at offset {offset}"))
    }
}

/// Shows the name that was probably meant.
pub(super) struct NearestDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for NearestDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, "; did you mean {name:?}?"))
    }
}

/// Shows the store that a file is of.
pub(super) struct StoreDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for StoreDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " of the store in {store}"))
    }
}

/// Shows where a store lies.
pub(super) struct PathDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for PathDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " in {store}"))
    }
}

/// Shows a size that may be unknown.
pub(super) struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX { Ok(()) } else { write!(f, "{}, ", self.0) }
    }
}

/// Shows a snapshot to start from.
pub(super) struct StartFrom(pub Option<SnapshotId>);

impl fmt::Display for StartFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |snapshot| write!(f, ": start from snapshot {snapshot}"))
    }
}

/// Shows what is left of an incarnation.
pub(super) struct Survived(pub Option<Lsn>);

impl fmt::Display for Survived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |lsn| write!(f, ", where {lsn} is the last one of that incarnation"))
    }
}

/// Shows a layout fingerprint: as the block layout that it is, or else its bytes.
pub(super) struct Fingerprint<'a>(pub Option<&'a [u8; 32]>);

impl fmt::Display for Fingerprint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bytes) = self.0 else { return f.write_str("none") };
        match BlockLayout::from_fingerprint(*bytes) {
            Ok(layout) => write!(f, "that of {layout}"),
            Err(_) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}
