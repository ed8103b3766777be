//! The remains of a page: every way from an image of it, or from its creation, to a version of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::known_log::KnownLog;
use super::{PageRemains, Salvage};
use crate::defect::{Damage, Defect, check_limit, collected};
use crate::ids::{Epoch, Key, Lsn, PageId};
use crate::image::ImageRef;
use crate::manifest::{ManifestEntry, ManifestKind};
use crate::names::{FileName, ReadAt};
use crate::op::{OP_HEADER_LEN, Op, OpAt, decode_single};
use crate::state::replay::page_info;
use crate::state::survey::Survey;
use crate::state::table::{PageInfo, PageTable, PlanMode};
use crate::state::trail::{OpLocation, ProvenPage};

/// A version of a page that a manifest or a table names, and the place of its bytes.
#[derive(Clone, Debug)]
pub(super) struct Fact {
    info: PageInfo,
    image: Option<ImageRef>,
}

/// What a page's bytes are made from: an image, or as many zeros.
#[derive(Clone, Copy, Debug)]
struct Start {
    image: Option<ImageRef>,
    len: u64,
}

/// The bytes of a version of a page, all of them proven. [`Salvage::window`] reads them.
#[derive(Clone, Debug)]
pub struct FoundBytes {
    start: Start,
    proven: ProvenPage,
    locations: Vec<OpLocation>,
}

/// Bytes of a page that are summed at a time.
const SUMMED_AT_ONCE: u64 = 16 << 20;

/// All versions that manifests and tables name, the newest of each page first. A link counts even if the
/// chain that it belongs to is broken. A table counts only if a known restore names it: a table that was
/// written for a restore that never came tells of versions that never were.
pub(super) fn facts(source: &dyn ReadAt, survey: &Survey, log: &KnownLog) -> BTreeMap<PageId, Vec<Fact>> {
    let mut facts: BTreeMap<PageId, Vec<Fact>> = BTreeMap::new();
    let mut note = |entry: &ManifestEntry| {
        let of_page = facts.entry(entry.page).or_default();
        let is_new = of_page.iter().all(|fact| (fact.info.lsn, fact.image) != (entry.lsn, entry.image));
        if is_new {
            of_page.push(Fact { info: page_info(entry), image: entry.image });
        }
    };
    survey.readable().flat_map(|manifest| &manifest.entries).for_each(&mut note);
    for (table, table_crc) in log.tables() {
        if let Ok(table) = survey.read_table(source, table, table_crc) {
            table.entries.iter().for_each(&mut note);
        }
    }
    for of_page in facts.values_mut() {
        of_page.sort_by_key(|fact| std::cmp::Reverse(fact.info.lsn));
    }
    facts
}

impl Salvage<'_> {
    /// The remains of a page of the state.
    #[must_use]
    pub fn find(&self, info: &PageInfo) -> PageRemains {
        let why = match self.prove(info) {
            Ok(bytes) if self.state.is_whole => return PageRemains::Exact(bytes),
            // Exact would be the state's version, and that is not known.
            Ok(bytes) => {
                return PageRemains::Older {
                    version: info.clone(),
                    bytes,
                    why: self.log.hole(info.lsn.next()),
                };
            }
            Err(why) => why,
        };
        // An older version for want of memory would be taken for all that is left.
        if matches!(why.defect, Defect::Memory { .. }) {
            return PageRemains::Lost(why);
        }
        match self.newest_before(info) {
            Some((version, bytes)) => PageRemains::Older { version, bytes, why },
            None => PageRemains::Lost(why),
        }
    }

    /// The bytes of just this version.
    fn prove(&self, wanted: &PageInfo) -> Result<FoundBytes, Damage> {
        let mut first = None;
        let older = self.facts_of(wanted.page).iter().filter(|fact| fact.info.lsn <= wanted.lsn);
        for start in older.map(Some).chain([None]) {
            match self.lead(wanted.page, start, wanted) {
                Ok(bytes) => return Ok(bytes),
                Err(damage) if matches!(damage.defect, Defect::Memory { .. }) => return Err(damage),
                Err(damage) => _ = first.get_or_insert(damage),
            }
        }
        Err(first.unwrap_or_else(|| self.log.hole(wanted.lsn)))
    }

    /// The bytes of a version, if known batches lead to it from `start`, or from the page's creation.
    fn lead(&self, page: PageId, start: Option<&Fact>, wanted: &PageInfo) -> Result<FoundBytes, Damage> {
        let locations = match start {
            Some(fact) => self.log.touches(page, fact.info.lsn, wanted.lsn),
            None => self.touches_from_creation(page, wanted.lsn)?,
        };
        let info = self.outcome(page, start.map(|fact| &fact.info), locations)?;
        // With one batch less the epoch would be lower. So all batches between are there, except for moves,
        // which change no bytes. The epoch names the page's content, its length and its metadata.
        if info.epoch != wanted.epoch {
            let (what, found, expected) =
                ("epoch that the batches found lead to", info.epoch.0, wanted.epoch.0);
            let hole = self.log.hole(self.log.reach(info.lsn).next());
            return Err(Damage { defect: Defect::Mismatch { what, found, expected }, ..hole });
        }
        // A page of no bytes has no image.
        let start = start.map(|fact| match fact.image {
            Some(image) => Start { image: Some(image), len: fact.info.len },
            None => Start { image: None, len: 0 },
        });
        let bytes = self.bytes(start.ok_or_else(|| self.log.hole(wanted.lsn)), page, locations, info.len)?;
        // If any structure gives the checksum of these bytes, they are compared with it once more.
        let mut known = self.facts_of(info.page).iter().filter(|fact| fact.info.epoch == wanted.epoch);
        let mut computed = None;
        known.by_ref().filter_map(|fact| fact.image).try_for_each(|image| {
            let at = |defect: Defect| defect.at_lsn(FileName::Pages(image.file), image.offset, wanted.lsn);
            let computed = match computed {
                Some(computed) => computed,
                None => *computed.insert(self.sum(&bytes, info.len)?),
            };
            let (what, found) = ("page", image.raw_crc);
            if found == computed { Ok(()) } else { Err(at(Defect::Checksum { what, found, computed })) }
        })?;
        Ok(bytes)
    }

    /// The checksum of a page's bytes.
    fn sum(&self, bytes: &FoundBytes, len: u64) -> Result<u32, Damage> {
        let mut sum = crc32fast::Hasher::new();
        for from in (0..len).step_by(SUMMED_AT_ONCE as usize) {
            sum.update(&self.window(bytes, from..len.min(from + SUMMED_AT_ONCE))?);
        }
        Ok(sum.finalize())
    }

    /// A window of a page's bytes, which ends where the page does or before. They are those that were found,
    /// or there is an error: no more of the page is held than the window.
    ///
    /// # Errors
    /// [`Damage`] that was not there when they were found, or there is no memory.
    pub fn window(&self, bytes: &FoundBytes, window: Range<u64>) -> Result<Vec<u8>, Damage> {
        bytes.proven.window(self.source, &bytes.locations, &window)
    }

    /// The newest version below `wanted` that can be proven: one that a manifest or a table tells of, or the
    /// page's first, followed by known batches without a hole.
    fn newest_before(&self, wanted: &PageInfo) -> Option<(PageInfo, FoundBytes)> {
        let is_before = |fact: &&Fact| fact.info.lsn < wanted.lsn && fact.info.epoch < wanted.epoch;
        let known = self.facts_of(wanted.page).iter().filter(is_before);
        let mut proven = known.filter_map(|fact| Some((fact.info.clone(), self.prove(&fact.info).ok()?)));
        let from_creation = || {
            let created = self.creation(wanted.page)?;
            let until = self.log.reach_before_restore(created).min(Lsn(wanted.lsn.0 - 1));
            let locations = self.touches_from_creation(wanted.page, until).ok()?;
            let info = self.outcome(wanted.page, None, locations).ok()?;
            let bytes = self.bytes(Err(self.log.hole(until)), info.page, locations, info.len).ok()?;
            Some((info, bytes))
        };
        let (info, bytes) = proven.next().or_else(from_creation)?;
        let until = self.log.reach_before_restore(info.lsn).min(Lsn(wanted.lsn.0 - 1));
        let locations = self.log.touches(info.page, info.lsn, until);
        if locations.is_empty() {
            return Some((info, bytes));
        }
        let later = || {
            let later = self.outcome(info.page, Some(&info), locations).ok()?;
            let locations = [&bytes.locations, locations].concat();
            let bytes = self.bytes(Ok(bytes.start), info.page, &locations, later.len).ok()?;
            Some((later, bytes))
        };
        later().or_else(|| Some((info.clone(), bytes.clone())))
    }

    /// The batch that created a page, if it is known: the first that ever touched it.
    fn creation(&self, page: PageId) -> Option<Lsn> {
        let first = self.log.touches(page, Lsn(0), Lsn(u64::MAX)).first()?;
        matches!(decode_single(&first.read(self.source).ok()?), Ok(Op::Create { .. })).then_some(first.lsn)
    }

    /// The known operations on a page from its creation on, up to batch `until`.
    fn touches_from_creation(&self, page: PageId, until: Lsn) -> Result<&[OpLocation], Damage> {
        let created = self.creation(page).ok_or_else(|| self.log.hole(until))?;
        Ok(self.log.touches(page, Lsn(created.0 - 1), until))
    }

    /// The version that known operations make of another one, except for its bytes. The plan says what a
    /// batch means, and that its ranges lie within the page.
    fn outcome(
        &self,
        page: PageId,
        start: Option<&PageInfo>,
        locations: &[OpLocation],
    ) -> Result<PageInfo, Damage> {
        let lsn = start.map_or(Lsn(0), |info| info.lsn);
        let mut table = PageTable::from_parts(start.cloned(), Arc::default(), 1, Epoch(0), lsn);
        for batch in locations.chunk_by(|left, right| left.lsn == right.lsn) {
            let first = &batch[0];
            let stored =
                batch.iter().map(|location| location.read(self.source)).collect::<Result<Vec<_>, _>>()?;
            let ops = stored
                .iter()
                .map(|bytes| Ok(OpAt { op: decode_single(bytes)?, body_at: OP_HEADER_LEN }))
                .collect::<Result<Vec<_>, Defect>>()
                .map_err(|defect| first.at(defect))?;
            let changes = table
                .plan(first.lsn, &ops, PlanMode::Replay)
                .map_err(|(_, refusal)| first.at(Defect::from(refusal)))?;
            table.install(&changes);
        }
        let gone = || Defect::Batch(format!("page {page} is deleted"));
        let at = |defect: Defect| locations.last().map_or(self.log.hole(Lsn(1)), |last| last.at(defect));
        table.get(page).ok_or_else(|| at(gone()))
    }

    /// The bytes of the version to which these operations lead, `final_len` of them. An image or a create
    /// makes all bytes anew, whatever became of the bytes before.
    fn bytes(
        &self,
        start: Result<Start, Damage>,
        page: PageId,
        locations: &[OpLocation],
        final_len: u64,
    ) -> Result<FoundBytes, Damage> {
        let (mut start, mut since) = (start, 0);
        for (index, location) in locations.iter().enumerate() {
            let stored = location.read(self.source)?;
            match decode_single(&stored).map_err(|defect| location.at(defect))? {
                Op::Image { image, len, .. } => {
                    (start, since) = (Ok(Start { image: Some(image), len }), index + 1);
                }
                Op::Create { .. } => (start, since) = (Ok(Start { image: None, len: 0 }), index),
                _ => {}
            }
        }
        let start = start?;
        let location =
            start.image.map_or((FileName::Store, 0), |image| (FileName::Pages(image.file), image.offset));
        self.check_len(final_len).map_err(|defect| defect.at(location.0, location.1))?;
        let proven = ProvenPage::prove(self.source, page, start.image, start.len)?;
        Ok(FoundBytes { start, proven, locations: locations[since..].to_vec() })
    }

    /// Refuses a page that is longer than the caller wants put together.
    fn check_len(&self, final_len: u64) -> Result<(), Defect> {
        check_limit("page length", final_len, self.page_bytes_max)
    }

    fn facts_of(&self, page: PageId) -> &[Fact] {
        self.facts.get(&page).map_or(&[], Vec::as_slice)
    }

    /// Every page that any structure tells of, at the newest version that is known, except for those that are
    /// known to be gone. For a table if no state is known.
    ///
    /// # Errors
    /// [`Defect::Memory`].
    pub(super) fn pages_known(&self) -> Result<Vec<PageInfo>, Defect> {
        let mut pages: BTreeSet<PageId> = BTreeSet::new();
        pages.extend(self.facts.keys().copied().chain(self.log.pages()));
        let mut deleted: BTreeMap<PageId, Lsn> = BTreeMap::new();
        for tombstone in self.survey.readable().flat_map(|link| &link.tombstones) {
            let newest = deleted.entry(tombstone.page).or_default();
            *newest = tombstone.lsn.max(*newest);
        }
        let newest = |page| self.newest_known(page, deleted.get(&page).copied());
        let mut known = collected(pages.into_iter().filter_map(newest))?;
        known.sort_unstable_by_key(|info| std::cmp::Reverse((info.lsn, info.page)));
        // A key belongs to one page at a time: the page that had it before is gone.
        let mut keys: BTreeSet<Key> = BTreeSet::new();
        known.retain(|info| info.key.clone().is_none_or(|key| keys.insert(key)));
        Ok(known)
    }

    /// The newest version of a page that is known, whatever remains of its bytes; `deleted` is the batch of
    /// its newest tombstone.
    fn newest_known(&self, page: PageId, deleted: Option<Lsn>) -> Option<PageInfo> {
        let fact = self.facts_of(page).first().map(|fact| fact.info.clone());
        let from = fact.as_ref().map(|info| info.lsn).or_else(|| self.creation(page))?;
        let ends = self.log.touches(page, from, Lsn(u64::MAX)).last();
        let ends = ends.and_then(|location| location.read(self.source).ok());
        let is_deleted = ends.is_some_and(|op| matches!(decode_single(&op), Ok(Op::Delete { .. })));
        if is_deleted || deleted.is_some_and(|lsn| lsn > from) || self.is_passed_over(page, from) {
            return None;
        }
        let until = self.log.reach_before_restore(from);
        let after = if fact.is_some() { from } else { Lsn(from.0 - 1) };
        let locations = self.log.touches(page, after, until);
        self.outcome(page, fact.as_ref(), locations).ok().or(fact)
    }

    /// Whether a snapshot that was begun after batch `lsn` does not name the page any more.
    fn is_passed_over(&self, page: PageId, lsn: Lsn) -> bool {
        self.survey.readable().rev().any(|link| {
            link.kind == ManifestKind::Base
                && link.redo.lsn >= lsn
                && link.entries.binary_search_by_key(&page, |entry| entry.page).is_err()
        })
    }
}
