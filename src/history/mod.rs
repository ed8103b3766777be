//! Earlier states of a store: looking at one, going back to one, and stores that begin at one.

pub(crate) mod audit;
pub(crate) mod blame;
pub(crate) mod copier;
pub(crate) mod fork;
pub(crate) mod point;
pub(crate) mod restore;
pub(crate) mod seed;
pub(crate) mod state;
pub(crate) mod view;
pub(crate) mod windows;
