//! The compared stores, each with its strictest durability and all its integrity checks.

mod fjall;
mod lmdb;
pub mod okaywal;
mod redb;
mod remanent;
#[cfg(feature = "rocksdb")]
mod rocksdb;
mod sqlite;

use std::error::Error;
use std::path::Path;

use crate::record::Record;

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The records that a store returned.
pub struct Found {
    pub records: Vec<Record>,
    /// Damage that the store reported although it could be opened.
    pub reported: Option<String>,
}

impl From<Vec<Record>> for Found {
    fn from(records: Vec<Record>) -> Self {
        Self { records, reported: None }
    }
}

/// A store to which several threads commit.
pub trait Commit: Sync {
    /// Commits a record of a thread and returns once the record is durable.
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()>;
}

/// A store of whole blocks by number. A written block survives the death of the process but not a power cut.
pub trait Blocks {
    /// Returns the bytes of an existing block.
    fn get(&mut self, block: u64) -> Result<Vec<u8>>;
    /// Writes a new block.
    fn put(&mut self, block: u64, bytes: &[u8]) -> Result<()>;
    /// Returns the number of reads that the cache served without reading files, or `None` if the store does
    /// not count them.
    fn hits(&self) -> Option<u64>;
}

/// A function that opens an empty store of blocks. Its arguments are the directory, the length of the cache
/// and the total length of all blocks, in bytes.
pub type OpenBlocks = fn(&Path, u64, u64) -> Result<Box<dyn Blocks>>;

/// The stores of blocks. Each name describes the cache.
pub const BLOCK_STORES: &[(&str, OpenBlocks)] = &[
    ("remanent, s3-fifo", |directory, cache, _| remanent::open_blocks(directory, cache, false)),
    ("remanent, lru", |directory, cache, _| remanent::open_blocks(directory, cache, true)),
    #[cfg(feature = "rocksdb")]
    ("rocksdb, block cache", |directory, cache, _| rocksdb::open_blocks(directory, cache)),
    ("lmdb, the page cache: no limit", |directory, _, all| lmdb::open_blocks(directory, all)),
];

/// Number of records per thread, which are overwritten in turn.
const RECORDS: u64 = 16;

/// Returns the key of a thread's record.
fn key(thread: usize, count: u64) -> [u8; 8] {
    (thread as u64 * RECORDS + count % RECORDS).to_be_bytes()
}

/// A compared store.
pub struct Peer {
    pub name: &'static str,
    /// Writes all records durably, one after the other, then calls the callback while the store is open.
    pub write: fn(&Path, &dyn Fn()) -> Result<()>,
    /// Opens the store and reads all records.
    pub read: fn(&Path) -> Result<Found>,
    /// Opens an empty store to which this number of threads commit concurrently.
    pub open: fn(&Path, usize) -> Result<Box<dyn Commit>>,
}

pub const PEERS: &[Peer] = &[
    Peer { name: "remanent", write: remanent::write, read: remanent::read, open: remanent::open },
    Peer { name: "okaywal", write: okaywal::write, read: okaywal::read, open: okaywal::open },
    Peer { name: "fjall", write: fjall::write, read: fjall::read, open: fjall::open },
    Peer { name: "redb", write: redb::write, read: redb::read, open: redb::open },
    Peer { name: "sqlite", write: sqlite::write, read: sqlite::read, open: sqlite::open },
    #[cfg(feature = "rocksdb")]
    Peer { name: "rocksdb", write: rocksdb::write, read: rocksdb::read, open: rocksdb::open },
    Peer { name: "lmdb", write: lmdb::write, read: lmdb::read, open: lmdb::open },
];

/// Returns the store with this name.
pub fn named(name: &str) -> &'static Peer {
    PEERS.iter().find(|peer| peer.name == name).expect("a peer's name")
}
