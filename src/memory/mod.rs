//! Two kinds of memory: the page memory, and the host memory through which lanes copy.

pub mod arena;
pub mod staging;
