//! Kills processes that are archiving.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use remanent::Ack;

use crate::bed::{Bed, check, pages, pause, step, step_of};

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

fn start(bed: &Bed) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kills::child_archives_until_killed", "--nocapture"])
        .env(CHILD, bed.store().parent().unwrap())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills the process at random times. After each kill, a restore must contain every step that was reported as archived,
/// and the directory must be able to continue the archive.
#[test]
fn archived_steps_survive_kills() {
    let rounds = std::env::var("REMANENT_ARCHIVE_KILLS").map_or(12, |rounds| rounds.parse().unwrap());
    let bed = Bed::new();
    let mut archived = 0;
    let mut progressed = 0;
    for round in 0..rounds {
        let mut child = start(&bed);
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (reports, first_report) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let (mut line, mut last) = (String::new(), 0);
            while out.read_line(&mut line).is_ok_and(|len| len > 0) {
                if let Some(step) = line.trim().strip_prefix("archived ") {
                    last = step.parse().unwrap();
                    let _ = reports.send(()); // Only the first report is awaited.
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
