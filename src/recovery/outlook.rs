//! The catalog that an open would make of a store, for callers that only want to know. Nothing is
//! written, no lock is taken, no page is loaded.
//!
//! The rules are those of an open: it puts together the same catalog, and the code that prunes judges it.
//! Images are not read. Where those of the newest snapshot turn out damaged, an open begins from an older
//! one, and keeps more than is said here.

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

/// How often the files are looked at anew if a writer changes them meanwhile.
const ATTEMPTS: usize = 16;

/// The catalog that an open would make, and the files that a writer may be about to name.
pub(crate) struct Outlook {
    pub catalog: Catalog,
    /// The segment in which the log ends.
    pub current_segment: u64,
    /// From this number on, files may be those of a batch or a snapshot that a writer has under way:
    /// nothing on disk names them yet, and they are not unneeded. `None` if there is no writer.
    pub under_way_from: Option<u64>,
}

impl Outlook {
    /// Looks at the store's files, again if a writer was in the way.
    ///
    /// The lock is looked at (`F_OFD_GETLK`), not taken: a dry run keeps no reader and no writer waiting.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Damaged`]; what the system says.
    pub fn take(disk: &Arc<dyn Disk>) -> Result<Self> {
        if !disk.list(Folder::Root)?.iter().any(|name| *name == FileName::Store.name()) {
            return Err(Error::NoStore { path: disk.label() });
        }
        let mut attempt = 1;
        loop {
            match Self::take_once(disk) {
                // A file that is written to while it is read looks damaged. Without a writer it is.
                Err(Error::Damaged(_)) if attempt < ATTEMPTS && disk.is_locked()? => attempt += 1,
                outlook => return outlook,
            }
        }
    }

    /// One look, which a writer may spoil.
    fn take_once(disk: &Arc<dyn Disk>) -> Result<Self> {
        // Asked first: a writer that begins later removes what nothing needs before it writes anything new.
        let is_locked = disk.is_locked()?;
        let source = DiskSource::new(disk.clone());
        let survey = survey::read(&source)?;
        let resolution = best(&source, &survey)?;
        let end = resolution.end.as_ref().expect("followed to its end");
        let base = resolution.base.map(|base| survey.snapshot(base)).transpose()?;
        let draft = CatalogDraft::look(
            &**disk,
            &source,
            &survey,
            base.as_deref(),
            &resolution,
            ReplayImages::default(),
        )?;
        // Files of batches that are under way have numbers from `ahead_from` on; those of a snapshot,
        // from `next_file` on.
        let newest = survey.readable().next_back();
        let numbers = newest.map_or(0, |link| link.next_file.min(link.ahead_from));
        let spares = Arc::new(ImageSpares::none(disk.clone(), survey.store.store));
        // No page is read by this process.
        let disk_pages = Arc::new(DiskPages::new(disk.clone(), u64::MAX));
        Ok(Self {
            current_segment: end.accepted.segment,
            under_way_from: is_locked.then_some(numbers),
            catalog: draft.into_catalog(disk, spares, disk_pages, &survey, end.accepted.lsn),
        })
    }
}

/// The newest state that the log leads to, as an open would find it.
///
/// A candidate that is damaged is passed over, as in an open. If there is no other, the damage of the
/// newest one is the answer.
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
