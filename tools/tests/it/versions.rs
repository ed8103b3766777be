//! `versions`: every state that can be loaded is listed exactly once, and no other.

use std::fs;

use remanent::{Options, Place, Retention, SnapshotOptions, Store};
use serde_json::{Value, json};

use crate::command::{Scratch, run};
use crate::weights::{file, tensor};

/// Returns the versions that the command lists.
fn listed(dir: &str) -> Vec<Value> {
    run(&["versions", dir, "--json"]).expect(0).json()
}

fn column(listed: &[Value], name: &str) -> Vec<Value> {
    listed.iter().map(|version| version[name].clone()).collect()
}

#[test]
fn imports_have_note_step_and_bytes() {
    let scratch = Scratch::new();
    let (store, path) = (scratch.store(), scratch.path("file"));
    for (number, note) in ["first", "second"].iter().enumerate() {
        fs::write(&path, file(&[tensor("w", "U8", "[4]", [number as u8; 4])])).unwrap();
        run(&["import", &store, &path, "--note", note, "--root", &format!("step={number}")]).expect(0);
    }
    let found = listed(&store);
    assert_eq!(column(&found, "lsn"), [1, 2]);
    assert_eq!(column(&found, "note"), ["first", "second"]);
    assert_eq!(column(&found, "step"), [0, 1]);
    assert!(found.iter().all(|version| version["bytes"].as_u64() > Some(64)), "{found:?}");
    let table = run(&["versions", &store]).expect(0).out;
    assert!(table.contains("second") && table.lines().count() == 3, "{table}");
}

#[test]
fn version_time_is_listed_but_not_compared() {
    let path = Scratch::new();
    let store = Store::open(path.store()).unwrap();
    for seconds in [1_700_000_000.25, 1_700_000_001.5] {
        let mut batch = store.batch();
        batch.set_root("saved at", seconds);
        store.commit(batch).unwrap();
    }
    store.close().unwrap();
    let found = listed(&path.store());
    assert_eq!(column(&found, "created_unix_ms"), [1_700_000_000_250_u64, 1_700_000_001_500]);
    let same = run(&["diff", &path.store(), "--from", "lsn:1", "--to", "lsn:2"]).expect(0);
    assert_eq!(same.out, "total: 0 pages changed, 0 bytes\n");
}

#[test]
fn exactly_the_loadable_versions_are_listed() {
    let scratch = Scratch::new();
    let path = scratch.store();
    let store = Options::new().retention(Retention::new().snapshots_kept(100)).open(&path).unwrap();
    for number in 1..=9_u64 {
        let mut batch = store.batch();
        let page = batch.create(8, Place::Host).page();
        batch.write(page, 0, &number.to_le_bytes());
        // The fifth and the sixth batch are parts of an unfinished save.
        match number {
            5 => _ = batch.set_root("saving", true),
            7 => _ = batch.remove_root("saving"),
            _ => {}
        }
        store.commit(batch).unwrap();
        match number {
            2 => _ = store.snapshot_with(SnapshotOptions::new().name("kept")).unwrap(),
            4 => _ = store.snapshot().unwrap(),
            _ => {}
        }
    }
    store.prune(&Retention::default().snapshots_kept(1)).unwrap();
    store.close().unwrap();
    let found = listed(&path);
    assert_eq!(column(&found, "lsn"), [2, 4, 7, 8, 9]);
    assert_eq!(found[0]["name"], "kept");
    for lsn in 1..=9_u64 {
        let is_loadable = run(&["diff", &path, "--from", &format!("lsn:{lsn}")]).code != 2;
        let is_listed = found.iter().any(|version| version["lsn"] == lsn);
        assert_eq!(is_loadable, is_listed || [5, 6].contains(&lsn), "lsn {lsn}");
    }
}

#[test]
fn versions_of_several_ranks_come_from_points() {
    let scratch = Scratch::new();
    let run_dir = scratch.path("run");
    let points = format!("{run_dir}/points");
    fs::create_dir_all(&points).unwrap();
    let sum = "f634b90c9e7311701f541bd952ec0506";
    let body = r#"{"step":7,"name":"best","created":1700000000.5,"parts":[["aa","step 7 @3",3],["bb","step 7 @4",4]]}"#;
    let point = format!("{{\"remanent version\": 1, \"blake2b\": \"{sum}\"}}\n{body}\n");
    fs::write(format!("{points}/0000000001.point"), &point).unwrap();
    let found = listed(&run_dir);
    let expected = json!({
        "schema": 1, "lsn": 3, "step": 7, "name": "best", "note": null, "created_unix_ms": 1_700_000_000_500_u64,
        "bytes": null, "ranks": [3, 4],
    });
    assert_eq!(found, [expected]);

    // Changes the step, so that the checksum does not match.
    fs::write(format!("{points}/0000000002.point"), point.replace("\"step\":7", "\"step\":8")).unwrap();
    let damaged = run(&["versions", &run_dir, "--json"]).expect(1);
    assert_eq!(column(&damaged.json(), "step"), [7]);
    assert!(damaged.err.contains("0000000002.point"), "{}", damaged.err);
}

#[test]
fn directory_without_a_store_is_an_error() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("empty")).unwrap();
    for name in ["empty", "nothing"] {
        let failed = run(&["versions", &scratch.path(name)]).expect(2);
        assert!(failed.err.contains(name), "{}", failed.err);
    }
}
