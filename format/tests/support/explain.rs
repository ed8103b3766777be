//! The text next to a golden file: the meaning of each byte of a structure.

use remanent_format::frame::{FrameHeaderRaw, VerifiedSnapshotRaw};
use remanent_format::image::{
    ChunkHeaderRaw, ImageFileHeaderRaw, ImageHeaderRaw, OverlayHeaderRaw, OverlayPieceRaw,
};
use remanent_format::manifest::{ManifestEntryRaw, ManifestHeaderRaw, OverlayBaseRaw, TombstoneRaw};
use remanent_format::op::{CreateBodyRaw, ImageBodyRaw, OpHeaderRaw, PayloadHeadRaw, RestoreBodyRaw};
use remanent_format::segment::SegmentHeaderRaw;
use remanent_format::store::StoreHeaderRaw;

use crate::annotate::Annotate;
use crate::samples::{Structure, compressed_contents, contents};

/// Returns the text file that accompanies a valid sample: each field with its offset, bytes and value.
pub fn explain(structure: Structure, title: &str, bytes: &[u8]) -> String {
    let mut text = Annotate::new(title, bytes);
    match structure {
        Structure::Metadata => text.metadata(),
        Structure::Entry => text.entry(),
        Structure::Store => {
            text.layout(&StoreHeaderRaw::TABLE).head("Record");
            let has_fingerprint = text.peek(1) == 1;
            text.part(1, if has_fingerprint { "a fingerprint follows" } else { "no fingerprint" });
            if has_fingerprint {
                text.part(32, "layout_fingerprint");
            }
            let identity_len = text.peek(8) as usize;
            text.part(8, &format!("identity of {identity_len} bytes")).part(identity_len, "identity");
            let created = format!("created_unix_ms = {}", text.peek(8));
            text.part(8, &created);
            let ancestors = text.peek(8);
            text.part(8, &format!("{ancestors} ancestors"));
            for _ in 0..ancestors {
                text.part(16, "ancestor");
            }
            &mut text
        }
        Structure::Segment => text.layout(&SegmentHeaderRaw::TABLE),
        Structure::Frame => explain_frame(&mut text, bytes),
        Structure::Groups => {
            text.head("First group: its first frame");
            explain_frame(&mut text, bytes).head("The frame that follows it");
            let first = FrameHeaderRaw::from_bytes(bytes[..80].try_into().unwrap());
            let second = FrameHeaderRaw::LEN + first.payload_len as usize;
            explain_frame(&mut text, &bytes[second..]).pad(4096, "up to a multiple of 4096");
            text.head("Second group");
            explain_frame(&mut text, &bytes[4096..]).pad(4096, "up to a multiple of 4096")
        }
        Structure::Images => {
            text.layout(&ImageFileHeaderRaw::TABLE).pad(4096, "rest of the header block");
            text.layout(&ChunkHeaderRaw::TABLE);
            text.layout(&ImageHeaderRaw::TABLE).layout(&ImageHeaderRaw::TABLE).head("Payloads");
            let is_compressed = bytes[4096 + 2 * 64 + 56] == 1;
            for content in if is_compressed { compressed_contents() } else { contents() } {
                text.part(content.len(), "payload").pad(16, "up to a multiple of 16");
            }
            text.pad(4096, "up to a multiple of 4096")
        }
        Structure::Overlay => {
            text.layout(&OverlayHeaderRaw::TABLE);
            let rows = text.layout(&OverlayPieceRaw::TABLE).layout(&OverlayPieceRaw::TABLE);
            rows.part(3, "first piece").part(96, "second piece")
        }
        Structure::Manifest => {
            for copy in ["First copy", "Second copy, the same"] {
                text.head(copy);
                explain_manifest(&mut text, bytes);
            }
            &mut text
        }
    }
    .finish()
}

fn explain_frame<'t, 'a>(text: &'t mut Annotate<'a>, bytes: &[u8]) -> &'t mut Annotate<'a> {
    let header = FrameHeaderRaw::from_bytes(bytes[..80].try_into().unwrap());
    text.layout(&FrameHeaderRaw::TABLE);
    if header.kind == 2 {
        for _ in 0..header.payload_len / 16 {
            text.layout(&VerifiedSnapshotRaw::TABLE);
        }
        return text;
    }
    let op_count = PayloadHeadRaw::from_bytes(bytes[80..96].try_into().unwrap()).op_count;
    text.layout(&PayloadHeadRaw::TABLE);
    let mut at = 96;
    for _ in 0..op_count {
        let op = OpHeaderRaw::from_bytes(bytes[at..at + 32].try_into().unwrap());
        text.layout(&OpHeaderRaw::TABLE);
        match op.kind {
            1 => {
                text.layout(&CreateBodyRaw::TABLE);
                let key_len = usize::from(bytes[at + 32 + 1]);
                text.part(key_len, "key").metadata();
            }
            2 => _ = text.part(op.second as usize, "bytes"),
            3 => {
                let mask_len = (op.second as usize / usize::from(op.width)).div_ceil(8);
                text.part(mask_len, "mask").pad(16, "up to a multiple of 16");
                text.part(op.second as usize, "bytes");
            }
            4 => {
                let count = op.second as usize;
                if op.encoding == 0 {
                    text.part(4 * count, "indices");
                } else {
                    let ends = bytes[at + 32..].iter().enumerate().filter(|(_, byte)| **byte < 0x80);
                    let len = ends.map(|(end, _)| end + 1).take(count).last().unwrap_or(0);
                    text.part(len, "gaps between indices");
                }
                text.pad(16, "up to a multiple of 16");
                text.part(op.second as usize * usize::from(op.width), "elements");
            }
            5 => _ = text.part(op.width.into(), "pattern"),
            14 => _ = text.layout(&ImageBodyRaw::TABLE),
            8 | 10 => _ = text.entry(),
            9 | 11 | 12 => _ = text.part(op.body_len as usize, "text"),
            13 => _ = text.layout(&RestoreBodyRaw::TABLE),
            _ => {}
        }
        text.pad(16, "up to a multiple of 16");
        at = (at + 32 + op.body_len as usize).next_multiple_of(16);
    }
    text
}

fn explain_manifest(text: &mut Annotate<'_>, bytes: &[u8]) {
    text.layout(&ManifestHeaderRaw::TABLE);
    let is_overlaid = bytes[256 + 72] == 2;
    text.layout(&ManifestEntryRaw::TABLE);
    if is_overlaid {
        text.layout(&OverlayBaseRaw::TABLE);
    }
    text.part(7, "key").metadata().pad(8, "up to a multiple of 8");
    text.layout(&ManifestEntryRaw::TABLE).metadata().pad(8, "up to a multiple of 8");
    text.layout(&TombstoneRaw::TABLE).metadata().pad(4096, "up to a multiple of 4096");
}
