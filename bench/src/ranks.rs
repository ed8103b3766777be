//! `remanent-bench ranks` measures how fast replicas on several GPUs, one process per GPU, open together and compare
//! their pages.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use remanent::device::Device;
use remanent::disk::dir::DirDisk;
use remanent::nccl::{Communicator, GatherMode, Nccl, Rank, UniqueId};
use remanent::options::MemoryOptions;
use remanent::{DeviceChoice, PageId, Place, Store};
use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::engine::engine_failure;
use remanent_tools::shared::exit::{Ending, Failure, Outcome};
use remanent_tools::shared::output::Output;
use remanent_tools::shared::program;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::room::{self, BenchStop, Room, size};
use crate::{Common, Measure, transfer};

const EXAMPLES: &str = "\
Requires the NCCL library and one GPU per rank, starting with GPU 0. Each rank is a process with its own copy of the \
store. First, rank 0 opens its store alone. Then all ranks open concurrently, and each loads all pages. Finally, each \
rank loads a share, and the GPUs exchange the shares. Rates are the size of one replica divided by the time of the \
slowest rank. NVLink multicast is disabled (NCCL_NVLS_ENABLE=0) unless the environment variable is set.

Examples:
  remanent-bench ranks /dev/shm --bytes 8GiB --device host
  remanent-bench ranks /mnt/fast --bytes 4GiB --cold --device host";

/// The time limit of exchanges between ranks.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The number of exchanges in one measurement.
const EXCHANGES: u32 = 10;

/// Opens and comparisons of replicas on several GPUs
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct RanksBench {
    #[command(flatten)]
    common: Common,
    /// Number of ranks, each with its own GPU
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: u32,
    /// Total size of the pages of a replica, in bytes
    #[arg(long, default_value = "256MiB")]
    bytes: Size,
    /// Length of each page in bytes
    #[arg(long, value_name = "BYTES", default_value = "2MiB")]
    page_len: Size,
    /// Drop the files from the page cache before each open
    #[arg(long)]
    cold: bool,
    /// Exchange pages even if the link between the GPUs is slow
    #[arg(long)]
    always: bool,
}

impl Measure for RanksBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        if self.page_len.0 < 8 || !self.page_len.0.is_multiple_of(8) || self.page_len.0 > self.bytes.0 {
            let len = self.page_len;
            return Err(Failure::Environment(format!(
                "--page-len {len} must be a multiple of 8 and at most --bytes"
            )));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        self.bytes.0.saturating_mul(2 * u64::from(self.ranks))
    }

    fn steps(&self) -> u64 {
        1 + u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let temperature = if self.cold { "cold" } else { "warm" };
        let figure = |name: &str| Figure::new(format!("{name}, {temperature}"), Unit::BytesPerSecond);
        let mut alone = figure("one rank opens");
        let mut each = figure("all ranks open, each loads all");
        let mut together = figure("all ranks open together");
        let mut received = Figure::new("received by each rank", Unit::Bytes);
        let mut agrees = Figure::new("compare all pages", Unit::Seconds);
        let mut gathered = Figure::new("all-gather of 1 GiB, received by each rank", Unit::BytesPerSecond);
        let mut broadcast = Figure::new("broadcast of 1 GiB", Unit::BytesPerSecond);

        let mut ranks = Ranks::start(self, room)?;
        room.step("creating replicas")?;
        ranks.all(&format!("create {} {}", self.bytes.0, self.page_len.0))?;
        let bytes = self.bytes.0 as f64;
        let rate = |answers: &[Answer]| bytes / slowest(answers);
        for _ in 0..self.common.rounds {
            room.step("opening")?;
            for (way, is_alone) in [(&mut alone, true), (&mut each, false)] {
                if self.cold {
                    ranks.all("forget")?;
                }
                let answers = if is_alone { vec![ranks.one(0, "open")?] } else { ranks.all("open")? };
                way.push(rate(&answers));
                let _closed = if is_alone { vec![ranks.one(0, "close")?] } else { ranks.all("close")? };
            }
            if self.cold {
                ranks.all("forget")?;
            }
            let answers = ranks.all(if self.always { "open always" } else { "open gather" })?;
            together.push(rate(&answers));
            received.push(answers.iter().map(|answer| answer.1).fold(f64::MAX, f64::min));
            for _ in 0..3 {
                agrees.push(slowest(&ranks.all("agrees")?));
            }
            ranks.all("close")?;
        }
        let answers = ranks.all("rates")?;
        let others = f64::from(self.ranks - 1);
        let gib = f64::from(1 << 30);
        gathered.push(gib * others / f64::from(self.ranks) / slowest(&answers));
        broadcast.push(gib / answers.iter().map(|answer| answer.1).fold(0.0, f64::max));
        ranks.end()?;
        let title = format!(
            "{} replicas of {} in pages of {}",
            self.ranks,
            size(self.bytes.0),
            size(self.page_len.0)
        );
        let figures = vec![alone, each, together, received, agrees, gathered, broadcast];
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        Ok(Findings {
            bench: "ranks",
            settings,
            groups: vec![Group { title, figures }],
            left_out: Vec::new(),
        })
    }
}

/// The two numbers in the answer of a rank to a command. Both are 0 if the command has no result.
type Answer = (f64, f64);

fn slowest(answers: &[Answer]) -> f64 {
    answers.iter().map(|answer| answer.0).fold(0.0, f64::max)
}

/// The processes of the ranks. Dropping this value kills them.
struct Ranks(Vec<Worker>);

struct Worker {
    rank: usize,
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // These calls fail if the process has already ended.
        let _is_over = self.child.kill();
        let _is_over = self.child.wait();
    }
}

impl Ranks {
    fn start(bench: &RanksBench, room: &Room) -> Result<Self, BenchStop> {
        let mut workers = Vec::new();
        for rank in 0..bench.ranks as usize {
            let mut command = program::again()?;
            command.arg("rank").args(["--rank", &rank.to_string(), "--ranks", &bench.ranks.to_string()]);
            command.arg(room.path(&format!("rank-{rank}"))).stdin(Stdio::piped()).stdout(Stdio::piped());
            if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
                command.env("NCCL_NVLS_ENABLE", "0");
            }
            let mut child = command.spawn()?;
            let commands = child.stdin.take().expect("piped");
            let answers = BufReader::new(child.stdout.take().expect("piped"));
            workers.push(Worker { rank, child, commands, answers });
        }
        let mut ranks = Self(workers);
        ranks.0[0].send("id")?;
        let id = ranks.0[0].line()?;
        ranks.all(&format!("join {id}"))?;
        Ok(ranks)
    }

    fn one(&mut self, rank: usize, command: &str) -> Result<Answer, BenchStop> {
        self.0[rank].send(command)?;
        self.0[rank].answer()
    }

    /// Sends a command to all ranks, and then waits for all answers.
    fn all(&mut self, command: &str) -> Result<Vec<Answer>, BenchStop> {
        self.0.iter_mut().try_for_each(|worker| worker.send(command))?;
        self.0.iter_mut().map(Worker::answer).collect()
    }

    /// Stops the processes and waits until they have ended. All ranks must stop together, because NCCL waits for the
    /// other ranks.
    fn end(mut self) -> Result<(), BenchStop> {
        self.0.iter_mut().try_for_each(|worker| worker.send("end"))?;
        for worker in &mut self.0 {
            let status = worker.child.wait()?;
            if !status.success() {
                let reason = format!("rank {} ended with {status}; its error is above", worker.rank);
                return Err(Failure::Environment(reason).into());
            }
        }
        Ok(())
    }
}

impl Worker {
    fn send(&mut self, command: &str) -> Result<(), BenchStop> {
        Ok(writeln!(self.commands, "{command}").and_then(|()| self.commands.flush())?)
    }

    fn line(&mut self) -> Result<String, BenchStop> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            return Err(
                Failure::Environment(format!("rank {} has ended; its error is above", self.rank)).into()
            );
        }
        Ok(line.trim_end().to_owned())
    }

    fn answer(&mut self) -> Result<Answer, BenchStop> {
        let line = self.line()?;
        let numbers: Vec<f64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
        match numbers[..] {
            [one, other] => Ok((one, other)),
            _ => Err(Failure::Environment(format!("rank {} answers {line:?}", self.rank)).into()),
        }
    }
}

/// Run one rank of `remanent-bench ranks`, which executes commands from standard input
#[derive(clap::Args)]
pub struct RankWorker {
    dir: PathBuf,
    #[arg(long)]
    rank: u32,
    #[arg(long)]
    ranks: u32,
}

/// The state of a rank between two commands.
struct State<'w> {
    worker: &'w RankWorker,
    nccl: Nccl,
    device: Arc<dyn Device>,
    communicator: Option<Communicator>,
    store: Option<Store>,
    page_len: u64,
    pages: u64,
}

impl RankWorker {
    /// Executes commands until standard input ends.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let (device, _) = room::open_device(DeviceChoice::Cuda(self.rank))?;
        let nccl = Nccl::load().map_err(engine_failure)?;
        let mut state =
            State { worker: self, nccl, device, communicator: None, store: None, page_len: 0, pages: 0 };
        for command in std::io::stdin().lines() {
            let command =
                command.map_err(|error| Failure::Environment(format!("cannot read a command: {error}")))?;
            if command == "end" {
                break;
            }
            let answer = state.execute(&command).map_err(|stop| match stop {
                BenchStop::Failed(failure) => failure,
                BenchStop::Interrupted => Failure::Environment("interrupted".to_owned()),
            })?;
            out.line(format_args!("{answer}"))?;
            out.flush()?;
        }
        Ok(Ending::Fine)
    }
}

impl State<'_> {
    fn execute(&mut self, command: &str) -> Result<String, BenchStop> {
        let words: Vec<&str> = command.split(' ').collect();
        let (one, other) = match words[..] {
            ["id"] => {
                let id = self.nccl.unique_id()?.to_bytes();
                return Ok(id.iter().map(|byte| format!("{byte:02x}")).collect());
            }
            ["join", id] => {
                let byte =
                    |at: usize| u8::from_str_radix(id.get(2 * at..2 * at + 2).unwrap_or(""), 16).unwrap_or(0);
                let id = UniqueId::from_bytes(std::array::from_fn(byte));
                let rank =
                    Rank::new(self.worker.rank, self.worker.ranks).gpu(self.worker.rank).timeout(TIMEOUT);
                self.communicator = Some(self.nccl.join(&id, rank)?);
                (0.0, 0.0)
            }
            ["create", bytes, page_len] => {
                let number = |text: &str| {
                    text.parse().map_err(|_| Failure::Environment(format!("not a number: {text}")))
                };
                self.create(number(bytes)?, number(page_len)?)?;
                (0.0, 0.0)
            }
            ["forget"] => {
                transfer::forget(&room::files(&self.worker.dir, &["pages", "log", "snapshots"])?)?;
                (0.0, 0.0)
            }
            ["open"] => self.open(None)?,
            ["open", "gather"] => self.open(Some(GatherMode::IfFaster))?,
            ["open", "always"] => self.open(Some(GatherMode::Always))?,
            ["agrees"] => {
                let started = Instant::now();
                let store = self.store.as_ref().expect("opened before");
                let agreement = store.agrees(self.communicator())?;
                let took = started.elapsed().as_secs_f64();
                if !agreement.is_equal() {
                    return Err(
                        Failure::Environment(format!("{} pages differ", agreement.diverged.len())).into()
                    );
                }
                (took, agreement.bytes as f64)
            }
            ["close"] => {
                self.store.take().map_or(Ok(()), Store::close)?;
                (0.0, 0.0)
            }
            ["rates"] => self.rates()?,
            _ => return Err(Failure::Environment(format!("unknown command {command}")).into()),
        };
        Ok(format!("{one} {other}"))
    }

    fn communicator(&self) -> &Communicator {
        self.communicator.as_ref().expect("joined before")
    }

    /// Creates the store. Its contents are the same on all ranks.
    fn create(&mut self, bytes: u64, page_len: u64) -> Result<(), BenchStop> {
        (self.page_len, self.pages) = (page_len, bytes / page_len);
        let store = Store::open_on(disk(&self.worker.dir), self.device.clone(), room::options())?;
        let mut next = 0;
        while next < self.pages {
            let mut batch = store.batch();
            for _ in 0..((64 << 20) / page_len).clamp(1, self.pages - next) {
                batch.create_from(content(next, page_len), Place::Device(0));
                next += 1;
            }
            store.commit(batch)?;
        }
        store.snapshot()?;
        Ok(store.close()?)
    }

    /// Opens the store. Returns the time in seconds and the number of bytes received from other ranks.
    fn open(&mut self, gather: Option<GatherMode>) -> Result<Answer, BenchStop> {
        let options = room::options();
        let options = match gather {
            Some(mode) => options.memory(MemoryOptions::new().gather(self.communicator(), mode)),
            None => options,
        };
        let started = Instant::now();
        let store = Store::open_on(disk(&self.worker.dir), self.device.clone(), options)?;
        let took = started.elapsed().as_secs_f64();
        let report = store.recovered().gather.clone();
        if let Some(reason) = report.as_ref().and_then(|report| report.stopped.as_ref()) {
            return Err(Failure::Environment(format!("the ranks exchanged no pages: {reason}")).into());
        }
        for page in [0, self.pages / 2, self.pages - 1] {
            if store.read_to_vec(PageId(page + 1))? != content(page, self.page_len) {
                return Err(Failure::Environment(format!("page {} has wrong bytes", page + 1)).into());
            }
        }
        self.store = Some(store);
        Ok((took, report.map_or(0.0, |report| report.received_bytes as f64)))
    }

    /// Returns the times in seconds of an all-gather of 1 GiB and of a broadcast of 1 GiB.
    fn rates(&self) -> Result<Answer, BenchStop> {
        let memory = tempfile::tempdir_in(&self.worker.dir)?;
        let store = Store::open_on(disk(&memory.path().join("store")), self.device.clone(), room::options())?;
        let communicator = self.communicator();
        let all = store.device_bytes(1 << 30, Place::Device(0))?;
        let len = all.byte_len() / u64::from(communicator.ranks());
        let own = u64::from(communicator.rank()) * len;
        let (part, whole) = (all.part(own..own + len)?, all.part(0..len * u64::from(communicator.ranks()))?);
        let time = |run: &dyn Fn() -> remanent::Result<()>| -> remanent::Result<f64> {
            run()?; // Establishes the connections.
            let started = Instant::now();
            for _ in 0..EXCHANGES {
                run()?;
            }
            Ok(started.elapsed().as_secs_f64() / f64::from(EXCHANGES))
        };
        let gathered = time(&|| communicator.all_gather(&part, &whole)?.wait())?;
        let broadcast = time(&|| communicator.broadcast(0, &all, &all)?.wait())?;
        Ok((gathered, broadcast))
    }
}

fn disk(dir: &Path) -> Arc<DirDisk> {
    Arc::new(DirDisk::new(dir))
}

/// Returns the contents of a page.
fn content(page: u64, len: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(page + 1);
    let mut bytes = vec![0; len as usize];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_word().to_le_bytes());
    }
    bytes
}
