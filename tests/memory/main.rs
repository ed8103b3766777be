//! What a store takes of the host's memory.

#[macro_use]
#[path = "../it/forward.rs"]
mod forward;
mod new_pages;
