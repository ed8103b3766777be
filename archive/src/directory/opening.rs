//! The end of a restore: the directory's own opening, proofs from the medium, and STORE (rule 24).

use std::io;

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, encode_seal};
use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::log::{LogMap, LogWalk};
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::state::survey::read_manifest;
use remanent_format::store::StoreFile;
use remanent_format::{FileName, Folder, Incarnation, LogPoint, Lsn};

use super::files::{file_of, invalid};
use super::random_number;
use super::record::ArchiveRecord;
use super::restore::RestoredState;
use crate::line::RestoredEnd;
use crate::local::FenceRecord;

impl RestoredState<'_> {
    /// Completes the restore. STORE gets its name last: until then, the engine refuses the directory.
    ///
    /// 1. Complete the segments, and write an opening that lists the restored snapshot, and the empty segment after it.
    /// 2. Sync all files and folders, and read everything back from the medium.
    /// 3. Record the last batch, so that the archive can be continued.
    /// 4. Publish STORE.
    pub fn finish(mut self, end: &RestoredEnd, claim: FenceRecord) -> io::Result<()> {
        self.check_complete()?;
        self.begin_log()?;
        let batch = self.batch;
        if (batch.lsn, batch.chain) != (end.batch.lsn, end.batch.chain) {
            return Err(invalid(format!("the restored log ends at lsn {}, not at {}", batch.lsn, end.batch)));
        }
        let (store, store_bytes) = self.store.take().ok_or_else(|| invalid("no fence contains STORE"))?;
        // Step 1.
        let mut segments = self.complete_segments(&store)?;
        segments.extend(self.write_opening(&store, end)?);
        // Step 2.
        self.sync_and_prove(&store, &segments)?;
        // Step 3.
        let fences = vec![claim];
        let record = ArchiveRecord { store: store.store, fences, batches: vec![end.batch] };
        record.publish(self.files)?;
        // Step 4.
        self.files.publish(FileName::Store, &store_bytes)
    }

    /// Writes the headers of the segments that contain frames. Returns the segments.
    fn complete_segments(&self, store: &StoreFile) -> io::Result<Vec<u64>> {
        for (number, segment) in &self.segments {
            let len = align_up(segment.end, GROUP_ALIGN).max(SEGMENT_LEN_MIN);
            self.write_segment(store, *number, len, segment.opening, &[])?;
        }
        Ok(self.segments.keys().copied().collect())
    }

    /// Writes the header of a segment, and frames after it.
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

    /// Writes the directory's own opening, and the empty segment after it. Returns the two segments.
    fn write_opening(&self, store: &StoreFile, end: &RestoredEnd) -> io::Result<[u64; 2]> {
        let number = self.segments.keys().next_back().map_or(1, |last| last + 1);
        let predecessor = self.batch;
        // A snapshot may begin at the start of an incarnation that has no batch.
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
        let payload = encode_seal(&self.verified(store)?);
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

    /// Returns the snapshot that the opening lists as verified. Seals of the archived log list snapshots that the archive
    /// never contained.
    fn verified(&self, store: &StoreFile) -> io::Result<Vec<VerifiedSnapshot>> {
        let Some(manifest) = &self.manifest else { return Ok(Vec::new()) };
        let file = FileName::Manifest(manifest.snapshot.0);
        let (_, health) = read_manifest(self.files, file, store).map_err(invalid)?;
        let (snapshot, manifest_crc) = (manifest.snapshot, health.header_crc);
        Ok(vec![VerifiedSnapshot { snapshot, manifest_crc, log_kept: true }])
    }

    /// Syncs everything, and reads it back from the medium (I7).
    fn sync_and_prove(&self, store: &StoreFile, segments: &[u64]) -> io::Result<()> {
        for (role, file, _) in self.parts.keys() {
            self.files.sync_and_drop_cache(file_of(*role, *file)?)?;
        }
        for segment in segments {
            self.files.sync_and_drop_cache(FileName::Segment(*segment))?;
        }
        for folder in [Folder::Log, Folder::Pages, Folder::Snapshots, Folder::Root] {
            self.files.sync_folder(folder)?;
        }
        for part in self.parts.values() {
            self.files.read_part(part)?;
        }
        self.prove_log(store)
    }

    /// Follows the restored log to the directory's own opening.
    fn prove_log(&self, store: &StoreFile) -> io::Result<()> {
        let map = LogMap::read(self.files, store.store).map_err(invalid)?;
        let start = match self.start.filter(|_| self.manifest.is_some()) {
            Some(redo) => redo,
            None => map.beginning().ok_or_else(|| invalid("the restored log has no beginning"))?,
        };
        let mut walk = LogWalk::new(self.files, &map, start, Lsn(0)).map_err(invalid)?;
        while walk.next().map_err(invalid)?.is_some() {}
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
