//! The pages that a damaged store still proves, each on its own.
//!
//! [`crate::state::rebuild`] asks for one way that is clear from a snapshot to the log's end, and refuses if
//! there is none. Salvage refuses nothing: every structure that proves itself counts, wherever it lies.
//!
//! 1. **The known log**: all frames that prove themselves, in whatever segment they are found
//!    (`known_log.rs`).
//! 2. **The state**: the newest one whose page table can be followed, from any snapshot that can be read or
//!    from the log's beginning, over known batches without a hole.
//! 3. **The pages** of that state, each on its own (`pages.rs`): from any image of it that some manifest or
//!    table names, over the known batches that touch it. A page's epoch rises by one with every batch that
//!    changes it. So if image and batches arrive at the epoch and the batch that the table gives, nothing was
//!    left out, even if batches between them are lost: those changed other pages.
//!
//! A page that does not arrive there may still prove an earlier version. No byte is taken that no checksum
//! covers.
//!
//! ```
//! # use remanent_format::{FileName, Folder, ReadAt};
//! # struct Nothing;
//! # impl ReadAt for Nothing {
//! #     fn list(&self, _: Folder) -> std::io::Result<Vec<String>> { Ok(Vec::new()) }
//! #     fn len(&self, _: FileName) -> std::io::Result<Option<u64>> { Ok(None) }
//! #     fn read_at(&self, _: FileName, _: u64, _: &mut [u8]) -> std::io::Result<()> {
//! #         Err(std::io::ErrorKind::NotFound.into())
//! #     }
//! # }
//! # let source = Nothing;
//! use remanent_format::salvage::{PageRemains, Salvage};
//! use remanent_format::store::{Features, StoreFile, StoreRecord};
//! use remanent_format::StoreId;
//! // The content of STORE, or a guess if it is lost.
//! let store =
//!     StoreFile { store: StoreId([7; 16]), features: Features::default(), record: StoreRecord::default() };
//! let salvage = Salvage::read(&source, store, 1 << 30)?;
//! for info in salvage.state().table.pages() {
//!     match salvage.find(&info) {
//!         PageRemains::Exact(bytes) => {
//!             assert_eq!(salvage.window(&bytes, 0..info.len)?.len() as u64, info.len)
//!         }
//!         PageRemains::Older { version, .. } => assert!(version.epoch < info.epoch),
//!         PageRemains::Lost(why) => println!("page {}: {why}", info.page),
//!     }
//! }
//! # assert_eq!(salvage.state().table.pages().len(), 0);
//! # Ok::<(), remanent_format::Damage>(())
//! ```

mod known_log;
mod pages;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::known_log::KnownLog;
use self::pages::Fact;
pub use self::pages::FoundBytes;
use crate::defect::{Damage, Defect};
use crate::ids::{Epoch, LogPoint, Lsn, PageId, SnapshotId};
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::Survey;
use crate::state::table::PageTable;
use crate::store::StoreFile;

/// A damaged store, looked through.
pub struct Salvage<'s> {
    source: &'s dyn ReadAt,
    survey: Survey,
    log: KnownLog,
    /// The versions of each page that manifests and tables name, the newest first.
    facts: BTreeMap<PageId, Vec<Fact>>,
    page_bytes_max: u64,
    state: State,
}

/// The newest state that can be known.
#[derive(Clone, Debug)]
pub struct State {
    /// The snapshot from which it was followed; `None` is the log's beginning, or several places.
    pub base: Option<SnapshotId>,
    /// Pages and root.
    pub table: PageTable,
    /// The end of its last batch in the log.
    pub point: LogPoint,
    /// Whether this was the state after a batch. If not, the table is put together from pages that are each
    /// known at some batch: none can be called exact, and pages may be missing that nothing tells of.
    pub is_whole: bool,
}

/// The known batches after the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRemainder {
    /// The newest batch that anything says was durable: above the state's, batches are lost.
    pub durable: Lsn,
    /// The newest batch with a frame anywhere. Above `durable`, that is a torn tail.
    pub seen: Lsn,
    /// A segment that must be there, and is missing, cut short, or has no valid header. It may hold, or have
    /// held, batches that nothing else tells of.
    pub hidden: Option<Damage>,
}

/// The remains of a page.
#[derive(Clone, Debug)]
pub enum PageRemains {
    /// Its bytes, as they are in the state.
    Exact(FoundBytes),
    /// An earlier version of it.
    Older {
        /// The version that the bytes are.
        version: crate::state::table::PageInfo,
        /// The bytes of that version.
        bytes: FoundBytes,
        /// The damage in the way of the state's own version.
        why: Damage,
    },
    /// Nothing that is proven.
    Lost(Damage),
}

impl<'s> Salvage<'s> {
    /// Looks through a store: all of the log, all manifests and tables, but no image. `store` is the content
    /// of STORE; if that is lost, the id is enough. Pages longer than `page_bytes_max` are not put together.
    ///
    /// # Errors
    /// [`Damage`] if a folder cannot be listed, or the length of a segment cannot be asked. Also with
    /// [`Defect::Memory`]: a batch for which there is no memory is not lost.
    pub fn read(source: &'s dyn ReadAt, store: StoreFile, page_bytes_max: u64) -> Result<Self, Damage> {
        let survey = Survey::read_as(source, store)?;
        let refused = survey.links.values().filter_map(|link| link.as_ref().err());
        if let Some(refused) = refused.into_iter().find(|damage| is_memory(damage)) {
            return Err(refused.clone());
        }
        let log = KnownLog::read(source, &survey)?;
        let facts = pages::facts(source, &survey, &log);
        let state =
            State { base: None, table: PageTable::new(), point: LogPoint::default(), is_whole: false };
        let mut salvage = Self { source, survey, log, facts, page_bytes_max, state };
        salvage.state = match salvage.newest_state()? {
            Some(state) => state,
            None => salvage.pieces()?,
        };
        Ok(salvage)
    }

    /// The newest state that can be known.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The known batches after the state.
    #[must_use]
    pub fn beyond(&self) -> LogRemainder {
        LogRemainder { durable: self.log.durable, seen: self.log.seen, hidden: self.log.hidden.clone() }
    }

    /// The state that the most batches lead to; of several ways to it that from the newest snapshot.
    fn newest_state(&self) -> Result<Option<State>, Damage> {
        let mut best: Option<State> = None;
        let snapshots = self.survey.links.keys().rev().map(|link| self.survey.snapshot(*link));
        for base in snapshots.map(Some).chain([None]) {
            let base = match base.transpose() {
                Ok(base) => base,
                Err(damage) if is_memory(&damage) => return Err(damage),
                Err(_) => continue,
            };
            let (from, end) = base.as_ref().map_or_else(Default::default, |base| (base.redo.lsn, base.end));
            let reach = self.log.reach(from);
            // The store was empty at the log's beginning: that is a way only if the log is there, or never
            // was.
            let is_way = base.is_some() || reach > from || self.log.seen == Lsn(0);
            if is_way && reach >= end && best.as_ref().is_none_or(|best| best.table.lsn() < reach) {
                let followed = self.follow(base.as_ref(), reach)?;
                let is_further =
                    |state: &State| best.as_ref().is_none_or(|best| best.table.lsn() < state.table.lsn());
                if let Some(state) = followed.filter(is_further) {
                    best = Some(state);
                }
            }
        }
        Ok(best)
    }

    /// Follows known batches from a snapshot up to `until`, or as far as they can be followed; `None` if that
    /// is not as far as the snapshot needs.
    fn follow(&self, base: Option<&Arc<Manifest>>, until: Lsn) -> Result<Option<State>, Damage> {
        let mut resolver = base.map_or_else(Resolver::new, Resolver::from_manifest);
        let mut point = base.map_or_else(LogPoint::default, |manifest| manifest.redo);
        while point.lsn < until {
            match self.step(&mut resolver, point.lsn.next()) {
                Ok(end) => point = end,
                Err(damage) if is_memory(&damage) => return Err(damage),
                // A batch that was readable a moment ago no longer is, or names a lost table: stop before it.
                Err(_) => break,
            }
        }
        let Ok(ResolvedState { table, .. }) = resolver.finish() else { return Ok(None) };
        Ok(Some(State { base: base.map(|base| base.snapshot), table, point, is_whole: true }))
    }

    /// Follows one known batch.
    fn step(&self, resolver: &mut Resolver, lsn: Lsn) -> Result<LogPoint, Damage> {
        let (payload, end) = self.log.payload(self.source, lsn)?;
        let at = |defect: Defect| defect.at_lsn(FileName::Segment(end.segment), end.offset, lsn);
        let ops = decode_payload(&payload).map_err(at)?;
        if let [OpAt { op: Op::Restore { table, table_crc, .. }, .. }] = ops.as_slice() {
            resolver.restore(lsn, self.survey.read_table(self.source, *table, *table_crc)?).map_err(at)?;
        } else {
            resolver.batch(lsn, &ops).map_err(at)?;
        }
        Ok(end)
    }

    /// If no state can be known: every page at the newest version that any structure tells of. The root is
    /// the newest link's.
    fn pieces(&self) -> Result<State, Damage> {
        let newest = self.survey.readable().max_by_key(|link| link.end);
        let pages = self.pages_known().map_err(|defect| defect.at(FileName::Store, 0))?;
        let lsn = pages.iter().map(|info| info.lsn).fold(self.log.durable, Lsn::max);
        let (root, next_page, epoch_high) = newest.map_or_else(
            || (Arc::default(), 1, Epoch(0)),
            |link| (link.root.clone(), link.next_page, link.epoch_high),
        );
        let mut table = PageTable::from_parts(pages, root, next_page, epoch_high, lsn);
        table.index_keys().expect("of two pages with one key the older was left out");
        let point = newest.map_or_else(LogPoint::default, |link| link.redo);
        Ok(State { base: None, table, point: LogPoint { lsn, ..point }, is_whole: false })
    }
}

/// Whether memory was refused, which says nothing about a file.
fn is_memory(damage: &Damage) -> bool {
    matches!(damage.defect, Defect::Memory { .. })
}

impl std::fmt::Debug for Salvage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Salvage").field("page_bytes_max", &self.page_bytes_max).finish_non_exhaustive()
    }
}
