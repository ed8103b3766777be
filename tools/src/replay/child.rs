//! A `remanent replay` in a child process, which is observed through its acknowledgements and killed.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use remanent::DeviceChoice;
use remanent::options::LogIo;

use crate::cli::exit::Failure;
use crate::cli::program;
use crate::replay::simulate::Rule;

/// Upper bound on the time until Ctrl-C is noticed while a replay acknowledges nothing.
const NOTICE: Duration = Duration::from_millis(10);

/// The parameters common to all replays of a run.
#[derive(Clone)]
pub struct ReplayParams {
    /// The store directory.
    pub store: PathBuf,
    /// The trace file.
    pub trace: PathBuf,
    /// The length of pages, and how many are kept.
    pub rule: Rule,
    /// The number of requests.
    pub limit: u64,
    /// The number of requests between snapshots.
    pub snapshot_every: u64,
    /// The device of the pages.
    pub device: DeviceChoice,
    /// Whether requests are acknowledged only when they are durable.
    pub durable: bool,
    /// How the log is written, or `None` to let the store choose. With [`LogIo::Direct`] every
    /// acknowledgement is durable.
    pub log_io: Option<LogIo>,
}

/// A running replay.
pub struct Replayer {
    process: Child,
    started: Instant,
    acks: Receiver<u64>,
    last_ack: Option<u64>,
    first_ack_after: Option<Duration>,
}

/// The reason why [`Replayer::watch`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// `moment` returned true.
    Reached,
    /// The process exited.
    Ended(ExitStatus),
    /// `stop` returned true.
    Interrupted,
}

impl ReplayParams {
    /// Starts a replay that continues after the store's last request.
    pub fn start(&self) -> Result<Replayer, Failure> {
        let mut command = program::again().map_err(|error| cannot("find this program", &error))?;
        let log_io = self.log_io.map(|log_io| ["--log-io".to_owned(), log_io.to_string()]);
        let mut process = command
            .arg("replay")
            .args(log_io.into_iter().flatten())
            .args([&self.store, &self.trace])
            .args(["--resume", "--acks", "-", "--limit", &self.limit.to_string()])
            .args(["--ack", if self.durable { "durable" } else { "logged" }])
            .args(["--page-len", &self.rule.page_len.to_string()])
            .args(["--pages-max", &self.rule.pages_max.to_string()])
            .args(["--snapshot-every", &self.snapshot_every.to_string()])
            .args(["--device", &self.device.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Not inherited, because the parent reports the progress of all replays.
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| cannot("start a replay", &error))?;
        let stdout = process.stdout.take().expect("standard output was asked to be a pipe");
        let (sender, acks) = channel();
        std::thread::spawn(move || forward(stdout, &sender));
        let started = Instant::now();
        Ok(Replayer { process, started, acks, last_ack: None, first_ack_after: None })
    }
}

/// Reads lines `lsn request` until the process exits, and forwards the requests.
fn forward(stdout: ChildStdout, acks: &Sender<u64>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        // The replay prints other lines too.
        let request = line.split_once(' ').and_then(|(lsn, request)| {
            lsn.parse::<u64>().ok()?;
            request.parse().ok()
        });
        if request.is_some_and(|request| acks.send(request).is_err()) {
            return;
        }
    }
}

impl Replayer {
    /// Waits until `moment` returns true, the process exits, or `stop` returns true. `moment` gets the last
    /// acknowledged request and the time since the start.
    pub fn watch(
        &mut self,
        stop: impl Fn() -> bool,
        moment: impl Fn(Option<u64>, Duration) -> bool,
    ) -> Result<WatchEnd, Failure> {
        loop {
            let ended = !self.listen(NOTICE);
            // Ctrl-C also ends the replay, so the interruption takes precedence over its exit.
            if stop() {
                return Ok(WatchEnd::Interrupted);
            }
            if ended {
                let status = self.process.wait().map_err(|error| cannot("wait for a replay", &error))?;
                return Ok(WatchEnd::Ended(status));
            }
            if moment(self.last_ack, self.started.elapsed()) {
                return Ok(WatchEnd::Reached);
            }
        }
    }

    /// Waits while the process continues for `duration`.
    pub fn run_on(&mut self, duration: Duration) {
        let until = Instant::now() + duration;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if !self.listen(left) {
                return;
            }
        }
    }

    /// Receives one acknowledgement if it arrives in time. Returns `false` if no more can arrive.
    fn listen(&mut self, patience: Duration) -> bool {
        match self.acks.recv_timeout(patience) {
            Ok(request) => {
                self.last_ack = Some(request);
                self.first_ack_after.get_or_insert_with(|| self.started.elapsed());
                true
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Kills the process with SIGKILL, waits for its exit, and returns how long it ran.
    pub fn kill(&mut self) -> Result<Duration, Failure> {
        self.process.kill().map_err(|error| cannot("kill a replay", &error))?;
        let lived = self.started.elapsed();
        self.process.wait().map_err(|error| cannot("wait for a killed replay", &error))?;
        // Acknowledgements that have not been read yet count.
        while self.listen(Duration::MAX) {}
        Ok(lived)
    }

    /// Returns the time since the process was started.
    pub fn lived(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the last request that this process acknowledged.
    pub fn last_ack(&self) -> Option<u64> {
        self.last_ack
    }

    /// Returns the time from the start of the process to its first acknowledgement, which includes opening
    /// the store.
    pub fn first_ack_after(&self) -> Option<Duration> {
        self.first_ack_after
    }

    /// Returns the failure of a process that exited with an error.
    pub fn failure(&mut self, status: ExitStatus) -> Failure {
        let mut said = String::new();
        if let Some(stderr) = &mut self.process.stderr {
            // If the output cannot be read, the exit code is still reported.
            let _ = stderr.read_to_string(&mut said);
        }
        let message = format!("the replay stopped ({status}): {}", said.trim_end());
        match status.code() {
            Some(1) => Failure::Damage(message),
            Some(3) => Failure::Locked(message),
            _ => Failure::Environment(message),
        }
    }
}

impl Drop for Replayer {
    /// Kills the process, so that no replay outlives its parent. An error means that it has already exited.
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn cannot(what: &str, error: &std::io::Error) -> Failure {
    Failure::Environment(format!("cannot {what}: {error}"))
}
