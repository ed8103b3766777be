//! Creates the files of a small store, frame by frame, as SPEC.md requires of writers.
//!
//! Batch 1 creates a page of 64 bytes with the key `p`. Batch *n* writes eight bytes of value *n* at the
//! start of the page and sets the root's entry `n`. The state at any Lsn is therefore known without another
//! model.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, encode_seal};
use remanent_format::image::{Chunk, CompressedBytes, ImageFileHeader, ImagePurpose, ImageRef, NewImage};
use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind, Tombstone};
use remanent_format::op::{Op, PayloadWriter};
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{
    Epoch, FileName, Incarnation, Key, LogPoint, Lsn, Metadata, PageId, Place, SnapshotId, StoreId, Value,
};

use crate::archive::Files;
use crate::frames;

pub const STORE: StoreId = StoreId([0x57; 16]);
pub const PAGE: PageId = PageId(1);
pub const PAGE_LEN: usize = 64;

/// A batch in the log of the newest incarnation.
#[derive(Clone)]
struct Batch {
    payload: Vec<u8>,
    /// The location of its frame.
    at: LogPoint,
    /// The point at its end.
    end: LogPoint,
}

/// A store under construction.
#[derive(Clone)]
pub struct Maker {
    pub files: Files,
    /// The point after the last frame.
    point: LogPoint,
    /// The durable mark in subsequent frames.
    durable: Lsn,
    batches: Vec<Batch>,
    /// Whether images are compressed.
    pub compress: bool,
}

impl Maker {
    /// Creates a store that consists of the first incarnation and its seal.
    pub fn new() -> Self {
        let mut maker = Self {
            files: Files::default(),
            point: LogPoint::default(),
            durable: Lsn(0),
            batches: Vec::new(),
            compress: false,
        };
        let file = StoreFile { store: STORE, features: Features::default(), record: StoreRecord::default() };
        maker.files.0.insert(FileName::Store, file.encode().unwrap());
        maker.open(LogPoint::default(), LogPoint::default(), 1);
        maker
    }

    fn open(&mut self, predecessor: LogPoint, accepted: LogPoint, segment: u64) {
        let number = predecessor.incarnation.number + 1;
        let opening = Opening {
            incarnation: Incarnation { number, random: 0x1000 + number },
            predecessor,
            accepted: accepted.lsn,
            accepted_chain: accepted.chain,
        };
        self.segment(segment, Some(opening));
        self.point = opening.start(segment);
        let tail = std::mem::take(&mut self.batches);
        for batch in tail.into_iter().filter(|batch| batch.end.lsn > predecessor.lsn) {
            let group_start = self.batches.is_empty();
            self.frame(FrameKind::Batch, &batch.payload, group_start);
        }
        let is_first = self.batches.is_empty();
        self.frame(FrameKind::Seal, &[], is_first);
    }

    /// Begins another incarnation, as recovery does, with batch `proven` as the predecessor's end.
    pub fn reopen(&mut self, proven: u64) {
        let end = |lsn| self.batches.iter().find(|batch| batch.end.lsn == Lsn(lsn)).expect("a batch").end;
        let (predecessor, accepted) = (end(proven), self.batches.last().expect("a batch").end);
        let newest = self.files.0.keys().filter_map(|name| match name {
            FileName::Segment(number) => Some(*number),
            _ => None,
        });
        let newest = newest.max().expect("a segment");
        self.open(predecessor, accepted, newest);
    }

    fn segment(&mut self, number: u64, opening: Option<Opening>) {
        for (number, opening) in [(number, opening), (number + 1, None)] {
            let header =
                SegmentHeader { store: STORE, segment: number, segment_len: SEGMENT_LEN_MIN, opening };
            let mut bytes = header.encode().to_vec();
            bytes.resize(SEGMENT_LEN_MIN as usize, 0);
            self.files.0.insert(FileName::Segment(number), bytes);
        }
    }

    fn frame(&mut self, kind: FrameKind, payload: &[u8], group_start: bool) {
        let align = if group_start { GROUP_ALIGN } else { 16 };
        let mut header = FrameHeader {
            kind,
            group_start,
            incarnation: self.point.incarnation,
            store: STORE,
            segment: self.point.segment,
            offset: align_up(self.point.offset, align),
            lsn: if kind == FrameKind::Batch { self.point.lsn.next() } else { self.point.lsn },
            durable: self.durable,
            payload_len: payload.len() as u32,
            payload_crc: crc32fast::hash(payload),
            chain_prev: self.point.chain,
        };
        if header.end() > SEGMENT_LEN_MIN {
            header.segment += 1;
            header.offset = SEGMENT_HEADER_BLOCK;
            header.group_start = true;
            self.segment(header.segment, None);
        }
        let (bytes, chain) = header.encode();
        let file = self.files.0.get_mut(&FileName::Segment(header.segment)).expect("made before");
        let at = header.offset as usize;
        file[at..at + bytes.len()].copy_from_slice(&bytes);
        file[at + bytes.len()..][..payload.len()].copy_from_slice(payload);
        let at = LogPoint { segment: header.segment, offset: header.offset, ..self.point };
        self.point = LogPoint { lsn: header.lsn, offset: header.end(), chain, ..at };
        if kind == FrameKind::Batch {
            self.batches.push(Batch { payload: payload.to_vec(), at, end: self.point });
        }
    }

    /// Appends the next batch at the start of a group.
    pub fn batch(&mut self) -> &mut Self {
        self.batch_of(&self.next_ops(), true)
    }

    /// Appends the next batch directly after the last frame.
    pub fn batch_in_group(&mut self) -> &mut Self {
        self.batch_of(&self.next_ops(), false)
    }

    pub fn batch_of(&mut self, ops: &[Op<'_>], group_start: bool) -> &mut Self {
        let mut writer = PayloadWriter::default();
        ops.iter().for_each(|op| writer.push(op).unwrap());
        self.frame(FrameKind::Batch, &writer.finish(), group_start);
        self
    }

    fn next_ops(&self) -> Vec<Op<'static>> {
        let number = self.point.lsn.0 + 1;
        let root = Op::SetRoot { name: "n".into(), value: Value::from(number) };
        let page = PAGE;
        let change = if number == 1 {
            let key = Some(Key::new("p").unwrap());
            Op::Create { page, len: PAGE_LEN as u64, place: Place::Host, key, metadata: Metadata::new() }
        } else {
            let words: &'static [[u8; 8]; 64] = &WORDS;
            Op::Write { page, offset: 0, bytes: &words[number as usize] }
        };
        vec![change, root]
    }

    /// Appends a seal in a group of its own.
    pub fn seal(&mut self, verified: &[VerifiedSnapshot]) -> &mut Self {
        self.frame(FrameKind::Seal, &encode_seal(verified), true);
        self
    }

    /// Appends a seal with an arbitrary payload.
    pub fn seal_of(&mut self, payload: &[u8]) -> &mut Self {
        self.frame(FrameKind::Seal, payload, true);
        self
    }

    /// Makes later frames state that all batches so far are durable.
    pub fn sync(&mut self) -> &mut Self {
        self.durable = self.point.lsn;
        self
    }

    /// Returns the number of the last batch.
    pub fn last(&self) -> u64 {
        self.point.lsn.0
    }

    /// Returns the segment and offset of a batch's frame.
    pub fn at(&self, lsn: u64) -> (u64, usize) {
        let batch = self.batches.iter().find(|batch| batch.end.lsn == Lsn(lsn)).expect("a batch");
        (batch.at.segment, batch.at.offset as usize)
    }

    /// Returns the bytes of the segment from the batch's frame on.
    pub fn frame_at(&mut self, lsn: u64) -> &mut [u8] {
        let (segment, offset) = self.at(lsn);
        &mut self.files.0.get_mut(&FileName::Segment(segment)).expect("a segment")[offset..]
    }

    /// Returns the point at a batch's end.
    pub fn end(&self, lsn: u64) -> LogPoint {
        self.batches.iter().find(|batch| batch.end.lsn == Lsn(lsn)).expect("a batch").end
    }

    /// Writes image file `number`, which contains the page after batch `lsn`.
    pub fn image(&mut self, number: u64, purpose: ImagePurpose, lsn: u64) -> ImageRef {
        let content = content(lsn);
        let frames = frames::runs(&[(content[0], 8), (0, PAGE_LEN - 8)]);
        let known = if purpose == ImagePurpose::Batch { 0 } else { lsn };
        let (epoch, lsn) = (Epoch(known), Lsn(known));
        let crc = crc32fast::hash(&content);
        let stored = CompressedBytes { len: frames.len() as u64, crc: crc32fast::hash(&frames) };
        let compressed = self.compress.then_some(stored);
        let image = NewImage { page: PAGE, epoch, lsn, len: PAGE_LEN as u64, crc, compressed };
        let chunk = Chunk::plan(number, 4096, &[image]).unwrap();
        let mut bytes = ImageFileHeader { store: STORE, file: number, purpose }.encode().to_vec();
        bytes.resize(4096, 0);
        bytes.extend_from_slice(&chunk.encode(STORE).unwrap());
        bytes.extend_from_slice(if self.compress { &frames } else { &content });
        bytes.resize(4096 + chunk.len as usize, 0);
        self.files.0.insert(FileName::Pages(number), bytes);
        chunk.images[0].image
    }

    /// Appends the next batch, whose bytes are in image file `number`.
    pub fn batch_with_image(&mut self, number: u64) -> &mut Self {
        let lsn = self.point.lsn.0 + 1;
        let image = self.image(number, ImagePurpose::Batch, lsn);
        let mut ops = self.next_ops();
        ops[0] = Op::Image { page: PAGE, len: PAGE_LEN as u64, image };
        self.batch_of(&ops, true)
    }

    /// Creates a manifest with this number that names an image of the page after batch `caught`. Also writes
    /// the image file.
    pub fn manifest(&mut self, number: u64, redo: u64, caught: u64, end: u64) -> Manifest {
        let image = self.image(number, ImagePurpose::Snapshot, caught);
        let entry = ManifestEntry {
            page: PAGE,
            key: Some(Key::new("p").unwrap()),
            len: PAGE_LEN as u64,
            epoch: Epoch(caught),
            lsn: Lsn(caught),
            place: Place::Host,
            metadata: Default::default(),
            image: Some(image),
        };
        Manifest {
            kind: ManifestKind::Base,
            store: STORE,
            snapshot: SnapshotId(number),
            name: None,
            created_unix_ms: 0,
            redo: self.end(redo),
            end: Lsn(end),
            next_page: 2,
            epoch_high: Epoch(caught),
            next_file: number + 1,
            ahead_from: 0,
            entries: vec![entry],
            tombstones: Vec::<Tombstone>::new(),
            root: root(end),
        }
    }

    /// Publishes a snapshot.
    pub fn snapshot(&mut self, number: u64, redo: u64, caught: u64, end: u64) -> &mut Self {
        let manifest = self.manifest(number, redo, caught, end);
        self.publish(FileName::Manifest(number), &manifest);
        self
    }

    /// Writes a manifest, and returns its header checksum.
    pub fn publish(&mut self, file: FileName, manifest: &Manifest) -> u32 {
        let bytes = manifest.encode().unwrap();
        let crc = u32::from_le_bytes(bytes[252..256].try_into().unwrap());
        self.files.0.insert(file, bytes);
        crc
    }
}

const WORDS: [[u8; 8]; 64] = {
    let mut words = [[0; 8]; 64];
    let mut number = 0;
    while number < 64 {
        words[number] = [number as u8; 8];
        number += 1;
    }
    words
};

/// Returns the page's bytes after batch `lsn`.
pub fn content(lsn: u64) -> Vec<u8> {
    let mut content = vec![0; PAGE_LEN];
    if lsn > 1 {
        content[..8].copy_from_slice(&WORDS[lsn as usize]);
    }
    content
}

/// Returns the root after batch `lsn`.
pub fn root(lsn: u64) -> Arc<Metadata> {
    Arc::new([("n".to_owned(), Value::from(lsn))].into())
}
