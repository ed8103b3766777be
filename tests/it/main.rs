//! The integration tests: one binary, one file an area.

#[path = "../../fuzz/src/archive.rs"]
mod archive;
#[macro_use]
mod forward;

mod background;
mod beside;
mod arrivals;
mod audit;
mod born;
mod bounds;
mod bulk;
mod captures;
mod changed;
mod compression;
mod crash;
mod cramped;
mod cuda;
mod damage;
mod defences;
mod devices;
mod direct;
mod disk_faults;
mod disk_laws;
mod durable;
mod faults;
mod files;
#[path = "../../fuzz/src/fit.rs"]
mod fit;
mod language;
mod layout;
mod follow;
mod fork;
mod forks;
mod fuzzed;
mod gpu;
mod growth;
mod interrupted;
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
mod past;
mod pins;
mod reads;
mod readme;
mod recovery;
mod replaying;
mod rule_model;
mod salvage;
mod scrub;
mod several;
mod snapshots;
mod sparse;
mod store;
mod streams;
