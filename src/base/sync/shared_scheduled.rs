//! Values that one thread replaces while others read them, under a test's scheduler: each look and each
//! change is a point at which another thread may go on.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Deref;
use std::sync::Arc;

use shuttle_parking_lot::Mutex;

/// A cell for a shared value, or for none.
#[derive(Debug)]
pub struct Swap<T>(Mutex<Option<Arc<T>>>);

/// The content of a cell at the moment of a look.
#[derive(Debug)]
pub struct SwapGuard<T>(Option<Arc<T>>);

impl<T> Swap<T> {
    /// A cell that holds this value.
    pub fn new(value: Option<Arc<T>>) -> Self {
        Self(Mutex::new(value))
    }

    /// The cell's value, for a look.
    pub fn look(&self) -> SwapGuard<T> {
        SwapGuard(self.get())
    }

    /// The cell's value.
    pub fn get(&self) -> Option<Arc<T>> {
        self.0.lock().clone()
    }

    /// Puts another value in the cell.
    pub fn set(&self, value: Option<Arc<T>>) {
        let _before = std::mem::replace(&mut *self.0.lock(), value);
    }

    /// Takes the value out, for the only owner of the cell.
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

/// A hash map under the scheduler.
#[derive(Debug)]
pub struct Map<K, V>(Mutex<HashMap<K, V>>);

impl<K: Hash + Eq, V> Map<K, V> {
    /// A map with room for `count` items.
    pub fn with_capacity(count: usize) -> Self {
        Self(Mutex::new(HashMap::with_capacity(count)))
    }

    /// Gives the key's value to `look`, and returns its result.
    pub fn look<R>(&self, key: &K, look: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.lock().get(key).map(look)
    }

    /// Gives a key another value.
    pub fn set(&self, key: K, value: V) {
        self.0.lock().insert(key, value);
    }

    /// Takes a key out.
    pub fn remove(&self, key: &K) {
        self.0.lock().remove(key);
    }
}
