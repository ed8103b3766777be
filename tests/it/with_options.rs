//! Options that differ in a few values from those of a helper.

use remanent::Options;

pub trait With {
    /// Changes single values, and keeps the others of their groups.
    fn with<R>(self, change: impl FnOnce(&mut Options) -> R) -> Self;
}

impl With for Options {
    fn with<R>(mut self, change: impl FnOnce(&mut Options) -> R) -> Self {
        change(&mut self);
        self
    }
}
