//! Searching history: which batch changed an element, and which version is the first bad one.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use remanent::options::{LogOptions, Retention};
use remanent::{Options, Place};
use rustix::process::{Pid, Signal, kill_process};

use crate::command::{Scratch, command, finished, run};
use crate::weights::{Weights, file, noise, tensor};

/// The version in which the NaN appears.
const PLANTED: usize = 5;

/// Returns eight versions of a tensor of 3 by 4 floats. The element [1,2] changes in some and is NaN from one
/// version on.
fn versions() -> Vec<Vec<u8>> {
    let mut values: Vec<f32> = (0..12u8).map(f32::from).collect();
    let mut versions = Vec::new();
    for version in 1..=8 {
        values[11] = version as f32;
        match version {
            3 => values[6] = 6.5,
            PLANTED => values[6] = f32::NAN,
            _ => {}
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        versions.push(file(&[tensor("w", "F32", "[3,4]", bytes)]));
    }
    versions
}

/// Creates a store with the first `count` versions.
fn imported(count: usize) -> Weights {
    let weights = Weights::new();
    for (version, number) in versions()[..count].iter().zip(1..) {
        let (note, root) = (format!("version {number}"), format!("step={}", number * 10));
        weights.import(version, &["--note", &note, "--root", &root]);
    }
    weights
}

/// Returns the rows of `blame --json`: Lsn, cause, values, step and note.
fn blame(weights: &Weights, element: &str, more: &[&str]) -> Vec<String> {
    let store = weights.scratch.store();
    let lines = run(&[&["blame", &store, element, "--json"], more].concat()).expect(0).json();
    let line = |line: &serde_json::Value| {
        let (root, note) = (&line["root"]["step"], &line["note"]);
        format!("{} {} {} {} {root} {note}", line["lsn"], line["cause"], line["before"], line["after"])
    };
    lines.iter().map(line).collect()
}

#[test]
fn blame_lists_the_batches_that_changed_an_element() {
    let weights = imported(8);
    let expected = [
        r#"1 "batch" null 6.0 10 "version 1""#,
        r#"3 "batch" 6.0 6.5 30 "version 3""#,
        r#"5 "batch" 6.5 "NaN" 50 "version 5""#,
    ];
    for element in ["w[1,2]", "w[6]", "page:1[6]"] {
        assert_eq!(blame(&weights, element, &[]), expected);
    }
    assert_eq!(blame(&weights, "w[1,2]", &["--at", "lsn:4"]), expected[..2]);
    assert_eq!(blame(&weights, "w[11]", &[]).len(), 8);
    assert_eq!(blame(&weights, "w[0]", &[]), [r#"1 "batch" null 0.0 10 "version 1""#]);
    let store = weights.scratch.store();
    let text = run(&["blame", &store, "w[1,2]"]).expect(0).out;
    assert!(text.lines().last().unwrap().contains("NaN"), "{text}");
    for element in ["w[3,0]", "w[12]", "w[1,2,3]", "v[0]", "w"] {
        run(&["blame", &store, element]).expect(2);
    }
}

#[test]
fn blame_uses_snapshots_where_the_log_is_not_kept() {
    let weights = imported(4);
    let options = || {
        Options::new()
            .retention(Retention::new().snapshots_kept(1))
            .log(LogOptions::new().segment_len(16 << 10))
    };
    // With these options, each snapshot removes the log before it.
    options().open(weights.scratch.store()).unwrap().snapshot().unwrap();
    for version in &versions()[4..] {
        weights.import(version, &[]);
    }
    assert_eq!(
        blame(&weights, "w[1,2]", &[]),
        [r#"4 "snapshot" null 6.5 40 null"#, r#"5 "batch" 6.5 "NaN" 40 null"#]
    );
    let text = run(&["blame", &weights.scratch.store(), "w[6]"]).expect(0).out;
    assert!(text.contains("the log before it is not kept"), "{text}");
}

/// `blame` allocates memory only for the element, and not for the other bytes of its page.
#[test]
fn blame_memory_is_independent_of_page_length() {
    const LONG: usize = 1 << 20;
    let scratch = Scratch::new();
    // The page's first bytes come from the image of a batch or of a snapshot, uncompressed or compressed.
    for (name, snapshot, bytes) in [
        ("raw", false, noise(1, LONG)),
        ("compressed", false, vec![7; LONG]),
        ("snapshot-raw", true, noise(2, LONG)),
        ("snapshot-compressed", true, vec![8; LONG]),
    ] {
        let path = scratch.path(name);
        let open = || Options::new().retention(Retention::new().snapshots_kept(1)).open(&path).unwrap();
        let mut store = open();
        let mut batch = store.batch();
        let page = batch.create(LONG as u64, Place::Host).page();
        batch.write(page, 0, &bytes);
        let page = store.commit(batch).unwrap().pages[0];
        let mut expected = vec![(1, "batch", Some(bytes[5]))];
        if snapshot {
            // The snapshot removes the log of the first open.
            drop(store);
            store = open();
            store.snapshot().unwrap();
            expected[0].1 = "snapshot";
        }
        // A write with the element in its middle, and one past its end.
        let mut batch = store.batch();
        batch.write(page, 4, &[20; 3]).write(page, LONG as u64 - 1, &[21]);
        store.commit(batch).unwrap();
        expected.push((2, "batch", Some(20)));
        // A resize cuts the element off; after the next ones it exists again, as zero.
        for (len, value) in [(5, None), (LONG as u64, Some(0)), (16, Some(0))] {
            let mut batch = store.batch();
            batch.resize(page, len);
            let lsn = store.commit(batch).unwrap().position.lsn.0;
            if expected.last().unwrap().2 != value {
                expected.push((lsn, "batch", value));
            }
        }
        store.close().unwrap();
        let blame = |memory: &str| run(&["blame", &path, "page:1[5]", "--json", "--memory-max", memory]);
        let lines = blame("1").expect(0).json();
        let found = lines.iter().map(|line| serde_json::json!([line["lsn"], line["cause"], line["after"]]));
        let expected = expected.into_iter().map(|event| serde_json::json!(event));
        assert!(found.eq(expected), "{name}: {lines:?}");
        let refused = blame("0").expect(2).err;
        assert!(refused.contains("cannot allocate 1 bytes"), "{refused}");
    }
}

#[test]
fn restore_adds_version_and_removes_none() {
    let weights = imported(3);
    let store = weights.scratch.store();
    let taken = run(&["snapshot", &store, "--exact", "--json"]).expect(0).json().remove(0);
    assert_eq!(
        (&taken["snapshot"], &taken["end"], &taken["pages"]),
        (&1.into(), &3.into(), &2.into()),
        "{taken}"
    );
    weights.import(&versions()[PLANTED - 1], &[]);
    run(&["restore", &store, "--at", "lsn:9"]).expect(2);
    run(&["restore", &store, "--at", "snapshot:9"]).expect(2);
    let restored = run(&["restore", &store, "--at", "snapshot:1", "--json"]).expect(0).json().remove(0);
    assert_eq!((&restored["lsn"], &restored["restored"]), (&5.into(), &3.into()), "{restored}");
    let again = run(&["restore", &store, "--at", "lsn:1"]).expect(0).out;
    assert_eq!(again, "lsn 6: restored the state after lsn 1\n");

    let expected = [1, 2, 3, PLANTED, 3, 1].map(|version| versions()[version - 1].clone());
    for (version, lsn) in expected.iter().zip(1..) {
        assert!(weights.export(&["--at", &format!("lsn:{lsn}")]) == *version, "another version at lsn {lsn}");
    }
    let lines = blame(&weights, "w[6]", &[]);
    assert_eq!(
        lines[1..],
        [
            r#"3 "batch" 6.0 6.5 30 "version 3""#,
            r#"4 "batch" 6.5 "NaN" 30 null"#,
            r#"5 "restore" "NaN" 6.5 30 null"#,
            r#"6 "restore" 6.5 6.0 10 null"#,
        ]
    );
    // Each restore also took a snapshot.
    let listed = run(&["snapshots", &store, "--json"]).expect(0).json();
    assert!(listed.iter().any(|line| line["end"] == 6 && line["verified"] == true), "{listed:?}");
    assert!(listed.iter().all(|line| line["defect"].is_null() && line["pages"] == 2), "{listed:?}");
    let table = run(&["snapshots", &store]).expect(0).out;
    assert_eq!(table.lines().count(), listed.len() + 1, "{table}");
}

#[test]
fn fork_starts_at_requested_state_and_diverges() {
    let weights = imported(4);
    let store = weights.scratch.store();
    let (new, out) = (weights.scratch.path("new"), weights.scratch.path("exported"));
    let forked = run(&["fork", &store, &new, "--at", "lsn:2", "--json"]).expect(0).json().remove(0);
    assert_eq!(forked["lsn"], 2);
    run(&["export", &new, &out]).expect(0);
    assert!(fs::read(&out).unwrap() == versions()[1]);
    let path = weights.write(&versions()[7]);
    run(&["import", &new, &path]).expect(0);
    assert!(weights.export(&[]) == versions()[3], "the original store changed");
    let newest = weights.scratch.path("newest");
    run(&["fork", &store, &newest]).expect(0);
    run(&["export", &newest, &out]).expect(0);
    assert!(fs::read(&out).unwrap() == versions()[3]);
    run(&["fork", &store, &new]).expect(2);
    run(&["fork", &store, &weights.scratch.path("none"), "--at", "lsn:9"]).expect(2);
    assert!(!Path::new(&weights.scratch.path("none")).exists(), "a refused fork created a directory");
}

#[test]
fn prune_lists_removals_and_deletes_only_with_yes() {
    let weights = imported(1);
    let store = weights.scratch.store();
    run(&["snapshot", &store, "--name", "first"]).expect(0);
    assert!(run(&["snapshot", &store, "--name", "first"]).expect(2).err.contains("first"));
    for version in &versions()[1..4] {
        weights.import(version, &[]);
        run(&["snapshot", &store]).expect(0);
    }
    let named = |store: &str| {
        let listed = run(&["snapshots", store, "--json"]).expect(0).json();
        listed.iter().map(|line| line["end"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(named(&store), [1, 2, 3, 4]);
    let prune = |more: &[&str]| {
        run(&[&["prune", &store, "--json", "--snapshots", "1"], more].concat()).expect(0).json().remove(0)
    };
    let would = prune(&[]);
    assert_eq!(
        (&would["removed"], &would["snapshots"]),
        (&false.into(), &serde_json::json!([2, 3])),
        "{would}"
    );
    assert!(weights.export(&["--at", "lsn:2"]) == versions()[1], "nothing is gone yet");
    let did = prune(&["--yes"]);
    assert_eq!((&did["removed"], &did["snapshots"]), (&true.into(), &would["snapshots"]), "{did}");
    run(&["verify", &store]).expect(0);
    assert!(weights.export(&["--at", "name:first"]) == versions()[0], "its name keeps it");
    assert!(weights.export(&[]) == versions()[3]);
    assert_ne!(run(&["export", &store, &weights.scratch.path("gone"), "--at", "snapshot:2"]).code, 0);

    let name = prune(&["--name", "first", "--yes"]);
    assert_eq!(name["snapshots"], serde_json::json!([1]), "{name}");
    run(&["export", &store, &weights.scratch.path("gone"), "--at", "name:first"]).expect(2);
    let text = run(&["prune", &store, "--snapshots", "2"]).expect(0).out;
    assert!(text.contains("use --yes to remove them"), "{text}");
    run(&["prune", &store, "--snapshots", "0"]).expect(2);
    run(&["prune", &store, "--age", "1w"]).expect(2);
}

/// Without a rule, a prune would remove states that the writing application wants to keep.
#[test]
fn prune_without_a_rule_is_refused() {
    let weights = imported(2);
    let store = weights.scratch.store();
    for more in [&[][..], &["--yes"], &["--json"]] {
        let refused = run(&[&["prune", &store], more].concat()).expect(2);
        assert!(refused.err.contains("--snapshots, --age or --log-bytes"), "{}", refused.err);
    }
    assert!(weights.export(&["--at", "lsn:1"]) == versions()[0]);
}

/// Every option that names a state accepts the same syntax.
#[test]
fn states_have_one_syntax_in_all_commands() {
    let weights = imported(2);
    let (store, out) = (weights.scratch.store(), weights.scratch.path("out"));
    run(&["snapshot", &store, "--name", "warm"]).expect(0);
    weights.import(&versions()[2], &[]);
    let commands: [&[&str]; 7] = [
        &["export", &store, &out, "--at"],
        &["blame", &store, "w[6]", "--at"],
        &["diff", &store, "--from", "lsn:1", "--to"],
        &["diff", &store, "--from"],
        &["bisect", &store, "--bad", "lsn:3", "--run", NO_NAN, "--good"],
        &["restore", &store, "--at"],
        &["fork", &store, &weights.scratch.path("new"), "--at"],
    ];
    for command in commands {
        let given = |state: &str| run(&[command, &[state]].concat());
        for (state, word) in [
            ("wram", "there is no snapshot named \"wram\"; did you mean \"warm\"?"),
            ("name:3", "there is no snapshot named \"3\""),
            ("3", "expected lsn:N, snapshot:N or the name of a snapshot, found \"3\""),
            ("lsn:x", "found \"lsn:x\""),
        ] {
            let refused = given(state).expect(2).err;
            assert!(refused.contains(word), "{command:?} {state}: {refused}");
        }
        for state in ["warm", "name:warm", "lsn:2", "snapshot:1"] {
            let code = given(state).code;
            assert!(code != 2 || command[0] == "fork" && state != "warm", "{command:?} {state}: {code}");
        }
    }
}

/// `dump` and `blame` accept the same syntax for a page.
#[test]
fn pages_have_one_syntax_in_all_commands() {
    let weights = imported(1);
    let store = weights.scratch.store();
    for (page, code) in [("1", 0), ("page:1", 0), ("w", 0), ("key:w", 0), ("v", 2), ("9", 2), ("key:v", 2)] {
        run(&["dump", &store, page, "--output", &weights.scratch.path("page")]).expect(code);
        run(&["blame", &store, &format!("{page}[6]")]).expect(code);
    }
}

/// A shell command that fails if the file contains the NaN.
const NO_NAN: &str = r"! LC_ALL=C grep -aqP '\x00\x00\xc0\x7f'";

#[test]
fn bisect_finds_the_first_bad_version() {
    let weights = imported(8);
    let store = weights.scratch.store();
    let args = ["bisect", &store, "--good", "lsn:1", "--bad", "lsn:8", "--run"];
    let found = run(&[&args[..], &[&format!("{NO_NAN} {{}}"), "--json"]].concat()).expect(0).json().remove(0);
    let expected = serde_json::json!({
        "schema": 1, "first_bad": PLANTED, "root": { "step": 50 }, "note": "version 5"
    });
    assert_eq!(found, expected);
    // Without {}, the file's path is the last argument.
    let text = run(&[&args[..], &[NO_NAN]].concat()).expect(0).out;
    assert!(text.contains("the first bad version is lsn 5\n") && text.contains("lsn 4: good\n"), "{text}");

    for (verdict, code, word) in
        [("exit 125 #", 2, "one of lsn 2 to 8"), ("exit 128 #", 2, "exited with code 128")]
    {
        let stopped = run(&[&args[..], &[verdict]].concat()).expect(code);
        assert!(stopped.err.contains(word), "{}", stopped.err);
    }
    for (good, bad) in [("lsn:8", "lsn:1"), ("lsn:3", "lsn:3"), ("lsn:1", "lsn:9")] {
        run(&["bisect", &store, "--good", good, "--bad", bad, "--run", "true"]).expect(2);
    }
}

#[test]
fn bisect_leaves_no_files() {
    let weights = imported(8);
    let (store, scratch) = (weights.scratch.store(), weights.scratch.path("scratch"));
    fs::create_dir(&scratch).unwrap();
    let args = ["bisect", &store, "--good", "lsn:1", "--bad", "lsn:8", "--run"];
    let started = weights.scratch.path("started");
    let bisect = |script: &str| {
        let mut command = command(&[&args[..], &[script]].concat());
        command.env("TMPDIR", &scratch);
        command
    };
    finished(bisect(NO_NAN)).expect(0);
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);

    let mut child = bisect(&format!("touch {started}; exec tail -f")).stderr(Stdio::null()).spawn().unwrap();
    while !Path::new(&started).exists() {
        assert!(child.try_wait().unwrap().is_none(), "the search ended by itself");
        std::thread::yield_now();
    }
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
}
