//! Parts that all commands share: exit codes, output, handling of Ctrl-C, and access to stores.

pub mod exit;
pub mod output;
pub mod table;
pub mod interrupt;
pub mod progress;
pub mod replacement;
pub mod program;
pub mod verbosity;
pub mod json;
pub(crate) mod memory;
pub mod size;
pub mod aligned_buf;
pub mod engine;
pub(crate) mod completions;
