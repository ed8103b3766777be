//! Storage abstraction: the files of a store, its folders, and windows for in-place writes.
//!
//! The engine accesses storage only through these traits, so that `SimDisk` sees every write, sync and rename as a
//! point at which a crash can occur. The engine uses `Arc<dyn Disk>` and is therefore compiled once instead of once per
//! disk. An indirect call costs one or two nanoseconds, little compared with a store into a mapping or a sync.

pub(crate) mod source;
pub(crate) mod growing;
pub(crate) mod image_spares;
mod buffered;
mod cached;
mod claim;
// Public because tests and fuzz targets use this module from outside the crate. Hidden because applications do not need
// it.
pub mod dir;
mod dir_file;
mod directory;
mod direct;
mod lock;
mod mapped;
mod direct_read;
mod reader_locks;
mod record_locks;
mod capabilities;
mod watch;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::{FileName, Folder, SnapshotId};

use crate::base::aligned_buf::AlignedBuf;
use crate::error::Result;
use crate::options::caller_memory::HostMemory;
use crate::options::{ImageIo, LogIo};

/// A store directory, in a file system or simulated. `Any` is a supertrait so that [`link`](Disk::link) can recognize
/// directories of the same type.
pub trait Disk: Any + Send + Sync {
    /// Returns the name of the directory for error messages and reports, such as its path.
    fn label(&self) -> String;

    /// Acquires the store's writer lock. The lock is held until the guard is dropped. Creates the `LOCK` and `READERS`
    /// files if they do not exist.
    ///
    /// # Errors
    /// `Locked` with the holder; I/O errors.
    fn lock(&self) -> Result<Box<dyn DiskLock>>;

    /// Returns an error if another writer has opened the store after this writer. Two writers are possible only where
    /// locks do not work.
    ///
    /// A writer writes its description to `LOCK` before it reads the log. If this check succeeds, no other writer has
    /// read the log yet, so a later writer finds all batches that were synced before the check. The disk itself
    /// performs this check before each change to a file or a name. Callers must perform the check only before they
    /// write through [windows](DiskFile::window) and [mapped parts](DiskFile::mapped_part).
    ///
    /// # Errors
    /// [`Error::Superseded`](crate::Error::Superseded); I/O errors.
    fn check_writer(&self) -> Result<()>;

    /// Returns whether any process holds the writer lock. The check acquires no lock and writes nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn is_locked(&self) -> Result<bool>;

    /// Prevents the writer from removing the files that snapshot `id` needs, including its log, until the guard is
    /// dropped. Id 0 represents the beginning of the log. Several readers may hold the same snapshot. The call writes
    /// nothing.
    ///
    /// The writer may already have removed the snapshot, so the caller must then check that the manifest still exists.
    ///
    /// # Errors
    /// I/O errors.
    fn hold(&self, id: SnapshotId) -> Result<Hold>;

    /// Prevents new readers from holding snapshot `id` until the guard is dropped. Returns `None` if a reader holds the
    /// snapshot. The writer keeps the guard until it has removed the files that the snapshot needs.
    ///
    /// # Errors
    /// I/O errors.
    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>>;

    /// Returns whether a reader holds snapshot `id`. The check acquires no lock and writes nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn is_held(&self, id: SnapshotId) -> Result<bool>;

    /// Returns the names in `folder`, sorted. Returns an empty list if the folder does not exist.
    ///
    /// # Errors
    /// I/O errors.
    fn list(&self, folder: Folder) -> Result<Vec<String>>;

    /// Returns the numbers of the image files whose reads may wait for an archive, because the directory lacks parts of
    /// them.
    fn unfetched_files(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Creates `folder` in the store directory, or the store directory itself. Does nothing if the folder exists.
    ///
    /// # Errors
    /// I/O errors.
    fn make_folder(&self, folder: Folder) -> Result<()>;

    /// Durably creates the missing parent directories of the store directory.
    ///
    /// # Errors
    /// I/O errors.
    fn make_parents(&self) -> Result<()> {
        Ok(())
    }

    /// Makes all creations, renames and removals of names in `folder` durable.
    ///
    /// # Errors
    /// I/O errors.
    fn sync_folder(&self, folder: Folder) -> Result<()>;

    /// Opens the descriptors that [`sync_folder`](Self::sync_folder) needs, and keeps them open for the lifetime of
    /// this disk. A later sync of a folder then cannot fail because the process has too many open files.
    ///
    /// # Errors
    /// I/O errors.
    fn keep_folders_open(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the total size of the file system in bytes, or `None` if it is unknown.
    ///
    /// # Errors
    /// I/O errors.
    fn total_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Returns the number of bytes in the file system that are free for this process, or `None` if it is unknown.
    ///
    /// # Errors
    /// I/O errors.
    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Creates an empty file that is open for reading and writing. An existing file with this name is truncated, so
    /// callers must pass an unused name: a `Temporary` name or a new number.
    ///
    /// # Errors
    /// I/O errors.
    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>>;

    /// Opens a file for reading, and also for writing if `write` is true.
    ///
    /// # Errors
    /// I/O errors; `NotFound` inside `Io` if the file does not exist.
    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>>;

    /// Returns the current absolute path of the store directory. Returns `None` if the directory is not in a file
    /// system. If a locked directory was moved, the result is its new path.
    ///
    /// # Errors
    /// [`Error::NoStore`](crate::Error::NoStore) if the directory was removed.
    fn directory(&self) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Creates a hard link to `file` of the directory `source` in this directory, under the same name. Returns `false`
    /// if the two directories cannot share a file.
    ///
    /// # Errors
    /// I/O errors.
    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let _ = (source, file);
        Ok(false)
    }

    /// Renames a file, replacing `target`. A rename between folders becomes durable separately in each folder. Until
    /// both folders are synced, a power cut may leave both names or neither.
    ///
    /// # Errors
    /// I/O errors. If there is no space for the new name, the rename fails without any change. XFS reports this error
    /// on a full disk.
    fn rename(&self, source: FileName, target: FileName) -> Result<()>;

    /// Removes a file from its folder.
    ///
    /// # Errors
    /// I/O errors.
    fn remove(&self, file: FileName) -> Result<()>;

    /// Returns a watch that reports when files of `folder` are written, created or renamed. On a system without such
    /// notifications, the watch only waits.
    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        let _ = folder;
        Box::new(SleepOnlyWatch)
    }

    /// Wakes every [watch](Self::watch) on the folder of `file`, in all processes, as if a system call had written to
    /// `file`. The file is unchanged.
    ///
    /// Writers call this method after stores into a mapping, because such stores cause no event. Where this method is
    /// not supported, watchers poll.
    fn notify_watchers(&self, file: FileName) {
        let _ = file;
    }

    /// Returns the reason why this disk does not support `io` for the log, or `None` if the disk supports `io`.
    /// `Buffered` is always supported.
    ///
    /// # Errors
    /// I/O errors.
    fn refuses(&self, io: LogIo) -> Result<Option<String>>;

    /// Returns the reason why this disk does not support `io` for image files, or `None` if the disk supports `io`.
    /// `Buffered` is always supported. For `Auto`, returns the reason why direct I/O is not supported or gains nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>>;
}

/// An open file of a store directory, for reads and writes at given offsets.
#[expect(clippy::len_without_is_empty, reason = "a file is measured, which can fail; it is not a collection")]
pub trait DiskFile: Send + Sync {
    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// I/O errors.
    fn len(&self) -> Result<u64>;

    /// Returns whether space is allocated for every byte of the file. The result is `false`, for example, for a copy
    /// that was made without writing zeros.
    ///
    /// # Errors
    /// I/O errors.
    fn is_without_holes(&self) -> Result<bool> {
        Ok(true)
    }

    /// Returns whether the file has exactly one name. The store does not overwrite a file with a second name, because a
    /// fork may read the file.
    ///
    /// # Errors
    /// I/O errors.
    fn has_one_name(&self) -> Result<bool>;

    /// Writes all of `bytes` at `offset`, extending the file if needed.
    ///
    /// # Errors
    /// I/O errors.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Writes zeros from `offset` to `end`. `io` is the mode of the window that will be opened on the file. The mode
    /// determines how the zeros are written.
    ///
    /// # Errors
    /// I/O errors.
    fn write_zeros(&self, offset: u64, end: u64, io: LogIo) -> Result<()> {
        let _ = io;
        zeros_by_pieces(offset, end, ZEROS_LEN_MAX, |at, zeros| self.write_at(at, zeros))
    }

    /// Fills `out` with the bytes at `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` inside `Io` if the file ends before the last byte; other I/O errors.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` with the bytes at `offset`, read from the medium. On a system where reads cannot bypass the page
    /// cache, the bytes may come from the cache. The bytes must have been synced.
    ///
    /// # Errors
    /// Same as `read_at`.
    fn read_bypassing_cache(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` with the bytes at `offset`. Cached bytes are read from the page cache, and all others from the
    /// medium.
    ///
    /// The bytes must have been read with [`read_bypassing_cache`](Self::read_bypassing_cache) after their last sync,
    /// and no writer may modify them. For other bytes, the cache does not prove what is on the medium (I6).
    ///
    /// # Errors
    /// Same as `read_at`.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_bypassing_cache(offset, out)
    }

    /// Returns the byte ranges of the file that are currently in no cache of the system, in ascending order, separated
    /// by gaps. A later read of such a range reads from the medium, unless a writer modifies the range.
    ///
    /// A missing range only costs another read. An extra range would make a reader trust cached bytes that may differ
    /// from the medium (I6). Therefore the result is empty if the system cannot report its cached pages.
    fn uncached(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    /// Allocates space for every byte from `offset` to `end`, and extends the file to at least `end`. Newly allocated
    /// bytes are zero. Returns `false`, without any change, if the file system cannot allocate space without writing.
    ///
    /// # Errors
    /// I/O errors. If there is not enough space, a part of the range may be allocated, and the file partly extended.
    fn reserve(&self, offset: u64, end: u64) -> Result<bool>;

    /// Writes whole blocks at `offset`, bypassing the page cache. The memory of `blocks` must be aligned to blocks. The
    /// bytes are durable after [`sync`](Self::sync).
    ///
    /// # Errors
    /// I/O errors, including the error of a file system without such writes ([`Disk::refuses_images`]).
    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()>;

    /// Truncates the file to `len` bytes, or extends the file to `len` bytes with a hole. The file must not be mapped,
    /// because a store past the end of the file would kill the process.
    ///
    /// # Errors
    /// I/O errors.
    fn cut(&self, len: u64) -> Result<()>;

    /// Maps `range` of the file for stores. Offsets in the returned window are relative to the start of the range.
    ///
    /// Space must be allocated for every byte of the range, because a store cannot report a full disk. The file must
    /// not be truncated during the lifetime of the window. A `sync` of the file also makes the stores durable, even
    /// after the window is dropped.
    ///
    /// # Errors
    /// I/O errors.
    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>>;

    /// Returns the memory of the file at its current length, if the file exists only in memory and is fully allocated.
    /// Otherwise returns `None`, because a file on a medium must be verified by reads that bypass the page cache (I7).
    ///
    /// # Errors
    /// I/O errors.
    fn memory(&self) -> Result<Option<Box<dyn FileMemory>>> {
        Ok(None)
    }

    /// Starts writing the given range to the medium, so that a later [`sync`](Self::sync) takes less time. Only `sync`
    /// reports failures.
    fn write_back(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Makes all bytes written so far and the file's length durable. Callers must not retry a failed sync, because the
    /// system may have dropped the bytes that it could not write.
    ///
    /// # Errors
    /// I/O errors.
    fn sync(&self) -> Result<()>;

    /// Opens a window onto the file for in-place writes. The file's length must not change during the lifetime of the
    /// window. The disk must support `io`. A `Mapped` window requires a file in which every byte was written.
    ///
    /// # Errors
    /// I/O errors.
    fn window(&self, io: LogIo) -> Result<Box<dyn Window>>;
}

/// The memory of a file that exists only in memory, so that a device can copy pages directly into the file. The owner
/// of this value is the only writer through it. During its lifetime, the file must be neither truncated nor punched,
/// because bytes that a device writes to a removed page are lost without an error.
///
/// The owner is the device that registered the file. A device must not both borrow the bytes and write to the address
/// in its lanes, because a borrow does not exclude the lanes.
pub trait FileMemory: Any + HostMemory {
    /// Returns the address of the file's first byte, a multiple of the page size.
    fn address(&self) -> u64;
}

/// The maximum number of zeros written at a time, a compromise between latency and throughput. A sync of the log waits
/// for the zeros that were written before the sync.
///
/// For 8 committing threads on 2 cores with ext4, the slowest hundredth of 4 KiB commits took 1.4 ms with pieces of 1
/// MiB, and 1.0 ms with this length. For 64 KiB commits it took 4.0 and 2.3 ms, and this length made a tenth more
/// commits. With pieces of 64 KiB, segments were created too late, and a fifth fewer commits were made.
const ZEROS_LEN_MAX: u64 = 256 << 10;

/// The value of [`ZEROS_LEN_MAX`] if memory is short. An allocation of this length does not fail.
const ZEROS_LEN_SHORT: usize = 32 << 10;

/// Calls `write` with zeros for the range from `offset` to `end`. The range is divided at the multiples of `piece_len`.
fn zeros_by_pieces<E>(
    offset: u64,
    end: u64,
    piece_len: u64,
    mut write: impl FnMut(u64, &[u8]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let zeros_len = piece_len.min(end.saturating_sub(offset)) as usize;
    // If memory is short, the pieces are shorter.
    let zeros = AlignedBuf::try_new(zeros_len);
    let zeros = zeros.unwrap_or_else(|| AlignedBuf::new(zeros_len.min(ZEROS_LEN_SHORT)));
    let piece_len = if zeros.len() < zeros_len { ZEROS_LEN_SHORT as u64 } else { piece_len };
    let mut at = offset;
    while at < end {
        let next = (at + 1).next_multiple_of(piece_len).min(end);
        write(at, &zeros[..(next - at) as usize])?;
        at = next;
    }
    Ok(())
}

/// A view of a file for writes that neither extend nor truncate the file. The log is always written through windows,
/// and image files may be. Only one thread may call [`put`](Self::put) at a time. Another thread may call
/// [`sync`](Self::sync) concurrently.
pub trait Window: Send + Sync {
    /// Stores `bytes` at `offset` in the window. On return the bytes survive the death of the process. In a `Direct`
    /// window, they survive only after a sync.
    ///
    /// # Errors
    /// I/O errors.
    ///
    /// # Panics
    /// If the bytes are not within the window.
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Makes the bytes in `offset..offset + len` durable. A `Direct` window has three further rules:
    ///
    /// - `offset` must be a multiple of 4096.
    /// - A later put must not store bytes below the end of the range.
    /// - The remainder of the last 4096-byte block is set to zero.
    ///
    /// # Errors
    /// I/O errors, after which no further batch may be acknowledged.
    fn sync(&self, offset: u64, len: u64) -> Result<()>;

    /// Prepares the range for a first put, for example by causing its page faults in advance. Changes no byte. Without
    /// this preparation, the first put takes longer.
    ///
    /// # Panics
    /// If the range is not within the window.
    fn prefault(&self, _offset: u64, _len: u64) {}
}

/// Waits for changes to the files of a folder, so that a follower of the log need not poll.
pub trait Watch: Send {
    /// Returns whether a change in the folder ends a wait early. A store into a mapping ends a wait only if the writer
    /// calls [`Disk::notify_watchers`].
    fn has_notifications(&self) -> bool;

    /// Waits for a change in the folder, but at most for `timeout`. Returns whether names in the folder changed or may
    /// have changed.
    fn wait(&mut self, timeout: Duration) -> bool;
}

/// A watch for systems without notifications. Each wait lasts for its full timeout.
struct SleepOnlyWatch;

impl Watch for SleepOnlyWatch {
    fn has_notifications(&self) -> bool {
        false
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        // A spurious early wake-up costs only one extra check.
        std::thread::park_timeout(timeout);
        false
    }
}

/// A guard for a file lock, released when the process that acquired the lock drops the guard. Dropping a forked child's
/// copy of the guard has no effect.
pub trait DiskLock: Send + Sync {}

/// The result of [`Disk::hold`].
pub enum Hold {
    /// The snapshot is held until the guard is dropped.
    Held(Box<dyn DiskLock>),
    /// The writer is removing the snapshot, so the reader cannot use it.
    Retiring,
    /// No lock can be acquired, because the store is on a read-only medium and has no lock file. A caller that reads
    /// the snapshot without a lock must handle the removal of its files.
    Impossible,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hold::Held(_) => "Held",
            Hold::Retiring => "Retiring",
            Hold::Impossible => "Impossible",
        })
    }
}
