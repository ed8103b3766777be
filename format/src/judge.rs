//! The verdict on a store: where recovery starts, what blocks it elsewhere, which snapshots stand for
//! themselves, and which snapshots are lost that should be there.
//!
//! Recovery, views of earlier states and inspectors ask here, so that all of them say the same of a store.
//! Recovery stops at the first candidate that holds. [`judge`] looks at all candidates, in the same order and
//! by the same rules.
//!
//! The uses of a snapshot:
//!
//! | it | means | asked by |
//! |---|---|---|
//! | is a *start* | its chain, the log after it, and all images that an open reads hold | [`Start::blocked_by`] |
//! | *stands* | its own state can be computed, with the log up to its end | [`Start::lost_by`] |
//! | is *recorded* | the newest seal names it, so no crash can have taken it away | [`Record::names`] |
//! | is a *link alone* | a newer one is recorded, and it is not | [`Record::is_link_alone`] |
//!
//! An open reads the images of all pages but some of those in [`Place::Disk`]: an image that a verified
//! snapshot names for such a page was read back when the snapshot was. Damage to one concerns that page alone
//! ([`Start::damaged_pages`]). An open that loads pages on demand leaves more of them for later, and one in
//! less memory takes pages to disk; the verdict is that of an open that does neither.

use std::collections::BTreeMap;

use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::{Lsn, PageId, Place, SnapshotId};
use crate::image::ImageRef;
use crate::image::read::check_image;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::state::follow::Resolution;
use crate::state::reach::Reach;
use crate::state::survey::Survey;

/// The snapshots that the newest seal of the log names.
#[derive(Clone, Copy, Debug)]
pub struct Record<'r>(pub &'r [VerifiedSnapshot]);

impl Record<'_> {
    /// Whether it names a snapshot.
    #[must_use]
    pub fn names(self, snapshot: SnapshotId) -> bool {
        self.0.iter().any(|entry| entry.snapshot == snapshot)
    }

    /// Whether a link is there only for snapshots that follow it. A snapshot that is newer than all named
    /// ones waits for its seal.
    #[must_use]
    pub fn is_link_alone(self, snapshot: SnapshotId) -> bool {
        !self.names(snapshot) && self.0.iter().any(|entry| entry.snapshot > snapshot)
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
    /// Whether it is a link alone: nothing promises that it can be started from.
    pub is_link_alone: bool,
    /// Whether it was caught at one moment: then it stands without the log after it.
    pub is_exact: bool,
    /// The damage that keeps recovery from starting here.
    pub blocked_by: Vec<Damage>,
    /// Damage to images of pages on disk that an open from here does not read. It keeps no open from
    /// starting: reads of these pages fail until a batch writes them whole or deletes them.
    pub damaged_pages: Vec<(PageId, Damage)>,
    /// The damage that keeps the store from going back to just this state. It is not asked of a link alone.
    pub lost_by: Vec<Damage>,
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
}

impl Verdict {
    /// The candidate that recovery starts from.
    #[must_use]
    pub fn start(&self) -> Option<&Start> {
        self.opens_from.map(|index| &self.starts[index])
    }
}

/// Proofs of images: each image is read once, and its defect is remembered.
pub struct ImageProofs<'s> {
    source: &'s dyn ReadAt,
    read: BTreeMap<(u64, u64, u64, u32), Option<Defect>>,
    bytes: u64,
}

impl<'s> ImageProofs<'s> {
    /// None is read yet.
    #[must_use]
    pub fn new(source: &'s dyn ReadAt) -> Self {
        Self { source, read: BTreeMap::new(), bytes: 0 }
    }

    /// Damage to the image of a page of length `len`.
    pub fn check(&mut self, lsn: Lsn, image: Option<ImageRef>, len: u64) -> Option<Damage> {
        let image = image?;
        let name = (image.file, image.offset, image.stored_len, image.stored_crc);
        let defect = match self.read.get(&name) {
            Some(known) => known.clone(),
            None => {
                self.bytes = self.bytes.saturating_add(image.stored_len);
                let defect = check_image(self.source, &image, len).err().map(|damage| damage.defect);
                self.read.insert(name, defect.clone());
                defect
            }
        };
        defect.map(|defect| defect.at_lsn(FileName::Pages(image.file), image.offset, lsn))
    }

    /// Forgets images that did not hold: while a writer is at work, they may have been about to be deleted.
    pub fn forget_damaged(&mut self) {
        self.read.retain(|_, defect| defect.is_none());
    }

    /// How many images were read.
    #[must_use]
    pub fn count(&self) -> usize {
        self.read.len()
    }

    /// The bytes that they take on disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The numbers of the files that they lie in, ascending.
    pub fn files(&self) -> impl Iterator<Item = u64> {
        let mut files: Vec<u64> = self.read.keys().map(|(file, ..)| *file).collect();
        files.dedup();
        files.into_iter()
    }
}

/// Judges a store whose files were looked at.
#[must_use]
pub fn judge(survey: &Survey, source: &dyn ReadAt, images: &mut ImageProofs<'_>) -> Verdict {
    let mut verdict = Verdict { starts: Vec::new(), opens_from: None, state: None, lost: Vec::new() };
    for (snapshot, candidate) in survey.named_candidates() {
        let mut start = Start {
            snapshot,
            is_link_alone: false,
            is_exact: false,
            blocked_by: Vec::new(),
            damaged_pages: Vec::new(),
            lost_by: Vec::new(),
        };
        match &candidate {
            Ok(base) => match survey.resolve(source, base.as_ref(), None) {
                Ok(state) => {
                    let record = state.end.as_ref().map(|end| &end.verified[..]).unwrap_or_default();
                    start.blocked_by.extend(Reach::of(survey, record).check_start(base.as_deref()).err());
                    let is_verified = snapshot.is_some_and(|id| Record(record).has_verified(survey, id));
                    let verified = base.as_deref().filter(|_| is_verified);
                    for (page, damage) in images_of(&state, images) {
                        match stays_unread(page, &state, verified) {
                            true => start.damaged_pages.push((page, damage)),
                            false => start.blocked_by.push(damage),
                        }
                    }
                    if start.blocked_by.is_empty() && verdict.opens_from.is_none() {
                        (verdict.opens_from, verdict.state) = (Some(verdict.starts.len()), Some(state));
                    }
                }
                Err(damage) => start.blocked_by.push(damage),
            },
            Err(damage) => start.blocked_by.push(damage.clone()),
        }
        start.is_exact = matches!(&candidate, Ok(Some(base)) if base.redo.lsn == base.end);
        verdict.starts.push(start);
    }
    let end = verdict.state.as_ref().and_then(|state| state.end.as_ref());
    let record = Record(end.map(|end| &end.verified[..]).unwrap_or_default());
    verdict.lost = record.lost(survey);
    // A start that the floor leaves out is promised by no seal, whether or not it is still there.
    if end.is_some_and(|end| !Reach::of(survey, &end.verified).is_start(None)) {
        verdict.starts.retain(|start| start.snapshot.is_some());
    }
    for start in &mut verdict.starts {
        let Some(snapshot) = start.snapshot else { continue };
        start.is_link_alone = record.is_link_alone(snapshot);
        if !start.is_link_alone {
            start.lost_by = survey
                .own_state(source, snapshot)
                .map_or_else(|damage| vec![damage], |state| damaged_images(&state, images));
        }
    }
    verdict
}

impl Survey {
    /// The state that a snapshot stands for.
    fn own_state(&self, source: &dyn ReadAt, snapshot: SnapshotId) -> Result<Resolution, Damage> {
        let base = self.snapshot(snapshot)?;
        self.resolve(source, Some(&base), Some(base.end))
    }
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

/// Whether an open leaves the image of a page unread: the page stays on disk, and the snapshot from which the
/// open starts names the image and is recorded as verified (SPEC R4).
fn stays_unread(page: PageId, state: &Resolution, verified: Option<&Manifest>) -> bool {
    let Some(verified) = verified else { return false };
    let is_on_disk = state.resolved.table.get(page).is_some_and(|info| info.place == Place::Disk);
    let image = state.resolved.bases.get(page).and_then(|base| base.image);
    let named = verified.entries.binary_search_by_key(&page, |entry| entry.page).ok();
    is_on_disk && named.is_some_and(|at| verified.entries[at].image == image)
}

impl std::fmt::Debug for ImageProofs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageProofs").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
