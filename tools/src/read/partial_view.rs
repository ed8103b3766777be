//! A view of the readable parts of a store, damaged or not.
//!
//! `rebuild` computes a complete state or returns an error. This view contains partial results: the state before the
//! first damage in the log, the pages whose bytes are readable, and the pages whose bytes are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::judge::{Record, is_left_unread};
use remanent_format::log::LogEnd;
use remanent_format::manifest::Manifest;
use remanent_format::segment::{SegmentHeader, SegmentHeaderRaw};
use remanent_format::state::follow::Resolution;
use remanent_format::state::reach::{Reach, Role};
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::OpLocations;
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{Damage, Defect, FileName, Folder, Lsn, PageId, PageInfo, ReadAt, SnapshotId, StoreId};

use crate::cli::exit::Failure;
use crate::read::page_bytes::PageBytes;
use crate::read::stable::read_until_stable;
use crate::read::store_dir::StoreDir;

/// The readable parts of a store, and the damage to the other parts.
pub struct PartialView {
    /// The survey of all files.
    pub survey: Survey,
    /// The newest state that can be computed, or `None` if no state can be computed.
    pub state: Option<Resolution>,
    /// The damage that was found, the most serious first.
    pub damage: Vec<Damage>,
}

impl PartialView {
    /// Reads the files of a store except its images. Repeats the read if another process may be writing to the store.
    pub fn take(dir: &StoreDir) -> Result<Self, Failure> {
        let read_once = |_: Option<&[Damage]>| Self::take_once(dir);
        let (view, damage) = read_until_stable(dir, read_once, |view| view.damage.clone())?;
        Ok(Self { damage, ..view })
    }

    /// Reads the files of a store except its images, once.
    pub fn take_once(dir: &StoreDir) -> Result<Self, Failure> {
        let (survey, identity_damage) = survey(dir)?;
        let mut damage: Vec<Damage> = identity_damage.into_iter().collect();
        let mut furthest: Option<Resolution> = None;
        let mut arrived: Option<Resolution> = None;
        for candidate in survey.candidates() {
            let stopped_by = match candidate {
                Err(unreadable) => unreadable,
                Ok(base) => match Reach::follow(&survey, dir, base.as_ref()) {
                    Ok(state) => {
                        arrived = Some(state);
                        break;
                    }
                    Err(stopped_by) => {
                        let before = resolve_before(dir, &survey, base.as_ref(), &stopped_by);
                        let reached = |state: &Option<Resolution>| {
                            state.as_ref().map(|state| state.resolved.table.lsn())
                        };
                        if reached(&before) > reached(&furthest) {
                            furthest = before;
                        }
                        stopped_by
                    }
                },
            };
            if !damage.contains(&stopped_by) {
                damage.push(stopped_by);
            }
        }
        if arrived.is_none() && damage.is_empty() {
            damage.push(Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1)));
        }
        Ok(Self { survey, state: arrived.or(furthest), damage })
    }

    /// Reads the files of a store with its images. Returns the view and the bytes of all pages. The bytes are `None` if
    /// their total length exceeds `page_bytes_max`.
    pub fn with_bytes(dir: &StoreDir, page_bytes_max: u64) -> Result<(Self, Option<PageBytes<'_>>), Failure> {
        let read_once = |_: Option<&[Damage]>| Self::with_bytes_once(dir, page_bytes_max);
        let ((view, bytes), damage) = read_until_stable(dir, read_once, |(view, _)| view.damage.clone())?;
        Ok((Self { damage, ..view }, bytes))
    }

    fn with_bytes_once(
        dir: &StoreDir,
        page_bytes_max: u64,
    ) -> Result<(Self, Option<PageBytes<'_>>), Failure> {
        let mut view = Self::take_once(dir)?;
        let mut skipped = Vec::new();
        let opened = view.survey.candidates().find_map(|candidate| {
            let bytes = candidate.and_then(|base| view.opened(dir, base.as_ref(), page_bytes_max));
            bytes.map_err(|damage| skipped.push(damage)).ok()
        });
        if let Some(bytes) = opened {
            // `view.state` may have been computed from a snapshot whose images are damaged.
            if view.state.as_ref().is_some_and(|state| state.base != bytes.base()) {
                skipped.into_iter().for_each(|damage| view.add(damage));
            }
            bytes.damage().for_each(|damage| add(&mut view.damage, damage.clone()));
            return Ok((view, Some(bytes)));
        }
        let Some(state) = &view.state else { return Ok((view, None)) };
        let base = state.base.map(|base| view.survey.snapshot(base)).transpose();
        let until = Some(state.resolved.table.lsn());
        match base.and_then(|base| view.bytes(dir, base.as_ref(), until, page_bytes_max)) {
            Ok(bytes) => {
                bytes.damage().for_each(|damage| add(&mut view.damage, damage.clone()));
                Ok((view, Some(bytes)))
            }
            // The pages exceed the limit, or the log has changed since it was read.
            Err(damage) => {
                view.add(damage);
                Ok((view, None))
            }
        }
    }

    /// Proves the bytes of all pages, as an open from `base` does. Ignores damage to images that an open does not read.
    fn opened<'d>(
        &self,
        dir: &'d StoreDir,
        base: Option<&Arc<Manifest>>,
        page_bytes_max: u64,
    ) -> Result<PageBytes<'d>, Damage> {
        let mut op_locations = OpLocations::default();
        let resolution = op_locations.follow(&self.survey, dir, base, None)?;
        let record = resolution.end.as_ref().map(|end| &end.verified[..]).unwrap_or_default();
        Reach::of(&self.survey, record).check_start(base.map(AsRef::as_ref))?;
        let verified = base.filter(|base| Record(record).has_verified(&self.survey, base.snapshot));
        let pages = resolution.resolved.table.pages().map(|info| info.page);
        let unread = |page: &PageId| is_left_unread(*page, &resolution, verified.map(AsRef::as_ref));
        let unread: BTreeSet<PageId> = pages.filter(unread).collect();
        let bytes = PageBytes::prove(dir, resolution, op_locations, page_bytes_max, |_| true)?;
        let blocking =
            bytes.lost().find(|(page, _)| !unread.contains(page)).map(|(_, damage)| damage.clone());
        blocking.map_or(Ok(bytes), Err)
    }

    /// Proves the bytes of all pages, computed from `base` and the log.
    fn bytes<'d>(
        &self,
        dir: &'d StoreDir,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
        page_bytes_max: u64,
    ) -> Result<PageBytes<'d>, Damage> {
        let mut op_locations = OpLocations::default();
        let resolution = op_locations.follow(&self.survey, dir, base, until)?;
        PageBytes::prove(dir, resolution, op_locations, page_bytes_max, |_| true)
    }

    /// Adds damage to the list unless the list already contains it.
    fn add(&mut self, damage: Damage) {
        add(&mut self.damage, damage);
    }

    /// Returns the pages of the state, in the order of their ids.
    pub fn pages(&self) -> impl Iterator<Item = PageInfo> {
        self.state.iter().flat_map(|state| state.resolved.table.pages())
    }

    /// Returns the snapshots, oldest first, including unreadable snapshots. Manifests that exist only as links of later
    /// snapshots are excluded.
    pub fn snapshots(&self) -> impl Iterator<Item = SnapshotId> {
        let reach = self.end().map(|end| Reach::of(&self.survey, &end.verified));
        let links = self.survey.links.iter();
        let is_kept = move |snapshot| reach.as_ref().is_none_or(|reach| reach.role(snapshot) != Role::Link);
        links
            .filter(move |(snapshot, link)| link.is_err() || is_kept(**snapshot))
            .map(|(snapshot, _)| *snapshot)
    }

    /// Returns the end of the log, or `None` if the log could not be read to its end.
    pub fn end(&self) -> Option<&LogEnd> {
        self.state.as_ref()?.end.as_ref()
    }

    /// Returns the newest state at the end of the log, or `None` if damage was found.
    pub fn undamaged_state(&self) -> Option<&Resolution> {
        self.state.as_ref().filter(|state| state.end.is_some() && self.damage.is_empty())
    }

    /// Returns an error that lists all damage, unless there is no damage.
    pub fn check_undamaged(&self) -> Result<(), Failure> {
        let lines: Vec<String> = self.damage.iter().map(ToString::to_string).collect();
        if lines.is_empty() { Ok(()) } else { Err(Failure::Damage(lines.join("\n"))) }
    }

    /// Returns the Lsn of the last batch in the state.
    pub fn lsn(&self) -> Lsn {
        self.state.as_ref().map_or(Lsn(0), |state| state.resolved.table.lsn())
    }

    /// Returns the Lsn of the newest batch that is known to be durable.
    pub fn durable(&self) -> Lsn {
        self.end().map_or_else(|| self.survey.mark(), |end| end.proven.lsn)
    }
}

fn add(all: &mut Vec<Damage>, damage: Damage) {
    if !all.contains(&damage) {
        all.push(damage);
    }
}

/// Reads STORE, all segment headers and all manifests.
fn survey(dir: &StoreDir) -> Result<(Survey, Option<Damage>), Failure> {
    if dir.len(FileName::Unfetched).is_ok_and(|len| len.is_some()) {
        // The images are not damaged, but not here.
        return Err(Failure::Environment(Defect::Unfetched.at(FileName::Unfetched, 0).to_string()));
    }
    let (store, refused) = identity(dir)?;
    match Survey::read_as(dir, store) {
        Ok(survey) => Ok((survey, refused)),
        Err(damage) => Err(Failure::Damage(damage.to_string())),
    }
}

/// Reads the STORE file. If STORE is damaged, returns the store id that the log segments contain, and the damage. The
/// other contents of STORE are then lost.
pub fn identity(dir: &StoreDir) -> Result<(StoreFile, Option<Damage>), Failure> {
    let read = dir.read_whole(FileName::Store).map_err(|error| Defect::Unreadable(error.to_string()));
    let read = read.and_then(|bytes| StoreFile::decode(&bytes.ok_or(Defect::Missing)?));
    let refused = match read {
        Ok(store) => return Ok((store, None)),
        Err(defect) => defect.at(FileName::Store, 0),
    };
    let Some(store) = store_of_segments(dir) else {
        return Err(match refused.defect {
            Defect::Missing => dir.no_store(),
            _ => Failure::Damage(format!("{refused}, and no log segment contains the id of the store")),
        });
    };
    let store = StoreFile { store, features: Features::default(), record: StoreRecord::default() };
    Ok((store, Some(refused)))
}

/// Returns the store id that most segment headers contain.
fn store_of_segments(dir: &StoreDir) -> Option<StoreId> {
    let mut votes: BTreeMap<[u8; 16], usize> = BTreeMap::new();
    for name in dir.list(Folder::Log).ok()? {
        let mut header = [0; SegmentHeaderRaw::LEN];
        if let Some(file @ FileName::Segment(_)) = FileName::parse(Folder::Log, &name)
            && dir.read_at(file, 0, &mut header).is_ok()
            && let Ok(header) = SegmentHeader::decode(&header)
        {
            *votes.entry(header.store.0).or_default() += 1;
        }
    }
    votes.into_iter().max_by_key(|(_, count)| *count).map(|(store, _)| StoreId(store))
}

/// Computes the state directly before the damage in the log. Returns `None` if the snapshot ends after the damage.
fn resolve_before(
    dir: &StoreDir,
    survey: &Survey,
    base: Option<&Arc<Manifest>>,
    stopped_by: &Damage,
) -> Option<Resolution> {
    let last = Lsn(stopped_by.lsn?.0.checked_sub(1)?);
    survey.resolve(dir, base, Some(last)).ok()
}
