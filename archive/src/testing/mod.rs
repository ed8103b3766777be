//! A simulated bucket and simulated machines with a seeded scheduler, for tests.
//!
//! [`run`] runs one schedule: writers, readers and pruners on three machines call the functions of
//! [`line`](crate::line) on one bucket. Each request yields to the scheduler once or twice. The scheduler may then run
//! another process, stall this one, or kill it. The bucket delays, repeats and loses requests. Requests of a killed
//! process may take effect later. Machines lose power or their disk, and old copies of directories are opened.
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
