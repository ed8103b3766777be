//! The integration tests: one binary, one file an area.

#[path = "../../fuzz/src/archive.rs"]
mod archive;
#[macro_use]
mod forward;

mod background;
mod concurrent;
mod api;
mod arrivals;
mod audit;
mod device_ops;
mod bounds;
mod bulk;
mod captures;
mod changed_pages;
mod compression;
mod crash;
mod full_file_systems;
mod cuda;
mod damage;
mod defences;
mod devices;
mod direct_io;
mod disk_faults;
mod disk_laws;
mod durable_marks;
mod faults;
mod files;
#[path = "../../fuzz/src/fit.rs"]
mod fit;
mod language;
mod layout;
mod follow;
mod fork;
mod forks;
mod fuzz_inputs;
mod gpu;
mod growth;
mod interrupted_reads;
#[cfg(feature = "cuda")]
mod kernels;
mod kill;
mod laws;
mod leases;
mod life;
mod loading;
mod machine;
mod model;
mod moves;
mod on_demand;
mod earlier_states;
mod pins;
mod reads;
mod readme;
mod recovery;
mod replay;
mod rule_model;
mod salvage;
mod scrub;
mod multi_device;
mod snapshots;
mod sparse_deltas;
mod store;
mod streams;
