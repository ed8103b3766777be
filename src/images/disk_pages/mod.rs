//! Pages of [`Place::Disk`](remanent_format::Place::Disk), which have no memory.
//!
//! The current bytes of such a page are the bytes of its newest image, overlaid with later writes of batches. The image
//! belongs to a snapshot, or was written before its batch was logged. Later writes are kept in host memory, block by
//! block, until a snapshot writes a new image.
//!
//! None of this state is on disk, so a crash loses no data. An open finds the image through the newest snapshot and the
//! log, and replays the log over the image.
//!
//! If little of a page changed, its new image may be an overlay over an older image (`overlay.rs`).
//!
//! A file is kept while one of its images is used, even if nothing else needs the file. Thus another snapshot cannot
//! remove or overwrite the bytes of a page, or of a reader that has captured a page (I13).

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

/// The default maximum number of bytes of host memory for writes to pages on disk that no image contains yet. The
/// budget of [`Place::Disk`] overrides this value.
const PENDING_BYTES_MAX: u64 = 128 << 20;
/// The interval at which a committer checks again whether its writes fit in host memory. A snapshot frees host memory,
/// and takes longer than this interval.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The state that all pages on disk of a store share: their counters, the uses of image files, and the host memory for
/// pending writes.
pub(crate) struct DiskPages {
    disk: Arc<dyn Disk>,
    uses: Arc<FileUses>,
    counts: Arc<DiskCounts>,
    pending: Arc<PendingBytes>,
    pending_max: u64,
    /// Whether a page on disk exists or has existed since the open. If not, committers need not search for such pages.
    is_any: AtomicBool,
    /// The number of committers that wait for host memory for their writes.
    waiting: AtomicUsize,
    /// The error with which the last snapshot failed to read a page, or `None` if it read all pages. After such an
    /// error, snapshots free no host memory until the page is rewritten or deleted.
    unreadable: Mutex<Option<Error>>,
}

/// The number of [`DiskImage`] values that use each image file, by file number.
#[derive(Default)]
struct FileUses(Mutex<BTreeMap<u64, usize>>);

/// The host memory that buffers writes of batches to pages on disk, in bytes: used and claimed.
#[derive(Default)]
struct PendingBytes {
    bytes: AtomicU64,
    /// The number of bytes claimed for batches that are not applied yet. The applier adds the bytes of a batch to
    /// `bytes` before it drops the batch's claim, so that a reader that holds the lock always counts the batch.
    claimed: Mutex<u64>,
    claim_reduced: Condvar,
}

/// Host memory that is reserved for a batch's writes to pages on disk, from the check of the batch until it is applied.
/// Without claims, several batches could be checked against the same free memory before the first of them is applied.
#[derive(Debug)]
pub(crate) struct PendingClaim {
    pending: Arc<PendingBytes>,
    bytes: u64,
}

/// Returns the maximum number of pending bytes for a store whose budget of [`Place::Disk`] is `budget` bytes.
pub(crate) fn pending_max(budget: u64) -> u64 {
    if budget == u64::MAX { PENDING_BYTES_MAX } else { budget }
}

impl DiskPages {
    /// Creates the state for a store on `disk`. `budget` is the budget of [`Place::Disk`] in bytes.
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

    /// Returns a handle to an image that contains a page of `len` bytes. The image's files are kept until the last
    /// handle is dropped. The caller must ensure that the files exist until this function returns.
    pub fn image(&self, image: ImageRef, len: u64) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), false, None)
    }

    /// Returns a handle like [`image`](Self::image), to an image that was read back from the medium and was intact.
    pub fn proven_image(&self, image: ImageRef, len: u64) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), true, None)
    }

    /// Returns a handle like [`proven_image`](Self::proven_image), to an image that replaces `before`. If the two
    /// images are overlays over the same base, the new handle inherits the known checksums of the base.
    pub fn image_after(&self, image: ImageRef, len: u64, before: Option<&DiskImage>) -> Arc<DiskImage> {
        DiskImage::new(self.disk.clone(), self.files_of(&image), (image, len), true, before)
    }

    fn files_of(&self, image: &ImageRef) -> Vec<FileUse> {
        image.files().map(|(file, _)| FileUse::of(&self.uses, file)).collect()
    }

    /// Creates a page of `len` zero bytes without an image.
    pub fn zeros(&self, len: u64) -> DiskPage {
        DiskPage::new(None, len, self.pending.clone())
    }

    /// Creates a page with the bytes of `image`, or a page of length 0 for `None`.
    pub fn page(&self, image: Option<Arc<DiskImage>>) -> DiskPage {
        let len = image.as_ref().map_or(0, |image| image.page_len());
        DiskPage::new(image, len, self.pending.clone())
    }

    /// Creates the table of pages on disk. [`usage`](Self::usage) counts the pages in this table from now on. A store
    /// has a single table.
    pub fn table(&self, pages: IdMap<PageId, DiskPage>) -> DiskPageTable {
        DiskPageTable::new(pages, self.counts.clone())
    }

    /// Returns the number of pages in the table, and their total length in bytes.
    pub fn usage(&self) -> DiskUsage {
        self.counts.usage()
    }

    /// Records the places of new pages. The caller must hold the submission lock, or be the only thread of the store.
    pub fn note(&self, places: impl IntoIterator<Item = Place>) {
        if !self.is_any() && places.into_iter().any(|place| place == Place::Disk) {
            self.is_any.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a page on disk exists or has existed since the open. A caller without the submission lock may
    /// observe the first such page late.
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Returns whether a page on disk, or a reader of such a page, uses an image in image file `file`.
    pub fn uses_file(&self, file: u64) -> bool {
        self.uses.0.lock().contains_key(&file)
    }

    /// Returns the number of bytes of host memory that buffer writes of batches to pages on disk.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.bytes.load(Ordering::Relaxed)
    }

    /// Returns whether a snapshot should move pending writes to images. A snapshot is due if half of the limit is
    /// pending, or if a committer waits for host memory.
    pub fn is_snapshot_due(&self) -> bool {
        let pending = self.pending_bytes();
        pending >= self.pending_max / 2 || (pending > 0 && self.waiting.load(Ordering::Relaxed) > 0)
    }

    /// Records whether the last snapshot could read all pages. After a failure, a committer gets the error instead of
    /// waiting, because no snapshot frees host memory until the page is rewritten or deleted.
    pub fn note_unreadable(&self, reason: Option<&Error>) {
        *self.unreadable.lock() = reason.cloned();
        self.pending.claim_reduced.notify_all();
    }

    /// Returns the number of bytes that may become pending in addition to the bytes that are pending or claimed.
    pub fn room(&self) -> u64 {
        let claimed = self.pending.claimed.lock();
        self.pending_max.saturating_sub(self.pending_bytes().saturating_add(*claimed))
    }

    pub fn pending_max(&self) -> u64 {
        self.pending_max
    }

    /// Claims `needed` bytes of host memory regardless of the limit, for a caller that cannot wait.
    pub fn claim(&self, needed: u64) -> PendingClaim {
        self.pending.claim(needed, u64::MAX).expect("all claims fit")
    }

    /// Waits until `needed` bytes of host memory fit within the limit, and claims them. `is_coming` notifies the thread
    /// that takes snapshots, and returns whether a snapshot will free host memory.
    ///
    /// # Errors
    /// `OverBudget` if there can never be enough memory, or no snapshot is coming; `Damaged` if snapshots fail at an
    /// unreadable page; any error of `is_coming`.
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
            // The waiting committer is counted before the snapshot thread is notified, because that thread checks the
            // count.
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

/// A guard that counts a committer that waits for host memory.
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

    /// Claims `bytes` bytes if all pending and claimed bytes together are then at most `max`.
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

/// A use of an image file. The file is not removed before the use is dropped.
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
