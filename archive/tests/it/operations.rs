//! Operations that random schedules do not contain: cuts, gaps, long runs and failures during an append.

use remanent_archive::Error;
use remanent_archive::line::{Line, Pruned, SnapshotParts, Verified, ViewPoint};
use remanent_archive::local::LocalStore;
use remanent_archive::object::{BatchPoint, INLINE_FRAMES_LEN_MAX, Kind, ObjectKey};
use remanent_archive::rules::Rules;
use remanent_archive::testing::store::{Restored, SimStore};
use remanent_format::Lsn;

use crate::stage::{Stage, archive_snapshot, block_on, commit, snapshot};

#[test]
fn cut_continues_line_at_earlier_batch() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 2);
    archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
    for _ in 0..2 {
        commit(&local, 2);
        archive_snapshot(&writer, &mut line, false).expect("the snapshot is archived");
    }
    let tokens = local.with(|store| store.tokens(0, 6));

    // Another machine continues the line after batch 3.
    let cutter = stage.process(1);
    let mut line = Line::new(cutter.archive());
    let mut state = Restored::default();
    let end = block_on(async {
        use remanent_archive::line::Nonces;
        line.find().await?;
        let claim = line.claim(cutter.bucket.draw()).await?;
        let end = line.read_state_at(Lsn(3), &mut state).await?;
        Ok::<_, Error>((end, claim))
    });
    let (end, claim) = end.expect("the state at the point can be read");
    assert_eq!(state.tokens(), tokens[..3]);
    let mut store = SimStore::restored(state, &end, Some(claim));
    store.plan_opening(99);
    store.publish_opening();
    stage.world.borrow_mut().machines[1] = Some(store);
    let mut local = cutter.local();
    let point = local.newest();
    assert_eq!(point.lsn, Lsn(3));
    block_on(line.fence_with_cut(&mut local, point)).expect("the line is cut");
    stage.world.borrow_mut().forget_restores();
    assert_eq!(stage.read().expect("the end can be restored"), tokens[..3]);

    commit(&local, 2);
    archive_snapshot(&cutter, &mut line, false).expect("the snapshot is archived");
    let after = stage.read().expect("the end can be restored");
    assert_eq!((after.len(), &after[..3]), (5, &tokens[..3]));

    // Reads an earlier batch of the new line, and a batch that both lines contain.
    let reader = stage.process(2);
    for (lsn, expected) in [(4, &after[..4]), (2, &tokens[..2])] {
        let mut line = Line::new(reader.archive());
        let mut state = Restored::default();
        block_on(async {
            line.find().await?;
            line.read_state_at(Lsn(lsn), &mut state).await
        })
        .expect("the point can be read");
        assert_eq!(state.tokens(), expected, "lsn {lsn}");
    }
}

#[test]
fn cut_below_all_manifests_is_refused() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    for _ in 0..3 {
        commit(&local, 2);
        archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
        block_on(writer.prune_as_writer(&mut line)).expect("the prune succeeds");
    }
    let reader = stage.process(2);
    let mut line = Line::new(reader.archive());
    let mut state = Restored::default();
    let refused = block_on(async {
        line.find().await?;
        line.read_state_at(Lsn(1), &mut state).await
    });
    assert!(matches!(refused, Err(Error::CutTooOld { lsn: 1 })), "{refused:?}");
}

/// A directory has lost log that was not archived. Its next manifest follows a gap, and lists the frames of the
/// snapshot.
#[test]
fn manifest_after_a_gap_archives_its_state() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 2);
    block_on(writer.append_run(&mut line, &local)).expect("the run is archived");
    commit(&local, 2);
    let redo = local.with(|store| store.snapshot_redo());
    commit(&local, 1);
    let rebased = local.with(|store| store.complete_rebase(redo));
    let appended = block_on(line.append_manifest(&local, &rebased)).expect("the manifest is archived");
    assert_eq!((appended.kind, appended.archived), (Kind::Manifest, rebased.end));
    let tokens = local.with(|store| store.tokens(0, 5));
    assert_eq!(stage.read().expect("the end can be restored"), tokens);

    commit(&local, 1);
    block_on(writer.append_run(&mut line, &local)).expect("the run after the gap is archived");
    assert_eq!(stage.read().expect("the end can be restored").len(), 6);

    let tokens = local.with(|store| store.tokens(0, 6));
    let reader = stage.process(2);
    for lsn in 1..=6 {
        let mut line = Line::new(reader.archive());
        let mut state = Restored::default();
        let read = block_on(async {
            line.find_to_read().await?;
            line.read_view(&ViewPoint::Batch(Lsn(lsn)), &mut state).await
        });
        if (3..5).contains(&lsn) {
            assert!(matches!(read, Err(Error::InGap { after: 2, until: 5, .. })), "lsn {lsn}: {read:?}");
        } else {
            read.expect("the state can be read");
            let found = state.tokens();
            assert!(found.len() as u64 >= lsn && tokens.starts_with(&found), "lsn {lsn}: {found:?}");
        }
    }
}

#[test]
fn manifest_before_its_run_is_refused() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 2);
    let early = snapshot(&local, true);
    let refused = block_on(line.append_manifest(&local, &early));
    assert!(matches!(refused, Err(Error::EndNotArchived { end: 2, archived: 0 })), "{refused:?}");
}

#[test]
fn long_run_lists_data_objects() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    let count = INLINE_FRAMES_LEN_MAX as u64 / 20 + 1;
    commit(&local, count);
    block_on(writer.append_run(&mut line, &local)).expect("the run is archived");
    let data = stage.world.borrow().objects.keys().filter(|key| key.to_string().starts_with("data/")).count();
    assert_eq!(data, 1);
    assert_eq!(stage.read().expect("the end can be restored").len() as u64, count);
}

#[test]
fn writer_calls_without_fence_are_refused() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    stage.world.borrow_mut().machines[0] = Some(SimStore::create(5));
    let mut line = Line::new(writer.archive());
    let run = block_on(line.append_run(&local));
    assert!(matches!(run, Err(Error::NoFence)), "{run:?}");
    let snapshot = SnapshotParts {
        snapshot: remanent_format::SnapshotId(1),
        redo: BatchPoint::default(),
        end: BatchPoint::default(),
        parts: Vec::new(),
        follows_gap: false,
    };
    let manifest = block_on(line.append_manifest(&local, &snapshot));
    assert!(matches!(manifest, Err(Error::NoFence)), "{manifest:?}");
}

/// A boundary is appended only over the newest manifest, and only if that manifest was verified (rule 18).
#[test]
fn prune_requires_verified_newest_manifest() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 2);
    archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
    let old = Verified::by_server(line.newest_manifest().expect("a manifest"));
    commit(&local, 2);
    archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
    assert_eq!(block_on(line.prune(old)).expect("the prune succeeds"), Pruned::Nothing);
    let verified = block_on(line.verify_manifest()).expect("the parts can be read").expect("a manifest");
    let pruned = block_on(line.prune(verified)).expect("the prune succeeds");
    assert!(matches!(pruned, Pruned::Boundary { number: 1, .. }), "{pruned:?}");
}

#[test]
fn verification_reads_every_part() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 2);
    archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
    let key = remanent_archive::object::ObjectKey::Data(line.newest_listed()[0].key);
    stage.world.borrow_mut().apply(&remanent_archive::testing::world::Effect::Delete(key));
    let refused = block_on(line.verify_manifest());
    assert!(matches!(refused, Err(Error::Damaged { key: found, .. }) if found == key), "{refused:?}");
}

/// While a bucket refuses to delete data objects, sweeps keep the line objects that list them, so that a later sweep
/// can delete the data objects.
#[test]
fn locked_data_is_deleted_after_the_lock_ends() {
    let data_after = |is_locked: bool| {
        let mut stage = Stage::new(Rules::default());
        let writer = stage.process(0);
        let local = writer.local();
        let mut line = block_on(writer.open()).expect("a new store opens");
        for round in 0..6 {
            stage.world.borrow_mut().locks_data = is_locked && round < 4;
            commit(&local, 2);
            archive_snapshot(&writer, &mut line, true).expect("the snapshot is archived");
            block_on(writer.prune_as_writer(&mut line)).expect("the prune succeeds");
        }
        let count =
            stage.world.borrow().objects.keys().filter(|key| matches!(key, ObjectKey::Data(_))).count();
        stage.read().expect("the end can be restored");
        count
    };
    assert_eq!(data_after(true), data_after(false));
}
