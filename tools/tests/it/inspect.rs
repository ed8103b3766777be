//! The inspecting commands: fixed output, no writes, and all readable parts of a damaged store.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::SystemTime;
use std::{fs, io};

use remanent::options::{Compression, ImageOptions, LogOptions, Retention};
use remanent::{Ack, Key, Metadata, Options, Place, Store, Value};

use crate::command::{Scratch, command, run};

/// Returns every file below a directory, with its bytes and modification time.
pub fn files(dir: &str) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    try_files(dir).unwrap()
}

fn try_files(dir: &str) -> io::Result<BTreeMap<PathBuf, (Vec<u8>, SystemTime)>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![Path::new(dir).to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let changed = fs::metadata(&path)?.modified()?;
                found.insert(path.clone(), (fs::read(&path)?, changed));
            }
        }
    }
    Ok(found)
}

/// Copies a store as it is on disk, as a kill would leave it. An open store creates segments in advance and
/// renames them when they are complete: if a file disappears during the copy, everything is read again.
pub fn copy(from: &str, to: &str) {
    let found = loop {
        match try_files(from) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            found => break found.unwrap(),
        }
    };
    for (path, (bytes, _)) in found {
        let target = Path::new(to).join(path.strip_prefix(from).unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, bytes).unwrap();
    }
}

/// Changes one byte of a file.
fn flip(file: impl AsRef<Path>, offset: u64) {
    let mut bytes = fs::read(&file).unwrap();
    bytes[offset as usize] ^= 0x10;
    fs::write(&file, bytes).unwrap();
}

/// Returns the newest file in a folder of the store.
pub fn newest(store: &str, folder: &str, extension: &str) -> PathBuf {
    let files = fs::read_dir(Path::new(store).join(folder)).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|found| found == extension)).max().unwrap()
}

/// Creates a store of three batches with a snapshot after the second. Segments are short and images
/// uncompressed, so that tests can find a page's bytes.
pub fn small_store(scratch: &Scratch) -> Store {
    let options = Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .images(ImageOptions::new().compression(Compression::Off));
    let store = options.open(scratch.store()).unwrap();
    let mut batch = store.batch();
    let metadata = Metadata::from([
        ("dtype".to_owned(), Value::from("bf16")),
        ("blob".to_owned(), Value::Bytes(vec![0, 255])),
        ("nan".to_owned(), Value::F64(f64::NAN)),
    ]);
    let page = batch.create(5000, Place::Host).key(Key::new("weights").unwrap()).metadata(metadata).page();
    batch.write(page, 0, &[7; 5000]).set_root("step", 1u64);
    let weights = store.commit(batch).unwrap().pages[0];
    let mut batch = store.batch();
    batch.create(16, Place::Device(0)).key(Key::new([0xff]).unwrap());
    batch.note("a second page");
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(weights, 4096, b"third").create(0, Place::Pinned);
    let third = store.commit(batch).unwrap();
    store.wait_durable(third.position.lsn).unwrap();
    store
}

#[test]
fn pages_output_format_is_unchanged() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let pages = run(&["pages", &scratch.store(), "--json"]).expect(0);
    let mut content = vec![7; 5000];
    content[4096..4101].copy_from_slice(b"third");
    let expected = [
        format!(
            "{{\"schema\":1,\"page\":1,\"key\":\"weights\",\"len\":5000,\"epoch\":2,\"lsn\":3,\"place\":\"host\",\
             \"crc32\":{},\"metadata\":{{\"blob\":{{\"$bytes\":\"AP8=\"}},\"dtype\":\"bf16\",\"nan\":\"NaN\"}}}}",
            crc32fast::hash(&content)
        ),
        format!(
            "{{\"schema\":1,\"page\":2,\"key\":{{\"$bytes\":\"/w==\"}},\"len\":16,\"epoch\":1,\"lsn\":2,\
             \"place\":\"device:0\",\"crc32\":{},\"metadata\":{{}}}}",
            crc32fast::hash(&[0; 16])
        ),
        "{\"schema\":1,\"page\":3,\"key\":null,\"len\":0,\"epoch\":1,\"lsn\":3,\"place\":\"pinned\",\
         \"crc32\":0,\"metadata\":{}}"
            .to_owned(),
    ];
    assert_eq!(pages.out.lines().collect::<Vec<_>>(), expected);
    let table = run(&["pages", &scratch.store()]).expect(0);
    assert_eq!(table.out.lines().count(), 4, "{}", table.out);

    let target = scratch.path("page");
    run(&["dump", &scratch.store(), "1", "-o", &target]).expect(0);
    assert_eq!(fs::read(&target).unwrap(), content);
    let by_key = command(&["dump", &scratch.store(), "key:weights", "-o", "-"]).output().unwrap();
    assert_eq!(by_key.stdout, content);
    run(&["dump", &scratch.store(), "4", "-o", &target]).expect(2);
}

#[test]
fn info_shows_position_and_purpose_of_each_file() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let store = scratch.store();
    fs::write(Path::new(&store).join("snapshots/00000000000000ff.tmp"), b"cut short").unwrap();
    fs::write(Path::new(&store).join("notes.txt"), b"mine").unwrap();
    let info = run(&["info", &store, "--json"]).expect(0).json().remove(0);
    assert_eq!(info["schema"], 1);
    assert_eq!(info["store"].as_str().unwrap().len(), 32);
    for (field, expected) in [("incarnation", 1), ("lsn", 3), ("durable", 3), ("pages", 3)] {
        assert_eq!(info[field], expected, "{field}");
    }
    assert_eq!(info["root"], serde_json::json!({ "step": 1 }));
    assert_eq!(info["torn_tail"], serde_json::Value::Null);
    assert!(info["log_bytes"].as_u64().unwrap() >= 32 << 10);
    let snapshots = info["snapshots"].as_array().unwrap();
    assert_eq!(
        (&snapshots[0]["snapshot"], &snapshots[0]["end"], &snapshots[0]["pages"]),
        (&1.into(), &2.into(), &2.into())
    );

    let on_disk = files(&store);
    let listed: Vec<&serde_json::Value> = info["files"].as_array().unwrap().iter().collect();
    assert_eq!(listed.len(), on_disk.len(), "every file is named");
    let deletable: Vec<&str> = listed
        .iter()
        .filter(|file| file["deletable"] == true)
        .map(|file| file["file"].as_str().unwrap())
        .collect();
    assert_eq!(deletable, ["snapshots/00000000000000ff.tmp"]);
    let text = run(&["info", &store]).expect(0).out;
    assert!(text.starts_with("status       no damage found"), "{text}");
    for file in listed.iter().filter(|file| !file["file"].as_str().unwrap().ends_with(".spare")) {
        assert!(text.contains(file["file"].as_str().unwrap()), "{file} is not in:\n{text}");
    }
    // Deleting a deletable file loses nothing.
    fs::remove_file(Path::new(&store).join(deletable[0])).unwrap();
    fs::remove_file(Path::new(&store).join("notes.txt")).unwrap();
    let reopened = Store::open(&store).unwrap();
    assert_eq!(reopened.pages().unwrap().len(), 3);
}

#[test]
fn log_shows_batches_notes_and_seals() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let store = scratch.store();
    let frames = run(&["log", &store, "--json"]).expect(0).json();
    let batches: Vec<&serde_json::Value> = frames.iter().filter(|frame| frame["kind"] == "batch").collect();
    let lsns: Vec<u64> = batches.iter().map(|frame| frame["lsn"].as_u64().unwrap()).collect();
    assert_eq!(lsns, [1, 2, 3]);
    assert_eq!(batches[1]["note"], "a second page");
    assert_eq!(batches[2]["kinds"], serde_json::json!({ "create": 1, "write": 1 }));
    assert!(frames.iter().all(|frame| frame["chain"] == "follows" && frame["torn"] == false));
    assert_eq!(frames.last().unwrap()["kind"], "seal", "a clean close seals");
    assert_eq!(frames.last().unwrap()["durable"], 3);

    let of = |args: &[&str]| run(&[&["log", &store, "--json"], args].concat()).expect(0).json();
    assert!(of(&["--from", "2", "--to", "2"]).iter().all(|frame| frame["lsn"] == 2));
    let about: Vec<serde_json::Value> =
        of(&["--page", "1"]).iter().map(|frame| frame["lsn"].clone()).collect();
    assert_eq!(about, [1, 3]);
    let text = run(&["log", &store]).expect(0).out;
    assert!(text.contains("note \"a second page\""), "{text}");
    assert!(text.ends_with("The log ends with lsn 3, durable up to lsn 3.\n"), "{text}");
}

#[test]
fn torn_tail_is_shown_not_as_damage() {
    let (scratch, crashed) = (Scratch::new(), Scratch::new());
    let store = small_store(&scratch);
    let mut batch = store.batch();
    batch.set_root("step", 4u64).note("torn");
    store.submit(batch).unwrap().wait(Ack::Logged).unwrap();
    copy(&scratch.store(), &crashed.store());
    store.close().unwrap();
    let crashed = crashed.store();
    let frame =
        run(&["log", &crashed, "--json"]).expect(0).json().into_iter().find(|frame| frame["note"] == "torn");
    let frame = frame.expect("a logged batch is there after a kill");
    let segment = Path::new(&crashed).join(format!("log/{:016x}.log", frame["segment"].as_u64().unwrap()));
    flip(segment, frame["offset"].as_u64().unwrap() + 80 + 16);

    let verify = run(&["verify", &crashed]).expect(0);
    assert!(verify.out.contains("note: torn tail") && verify.out.contains("clean: "), "{}", verify.out);
    let info = run(&["info", &crashed, "--json"]).expect(0).json().remove(0);
    assert_eq!(info["lsn"], 3);
    assert_eq!(info["torn_tail"]["lsn_first"], 4);
    assert_eq!(info["torn_tail"]["offset"], frame["offset"]);
    let log = run(&["log", &crashed, "--json"]).expect(0).json();
    let torn: Vec<&serde_json::Value> = log.iter().filter(|frame| frame["torn"] == true).collect();
    assert_eq!(torn[0]["lsn"], 4);
    assert_eq!(log.last().unwrap()["kind"], "torn_tail");
    assert!(run(&["log", &crashed]).expect(0).out.contains("TORN"));
}

#[test]
fn damaged_image_falls_back_to_older_snapshot() {
    let scratch = Scratch::new();
    let store = small_store(&scratch);
    store.snapshot().unwrap();
    store.close().unwrap();
    let store = scratch.store();
    let whole = run(&["pages", &store, "--json"]).expect(0).out;
    let image = newest(&store, "pages", "pages");
    flip(&image, 4096 + 400);
    let verify = run(&["verify", &store, "--json"]).expect(1).json();
    let finding = verify.iter().find(|line| line["kind"] == "finding").unwrap();
    assert!(image.ends_with(finding["file"].as_str().unwrap()), "{finding}");
    assert_eq!(finding["cost"], "time, but no data: recovery starts from snapshot 1 instead");
    assert!(finding["offset"].as_u64().is_some() && finding["lsn"].as_u64().is_some(), "{finding}");
    assert_eq!(verify.last().unwrap()["opens_from"], "snapshot 1");
    // Nothing is lost, and the damage is reported.
    let pages = run(&["pages", &store, "--json"]).expect(1);
    assert_eq!(pages.out, whole);
    assert!(pages.err.contains("image checksum"), "{}", pages.err);
}

#[test]
fn unopenable_store_shows_all_readable_data() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let store = scratch.store();
    let frames = run(&["log", &store, "--json"]).expect(0).json();
    let third = frames.iter().find(|frame| frame["lsn"] == 3 && frame["kind"] == "batch").unwrap();
    let segment = Path::new(&store).join(format!("log/{:016x}.log", third["segment"].as_u64().unwrap()));
    flip(&segment, third["offset"].as_u64().unwrap() + 80 + 48);
    assert!(Store::open(&store).is_err());

    let verify = run(&["verify", &store]).expect(1);
    assert!(
        verify.out.contains("(lsn 3)") && verify.out.contains("the store cannot be opened"),
        "{}",
        verify.out
    );
    // The state just before the damage.
    let pages = run(&["pages", &store, "--json"]).expect(1);
    assert_eq!(pages.out.lines().count(), 2);
    assert!(pages.out.contains("\"epoch\":1,\"lsn\":1"), "{}", pages.out);
    assert!(pages.err.contains("lsn 3"), "{}", pages.err);
    let info = run(&["info", &store, "--json"]).expect(1).json().remove(0);
    assert_eq!(info["lsn"], 2);
    assert_eq!(info["damage"][0]["lsn"], 3);
    let text = run(&["info", &store]).expect(1).out;
    assert!(text.starts_with("status       DAMAGED, "), "{text}");
    let log = run(&["log", &store, "--json"]).expect(1).json();
    assert!(log.iter().any(|line| line["lsn"] == 3 && line["defect"].is_string()));
    assert_eq!(log.last().unwrap()["kind"], "damage");
    run(&["dump", &store, "2", "-o", &scratch.path("page")]).expect(1);
    assert_eq!(fs::read(scratch.path("page")).unwrap(), [0; 16]);
}

#[test]
fn store_without_identity_file_is_still_identified() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let store = scratch.store();
    let whole = run(&["pages", &store, "--json"]).expect(0).out;
    flip(Path::new(&store).join("STORE"), 20);
    let pages = run(&["pages", &store, "--json"]).expect(1);
    assert_eq!(pages.out, whole);
    assert!(pages.err.contains("STORE"), "{}", pages.err);
    let verify = run(&["verify", &store]).expect(1);
    assert!(verify.out.contains("cannot be opened without its identity"), "{}", verify.out);
    fs::remove_file(Path::new(&store).join("STORE")).unwrap();
    assert_eq!(run(&["pages", &store, "--json"]).expect(1).out, whole);
}

#[test]
fn lost_page_does_not_affect_others() {
    let scratch = Scratch::new();
    let store = small_store(&scratch);
    store.snapshot().unwrap();
    store.close().unwrap();
    let store = scratch.store();
    // Both snapshots' images of page 1 are damaged, and so is the log's first frame.
    for number in [1, 2] {
        flip(Path::new(&store).join(format!("pages/{number:016x}.pages")), 4096 + 400);
    }
    flip(Path::new(&store).join("log/0000000000000001.log"), 4096 + 3);
    let pages = run(&["pages", &store, "--json"]).expect(1);
    let pages = pages.json();
    assert_eq!(pages.len(), 3);
    assert_eq!(pages[0]["crc32"], serde_json::Value::Null);
    assert_eq!(pages[1]["crc32"], crc32fast::hash(&[0; 16]));
    run(&["dump", &store, "2", "-o", &scratch.path("page")]).expect(1);
    let lost = run(&["dump", &store, "1", "-o", &scratch.path("lost")]).expect(1);
    assert!(lost.err.contains("page 1 cannot be read"), "{}", lost.err);
    assert!(fs::metadata(scratch.path("lost")).is_err());
}

#[test]
fn inspecting_never_modifies_the_store() {
    let (scratch, crashed) = (Scratch::new(), Scratch::new());
    let store = small_store(&scratch);
    copy(&scratch.store(), &crashed.store());
    store.close().unwrap();
    let store = crashed.store();
    let before = files(&store);
    for args in [
        &["info", &store][..],
        &["info", &store, "--json"],
        &["pages", &store],
        &["log", &store],
        &["verify", &store],
        &["dump", &store, "1", "-o", "-"],
    ] {
        let output = command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
    }
    for target in [format!("{store}/page"), format!("{store}/log/page"), format!("{store}/STORE")] {
        let refused = run(&["dump", &store, "1", "-o", &target]).expect(2);
        assert!(refused.err.contains("is inside the store"), "{}", refused.err);
    }
    assert!(files(&store) == before, "an inspecting command changed the store");
}

#[test]
fn closed_pipe_ends_command_quietly() {
    let scratch = Scratch::new();
    scratch.replay(60, &[]).expect(0);
    let store = scratch.store();
    let lines = run(&["pages", &store, "--json"]).expect(0).out;
    assert!(lines.len() > 1 << 16, "all of it would fit into the pipe");
    let mut pages =
        command(&["pages", &store, "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::with_capacity(1, pages.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(lines.starts_with(&first));
    let output = pages.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn full_disk_at_stdout_is_an_error() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = command(&["info", &scratch.store()]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write to standard output"));
}

#[test]
fn inspecting_commands_do_not_import_the_engine() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let knows = |name: &str| {
        let text = fs::read_to_string(sources.join(name)).unwrap();
        text.contains("use remanent::") || text.contains("remanent::Store")
    };
    assert!(knows("replay/mod.rs"), "the search finds nothing");
    for name in [
        "inspect/info.rs",
        "inspect/pages.rs",
        "inspect/log.rs",
        "inspect/dump.rs",
        "inspect/verify.rs",
        "read/partial_view.rs",
        "read/scan.rs",
        "inspect/file_purposes.rs",
        "read/store_dir.rs",
    ] {
        assert!(!knows(name), "{name} imports the engine, which refuses what this command must open");
    }
}

#[test]
fn page_longer_than_memory_is_listed_not_rebuilt() {
    let scratch = Scratch::new();
    let store = Options::new().log(LogOptions::new().segment_len(64 << 10)).open(scratch.store()).unwrap();
    let mut batch = store.batch();
    batch.create(1 << 20, Place::Host);
    store.commit(batch).unwrap();
    store.close().unwrap();
    let store = scratch.store();
    let limited = |command: &[&str], code| {
        let args = [&[command[0], &store], &command[1..], &["--memory-max", "1048575"]].concat();
        run(&args).expect(code)
    };
    let pages = limited(&["pages", "--json"], 1);
    assert_eq!(pages.json()[0]["len"], 1 << 20);
    assert!(pages.json()[0]["crc32"].is_null());
    assert_eq!(pages.err.matches("over the limit of 1048575").count(), 1, "{}", pages.err);
    assert!(limited(&["verify"], 1).out.contains("`--memory-max` raises the limit"));
    limited(&["dump", "1", "-o", &scratch.path("page")], 1);
    run(&["verify", &store, "--memory-max", "1048576"]).expect(0);
    run(&["pages", &store]).expect(0);
}

#[test]
fn disk_sized_hole_is_damage_without_abort() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let store = scratch.store();
    let file = fs::File::options().write(true).open(newest(&store, "snapshots", "manifest")).unwrap();
    file.set_len(8 << 40).unwrap();
    let info = run(&["info", &store, "--json"]).expect(1).json().remove(0);
    assert!(
        info["damage"][0]["defect"].as_str().unwrap().contains("longer than the available memory"),
        "{info}"
    );
    run(&["verify", &store]).expect(1);
    run(&["pages", &store]).expect(1);
}

#[test]
fn close_removes_spare_image_files() {
    const LEN: u64 = 3 << 20;
    let scratch = Scratch::new();
    let options = Options::new()
        .retention(Retention::new().snapshots_kept(1))
        .images(ImageOptions::new().compression(remanent::options::Compression::Off));
    let store = options.open(scratch.store()).unwrap();
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    for round in 1..4 {
        let mut batch = store.batch();
        batch.fill(page, 0, 100, &[round]);
        store.commit(batch).unwrap();
        store.snapshot().unwrap();
    }
    let spares = || -> Vec<serde_json::Value> {
        let info = run(&["info", &scratch.store(), "--json"]).expect(0).json().remove(0);
        let files = info["files"].as_array().unwrap().clone().into_iter();
        files.filter(|file| file["why"] == "space reserved for later images").collect()
    };
    let found = spares();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0]["file"].as_str().unwrap().starts_with("pages/"), "{found:?}");
    assert!(found[0]["bytes"].as_u64().unwrap() >= LEN, "{found:?}");
    run(&["verify", &scratch.store()]).expect(0);
    store.close().unwrap();
    assert_eq!(spares(), Vec::<serde_json::Value>::new());
    run(&["verify", &scratch.store()]).expect(0);
}

#[test]
fn snapshot_is_verified_once_the_store_is_closed() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let info = run(&["info", &scratch.store(), "--json"]).expect(0).json().remove(0);
    assert_eq!(info["snapshots"][0]["verified"], true);
}
