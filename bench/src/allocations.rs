//! `remanent-bench allocations`: replays a trace of allocations through each allocator.
//!
//! `allocation_trace.rs` reads the calls, `allocators.rs` makes them; this file measures them.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

use clap::builder::RangedU64ValueParser;
use remanent::DeviceChoice;
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;
use remanent_tools::shared::trace::{self, Trace};

use crate::allocation_trace::{AllocationTrace, Event};
use crate::allocators::{Allocator, AllocatorKind, LiveBlocks};
use crate::figures::{Figure, Findings, Group, Unit, rate};
use crate::latency::Latency;
use crate::room::{BenchStop, Room, size};
use crate::{Common, Measure, check_threads};

const EXAMPLES: &str = "\
Each thread makes all calls of the trace, and all threads share an allocator. The trace is replayed three times: \
through a new allocator that holds no memory, again through the same allocator, and once more with each call timed, \
which includes the cost of the clock. The ceiling is the same loop with all addresses known in advance. Reserved \
memory is compared with the requested bytes that are live at once. No files are created in DIR.

A --trace file has one JSON object per line, {\"alloc\": ID, \"len\": BYTES} or {\"free\": ID}. Without a --trace \
file, the cache requests of --kv are converted: a missing block is allocated, and the least recently used block is \
freed once the cache is full. With a GPU the memory comes from the driver, and blocks are also freed behind events of \
the default stream. On the host it comes from the host's allocator, zeroed.

Examples:
  remanent-bench allocations /dev/shm
  remanent-bench allocations /dev/shm --device cuda:0 --trace steps.jsonl --threads 1,2,4
  remanent-bench allocations /dev/shm --requests 4000 --len 2MiB --save kv.jsonl";

/// Allocations of a real trace through the driver, the pool and the cache
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct AllocationsBench {
    #[command(flatten)]
    common: Common,
    /// Trace of allocations, plain or compressed with zstd
    #[arg(long, value_name = "FILE", conflicts_with = "kv")]
    trace: Option<PathBuf>,
    /// Trace of cache requests: one JSON object with `hash_ids` per line [default: one hour of a chat
    /// service, included in the tool]
    #[arg(long, value_name = "FILE")]
    kv: Option<PathBuf>,
    /// Number of requests of the --kv trace to use
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    requests: usize,
    /// Length of each block of the cache in bytes
    #[arg(long, value_name = "BYTES", default_value = "64KiB")]
    len: Size,
    /// Size of the cache, as a percentage of the distinct blocks
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = RangedU64ValueParser::<usize>::new().range(1..=100))]
    budget: usize,
    /// Numbers of threads that replay the trace concurrently, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Write the allocations to a file, for use with another allocator
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    #[arg(skip)]
    replayed: OnceLock<AllocationTrace>,
}

impl Measure for AllocationsBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        check_threads(&self.threads)?;
        if self.len.0 == 0 || self.len.0 > 1 << 30 {
            return Err(Failure::Environment("--len must be between 1 and 1GiB".to_owned()));
        }
        let trace = match (&self.trace, &self.kv) {
            (Some(path), _) => AllocationTrace::read(path)?,
            (None, Some(path)) => self.of_requests(path)?,
            (None, None) => {
                let folder = tempfile::tempdir().map_err(|error| {
                    Failure::Environment(format!("cannot create a temporary directory: {error}"))
                })?;
                self.of_requests(&trace::bundled(folder.path())?)?
            }
        };
        if trace.events.is_empty() {
            return Err(Failure::Environment("the trace contains no allocations".to_owned()));
        }
        let _again = self.replayed.set(trace);
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        0
    }

    fn steps(&self) -> u64 {
        u64::from(self.common.rounds) * (self.threads.len() * AllocatorKind::all(true).len()) as u64
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let trace = self.replayed.get().expect("options are checked first");
        if let Some(path) = &self.save {
            trace.write(path)?;
        }
        let groups = self.threads.iter().map(|threads| self.group(room, trace, *threads));
        let groups = groups.collect::<Result<Vec<_>, BenchStop>>()?;
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        settings.push(("trace", self.name()));
        settings.push((
            "calls",
            format!(
                "{}, up to {} blocks of {} together live at once",
                trace.events.len(),
                trace.slots,
                size(trace.live_peak_bytes)
            ),
        ));
        let mut left_out = Vec::new();
        if !room.is_gpu() {
            left_out.push("blocks freed behind events: the host has no streams".to_owned());
        }
        Ok(Findings { bench: "allocations", settings, groups, left_out })
    }
}

impl AllocationsBench {
    fn of_requests(&self, path: &Path) -> Result<AllocationTrace, Failure> {
        let requests = Trace::open(path, Some(self.requests as u64))?.collect::<Result<Vec<_>, _>>()?;
        if requests.len() < self.requests {
            return Err(Failure::Environment(format!(
                "the trace has {} requests, fewer than the {} of --requests",
                requests.len(),
                self.requests
            )));
        }
        let blocks: std::collections::HashSet<u64> = requests.iter().flatten().copied().collect();
        let held = (blocks.len() * self.budget / 100).max(1);
        Ok(AllocationTrace::of_cache(&requests, held, self.len.0))
    }

    fn name(&self) -> String {
        let of_cache = |requests: &str| {
            let Self { requests: number, budget, len, .. } = self;
            format!("{requests}, {number} requests, room for {budget} % of the blocks of {len}")
        };
        match (&self.trace, &self.kv) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(path)) => of_cache(&path.display().to_string()),
            (None, None) => of_cache("one hour of a chat service"),
        }
    }

    fn group(&self, room: &Room, trace: &AllocationTrace, threads: usize) -> Result<Group, BenchStop> {
        let gpu = room.is_gpu().then_some(match self.common.device {
            DeviceChoice::Cuda(ordinal) => ordinal,
            _ => 0,
        });
        let mut replays: Vec<Replay> =
            AllocatorKind::all(room.is_gpu()).into_iter().map(|kind| Replay::new(kind, gpu)).collect();
        let plural = if threads == 1 { "" } else { "s" };
        for _ in 0..self.common.rounds {
            for replay in &mut replays {
                room.step(&format!("{threads} thread{plural}, {}", replay.again.name))?;
                replay.round(trace, threads)?;
            }
        }
        let title = format!("{threads} thread{plural}, {} calls each", trace.events.len());
        Ok(Group { title, figures: replays.into_iter().flat_map(Replay::figures).collect() })
    }
}

/// The replays through one allocator.
struct Replay {
    kind: AllocatorKind,
    gpu: Option<u32>,
    /// The first replay, through an allocator that holds no memory.
    first: Figure,
    again: Figure,
    reserved: Figure,
    beyond: Figure,
}

impl Replay {
    fn new(kind: AllocatorKind, gpu: Option<u32>) -> Self {
        let name = |kind: AllocatorKind| kind.name(gpu.is_some());
        let figure = |what: &str, unit| Figure::new(format!("{}{what}", name(kind)), unit);
        let mut again = figure("", Unit::PerSecond("calls"));
        again.latency = Some(Latency::new());
        let mut first = figure(", first replay", Unit::PerSecond("calls"));
        if kind != AllocatorKind::Known {
            again = again.under(name(AllocatorKind::Known));
            first = first.under(name(AllocatorKind::Known));
        }
        Self {
            kind,
            gpu,
            first,
            again,
            reserved: figure(", peak reserved", Unit::Bytes),
            beyond: figure(", share of reserved not live", Unit::Share),
        }
    }

    fn round(&mut self, trace: &AllocationTrace, threads: usize) -> Result<(), BenchStop> {
        let allocator = self.kind.make(self.gpu)?;
        let calls = (trace.events.len() * threads) as u64;
        self.first.push(rate(calls, replay(trace, &allocator, threads)?));
        self.again.push(rate(calls, replay(trace, &allocator, threads)?));
        let (latency, live_peak_bytes) = replay_timed(trace, &allocator, threads)?;
        self.again.latency.get_or_insert_with(Latency::new).add(&latency);
        if let Some(reserved) = allocator.reserved_peak_bytes() {
            self.reserved.push(reserved as f64);
            self.beyond.push(1.0 - live_peak_bytes as f64 / reserved as f64);
        }
        Ok(())
    }

    fn figures(self) -> impl Iterator<Item = Figure> {
        let keeps_memory = !self.reserved.rounds.is_empty();
        let Self { first, again, reserved, beyond, .. } = self;
        [again].into_iter().chain(keeps_memory.then_some([first, reserved, beyond]).into_iter().flatten())
    }
}

/// Makes all calls of the trace in each of `threads` threads, and returns the time until the last one is
/// done.
fn replay(trace: &AllocationTrace, allocator: &Allocator, threads: usize) -> Result<Duration, BenchStop> {
    let times = in_threads(threads, |begin| {
        let mut blocks = LiveBlocks::new(allocator, trace.slots);
        begin.wait();
        let begun = Instant::now();
        for event in &trace.events {
            blocks.call(black_box(*event))?;
        }
        Ok((begun, Instant::now()))
    })?;
    let begun = times.iter().map(|(begun, _)| *begun).min();
    let ended = times.iter().map(|(_, ended)| *ended).max();
    Ok(begun.zip(ended).map_or(Duration::ZERO, |(begun, ended)| ended - begun))
}

/// Replays the trace as [`replay`] does and measures each call. Returns the durations, and the maximum number
/// of bytes that were live at once.
fn replay_timed(
    trace: &AllocationTrace,
    allocator: &Allocator,
    threads: usize,
) -> Result<(Latency, u64), BenchStop> {
    let (live, live_peak) = (AtomicU64::new(0), AtomicU64::new(0));
    let latencies = in_threads(threads, |begin| {
        let (mut blocks, mut latency) = (LiveBlocks::new(allocator, trace.slots), Latency::new());
        let mut lens = vec![0_u64; trace.slots];
        begin.wait();
        // `live` never exceeds the bytes that are live, because bytes are added after an allocation and
        // subtracted before a free.
        for event in &trace.events {
            if let Event::Free { slot } = *event {
                live.fetch_sub(std::mem::take(&mut lens[slot]), Ordering::Relaxed);
            }
            let before = Instant::now();
            blocks.call(*event)?;
            latency.record(before.elapsed());
            if let Event::Allocate { slot, len } = *event {
                lens[slot] = len;
                live_peak.fetch_max(live.fetch_add(len, Ordering::Relaxed) + len, Ordering::Relaxed);
            }
        }
        live.fetch_sub(lens.iter().sum(), Ordering::Relaxed);
        Ok(latency)
    })?;
    let mut all = Latency::new();
    latencies.iter().for_each(|latency| all.add(latency));
    Ok((all, live_peak.into_inner()))
}

/// Runs the same work in several threads that start together.
fn in_threads<T: Send>(
    threads: usize,
    work: impl Fn(&Barrier) -> remanent::Result<T> + Sync,
) -> Result<Vec<T>, BenchStop> {
    let begin = Barrier::new(threads);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| work(&begin))).collect();
        running.into_iter().map(|thread| Ok(thread.join().expect("no panic")?)).collect()
    })
}
