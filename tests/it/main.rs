//! The integration tests: one binary, one file an area.

#[path = "../../fuzz/src/archive.rs"]
mod archive;
#[macro_use]
mod forward;

mod api;
mod arrivals;
mod audit;
mod background;
mod bounds;
mod bulk;
mod captures;
mod change_streams;
mod changed_pages;
mod compares;
mod compression;
mod concurrent;
mod copies;
mod counters;
mod crash;
mod cuda;
mod damage;
mod defences;
mod device_ops;
mod devices;
mod direct_io;
mod disk_faults;
mod disk_laws;
mod durable_marks;
mod earlier_states;
mod faults;
mod files;
#[path = "../../fuzz/src/fit.rs"]
mod fit;
mod follow;
mod fork;
mod forks;
mod full_file_systems;
mod fuzz_inputs;
mod gpu;
mod growth;
mod image_spares;
mod image_ways;
mod in_place;
mod interrupted_reads;
#[cfg(feature = "cuda")]
mod kernels;
mod kill;
mod language;
mod laws;
mod layout;
mod leases;
mod lent_pages;
mod life;
mod loading;
mod machine;
mod many_reads;
mod model;
mod moves;
mod multi_device;
mod on_demand;
mod page_memory;
mod pins;
mod readme;
mod reads;
mod recovery;
mod releases;
mod replay;
mod rule_model;
mod salvage;
mod scrub;
mod snapshots;
mod sparse_deltas;
mod store;
mod stream_guards;
mod streams;
