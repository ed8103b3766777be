//! `remanent-bench follow`: measures the delay until a follower receives a batch.

use std::collections::HashMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use remanent::follow::{FollowFrom, Follower};
use remanent::options::{LogIo, LogOptions};
use remanent::{Ack, Lsn, PageId, Store};
use remanent_tools::shared::exit::Failure;
use rustix::time::{ClockId, clock_gettime};

use crate::figures::{Figure, Findings, Group, Unit};
use crate::latency::Latency;
use crate::room::{self, BenchStop, Room};
use crate::{Common, Measure, check_seconds};

const EXAMPLES: &str = "\
One thread commits deltas of 256 bytes, one per batch, and a follower in another thread receives them. The delay of a \
batch is the time from the return of its commit until the follower receives the batch, or zero if the follower was \
faster. A mapped log is polled; a log written by system calls wakes the waiting follower. The last figure is the CPU \
share of a follower that waits while nothing is committed.

Examples:
  remanent-bench follow /mnt/fast
  remanent-bench follow /mnt/fast --batches 5000 --idle 10";

/// Delay of batches at a follower, and its cost while idle
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct FollowBench {
    #[command(flatten)]
    common: Common,
    /// Number of batches per round
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    batches: u64,
    /// Duration for which the idle follower is measured, in seconds
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    idle: f64,
}

/// The pause between two batches in the second figure.
const GAP: Duration = Duration::from_millis(2);
/// Longer than any batch takes.
const PATIENCE: Duration = Duration::from_secs(10);
/// Length of the page in bytes.
const PAGE_LEN: u64 = 64 << 10;
/// Length of a delta in bytes.
const DELTA_LEN: u64 = 256;
/// The name, the method of writing the log, and the acknowledgement that a commit waits for.
const WAYS: [(&str, LogIo, Ack); 2] =
    [("logged, mapped", LogIo::Mapped, Ack::Logged), ("durable, buffered", LogIo::Buffered, Ack::Durable)];

impl Measure for FollowBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        check_seconds("--idle", self.idle)
    }

    fn bytes_needed(&self) -> u64 {
        // A single durable batch takes a padded group and possibly a seal.
        u64::from(self.common.rounds) * self.batches * 4 * 8192 + (256 << 20)
    }

    fn steps(&self) -> u64 {
        WAYS.len() as u64 * u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let groups = WAYS.into_iter().map(|way| self.way(room, way)).collect::<Result<_, _>>()?;
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", format!("{} of {} batches", self.common.rounds, self.batches)));
        Ok(Findings { bench: "follow", settings, groups, left_out: Vec::new() })
    }
}

impl FollowBench {
    fn way(&self, room: &Room, (name, log_io, ack): (&str, LogIo, Ack)) -> Result<Group, BenchStop> {
        let folder = name.replace(", ", "-");
        let store = room.open(&folder, room::options().ack(ack).log(LogOptions::new().io(log_io)))?;
        let mut batch = store.batch();
        batch.create(PAGE_LEN, room.place);
        let page = store.commit(batch)?.pages[0];
        let mut follower = Follower::open(room.path(&folder), FollowFrom::Beginning)?;
        let gaps = [Duration::ZERO, GAP];
        let mut figures = gaps.map(|gap| {
            let mut figure =
                Figure::new(format!("delay, {} ms between commits", gap.as_millis()), Unit::Seconds);
            figure.latency = Some(Latency::new());
            figure
        });
        let mut idle = Figure::new("idle, share of a CPU", Unit::Share);
        for _ in 0..self.common.rounds {
            room.step(name)?;
            for (gap, figure) in gaps.into_iter().zip(&mut figures) {
                let late = self.round(&store, page, &mut follower, gap)?;
                figure.push(late.quantile(0.5));
                if let Some(all) = &mut figure.latency {
                    all.add(&late);
                }
            }
            let before = processor_time();
            let started = Instant::now();
            // Seals of earlier batches may still arrive; they are not batches.
            follower.next(Duration::from_secs_f64(self.idle))?;
            let waited = started.elapsed();
            idle.push((processor_time() - before).as_secs_f64() / waited.as_secs_f64());
        }
        store.close()?;
        let [close, apart] = figures;
        Ok(Group { title: name.to_owned(), figures: vec![close, apart, idle] })
    }

    /// Measures the delay of each batch of a round.
    fn round(
        &self,
        store: &Store,
        page: PageId,
        follower: &mut Follower,
        gap: Duration,
    ) -> Result<Latency, BenchStop> {
        let until = Lsn(store.lsn().0 + self.batches);
        let (committed, received) = std::thread::scope(|scope| -> Result<_, BenchStop> {
            let reader = scope.spawn(|| arrivals(follower, until));
            // Nothing is ever sent: the receive timeout makes the writer idle.
            let (_silent, silence) = mpsc::channel::<()>();
            let mut committed = Vec::new();
            for index in 0..self.batches {
                let mut batch = store.batch();
                batch.write(page, index * DELTA_LEN % PAGE_LEN, &[index as u8; DELTA_LEN as usize]);
                let commit = store.commit(batch)?;
                committed.push((commit.position.lsn, Instant::now()));
                if !gap.is_zero() {
                    let _timeout = silence.recv_timeout(gap);
                }
            }
            Ok((committed, reader.join().expect("no panic")?))
        })?;
        let mut late = Latency::new();
        for (lsn, at) in committed {
            late.record(received[&lsn].saturating_duration_since(at));
        }
        Ok(late)
    }
}

/// Returns when each batch up to `until` arrived.
fn arrivals(follower: &mut Follower, until: Lsn) -> Result<HashMap<Lsn, Instant>, BenchStop> {
    let mut received = HashMap::new();
    while follower.position().lsn < until {
        match follower.next(PATIENCE)? {
            Some(batch) => drop(received.insert(batch.lsn(), Instant::now())),
            None => {
                let text = "the follower received no batch within 10 s".to_owned();
                return Err(Failure::Environment(text).into());
            }
        }
    }
    Ok(received)
}

/// Returns the CPU time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
