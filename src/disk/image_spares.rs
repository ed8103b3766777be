//! Spare image files: image files that are no longer needed, kept to be overwritten by the next images (I13).
//!
//! For a new file, the file system must allocate space, and the kernel zeroes each page before it is written. A reused
//! file avoids both costs.
//!
//! A spare is named `pages/<n>.spare`, with the number of its former image file. The spare stays in the folder of
//! images, because a rename within one folder is atomic, and one sync makes the rename durable. After a rename between
//! folders, a power cut may leave both names, and the older name would lead to the bytes of the newer file.
//!
//! 1. **Rename** a free file to its spare name, and **sync** the folder. If the file were overwritten before that, a
//!    power cut could restore the old name, and a reader that still uses the old name would find other bytes.
//! 2. **Check** the spare. The check must follow the rename, because a fork links files by name, and can no
//!    longer link the renamed file.
//! 3. **Rename** the spare to its new name, and **sync** the folder.
//! 4. **Write** header and chunks, as for a new file. The heads of chunks contain the file's number. If they were
//!    written before the sync of step 3, a power cut could undo the rename and leave these chunks in the spare. The
//!    number would be assigned again, and the old chunks would look like new chunks.
//!
//! A crash leaves the file under one of its names, without references to it. A manifest refers to the file only after
//! header, chunks and name are synced. After a crash in step 4 the file may still have its old header, on which no
//! image depends.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw};
use remanent_format::{FileName, Folder, StoreId};

use super::{Disk, DiskFile};
use crate::base::sync::{Mutex, Rank};
use crate::error::{Error, Result};

/// The maximum number of spares to keep. A snapshot writes up to four files at a time.
const FILES_MAX: usize = 8;
/// The maximum length of a reused spare, as a multiple of the length of its new images. A longer spare is not reused,
/// because the truncation would lose the space for a longer file.
const LONGER_MAX: u64 = 2;

/// The spare image files of an open store. Snapshots overwrite them instead of creating new image files.
pub(crate) struct ImageSpares {
    disk: Arc<dyn Disk>,
    store: StoreId,
    /// The spares, in ascending order of length.
    files: Mutex<Vec<ImageSpare>>,
    /// The resources that keep files ready for the next images, by file number. Each file is a spare, or an image file
    /// that was a spare. The resource is dropped before the file is removed or truncated.
    kept_ready: Mutex<BTreeMap<u64, KeptReady>>,
}

/// An opaque resource, for example a mapping, that keeps a file ready for the next images until the resource is
/// dropped.
pub(crate) type KeptReady = Arc<dyn Any + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageSpare {
    number: u64,
    len: u64,
}

/// A spare that was renamed to an image file. The file still contains its old bytes.
pub(crate) struct ReusedFile {
    pub file: Arc<dyn DiskFile>,
    /// The number of bytes from the start of the file for which space is allocated.
    pub space_len: u64,
    /// The resource that keeps the file ready, or `None` if there is no such resource.
    pub kept_ready: Option<KeptReady>,
}

impl ImageSpares {
    /// Lists the spares that earlier opens left. The spares are not changed, because an open that fails must change
    /// nothing on disk.
    pub fn open(disk: Arc<dyn Disk>, store: StoreId) -> Result<Self> {
        let mut files = Vec::new();
        for name in disk.list(Folder::Pages)? {
            if let Some(file @ FileName::ImageSpare(number)) = FileName::parse(Folder::Pages, &name) {
                files.push(ImageSpare { number, len: disk.open(file, false)?.len()? });
            }
        }
        files.sort_unstable_by_key(|spare| spare.len);
        Ok(Self {
            disk,
            store,
            files: Mutex::of_rank(Rank::IMAGE_SPARES, files),
            kept_ready: Mutex::of_rank(Rank::IMAGE_SPARES_READY, BTreeMap::new()),
        })
    }

    /// Creates an empty set of spares, for a store that is opened read-only or was just created.
    pub fn none(disk: Arc<dyn Disk>, store: StoreId) -> Self {
        Self {
            disk,
            store,
            files: Mutex::of_rank(Rank::IMAGE_SPARES, Vec::new()),
            kept_ready: Mutex::of_rank(Rank::IMAGE_SPARES_READY, BTreeMap::new()),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.files.lock().is_empty()
    }

    /// Turns free image files into spares while all spares together have at most `bytes_max` bytes. Removes the other
    /// free files, and existing spares that exceed the limit.
    ///
    /// `free` contains the numbers and lengths of the free files. `is_changed` states whether other files were removed
    /// from the folder before. Syncs the folder if any of its names changed.
    pub fn recycle(&self, free: &[(u64, u64)], bytes_max: u64, is_changed: bool) -> Result<()> {
        let mut files = self.files.lock();
        let count = files.len();
        // The longest files come first, because they cost most to create again.
        let mut all: Vec<(ImageSpare, bool)> = files.iter().map(|spare| (*spare, true)).collect();
        all.extend(free.iter().map(|(number, len)| (ImageSpare { number: *number, len: *len }, false)));
        all.sort_by_key(|(spare, _)| std::cmp::Reverse(spare.len));
        let (mut bytes, mut kept) = (0_u64, Vec::new());
        for (spare, is_spare) in all {
            let name = if is_spare { FileName::ImageSpare } else { FileName::Pages }(spare.number);
            let fits = kept.len() < FILES_MAX && bytes + spare.len <= bytes_max;
            match (fits, is_spare) {
                (true, true) => {}
                // Step 1.
                (true, false) => match self.disk.rename(name, FileName::ImageSpare(spare.number)) {
                    Ok(()) => {}
                    // XFS may have no free block for the new name. The file is then removed, which frees its space.
                    Err(error) if error.is_no_space() => {
                        self.remove(name, spare.number)?;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                (false, _) => {
                    self.remove(name, spare.number)?;
                    files.retain(|other| *other != spare);
                    continue;
                }
            }
            bytes += spare.len;
            kept.push((spare, is_spare));
        }
        if is_changed || !free.is_empty() || files.len() < count {
            self.disk.sync_folder(Folder::Pages)?;
        }
        for (spare, _) in kept.iter().filter(|(_, is_spare)| !is_spare) {
            // Step 2.
            let name = FileName::ImageSpare(spare.number);
            match self.disk.open(name, false).and_then(|file| self.is_usable(&*file)) {
                Ok(false) => self.remove(name, spare.number)?,
                // If the spare cannot be checked for lack of memory or file handles, it is checked when it is used.
                Err(error) if !error.is_passing() => return Err(error),
                Ok(true) | Err(_) => insert(&mut files, *spare),
            }
        }
        Ok(())
    }

    /// Renames spares of about `len` bytes each to image files with the given numbers, and makes the names durable. The
    /// result contains fewer files than `numbers` if there are too few spares. One sync of the folder covers all
    /// renames.
    pub fn reuse(&self, numbers: Range<u64>, len: u64) -> Result<BTreeMap<u64, ReusedFile>> {
        let mut reused = BTreeMap::new();
        for number in numbers {
            let renamed = self.rename(number, len).inspect_err(|_| self.forget(reused.keys()))?;
            reused.extend(renamed.map(|file| (number, file)));
        }
        if !reused.is_empty() {
            self.disk.sync_folder(Folder::Pages).inspect_err(|_| self.forget(reused.keys()))?;
        }
        Ok(reused)
    }

    /// Removes image files that were renamed from spares but will not be written.
    pub fn forget<'n>(&self, numbers: impl Iterator<Item = &'n u64>) {
        for number in numbers {
            if let Err(error) = self.remove(FileName::Pages(*number), *number) {
                tracing::warn!(%error, "cannot remove an unfinished image file; the next open will");
            }
        }
    }

    /// Renames a spare of about `len` bytes to image file `number`. Returns `None` if no spare is suitable.
    fn rename(&self, number: u64, len: u64) -> Result<Option<ReusedFile>> {
        while let Some(spare) = self.take(len) {
            let name = FileName::ImageSpare(spare.number);
            let opened = self.disk.open(name, false);
            // The spare is checked again: the first check may have been skipped, or another program may have linked the
            // file since.
            let judged = opened.and_then(|file| self.is_usable(&*file));
            if !judged.inspect_err(|_| insert(&mut self.files.lock(), spare))? {
                self.remove(name, spare.number)?;
                continue;
            }
            // Step 3.
            let target = FileName::Pages(number);
            match self.disk.rename(name, target) {
                Ok(()) => {}
                // The rename failed, so the file is still a spare.
                Err(error) if error.is_no_space() => {
                    insert(&mut self.files.lock(), spare);
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
            let kept_ready = {
                let mut kept_ready = self.kept_ready.lock();
                let kept = kept_ready.remove(&spare.number);
                kept.inspect(|kept| _ = kept_ready.insert(number, kept.clone()))
            };
            // The file is opened by its new name, so that errors state that name.
            let file = self.disk.open(target, true).inspect_err(|_| self.forget([number].iter()))?;
            return Ok(Some(ReusedFile { file, space_len: spare.len, kept_ready }));
        }
        Ok(None)
    }

    /// Removes all spares to free their space, and returns whether any spare existed. The removals are not durable on
    /// return. After a crash, spares may exist again, at no cost except their space.
    pub fn release(&self) -> Result<bool> {
        let mut files = self.files.lock();
        let had_any = !files.is_empty();
        while let Some(spare) = files.last() {
            self.remove(FileName::ImageSpare(spare.number), spare.number)?;
            files.pop();
        }
        Ok(had_any)
    }

    /// Calls `keep` for each spare that is not yet ready for the next images, the longest first. `is_ready` returns
    /// whether a resource makes a spare of the given length ready. `keep` returns `None` if it cannot make a file
    /// ready.
    ///
    /// The call is slow and holds no lock. If a spare is removed during the call, its new resource is dropped.
    pub fn keep_ready(
        &self,
        is_ready: impl Fn(&KeptReady, u64) -> bool,
        keep: impl Fn(&dyn DiskFile) -> Option<KeptReady>,
    ) {
        let spares: Vec<ImageSpare> = self.files.lock().iter().rev().copied().collect();
        for ImageSpare { number, len } in spares {
            match self.kept_ready.lock().get(&number) {
                Some(kept) if is_ready(kept, len) => continue,
                _ => {}
            }
            // The resource is dropped outside the lock, and before the file is mapped again.
            let stale = self.kept_ready.lock().remove(&number);
            drop(stale);
            let opened = self.disk.open(FileName::ImageSpare(number), true);
            let Some(kept) = opened.ok().and_then(|file| keep(&*file)) else { continue };
            let files = self.files.lock();
            if files.iter().any(|spare| spare.number == number) {
                self.kept_ready.lock().insert(number, kept);
            }
        }
    }

    /// Drops the resource that keeps file `number` ready. Callers must call this function before they remove or
    /// truncate the file.
    pub fn drop_kept_ready(&self, number: u64) {
        // The resource is dropped outside the lock, because the drop is slow.
        let kept = self.kept_ready.lock().remove(&number);
        drop(kept);
    }

    fn remove(&self, name: FileName, number: u64) -> Result<()> {
        self.drop_kept_ready(number);
        self.disk.remove(name)
    }

    /// Runs `make`. If `make` fails because the disk is full, removes the spares and runs `make` once more. A `make`
    /// that fails for lack of space must have changed nothing.
    pub fn retry_without_spares<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(Error::DiskFull { .. }) if self.release()? => make(),
            made => made,
        }
    }

    /// Takes the shortest spare of at least `len` bytes, or the longest spare if all are shorter. Returns `None` if
    /// that spare is more than [`LONGER_MAX`] times as long as `len`.
    fn take(&self, len: u64) -> Option<ImageSpare> {
        let mut files = self.files.lock();
        let long = files.partition_point(|spare| spare.len < len);
        let at = if long < files.len() { long } else { files.len().checked_sub(1)? };
        (files[at].len <= len.saturating_mul(LONGER_MAX)).then(|| files.remove(at))
    }

    /// Returns whether a file may be overwritten. Three kinds of files must not be overwritten:
    ///
    /// - A file with a second name, because the name may belong to a fork.
    /// - A file of the store from which this one was forked, because its readers acquire no locks here.
    /// - A file with holes, because on a full disk a store into a hole raises SIGBUS.
    fn is_usable(&self, file: &dyn DiskFile) -> Result<bool> {
        if !file.has_one_name()? || !file.is_without_holes()? {
            return Ok(false);
        }
        if file.len()? < ImageFileHeaderRaw::LEN as u64 {
            return Ok(false);
        }
        let mut bytes = [0; ImageFileHeaderRaw::LEN];
        match file.read_at(0, &mut bytes) {
            Ok(()) => {}
            Err(error) if error.is_shortage() => return Err(error),
            // If the medium cannot be read, no images should be written there either.
            Err(_) => return Ok(false),
        }
        Ok(ImageFileHeader::decode(&bytes).is_ok_and(|header| header.store == self.store))
    }
}

/// Inserts a spare, so that the spares remain in ascending order of length.
fn insert(files: &mut Vec<ImageSpare>, spare: ImageSpare) {
    let at = files.partition_point(|other| other.len <= spare.len);
    files.insert(at, spare);
}
