//! Builds the catalog that an open would build, for callers that only query it. The preview writes nothing, takes no
//! lock and loads no pages.
//!
//! The preview and an open use the same code to build the catalog and to plan the pruning. The preview does not read
//! images. If images of the newest snapshot are damaged, an open starts from an older snapshot, and keeps more files
//! than this preview reports.

use std::sync::Arc;

use remanent_format::state::follow::Resolution;
use remanent_format::state::reach::Reach;
use remanent_format::state::survey::Survey;
use remanent_format::{Damage, Defect, FileName, Folder, Lsn};

use super::catalog::CatalogDraft;
use super::survey;
use crate::catalog::{Catalog, ReplayImages};
use crate::disk::Disk;
use crate::disk::image_spares::ImageSpares;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPages;

/// The maximum number of attempts to read the files while a writer changes them.
const ATTEMPTS: usize = 16;

/// The catalog that an open would build, and the lowest number of the files that a writer may be creating.
pub(crate) struct OpenPreview {
    pub catalog: Catalog,
    /// The number of the segment that contains the end of the log.
    pub current_segment: u64,
    /// The lowest number of a file that may belong to a batch or snapshot in progress, or `None` if no writer is
    /// active. Files from this number on must be kept, although no record names them yet.
    pub under_way_from: Option<u64>,
}

/// A store that a caller has already surveyed, so that the log need not be read twice.
#[derive(Clone, Copy, Debug)]
pub struct SurveyedStore<'s> {
    /// The survey of all files.
    pub survey: &'s Survey,
    /// The newest state, which must have been followed to the end of the log.
    pub newest: &'s Resolution,
    /// Whether a writer had the store open. Must have been determined before the files were read.
    pub is_locked: bool,
}

impl OpenPreview {
    /// Reads the store's files, and retries if a writer changed them during the read.
    ///
    /// The lock is only queried (`F_OFD_GETLK`) and not taken, so a dry run delays neither readers nor writers.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Damaged`], or an I/O error.
    pub fn take(disk: &Arc<dyn Disk>) -> Result<Self> {
        if !disk.list(Folder::Root)?.iter().any(|name| *name == FileName::Store.name()) {
            return Err(Error::NoStore { path: disk.label(), found: None });
        }
        let mut attempt = 1;
        loop {
            match Self::take_once(disk) {
                // A file read while it is being written looks damaged. Without a writer the damage is real.
                Err(Error::Damaged(_)) if attempt < ATTEMPTS && disk.is_locked()? => attempt += 1,
                preview => return preview,
            }
        }
    }

    /// Reads the store's files once. Fails if a writer changes the files during the read.
    fn take_once(disk: &Arc<dyn Disk>) -> Result<Self> {
        // The lock is queried first: a writer that starts later removes unneeded files before it writes new ones.
        let is_locked = disk.is_locked()?;
        let source = DiskSource::new(disk.clone());
        let survey = survey::read(&source)?;
        let newest = best(&source, &survey)?;
        Self::of(disk, &SurveyedStore { survey: &survey, newest: &newest, is_locked })
    }

    /// Builds the preview of a store that was already read.
    ///
    /// # Errors
    /// [`Error::Damaged`], or an I/O error.
    pub fn of(disk: &Arc<dyn Disk>, store: &SurveyedStore<'_>) -> Result<Self> {
        let SurveyedStore { survey, newest: resolution, is_locked } = *store;
        let source = DiskSource::new(disk.clone());
        let end = resolution.end.as_ref().expect("followed to its end");
        let base = resolution.base.map(|base| survey.snapshot(base)).transpose()?;
        let images = ReplayImages::default();
        let draft = CatalogDraft::read(&**disk, &source, survey, base.as_deref(), resolution, images)?;
        // Files of batches in progress have numbers from `ahead_from` on, and those of a snapshot from `next_file` on.
        let newest = survey.readable().next_back();
        let numbers = newest.map_or(0, |link| link.next_file.min(link.ahead_from));
        let spares = Arc::new(ImageSpares::none(disk.clone(), survey.store.store));
        // No pages are read, so no budget is needed.
        let disk_pages = Arc::new(DiskPages::new(disk.clone(), u64::MAX));
        Ok(Self {
            current_segment: end.accepted.segment,
            under_way_from: is_locked.then_some(numbers),
            catalog: draft.into_catalog(disk, spares, disk_pages, survey, end.accepted.lsn),
        })
    }
}

/// Resolves the newest state that an open would find.
///
/// Damaged candidates are skipped, as in an open. If no candidate is left, returns the damage of the newest candidate.
fn best(source: &DiskSource, survey: &Survey) -> Result<Resolution, Damage> {
    let mut first = None;
    for candidate in survey.candidates() {
        match candidate.and_then(|base| Reach::follow(survey, source, base.as_ref())) {
            Ok(resolution) => return Ok(resolution),
            Err(damage) => _ = first.get_or_insert(damage),
        }
    }
    Err(first.unwrap_or_else(|| Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1))))
}
