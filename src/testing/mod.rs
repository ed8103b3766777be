//! A disk and devices that fail, lag or crash on demand, and a hook that is told the engine's phases: for
//! tests.
//!
//! Only builds with the feature `testing` have them.

pub mod faulty_device;
pub mod late_device;
pub mod sim_disk;

pub use crate::base::phases;
#[cfg(shuttle)]
pub use crate::base::sync;
pub use crate::base::sync::threads::refusals as thread_refusals;
pub use crate::base::wall_clock::jump_to as wall_clock_jump_to;
