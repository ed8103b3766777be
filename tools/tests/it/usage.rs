//! What all commands have in common: help, exit codes, levels of messages. Also `doctor`.

use crate::command::run;

const COMMANDS: &[&str] = &[
    "demo",
    "torture",
    "replay",
    "import",
    "export",
    "diff",
    "blame",
    "bisect",
    "snapshots",
    "snapshot",
    "restore",
    "fork",
    "prune",
    #[cfg(feature = "archive")]
    "archive",
    "doctor",
    "completions",
    "info",
    "pages",
    "log",
    "follow",
    "dump",
    "verify",
    "salvage",
];

#[test]
fn help_is_printed_without_error() {
    let help = run(&["--help"]).expect(0);
    assert!(help.out.contains("Exit codes"), "{}", help.out);
    for command in COMMANDS {
        assert!(help.out.contains(&format!("\n  {command} ")), "{command} is not in:\n{}", help.out);
        let own = run(&[command, "--help"]).expect(0);
        assert!(own.out.contains("Examples:\n"), "{command} gives no examples:\n{}", own.out);
    }
    #[cfg(feature = "archive")]
    for command in ["push", "status", "verify", "prune"] {
        let own = run(&["archive", command, "--help"]).expect(0);
        assert!(own.out.contains("Examples:\n"), "archive {command} gives no examples:\n{}", own.out);
    }
}

/// Without arguments, a short guide goes to standard error.
#[test]
fn no_arguments_print_a_guide() {
    let guide = run(&[]).expect(2);
    assert!(guide.out.is_empty(), "{}", guide.out);
    for next in ["remanent demo", "remanent import", "remanent info", "remanent verify", "remanent doctor"] {
        assert!(guide.err.contains(next), "{next} is not in:\n{}", guide.err);
    }
    assert!(run(&["-q"]).expect(2).err.contains("requires a subcommand"));
}

#[test]
fn usage_errors_exit_with_2_without_changes() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().to_str().unwrap();
    let missing = dir.path().join("missing");
    let missing = missing.to_str().unwrap();
    for args in [
        &[][..],
        &["unknown"],
        &["log"],
        &["log", empty, "--unknown"],
        &["info", empty],
        &["pages", empty],
        &["log", missing],
        &["verify", empty],
        &["salvage", empty],
        &["dump", empty, "1"],
        &["dump", empty, "one", "-o", "-"],
        &["dump", empty, "1", "-o", "-"],
    ] {
        let run = run(args).expect(2);
        assert!(!run.err.is_empty() && run.out.is_empty(), "{args:?}: {}", run.out);
    }
    assert!(run(&["log", empty]).err.contains("there is no store in"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// A run of several ranks has a store in each of its folders, but is not a store itself.
#[test]
fn error_names_stores_in_subfolders() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().to_str().unwrap();
    let make = |name: &str| {
        let file = dir.path().join("empty.safetensors");
        std::fs::write(&file, b"\x02\0\0\0\0\0\0\0{}").unwrap();
        let store = dir.path().join(name);
        run(&["import", store.to_str().unwrap(), file.to_str().unwrap()]).expect(0);
    };
    std::fs::create_dir(dir.path().join("points")).unwrap();
    make("rank-2");
    for args in [&["info", run_dir][..], &["pages", run_dir], &["log", run_dir], &["verify", run_dir]] {
        let message = run(args).expect(2).err;
        let named = format!("there is no store in {run_dir}, but there is a store in {run_dir}/rank-2");
        assert!(message.contains(&named), "{message}");
    }
    (10..12).for_each(|rank| make(&format!("rank-{rank}")));
    let message = run(&["info", run_dir]).expect(2).err;
    let named = format!(
        "but its folders contain 3 stores, from {run_dir}/rank-2 to {run_dir}/rank-11; use one of them"
    );
    assert!(message.contains(&named), "{message}");
}

#[test]
fn quiet_prints_nothing_and_verbose_prints_events() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (store, file) = (path("store"), path("empty.safetensors"));
    std::fs::write(&file, b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let imported = run(&["import", &store, &file]).expect(0);
    assert!(imported.err.is_empty(), "no terminal, no progress: {}", imported.err);
    let message = run(&["-vv", "import", &store, &file]).expect(0);
    assert!(message.err.contains("remanent"), "{}", message.err);
    assert!(!message.err.contains('\u{1b}'), "colors: {}", message.err);
    let quiet = run(&["import", &store, &file, "--quiet"]).expect(0);
    assert!(quiet.err.is_empty() && quiet.out.contains("nothing to import"), "{}", quiet.err);
    // The reason of a failure is printed nevertheless.
    assert!(run(&["-q", "import", &store, &path("missing")]).expect(2).err.contains("missing"));
    run(&["-q", "-v", "import", &store, &file]).expect(2);
}

#[test]
fn completions_contain_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&["completions", shell]).expect(0).out;
        for command in COMMANDS {
            assert!(script.contains(command), "{command} is not in that for {shell}");
        }
    }
    run(&["completions", "dos"]).expect(2);
}

#[test]
fn doctor_reports_capabilities_and_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let found = run(&["doctor", path, "--json"]).expect(0).json().remove(0);
    assert_eq!(found["schema"], 1);
    assert!(
        ["mapped", "buffered"].iter().any(|io| found["log"].as_str().unwrap().starts_with(io)),
        "{found}"
    );
    assert!(found["device"].as_str().is_some_and(|device| !device.is_empty()), "{found}");
    for number in ["free_bytes", "cpus", "memory_bytes", "page_size", "open_files_max"] {
        assert!(found[number].as_u64().unwrap() > 0, "{number} in {found}");
    }
    assert!(found["sync_us"]["longest"].as_u64() >= found["sync_us"]["median"].as_u64(), "{found}");
    let text = run(&["doctor", path]).expect(0).out;
    assert_eq!(text.lines().count(), found.as_object().unwrap().len() - 1, "{text}");
    assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
    run(&["doctor", &format!("{path}/missing")]).expect(2);
}
