//! Optional parts of error messages.

use std::fmt;

use remanent_format::{Lsn, SnapshotId};

use crate::layout::BlockLayout;

/// Returns the end of the message for a state outside the retained range: older states that are still
/// available.
pub(super) fn single_states(below: &[Lsn]) -> String {
    let batches: Vec<String> = below.iter().map(Lsn::to_string).collect();
    match batches.len() {
        0 => String::new(),
        1 => format!("; of older states it has that at batch {}", batches[0]),
        _ => format!("; of older states it has those at batches {}", batches.join(", ")),
    }
}

/// Displays an offset, if known.
pub(super) struct OffsetDisplay(pub Option<u64>);

impl fmt::Display for OffsetDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |offset| write!(f, " at offset {offset}"))
    }
}

/// Displays the suggested name, if any.
pub(super) struct NearestDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for NearestDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, "; did you mean {name:?}?"))
    }
}

/// Displays the store that contains a file, if known.
pub(super) struct StoreDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for StoreDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " of the store in {store}"))
    }
}

/// Displays the directory of a store, if known.
pub(super) struct PathDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for PathDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " in {store}"))
    }
}

/// Displays a size, unless it is unknown (`u64::MAX`).
pub(super) struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX { Ok(()) } else { write!(f, "{}, ", self.0) }
    }
}

/// Displays the snapshot to start from, if any.
pub(super) struct StartFrom(pub Option<SnapshotId>);

impl fmt::Display for StartFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |snapshot| write!(f, ": start from snapshot {snapshot}"))
    }
}

/// Displays the last surviving batch of an incarnation, if known.
pub(super) struct LastSurvivingBatch(pub Option<Lsn>);

impl fmt::Display for LastSurvivingBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |lsn| write!(f, ", where {lsn} is the last one of that incarnation"))
    }
}

/// Displays a layout fingerprint: as its block layout if it is one, otherwise as bytes.
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
