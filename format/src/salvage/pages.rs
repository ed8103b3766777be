//! Salvage of pages. A version of a page is computed from an image of the page or from its creation, and from later
//! operations in the log.

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

/// A version of a page in a manifest or a table, with the reference to its image.
#[derive(Clone, Debug)]
pub(super) struct KnownVersion {
    info: PageInfo,
    image: Option<ImageRef>,
}

/// The image to which operations are applied, or zeros if `image` is `None`.
#[derive(Clone, Copy, Debug)]
struct Start {
    image: Option<ImageRef>,
    len: u64,
}

/// The proven bytes of a version of a page. [`Salvage::window`] reads them.
#[derive(Clone, Debug)]
pub struct FoundBytes {
    start: Start,
    proven: ProvenPage,
    locations: Vec<OpLocation>,
}

/// Number of page bytes whose checksum is computed in one step.
const SUMMED_AT_ONCE: u64 = 16 << 20;

/// Collects the versions of pages in manifests and tables, newest first for each page. A manifest is used even if its
/// chain is broken. A table is used only if a known restore names the table, because the versions in the table of an
/// uncommitted restore never existed.
pub(super) fn known_versions(
    source: &dyn ReadAt,
    survey: &Survey,
    log: &KnownLog,
) -> BTreeMap<PageId, Vec<KnownVersion>> {
    let mut known_versions: BTreeMap<PageId, Vec<KnownVersion>> = BTreeMap::new();
    let mut note = |entry: &ManifestEntry| {
        let of_page = known_versions.entry(entry.page).or_default();
        let is_new = of_page
            .iter()
            .all(|known_version| (known_version.info.lsn, known_version.image) != (entry.lsn, entry.image));
        if is_new {
            of_page.push(KnownVersion { info: page_info(entry), image: entry.image });
        }
    };
    survey.readable().flat_map(|manifest| &manifest.entries).for_each(&mut note);
    for (table, table_crc) in log.tables() {
        if let Ok(table) = survey.read_table(source, table, table_crc) {
            table.entries.iter().for_each(&mut note);
        }
    }
    for of_page in known_versions.values_mut() {
        of_page.sort_by_key(|known_version| std::cmp::Reverse(known_version.info.lsn));
    }
    known_versions
}

impl Salvage<'_> {
    /// Salvages a page of the state. Reads and proves its bytes.
    #[must_use]
    pub fn find(&self, info: &PageInfo) -> PageRemains {
        let why = match self.prove(info) {
            Ok(bytes) if self.state.is_whole => return PageRemains::Exact(bytes),
            // The state combines pages as of different batches, so no version is exact.
            Ok(bytes) => {
                return PageRemains::Older {
                    version: info.clone(),
                    bytes,
                    why: self.log.hole(info.lsn.next()),
                };
            }
            Err(why) => why,
        };
        // Do not return an older version because of a lack of memory. The caller would assume that the newer version is
        // lost.
        if matches!(why.defect, Defect::Memory { .. }) {
            return PageRemains::Lost(why);
        }
        match self.newest_before(info) {
            Some((version, bytes)) => PageRemains::Older { version, bytes, why },
            None => PageRemains::Lost(why),
        }
    }

    /// Returns the proven bytes of this version.
    fn prove(&self, wanted: &PageInfo) -> Result<FoundBytes, Damage> {
        let mut first = None;
        let older =
            self.versions_of(wanted.page).iter().filter(|known_version| known_version.info.lsn <= wanted.lsn);
        for start in older.map(Some).chain([None]) {
            match self.lead(wanted.page, start, wanted) {
                Ok(bytes) => return Ok(bytes),
                Err(damage) if matches!(damage.defect, Defect::Memory { .. }) => return Err(damage),
                Err(damage) => _ = first.get_or_insert(damage),
            }
        }
        Err(first.unwrap_or_else(|| self.log.hole(wanted.lsn)))
    }

    /// Computes a version of a page from `start`, or from the creation of the page, by applying known batches.
    fn lead(
        &self,
        page: PageId,
        start: Option<&KnownVersion>,
        wanted: &PageInfo,
    ) -> Result<FoundBytes, Damage> {
        let locations = match start {
            Some(known_version) => self.log.touches(page, known_version.info.lsn, wanted.lsn),
            None => self.touches_from_creation(page, wanted.lsn)?,
        };
        let info = self.outcome(page, start.map(|known_version| &known_version.info), locations)?;
        // Each batch that changes the content, length or metadata of the page raises its epoch. If the epoch is
        // correct, no such batch is missing.
        if info.epoch != wanted.epoch {
            let (what, found, expected) = ("epoch after the known batches", info.epoch.0, wanted.epoch.0);
            let hole = self.log.hole(self.log.reach(info.lsn).next());
            return Err(Damage { defect: Defect::Mismatch { what, found, expected }, ..hole });
        }
        // An empty page has no image.
        let start = start.map(|known_version| match known_version.image {
            Some(image) => Start { image: Some(image), len: known_version.info.len },
            None => Start { image: None, len: 0 },
        });
        let bytes = self.bytes(start.ok_or_else(|| self.log.hole(wanted.lsn)), page, locations, info.len)?;
        // Compare the checksum with that of each image of the same version.
        let mut known = self
            .versions_of(info.page)
            .iter()
            .filter(|known_version| known_version.info.epoch == wanted.epoch);
        let mut computed = None;
        known.by_ref().filter_map(|known_version| known_version.image).try_for_each(|image| {
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

    /// Computes the CRC-32 of a page's bytes.
    fn sum(&self, bytes: &FoundBytes, len: u64) -> Result<u32, Damage> {
        let mut sum = crc32fast::Hasher::new();
        for from in (0..len).step_by(SUMMED_AT_ONCE as usize) {
            sum.update(&self.window(bytes, from..len.min(from + SUMMED_AT_ONCE))?);
        }
        Ok(sum.finalize())
    }

    /// Reads a window of a page, and verifies its bytes. The window must be within the page. Memory is allocated for
    /// the window only.
    ///
    /// # Errors
    /// Returns [`Damage`] if the bytes have changed since they were proven, or if there is not enough memory.
    pub fn window(&self, bytes: &FoundBytes, window: Range<u64>) -> Result<Vec<u8>, Damage> {
        bytes.proven.window(self.source, &bytes.locations, &window)
    }

    /// Returns the newest version before `wanted` that can be proven. The search starts from the versions in manifests
    /// and tables, or from the creation of the page, and applies known batches as long as none is missing.
    fn newest_before(&self, wanted: &PageInfo) -> Option<(PageInfo, FoundBytes)> {
        let is_before = |known_version: &&KnownVersion| {
            known_version.info.lsn < wanted.lsn && known_version.info.epoch < wanted.epoch
        };
        let known = self.versions_of(wanted.page).iter().filter(is_before);
        let mut proven = known.filter_map(|known_version| {
            Some((known_version.info.clone(), self.prove(&known_version.info).ok()?))
        });
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

    /// Returns the Lsn of the batch that created a page, or `None` if that batch is not known. No earlier batch can
    /// change the page.
    fn creation(&self, page: PageId) -> Option<Lsn> {
        let first = self.log.touches(page, Lsn(0), Lsn(u64::MAX)).first()?;
        matches!(decode_single(&first.read(self.source).ok()?), Ok(Op::Create { .. })).then_some(first.lsn)
    }

    /// Returns the known operations on a page from its creation up to batch `until`.
    fn touches_from_creation(&self, page: PageId, until: Lsn) -> Result<&[OpLocation], Damage> {
        let created = self.creation(page).ok_or_else(|| self.log.hole(until))?;
        Ok(self.log.touches(page, Lsn(created.0 - 1), until))
    }

    /// Computes the description of the page after known operations. Planning the operations checks that their ranges
    /// are within the page.
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

    /// Proves the bytes of the page after these operations. `final_len` is the length of the page after the last
    /// operation. An image or a create replaces all bytes, so earlier operations are ignored.
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

    /// Checks that the page is at most `page_bytes_max` bytes long.
    fn check_len(&self, final_len: u64) -> Result<(), Defect> {
        check_limit("page length", final_len, self.page_bytes_max)
    }

    fn versions_of(&self, page: PageId) -> &[KnownVersion] {
        self.known_versions.get(&page).map_or(&[], Vec::as_slice)
    }

    /// Returns the newest known version of every page. Pages that are known to be deleted are excluded. These versions
    /// form the table if no state can be computed.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory for the list.
    pub(super) fn pages_known(&self) -> Result<Vec<PageInfo>, Defect> {
        let mut pages: BTreeSet<PageId> = BTreeSet::new();
        pages.extend(self.known_versions.keys().copied().chain(self.log.pages()));
        let mut deleted: BTreeMap<PageId, Lsn> = BTreeMap::new();
        for tombstone in self.survey.readable().flat_map(|link| &link.tombstones) {
            let newest = deleted.entry(tombstone.page).or_default();
            *newest = tombstone.lsn.max(*newest);
        }
        let newest = |page| self.newest_known(page, deleted.get(&page).copied());
        let mut known = collected(pages.into_iter().filter_map(newest))?;
        known.sort_unstable_by_key(|info| std::cmp::Reverse((info.lsn, info.page)));
        // Two pages never have the same key at the same time, so the older page was deleted.
        let mut keys: BTreeSet<Key> = BTreeSet::new();
        known.retain(|info| info.key.clone().is_none_or(|key| keys.insert(key)));
        Ok(known)
    }

    /// Returns the newest known version of a page, even if its bytes cannot be proven. `deleted` is the batch of the
    /// page's newest tombstone.
    fn newest_known(&self, page: PageId, deleted: Option<Lsn>) -> Option<PageInfo> {
        let known_version = self.versions_of(page).first().map(|known_version| known_version.info.clone());
        let from = known_version.as_ref().map(|info| info.lsn).or_else(|| self.creation(page))?;
        let ends = self.log.touches(page, from, Lsn(u64::MAX)).last();
        let ends = ends.and_then(|location| location.read(self.source).ok());
        let is_deleted = ends.is_some_and(|op| matches!(decode_single(&op), Ok(Op::Delete { .. })));
        if is_deleted || deleted.is_some_and(|lsn| lsn > from) || self.is_passed_over(page, from) {
            return None;
        }
        let until = self.log.reach_before_restore(from);
        let after = if known_version.is_some() { from } else { Lsn(from.0 - 1) };
        let locations = self.log.touches(page, after, until);
        self.outcome(page, known_version.as_ref(), locations).ok().or(known_version)
    }

    /// Returns true if the log of a base starts at or after batch `lsn` and the base does not list the page.
    fn is_passed_over(&self, page: PageId, lsn: Lsn) -> bool {
        self.survey.readable().rev().any(|link| {
            link.kind == ManifestKind::Base
                && link.redo.lsn >= lsn
                && link.entries.binary_search_by_key(&page, |entry| entry.page).is_err()
        })
    }
}
