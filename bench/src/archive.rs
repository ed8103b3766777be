//! `remanent-bench archive` measures how much an archive slows down commits, and how far the archive lags behind.

use std::fs;
use std::time::{Duration, Instant};

use remanent::options::ArchiveOptions;
use remanent::{Ack, PageId, Store};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::archived_snapshot::SnapshotFigures;
use crate::figures::{Figure, Findings, Group, Unit, rate};
use crate::latency::Latency;
use crate::room::{self, BenchStop, Room};
use crate::{Common, Measure, check_seconds};

const EXAMPLES: &str = "\
One thread commits deltas of 4 KiB, in turn to a store without an archive and to a store with an archive. The ceiling \
is the store without an archive. Then the thread commits single batches and waits until each is archived. Finally, a \
named snapshot is archived, once its batches are archived, and restored; the ceilings are loops that create and read \
objects of 8 MiB with the same client. The bucket is a folder next to the stores, which syncs its objects to the same \
disk and is removed at the end. With --url, the archives are created in the given bucket under new names, and are not removed.

Examples:
  remanent-bench archive /mnt/fast
  remanent-bench archive /mnt/fast --url file:///dev/shm/bench
  remanent-bench archive /mnt/fast --url s3://bucket/bench --seconds 10";

/// Cost and lag of an archive
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ArchiveBench {
    #[command(flatten)]
    common: Common,
    /// URL below which the archives are created; credentials are read from the environment
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Duration of the commits to each store in a round, in seconds
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,
    /// Number of batches per round that the thread commits and waits for until they are archived
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    waits: u64,
    /// Size in bytes of the snapshot to archive and restore; 0 skips this measurement
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    snapshot: Size,
}

const DELTA_LEN: u64 = 4096;
const PAGES: u64 = 64;
/// An upper bound on the commits per second of one thread.
const COMMITS_MAX: u64 = 200_000;
const ACKS: [(&str, Ack); 2] = [("logged", Ack::Logged), ("durable", Ack::Durable)];

impl Measure for ArchiveBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        check_seconds("--seconds", self.seconds)
    }

    fn bytes_needed(&self) -> u64 {
        // Counts a store, its archive, and log that is not archived yet.
        let commits = (self.seconds * COMMITS_MAX as f64) as u64 + self.waits;
        let of_snapshot = self.snapshot.0.saturating_mul(6);
        (3 * commits * 2 * DELTA_LEN + (256 << 20)).saturating_add(of_snapshot)
    }

    fn steps(&self) -> u64 {
        let of_round = 2 * ACKS.len() as u64 + u64::from(self.snapshot.0 > 0);
        of_round * u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let mut groups = Vec::new();
        for (name, ack) in ACKS {
            groups.push(self.commits(room, name, ack)?);
        }
        if self.snapshot.0 > 0 {
            groups.push(self.snapshots(room)?);
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", format!("{} of {} s", self.common.rounds, self.seconds)));
        settings.push(("bucket", self.url.clone().unwrap_or_else(|| "a folder".to_owned())));
        Ok(Findings { bench: "archive", settings, groups, left_out: Vec::new() })
    }
}

impl ArchiveBench {
    fn commits(&self, room: &Room, name: &str, ack: Ack) -> Result<Group, BenchStop> {
        let with_latency = |name: &str, unit| {
            let mut figure = Figure::new(name, unit);
            figure.latency = Some(Latency::new());
            figure
        };
        let mut without = with_latency("without an archive", Unit::PerSecond("commits"));
        let mut with = with_latency("with an archive", Unit::PerSecond("commits"));
        with.ceiling = Some(without.name.clone());
        let mut waits = with_latency("wait until archived", Unit::Seconds);
        for round in 0..self.common.rounds {
            for figure in [&mut without, &mut with] {
                room.step(name)?;
                let is_archived = figure.ceiling.is_some();
                let folder = format!("{name}-{round}-{is_archived}");
                let mut options = room::options().ack(ack);
                if is_archived {
                    options = options.archive(self.archive(room, &folder)?);
                }
                let store = room.open(&folder, options)?;
                let pages = create_pages(&store, room)?;
                let (commits, took) = self.commit(&store, &pages, figure)?;
                figure.push(rate(commits, took));
                if is_archived {
                    self.wait(&store, &pages, &mut waits)?;
                }
                store.close()?;
                fs::remove_dir_all(room.path(&folder))?;
            }
        }
        Ok(Group {
            title: format!("{name} commits of {DELTA_LEN} bytes"),
            figures: vec![without, with, waits],
        })
    }

    fn snapshots(&self, room: &Room) -> Result<Group, BenchStop> {
        let mut figures = SnapshotFigures::new(self.snapshot.0);
        for round in 0..self.common.rounds {
            room.step("a snapshot")?;
            let (archive, other) = (format!("snapshot-{round}"), format!("loop-{round}"));
            figures.measure(room, &self.archive(room, &archive)?, &self.archive(room, &other)?)?;
        }
        Ok(figures.into_group())
    }

    /// Returns the options of a new archive.
    fn archive(&self, room: &Room, name: &str) -> Result<ArchiveOptions, BenchStop> {
        if let Some(url) = &self.url {
            let unique = room.path("").file_name().map(|name| name.to_string_lossy().into_owned());
            let url = format!("{url}/{}-{name}", unique.unwrap_or_default());
            if let Some(folder) = url.strip_prefix("file://") {
                fs::create_dir_all(folder)?;
            }
            return Ok(ArchiveOptions::new(url));
        }
        let bucket = room.path(&format!("{name}.bucket"));
        fs::create_dir(&bucket)?;
        Ok(ArchiveOptions::new(format!("file://{}", bucket.display())))
    }

    fn commit(
        &self,
        store: &Store,
        pages: &[PageId],
        figure: &mut Figure,
    ) -> Result<(u64, Duration), BenchStop> {
        let started = Instant::now();
        let mut commits = 0;
        while started.elapsed().as_secs_f64() < self.seconds {
            let begun = Instant::now();
            store.commit(delta(store, pages, commits))?;
            if let Some(latency) = &mut figure.latency {
                latency.record(begun.elapsed());
            }
            commits += 1;
        }
        Ok((commits, started.elapsed()))
    }

    /// Measures the time from a commit until its batch is archived.
    fn wait(&self, store: &Store, pages: &[PageId], figure: &mut Figure) -> Result<(), BenchStop> {
        // First waits until the batches of the previous measurement are archived.
        store.submit(delta(store, pages, 0))?.wait(Ack::Archived)?;
        let mut times = Latency::new();
        for index in 0..self.waits {
            let begun = Instant::now();
            store.submit(delta(store, pages, index))?.wait(Ack::Archived)?;
            times.record(begun.elapsed());
        }
        figure.push(times.quantile(0.5));
        if let Some(all) = &mut figure.latency {
            all.add(&times);
        }
        Ok(())
    }
}

fn create_pages(store: &Store, room: &Room) -> Result<Vec<PageId>, BenchStop> {
    let mut batch = store.batch();
    (0..PAGES).for_each(|_| _ = batch.create(DELTA_LEN, room.place));
    Ok(store.commit(batch)?.pages)
}

fn delta(store: &Store, pages: &[PageId], index: u64) -> remanent::WriteBatch {
    let mut batch = store.batch();
    batch.write(pages[(index % PAGES) as usize], 0, &[index as u8; DELTA_LEN as usize]);
    batch
}
