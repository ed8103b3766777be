//! A simulated bucket and simulated machines under a seeded scheduler, for tests.
//!
//! [`run`] plays one schedule: writers, readers and pruners on three machines, which run the functions of
//! [`line`](crate::line) on one bucket. A request has one or two points at which the scheduler may run another process,
//! stall this one, or kill it. The bucket delays, repeats and loses requests; a killed process leaves requests that take
//! effect later, or never. Machines lose power or their disk, and old copies of directories come back.
//!
//! After each acknowledgement and each restore, [`world`] checks the promises of the archive.

pub mod schedule;
pub mod process;
pub mod bucket;
pub mod handle;
pub mod world;
pub mod store;
pub mod rng;

pub use schedule::{Outcome, Simulation, run};
