//! The stores, each with the strictest durability and the most checking that it offers.

mod fjall;
mod lmdb;
mod okaywal;
mod redb;
mod remanent;
mod sqlite;

use std::error::Error;
use std::path::Path;

use crate::record::Record;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What a store gives back.
pub struct Found {
    pub records: Vec<Record>,
    /// What it told of damage without refusing to open.
    pub told: Option<String>,
}

impl From<Vec<Record>> for Found {
    fn from(records: Vec<Record>) -> Self {
        Self { records, told: None }
    }
}

/// A store.
pub struct Peer {
    pub name: &'static str,
    /// Writes every record durably, one after the other, and calls back with the store still open.
    pub write: fn(&Path, &dyn Fn()) -> Result<()>,
    /// Opens and reads everything.
    pub read: fn(&Path) -> Result<Found>,
}

pub const PEERS: &[Peer] = &[
    Peer { name: "remanent", write: remanent::write, read: remanent::read },
    Peer { name: "okaywal", write: okaywal::write, read: okaywal::read },
    Peer { name: "fjall", write: fjall::write, read: fjall::read },
    Peer { name: "redb", write: redb::write, read: redb::read },
    Peer { name: "sqlite", write: sqlite::write, read: sqlite::read },
    Peer { name: "lmdb", write: lmdb::write, read: lmdb::read },
];

/// The peer of this name.
pub fn named(name: &str) -> &'static Peer {
    PEERS.iter().find(|peer| peer.name == name).expect("a peer's name")
}
