//! `remanent-bench snapshot`: takes full and incremental snapshots, compared with plain writing, and measures
//! their effect on a hot page's commits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remanent::options::ImageIo;
use remanent::snapshot::{SnapshotInfo, SnapshotPhase};
use remanent::{Ack, PageId, SnapshotOptions, Store, WriteBatch};
use remanent_tools::shared::exit::Failure;

use crate::figures::{Figure, Findings, Group, TimeSeries, Unit};
use crate::latency::Latency;
use crate::room::{self, BenchStop, Room};
use crate::sizes::{DELTA_LEN, Sizes};
use crate::{Common, Measure, peak, transfer};

const EXAMPLES: &str = "\
All pages contain random bytes, which cannot be compressed, and each page is changed before a full snapshot, so that \
all pages are written. The ceiling is the same number of bytes, written to new files by 4 threads past the page cache \
and synced. A snapshot is durable when it is published. After that, it is read back and older snapshots are removed.

A snapshot after one page in a hundred changed is shown as a share of the full snapshot of the same round. After some \
full snapshots, the next one reuses files that earlier snapshots have freed (files of 1 MiB and more). Commits to a \
hot page wait for Applied each time, first without a snapshot, then during a full one.

Examples:
  remanent-bench snapshot /mnt/fast --image-io buffered,direct,mapped
  remanent-bench snapshot /mnt/fast --bytes 16GiB --page-len 2MiB,64KiB,16KiB --device cuda:0 --rounds 3";

/// Rate of snapshots, cost of incremental ones, and their effect on commits
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct SnapshotBench {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    sizes: Sizes,
    /// Methods of writing images, separated by commas [default: the store's choice]
    #[arg(long, value_enum, value_delimiter = ',')]
    image_io: Vec<ImageWriter>,
}

/// A method of writing images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ImageWriter {
    /// Through a shared mapping
    Mapped,
    /// By write and fdatasync
    Buffered,
    /// Past the page cache
    Direct,
}

impl From<ImageWriter> for ImageIo {
    fn from(way: ImageWriter) -> Self {
        match way {
            ImageWriter::Mapped => ImageIo::Mapped,
            ImageWriter::Buffered => ImageIo::Buffered,
            ImageWriter::Direct => ImageIo::Direct,
        }
    }
}

/// Number of bytes that are written to a page to make it differ from its image.
const TOUCH_LEN: usize = 64;
/// Number of full snapshots after which a snapshot reuses freed files. The files of the two kept snapshots
/// are not free.
const SNAPSHOTS_UNTIL_REUSE: usize = 5;
/// Interval at which the progress of a snapshot is sampled.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Number of values in the time series of a hot page's commits, and of the first snapshot.
const COURSE_STEPS: u32 = 200;
const ROUND_STEPS: u32 = 40;

impl Measure for SnapshotBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        self.sizes.check()
    }

    fn bytes_needed(&self) -> u64 {
        // Each store's two kept snapshots and the one being written, or the ceiling's files in its place.
        self.sizes.bytes().saturating_mul(1 + 2 * self.ways())
    }

    fn steps(&self) -> u64 {
        self.sizes.steps(1 + 3 * u64::from(self.common.rounds) * self.ways())
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        self.sizes.findings("snapshot", room, &self.common, |page_len| self.pages_of(room, page_len))
    }
}

/// The measurements of one snapshot.
struct SnapshotTrace {
    info: SnapshotInfo,
    /// The time until it was published.
    durable: Duration,
    /// The time until it was read back.
    verified: Duration,
    /// The bytes gathered at these times.
    gathered: Vec<(Duration, u64)>,
    started: Instant,
}

impl SnapshotBench {
    /// Returns the number of methods of writing images that are measured.
    fn ways(&self) -> u64 {
        self.image_io.len().max(1) as u64
    }

    fn pages_of(&self, room: &Room, page_len: u64) -> Result<Group, BenchStop> {
        let title = self.sizes.title(page_len);
        room.step(&title)?;
        let ways: Vec<Option<ImageIo>> = match &self.image_io[..] {
            [] => vec![None],
            ways => ways.iter().map(|way| Some((*way).into())).collect(),
        };
        let raw_name = "raw, 4 threads past the cache, synced";
        let mut raw = Figure::new(raw_name, Unit::BytesPerSecond);
        let mut stores = Vec::new();
        for (index, way) in ways.into_iter().enumerate() {
            let folder = format!("pages-{page_len}-{index}");
            let mut options = room::options();
            let mut suffix = String::new();
            if let Some(io) = way {
                options.images.io = io;
                suffix = format!(", {io}");
            }
            let (store, pages) = self.sizes.store(room, &folder, page_len, options)?;
            store.snapshot()?;
            stores.push((folder, store, pages, Figures::new(&suffix, raw_name)));
        }
        let bytes = self.sizes.bytes() / page_len * page_len;
        for round in 0..self.common.rounds as usize {
            let (files, took) = transfer::write(&room.path("raw"), bytes)?;
            raw.push(bytes as f64 / took.as_secs_f64());
            transfer::remove(&files)?;
            // All methods are measured in turn within each round.
            for (_, store, pages, figures) in &mut stores {
                room.step(&title)?;
                full(store, pages, round, figures)?;
                part(store, pages, round, figures)?;
                room.step(&title)?;
                beside(store, pages, round, figures)?;
                room.step(&title)?;
                again(store, pages, round, figures)?;
            }
        }
        let mut figures = vec![raw];
        for (folder, store, _, measured) in stores {
            store.close()?;
            std::fs::remove_dir_all(room.path(&folder))?;
            let Figures { full, verified, again, part_time, part_bytes, part, memory, alone, beside } =
                measured;
            figures.extend([full, verified, again, part, part_time, part_bytes, memory, alone, beside]);
        }
        Ok(Group { title, figures })
    }
}

/// The figures for pages of one length and one method of writing images.
struct Figures {
    full: Figure,
    verified: Figure,
    again: Figure,
    part: Figure,
    part_time: Figure,
    part_bytes: Figure,
    memory: Figure,
    alone: Figure,
    beside: Figure,
}

impl Figures {
    fn new(suffix: &str, raw: &str) -> Self {
        let named = |name: &str| format!("{name}{suffix}");
        let alone = named("hot page, Applied, without a snapshot");
        Self {
            full: Figure::new(named("full, durable"), Unit::BytesPerSecond).under(raw),
            verified: Figure::new(named("full, read back too"), Unit::BytesPerSecond),
            again: Figure::new(named("full, durable, over freed files"), Unit::BytesPerSecond).under(raw),
            part_time: Figure::new(named("1 % changed: time, relative to full"), Unit::Share),
            part_bytes: Figure::new(named("1 % changed: bytes, relative to full"), Unit::Share),
            part: Figure::new(named("1 % changed: durable after"), Unit::Seconds),
            memory: Figure::new(named("peak host memory above the start"), Unit::Bytes),
            beside: hot(named("hot page, Applied, during a snapshot")).under(alone.clone()),
            alone: hot(alone),
        }
    }
}

fn hot(name: String) -> Figure {
    let mut figure = Figure::new(name, Unit::PerSecond("commits"));
    figure.latency = Some(Latency::new());
    figure
}

/// Makes pages differ from their images.
fn touch(store: &Store, pages: impl Iterator<Item = PageId>, round: usize) -> Result<(), BenchStop> {
    let mut pages = pages.peekable();
    while pages.peek().is_some() {
        let mut batch = store.batch();
        for page in pages.by_ref().take(1024) {
            batch.write(page, 0, &[round as u8; TOUCH_LEN]);
        }
        store.commit(batch)?;
    }
    Ok(store.wait_durable(store.lsn())?)
}

/// Measures a snapshot of all pages.
fn full(store: &Store, pages: &[PageId], round: usize, figures: &mut Figures) -> Result<(), BenchStop> {
    touch(store, pages.iter().copied(), round)?;
    peak::forget()?;
    let before = peak::resident_bytes()?;
    let taken = watch(store)?;
    figures.memory.push(peak::peak_bytes()?.saturating_sub(before) as f64);
    let bytes = taken.info.bytes_written as f64;
    figures.full.push(bytes / taken.durable.as_secs_f64());
    figures.verified.push(bytes / taken.verified.as_secs_f64());
    match &mut figures.full.course {
        Some(shown) => append(shown, &taken),
        none => *none = Some(course(&taken, taken.durable / ROUND_STEPS + Duration::from_nanos(1))),
    }
    Ok(())
}

/// Takes snapshots of all pages until one reuses files that an earlier one has freed.
fn again(store: &Store, pages: &[PageId], round: usize, figures: &mut Figures) -> Result<(), BenchStop> {
    for number in 0..SNAPSHOTS_UNTIL_REUSE {
        touch(store, pages.iter().copied(), round + 64 * number)?;
        let before = store.stats().snapshots.files_reused;
        let taken = watch(store)?;
        if store.stats().snapshots.files_reused > before {
            figures.again.push(taken.info.bytes_written as f64 / taken.durable.as_secs_f64());
            break;
        }
    }
    Ok(())
}

/// Measures a snapshot of one page in a hundred, after the full snapshot of this round.
fn part(store: &Store, pages: &[PageId], round: usize, figures: &mut Figures) -> Result<(), BenchStop> {
    let full = |figure: &Figure| figure.rounds.last().copied().unwrap_or(f64::NAN);
    let all_bytes = store.snapshots().last().map_or(f64::NAN, |info| info.bytes as f64);
    let all_time = all_bytes / full(&figures.full);
    // The first snapshot after a full one also removes the images of the previous full one.
    for is_measured in [false, true] {
        touch(store, pages.iter().copied().skip(round % 100).step_by(100), round)?;
        let taken = watch(store)?;
        if is_measured {
            let time = taken.durable.as_secs_f64();
            figures.part.push(time);
            figures.part_time.push(time / all_time);
            figures.part_bytes.push(taken.info.bytes_written as f64 / all_bytes);
        }
    }
    Ok(())
}

/// Commits to one page for as long as a snapshot of all pages takes: first without a snapshot, then during
/// one.
fn beside(store: &Store, pages: &[PageId], round: usize, figures: &mut Figures) -> Result<(), BenchStop> {
    let full_seconds = figures
        .verified
        .rounds
        .last()
        .map_or(0.1, |rate| store.snapshots().last().map_or(0.1, |info| info.bytes as f64 / rate));
    let time = Duration::from_secs_f64(full_seconds.clamp(0.05, 10.0));
    let page = pages[pages.len() / 2];
    let until = Instant::now() + time;
    commit_until_stopped(store, page, &mut figures.alone, || Instant::now() >= until)?;

    touch(store, pages.iter().copied(), round + 128)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| {
            let taken = watch(store);
            over.store(true, Ordering::Relaxed);
            taken
        });
        let started = Instant::now();
        let hammered =
            commit_until_stopped(store, page, &mut figures.beside, || over.load(Ordering::Relaxed));
        let taken = snapshot.join().expect("no panic")?;
        if let Some(course) = figures.beside.course.as_mut().filter(|course| course.marks.is_empty()) {
            let begun = taken.started.saturating_duration_since(started);
            course.marks = vec![(begun + taken.durable, "durable"), (begun + taken.verified, "read back")];
        }
        hammered
    })
}

/// Commits to a page until `enough` returns true. The time series is that of the first round, with the
/// longest time of each step.
pub(super) fn commit_until_stopped(
    store: &Store,
    page: PageId,
    figure: &mut Figure,
    enough: impl Fn() -> bool,
) -> Result<(), BenchStop> {
    let started = Instant::now();
    let mut times = Vec::new();
    let mut latency = Latency::new();
    for count in 0_u64.. {
        let mut batch: WriteBatch = store.batch();
        batch.write(page, 0, &[count as u8; DELTA_LEN]);
        let begun = Instant::now();
        store.submit(batch)?.wait(Ack::Applied)?;
        let took = begun.elapsed();
        latency.record(took);
        times.push((begun - started, took));
        if enough() {
            break;
        }
    }
    let lasted = started.elapsed();
    figure.push(latency.count() as f64 / lasted.as_secs_f64());
    if let Some(all) = &mut figure.latency {
        all.add(&latency);
    }
    if figure.course.is_none() {
        let step = lasted / COURSE_STEPS + Duration::from_nanos(1);
        let mut values = vec![0.0; COURSE_STEPS as usize];
        for (at, took) in times {
            let value: &mut f64 = &mut values[(at.as_nanos() / step.as_nanos()) as usize];
            *value = value.max(took.as_secs_f64());
        }
        figure.course = Some(TimeSeries { unit: Unit::Seconds, step, values, marks: Vec::new() });
    }
    Ok(())
}

/// Takes a snapshot, samples its progress until it is published, and waits until it is read back.
fn watch(store: &Store) -> Result<SnapshotTrace, BenchStop> {
    let started = Instant::now();
    let mut gathered = Vec::new();
    let (info, durable) = std::thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        let snapshot = scope.spawn(move || {
            let published = store
                .snapshot_with(SnapshotOptions::new().only_published())
                .map(|info| (info, started.elapsed()));
            drop(ended);
            published
        });
        while end.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
            let stats = store.stats().snapshots;
            if matches!(stats.phase, SnapshotPhase::Gather | SnapshotPhase::Publish) {
                gathered.push((started.elapsed(), stats.bytes_done));
            }
        }
        snapshot.join().expect("no panic")
    })?;
    store.wait_verified()?;
    Ok(SnapshotTrace { info, durable, verified: started.elapsed(), gathered, started })
}

/// Returns the bytes gathered per second as a time series.
fn course(taken: &SnapshotTrace, step: Duration) -> TimeSeries {
    let steps = taken.durable.as_nanos() / step.as_nanos() + 1;
    let mut values = vec![0.0; steps as usize];
    let mut before = 0;
    for (at, bytes) in &taken.gathered {
        if let Some(value) = values.get_mut((at.as_nanos() / step.as_nanos()) as usize) {
            *value += bytes.saturating_sub(before) as f64 / step.as_secs_f64();
        }
        before = *bytes;
    }
    TimeSeries { unit: Unit::BytesPerSecond, step, values, marks: Vec::new() }
}

/// Appends another round to a time series.
fn append(shown: &mut TimeSeries, taken: &SnapshotTrace) {
    let end = shown.step * shown.values.len() as u32;
    shown.marks.push((end, "next round"));
    shown.values.extend(course(taken, shown.step).values);
}
