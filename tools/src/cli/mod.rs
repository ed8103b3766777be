//! Parts common to all commands: exit codes, output, interruption, opening a store.

pub(crate) mod exit;
pub(crate) mod output;
pub(crate) mod table;
pub(crate) mod interrupt;
pub(crate) mod progress;
pub(crate) mod replacement;
pub(crate) mod program;
pub(crate) mod verbosity;
pub(crate) mod json;
pub(crate) mod memory;
pub(crate) mod size;
pub(crate) mod aligned_buf;
pub(crate) mod engine;
pub(crate) mod completions;
