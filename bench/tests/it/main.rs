//! The benchmarks as a user runs them: their output, and that they leave no files.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Every benchmark, with options for a very short run.
const SMALL: &[(&str, &[&str])] = &[
    (
        "commit",
        &["--threads", "1,2", "--len", "256,4KiB", "--seconds", "0.01", "--log-io", "mapped,buffered"],
    ),
    ("snapshot", &["--bytes", "2MiB", "--page-len", "64KiB,4KiB"]),
    ("restore", &["--bytes", "2MiB", "--page-len", "64KiB,4KiB"]),
    ("replay", &["--bytes", "256KiB", "--pages", "256KiB"]),
    ("create", &["--bytes", "2MiB", "--batch", "1MiB", "--page-len", "256KiB"]),
    ("growth", &["--pages", "200,300", "--commits", "20", "--keys"]),
    ("follow", &["--batches", "20", "--idle", "0.01"]),
    ("archive", &["--seconds", "0.02", "--waits", "3"]),
    ("lookup", &["--threads", "2", "--pages", "500", "--seconds", "0.001"]),
    (
        "tiers",
        &[
            "--requests",
            "30",
            "--len",
            "4KiB",
            "--budgets",
            "20,100",
            "--prefetch",
            "1",
            "--move-bytes",
            "4MiB",
        ],
    ),
    ("allocations", &["--requests", "30", "--len", "5000", "--budget", "50"]),
    ("steady", &["--threads", "2", "--len", "64KiB,4KiB", "--bytes", "1MiB", "--seconds", "0.05"]),
    ("ceilings", &["--bytes", "1MiB"]),
];

/// Benchmarks whose figures have no ceiling.
const WITHOUT_CEILING: [&str; 4] = ["ceilings", "follow", "growth", "steady"];

/// Benchmarks of which a part needs a GPU.
const NEED_A_GPU: [&str; 2] = ["allocations", "ceilings"];

/// The result of a benchmark.
struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    /// Returns `self` if the exit code is `code`. Panics with both outputs otherwise.
    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }

    /// Parses every line of standard output as JSON.
    #[track_caller]
    fn json(&self) -> Vec<serde_json::Value> {
        self.out.lines().map(|line| serde_json::from_str(line).expect("a line is one JSON object")).collect()
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remanent-bench"));
    command.args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Run {
    let output = command(args).output().expect("the program was built beside the test");
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn small<'a>(what: &'a str, dir: &'a str, own: &[&'a str]) -> Vec<&'a str> {
    [&[what, dir, "--device", "host", "--rounds", "2"], own].concat()
}

#[test]
fn benchmarks_report_each_round_with_ceiling_and_leave_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for (what, own) in SMALL {
        let lines = run(&[&small(what, path, own)[..], &["--json"]].concat()).expect(0).json();
        let (last, figures) = lines.split_last().unwrap();
        assert_eq!((&last["schema"], &last["bench"]), (&1.into(), &(*what).into()));
        assert_eq!(last["settings"]["device"], "host", "{last}");
        let mut groups: BTreeMap<&str, Vec<&serde_json::Value>> = BTreeMap::new();
        for figure in figures {
            assert_eq!((&figure["schema"], &figure["bench"]), (&1.into(), &(*what).into()));
            groups.entry(figure["group"].as_str().unwrap()).or_default().push(figure);
        }
        let mut under = 0;
        for figures in groups.values() {
            for figure in figures {
                let rounds = figure["rounds"].as_array().unwrap();
                assert_eq!(rounds.len(), 2, "{figure}");
                // These figures may be zero. Memory may not grow, an allocator may hold only live blocks, a
                // follower may receive a batch before its commit returns, and blocks may neither be awaited
                // nor evicted.
                let may_be_none =
                    figure["unit"] == "bytes" || ["allocations", "follow", "tiers"].contains(what);
                let least = if may_be_none { 0.0 } else { f64::MIN_POSITIVE };
                assert!(rounds.iter().all(|value| value.as_f64().unwrap() >= least), "{figure}");
                if let Some(latency) = figure.get("latency_us") {
                    let of = |name: &str| latency[name].as_f64().unwrap();
                    assert!(
                        of("count") > 0.0 && of("p50") <= of("p99") && of("p99") <= of("worst"),
                        "{figure}"
                    );
                }
                if let Some(ceiling) = figure["ceiling"].as_str() {
                    assert!(figure["ratio"].as_f64().unwrap() > 0.0, "{figure}");
                    assert!(figures.iter().any(|other| other["figure"] == ceiling), "{figure}");
                    under += 1;
                }
            }
        }
        assert!(under > 0 || WITHOUT_CEILING.contains(what), "{what} has no figure under a ceiling");
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "{what} left something");
    }
}

#[test]
fn report_has_table_and_html_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(path("disk")).unwrap();
    for (what, own) in SMALL {
        let (disk, page) = (path("disk"), path(&format!("{what}.html")));
        let text = run(&[&small(what, &disk, own)[..], &["--report", &page]].concat()).expect(0).out;
        assert!(
            text.contains("MEDIAN") && text.contains("not measured: ") == NEED_A_GPU.contains(what),
            "{text}"
        );
        let html = std::fs::read_to_string(page).unwrap();
        assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"), "{html}");
        assert_eq!(html.contains("Share of the ceiling"), !WITHOUT_CEILING.contains(what));
    }
}

#[test]
fn unmeasurable_benchmark_is_refused_before_setup() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let missing = format!("{path}/missing");
    let no_folder = format!("{path}/missing/page.html");
    for (args, said) in [
        (&["snapshot", &missing][..], "cannot measure in"),
        (&["snapshot", path, "--bytes", "1024TiB", "--page-len", "1GiB"], "free"),
        (&["restore", path, "--page-len", "1GiB"], "--page-len 1 GiB"),
        (&["commit", path, "--seconds", "nan"], "--seconds"),
        (&["commit", path, "--threads", "0"], "--threads"),
        (&["commit", path, "--len", "0"], "--len"),
        (&["commit", path, "--len", "1MiB", "--threads", "1000"], "does not fit into the raw loop's file"),
        (&["commit", path, "--rounds", "0"], "--rounds"),
        (&["replay", path, "--deltas", "256"], "256x64"),
        (&["replay", path, "--deltas", "64KiBx1000"], "a batch"),
        (&["tiers", path, "--len", "60"], "--len"),
        (&["tiers", path, "--len", "68"], "--len"),
        (&["tiers", path, "--budgets", "10,0"], "--budgets"),
        (&["tiers", path, "--budgets", "101"], "--budgets"),
        (&["tiers", path, "--budgets", "5,5"], "twice"),
        (&["tiers", path, "--policies", "lru,lru"], "twice"),
        (&["tiers", path, "--policies", "fifo"], "--policies"),
        (&["tiers", path, "--requests", "1"], "--requests"),
        (&["tiers", path, "--requests", "20000"], "12031 requests"),
        (&["tiers", path, "--trace", &missing], "cannot read"),
        (&["tiers", path, "--requests", "12031", "--len", "1GiB"], "free"),
        (&["allocations", path, "--threads", "0"], "--threads"),
        (&["allocations", path, "--len", "0"], "--len"),
        (&["allocations", path, "--budget", "101"], "--budget"),
        (&["allocations", path, "--requests", "20000"], "12031 requests"),
        (&["allocations", path, "--trace", &missing], "cannot read"),
        (&["allocations", path, "--kv", &missing], "cannot read"),
        (&["allocations", path, "--trace", "/dev/null"], "contains no allocations"),
        (&["ceilings", path, "--bytes", "ten"], "expected a size"),
        (&["ceilings", path, "--device", "cuda:99"], "cuda:99"),
        (&["ceilings", path, "--report", &no_folder], "cannot write the report"),
    ] {
        let run = run(args).expect(2);
        assert!(run.err.contains(said) && run.out.is_empty(), "{args:?}: {}", run.err);
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "{args:?} created a file");
    }
}

/// A trace of allocations gives figures with known bytes, and a saved trace gives the same ones.
#[test]
fn trace_peaks_follow_its_lengths() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let lines = [
        r#"{"alloc": 1, "len": 3000000, "stream": 0}"#,
        r#"{"alloc": 2, "len": 1000000, "stream": 0}"#,
        r#"{"free": 1}"#,
        r#"{"alloc": 3, "len": 2000000, "stream": 7}"#,
    ];
    std::fs::write(path("trace"), lines.join("\n")).unwrap();
    std::fs::create_dir(path("disk")).unwrap();
    let disk = path("disk");
    let args = |trace: &'static str, more: &[&str]| -> Vec<String> {
        let fixed = ["allocations", &disk, "--device", "host", "--rounds", "1", "--threads", "1"];
        let trace = path(trace);
        [&fixed[..], &["--trace", &trace], more].concat().into_iter().map(str::to_owned).collect()
    };
    let saved = path("saved");
    let first = args("trace", &["--save", &saved]);
    let again = args("saved", &[]);
    let [first, again] = [first, again].map(|args| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        values(&args)
    });
    for values in [&first, &again] {
        let of = |name: &str| values[&("1 thread, 4 calls each".to_owned(), name.to_owned())][0];
        // One segment for the long blocks, and one for the short block.
        let reserved = f64::from((20 + 2) << 20);
        assert_eq!(of("caching, peak reserved"), reserved);
        assert_eq!(of("caching, share of reserved not live"), 1.0 - 4e6 / reserved);
        // Each slab serves one length, and the first slab of a class is as short as possible.
        assert!(of("pool, peak reserved") >= 4e6 && of("host allocator") > 0.0);
    }
    assert_eq!(first.keys().collect::<Vec<_>>(), again.keys().collect::<Vec<_>>());
}

/// Returns the values of a run's figures, one per round, by group and name.
fn values(args: &[&str]) -> BTreeMap<(String, String), Vec<f64>> {
    let mut lines = run(&[args, &["--json"]].concat()).expect(0).json();
    lines.pop().expect("the run");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let of = |figure: &serde_json::Value| {
        let rounds = figure["rounds"].as_array().unwrap().iter().map(number).collect();
        ((text(&figure["group"]), text(&figure["figure"])), rounds)
    };
    lines.iter().map(of).collect()
}

#[test]
fn block_cache_hits_repeated_blocks_and_evicts_when_full() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(path("disk")).unwrap();
    // 40 requests for 4 of 40 blocks, cyclically; one block is named twice in each.
    let request = |at: u64| (0..4).map(|block| (4 * at + block) % 40).collect::<Vec<u64>>();
    let line = |at: u64| {
        let ids = [request(at), vec![4 * at % 40]].concat();
        format!("{{\"timestamp\": {at}, \"hash_ids\": {ids:?}}}\n")
    };
    std::fs::write(path("trace"), (0..40).map(line).collect::<String>()).unwrap();
    let (disk, trace) = (path("disk"), path("trace"));
    let common = ["tiers", &disk, "--device", "host", "--rounds", "2", "--trace", &trace];
    let own = ["--requests", "40", "--len", "4KiB", "--budgets", "30,100", "--prefetch", "2"];
    let values = values(&[&common[..], &own].concat());
    let (new, again) = (40.0, 120.0);
    let mut runs = 0;
    for (group, name) in values.keys().filter(|(_, name)| name.ends_with(": new")) {
        let variant = name.strip_suffix(": new").unwrap();
        let of = |what: &str| {
            let found = values.get(&(group.clone(), format!("{variant}: {what}")));
            found.unwrap_or_else(|| panic!("no {what} of {variant} in {group}"))
        };
        let has_room = group.starts_with("room for 100 %");
        for round in 0..2 {
            let of = |what: &str| of(what)[round];
            assert_eq!((of("new"), of("requested again")), (new, again));
            assert_eq!(of("found in host") + of("found in disk"), again);
            assert!((of("hits") - of("found in host") / again).abs() < 1e-9);
            if !variant.contains("ahead") {
                let (hits, misses) = (of("hits by the store's count"), of("misses by the store's count"));
                assert_eq!(hits + misses, again, "{variant} in {group}");
                assert_eq!(has_room, misses == 0.0, "{variant} in {group}");
            }
            if has_room {
                assert_eq!((of("hits"), of("evictions"), of("waits for room")), (1.0, 0.0, 0.0));
            } else {
                // With prefetch, all blocks may be in place in time.
                assert!(variant.contains("ahead") || of("hits") < 1.0, "{variant} in {group}");
                assert!(of("evictions") >= 40.0 - 12.0, "{variant} in {group}");
                assert_eq!(of("host to disk, moved"), 4096.0 * of("evictions"));
            }
        }
        runs += 1;
    }
    assert_eq!(runs, 8, "two policies with two budgets, with and without prefetch");
    let of_part =
        |part: &str| values.iter().filter(|((group, _), _)| group.contains(part)).collect::<Vec<_>>();
    for ((_, name), hits) in of_part("policies alone") {
        assert_eq!(hits == &[1.0, 1.0], name.ends_with("100 %"), "{name}");
    }
    // The budget in the middle of the list has room for all blocks.
    let around = of_part("a restart");
    let around: Vec<_> = around.iter().filter(|((_, name), _)| name.contains("hits")).collect();
    assert_eq!(around.len(), 6);
    for ((_, name), hits) in around {
        assert!(name.contains(" 20 requests ") && *hits == &[1.0, 1.0], "{name}");
    }
}

#[test]
fn interrupted_benchmark_leaves_no_store_and_no_report() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let page = format!("{path}/page.html");
    let args = ["-vv", "commit", path, "--device", "host", "--rounds", "1000", "--report", &page];
    let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    // With -vv the engine logs a message as soon as the store exists.
    said.read_line(&mut String::new()).unwrap();
    assert!(std::fs::read_dir(path).unwrap().count() > 0);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    said.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn each_benchmark_has_help() {
    for (what, _) in SMALL {
        let help = run(&[what, "--help"]).expect(0).out;
        assert!(help.contains("Examples:\n") && help.contains("--report"), "{help}");
    }
}
