//! okaywal. Each record is an entry with two chunks, the key and the value, whose checksums are verified.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use okaywal::{
    Configuration, Entry, EntryId, LogManager, LogVoid, ReadChunkResult, SegmentReader, WriteAheadLog,
};

use super::{Commit, Found, Result};
use crate::record::{self, Record};

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let log = WriteAheadLog::recover(directory, LogVoid)?;
    for number in 0..record::COUNT {
        let mut entry = log.begin_entry()?;
        entry.write_chunk(&number.to_be_bytes())?;
        entry.write_chunk(&record::bytes(number))?;
        entry.commit()?;
    }
    done();
    Ok(())
}

/// Collects the recovered records.
#[derive(Clone, Debug, Default)]
struct Collector(Arc<Mutex<Vec<Record>>>);

impl LogManager for Collector {
    fn recover(&mut self, entry: &mut Entry<'_>) -> io::Result<()> {
        let mut chunks = Vec::new();
        loop {
            match entry.read_chunk()? {
                ReadChunkResult::Chunk(mut chunk) => {
                    chunks.push(chunk.read_all()?);
                    if !chunk.check_crc()? {
                        return Err(io::Error::other("a chunk's checksum does not match"));
                    }
                }
                ReadChunkResult::EndOfEntry => break,
                // An unfinished entry was not acknowledged.
                ReadChunkResult::AbortedEntry => return Ok(()),
            }
        }
        let value = chunks.pop().unwrap_or_default();
        self.0.lock().expect("no panic").push((chunks.pop().unwrap_or_default(), value));
        Ok(())
    }

    fn checkpoint_to(&mut self, _: EntryId, _: &mut SegmentReader, _: &WriteAheadLog) -> io::Result<()> {
        Ok(())
    }
}

pub fn read(directory: &Path) -> Result<Found> {
    let collector = Collector::default();
    let log = WriteAheadLog::recover(directory, collector.clone())?;
    let records = std::mem::take(&mut *collector.0.lock().expect("no panic"));
    drop(log);
    Ok(records.into())
}

pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    Ok(Box::new(WriteAheadLog::recover(directory, LogVoid)?))
}

/// Opens a log that keeps as much as Remanent keeps between two snapshots, instead of the default 768 KiB.
/// The log then fills new files and does not immediately reuse a file.
pub fn open_keeping_log(directory: &Path) -> Result<Box<dyn Commit>> {
    const KEPT: u32 = 256 << 20;
    let configuration = Configuration::default_for(directory);
    let configuration = configuration.preallocate_bytes(KEPT + (1 << 20)).checkpoint_after_bytes(KEPT.into());
    Ok(Box::new(configuration.open(LogVoid)?))
}

impl Commit for WriteAheadLog {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        let mut entry = self.begin_entry()?;
        entry.write_chunk(&super::key(thread, count))?;
        entry.write_chunk(record)?;
        entry.commit()?;
        Ok(())
    }
}
