//! What the core costs, each figure beside what the machine does without it, measured in the same run.
//!
//! `cargo bench -p remanent --bench core`; with `REMANENT_BENCH_QUICK=1` in seconds, for a look only. The
//! store lies in `REMANENT_BENCH_DIR`, or else in the system's folder for temporary files: that folder's
//! file system and disk are what is measured. Rounds of all variants take turns, so that a machine that
//! slows down slows all of them down; medians over the rounds are printed.

#![expect(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use remanent::{Ack, Compression, LogIo, Options, PageId, Place, Store};
use rustix::fs::{Advice, OFlags};

const RECORD_LEN: usize = 4096;
const THREADS: usize = 8;
/// Length of the pages that take deltas, in bytes.
const PAGE_LEN: u64 = 64 << 10;

fn main() {
    let plan = if std::env::var_os("REMANENT_BENCH_QUICK").is_some() { Plan::QUICK } else { Plan::FULL };
    let root = std::env::var_os("REMANENT_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    println!("in {}, {} processors\n", root.display(), std::thread::available_parallelism().unwrap());
    commits_per_second(&plan, &root);
    latency(&plan, &root);
    logged_cost(&plan, &root);
    opening(&plan, &root);
}

/// Of a store that does nothing on its own, and whose images are as long as its pages.
fn options() -> Options {
    Options::default().snapshot_log_bytes(None).snapshot_interval(None).compression(Compression::Off)
}

/// How much is measured.
struct Plan {
    rounds: usize,
    round: Duration,
    /// Commits a round where single ones are timed.
    commits: usize,
    /// Pages of the store that is opened.
    pages: u64,
    /// Bytes of deltas in the log of the store that is opened.
    replayed_bytes: u64,
}

impl Plan {
    const FULL: Self = Self {
        rounds: 5,
        round: Duration::from_secs(2),
        commits: 1000,
        pages: (2 << 30) / PAGE_LEN,
        replayed_bytes: 256 << 20,
    };
    const QUICK: Self = Self {
        rounds: 3,
        round: Duration::from_millis(200),
        commits: 100,
        pages: (64 << 20) / PAGE_LEN,
        replayed_bytes: 8 << 20,
    };
}

/// The least that makes records durable in groups: what a store does beyond it is what a store costs.
/// Threads put records into a queue; the first to find no leader leads: it writes all that is queued in one
/// piece and syncs once. The file is wholly written beforehand, as a log segment is, and used in a circle.
struct RawLog {
    file: File,
    len: u64,
    state: Mutex<RawState>,
    progress: Condvar,
}

#[derive(Default)]
struct RawState {
    queue: Vec<u8>,
    /// Records queued and records durable since the beginning.
    queued: u64,
    durable: u64,
    offset: u64,
    led: bool,
}

impl RawLog {
    fn new(path: &Path) -> Self {
        let len = 256 << 20;
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        for at in (0..len).step_by(1 << 20) {
            file.write_all_at(&[0; 1 << 20], at).unwrap();
        }
        file.sync_all().unwrap();
        Self { file, len, state: Mutex::default(), progress: Condvar::new() }
    }

    /// Returns when the record is durable.
    fn commit(&self, record: &[u8; RECORD_LEN]) {
        let mut state = self.state.lock().unwrap();
        state.queue.extend_from_slice(record);
        state.queued += 1;
        let own = state.queued;
        while state.durable < own {
            if state.led {
                state = self.progress.wait(state).unwrap();
                continue;
            }
            state.led = true;
            let group = std::mem::take(&mut state.queue);
            let (offset, last) = (state.offset, state.queued);
            // The next group goes behind this one, or to the start if it might not fit.
            let end = offset + group.len() as u64;
            state.offset = if end + (THREADS * RECORD_LEN) as u64 > self.len { 0 } else { end };
            drop(state);
            self.file.write_all_at(&group, offset).unwrap();
            self.file.sync_data().unwrap();
            state = self.state.lock().unwrap();
            state.durable = last;
            state.led = false;
            self.progress.notify_all();
        }
    }
}

/// Something that makes 4 KiB records survive.
enum Subject {
    Raw(RawLog),
    Store(Box<Store>, Vec<PageId>),
}

const VARIANTS: [(&str, Option<(LogIo, Ack)>); 6] = [
    ("raw pwrite + fdatasync", None),
    ("durable, mapped", Some((LogIo::Mapped, Ack::Durable))),
    ("durable, buffered", Some((LogIo::Buffered, Ack::Durable))),
    ("durable, direct", Some((LogIo::Direct, Ack::Durable))),
    ("logged, mapped", Some((LogIo::Mapped, Ack::Logged))),
    ("logged, buffered", Some((LogIo::Buffered, Ack::Logged))),
];

impl Subject {
    fn new(directory: &Path, variant: Option<(LogIo, Ack)>) -> Self {
        let Some((log_io, ack)) = variant else { return Self::Raw(RawLog::new(&directory.join("raw"))) };
        let store = Store::open(directory.join("store"), options().log_io(log_io).ack(ack)).unwrap();
        let mut batch = store.batch();
        for _ in 0..THREADS {
            batch.create(PAGE_LEN, Place::Host);
        }
        let committed = store.commit(batch).unwrap();
        store.wait_durable(committed.position.lsn).unwrap();
        Self::Store(Box::new(store), committed.pages)
    }

    /// Commit number `count` of a thread.
    fn commit(&self, thread: usize, count: u64, record: &[u8; RECORD_LEN]) {
        match self {
            Self::Raw(raw) => raw.commit(record),
            Self::Store(store, pages) => {
                let mut batch = store.batch();
                batch.write(pages[thread], count * RECORD_LEN as u64 % PAGE_LEN, record);
                store.commit(batch).unwrap();
            }
        }
    }
}

fn commits_per_second(plan: &Plan, root: &Path) {
    let mut rates = vec![Vec::new(); VARIANTS.len()];
    for _ in 0..plan.rounds {
        for (rates, (_, variant)) in rates.iter_mut().zip(VARIANTS) {
            let directory = tempfile::tempdir_in(root).unwrap();
            rates.push(rate(&Subject::new(directory.path(), variant), plan.round));
        }
    }
    println!("commits/s, {THREADS} threads, {RECORD_LEN} bytes each");
    let rates: Vec<f64> = rates.into_iter().map(median).collect();
    for ((name, _), rate) in VARIANTS.iter().zip(&rates) {
        println!("  {name:<26}{rate:>10.0}{:>10.2} x raw", rate / rates[0]);
    }
    println!();
}

fn rate(subject: &Subject, round: Duration) -> f64 {
    let over = AtomicBool::new(false);
    let total = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (over, total) = (&over, &total);
            scope.spawn(move || {
                let mut count = 0;
                while !over.load(Ordering::Relaxed) {
                    subject.commit(thread, count, &[count as u8; RECORD_LEN]);
                    count += 1;
                    if started.elapsed() >= round {
                        over.store(true, Ordering::Relaxed);
                    }
                }
                total.fetch_add(count, Ordering::Relaxed);
            });
        }
    });
    total.into_inner() as f64 / started.elapsed().as_secs_f64()
}

fn latency(plan: &Plan, root: &Path) {
    let variants = &VARIANTS[..4];
    let mut times = vec![Vec::new(); variants.len()];
    for _ in 0..plan.rounds {
        for (times, (_, variant)) in times.iter_mut().zip(variants) {
            let directory = tempfile::tempdir_in(root).unwrap();
            let subject = Subject::new(directory.path(), *variant);
            for count in 0..plan.commits as u64 {
                let started = Instant::now();
                subject.commit(0, count, &[count as u8; RECORD_LEN]);
                times.push(started.elapsed());
            }
        }
    }
    println!("durable commit, 1 thread, {RECORD_LEN} bytes           p50       p99");
    let mut raw = None;
    for ((name, _), mut times) in variants.iter().zip(times) {
        times.sort_unstable();
        let (p50, p99) = (micros(times[times.len() / 2]), micros(times[times.len() * 99 / 100]));
        let raw = *raw.get_or_insert(p50);
        println!("  {name:<36}{p50:>6.0} µs{p99:>7.0} µs{:>8.2} x raw p50", p50 / raw);
    }
    println!();
}

fn logged_cost(plan: &Plan, root: &Path) {
    let variants = &VARIANTS[4..];
    let count = 50 * plan.commits as u32;
    let mut costs = vec![Vec::new(); variants.len()];
    for _ in 0..plan.rounds {
        for (costs, (_, variant)) in costs.iter_mut().zip(variants) {
            let directory = tempfile::tempdir_in(root).unwrap();
            let Subject::Store(store, pages) = Subject::new(directory.path(), *variant) else { continue };
            let started = Instant::now();
            for index in 0..u64::from(count) {
                let mut batch = store.batch();
                batch.write(pages[0], index * 256 % PAGE_LEN, &[index as u8; 256]);
                store.commit(batch).unwrap();
            }
            costs.push(micros(started.elapsed() / count));
        }
    }
    println!("logged commit, 1 thread, 256 bytes, mean over {count}");
    for ((name, _), costs) in variants.iter().zip(costs) {
        println!("  {name:<36}{:>6.2} µs", median(costs));
    }
    println!();
}

/// A store in a new directory, with pages that are all different.
fn large_store(plan: &Plan, root: &Path) -> (tempfile::TempDir, Store, Vec<PageId>) {
    let directory = tempfile::tempdir_in(root).unwrap();
    let store = Store::open(directory.path(), options()).unwrap();
    let mut pages = Vec::new();
    while (pages.len() as u64) < plan.pages {
        let mut batch = store.batch();
        for index in 0..1024.min(plan.pages - pages.len() as u64) {
            let page = batch.create(PAGE_LEN, Place::Host);
            batch.fill(page, 0, PAGE_LEN, &(index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        pages.extend(store.commit(batch).unwrap().pages);
    }
    (directory, store, pages)
}

/// Opens a large store, as a share of reading its files from the first to the last byte.
fn opening(plan: &Plan, root: &Path) {
    let (directory, store, pages) = large_store(plan, root);
    // One only: a second would double the files, and opening reads the images of one.
    store.snapshot().unwrap();
    store.close().unwrap();
    println!("opening {} pages of {PAGE_LEN} bytes              open      read", plan.pages);
    open_and_read(plan, directory.path(), "after a snapshot");

    let store = Store::open(directory.path(), options()).unwrap();
    for index in 0..plan.replayed_bytes / RECORD_LEN as u64 {
        // Steps that share no factor with a power of two reach every page and every place in it.
        let page = pages[(index * 40_503 % plan.pages) as usize];
        let mut batch = store.batch();
        batch.write(page, index * RECORD_LEN as u64 % PAGE_LEN, &[index as u8; RECORD_LEN]);
        store.commit(batch).unwrap();
    }
    store.close().unwrap();
    open_and_read(plan, directory.path(), &format!("with {} MiB of deltas", plan.replayed_bytes >> 20));
}

fn open_and_read(plan: &Plan, directory: &Path, what: &str) {
    let files = files(directory);
    let bytes: u64 = files.iter().map(|path| path.metadata().unwrap().len()).sum();
    for (cache, direct) in [("cold", true), ("warm", false)] {
        let (mut reads, mut opens) = (Vec::new(), Vec::new());
        for _ in 0..plan.rounds {
            // Opening writes a little, so that the files are listed anew.
            let files = self::files(directory);
            if !direct {
                read(&files, false);
            }
            let started = Instant::now();
            read(&files, direct);
            reads.push(started.elapsed().as_secs_f64());
            if direct {
                forget(&files);
            }
            let started = Instant::now();
            let store = Store::open(directory, options()).unwrap();
            opens.push(started.elapsed().as_secs_f64());
            assert_eq!(store.pages().unwrap().len() as u64, plan.pages);
            store.close().unwrap();
        }
        let (open, read) = (median(opens), median(reads));
        let name = format!("{what}, {cache}, {} MiB", bytes >> 20);
        println!("  {name:<42}{open:>7.2} s{read:>8.2} s{:>8.2} x reading", open / read);
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in ["log", "pages", "snapshots"] {
        let entries = std::fs::read_dir(directory.join(folder)).unwrap();
        files.extend(entries.map(|entry| entry.unwrap().path()));
    }
    files.sort();
    files
}

/// Reads files one after the other by one thread, in pieces of 1 MiB.
fn read(files: &[PathBuf], direct: bool) {
    // Page-aligned, as direct reads demand.
    let mut piece = MmapMut::map_anon(1 << 20).unwrap();
    for path in files {
        let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path).unwrap();
        let mut at = 0;
        loop {
            let len = file.read_at(&mut piece, at).unwrap();
            at += len as u64;
            if len < piece.len() {
                break;
            }
        }
    }
}

/// Asks the kernel to drop what it has cached of these files, which are synced.
fn forget(files: &[PathBuf]) {
    for path in files {
        rustix::fs::fadvise(File::open(path).unwrap(), 0, None, Advice::DontNeed).unwrap();
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
