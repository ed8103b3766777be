//! `remanent follow`, each time in a new process: continuing from a position, following a writer in another
//! process, and the ways in which it ends.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::command::{Scratch, command, run};

#[test]
fn position_resumes_in_another_process() {
    let scratch = Scratch::new();
    scratch.replay(40, &[]).expect(0);
    let store = scratch.store();
    let all = run(&["follow", &store, "--timeout", "0", "--json"]).expect(0).json();
    assert!(all.len() >= 40, "{} batches", all.len());
    let mut from = "beginning".to_owned();
    let mut again = Vec::new();
    while again.len() < all.len() {
        let args = ["follow", &store, "--from", &from, "--count", "17", "--timeout", "0", "--json"];
        let batches = run(&args).expect(0).json();
        from = batches.last().expect("there are more")["position"].as_str().expect("text").to_owned();
        again.extend(batches);
    }
    assert_eq!(again, all);
    for (index, batch) in all.iter().enumerate() {
        assert_eq!((&batch["schema"], &batch["lsn"]), (&1.into(), &(index as u64 + 1).into()));
    }
    assert_eq!(run(&["follow", &store, "--from", &from, "--timeout", "0"]).expect(0).out, "");
    let lines = run(&["follow", &store, "--timeout", "0"]).expect(0).out;
    assert_eq!(lines.lines().count(), all.len());
    assert!(lines.lines().next().is_some_and(|line| line.contains("create")), "{lines}");
}

#[test]
fn follow_shows_batches_of_writer_in_other_process() {
    let scratch = Scratch::new();
    scratch.replay(5, &[]).expect(0);
    let mut follow =
        command(&["follow", &scratch.store(), "--json"]).stdout(Stdio::piped()).spawn().expect("built");
    let mut lines = BufReader::new(follow.stdout.take().expect("a pipe")).lines();
    let mut next = || {
        let line = lines.next().expect("it goes on").expect("a pipe can be read");
        serde_json::from_str::<serde_json::Value>(&line).expect("one object a line")["lsn"].as_u64()
    };
    while next() < Some(5) {}
    // It waits now, while the other process writes.
    scratch.replay(30, &["--resume"]).expect(0);
    while next() < Some(30) {}
    kill_process(Pid::from_child(&follow), Signal::INT).expect("it is running");
    assert_eq!(follow.wait().expect("ours").code(), Some(130));
}

#[test]
fn closed_pipe_ends_output_quietly() {
    let scratch = Scratch::new();
    scratch.replay(20, &[]).expect(0);
    let mut child = command(&["follow", &scratch.store(), "--timeout", "60"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("built");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ours");
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

#[test]
fn follow_reports_why_a_position_is_unavailable() {
    let scratch = Scratch::new();
    let nowhere = run(&["follow", &scratch.store()]).expect(2);
    assert!(nowhere.err.contains("there is no store"), "{}", nowhere.err);
    scratch.replay(5, &[]).expect(0);
    let store = scratch.store();
    let diverged = run(&["follow", &store, "--from", "9-00000001:3:00000002"]).expect(1);
    assert!(diverged.err.contains("not in the store's history"), "{}", diverged.err);
    let wrong = run(&["follow", &store, "--from", "yesterday"]).expect(2);
    assert!(wrong.err.contains("expected beginning, snapshot or a position"), "{}", wrong.err);
}
