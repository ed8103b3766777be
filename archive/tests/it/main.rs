//! Tests of the archive protocol in a simulation.
//!
//! `tests/README.md` in the repository lists the injected faults.

mod campaign;
mod rules;
mod schedules;
mod stage;
#[path = "../../../tests/it/size.rs"]
mod size;
mod operations;
mod buckets;
