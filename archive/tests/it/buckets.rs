//! Buckets with faults: probes, damage, lost archives and wrong hints.

use remanent_archive::Error;
use remanent_archive::error::Damage;
use remanent_archive::line::{Line, probe};
use remanent_archive::object::{Hint, ObjectKey};
use remanent_archive::rules::Rules;
use remanent_archive::testing::process::{Process, SimLine, Stop};
use remanent_archive::testing::store::Restored;
use remanent_archive::testing::world::Effect;
use remanent_format::StoreId;

use crate::stage::{Stage, archive_snapshot, block_on, commit};

/// Opens a store on machine 0, and archives three batches, a snapshot and another batch.
fn archived<'a>(writer: &'a Process) -> SimLine<'a> {
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    commit(&local, 3);
    archive_snapshot(writer, &mut line, true).expect("the snapshot is archived");
    commit(&local, 1);
    block_on(writer.append_run(&mut line, &local)).expect("the run is archived");
    line
}

fn delete(stage: &Stage, key: ObjectKey) {
    assert!(stage.has(key), "{key} is to be deleted");
    stage.world.borrow_mut().apply(&Effect::Delete(key));
}

/// Reads the end of the line without checking the promises.
fn read(stage: &mut Stage) -> Result<Vec<u64>, Error> {
    let reader = stage.process(2);
    let mut line = Line::new(reader.archive());
    let mut state = Restored::default();
    block_on(async {
        line.find().await?;
        line.read_state(&mut state).await?;
        Ok(state.tokens())
    })
}

#[test]
fn probe_of_sound_bucket_leaves_no_object() {
    let mut stage = Stage::new(Rules::default());
    let process = stage.process(0);
    block_on(probe(process.archive(), StoreId([1; 16]))).expect("the bucket is sound");
    assert!(stage.world.borrow().objects.is_empty());
}

#[test]
fn probe_detects_a_bucket_that_ignores_conditions() {
    let mut stage = Stage::new(Rules::default());
    let mut process = stage.process(0);
    process.bucket.ignores_condition = true;
    let refused = block_on(probe(process.archive(), StoreId([1; 16])));
    assert!(matches!(refused, Err(Error::NotSupported { .. })), "{refused:?}");
    let text = refused.map_err(|error| error.to_string());
    let expected = "the bucket does not support archives: a second create of one key succeeds; \
                    use another bucket or server";
    assert_eq!(text, Err(expected.to_owned()));
}

#[test]
fn missing_object_is_reported_with_its_key() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    archived(&writer);
    let part = stage.world.borrow().objects.keys().copied().find(|key| matches!(key, ObjectKey::Data(_)));
    delete(&stage, part.expect("the snapshot has a part"));
    let found = read(&mut stage);
    assert!(
        matches!(found, Err(Error::Damaged { key, damage: Damage::Missing }) if Some(key) == part),
        "{found:?}"
    );
}

#[test]
fn damaged_byte_is_reported_with_its_offset() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    archived(&writer);
    let key = ObjectKey::Line(4);
    let mut bytes = stage.world.borrow().objects[&key].to_vec();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    stage.world.borrow_mut().apply(&Effect::Put(key, bytes.into()));
    let found = read(&mut stage).expect_err("the object is damaged").to_string();
    assert!(
        found.starts_with("line/0000000000000004 is damaged: at offset 104: body checksum is 0x"),
        "{found}"
    );
}

#[test]
fn object_replaced_by_racing_server_is_damage() {
    // The server let two creates of one position succeed. The next object contains the nonce of the first one.
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let mut line = archived(&writer);
    let local = writer.local();
    commit(&local, 1);
    block_on(writer.append_run(&mut line, &local)).expect("the run is archived");
    let key = ObjectKey::Line(4);
    let bytes = stage.world.borrow().objects[&key].to_vec();
    let mut object = remanent_archive::object::LineObject::decode(&bytes, 4, None).expect("a valid object");
    object.nonce.0[15] ^= 1;
    let other = object.encode().expect("a valid object");
    stage.world.borrow_mut().apply(&Effect::Put(key, other.into()));
    let found = read(&mut stage);
    let next = ObjectKey::Line(5);
    assert!(
        matches!(found, Err(Error::Damaged { key, damage: Damage::NotNext }) if key == next),
        "{found:?}"
    );
}

#[test]
fn emptied_archive_is_refused() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    archived(&writer);
    stage.world.borrow_mut().objects.clear();
    let again = stage.process(0);
    let Err(Stop::Violation(reason)) = block_on(again.open()) else { panic!("the archive is begun anew") };
    assert!(
        reason
            .starts_with("the archive ends at position 0, but this directory created a fence at position 1"),
        "{reason}"
    );
    assert!(stage.world.borrow().objects.is_empty());
}

#[test]
fn archive_of_another_store_is_refused() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    archived(&writer);
    stage.world.borrow_mut().machines[1] = Some(remanent_archive::testing::store::SimStore::create(77));
    let other = stage.process(1);
    let Err(Stop::Expected(reason)) = block_on(other.open()) else { panic!("the archive is opened") };
    assert!(reason.starts_with("the archive belongs to store "), "{reason}");
}

#[test]
fn wrong_hint_does_not_change_the_result() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let mut line = archived(&writer);
    block_on(writer.prune_as_writer(&mut line)).expect("the boundary is created");
    let expected = read(&mut stage).expect("the line can be read");
    let store = line.store().expect("the line has objects");
    for hint in [
        Hint { end: 4, manifest: 3, bound: 1, ..Hint::default() },
        Hint { end: 900, manifest: 901, bound: 902, ..Hint::default() },
        Hint { end: 1, ..Hint::default() },
    ] {
        stage.world.borrow_mut().apply(&Effect::Put(ObjectKey::Newest, hint.encode(store, 1).into()));
        assert_eq!(read(&mut stage).expect("the line can be read"), expected, "{hint:?}");
    }
    stage.world.borrow_mut().apply(&Effect::Put(ObjectKey::Newest, b"no hint".as_slice().into()));
    assert_eq!(read(&mut stage).expect("the line can be read"), expected);
}

#[test]
fn end_of_long_line_is_found() {
    let mut stage = Stage::new(Rules::default());
    let writer = stage.process(0);
    let local = writer.local();
    let mut line = block_on(writer.open()).expect("a new store opens");
    for count in 1..=70 {
        commit(&local, 1);
        block_on(writer.append_run(&mut line, &local)).expect("the run is archived");
        assert_eq!(read(&mut stage).expect("the line can be read").len(), count);
    }
}
