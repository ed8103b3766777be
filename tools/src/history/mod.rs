//! Commands that compare, name, restore and fork kept states.

pub(crate) mod snapshot;
pub(crate) mod restore;
pub(crate) mod fork;
pub(crate) mod prune;
pub(crate) mod diff;
pub(crate) mod blame;
pub(crate) mod bisect;
pub(crate) mod salvage;
