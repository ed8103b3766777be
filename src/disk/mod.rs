//! Storage abstraction: the files of a store, its folders, and mapped windows.
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

/// A store directory. `Any` is a supertrait so that [`link`](Disk::link) can recognize directories of the same type.
pub trait Disk: Any + Send + Sync {
    /// Returns the directory's name as it appears in errors and reports.
    fn label(&self) -> String;

    /// Takes the store's writer lock, which is held until the guard is dropped. Creates the `LOCK` and `READERS` files
    /// if needed.
    ///
    /// # Errors
    /// `Locked` with the holder; I/O errors.
    fn lock(&self) -> Result<Box<dyn DiskLock>>;

    /// Returns an error if another writer has opened the store since this writer did, which is possible only where
    /// locks do not work.
    ///
    /// A writer announces itself before it reads the log. Therefore the other writer finds all batches that were synced
    /// before a successful check. The disk itself performs this check before each change to a file or a name. Callers
    /// must perform it only for [windows](DiskFile::window) and [mapped parts](DiskFile::mapped_part).
    ///
    /// # Errors
    /// [`Error::Superseded`](crate::Error::Superseded); I/O errors.
    fn check_writer(&self) -> Result<()>;

    /// Returns whether any process holds the writer lock. Takes no lock and writes nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn is_locked(&self) -> Result<bool>;

    /// Prevents the writer from removing the files that snapshot `id` needs, including its log, until the guard is
    /// dropped. Number 0 represents the beginning of the log. Several readers may hold the same snapshot. Writes
    /// nothing.
    ///
    /// The writer may already have removed the snapshot, so the caller must check afterwards that the manifest still
    /// exists.
    ///
    /// # Errors
    /// I/O errors.
    fn hold(&self, id: SnapshotId) -> Result<Hold>;

    /// Makes snapshot `id` unavailable to new readers until the guard is dropped. Returns `None` if a reader holds the
    /// snapshot. The writer keeps the guard until the files that the snapshot needs are removed.
    ///
    /// # Errors
    /// I/O errors.
    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>>;

    /// Returns whether a reader holds snapshot `id`. Takes no lock and writes nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn is_held(&self, id: SnapshotId) -> Result<bool>;

    /// Returns the sorted names in a folder, or an empty list if the folder does not exist.
    ///
    /// # Errors
    /// I/O errors.
    fn list(&self, folder: Folder) -> Result<Vec<String>>;

    /// Creates a folder of the store directory, or the directory itself. Does nothing if it exists.
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

    /// Makes all creations, renames and removals of names in a folder durable.
    ///
    /// # Errors
    /// I/O errors.
    fn sync_folder(&self, folder: Folder) -> Result<()>;

    /// Opens the descriptors that [`sync_folder`](Self::sync_folder) needs, and keeps them open for the lifetime of
    /// this disk. Therefore a sync after a rename does not fail because the process has too many open files.
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

    /// Creates an empty file, open for reading and writing. Truncates an existing file, so the name must not be in use
    /// (a `Temporary` name or a new number).
    ///
    /// # Errors
    /// I/O errors.
    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>>;

    /// Opens a file for reading, and also for writing if `write` is true.
    ///
    /// # Errors
    /// I/O errors; `NotFound` inside `Io` if the file does not exist.
    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>>;

    /// Returns the absolute path of the directory, or `None` if it is not in a file system. If a locked directory was
    /// moved, this is its current path.
    ///
    /// # Errors
    /// [`Error::NoStore`](crate::Error::NoStore) if the directory was removed.
    fn directory(&self) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Links file `file` of the directory `source` into this directory under the same name, so that both share its
    /// bytes. Returns `false` if that is not possible.
    ///
    /// # Errors
    /// I/O errors.
    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let _ = (source, file);
        Ok(false)
    }

    /// Renames a file, replacing `target`. A rename between folders becomes durable separately in each folder. Until
    /// both folders are synced, a power cut may leave both names or none.
    ///
    /// # Errors
    /// I/O errors. If there is no space for the name, which XFS reports on a full disk, nothing has changed.
    fn rename(&self, source: FileName, target: FileName) -> Result<()>;

    /// Removes a file from its folder.
    ///
    /// # Errors
    /// I/O errors.
    fn remove(&self, file: FileName) -> Result<()>;

    /// Returns a watch that reports when files of a folder are written, created or renamed, as far as the system
    /// supports it.
    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        let _ = folder;
        Box::new(SleepOnlyWatch)
    }

    /// Wakes every [watch](Self::watch) on the folder, in all processes, as if a system call had written to `file`. The
    /// file is unchanged.
    ///
    /// Writers call this after stores into a mapping, which cause no event. If the call is not supported, watchers
    /// poll.
    fn notify_watchers(&self, file: FileName) {
        let _ = file;
    }

    /// Returns the reason why this disk does not support `io` for the log, or `None` if it does. `Buffered` is always
    /// supported.
    ///
    /// # Errors
    /// I/O errors.
    fn refuses(&self, io: LogIo) -> Result<Option<String>>;

    /// Returns the reason why this disk does not support `io` for image files, or `None` if it does. `Buffered` is
    /// always supported.
    ///
    /// # Errors
    /// I/O errors.
    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>>;
}

/// An open file of a store directory.
#[expect(clippy::len_without_is_empty, reason = "a file is measured, which can fail; it is no collection")]
pub trait DiskFile: Send + Sync {
    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// I/O errors.
    fn len(&self) -> Result<u64>;

    /// Returns whether space is allocated for every byte of the file. For example, a copy that skips zeros has holes
    /// without space.
    ///
    /// # Errors
    /// I/O errors.
    fn is_without_holes(&self) -> Result<bool> {
        Ok(true)
    }

    /// Returns whether the file has exactly one name. Files with a second name are not overwritten, because a fork may
    /// read them.
    ///
    /// # Errors
    /// I/O errors.
    fn has_one_name(&self) -> Result<bool>;

    /// Writes all of `bytes` at `offset`, extending the file if needed.
    ///
    /// # Errors
    /// I/O errors.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Writes zeros from `offset` to `end`, in the way that suits a window with mode `io` best.
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

    /// Fills `out` with the bytes at `offset`, from the medium if the system allows a process to read past its cache.
    /// All of these bytes must be synced.
    ///
    /// # Errors
    /// Same as `read_at`.
    fn read_past_cache(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` with the bytes at `offset`, from the cache where they are cached, otherwise from the medium.
    ///
    /// Use this only for bytes that were read past the cache after their last sync, and that no writer modifies. For
    /// other bytes, the cache does not prove what is on the medium (I6).
    ///
    /// # Errors
    /// Same as `read_at`.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_past_cache(offset, out)
    }

    /// Returns the byte ranges that are currently in no cache of the system, in ascending order, separated by gaps. A
    /// later read takes these bytes from the medium, unless a writer modifies them.
    ///
    /// A missing range only costs another read. In contrast, an extra range makes a reader trust cached bytes that may
    /// differ from the medium (I6). Therefore the result is empty if the system cannot be queried.
    fn uncached(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    /// Allocates space for every byte from `offset` to `end`, and extends the file to at least `end`. Newly allocated
    /// bytes are zero. Returns `false`, without any change, if the file system cannot allocate space without writing.
    ///
    /// # Errors
    /// I/O errors. After a lack of space, a part of the range may be allocated, and the file partly extended.
    fn reserve(&self, offset: u64, end: u64) -> Result<bool>;

    /// Writes whole blocks past the system's cache, from memory that is aligned to blocks. The blocks are durable after
    /// a sync. Fails if the file system does not support such writes, which [`Disk::refuses_images`] determines.
    ///
    /// # Errors
    /// I/O errors.
    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()>;

    /// Truncates the file to `len` bytes, or extends it with a hole. The file must not be mapped, because a store past
    /// its end would kill the process.
    ///
    /// # Errors
    /// I/O errors.
    fn cut(&self, len: u64) -> Result<()>;

    /// Maps a part of the file for stores. Offsets in the window are relative to the start of the part.
    ///
    /// Space must be allocated for every byte of the part, so that no store needs space, and the file must not be
    /// truncated during the lifetime of the window. A `sync` of the file covers the stores, even after the window is
    /// dropped.
    ///
    /// # Errors
    /// I/O errors.
    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>>;

    /// Returns the memory of the file at its current length, if the file exists only in memory and is fully allocated.
    /// Otherwise returns `None`, because files on a medium must be verified by reads past the cache (I7).
    ///
    /// # Errors
    /// I/O errors.
    fn memory(&self) -> Result<Option<Box<dyn FileMemory>>> {
        Ok(None)
    }

    /// Starts writing these bytes to the medium, so that `sync` takes less time. Failures are reported only by `sync`.
    fn write_back(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Makes all bytes written so far and the length durable. A failed sync is never retried, because the system may
    /// have dropped the bytes that it could not write.
    ///
    /// # Errors
    /// I/O errors.
    fn sync(&self) -> Result<()>;

    /// Opens a window onto the file, whose length must not change during the lifetime of the window. The disk must
    /// support `io`. A `Mapped` window requires a file that is fully written.
    ///
    /// # Errors
    /// I/O errors.
    fn window(&self, io: LogIo) -> Result<Box<dyn Window>>;
}

/// The memory of a whole file, to which a device can copy. Its bytes are those of the file. The owner of this value is
/// the only writer through it. During its lifetime, the file must be neither truncated nor punched: bytes that a device
/// writes to a removed page are lost without an error.
///
/// The owner is the device that registered the file. A device either borrows the bytes or writes to the address in its
/// lanes, but not both: a borrow would not exclude the lanes.
pub trait FileMemory: Any + HostMemory {
    /// Returns the page-aligned address of the first byte.
    fn address(&self) -> u64;
}

/// The maximum number of zeros written at a time, a compromise between latency and throughput. The log's syncs wait for
/// the zeros before them.
///
/// For 8 committing threads on 2 cores with ext4, the slowest hundredth of 4 KiB commits took 1.4 ms with pieces of 1
/// MiB, and 1.0 ms with this length. For 64 KiB commits it took 4.0 and 2.3 ms, and this length made a tenth more
/// commits. With pieces of 64 KiB, segments were created too late, and a fifth fewer commits were made.
const ZEROS_LEN_MAX: u64 = 256 << 10;

/// The value of [`ZEROS_LEN_MAX`] if memory is short. An allocation of this length does not fail.
const ZEROS_LEN_SHORT: usize = 32 << 10;

/// Calls `write` with zeros from `offset` to `end`, in aligned pieces that end at multiples of `piece_len`.
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

/// A window onto a file that is written in place. The log is always written through windows, and image files may be.
/// Only one thread may put at a time. Another thread may sync concurrently.
pub trait Window: Send + Sync {
    /// Stores `bytes` at `offset`. On return the bytes survive the death of the process. In a `Direct` window, they
    /// survive only after a sync.
    ///
    /// # Errors
    /// I/O errors.
    ///
    /// # Panics
    /// If the bytes are not within the window.
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Makes the bytes in `offset..offset + len` durable. In a `Direct` window, `offset` must be a multiple of 4096, no
    /// later put may be below the end of the range, and the remainder of the last 4096 bytes is zeroed.
    ///
    /// # Errors
    /// I/O errors, after which no further batch may be acknowledged.
    fn sync(&self, offset: u64, len: u64) -> Result<()>;

    /// Prepares the range for a first put, for example by causing its page faults in advance. Changes no byte. If this
    /// is not supported, puts wait instead.
    ///
    /// # Panics
    /// If the bytes are not within the window.
    fn prefault(&self, _offset: u64, _len: u64) {}
}

/// A watch that waits for changes in a folder.
pub trait Watch: Send {
    /// Returns whether changes end a wait early. Stores into a mapping do not, unless the writer calls
    /// [`Disk::notify_watchers`].
    fn has_notifications(&self) -> bool;

    /// Waits for a change, or for `timeout`. Returns whether names changed or may have changed.
    fn wait(&mut self, timeout: Duration) -> bool;
}

/// A watch without notifications, in which each wait takes its full time.
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

/// A lock that is held until the process that took it drops this value. In a forked child, dropping the copy has no
/// effect.
pub trait DiskLock: Send + Sync {}

/// The result of a reader's attempt to hold a snapshot.
pub enum Hold {
    /// The snapshot is held until the guard is dropped.
    Held(Box<dyn DiskLock>),
    /// The writer is removing the snapshot.
    Retiring,
    /// No lock can be taken, because the store is on a read-only medium and has no lock file. A caller that reads
    /// anyway must handle the removal of files.
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
