//! Values that one thread replaces while others read them, under a test scheduler: each read and each change
//! is a point at which another thread may be scheduled.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Deref;
use std::sync::Arc;

use shuttle_parking_lot::Mutex;

/// A cell with an optional shared value.
#[derive(Debug)]
pub struct Swap<T>(Mutex<Option<Arc<T>>>);

/// The value of a cell at the time of a read.
#[derive(Debug)]
pub struct SwapGuard<T>(Option<Arc<T>>);

impl<T> Swap<T> {
    /// Creates a cell with this value.
    pub fn new(value: Option<Arc<T>>) -> Self {
        Self(Mutex::new(value))
    }

    /// Returns a guard for the cell's current value.
    pub fn load(&self) -> SwapGuard<T> {
        SwapGuard(self.get())
    }

    /// Returns the cell's current value.
    pub fn get(&self) -> Option<Arc<T>> {
        self.0.lock().clone()
    }

    /// Replaces the cell's value.
    pub fn set(&self, value: Option<Arc<T>>) {
        let _before = std::mem::replace(&mut *self.0.lock(), value);
    }

    /// Takes the value, given exclusive access to the cell.
    pub fn take(&mut self) -> Option<Arc<T>> {
        self.0.get_mut().take()
    }
}

impl<T> Deref for SwapGuard<T> {
    type Target = Option<Arc<T>>;

    fn deref(&self) -> &Option<Arc<T>> {
        &self.0
    }
}

/// A hash map under the test scheduler.
#[derive(Debug)]
pub struct Map<K, V>(Mutex<HashMap<K, V>>);

impl<K: Hash + Eq, V> Map<K, V> {
    /// Creates a map with capacity for `count` items.
    pub fn with_capacity(count: usize) -> Self {
        Self(Mutex::new(HashMap::with_capacity(count)))
    }

    /// Calls `with` with the key's value and returns its result.
    pub fn with<Q, R>(&self, key: &Q, read: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.0.lock().get(key).map(read)
    }

    /// Sets the value of a key.
    pub fn set(&self, key: K, value: V) {
        self.0.lock().insert(key, value);
    }

    /// Removes a key and its value.
    pub fn remove(&self, key: &K) {
        self.0.lock().remove(key);
    }
}
