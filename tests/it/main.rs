//! The integration tests: one binary, one file an area.

mod crash;
mod devices;
mod disk_faults;
mod disk_laws;
mod floors;
mod fork;
mod kill;
mod laws;
mod model;
mod readme;
mod rule_model;
mod store;
