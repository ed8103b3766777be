//! Phase 6: what published snapshots wrote is read back.
//!
//! A snapshot is durable when it is published: a crash starts from it. What it takes the place of stays until all
//! that it wrote was read back past the cache (I7), which takes about as long as writing it, and need not be waited
//! for. Snapshots are read back in the order in which they were published, for each shares images with those before.
//!
//! Who holds the lock on what is kept may wait for what is being read back, and not the other way round: so the
//! thread proves first, and says so later.
//!
//! A crash here leaves a snapshot that no frame records as verified: the next open loads all of it, and publishes it
//! anew.

use std::collections::VecDeque;
use std::sync::Arc;

use remanent_format::SnapshotId;

use super::{SnapshotRequest, Snapshots};
use crate::base::poison::PanicPoisons;
use crate::base::sync::Mutex;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::catalog::publish::PublishedFile;
use crate::catalog::{Catalog, SnapshotInfo};
use crate::error::{Error, Result};
use crate::images::ImageWriters;

/// So many snapshots wait to be verified; who publishes one more verifies them first. What they wrote takes memory.
const UNVERIFIED_MAX: usize = 2;

/// Published snapshots that are not verified yet.
#[derive(Default)]
pub(crate) struct UnverifiedSnapshots {
    queue: Mutex<VerifyQueue>,
    /// Those that hold, and whose record does not say so yet. Held while any is read back.
    proven: Mutex<Vec<SnapshotId>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a published snapshot wrote. Of each page it takes some 200 bytes of memory, until all is read back.
pub(crate) struct WrittenSnapshot {
    pub snapshot: SnapshotId,
    pub manifest: PublishedFile,
    pub images: Option<ImageWriters>,
}

impl WrittenSnapshot {
    /// Reads it back past the cache (I7). Older images were read back for the snapshots that wrote them.
    fn check(&self) -> Result<()> {
        self.manifest.check()?;
        self.images.iter().try_for_each(ImageWriters::verify)
    }
}

#[derive(Default)]
struct VerifyQueue {
    /// What they wrote, in the order in which they were published.
    written: VecDeque<WrittenSnapshot>,
    /// Whether a thread looks here again before it ends.
    is_attended: bool,
}

impl UnverifiedSnapshots {
    pub fn push(&self, written: WrittenSnapshot) {
        self.queue.lock().written.push_back(written);
    }

    fn len(&self) -> usize {
        self.queue.lock().written.len()
    }

    /// Waits for the thread that reads back, if there is one.
    pub fn join(&self) {
        join(self.thread.lock().take());
    }

    /// Reads back what there is. More may be published meanwhile.
    fn read_back(&self, proven: &mut Vec<SnapshotId>) -> Result<()> {
        loop {
            let Some(written) = self.queue.lock().written.pop_front() else { return Ok(()) };
            if let Err(error) = written.check() {
                self.queue.lock().written.push_front(written);
                return Err(error);
            }
            proven.push(written.snapshot);
        }
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    if thread.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("a thread that verified snapshots panicked");
    }
}

impl Snapshots {
    /// Takes a snapshot as far as it is durable, and has the rest done behind the caller's back.
    pub fn take_unverified(self: &Arc<Self>, wanted: SnapshotRequest) -> Result<SnapshotInfo> {
        let mut catalog = self.catalog.lock();
        if self.unverified.len() >= UNVERIFIED_MAX {
            self.finish(&mut catalog)?;
        }
        let info = self.with_space(&mut catalog, wanted, |catalog, wanted| {
            self.take_then(catalog, wanted, |_| Ok(()))
        })?;
        drop(catalog);
        if std::mem::replace(&mut self.unverified.queue.lock().is_attended, true) {
            return Ok(info);
        }
        let snapshots = self.clone();
        let thread = threads::start("remanent-verify", move || {
            let thread = "the thread that verifies snapshots";
            let _poisons = PanicPoisons { poison: snapshots.poison.clone(), thread };
            snapshots.attend();
        });
        match thread {
            // The one before has ended, or is about to.
            Ok(thread) => join(self.unverified.thread.lock().replace(thread)),
            Err(error) => {
                tracing::warn!(%error, "the next snapshot verifies this one, too");
                self.unverified.queue.lock().is_attended = false;
            }
        }
        Ok(info)
    }

    /// Does phases 6 and 7 as long as there is anything to do, and lets others take snapshots while it reads.
    fn attend(&self) {
        loop {
            let proven = self.unverified.read_back(&mut self.unverified.proven.lock());
            let finished = match proven {
                Ok(()) => self.finish(&mut self.catalog.lock_patiently()),
                Err(error) if error.is_passing() => Err(error),
                Err(error) => Err(self.poison.set(error)),
            };
            if let Err(error) = &finished {
                tracing::error!(%error, "a snapshot that is published cannot be verified");
            }
            let mut queue = self.unverified.queue.lock();
            // Where it failed for a shortage, the next snapshot verifies this one, too.
            if queue.written.is_empty() || finished.is_err() {
                queue.is_attended = false;
                return;
            }
        }
    }

    /// Phases 6 and 7 for all snapshots that are published.
    pub fn finish(&self, catalog: &mut Catalog) -> Result<()> {
        match self.verify(catalog).and_then(|()| self.retain(catalog)) {
            // No space to record it: nothing is recycled, as yet.
            Ok(()) | Err(Error::DiskFull { .. }) => Ok(()),
            Err(error) if error.is_passing() => Err(error),
            Err(error) => Err(self.poison.set(error)),
        }
    }

    /// Phase 6. When it returns, every snapshot that is kept is verified.
    pub fn verify(&self, catalog: &mut Catalog) -> Result<()> {
        let mut proven = self.unverified.proven.lock();
        self.unverified.read_back(&mut proven)?;
        for snapshot in proven.drain(..) {
            if let Some(kept) = catalog.snapshots.get_mut(&snapshot) {
                kept.info.verified = true;
            }
        }
        Ok(())
    }
}
