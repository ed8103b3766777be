//! One object of each kind and variant, and a function that decodes and encodes them.

use remanent_archive::object::{
    BatchPoint, Bound, Boundary, Catalog, Content, DataKey, DataRef, Defect, Fence, Hint, KeptFence,
    KeptSnapshot, LineObject, Links, Manifest, Nonce, ObjectDefect, ObjectKey, Part, Role, Run, crc64,
    decode_data, decode_header, encode_data, encode_probe,
};
use remanent_format::segment::{Opening, SegmentHeader};
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{Incarnation, LogPoint, Lsn, SnapshotId, StoreId};

pub const STORE: StoreId = StoreId(*b"store of samples");
const PAYLOAD: &[u8] = b"a part of an image file";

/// An object and the name of its golden file.
pub struct Sample {
    pub name: &'static str,
    pub key: ObjectKey,
    pub bytes: Vec<u8>,
}

fn point(number: u32, lsn: u64) -> BatchPoint {
    BatchPoint {
        incarnation: Incarnation { number, random: 0xabcd },
        lsn: Lsn(lsn),
        chain: 0x1000 + lsn as u32,
    }
}

fn nonce(number: u8) -> Nonce {
    Nonce([number; 16])
}

fn store_file() -> Vec<u8> {
    let record = StoreRecord { identity: b"model".to_vec(), ..StoreRecord::default() };
    StoreFile { store: STORE, features: Features::default(), record }.encode().expect("a valid record")
}

fn opening() -> SegmentHeader {
    let BatchPoint { incarnation: before, lsn, chain } = point(1, 7);
    let opening = Opening {
        incarnation: Incarnation { number: 2, random: 0xabcd },
        predecessor: LogPoint { incarnation: before, lsn, segment: 3, offset: 8192, chain },
        accepted: Lsn(9),
        accepted_chain: 0x1009,
    };
    SegmentHeader { store: STORE, segment: 4, segment_len: 65_536, opening: Some(opening) }
}

fn part(role: Role, file: u64) -> Part {
    Part { role, file, offset: 4096, len: PAYLOAD.len() as u64, crc: crc64(PAYLOAD) }
}

fn entry(role: Role, file: u64) -> DataRef {
    DataRef { key: DataKey { term: 12, random: 0xabcd, index: file }, part: part(role, file) }
}

fn line(position: u64, data: Vec<DataRef>, content: Content) -> LineObject {
    LineObject {
        store: STORE,
        position,
        term: if matches!(content, Content::Fence(_)) { position } else { 12 },
        nonce: nonce(position as u8),
        nonce_before: nonce(position as u8 - 1),
        links: Links { fence: 12, boundary: 11, manifest: 10, listing: 9, catalog: 0 },
        archived: point(2, 20),
        data,
        content,
    }
}

fn fence(openings: Vec<SegmentHeader>, cut: Option<BatchPoint>) -> Fence {
    Fence { store_file: store_file(), openings, cut, follows_open_store: false }
}

/// Returns the line objects and their names.
pub fn line_objects() -> Vec<(&'static str, LineObject)> {
    let kept = KeptFence { position: 5, nonce: nonce(5), content: fence(vec![opening()], None) };
    let bytes = PAYLOAD.len() as u64;
    let named = |position, snapshot, name: &str| KeptSnapshot {
        position,
        nonce: nonce(position as u8),
        snapshot: SnapshotId(snapshot),
        batch: point(1, 2 * snapshot),
        name: name.to_owned(),
        bytes,
    };
    let snapshots = vec![named(8, 3, "before tuning")];
    let with_catalog =
        |catalog, object: LineObject| LineObject { links: Links { catalog, ..object.links }, ..object };
    let catalog = |snapshots| Content::Catalog(Catalog { snapshots });
    let both = vec![named(8, 3, "before tuning"), named(22, 5, "tuned")];
    let boundary = Boundary { number: 3, start: 10, manifest: 14, fence: Some(kept), snapshots };
    let manifest = Manifest {
        snapshot: SnapshotId(6),
        start: 15,
        redo: point(2, 16),
        end: point(2, 20),
        follows_gap: false,
    };
    let run = |frames: &[u8]| Run { before: point(2, 18), after: point(2, 20), frames: frames.to_vec() };
    let lists = [Role::Link, Role::Images, Role::Table].map(|role| entry(role, role as u64)).to_vec();
    vec![
        ("fence", line(13, vec![], Content::Fence(fence(vec![opening()], None)))),
        ("fence-claim", line(14, vec![], Content::Fence(fence(vec![], None)))),
        ("fence-cut", line(15, vec![], Content::Fence(fence(vec![opening()], Some(point(1, 5)))))),
        (
            "fence-open",
            line(
                24,
                vec![],
                Content::Fence(Fence { follows_open_store: true, ..fence(vec![opening()], None) }),
            ),
        ),
        ("run", line(16, vec![], Content::Run(run(b"frames of batches 19 and 20")))),
        ("run-long", line(17, vec![entry(Role::Frames, 19)], Content::Run(run(b"")))),
        ("manifest", line(18, lists.clone(), Content::Manifest(manifest))),
        ("manifest-gap", line(19, lists, Content::Manifest(Manifest { follows_gap: true, ..manifest }))),
        ("boundary", with_catalog(8, line(20, vec![], Content::Boundary(boundary.clone())))),
        (
            "boundary-first",
            line(21, vec![], Content::Boundary(Boundary { fence: None, snapshots: vec![], ..boundary })),
        ),
        ("catalog", with_catalog(8, line(22, vec![entry(Role::Link, 5)], catalog(both)))),
        ("catalog-removal", with_catalog(22, line(23, vec![], catalog(vec![])))),
    ]
}

/// Returns a valid object of each kind and variant.
pub fn samples() -> Vec<Sample> {
    let lines = line_objects();
    let of_line = |(name, object): &(&'static str, LineObject)| Sample {
        name,
        key: ObjectKey::Line(object.position),
        bytes: object.encode().expect("a valid object"),
    };
    let mut samples: Vec<Sample> = lines.iter().map(of_line).collect();
    let (_, boundary) = lines.into_iter().find(|(name, _)| *name == "boundary").expect("a boundary");
    let bound = Bound { object: boundary };
    let key = entry(Role::Images, 2).key;
    samples.push(Sample {
        name: "bound",
        key: ObjectKey::Bound(3),
        bytes: bound.encode().expect("a valid object"),
    });
    samples.push(Sample {
        name: "data",
        key: ObjectKey::Data(key),
        bytes: encode_data(STORE, key, nonce(9), PAYLOAD).expect("a valid object"),
    });
    samples.push(Sample {
        name: "hint",
        key: ObjectKey::Newest,
        bytes: Hint { end: 21, manifest: 19, bound: 3, start: 17, lines: vec![15, 18], data: vec![key] }
            .encode(STORE, 12),
    });
    samples.push(Sample {
        name: "probe",
        key: ObjectKey::Probe(77),
        bytes: encode_probe(STORE, 77, nonce(7)),
    });
    samples
}

/// Decodes the object that is stored under `key`, and encodes it again.
pub fn read_and_write(key: ObjectKey, bytes: &[u8]) -> Result<Vec<u8>, ObjectDefect> {
    match key {
        ObjectKey::Line(position) => LineObject::decode(bytes, position, Some(STORE))?.encode(),
        ObjectKey::Bound(number) => Bound::decode(bytes, number, Some(STORE))?.encode(),
        ObjectKey::Data(key) => {
            let entry = DataRef { key, ..entry(Role::Images, 2) };
            let payload = decode_data(bytes, &entry, STORE)?.to_vec();
            encode_data(STORE, key, decode_header(bytes)?.nonce, &payload)
        }
        ObjectKey::Newest => Ok(Hint::decode(bytes, Some(STORE))?.encode(STORE, decode_header(bytes)?.term)),
        ObjectKey::Probe(number) => {
            let header = decode_header(bytes)?;
            let is_own = header.key == key && header.store == STORE;
            if is_own { Ok(encode_probe(STORE, number, header.nonce)) } else { Err(Defect::Misplaced.at(32)) }
        }
    }
}
