//! How long snapshots are kept, with their files and the log after them.

use std::sync::Arc;
use std::time::Duration;

use crate::with_options::With;
use remanent::disk::{Disk, Hold};
use remanent::error::{Folder, NoSuchState, Taken};
use remanent::options::Retention;
use remanent::testing::sim_disk::Moment;
use remanent::{Lsn, SnapshotOptions, StatePoint, View};

use super::*;

/// Asserts that a view has the bytes of these pages.
fn check_seen(seen: &View, state: &State) {
    for (page, expected) in &state.contents {
        let mut bytes = vec![0; expected.len()];
        seen.read(*page, 0, &mut bytes).unwrap();
        assert_eq!(bytes, *expected, "{page}");
    }
}

#[test]
fn named_snapshot_stays_until_name_is_dropped() {
    let disk = SimDisk::new();
    let options = || small().retention(Retention::new().snapshots_kept(1));
    let (store, pages) = store_of(&disk, options(), 24);
    change(&store, &pages[..2], 1);
    let named = store.snapshot_with(SnapshotOptions::new().name("before")).unwrap();
    let before = State::of(&store);
    assert_eq!((named.name.as_deref(), named.redo), (Some("before"), named.end));
    assert!(
        matches!(store.snapshot_with(SnapshotOptions::new().name("before")), Err(Error::Taken(Taken::Name { snapshot, .. })) if snapshot == named.id)
    );
    for name in [String::new(), "x".repeat(65)] {
        assert!(
            matches!(store.snapshot_with(SnapshotOptions::new().name(&name)), Err(Error::Limit { .. })),
            "{name:?}"
        );
    }
    for round in 0..12 {
        change(&store, &pages, round);
        store.snapshot().unwrap();
    }
    store.close().unwrap();
    let files = Files::of(&disk);
    let redo = Survey::read(&files).unwrap().snapshot(named.id).unwrap().redo;
    assert!(!files.0.contains_key(&FileName::Segment(redo.segment)), "its log is gone");
    check_kept(&disk, &[(named.id, before.clone())]);

    let store = open_with(&disk, options()).unwrap();
    assert_eq!(store.snapshots()[0], named);
    store.restore(StatePoint::Snapshot(named.id)).unwrap();
    let restored = State::of(&store);
    assert_eq!(restored.pages.len(), before.pages.len());
    change(&store, &pages, 99);
    store.snapshot().unwrap();
    store.snapshot().unwrap();

    let given_up = store.retention().give_up("before").give_up("unknown");
    // Segments may be prepared in the meantime.
    let is_settled = |file: &FileName| file.folder() != Folder::Log;
    let listed = || Files::of(&disk).0.into_keys().filter(is_settled).collect::<BTreeSet<_>>();
    let there = listed();
    let would_go = store.would_prune(&given_up).unwrap();
    assert_eq!(would_go.snapshots, std::slice::from_ref(&named));
    assert!(would_go.bytes() > 24 * PAGE_LEN, "its images: {would_go:?}");
    assert_eq!(listed(), there, "nothing was done yet");
    assert_eq!(store.prune(&given_up).unwrap(), would_go);
    let gone: BTreeSet<FileName> = would_go.files.iter().map(|(file, _)| *file).collect();
    assert!(listed().is_disjoint(&gone));
    assert!(matches!(
        store.restore(StatePoint::Snapshot(named.id)),
        Err(Error::NoSuchState(NoSuchState::Snapshot { .. }))
    ));
    let state = State::of(&store);
    store.close().unwrap();
    let store = open_with(&disk, options()).unwrap();
    assert_eq!(ids(&store).len(), 1, "and it stays gone");
    assert_eq!(State::of(&store), state);
}

#[test]
fn dropping_name_keeps_needed_snapshot() {
    let disk = SimDisk::new();
    let (store, _) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 4);
    let named = store.snapshot_with(SnapshotOptions::new().name("newest")).unwrap();
    let pruned = store.prune(&store.retention().give_up("newest")).unwrap();
    assert_eq!(pruned.snapshots, []);
    assert_eq!(store.snapshots(), [named]);
}

/// The next snapshot follows the newest one and shares its images. The newest snapshot is therefore kept even if the
/// log's beginning exists and nothing else needs the snapshot.
#[test]
fn the_newest_snapshot_stays_until_there_is_a_newer_one() {
    let published = || SnapshotOptions::new().only_published();
    for (is_first, is_verified) in [(true, false), (false, false), (true, true), (false, true)] {
        let disk = SimDisk::new();
        let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 24);
        if !is_first {
            store.snapshot_with(published()).unwrap();
            change(&store, &pages[..3], 1);
        }
        let named = if is_verified { SnapshotOptions::new() } else { published() }.name("newest");
        let named = store.snapshot_with(named).unwrap();
        let given_up = || store.retention().give_up("newest").names_only(true);
        assert_eq!(store.prune(&given_up()).unwrap().snapshots, [], "{is_first} {is_verified}");
        store.snapshot_with(published()).unwrap();
        change(&store, &pages[..2], 2);
        let next = store.snapshot_with(published().name("next")).unwrap();
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        check_seen(&View::open_on(&shared, None).unwrap(), &State::of(&store));
        let gone = store.prune(&given_up()).unwrap().snapshots;
        assert_eq!(gone.iter().map(|info| info.id).collect::<Vec<_>>(), [named.id]);
        let state = State::of(&store);
        check_kept(&disk, &[(next.id, state.clone())]);
        store.snapshot().unwrap();
        store.close().unwrap();
        let store = open_with(&disk, small()).unwrap();
        assert_eq!(State::of(&store).contents, state.contents);
        assert!(store.audit().unwrap().changed.is_empty());
    }
}

/// A restore removes no snapshot before the next one is taken, even if the previous one is still being verified.
#[test]
fn restore_removes_no_snapshot_despite_late_verification() {
    for _ in 0..40 {
        let disk = SimDisk::new();
        let options = || small().retention(Retention::new().snapshots_kept(2));
        let (store, pages) = store_of(&disk, options(), 4);
        let first = store.snapshot().unwrap().id;
        change(&store, &pages, 1);
        let second = store.snapshot_with(SnapshotOptions::new().only_published()).unwrap().id;
        store.restore(StatePoint::Snapshot(first)).unwrap();
        // The thread that verifies snapshots ends with the store.
        store.close().unwrap();
        let store = open_with(&disk, options()).unwrap();
        let kept: Vec<SnapshotId> = store.snapshots().iter().map(|info| info.id).collect();
        assert_eq!(kept[..2], [first, second], "{kept:?}");
    }
}

/// A prune of names records the published snapshots, and recycles no log for them.
#[test]
fn replaced_snapshot_is_removed_after_name_prune() {
    for _ in 0..40 {
        let disk = SimDisk::new();
        let options = || small().retention(Retention::new().snapshots_kept(1));
        let (store, pages) = store_of(&disk, options(), 60);
        store.snapshot().unwrap();
        change(&store, &pages, 1);
        store.snapshot_with(SnapshotOptions::new().only_published()).unwrap();
        store.prune(&store.retention().give_up("none").names_only(true)).unwrap();
        // The thread that verifies snapshots ends with the store.
        store.close().unwrap();
        assert_eq!(open_with(&disk, options()).unwrap().snapshots().len(), 1);
    }
}

#[test]
fn held_snapshot_is_not_removed() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 24);
    let held = store.snapshot().unwrap();
    let state = State::of(&store);
    let Hold::Held(hold) = disk.hold(held.id).unwrap() else { panic!("no thread takes it away") };
    for round in 0..3 {
        change(&store, &pages, round);
        store.snapshot().unwrap();
    }
    assert_eq!(ids(&store), [held.id.0, 4]);
    check_kept(&disk, &[(held.id, state)]);
    assert_eq!(store.would_prune(&store.retention()).unwrap().held, [held.id]);
    drop(hold);
    let pruned = store.prune(&store.retention()).unwrap();
    assert_eq!(pruned.snapshots, [held]);
    assert_eq!(ids(&store), [4]);
}

/// A name keeps the state of its snapshot. A later state also needs the log after the snapshot, and its reader keeps
/// both.
#[test]
fn the_log_after_a_named_snapshot_stays_while_a_reader_holds_it() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 24);
    let named = store.snapshot_with(SnapshotOptions::new().name("named")).unwrap();
    change(&store, &pages, 1);
    let (state, at) = (State::of(&store), StatePoint::Lsn(store.lsn()));
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let seen = View::open_on(&shared, Some(&at)).unwrap();
    for value in 2..5 {
        change(&store, &pages, value);
        store.snapshot().unwrap();
    }
    check_seen(&seen, &state);
    drop(seen);
    assert_eq!(store.would_prune(&store.retention()).unwrap().held, []);
    let pruned = store.prune(&store.retention()).unwrap();
    assert!(pruned.files.iter().any(|(file, _)| matches!(file, FileName::Segment(_))), "{pruned:?}");
    let gone = View::open_on(&shared, Some(&at)).unwrap_err();
    assert!(matches!(gone, Error::NoSuchState(NoSuchState::OutsideWindow { .. })), "{gone}");
    // The state that the name keeps always exists.
    View::open_on(&shared, Some(&StatePoint::Snapshot(named.id))).unwrap();
}

/// A link is kept only for the snapshot that follows it.
#[test]
fn files_read_through_link_stay_until_reader_ends() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 24);
    let link = store.snapshot().unwrap();
    let at = StatePoint::Lsn(link.end);
    change(&store, &pages[..1], 2);
    store.snapshot().unwrap();
    assert!(!ids(&store).contains(&link.id.0), "no rule keeps it");
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    // No new reader starts there, but a reader that listed the files before the floor rose may have locked it.
    let outside = View::open_on(&shared, Some(&at)).unwrap_err();
    assert!(matches!(outside, Error::NoSuchState(NoSuchState::OutsideWindow { .. })), "{outside}");
    let Hold::Held(seen) = shared.hold(link.id).unwrap() else { panic!("nothing is going") };
    let needed = Files::of(&disk).names(|file| file.folder() == Folder::Pages);
    for value in 3..50 {
        change(&store, &pages, value);
        store.snapshot().unwrap();
    }
    assert!(needed.iter().all(|file| disk.bytes(*file).is_some()));
    drop(seen);
    store.snapshot().unwrap();
    assert!(needed.iter().all(|file| disk.bytes(*file).is_none()));
    assert_eq!(ids(&store).len(), 1);
    let gone = View::open_on(&shared, Some(&at)).unwrap_err();
    assert!(matches!(gone, Error::NoSuchState(NoSuchState::OutsideWindow { .. })), "{gone}");
}

#[test]
fn snapshots_are_kept_for_their_age_and_for_the_log_after_them() {
    for (options, expected) in [
        (small().retention(Retention::new().snapshots_kept(1)), vec![6]),
        (
            small()
                .retention(Retention::new().snapshots_kept(1).snapshots_kept_for(Duration::from_secs(3600))),
            vec![1, 2, 3, 4, 5, 6],
        ),
        // A segment is shorter than one round of changes.
        (small().retention(Retention::new().snapshots_kept(1).log_kept(16 << 10)), vec![5, 6]),
        (small().retention(Retention::new().snapshots_kept(1).log_kept(1 << 40)), vec![1, 2, 3, 4, 5, 6]),
    ] {
        let disk = SimDisk::new();
        let (store, pages) = store_of(&disk, options.clone(), 24);
        for round in 0..6 {
            change(&store, &pages, round);
            store.snapshot().unwrap();
        }
        let kept = ids(&store);
        if expected.len() == 2 {
            assert!(kept.len() >= 2 && kept.len() < 6 && kept.ends_with(&[6]), "{options:?}: {kept:?}");
            // Every state since the older snapshot can be restored.
            let (files, from) = (Files::of(&disk), store.snapshots()[0].end);
            let last = store.lsn();
            for lsn in [from, from.next(), last] {
                let options = RebuildOptions { until: Some(lsn), ..RebuildOptions::default() };
                assert_eq!(rebuild(&files, &options).unwrap().table.lsn(), lsn);
            }
        } else if expected.len() == 1 {
            assert_eq!(kept, expected, "{options:?}");
        } else {
            // The oldest kept snapshot precedes the whole kept log. Snapshots in between may be removed, unless they
            // are young.
            assert_eq!((kept.first(), kept.last()), (expected.first(), expected.last()), "{options:?}");
        }
    }
}

/// The record of the newest snapshot may be missing, and there may be no seal after its redo. The record of the earlier
/// snapshots is then before its redo.
#[test]
fn kill_before_snapshot_record_keeps_other_versions() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 4);
    store.snapshot_with(SnapshotOptions::new().name("before")).unwrap();
    change(&store, &pages, 1);
    let before = disk.events();
    let newest = store.snapshot().unwrap().id;
    let moments = before..=disk.events();
    let mut unrecorded = 0;
    for event in moments {
        let left = disk.after_kill(Moment { event, tear: None });
        let files = Files::of(&left);
        let names_newest = files.0.contains_key(&FileName::Manifest(newest.0));
        let store = open_with(&left, small().retention(Retention::new().snapshots_kept(1))).unwrap();
        let named = store.snapshots().into_iter().filter(|info| info.name.as_deref() == Some("before"));
        assert_eq!(named.count(), 1, "killed at event {event}, where the newest is there: {names_newest}");
        unrecorded += usize::from(names_newest && store.recovered().snapshot == Some(newest));
    }
    assert!(unrecorded > 1, "no kill struck between the snapshot and its record");
}

/// A link that is kept for the snapshots that follow it has lost images that none of them names. States after the link
/// must be computed from the kept snapshot before it.
#[test]
fn state_after_unretained_link_needs_earlier_snapshot() {
    let disk = SimDisk::new();
    let (store, pages) =
        store_of(&disk, small().retention(Retention::new().snapshots_kept(1).log_kept(1 << 20)), 10);
    let first = store.snapshot().unwrap();
    let mut taken = Vec::new();
    for value in 1..=2 {
        change(&store, &pages[..2], value);
        taken.push((store.snapshot().unwrap(), State::of(&store)));
    }
    let (link, state) = &taken[0];
    assert_eq!(ids(&store), [first.id.0, taken[1].0.id.0]);
    assert_eq!(chain(&disk, taken[1].0.id), [taken[1].0.id, link.id, first.id]);
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let old = View::open_on(&shared, Some(&StatePoint::Lsn(link.end))).unwrap();
    assert_eq!(old.base(), Some(first.id));
    for (page, bytes) in &state.contents {
        let mut found = vec![0; bytes.len()];
        old.read(*page, 0, &mut found).unwrap();
        assert_eq!(&found, bytes, "page {page}");
    }
    drop(old);
    store.restore(StatePoint::Lsn(link.end)).unwrap();
    assert_eq!(State::of(&store).contents, state.contents);
}

/// Like the previous test, but no older snapshot is kept, and the log begins after the link.
#[test]
fn state_after_link_without_images_is_unreachable() {
    let disk = SimDisk::new();
    let options = small()
        .retention(Retention::new().snapshots_kept(1))
        .with(|options| options.log.segment_len = 64 << 10);
    let (store, pages) = store_of(&disk, options, 24);
    let base = store.snapshot().unwrap();
    for value in 0..400 {
        change(&store, &pages[..2], value);
    }
    let taken: Vec<SnapshotInfo> = (1..=2)
        .map(|value| {
            change(&store, &pages[..2], value);
            store.snapshot().unwrap()
        })
        .collect();
    let [link, kept] = &taken[..] else { unreachable!("two were taken") };
    assert_eq!(ids(&store), [kept.id.0]);
    assert_eq!(chain(&disk, kept.id), [kept.id, link.id, base.id]);
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let log_of = |id: SnapshotId| survey.links[&id].as_ref().unwrap().0.redo.segment;
    assert!(survey.log.segments().contains_key(&log_of(link.id)), "the log after it is there");
    assert!(!survey.log.segments().contains_key(&log_of(base.id)), "and that after the base is not");

    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let outside = |requested: Lsn, error: Error| match error {
        Error::NoSuchState(NoSuchState::OutsideWindow { requested: named, oldest, newest, .. }) => {
            assert_eq!((named, oldest, newest), (requested, kept.end, store.lsn()));
        }
        other => panic!("{other}"),
    };
    outside(link.end, View::open_on(&shared, Some(&StatePoint::Lsn(link.end))).unwrap_err());
    outside(link.end, store.restore(StatePoint::Lsn(link.end)).unwrap_err());
    // The state before the link's end cannot be viewed either.
    let before = Lsn(link.end.0 - 1);
    outside(before, View::open_on(&shared, Some(&StatePoint::Lsn(before))).unwrap_err());
}
