//! LMDB with its default syncs. Each record has its own key and transaction.

use std::path::Path;

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions};

use super::{Blocks, Commit, Found, Result};
use crate::record;

/// Opens an environment. The length of its memory map is also the maximum length of the file.
fn map(directory: &Path) -> Result<Env> {
    let mut options = EnvOpenOptions::new();
    options.map_size(64 << 20);
    // SAFETY: no other process has the directory's files open, and none changes them while this process maps
    // them.
    Ok(unsafe { options.open(directory)? })
}

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let env = map(directory)?;
    let mut transaction = env.write_txn()?;
    let records = env.create_database::<Bytes, Bytes>(&mut transaction, None)?;
    transaction.commit()?;
    for number in 0..record::COUNT {
        let mut transaction = env.write_txn()?;
        records.put(&mut transaction, &number.to_be_bytes(), &record::bytes(number))?;
        transaction.commit()?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let env = map(directory)?;
    let transaction = env.read_txn()?;
    let records = env.open_database::<Bytes, Bytes>(&transaction, None)?.ok_or("there is no database")?;
    let mut found = Vec::new();
    for entry in records.iter(&transaction)? {
        let (key, value) = entry?;
        found.push((key.to_vec(), value.to_vec()));
    }
    Ok(found.into())
}

pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    let env = map(directory)?;
    let mut transaction = env.write_txn()?;
    let records = env.create_database::<Bytes, Bytes>(&mut transaction, None)?;
    transaction.commit()?;
    Ok(Box::new((env, records)))
}

impl Commit for (Env, Database<Bytes, Bytes>) {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        let mut transaction = self.0.write_txn()?;
        self.1.put(&mut transaction, &super::key(thread, count), record)?;
        Ok(transaction.commit()?)
    }
}

/// Blocks that are read through the memory map. The page cache is the cache, and LMDB does not limit it.
struct MappedBlocks(Env, Database<Bytes, Bytes>);

/// Opens a store of blocks without a sync per commit. The map is twice as long as all blocks.
pub fn open_blocks(directory: &Path, all: u64) -> Result<Box<dyn Blocks>> {
    let mut options = EnvOpenOptions::new();
    options.map_size((2 * all as usize).next_multiple_of(1 << 20) + (64 << 20));
    // SAFETY: the blocks are compared when they are read, and need not survive a power cut.
    unsafe { options.flags(EnvFlags::NO_SYNC) };
    // SAFETY: no other process has the directory's files open, and none changes them while this process maps
    // them.
    let env = unsafe { options.open(directory)? };
    let mut transaction = env.write_txn()?;
    let blocks = env.create_database::<Bytes, Bytes>(&mut transaction, None)?;
    transaction.commit()?;
    Ok(Box::new(MappedBlocks(env, blocks)))
}

impl Blocks for MappedBlocks {
    fn get(&mut self, block: u64) -> Result<Vec<u8>> {
        let transaction = self.0.read_txn()?;
        Ok(self.1.get(&transaction, &block.to_be_bytes())?.ok_or("a block is gone")?.to_vec())
    }

    fn put(&mut self, block: u64, bytes: &[u8]) -> Result<()> {
        let mut transaction = self.0.write_txn()?;
        self.1.put(&mut transaction, &block.to_be_bytes(), bytes)?;
        Ok(transaction.commit()?)
    }

    fn hits(&self) -> Option<u64> {
        None
    }
}
