//! A value with its own cache lines.
//!
//! A word that many threads write moves between the caches of their cores. If adjacent read-only fields were
//! on the same line, every commit would cause cache misses for their readers.

use std::ops::Deref;

/// A value that shares its cache lines with no other value. The alignment is two lines because processors
/// prefetch lines in pairs.
#[repr(align(128))]
#[derive(Debug, Default)]
pub(crate) struct CachePadded<T>(pub T);

impl<T> Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
