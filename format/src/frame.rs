//! Frames of the log. A frame contains one batch, or it is a seal.
//!
//! A frame is valid in the order of the log if and only if all of these are correct (I3): its header checksum, payload
//! checksum, store, incarnation, position and Lsn, and the chain hash of the previous frame. The chain hash of a frame
//! is its header checksum. The header checksum covers the payload checksum and the previous chain hash, so chaining
//! adds no cost per payload byte. The chain detects accidental damage, not tampering.

use std::collections::BTreeSet;

use crate::defect::{Defect, array, check_crc, check_limit, check_zero, slice};
use crate::ids::{Incarnation, LogPoint, Lsn, SnapshotId, StoreId};
use crate::layout::{Field, layout};
use crate::limits::{FRAME_ALIGN, FRAME_PAYLOAD_LEN_MAX, NUMBER_MAX, align_up};

/// Magic bytes at the start of a frame header.
pub const FRAME_MAGIC: [u8; 4] = *b"RMFR";
/// Length of a frame header in bytes.
pub const FRAME_HEADER_LEN: u64 = FrameHeaderRaw::LEN as u64;
/// Flag of a frame that starts a group.
pub const FLAG_GROUP_START: u8 = 1;

const KIND_BATCH: u8 = 1;
const KIND_SEAL: u8 = 2;

layout! {
    /// The encoded header of a frame.
    pub struct FrameHeaderRaw: 80 {
        /// Magic bytes, always `RMFR`.
        0 => magic: [u8; 4],
        /// Kind of the frame. 1: batch, 2: seal.
        4 => kind: u8,
        /// Bit 0: the frame starts a group.
        5 => flags: u8,
        /// Reserved, always zero.
        6 => reserved: u16,
        /// Incarnation that wrote the frame.
        8 => incarnation: Incarnation,
        /// The id of the store.
        16 => store: StoreId,
        /// Number of the segment that contains this frame.
        32 => segment: u64,
        /// Offset of this frame, in bytes from the start of the segment.
        40 => offset: u64,
        /// Lsn of the batch. A seal repeats the Lsn of the last batch.
        48 => lsn: Lsn,
        /// Newest batch that was known to be durable when the frame was written.
        56 => durable: Lsn,
        /// Length of the payload in bytes. The payload follows the header.
        64 => payload_len: u32,
        /// CRC-32 of the payload.
        68 => payload_crc: u32,
        /// Chain hash of the previous frame.
        72 => chain_prev: u32,
        /// CRC-32 of the preceding bytes, which is the chain hash of this frame.
        76 => header_crc: u32,
    }
}

/// The kind of a frame in the log: batch or seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A frame that contains the operations of one batch.
    Batch,
    /// A frame that contains a durable mark and the list of verified snapshots.
    Seal,
}

/// The decoded header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Whether the frame is a batch or a seal.
    pub kind: FrameKind,
    /// Whether the frame starts a group.
    pub group_start: bool,
    /// The incarnation that wrote the frame.
    pub incarnation: Incarnation,
    /// The id of the store.
    pub store: StoreId,
    /// The number of the segment that contains this frame.
    pub segment: u64,
    /// The offset of this frame, in bytes from the start of the segment.
    pub offset: u64,
    /// The Lsn of the batch. A seal repeats the Lsn of the last batch.
    pub lsn: Lsn,
    /// The newest batch that was known to be durable when the frame was written (I4).
    pub durable: Lsn,
    /// Length of the payload in bytes.
    pub payload_len: u32,
    /// CRC-32 of the payload.
    pub payload_crc: u32,
    /// The chain hash of the previous frame.
    pub chain_prev: u32,
}

/// A frame header whose checksum is correct. Its payload has not been checked, and its position in the log has not been
/// compared with the position where the header was read (I9).
#[derive(Clone, Copy, Debug)]
pub struct UncheckedFrame {
    header: FrameHeader,
    chain: u32,
}

impl FrameHeader {
    /// Encodes the header. Returns its bytes and the chain hash of the frame.
    #[must_use]
    pub fn encode(&self) -> ([u8; FrameHeaderRaw::LEN], u32) {
        let mut raw = FrameHeaderRaw {
            magic: FRAME_MAGIC,
            kind: match self.kind {
                FrameKind::Batch => KIND_BATCH,
                FrameKind::Seal => KIND_SEAL,
            },
            flags: if self.group_start { FLAG_GROUP_START } else { 0 },
            reserved: 0,
            incarnation: self.incarnation,
            store: self.store,
            segment: self.segment,
            offset: self.offset,
            lsn: self.lsn,
            durable: self.durable,
            payload_len: self.payload_len,
            payload_crc: self.payload_crc,
            chain_prev: self.chain_prev,
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..76]);
        (raw.to_bytes(), raw.header_crc)
    }

    /// Returns the length of the frame in bytes, including padding.
    #[must_use]
    pub fn frame_len(&self) -> u64 {
        frame_len(u64::from(self.payload_len))
    }

    /// Returns the offset of the frame's end, including padding.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.frame_len())
    }
}

/// Returns the length in bytes, including padding, of a frame whose payload has `payload_len` bytes.
#[must_use]
pub const fn frame_len(payload_len: u64) -> u64 {
    align_up(FRAME_HEADER_LEN + payload_len, FRAME_ALIGN)
}

impl UncheckedFrame {
    /// Decodes a header, and checks its checksum and the ranges of its fields.
    ///
    /// # Errors
    /// Returns a [`Defect`] if the bytes are too short or are not a frame header, if the checksum is wrong, or if a
    /// field is out of range.
    pub fn decode(bytes: &[u8]) -> Result<Self, Defect> {
        let bytes: &[u8; FrameHeaderRaw::LEN] = array(bytes, 0)?;
        let raw = FrameHeaderRaw::from_bytes(bytes);
        if raw.magic != FRAME_MAGIC {
            return Err(Defect::Magic { expected: "frame" });
        }
        check_crc("frame header", raw.header_crc, &bytes[..76])?;
        check_zero("reserved frame bytes", raw.reserved.into())?;
        check_limit("frame flags", raw.flags.into(), FLAG_GROUP_START.into())?;
        check_limit("payload length", raw.payload_len.into(), FRAME_PAYLOAD_LEN_MAX)?;
        check_limit("frame's lsn", raw.lsn.0, NUMBER_MAX)?;
        check_limit("durable mark", raw.durable.0, NUMBER_MAX)?;
        let kind = match raw.kind {
            KIND_BATCH => FrameKind::Batch,
            KIND_SEAL => FrameKind::Seal,
            other => return Err(Defect::Field { what: "frame kind", found: other.into() }),
        };
        let header = FrameHeader {
            kind,
            group_start: raw.flags == FLAG_GROUP_START,
            incarnation: raw.incarnation,
            store: raw.store,
            segment: raw.segment,
            offset: raw.offset,
            lsn: raw.lsn,
            durable: raw.durable,
            payload_len: raw.payload_len,
            payload_crc: raw.payload_crc,
            chain_prev: raw.chain_prev,
        };
        Ok(Self { header, chain: raw.header_crc })
    }

    /// Returns true if the header contains this store, segment and offset. The incarnation is not compared.
    #[must_use]
    pub fn is_at(&self, store: StoreId, segment: u64, offset: u64) -> bool {
        self.header.store == store && self.header.segment == segment && self.header.offset == offset
    }

    /// Returns the header without checking the frame's order or payload. Tools display this header, and recovery uses
    /// its durable mark (I4). Replay must not use it.
    #[must_use]
    pub fn unproven(&self) -> &FrameHeader {
        &self.header
    }

    /// Checks that the frame follows the point `before` in the order of the log (I3, SPEC F1 to F5). The payload is not
    /// checked. Returns the header and the point at the end of the frame.
    ///
    /// # Errors
    /// Returns [`Defect::Foreign`] for a frame of another store, [`Defect::Mismatch`] with the first field that breaks
    /// the order, or [`Defect::Limit`] if the durable mark is above the frame's Lsn.
    pub fn follow(
        self,
        before: &LogPoint,
        store: StoreId,
        segment: u64,
        offset: u64,
    ) -> Result<(FrameHeader, LogPoint), Defect> {
        let header = self.header;
        if header.store != store {
            return Err(Defect::Foreign);
        }
        let lsn = match header.kind {
            FrameKind::Batch => before.lsn.next(),
            FrameKind::Seal => before.lsn,
        };
        for (what, found, expected) in [
            ("frame's segment", header.segment, segment),
            ("frame's offset", header.offset, offset),
            ("frame's incarnation", header.incarnation.number.into(), before.incarnation.number.into()),
            ("frame's incarnation tag", header.incarnation.random.into(), before.incarnation.random.into()),
            ("frame's lsn", header.lsn.0, lsn.0),
            ("chain hash", header.chain_prev.into(), before.chain.into()),
        ] {
            if found != expected {
                return Err(Defect::Mismatch { what, found, expected });
            }
        }
        check_limit("durable mark", header.durable.0, lsn.0)?;
        Ok((header, self.end()))
    }

    /// Returns the point at the end of the frame. The point is correct only if the payload and the position of the
    /// frame are valid.
    #[must_use]
    pub fn end(&self) -> LogPoint {
        let FrameHeader { incarnation, lsn, segment, .. } = self.header;
        LogPoint { incarnation, lsn, segment, offset: self.header.end(), chain: self.chain }
    }
}

/// Checks that `payload` has the checksum that the header records (SPEC F7).
///
/// # Errors
/// Returns [`Defect::Checksum`] if the checksums differ.
pub fn check_payload(header: &FrameHeader, payload: &[u8]) -> Result<(), Defect> {
    check_crc("payload", header.payload_crc, payload)
}

/// Checks that the computed CRC-32 of a payload is the checksum that the header records (SPEC F7).
///
/// # Errors
/// Returns [`Defect::Checksum`] if the checksums differ.
pub fn check_payload_crc(header: &FrameHeader, computed: u32) -> Result<(), Defect> {
    let found = header.payload_crc;
    if found == computed { Ok(()) } else { Err(Defect::Checksum { what: "payload", found, computed }) }
}

/// An entry of a seal, which names a verified snapshot. A snapshot is verified once its files were read back from the
/// medium, bypassing the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifiedSnapshot {
    /// The number of the snapshot.
    pub snapshot: SnapshotId,
    /// The checksum of the header of the snapshot's manifest.
    pub manifest_crc: u32,
    /// Whether the log after the snapshot's `redo` is kept, so that replay can start at the snapshot. If no entry of a
    /// seal has this flag, the seal does not limit where replay can start; see [`crate::state::reach`].
    pub log_kept: bool,
}

/// Bit of `flags` that is set if the log after the snapshot's `redo` is kept.
const LOG_KEPT: u32 = 1;

layout! {
    /// The encoded entry of a snapshot in a seal's payload.
    pub struct VerifiedSnapshotRaw: 16 {
        /// The number of the snapshot.
        0 => snapshot: SnapshotId,
        /// Checksum of the header of the snapshot's manifest.
        8 => manifest_crc: u32,
        /// Bit 0: the log after the snapshot's `redo` is kept.
        12 => flags: u32,
    }
}

/// Encodes the payload of a seal, which lists the verified snapshots.
#[must_use]
pub fn encode_seal(verified: &[VerifiedSnapshot]) -> Vec<u8> {
    verified
        .iter()
        .flat_map(|entry| {
            let flags = if entry.log_kept { LOG_KEPT } else { 0 };
            VerifiedSnapshotRaw { snapshot: entry.snapshot, manifest_crc: entry.manifest_crc, flags }
                .to_bytes()
        })
        .collect()
}

/// Decodes the payload of a seal, which lists the verified snapshots.
///
/// # Errors
/// Returns a [`Defect`] if the length of the payload is not a multiple of the length of an entry, a snapshot number
/// exceeds its limit, or an unknown flag is set.
pub fn decode_seal(payload: &[u8]) -> Result<Vec<VerifiedSnapshot>, Defect> {
    if !payload.len().is_multiple_of(VerifiedSnapshotRaw::LEN) {
        return Err(Defect::Field { what: "seal length", found: payload.len() as u64 });
    }
    payload
        .chunks_exact(VerifiedSnapshotRaw::LEN)
        .map(|chunk| {
            let raw = VerifiedSnapshotRaw::from_bytes(array(chunk, 0)?);
            check_limit("snapshot number", raw.snapshot.0, NUMBER_MAX)?;
            check_zero("unknown flags of a seal's entry", (raw.flags & !LOG_KEPT).into())?;
            let log_kept = raw.flags & LOG_KEPT != 0;
            Ok(VerifiedSnapshot { snapshot: raw.snapshot, manifest_crc: raw.manifest_crc, log_kept })
        })
        .collect()
}

/// Keeps only the first entry of each snapshot. A reader ignores repeated entries.
#[must_use]
pub fn counting_entries(mut entries: Vec<VerifiedSnapshot>) -> Vec<VerifiedSnapshot> {
    let mut named = BTreeSet::new();
    entries.retain(|entry| named.insert(entry.snapshot));
    entries
}

/// Returns true if the bytes resemble a frame header for this segment and offset, even if the header is damaged. A
/// header with another segment or offset is left from before the segment was recycled.
///
/// Use the result only in reports, because damaged bytes prove nothing.
#[must_use]
pub fn looks_like_frame(
    bytes: &[u8],
    store: StoreId,
    running: Incarnation,
    segment: u64,
    offset: u64,
) -> bool {
    let Ok(header) = slice(bytes, 0, FrameHeaderRaw::LEN) else {
        return false;
    };
    if let Ok(frame) = UncheckedFrame::decode(header) {
        return frame.is_at(store, segment, offset);
    }
    let (its_incarnation, its_segment) = (Incarnation::get(&header[8..]), u64::get(&header[32..]));
    // A torn frame from an earlier use of the file names an earlier incarnation and a segment with a lower number.
    let is_earlier =
        (1..segment).contains(&its_segment) && (1..running.number).contains(&its_incarnation.number);
    // A torn write keeps the front or the back of a header, so some fields still match.
    let matches = [
        header[..4] == FRAME_MAGIC,
        StoreId::get(&header[16..]) == store,
        its_segment == segment,
        u64::get(&header[40..]) == offset,
    ];
    !is_earlier && matches.into_iter().filter(|matches| *matches).count() >= 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_frame_is_distinguished_from_recycled_bytes() {
        let (store, running) = (StoreId([7; 16]), Incarnation { number: 3, random: 5 });
        let frame = |incarnation, segment| FrameHeader {
            kind: FrameKind::Seal,
            group_start: true,
            incarnation,
            store,
            segment,
            offset: 4096,
            lsn: Lsn(1),
            durable: Lsn(1),
            payload_len: 0,
            payload_crc: 0,
            chain_prev: 9,
        };
        let torn = |incarnation, segment| {
            let (mut bytes, _) = frame(incarnation, segment).encode();
            bytes[76..].fill(0);
            bytes
        };
        let resembles = |bytes: &[u8]| looks_like_frame(bytes, store, running, 6, 4096);
        let earlier = Incarnation { number: 2, random: 8 };
        assert!(resembles(&frame(running, 6).encode().0), "whole");
        assert!(resembles(&torn(running, 6)), "torn");
        assert!(resembles(&torn(running, 4)), "the segment's number is damaged, too");
        assert!(resembles(&torn(earlier, 6)), "the incarnation is damaged, too");
        let mut front = torn(running, 6);
        front[32..].fill(0);
        assert!(resembles(&front), "nothing but its front is there");
        assert!(!resembles(&frame(earlier, 4).encode().0), "whole, from before");
        assert!(!resembles(&torn(earlier, 4)), "torn, from before");
        assert!(!resembles(&[0; 80]) && !resembles(&front[..79]));
    }
}
