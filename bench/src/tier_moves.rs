//! Measures moves of pages between two places without other load: one call moves all pages, and the time ends when the
//! bytes have arrived.
//!
//! `remanent-bench tiers` replays a trace, in which moves concern some blocks and mix with commits and reads. Here all
//! pages of one length are moved at once, and the rate is compared with that of the bus or the disk in the
//! same round.

use std::time::{Duration, Instant};

use remanent::options::{Compression, ImageOptions, MemoryOptions, ScrubSchedule, SnapshotSchedule};
use remanent::{Ack, Options, PageId, Place, Store};
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Group, Unit, rate};
use crate::room::{BenchStop, Room};
use crate::tier_ceilings;

/// The page lengths.
const PAGE_LENS: [u64; 2] = [2 << 20, 16 << 10];
/// Bytes that are written to each page so that no existing image holds its content.
const TOUCHED: [u8; 8] = [9; 8];

/// The figures of one page length.
pub struct Moves {
    page_len: u64,
    bytes: u64,
    group: Group,
}

impl Moves {
    /// Returns the groups of all lengths, each with up to `bytes` bytes of pages, but at least one page.
    pub fn all(bytes: u64) -> Vec<Self> {
        let of_len = |page_len: u64| {
            let count = (bytes / page_len).max(1);
            let title = format!("{count} pages of {}, moved by one call", Size(page_len));
            Self { page_len, bytes: count * page_len, group: Group::new(title) }
        };
        PAGE_LENS.map(of_len).into()
    }

    /// Returns the maximum bytes of memory and disk that a round of all lengths takes.
    pub fn bytes_needed(bytes: u64) -> u64 {
        // Each move to disk writes an image of each page, and snapshots may do so again.
        bytes.max(PAGE_LENS[0]).saturating_mul(8)
    }

    pub fn round(&mut self, room: &Room) -> Result<(), BenchStop> {
        room.step(&self.group.title)?;
        for (name, rate) in tier_ceilings::rates(room, self.bytes)? {
            self.push(name.to_owned(), rate, None);
        }
        let fast = if room.is_gpu() { room.place } else { Place::Device(0) };
        let memory = MemoryOptions::new().budget(fast, 2 * self.bytes).budget(Place::Pinned, 2 * self.bytes);
        let options = Options::new()
            .ack(Ack::Applied)
            .images(ImageOptions::new().compression(Compression::Off))
            .scrubs(ScrubSchedule::new().interval(None))
            .snapshots(SnapshotSchedule::new().interval(None))
            .memory(memory);
        let store = room.open("moves", options)?;
        let mut batch = store.batch();
        for _ in 0..self.bytes / self.page_len {
            batch.create(self.page_len, Place::Pinned);
        }
        let pages = store.commit(batch)?.pages;
        // The first pass allocates memory and is not counted. Two of the moves occur twice, and are counted
        // once.
        for is_counted in [false, true] {
            let mut place = Place::Pinned;
            for (to, is_new) in [
                (fast, true),
                (Place::Pinned, true),
                (Place::Disk, true),
                (Place::Pinned, true),
                (fast, false),
                (Place::Disk, true),
                (fast, true),
                (Place::Pinned, false),
            ] {
                room.check()?;
                let took = move_all(&store, &pages, to)?;
                if is_counted && is_new {
                    let ceiling = tier_ceilings::in_room(room, place, to);
                    self.push(format!("{place} to {to}"), rate(self.bytes, took), Some(ceiling));
                }
                place = to;
            }
        }
        store.close()?;
        Ok(std::fs::remove_dir_all(room.path("moves"))?)
    }

    fn push(&mut self, name: String, rate: f64, ceiling: Option<&str>) {
        let figures = &mut self.group.figures;
        let at = figures.iter().position(|figure| figure.name == name).unwrap_or_else(|| {
            let figure = Figure::new(name, Unit::BytesPerSecond);
            figures.push(match ceiling {
                Some(ceiling) => figure.under(ceiling),
                None => figure,
            });
            figures.len() - 1
        });
        figures[at].push(rate);
    }

    pub fn group(self) -> Group {
        self.group
    }
}

/// Moves pages to a place, and returns the time until the last of them can be read there. On a device that is
/// when its copies are done.
fn move_all(store: &Store, pages: &[PageId], to: Place) -> Result<Duration, BenchStop> {
    if to == Place::Disk {
        // Makes each page differ from its image: otherwise the existing image would be kept and nothing
        // written.
        let mut batch = store.batch();
        pages.iter().for_each(|page| _ = batch.write(*page, 0, &TOUCHED));
        store.commit(batch)?;
    }
    let last = *pages.last().expect("one page at least");
    let mut bytes = [0; TOUCHED.len()];
    // Waits until no earlier work is in flight.
    store.read(last, 0, &mut bytes)?;
    let started = Instant::now();
    store.ensure(pages, to)?;
    if to != Place::Disk {
        // Command lists are done in order, and this is the last page of the last one.
        store.read(last, 0, &mut bytes)?;
    }
    Ok(started.elapsed())
}
