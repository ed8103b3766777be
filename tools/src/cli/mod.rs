//! Parts that all commands share: exit codes, output, handling of Ctrl-C, and access to stores.

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
