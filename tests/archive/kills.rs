//! Kills processes that archive or restore a store. `REMANENT_TEST_SIZE=full` kills 100 processes of each kind.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use remanent::Ack;

use crate::bed::{Bed, check, copy_directory, pages, pause, step, step_of};
use crate::size::sized;

/// The environment variable with the directory of the store and the bucket, for the child process.
const CHILD: &str = "REMANENT_ARCHIVE_CHILD";

/// Commits and archives until the process is killed. Prints each archived step.
#[test]
fn child_archives_until_killed() {
    let Some(root) = std::env::var_os(CHILD) else { return };
    let root = std::path::PathBuf::from(root);
    let url = format!("file://{}", root.join("bucket").display());
    let archive = remanent::options::ArchiveOptions::new(url).interval(Duration::from_millis(1));
    let store =
        crate::bed::plain_options(Default::default()).archive(archive).open(root.join("store")).unwrap();
    let pages = pages(&store);
    loop {
        let ticket = step(&store, &pages).unwrap();
        let now = step_of(&store);
        if now.is_multiple_of(3) {
            ticket.wait(Ack::Archived).unwrap();
            println!("archived {now}");
        }
        if now.is_multiple_of(40) {
            store.snapshot().unwrap();
        }
    }
}

/// Restores the archive, and continues it with one step.
#[test]
fn child_restores_until_killed() {
    let Some(root) = std::env::var_os(CHILD) else { return };
    println!("started");
    crate::bed::continue_restored(std::path::Path::new(&root));
}

fn kills() -> u64 {
    sized(12, 100)
}

fn start(test: &str, root: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, root)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills the process at random times. After each kill, a restore must contain every step that was reported as archived,
/// and the directory must be able to continue the archive.
#[test]
fn archived_steps_survive_kills() {
    let rounds = kills();
    let bed = Bed::new();
    let mut archived = 0;
    let mut progressed = 0;
    for round in 0..rounds {
        let mut child = start("kills::child_archives_until_killed", bed.root());
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (reports, first_report) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let (mut line, mut last) = (String::new(), 0);
            while out.read_line(&mut line).is_ok_and(|len| len > 0) {
                if let Some(step) = line.trim().strip_prefix("archived ") {
                    last = step.parse().unwrap();
                    let _ = reports.send(()); // The receiver waits for the first report only.
                }
                line.clear();
            }
            last
        });
        // Half of the processes are killed at a random time, possibly while the store is opened.
        if round % 2 == 0 {
            first_report.recv().unwrap();
        }
        pause(Duration::from_millis((round * 67) % 400));
        child.kill().unwrap();
        child.wait().unwrap();
        let last: u64 = reader.join().unwrap();
        progressed += u64::from(last > archived);
        archived = archived.max(last);
        if bed.bucket().join("line").is_dir() && archived > 0 {
            let restored = bed.restored_step("restored");
            assert!(restored >= archived, "step {restored} was restored, but {archived} was archived");
        }
    }
    assert!(progressed * 2 >= rounds, "{progressed} of {rounds} rounds archived something");
    let store = bed.open();
    assert!(check(&store) >= archived);
    crate::bed::archive_steps(&store, &pages(&store), 1);
    assert_eq!(bed.restored_step("restored"), step_of(&store));
}

/// Kills a restore at a random time. The next restore into the same directory must contain the last archived step, and
/// the restored store must continue the archive.
#[test]
fn killed_restores_are_repeated() {
    let source = Bed::new();
    let store = source.open();
    let pages = pages(&store);
    for _ in 0..20 {
        crate::bed::archive_steps(&store, &pages, 10);
        store.snapshot().unwrap();
    }
    let archived = step_of(&store);
    store.close().unwrap();
    let mut interrupted = 0;
    for round in 0..kills() {
        let bed = Bed::new();
        copy_directory(&source.bucket(), &bed.bucket());
        let mut child = start("kills::child_restores_until_killed", bed.root());
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("started") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0);
        }
        pause(Duration::from_millis(round * 3 % 40));
        child.kill().unwrap();
        child.wait().unwrap();
        let directory = bed.path("restored");
        interrupted += u64::from(directory.join("ARCHIVE").exists() && !directory.join("STORE").exists());
        let step = crate::bed::continue_restored(bed.root());
        assert!((archived + 1..=archived + 2).contains(&step), "step {step} after {archived}");
        assert_eq!(bed.restored_step("again"), step);
    }
    println!("{interrupted} restores were killed before they ended");
}
