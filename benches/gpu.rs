//! What pages on a GPU cost: applying after logging, many deltas in one batch, reading back, recovery, memory.
//!
//! `cargo bench -p remanent --bench gpu`; needs a GPU. The store lies in `REMANENT_BENCH_DIR`, or else in the
//! system's folder for temporary files; `REMANENT_BENCH_GIB` is the size of the store that is recovered.

#![expect(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use remanent::device::cuda::CudaDevice;
use remanent::device::{
    Command, CommandList, Device, Lane, MemoryId, Payload, Piece, PieceKind, Span, StagingSpan,
};
use remanent::{Ack, DeviceChoice, Options, PageId, Place, Result, Store};
use rustix::fs::OFlags;

const PLACE: Place = Place::Device(0);
const DELTA_LEN: usize = 256;

fn main() -> Result<()> {
    let root = std::env::var_os("REMANENT_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let gib = std::env::var("REMANENT_BENCH_GIB").ok().and_then(|gib| gib.parse().ok()).unwrap_or(4);
    let before = resident_bytes();
    let device = Arc::new(CudaDevice::open(0)?);
    println!("{} in {}\n", device.label(), root.display());
    let context = resident_bytes();
    println!("{:<52}{:>9} MiB", "host memory that context and kernels take", mib(context - before));
    one_delta(&*device)?;
    many_deltas(&*device)?;
    copies(&*device)?;
    drop(device);
    applied_after_logged(&root)?;
    recovery(&root, gib, context)
}

/// A list of one delta, from submit to its fence.
fn one_delta(device: &dyn Device) -> Result<()> {
    let page = device.allocate(PLACE, 64 << 10)?;
    let mut staging = vec![device.staging(4096)?];
    let (mut submitted, mut done) = (Times::default(), Times::default());
    for round in 0..5000_u64 {
        let target =
            Span { memory: page, offset: round * DELTA_LEN as u64 % (64 << 10), len: DELTA_LEN as u64 };
        let payload = Payload::Staging { index: 0, offset: 0 };
        let pieces = vec![Piece { target, payload, kind: PieceKind::Dense }];
        let started = Instant::now();
        let list =
            device.submit(Lane::Apply, CommandList { commands: vec![Command::Apply { pieces }], staging })?;
        submitted.add(started.elapsed());
        staging = list.finish(device)?;
        done.add(started.elapsed());
    }
    submitted.print("one delta of 256 B: submit");
    done.print("one delta of 256 B: submit to fence");
    device.release(page)
}

/// 10,000 deltas over 10,000 pages in one list.
fn many_deltas(device: &dyn Device) -> Result<()> {
    const PAGES: usize = 10_000;
    let pages = (0..PAGES).map(|_| device.allocate(PLACE, 16 << 10)).collect::<Result<Vec<MemoryId>>>()?;
    let mut staging = vec![device.staging(PAGES * DELTA_LEN)?];
    let (mut submitted, mut done) = (Times::default(), Times::default());
    for round in 0..200_u64 {
        let piece = |(number, page): (usize, &MemoryId)| Piece {
            target: Span { memory: *page, offset: round * 64 % 8192, len: DELTA_LEN as u64 },
            payload: Payload::Staging { index: 0, offset: number * DELTA_LEN },
            kind: PieceKind::Dense,
        };
        let pieces = pages.iter().enumerate().map(piece).collect();
        let list = CommandList { commands: vec![Command::Apply { pieces }], staging };
        let started = Instant::now();
        let list = device.submit(Lane::Apply, list)?;
        let queued = started.elapsed();
        submitted.add(queued);
        staging = list.finish(device)?;
        done.add(started.elapsed() - queued);
    }
    submitted.print("10,000 deltas of 256 B, 10,000 pages: submit");
    done.print("the same: from there to the fence");
    pages.into_iter().try_for_each(|page| device.release(page))
}

/// Long copies both ways, and a short one beside long ones of the other lane.
fn copies(device: &dyn Device) -> Result<()> {
    const LEN: usize = 64 << 20;
    let page = device.allocate(PLACE, LEN as u64)?;
    let (all, staged) =
        (Span { memory: page, offset: 0, len: LEN as u64 }, StagingSpan { index: 0, offset: 0, len: LEN });
    let mut staging = vec![device.staging(LEN)?];
    let (mut up, mut down) = (Times::default(), Times::default());
    for _ in 0..20 {
        for (times, command) in [
            (&mut up, Command::Upload { source: staged, target: all }),
            (&mut down, Command::Download { source: all, target: staged }),
        ] {
            let started = Instant::now();
            let list = CommandList { commands: vec![command], staging };
            staging = device.submit(Lane::Drain, list)?.finish(device)?;
            times.add(started.elapsed());
        }
    }
    let rate = |times: &mut Times| LEN as f64 / times.quantile(0.5).as_secs_f64() / 1e9;
    println!("{:<52}{:>9.1} GB/s up, {:.1} down", "64 MiB at a time", rate(&mut up), rate(&mut down));

    let short = Span { memory: page, offset: 0, len: 4096 };
    let mut small = vec![device.staging(4096)?];
    let mut times = Times::default();
    std::thread::scope(|scope| -> Result<()> {
        let long = scope.spawn(move || -> Result<()> {
            for _ in 0..200 {
                let commands = vec![Command::Download { source: all, target: staged }];
                staging = device.submit(Lane::Drain, CommandList { commands, staging })?.finish(device)?;
            }
            Ok(())
        });
        while !long.is_finished() {
            let target = StagingSpan { index: 0, offset: 0, len: 4096 };
            let commands = vec![Command::Download { source: short, target }];
            let started = Instant::now();
            small = device.submit(Lane::Apply, CommandList { commands, staging: small })?.finish(device)?;
            times.add(started.elapsed());
        }
        long.join().expect("the thread of long copies")
    })?;
    times.print("4 KiB down beside 64 MiB down, other lane");
    device.release(page)
}

/// Through the store: from the acknowledgement `Logged` to `Applied`, and a read back.
fn applied_after_logged(root: &Path) -> Result<()> {
    let directory = tempfile::tempdir_in(root).expect("a folder for the store");
    let store = Store::open(directory.path(), Options::default().device(DeviceChoice::Cuda(0)))?;
    let mut batch = store.batch();
    batch.create(1 << 20, PLACE);
    let page = store.commit(batch)?.pages[0];
    let (mut applied, mut read) = (Times::default(), Times::default());
    let mut bytes = [0; DELTA_LEN];
    for round in 0..3000_u64 {
        let offset = round * DELTA_LEN as u64 % (1 << 20);
        let mut batch = store.batch();
        batch.write(page, offset, &[round as u8; DELTA_LEN]);
        let ticket = store.submit(batch)?;
        let logged = Instant::now();
        ticket.wait(Ack::Applied)?;
        applied.add(logged.elapsed());
        let started = Instant::now();
        store.read(page, offset, &mut bytes)?;
        read.add(started.elapsed());
        assert_eq!(bytes, [round as u8; DELTA_LEN]);
    }
    applied.print("Applied after Logged, one delta of 256 B");
    read.print("read of 256 B");
    store.close()
}

/// Opens a store of this size, from a snapshot alone.
fn recovery(root: &Path, gib: u64, context: u64) -> Result<()> {
    const PAGE_LEN: u64 = 1 << 20;
    let directory = tempfile::tempdir_in(root).expect("a folder for the store");
    let options = || Options::default().device(DeviceChoice::Cuda(0)).segment_len(64 << 20);
    let store = Store::open(directory.path(), options())?;
    let mut content = vec![0; PAGE_LEN as usize];
    let mut pages: Vec<PageId> = Vec::new();
    for page in 0..gib << 10 {
        content.chunks_exact_mut(8).enumerate().for_each(|(at, word)| {
            word.copy_from_slice(&(page << 32 ^ at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        });
        let mut batch = store.batch();
        let new = batch.create(PAGE_LEN, PLACE);
        batch.write(new, 0, &content);
        pages.extend(store.commit(batch)?.pages);
    }
    forget_peak();
    let print_memory = |while_what: &str| {
        let above = mib(peak_bytes().saturating_sub(context));
        println!("{:<52}{above:>9} MiB", format!("host memory above the context, {while_what}"));
        forget_peak();
    };
    let started = Instant::now();
    store.snapshot()?;
    println!("{:<52}{:>9.2} s", format!("a snapshot of {gib} GiB"), started.elapsed().as_secs_f64());
    print_memory("at most, log windows among it");
    store.close()?;

    let gigabytes = (gib << 30) as f64 / 1e9;
    for _ in 0..2 {
        let took = read_images(&directory.path().join("pages")).as_secs_f64();
        let rate = gigabytes / took;
        println!("{:<52}{took:>9.2} s, {rate:.2} GB/s", "reading its images past the cache, 4 threads");
        let started = Instant::now();
        let store = Store::open(directory.path(), options())?;
        let took = started.elapsed().as_secs_f64();
        let rate = gigabytes / took;
        println!("{:<52}{took:>9.2} s, {rate:.2} GB/s", format!("opening a store of {gib} GiB"));
        print_memory("the same");
        let mut found = vec![0; PAGE_LEN as usize];
        store.read(*pages.last().expect("at least one GiB"), 0, &mut found)?;
        assert_eq!(found, content);
        store.close()?;
    }
    Ok(())
}

/// Reads every file of a folder as fast as four threads can, past the page cache where that is possible: what no
/// recovery can beat.
fn read_images(folder: &Path) -> Duration {
    const BLOCK: u64 = 4 << 20;
    let entries =
        std::fs::read_dir(folder).expect("a store has images").map(|entry| entry.expect("one").path());
    let open = |flags: OFlags, path: &Path| {
        OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path).ok()
    };
    let files: Vec<(File, u64)> = entries
        .filter_map(|path| open(OFlags::DIRECT, &path).or_else(|| open(OFlags::empty(), &path)))
        .map(|file| {
            let len = file.metadata().expect("an open file has a length").len();
            (file, len)
        })
        .collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let files = &files;
            scope.spawn(move || {
                // Page-aligned, as direct reads demand.
                let mut block = MmapMut::map_anon(BLOCK as usize).expect("there is memory");
                for (file, len) in files {
                    for at in (0..*len).step_by(BLOCK as usize).skip(thread).step_by(4) {
                        file.read_at(&mut block, at).expect("what was written can be read");
                    }
                }
            });
        }
    });
    started.elapsed()
}

/// Times of one kind.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    fn quantile(&mut self, quantile: f64) -> Duration {
        self.0.sort_unstable();
        self.0[((self.0.len() - 1) as f64 * quantile) as usize]
    }

    fn print(mut self, what: &str) {
        let [half, most] = [0.5, 0.99].map(|quantile| self.quantile(quantile).as_secs_f64() * 1e6);
        println!("{what:<52}{half:>9.1} µs p50{most:>9.1} µs p99");
    }
}

/// Bytes of host memory that the process has in use.
fn resident_bytes() -> u64 {
    status_bytes("VmRSS:")
}

/// The most that the process had in use since [`forget_peak`].
fn peak_bytes() -> u64 {
    status_bytes("VmHWM:")
}

/// Lets the peak begin anew.
fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("a process may forget its own peak");
}

fn status_bytes(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a process knows its own status");
    let line = status.lines().find(|line| line.starts_with(what)).expect("memory in use is listed");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number of KiB");
    kib << 10
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}
