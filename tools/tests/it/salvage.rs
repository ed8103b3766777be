//! `remanent salvage`: the pages copied, the report on the rest, and that the damaged store is not modified.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use remanent::options::{Compression, ImageOptions, LogOptions};
use remanent::{Key, Options, Place, Store};
use serde_json::{Value, json};

use crate::command::{Scratch, run};
use crate::inspect::{copy, files, newest, small_store};

/// Returns the pages as they are listed, and the root.
fn content(store: &str) -> (String, Value) {
    let info = run(&["info", store, "--json"]).expect(0).json().remove(0);
    (run(&["pages", store, "--json"]).expect(0).out, info["root"].clone())
}

/// Runs a salvage as JSON. Returns the pages that are not exact, and the summary. The store must not change.
fn salvage(code: i32, store: &str, more: &[&str]) -> (Vec<Value>, Value) {
    let before = files(store);
    let mut lines = run(&[&["salvage", store, "--json"], more].concat()).expect(code).json();
    assert!(files(store) == before, "the damaged store was changed");
    let summary = lines.pop().unwrap();
    assert_eq!(summary["kind"], "summary");
    (lines, summary)
}

#[test]
fn sound_store_is_copied_completely() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let (store, new) = (scratch.store(), scratch.path("new"));
    let (pages, summary) = salvage(0, &store, &["--to", &new]);
    assert_eq!(pages, [] as [Value; 0]);
    for (field, expected) in [
        ("exact", json!(3)),
        ("older", json!(0)),
        ("lost", json!(0)),
        ("carried", json!(3)),
        ("lsn", json!(3)),
        ("lost_batches", json!(null)),
        ("torn_batches", json!(null)),
    ] {
        assert_eq!(summary[field], expected, "{field} in {summary}");
    }
    assert_eq!(content(&new), content(&store));
    run(&["verify", &new]).expect(0);
    let opened = Store::open(&new).unwrap();
    assert_eq!(opened.id().to_string(), summary["store"].as_str().unwrap());
    assert_ne!(run(&["info", &store, "--json"]).json()[0]["store"], summary["store"]);
    let mut batch = opened.batch();
    batch.write(opened.page_by_key(Key::new("weights").unwrap()).unwrap().page, 0, b"on");
    assert_eq!(opened.commit(batch).unwrap().position.lsn.0, 4);
}

/// Creates two pages in two snapshots. The batch between them that changed page 1 and the newest images are
/// lost.
fn scarred(scratch: &Scratch) {
    let options = Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .images(ImageOptions::new().compression(Compression::Off));
    let store = options.open(scratch.store()).unwrap();
    let mut batch = store.batch();
    for name in ["changed", "still"] {
        let page = batch.create(3000, Place::Host).key(Key::new(name).unwrap()).page();
        batch.fill(page, 0, 3000, &[1]);
    }
    let pages = store.commit(batch).unwrap().pages;
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.fill(pages[0], 0, 3000, &[2]);
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.set_root("step", 3u64);
    store.commit(batch).unwrap();
    store.close().unwrap();

    let path = scratch.store();
    let frames = run(&["log", &path, "--json"]).expect(0).json();
    let second = frames.iter().find(|frame| frame["lsn"] == 2 && frame["kind"] == "batch").unwrap();
    let name = format!("log/{:016x}.log", second["segment"].as_u64().unwrap());
    let segment = fs::File::options().write(true).open(Path::new(&path).join(name)).unwrap();
    segment.write_all_at(&[0; 512], second["offset"].as_u64().unwrap()).unwrap();
    fs::remove_file(newest(&path, "pages", "pages")).unwrap();
    assert!(Store::open(&path).is_err(), "then there is nothing to salvage");
}

#[test]
fn older_states_are_listed_and_copied_only_on_request() {
    let scratch = Scratch::new();
    scarred(&scratch);
    let (store, new, all) = (scratch.store(), scratch.path("new"), scratch.path("all"));
    let (pages, summary) = salvage(1, &store, &[]);
    let [page] = &pages[..] else { panic!("{pages:?}") };
    assert_eq!(
        (&page["outcome"], &page["key"], &page["epoch"]),
        (&json!("older"), &json!("changed"), &json!(2))
    );
    assert_eq!(page["left"], json!({ "len": 3000, "epoch": 1, "lsn": 1 }));
    assert!(page["file"].as_str().unwrap().starts_with("pages/"), "{page}");
    assert_eq!((&summary["exact"], &summary["older"], &summary["lsn"]), (&json!(1), &json!(1), &json!(3)));
    assert_eq!((&summary["whole"], &summary["store"]), (&json!(true), &json!(null)));

    let (_, summary) = salvage(1, &store, &["--to", &new]);
    assert_eq!(summary["carried"], 1);
    let (_, summary) = salvage(1, &store, &["--to", &all, "--older"]);
    assert_eq!(summary["carried"], 2);
    let listed = |store: &str| -> Vec<(u64, u64, u64)> {
        let of_page = |line: &Value| ["page", "epoch", "lsn"].map(|field| line[field].as_u64().unwrap());
        let pages = run(&["pages", store, "--json"]).expect(0).json();
        pages.iter().map(|line| of_page(line).into()).collect()
    };
    assert_eq!(listed(&new), [(2, 1, 1)]);
    assert_eq!(listed(&all), [(1, 1, 1), (2, 1, 1)]);
    for store in [&new, &all] {
        run(&["verify", store]).expect(0);
        assert_eq!(content(store).1, json!({ "step": 3 }));
    }
    let target = scratch.path("page");
    run(&["dump", &all, "key:changed", "-o", &target]).expect(0);
    assert_eq!(fs::read(&target).unwrap(), [1; 3000]);

    let text = run(&["salvage", &store]).expect(1).out;
    assert!(text.contains("epoch 1, lsn 1") && text.contains("1 pages exact, 1 older, 0 lost"), "{text}");
}

#[test]
fn without_known_state_pages_are_salvaged_individually() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let (store, new) = (scratch.store(), scratch.path("new"));
    fs::remove_dir_all(Path::new(&store).join("log")).unwrap();
    // Without the log, an exact snapshot still gives its own state.
    let (_, summary) = salvage(1, &store, &["--to", &new]);
    assert_eq!(
        (&summary["whole"], &summary["lsn"], &summary["carried"]),
        (&json!(true), &json!(2), &json!(2))
    );
    run(&["verify", &new]).expect(0);

    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let (store, new) = (scratch.store(), scratch.path("new"));
    fs::remove_dir_all(Path::new(&store).join("snapshots")).unwrap();
    // Destroys the log's beginning, with the first batch.
    let frames = run(&["log", &store, "--json"]).expect(0).json();
    let first = frames.iter().find(|frame| frame["lsn"] == 1 && frame["kind"] == "batch").unwrap();
    let segment = newest(&store, "log", "log").with_file_name("0000000000000001.log");
    let segment = fs::File::options().write(true).open(segment).unwrap();
    segment.write_all_at(&[0; 512], first["offset"].as_u64().unwrap()).unwrap();
    let (pages, summary) = salvage(1, &store, &["--to", &new]);
    assert_eq!((&summary["whole"], &summary["store"]), (&json!(false), &json!(null)));
    assert!(!Path::new(&new).exists());
    // Pages 2 and 3, which later batches created, are the only ones left.
    let left: Vec<&Value> = pages.iter().map(|page| &page["page"]).collect();
    assert_eq!(left, [2, 3]);
    let (_, summary) = salvage(1, &store, &["--to", &new, "--older"]);
    assert_eq!(summary["carried"], 2);
    run(&["verify", &new]).expect(0);
}

#[test]
fn lost_file_or_sector_is_reported_and_store_unchanged() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let (store, hurt) = (scratch.store(), scratch.path("hurt"));
    let states = [1, 2, 3].map(|lsn| {
        let then = scratch.path(&format!("then-{lsn}"));
        run(&["fork", &store, &then, "--at", &format!("lsn:{lsn}")]).expect(0);
        run(&["pages", &then, "--json"]).expect(0).out
    });
    let mut whole = 0;
    for (number, path) in files(&store).into_keys().enumerate() {
        let path = path.strip_prefix(&store).unwrap().to_owned();
        for sector in [None, Some(number as u64)] {
            copy(&store, &hurt);
            match sector {
                None => fs::remove_file(Path::new(&hurt).join(&path)).unwrap(),
                Some(sector) => fs::File::options()
                    .write(true)
                    .open(Path::new(&hurt).join(&path))
                    .unwrap()
                    .write_all_at(&[0; 512], sector * 512)
                    .unwrap(),
            }
            let new = scratch.path(&format!("new-{number}-{}", sector.is_some()));
            let before = files(&hurt);
            let ended = run(&["salvage", &hurt, "--to", &new]);
            assert!([0, 1].contains(&ended.code), "{path:?}: {}", ended.err);
            assert!(files(&hurt) == before, "{path:?}");
            // Every copied page is as it was in some state, and a salvage that exits with 0 copied the last
            // state.
            let carried = run(&["pages", &new, "--json"]).expect(0).out;
            let of_one = |state: &String| carried.lines().all(|line| state.contains(line));
            assert!(states.iter().any(of_one), "{path:?}: {carried}");
            assert!(ended.code == 1 || carried == states[2], "{path:?}: {carried}");
            whole += usize::from(carried == states[2]);
            fs::remove_dir_all(&hurt).unwrap();
        }
    }
    assert!(whole >= 10, "{whole} whole");
}

#[test]
fn invalid_salvage_arguments_change_nothing() {
    let scratch = Scratch::new();
    let open = small_store(&scratch);
    let (store, new, other) = (scratch.store(), scratch.path("new"), scratch.path("other"));
    run(&["salvage", &store, "--to", &new]).expect(3);
    open.close().unwrap();
    let before = files(&store);
    fs::create_dir(&other).unwrap();
    fs::write(Path::new(&other).join("notes"), b"mine").unwrap();
    for target in [&store, &format!("{store}/new"), &other] {
        let refused = run(&["salvage", &store, "--to", target]).expect(2);
        assert!(!refused.err.is_empty(), "{target}");
    }
    run(&["salvage", &store, "--to", &new]).expect(0);
    run(&["salvage", &store, "--to", &new]).expect(2);
    assert!(files(&store) == before);
    assert_eq!(fs::read_dir(&other).unwrap().count(), 1);
}
