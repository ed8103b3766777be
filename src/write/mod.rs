//! The write path: batches as callers build them, and the commit that checks, encodes and logs them.

pub(crate) mod batch;
pub(crate) mod commit;
