//! A value on cache lines of its own.
//!
//! A word that many threads write takes its line from core to core. Fields beside it that all threads only
//! read would miss their caches for it, on each commit.

use std::ops::Deref;

/// A value that shares its cache lines with no other. Processors fetch lines in pairs, hence two of them.
#[repr(align(128))]
#[derive(Debug, Default)]
pub(crate) struct OwnLine<T>(pub T);

impl<T> Deref for OwnLine<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
