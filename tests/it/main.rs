//! The integration tests. One binary contains all of them, with one file or folder per area.

#[path = "../../fuzz/src/archive.rs"]
mod archive;
#[macro_use]
mod forward;

mod api;
mod arrivals;
mod audit;
mod background;
mod batch_keys;
mod blocks;
mod bounds;
mod bulk;
mod captures;
mod change_streams;
mod changed_pages;
mod compares;
mod compression;
mod concurrent;
mod copied_directories;
mod copies;
mod counters;
mod crash;
mod cuda;
mod damage;
mod defences;
mod device_copies;
mod device_ops;
mod device_reads;
mod devices;
mod digests;
mod disk_captures;
mod direct_io;
mod disk_faults;
mod disk_laws;
mod docs;
mod durable_marks;
mod earlier_states;
#[path = "../../format/tests/support/far_store.rs"]
mod far_store;
mod faults;
mod files;
#[path = "../../fuzz/src/fit.rs"]
mod fit;
mod follow;
mod fork;
mod footprints;
mod forks;
#[path = "../../format/tests/support/frames.rs"]
mod frames;
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
mod laws;
mod layout;
mod leases;
mod lent_pages;
mod life;
mod loading;
mod long_payloads;
mod machine;
#[expect(dead_code, reason = "the tests of the format crate use all of it")]
#[path = "../../format/tests/support/maker.rs"]
mod maker;
mod many_reads;
mod model;
mod moved_directories;
mod moves;
mod multi_device;
mod on_demand;
mod overlays;
mod page_memory;
mod past_4_gib;
mod pages_on_disk;
mod pins;
mod readme;
mod reads;
mod recovery;
mod releases;
mod replay;
mod rule_model;
mod salvage;
mod scrub;
mod size;
mod snapshots;
mod sources;
mod spans;
mod sparse_deltas;
mod store;
mod stream_guards;
mod streams;
mod superseded;
mod tiers;
mod unified;
mod with_options;
