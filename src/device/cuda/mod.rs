//! Floor 3. Pages in the memory of a GPU.

pub mod abi;
pub mod modules;
