//! A cache of blocks with keys. Blocks are added, evicted, and found again after a restart.
//!
//! ```sh
//! cargo run --example kv_cache
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::collections::VecDeque;

use remanent::store::ReadPages;
use remanent::{Error, Key, Place, Result, Store};

/// Length of a block in bytes.
const BLOCK_LEN: usize = 16 << 10;
/// Maximum number of blocks in the cache.
const BLOCKS_MAX: usize = 64;

/// Blocks in insertion order, oldest first. The store itself is the index on disk.
struct Cache {
    store: Store,
    order: VecDeque<Key>,
}

impl Cache {
    fn open(directory: &std::path::Path) -> Result<Self> {
        let store = Store::open(directory)?;
        // After a restart, the index is rebuilt from the pages: their keys, and the batch that last wrote
        // each page.
        let mut blocks: Vec<_> = store.pages_with_prefix("block/")?.collect();
        blocks.sort_by_key(|block| block.lsn);
        let order = blocks.into_iter().filter_map(|block| block.key).collect();
        Ok(Self { store, order })
    }

    fn get(&mut self, hash: u64) -> Result<Option<Vec<u8>>> {
        let key = key(hash)?;
        let mut block = vec![0; BLOCK_LEN];
        // The key and the bytes are read at the same moment, so a concurrent eviction happens entirely before
        // or after.
        match self.store.read_key(&key, 0, &mut block) {
            Ok(_) => Ok(Some(block)),
            Err(Error::UnknownKey { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Adds a block and evicts the oldest block in the same batch, so that after a crash the cache contains
    /// exactly one of the two.
    fn put(&mut self, hash: u64, block: Vec<u8>) -> Result<()> {
        let key = key(hash)?;
        let mut batch = self.store.batch();
        let is_full = self.order.len() >= BLOCKS_MAX;
        if let Some(oldest) = self.order.front().filter(|_| is_full) {
            batch.delete(oldest);
        }
        batch.create_from(block, Place::Host).key(&key);
        self.store.commit(batch)?;
        // Update the list only now, because a rejected batch evicts nothing.
        if is_full {
            self.order.pop_front();
        }
        self.order.push_back(key);
        Ok(())
    }
}

fn key(hash: u64) -> Result<Key> {
    Ok(Key::new(format!("block/{hash:016x}"))?)
}

fn content(hash: u64) -> Vec<u8> {
    hash.to_le_bytes().repeat(BLOCK_LEN / 8)
}

fn main() -> Result<()> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("cache");

    let mut cache = Cache::open(&path)?;
    for hash in 0..200 {
        cache.put(hash, content(hash))?;
    }
    assert_eq!(cache.get(7)?, None, "it was evicted");
    assert_eq!(cache.get(199)?, Some(content(199)));
    println!("{} blocks of 200 are left", cache.store.page_count()?);
    drop(cache);

    // A new process finds every acknowledged block and verifies its bytes.
    let mut cache = Cache::open(&path)?;
    let hits = (0..200)
        .filter(|hash| matches!(cache.get(*hash), Ok(Some(block)) if block == content(*hash)))
        .count();
    println!("{hits} hits after the restart");
    assert_eq!(hits, BLOCKS_MAX);
    // Eviction continues in the same order.
    cache.put(200, content(200))?;
    assert_eq!((cache.get(136)?, cache.get(137)?), (None, Some(content(137))));
    Ok(())
}
