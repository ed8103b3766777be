//! Scrubbing: what lies on disk is read, past the cache, while there is still a memory to mend it from.
//!
//! A page that never changes is written once and read at the next open, perhaps years later; all
//! snapshots share its image. If that has rotten meanwhile, the open is refused, and the bytes are gone
//! with the process that had them. So a scrub reads STORE, both copies of every link, the log from the
//! oldest start to its last durable batch, and every image that one of these names ([`pass`]). Commits
//! and snapshots go on.
//! | damaged | what is done |
//! |---|---|
//! | STORE | written anew |
//! | one copy of a link | both are written anew |
//! | both copies of a link | the next snapshot follows none, and names all pages |
//! | an image | no snapshot names it again: the next one gathers its page |
//! | the log, a restore's table, an image that a batch names | recovery begins after it |
//!
//! For the last three a snapshot is taken. A snapshot that needs damaged bytes counts as none from then
//! on ([`RetainedSnapshot::holds`](crate::catalog::RetainedSnapshot::holds)). So it displaces no sound
//! one, and goes as soon as there are enough of these, unless its name keeps it: then it stays as it is,
//! damage and all.
//!
//! Nothing is overwritten and nothing removed for damage. A crash at any point finds what it would have found
//! without the scrub, or the snapshot that mends it.

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
use crate::catalog::publish::{of_no_spare, publish};
use crate::catalog::{Catalog, RetainedSnapshot};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// The report of a scrub: how much it read, and the damage that it found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ScrubReport {
    /// Images that were read.
    pub images: u64,
    /// Bytes of these images, as they are stored.
    pub image_bytes: u64,
    /// Batches of the log that were read.
    pub batches: u64,
    /// Bytes of these batches' frames.
    pub log_bytes: u64,
    /// The damage, in the order in which it was found.
    pub damage: Vec<Damage>,
    /// The snapshot that was taken for it, so that the newest state needs none of what is damaged; or why it
    /// could not be taken. `None` if no snapshot was needed.
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
    /// Places found damaged by all of them.
    pub damaged: u64,
    /// The outcome of the last one; `None` if there was none.
    pub last: Option<Result<ScrubReport>>,
}

/// Scrubs a store, one pass at a time.
pub(crate) struct Scrub {
    snapshots: Arc<Snapshots>,
    /// STORE as memory has it: the damaged file is written anew from this.
    store: StoreFile,
    /// The pace of scrubs in the background.
    pace: Pace,
    /// Held by the thread that scrubs: one pass at a time.
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

    /// Waits until `count` scrubs have ended, well or not.
    pub fn wait_ended(&self, count: u64) {
        let mut stats = self.stats.lock();
        while stats.done + stats.failed < count {
            self.ended.wait(&mut stats);
        }
    }

    /// Reads everything at this pace, and mends what is damaged.
    pub fn run(&self, pace: &Pace, request: SnapshotRequest) -> Result<ScrubReport> {
        // A caller that waits for a scrub in the background has it go on at full speed.
        let hurry = (!request.paced).then(|| self.pace.hurry());
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

    /// Reads everything, and then mends, under the catalog's lock:
    ///
    /// 1. Files that memory, or their other copy, has: written anew.
    /// 2. Snapshots that need damaged bytes: flagged, so that none of them stands in for a sound one.
    /// 3. A snapshot that needs none of it. Taken before 2, retention could keep a damaged one for it.
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
        // 1. A link that is not kept any more must not come back.
        let is_kept = |link: &Arc<Manifest>| {
            let mut kept = catalog.snapshots.iter();
            kept.any(|(id, kept)| *id == link.snapshot || kept.links.contains(&link.snapshot))
        };
        let copies: Vec<Arc<Manifest>> = copies.into_iter().filter(is_kept).collect();
        self.mend_files(store, &copies, request.threads_max()).map_err(|error| match error {
            error if error.is_passing() => error,
            error => self.snapshots.engine.poison.set(error),
        })?;
        // 2. Surveyed once more: snapshots may have been taken meanwhile, or may have gone.
        let source = DiskSource::past_cache(self.snapshots.engine.disk.clone());
        let survey = Survey::read_as(&source, self.store.clone())?;
        // Only images that this pass has read can be among them; a snapshot taken meanwhile names none of
        // these.
        let is_spoilt = |snapshot: &Manifest| {
            let mut named = snapshot.entries.iter().filter_map(|entry| Some((entry.page, entry.image?)));
            named.any(|(page, image)| {
                let mut of_base = image.files().skip(1);
                images.contains(&(image.file, image.offset))
                    || of_base.any(|(file, _)| bases.contains(&(file, page)))
            })
        };
        let needs_damaged = |kept: &RetainedSnapshot| {
            // Replay from its redo passes the damaged batch.
            batches.iter().any(|lsn| kept.redo.lsn < *lsn)
                || survey.snapshot(kept.info.id).map_or(true, |snapshot| is_spoilt(&snapshot))
        };
        let spoilt = spoil(&mut catalog, needs_damaged);
        // 3.
        if spoilt.is_due || !batches.is_empty() {
            let newest = catalog.snapshots.keys().next_back();
            if newest.is_some_and(|newest| survey.chain(*newest).is_err()) {
                catalog.known.unlink();
            }
            // Nothing else goes before it stands: an older snapshot may be the only one that holds.
            let request = SnapshotRequest { keeps_others: true, ..request };
            let taken = self.snapshots.take(&mut catalog, &request);
            if taken.is_err() {
                // The next scrub is to find it all again, when there is room for the snapshot that mends it.
                for (_, kept) in catalog.snapshots.iter_mut().filter(|(id, _)| spoilt.snapshots.contains(id))
                {
                    kept.is_sound = true;
                }
            }
            scrubbed.mended = Some(taken.map(|info| info.id));
        }
        Ok(scrubbed)
    }

    /// Writes files anew of which memory, or their own other copy, has all that they should say.
    fn mend_files(&self, store: bool, copies: &[Arc<Manifest>], threads_max: usize) -> Result<()> {
        if store {
            let bytes = self.store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
            publish(&self.snapshots.engine.disk, FileName::Store, 0, &[&bytes], &of_no_spare)?;
        }
        let mut copies = copies.iter();
        copies.try_for_each(|link| self.snapshots.publish_manifest(link, threads_max)?.check())
    }
}

/// The snapshots that a scrub has flagged.
struct Spoilt {
    snapshots: Vec<SnapshotId>,
    /// Whether another snapshot must take the place of one of them.
    is_due: bool,
}

/// Flags the snapshots that need damaged bytes. Another one is due in place of the newest, from which
/// recovery starts, and of one that is kept to start from. A name keeps its snapshot for its own sake.
fn spoil(catalog: &mut Catalog, needs_damaged: impl Fn(&RetainedSnapshot) -> bool) -> Spoilt {
    let newest = catalog.snapshots.keys().next_back().copied();
    let mut spoilt = Spoilt { snapshots: Vec::new(), is_due: false };
    for (id, kept) in &mut catalog.snapshots {
        if kept.is_sound && needs_damaged(kept) {
            kept.is_sound = false;
            spoilt.snapshots.push(*id);
            spoilt.is_due |= kept.info.name.is_none() || Some(*id) == newest;
        }
    }
    spoilt
}
