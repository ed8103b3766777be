//! `verify` checks everything that a kept state needs, and `pages` shows what an open finds.

use std::fs;
use std::path::{Path, PathBuf};

use remanent::options::{Compression, ImageOptions, LogOptions, SnapshotSchedule};
use remanent::{Options, Place, Retention, Store};

use crate::command::{Scratch, run};
use crate::inspect::copy;
use crate::weights::{file, tensor};

fn import(scratch: &Scratch, store: &str, seed: u8) {
    let path = scratch.path("weights.safetensors");
    fs::write(&path, file(&[tensor("a", "U8", "[4096]", vec![seed; 4096])])).unwrap();
    run(&["import", store, &path]).expect(0);
}

/// Returns the segment of a batch's frame, and the offset of its payload.
fn payload_of(store: &str, lsn: u64) -> (PathBuf, usize) {
    let frames = run(&["log", store, "--json"]).expect(0).json();
    let frame = frames.iter().find(|frame| frame["lsn"] == lsn && frame["kind"] == "batch").unwrap();
    let segment = Path::new(store).join(format!("log/{:016x}.log", frame["segment"].as_u64().unwrap()));
    (segment, frame["offset"].as_u64().unwrap() as usize + 80)
}

#[test]
fn verify_finds_damage_to_every_forkable_state() {
    let scratch = Scratch::new();
    let path = scratch.store();
    import(&scratch, &path, 1);
    run(&["snapshot", &path]).expect(0);
    import(&scratch, &path, 2);
    run(&["snapshot", &path, "--name", "x"]).expect(0);
    import(&scratch, &path, 3);
    import(&scratch, &path, 4);
    run(&["snapshot", &path]).expect(0);
    run(&["prune", &path, "--snapshots", "2", "--yes"]).expect(0);
    import(&scratch, &path, 5);
    let fork = |store: &str, lsn: u64| {
        let target = scratch.path(&format!("fork of {lsn}"));
        let forked = run(&["fork", store, &target, "--at", &format!("lsn:{lsn}")]);
        _ = fs::remove_dir_all(&target);
        forked
    };
    run(&["verify", &path]).expect(0);
    (2..=5).for_each(|lsn| _ = fork(&path, lsn).expect(0));
    let (segment, payload) = payload_of(&path, 3);
    let segment = segment.strip_prefix(&path).unwrap().to_owned();
    for is_removed in [false, true] {
        let damaged = scratch.path(if is_removed { "removed" } else { "flipped" });
        copy(&path, &damaged);
        let segment = Path::new(&damaged).join(&segment);
        if is_removed {
            fs::remove_file(&segment).unwrap();
        } else {
            let mut bytes = fs::read(&segment).unwrap();
            bytes[payload + 40] ^= 1;
            fs::write(&segment, bytes).unwrap();
        }
        let verify = run(&["verify", &damaged]).expect(1).out;
        assert!(verify.contains("cost: the state after lsn 3 is no longer available"), "{verify}");
        assert!(verify.contains("recovery starts from snapshot 3"), "{verify}");
        fork(&damaged, 3).expect(1);
        fork(&damaged, 2).expect(0);
        fork(&damaged, 5).expect(0);
    }
}

const LEN: usize = 3000;

/// Creates a page on disk whose newest image is damaged, while an older snapshot and the log still contain
/// its bytes.
fn with_a_damaged_page_on_disk(scratch: &Scratch) -> String {
    let options = Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .images(ImageOptions::new().compression(Compression::Off).chunk_len(4096));
    let options = options
        .retention(Retention::new().log_kept(1 << 30))
        .snapshots(SnapshotSchedule::new().log_bytes(None));
    let path = scratch.store();
    let store = options.open(&path).unwrap();
    let mut batch = store.batch();
    batch.create_from(vec![5; LEN], Place::Disk);
    let page = store.commit(batch).unwrap().pages[0];
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.fill(page, 0, LEN as u64, &[6]);
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    store.close().unwrap();
    let pages = fs::read_dir(Path::new(&path).join("pages")).unwrap().map(|entry| entry.unwrap().path());
    let newest = pages.filter(|path| path.extension().is_some_and(|found| found == "pages")).max().unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    let at = bytes.windows(LEN).position(|window| window == vec![6; LEN]).expect("the newest image");
    bytes[at + 9] ^= 1;
    fs::write(&newest, bytes).unwrap();
    path
}

#[test]
fn pages_shows_no_checksum_of_unreadable_pages() {
    let scratch = Scratch::new();
    let path = with_a_damaged_page_on_disk(&scratch);
    let pages = run(&["pages", &path, "--json"]).expect(1);
    assert!(pages.json()[0]["crc32"].is_null(), "{}", pages.out);
    let store = Store::open(&path).unwrap();
    let page = store.pages().unwrap().next().unwrap().page;
    assert!(store.read_to_vec(page).is_err(), "the engine cannot read it either");
    // Once the page is written whole, it no longer needs the damaged image, but earlier states do.
    let mut batch = store.batch();
    batch.fill(page, 0, LEN as u64, &[7]);
    store.commit(batch).unwrap();
    store.close().unwrap();
    let pages = run(&["pages", &path, "--json"]).expect(0);
    assert_eq!(pages.json()[0]["crc32"], u64::from(crc32fast::hash(&[7; LEN])), "{}", pages.out);
    let verify = run(&["verify", &path]).expect(1).out;
    assert!(!verify.contains("reads fail until"), "{verify}");
    assert!(verify.contains("cost: snapshot 2 is no longer available"), "{verify}");
    let fork = scratch.path("fork");
    run(&["fork", &path, &fork]).expect(0);
    assert_eq!(run(&["pages", &fork, "--json"]).expect(0).json()[0]["crc32"], pages.json()[0]["crc32"]);
}

/// The manifest of a removed snapshot exists again, as after a crash before its removal was durable.
#[test]
fn unlisted_manifest_is_reported_if_any_copy_is_damaged() {
    let scratch = Scratch::new();
    let path = scratch.store();
    let store = Options::new().retention(Retention::new().snapshots_kept(4).log_kept(0)).open(&path).unwrap();
    let mut batch = store.batch();
    batch.create(LEN as u64, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    for seed in 0..3 {
        let mut batch = store.batch();
        batch.fill(page, 0, LEN as u64, &[seed]);
        store.commit(batch).unwrap();
        store.snapshot().unwrap();
    }
    let manifest = Path::new(&path).join("snapshots/0000000000000002.manifest");
    let sound = fs::read(&manifest).unwrap();
    store.prune(&Retention::default().snapshots_kept(1).log_kept(0)).unwrap();
    store.close().unwrap();
    fs::write(&manifest, &sound).unwrap();
    run(&["verify", &path]).expect(0);
    for copies in 1..4_usize {
        let mut bytes = sound.clone();
        for copy in (0..2).filter(|copy| copies >> copy & 1 == 1) {
            bytes[copy * sound.len() / 2 + 300] ^= 1;
        }
        fs::write(&manifest, bytes).unwrap();
        let verify = run(&["verify", &path]).expect(1).out;
        assert!(verify.contains("0000000000000002.manifest") && verify.contains("cost: nothing"), "{verify}");
        assert!(verify.starts_with("snapshots/") && verify.contains("findings: 1;"), "{verify}");
    }
}
