//! Values that threads read while other threads replace them, under a test scheduler. The scheduler may switch threads
//! at each read and each change.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Deref;
use std::sync::Arc;

use shuttle_parking_lot::Mutex;

/// A cell with an optional shared value, under the test scheduler.
#[derive(Debug)]
pub struct Swap<T>(Mutex<Option<Arc<T>>>);

/// A guard for the value that a [`Swap`] contained at the time of the read.
#[derive(Debug)]
pub struct SwapGuard<T>(Option<Arc<T>>);

impl<T> Swap<T> {
    pub fn new(value: Option<Arc<T>>) -> Self {
        Self(Mutex::new(value))
    }

    pub fn load(&self) -> SwapGuard<T> {
        SwapGuard(self.get())
    }

    pub fn get(&self) -> Option<Arc<T>> {
        self.0.lock().clone()
    }

    pub fn set(&self, value: Option<Arc<T>>) {
        let _before = std::mem::replace(&mut *self.0.lock(), value);
    }

    /// Removes the value from the cell and returns it.
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
    pub fn with_capacity(count: usize) -> Self {
        Self(Mutex::new(HashMap::with_capacity(count)))
    }

    /// Calls `read` with the value of `key` and returns the result, or `None` if the map does not contain `key`.
    pub fn with<Q, R>(&self, key: &Q, read: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.0.lock().get(key).map(read)
    }

    pub fn set(&self, key: K, value: V) {
        self.0.lock().insert(key, value);
    }

    pub fn remove(&self, key: &K) {
        self.0.lock().remove(key);
    }
}
