//! A child process that runs `remanent replay`. The parent process reads its acknowledgements and kills it.

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

/// Maximum time between two checks for Ctrl-C while the child acknowledges no request.
const NOTICE: Duration = Duration::from_millis(10);

/// The parameters with which every child process of a run replays the trace.
#[derive(Clone)]
pub struct ReplayParams {
    /// The directory of the store.
    pub store: PathBuf,
    /// The path of the trace file.
    pub trace: PathBuf,
    /// The length and the maximum number of pages.
    pub rule: Rule,
    /// The number of requests to replay.
    pub limit: u64,
    /// The number of requests between two snapshots.
    pub snapshot_every: u64,
    /// The device whose memory contains the pages.
    pub device: DeviceChoice,
    /// Whether the child acknowledges a request only when the request is durable.
    pub durable: bool,
    /// The mode in which the child writes the log, or `None` for the store's default. With [`LogIo::Direct`], every
    /// acknowledgement means that the request is durable.
    pub log_io: Option<LogIo>,
}

/// A child process that replays a trace.
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
    /// The closure `reached` returned true.
    Reached,
    /// The process exited with this status.
    Ended(ExitStatus),
    /// The closure `stop` returned true.
    Interrupted,
}

impl ReplayParams {
    /// Starts a child process. It continues after the last request in the store.
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
            // Standard error is not inherited, because the parent reports the progress of all replays.
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| cannot("start a replay", &error))?;
        let stdout = process.stdout.take().expect("standard output is a pipe");
        let (sender, acks) = channel();
        std::thread::spawn(move || forward(stdout, &sender));
        let started = Instant::now();
        Ok(Replayer { process, started, acks, last_ack: None, first_ack_after: None })
    }
}

/// Reads lines of the form `lsn request` from the child until it exits, and sends the request numbers to the parent's
/// channel.
fn forward(stdout: ChildStdout, acks: &Sender<u64>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        // Skip all other lines that the replay prints.
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
    /// Waits until `reached` returns true, the process exits, or `stop` returns true. The arguments of `reached` are
    /// the last acknowledged request and the time since the start of the process.
    pub fn watch(
        &mut self,
        stop: impl Fn() -> bool,
        reached: impl Fn(Option<u64>, Duration) -> bool,
    ) -> Result<WatchEnd, Failure> {
        loop {
            let ended = !self.listen(NOTICE);
            // Ctrl-C also ends the replay, so check `stop` before the exit.
            if stop() {
                return Ok(WatchEnd::Interrupted);
            }
            if ended {
                let status = self.process.wait().map_err(|error| cannot("wait for a replay", &error))?;
                return Ok(WatchEnd::Ended(status));
            }
            if reached(self.last_ack, self.started.elapsed()) {
                return Ok(WatchEnd::Reached);
            }
        }
    }

    /// Lets the process continue for `duration`. Returns earlier if the process exits.
    pub fn run_on(&mut self, duration: Duration) {
        let until = Instant::now() + duration;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if !self.listen(left) {
                return;
            }
        }
    }

    /// Waits up to `timeout` for one acknowledgement. Returns `false` if the process has closed its standard output.
    fn listen(&mut self, timeout: Duration) -> bool {
        match self.acks.recv_timeout(timeout) {
            Ok(request) => {
                self.last_ack = Some(request);
                self.first_ack_after.get_or_insert_with(|| self.started.elapsed());
                true
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Kills the process with SIGKILL, waits for its exit, and returns the time from its start to the kill.
    pub fn kill(&mut self) -> Result<Duration, Failure> {
        self.process.kill().map_err(|error| cannot("kill a replay", &error))?;
        let lived = self.started.elapsed();
        self.process.wait().map_err(|error| cannot("wait for a killed replay", &error))?;
        // Read the acknowledgements that are still in the pipe.
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

    /// Returns the time from the start of the process to its first acknowledgement, which includes opening the store.
    pub fn first_ack_after(&self) -> Option<Duration> {
        self.first_ack_after
    }

    /// Returns the failure for the exit status of the process. The message contains the error output of the process.
    pub fn failure(&mut self, status: ExitStatus) -> Failure {
        let mut error_output = String::new();
        if let Some(stderr) = &mut self.process.stderr {
            // Ignore the error, because the exit status is reported in any case.
            let _ = stderr.read_to_string(&mut error_output);
        }
        let message = format!("the replay stopped ({status}): {}", error_output.trim_end());
        match status.code() {
            Some(1) => Failure::Damage(message),
            Some(3) => Failure::Locked(message),
            _ => Failure::Environment(message),
        }
    }
}

impl Drop for Replayer {
    /// Kills the process, so that no child outlives its parent. Errors are ignored, because the process may have
    /// exited.
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn cannot(what: &str, error: &std::io::Error) -> Failure {
    Failure::Environment(format!("cannot {what}: {error}"))
}
