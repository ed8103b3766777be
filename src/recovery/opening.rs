//! Begins an incarnation: writes its complete opening segment under a temporary name, and then renames the segment
//! (I5).
//!
//! A crash before the rename changes nothing, and the next open repeats these steps. A crash after the rename leaves
//! the new incarnation complete, with all batches that the previous incarnation accepted.

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, encode_seal, frame_len};
use remanent_format::log::LogEnd;
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK};
use remanent_format::{Defect, FileName, Folder, Incarnation, LogPoint, Position, StoreId};

use crate::base::allocation::make_room;
use crate::error::{Error, INCARNATION, IoAction, IoObject, Result};
use crate::log::{LogStart, SegmentPool, SpacePurpose};

/// Begins the incarnation after `before`, in the steps that I5 requires.
///
/// Every writable open begins an incarnation, even after a clean close. An acknowledgement names its incarnation, so
/// that a caller can later determine whether the batch survived.
pub(crate) fn begin(
    pool: &SegmentPool,
    store: StoreId,
    before: &Predecessor,
    verified: Vec<VerifiedSnapshot>,
) -> Result<(LogStart, Position)> {
    let opening = before.opening(Incarnation {
        number: before.newest.number.checked_add(1).ok_or(Error::Limit {
            what: INCARNATION,
            found: u64::from(u32::MAX) + 1,
            limit: u32::MAX.into(),
        })?,
        // Two attempts may choose the same number, but at most one of them became durable. The random part
        // distinguishes them.
        random: u32::from_le_bytes(random()?),
    });
    // The highest segment is empty, and the rename replaces it.
    let number = before.segment.max(1);
    // 1. Write the file under a temporary name: header, copied tail, opening seal. If the tail were synced only after
    //    the rename, a power cut could keep the rename and lose the tail. Its batches would be acknowledged as accepted
    //    without existing.
    let frames = opening_frames(store, number, &opening, &before.tail, &verified);
    let segment = pool.build_opening(number, opening, &frames.bytes)?;
    // 2. Read the file back with O_DIRECT, to detect a failed sync before anything depends on the file. After the
    //    rename this is the only copy of the tail, because the end of the predecessor is cut. Memory for the tail is
    //    allocated fallibly, so a lack of memory refuses the open.
    let mut found = Vec::new();
    make_room(&mut found, frames.bytes.len())?;
    found.resize(frames.bytes.len(), 0);
    segment.file.read_bypassing_cache(SEGMENT_HEADER_BLOCK, &mut found)?;
    if found != frames.bytes {
        let defect = Defect::Field { what: "opening segment that differs from the one written", found: 0 };
        return Err(defect.at(FileName::Temporary(Folder::Log, number), SEGMENT_HEADER_BLOCK).into());
    }
    // 3. Create the following empty segment with its name, because a segment with frames has a successor (I8). If it
    //    were created after step 4, a crash in between would look like a lost newest segment, and the store would be
    //    refused. The empty segment names no incarnation, so nothing refers to this one if the process dies now.
    let next = pool.make(number + 1, 0, SpacePurpose::Open).inspect_err(|_| pool.retract(&segment))?;
    assert!(next.number == number + 1); // I8: the successor exists before any frame does.
    // 4. The commit point: the rename, and the sync of its folder. From here on, recovery starts from the new
    //    incarnation.
    pool.publish_opening(number)?;
    let position = Position { incarnation: opening.incarnation, lsn: opening.accepted };
    let log = LogStart {
        point: frames.point,
        chain: frames.chain,
        offset: frames.end,
        current: segment,
        next,
        verified,
    };
    Ok((log, position))
}

/// The end of the previous incarnation. The default value is the predecessor of a new store.
#[derive(Default)]
pub(crate) struct Predecessor {
    /// The number of the highest segment, which is empty. The opening segment replaces it through a rename.
    pub segment: u64,
    /// The newest incarnation on disk, whose number is never assigned again. If the newest incarnation was omitted
    /// because it has no batch, `end` is in an older incarnation.
    pub newest: Incarnation,
    /// The end of the log, or `None` for a new store.
    pub end: Option<LogEnd>,
    /// The payloads of the accepted batches above the last durable mark, which the opening segment copies (I6).
    pub tail: Vec<Vec<u8>>,
}

impl Predecessor {
    /// Creates the opening record of the new incarnation. The record states the last durable point of the predecessor
    /// (I6). The frames after that point, which may exist only in the page cache, are never read again.
    fn opening(&self, incarnation: Incarnation) -> Opening {
        let (predecessor, accepted) =
            self.end.as_ref().map_or_else(Default::default, |end| (end.proven, end.accepted));
        Opening { incarnation, predecessor, accepted: accepted.lsn, accepted_chain: accepted.chain }
    }
}

/// The encoded frames of an opening segment, and the positions from which the log continues.
struct OpeningFrames {
    bytes: Vec<u8>,
    /// The end of the last copied batch.
    point: LogPoint,
    /// The opening seal's chain hash, which the next frame states.
    chain: u32,
    /// The offset in the segment at which the opening seal ends.
    end: u64,
}

/// Encodes the frames after the segment header: the copied batches, and the seal that records the verified snapshots.
fn opening_frames(
    store: StoreId,
    segment: u64,
    opening: &Opening,
    tail: &[Vec<u8>],
    verified: &[VerifiedSnapshot],
) -> OpeningFrames {
    let mut bytes = Vec::new();
    let mut point = opening.start(segment);
    let mut push = |kind, lsn, durable, payload: &[u8], chain_prev| {
        let offset = SEGMENT_HEADER_BLOCK + bytes.len() as u64;
        // A copied frame is encoded again for its new position, because the position is a part of the frame (I3).
        let header = FrameHeader {
            kind,
            group_start: bytes.is_empty(),
            incarnation: opening.incarnation,
            store,
            segment,
            offset,
            lsn,
            durable,
            payload_len: u32::try_from(payload.len()).expect("it was a frame's payload"),
            payload_crc: crc32fast::hash(payload),
            chain_prev,
        };
        let (encoded, chain) = header.encode();
        bytes.extend_from_slice(&encoded);
        bytes.extend_from_slice(payload);
        // The payload is padded with zeros up to the next frame's boundary.
        bytes.resize((offset - SEGMENT_HEADER_BLOCK + frame_len(payload.len() as u64)) as usize, 0);
        (header.end(), chain)
    };
    // Copied frames keep their Lsns, so that their acknowledgements remain valid. No batch in this file is acknowledged
    // before all of the file is durable, so the seal may state the last batch as its mark (I4).
    for payload in tail {
        let lsn = point.lsn.next();
        let (offset, chain) = push(FrameKind::Batch, lsn, opening.predecessor.lsn, payload, point.chain);
        point = LogPoint { lsn, offset, chain, ..point };
    }
    // The seal is the last frame of the opening, and its mark covers the copied batches (I4).
    let seal = encode_seal(verified);
    let (end, chain) = push(FrameKind::Seal, point.lsn, point.lsn, &seal, point.chain);
    assert!(point.lsn == opening.accepted); // I5: exactly the accepted batches are carried over.
    OpeningFrames { bytes, point, chain, end }
}

/// Returns random bytes from the operating system, for identities that must not repeat.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(len) => filled += len,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(Error::system(IoAction::Draw, IoObject::Randomness, errno.into()));
            }
        }
    }
    Ok(bytes)
}
