//! The state of a training run: deltas at each step, named snapshots, a restore, and a fork for an
//! experiment.
//!
//! ```sh
//! cargo run --example training_state
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use remanent::batch::Width;
use remanent::store::ReadPages;
use remanent::{Metadata, PageId, Place, Result, SnapshotOptions, StatePoint, Store, Value};

/// Number of parameters of the only layer, each a little-endian `f32`.
const PARAMETERS: u32 = 1024;

/// Changes every eighth parameter slightly, as a sparse optimizer would.
fn step(store: &Store, weights: PageId, step: u64) -> Result<()> {
    let indices: Vec<u32> = (0..PARAMETERS).skip(step as usize % 8).step_by(8).collect();
    let values: Vec<u8> =
        indices.iter().flat_map(|index| (*index as f32 * step as f32).to_le_bytes()).collect();
    let mut batch = store.batch();
    // The log records the changed elements and about one byte of index per element, not the whole page.
    batch.scatter(weights, Width::W4, &indices, &values);
    // The step and the loader position are entries of the root, so they are committed with the weights.
    batch.set_root("step", step).set_root("loader", step * 32).note(format!("step {step}"));
    store.commit(batch)?;
    Ok(())
}

/// Reads the step. Works for a store, a view of an earlier state and a replica, which all implement
/// `ReadPages`.
fn steps_of(pages: &impl ReadPages) -> Result<u64> {
    Ok(pages.root()?["step"].as_u64().expect("a step"))
}

fn main() -> Result<()> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("run");
    let store = Store::open(&path)?;

    let mut batch = store.batch();
    let metadata = Metadata::from([("dtype".to_owned(), Value::from("f32"))]);
    batch.create(u64::from(PARAMETERS) * 4, Place::Host).key("layer.0.weight").metadata(metadata);
    let weights = store.commit(batch)?.pages[0];

    // 1. Train. A named snapshot is kept until its name is released. Steps continue while the snapshot is
    //    written.
    for number in 1..=10 {
        step(&store, weights, number)?;
    }
    let good = store.snapshot_with(SnapshotOptions::new().name("before the warm-up ended"))?;
    println!("snapshot {} holds batch {}", good.id, good.end);
    for number in 11..=20 {
        step(&store, weights, number)?;
    }

    // 2. View the named state, read-only, while the run continues.
    let point = StatePoint::Name("before the warm-up ended".to_owned());
    let then = Store::open_at(&path, &point)?;
    assert_eq!((steps_of(&then)?, steps_of(&store)?), (10, 20));
    let weights_then = then.read_to_vec(weights)?;

    // 3. Run an experiment from that state in a fork. Image files are shared, not copied.
    let trial = directory.path().join("trial");
    store.fork(&trial, &point)?;
    let trial = Store::open(&trial)?;
    step(&trial, weights, 1000)?;
    assert_eq!((steps_of(&trial)?, steps_of(&store)?), (1000, 20));

    // 4. Restore. A restore adds one more batch, so step 20 can itself be restored later.
    let before = store.lsn();
    store.restore(&point)?;
    assert_eq!((steps_of(&store)?, store.read_to_vec(weights)?), (10, weights_then));
    store.restore(StatePoint::Lsn(before))?;
    assert_eq!(steps_of(&store)?, 20);
    println!("went back to step 10 and forward to step 20 again");
    Ok(())
}
