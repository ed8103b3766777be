//! The header of a frame: one batch, or a seal, as bytes in the log.
//!
//! A frame is valid in the order of the log if and only if its header checksum, payload checksum, store,
//! incarnation, own position, Lsn and the chain hash of the frame before it all hold (I3). The chain hash
//! of a frame *is* its header checksum: the header covers the payload checksum and the chain hash before,
//! so chaining costs nothing per payload byte. It finds accidents, not forgers.

use std::collections::BTreeSet;

use crate::defect::{Defect, array, check_crc, check_limit, check_zero, slice};
use crate::ids::{Incarnation, LogPoint, Lsn, SnapshotId, StoreId};
use crate::layout::{Field, layout};
use crate::limits::{FRAME_ALIGN, FRAME_PAYLOAD_LEN_MAX, NUMBER_MAX, align_up};

/// The first bytes of a frame.
pub const FRAME_MAGIC: [u8; 4] = *b"RMFR";
/// Length of a frame's header.
pub const FRAME_HEADER_LEN: u64 = FrameHeaderRaw::LEN as u64;
/// The flag of the first frame of a group.
pub const FLAG_GROUP_START: u8 = 1;

const KIND_BATCH: u8 = 1;
const KIND_SEAL: u8 = 2;

layout! {
    /// The bytes of a frame header.
    pub struct FrameHeaderRaw: 80 {
        /// The magic `RMFR`.
        0 => magic: [u8; 4],
        /// 1: batch, 2: seal.
        4 => kind: u8,
        /// Bit 0: first frame of a group.
        5 => flags: u8,
        /// Reserved, always zero.
        6 => reserved: u16,
        /// The run of the log that wrote the frame.
        8 => incarnation: Incarnation,
        /// The store's id.
        16 => store: StoreId,
        /// Own position: the segment's number.
        32 => segment: u64,
        /// Own position: bytes from the segment's start.
        40 => offset: u64,
        /// The batch's number; a seal repeats the last one.
        48 => lsn: Lsn,
        /// The durable mark: the newest batch known to be durable when the frame was written.
        56 => durable: Lsn,
        /// Length of the payload, which follows the header.
        64 => payload_len: u32,
        /// CRC-32 of the payload.
        68 => payload_crc: u32,
        /// The chain hash of the frame before.
        72 => chain_prev: u32,
        /// CRC-32 of the bytes before; the frame's own chain hash.
        76 => header_crc: u32,
    }
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// The operations of one batch.
    Batch,
    /// Nothing but a durable mark, and the snapshots known to be verified.
    Seal,
}

/// The content of a frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Batch or seal.
    pub kind: FrameKind,
    /// Whether a group starts here.
    pub group_start: bool,
    /// The run of the log that wrote the frame.
    pub incarnation: Incarnation,
    /// The store's id.
    pub store: StoreId,
    /// Own position: the segment's number.
    pub segment: u64,
    /// Own position: bytes from the segment's start.
    pub offset: u64,
    /// The batch's number; a seal repeats the last one.
    pub lsn: Lsn,
    /// The newest batch known to be durable when the frame was written (I4).
    pub durable: Lsn,
    /// Length of the payload in bytes.
    pub payload_len: u32,
    /// CRC-32 of the payload.
    pub payload_crc: u32,
    /// The chain hash of the frame before.
    pub chain_prev: u32,
}

/// A header whose own checksum holds, and nothing else is known: neither that its payload is whole nor
/// that it belongs where it lies (I9).
#[derive(Clone, Copy, Debug)]
pub struct UncheckedFrame {
    header: FrameHeader,
    chain: u32,
}

impl FrameHeader {
    /// The header's bytes, and the frame's chain hash.
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

    /// Bytes of the frame, padding included.
    #[must_use]
    pub fn frame_len(&self) -> u64 {
        frame_len(u64::from(self.payload_len))
    }

    /// The frame's end, padding included.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.frame_len())
    }
}

/// Bytes of a frame with such a payload, padding included.
#[must_use]
pub const fn frame_len(payload_len: u64) -> u64 {
    align_up(FRAME_HEADER_LEN + payload_len, FRAME_ALIGN)
}

impl UncheckedFrame {
    /// Reads a header; its own checksum must hold.
    ///
    /// # Errors
    /// A [`Defect`]: too short, no frame, a wrong checksum, fields out of range.
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

    /// Whether the frame was written at this place of this store, whenever that was.
    #[must_use]
    pub fn lies_at(&self, store: StoreId, segment: u64, offset: u64) -> bool {
        self.header.store == store && self.header.segment == segment && self.header.offset == offset
    }

    /// The header, unproven: good for display and for testimony (I4), not for replay.
    #[must_use]
    pub fn unproven(&self) -> &FrameHeader {
        &self.header
    }

    /// The header, if the frame follows `before` in the order of the log (I3 without the payload, SPEC F1 to
    /// F5).
    ///
    /// # Errors
    /// [`Defect::Mismatch`] with the first field that breaks the order.
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

    /// The point at the frame's end, if the frame is where it says and its payload is whole.
    #[must_use]
    pub fn end(&self) -> LogPoint {
        let FrameHeader { incarnation, lsn, segment, .. } = self.header;
        LogPoint { incarnation, lsn, segment, offset: self.header.end(), chain: self.chain }
    }
}

/// Refuses a payload whose checksum is not the header's (SPEC F7).
///
/// # Errors
/// [`Defect::Checksum`].
pub fn check_payload(header: &FrameHeader, payload: &[u8]) -> Result<(), Defect> {
    check_crc("payload", header.payload_crc, payload)
}

/// As [`check_payload`], for a caller that has the payload's checksum.
///
/// # Errors
/// [`Defect::Checksum`].
pub fn check_payload_crc(header: &FrameHeader, computed: u32) -> Result<(), Defect> {
    let found = header.payload_crc;
    if found == computed { Ok(()) } else { Err(Defect::Checksum { what: "payload", found, computed }) }
}

/// A snapshot that was read back past the cache, as seals record it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifiedSnapshot {
    /// The snapshot's number.
    pub snapshot: SnapshotId,
    /// The checksum of its manifest's header.
    pub manifest_crc: u32,
    /// Whether the log after its `redo` is kept, so that replay may start from it. While no snapshot of a
    /// seal says so, no floor was recorded: see [`crate::state::reach`].
    pub log_kept: bool,
}

/// Bit 0 of an entry's flags: the log after the snapshot is kept.
const LOG_KEPT: u32 = 1;

layout! {
    /// One entry of a seal's payload.
    pub struct VerifiedSnapshotRaw: 16 {
        /// The snapshot's number.
        0 => snapshot: SnapshotId,
        /// The checksum of its manifest's header.
        8 => manifest_crc: u32,
        /// Bit 0: the log after its `redo` is kept.
        12 => flags: u32,
    }
}

/// A seal's payload: the kept snapshots that are verified.
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

/// Reads a seal's payload.
///
/// # Errors
/// A [`Defect`] if it is no whole number of entries or has a flag that means nothing.
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

/// The entries of a seal that count: of two for one snapshot the first.
#[must_use]
pub fn counting_entries(mut entries: Vec<VerifiedSnapshot>) -> Vec<VerifiedSnapshot> {
    let mut named = BTreeSet::new();
    entries.retain(|entry| named.insert(entry.snapshot));
    entries
}

/// Whether a frame of incarnation `running` was written at this place: it is whole, or enough of its header
/// is left to say so. A frame of another place, whole or torn, was there before the segment was recycled. The
/// answer is for reports only, and decides nothing.
#[must_use]
pub fn resembles_frame(
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
        return frame.lies_at(store, segment, offset);
    }
    let (its_incarnation, its_segment) = (Incarnation::get(&header[8..]), u64::get(&header[32..]));
    // A segment is recycled torn only by a later run than the one that was cut short in it.
    let is_earlier =
        (1..segment).contains(&its_segment) && (1..running.number).contains(&its_incarnation.number);
    // One of the fields may be the damaged one, and a torn write leaves the front of a header or its back.
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
    fn a_torn_frame_is_told_from_what_a_recycled_segment_held() {
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
        let resembles = |bytes: &[u8]| resembles_frame(bytes, store, running, 6, 4096);
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
