//! How a change gets into the store: what a caller asks for, and what becomes of it.

pub(crate) mod batch;
pub(crate) mod commit;
