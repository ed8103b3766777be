//! The interface to the local store directory that is archived.

use std::io;

use remanent_format::segment::SegmentHeader;
use remanent_format::{Incarnation, Lsn, StoreId};

use crate::object::{BatchPoint, KeptSnapshot, Nonce, Part, Role};

/// The directory's record of a fence that it created or tried to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceRecord {
    /// Position on the line at which the directory tried to create the fence.
    pub position: u64,
    /// Nonce of the fence.
    pub nonce: Nonce,
    /// Whether the fence is known to have been created.
    pub is_confirmed: bool,
}

/// Log frames that are ready to be archived (rule 7).
///
/// The frames are contiguous and end with a batch. A synced durable mark after them proves the batches, so every later
/// open of the directory keeps these batches. Only implementations of [`LocalStore`] may create this value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedFrames {
    /// The last batch before the first frame.
    pub before: BatchPoint,
    /// The last batch in the frames.
    pub after: BatchPoint,
    /// The bytes of the frames, as in the log.
    pub bytes: Vec<u8>,
    /// The parts of image files and tables that the frames name. They are uploaded before the run (rule 9).
    pub files: Vec<Part>,
}

/// A piece of a file that is not uploaded yet. The piece becomes a [`Part`] once its checksum is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePiece {
    /// Kind of the file.
    pub role: Role,
    /// Number of the file.
    pub file: u64,
    /// Offset of the piece in the file in bytes.
    pub offset: u64,
    /// Length of the piece in bytes, at most that of a part.
    pub len: usize,
}

impl FilePiece {
    /// Returns the part that consists of this piece. `crc` is the CRC-64 of its bytes.
    #[must_use]
    pub fn part(self, crc: u64) -> Part {
        let Self { role, file, offset, len } = self;
        Part { role, file, offset, len: len as u64, crc }
    }
}

/// A store directory and its history, as the archive protocol reads it.
///
/// The history consists of incarnations: each open of the store for writing starts one, and its *opening* names the
/// last earlier batch that it continues, the *predecessor*. Batches above the predecessor are not in the history.
pub trait LocalStore {
    /// Returns the id of the store.
    fn store(&self) -> StoreId;

    /// Returns the bytes of the STORE file.
    fn store_file(&self) -> Vec<u8>;

    /// Returns a random number, which is chosen once for each open of the store. The keys of this writer's data objects
    /// contain the number, so that two writers never use the same key.
    fn random(&self) -> u64;

    /// Returns true if the store is archived while it is open. A directory restored from such an archive must not be
    /// opened without the archive (rule 25).
    fn is_open(&self) -> bool {
        false
    }

    /// Returns true if the directory contains the named snapshot `kept`, or contained it before its name was given up.
    /// An older copy of the directory returns false for newer snapshots, because it may reuse the numbers of their
    /// files.
    fn knows_name(&self, kept: &KeptSnapshot) -> bool;

    /// Returns the newest batch of the store.
    fn newest(&self) -> BatchPoint;

    /// Returns the segment headers of openings in the history, oldest first. The result contains at least every opening
    /// after the incarnation of the last archived batch, including the opening that the current open wrote or is about
    /// to write.
    fn openings(&self) -> Vec<SegmentHeader>;

    /// Returns the chain hash of the frame of a batch, or `None` if the directory has no record of the batch. A
    /// directory has a record of at least its last archived batch and every later batch. The result may include batches
    /// that a later opening dropped.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    fn chain_of(&self, incarnation: Incarnation, lsn: Lsn) -> io::Result<Option<u32>>;

    /// Returns the recorded fences that the directory created or tried to create.
    fn fences(&self) -> Vec<FenceRecord>;

    /// Replaces the recorded fences. Returns after the new records are durable.
    ///
    /// # Errors
    /// Returns an error if the record cannot be written.
    fn record_fences(&mut self, fences: &[FenceRecord]) -> io::Result<()>;

    /// Returns the frames after batch `archived` that are ready to be archived, or `None` if there are none.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    fn sealed_frames(&self, archived: &BatchPoint) -> io::Result<Option<SealedFrames>>;

    /// Returns the bytes of a part of a file. The caller must ensure that the file is not removed or reused during the
    /// call (rule 13).
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    fn read_part(&self, part: &Part) -> io::Result<Vec<u8>>;
}
