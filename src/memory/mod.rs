//! Two kinds of memory: the page memory, and the host memory through which lanes copy.

pub(crate) mod arena;
pub(crate) mod staging;
