//! Values that one thread replaces while others read them without a lock.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash, RandomState};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;

/// A cell with an optional shared value. Readers never block and never make a writer wait. A reader sees a
/// stored value as a whole, with everything that its writer did before.
pub struct Swap<T>(ArcSwapOption<T>);

/// The value of a cell at the time of a read.
pub struct SwapGuard<T>(arc_swap::Guard<Option<Arc<T>>>);

impl<T> Swap<T> {
    /// Creates a cell with this value.
    pub fn new(value: Option<Arc<T>>) -> Self {
        Self(ArcSwapOption::new(value))
    }

    /// Returns a guard for the cell's current value, without changing its reference count.
    pub fn load(&self) -> SwapGuard<T> {
        SwapGuard(self.0.load())
    }

    /// Returns the cell's current value.
    pub fn get(&self) -> Option<Arc<T>> {
        self.0.load_full()
    }

    /// Replaces the cell's value.
    pub fn set(&self, value: Option<Arc<T>>) {
        self.0.store(value);
    }

    /// Takes the value, given exclusive access to the cell.
    pub fn take(&mut self) -> Option<Arc<T>> {
        self.0.swap(None)
    }
}

impl<T> Deref for SwapGuard<T> {
    type Target = Option<Arc<T>>;

    fn deref(&self) -> &Option<Arc<T>> {
        &self.0
    }
}

/// The number of maps that the keys are distributed over. A growing map makes a single infallible allocation
/// for its whole table. With this number of maps, each such allocation is below 64 KiB up to half a million
/// keys, and below 1 MiB up to ten million.
const SHARDS: usize = 256;

/// A hash map whose readers never block and never make other threads wait.
pub struct Map<K, V> {
    hasher: RandomState,
    /// The maps, each of which is created with its first item.
    shards: Vec<OnceLock<papaya::HashMap<K, V>>>,
}

impl<K: Hash + Eq, V> Map<K, V> {
    /// Creates a map with capacity for `count` items.
    pub fn with_capacity(count: usize) -> Self {
        let shard = || match count.div_ceil(SHARDS) {
            0 => OnceLock::new(),
            each => OnceLock::from(papaya::HashMap::with_capacity(each)),
        };
        Self { hasher: RandomState::new(), shards: (0..SHARDS).map(|_| shard()).collect() }
    }

    fn shard<Q: Hash + ?Sized>(&self, key: &Q) -> &OnceLock<papaya::HashMap<K, V>> {
        &self.shards[(self.hasher.hash_one(key) >> 32) as usize % SHARDS]
    }

    /// Calls `with` with the key's value and returns its result.
    pub fn with<Q, R>(&self, key: &Q, read: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shard(key).get()?.pin().get(key).map(read)
    }

    /// Sets the value of a key.
    pub fn set(&self, key: K, value: V) {
        self.shard(&key).get_or_init(papaya::HashMap::new).pin().insert(key, value);
    }

    /// Removes a key and its value.
    pub fn remove(&self, key: &K) {
        if let Some(shard) = self.shard(key).get() {
            shard.pin().remove(key);
        }
    }
}
