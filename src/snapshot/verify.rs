//! Phase 6: reads back the files that published snapshots wrote.
//!
//! A snapshot is durable once it is published, and recovery after a crash starts from it. The snapshot that it replaces
//! is kept until every file of the new snapshot was read back, bypassing the page cache (I7). Reading takes about as
//! long as writing, so a caller that needs only durability does not wait for it. Snapshots are read back in the order
//! of publication, because each shares images with earlier snapshots.
//!
//! A thread that holds the catalog lock may wait for the verifying thread, but the reverse would deadlock. Therefore
//! the verifying thread takes the catalog lock only after reading, to record the result.
//!
//! A crash here leaves a snapshot that no frame records as verified. The next open loads the complete snapshot and
//! publishes it again.

use std::collections::VecDeque;
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::{Damage, FileName, PageId, SnapshotId};

use super::gather::GatheredDiskPage;
use super::{SnapshotRequest, Snapshots};
use crate::base::allocation::{collected, map_of};
use crate::base::parallel;
use crate::base::poison::PoisonOnPanic;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Mutex, Rank};
use crate::catalog::Catalog;
use crate::catalog::publish::PublishedFile;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, damaged};
use crate::images::{ImageWriters, THREADS_MAX};

/// The maximum number of snapshots that wait for verification, which bounds their memory use. A caller that publishes
/// another snapshot first verifies the waiting snapshots.
const UNVERIFIED_MAX: usize = 2;
/// The number of threads that read images back on behalf of a caller.
pub(crate) const PROVERS_MAX: usize = 2;

/// The queue of published snapshots that are not verified yet, and the thread that reads their files back.
pub(crate) struct UnverifiedSnapshots {
    /// The waiting snapshots, and whether a thread is processing them.
    queue: Mutex<VerifyQueue>,
    /// The snapshots that were read back but are not yet marked as verified in the catalog. A thread holds this lock
    /// while it reads a snapshot back.
    proven: Mutex<Vec<ProvenSnapshot>>,
    /// The verifying thread, running or ended, or `None` if no thread was started yet.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Default for UnverifiedSnapshots {
    fn default() -> Self {
        let (queue, thread) = Default::default();
        Self { queue, proven: Mutex::of_rank(Rank::WAITING, Vec::new()), thread }
    }
}

/// The files that a published snapshot wrote, with their expected contents. The value takes about 200 bytes of memory
/// per page until all files are read back.
pub(crate) struct WrittenSnapshot {
    pub snapshot: SnapshotId,
    /// The published manifest file, with its expected contents.
    pub manifest: PublishedFile,
    /// The image files, with their expected contents, or `None` if the snapshot wrote none.
    pub images: Option<ImageWriters>,
    /// The images that batches wrote and that were not read back before the snapshot named them.
    pub of_batches: Vec<ImageRequest>,
    /// The pages on disk that the snapshot gathered, with their new images.
    pub on_disk: Vec<GatheredDiskPage>,
}

impl WrittenSnapshot {
    /// Reads the snapshot's own files and the images of batches back, bypassing the page cache (I7). Older images were
    /// read back for the snapshots that wrote them. Returns the damaged images of batches.
    ///
    /// The page cache would return the bytes as written, even if the disk lost them.
    fn check(&mut self, disk: &Arc<dyn Disk>) -> Result<Vec<DamagedImage>> {
        self.manifest.check()?;
        self.images.iter().try_for_each(ImageWriters::verify)?;
        let pages = map_of(self.of_batches.iter().map(|of| ((of.image.file, of.image.offset), of.page)));
        let found = damaged(&DiskSource::bypassing_cache(disk.clone()), &mut self.of_batches, THREADS_MAX)?;
        let damaged = found.into_iter().map(|(image, damage)| {
            let page = pages[&(image.file, image.offset)];
            DamagedImage { page, image, damage }
        });
        collected(damaged)
    }
}

/// A snapshot that was read back, with the damaged images of batches that it names.
struct ProvenSnapshot {
    snapshot: SnapshotId,
    /// Whether the snapshot names images of batches that were not read back before.
    names_batch_images: bool,
    damaged: Vec<DamagedImage>,
}

/// An image that does not contain the bytes that were written.
struct DamagedImage {
    page: PageId,
    image: ImageRef,
    damage: Damage,
}

#[derive(Default)]
struct VerifyQueue {
    /// The snapshots that wait to be read back, in order of publication.
    written: VecDeque<WrittenSnapshot>,
    /// The number of published snapshots that name images of batches and whose verification is not in the catalog yet.
    naming_batch_images: usize,
    /// Whether a thread is processing the queue and will check it again before it ends. The flag has the same lock as
    /// the queue: otherwise a snapshot that is added while the thread ends would not be processed until the next one is
    /// added.
    is_attended: bool,
    /// Whether unneeded files must still be removed after the publication of a snapshot.
    is_retention_owed: bool,
}

impl UnverifiedSnapshots {
    fn is_retention_owed(&self) -> bool {
        self.queue.lock().is_retention_owed
    }

    /// Records whether retention must still run for a published snapshot. The caller must hold the catalog lock.
    pub fn set_retention_pending(&self, is_pending: bool) {
        self.queue.lock().is_retention_owed = is_pending;
    }

    /// Adds a published snapshot. Until it is verified, no file is recycled.
    pub fn push(&self, written: WrittenSnapshot) {
        let mut queue = self.queue.lock();
        queue.naming_batch_images += usize::from(!written.of_batches.is_empty());
        queue.written.push_back(written);
    }

    /// Returns whether a published snapshot names images of batches, and the catalog does not record yet whether they
    /// are intact.
    pub fn names_batch_images(&self) -> bool {
        self.queue.lock().naming_batch_images > 0
    }

    pub fn is_full(&self) -> bool {
        self.queue.lock().written.len() >= UNVERIFIED_MAX
    }

    /// Waits until the verifying thread ends, if one was started.
    pub fn join(&self) {
        join(self.thread.lock().take());
    }

    /// Reads back the waiting snapshots, including snapshots that are published in the meantime. Calls `then` with the
    /// gathered pages on disk of each snapshot.
    fn read_back(
        &self,
        disk: &Arc<dyn Disk>,
        proven: &mut Vec<ProvenSnapshot>,
        then: impl Fn(Vec<GatheredDiskPage>) -> Result<()>,
    ) -> Result<()> {
        loop {
            let Some(mut written) = self.queue.lock().written.pop_front() else { return Ok(()) };
            let names_batch_images = !written.of_batches.is_empty();
            let checked = written.check(disk).and_then(|damaged| {
                then(std::mem::take(&mut written.on_disk))?;
                Ok(damaged)
            });
            match checked {
                Ok(damaged) => {
                    proven.push(ProvenSnapshot { snapshot: written.snapshot, names_batch_images, damaged })
                }
                Err(error) => {
                    // The snapshot remains first in the queue, because no later one may be marked as verified before
                    // it.
                    self.queue.lock().written.push_front(written);
                    return Err(error);
                }
            }
        }
    }
}

/// Waits for a thread to end. A thread that panicked has poisoned the store.
fn join(thread: Option<JoinHandle<()>>) {
    if thread.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("a thread that verified snapshots panicked");
    }
}

impl Snapshots {
    /// Verifies published snapshots and removes superseded files on a background thread, for snapshots requested with
    /// [`AfterPublication::Leave`](super::AfterPublication::Leave).
    pub fn attend_later(self: &Arc<Self>) {
        // One thread at a time processes the queue. It checks the queue again before it ends, so it will find this
        // snapshot.
        if std::mem::replace(&mut self.unverified.queue.lock().is_attended, true) {
            return;
        }
        let snapshots = self.clone();
        let thread = threads::start("remanent-verify", move || {
            let thread = "the thread that verifies snapshots";
            let _poisons = PoisonOnPanic { poison: snapshots.engine.poison.clone(), thread };
            // A panic poisons the store. Otherwise no more snapshots would be verified, and their files would
            // accumulate.
            snapshots.attend();
        });
        match thread {
            // The previous thread has ended or will end without waiting, because it has cleared `is_attended`.
            Ok(thread) => join(self.unverified.thread.lock().replace(thread)),
            Err(error) => {
                tracing::warn!(%error, "the next snapshot verifies this one, too");
                self.unverified.queue.lock().is_attended = false;
            }
        }
    }

    /// Performs phases 6 and 7 until no snapshot waits for verification. Other threads may take snapshots in the
    /// meantime.
    fn attend(&self) {
        loop {
            let proven =
                self.unverified.read_back(&self.engine.disk, &mut self.unverified.proven.lock(), |pages| {
                    self.rebase(pages)
                });
            let finished = match proven {
                // The result is recorded, and files are recycled, in order of publication.
                Ok(()) => self.finish_pending_retention(&mut self.catalog.lock_patiently()),
                Err(error) if error.is_passing() => Err(error),
                Err(error) => Err(self.engine.poison.set(error)),
            };
            if let Err(error) = &finished {
                tracing::error!(%error, "a published snapshot cannot be verified");
            }
            let mut queue = self.unverified.queue.lock();
            // After a shortage of memory or disk space, the next snapshot also verifies this one.
            if queue.written.is_empty() || finished.is_err() {
                queue.is_attended = false;
                return;
            }
        }
    }

    /// Makes gathered pages on disk refer to their new images, which have been read back. This frees the memory of the
    /// pages' pending writes.
    fn rebase(&self, gathered: Vec<GatheredDiskPage>) -> Result<()> {
        if gathered.is_empty() {
            return Ok(());
        }
        // This runs before the applier is involved, because the information about the previous image may have to be
        // read from disk.
        let after = |GatheredDiskPage { page, copy, image }: GatheredDiskPage| {
            let before = copy.image().map(AsRef::as_ref);
            let image = image.map(|image| self.engine.disk_pages.image_after(image, copy.byte_len(), before));
            (page, copy, image)
        };
        let proven = collected(gathered.into_iter().map(after))?;
        // I7: only the stored bytes of an overlay were read back so far. Here the page that the overlay and its base
        // form together is verified.
        let prove = |(): &mut (), at: usize| {
            let image = proven[at].2.as_ref().filter(|image| !image.image().is_whole());
            image.map_or(Ok(()), |image| image.prove().map(drop))
        };
        parallel::map_indexed(parallel::threads(PROVERS_MAX), proven.len(), || (), prove)?;
        self.engine.applier.turn(move |turn| {
            for (page, copy, image) in proven {
                turn.applied.on_disk.change(page, |on_disk| on_disk.rebase(&copy, image));
            }
            Ok(())
        })
    }

    /// Performs phases 6 and 7 unless another thread has already done so. After a restore, nothing is removed until the
    /// next snapshot.
    fn finish_pending_retention(&self, catalog: &mut Catalog) -> Result<()> {
        if !self.unverified.is_retention_owed() {
            return Ok(());
        }
        self.finish(catalog)
    }

    /// Performs phases 6 and 7 for all published snapshots.
    pub fn finish(&self, catalog: &mut Catalog) -> Result<()> {
        let verified = self.verify(catalog).and_then(|()| self.replace_damaged(catalog));
        match verified.and_then(|()| self.retain(catalog)) {
            // There is no space to write the record, so no files are recycled yet.
            Ok(()) | Err(Error::DiskFull { .. }) => Ok(()),
            Err(error) if error.is_passing() => Err(error),
            Err(error) => Err(self.engine.poison.set(error)),
        }
    }

    /// Reads the published snapshots back and records the result in the catalog (phase 6). On return, every snapshot in
    /// the catalog is verified, and those without damage may replace others (I7).
    pub fn verify(&self, catalog: &mut Catalog) -> Result<()> {
        let mut proven = self.unverified.proven.lock();
        self.unverified.read_back(&self.engine.disk, &mut proven, |pages| self.rebase(pages))?;
        for ProvenSnapshot { snapshot, names_batch_images, damaged } in proven.drain(..) {
            self.unverified.queue.lock().naming_batch_images -= usize::from(names_batch_images);
            for DamagedImage { page, image, damage } in damaged {
                tracing::warn!(%damage, %page, %snapshot, "an image of a published snapshot is damaged");
                let file = if let FileName::Pages(file) = damage.file { file } else { image.file };
                catalog.known.mark_damaged(page, &image, (file, damage.offset));
                // Later snapshots may name the image, too.
                let later = catalog.snapshots.range_mut(snapshot..).map(|(_, kept)| kept);
                for kept in later.filter(|kept| kept.files.contains_key(&image.file)) {
                    kept.is_sound = false;
                }
            }
            // A snapshot that is no longer in the catalog needs no record.
            if let Some(kept) = catalog.snapshots.get_mut(&snapshot) {
                kept.info.verified = true;
            }
        }
        Ok(())
    }

    /// Takes a snapshot if the newest one is damaged. The new snapshot gathers the pages of damaged images from memory,
    /// and keeps all older snapshots, because one of them may be the only sound one. If a page exists only in its
    /// damaged image, the failure is logged, and the older snapshots are kept.
    fn replace_damaged(&self, catalog: &mut Catalog) -> Result<()> {
        let newest = catalog.snapshots.values().next_back();
        if newest.is_none_or(|newest| newest.is_sound) {
            return Ok(());
        }
        let request = SnapshotRequest { keeps_others: true, ..SnapshotRequest::default() };
        match self.take(catalog, &request) {
            Ok(_) => Ok(()),
            Err(error @ Error::Damaged(_)) => {
                tracing::error!(%error, "the newest snapshot is damaged and cannot be replaced");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
