//! Floor 2. Which ranges a list's commands name, for devices that stand before others.

use super::{Command, Payload, Piece, PieceKind, Span, StagingSpan};

/// The page memory that commands name.
pub fn page_spans(commands: &[Command]) -> Vec<Span> {
    let mut spans = Vec::new();
    for command in commands {
        match command {
            Command::Upload { target, .. } | Command::Fill { target, .. } => spans.push(*target),
            Command::Download { source, .. } => spans.push(*source),
            Command::Apply { pieces } => spans.extend(pieces.iter().flat_map(piece_spans)),
            Command::Copy { source, target } => spans.extend([*source, *target]),
            Command::Gather { sources, target } => {
                spans.extend(sources.iter().map(|(source, _)| *source).chain([*target]));
            }
            Command::Scatter { source, targets } => {
                spans.extend(targets.iter().map(|(_, target)| *target).chain([*source]));
            }
            Command::Diff { left, right, target, .. } => spans.extend([*left, *right, *target]),
            Command::Select { bitmaps, .. } => {
                spans.extend(bitmaps.iter().flat_map(|of| [of.bits, of.indices]));
            }
            Command::Crc { sources, .. } => spans.extend(sources),
            Command::Pick { source, target, .. } => spans.extend([*source, *target]),
            Command::Validate { lists, .. } => spans.extend(lists.iter().map(|list| list.indices)),
        }
    }
    spans
}

fn piece_spans(piece: &Piece) -> impl Iterator<Item = Span> {
    let payload = match piece.payload {
        Payload::Device(span) => Some(span),
        Payload::Staging { .. } => None,
    };
    std::iter::once(piece.target).chain(payload)
}

/// The ranges of staging that commands read, and those that they write.
pub fn staged_spans(commands: &[Command]) -> (Vec<StagingSpan>, Vec<StagingSpan>) {
    let (mut read, mut written) = (Vec::new(), Vec::new());
    for command in commands {
        match command {
            Command::Upload { source, .. } => read.push(*source),
            Command::Pick { indices, .. } => read.push(*indices),
            Command::Download { target, .. }
            | Command::Select { target, .. }
            | Command::Crc { target, .. }
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

/// The ranges of staging that a piece reads.
fn payload_spans(piece: &Piece) -> Vec<StagingSpan> {
    let Payload::Staging { index, offset } = piece.payload else { return Vec::new() };
    let span = |at, len| StagingSpan { index, offset: offset + at, len };
    // The range lies in host memory too, so its length is a usize.
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

/// Whether two ranges have a byte in common.
pub fn overlap(one: StagingSpan, other: StagingSpan) -> bool {
    let before = |a: StagingSpan, b: StagingSpan| a.offset + a.len <= b.offset;
    one.index == other.index && !before(one, other) && !before(other, one)
}
