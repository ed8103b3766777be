//! Commands that show the content of a store. They read the files without the engine, and can therefore open stores
//! that the engine refuses.

pub(crate) mod file_purposes;
pub(crate) mod info;
pub(crate) mod snapshots;
pub(crate) mod pages;
pub(crate) mod log;
pub(crate) mod follow;
pub(crate) mod dump;
pub(crate) mod verify;
pub(crate) mod doctor;
