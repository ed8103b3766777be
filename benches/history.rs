//! What remembering costs: incremental snapshots beside full ones, whole pages written once, followers.
//!
//! `cargo bench -p remanent --bench history`; with `REMANENT_BENCH_QUICK=1` in seconds, for a look only. The
//! stores lie in `REMANENT_BENCH_DIR`, or else in the system's folder for temporary files. What is compared
//! takes turns; medians over the rounds are printed.

#![expect(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remanent::{
    Ack, Compression, FollowFrom, Follower, LogIo, Lsn, Metadata, Options, PageId, Place, Store, WriteBatch,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Length of a page, in bytes.
const PAGE_LEN: u64 = 64 << 10;
/// Length of the pages that are imported, and what a batch of them takes.
const BULK_PAGE_LEN: usize = 8 << 20;
const BULK_BATCH_LEN: usize = 64 << 20;

/// How much is measured.
struct Plan {
    rounds: usize,
    /// Pages of the store of which snapshots are taken.
    pages: u64,
    /// Bytes imported.
    bulk_bytes: usize,
    /// Batches followed.
    batches: u64,
    /// How long a follower waits for nothing.
    idle: Duration,
}

impl Plan {
    const FULL: Self = Self {
        rounds: 5,
        pages: (4 << 30) / PAGE_LEN,
        bulk_bytes: 1 << 30,
        batches: 5000,
        idle: Duration::from_secs(10),
    };
    const QUICK: Self = Self {
        rounds: 3,
        pages: (64 << 20) / PAGE_LEN,
        bulk_bytes: 128 << 20,
        batches: 200,
        idle: Duration::from_secs(1),
    };
}

fn main() -> Result<()> {
    let plan = if std::env::var_os("REMANENT_BENCH_QUICK").is_some() { Plan::QUICK } else { Plan::FULL };
    let root = std::env::var_os("REMANENT_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    println!("in {}, {} processors\n", root.display(), std::thread::available_parallelism()?);
    snapshots(&plan, &root)?;
    bulk(&plan, &root)?;
    following(&plan, &root)
}

/// Of a store whose snapshots are taken by nobody but the caller.
fn options() -> Options {
    Options::default().snapshot_log_bytes(None).snapshot_interval(None).compression(Compression::Off)
}

/// A snapshot after every page changed, and one after one page in a hundred did. Bytes are those of the files
/// that a snapshot makes; the time ends when it is verified.
fn snapshots(plan: &Plan, root: &Path) -> Result<()> {
    let directory = tempfile::tempdir_in(root)?;
    let store = Store::open(directory.path(), options())?;
    let mut batch = store.batch();
    for _ in 0..plan.pages {
        batch.create(PAGE_LEN, Place::Host);
    }
    let pages = store.commit(batch)?.pages;
    let (mut full, mut first, mut incremental) = (Taken::default(), Taken::default(), Taken::default());
    for round in 0..plan.rounds as u64 {
        for pages in pages.chunks(1024) {
            let mut batch = store.batch();
            for page in pages {
                fill(&mut batch, *page, round);
            }
            store.commit(batch)?;
        }
        full.take(&store, directory.path())?;
        // The first one behind a full one also removes the images of the full one before.
        for taken in [&mut first, &mut incremental] {
            let mut batch = store.batch();
            for page in pages.iter().skip(round as usize).step_by(100) {
                batch.write(*page, 0, &[round as u8; 64]);
            }
            store.commit(batch)?;
            taken.take(&store, directory.path())?;
        }
    }
    println!("snapshot of {} pages of {PAGE_LEN} bytes, verified", plan.pages);
    let all = full.print("every page changed", None);
    first.print("1 % changed, old files go", Some(all));
    incremental.print("1 % changed", Some(all));
    println!();
    Ok(())
}

/// Eight bytes that tell pages and rounds apart, repeated.
fn fill(batch: &mut WriteBatch, page: PageId, round: u64) {
    let pattern = (page.0 + (round << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    batch.fill(page, 0, PAGE_LEN, &pattern.to_le_bytes());
}

/// Snapshots of one kind.
#[derive(Default)]
struct Taken {
    seconds: Vec<f64>,
    bytes: Vec<f64>,
}

impl Taken {
    fn take(&mut self, store: &Store, directory: &Path) -> Result<()> {
        store.wait_durable(store.lsn())?;
        let (before, started) = (files(directory)?, Instant::now());
        store.snapshot()?;
        self.seconds.push(started.elapsed().as_secs_f64());
        let new = files(directory)?.into_iter().filter(|path| !before.contains(path));
        self.bytes.push(byte_len(new)? as f64);
        Ok(())
    }

    fn print(self, what: &str, full: Option<(f64, f64)>) -> (f64, f64) {
        let (seconds, bytes) = (median(self.seconds), median(self.bytes));
        print!("  {what:<26}{:>12.1} MiB{:>9.3} s", bytes / f64::from(1 << 20), seconds);
        if let Some((full_seconds, full_bytes)) = full {
            print!("{:>9.4} x the bytes{:>8.4} x the time", bytes / full_bytes, seconds / full_seconds);
        }
        println!();
        (seconds, bytes)
    }
}

/// The files that snapshots make.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for folder in ["pages", "snapshots"] {
        for entry in std::fs::read_dir(directory.join(folder))? {
            files.push(entry?.path());
        }
    }
    Ok(files)
}

fn byte_len(files: impl IntoIterator<Item = PathBuf>) -> Result<u64> {
    files.into_iter().map(|path| Ok(path.metadata()?.len())).sum()
}

/// Pages made of bytes that are at hand, beside a file written and synced as often. Random bytes: they do not
/// compress.
fn bulk(plan: &Plan, root: &Path) -> Result<()> {
    let mut state = 1u64;
    let content: Vec<u8> =
        (0..BULK_PAGE_LEN / 8).flat_map(|_| next_random(&mut state).to_le_bytes()).collect();
    let batches = plan.bulk_bytes / BULK_BATCH_LEN;
    let (mut raw, mut stored, mut written) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let directory = tempfile::tempdir_in(root)?;
        let started = Instant::now();
        let mut file = File::create(directory.path().join("raw"))?;
        for _ in 0..batches {
            for _ in 0..BULK_BATCH_LEN / BULK_PAGE_LEN {
                file.write_all(&content)?;
            }
            file.sync_data()?;
        }
        raw.push(started.elapsed().as_secs_f64());
        drop(file);

        let directory = tempfile::tempdir_in(root)?;
        let store = Store::open(directory.path(), Options::default())?;
        let started = Instant::now();
        for _ in 0..batches {
            let mut batch = store.batch();
            for _ in 0..BULK_BATCH_LEN / BULK_PAGE_LEN {
                batch.create_from(content.clone(), Place::Host, None, Metadata::new());
            }
            let committed = store.commit(batch)?;
            store.wait_durable(committed.position.lsn)?;
        }
        stored.push(started.elapsed().as_secs_f64());
        store.snapshot()?;
        let bytes = byte_len(files(directory.path())?)? + store.stats().log.bytes;
        written.push(bytes as f64 / plan.bulk_bytes as f64);
    }
    let (raw, stored) = (median(raw), median(stored));
    println!("{} MiB of new pages in batches of {} MiB", plan.bulk_bytes >> 20, BULK_BATCH_LEN >> 20);
    println!("  file, write + fdatasync   {raw:>9.3} s");
    println!("  store, durable            {stored:>9.3} s{:>9.2} x the file's time", stored / raw);
    println!("  log, images, manifest after a snapshot{:>9.4} x the pages' bytes\n", median(written));
    Ok(())
}

/// From the return of a commit until a follower in another thread has the batch, and what a follower costs that
/// waits for nothing.
fn following(plan: &Plan, root: &Path) -> Result<()> {
    println!("follower, {} batches of 256 bytes          p50       p99     worst", plan.batches);
    for (ways, log_io, ack) in [
        ("logged, by stores", LogIo::Mapped, Ack::Logged),
        ("durable, by system calls", LogIo::Buffered, Ack::Durable),
    ] {
        let directory = tempfile::tempdir_in(root)?;
        let store = Store::open(directory.path(), options().log_io(log_io).ack(ack))?;
        let mut batch = store.batch();
        let page = batch.create(PAGE_LEN, Place::Host);
        let page = store.commit(batch)?.pages[page.index()];
        let mut follower = Follower::open(directory.path(), FollowFrom::Beginning)?;
        for gap in [Duration::ZERO, Duration::from_millis(5)] {
            let late = follow(plan, &store, page, &mut follower, gap)?;
            let (p50, p99, worst) = (late[late.len() / 2], late[late.len() * 99 / 100], late[late.len() - 1]);
            let what = format!("{ways}, {} ms between", gap.as_millis());
            println!("  {what:<36}{p50:>7.0} µs{p99:>7.0} µs{worst:>7.0} µs");
        }
        let before = processor_seconds();
        assert!(follower.next(plan.idle)?.is_none());
        let used = processor_seconds() - before;
        println!("  waiting for nothing{:>24.2} % of a processor", 100.0 * used / plan.idle.as_secs_f64());
    }
    Ok(())
}

/// How late batches come to a follower, in microseconds, ascending.
fn follow(
    plan: &Plan,
    store: &Store,
    page: PageId,
    follower: &mut Follower,
    gap: Duration,
) -> Result<Vec<f64>> {
    let until = Lsn(store.lsn().0 + plan.batches);
    let (committed, received) = std::thread::scope(|scope| -> Result<_> {
        let reader = scope.spawn(|| arrivals(follower, until));
        let mut committed = Vec::new();
        for index in 0..plan.batches {
            let mut batch = store.batch();
            batch.write(page, index * 256 % PAGE_LEN, &[index as u8; 256]);
            let commit = store.commit(batch)?;
            committed.push((commit.position.lsn, Instant::now()));
            pause(gap);
        }
        Ok((committed, reader.join().expect("the follower's thread")?))
    })?;
    let received: HashMap<Lsn, Instant> = received.into_iter().collect();
    let mut late: Vec<f64> = committed
        .iter()
        .map(|(lsn, at)| received[lsn].saturating_duration_since(*at).as_secs_f64() * 1e6)
        .collect();
    late.sort_by(f64::total_cmp);
    Ok(late)
}

#[expect(clippy::disallowed_methods, reason = "a writer that is idle between batches")]
fn pause(gap: Duration) {
    std::thread::sleep(gap);
}

/// When each batch up to `until` came.
fn arrivals(follower: &mut Follower, until: Lsn) -> Result<Vec<(Lsn, Instant)>> {
    let mut received = Vec::new();
    while follower.position().lsn < until {
        if let Some(batch) = follower.next(Duration::from_secs(10))? {
            received.push((batch.lsn(), Instant::now()));
        }
    }
    Ok(received)
}

/// Processor time of this process.
fn processor_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Xorshift.
fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
