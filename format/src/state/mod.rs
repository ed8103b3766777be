//! The state of a store, computed from its files: the page table, the batches of the log, and the bytes of each page.

pub mod id_map;
pub mod table;
pub mod apply;
mod coverage;
pub mod page_changes;
pub mod window;
pub mod bases;
pub mod replay;
pub mod survey;
pub mod follow;
pub mod reach;
pub mod rebuild;
pub mod trail;
pub mod blame;
pub mod bisection;
