//! `remanent replay`: a kill at any time loses no acknowledged request, and `--check` detects every change of the
//! store.

use std::fs;

use remanent::{Epoch, Key, Store};
use rustix::process::Signal;

use crate::command::{Scratch, TRACE, run};

#[test]
fn resumed_replay_equals_uninterrupted_replay() {
    let (whole, parts) = (Scratch::new(), Scratch::new());
    whole.replay(90, &["--snapshot-every", "40"]).expect(0);
    parts.replay(33, &["--snapshot-every", "40"]).expect(0);
    parts.replay(34, &["--resume"]).expect(0);
    parts.replay(90, &["--resume", "--snapshot-every", "40", "--ack", "durable"]).expect(0);
    parts.replay(90, &["--resume"]).expect(0);
    let pages = |scratch: &Scratch| run(&["pages", &scratch.store(), "--json"]).expect(0).out;
    assert_eq!(pages(&whole).lines().count(), 600);
    assert_eq!(pages(&whole), pages(&parts));
    for scratch in [whole, parts] {
        assert_eq!(
            scratch.check(0),
            "exact after request 89: 600 pages, with their epochs and all their bytes"
        );
    }
}

#[test]
fn acknowledgements_are_appended_one_line_per_request() {
    let scratch = Scratch::new();
    let acks = scratch.path("acks");
    scratch.replay(3, &["--acks", &acks]).expect(0);
    scratch.replay(5, &["--acks", &acks, "--resume"]).expect(0);
    assert_eq!(fs::read_to_string(acks).unwrap(), "1 0\n2 1\n3 2\n4 3\n5 4\n");
}

#[test]
fn kill_keeps_acknowledged_requests_plus_at_most_one() {
    let scratch = Scratch::new();
    for request in [0, 7, 31, 32, 60, 99] {
        // The replay is ahead of the output read so far, so the trace must be long.
        let mut replay = scratch.start_replay(12_000, &["--snapshot-every", "20"]);
        replay.until(scratch.last_request().map_or(request, |last| last + 1 + request));
        let status = replay.signal(Signal::KILL);
        assert_eq!(status.code(), None, "the kill came too late");
        let found = scratch.last_request();
        let next = replay.last_ack.map(|request| request + 1);
        assert!(
            found == replay.last_ack || found == next,
            "found {found:?}, acknowledged {:?}",
            replay.last_ack
        );
        scratch.check(0);
    }
    let end = scratch.last_request().unwrap() + 20;
    scratch.replay(end, &["--resume"]).expect(0);
    let last = end - 1;
    let exact = format!("exact after request {last}: 600 pages, with their epochs and all their bytes");
    assert_eq!(scratch.check(0), exact);
}

#[test]
fn ctrl_c_finishes_the_current_batch_and_exits_with_130() {
    let scratch = Scratch::new();
    let mut replay = scratch.start_replay(12_000, &[]);
    replay.until(5);
    assert_eq!(replay.signal(Signal::INT).code(), Some(130));
    assert_eq!(scratch.last_request(), replay.last_ack);
    assert!(replay.last_ack < Some(11_999));
    scratch.check(0);
    let verify = run(&["verify", &scratch.store()]).expect(0);
    assert!(!verify.out.contains("torn tail"), "the store was not closed: {}", verify.out);
}

#[test]
fn check_finds_changes_by_other_programs() {
    let scratch = Scratch::new();
    scratch.replay(20, &[]).expect(0);
    let store = Store::open(scratch.store()).unwrap();
    let page = |id: u64| store.page_by_key(Key::new(id.to_string()).unwrap()).unwrap();
    let (written, deleted) = (page(1), page(2));
    assert_eq!(written.epoch, Epoch(1));
    let mut batch = store.batch();
    batch.write(written.page, 100, &[0xee]).delete(deleted.page);
    store.commit(batch).unwrap();
    store.close().unwrap();

    let check = run(&["replay", &scratch.store(), TRACE, "--check"]).expect(1);
    let lines: Vec<&str> = check.out.lines().collect();
    assert_eq!(lines[0], "page 1: epoch 2, expected 1");
    assert_eq!(lines[1], "page 1: wrong bytes, the first at offset 100");
    assert_eq!(lines[2], "page 2: missing");
    assert!(lines[3].starts_with("3 differences after request 19"), "{}", lines[3]);
    // Continuing would hide the difference.
    let resumed = scratch.replay(30, &["--resume"]).expect(1);
    assert!(resumed.err.contains("--check"), "{}", resumed.err);
}

#[test]
fn request_longer_than_cache_is_refused_before_writes() {
    let scratch = Scratch::new();
    let store = scratch.store();
    let short = run(&["replay", &store, TRACE, "--pages-max", "20", "--limit", "50"]).expect(2);
    assert!(short.err.contains("the longest request names"), "{}", short.err);
    run(&["replay", &store, TRACE, "--page-len", "60", "--limit", "50"]).expect(2);
    run(&["replay", &store, TRACE, "--page-len", "100", "--limit", "50"]).expect(2);
    assert!(fs::metadata(store).is_err(), "a refused replay made a store");
}

#[test]
fn bad_trace_is_reported_by_line_before_any_write() {
    let scratch = Scratch::new();
    let (store, trace) = (scratch.store(), scratch.path("trace.jsonl"));
    fs::write(&trace, "{\"hash_ids\": [1]}\n{\"hash_ids\": \"2\"}\n").unwrap();
    let bad = run(&["replay", &store, &trace]).expect(2);
    assert!(bad.err.contains(&format!("{trace}:2: ")), "{}", bad.err);
    assert!(fs::metadata(&store).is_err(), "a refused replay made a store");
    // Requests after the limit are not validated.
    run(&["replay", &store, &trace, "--limit", "1"]).expect(0);
}

#[test]
fn replay_requires_resume_and_the_same_rule() {
    let scratch = Scratch::new();
    scratch.replay(10, &[]).expect(0);
    let again = scratch.replay(20, &[]).expect(2);
    assert!(again.err.contains("--resume"), "{}", again.err);
    let store = scratch.store();
    let other = run(&["replay", &store, TRACE, "--resume", "--page-len", "512"]).expect(2);
    assert!(other.err.contains("created with --page-len 256 --pages-max 600"), "{}", other.err);
    let past = scratch.replay(5, &["--resume"]).expect(2);
    assert!(past.err.contains("the trace has only 5 requests"), "{}", past.err);
    // Omitted values are those of the store.
    run(&["replay", &store, TRACE, "--resume", "--limit", "12"]).expect(0);
    assert_eq!(scratch.last_request(), Some(11));
}

#[test]
fn foreign_store_is_untouched() {
    let scratch = Scratch::new();
    Store::open(scratch.store()).unwrap().close().unwrap();
    let refused = scratch.replay(5, &[]).expect(2);
    assert!(refused.err.contains("not created by `replay`; use another directory"), "{}", refused.err);
}

#[test]
fn store_open_elsewhere_refuses_replay_but_allows_reads() {
    let scratch = Scratch::new();
    scratch.replay(10, &[]).expect(0);
    let store = Store::open(scratch.store()).unwrap();
    let locked = scratch.replay(20, &["--resume"]).expect(3);
    assert!(locked.err.contains(&std::process::id().to_string()), "{}", locked.err);
    let info = run(&["info", &scratch.store(), "--json"]).expect(0).json().remove(0);
    assert_eq!(info["open_in_process"], std::process::id());
    scratch.check(0);
    store.close().unwrap();
}

#[test]
fn demo_kills_checks_and_cleans_up() {
    let scratch = Scratch::new();
    let temporary = scratch.path("");
    let mut command = crate::command::command(&["demo", "--kills", "3", "--requests", "150"]);
    command.args(["--snapshot-every", "30", "--seed", "7"]).env("TMPDIR", &temporary);
    let demo = crate::command::finished(command).expect(0);
    assert!(demo.out.contains("Every acknowledged request was found"), "{}", demo.out);
    assert!(demo.out.contains("kill 1 of 3") && demo.out.contains("Restored snapshot"), "{}", demo.out);
    assert_eq!(demo.err, "", "progress is for terminals");
    assert_eq!(fs::read_dir(temporary).unwrap().count(), 0);

    let store = scratch.store();
    let command = ["demo", &store, "--kills", "1", "--requests", "60", "--snapshot-every", "25"];
    run(&command).expect(0);
    run(&["verify", &store]).expect(0);
    let refused = run(&command).expect(2);
    assert!(refused.err.contains("is not empty"), "{}", refused.err);
}

#[test]
fn replay_that_ends_before_its_kill_is_checked() {
    let scratch = Scratch::new();
    // This seed schedules a kill after request 60, which is never reached.
    let demo = run(&[
        "demo",
        &scratch.store(),
        "--kills",
        "1",
        "--requests",
        "60",
        "--snapshot-every",
        "25",
        "--seed",
        "165",
    ])
    .expect(0);
    let (there, _) = demo.out.split_once("Restored snapshot").expect("the demo restores its first snapshot");
    assert!(!there.contains("kill 1 of 1"), "the replay was killed: {there}");
    assert!(there.contains("without a kill"), "{there}");
}
