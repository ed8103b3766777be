//! Memory management: page memory, and the staging memory through which lanes copy.

pub(crate) mod arena;
pub(crate) mod staging;
