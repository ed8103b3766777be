//! Reads and writes the file ARCHIVE. The file contains the fences that the directory created, the last archived
//! batches, and the named snapshots that both the directory and the archive contain. It also contains the URL of the
//! archive if the store must not be opened without the archive.
//!
//! The log up to the last archived batch may be recycled. The file then proves that this batch is in the history of the
//! directory: a synced durable mark proved the batch before it was recorded, so every later open keeps it.

use std::io;

use remanent_format::layout::{Field, layout};
use remanent_format::limits::NUMBER_MAX;
use remanent_format::{FileName, SnapshotId, StoreId};

use super::files::{StoreFiles, invalid};
use crate::local::FenceRecord;
use crate::object::{BatchPoint, Nonce};

const MAGIC: [u8; 8] = *b"RMNTARFI";
const VERSION: u32 = 1;
/// Maximum number of fences and of batches in the file.
const ENTRIES_MAX: usize = 1024;
/// Maximum number of named snapshots in the file. It exceeds the number that a catalog of the archive can contain.
const NAMED_MAX: usize = 1 << 16;
/// Maximum length of the URL in bytes.
const URL_LEN_MAX: usize = 4096;
const LEN_MAX: u64 = (ArchiveFileRaw::LEN
    + ENTRIES_MAX * (FenceRecordRaw::LEN + ArchivedBatchRaw::LEN)
    + 2 * NAMED_MAX * SnapshotId::SIZE
    + URL_LEN_MAX) as u64;

layout! {
    /// The encoded header of ARCHIVE.
    pub struct ArchiveFileRaw: 64 {
        /// Magic bytes, always `RMNTARFI`.
        0 => magic: [u8; 8],
        /// Version of the file; always 1.
        8 => version: u32,
        /// Number of fences.
        12 => fences: u32,
        /// The id of the store.
        16 => store: StoreId,
        /// Number of batches.
        32 => batches: u32,
        /// CRC-32 of the fences, batches, named and lost snapshots and URL, which follow the header.
        36 => body_crc: u32,
        /// Number of named snapshots.
        40 => named: u32,
        /// Length of the URL in bytes, or zero.
        44 => url_len: u32,
        /// Number of lost named snapshots.
        48 => lost: u32,
        /// Reserved, always zero.
        52 => reserved: [u8; 8],
        /// CRC-32 of the preceding bytes.
        60 => header_crc: u32,
    }
}

layout! {
    /// A fence in ARCHIVE.
    pub struct FenceRecordRaw: 32 {
        /// Position at which the directory tried to create the fence.
        0 => position: u64,
        /// Nonce of the fence.
        8 => nonce: Nonce,
        /// 1 if the fence is known to have been created, otherwise 0.
        24 => is_confirmed: u32,
        /// Reserved, always zero.
        28 => reserved: u32,
    }
}

layout! {
    /// A batch in ARCHIVE.
    pub struct ArchivedBatchRaw: 24 {
        /// The batch.
        0 => batch: BatchPoint,
        /// Reserved, always zero.
        20 => reserved: u32,
    }
}

/// The content of ARCHIVE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArchiveRecord {
    pub store: StoreId,
    pub fences: Vec<FenceRecord>,
    /// The last archived batch, and the last batch of the run or snapshot whose append may be in progress.
    pub batches: Vec<BatchPoint>,
    /// Named snapshots that both the directory and the archive contained at the last record. If the directory no longer
    /// contains one of them, its name was given up.
    pub named: Vec<SnapshotId>,
    /// Named snapshots that both contained and that the directory has lost because of damage. The archive keeps these
    /// snapshots.
    pub lost: Vec<SnapshotId>,
    /// URL of the archive without which the store must not be opened for writing, or an empty string.
    pub url: String,
}

impl ArchiveRecord {
    pub fn new(store: StoreId) -> Self {
        let (fences, batches, named, lost) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { store, fences, batches, named, lost, url: String::new() }
    }

    /// Reads the file. Returns a record without entries if the file does not exist.
    pub fn read(files: &StoreFiles, store: StoreId) -> io::Result<Self> {
        let Some(bytes) = files.read_whole(FileName::Archive, LEN_MAX)? else { return Ok(Self::new(store)) };
        let record = Self::decode(&bytes).map_err(|what| invalid(format!("ARCHIVE is damaged: {what}")))?;
        if record.store == store {
            return Ok(record);
        }
        Err(invalid(format!("ARCHIVE belongs to store {}, but the directory to store {store}", record.store)))
    }

    /// Replaces the file atomically and durably.
    pub fn publish(&self, files: &StoreFiles) -> io::Result<()> {
        if self.fences.len() > ENTRIES_MAX
            || self.batches.len() > ENTRIES_MAX
            || self.named.len().max(self.lost.len()) > NAMED_MAX
            || self.url.len() > URL_LEN_MAX
        {
            return Err(invalid("too many entries for ARCHIVE"));
        }
        files.publish(FileName::Archive, &self.encode())
    }

    /// Returns the recorded batch with the same Lsn and chain hash as `point`, regardless of its incarnation.
    pub fn batch_at(&self, point: &BatchPoint) -> Option<BatchPoint> {
        let is_same = |known: &&BatchPoint| (known.lsn, known.chain) == (point.lsn, point.chain);
        self.batches.iter().find(is_same).copied()
    }

    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for FenceRecord { position, nonce, is_confirmed } in &self.fences {
            let raw = FenceRecordRaw {
                position: *position,
                nonce: *nonce,
                is_confirmed: (*is_confirmed).into(),
                reserved: 0,
            };
            body.extend_from_slice(&raw.to_bytes());
        }
        for batch in &self.batches {
            body.extend_from_slice(&ArchivedBatchRaw { batch: *batch, reserved: 0 }.to_bytes());
        }
        let snapshots = self.named.iter().chain(&self.lost);
        snapshots.for_each(|snapshot| body.extend_from_slice(&snapshot.0.to_le_bytes()));
        body.extend_from_slice(self.url.as_bytes());
        let mut raw = ArchiveFileRaw {
            magic: MAGIC,
            version: VERSION,
            fences: self.fences.len() as u32,
            store: self.store,
            batches: self.batches.len() as u32,
            body_crc: crc32fast::hash(&body),
            named: self.named.len() as u32,
            url_len: self.url.len() as u32,
            lost: self.lost.len() as u32,
            reserved: [0; 8],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        let mut bytes = raw.to_bytes().to_vec();
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Decodes the file. Returns the name of the first invalid field as an error.
    fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (header, body) = bytes.split_first_chunk::<{ ArchiveFileRaw::LEN }>().ok_or("length")?;
        let raw = ArchiveFileRaw::from_bytes(header);
        let (fences, batches, named) = (raw.fences as usize, raw.batches as usize, raw.named as usize);
        let (lost, url_len) = (raw.lost as usize, raw.url_len as usize);
        let is_count_valid =
            fences.max(batches) <= ENTRIES_MAX && named.max(lost) <= NAMED_MAX && url_len <= URL_LEN_MAX;
        let len = |fences, batches, named| {
            FenceRecordRaw::LEN * fences + ArchivedBatchRaw::LEN * batches + SnapshotId::SIZE * named
        };
        for (is_right, what) in [
            (raw.magic == MAGIC, "magic number"),
            (raw.header_crc == crc32fast::hash(&header[..60]), "header checksum"),
            (raw.version == VERSION, "version"),
            (is_count_valid, "number of entries"),
            (raw.reserved == [0; 8], "reserved bytes"),
            (is_count_valid && body.len() == len(fences, batches, named + lost) + url_len, "length"),
            (raw.body_crc == crc32fast::hash(body), "checksum"),
        ] {
            if !is_right {
                return Err(what);
            }
        }
        let mut record = Self::new(raw.store);
        let (of_fences, rest) = body.split_at(len(fences, 0, 0));
        let (of_batches, rest) = rest.split_at(len(0, batches, 0));
        let (of_snapshots, url) = rest.split_at(len(0, 0, named + lost));
        record.url = std::str::from_utf8(url).map_err(|_| "URL")?.to_owned();
        for entry in of_fences.chunks_exact(FenceRecordRaw::LEN) {
            let raw = FenceRecordRaw::from_bytes(entry.try_into().map_err(|_| "length")?);
            if raw.position > NUMBER_MAX || raw.is_confirmed > 1 || raw.reserved != 0 {
                return Err("fence");
            }
            let is_confirmed = raw.is_confirmed == 1;
            record.fences.push(FenceRecord { position: raw.position, nonce: raw.nonce, is_confirmed });
        }
        for entry in of_batches.chunks_exact(ArchivedBatchRaw::LEN) {
            let raw = ArchivedBatchRaw::from_bytes(entry.try_into().map_err(|_| "length")?);
            if raw.batch.lsn.0 > NUMBER_MAX || raw.reserved != 0 {
                return Err("batch");
            }
            record.batches.push(raw.batch);
        }
        for entry in of_snapshots.chunks_exact(SnapshotId::SIZE) {
            let snapshot: SnapshotId = Field::get(entry);
            if snapshot.0 > NUMBER_MAX {
                return Err("named snapshot");
            }
            record.named.push(snapshot);
        }
        record.lost = record.named.split_off(named);
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::{Incarnation, Lsn};

    use super::*;

    fn sample() -> ArchiveRecord {
        let fence = |position, is_confirmed| FenceRecord { position, nonce: Nonce([7; 16]), is_confirmed };
        let incarnation = Incarnation { number: 3, random: 9 };
        ArchiveRecord {
            store: StoreId([5; 16]),
            fences: vec![fence(4, true), fence(9, false)],
            batches: vec![BatchPoint { incarnation, lsn: Lsn(12), chain: 77 }],
            named: vec![SnapshotId(3), SnapshotId(8)],
            lost: vec![SnapshotId(5)],
            url: "s3://bucket/run-7".to_owned(),
        }
    }

    #[test]
    fn spec_tables_match_code() {
        let spec = include_str!("../../../format/SPEC.md");
        let section = spec.split_once("\n### ARCHIVE\n").unwrap().1.split_once("\n### ").unwrap().0;
        let cells = |line: &str| -> Vec<String> {
            line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
        };
        let mut rows: Vec<Vec<String>> =
            section.lines().filter(|line| line.starts_with('|')).map(cells).collect();
        rows.retain(|row| row[0].parse::<usize>().is_ok());
        let tables = [ArchiveFileRaw::TABLE, FenceRecordRaw::TABLE, ArchivedBatchRaw::TABLE];
        let fields = tables.iter().flat_map(|table| table.fields);
        let code =
            fields.map(|field| [field.offset.to_string(), field.size.to_string(), field.name.to_owned()]);
        assert_eq!(rows.iter().map(|row| &row[..3]).collect::<Vec<_>>(), code.collect::<Vec<_>>());
    }

    #[test]
    fn archive_file_round_trips() {
        for record in [sample(), ArchiveRecord::new(StoreId([5; 16]))] {
            assert_eq!(ArchiveRecord::decode(&record.encode()), Ok(record));
        }
    }

    #[test]
    fn every_truncation_and_bit_flip_of_archive_file_is_refused() {
        let bytes = sample().encode();
        for len in 0..bytes.len() {
            ArchiveRecord::decode(&bytes[..len]).unwrap_err();
        }
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            ArchiveRecord::decode(&damaged).unwrap_err();
        }
    }
}
