//! Values that threads read without a lock while other threads replace them.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash, RandomState};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;

/// A cell with an optional shared value. Readers never block and never delay a writer. A reader of a stored value also
/// observes everything that the writer did before the store.
pub struct Swap<T>(ArcSwapOption<T>);

/// A guard for the value that a [`Swap`] contained at the time of the read.
pub struct SwapGuard<T>(arc_swap::Guard<Option<Arc<T>>>);

impl<T> Swap<T> {
    pub fn new(value: Option<Arc<T>>) -> Self {
        Self(ArcSwapOption::new(value))
    }

    /// Returns a guard for the cell's current value, without changing its reference count.
    pub fn load(&self) -> SwapGuard<T> {
        SwapGuard(self.0.load())
    }

    /// Returns the cell's current value, and increments its reference count.
    pub fn get(&self) -> Option<Arc<T>> {
        self.0.load_full()
    }

    pub fn set(&self, value: Option<Arc<T>>) {
        self.0.store(value);
    }

    /// Removes the value from the cell and returns it.
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

/// The number of maps among which a [`Map`] distributes its keys. A growing map makes a single infallible allocation
/// for its table. With this number of maps, each such allocation is below 64 KiB for up to half a million keys, and
/// below 1 MiB for up to ten million keys.
const SHARDS: usize = 256;

/// A hash map whose readers never block and never delay other threads.
pub struct Map<K, V> {
    hasher: RandomState,
    /// The maps among which the keys are distributed. Each map is created when its first item is added.
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

    /// Calls `read` with the value of `key` and returns the result, or `None` if the map does not contain `key`.
    pub fn with<Q, R>(&self, key: &Q, read: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shard(key).get()?.pin().get(key).map(read)
    }

    pub fn set(&self, key: K, value: V) {
        self.shard(&key).get_or_init(papaya::HashMap::new).pin().insert(key, value);
    }

    pub fn remove(&self, key: &K) {
        if let Some(shard) = self.shard(key).get() {
            shard.pin().remove(key);
        }
    }
}
