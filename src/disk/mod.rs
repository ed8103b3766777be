//! The seam to storage: files of a store, folders, and mapped windows.
//!
//! The engine asks of storage nothing that is not a method here, so that `SimDisk` sees every write, every
//! sync and every rename as a point at which a crash can strike. The engine holds `Arc<dyn Disk>`. An
//! indirect call costs a nanosecond or two, little against a store into a mapping or a sync, and the engine
//! is compiled once, not once for each disk.

pub(crate) mod source;
pub(crate) mod growing;
pub(crate) mod image_spares;
mod buffered;
mod cached;
mod claim;
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
// Public because tests and fuzz targets use it from outside the crate; hidden because no user's store needs
// it.

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

/// A store directory. `Any`, so that [`link`](Disk::link) can tell its own kind.
pub trait Disk: Any + Send + Sync {
    /// The directory's name in errors and reports.
    fn label(&self) -> String;

    /// Takes the store's writer lock for as long as the guard lives. Creates the `LOCK` and `READERS` files
    /// if needed.
    ///
    /// # Errors
    /// `Locked` with the holder, else what the system says.
    fn lock(&self) -> Result<Box<dyn DiskLock>>;

    /// Refuses a writer whose store another writer has opened since. Where locks work there is none. An open
    /// announces itself before it reads the log, so batches that were synced before a successful check are
    /// among those that the other writer finds. The disk itself checks before each change of a file or a
    /// name. Only [windows](DiskFile::window) and [mapped parts](DiskFile::mapped_part) leave it to the
    /// caller.
    ///
    /// # Errors
    /// [`Error::Superseded`](crate::Error::Superseded); what the system says.
    fn check_writer(&self) -> Result<()>;

    /// Whether any process holds the writer lock. Takes nothing and writes nothing.
    ///
    /// # Errors
    /// What the system says.
    fn is_locked(&self) -> Result<bool>;

    /// Keeps the writer from removing what snapshot `id` needs, its log included, for as long as the guard
    /// lives; number 0 stands for the log's beginning. Any number of readers hold a snapshot. Writes nothing.
    /// A hold that was just taken may be too late: the caller looks whether the manifest is still there.
    ///
    /// # Errors
    /// What the system says.
    fn hold(&self, id: SnapshotId) -> Result<Hold>;

    /// Takes snapshot `id` away from readers to come, for as long as the guard lives; `None` if a reader
    /// holds it. The writer keeps the guard until what the snapshot needs is removed.
    ///
    /// # Errors
    /// What the system says.
    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>>;

    /// Whether a reader holds snapshot `id`. Takes nothing and writes nothing.
    ///
    /// # Errors
    /// What the system says.
    fn is_held(&self, id: SnapshotId) -> Result<bool>;

    /// The names in a folder, sorted; empty if the folder does not exist.
    ///
    /// # Errors
    /// What the system says.
    fn list(&self, folder: Folder) -> Result<Vec<String>>;

    /// Makes a folder below the store directory (or the directory itself), unless it exists.
    ///
    /// # Errors
    /// What the system says.
    fn make_folder(&self, folder: Folder) -> Result<()>;

    /// Makes the missing directories above the store's, durably.
    ///
    /// # Errors
    /// What the system says.
    fn make_parents(&self) -> Result<()> {
        Ok(())
    }

    /// Makes the names in a folder durable: files made, renamed and removed there.
    ///
    /// # Errors
    /// What the system says.
    fn sync_folder(&self, folder: Folder) -> Result<()>;

    /// Keeps open what [`sync_folder`](Self::sync_folder) needs, for as long as this lives. A sync that
    /// follows a rename must not fail because the process has too many files open just then.
    ///
    /// # Errors
    /// What the system says.
    fn keep_folders_open(&self) -> Result<()> {
        Ok(())
    }

    /// How long the file system is, in bytes, used or not; `None` where nothing says it.
    ///
    /// # Errors
    /// What the system says.
    fn total_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// How many bytes of the file system are free for this process; `None` where nothing says it.
    ///
    /// # Errors
    /// What the system says.
    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Makes an empty file, open for reading and writing. A file of that name is truncated, so only names
    /// that stand for nothing yet (`Temporary`, new numbers) are created.
    ///
    /// # Errors
    /// What the system says.
    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>>;

    /// Opens a file for reading, and for writing if `write`.
    ///
    /// # Errors
    /// What the system says; `NotFound` inside `Io` if there is no such file.
    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>>;

    /// Where the directory is now, as an absolute path: one that is locked may have been moved since. `None`
    /// if it lies in no file system.
    ///
    /// # Errors
    /// [`Error::NoStore`](crate::Error::NoStore) if it was removed.
    fn directory(&self) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Gives a file of another store directory a second name here, the same one, so that both share its
    /// bytes; `false` if that is not possible.
    ///
    /// # Errors
    /// What the system says.
    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let _ = (source, file);
        Ok(false)
    }

    /// Renames, replacing `target`. A rename from one folder to another is durable in each of them by its own
    /// sync: until both are synced, a power cut may leave both names, or none.
    ///
    /// # Errors
    /// What the system says. It may say that there is no space for the name, as XFS does on a full disk: then
    /// nothing has changed.
    fn rename(&self, source: FileName, target: FileName) -> Result<()>;

    /// Removes a file from its folder.
    ///
    /// # Errors
    /// What the system says.
    fn remove(&self, file: FileName) -> Result<()>;

    /// A watch that tells when files of a folder are written, made or renamed, as far as the system tells it.
    fn watch(&self, folder: Folder) -> Box<dyn Watch> {
        let _ = folder;
        Box::new(PlainSleep)
    }

    /// Has every [watch](Self::watch) of the folder end its wait, in all processes, as if `file` had been
    /// written by a system call. The file stays as it is. Stores into a mapping make no event of their own.
    /// An advice: where it cannot be followed, watchers look of their own accord.
    fn tell_watchers(&self, file: FileName) {
        let _ = file;
    }

    /// Why a log here must not be written this way, if so. Buffered is always possible.
    ///
    /// # Errors
    /// What the system says.
    fn refuses(&self, io: LogIo) -> Result<Option<String>>;

    /// Why image files here must not be written this way, if so. Buffered is always possible.
    ///
    /// # Errors
    /// What the system says.
    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>>;
}

/// One open file of a store directory.
#[expect(clippy::len_without_is_empty, reason = "a file is measured, which can fail; it is no collection")]
pub trait DiskFile: Send + Sync {
    /// The file's length in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn len(&self) -> Result<u64>;

    /// Whether every byte of the file has its space. A hole has none; a copy that leaves zeros out has holes.
    ///
    /// # Errors
    /// What the system says.
    fn is_without_holes(&self) -> Result<bool> {
        Ok(true)
    }

    /// Whether no other name leads to the file, and the file still has one. Bytes that have a second name are
    /// not written over: a fork may read them.
    ///
    /// # Errors
    /// What the system says.
    fn has_one_name(&self) -> Result<bool>;

    /// Writes all of `bytes` at `offset`, extending the file if needed.
    ///
    /// # Errors
    /// What the system says.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Writes zeros from `offset` to `end`, in the way that is best for a window of this kind.
    ///
    /// # Errors
    /// What the system says.
    fn write_zeros(&self, offset: u64, end: u64, io: LogIo) -> Result<()> {
        let _ = io;
        zeros_by_pieces(offset, end, ZEROS_LEN_MAX, |at, zeros| self.write_at(at, zeros))
    }

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` inside `Io` if the file ends before the last byte; else what the system says.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` from `offset`, from the medium where the system lets a process read past its cache. Only
    /// synced bytes may be read this way.
    ///
    /// # Errors
    /// As for `read_at`.
    fn read_past_cache(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Fills `out` from `offset`. Bytes that the system's cache has at once come from there, the rest from
    /// the medium. Only for bytes that were read past the cache since they were synced, and that no writer
    /// touches: for other bytes the cache proves nothing about the medium (I6).
    ///
    /// # Errors
    /// As for `read_at`.
    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_past_cache(offset, out)
    }

    /// Ranges of bytes of which no cache of the system has anything now. The system takes a later read of
    /// them from the medium, between now and then, unless a writer touches them. They ascend and neither
    /// overlap nor touch. A missing range costs another read. A range too many lets a reader believe a cache
    /// that the medium does not back (I6). So there are none where the system cannot be asked.
    fn uncached(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    /// Makes space for every byte from `offset` to `end`, which then is the file's length at least. Bytes
    /// that had none are zeros. `false` where the file system makes no space without bytes: then nothing
    /// changed.
    ///
    /// # Errors
    /// What the system says. After a lack of space some of the bytes may have theirs, and a part of the
    /// length may be there.
    fn reserve(&self, offset: u64, end: u64) -> Result<bool>;

    /// Writes whole blocks past the system's cache, from memory that is aligned to blocks. They are durable
    /// once they are synced. Where the file system has no such writes, the call fails: see
    /// [`Disk::refuses_images`].
    ///
    /// # Errors
    /// What the system says.
    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()>;

    /// Cuts the file to `len` bytes, or extends it by a hole. No part of it is mapped: a store past the end
    /// would end the process.
    ///
    /// # Errors
    /// What the system says.
    fn cut(&self, len: u64) -> Result<()>;

    /// Maps a part of the file for stores. The offsets of the window count from the part's start. Every byte
    /// of the part has its space, so that no store wants any; while the window lives, the file is not cut. A
    /// `sync` of the file covers the stores, also after the window is gone.
    ///
    /// # Errors
    /// What the system says.
    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>>;

    /// The memory of the file as long as it is now, where the file lies in memory alone and has all its
    /// space. `None` anywhere else: a medium is proven by reading past the cache, and not by memory (I7).
    ///
    /// # Errors
    /// What the system says.
    fn memory(&self) -> Result<Option<Box<dyn FileMemory>>> {
        Ok(None)
    }

    /// Lets the system begin to bring these bytes to the medium, so that `sync` finds less to do. Nothing is
    /// promised: `sync` reports a failure.
    fn write_back(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Makes all bytes written so far, and the length, durable. A failed sync is never retried: the
    /// system may have dropped what it could not write.
    ///
    /// # Errors
    /// What the system says.
    fn sync(&self) -> Result<()>;

    /// Opens a window onto the file, whose length must not change while the window lives. `io` must not
    /// be one that the disk refuses, nor `Mapped` on a file that is not wholly written.
    ///
    /// # Errors
    /// What the system says.
    fn window(&self, io: LogIo) -> Result<Box<dyn Window>>;
}

/// The memory of a whole file, for a device that copies to it: the bytes are the file's own. Its owner is the
/// only writer through it. While it lives the file is neither cut nor given holes: what a device writes to a
/// page that the file has lost goes nowhere, without an error.
pub trait FileMemory: Any + Send + Sync {
    /// The address of the first byte, which begins a page of the system's.
    fn address(&self) -> u64;

    /// Length in bytes.
    fn byte_len(&self) -> u64;

    /// A range of the bytes, to read.
    ///
    /// # Panics
    /// If they do not lie in the file.
    fn bytes(&self, range: Range<usize>) -> &[u8];

    /// A range of the bytes, to write.
    ///
    /// # Panics
    /// As for [`bytes`](Self::bytes).
    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8];
}

/// How many zeros are written at once. The log's syncs wait for the zeros before them. For 8 committing
/// threads on 2 cores with ext4, the slowest hundredth of 4 KiB commits took 1.4 ms with pieces of 1 MiB, and
/// 1.0 ms with this length. With 64 KiB commits it took 4.0 and 2.3 ms, and this length made a tenth more
/// commits. With 64 KiB the maker came too late, and a fifth fewer commits were made.
const ZEROS_LEN_MAX: u64 = 256 << 10;

/// The same where no memory is left for more. A request this short is not refused.
const ZEROS_LEN_SHORT: usize = 32 << 10;

/// Calls `write` with zeros from `offset` to `end`, in aligned pieces that end at multiples of `piece_len`.
fn zeros_by_pieces<E>(
    offset: u64,
    end: u64,
    piece_len: u64,
    mut write: impl FnMut(u64, &[u8]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let zeros_len = piece_len.min(end.saturating_sub(offset)) as usize;
    // Where memory is short, by shorter pieces.
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

/// A window onto a file that is written in place: the log's way to the disk, and one of the images' ways.
/// One thread puts at a time; another may sync meanwhile.
pub trait Window: Send + Sync {
    /// Stores `bytes` at `offset`. When it returns, they survive the death of the process; where the window
    /// is `Direct`, only when they are synced.
    ///
    /// # Errors
    /// What the system says.
    ///
    /// # Panics
    /// If the bytes do not lie within the window: the caller checked that.
    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Makes the bytes in `offset..offset + len` durable. Where the window is `Direct`, `offset` is a
    /// multiple of 4096, no later put lies below the end, and the rest of the last 4096 bytes becomes zeros.
    ///
    /// # Errors
    /// What the system says; then nothing may be acknowledged any more.
    fn sync(&self, offset: u64, len: u64) -> Result<()>;

    /// Does in advance the work for which the first put into each of these bytes would wait. Changes no byte.
    /// It is advice: where it cannot be followed, puts wait.
    ///
    /// # Panics
    /// If the bytes do not lie within the window.
    fn prefault(&self, _offset: u64, _len: u64) {}
}

/// Waits for changes in a folder.
pub trait Watch: Send {
    /// Whether changes end a wait early. Stores into a mapping do not, unless the writer
    /// [tells](Disk::tell_watchers).
    fn tells(&self) -> bool;

    /// Waits until something changes, or for `timeout`. Returns whether names changed, or may have changed.
    fn wait(&mut self, timeout: Duration) -> bool;
}

/// A watch without news: a wait takes its whole time.
struct PlainSleep;

impl Watch for PlainSleep {
    fn tells(&self) -> bool {
        false
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        // A park that ends early, without a reason, costs only one look.
        std::thread::park_timeout(timeout);
        false
    }
}

/// A lock, held until the process that took it drops it. In a forked child, dropping its copy does nothing.
pub trait DiskLock: Send + Sync {}

/// The answer to a reader that wants to hold a snapshot.
pub enum Hold {
    /// The snapshot is held until the guard is dropped.
    Held(Box<dyn DiskLock>),
    /// The writer is removing the snapshot just now.
    Going,
    /// Nothing can be locked here: on a medium without write access a store has no file for it. A caller that
    /// reads all the same must expect to be overtaken.
    Impossible,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hold::Held(_) => "Held",
            Hold::Going => "Going",
            Hold::Impossible => "Impossible",
        })
    }
}
