//! How a change gets into the store: the batch that a caller builds, and the commit that checks, encodes
//! and logs it.

pub(crate) mod batch;
pub(crate) mod commit;
