//! The integration tests: one binary, one file an area.

mod background;
mod beside;
mod bulk;
mod compression;
mod crash;
mod cuda;
mod damage;
mod devices;
mod direct;
mod disk_faults;
mod disk_laws;
mod faults;
mod files;
mod floors;
mod follow;
mod fork;
mod forks;
mod gpu;
mod interrupted;
#[cfg(feature = "cuda")]
mod kernels;
mod kill;
mod laws;
mod leases;
mod model;
mod past;
mod readme;
mod recovery;
mod rule_model;
mod salvage;
mod several;
mod snapshots;
mod sparse;
mod store;
mod streams;
