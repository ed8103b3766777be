//! The ranges of staging that the commands of a list name, for devices that pass lists on to other devices.

use super::{Command, Payload, Piece, PieceKind, StagingSpan};

/// Returns the ranges of staging that commands read, then the ranges that they write.
pub fn staged_spans(commands: &[Command]) -> (Vec<StagingSpan>, Vec<StagingSpan>) {
    let (mut read, mut written) = (Vec::new(), Vec::new());
    for command in commands {
        match command {
            Command::Upload { source, .. } => read.push(*source),
            Command::Pick { indices, .. } => read.push(*indices),
            Command::Download { target, .. }
            | Command::Select { target, .. }
            | Command::Crc { target, .. }
            | Command::Digest { target, .. }
            | Command::Validate { target, .. } => written.push(*target),
            Command::Apply { pieces } => read.extend(pieces.iter().flat_map(payload_spans)),
            Command::Copy { .. }
            | Command::Fill { .. }
            | Command::Diff { .. }
            | Command::Gather { .. }
            | Command::Scatter { .. } => {}
        }
    }
    (read, written)
}

/// Returns the ranges of staging that a delta reads.
fn payload_spans(piece: &Piece) -> Vec<StagingSpan> {
    let Payload::Staging { index, offset } = piece.payload else { return Vec::new() };
    let span = |at, len| StagingSpan { index, offset: offset + at, len };
    // A payload of this length is in host memory, so the length fits in a usize.
    let target_len = piece.target.len as usize;
    match piece.kind {
        PieceKind::Dense => vec![span(0, target_len)],
        PieceKind::Masked { width, bytes_at } => {
            vec![span(0, (target_len / width.bytes()).div_ceil(8)), span(bytes_at, target_len)]
        }
        PieceKind::Sparse { width, count, values_at } => {
            vec![span(0, 4 * count), span(values_at, width.bytes() * count)]
        }
    }
}

/// Returns whether two ranges share a byte.
pub fn overlap(one: StagingSpan, other: StagingSpan) -> bool {
    let before = |a: StagingSpan, b: StagingSpan| a.offset + a.len <= b.offset;
    one.index == other.index && !before(one, other) && !before(other, one)
}
