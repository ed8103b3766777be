//! The pinned bytes of version 1. `golden/` contains one file for each structure and one for each kind of
//! defect, and with each file a text that explains every byte, or the difference from the valid file.
//!
//! Only this test writes the files:
//!
//! ```text
//! REMANENT_GOLDEN=write cargo test -p remanent-format --test golden
//! ```
//!
//! A change that alters an existing file changes the format. It needs a new version or a feature bit, and a
//! golden file of its own.

#[path = "support/annotate.rs"]
mod annotate;
#[path = "support/frames.rs"]
mod frames;
#[path = "support/explain.rs"]
mod explain;
#[path = "support/samples.rs"]
mod samples;
#[path = "support/defects.rs"]
mod defects;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use defects::{Damaged, damaged_files};
use remanent_format::frame::{
    FrameHeaderRaw, FrameKind, UncheckedFrame, check_payload, decode_seal, encode_seal,
};
use remanent_format::image::{ChunkHeader, ImageFileHeader, ImageRef, Overlay};
use remanent_format::limits::{METADATA_LEN_MAX, ROOT_LEN_MAX};
use remanent_format::manifest::Manifest;
use remanent_format::op::decode_payload;
use remanent_format::segment::SegmentHeader;
use remanent_format::store::StoreFile;
use remanent_format::value::{decode_entry, decode_metadata, encode_entry, encode_metadata};
use remanent_format::{Defect, LogPoint};
use samples::{BEFORE, CHUNK_AT, FRAME_AT, STORE, Sound, Structure, images_of, sound_files};

/// Decodes a structure as SPEC.md requires, including checksums and position, and encodes it again.
fn read_and_write(structure: Structure, bytes: &[u8]) -> Result<Vec<u8>, Defect> {
    match structure {
        Structure::Metadata => {
            encode_metadata(&decode_metadata(bytes, METADATA_LEN_MAX)?.0, METADATA_LEN_MAX)
        }
        Structure::Entry => {
            let ((name, value), _) = decode_entry(bytes, ROOT_LEN_MAX)?;
            encode_entry(&name, &value, ROOT_LEN_MAX)
        }
        Structure::Store => StoreFile::decode(bytes)?.encode(),
        Structure::Segment => Ok(SegmentHeader::decode(bytes)?.encode().to_vec()),
        Structure::Frame => Ok(read_frame(bytes, &BEFORE, FRAME_AT.1)?.0),
        Structure::Groups => {
            let (mut out, mut point) = (Vec::new(), BEFORE);
            // The next frame is directly after the last one, or else at the next group boundary.
            while out.len() < bytes.len() {
                let frame = read_frame(&bytes[out.len()..], &point, FRAME_AT.1 + out.len() as u64);
                if frame.is_err() && out.len() % 4096 != 0 {
                    out.resize(out.len().next_multiple_of(4096), 0);
                    continue;
                }
                let (frame, end) = frame?;
                out.extend_from_slice(&frame);
                point = end;
            }
            Ok(out)
        }
        Structure::Images => {
            ImageFileHeader::decode(bytes)?;
            let at = bytes.get(4096..).unwrap_or_default();
            let header = ChunkHeader::decode(at)?;
            header.check_location(STORE, CHUNK_AT.0, CHUNK_AT.1)?;
            let chunk = header.decode_table(at)?;
            let content =
                |image: &ImageRef| bytes[image.offset as usize..][..image.stored_len as usize].to_vec();
            let contents: Vec<_> = chunk.images.iter().map(|header| content(&header.image)).collect();
            for (header, content) in chunk.images.iter().zip(&contents) {
                header.image.check_content(content, header.len)?;
            }
            Ok(images_of(&chunk, &contents))
        }
        Structure::Overlay => {
            let overlay = Overlay::decode_head(bytes)?;
            let mut out = overlay.encode_head()?;
            out.extend_from_slice(&bytes[out.len()..]);
            assert_eq!(out.len() as u64, overlay.stored_len());
            Ok(out)
        }
        Structure::Manifest => {
            let (manifest, health) = Manifest::decode(bytes)?;
            assert!(health.is_whole(), "{health:?}");
            manifest.encode()
        }
    }
}

/// Decodes the frame after a point and encodes it again. Returns it with the point after it.
fn read_frame(bytes: &[u8], before: &LogPoint, offset: u64) -> Result<(Vec<u8>, LogPoint), Defect> {
    let (header, end) = UncheckedFrame::decode(bytes)?.follow(before, STORE, FRAME_AT.0, offset)?;
    let needed = FrameHeaderRaw::LEN + header.payload_len as usize;
    let payload = bytes.get(FrameHeaderRaw::LEN..needed);
    let payload = payload.ok_or(Defect::Truncated { needed: needed as u64, have: bytes.len() as u64 })?;
    check_payload(&header, payload)?;
    let written = match header.kind {
        FrameKind::Seal => encode_seal(&decode_seal(payload)?),
        FrameKind::Batch => {
            let ops: Vec<_> = decode_payload(payload)?.into_iter().map(|at| at.op).collect();
            samples::payload(&ops)
        }
    };
    let (header_bytes, chain) = header.encode();
    assert_eq!(chain, end.chain);
    let mut out = header_bytes.to_vec();
    out.extend_from_slice(&written);
    out.resize(header.frame_len() as usize, 0);
    Ok((out, end))
}

fn folder(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(kind)
}

/// Returns all golden files as the code produces them, and writes them to disk first if requested.
fn files() -> &'static (Vec<Sound>, Vec<Damaged>) {
    static FILES: OnceLock<(Vec<Sound>, Vec<Damaged>)> = OnceLock::new();
    FILES.get_or_init(|| {
        let sound = sound_files();
        let damaged = damaged_files(&sound);
        if std::env::var_os("REMANENT_GOLDEN").is_some_and(|value| value == "write") {
            for kind in ["sound", "damaged"] {
                // The folder does not exist the first time.
                _ = std::fs::remove_dir_all(folder(kind));
                std::fs::create_dir_all(folder(kind)).unwrap();
            }
            sound.iter().for_each(|file| write("sound", file.name, &file.bytes, &file.text));
            damaged.iter().for_each(|file| write("damaged", file.name, &file.bytes, &file.text));
        }
        (sound, damaged)
    })
}

fn write(kind: &str, name: &str, bytes: &[u8], text: &str) {
    std::fs::write(folder(kind).join(format!("{name}.bin")), bytes).unwrap();
    std::fs::write(folder(kind).join(format!("{name}.txt")), text).unwrap();
}

/// Reads the file on disk, and checks that it and its text equal those that the code produces.
fn read(kind: &str, name: &str, bytes: &[u8], text: &str) -> Vec<u8> {
    let on_disk = std::fs::read(folder(kind).join(format!("{name}.bin"))).unwrap();
    assert!(on_disk == bytes, "{kind}/{name}.bin is not what the encoder makes");
    let text_on_disk = std::fs::read_to_string(folder(kind).join(format!("{name}.txt"))).unwrap();
    assert_eq!(text_on_disk, text, "{kind}/{name}.txt");
    on_disk
}

#[test]
fn valid_files_round_trip_to_the_same_bytes() {
    for file in &files().0 {
        let on_disk = read("sound", file.name, &file.bytes, &file.text);
        let written = read_and_write(file.structure, &on_disk);
        assert!(written.as_ref() == Ok(&on_disk), "{}: {:?}", file.name, written.err());
    }
}

#[test]
fn every_defect_has_a_message() {
    let mut wrong = Vec::new();
    for file in &files().1 {
        let on_disk = read("damaged", file.name, &file.bytes, &file.text);
        let found = match read_and_write(file.structure, &on_disk) {
            Ok(_) => "no defect".to_owned(),
            Err(defect) => defect.to_string(),
        };
        if !found.starts_with(file.defect) {
            wrong.push(format!("{}: {found:?}, expected {:?}", file.name, file.defect));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn golden_folder_contains_no_other_files() {
    let (sound, damaged) = files();
    let names = [
        ("sound", sound.iter().map(|file| file.name).collect::<Vec<_>>()),
        ("damaged", damaged.iter().map(|file| file.name).collect()),
    ];
    for (kind, names) in names {
        let entries = std::fs::read_dir(folder(kind)).unwrap();
        let found: BTreeSet<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let expected: BTreeSet<_> =
            names.iter().flat_map(|name| [format!("{name}.bin"), format!("{name}.txt")]).collect();
        assert_eq!(found, expected);
        assert_eq!(expected.len(), 2 * names.len(), "two files of one name");
    }
}
