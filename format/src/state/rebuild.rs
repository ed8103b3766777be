//! The state of a store directory, computed purely over [`ReadAt`]: no device, no mapping, no
//! write. Inspectors and read-only opens use it, and the engine's recovery is tested against it.
//!
//! [`rebuild`] tries the snapshots from the newest to the oldest, then the log's beginning, and loads bytes.
//! It starts nowhere below the floor that the log's last seal records: segments may be there when the images
//! of their batches are gone ([`super::reach`]).

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

/// The options of a rebuild.
#[derive(Clone, Copy, Debug)]
pub struct RebuildOptions {
    /// Start from this snapshot and no other.
    pub base: Option<SnapshotId>,
    /// Stop after this batch; the base must not have later ones.
    pub until: Option<Lsn>,
    /// Refuse a state whose pages take more memory than this together, in bytes. A length on disk may be any
    /// up to [`crate::limits::PAGE_LEN_MAX`], and zeros take no space there. A caller that reads a stranger's
    /// files sets this.
    pub page_bytes_max: u64,
}

impl Default for RebuildOptions {
    fn default() -> Self {
        Self { base: None, until: None, page_bytes_max: u64::MAX }
    }
}

/// A state with its bytes.
#[derive(Debug)]
pub struct RebuiltStore {
    /// How it came about.
    pub base: Option<SnapshotId>,
    /// Pages and root.
    pub table: PageTable,
    /// The pages' bytes.
    pub contents: BTreeMap<PageId, Vec<u8>>,
    /// The end of the log; `None` if the rebuild stopped before, at the batch asked for.
    pub end: Option<LogEnd>,
    /// Batches replayed after the base.
    pub batches: u64,
    /// Snapshots that could not be used, newest first; time was lost, not data.
    pub passed_over: Vec<Damage>,
}

/// Computes the state of a store directory.
///
/// # Errors
/// The first [`Damage`] that no snapshot gets around. A start that the floor leaves out counts as one whose
/// log is missing.
pub fn rebuild(source: &dyn ReadAt, options: &RebuildOptions) -> Result<RebuiltStore, Damage> {
    let survey = Survey::read(source)?;
    let mut passed_over = Vec::new();
    let wanted = |snapshot: &SnapshotId| match &survey.links[snapshot] {
        Ok((manifest, _)) => {
            options.base.is_none_or(|base| base == *snapshot)
                && options.until.is_none_or(|until| manifest.end <= until)
        }
        // It may be the one: then its damage is the answer.
        Err(_) => true,
    };
    let snapshots = survey.links.keys().rev().copied().filter(wanted);
    let candidates = snapshots.map(|snapshot| survey.snapshot(snapshot).map(Some));
    let beginning = survey.beginning().filter(|read| options.base.is_none() || read.is_err());
    let promise = Promise::new(&survey, source);
    for candidate in candidates.chain(beginning) {
        let attempt = candidate.and_then(|manifest| rebuild_from(&promise, manifest.as_ref(), options));
        match attempt {
            Ok(rebuilt) => return Ok(RebuiltStore { passed_over, ..rebuilt }),
            Err(damage) => passed_over.push(damage),
        }
    }
    // The newest snapshot's complaint names the damage; an older one's is mostly that its log is gone.
    let nothing = || Defect::Missing.at_lsn(FileName::Segment(1), SEGMENT_HEADER_BLOCK, Lsn(1));
    let of_line = survey.log.break_of_line().cloned();
    Err(passed_over.into_iter().next().or(of_line).unwrap_or_else(nothing))
}

/// The promise of the log's last seal: from where replay may start.
struct Promise<'s> {
    survey: &'s Survey,
    source: &'s dyn ReadAt,
    /// Read when the first state before the log's end is asked for, by one more walk. `None` if no candidate
    /// leads to the end: then no seal is known, and every candidate is tried.
    at_the_end: OnceCell<Option<(Lsn, Reach)>>,
}

impl<'s> Promise<'s> {
    fn new(survey: &'s Survey, source: &'s dyn ReadAt) -> Self {
        Self { survey, source, at_the_end: OnceCell::new() }
    }

    /// Follows the log from a candidate to its end or to `until`, if the last seal lets replay start there.
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
    Ok(RebuiltStore { base, table: resolved.table, contents, end, batches, passed_over: Vec::new() })
}
