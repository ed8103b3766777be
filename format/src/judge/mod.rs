//! The verdict on a store. It states where recovery starts, what prevents other starts, and which kept states and
//! recorded snapshots are lost.
//!
//! Recovery, views of earlier states and inspectors use this module, so that they agree about a store. Recovery uses
//! the first candidate that works, and so does [`judge`], which then proves the states that a caller can request. Each
//! batch of the log belongs to the newest start that ends before the batch. The log is therefore read about once,
//! however many snapshots exist.
//!
//! | question | answer |
//! |---|---|
//! | Can recovery start from a candidate: its chain, the log after it, and all images that an open reads? | [`Start::blocked_by`] |
//! | Can the snapshot's own state be computed, with the log up to its end? | [`Start::lost_by`] |
//! | Can each state between the candidate and the next one be computed? | [`Start::gaps`] |
//! | Which of these states does the newest seal guarantee? | [`Start::role`] |
//! | Does the newest seal list a snapshot, so that its absence is damage and not the effect of a crash? | [`Record::names`] |
//!
//! An open reads the images of all pages except some in [`Place::Disk`]. If a verified snapshot names the image of such
//! a page, the image was read when the snapshot was verified, and an open does not read it. Damage to such an image
//! affects only that page ([`Start::damaged_pages`]). An open that loads pages on demand reads fewer images, and an
//! open with too little memory moves pages to disk. The verdict is that of an open that does neither.

mod gaps;
mod image_proofs;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

pub use self::gaps::Gap;
use self::gaps::{gaps, lost_beginning};
pub use self::image_proofs::ImageProofs;
use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::{Lsn, PageId, Place, SnapshotId};
use crate::image::ImageRef;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::state::follow::Resolution;
use crate::state::reach::{Reach, Role};
use crate::state::survey::Survey;
use crate::state::trail::OpLocations;

/// The entries of the newest seal of the log. Each entry names a verified snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Record<'r>(pub &'r [VerifiedSnapshot]);

impl Record<'_> {
    /// Returns true if the seal lists the snapshot.
    #[must_use]
    pub fn names(self, snapshot: SnapshotId) -> bool {
        self.0.iter().any(|entry| entry.snapshot == snapshot)
    }

    /// Returns true if the seal lists the snapshot with the manifest checksum that is on disk, and all links of the
    /// snapshot's chain are valid.
    #[must_use]
    pub fn has_verified(self, survey: &Survey, snapshot: SnapshotId) -> bool {
        let Some(Ok((_, health))) = survey.links.get(&snapshot) else { return false };
        let on_disk = (snapshot, health.header_crc);
        let is_named = self.0.iter().any(|entry| (entry.snapshot, entry.manifest_crc) == on_disk);
        is_named && survey.chain(snapshot).is_ok()
    }

    /// Returns the damage to manifests that the newest seal lists. Such a manifest is missing, unreadable, or different
    /// from the verified manifest.
    ///
    /// No other check detects this damage, because recovery starts from another snapshot. The name of the snapshot is
    /// lost as well, because only the manifest contains the name.
    #[must_use]
    pub fn lost(self, survey: &Survey) -> Vec<Damage> {
        let mut lost: Vec<Damage> = Vec::new();
        for entry in self.0 {
            let damage = match survey.chain(entry.snapshot) {
                Err(damage) => damage,
                Ok(_) => match survey.links.get(&entry.snapshot) {
                    Some(Ok((_, health))) if health.header_crc != entry.manifest_crc => {
                        let (found, expected) = (health.header_crc.into(), entry.manifest_crc.into());
                        let defect =
                            Defect::Mismatch { what: "checksum of a verified manifest", found, expected };
                        defect.at(FileName::Manifest(entry.snapshot.0), 0)
                    }
                    _ => continue,
                },
            };
            if !lost.contains(&damage) {
                lost.push(damage);
            }
        }
        lost
    }
}

/// A candidate for the start of recovery: a snapshot, or the beginning of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The snapshot, or `None` for the beginning of the log.
    pub snapshot: Option<SnapshotId>,
    /// The states that the newest seal guarantees to be computable from this candidate.
    pub role: Role,
    /// The damage that prevents recovery from starting at this candidate. Empty for a candidate that recovery does not
    /// reach, because such candidates are not checked.
    pub blocked_by: Vec<Damage>,
    /// Pages on disk whose images are damaged but are not read by an open. Reads of such a page fail until a batch
    /// replaces or deletes the page.
    pub damaged_pages: Vec<(PageId, Damage)>,
    /// The damage that prevents the computation of the candidate's own state, which is the state at the snapshot's
    /// `end`.
    pub lost_by: Vec<Damage>,
    /// Ranges of states between this candidate and the next start that cannot be computed.
    pub gaps: Vec<Gap>,
}

/// The result of [`judge`]: the point at which recovery starts, and all damage.
#[derive(Debug)]
pub struct Verdict {
    /// All candidates for the start of recovery, in the order in which recovery tries them.
    pub starts: Vec<Start>,
    /// The index in `starts` of the candidate that recovery starts from, or `None` if the store cannot be opened.
    pub opens_from: Option<usize>,
    /// The state that recovery computes, or `None` if the store cannot be opened.
    pub state: Option<Resolution>,
    /// Damage to the manifests of snapshots that the newest seal lists as verified.
    pub lost: Vec<Damage>,
    /// The damage to the beginning of the log. `None` if the beginning is intact or is no longer needed.
    pub lost_beginning: Option<Damage>,
}

impl Verdict {
    /// Returns the candidate that recovery starts from, or `None` if the store cannot be opened.
    #[must_use]
    pub fn start(&self) -> Option<&Start> {
        self.opens_from.map(|index| &self.starts[index])
    }
}

/// The state that an open computes from one candidate, and the damage that the open finds.
struct Attempt {
    /// The state at the end of the log.
    state: Resolution,
    /// Damage that prevents recovery from starting at the candidate.
    blocked_by: Vec<Damage>,
    /// Damage to images that an open does not read, as in [`Start::damaged_pages`].
    damaged_pages: Vec<(PageId, Damage)>,
}

/// Images that prevented recovery from starting at a candidate, keyed by file and offset.
type Blocking = HashMap<(u64, u64), ImageRef>;

/// Computes the state at the end of the log from a candidate, as an open does. Checks the images of all pages of the
/// state.
///
/// # Errors
/// Returns the [`Damage`] to the log, or to a table that a restore names.
fn attempt(
    survey: &Survey,
    source: &dyn ReadAt,
    base: Option<&Arc<Manifest>>,
    images: &mut ImageProofs<'_>,
) -> Result<Attempt, Damage> {
    let state = survey.resolve(source, base, None)?;
    let record = recorded(&state);
    let start = Reach::of(survey, record).check_start(base.map(AsRef::as_ref));
    let verified = base.filter(|base| Record(record).has_verified(survey, base.snapshot));
    let mut blocked_by: Vec<Damage> = start.err().into_iter().collect();
    let mut damaged_pages = Vec::new();
    for (page, damage) in images_of(&state, images) {
        match is_left_unread(page, &state, verified.map(AsRef::as_ref)) {
            true => damaged_pages.push((page, damage)),
            false => blocked_by.push(damage),
        }
    }
    if !damaged_pages.is_empty() {
        // An image is not needed if later batches have overwritten every byte of its page.
        let mut op_locations = OpLocations::default();
        let state = op_locations.follow(survey, source, base, None)?;
        damaged_pages.retain(|(page, _)| !op_locations.is_image_overwritten(source, &state.resolved, *page));
    }
    Ok(Attempt { state, blocked_by, damaged_pages })
}

/// Determines the verdict on a store from a survey of its files. Reads the log, and all images that are not yet in the
/// cache `images`.
#[must_use]
pub fn judge(survey: &Survey, source: &dyn ReadAt, images: &mut ImageProofs<'_>) -> Verdict {
    let Search { mut starts, opens_from, state, record, .. } = Search::run(survey, source, images);
    let is_end_known = record.is_some();
    let record = record.unwrap_or_default();
    let reach = Reach::of(survey, &record);
    let lost = Record(&record).lost(survey);
    let lost_beginning = lost_beginning(survey, &record).filter(|_| is_end_known);
    StateProofs { survey, source, reach: &reach, is_end_known }.find_lost_states(&mut starts, images);
    exclude_own_states_from_gaps(survey, &mut starts);
    // The floor excludes the beginning of the log, even if the beginning still exists.
    if state.is_some() && !reach.is_start(None) {
        starts.retain(|start| start.snapshot.is_some());
    }
    Verdict { starts, opens_from, state, lost, lost_beginning }
}

/// The search for the candidate that recovery starts from.
#[derive(Default)]
struct Search {
    /// The candidates so far, in the order in which recovery tries them.
    starts: Vec<Start>,
    opens_from: Option<usize>,
    /// The state that recovery computes from `opens_from`.
    state: Option<Resolution>,
    /// Entries of the last seal of the log, once a walk has reached the end.
    record: Option<Vec<VerifiedSnapshot>>,
    blocking: Blocking,
}

impl Search {
    /// Lists all candidates, and checks them up to the first from which recovery can start.
    fn run(survey: &Survey, source: &dyn ReadAt, images: &mut ImageProofs<'_>) -> Self {
        let mut search = Self::default();
        for (snapshot, candidate) in survey.named_candidates() {
            let mut start = Start {
                snapshot,
                role: Role::Link,
                blocked_by: Vec::new(),
                damaged_pages: Vec::new(),
                lost_by: Vec::new(),
                gaps: Vec::new(),
            };
            if search.opens_from.is_none() {
                start = search.check(start, candidate, survey, source, images);
            }
            search.starts.push(start);
        }
        search
    }

    /// Checks whether recovery can start from a candidate, and returns `start` with the damage that was found.
    fn check(
        &mut self,
        mut start: Start,
        candidate: Result<Option<Arc<Manifest>>, Damage>,
        survey: &Survey,
        source: &dyn ReadAt,
        images: &mut ImageProofs<'_>,
    ) -> Start {
        let attempted = candidate.and_then(|base| match base {
            Some(base) if is_blocked(&base, &self.blocking) => Ok(Err(base)),
            base => attempt(survey, source, base.as_ref(), images).map(Ok),
        });
        match attempted {
            Ok(Ok(Attempt { state, blocked_by, damaged_pages })) => {
                if !blocked_by.is_empty() {
                    note_blocking(&state, images, &mut self.blocking);
                }
                self.record.get_or_insert_with(|| recorded(&state).to_vec());
                (start.blocked_by, start.damaged_pages) = (blocked_by, damaged_pages);
                if start.blocked_by.is_empty() {
                    (self.opens_from, self.state) = (Some(self.starts.len()), Some(state));
                }
            }
            Ok(Err(blocked)) => start.blocked_by = self.damage_to_blocked(&blocked, survey, images),
            Err(damage) => start.blocked_by.push(damage),
        }
        start
    }

    /// Returns the damage to a snapshot for which [`is_blocked`] returned true, without reading the log.
    fn damage_to_blocked(
        &self,
        blocked: &Manifest,
        survey: &Survey,
        images: &mut ImageProofs<'_>,
    ) -> Vec<Damage> {
        let reach = Reach::of(survey, self.record.as_deref().unwrap_or_default());
        let mut found: Vec<Damage> = reach.check_start(Some(blocked)).err().into_iter().collect();
        // An open need not read the images of pages on disk.
        let read = blocked
            .entries
            .iter()
            .filter(|entry| entry.place != Place::Disk || is_blocking(entry.image, &self.blocking));
        found.extend(read.filter_map(|entry| images.check(entry.lsn, entry.image, entry.len)));
        found
    }
}

/// The proof of the states that a caller can request.
struct StateProofs<'s> {
    survey: &'s Survey,
    source: &'s dyn ReadAt,
    reach: &'s Reach,
    /// Whether a walk has reached the end of the log.
    is_end_known: bool,
}

impl StateProofs<'_> {
    /// Sets the role of each start, and the states after the start that cannot be computed.
    fn find_lost_states(&self, starts: &mut [Start], images: &mut ImageProofs<'_>) {
        let Self { survey, source, reach, is_end_known } = *self;
        // Newest state before the start that was examined last.
        let mut until = None;
        for start in starts {
            start.role = start.snapshot.map_or_else(|| role_of_beginning(reach), |id| reach.role(id));
            let base = match start.snapshot.map(|id| survey.snapshot(id)).transpose() {
                Ok(base) if start.role != Role::Link => base,
                Ok(_) => continue,
                Err(damage) => {
                    start.lost_by.extend((start.role != Role::Link).then_some(damage));
                    continue;
                }
            };
            if let Some(base) = &base {
                let own = survey.resolve(source, Some(base), Some(base.end));
                start.lost_by =
                    own.map_or_else(|damage| vec![damage], |state| damaged_images(&state, images));
            }
            if start.role == Role::Start && is_end_known {
                start.gaps = gaps(survey, source, base.as_ref(), until, images);
                until = base.map(|base| Lsn(base.end.0.saturating_sub(1)));
            }
        }
    }
}

/// Removes the own states of intact snapshots from the gaps. A snapshot's own state can be computed even if the log
/// before the snapshot is damaged.
fn exclude_own_states_from_gaps(survey: &Survey, starts: &mut [Start]) {
    let is_complete = |start: &Start| start.role != Role::Link && start.lost_by.is_empty();
    let complete = starts.iter().filter(|start| is_complete(start)).filter_map(|start| start.snapshot);
    let ends: BTreeSet<Lsn> =
        complete.filter_map(|id| Some(survey.links.get(&id)?.as_ref().ok()?.0.end)).collect();
    for gap in starts.iter_mut().flat_map(|start| &mut start.gaps) {
        while gap.first < gap.last && ends.contains(&gap.first) {
            gap.first = gap.first.next();
        }
    }
}

/// Returns true if the snapshot names an image that prevented recovery from a newer snapshot. The final state then uses
/// the same image, so recovery from this snapshot fails, too. The log need not be read again.
fn is_blocked(base: &Manifest, blocking: &Blocking) -> bool {
    !blocking.is_empty() && base.entries.iter().any(|entry| is_blocking(entry.image, blocking))
}

fn is_blocking(image: Option<ImageRef>, blocking: &Blocking) -> bool {
    image.is_some_and(|image| blocking.get(&(image.file, image.offset)) == Some(&image))
}

/// Adds the damaged images of a state to `blocking`. Images of pages on disk are not added, because another snapshot
/// may list such an image as verified.
fn note_blocking(state: &Resolution, images: &mut ImageProofs<'_>, blocking: &mut Blocking) {
    for (page, _) in images_of(state, images) {
        let base = state.resolved.bases.get(page).and_then(|base| base.image);
        let place = state.resolved.table.get(page).map(|info| info.place);
        if let Some(image) = base.filter(|_| place != Some(Place::Disk)) {
            blocking.insert((image.file, image.offset), image);
        }
    }
}

fn role_of_beginning(reach: &Reach) -> Role {
    if reach.is_start(None) { Role::Start } else { Role::Link }
}

/// Returns the snapshots that the last seal before the end of the log lists as verified.
fn recorded(state: &Resolution) -> &[VerifiedSnapshot] {
    state.end.as_ref().map(|end| &end.verified[..]).unwrap_or_default()
}

/// Checks the images of all pages of a state. Returns the pages whose images are damaged, with the damage.
fn images_of(state: &Resolution, images: &mut ImageProofs<'_>) -> Vec<(PageId, Damage)> {
    let bases = state.resolved.bases.iter();
    bases.filter_map(|(page, base)| Some((page, images.check(base.lsn, base.image, base.len)?))).collect()
}

fn damaged_images(state: &Resolution, images: &mut ImageProofs<'_>) -> Vec<Damage> {
    images_of(state, images).into_iter().map(|(_, damage)| damage).collect()
}

/// Returns true if an open does not read the image of a page (SPEC R4). The page must be on disk in the resulting
/// state, and the verified snapshot that the open starts from must name the image.
#[must_use]
pub fn is_left_unread(page: PageId, state: &Resolution, verified: Option<&Manifest>) -> bool {
    let Some(verified) = verified else { return false };
    let is_on_disk = state.resolved.table.get(page).is_some_and(|info| info.place == Place::Disk);
    let image = state.resolved.bases.get(page).and_then(|base| base.image);
    let named = verified.entries.binary_search_by_key(&page, |entry| entry.page).ok();
    is_on_disk && named.is_some_and(|at| verified.entries[at].image == image)
}
