//! The verdict on a store: where recovery starts, what blocks it elsewhere, which of the kept states are
//! lost, and which snapshots are lost that should be there.
//!
//! Recovery, views of earlier states and inspectors ask here, so that all of them say the same of a store.
//! Recovery stops at the first candidate that holds, and so does [`judge`]. Then it proves the states that a
//! caller can ask for: each batch of the log belongs to the newest start that ends before it, so that the log
//! is walked about once, however many snapshots there are.
//!
//! | question | answer |
//! |---|---|
//! | Can recovery start from a candidate: its chain, the log after it, and all images that an open reads? | [`Start::blocked_by`] |
//! | Can the snapshot's own state be computed, with the log up to its end? | [`Start::lost_by`] |
//! | Can each state between it and the next start be computed? | [`Start::gaps`] |
//! | Which of these does the store promise? | [`Start::role`] |
//! | Does the newest seal name a snapshot, so that no crash can have taken it away? | [`Record::names`] |
//!
//! An open reads the images of all pages but some of those in [`Place::Disk`]: an image that a verified
//! snapshot names for such a page was read back when the snapshot was. Damage to one concerns that page alone
//! ([`Start::damaged_pages`]). An open that loads pages on demand leaves more of them for later, and one in
//! less memory takes pages to disk; the verdict is that of an open that does neither.

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
use crate::state::trail::Trails;

/// The snapshots that the newest seal of the log names.
#[derive(Clone, Copy, Debug)]
pub struct Record<'r>(pub &'r [VerifiedSnapshot]);

impl Record<'_> {
    /// Whether it names a snapshot.
    #[must_use]
    pub fn names(self, snapshot: SnapshotId) -> bool {
        self.0.iter().any(|entry| entry.snapshot == snapshot)
    }

    /// Whether it names a snapshot just as it lies on disk, with all links that it follows.
    #[must_use]
    pub fn has_verified(self, survey: &Survey, snapshot: SnapshotId) -> bool {
        let Some(Ok((_, health))) = survey.links.get(&snapshot) else { return false };
        let on_disk = (snapshot, health.header_crc);
        let is_named = self.0.iter().any(|entry| (entry.snapshot, entry.manifest_crc) == on_disk);
        is_named && survey.chain(snapshot).is_ok()
    }

    /// Damage to the manifests of named snapshots: one is missing, unreadable, or another one than was
    /// verified. A snapshot's name is in its manifest and nowhere else, so a named snapshot's name is lost
    /// with it. Nothing else shows the loss, because recovery starts from another one.
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

/// A candidate to start from: a snapshot, or the log's beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The snapshot; `None` is the log's beginning.
    pub snapshot: Option<SnapshotId>,
    /// The states that the newest seal promises from here.
    pub role: Role,
    /// The damage that keeps recovery from starting here. It is not looked for in candidates after the one
    /// that recovery starts from.
    pub blocked_by: Vec<Damage>,
    /// Damage to images of pages on disk that an open from here does not read. It keeps no open from
    /// starting: reads of these images fail until a batch writes the page whole or deletes it.
    pub damaged_pages: Vec<(PageId, Damage)>,
    /// The damage that keeps the store from going back to just this state.
    pub lost_by: Vec<Damage>,
    /// The states after this one, and before the next start, that cannot be computed.
    pub gaps: Vec<Gap>,
}

/// The verdict on a store.
#[derive(Debug)]
pub struct Verdict {
    /// All candidates, in the order in which recovery tries them.
    pub starts: Vec<Start>,
    /// The candidate that recovery starts from, an index into `starts`; `None` if the store cannot be opened.
    pub opens_from: Option<usize>,
    /// The state that recovery finds.
    pub state: Option<Resolution>,
    /// Damage to snapshots that the log records.
    pub lost: Vec<Damage>,
    /// Damage to the log's beginning, if no seal has given it up.
    pub lost_beginning: Option<Damage>,
}

impl Verdict {
    /// The candidate that recovery starts from.
    #[must_use]
    pub fn start(&self) -> Option<&Start> {
        self.opens_from.map(|index| &self.starts[index])
    }
}

/// What an open from a candidate finds.
struct Attempt {
    /// The state at the log's end.
    state: Resolution,
    /// The damage that keeps recovery from starting there.
    blocked_by: Vec<Damage>,
    /// Damage that keeps no open from starting, as in [`Start::damaged_pages`].
    damaged_pages: Vec<(PageId, Damage)>,
}

/// Images that kept recovery from starting at a candidate, by where they lie.
type Blocking = HashMap<(u64, u64), ImageRef>;

/// Looks at a candidate as an open does: its log to the end, and the images that its pages are made from.
///
/// # Errors
/// [`Damage`] in the log, or a table that a restore names.
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
        match stays_unread(page, &state, verified.map(AsRef::as_ref)) {
            true => damaged_pages.push((page, damage)),
            false => blocked_by.push(damage),
        }
    }
    if !damaged_pages.is_empty() {
        // Of a page that batches wrote whole since, no byte of the image is read any more.
        let mut trails = Trails::default();
        let state = trails.follow(survey, source, base, None)?;
        damaged_pages.retain(|(page, _)| !trails.hides_image(source, &state.resolved, *page));
    }
    Ok(Attempt { state, blocked_by, damaged_pages })
}

/// Judges a store whose files were looked at.
#[must_use]
pub fn judge(survey: &Survey, source: &dyn ReadAt, images: &mut ImageProofs<'_>) -> Verdict {
    let mut verdict =
        Verdict { starts: Vec::new(), opens_from: None, state: None, lost: Vec::new(), lost_beginning: None };
    // The entries of the log's last seal, and where it is known.
    let mut record: Option<Vec<VerifiedSnapshot>> = None;
    let mut blocking = Blocking::new();
    for (snapshot, candidate) in survey.named_candidates() {
        let mut start = Start {
            snapshot,
            role: Role::Link,
            blocked_by: Vec::new(),
            damaged_pages: Vec::new(),
            lost_by: Vec::new(),
            gaps: Vec::new(),
        };
        if verdict.opens_from.is_none() {
            let attempted = candidate.and_then(|base| match base {
                Some(base) if is_blocked(&base, &blocking) => Ok(Err(base)),
                base => attempt(survey, source, base.as_ref(), images).map(Ok),
            });
            match attempted {
                Ok(Ok(Attempt { state, blocked_by, damaged_pages })) => {
                    if !blocked_by.is_empty() {
                        note_blocking(&state, images, &mut blocking);
                    }
                    record.get_or_insert_with(|| recorded(&state).to_vec());
                    (start.blocked_by, start.damaged_pages) = (blocked_by, damaged_pages);
                    if start.blocked_by.is_empty() {
                        (verdict.opens_from, verdict.state) = (Some(verdict.starts.len()), Some(state));
                    }
                }
                Ok(Err(blocked)) => {
                    let reach = Reach::of(survey, record.as_deref().unwrap_or_default());
                    start.blocked_by.extend(reach.check_start(Some(&blocked)).err());
                    // An open may leave the images of pages on disk unread.
                    let read = blocked
                        .entries
                        .iter()
                        .filter(|entry| entry.place != Place::Disk || is_blocking(entry.image, &blocking));
                    let damaged = read.filter_map(|entry| images.check(entry.lsn, entry.image, entry.len));
                    start.blocked_by.extend(damaged);
                }
                Err(damage) => start.blocked_by.push(damage),
            }
        }
        verdict.starts.push(start);
    }
    let is_end_known = record.is_some();
    let record = record.unwrap_or_default();
    let reach = Reach::of(survey, &record);
    verdict.lost = Record(&record).lost(survey);
    verdict.lost_beginning = lost_beginning(survey, &record).filter(|_| is_end_known);
    // The newest state before the start that was looked at last.
    let mut until = None;
    for start in &mut verdict.starts {
        start.role = start.snapshot.map_or_else(|| role_of_beginning(&reach), |id| reach.role(id));
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
            start.lost_by = own.map_or_else(|damage| vec![damage], |state| damaged_images(&state, images));
        }
        if start.role == Role::Start && is_end_known {
            start.gaps = gaps(survey, source, base.as_ref(), until, images);
            until = base.map(|base| Lsn(base.end.0.saturating_sub(1)));
        }
    }
    // A snapshot that stands for its end only gives that state, whatever became of the log before it.
    let stands = |start: &Start| start.role != Role::Link && start.lost_by.is_empty();
    let standing = verdict.starts.iter().filter(|start| stands(start)).filter_map(|start| start.snapshot);
    let ends: BTreeSet<Lsn> =
        standing.filter_map(|id| Some(survey.links.get(&id)?.as_ref().ok()?.0.end)).collect();
    for gap in verdict.starts.iter_mut().flat_map(|start| &mut start.gaps) {
        while gap.first < gap.last && ends.contains(&gap.first) {
            gap.first = gap.first.next();
        }
    }
    // A start that the floor leaves out is promised by no seal, whether or not it is still there.
    if verdict.state.is_some() && !reach.is_start(None) {
        verdict.starts.retain(|start| start.snapshot.is_some());
    }
    verdict
}

/// Whether a snapshot names an image for which a newer one that names it, too, could not be started from. In
/// between no batch can have given the page another image, so the state at the log's end is made from it here
/// as well, and the log need not be followed once more.
fn is_blocked(base: &Manifest, blocking: &Blocking) -> bool {
    !blocking.is_empty() && base.entries.iter().any(|entry| is_blocking(entry.image, blocking))
}

fn is_blocking(image: Option<ImageRef>, blocking: &Blocking) -> bool {
    image.is_some_and(|image| blocking.get(&(image.file, image.offset)) == Some(&image))
}

/// Notes the damaged images of a state, except for those of pages on disk: another snapshot that names one of
/// these may be verified.
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

/// The entries of the last seal on the way to a state at the log's end.
fn recorded(state: &Resolution) -> &[VerifiedSnapshot] {
    state.end.as_ref().map(|end| &end.verified[..]).unwrap_or_default()
}

/// Damage to the images that a state is made from, each with its page.
fn images_of(state: &Resolution, images: &mut ImageProofs<'_>) -> Vec<(PageId, Damage)> {
    let bases = state.resolved.bases.iter();
    bases.filter_map(|(page, base)| Some((page, images.check(base.lsn, base.image, base.len)?))).collect()
}

/// The same without the pages.
fn damaged_images(state: &Resolution, images: &mut ImageProofs<'_>) -> Vec<Damage> {
    images_of(state, images).into_iter().map(|(_, damage)| damage).collect()
}

/// Whether an open leaves the image of a page unread: in the state that it reaches, the page stays on disk,
/// and the snapshot from which it starts names the image and is recorded as verified (SPEC R4).
#[must_use]
pub fn stays_unread(page: PageId, state: &Resolution, verified: Option<&Manifest>) -> bool {
    let Some(verified) = verified else { return false };
    let is_on_disk = state.resolved.table.get(page).is_some_and(|info| info.place == Place::Disk);
    let image = state.resolved.bases.get(page).and_then(|base| base.image);
    let named = verified.entries.binary_search_by_key(&page, |entry| entry.page).ok();
    is_on_disk && named.is_some_and(|at| verified.entries[at].image == image)
}
