//! `remanent-bench lookup`: looks up and reads pages in several threads, alone and during durable commits.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remanent::{Ack, Key, PageId, PageInfo, Store};
use remanent_tools::shared::exit::Failure;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::latency::Latency;
use crate::room::{self, BenchStop, Room};
use crate::{Common, Measure, check_seconds, check_threads};

const EXAMPLES: &str = "\
Threads look up random pages by id and by key, look up the root, and read 256 bytes of a page. The ceiling of a lookup \
is a lookup in an unchanging map of the standard library. One lookup in 64 is timed. Two other threads commit deltas \
of 256 bytes to the same pages and wait until each batch is durable. A second part measures lookups without these \
commits.

Examples:
  remanent-bench lookup /mnt/fast
  remanent-bench lookup /mnt/fast --threads 1,8,16 --pages 1000000";

/// Lookups per second, and the latency of each
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct LookupBench {
    #[command(flatten)]
    common: Common,
    /// Numbers of threads that look up concurrently, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8")]
    threads: Vec<usize>,
    /// Number of pages in the store
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pages: u64,
    /// Duration of each measurement in a round, in seconds
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    seconds: f64,
}

/// Length in bytes of a page, of a delta and of a read.
const PAGE_LEN: u64 = 256;
/// Number of threads that commit.
const WRITERS: usize = 2;
/// One lookup in this many is timed.
const TIMED: u64 = 64;
/// Maximum number of pages created in one batch.
const CREATED_MAX: u64 = 10_000;

/// The operation that a thread repeats.
#[derive(Clone, Copy)]
enum Work {
    Map,
    Page,
    Key,
    Root,
    Read,
}

const WORKS: [(Work, &str); 5] = [
    (Work::Map, "unchanging map"),
    (Work::Page, "page"),
    (Work::Key, "page_by_key"),
    (Work::Root, "root"),
    (Work::Read, "read, 256 B"),
];

/// A store, and a map of its pages.
struct LookupSubject {
    store: Store,
    keys: Vec<Key>,
    map: HashMap<PageId, PageInfo>,
    ids: Vec<PageId>,
}

impl Measure for LookupBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        check_seconds("--seconds", self.seconds)?;
        check_threads(&self.threads)
    }

    fn bytes_needed(&self) -> u64 {
        4 * self.pages * PAGE_LEN + (1 << 30)
    }

    fn steps(&self) -> u64 {
        2 * u64::from(self.common.rounds) * self.threads.len() as u64
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let subject = self.subject(room)?;
        let mut groups = Vec::new();
        for &threads in &self.threads {
            for writers in [WRITERS, 0] {
                groups.push(self.group(room, &subject, threads, writers)?);
            }
        }
        subject.store.close()?;
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", format!("{} of {} s", self.common.rounds, self.seconds)));
        settings.push(("pages", self.pages.to_string()));
        Ok(Findings { bench: "lookup", settings, groups, left_out: Vec::new() })
    }
}

impl LookupBench {
    fn subject(&self, room: &Room) -> Result<LookupSubject, BenchStop> {
        let store = room.open("store", room::options().ack(Ack::Durable))?;
        let key = |number: u64| Key::new(format!("page/{number}")).expect("a short key");
        let keys: Vec<Key> = (0..self.pages).map(key).collect();
        let mut ids = Vec::new();
        for keys in keys.chunks(CREATED_MAX as usize) {
            let mut batch = store.batch();
            for key in keys {
                batch.create(PAGE_LEN, room.place).key(key.clone());
            }
            batch.set_root("pages", self.pages);
            ids.extend(store.commit(batch)?.pages);
        }
        let map = store.pages()?.map(|info| (info.page, info)).collect();
        Ok(LookupSubject { store, keys, map, ids })
    }

    fn group(
        &self,
        room: &Room,
        subject: &LookupSubject,
        threads: usize,
        writers: usize,
    ) -> Result<Group, BenchStop> {
        let plural = if threads == 1 { "" } else { "s" };
        let beside = if writers == 0 { "alone" } else { "with 2 durable writers" };
        let title = format!("{threads} thread{plural}, {beside}");
        let mut figures = WORKS.map(|(_, name)| {
            let mut figure = Figure::new(name.to_owned(), Unit::PerSecond("lookups"));
            figure.latency = Some(Latency::new());
            figure
        });
        for figure in &mut figures[1..4] {
            figure.ceiling = Some(WORKS[0].1.to_owned());
        }
        for _ in 0..self.common.rounds {
            room.step(&title)?;
            for ((work, _), figure) in WORKS.into_iter().zip(&mut figures) {
                self.round(room, subject, work, figure, threads, writers)?;
            }
        }
        Ok(Group { title, figures: figures.into() })
    }

    fn round(
        &self,
        room: &Room,
        subject: &LookupSubject,
        work: Work,
        figure: &mut Figure,
        threads: usize,
        writers: usize,
    ) -> Result<(), BenchStop> {
        let time = Duration::from_secs_f64(self.seconds);
        let is_over = AtomicBool::new(false);
        let commit = |writer: usize| -> Result<(), BenchStop> {
            let mut random = Random(writer as u64 + 1);
            while !is_over.load(Ordering::Relaxed) {
                let mut batch = subject.store.batch();
                batch.write(
                    subject.ids[random.below(subject.ids.len())],
                    0,
                    &[writer as u8; PAGE_LEN as usize],
                );
                subject.store.commit(batch)?;
            }
            Ok(())
        };
        let started = Instant::now();
        let look_up = |thread: usize| -> Result<(u64, Latency), BenchStop> {
            let (mut latency, mut random, mut count) = (Latency::new(), Random(1000 + thread as u64), 0);
            // Runs at least once: on a busy machine a thread may start after the time is over.
            loop {
                for _ in 1..TIMED {
                    subject.once(work, &mut random)?;
                }
                let before = Instant::now();
                subject.once(work, &mut random)?;
                latency.record(before.elapsed());
                count += TIMED;
                if started.elapsed() >= time || room.interrupted() {
                    return Ok((count, latency));
                }
            }
        };
        let looked = std::thread::scope(|scope| {
            let (commit, look_up) = (&commit, &look_up);
            let writing: Vec<_> = (0..writers).map(|writer| scope.spawn(move || commit(writer))).collect();
            let looking_up: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || look_up(thread))).collect();
            let looked: Vec<_> =
                looking_up.into_iter().map(|thread| thread.join().expect("no panic")).collect();
            let took = started.elapsed();
            is_over.store(true, Ordering::Relaxed);
            writing.into_iter().try_for_each(|thread| thread.join().expect("no panic"))?;
            Ok::<_, BenchStop>((looked, took))
        });
        let (looked, took) = looked?;
        let mut count = 0;
        for looked in looked {
            let (of_thread, latency) = looked?;
            count += of_thread;
            if let Some(all) = &mut figure.latency {
                all.add(&latency);
            }
        }
        figure.push(count as f64 / took.as_secs_f64());
        Ok(())
    }
}

impl LookupSubject {
    fn once(&self, work: Work, random: &mut Random) -> Result<(), BenchStop> {
        let at = random.below(self.ids.len());
        match work {
            Work::Map => _ = black_box(self.map.get(&self.ids[at]).cloned()),
            Work::Page => _ = black_box(self.store.page(self.ids[at])?),
            Work::Key => _ = black_box(self.store.page_by_key(&self.keys[at])?),
            Work::Root => _ = black_box(self.store.root()?),
            Work::Read => {
                let mut bytes = [0; PAGE_LEN as usize];
                black_box(self.store.read(self.ids[at], 0, &mut bytes)?);
            }
        }
        Ok(())
    }
}

/// A pseudorandom generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % end as u64) as usize
    }
}
