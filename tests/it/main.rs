//! The integration tests: one binary, one file an area.

mod rule_model;
