//! `remanent-bench capture`: finds the changes of a state in caller-owned memory and makes them durable.

use std::time::{Duration, Instant};

use remanent::batch::{InitialCopy, Shadow, Width, WorkingCopy};
use remanent::device::{
    Command, DIGEST_CHUNK_LEN, DIGEST_LEN, DIGEST_SEED_LEN, Lane, Span, StagingSpan, digest_count, digest_key,
};
use remanent::options::MemoryOptions;
use remanent::{Ack, Place, Store};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::room::{self, BenchStop, Room, size};
use crate::{Common, Measure, ceilings};

const EXAMPLES: &str = "\
A state of --bytes is in the caller's memory on --device, and its pages of --page-len are on disk. One byte changes in \
each of --changed percent of all 64 KiB chunks, contiguous from the start or spread evenly. The capture finds the \
changed chunks by their digests and logs them. The ceiling is the minimum that any capture must do: the device reads \
the state once, and the changed chunks are copied to the host. The read rate is measured by a copy of half of the \
bytes on the device, because the reads and writes of this copy move as many bytes as reading all of them.

Examples:
  remanent-bench capture /dev/shm --device cuda:0 --bytes 16GiB
  remanent-bench capture /mnt/fast --bytes 512MiB --changed 10";

/// Captures of changes in the caller's memory
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CaptureBench {
    #[command(flatten)]
    common: Common,
    /// Size of the state in bytes
    #[arg(long, default_value = "256MiB")]
    bytes: Size,
    /// Length of each page in bytes
    #[arg(long, value_name = "BYTES", default_value = "16MiB")]
    page_len: Size,
    /// Percentage of the state's chunks that change
    #[arg(long, value_name = "PERCENT", default_value_t = 1)]
    changed: u64,
}

impl Measure for CaptureBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        let is_whole = |len: u64| len > 0 && len.is_multiple_of(DIGEST_CHUNK_LEN);
        if !is_whole(self.page_len.0) || self.bytes < self.page_len || !(1..=100).contains(&self.changed) {
            let text = "--page-len must be a multiple of 64KiB, --bytes at least --page-len, and --changed \
                        between 1 and 100";
            return Err(Failure::Environment(text.to_owned()));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        // The pages once, and what each round of captures writes.
        let changed = self.bytes.0 / 100 * self.changed;
        self.bytes.0.saturating_mul(2) + changed.saturating_mul(4 * (u64::from(self.common.rounds) + 1))
    }

    fn steps(&self) -> u64 {
        u64::from(self.common.rounds) + 1
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        room.step("the state")?;
        let state = State::new(self, room)?;
        let mut ways = [Way::new("contiguous"), Way::new("spread")];
        let names = ["copied, read and written", "digested"];
        let mut rates = names.map(|name| Figure::new(name, Unit::BytesPerSecond));
        for round in 0..self.common.rounds {
            room.step("captures")?;
            for (number, way) in ways.iter_mut().enumerate() {
                let changed = state.change(number == 1, self.changed, round as u8 * 2 + number as u8 + 1)?;
                let took = state.read(&mut rates)?;
                way.round(&state, changed, took)?;
            }
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        let (bytes, page_len) = (size(self.bytes.0), size(self.page_len.0));
        let group = |way: Way| Group {
            title: format!("{}% of {bytes} changed, {}, pages of {page_len}", self.changed, way.name),
            figures: vec![way.ceiling, way.logged, way.durable, way.written],
        };
        let mut groups: Vec<Group> = ways.into_iter().map(group).collect();
        groups.push(Group { title: "the device".to_owned(), figures: rates.into() });
        state.store.close()?;
        Ok(Findings { bench: "capture", settings, groups, left_out: Vec::new() })
    }
}

/// A state in the caller's memory, and its pages on disk.
struct State<'r> {
    room: &'r Room,
    store: Store,
    copies: Vec<WorkingCopy>,
    page_len: u64,
    /// Memory that is read for the ceiling: as long as the state, up to a limit.
    halves: [Span; 2],
    key: Span,
}

/// The maximum number of bytes that are read for the ceiling. Reading more does not increase the rate.
const READ_LEN_MAX: u64 = 4 << 30;

impl<'r> State<'r> {
    fn new(bench: &CaptureBench, room: &'r Room) -> Result<Self, BenchStop> {
        // Logged changes and their indices stay in memory until the next snapshot.
        let pending = bench.bytes.0 / 100 * bench.changed + bench.bytes.0 / 16 + (128 << 20);
        let options = room::options().memory(MemoryOptions::new().budget(Place::Disk, pending));
        let store = room.open("store", options)?;
        let page_len = bench.page_len.0;
        let mut copies = Vec::new();
        for _ in 0..bench.bytes.0 / page_len {
            room.check()?;
            let mut batch = store.batch();
            batch.create(page_len, Place::Disk);
            let page = store.commit(batch)?.pages[0];
            let memory = store.device_bytes(page_len, room.place)?;
            copies.push(store.working_copy_in(
                page,
                &memory,
                Width::W2,
                Shadow::Digest,
                InitialCopy::Load,
            )?);
        }
        store.snapshot()?;
        let half = bench.bytes.0.min(READ_LEN_MAX) / 2;
        let allocated =
            |len| room.device.allocate(room.place, len).map(|memory| Span { memory, offset: 0, len });
        let halves = [allocated(half)?, allocated(half)?];
        let key = digest_key(&std::array::from_fn::<u8, DIGEST_SEED_LEN, _>(|at| at as u8))?;
        let key_at = allocated(key.len() as u64)?;
        let mut staging = room.device.staging(key.len())?;
        staging[..key.len()].copy_from_slice(&key);
        let source = StagingSpan { index: 0, offset: 0, len: key.len() };
        let upload = Command::Upload { source, target: key_at };
        ceilings::list(&*room.device, Lane::Stage, vec![upload], vec![staging])?;
        Ok(Self { room, store, copies, page_len, halves, key: key_at })
    }

    /// Changes a byte in each chunk that should change. Returns the length of all changed chunks.
    fn change(&self, is_spread: bool, percent: u64, byte: u8) -> Result<u64, BenchStop> {
        let per_page = self.page_len / DIGEST_CHUNK_LEN;
        let all = per_page * self.copies.len() as u64;
        let changed = (all * percent / 100).max(1);
        for number in 0..changed {
            let chunk = if is_spread { number * (all / changed) } else { number };
            let copy = &self.copies[(chunk / per_page) as usize];
            copy.bytes().write(chunk % per_page * DIGEST_CHUNK_LEN + 100, &[byte])?;
        }
        Ok(changed * DIGEST_CHUNK_LEN)
    }

    /// Measures how fast the device copies and digests. Returns the seconds that reading the state would
    /// take.
    fn read(&self, [copied, digested]: &mut [Figure; 2]) -> Result<f64, BenchStop> {
        let device = &*self.room.device;
        let [source, target] = self.halves;
        let copy = Command::Copy { source, target };
        let (took, _) = ceilings::list(device, Lane::Stage, vec![copy], Vec::new())?;
        let rate = 2.0 * source.len as f64 / took.as_secs_f64();
        copied.push(rate);
        let len = DIGEST_LEN * (2 * digest_count(source.len)) as usize;
        let digests = StagingSpan { index: 0, offset: 0, len };
        let digest = Command::Digest { sources: self.halves.into(), key: self.key, target: digests };
        let staging = vec![device.staging(len)?];
        let (took, _) = ceilings::list(device, Lane::Stage, vec![digest], staging)?;
        digested.push(2.0 * source.len as f64 / took.as_secs_f64());
        Ok((self.page_len * self.copies.len() as u64) as f64 / rate)
    }

    /// Returns the time to copy this many bytes to the host.
    fn down(&self, bytes: u64) -> Result<Duration, BenchStop> {
        let device = &*self.room.device;
        let mut left = bytes;
        let mut staging = vec![device.staging(DOWN_LEN.min(bytes) as usize)?];
        let mut all = Duration::ZERO;
        while left > 0 {
            let len = left.min(DOWN_LEN).min(self.halves[0].len);
            let target = StagingSpan { index: 0, offset: 0, len: len as usize };
            let download = Command::Download { source: Span { len, ..self.halves[0] }, target };
            let took;
            (took, staging) = ceilings::list(device, Lane::Stage, vec![download], staging)?;
            all += took;
            left -= len;
        }
        Ok(all)
    }
}

/// Number of bytes that are copied to the host at a time.
const DOWN_LEN: u64 = 32 << 20;

/// One pattern of changes to the state.
struct Way {
    name: &'static str,
    ceiling: Figure,
    logged: Figure,
    durable: Figure,
    written: Figure,
}

impl Way {
    fn new(name: &'static str) -> Self {
        let ceiling = Figure::new("read on the device, changed chunks to the host", Unit::Seconds);
        let under = |name| Figure::new(name, Unit::Seconds).under(&ceiling.name);
        let (logged, durable) = (under("captured, Logged"), under("captured, durable"));
        let written = Figure::new("logged, relative to the changed chunks", Unit::Share);
        Self { name, ceiling, logged, durable, written }
    }

    fn round(&mut self, state: &State<'_>, changed: u64, read: f64) -> Result<(), BenchStop> {
        self.ceiling.push(read + state.down(changed)?.as_secs_f64());
        let before = state.store.stats().log.bytes;
        let mut batch = state.store.batch();
        state.copies.iter().for_each(|copy| _ = batch.capture(copy));
        let started = Instant::now();
        let ticket = state.store.submit(batch)?;
        ticket.wait(Ack::Logged)?;
        self.logged.push(started.elapsed().as_secs_f64());
        ticket.wait(Ack::Durable)?;
        self.durable.push(started.elapsed().as_secs_f64());
        let written = state.store.stats().log.bytes - before;
        self.written.push(written as f64 / changed as f64);
        Ok(state.store.snapshot().map(drop)?)
    }
}
