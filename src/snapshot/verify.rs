//! Phase 6: what published snapshots wrote is read back.
//!
//! A snapshot is durable when it is published: a crash starts from it. The snapshot that it replaces
//! stays until all that the new one wrote was read back past the cache (I7). That takes about as long as
//! writing it, and a caller that wants durability need not wait for it. Snapshots are read back in the
//! order of their publication, because each shares images with those before.
//!
//! A thread that holds the catalog's lock may wait for the thread that reads back, and not the other way
//! round. So that thread proves first, and takes the lock only to say so: holding both, the two would
//! wait for each other.
//!
//! A crash here leaves a snapshot that no frame records as verified: the next open loads all of it, and
//! publishes it anew.

use std::collections::VecDeque;
use std::sync::Arc;

use remanent_format::SnapshotId;

use super::Snapshots;
use super::gather::GatheredDiskPage;
use crate::base::allocation::collected;
use crate::base::parallel;
use crate::base::poison::PanicPoisons;
use crate::base::sync::Mutex;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::catalog::Catalog;
use crate::catalog::publish::PublishedFile;
use crate::error::{Error, Result};
use crate::images::ImageWriters;

/// How many snapshots may wait to be verified. A caller that publishes one more verifies them first: the
/// memory of what they wrote is bounded by this.
const UNVERIFIED_MAX: usize = 2;
/// Threads that read back beside a caller that goes on.
pub(crate) const PROVERS_MAX: usize = 2;

/// Published snapshots that are not verified yet.
#[derive(Default)]
pub(crate) struct UnverifiedSnapshots {
    /// Snapshots that wait, and whether a thread attends to them.
    queue: Mutex<VerifyQueue>,
    /// Snapshots that were read back, and that the catalog does not call verified yet. Held while any is
    /// read back.
    proven: Mutex<Vec<SnapshotId>>,
    /// The thread that reads back, or the last one that did.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The files of a published snapshot. It takes some 200 bytes of memory a page, until all is read back.
pub(crate) struct WrittenSnapshot {
    pub snapshot: SnapshotId,
    /// The manifest, with the bytes that it should have.
    pub manifest: PublishedFile,
    /// The image files, with what they should have; `None` if the snapshot wrote none.
    pub images: Option<ImageWriters>,
    /// The pages on disk that it gathered.
    pub on_disk: Vec<GatheredDiskPage>,
}

impl WrittenSnapshot {
    /// Reads it back past the cache (I7). Older images were read back for the snapshots that wrote them.
    ///
    /// Past the cache, because the cache has the bytes that were written, whatever the disk did with them.
    fn check(&self) -> Result<()> {
        self.manifest.check()?;
        self.images.iter().try_for_each(ImageWriters::verify)
    }
}

#[derive(Default)]
struct VerifyQueue {
    /// Snapshots that wait to be read back, in the order of their publication.
    written: VecDeque<WrittenSnapshot>,
    /// Whether a thread looks here again before it ends. Under one lock with the queue: a snapshot that
    /// is pushed as the thread ends would otherwise wait for the next one.
    is_attended: bool,
    /// Whether a snapshot was published for which nothing was recycled yet.
    is_retention_owed: bool,
}

impl UnverifiedSnapshots {
    /// Whether a snapshot was published for which nothing was recycled yet.
    fn is_retention_owed(&self) -> bool {
        self.queue.lock().is_retention_owed
    }

    /// A snapshot was published, and recycling for it is left for later; or it was done, or given up. Told
    /// under the catalog's lock.
    pub fn owe_retention(&self, is_owed: bool) {
        self.queue.lock().is_retention_owed = is_owed;
    }

    /// A snapshot was published. Until it is verified it licenses nothing.
    pub fn push(&self, written: WrittenSnapshot) {
        self.queue.lock().written.push_back(written);
    }

    /// Whether no more may wait to be read back.
    pub fn is_full(&self) -> bool {
        self.queue.lock().written.len() >= UNVERIFIED_MAX
    }

    /// Waits for the thread that reads back, if there is one.
    pub fn join(&self) {
        join(self.thread.lock().take());
    }

    /// Reads back the snapshots that wait. More may be published meanwhile. `then` is told of each one's
    /// pages on disk.
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
                // It stays the first in the queue: none after it may be called verified before it.
            }
            proven.push(written.snapshot);
        }
    }
}

/// Waits for a thread to end. Its panic has poisoned the store.
fn join(thread: Option<JoinHandle<()>>) {
    if thread.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("a thread that verified snapshots panicked");
    }
}

impl Snapshots {
    /// Has a thread verify the snapshots that are published, and recycle for them: those that were asked for
    /// with [`AfterPublication::Leave`]. The thread needs the catalog's lock to say what it proved.
    pub fn attend_later(self: &Arc<Self>) {
        // One thread at a time. It looks at the queue again before it ends, so it will come to this snapshot.
        if std::mem::replace(&mut self.unverified.queue.lock().is_attended, true) {
            return;
        }
        let snapshots = self.clone();
        let thread = threads::start("remanent-verify", move || {
            let thread = "the thread that verifies snapshots";
            let _poisons = PanicPoisons { poison: snapshots.engine.poison.clone(), thread };
            // A panic must not leave snapshots waiting in silence: it poisons.
            snapshots.attend();
        });
        match thread {
            // The thread before has ended, or is about to: it has given up `is_attended`.
            Ok(thread) => join(self.unverified.thread.lock().replace(thread)),
            Err(error) => {
                tracing::warn!(%error, "the next snapshot verifies this one, too");
                self.unverified.queue.lock().is_attended = false;
            }
        }
    }

    /// Does phases 6 and 7 as long as any snapshot waits. Others may take snapshots while it reads.
    fn attend(&self) {
        loop {
            let proven =
                self.unverified.read_back(&mut self.unverified.proven.lock(), |pages| self.rebase(pages));
            let finished = match proven {
                // Recorded and recycled by the same thread, in the order of publication.
                Ok(()) => self.finish_owed(&mut self.catalog.lock_patiently()),
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

    /// Has pages on disk read from the images that were made of them, which were read back by now. What held
    /// their changes gives its memory back.
    fn rebase(&self, gathered: Vec<GatheredDiskPage>) -> Result<()> {
        if gathered.is_empty() {
            return Ok(());
        }
        // Not in the turn: what is known of the image before may be on its way from the disk, for a reader.
        let after = |GatheredDiskPage { page, copy, image }: GatheredDiskPage| {
            let before = copy.image().map(AsRef::as_ref);
            let image = image.map(|image| self.engine.disk_pages.image_after(image, copy.byte_len(), before));
            (page, copy, image)
        };
        let proven = collected(gathered.into_iter().map(after))?;
        // I7: of an overlay its payload was read back, which says nothing of what it makes of its base.
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

    /// Phases 6 and 7, unless another thread came first. If that was one of a restore, whose snapshot removes
    /// no other, none goes until the next snapshot.
    fn finish_owed(&self, catalog: &mut Catalog) -> Result<()> {
        if !self.unverified.is_retention_owed() {
            return Ok(());
        }
        self.finish(catalog)
    }

    /// Phases 6 and 7 for all snapshots that are published.
    pub fn finish(&self, catalog: &mut Catalog) -> Result<()> {
        match self.verify(catalog).and_then(|()| self.retain(catalog)) {
            // No space to record it: nothing is recycled, as yet.
            Ok(()) | Err(Error::DiskFull { .. }) => Ok(()),
            Err(error) if error.is_passing() => Err(error),
            Err(error) => Err(self.engine.poison.set(error)),
        }
    }

    /// Phase 6. When it returns, every snapshot of the catalog is verified, so that any of them may
    /// license recycling (I7).
    pub fn verify(&self, catalog: &mut Catalog) -> Result<()> {
        let mut proven = self.unverified.proven.lock();
        self.unverified.read_back(&mut proven, |pages| self.rebase(pages))?;
        // A snapshot that the catalog does not have any more needs no record.
        for snapshot in proven.drain(..) {
            if let Some(kept) = catalog.snapshots.get_mut(&snapshot) {
                kept.info.verified = true;
            }
        }
        Ok(())
    }
}
