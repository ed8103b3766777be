//! Writes a directory from an archive: parts of files, and frames at their original locations (rule 24).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;

use remanent_format::frame::{FRAME_HEADER_LEN, FrameHeaderRaw, FrameKind, UncheckedFrame, check_payload};
use remanent_format::log::{header_in_order, next_locations};
use remanent_format::segment::{Opening, SegmentHeader};
use remanent_format::state::survey::read_manifest;
use remanent_format::store::StoreFile;
use remanent_format::{FileName, Folder, Incarnation, LogPoint, Lsn, ReadAt, StoreId};

use super::WriterLock;
use super::files::{StoreFiles, file_of, invalid};
use super::part_writers::{Durability, Extents, PartWriters};
use super::record::ArchiveRecord;
use crate::line::{ListedPart, StateSink};
use crate::local::FenceRecord;
use crate::object::{BatchPoint, Fence, KeptSnapshot, Manifest, PART_LEN_MAX, Part, Payload, Role};

/// Minimum distance of two points from which the log is read back concurrently, in bytes of batches.
const POINT_EVERY: u64 = 8 << 20;

/// A directory to restore an archive into.
///
/// ARCHIVE is the first file that is created and STORE the last one. A directory with ARCHIVE but without STORE is an
/// unfinished restore: the engine refuses to open it, and the next restore starts over.
#[derive(Debug)]
pub struct RestoreTarget {
    pub(super) files: StoreFiles,
    url: Option<String>,
    _lock: Box<dyn WriterLock>,
}

impl RestoreTarget {
    /// Opens an existing directory that is empty or contains an unfinished restore. `lock` is the writer lock of the
    /// directory; the value holds it until it is dropped.
    ///
    /// # Errors
    /// Returns an error with the kind `AlreadyExists` if the directory contains a store or other files.
    pub fn open(path: &Path, lock: Box<dyn WriterLock>) -> io::Result<Self> {
        Self::check(path)?;
        Ok(Self { files: StoreFiles::new(path), url: None, _lock: lock })
    }

    /// Sets the URL of the archive. If the archived store was archived while it was open, the directory records the URL
    /// and can be opened for writing only with this archive (rule 25).
    #[must_use]
    pub fn url(self, url: impl Into<String>) -> Self {
        Self { url: Some(url.into()), ..self }
    }

    /// Checks that `path` does not exist, is an empty directory, or contains an unfinished restore. Changes nothing.
    /// Call this function before acquiring the writer lock, because acquiring the lock creates files.
    ///
    /// # Errors
    /// Returns the errors of [`open`](RestoreTarget::open).
    pub fn check(path: &Path) -> io::Result<()> {
        let files = StoreFiles::new(path);
        let names = files.list(Folder::Root)?;
        let is_ours = |name: &String| {
            FileName::parse(Folder::Root, name).is_some_and(|file| file != FileName::Store)
                || Folder::INNER.iter().any(|folder| folder.name() == name)
                || name == "lost+found"
        };
        let mut found = names.iter().find(|name| !is_ours(name)).cloned();
        if found.is_none() && !names.contains(&FileName::Archive.name()) {
            found = files.inner_files()?.first().map(ToString::to_string);
        }
        match found {
            None => Ok(()),
            Some(found) => {
                let error = format!("{} contains {found}; restore into an empty directory", path.display());
                Err(io::Error::new(ErrorKind::AlreadyExists, error))
            }
        }
    }

    /// Records the fence of a claim. Returns after the record is durable.
    pub(crate) fn record_claim(&self, store: StoreId, claim: FenceRecord) -> io::Result<()> {
        ArchiveRecord { fences: vec![claim], ..ArchiveRecord::new(store) }.publish(&self.files)
    }

    /// Records that the directory contains an unfinished copy. Returns after the record is durable.
    pub(crate) fn record_copy(&self, store: StoreId) -> io::Result<()> {
        ArchiveRecord::new(store).publish(&self.files)
    }

    /// Removes the files of an unfinished restore and starts a new one. With `is_on_demand`, parts of image files stay
    /// in the archive.
    pub(crate) fn begin(&self, is_on_demand: bool) -> io::Result<RestoredState<'_>> {
        let mut state = RestoredState::begin(&self.files, self.url.as_deref(), Durability::Proven)?;
        state.deferred = is_on_demand.then(Vec::new);
        Ok(state)
    }
}

/// A segment that is being restored.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RestoredSegment {
    pub opening: Option<Opening>,
    /// The offset after the last frame.
    pub end: u64,
}

/// The progress of a restore.
#[derive(Debug)]
pub(crate) struct RestoredState<'t> {
    pub(super) files: &'t StoreFiles,
    pub(super) url: Option<&'t str>,
    /// The contents of STORE, decoded and as bytes.
    pub(super) store: Option<(StoreFile, Vec<u8>)>,
    /// The segment headers of the openings that fences list.
    pub(super) openings: BTreeMap<Incarnation, SegmentHeader>,
    pub(super) manifest: Option<Manifest>,
    /// The named snapshots that were received.
    pub(super) named: Vec<KeptSnapshot>,
    /// The parts that were written, by role, file and offset.
    pub(super) parts: BTreeMap<(Role, u64, u64), Part>,
    pub(super) segments: BTreeMap<u64, RestoredSegment>,
    /// The point at which the restored log starts, or `None` until it is known.
    pub(super) start: Option<LogPoint>,
    /// The point after the last frame that was written.
    pub(super) point: LogPoint,
    /// The point after the last batch that was written.
    pub(super) batch: LogPoint,
    /// The first bytes of a frame whose remaining bytes were not received yet.
    pending: Vec<u8>,
    /// The parts of image files that stay in the archive, or `None` for a restore that fetches all parts.
    pub(super) deferred: Option<Vec<ListedPart>>,
    durability: Durability,
    /// Points after batches, at some distance from each other, in log order.
    pub(super) points: Vec<LogPoint>,
    /// Number of bytes of batches after the last of `points`.
    since_point: u64,
    /// Length of the longest frame in bytes.
    pub(super) longest: usize,
    /// Writes the parts of image files and the frames.
    writers: Option<PartWriters>,
    /// The parts that were read back from the medium after they were written.
    proven: BTreeSet<Part>,
}

impl<'t> RestoredState<'t> {
    /// Removes the files of an unfinished restore from a directory, and returns the state to write into it.
    pub(super) fn begin(
        files: &'t StoreFiles,
        url: Option<&'t str>,
        durability: Durability,
    ) -> io::Result<Self> {
        files.make_folders()?;
        for file in files.inner_files()? {
            files.remove(file)?;
        }
        files.remove(FileName::Unfetched)?;
        Ok(Self {
            files,
            url,
            store: None,
            openings: BTreeMap::new(),
            manifest: None,
            named: Vec::new(),
            parts: BTreeMap::new(),
            segments: BTreeMap::new(),
            start: None,
            point: LogPoint::default(),
            batch: LogPoint::default(),
            pending: Vec::new(),
            deferred: None,
            durability,
            points: Vec::new(),
            since_point: 0,
            longest: 0,
            writers: None,
            proven: BTreeSet::new(),
        })
    }

    /// Sets the point at which the log starts: the `redo` of the snapshot, or the beginning of the log if there is no
    /// snapshot.
    pub(super) fn begin_log(&mut self) -> io::Result<()> {
        if self.start.is_some() {
            return Ok(());
        }
        let mut start = LogPoint::default();
        if let Some(manifest) = &self.manifest {
            let (store, _) = self.store.as_ref().ok_or_else(|| invalid("no fence precedes the snapshot"))?;
            let file = FileName::Manifest(manifest.snapshot.0);
            let (link, _) = read_manifest(self.files, file, store).map_err(invalid)?;
            start = link.redo;
            if (start.lsn, start.chain) != (manifest.redo.lsn, manifest.redo.chain) {
                return Err(invalid(format!(
                    "{file} begins after lsn {}, not after {}",
                    start.lsn, manifest.redo
                )));
            }
            // The segment of `redo` must exist even if it contains no frame (W1).
            self.segments.insert(start.segment, RestoredSegment { opening: None, end: start.offset });
        }
        self.start = Some(start);
        (self.point, self.batch) = (start, start);
        Ok(())
    }

    fn writers(&mut self) -> &mut PartWriters {
        let (files, durability) = (self.files, self.durability);
        self.writers.get_or_insert_with(|| PartWriters::new(files, durability))
    }

    /// Waits until all parts and frames are written, and all parts are read back.
    pub(super) fn finish_writers(&mut self) -> io::Result<()> {
        if let Some(writers) = self.writers.take() {
            self.proven.extend(writers.finish()?);
        }
        Ok(())
    }

    /// Returns the parts that must be read back after all files were synced: the parts that were not read back after
    /// their write, and the parts that overlap other parts.
    pub(super) fn unproven_parts(&self) -> impl Iterator<Item = &Part> {
        let end = |part: &Part| part.offset + part.len;
        let mut overlapping = BTreeSet::new();
        let mut last: Option<&Part> = None;
        for part in self.parts.values() {
            let before = last.filter(|last| (last.role, last.file) == (part.role, part.file));
            match before.filter(|before| end(before) > part.offset) {
                Some(before) => overlapping.extend([*before, *part]),
                None => last = Some(part),
            }
        }
        self.parts.values().filter(move |part| !self.proven.contains(part) || overlapping.contains(part))
    }

    /// Returns the highest incarnation number that a fence lists, or 0.
    pub(super) fn highest_opening(&self) -> u32 {
        self.openings.keys().next_back().map_or(0, |incarnation| incarnation.number)
    }

    /// Returns an error if the last frame is incomplete.
    pub(super) fn check_complete(&self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        Err(invalid(format!("the frame after lsn {} is cut off", self.point.lsn)))
    }

    fn store_id(&self) -> io::Result<StoreId> {
        let store = self.store.as_ref().map(|(store, _)| store.store);
        store.ok_or_else(|| invalid("no fence precedes the frames"))
    }

    fn decode(&self, head: &[u8]) -> io::Result<UncheckedFrame> {
        UncheckedFrame::decode(head).map_err(|defect| self.refuse(&defect))
    }

    /// Checks the frames in `piece` from `at` on, and passes them to the writers. The start of a frame that continues
    /// in the next piece becomes pending.
    fn write_frames(&mut self, piece: Payload, mut at: usize) -> io::Result<()> {
        let mut writes: Vec<Extents> = Vec::new();
        while let Some(head) = piece.get(at..at + FrameHeaderRaw::LEN) {
            let frame = self.decode(head)?;
            let end = at + frame.unproven().frame_len() as usize;
            let Some(bytes) = piece.get(at..end) else { break };
            if let Some((segment, offset)) = self.check_frame(&frame, bytes)? {
                match writes.last_mut().filter(|last| last.segment == segment) {
                    Some(last) => last.push(offset, at..end),
                    None => writes.push(Extents::new(segment, offset, at..end)),
                }
            }
            at = end;
        }
        self.pending.extend_from_slice(&piece[at..]);
        if piece.len() > PART_LEN_MAX {
            // A frame that no object contains as a whole. It is written here, so that no other one is in memory
            // meanwhile.
            return writes.into_iter().try_for_each(|extents| extents.write(self.files, &piece).map(drop));
        }
        if writes.is_empty() {
            return Ok(());
        }
        let piece = Arc::new(piece);
        writes.into_iter().try_for_each(|extents| self.writers().write_frames(extents, piece.clone()))
    }

    /// Checks that a frame continues the log (I3). Returns its segment and offset, or `None` if the snapshot contains
    /// it.
    fn check_frame(&mut self, frame: &UncheckedFrame, bytes: &[u8]) -> io::Result<Option<(u64, u64)>> {
        let found = *frame.unproven();
        let redo = self.start.map_or(Lsn(0), |start| start.lsn);
        let is_in_snapshot = match found.kind {
            FrameKind::Batch => found.lsn <= redo,
            FrameKind::Seal => found.lsn < redo,
        };
        if is_in_snapshot {
            return Ok(None);
        }
        if found.incarnation != self.point.incarnation {
            self.cross_to(found.incarnation)?;
        }
        let (segment, offset) = (found.segment, found.offset);
        if !next_locations(&self.point).contains(&(segment, offset)) {
            return Err(invalid(format!("the frame after lsn {} is not at its location", self.point.lsn)));
        }
        let (header, end) = header_in_order(bytes, &self.point, self.store_id()?, segment, offset)
            .map_err(|defect| self.refuse(&defect))?;
        let payload = &bytes[FRAME_HEADER_LEN as usize..][..header.payload_len as usize];
        check_payload(&header, payload).map_err(|defect| self.refuse(&defect))?;
        self.segments.entry(segment).or_default().end = end.offset;
        self.longest = self.longest.max(bytes.len());
        self.point = end;
        if header.kind == FrameKind::Batch {
            self.batch = end;
            self.since_point += bytes.len() as u64;
            if self.since_point >= POINT_EVERY {
                self.points.push(end);
                self.since_point = 0;
            }
        }
        Ok(Some((segment, offset)))
    }

    fn refuse(&self, defect: &remanent_format::Defect) -> io::Error {
        invalid(format!("the frame after lsn {} does not continue the log: {defect}", self.point.lsn))
    }

    /// Continues the log at the opening of `incarnation`, a later incarnation (W2). Incarnations without batches may
    /// precede it.
    pub(super) fn cross_to(&mut self, incarnation: Incarnation) -> io::Result<()> {
        let mut crossed = Vec::new();
        let mut wanted = incarnation;
        while wanted != self.point.incarnation {
            let header = self.openings.get(&wanted).copied();
            let Some((header, opening)) = header.and_then(|header| Some((header, header.opening?))) else {
                return Err(invalid(format!("no fence lists the opening of incarnation {wanted}")));
            };
            crossed.push((header.segment, opening));
            wanted = opening.predecessor.incarnation; // The loop ends, because the predecessor's number is lower.
        }
        for (segment, opening) in crossed.into_iter().rev() {
            if opening.predecessor != self.point {
                let error = format!(
                    "incarnation {} begins after lsn {}, but the log before it ends at lsn {}",
                    opening.incarnation, opening.predecessor.lsn, self.point.lsn
                );
                return Err(invalid(error));
            }
            self.point = opening.start(segment);
            self.segments.insert(segment, RestoredSegment { opening: Some(opening), end: self.point.offset });
        }
        Ok(())
    }
}

impl StateSink for RestoredState<'_> {
    fn manifest(&mut self, manifest: &Manifest) -> io::Result<()> {
        self.manifest = Some(*manifest);
        Ok(())
    }

    fn defers_images(&self) -> bool {
        self.deferred.is_some()
    }

    fn defer(&mut self, part: &ListedPart) {
        self.deferred.get_or_insert_default().push(*part);
    }

    fn part(&mut self, part: &Part, bytes: Payload) -> io::Result<()> {
        let place = (part.role, part.file, part.offset);
        let is_first = self.parts.insert(place, *part).is_none();
        if part.role == Role::Images && is_first {
            return self.writers().write(*part, bytes);
        }
        if !is_first {
            // The earlier part at the same place must not be written after this one.
            self.finish_writers()?;
            self.proven.retain(|proven| (proven.role, proven.file, proven.offset) != place);
        }
        self.files.write_at(file_of(part.role, part.file)?, part.offset, &bytes)
    }

    fn parts_in_memory(&self) -> usize {
        self.writers.as_ref().map_or(0, PartWriters::parts_in_memory)
    }

    fn frames(&mut self, _before: &BatchPoint, _after: &BatchPoint, piece: Payload) -> io::Result<()> {
        self.begin_log()?;
        let mut at = 0;
        while !self.pending.is_empty() {
            // First completes the header of the frame that began in an earlier piece, and then the frame.
            let header = self.pending.first_chunk::<{ FrameHeaderRaw::LEN }>();
            let len = match header {
                None => FrameHeaderRaw::LEN,
                Some(header) => self.decode(header)?.unproven().frame_len() as usize,
            };
            let is_frame = header.is_some();
            let end = piece.len().min(at + len.saturating_sub(self.pending.len()));
            self.pending.extend_from_slice(&piece[at..end]);
            at = end;
            if self.pending.len() < len {
                return Ok(()); // The piece is used up.
            }
            if is_frame {
                let frame = std::mem::take(&mut self.pending);
                self.write_frames(frame.into(), 0)?;
            }
        }
        self.write_frames(piece, at)
    }

    fn fence(&mut self, fence: &Fence) -> io::Result<()> {
        self.check_complete()?;
        let store = StoreFile::decode(&fence.store_file);
        let store = store.map_err(|defect| invalid(defect.at(FileName::Store, 0)))?;
        self.store = Some((store, fence.store_file.clone()));
        for header in &fence.openings {
            if let Some(opening) = header.opening {
                self.openings.insert(opening.incarnation, *header);
            }
        }
        Ok(())
    }

    fn truncate(&mut self, lsn: Lsn) -> io::Result<()> {
        let error =
            format!("the archive goes back to lsn {lsn}; a directory cannot be restored across a cut");
        Err(io::Error::new(ErrorKind::Unsupported, error))
    }

    fn named_part(&mut self, part: &Part, bytes: Payload) -> io::Result<()> {
        self.part(part, bytes)
    }

    fn named(&mut self, snapshot: &KeptSnapshot, _parts: &[Part]) -> io::Result<()> {
        self.named.push(snapshot.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Overlapping parts are read back again, because one of them may have been read back before another one was
    /// written.
    #[test]
    fn overlapping_parts_are_read_back_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = StoreFiles::new(folder.path());
        let mut state = RestoredState::begin(&files, None, Durability::Proven).unwrap();
        let of = |file, offset, len| Part { role: Role::Images, file, offset, len, crc: 0 };
        let parts = [
            of(1, 0, 10),
            of(1, 10, 10),
            of(2, 0, 50),
            of(2, 10, 5),
            of(2, 40, 20),
            of(2, 60, 1),
            of(3, 0, 9),
        ];
        for part in parts {
            state.parts.insert((part.role, part.file, part.offset), part);
        }
        state.proven.extend(&parts[..6]);
        let unproven: Vec<Part> = state.unproven_parts().copied().collect();
        assert_eq!(unproven, [parts[2], parts[3], parts[4], parts[6]]);
    }
}
