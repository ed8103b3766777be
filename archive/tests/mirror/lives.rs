//! Random histories of a store that is archived after each step. `REMANENT_TEST_SIZE=full` runs more of them.

use crate::bed::{Bed, Life};

/// Runs one history of commits, snapshots, closes, crashes and opens. After each step, pushes the directory, and
/// compares a restore with the state after the last archived batch. Returns the number of boundaries.
fn live(seed: u64) -> u64 {
    let bed = Bed::new(seed);
    let mut life = Life::new(seed);
    let mut archived = 0;
    let mut boundaries = 0;
    for step in 0..10 {
        let batches = life.rng.below(6);
        let store = life.work(batches);
        if life.rng.chance(0.4) {
            store.snapshot().unwrap();
        }
        if life.rng.chance(0.4) {
            life.name(&store, &format!("step {step}"));
        }
        let names: Vec<String> = life.names.keys().cloned().collect();
        if names.len() > 1 && life.rng.chance(0.4) {
            let name = names[life.rng.below(names.len())].clone();
            life.give_up(&store, &name);
        }
        let is_crash = life.rng.chance(0.4);
        if is_crash {
            life.crash(store);
        } else {
            store.close().unwrap();
        }
        if life.rng.chance(0.25) {
            continue; // The log may be recycled before the next push.
        }
        let pushed = bed.push(&life.path).unwrap_or_else(|error| panic!("seed {seed}, step {step}: {error}"));
        let newest = *life.states.keys().next_back().unwrap();
        let lsn = pushed.archived.lsn.0;
        assert!(lsn >= archived && (is_crash || lsn == newest), "seed {seed}, step {step}: {pushed:?}");
        assert_eq!(pushed.damaged, []);
        archived = lsn;
        boundaries += u64::from(pushed.pruned != remanent_archive::line::Pruned::Nothing);
        let (state, names) = bed.restored();
        life.check_names(&names, &format!("seed {seed}, step {step}"));
        assert_eq!(state.lsn, lsn, "seed {seed}, step {step}");
        if lsn > 0 {
            assert!(state == life.states[&lsn], "seed {seed}, step {step}: another state at lsn {lsn}");
        }
    }
    boundaries
}

#[test]
fn restores_equal_the_store_after_each_push() {
    let lives = crate::size::sized(3, 64);
    let boundaries: u64 = (0..lives).map(live).sum();
    assert!(boundaries > lives, "{boundaries}");
}
