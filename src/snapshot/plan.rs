//! The snapshots that stay, and the log that they need. These are rules over known facts: no disk is
//! asked, so that a test can hold them against thousands of random lives.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::{LogPoint, Lsn, SnapshotId};

use crate::catalog::RetainedSnapshot;
use crate::options::Retention;

/// The snapshots and the log that stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RetentionPlan {
    pub snapshots: BTreeSet<SnapshotId>,
    /// Replay may begin here, in this segment and after this batch; what lies before may go (I8). Batch 0
    /// is the log's beginning. `None`: nothing goes but the records of snapshots.
    pub log_from: Option<(u64, Lsn)>,
}

impl RetentionPlan {
    /// Whether this plan takes a snapshot away, or the log after it.
    pub fn takes_from(&self, kept: &RetainedSnapshot, log: &LogOnDisk) -> bool {
        let is_cut = self.log_from.is_some_and(|(_, redo)| kept.redo.lsn < redo);
        !self.snapshots.contains(&kept.info.id) || (is_cut && log.reaches(kept))
    }
}

/// The segments of the log, and which of them may be replayed.
#[derive(Clone, Debug, Default)]
pub(super) struct LogOnDisk {
    /// The segments' lengths in bytes, by number.
    pub segments: BTreeMap<u64, u64>,
    /// The segment that takes frames now: it, and those after it, are not counted as log.
    pub current: u64,
    /// Replay may start at this `redo` and later ones; `None`: also at the log's beginning.
    pub floor: Option<Lsn>,
}

impl LogOnDisk {
    /// Whether the log after a snapshot is there.
    fn reaches(&self, kept: &RetainedSnapshot) -> bool {
        self.floor.is_none_or(|floor| kept.redo.lsn >= floor)
    }

    /// Bytes of log that lie after a point, at least: where frames end in a segment is not asked.
    fn bytes_after(&self, point: LogPoint) -> u64 {
        let segments = self.segments.range(point.segment..self.current.max(point.segment));
        segments.map(|(_, len)| len).sum::<u64>().saturating_sub(point.offset)
    }

    /// From where on the log stays, if the rules want it from `wanted` on and a reader may hold its
    /// beginning.
    fn from(&self, wanted: Option<(u64, Lsn)>, beginning_held: bool) -> Option<(u64, Lsn)> {
        match (beginning_held, self.floor) {
            (false, _) => wanted,
            (true, None) => Some(self.as_it_is()),
            // For a reader that begins now, the beginning is not there any more. One that holds it began
            // before that, and may need any of the log.
            (true, Some(_)) => None,
        }
    }

    /// The start of the log as it is kept now: nothing of it goes.
    fn as_it_is(&self) -> (u64, Lsn) {
        (0, self.floor.unwrap_or_default())
    }
}

/// Applies the rules. `held` are the snapshots that readers hold; `beginning_held` says whether a reader
/// holds the log's beginning; the time is in milliseconds since 1970.
///
/// Only verified snapshots count (I7): an image that a disk lost would otherwise cost the snapshot before
/// as well.
pub(super) fn plan(
    snapshots: &BTreeMap<SnapshotId, RetainedSnapshot>,
    retention: &Retention,
    log: &LogOnDisk,
    now_unix_ms: u64,
    held: &BTreeSet<SnapshotId>,
    beginning_held: bool,
) -> RetentionPlan {
    let with_log: Vec<&RetainedSnapshot> =
        snapshots.values().filter(|kept| kept.info.verified && log.reaches(kept)).collect();
    // A snapshot that was found damaged stands in for no other.
    let mut starts: Vec<&RetainedSnapshot> = with_log.iter().copied().filter(|kept| kept.is_sound).collect();
    // The next snapshot follows the newest one and shares its images; after an open, the one that recovery
    // starts from. Both stay, whatever else is said of them.
    let newest = [snapshots.keys().next_back().copied(), starts.last().map(|kept| kept.info.id)];
    let is_newest = |kept: &RetainedSnapshot| newest.contains(&Some(kept.info.id));
    if retention.names_only {
        let stays = |kept: &&RetainedSnapshot| {
            !is_given_up(kept, retention) || held.contains(&kept.info.id) || is_newest(kept)
        };
        let snapshots = snapshots.values().filter(stays).map(|kept| kept.info.id).collect();
        return RetentionPlan { snapshots, log_from: log.from(Some(log.as_it_is()), beginning_held) };
    }
    let replaced = replaced(&starts);
    starts.retain(|kept| !replaced.contains(&kept.info.id));
    // Until there are as many as are wanted, the log from before the first of them stands in for the others.
    let Some(counted) = starts.len().checked_sub(retention.snapshots_kept.max(1)) else {
        let is_replaced =
            |kept: &RetainedSnapshot| replaced.contains(&kept.info.id) && !is_named(kept, retention);
        let is_wanted = |kept: &RetainedSnapshot| !is_given_up(kept, retention) || log.reaches(kept);
        let stays = |kept: &&RetainedSnapshot| {
            held.contains(&kept.info.id) || is_newest(kept) || (is_wanted(kept) && !is_replaced(kept))
        };
        let snapshots = snapshots.values().filter(stays).map(|kept| kept.info.id).collect();
        return RetentionPlan { snapshots, log_from: log.from(Some(log.as_it_is()), beginning_held) };
    };
    let times = times(snapshots);
    let age_ms = u64::try_from(retention.snapshots_kept_for.as_millis()).unwrap_or(u64::MAX);
    // A snapshot that another one replaces does not stay for its age: its time went on to that one.
    let is_young = |kept: &&&RetainedSnapshot| {
        !replaced.contains(&kept.info.id) && now_unix_ms.saturating_sub(times[&kept.info.id]) < age_ms
    };
    let reaches_back = |kept: &&&RetainedSnapshot| log.bytes_after(kept.redo) >= retention.log_kept;
    let wants_log = retention.log_kept > 0;
    // The newest start with enough log after it: an older one would keep more than is wanted.
    let log_base = starts.iter().rev().find(reaches_back).filter(|_| wants_log);
    // If the log is shorter than is wanted, all of it stays.
    let from_beginning = wants_log && log_base.is_none() && log.floor.is_none();
    let log_base = log_base.or(starts.first().filter(|_| wants_log));
    // A reader may be following the log after what it holds.
    let held_with_log = with_log.iter().filter(|kept| held.contains(&kept.info.id));
    // These stay to be replayed from, with the log after them.
    let replayed: Vec<&RetainedSnapshot> = starts[counted..]
        .iter()
        .chain(with_log.iter().filter(is_young))
        .chain(log_base)
        .chain(held_with_log)
        // A snapshot that was not caught at one moment is nothing without the log up to its end: its
        // pages are of different batches.
        .chain(with_log.iter().filter(|kept| is_named(kept, retention) && kept.info.redo < kept.info.end))
        .copied()
        .collect();
    // Named ones that were caught at one moment are there to be looked at: their state needs no log.
    let looked_at = snapshots
        .values()
        .filter(|kept| is_named(kept, retention) || held.contains(&kept.info.id) || is_newest(kept));
    let stays: Vec<&RetainedSnapshot> = replayed.iter().copied().chain(looked_at).collect();
    let oldest = replayed.iter().map(|kept| kept.redo.lsn).min().map(|lsn| {
        // Snapshots of one batch may lie on either side of a restart. The floor is that batch, so all of
        // them that stay are starts as before, and keep their segment. Without this, the segment of the
        // older one went, and a floor that named its batch still said that it was a start.
        let from_there = stays.iter().filter(|kept| kept.redo.lsn >= lsn && log.reaches(kept));
        let segment = from_there.map(|kept| kept.redo.segment).min();
        (segment.expect("what is replayed stays"), lsn)
    });
    let oldest = if from_beginning { Some(log.as_it_is()) } else { oldest };
    let snapshots = stays.into_iter().map(|kept| kept.info.id).collect();
    RetentionPlan { snapshots, log_from: log.from(oldest, beginning_held) }
}

/// The snapshots that the next one replaces: it begins where they do, and goes further. A thin snapshot
/// does so. It is there to give up what the one before names: were both kept, nothing would come back.
/// `starts` ascend.
fn replaced(starts: &[&RetainedSnapshot]) -> BTreeSet<SnapshotId> {
    let pairs = starts.windows(2);
    let replaced = pairs.filter(|pair| pair[0].redo == pair[1].redo && pair[0].info.end < pair[1].info.end);
    replaced.map(|pair| pair[0].info.id).collect()
}

/// How old the snapshots are. Each is as old as the oldest time that it or a later one names. So a clock
/// that was ahead for a while keeps nothing longer than until it is right again, and a time in the future
/// ages nothing.
fn times(snapshots: &BTreeMap<SnapshotId, RetainedSnapshot>) -> BTreeMap<SnapshotId, u64> {
    let mut oldest = u64::MAX;
    let time = |(id, kept): (&SnapshotId, &RetainedSnapshot)| {
        oldest = oldest.min(kept.info.created_unix_ms);
        (*id, oldest)
    };
    snapshots.iter().rev().map(time).collect()
}

fn is_named(kept: &RetainedSnapshot, retention: &Retention) -> bool {
    kept.info.name.as_ref().is_some_and(|name| !retention.names_given_up.contains(name))
}

fn is_given_up(kept: &RetainedSnapshot, retention: &Retention) -> bool {
    kept.info.name.is_some() && !is_named(kept, retention)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::catalog::SnapshotInfo;

    /// Snapshot `id` was written at second `id`, in segment `id`, of batch 10 × `id`.
    fn kept(id: u64, name: Option<&str>, is_exact: bool) -> (SnapshotId, RetainedSnapshot) {
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
        (
            info.id,
            RetainedSnapshot {
                info,
                redo,
                next_file: 1,
                files,
                links,
                manifest_crc: 0,
                is_recorded: true,
                is_sound: true,
            },
        )
    }

    /// A table of rules: each row is one promise, or two that meet.
    #[test]
    fn rules_keep_snapshots_and_the_log_after_them() {
        // Snapshot 2 has a name and its log is gone; 4 has one, too.
        let snapshots: BTreeMap<SnapshotId, RetainedSnapshot> = [
            kept(2, Some("two"), true),
            kept(4, Some("four"), true),
            kept(5, None, false),
            kept(6, None, false),
            kept(7, None, false),
        ]
        .into();
        let floor = Some(Lsn(40));
        let log = LogOnDisk { segments: (3..=9).map(|number| (number, 100)).collect(), current: 10, floor };
        let rules = |count, seconds, log_kept| Retention {
            snapshots_kept: count,
            snapshots_kept_for: Duration::from_secs(seconds),
            log_kept,
            names_given_up: BTreeSet::new(),
            names_only: false,
        };
        for (why, retention, held, kept, log_from) in [
            ("the newest two", rules(2, 0, 0), vec![], vec![2, 4, 6, 7], Some(6)),
            ("the newest one", rules(1, 0, 0), vec![], vec![2, 4, 7], Some(7)),
            ("all that have a log", rules(4, 0, 0), vec![], vec![2, 4, 5, 6, 7], Some(4)),
            ("more than there are", rules(5, 0, 0), vec![], vec![2, 4, 5, 6, 7], Some(0)),
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
            (
                "too few, and a name given up",
                rules(5, 0, 0).give_up("two"),
                vec![],
                vec![4, 5, 6, 7],
                Some(0),
            ),
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
        // Two snapshots of one batch, in segments of two runs: the floor is one for both.
        let mut twice = snapshots.clone();
        twice.get_mut(&SnapshotId(4)).unwrap().redo.lsn = Lsn(70);
        let found = plan(&twice, &rules(1, 0, 0), &log, 10_500, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((4, Lsn(70))));
        let found = plan(&twice, &rules(1, 0, 0).give_up("four"), &log, 10_500, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((7, Lsn(70))));

        let read_from_the_beginning = plan(&snapshots, &rules(1, 0, 0), &log, 0, &BTreeSet::new(), true);
        assert_eq!(read_from_the_beginning.log_from, None);

        // A damaged snapshot does not count, and stays only for its name, for a reader, or as the newest one.
        let spoil = |(id, kept): (SnapshotId, RetainedSnapshot)| {
            (id, RetainedSnapshot { is_sound: ![4, 7].contains(&id.0), ..kept })
        };
        let damaged: BTreeMap<SnapshotId, RetainedSnapshot> = snapshots.into_iter().map(spoil).collect();
        for (held, kept, log_from) in [(vec![], vec![2, 4, 5, 6, 7], 5), (vec![7], vec![2, 4, 5, 6, 7], 5)] {
            let held = held.into_iter().map(SnapshotId).collect();
            let found = plan(&damaged, &rules(2, 0, 0), &log, 0, &held, false);
            let snapshots: Vec<u64> = found.snapshots.iter().map(|id| id.0).collect();
            assert_eq!((snapshots, found.log_from.map(|from| from.0)), (kept, Some(log_from)));
        }

        // A name does not make a snapshot whole that was not caught at one moment.
        let fuzzy: BTreeMap<SnapshotId, RetainedSnapshot> =
            [kept(4, Some("four"), false), kept(7, None, false)].into();
        let found = plan(&fuzzy, &rules(1, 0, 0), &log, 0, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((4, Lsn(40))));
    }

    /// What is done beside a snapshot, before retention is applied.
    #[derive(Clone, Copy, Debug)]
    enum Deed {
        Nothing,
        /// The name of one of the snapshots there are is given up, and perhaps no other rule is applied.
        GiveUp {
            which: usize,
            names_only: bool,
        },
        /// One of them is found damaged: it stands in for nothing any more, and the window has a hole.
        Damage {
            which: usize,
        },
        /// Readers hold those whose bits are set, and perhaps the log's beginning.
        Hold {
            which: u16,
            beginning: bool,
        },
    }

    /// One step of a life: the clock goes on by seconds, the log grows by segments, and a snapshot is
    /// taken, with a name or without, at one moment or not, or a thin one.
    type Step = (i64, u64, bool, bool, bool, Deed);

    /// Rules, and lives under them. Now and then the clock jumps, as it does when a machine has the wrong
    /// time for a while.
    fn lives() -> impl Strategy<Value = (Retention, Vec<Step>)> {
        let rules = (1..4usize, 0..50u64, 0..600u64).prop_map(|(count, seconds, log_kept)| Retention {
            snapshots_kept: count,
            snapshots_kept_for: Duration::from_secs(seconds),
            log_kept,
            names_given_up: BTreeSet::new(),
            names_only: false,
        });
        let jump = prop_oneof![8 => 0..20i64, 1 => 1000..100_000i64, 1 => -100_000..-1000i64];
        let rarely = || prop::bool::weighted(0.2);
        let deed = prop_oneof![
            5 => Just(Deed::Nothing),
            2 => (any::<usize>(), any::<bool>()).prop_map(|(which, names_only)| Deed::GiveUp { which, names_only }),
            1 => any::<usize>().prop_map(|which| Deed::Damage { which }),
            2 => (any::<u16>(), rarely()).prop_map(|(which, beginning)| Deed::Hold { which, beginning }),
        ];
        let step = (jump, 0..3u64, prop::bool::weighted(0.3), any::<bool>(), rarely(), deed);
        (rules, prop::collection::vec(step, 1..60))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 1024 }, failure_persistence: None, ..ProptestConfig::default() })]

        /// Each promise of [`Retention`], held against a plain account of the steps; and nothing stays
        /// that no promise wants, however the clock jumps.
        #[test]
        fn every_promise_is_kept_over_random_lives((rules, steps) in lives()) {
            let (mut now, mut snapshots) = (1_000_000_000u64, BTreeMap::new());
            let mut log = LogOnDisk { segments: [(1, 100)].into(), current: 1, floor: None };
            for (number, (seconds, segments, has_name, is_exact, is_thin, deed)) in (1u64..).zip(steps) {
                now = now.saturating_add_signed(seconds * 1000);
                log.segments.extend((log.current..=log.current + segments).map(|number| (number, 100)));
                log.current += segments;
                let before = snapshots.values().next_back().filter(|_| is_thin);
                let before = before.map(|before: &RetainedSnapshot| (before.redo, before.info.created_unix_ms));
                let name = (has_name && before.is_none()).then(|| format!("{number}"));
                let (id, mut taken_now) = kept(number, name.as_deref(), is_exact);
                taken_now.redo.segment = log.current;
                let (redo, time) = before.unwrap_or((taken_now.redo, now));
                taken_now.redo = redo;
                (taken_now.info.redo, taken_now.info.created_unix_ms) = (redo.lsn, time);
                snapshots.insert(id, taken_now);

                let mut retention = rules.clone();
                let (mut held, mut beginning_held) = (BTreeSet::new(), false);
                let ids: Vec<SnapshotId> = snapshots.keys().copied().collect();
                match deed {
                    Deed::Nothing => {}
                    Deed::GiveUp { which, names_only } => {
                        let names: Vec<&String> = snapshots.values().filter_map(|kept| kept.info.name.as_ref()).collect();
                        if !names.is_empty() {
                            retention = retention.give_up(names[which % names.len()]).names_only(names_only);
                        }
                    }
                    // The newest one was verified just now.
                    Deed::Damage { which } if ids.len() > 1 => {
                        snapshots.get_mut(&ids[which % (ids.len() - 1)]).unwrap().is_sound = false;
                    }
                    Deed::Damage { .. } => {}
                    Deed::Hold { which, beginning } => {
                        held = ids.iter().copied().filter(|id| which >> (id.0 % 16) & 1 == 1).collect();
                        beginning_held = beginning;
                    }
                }
                let names_only = retention.names_only;
                let found = plan(&snapshots, &retention, &log, now, &held, beginning_held);
                let floor = match found.log_from {
                    Some((_, redo)) => log.floor.max(Some(redo).filter(|redo| redo.0 > 0)),
                    None => log.floor,
                };

                let reached =
                    |id: &SnapshotId, floor: Option<Lsn>| floor.is_none_or(|floor| floor <= snapshots[id].redo.lsn);
                // A snapshot that a thin one replaces counts no more.
                let is_replaced = |id: &SnapshotId| {
                    let redo = snapshots[id].redo;
                    snapshots.range(id..).skip(1).any(|(_, later)| later.redo == redo && later.is_sound)
                };
                let is_start = |id: &SnapshotId| snapshots[id].is_sound && reached(id, log.floor) && !is_replaced(id);
                let starts: Vec<SnapshotId> = ids.iter().copied().filter(is_start).collect();
                let has_name = |id: &SnapshotId| {
                    snapshots[id].info.name.as_ref().is_some_and(|name| !retention.names_given_up.contains(name))
                };
                let is_given_up = |id: &SnapshotId| snapshots[id].info.name.is_some() && !has_name(id);
                let stays = |id: &SnapshotId| found.snapshots.contains(id);

                // Whatever the rules say, recovery has a start: one that holds, or the log's beginning.
                let is_open = floor.is_none() || ids.iter().any(|id| stays(id) && snapshots[id].is_sound && reached(id, floor));
                prop_assert!(is_open || starts.is_empty(), "nothing is left to start from");
                // The next one follows it.
                prop_assert!(stays(ids.last().expect("just taken")), "the newest one went");
                // What readers hold, with the log that was there for them.
                for id in &held {
                    let has_log = !reached(id, log.floor) || reached(id, floor);
                    prop_assert!(stays(id) && has_log, "{id} is held");
                }
                prop_assert!(!beginning_held || floor == log.floor, "the log is read from its beginning");
                // Names.
                for id in ids.iter().filter(|id| has_name(id)) {
                    prop_assert!(stays(id), "{id} has a name");
                    let kept = &snapshots[id];
                    let needs_log = kept.info.redo < kept.info.end && reached(id, log.floor);
                    prop_assert!(!needs_log || reached(id, floor), "{id} is nothing without its log");
                }
                // What is kept has what it needs: the state of its end, by the log or alone.
                for id in &found.snapshots {
                    let kept = &snapshots[id];
                    prop_assert!(reached(id, floor) || kept.info.redo == kept.info.end || !reached(id, log.floor));
                }
                if names_only {
                    prop_assert!(floor == log.floor, "no other rule is applied");
                    for id in &ids {
                        let must_go = is_given_up(id) && !held.contains(id) && starts.iter().any(|start| start > id);
                        prop_assert!(is_given_up(id) || stays(id), "{id} was not given up");
                        prop_assert!(!must_go || !stays(id), "{id} was given up");
                    }
                } else {
                    // The newest ones, and the log since the oldest of them.
                    let newest: Vec<_> = starts.iter().rev().take(retention.snapshots_kept).collect();
                    for id in &newest {
                        prop_assert!(stays(id) && reached(id, floor), "{id} of the newest");
                    }
                    // As old as the oldest time that it or a later one names.
                    let age = |id: &SnapshotId| {
                        let later = snapshots.range(id..).map(|(_, kept)| kept.info.created_unix_ms);
                        now.saturating_sub(later.min().expect("itself"))
                    };
                    let age_max = retention.snapshots_kept_for.as_millis() as u64;
                    for id in starts.iter().filter(|id| age(id) < age_max) {
                        prop_assert!(stays(id) && reached(id, floor), "{id} is young");
                    }
                    // That number of bytes of log, or all that there was: what lies before the oldest start
                    // is of no use.
                    if let Some((segment, redo)) = found.log_from {
                        let point = LogPoint { segment, lsn: redo, ..LogPoint::default() };
                        let oldest = starts.first().map(|id| snapshots[id].redo.lsn);
                        let is_all = floor == log.floor || oldest.is_none_or(|oldest| redo <= oldest);
                        prop_assert!(is_all || log.bytes_after(point) >= retention.log_kept, "log from {redo}");
                    }
                    // And nothing else: what stays without a name or a reader is counted, young, or begins
                    // the log that is wanted.
                    let wanted = |id: &SnapshotId| newest.contains(&id) || age(id) < age_max;
                    let others = found.snapshots.iter().filter(|id| !wanted(id) && !has_name(id) && !held.contains(id));
                    let others: Vec<_> = others.collect();
                    let too_few = starts.len() < retention.snapshots_kept;
                    prop_assert!(too_few || others.len() <= usize::from(retention.log_kept > 0), "{others:?} stay");
                }
                let segment = found.log_from.map_or(0, |(segment, _)| segment);
                snapshots.retain(|id, _| found.snapshots.contains(id));
                log.segments.retain(|number, _| *number >= segment);
                log.floor = floor;
            }
        }
    }
}
