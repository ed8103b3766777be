//! Pages of [`Place::Disk`](remanent_format::Place::Disk): pages without memory.
//!
//! The newest bytes of such a page are those of an image, overlaid with what batches have written since. The
//! image is the newest one of the page: from a snapshot, or written in advance of a batch. Later writes are
//! held in host memory, block by block, until a snapshot writes a new image.
//!
//! Nothing here is on disk, so a crash loses nothing: an open finds the image through the newest snapshot and
//! the log, and replays the log over it.
//!
//! An image may be an overlay over an older one, for a page of which little changed (`overlay.rs`).
//!
//! A file with such an image is kept as long as the image is used, whether or not anything else needs it. So
//! neither a page nor a reader that has captured one can find its bytes missing, or overwritten by another
//! snapshot (I13).

mod image;
mod overlay;
mod page;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::image::ImageRef;
use remanent_format::state::id_map::IdMap;
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
/// of [`Place::Disk`] sets another number.
const PENDING_BYTES_MAX: u64 = 128 << 20;
/// How long a committer waits for room before it checks again. Room comes from a snapshot, which takes
/// longer.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The state shared by all pages on disk of a store.
pub(crate) struct DiskPages {
    disk: Arc<dyn Disk>,
    uses: Arc<FileUses>,
    counts: Arc<DiskCounts>,
    pending: Arc<PendingBytes>,
    pending_max: u64,
    /// Whether a page on disk exists, or ever existed since the open: otherwise committers need not look for
    /// any.
    is_any: AtomicBool,
    /// The number of committers that wait for room.
    waiting: AtomicUsize,
    /// The reason why the last snapshot could not read a page, if any: no snapshot makes room until the page
    /// is rewritten or deleted.
    unreadable: Mutex<Option<Error>>,
}

/// The number of images of pages on disk in each image file.
#[derive(Default)]
struct FileUses(Mutex<BTreeMap<u64, usize>>);

/// Bytes of host memory that hold what batches have written.
#[derive(Default)]
struct PendingBytes {
    bytes: AtomicU64,
    /// Bytes of batches that the applier has not reached. It adds their bytes to `bytes` before it drops the
    /// claim, so that a reader under the lock misses none.
    claimed: Mutex<u64>,
    claim_reduced: Condvar,
}

/// Room for what a batch writes to pages on disk, held from its check until the applier has written it.
/// Otherwise all batches would see the room that existed before the applier reached the first of them.
#[derive(Debug)]
pub(crate) struct PendingClaim {
    pending: Arc<PendingBytes>,
    bytes: u64,
}

/// Returns the bytes of host memory that may be pending under this budget of [`Place::Disk`].
pub(crate) fn pending_max(budget: u64) -> u64 {
    if budget == u64::MAX { PENDING_BYTES_MAX } else { budget }
}

impl DiskPages {
    /// Creates the shared state for a store on this disk. `budget` is the budget of [`Place::Disk`] in bytes.
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

    /// Returns an image of a page of length `len`. Its files are kept until the last holder drops the image.
    /// The caller must ensure that they exist, and are kept until this returns.
    pub fn image(&self, image: ImageRef, len: u64) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), false, None)
    }

    /// Like [`image`](Self::image), for an image that was read back past the cache.
    pub fn proven_image(&self, image: ImageRef, len: u64) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), true, None)
    }

    /// Like [`proven_image`](Self::proven_image), for an image that replaces `before`. If it is an overlay
    /// over the same base, it inherits what is known of the base.
    pub fn image_after(&self, image: ImageRef, len: u64, before: Option<&DiskImage>) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), true, before)
    }

    fn files_of(&self, image: &ImageRef) -> Vec<FileUse> {
        image.files().map(|(file, _)| FileUse::of(&self.uses, file)).collect()
    }

    /// Creates a page of `len` zeros.
    pub fn zeros(&self, len: u64) -> DiskPage {
        DiskPage::new(None, len, self.pending.clone())
    }

    /// Creates a page with an image's bytes, or an empty page.
    pub fn page(&self, image: Option<Arc<DiskImage>>) -> DiskPage {
        let len = image.as_ref().map_or(0, |image| image.page_len());
        DiskPage::new(image, len, self.pending.clone())
    }

    /// Creates the table of these pages, which [`usage`](Self::usage) counts from now on. A store has one.
    pub fn table(&self, pages: IdMap<PageId, DiskPage>) -> DiskPageTable {
        DiskPageTable::new(pages, self.counts.clone())
    }

    /// Returns the number of pages in the table, and their bytes.
    pub fn usage(&self) -> DiskUsage {
        self.counts.usage()
    }

    /// Records the places of new pages. The caller holds the submission lock, or is the only thread.
    pub fn note(&self, places: impl IntoIterator<Item = Place>) {
        if !self.is_any() && places.into_iter().any(|place| place == Place::Disk) {
            self.is_any.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a page on disk exists, or ever existed since the open. A caller that does not hold the
    /// submission lock may see the first one late.
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Whether a page on disk, or a reader of one, has an image in this file.
    pub fn uses_file(&self, file: u64) -> bool {
        self.uses.0.lock().contains_key(&file)
    }

    /// Returns the bytes of host memory that hold what batches have written.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.bytes.load(Ordering::Relaxed)
    }

    /// Whether a snapshot is due to move pending bytes to images: half of the limit is pending, or a
    /// committer waits for room that only a snapshot makes.
    pub fn is_snapshot_due(&self) -> bool {
        let pending = self.pending_bytes();
        pending >= self.pending_max / 2 || (pending > 0 && self.waiting.load(Ordering::Relaxed) > 0)
    }

    /// Records whether a snapshot could read all pages. If it could not, it makes no room, nor does the next
    /// one until the page is rewritten or deleted: committers get the error instead of waiting.
    pub fn note_unreadable(&self, reason: Option<&Error>) {
        *self.unreadable.lock() = reason.cloned();
        self.pending.claim_reduced.notify_all();
    }

    /// Returns the bytes that may become pending in addition to those that are pending or claimed.
    pub fn room(&self) -> u64 {
        let claimed = self.pending.claimed.lock();
        self.pending_max.saturating_sub(self.pending_bytes().saturating_add(*claimed))
    }

    /// Returns the maximum number of pending bytes.
    pub fn pending_max(&self) -> u64 {
        self.pending_max
    }

    /// Claims `needed` bytes regardless of the limit, for a caller that cannot wait.
    pub fn claim(&self, needed: u64) -> PendingClaim {
        self.pending.claim(needed, u64::MAX).expect("all claims fit")
    }

    /// Claims `needed` bytes, waiting until they fit within the limit. `is_coming` returns whether a snapshot
    /// will make room, and notifies the thread that takes it.
    ///
    /// # Errors
    /// `OverBudget` if there can never be enough room, or no snapshot is coming; `Damaged` if snapshots fail
    /// at an unreadable page; any error of `is_coming`.
    pub fn wait_for_room(&self, needed: u64, is_coming: impl Fn() -> Result<bool>) -> Result<PendingClaim> {
        let full = |available: u64| Error::OverBudget {
            place: Place::Disk,
            requested: needed,
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
            // Before notifying the thread that takes snapshots, which checks whether one is due.
            waits.get_or_insert_with(|| Waiting::new(&self.waiting));
            let unreadable = self.unreadable.lock().clone();
            unreadable.map_or(Ok(()), Err)?;
            if !is_coming()? {
                return Err(full(self.pending_max.saturating_sub(pending)));
            }
            let mut claimed = self.pending.claimed.lock();
            self.pending.claim_reduced.wait_until(&mut claimed, Instant::now() + CHECK_INTERVAL);
        }
    }
}

/// A waiting committer, counted while this exists.
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

    /// Claims bytes if all pending and claimed bytes together are at most `max`.
    ///
    /// # Errors
    /// The number of bytes already pending and claimed.
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
        self.pending.claim_reduced.notify_all();
    }
}

/// A use of an image file, which keeps the file.
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
