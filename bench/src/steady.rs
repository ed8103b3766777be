//! `remanent-bench steady`: runs a full cache of blocks for a long time and checks that its cost stays
//! constant.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remanent::{DeviceChoice, Options, PageId, Place, Store};
use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, TimeSeries, Unit};
use crate::latency::Latency;
use crate::room::{BenchStop, Room};
use crate::{Common, Measure, check_seconds, opener, peak};

const EXAMPLES: &str = "\
Each thread keeps a window of blocks. Each commit creates a block, writes all of its bytes, and deletes the oldest \
block, as in a full cache. The lengths of --len alternate. The store runs with default options, so it takes snapshots \
and frees space automatically. Each round measures the directory, the memory, and the time that another process takes \
to open the store. The cost of a store should depend on its content, not on how long it has run.

Examples:
  remanent-bench steady /mnt/fast
  remanent-bench steady /mnt/fast --rounds 30 --seconds 60 --report steady.html";

/// Disk space in bytes for data other than blocks: segments, manifests, and partly filled chunks.
const BYTES_BESIDE: u64 = 1 << 30;

/// Disk, memory, open time and commits of a full cache over time
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct SteadyBench {
    #[command(flatten)]
    common: Common,
    /// Number of threads that commit concurrently
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Block lengths in bytes, separated by commas
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "2MiB,64KiB")]
    len: Vec<Size>,
    /// Total size of all blocks in bytes
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    bytes: Size,
    /// Duration of each round, in seconds
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
}

/// The blocks of one thread, oldest first.
struct Window {
    blocks: VecDeque<PageId>,
    /// The maximum number of blocks.
    len: usize,
    /// The number of blocks created so far, which selects the length of the next one.
    created: usize,
    contents: Vec<Vec<u8>>,
}

impl Window {
    /// Creates the next block, and deletes the oldest if the window is full.
    fn turn(&mut self, store: &Store, place: Place) -> Result<(), BenchStop> {
        let turn = self.created % self.contents.len();
        let content = &mut self.contents[turn];
        // Makes all blocks distinct and incompressible.
        content[..8].copy_from_slice(&(self.created as u64).to_le_bytes());
        let mut batch = store.batch();
        batch.create_from(content.clone(), place);
        let oldest = if self.blocks.len() == self.len { self.blocks.pop_front() } else { None };
        if let Some(oldest) = oldest {
            batch.delete(oldest);
        }
        self.blocks.extend(store.commit(batch)?.pages);
        self.created += 1;
        Ok(())
    }
}

impl SteadyBench {
    /// Returns the number of blocks per thread.
    fn blocks(&self) -> usize {
        let lens: u64 = self.len.iter().map(|len| len.0).sum();
        let mean = lens / self.len.len() as u64;
        (self.bytes.0 / mean / u64::from(self.threads)).max(1) as usize
    }

    fn windows(&self) -> Vec<Window> {
        let noise = |len: u64, seed: u64| {
            let mut random = SplitMix64::new(seed);
            let words = (0..len.div_ceil(8)).flat_map(|_| random.next_word().to_le_bytes());
            words.take(len as usize).collect::<Vec<u8>>()
        };
        let window = |thread: u16| Window {
            blocks: VecDeque::new(),
            len: self.blocks(),
            created: 0,
            contents: self.len.iter().map(|len| noise(len.0, u64::from(thread))).collect(),
        };
        (0..self.threads).map(window).collect()
    }

    /// Runs one round in all threads. Returns the latencies of their commits, and the duration in seconds.
    fn round(&self, room: &Room, store: &Store, windows: &mut [Window]) -> Result<(Latency, f64), BenchStop> {
        let (over, time) = (AtomicBool::new(false), Duration::from_secs_f64(self.seconds));
        let started = Instant::now();
        let work = |window: &mut Window| -> Result<Latency, BenchStop> {
            let mut latency = Latency::new();
            while !over.load(Ordering::Relaxed) {
                let before = Instant::now();
                let done = window.turn(store, room.place);
                latency.record(before.elapsed());
                if done.is_err() || started.elapsed() >= time || room.interrupted() {
                    over.store(true, Ordering::Relaxed);
                }
                done?;
            }
            Ok(latency)
        };
        let mut all = Latency::new();
        std::thread::scope(|scope| {
            let work = &work;
            let workers: Vec<_> =
                windows.iter_mut().map(|window| scope.spawn(move || work(window))).collect();
            workers.into_iter().try_for_each(|worker| -> Result<(), BenchStop> {
                all.add(&worker.join().expect("no panic")?);
                Ok(())
            })
        })?;
        Ok((all, started.elapsed().as_secs_f64()))
    }
}

impl Measure for SteadyBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |what: &str| Err(Failure::Environment(what.to_owned()));
        check_seconds("--seconds", self.seconds)?;
        if self.len.iter().any(|len| !(8..=1 << 30).contains(&len.0)) {
            return refuse("--len must be between 8 and 1GiB");
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        self.bytes.0.saturating_mul(8).saturating_add(BYTES_BESIDE)
    }

    fn steps(&self) -> u64 {
        u64::from(self.common.rounds) + 1
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let figure = |name: &str, unit: Unit| {
            let step = Duration::from_secs_f64(self.seconds);
            let course = TimeSeries { unit, step, values: Vec::new(), marks: Vec::new() };
            Figure { course: Some(course), ..Figure::new(name, unit) }
        };
        let mut commits = figure("commits", Unit::PerSecond("commits"));
        let mut tail = figure("commit, p99", Unit::Seconds);
        let mut disk = figure("disk", Unit::Bytes);
        let mut memory = figure("host memory", Unit::Bytes);
        let mut open = figure("open", Unit::Seconds);

        let mut windows = self.windows();
        let unknown = |error| Failure::Environment(format!("cannot determine the memory in use: {error}"));
        room.step("filling the windows")?;
        let mut store = room.open("steady", Options::new())?;
        for window in &mut windows {
            while window.blocks.len() < window.len {
                window.turn(&store, room.place)?;
                room.check()?;
            }
        }
        for _ in 0..self.common.rounds {
            room.step("replacing blocks")?;
            let (latency, seconds) = self.round(room, &store, &mut windows)?;
            add(&mut commits, latency.count() as f64 / seconds);
            add(&mut tail, latency.quantile(0.99));
            add(&mut memory, peak::resident_bytes().map_err(unknown)? as f64);
            add(&mut disk, disk_bytes(&room.path("steady"))? as f64);
            store.close()?;
            let opened = opener::open(&room.path("steady"), DeviceChoice::Host, false)?;
            add(&mut open, opened.seconds);
            store = room.open("steady", Options::new())?;
        }
        store.close()?;
        let live = windows.iter().map(|window| window.blocks.len()).sum::<usize>();
        let title = |of: &str| format!("{of}, {live} blocks of {} in all", self.bytes);
        let group = |of: &str, figure: Figure| Group { title: title(of), figures: vec![figure] };
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", format!("{} of {} s", self.common.rounds, self.seconds)));
        let groups = vec![
            group("commits", commits),
            group("commit latency", tail),
            group("directory", disk),
            group("process", memory),
            group("open by another process", open),
        ];
        Ok(Findings { bench: "steady", settings, groups, left_out: Vec::new() })
    }
}

/// Adds the value of one more round, also to the figure's time series.
fn add(figure: &mut Figure, value: f64) {
    figure.push(value);
    if let Some(course) = &mut figure.course {
        course.values.push(value);
    }
}

/// Returns the bytes that the files of a directory take on disk.
fn disk_bytes(directory: &Path) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut sum = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // A spare segment may be removed meanwhile.
        let Ok(metadata) = entry.metadata() else { continue };
        sum += if metadata.is_dir() { disk_bytes(&entry.path())? } else { metadata.blocks() * 512 };
    }
    Ok(sum)
}
