//! `remanent replay` replays a cache trace into a store, and commits one batch per request.
//!
//! `simulate.rs` computes the steps of a request, and this file executes them. A kill at any time loses no acknowledged
//! request. The root entry `request` contains the number of the last request in the store, which determines the
//! expected state.

pub(crate) mod check;
pub(crate) mod child;
pub(crate) mod demo;
pub(crate) mod simulate;
pub mod trace;
pub(crate) mod kill_run;
pub(crate) mod replay_params;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remanent::batch::PageRef;
use remanent::options::{LogIo, LogOptions};
use remanent::store::RecoveryReport;
use remanent::{Ack, DeviceChoice, Options, PageId, Place, Position, Store, Value};

use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt;
use crate::cli::interrupt::Interrupt;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::replay::check::{Epochs, REQUEST, hash_id, key_of, last_request};
use crate::replay::simulate::{HIT_LEN, Rule, Simulation, Step, stream};
use crate::replay::trace::Trace;

const EXAMPLES: &str = "\
Request i of the trace, counted from 0, is one batch. Each line of the trace contains the hash ids of a request as \
`hash_ids`. For each hash id in order, the first 64 bytes of the existing page are written, or a new page is created, \
whose key is the id in decimal. Then the least recently used pages are deleted until --pages-max pages remain, and the \
root entry `request` is set to i. Hash id and request determine all bytes, so --check can verify every byte.

Examples:
  remanent replay store trace.jsonl.zst --limit 1000           replay the first 1,000 requests
  remanent replay store trace.jsonl.zst --limit 2000 --resume  continue up to request 2,000
  remanent replay store trace.jsonl.zst --check                compare the store with the trace";

/// Replay a cache trace into a store, or compare a store with a trace
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Replay {
    /// Store directory, which is created if it does not exist
    dir: PathBuf,
    /// Trace file with one JSON object per line, plain or compressed with zstd
    trace: PathBuf,
    /// Length of a page in bytes [default: 4096, or the length in the existing store]
    #[arg(long, value_name = "B")]
    page_len: Option<usize>,
    /// Maximum number of pages after a request, at least the number in the longest request [default: 4096, or the
    /// number in the existing store]
    #[arg(long, value_name = "N")]
    pages_max: Option<usize>,
    /// Acknowledgement to wait for after each request
    #[arg(long, value_enum, default_value_t = AckLevel::Logged)]
    ack: AckLevel,
    /// Device for the pages: `auto` (a GPU if available), `host` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Method of writing the log [default: `mapped` if the file system supports it]
    #[arg(long, value_enum, value_name = "HOW")]
    log_io: Option<LogWriter>,
    /// Take a snapshot after every N requests
    #[arg(long, value_name = "N")]
    snapshot_every: Option<NonZeroU64>,
    /// Append a line `lsn request` to FILE after each acknowledgement; `-` means standard output
    #[arg(long, value_name = "FILE")]
    acks: Option<PathBuf>,
    /// Use only the first N requests of the trace
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Continue after the last request in the store
    #[arg(long)]
    resume: bool,
    /// Compare the store with the state that the trace produces, without writing to the store
    #[arg(long)]
    check: bool,
}

/// The acknowledgement to wait for.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum AckLevel {
    /// The request survives a crash of the process
    Logged,
    /// The request survives a power cut
    Durable,
}

impl From<AckLevel> for Ack {
    fn from(level: AckLevel) -> Self {
        match level {
            AckLevel::Logged => Ack::Logged,
            AckLevel::Durable => Ack::Durable,
        }
    }
}

/// The method of writing the log.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogWriter {
    /// Write to memory-mapped segments
    Mapped,
    /// Write through the page cache, and sync
    Buffered,
    /// Bypass the page cache, which makes every acknowledgement durable
    Direct,
}

impl From<LogWriter> for LogIo {
    fn from(writer: LogWriter) -> Self {
        match writer {
            LogWriter::Mapped => LogIo::Mapped,
            LogWriter::Buffered => LogIo::Buffered,
            LogWriter::Direct => LogIo::Direct,
        }
    }
}

impl Replay {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let rule = replay_params::choose(&self.dir, self.page_len, self.pages_max)?;
        // Validate the whole trace before anything is written.
        let survey = Trace::survey(&self.trace, self.limit)?;
        let rule = rule.check(survey.longest).map_err(Failure::Environment)?;
        if self.check {
            interrupt::end_at_once()?;
            return self.compare(rule, out);
        }

        let interrupt = Interrupt::listen()?;
        let mut acks = self.acks.as_deref().map(AckFile::open).transpose()?;
        let options =
            Options::new().ack(self.ack.into()).device(self.device).identity(replay_params::identity(rule));
        let options = match self.log_io {
            Some(writer) => options.log(LogOptions::new().io(writer.into())),
            None => options,
        };
        let store = options.open(&self.dir).map_err(engine_failure)?;
        let mut trace = Trace::open(&self.trace, self.limit)?;
        // Pages are on a GPU only if the GPU was requested by name.
        let place = if matches!(self.device, DeviceChoice::Cuda(_)) { Place::Device(0) } else { Place::Host };
        let mut driver = Driver::take_up(store, place, rule, &mut trace, self.resume)?;
        let first = driver.simulation.next_request();
        if let Some(request) = driver.simulation.last_request() {
            out.line(format_args!(
                "resumed after request {request}: {}",
                recovery_line(driver.store.recovered())
            ))?;
            out.flush()?;
        }

        let started = Instant::now();
        let bar = progress::bar(survey.requests.saturating_sub(first), "replaying");
        for hash_ids in trace {
            let hash_ids = hash_ids?;
            let request = driver.simulation.next_request();
            let position = driver.request(&hash_ids)?;
            if let Some(acks) = &mut acks {
                acks.append(position, request)?;
            }
            if self.snapshot_every.is_some_and(|every| (request + 1) % every == 0) {
                driver.store.snapshot().map_err(engine_failure)?;
                driver.totals.snapshots += 1;
            }
            bar.inc(1);
            if interrupt.is_noted() {
                break;
            }
        }
        bar.finish_and_clear();
        driver.report(first, started.elapsed(), out)?;
        driver.store.close().map_err(engine_failure)?;
        Ok(if interrupt.is_noted() { Ending::Interrupted } else { Ending::Fine })
    }

    /// Compares the store with the simulation, and prints the differences.
    fn compare(&self, rule: Rule, out: &mut Output) -> Outcome {
        let rebuilt = check::recovered(&self.dir)?;
        let last = last_request(rebuilt.table.root()).map_err(Failure::Damage)?;
        let simulation = check::simulate(rule, &mut Trace::open(&self.trace, self.limit)?, last)?;
        let differences = check::compare(&simulation, Epochs::Exact, &rebuilt);
        for difference in differences.iter().take(DIFFERENCES_SHOWN) {
            out.line(difference)?;
        }
        let until =
            last.map_or("before the first request".to_owned(), |last| format!("after request {last}"));
        let pages = simulation.pages().len();
        if differences.is_empty() {
            out.line(format_args!("exact {until}: {pages} pages, with their epochs and all their bytes"))?;
            return Ok(Ending::Fine);
        }
        out.line(format_args!("{} differences {until}, of {pages} pages", differences.len()))?;
        Ok(Ending::Difference)
    }
}

/// Maximum number of differences that are printed.
const DIFFERENCES_SHOWN: usize = 20;

/// An open store into which a trace is replayed, and the simulation of its content.
struct Driver {
    store: Store,
    /// Place of new pages.
    place: Place,
    simulation: Simulation,
    pages: HashMap<u64, PageId>,
    totals: ReplayTotals,
}

/// The totals of a replay, for the line that the replay prints at its end.
#[derive(Clone, Copy, Default)]
struct ReplayTotals {
    created: u64,
    hits: u64,
    evicted: u64,
    snapshots: u64,
}

impl Driver {
    /// Simulates the trace up to the last request in the store, so that the replay can continue. Returns an error if
    /// the pages of the store differ from the simulation.
    fn take_up(
        store: Store,
        place: Place,
        rule: Rule,
        trace: &mut Trace,
        resume: bool,
    ) -> Result<Self, Failure> {
        let root = store.root().map_err(engine_failure)?;
        let last = last_request(&root).map_err(Failure::Environment)?;
        if let (Some(request), false) = (last, resume) {
            return Err(Failure::Environment(format!(
                "the store already contains the trace up to request {request}; use --resume to continue"
            )));
        }
        let simulation = check::simulate(rule, trace, last)?;
        let mut pages = HashMap::new();
        for info in store.pages().map_err(engine_failure)? {
            // Keys are unique. If all pages are expected and their number is correct, no page is missing.
            let known = info.key.as_ref().and_then(hash_id).filter(|id| simulation.pages().contains_key(id));
            pages.insert(known.ok_or_else(differs)?, info.page);
        }
        if pages.len() != simulation.pages().len() {
            return Err(differs());
        }
        Ok(Self { store, place, simulation, pages, totals: ReplayTotals::default() })
    }

    /// Commits the next request of the trace as one batch.
    fn request(&mut self, hash_ids: &[u64]) -> Result<Position, Failure> {
        let request = self.simulation.next_request();
        let page_len = self.simulation.rule().page_len;
        let mut batch = self.store.batch();
        let mut created: Vec<u64> = Vec::new();
        let mut refs: HashMap<u64, PageRef> = HashMap::new();
        for step in self.simulation.request(hash_ids) {
            match step {
                Step::Create(id) => {
                    let key = Some(key_of(id));
                    let page = batch.create(page_len as u64, self.place).optional_key(key).page();
                    batch.write(page, 0, &stream(id, request, page_len));
                    created.push(id);
                    refs.insert(id, page.into());
                    self.totals.created += 1;
                }
                Step::Hit(id) => {
                    // A page that this request creates has no id yet.
                    let page = refs.get(&id).copied().unwrap_or_else(|| self.pages[&id].into());
                    batch.write(page, 0, &stream(id, request, HIT_LEN));
                    self.totals.hits += 1;
                }
                Step::Evict(id) => {
                    let page = self.pages.remove(&id).expect("a page is never evicted by its own request");
                    batch.delete(page);
                    self.totals.evicted += 1;
                }
            }
        }
        batch.set_root(REQUEST, Value::U64(request));
        let committed = self.store.commit(batch).map_err(engine_failure)?;
        self.pages.extend(created.into_iter().zip(committed.pages));
        Ok(committed.position)
    }

    fn report(&self, first: u64, took: Duration, out: &mut Output) -> Result<(), Failure> {
        let ReplayTotals { created, hits, evicted, snapshots } = self.totals;
        let Some(last) = self.simulation.last_request().filter(|last| *last >= first) else {
            return out.line("nothing to replay: the store contains all of these requests");
        };
        let requests = last + 1 - first;
        let page_len = self.simulation.rule().page_len as u64;
        let mib = (created * page_len + hits * HIT_LEN as u64) as f64 / f64::from(1 << 20);
        let seconds = took.as_secs_f64();
        out.line(format_args!(
            "replayed requests {first} to {last} in {seconds:.2} s: {:.0} requests/s, {:.0} MiB/s of page bytes",
            requests as f64 / seconds,
            mib / seconds
        ))?;
        out.line(format_args!(
            "{created} pages created, {hits} hits, {evicted} evicted, {snapshots} snapshots; {} pages at lsn {}",
            self.pages.len(),
            self.store.lsn()
        ))
    }
}

/// Returns a line of text that describes what recovery did.
fn recovery_line(recovered: &RecoveryReport) -> String {
    let RecoveryReport { snapshot, replayed_batches, copied_batches, elapsed, .. } = recovered;
    let base = snapshot.map_or("the log's beginning".to_owned(), |snapshot| format!("snapshot {snapshot}"));
    let torn = recovered
        .torn
        .as_ref()
        .map_or_else(String::new, |torn| format!(", lsn {} to {} cut as a torn tail", torn.first, torn.last));
    format!(
        "recovered in {elapsed:.1?} from {base} and {replayed_batches} batches, \
         {copied_batches} of them not yet durable{torn}"
    )
}

/// The file to which a replay writes acknowledgements.
struct AckFile {
    file: File,
    path: PathBuf,
}

impl AckFile {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = if path == Path::new("-") {
            std::io::stdout().as_fd().try_clone_to_owned().map(File::from)
        } else {
            OpenOptions::new().append(true).create(true).open(path)
        };
        match file {
            Ok(file) => Ok(Self { file, path: path.to_owned() }),
            Err(error) => Err(Failure::Environment(format!("cannot open {}: {error}", path.display()))),
        }
    }

    /// Appends a line with one write, so that a reader never sees a partial line.
    fn append(&mut self, position: Position, request: u64) -> Result<(), Failure> {
        let line = format!("{} {request}\n", position.lsn);
        self.file
            .write_all(line.as_bytes())
            .map_err(|error| Failure::Environment(format!("cannot write {}: {error}", self.path.display())))
    }
}

/// Returns the failure for a store whose pages differ from the simulation.
fn differs() -> Failure {
    Failure::Damage(
        "the pages of the store differ from those of the trace; use --check to list them".to_owned(),
    )
}
