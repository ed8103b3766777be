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
//! | is a *start* | its chain, the log after it, and all final images hold | [`Start::blocked_by`] |
//! | *stands* | its own state can be computed, with the log up to its end | [`Start::lost_by`] |
//! | is *recorded* | the newest seal names it, so no crash can have taken it away | [`Record::names`] |
//! | is a *link alone* | a newer one is recorded, and it is not | [`Record::is_link_alone`] |

use std::collections::BTreeMap;

use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::{Lsn, SnapshotId};
use crate::image::ImageRef;
use crate::image::read::check_image;
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
            lost_by: Vec::new(),
        };
        match &candidate {
            Ok(base) => match survey.resolve(source, base.as_ref(), None) {
                Ok(state) => {
                    let record = state.end.as_ref().map(|end| &end.verified[..]).unwrap_or_default();
                    start.blocked_by.extend(Reach::of(survey, record).check_start(base.as_deref()).err());
                    start.blocked_by.extend(images_of(&state, images));
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
                .map_or_else(|damage| vec![damage], |state| images_of(&state, images));
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

/// Damage to the images that a state is made from.
fn images_of(state: &Resolution, images: &mut ImageProofs<'_>) -> Vec<Damage> {
    let bases = state.resolved.bases.iter();
    bases.filter_map(|(_, base)| images.check(base.lsn, base.image, base.len)).collect()
}

impl std::fmt::Debug for ImageProofs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageProofs").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
