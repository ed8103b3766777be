//! `remanent-bench growth`: measures the cost of a store as its number of pages grows.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use remanent::{DeviceChoice, Key, PageId, Store};
use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::room::{self, BenchStop, Room, size};
use crate::{Common, Measure, opener};

const EXAMPLES: &str = "\
Measures stores with increasing numbers of short pages in turn: commits of 8 bytes to random pages, a snapshot after \
one page changed, a snapshot after one page in a hundred changed, and an open in a separate process, with its host \
memory per page beyond the page's own bytes. Unchanged pages should cost nothing: the first two figures should not \
depend on the number of pages, except for the time that the processor takes to load a byte of a random page, which is \
also shown.

Examples:
  remanent-bench growth /mnt/fast
  remanent-bench growth /mnt/fast --keys
  remanent-bench growth /mnt/fast --pages 1000,10000,100000,1000000,10000000 --json";

/// Number of pages that are created in one batch.
const BATCH_PAGES: u64 = 10_000;
/// Number of consecutive snapshots without writes after which no background writes remain: one more than the
/// kept snapshots.
const IDLE_SNAPSHOTS: u32 = 3;
/// Number of bytes that each commit writes.
const WRITTEN: usize = 8;
/// Disk space in bytes per page in addition to its length: image headers, manifest entries, and the log until
/// it is recycled.
const DISK_BYTES_BESIDE: u64 = 1024;

/// Cost of a store as its number of pages grows
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct GrowthBench {
    #[command(flatten)]
    common: Common,
    /// Numbers of pages, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1000,30000,1000000")]
    pages: Vec<u64>,
    /// Length of each page in bytes
    #[arg(long, value_name = "BYTES", default_value = "64")]
    page_len: Size,
    /// Give each page a key
    #[arg(long)]
    keys: bool,
    /// Number of commits per round
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    commits: u64,
}

/// A store and its measurements.
struct GrownStore {
    name: String,
    pages: Vec<PageId>,
    random: SplitMix64,
    commit: Figure,
    touch: Figure,
    one: Figure,
    hundredth: Figure,
    open: Figure,
    memory: Figure,
}

impl GrowthBench {
    fn grow(&self, room: &Room, count: u64) -> Result<GrownStore, BenchStop> {
        let name = format!("pages-{count}");
        let store = room.open(&name, room::options())?;
        let mut pages = Vec::new();
        while (pages.len() as u64) < count {
            let mut batch = store.batch();
            let first = pages.len() as u64;
            for number in first..count.min(first + BATCH_PAGES) {
                let page = batch.create_from(vec![7; self.page_len.0 as usize], room.place);
                if self.keys {
                    page.key(Key::new(format!("page/{number}")).expect("a short key"));
                }
            }
            pages.extend(store.commit(batch)?.pages);
            room.check()?;
        }
        store.snapshot()?;
        store.close()?;
        Ok(GrownStore {
            name,
            pages,
            random: SplitMix64::new(count),
            commit: Figure::new("commit", Unit::Seconds),
            touch: Figure::new("access to one byte of any page, without a store", Unit::Seconds),
            one: Figure::new("snapshot, one page changed", Unit::Seconds),
            hundredth: Figure::new("snapshot, 1 % of the pages changed", Unit::Seconds),
            open: Figure::new("open, per page", Unit::Seconds),
            memory: Figure::new("host memory beyond its bytes, per page", Unit::Bytes),
        })
    }
}

impl GrownStore {
    fn commit(&mut self, store: &Store, count: u64) -> Result<Duration, BenchStop> {
        let mut took = Duration::ZERO;
        for number in 0..count {
            let page = self.pages[self.random.below(self.pages.len() as u64) as usize];
            let started = Instant::now();
            let mut batch = store.batch();
            batch.write(page, 0, &[number as u8; WRITTEN]);
            store.commit(batch)?;
            took += started.elapsed();
        }
        Ok(took)
    }

    /// Finds and changes one byte `count` times among the same number of pages, without a store. The next
    /// page is known only once the previous byte was loaded.
    fn touch(&mut self, page_len: usize, count: u64) -> Duration {
        const CONTENT: u8 = 7;
        let mut bytes = vec![CONTENT; page_len * self.pages.len()];
        let mut found = CONTENT;
        let started = Instant::now();
        for _ in 0..count {
            let page = self.random.below(self.pages.len() as u64) as usize + usize::from(found ^ CONTENT);
            let byte = &mut bytes[page * page_len];
            (found, *byte) = (*byte, black_box(CONTENT));
        }
        started.elapsed()
    }

    /// Changes `changed` pages and takes a snapshot.
    fn snapshot(&mut self, store: &Store, changed: u64) -> Result<Duration, BenchStop> {
        self.commit(store, changed)?;
        let started = Instant::now();
        store.snapshot()?;
        Ok(started.elapsed())
    }

    fn measure_running(&mut self, room: &Room, page_len: u64, commits: u64) -> Result<(), BenchStop> {
        let took = self.touch(page_len as usize, commits);
        self.touch.push(took.as_secs_f64() / commits as f64);
        let store = room.open(&self.name, room::options())?;
        let took = self.commit(&store, commits)?;
        self.commit.push(took.as_secs_f64() / commits as f64);
        // Takes snapshots until none writes anything, so that the measurements below exclude the changes of
        // the commits and files that are rewritten once older snapshots are gone.
        let mut idle = 0;
        while idle < IDLE_SNAPSHOTS {
            idle = if store.snapshot()?.bytes_written > 0 { 0 } else { idle + 1 };
            room.check()?;
        }
        let took = self.snapshot(&store, 1)?;
        self.one.push(took.as_secs_f64());
        let took = self.snapshot(&store, (self.pages.len() as u64).div_ceil(100))?;
        self.hundredth.push(took.as_secs_f64());
        Ok(store.close()?)
    }

    fn measure_open(&mut self, path: &Path, page_len: u64) -> Result<(), BenchStop> {
        // Opened on the host device even if pages are on a GPU, to measure the memory that the store itself
        // takes.
        let opened = opener::open(path, DeviceChoice::Host, false)?;
        let count = self.pages.len() as f64;
        self.open.push(opened.seconds / count);
        self.memory.push((opened.resident as f64 / count - page_len as f64).max(0.0));
        Ok(())
    }
}

impl Measure for GrowthBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        if self.page_len.0 < WRITTEN as u64 || self.pages.contains(&0) {
            let text = format!("--page-len must be at least {WRITTEN}, and --pages must not contain 0");
            return Err(Failure::Environment(text));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        let of_page = self.page_len.0.saturating_mul(4).saturating_add(DISK_BYTES_BESIDE);
        self.pages.iter().map(|count| count.saturating_mul(of_page)).fold(0, u64::saturating_add)
    }

    fn steps(&self) -> u64 {
        (u64::from(self.common.rounds) + 1) * self.pages.len() as u64
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let title = |count: usize| format!("{count} pages of {}", size(self.page_len.0));
        let mut stores = Vec::new();
        for count in &self.pages {
            room.step(&title(*count as usize))?;
            stores.push(self.grow(room, *count)?);
        }
        for _ in 0..self.common.rounds {
            for grown in &mut stores {
                room.step(&title(grown.pages.len()))?;
                grown.measure_open(&room.path(&grown.name), self.page_len.0)?;
                grown.measure_running(room, self.page_len.0, self.commits)?;
            }
        }
        let group = |grown: GrownStore| Group {
            title: title(grown.pages.len()),
            figures: vec![grown.commit, grown.touch, grown.one, grown.hundredth, grown.open, grown.memory],
        };
        let mut settings = room.settings(&self.common);
        settings.push(("commits per round", self.commits.to_string()));
        settings.push(("rounds", self.common.rounds.to_string()));
        let groups = stores.into_iter().map(group).collect();
        Ok(Findings { bench: "growth", settings, groups, left_out: Vec::new() })
    }
}
