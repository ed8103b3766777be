//! Options that differ in a few values from those of a helper function.

use remanent::Options;

pub trait With {
    /// Changes single values and keeps all others.
    fn with<R>(self, change: impl FnOnce(&mut Options) -> R) -> Self;
}

impl With for Options {
    fn with<R>(mut self, change: impl FnOnce(&mut Options) -> R) -> Self {
        change(&mut self);
        self
    }
}
