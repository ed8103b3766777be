//! Schedules of failures that random schedules rarely contain. The schedules in the table of `rules.rs` return an error
//! if a promise is violated. The other schedules are tests.

use std::future::Future;
use std::pin::Pin;

use remanent_archive::line::Takeover;
use remanent_archive::object::ObjectKey;
use remanent_archive::rules::{Rule, Rules};
use remanent_archive::testing::process::{Process, SimLine, Stop};
use remanent_archive::testing::store::{Restored, SimStore};
use remanent_archive::testing::world::Effect;

use crate::stage::{Stage, archive_snapshot, block_on, commit, snapshot, stall_when};

/// The future of a process that a schedule can stall.
type Stalled<'a, T> = Pin<Box<dyn Future<Output = Result<T, Stop>> + 'a>>;

/// [pred] An older copy of a directory contains the last archived batches, synced but not under a durable mark. Its
/// opening drops them and copies them to a new incarnation.
pub fn unproven_copy_returns(rules: Rules) -> Result<(), Stop> {
    let mut stage = Stage::new(rules);
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open())?;
    commit(&local, 3);
    block_on(writer.append_run(&mut line, &local))?;
    let token = stage.world.borrow_mut().draw();
    local.with(|store| {
        store.commit(token);
        store.durable = store.log.len();
    });
    let copy = local.with(|store| store.clone());
    local.with(SimStore::seal);
    block_on(writer.append_run(&mut line, &local))?;

    stage.put_copy(&copy, 1);
    let successor = stage.process(1);
    let opened = block_on(successor.open());
    assert!(rules.follow(Rule::Pred) == opened.is_err(), "{:?}", opened.err());
    stage.read().map(|_| ())
}

/// Archives a snapshot, copies the directory, and archives another base. Returns the line and the copy.
fn two_bases<'a>(writer: &'a Process) -> Result<(SimLine<'a>, SimStore), Stop> {
    let local = writer.local();
    let mut line = block_on(writer.open())?;
    commit(&local, 3);
    archive_snapshot(writer, &mut line, true)?;
    let copy = local.with(|store| store.clone());
    archive_snapshot(writer, &mut line, true)?;
    Ok((line, copy))
}

/// [dedup] A copy of a directory remembers that a part was archived, but a boundary has passed since and the part was
/// deleted.
pub fn copy_remembers_deleted_parts(rules: Rules) -> Result<(), Stop> {
    let mut stage = Stage::new(rules);
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open())?;
    commit(&local, 3);
    archive_snapshot(&writer, &mut line, true)?;
    let (copy, remembered) = (local.with(|store| store.clone()), line.newest_listed().to_vec());
    archive_snapshot(&writer, &mut line, true)?;
    block_on(writer.prune_as_writer(&mut line))?;
    archive_snapshot(&writer, &mut line, true)?;
    block_on(writer.prune_as_writer(&mut line))?;
    assert!(!stage.has(ObjectKey::Data(remembered[0].key)), "the part was deleted");

    stage.put_copy(&copy, 1);
    let successor = stage.process(1);
    let mut line = block_on(successor.open())?;
    line.remember(remembered);
    archive_snapshot(&successor, &mut line, false)?;
    stage.read().map(|_| ())
}

/// [recheck] While a writer creates a manifest, a boundary takes its position and releases the only object that lists
/// one of its parts. Deletes do not lag in this schedule, because the lag would hide the failure.
pub fn boundary_passes_shared_parts(rules: Rules) -> Result<(), Stop> {
    let rules = rules.without(Rule::Lag);
    let mut stage = Stage::new(rules);
    let writer = stage.process(0);
    let (_, copy) = two_bases(&writer)?;

    stage.put_copy(&copy, 1);
    let successor = stage.process(1);
    let local = successor.local();
    let mut line = block_on(successor.open())?;
    commit(&local, 1);
    block_on(successor.append_run(&mut line, &local))?;
    let shared = snapshot(&local, false);
    let mut manifest: Stalled<'_, ()> = Box::pin(successor.append_manifest(&mut line, &local, &shared));
    stall_when(&mut manifest, || stage.is_creating_in_line(&successor));
    let pruner = stage.process(2);
    block_on(pruner.prune())?;
    block_on(manifest)?;
    stage.read().map(|_| ())
}

/// [ukeys] A copy of a directory uploads a deleted part again. Then a delayed delete of the earlier object takes
/// effect.
pub fn late_delete_of_a_key(rules: Rules) -> Result<(), Stop> {
    let mut stage = Stage::new(rules);
    let writer = stage.process(0);
    let (mut line, copy) = two_bases(&writer)?;
    block_on(writer.prune_as_writer(&mut line))?;
    archive_snapshot(&writer, &mut line, true)?;
    let before: Vec<ObjectKey> = stage.world.borrow().objects.keys().copied().collect();
    block_on(writer.prune_as_writer(&mut line))?;
    let deleted: Vec<ObjectKey> = before.into_iter().filter(|key| !stage.has(*key)).collect();
    assert!(deleted.iter().any(|key| matches!(key, ObjectKey::Data(_))), "{deleted:?}");

    stage.put_copy(&copy, 1);
    let successor = stage.process(1);
    let mut line = block_on(successor.open())?;
    archive_snapshot(&successor, &mut line, false)?;
    for key in deleted {
        stage.world.borrow_mut().apply(&Effect::Delete(key));
    }
    stage.read().map(|_| ())
}

/// [exact] A pruner stalls after it has created its boundary. The writer appends a manifest that shares parts, and a
/// newer boundary. The pruner sweeps before the writer does.
pub fn stalled_pruner_meets_a_boundary(rules: Rules) -> Result<(), Stop> {
    let mut stage = Stage::new(rules);
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open())?;
    commit(&local, 3);
    archive_snapshot(&writer, &mut line, false)?;
    block_on(writer.prune_as_writer(&mut line))?;
    commit(&local, 1);
    archive_snapshot(&writer, &mut line, false)?;
    // The `redo` of this snapshot is in a run below the pruner's boundary.
    commit(&local, 1);
    let redo = local.with(|store| store.snapshot_redo());
    commit(&local, 1);
    let late = local.with(|store| store.complete_snapshot(redo, false));
    block_on(writer.append_run(&mut line, &local))?;

    let pruner = stage.process(2);
    let mut prune: Stalled<'_, ()> = Box::pin(pruner.prune());
    let position = ObjectKey::Line(line.next());
    // The boundary exists, and the pruner has not checked for newer boundaries yet.
    stall_when(&mut prune, || stage.has(position));
    block_on(writer.append_manifest(&mut line, &local, &late))?;
    let mut newer: Stalled<'_, ()> = Box::pin(writer.prune_as_writer(&mut line));
    stall_when(&mut newer, || stage.has(ObjectKey::Bound(3)));
    block_on(prune)?;
    block_on(newer)?;
    stage.read().map(|_| ())
}

/// [lag] A reader stalls after it has found the end. Then one boundary passes the manifest that it reads.
pub fn reader_meets_one_boundary(rules: Rules) -> Result<(), Stop> {
    let mut stage = Stage::new(rules);
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open())?;
    commit(&local, 3);
    archive_snapshot(&writer, &mut line, true)?;
    let reader = stage.process(1);
    let mut stalled = SimLine::new(reader.archive());
    block_on(stalled.find())?;
    commit(&local, 1);
    archive_snapshot(&writer, &mut line, true)?;
    block_on(writer.prune_as_writer(&mut line))?;
    let mut state = Restored::default();
    let read = block_on(stalled.read_state(&mut state));
    assert!(read.is_err() || state.tokens().len() == 3);
    read.map(|_| ()).map_err(Stop::from)
}

/// Two processes stall before they create their fences. Boundaries pass the position of the fences, and its object is
/// deleted. One of the processes creates its fence in the hole and stops. The other process finds that fence, and then
/// an object that does not follow it.
#[test]
fn fence_in_a_hole_is_not_damage() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 1);
    archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
    let position = ObjectKey::Line(line.next());
    let (first, second) = (stage.process(1), stage.process(2));
    let mut openers: Vec<Stalled<'_, ()>> = Vec::new();
    for process in [&first, &second] {
        let mut opener: Stalled<'_, ()> = Box::pin(async { process.open().await.map(|_| ()) });
        stall_when(&mut opener, || stage.is_creating_in_line(process));
        openers.push(opener);
    }
    for _ in 0..2 {
        commit(&local, 1);
        archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
        block_on(writer.prune_as_writer(&mut line)).expect("the prune succeeds");
    }
    assert!(!stage.has(position), "the position was deleted");
    for opener in openers {
        let stopped = block_on(opener);
        assert!(matches!(stopped, Err(Stop::Expected(_))), "{stopped:?}");
        assert!(stage.has(position), "the first opener created its fence");
    }
    assert_eq!(stage.read().map(|state| state.len()), Ok(3));
}

/// A directory is rejected if another one created the newest fence, unless the operator permits a takeover.
#[test]
fn unknown_fence_is_refused_without_takeover() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 2);
    block_on(writer.append_run(&mut line, &local)).expect("the run is archived");
    let other = stage.process(1);
    block_on(other.open()).expect("another machine restores the archive");

    let mut again = stage.process(0);
    again.takeover = Takeover::Refused;
    let refused = block_on(again.open()).err();
    let Some(Stop::Expected(reason)) = refused else { panic!("{refused:?}") };
    assert!(reason.contains("in the term of a fence that this directory did not create"), "{reason}");
}
