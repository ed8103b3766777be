//! The ceilings of moves between tiers: the same bytes written, read and copied without a store.

use std::time::{Duration, Instant};

use remanent::Place;
use remanent::device::{Command, Lane, Span, StagingSpan};

use crate::ceilings;
use crate::figures::median;
use crate::room::{BenchStop, Room};
use crate::transfer::{self, Cache};

/// The maximum number of bytes for a round's ceilings.
const CEILING_BYTES: u64 = 64 << 20;
/// Length of a copy in bytes.
const COPY_LEN: usize = 8 << 20;
/// The names of the ceilings.
const WRITE: &str = "raw, 4 threads write past the cache, synced";
const READ: &str = "raw, 4 threads read through the cache";
const COPY: &str = "raw, a copy in host memory";
const UP: &str = "raw, pinned host to device";
const DOWN: &str = "raw, device to pinned host";

/// Returns the ceiling of moves from one place to another.
pub fn of(from: Place, to: Place) -> &'static str {
    match (from, to) {
        (_, Place::Disk) => WRITE,
        (Place::Disk, _) => READ,
        (Place::Device(_), Place::Device(_)) => COPY,
        (Place::Device(_), _) => DOWN,
        (_, Place::Device(_)) => UP,
        _ => COPY,
    }
}

/// Returns the ceiling of moves from one place to another, limited to those that [`rates`] measures. Without a GPU, the
/// rates of the bus are not measured.
pub fn in_room(room: &Room, from: Place, to: Place) -> &'static str {
    let ceiling = of(from, to);
    if !room.is_gpu() && [UP, DOWN].contains(&ceiling) { COPY } else { ceiling }
}

/// Returns the speed of the machine without a store, in bytes per second, measured with up to `bytes` bytes.
pub fn rates(room: &Room, bytes: u64) -> Result<Vec<(&'static str, f64)>, BenchStop> {
    let bytes = bytes.min(CEILING_BYTES);
    let of = |took: Duration| bytes as f64 / took.as_secs_f64();
    let (files, took) = transfer::write(&room.path("raw"), bytes)?;
    let mut rates = vec![(WRITE, of(took))];
    // The first read fills the cache.
    transfer::read(&files, Cache::Through)?;
    rates.push((READ, of(transfer::read(&files, Cache::Through)?)));
    transfer::remove(&files)?;
    let source = vec![7_u8; COPY_LEN];
    let mut target = vec![1_u8; COPY_LEN];
    let mut took = Vec::new();
    for _ in 0..8 {
        let started = Instant::now();
        target.copy_from_slice(&source);
        std::hint::black_box(&target);
        took.push(started.elapsed().as_secs_f64());
    }
    rates.push((COPY, COPY_LEN as f64 / median(took)));
    if room.is_gpu() {
        rates.extend(bus_rates(room)?);
    }
    Ok(rates)
}

/// Returns the speed of copies to the device and back.
fn bus_rates(room: &Room) -> Result<Vec<(&'static str, f64)>, BenchStop> {
    let memory = room.device.allocate(room.place, CEILING_BYTES)?;
    let staged = |at: usize| StagingSpan { index: 0, offset: at, len: COPY_LEN };
    let span = |at: usize| Span { memory, offset: at as u64, len: COPY_LEN as u64 };
    let mut staging = vec![room.device.staging(CEILING_BYTES as usize)?];
    let mut rates = Vec::new();
    for name in [UP, DOWN] {
        let copy = |at| match name {
            UP => Command::Upload { source: staged(at), target: span(at) },
            _ => Command::Download { source: span(at), target: staged(at) },
        };
        let commands: Vec<_> = (0..CEILING_BYTES as usize).step_by(COPY_LEN).map(copy).collect();
        let mut all = Vec::new();
        for _ in 0..8 {
            let took;
            (took, staging) = ceilings::list(&*room.device, Lane::Drain, commands.clone(), staging)?;
            all.push(took.as_secs_f64());
        }
        rates.push((name, CEILING_BYTES as f64 / median(all)));
    }
    room.device.release(memory)?;
    Ok(rates)
}
