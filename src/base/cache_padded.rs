//! Aligns a value so that it shares no cache line with other values.
//!
//! Each write by another core invalidates the cached line. If a read-only field shared a cache line with a frequently
//! written word, every commit would cause cache misses for the readers of the field.

use std::ops::Deref;

/// A value that shares its cache lines with no other value. The value is aligned to two lines, because processors
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
