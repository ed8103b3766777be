//! Foundations that all other folders use: locks, threads, parallel work, process identity, fallible allocation and
//! poison.

pub(crate) mod aligned_buf;
pub(crate) mod closed_on_fork;
pub(crate) mod crew;
pub(crate) mod allocation;
pub(crate) mod fair_mutex;
pub(crate) mod huge_pages;
pub(crate) mod cache_padded;
pub(crate) mod pace;
pub(crate) mod parallel;
pub mod phases;
pub(crate) mod poison;
pub(crate) mod process;
#[cfg(any(feature = "nccl", feature = "nixl"))]
pub(crate) mod python_packages;
pub(crate) mod queue;
#[cfg(not(shuttle))]
pub(crate) mod sync;
#[cfg(shuttle)]
pub mod sync;
pub(crate) mod wakers;
pub mod wall_clock;
