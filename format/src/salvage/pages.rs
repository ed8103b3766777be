//! Floor 0. What is left of a page: every way from an image of it, or from its creation, to a version of it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::known::KnownLog;
use super::{Found, Salvage};
use crate::apply::apply;
use crate::defect::{Damage, Defect, check_crc, check_limit, reserve};
use crate::ids::{Epoch, Key, Lsn, PageId};
use crate::image::ImageRef;
use crate::manifest::{ManifestEntry, ManifestKind};
use crate::names::{FileName, ReadAt};
use crate::op::{OP_HEADER_LEN, Op, OpAt, decode_single};
use crate::rebuild::{Survey, read_image};
use crate::replay::page_info;
use crate::table::{PageInfo, PageTable, PlanMode};
use crate::trail::OpPlace;

/// What a manifest or a table says of a page: a version of it, and where its bytes lie.
#[derive(Clone, Debug)]
pub(super) struct Fact {
    info: PageInfo,
    image: Option<ImageRef>,
}

/// A version on the way: its bytes may be lost, and come back with an image that a batch names.
struct Version {
    info: PageInfo,
    bytes: Result<Vec<u8>, Damage>,
}

/// All that manifests and tables say, the newest version of each page first. A link counts also where the chain
/// that it belongs to is broken. A table counts only if a known restore names it: one that was written for a
/// restore that never came tells of versions that never were.
pub(super) fn facts(source: &dyn ReadAt, survey: &Survey, log: &KnownLog) -> HashMap<PageId, Vec<Fact>> {
    let mut facts: HashMap<PageId, Vec<Fact>> = HashMap::new();
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
    /// What is left of a page of the state.
    #[must_use]
    pub fn find(&self, info: &PageInfo) -> Found {
        let why = match self.prove(info) {
            Ok(bytes) if self.state.is_whole => return Found::Exact(bytes),
            // Exact would be the state's version, and that is not known.
            Ok(bytes) => {
                return Found::Older { version: info.clone(), bytes, why: self.log.hole(info.lsn.next()) };
            }
            Err(why) => why,
        };
        match self.newest_before(info) {
            Some((version, bytes)) => Found::Older { version, bytes, why },
            None => Found::Lost(why),
        }
    }

    /// The bytes of just this version.
    fn prove(&self, wanted: &PageInfo) -> Result<Vec<u8>, Damage> {
        let mut first = None;
        let older = self.facts_of(wanted.page).iter().filter(|fact| fact.info.lsn <= wanted.lsn);
        for start in older.map(Some).chain([None]) {
            let proven =
                self.replay(wanted.page, start, wanted.lsn).and_then(|found| self.accept(found, wanted));
            match proven {
                Ok(bytes) => return Ok(bytes),
                Err(damage) => _ = first.get_or_insert(damage),
            }
        }
        Err(first.unwrap_or_else(|| self.log.hole(wanted.lsn)))
    }

    /// The bytes of a version, if it is the one that is wanted.
    fn accept(&self, found: Version, wanted: &PageInfo) -> Result<Vec<u8>, Damage> {
        let Version { info, bytes } = found;
        // One batch less, and the epoch would be lower: so all batches between are there, but for moves, which
        // change no bytes. The epoch names what the page holds, its length and its metadata.
        if info.epoch != wanted.epoch {
            let (what, found, expected) =
                ("epoch that the batches found lead to", info.epoch.0, wanted.epoch.0);
            let hole = self.log.hole(self.log.reach(info.lsn).next());
            return Err(Damage { defect: Defect::Mismatch { what, found, expected }, ..hole });
        }
        let bytes = bytes?;
        // Where somebody knows the checksum of the bytes, they are held against it once more.
        for fact in self.facts_of(info.page).iter().filter(|fact| fact.info.epoch == wanted.epoch) {
            if let Some(image) = fact.image {
                check_crc("page", image.raw_crc, &bytes)
                    .map_err(|defect| defect.at_lsn(FileName::Pages(image.file), image.offset, wanted.lsn))?;
            }
        }
        Ok(bytes)
    }

    /// The newest version below `wanted` that can be proven: one that a manifest or a table tells of, or the
    /// page's first, and what known batches without a hole make of it.
    fn newest_before(&self, wanted: &PageInfo) -> Option<(PageInfo, Vec<u8>)> {
        let is_before = |fact: &&Fact| fact.info.lsn < wanted.lsn && fact.info.epoch < wanted.epoch;
        let known = self.facts_of(wanted.page).iter().filter(is_before);
        let mut proven = known.filter_map(|fact| Some((fact.info.clone(), self.prove(&fact.info).ok()?)));
        let from_creation = || {
            let created = self.creation(wanted.page)?;
            let until = self.log.reach_before_restore(created).min(Lsn(wanted.lsn.0 - 1));
            let Version { info, bytes } = self.replay(wanted.page, None, until).ok()?;
            Some((info, bytes.ok()?))
        };
        let (info, bytes) = proven.next().or_else(from_creation)?;
        let until = self.log.reach_before_restore(info.lsn).min(Lsn(wanted.lsn.0 - 1));
        if self.log.touches(info.page, info.lsn, until).is_empty() {
            return Some((info, bytes));
        }
        let start = Version { info: info.clone(), bytes: Ok(bytes.clone()) };
        let later = self.go_on(start, until).ok().and_then(|later| Some((later.info, later.bytes.ok()?)));
        Some(later.unwrap_or((info, bytes)))
    }

    /// The batch that created a page, if it is known: the first that ever touched it.
    fn creation(&self, page: PageId) -> Option<Lsn> {
        let first = self.log.touches(page, Lsn(0), Lsn(u64::MAX)).first()?;
        matches!(decode_single(&first.read(self.source).ok()?), Ok(Op::Create { .. })).then_some(first.lsn)
    }

    /// From a fact, or from the page's creation, to what known batches up to `until` make of it.
    fn replay(&self, page: PageId, start: Option<&Fact>, until: Lsn) -> Result<Version, Damage> {
        let Some(Fact { info, image }) = start else {
            let unknown = self.log.hole(until);
            let created = self.creation(page).ok_or_else(|| unknown.clone())?;
            let places = self.log.touches(page, Lsn(created.0 - 1), until);
            return self.apply_all(page, PageTable::new(), Err(unknown), places);
        };
        let bytes = image.as_ref().map_or(Ok(Vec::new()), |image| self.load(image, info.len));
        self.go_on(Version { info: info.clone(), bytes }, until)
    }

    fn go_on(&self, start: Version, until: Lsn) -> Result<Version, Damage> {
        let Version { info, bytes } = start;
        let (page, lsn) = (info.page, info.lsn);
        let table = PageTable::from_parts([info], Arc::default(), 1, Epoch(0), lsn);
        self.apply_all(page, table, bytes, self.log.touches(page, lsn, until))
    }

    /// Applies operations batch by batch. What a batch means, and that its ranges lie within the page, the
    /// plan says.
    fn apply_all(
        &self,
        page: PageId,
        mut table: PageTable,
        mut bytes: Result<Vec<u8>, Damage>,
        places: &[OpPlace],
    ) -> Result<Version, Damage> {
        for batch in places.chunk_by(|left, right| left.lsn == right.lsn) {
            let first = &batch[0];
            let stored = batch.iter().map(|place| place.read(self.source)).collect::<Result<Vec<_>, _>>()?;
            let ops = stored
                .iter()
                .map(|bytes| Ok(OpAt { op: decode_single(bytes)?, body_at: OP_HEADER_LEN }))
                .collect::<Result<Vec<_>, Defect>>()
                .map_err(|defect| first.at(defect))?;
            let changes = table
                .plan(first.lsn, &ops, PlanMode::Replay)
                .map_err(|(_, refusal)| first.at(Defect::Batch(refusal.to_string())))?;
            table.install(&changes);
            for (OpAt { op, .. }, place) in ops.iter().zip(batch) {
                bytes = self.apply_one(op, place, bytes);
            }
        }
        let gone = || Defect::Batch(format!("page {page} is deleted"));
        let at = |defect: Defect| places.last().map_or(self.log.hole(Lsn(1)), |last| last.at(defect));
        let info = table.get(page).cloned().ok_or_else(|| at(gone()))?;
        Ok(Version { info, bytes })
    }

    /// What an operation makes of the page's bytes; an image and a create make them anew.
    fn apply_one(
        &self,
        op: &Op<'_>,
        place: &OpPlace,
        bytes: Result<Vec<u8>, Damage>,
    ) -> Result<Vec<u8>, Damage> {
        let mut bytes = match op {
            Op::Image { image, len, .. } => return self.load(image, *len),
            Op::Create { .. } => Vec::new(),
            _ => bytes?,
        };
        if let Op::Create { len, .. } | Op::Resize { len, .. } = op {
            check_limit("page length", *len, self.page_bytes_max)
                .and_then(|()| reserve(&mut bytes, *len))
                .map_err(|defect| place.at(defect))?;
        }
        apply(op, &mut bytes);
        Ok(bytes)
    }

    fn load(&self, image: &ImageRef, len: u64) -> Result<Vec<u8>, Damage> {
        check_limit("page length", len, self.page_bytes_max)
            .map_err(|defect| defect.at(FileName::Pages(image.file), image.offset))?;
        read_image(self.source, image, len)
    }

    fn facts_of(&self, page: PageId) -> &[Fact] {
        self.facts.get(&page).map_or(&[], Vec::as_slice)
    }

    /// Every page that something tells of, at the newest version that is known, but for those that are known to
    /// be gone: for a table where no state is known.
    pub(super) fn pages_known(&self) -> Vec<PageInfo> {
        let pages: HashSet<PageId> = self.facts.keys().copied().chain(self.log.pages()).collect();
        let mut deleted: HashMap<PageId, Lsn> = HashMap::new();
        for tombstone in self.survey.readable().flat_map(|link| &link.tombstones) {
            let newest = deleted.entry(tombstone.page).or_default();
            *newest = tombstone.lsn.max(*newest);
        }
        let newest = |page| self.newest_known(page, deleted.get(&page).copied());
        let mut known: Vec<PageInfo> = pages.into_iter().filter_map(newest).collect();
        known.sort_by_key(|info| std::cmp::Reverse((info.lsn, info.page)));
        // A key is one page's at a time: who had it before is gone.
        let mut keys: HashSet<Key> = HashSet::new();
        known.retain(|info| info.key.clone().is_none_or(|key| keys.insert(key)));
        known
    }

    /// The newest version of a page that is known, whatever is left of its bytes; `deleted` is the batch of its
    /// newest tombstone.
    fn newest_known(&self, page: PageId, deleted: Option<Lsn>) -> Option<PageInfo> {
        let fact = self.facts_of(page).first().map(|fact| fact.info.clone());
        let from = fact.as_ref().map(|info| info.lsn).or_else(|| self.creation(page))?;
        let ends = self.log.touches(page, from, Lsn(u64::MAX)).last();
        let ends = ends.and_then(|place| place.read(self.source).ok());
        let is_deleted = ends.is_some_and(|op| matches!(decode_single(&op), Ok(Op::Delete { .. })));
        if is_deleted || deleted.is_some_and(|lsn| lsn > from) || self.is_passed_over(page, from) {
            return None;
        }
        let until = self.log.reach_before_restore(from);
        let followed = match &fact {
            Some(info) => self.go_on(Version { info: info.clone(), bytes: Err(self.log.hole(from)) }, until),
            None => self.replay(page, None, until),
        };
        followed.ok().map(|version| version.info).or(fact)
    }

    /// Whether a snapshot that was begun behind batch `lsn` does not name the page any more.
    fn is_passed_over(&self, page: PageId, lsn: Lsn) -> bool {
        self.survey.readable().rev().any(|link| {
            link.kind == ManifestKind::Base
                && link.redo.lsn >= lsn
                && link.entries.binary_search_by_key(&page, |entry| entry.page).is_err()
        })
    }
}
