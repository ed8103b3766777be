//! `remanent-bench restore`: opens a store, compared with reading its files.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remanent::options::MemoryOptions;
use remanent::options::PageLoad as Loading;
use remanent::{DeviceChoice, PageId};
use remanent_tools::shared::exit::Failure;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::room::{self, BenchStop, Room};
use crate::sizes::Sizes;
use crate::transfer::{self, Cache};
use crate::{Common, Measure, opener};

const EXAMPLES: &str = "\
Closes a store of random pages after a snapshot and opens it cold, with its files dropped from the page cache, and \
warm, with all files in the page cache. An open verifies every byte. The ceiling of a cold open is reading the same \
files past the page cache with 4 threads, and the ceiling of a warm open is reading them through the page cache. The \
time to the first page runs from the start of the open until the page was read. It excludes the set-up of the device, \
which `remanent-bench ceilings` reports. With pages loaded on demand, the store is usable before they are loaded, and \
the page read is the last one in the loading order. With a GPU, a separate process opens the store again to measure \
its peak host memory beyond the driver's, split into mapped log and all other memory, sampled every ten milliseconds.

Examples:
  remanent-bench restore /mnt/fast
  remanent-bench restore /mnt/fast --bytes 16GiB --page-len 2MiB,16KiB --device cuda:0 --rounds 3";

/// Opens of a store, cold and warm, and the time to the first page
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct RestoreBench {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    sizes: Sizes,
}

impl Measure for RestoreBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        self.sizes.check()
    }

    fn bytes_needed(&self) -> u64 {
        self.sizes.bytes().saturating_mul(2)
    }

    fn steps(&self) -> u64 {
        self.sizes.steps(1 + 2 * u64::from(self.common.rounds))
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        self.sizes.findings("restore", room, &self.common, |page_len| self.pages_of(room, page_len))
    }
}

/// The figures for one state of the page cache.
struct Temperature {
    cache: Cache,
    raw: Figure,
    open: Figure,
    first: Figure,
    on_demand: Figure,
    first_on_demand: Figure,
}

/// The host memory that an open uses while its files are in the page cache.
struct OpenMemory {
    all: Figure,
    own: Figure,
    windows: Figure,
}

impl OpenMemory {
    fn new() -> Self {
        let above = "peak host memory above the device's";
        Self {
            all: Figure::new(above, Unit::Bytes),
            own: Figure::new(format!("{above}, without mapped log"), Unit::Bytes),
            windows: Figure::new("peak of mapped log", Unit::Bytes),
        }
    }

    fn measure(&mut self, dir: &Path, device: DeviceChoice) -> Result<(), BenchStop> {
        let most = opener::open(dir, device, true)?.most.expect("the memory was watched");
        for (figure, bytes) in
            [(&mut self.all, most.all), (&mut self.own, most.own), (&mut self.windows, most.windows)]
        {
            figure.push(bytes as f64);
        }
        Ok(())
    }
}

impl Temperature {
    fn new(cache: Cache) -> Self {
        let (name, way) = match cache {
            Cache::Past => ("cold", "past"),
            Cache::Through => ("warm", "through"),
        };
        let raw = format!("raw, 4 threads {way} the cache");
        Self {
            cache,
            open: Figure::new(format!("open, {name}"), Unit::BytesPerSecond).under(&raw),
            on_demand: Figure::new(format!("all pages on demand, {name}"), Unit::BytesPerSecond).under(&raw),
            first_on_demand: Figure::new(format!("first page on demand, {name}"), Unit::Seconds),
            raw: Figure::new(raw, Unit::BytesPerSecond),
            first: Figure::new(format!("first page, {name}"), Unit::Seconds),
        }
    }
}

impl RestoreBench {
    fn pages_of(&self, room: &Room, page_len: u64) -> Result<Group, BenchStop> {
        let title = self.sizes.title(page_len);
        room.step(&title)?;
        let name = format!("pages-{page_len}");
        let (store, pages) = self.sizes.store(room, &name, page_len, room::options())?;
        // A single snapshot, because an open reads the images of one only.
        store.snapshot()?;
        store.close()?;
        let of_pages = ClosedStore {
            name: &name,
            dir: room.path(&name),
            count: pages.len(),
            last: pages[pages.len() - 1],
            page_len,
        };
        let mut temperatures = [Cache::Past, Cache::Through].map(Temperature::new);
        // Measured only if pages are elsewhere: otherwise their own bytes dominate and hide the rest.
        let mut memory = room.is_gpu().then(OpenMemory::new);
        for _ in 0..self.common.rounds {
            for temperature in &mut temperatures {
                room.step(&title)?;
                of_pages.open(room, temperature)?;
            }
            if let Some(memory) = &mut memory {
                memory.measure(&of_pages.dir, self.common.device)?;
            }
        }
        std::fs::remove_dir_all(room.path(&name))?;
        let figures = temperatures.into_iter().flat_map(
            |Temperature { raw, open, first, on_demand, first_on_demand, .. }| {
                [raw, open, first, on_demand, first_on_demand]
            },
        );
        let figures = figures
            .chain(memory.map(|OpenMemory { all, own, windows }| [all, own, windows]).into_iter().flatten());
        Ok(Group { title, figures: figures.collect() })
    }
}

/// A closed store.
struct ClosedStore<'a> {
    name: &'a str,
    dir: PathBuf,
    count: usize,
    last: PageId,
    page_len: u64,
}

impl ClosedStore<'_> {
    /// Reads the files, then opens the store.
    fn open(&self, room: &Room, temperature: &mut Temperature) -> Result<(), BenchStop> {
        let bytes = self.count as u64 * self.page_len;
        // The log is empty after the snapshot.
        let files = room::files(&self.dir, &["pages", "snapshots"])?;
        let all: u64 = files.iter().map(|(_, len)| len).sum();
        match temperature.cache {
            Cache::Past => transfer::forget(&files)?,
            // The first read fills the cache.
            Cache::Through => transfer::read(&files, Cache::Through).map(drop)?,
        }
        let took = transfer::read(&files, temperature.cache)?;
        temperature.raw.push(all as f64 / took.as_secs_f64());
        if temperature.cache == Cache::Past {
            transfer::forget(&files)?;
        }

        let started = Instant::now();
        let store = room.open(self.name, room::options())?;
        let opened = started.elapsed();
        let mut found = vec![0; self.page_len as usize];
        store.read(self.last, 0, &mut found)?;
        let first: Duration = started.elapsed();
        if store.pages()?.len() != self.count {
            return Err(Failure::Damage("the opened store lacks some of its pages".to_owned()).into());
        }
        temperature.open.push(bytes as f64 / opened.as_secs_f64());
        temperature.first.push(first.as_secs_f64());
        store.close()?;

        if temperature.cache == Cache::Past {
            transfer::forget(&files)?;
        }
        let started = Instant::now();
        let store =
            room.open(self.name, room::options().memory(MemoryOptions::new().load(Loading::OnDemand)))?;
        store.read(self.last, 0, &mut found)?;
        temperature.first_on_demand.push(started.elapsed().as_secs_f64());
        store.wait_loaded()?;
        temperature.on_demand.push(bytes as f64 / started.elapsed().as_secs_f64());
        store.close()?;
        Ok(())
    }
}
