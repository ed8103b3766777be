//! A simulated store directory with only the parts that an archive reads: a log with marks, openings and image files.

use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

use remanent_format::segment::{Opening, SegmentHeader};
use remanent_format::{Incarnation, LogPoint, Lsn, SnapshotId, StoreId};

use crate::line::{NamedParts, RestoredEnd, SnapshotParts, StateSink};
use crate::local::{FenceRecord, SealedFrames};
use crate::object::{BatchPoint, Fence, KeptSnapshot, Manifest, Part, Payload, Role, crc64};

/// The contents of a batch: a unique number.
pub type Token = u64;

/// Length of an encoded batch in bytes.
const BATCH_LEN: usize = 20;

/// A batch of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The contents of the batch.
    pub token: Token,
    /// The incarnation that wrote the frame.
    pub incarnation: Incarnation,
    /// Chain hash of the frame.
    pub chain: u32,
}

impl Batch {
    fn after(before: Option<&Batch>, token: Token, incarnation: Incarnation) -> Self {
        let chain_before = before.map_or(0, |batch| batch.chain);
        let mut bytes = Vec::with_capacity(BATCH_LEN);
        bytes.extend_from_slice(&chain_before.to_le_bytes());
        bytes.extend_from_slice(&token.to_le_bytes());
        bytes.extend_from_slice(&incarnation.number.to_le_bytes());
        bytes.extend_from_slice(&incarnation.random.to_le_bytes());
        Self { token, incarnation, chain: crc32fast::hash(&bytes) }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.token.to_le_bytes());
        out.extend_from_slice(&self.incarnation.number.to_le_bytes());
        out.extend_from_slice(&self.incarnation.random.to_le_bytes());
        out.extend_from_slice(&self.chain.to_le_bytes());
    }

    fn decode_all(bytes: &[u8]) -> impl Iterator<Item = Self> {
        bytes.chunks_exact(BATCH_LEN).map(|batch| {
            let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| batch[at + byte]));
            let token = u64::from(word(0)) | u64::from(word(4)) << 32;
            let incarnation = Incarnation { number: word(8), random: word(12) };
            Self { token, incarnation, chain: word(16) }
        })
    }
}

/// An image file, which contains a range of batches.
#[derive(Clone, Debug)]
pub struct ImageFile {
    number: u64,
    end: usize,
    bytes: Rc<[u8]>,
}

impl ImageFile {
    fn of(number: u64, first: usize, batches: &[Batch]) -> Self {
        let mut bytes = (first as u64).to_le_bytes().to_vec();
        batches.iter().for_each(|batch| batch.encode(&mut bytes));
        Self { number, end: first + batches.len(), bytes: bytes.into() }
    }

    fn part(&self) -> Part {
        let len = self.bytes.len() as u64;
        Part { role: Role::Images, file: self.number, offset: 0, len, crc: crc64(&self.bytes) }
    }
}

/// A simulated store directory.
#[derive(Clone, Debug)]
pub struct SimStore {
    /// The id of the store.
    pub id: StoreId,
    /// All batches. The batch at index `n` has Lsn `n + 1`.
    pub log: Vec<Batch>,
    /// Number of synced batches.
    pub durable: usize,
    /// Number of batches under a synced mark.
    pub mark: usize,
    /// Whether this directory is an old copy of another one.
    pub is_old_copy: bool,
    /// The batches of the frames that an opening dropped and copied into its own incarnation.
    dropped: Vec<BatchPoint>,
    /// The highest incarnation number of the line when this directory was restored (rule 24).
    incarnation_floor: u32,
    pub(super) openings: Vec<SegmentHeader>,
    images: Vec<ImageFile>,
    /// The bytes of all image files, including those that only named snapshots need.
    parts: HashMap<Part, Rc<[u8]>>,
    /// Named snapshots, oldest first.
    pub named: Vec<NamedParts>,
    /// Names of all named snapshots that the directory ever contained.
    pub known_names: HashSet<String>,
    files: u64,
    snapshots: u64,
    pub(super) fences: Vec<FenceRecord>,
}

impl SimStore {
    /// Creates the directory of a new store.
    #[must_use]
    pub fn create(random: u64) -> Self {
        let mut id = [0xa5; 16];
        id[..8].copy_from_slice(&random.to_le_bytes());
        Self {
            id: StoreId(id),
            log: Vec::new(),
            durable: 0,
            mark: 0,
            is_old_copy: false,
            dropped: Vec::new(),
            incarnation_floor: 0,
            openings: Vec::new(),
            images: Vec::new(),
            parts: HashMap::new(),
            named: Vec::new(),
            known_names: HashSet::new(),
            files: 0,
            snapshots: 0,
            fences: Vec::new(),
        }
    }

    /// Creates a directory from a restored state. `fence` is the claim that the restore created, if any.
    #[must_use]
    pub fn restored(state: Restored, end: &RestoredEnd, fence: Option<FenceRecord>) -> Self {
        let count = state.batches.len();
        let files = state.parts.keys().map(|part| part.file).max().unwrap_or(0);
        let mut store = Self::create(0);
        store.id = end.store;
        store.log = state.batches;
        (store.durable, store.mark) = (count, count);
        store.images = state.images;
        store.parts = state.parts;
        store.named = state.named;
        store.named.sort_by_key(|named| named.snapshot);
        store.known_names = store.named.iter().map(|named| named.name.clone()).collect();
        store.files = files;
        let newest_named = store.named.last().map_or(0, |named| named.snapshot.0);
        store.snapshots = state.snapshot.max(newest_named);
        store.fences = fence.into_iter().collect();
        store.incarnation_floor = end.incarnation;
        store
    }

    /// Returns true if this directory created the fence at `position`.
    #[must_use]
    pub fn is_fence_of(&self, position: u64) -> bool {
        !self.is_old_copy
            && self.fences.iter().any(|record| record.is_confirmed && record.position == position)
    }

    /// Returns the contents of the batches from index `first` up to `end`.
    #[must_use]
    pub fn tokens(&self, first: usize, end: usize) -> Vec<Token> {
        let end = end.min(self.log.len());
        self.log[first.min(end)..end].iter().map(|batch| batch.token).collect()
    }

    /// Returns the batch with Lsn `count`, or the empty store for 0.
    pub(super) fn point(&self, count: usize) -> BatchPoint {
        let Some(batch) = count.checked_sub(1).and_then(|last| self.log.get(last)) else {
            return BatchPoint::default();
        };
        BatchPoint { incarnation: batch.incarnation, lsn: Lsn(count as u64), chain: batch.chain }
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.openings
            .last()
            .and_then(|header| header.opening)
            .map_or_else(Incarnation::default, |o| o.incarnation)
    }

    /// Plans an opening, which drops the batches above the newest durable mark from their incarnation. Call
    /// [`publish_opening`](SimStore::publish_opening) to complete it.
    pub fn plan_opening(&mut self, random: u64) {
        let number = self.incarnation().number.max(self.incarnation_floor) + 1;
        let incarnation = Incarnation { number, random: random as u32 };
        let predecessor = self.point(self.mark.min(self.log.len()));
        self.openings.push(opening(self.id, incarnation, &predecessor));
    }

    /// Discards a planned opening.
    pub fn discard_opening(&mut self) {
        self.openings.pop();
    }

    /// Completes the planned opening: copies the dropped batches into the new incarnation and syncs them.
    pub fn publish_opening(&mut self) {
        let incarnation = self.incarnation();
        for at in self.mark.min(self.log.len())..self.log.len() {
            self.dropped.push(self.point(at + 1));
            let before = at.checked_sub(1).map(|before| self.log[before]);
            self.log[at] = Batch::after(before.as_ref(), self.log[at].token, incarnation);
        }
        self.seal();
    }

    /// Appends a batch to the log without syncing.
    pub fn commit(&mut self, token: Token) {
        let batch = Batch::after(self.log.last(), token, self.incarnation());
        self.log.push(batch);
    }

    /// Syncs the log. The synced frames contain the previous mark.
    pub fn sync(&mut self) {
        self.mark = self.durable;
        self.durable = self.log.len();
    }

    /// Syncs the log and a seal that contains the new mark.
    pub fn seal(&mut self) {
        self.durable = self.log.len();
        self.mark = self.durable;
    }

    /// Starts a snapshot of the current state. Returns its `redo`.
    #[must_use]
    pub fn snapshot_redo(&self) -> usize {
        self.log.len()
    }

    /// Completes a snapshot. It either shares the images of the previous snapshot or writes all images again.
    pub fn complete_snapshot(&mut self, redo: usize, is_base: bool) -> SnapshotParts {
        self.write_images(redo, is_base);
        SnapshotParts {
            snapshot: SnapshotId(self.snapshots),
            redo: self.point(redo),
            end: self.point(self.log.len()),
            parts: self.images.iter().map(ImageFile::part).collect(),
            follows_gap: false,
        }
    }

    /// Writes the images of a snapshot.
    fn write_images(&mut self, redo: usize, is_base: bool) {
        self.seal();
        if is_base {
            self.images.clear();
        }
        let covered = self.images.last().map_or(0, |image| image.end);
        if redo > covered {
            self.files += 1;
            let image = ImageFile::of(self.files, covered, &self.log[covered..redo]);
            self.parts.insert(image.part(), image.bytes.clone());
            self.images.push(image);
        }
        self.snapshots += 1;
    }

    /// Takes a named snapshot of the current state.
    pub fn take_named(&mut self, name: String) -> NamedParts {
        let count = self.log.len();
        self.write_images(count, false);
        let parts = self.images.iter().map(ImageFile::part).collect();
        let named =
            NamedParts { snapshot: SnapshotId(self.snapshots), name, batch: self.point(count), parts };
        self.known_names.insert(named.name.clone());
        self.named.push(named.clone());
        named
    }

    /// Records that the archive contains a named snapshot with this number.
    pub fn skip_number(&mut self, snapshot: SnapshotId) {
        self.snapshots = self.snapshots.max(snapshot.0);
    }
}

impl SimStore {
    /// Completes a snapshot that follows a gap and lists the frames from its `redo` to its end.
    pub fn complete_rebase(&mut self, redo: usize) -> SnapshotParts {
        let mut snapshot = self.complete_snapshot(redo, true);
        let bytes = self.frames_from(redo);
        if !bytes.is_empty() {
            let file = redo as u64 + 1;
            let len = bytes.len() as u64;
            snapshot.parts.push(Part { role: Role::Frames, file, offset: 0, len, crc: crc64(&bytes) });
        }
        snapshot.follows_gap = true;
        snapshot
    }

    fn frames_from(&self, first: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.log[first..].iter().for_each(|batch| batch.encode(&mut bytes));
        bytes
    }

    /// Returns the frames of the batches from index `first` up to `end`.
    pub(super) fn frames(&self, first: usize, end: usize) -> Option<SealedFrames> {
        let end = end.min(self.log.len());
        if first >= end {
            return None;
        }
        let mut bytes = Vec::new();
        self.log[first..end].iter().for_each(|batch| batch.encode(&mut bytes));
        Some(SealedFrames { before: self.point(first), after: self.point(end), bytes, files: Vec::new() })
    }

    pub(super) fn chain_of(&self, incarnation: Incarnation, lsn: Lsn) -> Option<u32> {
        let current = self.point(lsn.0 as usize);
        let mut known = self.dropped.iter().chain(std::iter::once(&current));
        known.find(|point| point.incarnation == incarnation && point.lsn == lsn).map(|point| point.chain)
    }

    /// Records fences. A directory that creates a fence no longer counts as an old copy.
    pub(super) fn record_fences(&mut self, fences: &[FenceRecord]) {
        let is_new = |record: &FenceRecord| record.is_confirmed && !self.fences.contains(record);
        self.is_old_copy &= !fences.iter().any(is_new);
        self.fences = fences.to_vec();
    }

    pub(super) fn read_part(&self, part: &Part) -> Option<Vec<u8>> {
        if part.role == Role::Frames {
            let mut frames = self.frames_from(part.file as usize - 1);
            frames.truncate(part.len as usize);
            return Some(frames);
        }
        self.parts.get(part).map(|bytes| bytes.to_vec())
    }
}

fn opening(store: StoreId, incarnation: Incarnation, predecessor: &BatchPoint) -> SegmentHeader {
    let BatchPoint { incarnation: before, lsn, chain } = *predecessor;
    let predecessor = LogPoint { incarnation: before, lsn, segment: 0, offset: 0, chain };
    let opening = Opening { incarnation, predecessor, accepted: lsn, accepted_chain: chain };
    SegmentHeader {
        store,
        segment: u64::from(incarnation.number),
        segment_len: 65_536,
        opening: Some(opening),
    }
}

/// A state that is being read, or was read, from the archive.
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// The batches of the state.
    pub batches: Vec<Batch>,
    images: Vec<ImageFile>,
    parts: HashMap<Part, Rc<[u8]>>,
    /// The named snapshots of the state.
    pub named: Vec<NamedParts>,
    snapshot: u64,
    redo: BatchPoint,
}

impl Restored {
    /// Returns the contents of the batches.
    #[must_use]
    pub fn tokens(&self) -> Vec<Token> {
        self.batches.iter().map(|batch| batch.token).collect()
    }

    /// Returns the contents of the batches in a named snapshot.
    ///
    /// # Panics
    /// Panics if a part of the snapshot was not received.
    #[must_use]
    pub fn tokens_of(&self, named: &NamedParts) -> Vec<Token> {
        let parts = named.parts.iter().map(|part| &self.parts[part]);
        parts.flat_map(|bytes| Batch::decode_all(&bytes[8..]).map(|batch| batch.token)).collect()
    }

    fn check_redo(&self) -> io::Result<()> {
        let last = self.batches.last();
        let is_at_redo = self.batches.len() as u64 != self.redo.lsn.0
            || last.map_or(0, |batch| batch.chain) == self.redo.chain;
        if is_at_redo && self.batches.len() as u64 >= self.redo.lsn.0 {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the images are not the state at redo"))
    }
}

impl StateSink for Restored {
    fn manifest(&mut self, manifest: &Manifest) -> io::Result<()> {
        *self = Self { redo: manifest.redo, snapshot: manifest.snapshot.0, ..Self::default() };
        Ok(())
    }

    fn part(&mut self, part: &Part, bytes: Payload) -> io::Result<()> {
        let first = u64::from_le_bytes(std::array::from_fn(|at| bytes[at])) as usize;
        self.batches.truncate(first);
        self.batches.extend(Batch::decode_all(&bytes[8..]));
        let bytes: Rc<[u8]> = Rc::from(&*bytes);
        self.parts.insert(*part, bytes.clone());
        self.images.push(ImageFile { number: part.file, end: self.batches.len(), bytes });
        Ok(())
    }

    fn frames(&mut self, before: &BatchPoint, _after: &BatchPoint, piece: Payload) -> io::Result<()> {
        self.check_redo()?;
        for (lsn, batch) in (before.lsn.0 as usize + 1..).zip(Batch::decode_all(&piece)) {
            if lsn as u64 <= self.redo.lsn.0 {
                continue;
            }
            let is_next = lsn == self.batches.len() + 1;
            if !is_next || Batch::after(self.batches.last(), batch.token, batch.incarnation) != batch {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("the chain breaks at lsn {lsn}"),
                ));
            }
            self.batches.push(batch);
        }
        Ok(())
    }

    fn fence(&mut self, _fence: &Fence) -> io::Result<()> {
        self.check_redo()
    }

    fn truncate(&mut self, lsn: Lsn) -> io::Result<()> {
        self.batches.truncate(lsn.0 as usize);
        self.redo = BatchPoint::default();
        Ok(())
    }

    fn named_part(&mut self, part: &Part, bytes: Payload) -> io::Result<()> {
        self.parts.insert(*part, Rc::from(&*bytes));
        Ok(())
    }

    fn named(&mut self, snapshot: &KeptSnapshot, parts: &[Part]) -> io::Result<()> {
        if let Some(missing) = parts.iter().find(|part| !self.parts.contains_key(part)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{missing:?} was not received")));
        }
        let KeptSnapshot { snapshot, batch, name, .. } = snapshot.clone();
        self.named.push(NamedParts { snapshot, name, batch, parts: parts.to_vec() });
        Ok(())
    }
}
