//! Salvage, which finds those pages of a damaged store that can still be proven.
//!
//! [`crate::state::rebuild`] requires an undamaged path from a snapshot to the end of the log. Salvage has no such
//! requirement, and damage never causes an error. It uses every structure that can be proven, at any location, in these
//! steps:
//!
//! 1. **The known log**: finds all frames in any segment that can be proven (`known_log.rs`).
//! 2. **The state**: computes the newest possible page table, from any readable snapshot or from the beginning of the
//!    log, over known batches without a hole.
//! 3. **The pages** of that state: computes each page separately (`pages.rs`), from any image that a manifest or table
//!    names, over the known batches that touch the page. Every batch that changes a page raises its epoch by one. If an
//!    image and the known batches produce the epoch and the batch in the table, no change is missing, because the
//!    batches that are lost changed only other pages.
//!
//! If a page cannot be computed in this way, salvage tries earlier versions of the page. Salvage returns only bytes
//! that a checksum covers.
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
pub use self::pages::FoundBytes;
use self::pages::KnownVersion;
use crate::defect::{Damage, Defect};
use crate::ids::{Epoch, LogPoint, Lsn, PageId, SnapshotId};
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::Survey;
use crate::state::table::PageTable;
use crate::store::StoreFile;

/// The log, manifests and tables of a damaged store, from which pages are salvaged.
pub struct Salvage<'s> {
    source: &'s dyn ReadAt,
    survey: Survey,
    log: KnownLog,
    /// Versions of each page in manifests and tables, newest first.
    known_versions: BTreeMap<PageId, Vec<KnownVersion>>,
    page_bytes_max: u64,
    state: State,
}

/// The newest state that salvage can compute for a damaged store.
#[derive(Clone, Debug)]
pub struct State {
    /// The snapshot from which the state was computed. `None` if the state was computed from the beginning of the log
    /// or combined from several sources.
    pub base: Option<SnapshotId>,
    /// The pages and the root of the state.
    pub table: PageTable,
    /// The end of the state's last batch in the log.
    pub point: LogPoint,
    /// Whether the table is the state after one batch. If false, the table combines pages as of different batches, no
    /// page is exact, and pages that no structure mentions may be missing.
    pub is_whole: bool,
}

/// Evidence of batches after the salvaged state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRemainder {
    /// The newest batch that any structure on disk proves to be durable. If this batch is above the state, the batches
    /// after the state up to this batch are lost.
    pub durable: Lsn,
    /// The newest batch whose frame header was found. Batches above `durable` are a torn tail.
    pub seen: Lsn,
    /// The damage to a segment that must exist but is missing, truncated or without a valid header. `None` if there is
    /// no such segment. The segment may have contained batches of which no other structure gives evidence.
    pub hidden: Option<Damage>,
}

/// The result of salvaging one page.
#[derive(Clone, Debug)]
pub enum PageRemains {
    /// The version of the page in the state is proven.
    Exact(FoundBytes),
    /// Only an earlier version of the page is proven.
    Older {
        /// The description of the earlier version.
        version: crate::state::table::PageInfo,
        /// The proven bytes of the earlier version.
        bytes: FoundBytes,
        /// The damage that prevents the proof of the version in the state.
        why: Damage,
    },
    /// No version of the page can be proven because of this damage.
    Lost(Damage),
}

impl<'s> Salvage<'s> {
    /// Reads the log, the manifests and the tables of a damaged store, but no images.
    ///
    /// `store` is the content of STORE. If STORE is lost, its id is sufficient. Pages longer than `page_bytes_max` are
    /// not reconstructed.
    ///
    /// # Errors
    /// Returns [`Damage`] if a folder cannot be listed or the length of a segment cannot be read. Returns [`Damage`]
    /// with [`Defect::Memory`] if there is not enough memory. The files of the store may then be intact.
    pub fn read(source: &'s dyn ReadAt, store: StoreFile, page_bytes_max: u64) -> Result<Self, Damage> {
        let survey = Survey::read_as(source, store)?;
        let refused = survey.links.values().filter_map(|link| link.as_ref().err());
        if let Some(refused) = refused.into_iter().find(|damage| is_memory(damage)) {
            return Err(refused.clone());
        }
        let log = KnownLog::read(source, &survey)?;
        let known_versions = pages::known_versions(source, &survey, &log);
        let state =
            State { base: None, table: PageTable::new(), point: LogPoint::default(), is_whole: false };
        let mut salvage = Self { source, survey, log, known_versions, page_bytes_max, state };
        salvage.state = match salvage.newest_state()? {
            Some(state) => state,
            None => salvage.pieces()?,
        };
        Ok(salvage)
    }

    /// Returns the newest state that can be computed.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the evidence of batches after the state.
    #[must_use]
    pub fn beyond(&self) -> LogRemainder {
        LogRemainder { durable: self.log.durable, seen: self.log.seen, hidden: self.log.hidden.clone() }
    }

    /// Computes the state with the highest Lsn. If several snapshots lead to this state, the newest of them is used.
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
            // The store was empty at the beginning of the log. This start is valid only if the log is known from its
            // beginning, or if there never was a log.
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

    /// Computes the state from a snapshot and the known batches up to `until`. If a batch before `until` is not known,
    /// the state ends before that batch. Returns `None` if the snapshot needs a batch that is not known.
    fn follow(&self, base: Option<&Arc<Manifest>>, until: Lsn) -> Result<Option<State>, Damage> {
        let mut resolver = base.map_or_else(Resolver::new, Resolver::from_manifest);
        let mut point = base.map_or_else(LogPoint::default, |manifest| manifest.redo);
        while point.lsn < until {
            match self.step(&mut resolver, point.lsn.next()) {
                Ok(end) => point = end,
                Err(damage) if is_memory(&damage) => return Err(damage),
                // The batch has become unreadable, or it names a lost table. Stop before it.
                Err(_) => break,
            }
        }
        let Ok(ResolvedState { table, .. }) = resolver.finish() else { return Ok(None) };
        Ok(Some(State { base: base.map(|base| base.snapshot), table, point, is_whole: true }))
    }

    /// Applies a known batch, and returns the point at its end.
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

    /// Combines the newest known version of every page. Used if no state can be computed. The root is that of the
    /// newest link.
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

/// Returns true if the damage is a failed allocation. The file may be intact.
fn is_memory(damage: &Damage) -> bool {
    matches!(damage.defect, Defect::Memory { .. })
}

impl std::fmt::Debug for Salvage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Salvage").field("page_bytes_max", &self.page_bytes_max).finish_non_exhaustive()
    }
}
