//! Phase 6: reads back the files that published snapshots wrote.
//!
//! A snapshot is durable once it is published, and recovery after a crash starts from it. The snapshot that it replaces
//! is kept until every file of the new snapshot was read back, bypassing the page cache (I7). Reading takes about as
//! long as writing, and a caller that needs only durability does not wait. Snapshots are read back in the order of
//! publication, because each shares images with earlier snapshots.
//!
//! A thread that holds the catalog lock may wait for the verifying thread, but the reverse would deadlock. Therefore
//! the verifying thread takes the catalog lock only after reading, to record the result.
//!
//! A crash here leaves a snapshot that no frame records as verified. The next open loads the complete snapshot and
//! publishes it again.

use std::collections::VecDeque;
use std::sync::Arc;

use remanent_format::SnapshotId;

use super::Snapshots;
use super::gather::GatheredDiskPage;
use crate::base::allocation::collected;
use crate::base::parallel;
use crate::base::poison::PoisonOnPanic;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Mutex, Rank};
use crate::catalog::Catalog;
use crate::catalog::publish::PublishedFile;
use crate::error::{Error, Result};
use crate::images::ImageWriters;

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
    proven: Mutex<Vec<SnapshotId>>,
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
    /// The pages on disk that the snapshot gathered, with their new images.
    pub on_disk: Vec<GatheredDiskPage>,
}

impl WrittenSnapshot {
    /// Reads the snapshot's own files back, bypassing the page cache (I7). Older images were read back for the
    /// snapshots that wrote them.
    ///
    /// The page cache would return the bytes as written, even if the disk lost them.
    fn check(&self) -> Result<()> {
        self.manifest.check()?;
        self.images.iter().try_for_each(ImageWriters::verify)
    }
}

#[derive(Default)]
struct VerifyQueue {
    /// The snapshots that wait to be read back, in order of publication.
    written: VecDeque<WrittenSnapshot>,
    /// Whether a thread will check the queue again before it ends. The same lock protects this flag and the queue.
    /// Otherwise a snapshot pushed while the thread ends would wait for the next thread.
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
        self.queue.lock().written.push_back(written);
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
        proven: &mut Vec<SnapshotId>,
        then: impl Fn(Vec<GatheredDiskPage>) -> Result<()>,
    ) -> Result<()> {
        loop {
            let Some(mut written) = self.queue.lock().written.pop_front() else { return Ok(()) };
            let checked = written.check().and_then(|()| then(std::mem::take(&mut written.on_disk)));
            if let Err(error) = checked {
                self.queue.lock().written.push_front(written);
                return Err(error);
                // The snapshot remains first in the queue, because no later one may be marked as verified before it.
            }
            proven.push(written.snapshot);
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
    /// Verifies published snapshots and runs retention on a background thread, for snapshots requested with
    /// [`AfterPublication::Leave`](super::AfterPublication::Leave). The background thread takes the catalog lock to
    /// record its result.
    pub fn attend_later(self: &Arc<Self>) {
        // Only one thread runs at a time. It checks the queue again before it ends, so it will find this snapshot.
        if std::mem::replace(&mut self.unverified.queue.lock().is_attended, true) {
            return;
        }
        let snapshots = self.clone();
        let thread = threads::start("remanent-verify", move || {
            let thread = "the thread that verifies snapshots";
            let _poisons = PoisonOnPanic { poison: snapshots.engine.poison.clone(), thread };
            // A panic poisons the store, because snapshots must not be left waiting unnoticed.
            snapshots.attend();
        });
        match thread {
            // The previous thread has ended or is about to: it has cleared `is_attended`.
            Ok(thread) => join(self.unverified.thread.lock().replace(thread)),
            Err(error) => {
                tracing::warn!(%error, "the next snapshot verifies this one, too");
                self.unverified.queue.lock().is_attended = false;
            }
        }
    }

    /// Runs phases 6 and 7 until no snapshot waits for verification. Other threads may take snapshots in the meantime.
    fn attend(&self) {
        loop {
            let proven =
                self.unverified.read_back(&mut self.unverified.proven.lock(), |pages| self.rebase(pages));
            let finished = match proven {
                // Recorded and recycled by the same thread, in order of publication.
                Ok(()) => self.finish_pending_retention(&mut self.catalog.lock_patiently()),
                Err(error) if error.is_passing() => Err(error),
                Err(error) => Err(self.engine.poison.set(error)),
            };
            if let Err(error) = &finished {
                tracing::error!(%error, "a snapshot that is published cannot be verified");
            }
            let mut queue = self.unverified.queue.lock();
            // After a shortage the next snapshot verifies this one, too.
            if queue.written.is_empty() || finished.is_err() {
                queue.is_attended = false;
                return;
            }
        }
    }

    /// Switches gathered pages on disk to their new images, which have been read back. The switch frees the memory of
    /// the changes to those pages.
    fn rebase(&self, gathered: Vec<GatheredDiskPage>) -> Result<()> {
        if gathered.is_empty() {
            return Ok(());
        }
        // Done outside the turn, because a reader may still be loading the facts about the previous image from disk.
        let after = |GatheredDiskPage { page, copy, image }: GatheredDiskPage| {
            let before = copy.image().map(AsRef::as_ref);
            let image = image.map(|image| self.engine.disk_pages.image_after(image, copy.byte_len(), before));
            (page, copy, image)
        };
        let proven = collected(gathered.into_iter().map(after))?;
        // I7: only the payload of an overlay was read back, which does not verify the page that the payload and its
        // base form.
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

    /// Runs phases 6 and 7 unless another thread has already run them. If a restore ran the phases, nothing is removed
    /// until the next snapshot, because a restore removes no other snapshot.
    fn finish_pending_retention(&self, catalog: &mut Catalog) -> Result<()> {
        if !self.unverified.is_retention_owed() {
            return Ok(());
        }
        self.finish(catalog)
    }

    /// Runs phases 6 and 7 for all published snapshots.
    pub fn finish(&self, catalog: &mut Catalog) -> Result<()> {
        match self.verify(catalog).and_then(|()| self.retain(catalog)) {
            // There is no space to write the record, so no files are recycled yet.
            Ok(()) | Err(Error::DiskFull { .. }) => Ok(()),
            Err(error) if error.is_passing() => Err(error),
            Err(error) => Err(self.engine.poison.set(error)),
        }
    }

    /// Runs phase 6. On return, every snapshot in the catalog is verified and permits recycling (I7).
    pub fn verify(&self, catalog: &mut Catalog) -> Result<()> {
        let mut proven = self.unverified.proven.lock();
        self.unverified.read_back(&mut proven, |pages| self.rebase(pages))?;
        // A snapshot that is no longer in the catalog needs no record.
        for snapshot in proven.drain(..) {
            if let Some(kept) = catalog.snapshots.get_mut(&snapshot) {
                kept.info.verified = true;
            }
        }
        Ok(())
    }
}
