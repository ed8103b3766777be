//! What every command needs: how it ends, what it prints, how it is interrupted, how it opens a store.

pub(crate) mod exit;
pub(crate) mod output;
pub(crate) mod table;
pub(crate) mod interrupt;
pub(crate) mod progress;
pub(crate) mod verbosity;
pub(crate) mod json;
pub(crate) mod memory;
pub(crate) mod size;
pub(crate) mod aligned_buf;
pub(crate) mod engine;
pub(crate) mod completions;
