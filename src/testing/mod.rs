//! Test doubles: a disk and devices that fail, delay work or crash on demand, and a hook for the phases of the engine.
//!
//! They exist only in builds with the feature `testing`.

pub mod faulty_device;
pub mod late_device;
pub mod sim_disk;

pub use crate::base::phases;
#[cfg(shuttle)]
pub use crate::base::sync;
pub use crate::base::sync::threads::refusals as thread_refusals;
pub use crate::base::wall_clock::jump_to as wall_clock_jump_to;
