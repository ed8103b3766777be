//! Scrubbing reads the needed files on disk, bypassing the page cache, while a process with the data in memory can
//! still repair them.
//!
//! A page that never changes is written once and read at the next open, perhaps years later, and all snapshots share
//! its image. If the medium has lost the image by then, opening the store fails, and no process has the bytes.
//! Therefore a scrub reads STORE, both copies of every link, the log from the oldest start to its last durable batch,
//! and every image that any of these names ([`pass`]). Commits and snapshots continue.
//!
//! | damaged | repair |
//! |---|---|
//! | STORE | rewritten |
//! | one copy of a link | both copies are rewritten |
//! | both copies of a link | the next snapshot follows no link and names all pages |
//! | an image | no snapshot names it again, and the next snapshot gathers its page |
//! | the log, a restore's table, an image that a batch names | recovery begins after it |
//!
//! The last three repairs take a snapshot. A snapshot that needs damaged bytes no longer counts
//! ([`RetainedSnapshot::is_sound`](crate::catalog::RetainedSnapshot::is_sound)). It replaces no intact snapshot, and is
//! removed once there are enough intact snapshots. A damaged snapshot that is kept for its name remains unchanged.
//!
//! Damage causes no file to be overwritten or removed. A crash at any point leaves either the state without the scrub,
//! or the snapshot that repairs it.

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
use crate::base::sync::{Condvar, Mutex, Rank};
use crate::catalog::publish::{publish, without_spare};
use crate::catalog::{Catalog, RetainedSnapshot};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// The number of bytes that a scrub read, and the damage that it found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ScrubReport {
    /// The number of page images read.
    pub images: u64,
    /// The number of image bytes read, as stored on disk.
    pub image_bytes: u64,
    /// The number of batches that were read from the log.
    pub batches: u64,
    /// The total length, in bytes, of these batches' frames.
    pub log_bytes: u64,
    /// The damage, in the order in which it was found.
    pub damage: Vec<Damage>,
    /// The snapshot that the scrub took so that the newest state needs no damaged bytes, or the error of that snapshot.
    /// `None` if no snapshot was needed.
    pub mended: Option<Result<SnapshotId>>,
}

/// Counters of scrubs since the store was opened.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ScrubStats {
    /// The number of scrubs that completed since the open, whether or not they found damage.
    pub done: u64,
    /// The number of scrubs that ended with an error since the open.
    pub failed: u64,
    /// The number of damaged locations found by all scrubs.
    pub damaged: u64,
    /// The outcome of the last scrub, or `None` if none has ended.
    pub last: Option<Result<ScrubReport>>,
}

/// Runs scrubs of a store, one pass at a time, for callers and for the background thread.
pub(crate) struct Scrub {
    snapshots: Arc<Snapshots>,
    /// The contents of the STORE file in memory, from which a damaged file is rewritten.
    store: StoreFile,
    /// The rate limit of background scrubs, and the signal that cancels them.
    pace: Pace,
    /// The lock of the scrubbing thread, which ensures that passes run one at a time.
    running: Mutex<()>,
    stats: Mutex<ScrubStats>,
    ended: Condvar,
}

impl Scrub {
    pub fn new(snapshots: Arc<Snapshots>, store: StoreFile, pace: Pace) -> Self {
        let (running, stats, ended) = (Mutex::of_rank(Rank::CALL, ()), Mutex::default(), Condvar::new());
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

    /// Reads all needed files at the given rate and repairs damage.
    pub fn run(&self, pace: &Pace, request: SnapshotRequest) -> Result<ScrubReport> {
        // While a caller waits for it, a background scrub runs at full speed.
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

    /// Reads all needed files, then repairs damage under the catalog lock:
    ///
    /// 1. Rewrites files whose contents are in memory or in their other copy.
    /// 2. Flags snapshots that need damaged bytes, so that none of them replaces an intact snapshot.
    /// 3. Takes a snapshot that needs no damaged bytes. Taken before step 2, it could make retention keep a damaged
    ///    snapshot.
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
        // 1. A manifest that was removed in the meantime must not be created again.
        let is_kept = |link: &Arc<Manifest>| {
            let mut kept = catalog.snapshots.iter();
            kept.any(|(id, kept)| *id == link.snapshot || kept.links.contains(&link.snapshot))
        };
        let copies: Vec<Arc<Manifest>> = copies.into_iter().filter(is_kept).collect();
        self.mend_files(store, &copies, request.threads_max()).map_err(|error| match error {
            error if error.is_passing() => error,
            error => self.snapshots.engine.poison.set(error),
        })?;
        // 2. The files are listed again, because snapshots may have been taken or removed since the pass began.
        let source = DiskSource::bypassing_cache(self.snapshots.engine.disk.clone());
        let survey = Survey::read_as(&source, self.store.clone())?;
        // `images` contains only images that this pass has read. Snapshots taken later are not affected, because no
        // snapshot refers to an image that is known to be damaged.
        let needs_damaged_bytes = |snapshot: &Manifest| {
            let mut named = snapshot.entries.iter().filter_map(|entry| Some((entry.page, entry.image?)));
            named.any(|(page, image)| {
                let mut of_base = image.files().skip(1);
                images.contains(&(image.file, image.offset))
                    || of_base.any(|(file, _)| bases.contains(&(file, page)))
            })
        };
        let needs_damaged = |kept: &RetainedSnapshot| {
            // A replay from the snapshot's `redo` reaches the damaged batch.
            batches.iter().any(|lsn| kept.redo.lsn < *lsn)
                || survey.snapshot(kept.info.id).map_or(true, |snapshot| needs_damaged_bytes(&snapshot))
        };
        let flagged = flag_damaged(&mut catalog, needs_damaged);
        // 3. Take the repairing snapshot.
        if flagged.is_due || !batches.is_empty() {
            let newest = catalog.snapshots.keys().next_back();
            if newest.is_some_and(|newest| survey.chain(*newest).is_err()) {
                catalog.known.unlink();
            }
            // Older snapshots are kept until this one exists, because one of them may be the only intact one.
            let request = SnapshotRequest { keeps_others: true, ..request };
            let taken = self.snapshots.take(&mut catalog, &request);
            if taken.is_err() {
                // The marks are removed, so that the next scrub finds the damage again, when there may be space for the
                // repairing snapshot.
                for (_, kept) in catalog.snapshots.iter_mut().filter(|(id, _)| flagged.snapshots.contains(id))
                {
                    kept.is_sound = true;
                }
            }
            scrubbed.mended = Some(taken.map(|info| info.id));
        }
        Ok(scrubbed)
    }

    /// Rewrites the damaged files whose contents are in memory or in an intact copy.
    fn mend_files(&self, store: bool, copies: &[Arc<Manifest>], threads_max: usize) -> Result<()> {
        if store {
            let bytes = self.store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
            publish(&self.snapshots.engine.disk, FileName::Store, 0, &[&bytes], &without_spare)?;
        }
        let mut copies = copies.iter();
        copies.try_for_each(|link| self.snapshots.publish_manifest(link, threads_max)?.check())
    }
}

/// The snapshots that a scrub has marked as damaged.
struct FlaggedSnapshots {
    snapshots: Vec<SnapshotId>,
    /// Whether a new snapshot must replace a damaged snapshot.
    is_due: bool,
}

/// Marks the snapshots that need damaged bytes as damaged.
///
/// A replacement is due if the newest snapshot is damaged, because recovery starts from it, or if any unnamed snapshot
/// is damaged. A named snapshot is kept without a replacement.
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
