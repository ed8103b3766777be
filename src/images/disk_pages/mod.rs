//! Pages of [`Place::Disk`](remanent_format::Place::Disk): pages that have no memory.
//!
//! The newest bytes of such a page are those of an image, and over them what batches have written since. The
//! image is the newest one there is of the page: a snapshot's, or one that was written ahead of a batch. What
//! was written since is held in host memory, block by block, until a snapshot writes a new image.
//!
//! Nothing here is on disk, so a crash loses nothing: an open finds the image by the newest snapshot and the
//! log, and replays the log over it.
//!
//! An image may be an overlay over an older one, of a page of which little changed (`overlay.rs`).
//!
//! A file in which such an image lies stays as long as the image is used, whatever else needs it. So neither
//! a page nor a reader that has caught one finds its bytes gone, or written over by another snapshot (I13).

mod image;
mod overlay;
mod page;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::image::ImageRef;
use remanent_format::state::by_id::ById;
use remanent_format::{PageId, Place};

pub(crate) use self::image::DiskImage;
pub(crate) use self::overlay::NewOverlay;
pub(crate) use self::page::{DiskPage, pending_bytes_of, pending_bytes_of_elements, pending_bytes_of_write};
use self::table::DiskCounts;
pub(crate) use self::table::DiskPageTable;
pub use self::table::DiskUsage;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Instant, Mutex};
use crate::disk::Disk;
use crate::error::{Error, Result};

/// Bytes of host memory for what batches have written to pages on disk since their images, unless the budget
/// of [`Place::Disk`] says another number.
const PENDING_BYTES_MAX: u64 = 128 << 20;
/// How long a committer waits for room before it looks again. What makes room is a snapshot, which takes
/// longer.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The parts that all pages on disk of a store share.
pub(crate) struct DiskPages {
    disk: Arc<dyn Disk>,
    uses: Arc<FileUses>,
    counts: Arc<DiskCounts>,
    pending: Arc<PendingBytes>,
    pending_max: u64,
    /// Whether there is, or was, a page on disk: without one, committers look for none.
    is_any: AtomicBool,
    /// Committers that wait for room.
    waiting: AtomicUsize,
    /// Why the last snapshot could not read a page, if so: none makes room until the page is mended.
    unreadable: Mutex<Option<Error>>,
}

/// How many images of pages on disk lie in each image file.
#[derive(Default)]
struct FileUses(Mutex<BTreeMap<u64, usize>>);

/// Bytes of host memory that hold what batches have written.
#[derive(Default)]
struct PendingBytes {
    bytes: AtomicU64,
    /// Bytes of batches that the applier has not come to. It adds theirs to the others before it gives this
    /// up, so that a reader under the lock misses none.
    claimed: Mutex<u64>,
    fell: Condvar,
}

/// Room for what a batch writes to pages on disk, from its check until the applier has written it. Without it
/// all batches would find the room that there was before the applier came to the first of them.
#[derive(Debug)]
pub(crate) struct PendingClaim {
    pending: Arc<PendingBytes>,
    bytes: u64,
}

/// Bytes of host memory that may be pending by this budget of [`Place::Disk`].
pub(crate) fn pending_max(budget: u64) -> u64 {
    if budget == u64::MAX { PENDING_BYTES_MAX } else { budget }
}

impl DiskPages {
    /// The shared parts for a store on this disk. `budget` is the budget of [`Place::Disk`] in bytes.
    pub fn new(disk: Arc<dyn Disk>, budget: u64) -> Self {
        Self {
            disk,
            uses: Arc::default(),
            counts: Arc::default(),
            pending: Arc::default(),
            pending_max: pending_max(budget),
            is_any: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            unreadable: Mutex::new(None),
        }
    }

    /// An image of a page of length `len`. Its files stay until the last one to hold the image drops it. The
    /// caller knows that they are there, and stay until this returns.
    pub fn image(&self, image: ImageRef, len: u64) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), false, None)
    }

    /// As [`image`](Self::image), of an image that was read back past the cache.
    pub fn proven_image(&self, image: ImageRef, len: u64) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), true, None)
    }

    /// As [`proven_image`](Self::proven_image), of an image that takes the place of `before`. What is known
    /// of that is known of this one, if this is an overlay of it.
    pub fn image_after(&self, image: ImageRef, len: u64, before: Option<&DiskImage>) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), true, before)
    }

    fn files_of(&self, image: &ImageRef) -> Vec<FileUse> {
        image.files().map(|(file, _)| FileUse::of(&self.uses, file)).collect()
    }

    /// A page of `len` zeros.
    pub fn zeros(&self, len: u64) -> DiskPage {
        DiskPage::new(None, len, self.pending.clone())
    }

    /// A page with an image's bytes; an empty page has none.
    pub fn page(&self, image: Option<Arc<DiskImage>>) -> DiskPage {
        let len = image.as_ref().map_or(0, |image| image.page_len());
        DiskPage::new(image, len, self.pending.clone())
    }

    /// The table of these pages, which [`usage`](Self::usage) counts from now on. A store has one.
    pub fn table(&self, pages: ById<PageId, DiskPage>) -> DiskPageTable {
        DiskPageTable::new(pages, self.counts.clone())
    }

    /// How many pages the table has, and their bytes.
    pub fn usage(&self) -> DiskUsage {
        self.counts.usage()
    }

    /// Notes the places of pages that there are from now on. The caller holds the submission lock, or is
    /// alone.
    pub fn note(&self, places: impl IntoIterator<Item = Place>) {
        if !self.is_any() && places.into_iter().any(|place| place == Place::Disk) {
            self.is_any.store(true, Ordering::Relaxed);
        }
    }

    /// Whether there is, or was, a page on disk. A caller that does not hold the submission lock may learn of
    /// the first one late.
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Whether a page on disk, or a reader of one, has an image in this file.
    pub fn uses_file(&self, file: u64) -> bool {
        self.uses.0.lock().contains_key(&file)
    }

    /// Bytes of host memory that hold what batches have written.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.bytes.load(Ordering::Relaxed)
    }

    /// Whether a snapshot is due, so that what is pending goes to images: half of what may be pending is, or
    /// a committer waits for room that only a snapshot makes.
    pub fn is_snapshot_due(&self) -> bool {
        let pending = self.pending_bytes();
        pending >= self.pending_max / 2 || (pending > 0 && self.waiting.load(Ordering::Relaxed) > 0)
    }

    /// Notes whether a snapshot could read all pages. One that could not makes no room, nor does the next one
    /// until its page is written anew or deleted: committers are told, instead of waiting.
    pub fn note_unreadable(&self, reason: Option<&Error>) {
        *self.unreadable.lock() = reason.cloned();
        self.pending.fell.notify_all();
    }

    /// Bytes that may be pending beside those that are or will be.
    pub fn room(&self) -> u64 {
        let claimed = self.pending.claimed.lock();
        self.pending_max.saturating_sub(self.pending_bytes().saturating_add(*claimed))
    }

    /// Bytes that may be pending.
    pub fn pending_max(&self) -> u64 {
        self.pending_max
    }

    /// Claims `needed` bytes, however many are pending: for a caller that cannot wait.
    pub fn claim(&self, needed: u64) -> PendingClaim {
        self.pending.claim(needed, u64::MAX).expect("all claims fit")
    }

    /// Claims `needed` bytes, and waits until as many more may be pending. `is_coming` is asked whether a
    /// snapshot will make room; it says so to the thread that takes it.
    ///
    /// # Errors
    /// `OverBudget` if there never will be as much room, or no snapshot comes; `Damaged` if snapshots fail at
    /// a page that cannot be read; what `is_coming` fails with.
    pub fn wait_for_room(&self, needed: u64, is_coming: impl Fn() -> Result<bool>) -> Result<PendingClaim> {
        let full = |available: u64| Error::OverBudget {
            place: Place::Disk,
            asked: needed,
            available,
            budget: self.pending_max,
        };
        if needed > self.pending_max {
            return Err(full(self.pending_max.saturating_sub(self.pending_bytes())));
        }
        let mut waits = None;
        loop {
            let pending = match self.pending.claim(needed, self.pending_max) {
                Ok(claim) => return Ok(claim),
                Err(pending) => pending,
            };
            // Before the thread that takes snapshots is called: it looks whether one is due.
            waits.get_or_insert_with(|| Waiting::new(&self.waiting));
            let unreadable = self.unreadable.lock().clone();
            unreadable.map_or(Ok(()), Err)?;
            if !is_coming()? {
                return Err(full(self.pending_max.saturating_sub(pending)));
            }
            let mut claimed = self.pending.claimed.lock();
            self.pending.fell.wait_until(&mut claimed, Instant::now() + LOOK_AGAIN);
        }
    }
}

/// A committer that waits, counted as long as this lives.
struct Waiting<'w>(&'w AtomicUsize);

impl<'w> Waiting<'w> {
    fn new(waiting: &'w AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PendingBytes {
    fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn sub(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Claims bytes if all that is pending and claimed is at most `max` with them.
    ///
    /// # Errors
    /// What is pending and claimed without them.
    fn claim(self: &Arc<Self>, bytes: u64, max: u64) -> Result<PendingClaim, u64> {
        let mut claimed = self.claimed.lock();
        let before = self.bytes.load(Ordering::Relaxed).saturating_add(*claimed);
        if before.saturating_add(bytes) > max {
            return Err(before);
        }
        *claimed += bytes;
        Ok(PendingClaim { pending: self.clone(), bytes })
    }
}

impl Drop for PendingClaim {
    fn drop(&mut self) {
        *self.pending.claimed.lock() -= self.bytes;
        self.pending.fell.notify_all();
    }
}

/// A use of an image file, which keeps it.
struct FileUse {
    uses: Arc<FileUses>,
    file: u64,
}

impl FileUse {
    fn of(uses: &Arc<FileUses>, file: u64) -> Self {
        *uses.0.lock().entry(file).or_default() += 1;
        Self { uses: uses.clone(), file }
    }
}

impl Drop for FileUse {
    fn drop(&mut self) {
        let mut uses = self.uses.0.lock();
        let count = uses.get_mut(&self.file).expect("it was counted");
        *count -= 1;
        if *count == 0 {
            uses.remove(&self.file);
        }
    }
}

#[cfg(test)]
mod tests;
