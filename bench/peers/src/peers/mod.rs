//! The stores, each with the strictest durability and the most checking that it offers.

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

/// The records that a store gives back.
pub struct Found {
    pub records: Vec<Record>,
    /// The damage that it told of without refusing to open.
    pub told: Option<String>,
}

impl From<Vec<Record>> for Found {
    fn from(records: Vec<Record>) -> Self {
        Self { records, told: None }
    }
}

/// A store to which several threads commit.
pub trait Commit: Sync {
    /// Returns when the record is durable. Threads have records of their own.
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()>;
}

/// A store of whole blocks by number. What was put survives the death of the process, not a power cut.
pub trait Blocks {
    /// The bytes of a block that was put.
    fn get(&mut self, block: u64) -> Result<Vec<u8>>;
    /// Puts a new block.
    fn put(&mut self, block: u64, bytes: &[u8]) -> Result<()>;
    /// The gets that the cache of the store answered without its files; `None` if the store cannot tell.
    fn hits(&self) -> Option<u64>;
}

/// A way to open an empty store of blocks: the directory, the bytes of its cache, the bytes of all blocks.
pub type OpenBlocks = fn(&Path, u64, u64) -> Result<Box<dyn Blocks>>;

/// The stores of blocks, each with what its cache is.
pub const BLOCK_STORES: &[(&str, OpenBlocks)] = &[
    ("remanent, s3-fifo", |directory, cache, _| remanent::open_blocks(directory, cache, false)),
    ("remanent, lru", |directory, cache, _| remanent::open_blocks(directory, cache, true)),
    #[cfg(feature = "rocksdb")]
    ("rocksdb, block cache", |directory, cache, _| rocksdb::open_blocks(directory, cache)),
    ("lmdb, the page cache: no limit", |directory, _, all| lmdb::open_blocks(directory, all)),
];

/// Records of a thread, which are overwritten in turn.
const RECORDS: u64 = 16;

/// The key of a thread's record.
fn key(thread: usize, count: u64) -> [u8; 8] {
    (thread as u64 * RECORDS + count % RECORDS).to_be_bytes()
}

/// A store under test.
pub struct Peer {
    pub name: &'static str,
    /// Writes every record durably, one after the other, and calls back with the store still open.
    pub write: fn(&Path, &dyn Fn()) -> Result<()>,
    /// Opens the store and reads everything.
    pub read: fn(&Path) -> Result<Found>,
    /// Opens an empty one for this number of threads that commit at once.
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

/// The peer of this name.
pub fn named(name: &str) -> &'static Peer {
    PEERS.iter().find(|peer| peer.name == name).expect("a peer's name")
}
