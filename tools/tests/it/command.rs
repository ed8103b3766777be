//! Runs the command and captures its output and exit code.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The trace that comes with the tool.
pub const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_trace.jsonl.zst");

/// The result of a command.
pub struct Run {
    /// The exit code.
    pub code: i32,
    /// Text on standard output.
    pub out: String,
    /// Text on standard error.
    pub err: String,
}

/// Prepares the command with arguments.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remanent"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub fn run(args: &[&str]) -> Run {
    finished(command(args))
}

/// Runs a prepared command to its end.
pub fn finished(mut command: Command) -> Run {
    let output = command.output().expect("cargo builds the command with the test");
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    Run {
        code: output.status.code().expect("the command was not killed"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

impl Run {
    /// Returns `self` if the exit code is `code`. Panics with both outputs otherwise.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }

    /// Parses every line of standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Vec<serde_json::Value> {
        self.out.lines().map(|line| serde_json::from_str(line).expect("a line is one JSON object")).collect()
    }
}

/// A temporary directory for one store.
pub struct Scratch {
    dir: TempDir,
}

impl Scratch {
    /// Creates an empty directory.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory can be made") }
    }

    /// Returns a path in the directory.
    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("temporary directories have plain names").to_owned()
    }

    /// Returns the path of the store, which need not exist.
    pub fn store(&self) -> String {
        self.path("store")
    }

    /// Replays the trace up to `limit` requests, with small pages.
    pub fn replay(&self, limit: u64, more: &[&str]) -> Run {
        let (store, limit) = (self.store(), limit.to_string());
        let args = ["replay", &store, TRACE, "--page-len", "256", "--pages-max", "600", "--limit", &limit];
        run(&[&args[..], more].concat())
    }

    /// Starts a replay of up to `limit` requests whose acknowledgements can be read as they arrive.
    pub fn start_replay(&self, limit: u64, more: &[&str]) -> Running {
        let (store, limit) = (self.store(), limit.to_string());
        let args = ["replay", &store, TRACE, "--page-len", "256", "--pages-max", "600", "--resume"];
        let mut command = command(&[&args[..], &["--limit", &limit, "--acks", "-"], more].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the command was built");
        let stdout = BufReader::new(child.stdout.take().expect("asked to be a pipe"));
        Running { child, stdout, last_ack: None }
    }

    /// Returns the last line of `replay --check`, which must exit with `code`.
    #[track_caller]
    pub fn check(&self, code: i32) -> String {
        let check = run(&["replay", &self.store(), TRACE, "--check"]).expect(code);
        check.out.lines().next_back().unwrap_or_default().to_owned()
    }

    /// Returns the last request in the store; `None` also if there is no store yet.
    pub fn last_request(&self) -> Option<u64> {
        if !Path::new(&self.store()).exists() {
            return None;
        }
        let info = run(&["info", &self.store(), "--json"]).expect(0).json().remove(0);
        info["root"]["request"].as_u64()
    }
}

/// A replay in a child process.
pub struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// The last acknowledged request so far.
    pub last_ack: Option<u64>,
}

impl Running {
    /// Reads acknowledgements up to the one of `request`.
    pub fn until(&mut self, request: u64) {
        while self.last_ack < Some(request) {
            assert!(self.read(), "the replay ended before request {request}");
        }
    }

    /// Reads a line. Returns `false` at the end.
    fn read(&mut self) -> bool {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a pipe can be read");
        if let Some((lsn, request)) = line.trim_end().split_once(' ')
            && let (Ok(lsn), Ok(request)) = (lsn.parse::<u64>(), request.parse::<u64>())
        {
            assert_eq!(lsn, request + 1, "each request is one batch");
            self.last_ack = Some(request);
        }
        !line.is_empty()
    }

    /// Sends a signal and reads to the end.
    pub fn signal(&mut self, signal: Signal) -> ExitStatus {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the replay is running");
        while self.read() {}
        self.child.wait().expect("the replay is ours to wait for")
    }
}
