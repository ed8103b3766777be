//! Memory of two kinds: the memory where pages lie, and the host memory that lanes copy through.

pub mod arena;
pub mod staging;
