//! Blocks of an inference engine's cache, in pages of a store and in the engine's own tensors.
//!
//! [`crate::layout`] says where a block's bytes lie. Here they move: between pages and slices or
//! other pages ([`pages`]), and between pages and tensors on a device ([`tensors`]). All runs of all blocks
//! of one call go by one list of commands.

mod pages;
mod tensors;

pub use pages::{BlockPages, PagedBlock};
pub use tensors::{BlockTensors, WorkingBlocks};
