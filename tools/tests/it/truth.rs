//! The command agrees with an open of the same store, and accepts the names that it prints.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::options::{Compression, ImageOptions, LogOptions, Retention};
use remanent::{Key, Options, Place, SnapshotOptions, Store};

use crate::command::{Scratch, run};
use crate::inspect::{copy, files, newest, small_store};

/// Flips a bit in the frame of the batch with this Lsn.
fn damage_batch(store: &str, lsn: u64) {
    let frames = run(&["log", store, "--json"]).expect(0).json();
    let frame = frames.iter().find(|frame| frame["lsn"] == lsn && frame["kind"] == "batch").unwrap();
    let segment = Path::new(store).join(format!("log/{:016x}.log", frame["segment"].as_u64().unwrap()));
    let mut bytes = fs::read(&segment).unwrap();
    bytes[frame["offset"].as_u64().unwrap() as usize + 80 + 20] ^= 4;
    fs::write(segment, bytes).unwrap();
}

/// Opens a store with small segments and uncompressed images.
fn open(path: &str) -> Store {
    Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .images(ImageOptions::new().compression(Compression::Off))
        .open(path)
        .unwrap()
}

fn commit(store: &Store, step: u64) {
    let mut batch = store.batch();
    batch.set_root("step", step);
    if step == 1 {
        batch.create(5000, Place::Host).key(Key::new("weights").unwrap());
    } else {
        batch.fill(store.pages().unwrap().next().unwrap().page, 0, 5000, &[step as u8]);
    }
    let position = store.commit(batch).unwrap().position;
    store.wait_durable(position.lsn).unwrap();
}

#[test]
fn named_snapshot_does_not_replace_damaged_log() {
    let scratch = Scratch::new();
    let store = open(&scratch.store());
    commit(&store, 1);
    store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    commit(&store, 2);
    store.close().unwrap();
    let path = scratch.store();
    run(&["verify", &path]).expect(0);
    damage_batch(&path, 2);
    assert!(Store::open(&path).is_err());
    let verify = run(&["verify", &path]).expect(1).out;
    assert!(verify.contains("the store cannot be opened"), "{verify}");
    assert!(verify.contains("cost: the store"), "{verify}");
    let last = run(&["verify", &path, "--json"]).expect(1).json().pop().unwrap();
    assert!(last["opens_from"].is_null(), "{last}");
}

#[test]
fn missing_retained_snapshot_is_reported() {
    let scratch = Scratch::new();
    let store = open(&scratch.store());
    commit(&store, 1);
    store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    for step in 2..4 {
        commit(&store, step);
        store.snapshot().unwrap();
    }
    store.close().unwrap();
    let path = scratch.store();
    run(&["verify", &path]).expect(0);
    let manifest = Path::new(&path).join("snapshots/0000000000000001.manifest");
    fs::remove_file(manifest).unwrap();
    let verify = run(&["verify", &path]).expect(1).out;
    assert!(verify.contains("snapshots/0000000000000001.manifest at offset 0: missing"), "{verify}");
    assert!(
        verify.contains("a kept snapshot is no longer available") && verify.contains("recovery starts from"),
        "{verify}"
    );
}

#[test]
fn store_without_identity_file_does_not_open() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let path = scratch.store();
    let identity = Path::new(&path).join("STORE");
    let mut bytes = fs::read(&identity).unwrap();
    bytes[20] ^= 1;
    fs::write(&identity, bytes).unwrap();
    assert!(Store::open(&path).is_err());
    let verify = run(&["verify", &path]).expect(1).out;
    assert!(verify.contains("the store cannot be opened"), "{verify}");
    assert!(!verify.contains("recovery starts from"), "{verify}");
    assert!(run(&["verify", &path, "--json"]).expect(1).json().pop().unwrap()["opens_from"].is_null());
}

#[test]
fn dropping_name_removes_only_its_snapshot() {
    let scratch = Scratch::new();
    let store = open(&scratch.store());
    for step in 1..7 {
        commit(&store, step);
        match step {
            2 => store.snapshot_with(SnapshotOptions::new().name("good")).unwrap(),
            4 => store.snapshot_with(SnapshotOptions::new().name("better")).unwrap(),
            _ => store.snapshot().unwrap(),
        };
    }
    let kept = store.snapshots();
    store.close().unwrap();
    let path = scratch.store();
    let sound = Scratch::new();
    copy(&path, &sound.store());
    let ids = |store: &str| -> Vec<u64> {
        let lines = run(&["snapshots", store, "--json"]).expect(0).json();
        let kept = lines.iter().filter(|line| line["verified"] == true);
        kept.map(|line| line["snapshot"].as_u64().unwrap()).collect()
    };
    let (all, name) = (ids(&path), "good");
    let given_up = kept.iter().find(|info| info.name.as_deref() == Some(name)).unwrap().id.0;
    for more in [&[][..], &["--yes"]] {
        let wrong = run(&[&["prune", &path, "--name", "god"], more].concat()).expect(2);
        assert!(wrong.err.contains("there is no snapshot named \"god\""), "{}", wrong.err);
    }
    assert_eq!(ids(&path), all);
    let pruned = run(&["prune", &path, "--name", name, "--yes", "--json"]).expect(0).json().remove(0);
    assert_eq!(pruned["snapshots"], serde_json::json!([given_up]), "{pruned}");
    let removed = pruned["files"].as_array().unwrap();
    assert!(removed.iter().all(|file| !file["file"].as_str().unwrap().starts_with("log/")), "{pruned}");
    // Its manifest may still exist, as a link of other snapshots.
    let again = run(&["prune", &path, "--name", name]).expect(2);
    assert!(again.err.contains("there is no snapshot named \"good\""), "{}", again.err);
    let expected: Vec<u64> = all.iter().copied().filter(|id| *id != given_up).collect();
    assert_eq!(ids(&path), expected);
    run(&["verify", &path]).expect(0);
    // Rules given together with a name are applied too.
    let path = sound.store();
    let both = run(&["prune", &path, "--name", name, "--snapshots", "1", "--yes", "--json"]).expect(0);
    assert!(both.json()[0]["snapshots"].as_array().unwrap().len() > 1, "{}", both.out);
}

/// The newest snapshot has the name, and the log before it is removed: the store can only be opened from this
/// snapshot.
#[test]
fn dropping_last_snapshot_name_keeps_store() {
    let scratch = Scratch::new();
    let path = scratch.store();
    let store = open(&path);
    for step in 1..5 {
        commit(&store, step);
        store.snapshot().unwrap();
    }
    store.snapshot_with(SnapshotOptions::new().name("last")).unwrap();
    store.close().unwrap();
    run(&["prune", &path, "--snapshots", "1", "--log-bytes", "0", "--yes"]).expect(0);
    let before = run(&["pages", &path, "--json"]).expect(0).out;
    for more in [&[][..], &["--yes"]] {
        let output = run(&[&["prune", &path, "--name", "last"], more].concat()).expect(0).out;
        assert!(output.contains("snapshot 5 is kept: it is the newest snapshot"), "{output}");
    }
    let counted =
        run(&["prune", &path, "--name", "last", "--snapshots", "1", "--json"]).expect(0).json().remove(0);
    assert_eq!(counted["kept"], serde_json::json!([5]), "{counted}");
    run(&["verify", &path]).expect(0);
    assert_eq!(run(&["pages", &path, "--json"]).expect(0).out, before);
    open(&path).close().unwrap();
}

#[test]
fn keys_are_accepted_as_printed() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let path = scratch.store();
    let shown = run(&["pages", &path]).expect(0).out;
    assert!(shown.contains("0xff"), "{shown}");
    let dumped = run(&["dump", &path, "key:0xff"]).expect(0);
    assert_eq!(dumped.out.as_bytes(), [0; 16]);
    run(&["dump", &path, "key:0xfe"]).expect(2);
    let blamed = run(&["blame", &path, "key:weights[4096]", "--json"]).expect(0);
    assert_eq!(blamed.out, run(&["blame", &path, "weights[4096]", "--json"]).expect(0).out);
    run(&["blame", &path, "key:0xff[3]"]).expect(0);
}

#[test]
fn missing_snapshots_and_snapshot_names_are_printed() {
    let scratch = Scratch::new();
    let store = open(&scratch.store());
    commit(&store, 1);
    let path = scratch.store();
    assert_eq!(run(&["snapshots", &path]).expect(0).out, "no snapshots\n");
    assert_eq!(run(&["snapshots", &path, "--json"]).expect(0).out, "");
    store.snapshot_with(SnapshotOptions::new().name("good \"one\"")).unwrap();
    store.close().unwrap();
    let info = run(&["info", &path]).expect(0).out;
    assert!(info.contains(r#", named "good \"one\"""#), "{info}");
    let info = run(&["info", &path, "--json"]).expect(0).json().remove(0);
    assert_eq!(info["snapshots"][0]["name"], "good \"one\"");
    assert!(info["incarnation_random"].as_u64().is_some(), "{info}");
    let version = run(&["--version"]).expect(0).out;
    assert!(version.starts_with("remanent ") && !version.contains("tools"), "{version}");
}

#[test]
fn log_counts_notes_and_shows_the_incarnation() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let frames = run(&["log", &scratch.store(), "--json"]).expect(0).json();
    let noted = frames.iter().find(|frame| frame["note"] == "a second page").unwrap();
    assert_eq!(noted["kinds"], serde_json::json!({ "create": 1, "note": 1 }));
    let info = run(&["info", &scratch.store(), "--json"]).expect(0).json().remove(0);
    assert!(frames.iter().all(|frame| frame["incarnation_random"] == info["incarnation_random"]), "{info}");
}

#[test]
fn damage_is_reported_once() {
    let scratch = Scratch::new();
    let store = small_store(&scratch);
    store.snapshot().unwrap();
    store.close().unwrap();
    let path = scratch.store();
    // Damages the newest manifest, and an image that the older snapshot needs.
    let manifest = newest(&path, "snapshots", "manifest");
    let mut bytes = fs::read(&manifest).unwrap();
    let half = bytes.len() / 2;
    bytes[20] ^= 1;
    bytes[half + 20] ^= 1;
    fs::write(&manifest, bytes).unwrap();
    let image = Path::new(&path).join("pages/0000000000000001.pages");
    let mut bytes = fs::read(&image).unwrap();
    bytes[4096 + 400] ^= 1;
    fs::write(&image, bytes).unwrap();
    for command in [&["pages", &path][..], &["dump", &path, "2"], &["info", &path], &["log", &path]] {
        let message = run(command).expect(1).err;
        for line in message.lines() {
            assert_eq!(message.matches(line).count(), 1, "{command:?}: {message}");
        }
    }
}

#[test]
fn refused_import_leaves_no_files() {
    let scratch = Scratch::new();
    let file = scratch.path("weights.safetensors");
    let header = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2]].concat())
        .unwrap();
    let store = scratch.store();
    // The engine rejects a note of this length, after the store was created.
    let refused = format!("{}=1", "n".repeat(256));
    run(&["import", &store, &file, "--root", &refused]).expect(2);
    assert!(!Path::new(&store).exists(), "a store was left behind");
    // An existing directory is kept, and stays empty.
    fs::create_dir(&store).unwrap();
    run(&["import", &store, &file, "--root", &refused]).expect(2);
    assert_eq!(fs::read_dir(&store).unwrap().count(), 0);
    // An existing store is unchanged.
    run(&["import", &store, &file]).expect(0);
    let pages = run(&["pages", &store, "--json"]).expect(0).out;
    fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 3]].concat())
        .unwrap();
    run(&["import", &store, &file, "--root", &refused]).expect(2);
    assert_eq!(run(&["pages", &store, "--json"]).expect(0).out, pages);
}

#[test]
fn concurrent_writes_are_not_reported_as_damage() {
    let scratch = Scratch::new();
    let options = Options::new()
        .log(LogOptions::new().segment_len(16 << 10))
        .retention(Retention::new().snapshots_kept(1));
    let store = options.open(scratch.store()).unwrap();
    commit(&store, 1);
    let page = store.pages().unwrap().next().unwrap().page;
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut step = 0_u64;
            while !is_done.load(Ordering::Relaxed) {
                step += 1;
                let mut batch = store.batch();
                batch.fill(page, 0, 5000, &[step as u8]).write(page, 0, &[step as u8; 3000]);
                store.commit(batch).unwrap();
                if step.is_multiple_of(64) {
                    store.snapshot().unwrap();
                }
            }
        });
        let looks: Vec<_> =
            (0..12).map(|look| run(&[["verify", "info", "pages"][look % 3], &scratch.store()])).collect();
        is_done.store(true, Ordering::Relaxed);
        for look in looks {
            assert_eq!(look.code, 0, "{}{}", look.out, look.err);
        }
    });
    store.close().unwrap();
    run(&["verify", &scratch.store()]).expect(0);
}

#[test]
fn read_only_commands_do_not_modify_the_store() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let path = scratch.store();
    let before = files(&path);
    for args in [
        &["verify", &path][..],
        &["snapshots", &path],
        &["dump", &path, "1"],
        &["blame", &path, "weights[0]"],
        &["prune", &path, "--snapshots", "1"],
        &["info", &path],
    ] {
        run(args).expect(0);
    }
    assert!(files(&path) == before);
    // `prune` without `--yes` works while a writer has the store open, and does not prevent an open for writing.
    let store = Store::open(&path).unwrap();
    run(&["prune", &path, "--snapshots", "1"]).expect(0);
    run(&["prune", &path, "--snapshots", "1", "--yes"]).expect(3);
    store.close().unwrap();
}

/// `info` marks the files that an open and a prune remove, and no others.
#[test]
fn unneeded_files_are_removed() {
    let scratch = Scratch::new();
    let path = scratch.store();
    let store = Options::new().retention(Retention::new().snapshots_kept(1)).open(&path).unwrap();
    let page = {
        let mut batch = store.batch();
        let page = batch.create(4096, Place::Host).page();
        batch.write(page, 0, &[1; 4096]);
        store.commit(batch).unwrap().pages[0]
    };
    for round in 0..3 {
        let mut batch = store.batch();
        batch.write(page, 0, &[round; 4096]);
        store.commit(batch).unwrap();
        store.snapshot().unwrap();
    }
    store.snapshot_with(SnapshotOptions::new().name("kept")).unwrap();
    store.close().unwrap();
    let deletable = || -> Vec<String> {
        let info = run(&["info", &path, "--json"]).expect(0).json().remove(0);
        let listed = info["files"].as_array().unwrap().iter().filter(|file| file["deletable"] == true);
        listed.map(|file| file["file"].as_str().unwrap().to_owned()).collect()
    };
    let there = |name: &String| Path::new(&path).join(name).exists();
    // Files that a crash leaves: an incomplete one, and images that no snapshot names.
    let images = fs::read_dir(Path::new(&path).join("pages")).unwrap().map(|entry| entry.unwrap().path());
    let image = fs::read(images.min().unwrap()).unwrap();
    fs::write(Path::new(&path).join("pages/00000000000000f0.tmp"), b"cut short").unwrap();
    for number in ["00000000000000f0", "00000000000000f1"] {
        fs::write(Path::new(&path).join("pages").join(number).with_extension("pages"), &image).unwrap();
    }
    let marked = deletable();
    assert_eq!(marked, ["pages/00000000000000f0.pages", "pages/00000000000000f0.tmp"]);
    run(&["prune", &path, "--name", "kept", "--yes"]).expect(0);
    assert!(!marked.iter().any(there), "{marked:?}");
    assert_eq!(deletable(), Vec::<String>::new());
}
