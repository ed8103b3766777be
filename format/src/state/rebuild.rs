//! Rebuilds the state of a store from [`ReadAt`] alone, without a device, memory mapping or writes. Inspectors and
//! read-only opens use this module, and tests compare the engine's recovery with its results.
//!
//! [`rebuild`] tries the snapshots from the newest to the oldest, then the beginning of the log, and reads the bytes of
//! all pages. It never starts below the floor, because the images of earlier batches may have been deleted
//! ([`super::reach`]).

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect};
use crate::ids::{Lsn, PageId, SnapshotId};
use crate::log::LogEnd;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::segment::SEGMENT_HEADER_BLOCK;
use crate::state::follow::Resolution;
use crate::state::reach::Reach;
use crate::state::survey::Survey;
use crate::state::table::PageTable;

/// Options of [`rebuild`]: which state to rebuild, and the limit of its size.
#[derive(Clone, Copy, Debug)]
pub struct RebuildOptions {
    /// The snapshot from which replay starts, or `None` to try all candidates.
    pub base: Option<SnapshotId>,
    /// The last batch to apply, or `None` for the end of the log. Snapshots that end later are not used.
    pub until: Option<Lsn>,
    /// Maximum total length of all pages in bytes. [`rebuild`] fails with [`Damage`] if the pages are longer. Set this
    /// limit for untrusted files, because a small file can state lengths up to [`crate::limits::PAGE_LEN_MAX`].
    pub page_bytes_max: u64,
}

impl Default for RebuildOptions {
    fn default() -> Self {
        Self { base: None, until: None, page_bytes_max: u64::MAX }
    }
}

/// A rebuilt state, including the bytes of its pages.
#[derive(Debug)]
pub struct RebuiltStore {
    /// The snapshot from which the state was computed, or `None` for the beginning of the log.
    pub base: Option<SnapshotId>,
    /// The descriptions of the pages, and the root.
    pub table: PageTable,
    /// The bytes of each page.
    pub contents: BTreeMap<PageId, Vec<u8>>,
    /// The end of the log, or `None` if [`RebuildOptions::until`] is before the end.
    pub end: Option<LogEnd>,
    /// Number of batches that were replayed after the base.
    pub batches: u64,
    /// Damage to candidates that could not be used, in the order in which [`rebuild`] tried them. No data was lost,
    /// because another candidate produced the state.
    pub skipped: Vec<Damage>,
}

/// Rebuilds the state of a store, with the bytes of all pages.
///
/// # Errors
/// Returns the [`Damage`] of the first candidate if none can be used. For a candidate below the floor, the damage
/// reports the log after the candidate as missing.
pub fn rebuild(source: &dyn ReadAt, options: &RebuildOptions) -> Result<RebuiltStore, Damage> {
    let survey = Survey::read(source)?;
    let mut skipped = Vec::new();
    let wanted = |snapshot: &SnapshotId| match &survey.links[snapshot] {
        Ok((manifest, _)) => {
            options.base.is_none_or(|base| base == *snapshot)
                && options.until.is_none_or(|until| manifest.end <= until)
        }
        // The unreadable manifest may be the requested one. If so, its damage is returned.
        Err(_) => true,
    };
    let snapshots = survey.links.keys().rev().copied().filter(wanted);
    let candidates = snapshots.map(|snapshot| survey.snapshot(snapshot).map(Some));
    let beginning = survey.beginning().filter(|read| options.base.is_none() || read.is_err());
    let promise = Promise::new(&survey, source);
    for candidate in candidates.chain(beginning) {
        let attempt = candidate.and_then(|manifest| rebuild_from(&promise, manifest.as_ref(), options));
        match attempt {
            Ok(rebuilt) => return Ok(RebuiltStore { skipped, ..rebuilt }),
            Err(damage) => skipped.push(damage),
        }
    }
    // Report the damage to the newest candidate, because the log after older candidates has usually been deleted.
    let nothing = || Defect::Missing.at_lsn(FileName::Segment(1), SEGMENT_HEADER_BLOCK, Lsn(1));
    let of_line = survey.log.chain_break().cloned();
    Err(skipped.into_iter().next().or(of_line).unwrap_or_else(nothing))
}

/// Computes states, but only from candidates that the last seal of the log permits.
struct Promise<'s> {
    survey: &'s Survey,
    source: &'s dyn ReadAt,
    /// Newest Lsn, and the reach of the store. Computed when a state before the end is first requested. The inner value
    /// is `None` if the log cannot be read to its end, so that no seal is known and every candidate is tried.
    at_the_end: OnceCell<Option<(Lsn, Reach)>>,
}

impl<'s> Promise<'s> {
    fn new(survey: &'s Survey, source: &'s dyn ReadAt) -> Self {
        Self { survey, source, at_the_end: OnceCell::new() }
    }

    /// Computes the state after batch `until`, or at the end of the log, from a candidate. Returns an error if the last
    /// seal does not permit a start from this candidate.
    fn follow(&self, base: Option<&Arc<Manifest>>, until: Option<Lsn>) -> Result<Resolution, Damage> {
        let Some(until) = until else { return Reach::follow(self.survey, self.source, base) };
        let at_the_end = self.at_the_end.get_or_init(|| Reach::at_the_end(self.survey, self.source));
        if let Some((_, reach)) = at_the_end {
            reach.check_state(base.map(AsRef::as_ref), until)?;
        }
        self.survey.resolve(self.source, base, Some(until))
    }
}

fn rebuild_from(
    promise: &Promise<'_>,
    base: Option<&Arc<Manifest>>,
    options: &RebuildOptions,
) -> Result<RebuiltStore, Damage> {
    let Promise { survey, source, .. } = *promise;
    let resolution = promise.follow(base, options.until)?;
    let contents = survey
        .load(source, &resolution, options.page_bytes_max)?
        .into_iter()
        .map(|(page, content)| Ok((page, content?)))
        .collect::<Result<_, Damage>>()?;
    let Resolution { base, resolved, end, batches, .. } = resolution;
    Ok(RebuiltStore { base, table: resolved.table, contents, end, batches, skipped: Vec::new() })
}
