//! Headers of log segments. A segment is one file: a header block of 4096 bytes, then groups of frames.
//!
//! Only the first segment of an incarnation, the *opening* segment, names an incarnation. It is renamed into
//! place complete, and that rename makes the incarnation real. A header written before its frames must not
//! name an incarnation; otherwise an open cut short by a crash could be mistaken for the newest run.

use crate::defect::{Defect, array, check_crc, check_equal, check_limit, check_point, check_zero};
use crate::ids::{Incarnation, LogPoint, Lsn, StoreId};
use crate::layout::layout;
use crate::limits::{GROUP_ALIGN, NUMBER_MAX, SEGMENT_LEN_MAX, SEGMENT_LEN_MIN};

/// Version of the whole format, recorded in STORE and in every file header.
pub const FORMAT_VERSION: u32 = 1;
/// Length of the header block in bytes. The first group starts at this offset.
pub const SEGMENT_HEADER_BLOCK: u64 = 4096;
/// First bytes of a segment.
pub const SEGMENT_MAGIC: [u8; 8] = *b"RMNTSEGM";
/// Flag of an opening segment.
pub const FLAG_OPENING: u32 = 1;

layout! {
    /// Encoded segment header.
    pub struct SegmentHeaderRaw: 128 {
        /// The magic `RMNTSEGM`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// Bit 0: opening segment.
        12 => flags: u32,
        /// The store's id.
        16 => store: StoreId,
        /// Number of this segment, as in its file name.
        32 => segment: u64,
        /// Length of the file in bytes.
        40 => segment_len: u64,
        /// Incarnation that this segment opens; zero if it opens none.
        48 => incarnation: Incarnation,
        /// End of the previous incarnation: its last proven batch. Zero if there was none.
        56 => predecessor: LogPoint,
        /// Last batch accepted from the previous incarnation.
        92 => accepted: Lsn,
        /// Chain hash of that batch's frame, as the previous incarnation wrote it.
        100 => accepted_chain: u32,
        /// Reserved, always zero.
        104 => reserved: [u8; 20],
        /// CRC-32 of the preceding bytes.
        124 => header_crc: u32,
    }
}

/// Decoded segment header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store's id.
    pub store: StoreId,
    /// The number of this segment.
    pub segment: u64,
    /// The length of the file in bytes, a multiple of 4096.
    pub segment_len: u64,
    /// The start of an incarnation, or `None` if this is not an opening segment.
    pub opening: Option<Opening>,
}

/// The start of an incarnation, as its opening segment describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The incarnation that starts here.
    pub incarnation: Incarnation,
    /// The end of the predecessor: the last batch proven by a durable mark. Zero in a new store.
    pub predecessor: LogPoint,
    /// The last batch accepted by recovery. Batches after the predecessor's end up to this one were copied
    /// into this segment, which makes this number a durable mark.
    pub accepted: Lsn,
    /// The chain hash of that batch in the predecessor.
    pub accepted_chain: u32,
}

impl Opening {
    /// Returns the point at which the first frame of the incarnation is expected, given the opening segment's
    /// number.
    #[must_use]
    pub fn start(&self, segment: u64) -> LogPoint {
        LogPoint {
            incarnation: self.incarnation,
            lsn: self.predecessor.lsn,
            segment,
            offset: SEGMENT_HEADER_BLOCK,
            chain: self.predecessor.chain,
        }
    }
}

impl SegmentHeader {
    /// Encodes the header. The rest of the header block is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; SegmentHeaderRaw::LEN] {
        let opening = self.opening;
        let mut raw = SegmentHeaderRaw {
            magic: SEGMENT_MAGIC,
            version: FORMAT_VERSION,
            flags: if opening.is_some() { FLAG_OPENING } else { 0 },
            store: self.store,
            segment: self.segment,
            segment_len: self.segment_len,
            incarnation: opening.map_or_else(Default::default, |opening| opening.incarnation),
            predecessor: opening.map_or_else(Default::default, |opening| opening.predecessor),
            accepted: opening.map_or_else(Default::default, |opening| opening.accepted),
            accepted_chain: opening.map_or(0, |opening| opening.accepted_chain),
            reserved: [0; 20],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..124]);
        raw.to_bytes()
    }

    /// Decodes and checks the header of segment `number` of `store`, whose file is `file_len` bytes long
    /// (SPEC S1 to S5).
    ///
    /// # Errors
    /// Returns a [`Defect`] as [`SegmentHeader::decode`] does, or if the header belongs to another segment,
    /// another file length or another store.
    pub fn decode_at(bytes: &[u8], store: StoreId, number: u64, file_len: u64) -> Result<Self, Defect> {
        let header = Self::decode(bytes)?;
        check_equal("segment's number", header.segment, number)?;
        check_equal("segment's length", header.segment_len, file_len)?;
        if header.store == store { Ok(header) } else { Err(Defect::Foreign) }
    }

    /// Decodes a header from the start of a segment (SPEC S1 to S4).
    ///
    /// # Errors
    /// Returns a [`Defect`] if the bytes are too short, are not a segment header, have a wrong checksum or an
    /// unknown version, or a field is out of range.
    pub fn decode(bytes: &[u8]) -> Result<Self, Defect> {
        let bytes: &[u8; SegmentHeaderRaw::LEN] = array(bytes, 0)?;
        let raw = SegmentHeaderRaw::from_bytes(bytes);
        if raw.magic != SEGMENT_MAGIC {
            return Err(Defect::Magic { expected: "log segment" });
        }
        check_crc("segment header", raw.header_crc, &bytes[..124])?;
        if raw.version != FORMAT_VERSION {
            return Err(Defect::Version { version: raw.version, features: 0 });
        }
        check_limit("segment flags", u64::from(raw.flags), u64::from(FLAG_OPENING))?;
        check_zero("reserved segment bytes", raw.reserved.iter().map(|&byte| u64::from(byte)).sum())?;
        check_limit("segment length", raw.segment_len, 2 * SEGMENT_LEN_MAX)?;
        if raw.segment_len < SEGMENT_LEN_MIN || !raw.segment_len.is_multiple_of(GROUP_ALIGN) {
            return Err(Defect::Field { what: "segment length", found: raw.segment_len });
        }
        check_limit("segment's number", raw.segment, NUMBER_MAX)?;
        check_limit("accepted lsn", raw.accepted.0, NUMBER_MAX)?;
        check_point(&raw.predecessor)?;
        let opening = Opening {
            incarnation: raw.incarnation,
            predecessor: raw.predecessor,
            accepted: raw.accepted,
            accepted_chain: raw.accepted_chain,
        };
        let is_opening = raw.flags == FLAG_OPENING;
        if is_opening == (raw.incarnation.number == 0) {
            return Err(Defect::Field { what: "incarnation", found: raw.incarnation.number.into() });
        }
        if is_opening && raw.accepted < raw.predecessor.lsn {
            return Err(Defect::Field { what: "accepted lsn", found: raw.accepted.0 });
        }
        if is_opening && raw.predecessor.incarnation.number >= raw.incarnation.number {
            return Err(Defect::Field {
                what: "predecessor's incarnation",
                found: raw.predecessor.incarnation.number.into(),
            });
        }
        let header = Self {
            store: raw.store,
            segment: raw.segment,
            segment_len: raw.segment_len,
            opening: is_opening.then_some(opening),
        };
        if header.encode() != *bytes {
            return Err(Defect::Field { what: "unused segment header bytes", found: 1 });
        }
        Ok(header)
    }
}
