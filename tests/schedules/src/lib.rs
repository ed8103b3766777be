//! The engine under many thread schedules, which a scheduler generates.
//!
//! It is the engine as it is, on a simulated disk and the host's memory; only its locks, waits, atomics,
//! threads and its clock are the scheduler's (`src/base/sync` in the engine). A test is a few threads that
//! commit, read, take snapshots or lease. It runs under many schedules, and in each of them
//!
//! - acknowledged batches are in the state that a crash would leave at that moment, whole and in order;
//! - bytes that were read are there, too (I1);
//! - no thread waits for good: the scheduler knows when no thread can go on;
//! - no thread that should have been called is woken by time alone: the clock tells.
//!
//! Run by
//!
//!     RUSTFLAGS="--cfg shuttle" cargo test --manifest-path tests/schedules/Cargo.toml \
//!         --target-dir target/schedules
//!
//! `REMANENT_SCHEDULES=N` runs N schedules per test, `REMANENT_SEED=N` selects other schedules. A failure
//! prints the schedule; `REMANENT_SCHEDULE=…` with the test's name runs that one alone.
//!
//! The limits: the scheduler's atomics are all sequentially consistent, and the system's work is not in it
//! (mapped files, real syncs, the GPU). The kill suites and the sanitizers look there.

#[cfg(all(test, not(shuttle)))]
compile_error!("build with RUSTFLAGS=\"--cfg shuttle\": without it there is no scheduler");

#[cfg(all(test, shuttle))]
#[path = "../../../fuzz/src/archive.rs"]
#[expect(dead_code, reason = "shared with the fuzzer, which needs more of it")]
mod archive;
#[cfg(all(test, shuttle))]
mod commits;
#[cfg(all(test, shuttle))]
mod ground;
#[cfg(all(test, shuttle))]
mod leases;
#[cfg(all(test, shuttle))]
mod runner;
#[cfg(all(test, shuttle))]
mod scrubs;
#[cfg(all(test, shuttle))]
mod snapshots;
#[cfg(all(test, shuttle))]
mod tiers;
#[cfg(all(test, shuttle))]
mod views;
