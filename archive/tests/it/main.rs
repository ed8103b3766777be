//! Tests of the archive's protocol in a simulation.
//!
//! `tests/README.md` of the repository lists the injected faults.

mod campaign;
mod rules;
mod schedules;
mod stage;
mod operations;
mod buckets;
