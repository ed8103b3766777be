//! Finds the newest snapshot that can be loaded, and the log after it.
//!
//! This module writes nothing to disk, so a crash loses nothing.

use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::state::follow::Resolution;
use remanent_format::state::follow::StateWalk;
use remanent_format::state::reach::Reach;
use remanent_format::state::survey::Survey;
use remanent_format::{Damage, Defect, FileName, Lsn, PageTable, Place};

use super::catalog::CatalogDraft;
use super::load::load;
use super::loaded_pages::LoadedPages;
use super::log_reader::{BatchRun, Frames, RunStep};
use super::{Recovery, survey};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::options::PageLoad;

/// The newest snapshot that could be loaded, with the damage that excluded newer snapshots.
pub(super) struct BestCandidate<'s, 'a> {
    pub resolution: Resolution,
    pub loaded: LoadedPages<'a>,
    pub draft: CatalogDraft<'s>,
    /// The damage to the newer snapshots that were skipped.
    pub harmless: Vec<Damage>,
}

/// The damaged images that prevented newer snapshots from being loaded. An older snapshot that refers to one of these
/// images is skipped without an attempt to load it. No batch between the two snapshots can have replaced the image, or
/// the newer snapshot would not refer to it.
#[derive(Default)]
struct BlockingImages(Vec<(ImageRef, Damage)>);

impl BlockingImages {
    /// Records the damaged image that made loading the snapshot `base` fail. Images of pages on disk are not recorded,
    /// because an open reads them only if the snapshot is not verified.
    fn note(&mut self, base: &Manifest, table: &PageTable, damage: &Damage) {
        let lies_there = |entry: &&ManifestEntry| {
            let image = entry.image.filter(|image| FileName::Pages(image.file) == damage.file);
            let is_on_disk = || table.get(entry.page).is_none_or(|info| info.place == Place::Disk);
            image.is_some_and(|image| image.offset == damage.offset) && !is_on_disk()
        };
        let found = base.entries.iter().find(lies_there).and_then(|entry| entry.image);
        self.0.extend(found.map(|image| (image, damage.clone())));
    }

    /// Returns the damage to a recorded image that the snapshot `base` names, or `None` if it names no recorded image.
    fn damage_to(&self, base: &Manifest) -> Option<&Damage> {
        let is_named = |image: &ImageRef| base.entries.iter().any(|entry| entry.image == Some(*image));
        self.0.iter().find(|(image, _)| is_named(image)).map(|(_, damage)| damage)
    }
}

impl Recovery<'_> {
    /// Tries to load the snapshots from newest to oldest, then the state from the beginning of the log. If no state can
    /// be loaded, returns the damage of the newest snapshot.
    ///
    /// Skipping a snapshot costs only time, because an older snapshot and more log produce the same pages. A snapshot
    /// is skipped only if it is damaged. If it were skipped because of a shortage of resources, the new incarnation
    /// would not record the skipped snapshots as verified.
    pub(super) fn load_best<'s>(
        &self,
        source: &DiskSource,
        survey: &'s Survey,
    ) -> Result<BestCandidate<'s, '_>> {
        let mut skipped: Vec<Damage> = Vec::new();
        let mut blocking = BlockingImages::default();
        for candidate in survey.candidates() {
            let loaded = candidate.map_err(Error::from).and_then(|base| {
                if let Some(damage) = base.as_ref().and_then(|base| blocking.damage_to(base)) {
                    return Err(damage.clone().into());
                }
                let mut resolution = self.resolve(source, survey, base.as_ref())?;
                let end = resolution.end.as_ref().expect("followed to its end");
                // The floor, below which segments and images may have been removed, is known only now that the end of
                // the log was read.
                Reach::of(survey, &end.verified).check_start(base.as_deref())?;
                let loaded = load(self, source, survey, base.as_deref(), &mut resolution);
                if let (Err(Error::Damaged(damage)), Some(base)) = (&loaded, &base)
                    && self.options.memory.load == PageLoad::Eager
                    && self.options.tiers.is_none()
                {
                    blocking.note(base, &resolution.resolved.table, &damage.damage);
                }
                let (loaded, draft) = loaded?;
                Ok(BestCandidate { resolution, loaded, draft, harmless: Vec::new() })
            });
            match loaded {
                Ok(best) => return Ok(BestCandidate { harmless: skipped, ..best }),
                // A part that cannot be fetched does not make a snapshot unusable.
                Err(Error::Damaged(damage))
                    if damage.damage.defect.is_unreadable() && !self.disk.unfetched_files().is_empty() =>
                {
                    return Err(Error::Damaged(damage));
                }
                Err(Error::Damaged(damage)) => {
                    tracing::warn!(%damage, "a snapshot cannot be used");
                    skipped.push(damage.damage);
                }
                Err(error) => return Err(error),
            }
        }
        let nothing = Defect::Missing.at_lsn(FileName::Segment(1), SEGMENT_HEADER_BLOCK, Lsn(1));
        Err(skipped.into_iter().next().unwrap_or(nothing).into())
    }

    /// Reads the log from a snapshot to its end, like the single-threaded [`Survey::resolve`]. Other threads read,
    /// verify and decode frames while this thread resolves them.
    pub(super) fn resolve(
        &self,
        source: &DiskSource,
        survey: &Survey,
        base: Option<&Arc<Manifest>>,
    ) -> Result<Resolution> {
        let mut following = StateWalk::new_by(survey, source, base, &survey::EntryThreads)?;
        let with_steps = |run: BatchRun| (run.steps(), run);
        let frames = self.frames(source, survey);
        let stopped = frames.read(following.start(), None, with_steps, |(steps, run)| {
            for step in steps {
                let batches = match step {
                    RunStep::Changes(_, changes) if following.page_changes(&changes) => continue,
                    RunStep::Changes(batches, _) => batches,
                    RunStep::Batch(batch) => batch..batch + 1,
                };
                for batch in &run.batches[batches] {
                    following.batch(&batch.header, run.payload(batch))?;
                }
            }
            self.staging.put(run.memory.into_staging());
            Ok(())
        })?;
        Ok(following.finish(stopped.end, stopped.point)?)
    }

    /// Returns a reader of the log's frames from `source`. A log that ends below the durable mark in the manifests has
    /// lost durable batches, and the reader reports it as damaged instead of torn (I4).
    pub(super) fn frames<'s>(&'s self, source: &'s DiskSource, survey: &'s Survey) -> Frames<'s> {
        let window_len = self.options.log.replay_window_len;
        Frames { source, map: &survey.log, mark: survey.mark(), staging: self.staging, window_len }
    }
}
