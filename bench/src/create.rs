//! `remanent-bench create`: creates pages in bulk, compared with writing and syncing one file.

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remanent::{PageId, Store};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::latency::Latency;
use crate::room::{self, BenchStop, Room, size};
use crate::snapshot::commit_until_stopped;
use crate::{Common, Measure, transfer};

const EXAMPLES: &str = "\
Creates pages of random bytes, --batch bytes per batch, and waits until each batch is durable. The ceiling is a file to \
which one thread writes the same bytes, synced as often. A long batch's bytes are written to an image file once; the log \
and the next snapshot only refer to it. All bytes written, including a snapshot, are shown as a multiple of the pages' \
bytes.

A second part commits to another page, waiting for Applied each time: first alone, then while a long page is repeatedly \
created and deleted, then while one batch creates many pages and another thread lists them.

Examples:
  remanent-bench create /mnt/fast
  remanent-bench create /mnt/fast --bytes 4GiB --batch 256MiB --page-len 8MiB";

/// Bulk creation of pages, as in an import
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CreateBench {
    #[command(flatten)]
    common: Common,
    /// Total size of all pages in bytes
    #[arg(long, default_value = "256MiB")]
    bytes: Size,
    /// Total size of the pages in one batch, in bytes
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    batch: Size,
    /// Length of each page in bytes
    #[arg(long, value_name = "BYTES", default_value = "8MiB")]
    page_len: Size,
    /// Length in bytes of the page that is created during commits to another page
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    long_len: Size,
    /// Number of pages that one batch creates during commits to another page
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    many: u64,
}

impl Measure for CreateBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        if self.page_len.0 == 0 || self.page_len > self.batch || self.batch > self.bytes {
            let text =
                "--page-len must be at least 1, --batch at least --page-len, and --bytes at least --batch";
            return Err(Failure::Environment(text.to_owned()));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        // The bytes written if no batch is large enough for an image file.
        self.bytes.0.saturating_mul(3)
    }

    fn steps(&self) -> u64 {
        2 * u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let (page_len, batch) = (size(self.page_len.0), size(self.batch.0));
        let title = format!("{} in pages of {page_len}, {batch} per batch", size(self.bytes.0));
        let mut raw = Figure::new("raw, one file, write + fdatasync", Unit::BytesPerSecond);
        let mut store = Figure::new("create, durable", Unit::BytesPerSecond).under(&raw.name);
        let mut written = Figure::new("written, relative to the pages' bytes", Unit::Share);
        let content = transfer::random(self.page_len.0 as usize);
        let per_batch = self.batch.0 / self.page_len.0;
        let batches = self.bytes.0 / (per_batch * self.page_len.0);
        let bytes = (batches * per_batch * self.page_len.0) as f64;
        for _ in 0..self.common.rounds {
            room.step(&title)?;
            let path = room.path("raw");
            let started = Instant::now();
            let mut file = File::create(&path)?;
            for _ in 0..batches {
                for _ in 0..per_batch {
                    file.write_all(&content)?;
                }
                file.sync_data()?;
            }
            raw.push(bytes / started.elapsed().as_secs_f64());
            std::fs::remove_file(path)?;

            let made = room.open("store", room::options())?;
            let started = Instant::now();
            for _ in 0..batches {
                let mut batch = made.batch();
                for _ in 0..per_batch {
                    batch.create_from(content.to_vec(), room.place);
                }
                made.wait_durable(made.commit(batch)?.position.lsn)?;
            }
            store.push(bytes / started.elapsed().as_secs_f64());
            made.snapshot()?;
            let files = room::files(&room.path("store"), &["pages", "snapshots"])?;
            let all = files.iter().map(|(_, len)| len).sum::<u64>() + made.stats().log.bytes;
            written.push(all as f64 / bytes);
            made.close()?;
            std::fs::remove_dir_all(room.path("store"))?;
        }
        let mut beside = ConcurrentCommitter::new(self.long_len.0, self.many);
        for _ in 0..self.common.rounds {
            room.step("commits during creates")?;
            beside.round(room)?;
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        let groups = vec![Group { title, figures: vec![raw, store, written] }, beside.group()];
        Ok(Findings { bench: "create", settings, groups, left_out: Vec::new() })
    }
}

/// The time for which commits are measured without creates.
const ALONE: Duration = Duration::from_millis(300);
/// The number of times that the long page is created in a round.
const LONG_CREATES: usize = 20;
/// Length in bytes of each of the many pages.
const MANY_LEN: u64 = 64;

/// A thread that commits to its own page while others create pages.
struct ConcurrentCommitter {
    long_len: u64,
    many: u64,
    alone: Figure,
    beside_long: Figure,
    beside_many: Figure,
}

impl ConcurrentCommitter {
    fn new(long_len: u64, many: u64) -> Self {
        let figure = |name: String| Figure {
            latency: Some(Latency::new()),
            ..Figure::new(name, Unit::PerSecond("commits"))
        };
        Self {
            long_len,
            many,
            alone: figure("no creates".to_owned()),
            beside_long: figure(format!("during creates of {}", size(long_len))),
            beside_many: figure(format!("during a batch of {many} creates")),
        }
    }

    fn round(&mut self, room: &Room) -> Result<(), BenchStop> {
        let store = room.open("beside", room::options())?;
        let mut batch = store.batch();
        batch.create(4096, room.place);
        let page = store.commit(batch)?.pages[0];
        let until = Instant::now() + ALONE;
        commit_until_stopped(&store, page, &mut self.alone, || Instant::now() >= until)?;
        let (long_len, many) = (self.long_len, self.many);
        while_working(&store, page, &mut self.beside_long, |_| {
            for _ in 0..LONG_CREATES {
                let mut batch = store.batch();
                batch.create(long_len, room.place);
                let mut delete = store.batch();
                delete.delete(store.commit(batch)?.pages[0]);
                store.commit(delete)?;
            }
            Ok(())
        })?;
        while_working(&store, page, &mut self.beside_many, |over| {
            let mut batch = store.batch();
            for _ in 0..many {
                batch.create(MANY_LEN, room.place);
            }
            std::thread::scope(|scope| {
                let list = scope.spawn(|| -> Result<(), BenchStop> {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::black_box(store.pages()?.count());
                    }
                    Ok(())
                });
                let committed = store.commit(batch);
                over.store(true, Ordering::Relaxed);
                list.join().expect("no panic")?;
                Ok(committed.map(drop)?)
            })
        })?;
        store.close()?;
        Ok(std::fs::remove_dir_all(room.path("beside"))?)
    }

    fn group(self) -> Group {
        let title = "commits of 256 B to another page, Applied".to_owned();
        Group { title, figures: vec![self.alone, self.beside_long, self.beside_many] }
    }
}

/// Commits to a page while another thread works. The work may set the flag to end the commits earlier.
fn while_working(
    store: &Store,
    page: PageId,
    figure: &mut Figure,
    work: impl FnOnce(&AtomicBool) -> Result<(), BenchStop> + Send,
) -> Result<(), BenchStop> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let working = scope.spawn(|| {
            let worked = work(&over);
            over.store(true, Ordering::Relaxed);
            worked
        });
        let hammered = commit_until_stopped(store, page, figure, || over.load(Ordering::Relaxed));
        working.join().expect("no panic")?;
        hammered
    })
}
