//! Remanent. Each record is a page that is committed durably.

use std::path::Path;

use remanent::options::{Compression, ImageOptions, MemoryOptions};
use remanent::tiers::Tiers;
use remanent::{Ack, DeviceChoice, Key, Options, PageId, Place, Store};

use super::{Blocks, Commit, Found, RECORDS, Result};
use crate::record;

fn options() -> Options {
    Options::new().ack(Ack::Durable).device(DeviceChoice::Host)
}

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let store = options().open(directory)?;
    for number in 0..record::COUNT {
        let bytes = record::bytes(number);
        let mut batch = store.batch();
        let key = Key::new(number.to_be_bytes())?;
        let page = batch.create(bytes.len() as u64, Place::Host).key(key).page();
        batch.write(page, 0, &bytes);
        store.commit(batch)?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let store = options().open(directory)?;
    let mut records = Vec::new();
    for info in store.pages()? {
        let mut bytes = vec![0; usize::try_from(info.len)?];
        store.read(info.page, 0, &mut bytes)?;
        records.push((info.key.map_or_else(Vec::new, |key| key.as_bytes().to_vec()), bytes));
    }
    let reported = store.recovered().torn.as_ref().map(|torn| format!("{torn:?}"));
    Ok(Found { records, reported })
}

/// Maximum total length in bytes of the records of one thread.
const PAGE_LEN: u64 = 4 << 20;

pub fn open(directory: &Path, threads: usize) -> Result<Box<dyn Commit>> {
    let store = options().open(directory)?;
    let mut batch = store.batch();
    for _ in 0..threads {
        batch.create(PAGE_LEN, Place::Host);
    }
    let pages = store.commit(batch)?.pages;
    Ok(Box::new((store, pages)))
}

impl Commit for (Store, Vec<PageId>) {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        let mut batch = self.0.batch();
        batch.write(self.1[thread], count % RECORDS * record.len() as u64, record);
        self.0.commit(batch)?;
        Ok(())
    }
}

/// Opens a store that holds up to `cache` bytes of pages in host memory and all other pages on disk.
pub fn open_blocks(directory: &Path, cache: u64, is_lru: bool) -> Result<Box<dyn Blocks>> {
    let tiers = Tiers::new([Place::Host, Place::Disk]);
    let options = Options::new()
        .device(DeviceChoice::Host)
        .images(ImageOptions::new().compression(Compression::Off))
        .memory(MemoryOptions::new().budget(Place::Host, cache))
        .tiers(if is_lru { tiers.lru() } else { tiers });
    Ok(Box::new(options.ack(Ack::Applied).open(directory)?))
}

impl Blocks for Store {
    fn get(&mut self, block: u64) -> Result<Vec<u8>> {
        let page = self.page_by_key(&Key::new(block.to_be_bytes())?)?.page;
        self.ensure(&[page], Place::Host)?;
        Ok(self.read_to_vec(page)?)
    }

    fn put(&mut self, block: u64, bytes: &[u8]) -> Result<()> {
        Store::put(self, &Key::new(block.to_be_bytes())?, bytes, Place::Host)?;
        Ok(())
    }

    fn hits(&self) -> Option<u64> {
        self.stats().tiers.iter().find(|tier| tier.place == Place::Host).map(|tier| tier.hits)
    }
}
