//! The directory that is archived, as the protocol sees it.

use std::io;

use remanent_format::segment::SegmentHeader;
use remanent_format::{Incarnation, Lsn, StoreId};

use crate::object::{BatchPoint, KeptSnapshot, Nonce, Part};

/// A fence that a directory tried to create or created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceRecord {
    /// Position at which the directory tried to create the fence.
    pub position: u64,
    /// Nonce of the fence.
    pub nonce: Nonce,
    /// Whether the directory knows that its fence was created.
    pub is_confirmed: bool,
}

/// Frames of the log that may be archived (rule 7).
///
/// The frames are contiguous, end with a batch, and lie under a durable mark that is itself synced, so that every later
/// open of the directory keeps them. Only an implementation of [`LocalStore`] may create this value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedFrames {
    /// The batch before the first frame.
    pub before: BatchPoint,
    /// The last batch.
    pub after: BatchPoint,
    /// The bytes of the frames.
    pub bytes: Vec<u8>,
    /// Parts of the image files and tables that the frames name (rule 9).
    pub files: Vec<Part>,
}

/// A directory of a store with its history.
///
/// The line of a directory is the list of incarnations that count, each up to the predecessor that the next opening
/// states.
pub trait LocalStore {
    /// Returns the id of the store.
    fn store(&self) -> StoreId;

    /// Returns the bytes of the STORE file.
    fn store_file(&self) -> Vec<u8>;

    /// Returns the random number of this open. It becomes part of the keys of data objects.
    fn random(&self) -> u64;

    /// Returns whether the store is archived while it is open. A restored directory must then not be opened without its
    /// archive (rule 25).
    fn is_open(&self) -> bool {
        false
    }

    /// Returns whether the directory has a named snapshot of the archive, or had it and gave its name up. An older
    /// copy of the directory lacks newer ones, and may use the numbers of their files again.
    fn knows_name(&self, kept: &KeptSnapshot) -> bool;

    /// Returns the newest batch.
    fn newest(&self) -> BatchPoint;

    /// Returns openings of the line, oldest first: at least all after the incarnation of the last archived batch, with the
    /// opening that the current open has written or is about to write.
    fn openings(&self) -> Vec<SegmentHeader>;

    /// Returns the chain hash of the frame of a batch, or `None` if the directory does not know the batch. A directory knows
    /// at least its last archived batch and every later one. Batches that an opening has dropped may be included.
    ///
    /// # Errors
    /// Returns the error of the disk.
    fn chain_of(&self, incarnation: Incarnation, lsn: Lsn) -> io::Result<Option<u32>>;

    /// Returns the recorded fences.
    fn fences(&self) -> Vec<FenceRecord>;

    /// Replaces the recorded fences. Returns after the records are durable.
    ///
    /// # Errors
    /// Returns the error of the disk.
    fn record_fences(&mut self, fences: &[FenceRecord]) -> io::Result<()>;

    /// Returns the frames after `archived` that may be archived, or `None` if there are none.
    ///
    /// # Errors
    /// Returns the error of the disk.
    fn sealed_frames(&self, archived: &BatchPoint) -> io::Result<Option<SealedFrames>>;

    /// Returns the bytes of a part of a file. The caller holds the file (rule 13).
    ///
    /// # Errors
    /// Returns the error of the disk.
    fn read_part(&self, part: &Part) -> io::Result<Vec<u8>>;
}
