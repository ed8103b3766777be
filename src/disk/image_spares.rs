//! Spare image files: nothing needs them any more, and the next images are written over their bytes (I13).
//!
//! A new file costs more than its bytes: the file system finds space for it, and the kernel fills each of its
//! pages with zeros before it is written. A file that is written again has both.
//!
//! A spare is `pages/<n>.spare`, under the number that it had. It lies in the folder of images, because a
//! rename within one folder is atomic, and one sync makes it durable. Of a rename to another folder a power
//! cut may keep both names, and the older one would lead to the bytes of the newer file.
//!
//! 1. **Rename** a file that is free, and **sync** the folder. Written over before that, the old name could
//!    come back with a power cut, and a reader that still looks for it would find other bytes.
//! 2. **Judge** the spare. Only now: a fork links files by their names, and this one has lost the name.
//! 3. **Rename** it to its new name, and **sync** the folder.
//! 4. **Write** header and chunks, as to a new file. The heads of chunks carry the file's number. Written
//!    before 3 was synced, they could stay in a spare whose new name a power cut took. The number would be
//!    given again, and the old chunks would look like new ones.
//!
//! A crash leaves the file under one of its names, and nothing names it: a manifest does so only after
//! header, chunks and name are synced. After a crash in 4 the header may be the old one; no image depends on
//! it.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw};
use remanent_format::{FileName, Folder, StoreId};

use super::{Disk, DiskFile};
use crate::base::sync::Mutex;
use crate::error::{Error, Result};

/// The most spares that are kept. A snapshot writes up to four files at a time.
const FILES_MAX: usize = 8;
/// A spare is written again only if it is at most this many times as long as the images for it: the rest of
/// it is cut off, and its space is lost for a longer file.
const LONGER_MAX: u64 = 2;

/// The spare image files of an open store.
pub(crate) struct ImageSpares {
    disk: Arc<dyn Disk>,
    store: StoreId,
    /// The spares, from the shortest to the longest.
    files: Mutex<Vec<ImageSpare>>,
    /// What keeps files ready for the next images, by the files' numbers: those of spares, and of files that
    /// were spares and are image files again. A file is let go of before it is removed or cut.
    kept_ready: Mutex<BTreeMap<u64, KeptReady>>,
}

/// Keeps a file ready for the next images. What that is, is not known here; dropping it ends it.
pub(crate) type KeptReady = Arc<dyn Any + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageSpare {
    number: u64,
    len: u64,
}

/// A spare that has its new name. Its bytes are old ones.
pub(crate) struct ReusedFile {
    pub file: Arc<dyn DiskFile>,
    /// How many bytes have their space.
    pub space_len: u64,
    /// What keeps the file ready, if anything does.
    pub kept_ready: Option<KeptReady>,
}

impl ImageSpares {
    /// Lists the spares of earlier runs. None of them is touched: an open that is refused changes nothing.
    pub fn open(disk: Arc<dyn Disk>, store: StoreId) -> Result<Self> {
        let mut files = Vec::new();
        for name in disk.list(Folder::Pages)? {
            if let Some(file @ FileName::ImageSpare(number)) = FileName::parse(Folder::Pages, &name) {
                files.push(ImageSpare { number, len: disk.open(file, false)?.len()? });
            }
        }
        files.sort_unstable_by_key(|spare| spare.len);
        Ok(Self { disk, store, files: Mutex::new(files), kept_ready: Mutex::default() })
    }

    /// No spares: for a store that is only looked at, or just made.
    pub fn none(disk: Arc<dyn Disk>, store: StoreId) -> Self {
        Self { disk, store, files: Mutex::default(), kept_ready: Mutex::default() }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.lock().is_empty()
    }

    /// Keeps of these image files, which are free, as many as fit into `bytes_max` with the spares that are
    /// there, and removes the rest; `files` are numbers and lengths. Spares that do not fit any more go, too.
    /// `is_changed` says whether other files went from the folder. When this returns, it is synced if any
    /// did.
    pub fn recycle(&self, free: &[(u64, u64)], bytes_max: u64, is_changed: bool) -> Result<()> {
        let mut files = self.files.lock();
        let count = files.len();
        // The longest first: these cost most to make anew.
        let mut all: Vec<(ImageSpare, bool)> = files.iter().map(|spare| (*spare, true)).collect();
        all.extend(free.iter().map(|(number, len)| (ImageSpare { number: *number, len: *len }, false)));
        all.sort_by_key(|(spare, _)| std::cmp::Reverse(spare.len));
        let (mut bytes, mut kept) = (0_u64, Vec::new());
        for (spare, is_spare) in all {
            let name = if is_spare { FileName::ImageSpare } else { FileName::Pages }(spare.number);
            let fits = kept.len() < FILES_MAX && bytes + spare.len <= bytes_max;
            match (fits, is_spare) {
                (true, true) => {}
                // 1.
                (true, false) => match self.disk.rename(name, FileName::ImageSpare(spare.number)) {
                    Ok(()) => {}
                    // XFS may have no block for the new name; the file's space comes back all the same.
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
            // 2.
            let name = FileName::ImageSpare(spare.number);
            match self.disk.open(name, false).and_then(|file| self.is_usable(&*file)) {
                Ok(false) => self.remove(name, spare.number)?,
                // Where the system is short of something, it is judged when it is taken.
                Err(error) if !error.is_passing() => return Err(error),
                Ok(true) | Err(_) => insert(&mut files, *spare),
            }
        }
        Ok(())
    }

    /// Takes spares of about `len` bytes each, as far as there are any, and gives them the names of image
    /// files of these numbers, durably. One sync of the folder does for all.
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

    /// Removes image files that were spares and are not written after all.
    pub fn forget<'n>(&self, numbers: impl Iterator<Item = &'n u64>) {
        for number in numbers {
            if let Err(error) = self.remove(FileName::Pages(*number), *number) {
                tracing::warn!(%error, "cannot remove an unfinished image file; the next open will");
            }
        }
    }

    /// Takes a spare of about `len` bytes and gives it the name of image file `number`; `None` if no spare
    /// suits.
    fn rename(&self, number: u64, len: u64) -> Result<Option<ReusedFile>> {
        while let Some(spare) = self.take(len) {
            let name = FileName::ImageSpare(spare.number);
            let opened = self.disk.open(name, false);
            // A crash may have struck before it was judged, and a program may have linked it since.
            let judged = opened.and_then(|file| self.is_usable(&*file));
            if !judged.inspect_err(|_| insert(&mut self.files.lock(), spare))? {
                self.remove(name, spare.number)?;
                continue;
            }
            // 3.
            let target = FileName::Pages(number);
            match self.disk.rename(name, target) {
                Ok(()) => {}
                // The file is still the spare that the list said.
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
            // By its new name, for errors that name it.
            let file = self.disk.open(target, true).inspect_err(|_| self.forget([number].iter()))?;
            return Ok(Some(ReusedFile { file, space_len: spare.len, kept_ready }));
        }
        Ok(None)
    }

    /// Removes all spares for their space; returns whether there were any. The removals are not durable at
    /// once: a crash may bring spares back, which costs only their space.
    pub fn release(&self) -> Result<bool> {
        let mut files = self.files.lock();
        let had_any = !files.is_empty();
        while let Some(spare) = files.last() {
            self.remove(FileName::ImageSpare(spare.number), spare.number)?;
            files.pop();
        }
        Ok(had_any)
    }

    /// Has `keep` keep each spare ready for the next images, as far as it can, the longest first; `is_ready`
    /// says whether one is, for all of its length. Slow: no lock is held, and a spare that goes meanwhile is
    /// let go of.
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
            // Ended outside of the lock, and before the file is mapped anew.
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

    /// Lets go of a file of this number, if it is kept ready: it is removed or cut next.
    pub fn let_go(&self, number: u64) {
        // Ended after the lock is let go: it takes a while.
        let kept = self.kept_ready.lock().remove(&number);
        drop(kept);
    }

    fn remove(&self, name: FileName, number: u64) -> Result<()> {
        self.let_go(number);
        self.disk.remove(name)
    }

    /// Runs `make`; where it finds no space for its files, gives up the spares and runs it once more. A
    /// `make` that fails for lack of space must have changed nothing.
    pub fn give_way<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(Error::DiskFull { .. }) if self.release()? => make(),
            made => made,
        }
    }

    /// Takes the shortest spare that is long enough, or else the longest.
    fn take(&self, len: u64) -> Option<ImageSpare> {
        let mut files = self.files.lock();
        let long = files.partition_point(|spare| spare.len < len);
        let at = if long < files.len() { long } else { files.len().checked_sub(1)? };
        (files[at].len <= len.saturating_mul(LONGER_MAX)).then(|| files.remove(at))
    }

    /// Whether a file may be written over. A fork has a second name for it; a file of an ancestor's may be
    /// read by readers that hold nothing here; a hole would turn a full disk into SIGBUS.
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
            // Where the medium cannot be read, nothing is to be written either.
            Err(_) => return Ok(false),
        }
        Ok(ImageFileHeader::decode(&bytes).is_ok_and(|header| header.store == self.store))
    }
}

/// Puts a spare in its place by length.
fn insert(files: &mut Vec<ImageSpare>, spare: ImageSpare) {
    let at = files.partition_point(|other| other.len <= spare.len);
    files.insert(at, spare);
}
