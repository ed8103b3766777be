//! `remanent-bench commit`: commits batches of one delta, compared with a raw group-commit loop.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remanent::options::{LogIo, LogOptions};
use remanent::{Ack, PageId, Store};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, TimeSeries, Unit};
use crate::latency::Latency;
use crate::memory::RawMemory;
use crate::raw::{self, RawLog, WriteMethod};
use crate::room::{self, BenchStop, Room};
use crate::{Common, Measure, check_seconds, check_threads, transfer};

const EXAMPLES: &str = "\
Each thread writes deltas to its own page, one per batch, and waits for each batch. The ceiling of durable commits is \
the faster of two raw loops, which queue records and then write and sync the whole queue at once: one with pwrite and \
fdatasync, one with O_DIRECT and O_DSYNC. The ceiling of logged or applied commits is a copy with a checksum under a \
lock. Figures with one thread show the cost of a single commit.

Examples:
  remanent-bench commit /mnt/fast
  remanent-bench commit /mnt/fast --threads 8 --len 4KiB,64KiB --ack durable --log-io direct,buffered,mapped
  remanent-bench commit /dev/shm --threads 1 --len 256 --ack logged --seconds 2";

/// Commits per second, and the latency of each
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CommitBench {
    #[command(flatten)]
    common: Common,
    /// Numbers of threads that commit concurrently, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8")]
    threads: Vec<usize>,
    /// Delta lengths in bytes, separated by commas
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "256,4KiB,64KiB")]
    len: Vec<Size>,
    /// Acknowledgement that each commit waits for: one or more kinds, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "durable,logged")]
    ack: Vec<Level>,
    /// Methods of writing the log, separated by commas [default: the store's choice]
    #[arg(long, value_enum, value_delimiter = ',')]
    log_io: Vec<Io>,
    /// Duration of each measurement in a round, in seconds
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    seconds: f64,
}

/// The acknowledgement to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Level {
    /// Later reads see the batch
    Applied,
    /// The batch survives the death of the process
    Logged,
    /// The batch survives a power cut
    Durable,
}

impl Level {
    fn ack(self) -> Ack {
        match self {
            Level::Applied => Ack::Applied,
            Level::Logged => Ack::Logged,
            Level::Durable => Ack::Durable,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Level::Applied => "applied",
            Level::Logged => "logged",
            Level::Durable => "durable",
        }
    }
}

/// A method of writing the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Io {
    /// Through a shared mapping
    Mapped,
    /// By write and fdatasync
    Buffered,
    /// By one write per group past the page cache
    Direct,
}

impl From<Io> for LogIo {
    fn from(io: Io) -> Self {
        match io {
            Io::Mapped => LogIo::Mapped,
            Io::Buffered => LogIo::Buffered,
            Io::Direct => LogIo::Direct,
        }
    }
}

/// The minimum length of pages that are written to, in bytes.
const PAGE_LEN_MIN: u64 = 1 << 20;
/// A store whose log exceeds this length, in bytes, takes a snapshot between two rounds.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// Number of values in the time series of one round.
const COURSE_STEPS: u32 = 20;
/// An upper bound on what any machine logs per second; it limits the bytes that a round may write.
const LOG_BYTES_PER_SECOND: f64 = 1e9;

impl Measure for CommitBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |what: &str| Err(Failure::Environment(what.to_owned()));
        check_seconds("--seconds", self.seconds)?;
        check_threads(&self.threads)?;
        if self.len.iter().any(|len| !(1..=1 << 20).contains(&len.0)) {
            return refuse("--len must be between 1 and 1MiB: a delta is part of a page");
        }
        if self.longest() * self.most_threads() as u64 > raw::FILE_LEN_MAX {
            return refuse(
                "one group of all --threads with the longest --len does not fit into the raw loop's file",
            );
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        let stores = (self.ack.len() * self.log_io.len().max(1)) as u64;
        2 * raw::FILE_LEN_MAX + stores * ((self.seconds * LOG_BYTES_PER_SECOND) as u64 + 2 * LOG_BYTES_MAX)
    }

    fn steps(&self) -> u64 {
        // All stores and raw loops of a group are measured in one step.
        u64::from(self.common.rounds) * (self.threads.len() * self.len.len() * self.ack.len()) as u64
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let mut left_out = Vec::new();
        let durable = self.raw_loops(room, &mut left_out)?;
        let memory = [CommitSubject::Memory(RawMemory::new())];
        let stores = self.stores(room)?;
        let mut groups = Vec::new();
        for &threads in &self.threads {
            for &len in &self.len {
                for &level in &self.ack {
                    let ceilings = if level == Level::Durable { &durable[..] } else { &memory[..] };
                    let own = stores.iter().filter(|(of, _)| *of == level).map(|(_, store)| store);
                    let subjects: Vec<&CommitSubject> = ceilings.iter().chain(own).collect();
                    groups.push(self.group(room, level, threads, len.0, &subjects)?);
                }
            }
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", format!("{} of {} s", self.common.rounds, self.seconds)));
        Ok(Findings { bench: "commit", settings, groups, left_out })
    }
}

impl CommitBench {
    fn longest(&self) -> u64 {
        self.len.iter().map(|len| len.0).max().unwrap_or_default()
    }

    fn most_threads(&self) -> usize {
        self.threads.iter().copied().max().unwrap_or_default()
    }

    fn raw_loops(&self, room: &Room, left_out: &mut Vec<String>) -> Result<Vec<CommitSubject>, BenchStop> {
        let mut loops = Vec::new();
        if !self.ack.contains(&Level::Durable) {
            return Ok(loops);
        }
        let group_len_max = self.longest() as usize * self.most_threads();
        std::fs::create_dir(room.path("raw"))?;
        loops.push(CommitSubject::Raw(RawLog::new(
            &room.path("raw/synced"),
            WriteMethod::Synced,
            group_len_max,
        )?));
        if transfer::knows_direct(&room.path("raw"))? {
            loops.push(CommitSubject::Raw(RawLog::new(
                &room.path("raw/direct"),
                WriteMethod::Direct,
                group_len_max,
            )?));
        } else {
            left_out.push("the raw loop with O_DIRECT: this file system does not support it".to_owned());
        }
        Ok(loops)
    }

    /// Creates one store for each acknowledgement and method of writing the log, with a page for each thread.
    fn stores(&self, room: &Room) -> Result<Vec<(Level, CommitSubject)>, BenchStop> {
        let ways: Vec<Option<Io>> = match &self.log_io[..] {
            [] => vec![None],
            ways => ways.iter().copied().map(Some).collect(),
        };
        let mut stores = Vec::new();
        for &level in &self.ack {
            for (index, way) in ways.iter().enumerate() {
                let mut options = room::options().ack(level.ack());
                if let Some(way) = way {
                    options = options.log(LogOptions::new().io((*way).into()));
                }
                let store = room.open(&format!("{}-{index}", level.name()), options)?;
                let page_len = self.longest().max(PAGE_LEN_MIN);
                let mut batch = store.batch();
                for _ in 0..self.most_threads() {
                    batch.create(page_len, room.place);
                }
                let pages = store.commit(batch)?.pages;
                let log_io = store.recovered().log_io.clone();
                let log_io = log_io.split([',', ' ', ':']).next().unwrap_or_default();
                let name = format!("{}, {log_io}", level.name());
                stores.push((
                    level,
                    CommitSubject::Store(Box::new(RecordStore { name, store, pages, page_len })),
                ));
            }
        }
        Ok(stores)
    }

    /// Measures all subjects in turn, once per round.
    fn group(
        &self,
        room: &Room,
        level: Level,
        threads: usize,
        len: u64,
        subjects: &[&CommitSubject],
    ) -> Result<Group, BenchStop> {
        let plural = if threads == 1 { "" } else { "s" };
        let title = format!("{}: {threads} thread{plural}, {}", level.name(), Size(len));
        let mut group = Group::new(title);
        let time = Duration::from_secs_f64(self.seconds);
        for subject in subjects {
            let mut figure = Figure::new(subject.name(), Unit::PerSecond("commits"));
            figure.latency = Some(Latency::new());
            let step = time / COURSE_STEPS;
            figure.course =
                Some(TimeSeries { unit: figure.unit, step, values: Vec::new(), marks: Vec::new() });
            group.figures.push(figure);
        }
        for _ in 0..self.common.rounds {
            room.step(&group.title)?;
            for (figure, subject) in group.figures.iter_mut().zip(subjects) {
                round(room, subject, figure, threads, len as usize, time)?;
                subject.settle()?;
            }
        }
        let fastest = group.figures.iter().zip(subjects).filter(|(_, subject)| subject.is_ceiling());
        let fastest = fastest.max_by(|(one, _), (other, _)| one.median().total_cmp(&other.median()));
        let ceiling = fastest.map(|(figure, _)| figure.name.clone());
        for (figure, subject) in group.figures.iter_mut().zip(subjects) {
            if !subject.is_ceiling() {
                figure.ceiling.clone_from(&ceiling);
            }
        }
        Ok(group)
    }
}

/// A store or a ceiling that takes records.
enum CommitSubject {
    Raw(RawLog),
    Memory(RawMemory),
    Store(Box<RecordStore>),
}

/// A store that takes records.
struct RecordStore {
    name: String,
    store: Store,
    /// One page per thread.
    pages: Vec<PageId>,
    page_len: u64,
}

impl CommitSubject {
    fn name(&self) -> String {
        match self {
            CommitSubject::Raw(raw) if raw.way == WriteMethod::Synced => "raw, pwrite + fdatasync".to_owned(),
            CommitSubject::Raw(_) => "raw, O_DIRECT + O_DSYNC".to_owned(),
            CommitSubject::Memory(_) => "raw, copy + checksum".to_owned(),
            CommitSubject::Store(committing) => committing.name.clone(),
        }
    }

    fn is_ceiling(&self) -> bool {
        !matches!(self, CommitSubject::Store(_))
    }

    /// Makes commit number `count` of a thread.
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<(), BenchStop> {
        match self {
            CommitSubject::Raw(raw) => Ok(raw.commit(record)?),
            CommitSubject::Memory(memory) => {
                memory.commit(record);
                Ok(())
            }
            CommitSubject::Store(committing) => {
                let RecordStore { store, pages, page_len, .. } = &**committing;
                let mut batch = store.batch();
                let len = record.len() as u64;
                batch.write(pages[thread], count % (page_len / len) * len, record);
                store.commit(batch)?;
                Ok(())
            }
        }
    }

    /// Finishes background work, so that it does not slow the next measurement down.
    fn settle(&self) -> Result<(), BenchStop> {
        if let CommitSubject::Store(committing) = self {
            let store = &committing.store;
            store.wait_durable(store.lsn())?;
            let stats = store.stats();
            if stats.log.bytes > (stats.snapshots.taken + 1) * LOG_BYTES_MAX {
                store.snapshot()?;
            }
        }
        Ok(())
    }
}

/// Measures one subject for one round.
fn round(
    room: &Room,
    subject: &CommitSubject,
    figure: &mut Figure,
    threads: usize,
    len: usize,
    time: Duration,
) -> Result<(), BenchStop> {
    let over = AtomicBool::new(false);
    let course: Vec<AtomicU64> = (0..COURSE_STEPS).map(|_| AtomicU64::new(0)).collect();
    let step = time / COURSE_STEPS;
    let started = Instant::now();
    let work = |thread: usize| -> Result<Latency, BenchStop> {
        let mut latency = Latency::new();
        let mut record = vec![thread as u8; len];
        let mut before = Instant::now();
        for count in 0.. {
            record[0] = count as u8;
            let done = subject.commit(thread, count, &record);
            let now = Instant::now();
            if done.is_err() || now - started >= time || room.interrupted() {
                over.store(true, Ordering::Relaxed);
            }
            done?;
            latency.record(now - before);
            before = now;
            let at = ((now - started).as_nanos() / step.as_nanos()) as usize;
            if let Some(commits) = course.get(at) {
                commits.fetch_add(1, Ordering::Relaxed);
            }
            if over.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(latency)
    };
    let mut all = Latency::new();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        workers.into_iter().try_for_each(|worker| -> Result<(), BenchStop> {
            all.add(&worker.join().expect("no panic")?);
            Ok(())
        })
    })?;
    figure.push(all.count() as f64 / started.elapsed().as_secs_f64());
    if let Some(latency) = &mut figure.latency {
        latency.add(&all);
    }
    if let Some(shown) = &mut figure.course {
        shown
            .values
            .extend(course.iter().map(|commits| commits.load(Ordering::Relaxed) as f64 / step.as_secs_f64()));
    }
    Ok(())
}
