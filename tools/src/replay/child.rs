//! A `remanent replay` in a process of its own: started, watched through its
//! acknowledgements, and killed.

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

/// How long Ctrl-C may go unnoticed while a replay acknowledges nothing.
const NOTICE: Duration = Duration::from_millis(10);

/// The parameters that the replays of a course have in common.
#[derive(Clone)]
pub struct ReplayParams {
    /// The store's directory.
    pub store: PathBuf,
    /// The trace's file.
    pub trace: PathBuf,
    /// How long pages are, and how many stay.
    pub rule: Rule,
    /// Number of requests.
    pub limit: u64,
    /// Requests between snapshots.
    pub snapshot_every: u64,
    /// The device of the pages.
    pub device: DeviceChoice,
    /// Whether acknowledged requests survive a power cut.
    pub durable: bool,
    /// How the log is written; as the store would have it, if nothing is said. With [`LogIo::Direct`] every
    /// acknowledgement is a durable one.
    pub log_io: Option<LogIo>,
}

/// A replay that is running.
pub struct Replayer {
    process: Child,
    started: Instant,
    acks: Receiver<u64>,
    last_ack: Option<u64>,
    first_ack_after: Option<Duration>,
}

/// Why the watching ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// The moment has come.
    Reached,
    /// The process ended by itself.
    Ended(ExitStatus),
    /// The caller wanted no more.
    Interrupted,
}

impl ReplayParams {
    /// Starts a replay that goes on from the store's last request.
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
            // Not the terminal: the parent shows the progress of the whole.
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

/// Reads lines `lsn request` to the end, which the process's death brings about, and passes the requests on.
fn forward(stdout: ChildStdout, acks: &Sender<u64>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        // The replay says other things too.
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
    /// Waits until `moment` says so, the process ends, or `stop` says so. `moment` gets the last request
    /// acknowledged, and the time since the start.
    pub fn watch(
        &mut self,
        stop: impl Fn() -> bool,
        moment: impl Fn(Option<u64>, Duration) -> bool,
    ) -> Result<WatchEnd, Failure> {
        loop {
            let ended = !self.listen(NOTICE);
            // Ctrl-C reaches the replay as well: that it ended is then no news.
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

    /// Lets the process run on for a while.
    pub fn run_on(&mut self, duration: Duration) {
        let until = Instant::now() + duration;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if !self.listen(left) {
                return;
            }
        }
    }

    /// Takes in one acknowledgement, if one comes in time. `false` if none will ever come.
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

    /// Kills the process with SIGKILL, waits until it is gone, and says how long it lived.
    pub fn kill(&mut self) -> Result<Duration, Failure> {
        self.process.kill().map_err(|error| cannot("kill a replay", &error))?;
        let lived = self.started.elapsed();
        self.process.wait().map_err(|error| cannot("wait for a killed replay", &error))?;
        // Acknowledgements that have not been read yet count.
        while self.listen(Duration::MAX) {}
        Ok(lived)
    }

    /// How long ago the process was started.
    pub fn lived(&self) -> Duration {
        self.started.elapsed()
    }

    /// The last request that this process acknowledged.
    pub fn last_ack(&self) -> Option<u64> {
        self.last_ack
    }

    /// How long the process took from its start to its first acknowledgement: opening the store included.
    pub fn first_ack_after(&self) -> Option<Duration> {
        self.first_ack_after
    }

    /// Why a process that ended by itself ended badly.
    pub fn failure(&mut self, status: ExitStatus) -> Failure {
        let mut said = String::new();
        if let Some(stderr) = &mut self.process.stderr {
            // Unreadable output is not missed: the exit code says the essential.
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
    /// No replay outlives its parent. Errors mean that it is gone already.
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn cannot(what: &str, error: &std::io::Error) -> Failure {
    Failure::Environment(format!("cannot {what}: {error}"))
}
