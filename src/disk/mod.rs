//! Storage abstraction: the files of a store, its folders, and mapped windows.
//!
//! The engine performs storage operations only through the methods here, so that `SimDisk` sees every write,
//! sync and rename as a point at which a crash can occur. The engine holds `Arc<dyn Disk>`: an indirect call
//! costs a nanosecond or two, little compared with a store into a mapping or a sync, and the engine is
//! compiled once instead of once per disk.

pub(crate) mod source;
pub(crate) mod growing;
pub(crate) mod image_spares;
mod buffered;
mod cached;
mod claim;
// Public because tests and fuzz targets use it from outside the crate; hidden because no user's store needs
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
use crate::options::{ImageIo, LogIo};

/// A store directory. `Any` is a supertrait so that [`link`](Disk::link) can recognize its own kind.
pub trait Disk: Any + Send + Sync {
    /// Returns the directory's name for errors and reports.
    fn label(&self) -> String;

    /// Takes the store's writer lock for as long as the guard lives. Creates the `LOCK` and `READERS` files
    /// if needed.
    ///
    /// # Errors
    /// `Locked` with the holder; I/O errors.
    fn lock(&self) -> Result<Box<dyn DiskLock>>;

    /// Fails if another writer has opened the store since this one did, which can happen only where locks do
    /// not work. A writer announces itself before it reads the log, so batches that were synced before a
    /// successful check are among those that the other writer finds. The disk itself checks before each
    /// change to a file or a name; only for [windows](DiskFile::window) and [mapped
    /// parts](DiskFile::mapped_part) must the caller check.
    ///
    /// # Errors
    /// [`Error::Superseded`](crate::Error::Superseded); I/O errors.
    fn check_writer(&self) -> Result<()>;

    /// Whether any process holds the writer lock. Takes no lock and writes nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn is_locked(&self) -> Result<bool>;

    /// Keeps the writer from removing the files that snapshot `id` needs, including its log, for as long as
    /// the guard lives. Number 0 stands for the beginning of the log. Any number of readers may hold a
    /// snapshot. Writes nothing. A new hold may be too late: the caller must check that the manifest still
    /// exists.
    ///
    /// # Errors
    /// I/O errors.
    fn hold(&self, id: SnapshotId) -> Result<Hold>;

    /// Makes snapshot `id` unavailable to new readers for as long as the guard lives. Returns `None` if a
    /// reader holds it. The writer keeps the guard until the files that the snapshot needs are removed.
    ///
    /// # Errors
    /// I/O errors.
    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>>;

    /// Whether a reader holds snapshot `id`. Takes no lock and writes nothing.
    ///
    /// # Errors
    /// I/O errors.
    fn is_held(&self, id: SnapshotId) -> Result<bool>;

    /// Returns the names in a folder, sorted; empty if the folder does not exist.
    ///
    /// # Errors
    /// I/O errors.
    fn list(&self, folder: Folder) -> Result<Vec<String>>;

    /// Creates a folder of the store directory, or the directory itself, unless it exists.
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

    /// Makes the names in a folder durable: creations, renames and removals there.
    ///
    /// # Errors
    /// I/O errors.
    fn sync_folder(&self, folder: Folder) -> Result<()>;

    /// Keeps open the descriptors that [`sync_folder`](Self::sync_folder) needs, for as long as this disk
    /// lives. A sync after a rename must not fail because the process happens to have too many open files.
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

    /// Returns the bytes of the file system that are free for this process, or `None` if that is unknown.
    ///
    /// # Errors
    /// I/O errors.
    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Creates an empty file, open for reading and writing. An existing file is truncated, so only names that
    /// are not in use yet (`Temporary`, new numbers) may be created.
    ///
    /// # Errors
    /// I/O errors.
    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>>;

    /// Opens a file for reading, and also for writing if `write` is set.
    ///
    /// # Errors
    /// I/O errors; `NotFound` inside `Io` if the file does not exist.
    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>>;

    /// Returns the current absolute path of the directory: a locked directory may have been moved. `None` if
    /// it is in no file system.
    ///
    /// # Errors
    /// [`Error::NoStore`](crate::Error::NoStore) if it was removed.
    fn directory(&self) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Links a file of another store directory here under the same name, so that both share its bytes.
    /// Returns `false` if that is not possible.
    ///
    /// # Errors
    /// I/O errors.
    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let _ = (source, file);
        Ok(false)
    }

    /// Renames a file, replacing `target`. A rename across folders becomes durable in each folder by that
    /// folder's own sync: until both are synced, a power cut may leave both names, or none.
    ///
    /// # Errors
    /// I/O errors. A lack of space for the name, which XFS reports on a full disk, means that nothing has
    /// changed.
    fn rename(&self, source: FileName, target: FileName) -> Result<()>;

    /// Removes a file from its folder.
    ///
    /// # Errors
    /// I/O errors.
    fn remove(&self, file: FileName) -> Result<()>;

    /// Returns a watch that reports when files of a folder are written, created or renamed, as far as the
    /// system reports it.
    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        let _ = folder;
        Box::new(SleepOnlyWatch)
    }

    /// Ends the wait of every [watch](Self::watch) on the folder, in all processes, as if `file` had been
    /// written by a system call. The file is unchanged. This is needed because stores into a mapping cause no
    /// event. It is best effort: if it is not supported, watchers poll.
    fn notify_watchers(&self, file: FileName) {
        let _ = file;
    }

    /// Returns the reason why a log here must not be written in this way, or `None` if it may. Buffered is
    /// always possible.
    ///
    /// # Errors
    /// I/O errors.
    fn refuses(&self, io: LogIo) -> Result<Option<String>>;

    /// Returns the reason why image files here must not be written in this way, or `None` if they may.
    /// Buffered is always possible.
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

    /// Whether space is allocated for every byte of the file. A hole has none; a copy that skips zeros has
    /// holes.
    ///
    /// # Errors
    /// I/O errors.
    fn is_without_holes(&self) -> Result<bool> {
        Ok(true)
    }

    /// Whether the file has exactly one name. Files with a second name are not written over, because a fork
    /// may read them.
    ///
    /// # Errors
    /// I/O errors.
    fn has_one_name(&self) -> Result<bool>;

    /// Writes all of `bytes` at `offset`, extending the file if needed.
    ///
    /// # Errors
    /// I/O errors.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Writes zeros from `offset` to `end`, in the way that best suits a window of this kind.
    ///
    /// # Errors
    /// I/O errors.
    fn write_zeros(&self, offset: u64, end: u64, io: LogIo) -> Result<()> {
        let _ = io;
        zeros_by_pieces(offset, end, ZEROS_LEN_MAX, |at, zeros| self.write_at(at, zeros))
    }

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` inside `Io` if the file ends before the last byte; other I/O errors.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` from `offset`, from the medium if the system allows a process to read past its cache. Only
    /// synced bytes may be read this way.
    ///
    /// # Errors
    /// As for `read_at`.
    fn read_past_cache(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` from `offset`. Cached bytes come from the cache, the rest from the medium. Use this only
    /// for bytes that were read past the cache since they were synced, and that no writer touches: for other
    /// bytes the cache proves nothing about the medium (I6).
    ///
    /// # Errors
    /// As for `read_at`.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_past_cache(offset, out)
    }

    /// Returns the byte ranges that are currently in no cache of the system, so that a later read takes them
    /// from the medium unless a writer touches them. The ranges ascend and neither overlap nor touch. A
    /// missing range costs another read, but an extra range makes a reader trust a cache that the medium does
    /// not back (I6). So the result is empty if the system cannot be queried.
    fn uncached(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    /// Allocates space for every byte from `offset` to `end`, and extends the file to at least `end`. Newly
    /// allocated bytes are zero. Returns `false` if the file system cannot allocate space without writing:
    /// then nothing has changed.
    ///
    /// # Errors
    /// I/O errors. After a lack of space, a part of the range may be allocated, and the file partly extended.
    fn reserve(&self, offset: u64, end: u64) -> Result<bool>;

    /// Writes whole blocks past the system's cache, from memory that is aligned to blocks. They are durable
    /// once they are synced. Fails if the file system does not support such writes: see
    /// [`Disk::refuses_images`].
    ///
    /// # Errors
    /// I/O errors.
    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()>;

    /// Truncates the file to `len` bytes, or extends it with a hole. No part of it may be mapped: a store
    /// past the end would kill the process.
    ///
    /// # Errors
    /// I/O errors.
    fn cut(&self, len: u64) -> Result<()>;

    /// Maps a part of the file for stores. The window's offsets are relative to the start of the part. Space
    /// must be allocated for every byte of the part, so that no store needs any, and the file must not be
    /// truncated while the window lives. A `sync` of the file covers the stores, even after the window is
    /// dropped.
    ///
    /// # Errors
    /// I/O errors.
    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>>;

    /// Returns the memory of the file at its current length, if the file exists only in memory and is fully
    /// allocated. Otherwise returns `None`: a medium is proven by reading past the cache, not through memory
    /// (I7).
    ///
    /// # Errors
    /// I/O errors.
    fn memory(&self) -> Result<Option<Box<dyn FileMemory>>> {
        Ok(None)
    }

    /// Starts writing these bytes to the medium, so that `sync` has less to do. Best effort: `sync` reports a
    /// failure.
    fn write_back(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Makes all bytes written so far, and the length, durable. A failed sync is never retried: the system
    /// may have dropped the bytes that it could not write.
    ///
    /// # Errors
    /// I/O errors.
    fn sync(&self) -> Result<()>;

    /// Opens a window onto the file, whose length must not change while the window lives. `io` must not be
    /// one that the disk refuses, nor `Mapped` on a file that is not fully written.
    ///
    /// # Errors
    /// I/O errors.
    fn window(&self, io: LogIo) -> Result<Box<dyn Window>>;
}

/// The memory of a whole file, for a device that copies to it: the bytes are the file's own. The owner is the
/// only writer through it. While it lives, the file must be neither truncated nor punched: bytes that a
/// device writes to a page that the file has lost disappear without an error.
pub trait FileMemory: Any + Send + Sync {
    /// Returns the address of the first byte, which is page-aligned.
    fn address(&self) -> u64;

    /// Returns the length in bytes.
    fn byte_len(&self) -> u64;

    /// Returns a range of the bytes for reading.
    ///
    /// # Panics
    /// If the range is not within the file.
    fn bytes(&self, range: Range<usize>) -> &[u8];

    /// Returns a range of the bytes for writing.
    ///
    /// # Panics
    /// As for [`bytes`](Self::bytes).
    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8];
}

/// The maximum number of zeros written at a time. The log's syncs wait for the zeros before them. For 8
/// committing threads on 2 cores with ext4, the slowest hundredth of 4 KiB commits took 1.4 ms with pieces of
/// 1 MiB, and 1.0 ms with this length. For 64 KiB commits it took 4.0 and 2.3 ms, and this length made a
/// tenth more commits. With pieces of 64 KiB the maker came too late, and a fifth fewer commits were made.
const ZEROS_LEN_MAX: u64 = 256 << 10;

/// The same limit if memory is short. An allocation this small does not fail.
const ZEROS_LEN_SHORT: usize = 32 << 10;

/// Calls `write` with zeros from `offset` to `end`, in aligned pieces that end at multiples of `piece_len`.
fn zeros_by_pieces<E>(
    offset: u64,
    end: u64,
    piece_len: u64,
    mut write: impl FnMut(u64, &[u8]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let zeros_len = piece_len.min(end.saturating_sub(offset)) as usize;
    // Use shorter pieces if memory is short.
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

/// A window onto a file that is written in place. The log is written through windows, and images may be. One
/// thread puts at a time; another may sync concurrently.
pub trait Window: Send + Sync {
    /// Stores `bytes` at `offset`. On return they survive the death of the process; in a `Direct` window,
    /// only once they are synced.
    ///
    /// # Errors
    /// I/O errors.
    ///
    /// # Panics
    /// If the bytes are not within the window: the caller must have checked that.
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Makes the bytes in `offset..offset + len` durable. In a `Direct` window, `offset` is a multiple of
    /// 4096, no later put is below the end, and the rest of the last 4096 bytes is zeroed.
    ///
    /// # Errors
    /// I/O errors, after which nothing may be acknowledged any more.
    fn sync(&self, offset: u64, len: u64) -> Result<()>;

    /// Does the work in advance for which the first put into each of these bytes would wait, such as page
    /// faults. Changes no byte. Best effort: if it is not supported, puts wait.
    ///
    /// # Panics
    /// If the bytes are not within the window.
    fn prefault(&self, _offset: u64, _len: u64) {}
}

/// Waits for changes in a folder.
pub trait Watch: Send {
    /// Whether changes end a wait early. Stores into a mapping do not, unless the writer calls
    /// [`Disk::notify_watchers`].
    fn has_notifications(&self) -> bool;

    /// Waits for a change, or for `timeout`. Returns whether names changed, or may have changed.
    fn wait(&mut self, timeout: Duration) -> bool;
}

/// A watch without notifications: each wait takes its full time.
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

/// A lock, held until the process that took it drops it. In a forked child, dropping its copy does nothing.
pub trait DiskLock: Send + Sync {}

/// The result of a reader's attempt to hold a snapshot.
pub enum Hold {
    /// The snapshot is held until the guard is dropped.
    Held(Box<dyn DiskLock>),
    /// The writer is removing the snapshot.
    Retiring,
    /// No lock can be taken: on a medium without write access, the store has no file for it. A caller that
    /// reads anyway must expect files to be removed meanwhile.
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
