//! Applies the retention rules: determines which snapshots and which part of the log to keep. This module accesses no
//! disk, so that a test can check it with thousands of random histories.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::{LogPoint, Lsn, SnapshotId};

use crate::catalog::RetainedSnapshot;
use crate::options::Retention;

/// The snapshots and the log that the retention rules keep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RetentionPlan {
    pub snapshots: BTreeSet<SnapshotId>,
    /// The segment and the batch after which the kept log begins, or `None` if only manifests may be removed. The log
    /// before them may be removed (I8). Batch 0 is the beginning of the log.
    pub log_from: Option<(u64, Lsn)>,
}

impl RetentionPlan {
    /// Returns whether this plan removes the snapshot `kept`, or any of the log after it.
    pub fn takes_from(&self, kept: &RetainedSnapshot, log: &LogOnDisk) -> bool {
        let is_cut = self.log_from.is_some_and(|(_, redo)| kept.redo.lsn < redo);
        !self.snapshots.contains(&kept.info.id) || (is_cut && log.reaches(kept))
    }
}

/// The segments of the log on disk, and the earliest batch from which replay is permitted.
#[derive(Clone, Debug, Default)]
pub(super) struct LogOnDisk {
    /// The length in bytes of each segment, by segment number.
    pub segments: BTreeMap<u64, u64>,
    /// The number of the segment that receives frames. The retention rules do not count this segment and later
    /// segments.
    pub current: u64,
    /// The floor: the lowest `redo` from which replay is permitted, or `None` if it may start at the beginning of the
    /// log.
    pub floor: Option<Lsn>,
}

impl LogOnDisk {
    /// Returns whether the log that follows a snapshot still exists.
    fn reaches(&self, kept: &RetainedSnapshot) -> bool {
        self.floor.is_none_or(|floor| kept.redo.lsn >= floor)
    }

    /// Returns a lower bound on the number of bytes of log after a point. The exact number is unknown, because a
    /// segment may contain unused space after its frames.
    fn bytes_after(&self, point: LogPoint) -> u64 {
        let segments = self.segments.range(point.segment..self.current.max(point.segment));
        segments.map(|(_, len)| len).sum::<u64>().saturating_sub(point.offset)
    }

    /// Returns the start of the log to keep. `wanted` is the start according to the rules, and `is_beginning_held`
    /// states whether a reader holds the beginning of the log.
    fn from(&self, wanted: Option<(u64, Lsn)>, is_beginning_held: bool) -> Option<(u64, Lsn)> {
        match (is_beginning_held, self.floor) {
            (false, _) => wanted,
            (true, None) => Some(self.as_it_is()),
            // A reader may hold the beginning of the log although the log is to be removed. The reader started earlier,
            // and may need any part of the log, so nothing is removed.
            (true, Some(_)) => None,
        }
    }

    /// Returns the current start of the log. A plan with this start removes no log.
    fn as_it_is(&self) -> (u64, Lsn) {
        (0, self.floor.unwrap_or_default())
    }
}

/// Applies the retention rules. `held` contains the snapshots that readers have locked, `is_beginning_held` states
/// whether a reader has locked the beginning of the log, and `now_unix_ms` is the time in milliseconds since 1970.
///
/// Only verified snapshots may be passed (I7). If the disk has lost an image of an unverified snapshot, the snapshot
/// before it is still needed.
pub(super) fn plan(
    snapshots: &BTreeMap<SnapshotId, RetainedSnapshot>,
    retention: &Retention,
    log: &LogOnDisk,
    now_unix_ms: u64,
    held: &BTreeSet<SnapshotId>,
    is_beginning_held: bool,
) -> RetentionPlan {
    let with_log: Vec<&RetainedSnapshot> =
        snapshots.values().filter(|kept| kept.info.verified && log.reaches(kept)).collect();
    // A damaged snapshot does not count toward the number of snapshots to keep.
    let mut starts: Vec<&RetainedSnapshot> = with_log.iter().copied().filter(|kept| kept.is_sound).collect();
    // The newest snapshot is the one whose images the next snapshot shares. The newest intact snapshot is where
    // recovery starts. Both are kept under any rule.
    let newest = [snapshots.keys().next_back().copied(), starts.last().map(|kept| kept.info.id)];
    let is_newest = |kept: &RetainedSnapshot| newest.contains(&Some(kept.info.id));
    if retention.names_only {
        let stays = |kept: &&RetainedSnapshot| {
            !is_given_up(kept, retention) || held.contains(&kept.info.id) || is_newest(kept)
        };
        let snapshots = snapshots.values().filter(stays).map(|kept| kept.info.id).collect();
        return RetentionPlan { snapshots, log_from: log.from(Some(log.as_it_is()), is_beginning_held) };
    }
    let replaced = replaced(&starts);
    starts.retain(|kept| !replaced.contains(&kept.info.id));
    // While there are fewer intact snapshots than wanted, the log before the first of them is kept instead.
    let Some(counted) = starts.len().checked_sub(retention.snapshots_kept.max(1)) else {
        let is_replaced =
            |kept: &RetainedSnapshot| replaced.contains(&kept.info.id) && !is_named(kept, retention);
        let is_wanted = |kept: &RetainedSnapshot| !is_given_up(kept, retention) || log.reaches(kept);
        let stays = |kept: &&RetainedSnapshot| {
            held.contains(&kept.info.id) || is_newest(kept) || (is_wanted(kept) && !is_replaced(kept))
        };
        let snapshots = snapshots.values().filter(stays).map(|kept| kept.info.id).collect();
        return RetentionPlan { snapshots, log_from: log.from(Some(log.as_it_is()), is_beginning_held) };
    };
    let times = times(snapshots);
    let age_ms = u64::try_from(retention.snapshots_kept_for.as_millis()).unwrap_or(u64::MAX);
    // A replaced snapshot is not kept for its age, because its replacement has the same creation time.
    let is_young = |kept: &&&RetainedSnapshot| {
        !replaced.contains(&kept.info.id) && now_unix_ms.saturating_sub(times[&kept.info.id]) < age_ms
    };
    let reaches_back = |kept: &&&RetainedSnapshot| log.bytes_after(kept.redo) >= retention.log_kept;
    let wants_log = retention.log_kept > 0;
    // The newest snapshot that is followed by enough log. An older one would keep more log than wanted.
    let log_base = starts.iter().rev().find(reaches_back).filter(|_| wants_log);
    // If the log is shorter than wanted, all of it is kept.
    let from_beginning = wants_log && log_base.is_none() && log.floor.is_none();
    let log_base = log_base.or(starts.first().filter(|_| wants_log));
    // The reader of a locked snapshot may also be following the log after it.
    let held_with_log = with_log.iter().filter(|kept| held.contains(&kept.info.id));
    // The snapshots from which replay may begin. They keep the log after them.
    let replayed: Vec<&RetainedSnapshot> = starts[counted..]
        .iter()
        .chain(with_log.iter().filter(is_young))
        .chain(log_base)
        .chain(held_with_log)
        // A fuzzy snapshot also needs the log up to its end, because its pages reflect different batches.
        .chain(with_log.iter().filter(|kept| is_named(kept, retention) && kept.info.redo < kept.info.end))
        .copied()
        .collect();
    // An exact named snapshot is kept without the log after it, because its state is complete.
    let looked_at = snapshots
        .values()
        .filter(|kept| is_named(kept, retention) || held.contains(&kept.info.id) || is_newest(kept));
    let stays: Vec<&RetainedSnapshot> = replayed.iter().copied().chain(looked_at).collect();
    let oldest = replayed.iter().map(|kept| kept.redo.lsn).min().map(|lsn| {
        // Two snapshots of the same batch may be in segments of different incarnations of the log. If that batch
        // becomes the floor, replay from either must remain possible, so the earlier segment is kept.
        let from_there = stays.iter().filter(|kept| kept.redo.lsn >= lsn && log.reaches(kept));
        let segment = from_there.map(|kept| kept.redo.segment).min();
        (segment.expect("what is replayed stays"), lsn)
    });
    let oldest = if from_beginning { Some(log.as_it_is()) } else { oldest };
    let snapshots = stays.into_iter().map(|kept| kept.info.id).collect();
    RetentionPlan { snapshots, log_from: log.from(oldest, is_beginning_held) }
}

/// Returns the replaced snapshots. A snapshot is replaced by another one that begins at the same batch and ends later.
/// `starts` must be ascending.
fn replaced(starts: &[&RetainedSnapshot]) -> BTreeSet<SnapshotId> {
    let pairs = starts.windows(2);
    let replaced = pairs.filter(|pair| pair[0].redo == pair[1].redo && pair[0].info.end < pair[1].info.end);
    replaced.map(|pair| pair[0].info.id).collect()
}

/// Returns the time from which the age of each snapshot is computed: the earliest creation time of this and all later
/// snapshots. Thus a clock that was ahead for a while keeps no snapshot longer than until the clock is correct again,
/// and never makes a snapshot look older.
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

    /// Returns a test snapshot with number `id`, created at second `id`, in segment `id`, whose `redo` is batch 10 ×
    /// `id`.
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
            root: std::sync::Arc::default(),
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

    /// Tests a table of retention rules. Each row tests one guarantee, or two guarantees that interact.
    #[test]
    fn rules_keep_snapshots_and_the_log_after_them() {
        // Snapshot 2 has a name and no log after it. Snapshot 4 has a name, too.
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
        // Two snapshots of the same batch, in segments of two incarnations of the log.
        let mut twice = snapshots.clone();
        twice.get_mut(&SnapshotId(4)).unwrap().redo.lsn = Lsn(70);
        let found = plan(&twice, &rules(1, 0, 0), &log, 10_500, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((4, Lsn(70))));
        let found = plan(&twice, &rules(1, 0, 0).give_up("four"), &log, 10_500, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((7, Lsn(70))));

        let read_from_the_beginning = plan(&snapshots, &rules(1, 0, 0), &log, 0, &BTreeSet::new(), true);
        assert_eq!(read_from_the_beginning.log_from, None);

        // A damaged snapshot does not count. It is kept only for its name, for a reader, or as the newest one.
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

        // A name does not complete a fuzzy snapshot: it still needs its log.
        let fuzzy: BTreeMap<SnapshotId, RetainedSnapshot> =
            [kept(4, Some("four"), false), kept(7, None, false)].into();
        let found = plan(&fuzzy, &rules(1, 0, 0), &log, 0, &BTreeSet::new(), false);
        assert_eq!(found.log_from, Some((4, Lsn(40))));
    }

    /// An event in a random history, which happens before retention is applied.
    #[derive(Clone, Copy, Debug)]
    enum TestEvent {
        Nothing,
        /// Removes the name of an existing snapshot. Optionally, retention applies no other rule in this step.
        GiveUp {
            which: usize,
            names_only: bool,
        },
        /// Marks a snapshot as damaged. It then no longer counts toward the snapshots to keep.
        Damage {
            which: usize,
        },
        /// Readers hold the snapshots whose bits are set, and possibly the beginning of the log.
        Hold {
            which: u16,
            beginning: bool,
        },
    }

    /// One step of a random history: the seconds by which the clock advances, the number of new segments, whether the
    /// new snapshot is named, exact or thin, and an event.
    type Step = (i64, u64, bool, bool, bool, TestEvent);

    /// Generates retention rules and histories. Occasionally the clock jumps, as on a machine with a wrong clock.
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
            5 => Just(TestEvent::Nothing),
            2 => (any::<usize>(), any::<bool>()).prop_map(|(which, names_only)| TestEvent::GiveUp { which, names_only }),
            1 => any::<usize>().prop_map(|which| TestEvent::Damage { which }),
            2 => (any::<u16>(), rarely()).prop_map(|(which, beginning)| TestEvent::Hold { which, beginning }),
        ];
        let step = (jump, 0..3u64, prop::bool::weighted(0.3), any::<bool>(), rarely(), deed);
        (rules, prop::collection::vec(step, 1..60))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 1024 }, failure_persistence: None, ..ProptestConfig::default() })]

        /// Checks each guarantee of [`Retention`] against a simple record of the steps, even if the clock jumps. Also
        /// checks that every kept snapshot and segment has a reason.
        #[test]
        fn guarantees_hold_over_random_lives((rules, steps) in lives()) {
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
                let (mut held, mut is_beginning_held) = (BTreeSet::new(), false);
                let ids: Vec<SnapshotId> = snapshots.keys().copied().collect();
                match deed {
                    TestEvent::Nothing => {}
                    TestEvent::GiveUp { which, names_only } => {
                        let names: Vec<&String> = snapshots.values().filter_map(|kept| kept.info.name.as_ref()).collect();
                        if !names.is_empty() {
                            retention = retention.give_up(names[which % names.len()]).names_only(names_only);
                        }
                    }
                    // The newest snapshot has just been verified, so it is not damaged.
                    TestEvent::Damage { which } if ids.len() > 1 => {
                        snapshots.get_mut(&ids[which % (ids.len() - 1)]).unwrap().is_sound = false;
                    }
                    TestEvent::Damage { .. } => {}
                    TestEvent::Hold { which, beginning } => {
                        held = ids.iter().copied().filter(|id| which >> (id.0 % 16) & 1 == 1).collect();
                        is_beginning_held = beginning;
                    }
                }
                let names_only = retention.names_only;
                let found = plan(&snapshots, &retention, &log, now, &held, is_beginning_held);
                let floor = match found.log_from {
                    Some((_, redo)) => log.floor.max(Some(redo).filter(|redo| redo.0 > 0)),
                    None => log.floor,
                };

                let reached =
                    |id: &SnapshotId, floor: Option<Lsn>| floor.is_none_or(|floor| floor <= snapshots[id].redo.lsn);
                // A snapshot that a thin one replaces no longer counts.
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

                // Recovery always has a start: an intact snapshot, or the beginning of the log.
                let is_open = floor.is_none() || ids.iter().any(|id| stays(id) && snapshots[id].is_sound && reached(id, floor));
                prop_assert!(is_open || starts.is_empty(), "nothing is left to start from");
                // The newest snapshot is kept, because the next one shares its images.
                prop_assert!(stays(ids.last().expect("just taken")), "the newest one went");
                // Locked snapshots are kept, together with the log after them.
                for id in &held {
                    let has_log = !reached(id, log.floor) || reached(id, floor);
                    prop_assert!(stays(id) && has_log, "{id} is held");
                }
                prop_assert!(!is_beginning_held || floor == log.floor, "the log is read from its beginning");
                // Named snapshots are kept, with the log that they need.
                for id in ids.iter().filter(|id| has_name(id)) {
                    prop_assert!(stays(id), "{id} has a name");
                    let kept = &snapshots[id];
                    let needs_log = kept.info.redo < kept.info.end && reached(id, log.floor);
                    prop_assert!(!needs_log || reached(id, floor), "{id} is nothing without its log");
                }
                // Each kept snapshot can be restored to its end, by itself or with the log.
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
                    // The newest snapshots, and the log since the oldest of them.
                    let newest: Vec<_> = starts.iter().rev().take(retention.snapshots_kept).collect();
                    for id in &newest {
                        prop_assert!(stays(id) && reached(id, floor), "{id} of the newest");
                    }
                    // The age is computed from the earliest time among a snapshot's own and those of later snapshots.
                    let age = |id: &SnapshotId| {
                        let later = snapshots.range(id..).map(|(_, kept)| kept.info.created_unix_ms);
                        now.saturating_sub(later.min().expect("itself"))
                    };
                    let age_max = retention.snapshots_kept_for.as_millis() as u64;
                    for id in starts.iter().filter(|id| age(id) < age_max) {
                        prop_assert!(stays(id) && reached(id, floor), "{id} is young");
                    }
                    // At least `log_kept` bytes of log are kept, or all that exist. Log before the oldest start cannot
                    // be replayed.
                    if let Some((segment, redo)) = found.log_from {
                        let point = LogPoint { segment, lsn: redo, ..LogPoint::default() };
                        let oldest = starts.first().map(|id| snapshots[id].redo.lsn);
                        let is_all = floor == log.floor || oldest.is_none_or(|oldest| redo <= oldest);
                        prop_assert!(is_all || log.bytes_after(point) >= retention.log_kept, "log from {redo}");
                    }
                    // Nothing else is kept: a snapshot that has no name or reader is counted or young, or is where the
                    // wanted log begins.
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
