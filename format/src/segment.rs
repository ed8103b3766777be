//! Headers of log segments. A segment is a file that contains a header block of 4096 bytes and then groups of frames.
//!
//! Only the first segment of an incarnation, its *opening* segment, names the incarnation. An open writes the opening
//! segment completely and then renames it to its final name, which starts the incarnation. The headers of all other
//! segments are written before their frames. These headers must not name an incarnation, because a header that a
//! crashed open left behind could then be mistaken for the start of the newest incarnation.

use crate::defect::{Defect, array, check_crc, check_equal, check_limit, check_point, check_zero};
use crate::ids::{Incarnation, LogPoint, Lsn, StoreId};
use crate::layout::layout;
use crate::limits::{GROUP_ALIGN, NUMBER_MAX, SEGMENT_LEN_MAX, SEGMENT_LEN_MIN};

/// Version of the format. STORE and the headers of segments, image files and manifests contain this version.
pub const FORMAT_VERSION: u32 = 1;
/// Length of the header block of a segment in bytes. The first group starts at this offset.
pub const SEGMENT_HEADER_BLOCK: u64 = 4096;
/// Magic bytes at the start of a segment.
pub const SEGMENT_MAGIC: [u8; 8] = *b"RMNTSEGM";
/// Bit of `flags` that is set in the header of an opening segment.
pub const FLAG_OPENING: u32 = 1;

layout! {
    /// The encoded header of a segment.
    pub struct SegmentHeaderRaw: 128 {
        /// Magic bytes, always `RMNTSEGM`.
        0 => magic: [u8; 8],
        /// Format version; always 1.
        8 => version: u32,
        /// Bit 0: the segment opens an incarnation.
        12 => flags: u32,
        /// The id of the store.
        16 => store: StoreId,
        /// Number of this segment. The file name contains the same number.
        32 => segment: u64,
        /// Length of the segment file in bytes.
        40 => segment_len: u64,
        /// Incarnation that starts with this segment. Zero if this is not an opening segment.
        48 => incarnation: Incarnation,
        /// End of the last proven batch of the previous incarnation, or zero if there was none.
        56 => predecessor: LogPoint,
        /// Lsn of the last batch that recovery accepted from the previous incarnation.
        92 => accepted: Lsn,
        /// Chain hash of the frame of the last accepted batch, as the previous incarnation wrote the frame.
        100 => accepted_chain: u32,
        /// Reserved, always zero.
        104 => reserved: [u8; 20],
        /// CRC-32 of the preceding bytes.
        124 => header_crc: u32,
    }
}

/// The decoded header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The id of the store.
    pub store: StoreId,
    /// The number of the segment.
    pub segment: u64,
    /// The length of the segment file in bytes, a multiple of 4096.
    pub segment_len: u64,
    /// The start of an incarnation, or `None` if the segment is not an opening segment.
    pub opening: Option<Opening>,
}

/// The start of an incarnation, as recorded in the header of its opening segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The incarnation that starts with the segment.
    pub incarnation: Incarnation,
    /// The end of the last batch of the previous incarnation that a durable mark proved. Zero in the first incarnation
    /// of a store.
    pub predecessor: LogPoint,
    /// The last batch that recovery accepted from the previous incarnation. The opening segment contains copies of the
    /// accepted batches that no mark proved, so this Lsn is a durable mark.
    pub accepted: Lsn,
    /// The chain hash of the frame of the last accepted batch, as the previous incarnation wrote the frame.
    pub accepted_chain: u32,
}

impl Opening {
    /// Returns the point at which the first frame of the incarnation starts. `segment` is the number of the opening
    /// segment.
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
    /// Encodes the header. The remaining bytes of the header block are zero.
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

    /// Decodes the header of segment `number` of `store`. Checks that the header agrees with the file name and the
    /// length of the file (SPEC S1 to S5).
    ///
    /// # Errors
    /// Returns a [`Defect`] if [`SegmentHeader::decode`] fails, or if the header names another segment, file length or
    /// store.
    pub fn decode_at(bytes: &[u8], store: StoreId, number: u64, file_len: u64) -> Result<Self, Defect> {
        let header = Self::decode(bytes)?;
        check_equal("segment's number", header.segment, number)?;
        check_equal("segment's length", header.segment_len, file_len)?;
        if header.store == store { Ok(header) } else { Err(Defect::Foreign) }
    }

    /// Decodes a header from the start of a segment (SPEC S1 to S4).
    ///
    /// # Errors
    /// Returns a [`Defect`] if the bytes are too short or are not a segment header, if the checksum is wrong, if the
    /// version is unknown, or if a field is out of range.
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
