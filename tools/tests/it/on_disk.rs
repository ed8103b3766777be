//! The command on a store with pages on disk, one of them as an overlay over an older image.

use std::fs;
use std::path::{Path, PathBuf};

use remanent::options::{Compression, ImageOptions, LogOptions, Retention, SnapshotSchedule};
use remanent::{Key, Options, Place, Store};

use crate::command::{Scratch, run};
use crate::inspect::files;

const LEN: usize = 3000;

/// Returns a byte that identifies the page and its offset in the page.
fn byte(number: usize, at: usize) -> u8 {
    (at * 7 + at / 251 + number * 59) as u8
}

/// Creates the page "long" with an overlay and the page "quiet", both on disk, and a page in memory. Returns
/// the content of "long" before the overlay and now.
fn store(scratch: &Scratch) -> [Vec<u8>; 2] {
    let options = Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .images(ImageOptions::new().compression(Compression::Off).chunk_len(4096));
    let options = options
        .retention(Retention::new().log_kept(1 << 30))
        .snapshots(SnapshotSchedule::new().log_bytes(None));
    let store = options.open(scratch.store()).unwrap();
    let bytes = |number| (0..LEN).map(|at| byte(number, at)).collect::<Vec<u8>>();
    let mut batch = store.batch();
    batch.create_from(bytes(0), Place::Disk).key(Key::new("long").unwrap());
    batch.create_from(bytes(1), Place::Disk).key(Key::new("quiet").unwrap());
    batch.create_from(vec![5; 100], Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(page, 1000, b"little of it");
    store.commit(batch).unwrap();
    assert!(store.snapshot().unwrap().bytes_written < LEN as u64, "an overlay");
    store.close().unwrap();
    let mut now = bytes(0);
    now[1000..1012].copy_from_slice(b"little of it");
    [bytes(0), now]
}

/// Returns the image file that contains these bytes of a page, and their offset.
fn image_with(store: &str, bytes: &[u8]) -> (PathBuf, usize) {
    let held = files(store).into_iter().filter(|(path, _)| path.starts_with(Path::new(store).join("pages")));
    let at = |found: &[u8]| found.windows(bytes.len()).position(|window| window == bytes);
    let mut found = held.filter_map(|(path, (content, _))| Some((path, at(&content)?)));
    found.next_back().expect("an image has these bytes")
}

#[test]
fn pages_on_disk_are_verified_dumped_and_compared() {
    let scratch = Scratch::new();
    let [before, now] = store(&scratch);
    let (path, target) = (scratch.store(), scratch.path("page"));
    run(&["verify", &path]).expect(0);
    run(&["dump", &path, "key:long", "-o", &target]).expect(0);
    assert!(fs::read(&target).unwrap() == now);
    let pages = run(&["pages", &path, "--json"]).expect(0).out;
    assert_eq!(pages.matches(r#""place":"disk""#).count(), 2, "{pages}");
    let diff = run(&["diff", &path, "--from", "snapshot:1", "--json"]).expect(1).json();
    let changed: Vec<_> = diff.iter().filter(|line| line["kind"] != "summary").collect();
    assert!(changed.iter().any(|line| line["page"] == 1), "{diff:?}");
    assert!(!changed.iter().any(|line| line["page"] == 2), "{diff:?}");
    // Reads the earlier content through a fork of the first snapshot.
    let fork = scratch.path("fork");
    run(&["fork", &path, &fork, "--at", "snapshot:1"]).expect(0);
    run(&["dump", &fork, "key:long", "-o", &target]).expect(0);
    assert!(fs::read(&target).unwrap() == before);
}

#[test]
fn damaged_disk_pages_are_named_and_others_copied() {
    let scratch = Scratch::new();
    let [_, now] = store(&scratch);
    let path = scratch.store();
    for (what, lost, bytes) in [
        ("the base", "long", &now[..64]),
        ("the overlay", "long", &b"little of it"[..]),
        ("another image", "quiet", &(0..64).map(|at| byte(1, at)).collect::<Vec<u8>>()[..]),
    ] {
        let (file, at) = image_with(&path, bytes);
        let sound = fs::read(&file).unwrap();
        let mut damaged = sound.clone();
        damaged[at + 3] ^= 1;
        fs::write(&file, damaged).unwrap();
        let verify = run(&["verify", &path]).expect(1);
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(verify.out.contains(name), "{what}: {}", verify.out);
        let new = scratch.path(what);
        // If the log has the damaged bytes too, nothing is lost.
        let salvaged = run(&["salvage", &path, "--to", &new]);
        let is_lost = match salvaged.code {
            0 => false,
            _ => salvaged.expect(1).out.contains("1 lost"),
        };
        let rescued = Store::open(&new).unwrap();
        for (key, number) in
            [("long", 0), ("quiet", 1)].into_iter().filter(|(key, _)| !is_lost || *key != lost)
        {
            let page = rescued.page_by_key(Key::new(key).unwrap()).unwrap().page;
            let bytes = rescued.read_to_vec(page).unwrap();
            let expected = if number == 0 { now.clone() } else { (0..LEN).map(|at| byte(1, at)).collect() };
            assert!(bytes == expected, "{what}: page {key}");
        }
        fs::write(&file, sound).unwrap();
    }
    run(&["verify", &path]).expect(0);
}
