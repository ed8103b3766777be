//! Calls that cannot work are told from damage by their exit code, and say what is wrong.

use crate::command::run;

const COMMANDS: [&str; 12] = [
    "demo", "replay", "import", "export", "diff", "blame", "bisect", "info", "pages", "log", "dump", "verify",
];

#[test]
fn help_teaches_and_is_no_error() {
    let help = run(&["--help"]).expect(0);
    assert!(help.out.contains("Exit codes"), "{}", help.out);
    for command in COMMANDS {
        assert!(help.out.contains(&format!("\n  {command} ")), "{command} is not in:\n{}", help.out);
        let own = run(&[command, "--help"]).expect(0);
        assert!(own.out.contains("Examples:\n"), "{command} gives no examples:\n{}", own.out);
    }
}

#[test]
fn wrong_calls_end_with_two_and_touch_nothing() {
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
