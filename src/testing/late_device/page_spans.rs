//! Determines the ranges of page memory that the commands of a list use.

use crate::device::{Command, Payload, Piece, Span};

/// Returns the spans of page memory that commands name.
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
            Command::Digest { sources, key, .. } => spans.extend(sources.iter().chain([key])),
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
