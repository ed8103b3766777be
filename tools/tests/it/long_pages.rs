//! Commands that read pages hold one window in memory: they succeed with less memory than a page is long.

use std::fs;
use std::os::unix::fs::FileExt;

use remanent::batch::Width;
use remanent::options::SnapshotSchedule;
use remanent::{Options, Place};
use serde_json::json;

use crate::command::{Run, Scratch, command, finished};

const LEN: u64 = (320 << 20) + 4099;
/// The final length of a page that was short before.
const GROWN_LEN: u64 = 64 << 20;
/// The memory that a command may map, including its code and its threads' stacks.
const MAPPED_MAX_KIB: u64 = 300 << 10;

/// Runs the command with little memory.
fn run(args: &[&str]) -> Run {
    run_with(MAPPED_MAX_KIB, args)
}

/// Runs the command with this much memory.
fn run_with(mapped_max_kib: u64, args: &[&str]) -> Run {
    let whole = command(args);
    let mut limited = std::process::Command::new("sh");
    let program = whole.get_program().to_str().unwrap();
    limited.args(["-c", &format!("ulimit -v {mapped_max_kib} && exec \"$0\" \"$@\""), program]);
    limited.args(whole.get_args());
    finished(limited)
}

#[test]
fn page_longer_than_memory_is_read_in_windows() {
    let scratch = Scratch::new();
    let path = scratch.store();
    let options = Options::new().snapshots(SnapshotSchedule::never());
    let store = options.open(&path).unwrap();
    // One half compresses, the other does not.
    let mut expected: Vec<u8> = (0..LEN).map(|at| (at >> 14) as u8).collect();
    let noise = crate::weights::noise(7, LEN as usize / 2);
    expected[..noise.len()].copy_from_slice(&noise);
    let mut batch = store.batch();
    let page = batch.create(LEN, Place::Host).page();
    batch.write(page, 0, &expected);
    let short = batch.create(5000, Place::Host).page();
    batch.write(short, 0, &[9; 5000]);
    let [page, short] = store.commit(batch).unwrap().pages[..] else { panic!("two pages") };
    store.snapshot().unwrap();
    let before = store.lsn();
    let mut batch = store.batch();
    batch.write(page, (64 << 20) - 5, &[1; 10]).scatter(page, Width::W2, &[3, 100 << 20], &[7; 4]);
    // The page's image ends long before its last window begins.
    batch.resize(short, GROWN_LEN);
    store.commit(batch).unwrap();
    store.close().unwrap();
    expected[(64 << 20) - 5..][..10].fill(1);
    expected[6..8].fill(7);
    let mut grown = vec![9; 5000];
    grown.resize(GROWN_LEN as usize, 0);
    expected[200 << 20..][..2].fill(7);

    let pages = run(&["pages", &path, "--json"]).expect(0).json();
    assert_eq!(pages[0]["crc32"], crc32fast::hash(&expected));
    let (dumped, rescued) = (scratch.path("page"), scratch.path("rescued"));
    run(&["dump", &path, "1", "-o", &dumped]).expect(0);
    assert!(fs::read(&dumped).unwrap() == expected, "dump");
    run(&["dump", &path, "2", "-o", &dumped]).expect(0);
    assert!(fs::read(&dumped).unwrap() == grown, "dump of a page longer than its image");
    let blamed = run(&["blame", &path, "page:2[60000000]", "--json"]).expect(0).json();
    assert_eq!(blamed.last().unwrap()["after"], json!(0), "{blamed:?}");
    let diff = run(&["diff", &path, "--from", &format!("lsn:{before}"), "--json"]).expect(1).json();
    assert_eq!(diff[0]["changed"], json!(14));
    // The history of a byte near the page's end, and of one that was written since.
    for at in [LEN - 1, 200 << 20] {
        let blamed = run(&["blame", &path, &format!("page:1[{at}]"), "--json"]).expect(0).json();
        let newest = blamed.last().unwrap();
        assert_eq!(newest["after"], json!(expected[at as usize]), "byte {at}: {blamed:?}");
    }
    run(&["salvage", &path, "--to", &rescued]).expect(0);
    run(&["dump", &rescued, "1", "-o", &dumped]).expect(0);
    assert!(fs::read(&dumped).unwrap() == expected, "a rescued store's page");
    run(&["fork", &path, &scratch.path("forked")]).expect(0);
}

/// The maximum that an import maps in addition to the page: code, stacks, mapped log, and pieces.
const IMPORT_MAPPED_MAX_KIB: u64 = 1 << 20;

/// The memory limit permits neither a second copy of the tensor nor a list of its changes.
#[test]
fn import_needs_memory_for_one_copy_of_a_tensor() {
    const LEN: usize = 1 << 30;
    let scratch = Scratch::new();
    let (path, source, target) =
        (scratch.store(), scratch.path("a.safetensors"), scratch.path("b.safetensors"));
    let import = |pages: u64| {
        let kib = IMPORT_MAPPED_MAX_KIB + pages * (LEN as u64 >> 10);
        run_with(kib, &["import", &path, &source, "--json"]).expect(0).json().remove(0)
    };
    let shape = format!("[{LEN}]");
    let header = format!(r#"{{"long":{{"dtype":"U8","shape":{shape},"data_offsets":[0,{LEN}]}}}}"#);
    let head = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let file = fs::File::create(&source).unwrap();
    file.write_all_at(&head, 0).unwrap();
    file.set_len((head.len() + LEN) as u64).unwrap();
    // Zeros, except for some noise at the end.
    let at = (head.len() + LEN - 5000) as u64;
    file.write_all_at(&crate::weights::noise(1, 5000), at).unwrap();
    let imported = import(1);
    assert_eq!((&imported["created"], &imported["is_new"]), (&json!(1), &json!(true)), "{imported}");
    assert_eq!(import(1)["is_new"], json!(false));

    // More changes than are held in memory: one element in three over about 50 MiB.
    let mut part: Vec<u8> = vec![0; 51 << 20];
    part.iter_mut().step_by(3).for_each(|byte| *byte = 7);
    file.write_all_at(&part, head.len() as u64).unwrap();
    let imported = import(2);
    assert_eq!(imported["changed_elements"], json!(part.len().div_ceil(3)), "{imported}");
    run(&["verify", &path]).expect(0);
    run(&["export", &path, &target]).expect(0);
    let same = std::process::Command::new("cmp").args([&source, &target]).status().unwrap();
    assert!(same.success(), "the export is another file");
}

#[test]
fn tensor_longer_than_memory_is_exported_in_windows() {
    let scratch = Scratch::new();
    let (path, source, target) =
        (scratch.store(), scratch.path("a.safetensors"), scratch.path("b.safetensors"));
    let content = crate::weights::noise(3, 335_548_419);
    let tensor = crate::weights::tensor("long", "U8", "[335548419]", content);
    let file = crate::weights::file(&[tensor]);
    fs::write(&source, &file).unwrap();
    crate::command::run(&["import", &path, &source]).expect(0);
    run(&["export", &path, &target]).expect(0);
    assert!(fs::read(&target).unwrap() == file);
}
