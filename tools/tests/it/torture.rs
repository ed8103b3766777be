//! `remanent torture`: a short run finds no violation and leaves no files; neither does an interrupted one.

use std::fs;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::command::{command, run};

#[test]
fn tortured_store_passes_checks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let short = ["--kills", "6", "--damages", "60", "--power-cuts", "2", "--requests", "150", "--seed", "7"];
    let report = run(&[&["torture", path, "--json"], &short[..]].concat()).expect(0).json().remove(0);
    assert_eq!((&report["schema"], &report["right"]), (&1.into(), &true.into()), "{report}");
    let tortures = &report["tortures"];
    let sum = |torture: &str, column: &str| -> u64 {
        let rows = tortures[torture]["rows"].as_object().unwrap().values();
        rows.map(|row| row[column].as_u64().unwrap()).sum()
    };
    assert_eq!(sum("kills", "killed"), 6, "{report}");
    assert_eq!(sum("damage", "done"), 60, "{report}");
    assert_eq!(sum("damage", "right") + sum("damage", "refused") + sum("damage", "cut"), 60, "{report}");
    assert!(sum("damage", "refused") > 0, "no damage was seen: {report}");
    // Without root, or without a program to create a file system, there is a reason instead.
    let skipped = tortures["power cuts"]["skipped"].as_array().unwrap();
    println!("SKIPPED: {skipped:?}");
    assert_eq!(sum("power cuts", "cuts"), if skipped.is_empty() { 2 } else { 0 }, "{report}");
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn interrupted_torture_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let mut torture = command(&["torture", path]);
    let mut torture = torture.stdout(Stdio::null()).spawn().unwrap();
    while fs::read_dir(path).unwrap().count() == 0 {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&torture), Signal::INT).unwrap();
    assert_eq!(torture.wait().unwrap().code(), Some(130));
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}
