//! A follower reads every batch of a store in order and maintains a copy of its pages.
//!
//! ```sh
//! cargo run --example follow
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::thread;
use std::time::Duration;

use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::store::ReadPages;
use remanent::{Place, Result, Store};

const BATCHES: u64 = 200;

fn main() -> Result<()> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("store");
    let store = Store::open(&path)?;

    thread::scope(|scope| {
        // The follower takes no lock and writes nothing. It could also run in another process.
        let following = scope.spawn(|| -> Result<(Replica, String)> {
            let mut follower = Follower::open(&path, FollowFrom::Beginning)?;
            let mut replica = Replica::default();
            for batch in &mut follower {
                // Each batch arrives whole, in order and exactly once.
                replica.apply(&batch?)?;
                if replica.lsn().0 == BATCHES {
                    break;
                }
            }
            // A later process continues from this position: incarnation, Lsn and chain hash.
            Ok((replica, follower.position().to_string()))
        });

        let mut batch = store.batch();
        batch.create(8, Place::Host).key("counter");
        let page = store.commit(batch)?.pages[0];
        for number in 2..=BATCHES {
            let mut batch = store.batch();
            batch.write(page, 0, &number.to_le_bytes());
            store.commit(batch)?;
        }

        let (replica, position) = following.join().expect("the follower's thread")?;
        assert_eq!(replica.read_to_vec(page)?, BATCHES.to_le_bytes());
        println!("the copy is at batch {}; another process goes on from {position}", replica.lsn());

        let mut later = Follower::open(&path, FollowFrom::Position(position.parse().expect("a position")))?;
        assert!(later.next(Duration::ZERO)?.is_none(), "nothing has come since");
        store.commit(store.batch().set_root("done", true))?;
        let batch = later.next(Duration::from_secs(10))?.expect("one more batch");
        println!("and finds batch {} there", batch.lsn());
        Ok(())
    })
}
