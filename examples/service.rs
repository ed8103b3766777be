//! An asynchronous service in which many tasks share one store.
//!
//! ```sh
//! cargo run --example service
//! ```
//!
//! Lookups never wait, and submitting a small batch rarely waits for the disk, so tasks do both themselves.
//! Waiting for durability is a future: one sync of the store completes the futures of all waiting tasks, and
//! no thread of the runtime blocks. Calls that wait for a disk, such as opening or a snapshot, belong on
//! `spawn_blocking`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::sync::Arc;

use remanent::{Ack, Key, Place, Result, Store};

/// Handles one request: stores a value under a key, and returns once the value would survive a power cut.
async fn put(store: Arc<Store>, key: String, value: Vec<u8>) -> Result<()> {
    let mut batch = store.batch();
    batch.create_from(value, Place::Host).key(key);
    let ticket = store.submit(batch)?;
    ticket.acknowledged(Ack::Durable).await
}

fn get(store: &Store, key: &str) -> Result<Vec<u8>> {
    store.read_to_vec(store.page_by_key(&Key::new(key)?)?.page)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("store");
    let store = tokio::task::spawn_blocking(move || Store::open(path)).await??;
    let store = Arc::new(store);

    let requests: Vec<_> = (0..1000)
        .map(|number| tokio::spawn(put(store.clone(), format!("request/{number}"), vec![number as u8; 100])))
        .collect();
    for request in requests {
        request.await??;
    }
    let syncs = store.stats().log.syncs;
    println!("1000 durable requests by {syncs} syncs");
    assert_eq!(get(&store, "request/7")?, [7; 100]);

    // The last handle is closed where blocking is allowed, because closing syncs and seals the log.
    let store = Arc::into_inner(store).expect("every task has ended");
    tokio::task::spawn_blocking(move || store.close()).await??;
    Ok(())
}
