//! The engine under many thread schedules, which a scheduler generates.
//!
//! The engine itself runs unchanged, on a simulated disk and host memory. Only its locks, waits, atomics,
//! threads and clock are replaced by those of the scheduler (`src/base/sync` in the engine). A test consists
//! of a few threads that commit, read, take snapshots or lease. It runs under many schedules, and each
//! schedule must satisfy these conditions:
//!
//! - Acknowledged batches are in the state that a crash at that moment would leave, whole and in order.
//! - Bytes that were read are in that state, too (I1).
//! - No thread waits forever. The scheduler detects when no thread can continue.
//! - No thread that another thread should have woken is woken by a timeout. The simulated clock reveals this.
//!
//! Run the tests with
//!
//!     RUSTFLAGS="--cfg shuttle" cargo test --manifest-path tests/schedules/Cargo.toml \
//!         --target-dir target/schedules
//!
//! `REMANENT_SCHEDULES=N` runs N schedules per test, and `REMANENT_SEED=N` selects other schedules. A failure
//! prints its schedule. `REMANENT_SCHEDULE=…` with the test's name runs only that schedule.
//!
//! Limits: all atomics of the scheduler are sequentially consistent, and the work of the system is not
//! simulated (mapped files, real syncs, the GPU). The kill suites and the sanitizers cover these parts.

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
