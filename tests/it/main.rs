//! The integration tests: one binary, one file an area.

mod devices;
mod floors;
mod laws;
mod rule_model;
