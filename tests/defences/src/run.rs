//! Builds the copy of the repository, and runs its tests with one defence disabled.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::list::Test;
use crate::tree::SWITCH;

/// The time after which a test counts as hung.
const PATIENCE: Duration = Duration::from_secs(300);

/// The outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Green,
    Red,
    /// The test did not end before the timeout.
    Hangs,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Outcome::Green => "NOT NOTICED",
            Outcome::Red => "red",
            Outcome::Hangs => "hangs",
        })
    }
}

/// The test binaries of the copy, keyed by name without hash, with the folder in which each must run.
pub struct Binaries {
    paths: BTreeMap<String, (PathBuf, PathBuf)>,
}

/// Builds the tests of the copy, or only those of its format crate.
pub fn build(tree: &Path, target: &Path, only_format: bool) -> Result<Binaries> {
    let mut paths = BTreeMap::new();
    let packages = [("remanent-format", tree.join("format")), ("remanent", tree.to_owned())];
    for (package, folder) in packages {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // Packages that are not tested must still build.
        match package {
            "remanent" if only_format => cargo.args(["check", "--lib"]),
            _ => cargo.args(["test", "--no-run", "--lib", "--tests"]),
        };
        cargo.args(["--color=never", "--message-format=short"]);
        cargo.args(["--package", package]).current_dir(tree).env("CARGO_TARGET_DIR", target);
        // A higher optimization level does not pay off, because each test runs only once or twice.
        cargo.env("CARGO_PROFILE_TEST_OPT_LEVEL", "1");
        // The environment variables with which cargo built this program must not affect the build of the
        // copy.
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CARGO_PKG_"))
        {
            cargo.env_remove(name);
        }
        let Output { status, stderr, .. } = cargo.output()?;
        let said = String::from_utf8_lossy(&stderr);
        if !status.success() {
            let errors: Vec<&str> = said.lines().filter(|line| line.contains("error")).collect();
            let errors = errors.join("\n");
            return Err(Error::other(format!("the copy in {} does not build:\n{errors}", tree.display())));
        }
        // `  Executable tests/it/main.rs (target/debug/deps/it-0123456789abcdef)`
        for line in said.lines().filter(|line| line.trim_start().starts_with("Executable")) {
            let path = line.rsplit_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
            let path = tree.join(path.ok_or_else(|| Error::other(format!("cargo says: {line}")))?);
            let stem = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.rsplit_once('-'));
            let (name, _) = stem.ok_or_else(|| Error::other(format!("cargo says: {line}")))?;
            paths.insert(name.to_owned(), (path.clone(), folder.clone()));
        }
    }
    Ok(Binaries { paths })
}

impl Binaries {
    /// Returns the names of the binaries.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.paths.keys().map(String::as_str)
    }

    /// Runs one test with one defence disabled.
    pub fn test(&self, test: Test, without: Option<&str>) -> Result<Outcome> {
        let (outcome, said) = self.run(test.binary, &["--exact", test.name], without)?;
        if outcome != Outcome::Hangs && !said.contains("running 1 test") {
            return Err(Error::other(format!("{} has no test {}", test.binary, test.name)));
        }
        Ok(outcome)
    }

    /// Runs all tests of a binary with one defence disabled. Returns the names of the failed tests.
    pub fn red_tests(&self, binary: &str, without: &str) -> Result<Vec<String>> {
        let (outcome, said) = self.run(binary, &[], Some(without))?;
        let red = said.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"));
        let red: Vec<String> = red.map(str::to_owned).collect();
        let lost = outcome != Outcome::Green && red.is_empty();
        Ok(if lost { vec![format!("({outcome}, as a whole)")] } else { red })
    }

    fn run(&self, binary: &str, arguments: &[&str], without: Option<&str>) -> Result<(Outcome, String)> {
        let (path, folder) = self
            .paths
            .get(binary)
            .ok_or_else(|| Error::other(format!("there is no test binary {binary}")))?;
        let mut command = Command::new(path);
        command.args(arguments).current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        if let Some(without) = without {
            command.env(SWITCH, without);
        }
        let mut child = command.spawn()?;
        let mut stdout = child.stdout.take().expect("it is piped");
        let (sender, receiver) = mpsc::channel();
        // The thread ends with the test. After a timeout, no one reads the output.
        thread::spawn(move || sender.send(std::io::read_to_string(&mut stdout)));
        let Ok(said) = receiver.recv_timeout(PATIENCE) else {
            child.kill()?;
            child.wait()?;
            return Ok((Outcome::Hangs, String::new()));
        };
        let outcome = if child.wait()?.success() { Outcome::Green } else { Outcome::Red };
        Ok((outcome, said?))
    }
}

/// Calls a function for each of `items`, several at a time. Returns the results in the order of the items.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let jobs =
        std::env::var("DEFENCES_JOBS").ok().map_or(cores.div_ceil(2), |jobs| jobs.parse().expect("a number"));
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    *results[at].lock().expect("no panic") = Some(work(item));
                }
            });
        }
    });
    results.into_iter().map(|result| result.into_inner().expect("no panic").expect("all are done")).collect()
}
