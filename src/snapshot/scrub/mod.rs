//! Scrubbing reads the needed files on disk past the cache, while a process with the data in memory can still
//! repair them.
//!
//! A page that never changes is written once and read at the next open, perhaps years later, and all
//! snapshots share its image. If the image has rotted meanwhile, the open is refused, and the bytes are gone
//! with the process that had them. So a scrub reads STORE, both copies of every link, the log from the oldest
//! start to its last durable batch, and every image that any of these names ([`pass`]). Commits and snapshots
//! continue.
//!
//! | damaged | repair |
//! |---|---|
//! | STORE | rewritten |
//! | one copy of a link | both copies are rewritten |
//! | both copies of a link | the next snapshot follows no link and names all pages |
//! | an image | no snapshot names it again: the next one gathers its page |
//! | the log, a restore's table, an image that a batch names | recovery begins after it |
//!
//! The last three repairs take a snapshot. A snapshot that needs damaged bytes no longer counts from then on
//! ([`RetainedSnapshot::is_sound`](crate::catalog::RetainedSnapshot::is_sound)): it displaces no sound one,
//! and is removed once there are enough of those, unless its name keeps it. A snapshot kept for its name
//! stays unchanged, with the damage.
//!
//! Damage causes nothing to be overwritten or removed. A crash at any point finds the state as it was without
//! the scrub, or the snapshot that repairs it.

mod background;
mod pass;

use std::sync::Arc;

use remanent_format::manifest::Manifest;
use remanent_format::state::survey::Survey;
use remanent_format::store::StoreFile;
use remanent_format::{Damage, FileName, SnapshotId};

pub(crate) use self::background::Scrubber;
use self::pass::{ScrubFindings, ScrubPass};
use super::{SnapshotRequest, Snapshots};
use crate::base::pace::Pace;
use crate::base::sync::{Condvar, Mutex};
use crate::catalog::publish::{publish, without_spare};
use crate::catalog::{Catalog, RetainedSnapshot};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// The report of a scrub: the amount read, and the damage found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ScrubReport {
    /// Number of images read.
    pub images: u64,
    /// Bytes of these images, as stored.
    pub image_bytes: u64,
    /// Number of batches of the log read.
    pub batches: u64,
    /// Bytes of these batches' frames.
    pub log_bytes: u64,
    /// The damage, in the order in which it was found.
    pub damage: Vec<Damage>,
    /// The snapshot taken so that the newest state needs nothing that is damaged, or the error that prevented
    /// it. `None` if no snapshot was needed.
    pub mended: Option<Result<SnapshotId>>,
}

/// Counts of scrubs since the store was opened.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ScrubStats {
    /// Scrubs that read everything.
    pub done: u64,
    /// Scrubs that failed.
    pub failed: u64,
    /// Number of damaged locations found by all scrubs.
    pub damaged: u64,
    /// The outcome of the last scrub; `None` before the first one ends.
    pub last: Option<Result<ScrubReport>>,
}

/// Scrubs a store, one pass at a time.
pub(crate) struct Scrub {
    snapshots: Arc<Snapshots>,
    /// STORE as held in memory, from which the damaged file is rewritten.
    store: StoreFile,
    /// The pace of background scrubs.
    pace: Pace,
    /// Held by the scrubbing thread, so that passes run one at a time.
    running: Mutex<()>,
    stats: Mutex<ScrubStats>,
    ended: Condvar,
}

impl Scrub {
    pub fn new(snapshots: Arc<Snapshots>, store: StoreFile, pace: Pace) -> Self {
        let (running, stats, ended) = (Mutex::default(), Mutex::default(), Condvar::new());
        Self { snapshots, store, pace, running, stats, ended }
    }

    pub fn stats(&self) -> ScrubStats {
        self.stats.lock().clone()
    }

    /// Waits until `count` scrubs have ended, successfully or not.
    pub fn wait_ended(&self, count: u64) {
        let mut stats = self.stats.lock();
        while stats.done + stats.failed < count {
            self.ended.wait(&mut stats);
        }
    }

    /// Reads everything at the given pace and repairs the damage.
    pub fn run(&self, pace: &Pace, request: SnapshotRequest) -> Result<ScrubReport> {
        // A caller that waits for a background scrub makes it run at full speed.
        let hurry = (!request.paced).then(|| self.pace.expedite());
        let _one_at_a_time = self.running.lock();
        drop(hurry);
        let result = self.read_and_mend(pace, request);
        let mut stats = self.stats.lock();
        match &result {
            Ok(scrubbed) => {
                stats.done += 1;
                stats.damaged += scrubbed.damage.len() as u64;
            }
            Err(_) => stats.failed += 1,
        }
        stats.last = Some(result.clone());
        drop(stats);
        self.ended.notify_all();
        result
    }

    /// Reads everything, then repairs the damage under the catalog lock:
    ///
    /// 1. Rewrites files whose contents are in memory or in their other copy.
    /// 2. Flags snapshots that need damaged bytes, so that none of them replaces a sound one.
    /// 3. Takes a snapshot that needs no damaged bytes. Taken before step 2, it could make retention keep a
    ///    damaged snapshot.
    fn read_and_mend(&self, pace: &Pace, request: SnapshotRequest) -> Result<ScrubReport> {
        self.snapshots.engine.poison.check()?;
        let ScrubFindings { mut scrubbed, store, copies, images, bases, batches } =
            ScrubPass::begin(&self.snapshots, &self.store, pace)?.run()?;
        if scrubbed.damage.is_empty() {
            return Ok(scrubbed);
        }
        for damage in &scrubbed.damage {
            tracing::warn!(%damage, "found by a scrub");
        }
        let catalog = &self.snapshots.catalog;
        let mut catalog = if request.paced { catalog.lock_patiently() } else { catalog.lock() };
        // 1. A link that is no longer kept must not be recreated.
        let is_kept = |link: &Arc<Manifest>| {
            let mut kept = catalog.snapshots.iter();
            kept.any(|(id, kept)| *id == link.snapshot || kept.links.contains(&link.snapshot))
        };
        let copies: Vec<Arc<Manifest>> = copies.into_iter().filter(is_kept).collect();
        self.mend_files(store, &copies, request.threads_max()).map_err(|error| match error {
            error if error.is_passing() => error,
            error => self.snapshots.engine.poison.set(error),
        })?;
        // 2. Survey again: snapshots may have been taken or removed meanwhile.
        let source = DiskSource::past_cache(self.snapshots.engine.disk.clone());
        let survey = Survey::read_as(&source, self.store.clone())?;
        // Only images that this pass has read can be in `images`; a snapshot taken meanwhile names none of
        // them.
        let needs_damaged_bytes = |snapshot: &Manifest| {
            let mut named = snapshot.entries.iter().filter_map(|entry| Some((entry.page, entry.image?)));
            named.any(|(page, image)| {
                let mut of_base = image.files().skip(1);
                images.contains(&(image.file, image.offset))
                    || of_base.any(|(file, _)| bases.contains(&(file, page)))
            })
        };
        let needs_damaged = |kept: &RetainedSnapshot| {
            // Replay from the snapshot's `redo` passes the damaged batch.
            batches.iter().any(|lsn| kept.redo.lsn < *lsn)
                || survey.snapshot(kept.info.id).map_or(true, |snapshot| needs_damaged_bytes(&snapshot))
        };
        let flagged = flag_damaged(&mut catalog, needs_damaged);
        // 3.
        if flagged.is_due || !batches.is_empty() {
            let newest = catalog.snapshots.keys().next_back();
            if newest.is_some_and(|newest| survey.chain(*newest).is_err()) {
                catalog.known.unlink();
            }
            // Nothing else is removed before this snapshot exists: an older one may be the only sound one.
            let request = SnapshotRequest { keeps_others: true, ..request };
            let taken = self.snapshots.take(&mut catalog, &request);
            if taken.is_err() {
                // The next scrub must find the damage again, when there is space for the repairing snapshot.
                for (_, kept) in catalog.snapshots.iter_mut().filter(|(id, _)| flagged.snapshots.contains(id))
                {
                    kept.is_sound = true;
                }
            }
            scrubbed.mended = Some(taken.map(|info| info.id));
        }
        Ok(scrubbed)
    }

    /// Rewrites files whose full contents are in memory or in their own other copy.
    fn mend_files(&self, store: bool, copies: &[Arc<Manifest>], threads_max: usize) -> Result<()> {
        if store {
            let bytes = self.store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
            publish(&self.snapshots.engine.disk, FileName::Store, 0, &[&bytes], &without_spare)?;
        }
        let mut copies = copies.iter();
        copies.try_for_each(|link| self.snapshots.publish_manifest(link, threads_max)?.check())
    }
}

/// The snapshots that a scrub has flagged.
struct FlaggedSnapshots {
    snapshots: Vec<SnapshotId>,
    /// Whether another snapshot must replace one of them.
    is_due: bool,
}

/// Flags the snapshots that need damaged bytes. A replacement is due for the newest one, from which recovery
/// starts, and for any unnamed one, which is kept as a start. A name keeps its snapshot for its own sake.
fn flag_damaged(
    catalog: &mut Catalog,
    needs_damaged: impl Fn(&RetainedSnapshot) -> bool,
) -> FlaggedSnapshots {
    let newest = catalog.snapshots.keys().next_back().copied();
    let mut flagged = FlaggedSnapshots { snapshots: Vec::new(), is_due: false };
    for (id, kept) in &mut catalog.snapshots {
        if kept.is_sound && needs_damaged(kept) {
            kept.is_sound = false;
            flagged.snapshots.push(*id);
            flagged.is_due |= kept.info.name.is_none() || Some(*id) == newest;
        }
    }
    flagged
}
