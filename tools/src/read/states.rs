//! The kept states of a store. This module resolves the argument of `--at`, and computes states.
//!
//! The state after a batch is computed from the newest snapshot that ends at or before the batch, and from the log up
//! to the batch. If an image of that snapshot is damaged, the same state is computed from an older snapshot.

use std::cell::OnceCell;

use remanent::error::{NoSuchState, nearest};
use remanent::{Error, StatePoint};
use remanent_format::state::follow::Resolution;
use remanent_format::state::reach::Reach;
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::OpLocations;
use remanent_format::{Damage, Defect, FileName, Lsn, PageInfo, PageTable, SnapshotId};

use crate::cli::exit::Failure;
use crate::read::page_bytes::PageBytes;
use crate::read::stable;
use crate::read::store_dir::StoreDir;

/// A store directory whose kept states can be computed.
pub struct KeptStates<'d> {
    dir: &'d StoreDir,
    /// The survey of all files.
    pub survey: Survey,
}

impl<'d> KeptStates<'d> {
    /// Calls `read_states` with the kept states of a directory. If the call finds damage and a process may be writing,
    /// the call is repeated.
    pub fn with_retry<T>(
        dir: &'d StoreDir,
        mut read_states: impl FnMut(&KeptStates<'d>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let read_once = |_: Option<&[String]>| match Self::open(dir).and_then(|past| read_states(&past)) {
            Err(Failure::Damage(damage)) => Ok(Err(damage)),
            done => done.map(Ok),
        };
        let (result, _) = stable::read_until_stable(dir, read_once, |result| {
            result.as_ref().err().cloned().into_iter().collect()
        })?;
        result.map_err(Failure::Damage)
    }

    fn open(dir: &'d StoreDir) -> Result<Self, Failure> {
        let survey = Survey::read(dir).map_err(|damage| match damage.defect {
            Defect::Missing if damage.file == FileName::Store => dir.no_store(),
            _ => damaged(damage),
        })?;
        Ok(Self { dir, survey })
    }

    /// Returns the directory of the store.
    pub fn dir(&self) -> &'d StoreDir {
        self.dir
    }

    /// Returns the Lsn of the state that `at` names, or `None` for the newest state.
    pub fn lsn(&self, at: Option<&StatePoint>) -> Result<Option<Lsn>, Failure> {
        match at {
            None => Ok(None),
            Some(StatePoint::Lsn(lsn)) => Ok(Some(*lsn)),
            Some(StatePoint::Snapshot(snapshot)) if self.survey.links.contains_key(snapshot) => {
                self.survey.snapshot(*snapshot).map(|manifest| Some(manifest.end)).map_err(damaged)
            }
            Some(StatePoint::Snapshot(snapshot)) => {
                Err(refused(&Error::NoSuchState(NoSuchState::Snapshot { snapshot: *snapshot })))
            }
            Some(StatePoint::Name(name)) => {
                let names = || self.survey.readable().filter_map(|manifest| manifest.name.as_deref());
                let mut named = self.survey.readable().rev();
                let named = named.find(|manifest| manifest.name.as_deref() == Some(name));
                let none = || refused(&no_snapshot_named(name, names()));
                named.map(|manifest| Some(manifest.end)).ok_or_else(none)
            }
            Some(other) => Err(Failure::Environment(format!("unsupported state {other}"))),
        }
    }

    /// Returns the pages and the root after batch `until`, without the bytes of the pages.
    pub fn table(&self, until: Option<Lsn>) -> Result<PageTable, Failure> {
        self.first_success(until, |resolution, _| Ok(resolution.resolved.table))
    }

    /// Proves the bytes of the pages that `wanted` selects, in the state after batch `until`.
    pub fn bytes(
        &self,
        until: Option<Lsn>,
        page_bytes_max: u64,
        wanted: impl Fn(&PageInfo) -> bool,
    ) -> Result<PageBytes<'d>, Failure> {
        self.first_success(until, |resolution, op_locations| {
            PageBytes::prove(self.dir, resolution, op_locations, page_bytes_max, &wanted)?.whole()
        })
    }

    /// Computes the state after batch `until`. Tries the candidates in order, and returns the first result for which
    /// `finish` succeeds.
    fn first_success<T>(
        &self,
        until: Option<Lsn>,
        finish: impl Fn(Resolution, OpLocations) -> Result<T, Damage>,
    ) -> Result<T, Failure> {
        // A state below the floor is not kept, even if its files still exist.
        let kept = OnceCell::new();
        let kept = || kept.get_or_init(|| Reach::at_the_end(&self.survey, self.dir)).as_ref();
        let newest = self.survey.readable().next_back().map(|link| link.snapshot);
        // The newest snapshot is always a start, and usually no other is needed.
        let is_newest = |snapshot: Option<SnapshotId>| snapshot.is_some() && snapshot == newest;
        let leads_to =
            |snapshot| is_newest(snapshot) || kept().is_none_or(|(_, reach)| reach.leads_to(snapshot, until));
        let mut first_damage = None;
        for (snapshot, candidate) in self.survey.named_candidates() {
            let mut op_locations = OpLocations::default();
            let attempt = match candidate {
                Err(damage) => Err(damage),
                Ok(base) => {
                    let end = base.as_ref().map_or(Lsn(0), |manifest| manifest.end);
                    if until.is_some_and(|until| end > until) || !leads_to(snapshot) {
                        continue;
                    }
                    op_locations.follow(&self.survey, self.dir, base.as_ref(), until)
                }
            };
            let reached = |resolution: &Resolution| resolution.resolved.table.lsn();
            match attempt {
                Ok(resolution) if until.is_some_and(|until| reached(&resolution) < until) => {
                    let last = reached(&resolution);
                    return Err(Failure::Environment(format!(
                        "the batch does not exist; the last batch is lsn {last}"
                    )));
                }
                Ok(resolution) => match finish(resolution, op_locations) {
                    Ok(done) => return Ok(done),
                    Err(damage) => first_damage.get_or_insert(damage),
                },
                Err(damage) => first_damage.get_or_insert(damage),
            };
        }
        Err(match (first_damage, until, kept()) {
            // Use the error message of the engine.
            (_, Some(requested), Some((newest, reach)))
                if reach.opens_at().is_some_and(|oldest| requested < oldest) =>
            {
                let (oldest, below) = (reach.opens_at().unwrap_or_default(), reach.below());
                Failure::Environment(
                    Error::NoSuchState(NoSuchState::OutsideWindow {
                        requested,
                        oldest,
                        newest: *newest,
                        below,
                    })
                    .to_string(),
                )
            }
            (Some(damage), ..) => damaged(damage),
            _ => damaged(Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1))),
        })
    }
}

/// Returns the error for a snapshot name that does not exist. The error suggests the most similar name in `known`.
pub fn no_snapshot_named<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Error {
    Error::NoSuchState(NoSuchState::Name {
        name: name.to_owned(),
        nearest: nearest(name, known).map(str::to_owned),
    })
}

/// Converts an error of the engine to a failure.
pub fn refused(error: &Error) -> Failure {
    Failure::Environment(error.to_string())
}

/// Converts damage to a failure. A failed allocation becomes [`Failure::Environment`].
pub fn damaged(damage: Damage) -> Failure {
    match damage.defect {
        Defect::Memory { .. } | Defect::Limit { what: "bytes of all pages", .. } => {
            Failure::Environment(damage.defect.to_string())
        }
        _ => Failure::Damage(damage.to_string()),
    }
}

/// Converts damage to a failure, for bytes that were proven before. If the file is missing, the message states that
/// another process has removed it.
pub fn damaged_since(damage: Damage) -> Failure {
    match damage.defect {
        Defect::Missing => Failure::Environment(format!(
            "{} was removed by a process that is writing to the store; try again",
            damage.file
        )),
        _ => damaged(damage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_file_is_not_damage() {
        let damage = |defect: Defect| defect.at(FileName::Pages(3), 0);
        let gone = damaged_since(damage(Defect::Missing));
        assert!(
            matches!(gone, Failure::Environment(text) if text.starts_with("pages/0000000000000003.pages was removed"))
        );
        assert!(matches!(damaged_since(damage(Defect::Foreign)), Failure::Damage(_)));
    }
}
