//! Blocks of an inference engine's cache, in pages of a store and in the engine's own tensors.
//!
//! [`crate::layout`] computes the addresses of a block's bytes. This module copies the bytes between pages and
//! slices or other pages (`pages`), and between pages and tensors on a device (`tensors`). One command list
//! copies all blocks of a call.

mod pages;
mod tensors;

pub use pages::{BlockPages, PagedBlock};
pub use tensors::{BlockTensors, WorkingBlocks};
