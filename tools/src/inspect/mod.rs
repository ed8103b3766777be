//! Commands that show the content of a store. They read the files without the engine, and can therefore read stores
//! that the engine cannot open.

pub(crate) mod file_purposes;
pub(crate) mod info;
pub(crate) mod snapshots;
pub(crate) mod pages;
pub(crate) mod log;
pub(crate) mod follow;
pub(crate) mod dump;
pub(crate) mod verify;
pub(crate) mod doctor;
