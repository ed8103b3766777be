//! Memory management: the memory of pages, and the staging memory through which lanes copy.

pub(crate) mod arena;
pub(crate) mod staging;
