//! `remanent-bench ceilings`: measures the machine without a store.

use std::time::{Duration, Instant};

use remanent::device::{
    Command, CommandList, Device, Lane, Payload, Piece, PieceKind, Span, Staging, StagingSpan,
};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::latency::Latency;
use crate::room::{BenchStop, Room, size};
use crate::transfer::{self, Cache};
use crate::{Common, Measure};

const EXAMPLES: &str = "\
Disk: 4 threads write random bytes to separate files, past the page cache, and sync them; then 4 threads read the \
files back, past the page cache and through it. Host: a copy and a CRC-32 by one thread. Device: copies of 64 MiB \
between pinned host memory and the device, and on the device; a list of one delta from submission to fence, which is \
the minimum for Applied; a list of 10,000 deltas; a copy of 4 KiB to the host during long copies.

The raw group-commit loop, the ceiling of durable commits, is measured by `remanent-bench commit`.

Examples:
  remanent-bench ceilings /mnt/fast
  remanent-bench ceilings /mnt/fast --bytes 4GiB --device cuda:0";

/// The speed of disk, host and device without a store
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CeilingsBench {
    #[command(flatten)]
    common: Common,
    /// Number of bytes to write and read
    #[arg(long, default_value = "256MiB")]
    bytes: Size,
}

/// Length of a long copy in bytes.
const COPY_LEN: usize = 64 << 20;
/// Length of a short copy in bytes.
const SHORT_LEN: usize = 4096;
/// Length of a delta in bytes.
const DELTA_LEN: usize = 256;
/// Number of deltas in a long list, each for a separate page.
const DELTAS: usize = 10_000;
/// Number of lists with one delta per round.
const LISTS: u64 = 1000;
/// Number of long copies per round.
const COPIES: usize = 8;

impl Measure for CeilingsBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        if self.bytes.0 < 1 << 20 {
            return Err(Failure::Environment("--bytes must be at least 1MiB".to_owned()));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        self.bytes.0
    }

    fn steps(&self) -> u64 {
        3 * u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let mut left_out = Vec::new();
        let mut groups = vec![disk(room, self.bytes.0, self.common.rounds)?];
        groups.push(host(room, self.common.rounds)?);
        if room.is_gpu() {
            groups.push(device(room, self.common.rounds)?);
        } else {
            left_out.push("copies and launches of the device: no GPU is in use".to_owned());
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        if !transfer::knows_direct(&room.path("disk"))? {
            left_out.push("direct I/O: this file system does not support O_DIRECT".to_owned());
        }
        Ok(Findings { bench: "ceilings", settings, groups, left_out })
    }
}

fn disk(room: &Room, bytes: u64, rounds: u32) -> Result<Group, BenchStop> {
    let mut group = Group::new(format!("disk: {}, {} threads", size(bytes), transfer::THREADS));
    let names = ["write past the cache, synced", "read past the cache", "read through the cache"];
    let [mut write, mut cold, mut warm] = names.map(|name| Figure::new(name, Unit::BytesPerSecond));
    for _ in 0..rounds {
        room.step("disk")?;
        let rate = |took: Duration| bytes as f64 / took.as_secs_f64();
        let (files, took) = transfer::write(&room.path("disk"), bytes)?;
        write.push(rate(took));
        transfer::forget(&files)?;
        cold.push(rate(transfer::read(&files, Cache::Past)?));
        // The first read fills the cache.
        transfer::read(&files, Cache::Through)?;
        warm.push(rate(transfer::read(&files, Cache::Through)?));
        transfer::remove(&files)?;
    }
    group.figures = vec![write, cold, warm];
    Ok(group)
}

fn host(room: &Room, rounds: u32) -> Result<Group, BenchStop> {
    let mut group = Group::new(format!("host: {}, one thread", size(COPY_LEN as u64)));
    let names = ["copy, bytes moved once", "copy to memory never touched", "CRC-32"];
    let [mut copy, mut touch, mut sum] = names.map(|name| Figure::new(name, Unit::BytesPerSecond));
    let source = vec![7_u8; COPY_LEN];
    let mut target = vec![1_u8; COPY_LEN];
    for _ in 0..rounds {
        room.step("host")?;
        let rate = |started: Instant| COPY_LEN as f64 / started.elapsed().as_secs_f64();
        let started = Instant::now();
        target.copy_from_slice(&source);
        copy.push(rate(started));
        let started = Instant::now();
        let fresh = source.clone();
        touch.push(rate(started));
        let started = Instant::now();
        // Used, so that the compiler cannot remove the work.
        let sums = (crc32fast::hash(&target), fresh[COPY_LEN - 1]);
        std::hint::black_box(sums);
        sum.push(rate(started));
    }
    group.figures = vec![copy, touch, sum];
    Ok(group)
}

fn device(room: &Room, rounds: u32) -> Result<Group, BenchStop> {
    let device = &*room.device;
    let mut group = Group::new("device");
    let names = ["pinned host to device", "device to pinned host", "copy on the device, read and written"];
    let [mut up, mut down, mut copy] = names.map(|name| Figure::new(name, Unit::BytesPerSecond));
    let names = ["one delta of 256 B", "10,000 deltas of 256 B", "4 KiB to the host during long copies"];
    let [mut one, mut many, mut beside] = names.map(|name| {
        let mut figure = Figure::new(name, Unit::PerSecond("lists"));
        figure.latency = Some(Latency::new());
        figure
    });
    let pages = DevicePages::new(room)?;
    for _ in 0..rounds {
        room.step("device")?;
        let (source, target) = (pages.whole(0), pages.whole(1));
        let staged = StagingSpan { index: 0, offset: 0, len: COPY_LEN };
        // Each uses the lane of long copies. Copies to or from the host are done in pieces of 1 MiB, so that
        // short ones need not wait.
        for (figure, lane, command, moved) in [
            (&mut up, Lane::Drain, Command::Upload { source: staged, target }, COPY_LEN),
            (&mut down, Lane::Drain, Command::Download { source, target: staged }, COPY_LEN),
            (&mut copy, Lane::Apply, Command::Copy { source, target }, 2 * COPY_LEN),
        ] {
            let mut staging = vec![device.staging(COPY_LEN)?];
            let mut took = Vec::new();
            for _ in 0..COPIES {
                let time;
                (time, staging) = list(device, lane, vec![command.clone()], staging)?;
                took.push(time.as_secs_f64());
            }
            figure.push(moved as f64 / super::figures::median(took));
        }
        list_rate(&mut one, LISTS, || pages.deltas(device, 1))?;
        list_rate(&mut many, 20, || pages.deltas(device, DELTAS))?;
        short_while_long(device, &pages, &mut beside)?;
    }
    pages.release(device)?;
    let mut context = Figure::new("context and kernels", Unit::Seconds);
    context.push(room.device_took.as_secs_f64());
    group.figures = vec![up, down, copy, one, many, beside, context];
    Ok(group)
}

/// Page memory for the device's figures.
struct DevicePages {
    long: [remanent::device::MemoryId; 2],
    short: Vec<remanent::device::MemoryId>,
}

impl DevicePages {
    fn new(room: &Room) -> Result<Self, BenchStop> {
        let allocate = |len: usize| room.device.allocate(room.place, len as u64);
        let short = (0..DELTAS).map(|_| allocate(4 * SHORT_LEN)).collect::<Result<_, _>>()?;
        Ok(Self { long: [allocate(COPY_LEN)?, allocate(COPY_LEN)?], short })
    }

    fn whole(&self, index: usize) -> Span {
        Span { memory: self.long[index], offset: 0, len: COPY_LEN as u64 }
    }

    /// Returns the time for a list of `count` deltas, each to a separate page.
    fn deltas(&self, device: &dyn Device, count: usize) -> Result<Duration, BenchStop> {
        let piece = |(number, memory): (usize, &remanent::device::MemoryId)| Piece {
            target: Span { memory: *memory, offset: 64, len: DELTA_LEN as u64 },
            payload: Payload::Staging { index: 0, offset: number * DELTA_LEN },
            kind: PieceKind::Dense,
        };
        let pieces = self.short.iter().take(count).enumerate().map(piece).collect();
        let staging = vec![device.staging(count * DELTA_LEN)?];
        Ok(list(device, Lane::Apply, vec![Command::Apply { pieces }], staging)?.0)
    }

    fn release(self, device: &dyn Device) -> Result<(), BenchStop> {
        let all = self.long.into_iter().chain(self.short);
        Ok(all.into_iter().try_for_each(|memory| device.release(memory))?)
    }
}

/// Submits a list and returns the time until its fence, with the staging that it used.
pub fn list(
    device: &dyn Device,
    lane: Lane,
    commands: Vec<Command>,
    staging: Vec<Staging>,
) -> Result<(Duration, Vec<Staging>), BenchStop> {
    let started = Instant::now();
    let staging = device.submit(lane, CommandList { commands, staging })?.finish(device)?;
    Ok((started.elapsed(), staging))
}

/// Measures `count` lists one after the other.
fn list_rate(
    figure: &mut Figure,
    count: u64,
    mut run: impl FnMut() -> Result<Duration, BenchStop>,
) -> Result<(), BenchStop> {
    let mut all = Latency::new();
    let mut sum = Duration::ZERO;
    for _ in 0..count {
        let time = run()?;
        all.record(time);
        sum += time;
    }
    figure.push(count as f64 / sum.as_secs_f64());
    if let Some(latency) = &mut figure.latency {
        latency.add(&all);
    }
    Ok(())
}

/// Measures short copies to the host on one lane while long ones run on another.
fn short_while_long(device: &dyn Device, pages: &DevicePages, figure: &mut Figure) -> Result<(), BenchStop> {
    let (long, short) = (pages.whole(0), Span { len: SHORT_LEN as u64, ..pages.whole(1) });
    std::thread::scope(|scope| {
        let downloads = scope.spawn(move || -> Result<(), BenchStop> {
            let mut staging = vec![device.staging(COPY_LEN)?];
            for _ in 0..10 * COPIES {
                let target = StagingSpan { index: 0, offset: 0, len: COPY_LEN };
                let commands = vec![Command::Download { source: long, target }];
                (_, staging) = list(device, Lane::Drain, commands, staging)?;
            }
            Ok(())
        });
        let mut staging = vec![device.staging(SHORT_LEN)?];
        let mut all = Latency::new();
        let started = Instant::now();
        // Runs at least once: on a busy machine the long copies may be done before this thread starts.
        loop {
            let target = StagingSpan { index: 0, offset: 0, len: SHORT_LEN };
            let time;
            let commands = vec![Command::Download { source: short, target }];
            (time, staging) = list(device, Lane::Apply, commands, staging)?;
            all.record(time);
            if downloads.is_finished() {
                break;
            }
        }
        figure.push(all.count() as f64 / started.elapsed().as_secs_f64());
        if let Some(latency) = &mut figure.latency {
            latency.add(&all);
        }
        downloads.join().expect("no panic")
    })
}
