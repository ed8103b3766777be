//! Floor 6. Which snapshots stay, and from where on the log is needed: rules over what is known, no disk.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::{Lsn, SnapshotId};

use crate::keeping::Kept;
use crate::retention::Retention;

/// What stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub snapshots: BTreeSet<SnapshotId>,
    /// Replay may begin here, in this segment and behind this batch; what lies before may go. `None`: all stays.
    pub log_from: Option<(u64, Lsn)>,
}

impl Plan {
    /// Whether this takes a snapshot away, or log that lies behind it.
    pub fn takes_from(&self, kept: &Kept, log: &LogOnDisk) -> bool {
        let is_cut = self.log_from.is_some_and(|(segment, _)| kept.redo.segment < segment);
        !self.snapshots.contains(&kept.info.id) || (is_cut && log.reaches(kept))
    }
}

/// What is known of the log.
#[derive(Clone, Debug, Default)]
pub(super) struct LogOnDisk {
    /// The segments' lengths in bytes, by number.
    pub segments: BTreeMap<u64, u64>,
    /// The segment that takes frames now: it, and those behind it, are not counted as log.
    pub current: u64,
}

impl LogOnDisk {
    /// Whether the log behind a snapshot is there.
    fn reaches(&self, kept: &Kept) -> bool {
        self.segments.contains_key(&kept.redo.segment)
    }

    fn bytes_from(&self, segment: u64) -> u64 {
        self.segments.range(segment..self.current.max(segment)).map(|(_, len)| len).sum()
    }
}

/// Applies the rules. `held` are the snapshots that readers hold, `beginning_held` says whether one reads from
/// the log's beginning, and the time is in milliseconds since 1970.
pub(super) fn plan(
    snapshots: &BTreeMap<SnapshotId, Kept>,
    retention: &Retention,
    log: &LogOnDisk,
    now_unix_ms: u64,
    held: &BTreeSet<SnapshotId>,
    beginning_held: bool,
) -> Plan {
    if retention.names_only {
        let stays = |kept: &&Kept| !is_given_up(kept, retention) || held.contains(&kept.info.id);
        let snapshots = snapshots.values().filter(stays).map(|kept| kept.info.id).collect();
        return Plan { snapshots, log_from: Some((0, Lsn(0))) };
    }
    let with_log: Vec<&Kept> =
        snapshots.values().filter(|kept| kept.info.verified && log.reaches(kept)).collect();
    // What was found damaged stands in for nothing.
    let starts: Vec<&Kept> = with_log.iter().copied().filter(|kept| kept.holds).collect();
    // Until there are as many as are wanted, the log from before the first of them stands in for the others.
    let Some(counted) = starts.len().checked_sub(retention.snapshots_kept.max(1)) else {
        let stays =
            |kept: &&Kept| !is_given_up(kept, retention) || log.reaches(kept) || held.contains(&kept.info.id);
        let snapshots = snapshots.values().filter(stays).map(|kept| kept.info.id).collect();
        return Plan { snapshots, log_from: None };
    };
    let age_ms = u64::try_from(retention.snapshots_kept_for.as_millis()).unwrap_or(u64::MAX);
    let is_young = |kept: &&&Kept| now_unix_ms.saturating_sub(kept.info.created_unix_ms) < age_ms;
    // Where the log is shorter than is wanted, all there is of it.
    let reaches_back = |kept: &&&Kept| log.bytes_from(kept.redo.segment) >= retention.log_kept;
    let log_base = starts.iter().rev().find(reaches_back).or(starts.first());
    let log_base = log_base.filter(|_| retention.log_kept > 0);
    let held_with_log = with_log.iter().filter(|kept| held.contains(&kept.info.id));
    // These are there to replay from.
    let replayed: Vec<&Kept> = starts[counted..]
        .iter()
        .chain(with_log.iter().filter(is_young))
        .chain(log_base)
        .chain(held_with_log)
        // A snapshot that was not caught at one moment is nothing without the log up to its end.
        .chain(with_log.iter().filter(|kept| is_named(kept, retention) && kept.info.redo < kept.info.end))
        .copied()
        .collect();
    // Named ones that were caught at one moment are there to be looked at: their state needs no log.
    let looked_at =
        snapshots.values().filter(|kept| is_named(kept, retention) || held.contains(&kept.info.id));
    let ids = replayed.iter().copied().chain(looked_at).map(|kept| kept.info.id);
    let oldest =
        replayed.iter().min_by_key(|kept| kept.redo.lsn).map(|kept| (kept.redo.segment, kept.redo.lsn));
    Plan { snapshots: ids.collect(), log_from: oldest.filter(|_| !beginning_held) }
}

fn is_named(kept: &Kept, retention: &Retention) -> bool {
    kept.info.name.as_ref().is_some_and(|name| !retention.names_given_up.contains(name))
}

fn is_given_up(kept: &Kept, retention: &Retention) -> bool {
    kept.info.name.is_some() && !is_named(kept, retention)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use remanent_format::{LogPoint, Lsn};

    use super::*;
    use crate::keeping::SnapshotInfo;

    /// Snapshot `id` was written at second `id`, in segment `id`, of batch 10 × `id`.
    fn kept(id: u64, name: Option<&str>, is_exact: bool) -> (SnapshotId, Kept) {
        let redo = LogPoint { segment: id, lsn: Lsn(10 * id), ..LogPoint::default() };
        let info = SnapshotInfo {
            id: SnapshotId(id),
            name: name.map(str::to_owned),
            created_unix_ms: 1000 * id,
            redo: redo.lsn,
            end: Lsn(10 * id + u64::from(!is_exact)),
            pages: 0,
            bytes: 0,
            bytes_written: 0,
            verified: true,
        };
        let (files, links) = (BTreeMap::new(), Vec::new());
        (info.id, Kept { info, redo, files, links, manifest_crc: 0, holds: true })
    }

    #[test]
    fn rules_keep_snapshots_and_the_log_behind_them() {
        // Snapshot 2 has a name and its log is gone; 4 has one, too.
        let snapshots: BTreeMap<SnapshotId, Kept> = [
            kept(2, Some("two"), true),
            kept(4, Some("four"), true),
            kept(5, None, false),
            kept(6, None, false),
            kept(7, None, false),
        ]
        .into();
        let log = LogOnDisk { segments: (3..=9).map(|number| (number, 100)).collect(), current: 10 };
        let rules = |count, seconds, log_kept| Retention {
            snapshots_kept: count,
            snapshots_kept_for: Duration::from_secs(seconds),
            log_kept,
            names_given_up: BTreeSet::new(),
        };
        for (why, retention, held, kept, log_from) in [
            ("the newest two", rules(2, 0, 0), vec![], vec![2, 4, 6, 7], Some(6)),
            ("the newest one", rules(1, 0, 0), vec![], vec![2, 4, 7], Some(7)),
            ("all that have a log", rules(4, 0, 0), vec![], vec![2, 4, 5, 6, 7], Some(4)),
            ("more than there are", rules(5, 0, 0), vec![], vec![2, 4, 5, 6, 7], None),
            ("younger than five seconds", rules(1, 5, 0), vec![], vec![2, 4, 6, 7], Some(6)),
            ("400 bytes of log", rules(1, 0, 400), vec![], vec![2, 4, 6, 7], Some(6)),
            ("more log than there is", rules(1, 0, 10_000), vec![], vec![2, 4, 7], Some(4)),
            ("a name given up", rules(1, 0, 0).give_up("two"), vec![], vec![4, 7], Some(7)),
            ("the other one", rules(1, 0, 0).give_up("four"), vec![], vec![2, 7], Some(7)),
            (
                "a name of one that counts",
                rules(4, 0, 0).give_up("four"),
                vec![],
                vec![2, 4, 5, 6, 7],
                Some(4),
            ),
            ("too few, and a name given up", rules(5, 0, 0).give_up("two"), vec![], vec![4, 5, 6, 7], None),
            ("one that a reader holds", rules(1, 0, 0), vec![5], vec![2, 4, 5, 7], Some(5)),
            (
                "the same, and its name given up",
                rules(1, 0, 0).give_up("two"),
                vec![2],
                vec![2, 4, 7],
                Some(7),
            ),
        ] {
            let held: BTreeSet<SnapshotId> = held.into_iter().map(SnapshotId).collect();
            let found = plan(&snapshots, &retention, &log, 10_500, &held, false);
            let snapshots: Vec<u64> = found.snapshots.iter().map(|id| id.0).collect();
            assert_eq!((snapshots, found.log_from.map(|from| from.0)), (kept, log_from), "{why}");
        }
        let read_from_the_beginning = plan(&snapshots, &rules(1, 0, 0), &log, 0, &BTreeSet::new(), true);
        assert_eq!(read_from_the_beginning.log_from, None);

        // What was found damaged does not count, and stays only for its name, or for a reader.
        let spoil = |(id, kept): (SnapshotId, Kept)| (id, Kept { holds: ![4, 7].contains(&id.0), ..kept });
        let damaged: BTreeMap<SnapshotId, Kept> = snapshots.into_iter().map(spoil).collect();
        for (held, kept, log_from) in [(vec![], vec![2, 4, 5, 6], 5), (vec![7], vec![2, 4, 5, 6, 7], 5)] {
            let held = held.into_iter().map(SnapshotId).collect();
            let found = plan(&damaged, &rules(2, 0, 0), &log, 0, &held, false);
            let snapshots: Vec<u64> = found.snapshots.iter().map(|id| id.0).collect();
            assert_eq!((snapshots, found.log_from.map(|from| from.0)), (kept, Some(log_from)));
        }

        // A name does not make a snapshot whole that was not caught at one moment.
        let fuzzy: BTreeMap<SnapshotId, Kept> = [kept(4, Some("four"), false), kept(7, None, false)].into();
        let found = plan(&fuzzy, &rules(1, 0, 0), &log, 0, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((4, Lsn(40))));
    }
}
