//! Uses `strace` to change the effect of the n-th system call of a kind in a running process.
//!
//! `strace` is attached to a process that waits, so that only later calls count. Calls are counted per
//! thread, and the fault is injected into the first thread that reaches its n-th call.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::OnceLock;

/// A fault for one kind of system call.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// System calls in the syntax of `strace`, such as `pwrite64`, `/^rename` or `all`.
    pub calls: &'static str,
    /// The fault in the syntax of `strace`, such as `signal=KILL` or `error=EIO`.
    pub fault: &'static str,
}

/// A fault for one system call.
#[derive(Clone, Copy, Debug)]
pub struct Injection {
    pub fault: Fault,
    /// The number of the call, from 1.
    pub nth: u64,
}

impl Injection {
    fn argument(&self) -> String {
        let Self { fault: Fault { calls, fault }, nth } = self;
        format!("inject={calls}:{fault}:when={nth}")
    }
}

/// A running `strace`, which ends with its process.
pub struct Strace {
    process: Child,
    /// The file to which `strace` writes the calls of the kind.
    log: PathBuf,
    /// The stderr pipe, which stays open because `strace` writes a message for every new thread.
    _messages: BufReader<ChildStderr>,
}

impl Strace {
    /// Attaches to all threads of a process, and to those that they start.
    pub fn attach(process: u32, injection: &Injection, log: &Path) -> Result<Self, String> {
        let mut command = Command::new("strace");
        command.args(["-f", "-p", &process.to_string(), "-o"]).arg(log);
        command.args(["-e", &format!("trace={}", injection.fault.calls), "-e", &injection.argument()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|error| format!("strace: {error}"))?;
        let mut said = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let strace = Self { process, log: log.to_owned(), _messages: said };
        if line.contains(" attached") { Ok(strace) } else { Err(line.trim_end().to_owned()) }
    }

    /// Returns true if a call hit the fault. Call this method after the process has ended.
    pub fn struck(mut self) -> bool {
        self.process.wait().unwrap();
        std::fs::read_to_string(&self.log).unwrap().contains("(INJECTED)")
    }
}

impl Drop for Strace {
    fn drop(&mut self) {
        // `strace` has usually ended with its process, which is not a failure.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the reason why `strace` is not available, or `None` if it can attach to a process.
pub fn missing() -> Option<&'static str> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    let ask = || {
        let mut cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let injection = Injection { fault: Fault { calls: "rename", fault: "error=EIO" }, nth: 1 };
        let attached = Strace::attach(cat.id(), &injection, Path::new("/dev/null"));
        cat.kill().unwrap();
        cat.wait().unwrap();
        attached.err()
    };
    REASON.get_or_init(ask).as_deref()
}
