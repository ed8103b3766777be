//! Opens a store, writes a page, kills the process, and finds the page again.
//!
//! ```sh
//! cargo run --example crash_and_reopen
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::process::Command;

use remanent::{Place, Result, Store};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    match arguments.next() {
        // The child process, which is killed.
        Some(directory) => write_and_die(&directory),
        None => {
            let directory = tempfile::tempdir().expect("a temporary directory");
            let path = directory.path().join("store");

            // 1. A child process writes, then dies without closing the store: `abort` runs no destructors.
            let me = std::env::current_exe().expect("the path of this program");
            let died = Command::new(me).arg(&path).status().expect("a second process");
            assert!(!died.success());
            println!("the writer is gone: {died}");

            // 2. Opening the directory recovers the store. No separate step is needed.
            let store = Store::open(&path)?;
            let recovered = store.recovered();
            println!("recovered to batch {} in {:?}", recovered.position.lsn, recovered.elapsed);

            // 3. The page, key, metadata and root are those of the last acknowledged batch.
            let page = store.page_by_key("greeting")?;
            println!("{}", String::from_utf8_lossy(&store.read_to_vec(page.page)?));
            assert_eq!(store.read_to_vec(page.page)?, b"what remains");
            assert_eq!(store.root()?["step"].as_u64(), Some(2));
            Ok(())
        }
    }
}

fn write_and_die(directory: &str) -> Result<()> {
    let store = Store::open(directory)?;

    // A batch becomes visible and durable as a whole, or not at all.
    let mut batch = store.batch();
    let page = batch.create(12, Place::Host).key("greeting").page();
    batch.write(page, 0, b"what is here").set_root("step", 1u64);
    let page = store.commit(batch)?.pages[0];

    // A delta changes part of a page. The delta is logged before the page changes.
    let mut batch = store.batch();
    batch.write(page, 5, b"remains").set_root("step", 2u64);
    store.commit(batch)?;

    // The default acknowledgement is `Logged`: the batch survives the death of the process at any
    // instruction. To survive a power cut, use `Options::new().ack(Ack::Durable)` or call
    // `store.wait_durable(lsn)`.
    std::process::abort();
}
