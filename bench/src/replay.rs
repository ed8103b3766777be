//! `remanent-bench replay`: opens a store that is all log, compared with reading that log.

use std::time::Instant;

use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::room::{self, BenchStop, Room, size};
use crate::transfer::{self, Cache};
use crate::{Common, Measure};

const EXAMPLES: &str = "\
Opens a store without a snapshot, so that all of its log is replayed: deltas of one length, a fixed number per batch, \
to random pages. Cold: the files were dropped from the page cache, and the ceiling is reading them with 4 threads past \
the page cache. Warm: all files are in the cache, and the ceiling is reading them through the cache. Rates count the \
bytes of the deltas only.

Examples:
  remanent-bench replay /mnt/fast
  remanent-bench replay /mnt/fast --bytes 1GiB --deltas 256x64,256x1,64KiBx32";

/// Replay of the log
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ReplayBench {
    #[command(flatten)]
    common: Common,
    /// Total size of all deltas in bytes
    #[arg(long, default_value = "64MiB")]
    bytes: Size,
    /// Lengths of deltas in bytes and numbers of deltas per batch, separated by commas
    #[arg(long, value_name = "BYTESxN", value_delimiter = ',', default_value = "256x1,256x64,64KiBx32")]
    deltas: Vec<Deltas>,
    /// Total size of all pages in bytes
    #[arg(long, default_value = "64MiB")]
    pages: Size,
}

/// The deltas of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Deltas {
    len: Size,
    count: u64,
}

impl std::str::FromStr for Deltas {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (len, count) = text.rsplit_once('x').ok_or("expected BYTESxN, for example 256x64")?;
        let count = count.parse().map_err(|_| format!("expected a number of deltas, found `{count}`"))?;
        Ok(Self { len: len.parse()?, count })
    }
}

/// Length of each page in bytes.
const PAGE_LEN: u64 = 64 << 10;

impl Measure for ReplayBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |what: &str| Err(Failure::Environment(what.to_owned()));
        if self.deltas.iter().any(|deltas| !(1..=PAGE_LEN).contains(&deltas.len.0)) {
            return refuse("a delta must have between 1 byte and 64KiB");
        }
        if self.deltas.iter().any(|deltas| {
            deltas.count == 0 || deltas.count.checked_mul(deltas.len.0).is_none_or(|bytes| bytes > 4 << 20)
        }) {
            return refuse("a batch must have at least one delta, and at most 4MiB of deltas");
        }
        if self.pages.0 < PAGE_LEN {
            return refuse("--pages must be at least 64KiB");
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        // The frame of a small delta is a few times as long as the delta.
        self.bytes.0.saturating_mul(4).saturating_add(256 << 20)
    }

    fn steps(&self) -> u64 {
        (1 + u64::from(self.common.rounds)) * self.deltas.len() as u64
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let mut groups = Vec::new();
        for deltas in &self.deltas {
            groups.push(self.log_of(room, *deltas)?);
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        settings.push(("pages", format!("{} in pages of {}", self.pages, size(PAGE_LEN))));
        Ok(Findings { bench: "replay", settings, groups, left_out: Vec::new() })
    }
}

impl ReplayBench {
    fn log_of(&self, room: &Room, deltas: Deltas) -> Result<Group, BenchStop> {
        let Deltas { len, count } = deltas;
        let title = format!("{} of deltas of {len}, {count} per batch", self.bytes);
        room.step(&title)?;
        let name = format!("log-{}-{count}", len.0);
        let dir = room.path(&name);
        let written = self.write_log(room, &name, deltas)?;
        let names = [("cold", "past", Cache::Past), ("warm", "through", Cache::Through)];
        let mut figures = names.map(|(name, way, cache)| {
            let raw = format!("raw, 4 threads {way} the cache");
            let replay = Figure::new(format!("replay, {name}"), Unit::BytesPerSecond).under(&raw);
            let each = Figure::new(format!("replay, {name}, single deltas"), Unit::PerSecond("deltas"));
            (cache, Figure::new(raw, Unit::BytesPerSecond), replay, each)
        });
        for _ in 0..self.common.rounds {
            room.step(&title)?;
            for (cache, raw, replay, each) in &mut figures {
                // Each open writes a little, so the files are listed again.
                let files = room::files(&dir, &["log"])?;
                let all: u64 = files.iter().map(|(_, len)| len).sum();
                match cache {
                    Cache::Past => transfer::forget(&files)?,
                    Cache::Through => transfer::read(&files, Cache::Through).map(drop)?,
                }
                raw.push(all as f64 / transfer::read(&files, *cache)?.as_secs_f64());
                if *cache == Cache::Past {
                    transfer::forget(&files)?;
                }
                let started = Instant::now();
                let store = room.open(&name, room::options())?;
                let took = started.elapsed().as_secs_f64();
                if store.recovered().replayed_bytes < written * len.0 {
                    return Err(Failure::Damage("the open replayed only part of the log".to_owned()).into());
                }
                replay.push((written * len.0) as f64 / took);
                each.push(written as f64 / took);
                store.close()?;
            }
        }
        std::fs::remove_dir_all(dir)?;
        let figures = figures.into_iter().flat_map(|(_, raw, replay, each)| [raw, replay, each]).collect();
        Ok(Group { title, figures })
    }

    /// Writes the log and returns its number of deltas.
    fn write_log(&self, room: &Room, name: &str, deltas: Deltas) -> Result<u64, BenchStop> {
        let store = room.open(name, room::options())?;
        let mut batch = store.batch();
        for _ in 0..self.pages.0 / PAGE_LEN {
            batch.create(PAGE_LEN, room.place);
        }
        let pages = store.commit(batch)?.pages;
        let (len, per_batch) = (deltas.len.0, deltas.count);
        let bytes = vec![0x5a; len as usize];
        let mut random = SplitMix64::new(len);
        let batches = (self.bytes.0 / (len * per_batch)).max(1);
        for count in 0..batches {
            let mut batch = store.batch();
            for _ in 0..per_batch {
                let page = pages[random.below(pages.len() as u64) as usize];
                batch.write(page, random.below(PAGE_LEN / len) * len, &bytes);
            }
            store.commit(batch)?;
            if count % 1024 == 0 {
                room.check()?;
            }
        }
        store.close()?;
        Ok(batches * per_batch)
    }
}
