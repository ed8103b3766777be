//! Completes a restore: writes the directory's own opening, verifies all files from the medium, and publishes STORE
//! (rule 24).

use std::collections::{BTreeSet, HashSet};
use std::io;

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, encode_seal};
use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::log::{LogMap, LogWalk};
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::state::survey::read_manifest;
use remanent_format::store::StoreFile;
use remanent_format::{FileName, Folder, Incarnation, LogPoint, Lsn, SnapshotId};

use super::files::{file_of, invalid};
use super::random_number;
use super::record::ArchiveRecord;
use super::restore::{RestoredSegment, RestoredState};
use super::threads::for_each;
use super::unfetched::UnfetchedParts;
use crate::line::{ListedPart, RestoredEnd};
use crate::local::FenceRecord;
use crate::object::Part;

/// Maximum length in bytes of the longest frame of a log that is read back by several threads.
const CONCURRENT_LEN_MAX: usize = 64 << 20;

/// A restored named snapshot and its manifest.
#[derive(Clone, Copy, Debug)]
struct NamedManifest {
    snapshot: SnapshotId,
    manifest_crc: u32,
    redo: LogPoint,
}

/// The result of writing the log of a restore.
struct WrittenLog {
    store: StoreFile,
    /// The contents of STORE as bytes.
    store_bytes: Vec<u8>,
    named: Vec<NamedManifest>,
    segments: Vec<u64>,
}

impl RestoredState<'_> {
    /// Completes the restore. Until STORE is published as the last step, the engine refuses to open the directory.
    ///
    /// 1. Complete the segments, and write an opening that lists the restored snapshots, and the empty segment after
    ///    it.
    /// 2. Sync all files and folders, and read everything back from the medium.
    /// 3. Create the image files whose parts stay in the archive, and publish UNFETCHED.
    /// 4. Record the last batch and the named snapshots in ARCHIVE, so that the directory can continue the archive.
    /// 5. Publish STORE.
    pub fn finish(mut self, end: &RestoredEnd, claim: Option<FenceRecord>) -> io::Result<()> {
        // Step 1.
        let WrittenLog { store, store_bytes, named, segments } = self.write_log(end)?;
        // Step 2.
        self.sync_and_prove(&store, &segments, &named)?;
        // Step 3.
        if let Some(deferred) = self.deferred.take() {
            self.leave_unfetched(&UnfetchedParts::new(store.store, deferred))?;
        }
        // Step 4.
        let fences = claim.into_iter().collect();
        let batches = vec![end.batch];
        let named = named.iter().map(|named| named.snapshot).collect();
        let url = self.url.filter(|_| end.follows_open_store).unwrap_or_default().to_owned();
        let record = ArchiveRecord { fences, batches, named, url, ..ArchiveRecord::new(store.store) };
        record.publish(self.files)?;
        // Step 5.
        self.files.publish(FileName::Store, &store_bytes)
    }

    /// Creates sparse image files, and durably records in UNFETCHED which parts only the archive contains.
    fn leave_unfetched(&self, unfetched: &UnfetchedParts) -> io::Result<()> {
        for (number, parts) in &unfetched.files {
            let file = FileName::Pages(*number);
            self.files.write_at(file, 0, &[])?;
            self.files.set_len(file, UnfetchedParts::len_of(parts))?;
            self.files.sync(file)?;
        }
        self.files.sync_folder(Folder::Pages)?;
        if unfetched.files.is_empty() {
            return Ok(());
        }
        self.files.publish(FileName::Unfetched, &unfetched.encode())
    }

    /// Completes the temporary directory of a view. Syncs nothing, because the directory need not survive a crash.
    /// Returns the parts of image files that were not fetched.
    pub fn finish_view(mut self, end: &RestoredEnd) -> io::Result<Vec<ListedPart>> {
        let written = self.write_log(end)?;
        self.files.write_at(FileName::Store, 0, &written.store_bytes)?;
        Ok(self.deferred.unwrap_or_default())
    }

    /// Completes the segments, and writes an opening that lists the restored snapshots, and the empty segment after it.
    fn write_log(&mut self, end: &RestoredEnd) -> io::Result<WrittenLog> {
        self.check_complete()?;
        self.finish_writers()?;
        self.begin_log()?;
        let batch = self.batch;
        if (batch.lsn, batch.chain) != (end.batch.lsn, end.batch.chain) {
            return Err(invalid(format!("the restored log ends at lsn {}, not at {}", batch.lsn, end.batch)));
        }
        let (store, store_bytes) = self.store.take().ok_or_else(|| invalid("no fence contains STORE"))?;
        let named = self.read_named(&store)?;
        self.cover_starts(&named)?;
        let mut segments = self.complete_segments(&store)?;
        segments.extend(self.write_opening(&store, end, &named)?);
        Ok(WrittenLog { store, store_bytes, named, segments })
    }

    /// Reads the manifests of the restored named snapshots. Returns them oldest first.
    fn read_named(&self, store: &StoreFile) -> io::Result<Vec<NamedManifest>> {
        let mut found = Vec::new();
        for kept in &self.named {
            let file = FileName::Manifest(kept.snapshot.0);
            let (link, health) = read_manifest(self.files, file, store).map_err(invalid)?;
            let is_same = link.name.as_ref() == Some(&kept.name)
                && (link.redo.lsn, link.end, link.redo.chain)
                    == (kept.batch.lsn, kept.batch.lsn, kept.batch.chain);
            if !is_same {
                return Err(invalid(format!("{file} does not belong to the named snapshot {:?}", kept.name)));
            }
            let (snapshot, manifest_crc) = (kept.snapshot, health.header_crc);
            found.push(NamedManifest { snapshot, manifest_crc, redo: link.redo });
        }
        found.sort_unstable_by_key(|named| named.snapshot);
        Ok(found)
    }

    /// Adds the openings that a replay from each named snapshot needs. The `redo` of a named snapshot may be the start
    /// of an incarnation without batches. This start may be after the last frame or before the first frame.
    fn cover_starts(&mut self, named: &[NamedManifest]) -> io::Result<()> {
        let start = self.start.unwrap_or_default();
        for NamedManifest { redo, .. } in named.iter().filter(|named| named.redo.lsn >= start.lsn) {
            if redo.incarnation.number < start.incarnation.number {
                self.cover_before(*redo, start)?;
            }
        }
        let newest = named.iter().map(|named| named.redo.incarnation).max_by_key(|found| found.number);
        if let Some(newest) = newest.filter(|newest| newest.number > self.point.incarnation.number) {
            self.cross_to(newest)?;
            self.batch = self.point;
        }
        Ok(())
    }

    /// Adds the segments of the incarnations without batches between `redo` and `start`. Both points are after the same
    /// batch.
    fn cover_before(&mut self, redo: LogPoint, start: LogPoint) -> io::Result<()> {
        let mut point = start;
        while point != redo {
            let header = self.openings.get(&point.incarnation).copied();
            let found = header.and_then(|header| Some((header.segment, header.opening?)));
            let Some((segment, opening)) =
                found.filter(|(segment, opening)| opening.start(*segment) == point)
            else {
                return Err(invalid(format!("no fence lists the openings between {redo:?} and {start:?}")));
            };
            let at_start = RestoredSegment { opening: None, end: point.offset };
            self.segments.entry(segment).or_insert(at_start).opening = Some(opening);
            point = opening.predecessor; // The loop ends, because the predecessor's incarnation is lower.
        }
        self.segments.entry(redo.segment).or_insert(RestoredSegment { opening: None, end: redo.offset });
        Ok(())
    }

    /// Writes the headers of all segments that contain frames, and sets the lengths of the segments. Returns the
    /// segment numbers.
    fn complete_segments(&self, store: &StoreFile) -> io::Result<Vec<u64>> {
        for (number, segment) in &self.segments {
            let len = align_up(segment.end, GROUP_ALIGN).max(SEGMENT_LEN_MIN);
            self.write_segment(store, *number, len, segment.opening, &[])?;
        }
        Ok(self.segments.keys().copied().collect())
    }

    /// Writes the header of a segment and the frames after it, and sets its length.
    fn write_segment(
        &self,
        store: &StoreFile,
        number: u64,
        len: u64,
        opening: Option<Opening>,
        frames: &[u8],
    ) -> io::Result<()> {
        let file = FileName::Segment(number);
        let header = SegmentHeader { store: store.store, segment: number, segment_len: len, opening };
        self.files.write_at(file, 0, &header.encode())?;
        self.files.write_at(file, SEGMENT_HEADER_BLOCK, frames)?;
        self.files.set_len(file, len)
    }

    /// Writes the directory's own opening and an empty segment after it. Returns the numbers of both segments.
    fn write_opening(
        &self,
        store: &StoreFile,
        end: &RestoredEnd,
        named: &[NamedManifest],
    ) -> io::Result<[u64; 2]> {
        let number = self.segments.keys().next_back().map_or(1, |last| last + 1);
        let predecessor = self.batch;
        // A named snapshot may start in an incarnation without batches, whose number may be the highest.
        let highest = end.incarnation.max(predecessor.incarnation.number).max(self.highest_opening());
        let incarnation = Incarnation {
            number: highest.checked_add(1).ok_or_else(|| invalid("no incarnation number is left"))?,
            random: random_number()? as u32,
        };
        let opening = Opening {
            incarnation,
            predecessor,
            accepted: predecessor.lsn,
            accepted_chain: predecessor.chain,
        };
        let payload = encode_seal(&self.verified(store, named)?);
        let seal = FrameHeader {
            kind: FrameKind::Seal,
            group_start: true,
            incarnation,
            store: store.store,
            segment: number,
            offset: SEGMENT_HEADER_BLOCK,
            lsn: predecessor.lsn,
            durable: predecessor.lsn,
            payload_len: payload.len() as u32,
            payload_crc: crc32fast::hash(&payload),
            chain_prev: predecessor.chain,
        };
        let mut frames = seal.encode().0.to_vec();
        frames.extend_from_slice(&payload);
        frames.resize(seal.frame_len() as usize, 0);
        self.write_segment(store, number, SEGMENT_LEN_MIN, Some(opening), &frames)?;
        self.write_segment(store, number + 1, SEGMENT_LEN_MIN, None, &[])?;
        Ok([number, number + 1])
    }

    /// Returns the snapshots that the new opening lists as verified. The seals of the archived log cannot be used,
    /// because they list snapshots that the archive never contained.
    fn verified(&self, store: &StoreFile, named: &[NamedManifest]) -> io::Result<Vec<VerifiedSnapshot>> {
        let start = self.manifest.as_ref().map(|manifest| manifest.redo.lsn);
        let mut verified: Vec<VerifiedSnapshot> = Vec::new();
        for NamedManifest { snapshot, manifest_crc, redo } in named {
            let log_kept = start.is_some_and(|start| redo.lsn >= start);
            verified.push(VerifiedSnapshot { snapshot: *snapshot, manifest_crc: *manifest_crc, log_kept });
        }
        if let Some(manifest) =
            self.manifest.filter(|manifest| named.iter().all(|named| named.snapshot != manifest.snapshot))
        {
            let file = FileName::Manifest(manifest.snapshot.0);
            let (_, health) = read_manifest(self.files, file, store).map_err(invalid)?;
            let (snapshot, manifest_crc) = (manifest.snapshot, health.header_crc);
            verified.push(VerifiedSnapshot { snapshot, manifest_crc, log_kept: true });
        }
        verified.sort_unstable_by_key(|entry| entry.snapshot);
        Ok(verified)
    }

    /// Syncs all files and folders, and reads back from the medium all bytes that were not read back yet (I7).
    fn sync_and_prove(&self, store: &StoreFile, segments: &[u64], named: &[NamedManifest]) -> io::Result<()> {
        let files: BTreeSet<_> = self.parts.keys().map(|(role, file, _)| (*role, *file)).collect();
        let mut written: Vec<FileName> =
            files.into_iter().map(|(role, file)| file_of(role, file)).collect::<io::Result<_>>()?;
        written.extend(segments.iter().map(|segment| FileName::Segment(*segment)));
        for_each(&written, |file| self.files.sync_and_drop_cache(*file))?;
        for folder in [Folder::Log, Folder::Pages, Folder::Snapshots, Folder::Root] {
            self.files.sync_folder(folder)?;
        }
        let parts: Vec<&Part> = self.unproven_parts().collect();
        for_each(&parts, |part| self.files.check_part(part))?;
        self.prove_log(store, named)
    }

    /// Reads the restored log up to the directory's own opening, from each snapshot from which replay can start. Each
    /// walk ends where another one begins, so that the walks run concurrently and each batch is read once.
    fn prove_log(&self, store: &StoreFile, named: &[NamedManifest]) -> io::Result<()> {
        let map = LogMap::read(self.files, store.store).map_err(invalid)?;
        let start = match self.start.filter(|_| self.manifest.is_some()) {
            Some(redo) => redo,
            None => map.beginning().ok_or_else(|| invalid("the restored log has no beginning"))?,
        };
        let mut starts = vec![start];
        starts.extend(named.iter().map(|named| named.redo).filter(|redo| redo.lsn >= start.lsn));
        starts.extend(&self.points);
        let known: HashSet<LogPoint> = starts.drain(..).collect();
        starts.extend(&known);
        // The last walks may be the longest ones.
        starts.sort_unstable_by_key(|start| (start.lsn, start.segment, start.offset));
        let prove = |start: &LogPoint| self.prove_walk(&map, *start, &known);
        // Each walk holds a whole frame.
        if self.longest > CONCURRENT_LEN_MAX {
            starts.iter().try_for_each(prove)
        } else {
            for_each(&starts, prove)
        }
    }

    /// Reads the log from `start` to the end of a batch in `known`, or to the last batch.
    fn prove_walk(&self, map: &LogMap, start: LogPoint, known: &HashSet<LogPoint>) -> io::Result<()> {
        let mut walk = LogWalk::new(self.files, map, start, Lsn(0)).map_err(invalid)?;
        while let Some(frame) = walk.next().map_err(invalid)? {
            if frame.header.kind == FrameKind::Batch && known.contains(&frame.end) {
                return Ok(());
            }
        }
        let LogPoint { lsn, chain, .. } = walk.end().map(|end| end.proven).unwrap_or_default();
        if (lsn, chain) == (self.batch.lsn, self.batch.chain) {
            return Ok(());
        }
        Err(invalid(format!(
            "the log was restored up to lsn {}, but only lsn {lsn} can be read back",
            self.batch.lsn
        )))
    }
}
