//! Read access to store directories for the inspecting commands. The files, frames and states may be damaged.

pub(crate) mod writer_lock;
pub(crate) mod store_dir;
pub(crate) mod stable;
pub(crate) mod page_bytes;
pub(crate) mod partial_view;
pub(crate) mod states;
pub(crate) mod selector;
pub(crate) mod scan;
