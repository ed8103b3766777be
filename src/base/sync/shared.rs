//! Values that one thread replaces while others read them without a lock.

use std::hash::{BuildHasher, Hash, RandomState};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;

/// A cell for a shared value, or for none. A reader takes the value and neither waits nor makes another
/// thread wait. A reader sees a stored value as a whole, with everything that its writer did before.
pub struct Swap<T>(ArcSwapOption<T>);

/// The content of a cell at the moment of a look.
pub struct SwapGuard<T>(arc_swap::Guard<Option<Arc<T>>>);

impl<T> Swap<T> {
    /// A cell that holds this value.
    pub fn new(value: Option<Arc<T>>) -> Self {
        Self(ArcSwapOption::new(value))
    }

    /// The cell's value, for a look: no reference is counted.
    pub fn look(&self) -> SwapGuard<T> {
        SwapGuard(self.0.load())
    }

    /// The cell's value.
    pub fn get(&self) -> Option<Arc<T>> {
        self.0.load_full()
    }

    /// Puts another value in the cell.
    pub fn set(&self, value: Option<Arc<T>>) {
        self.0.store(value);
    }

    /// Takes the value out, for the only owner of the cell.
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

/// The number of maps that share the keys. A map that grows asks for all of its memory at once, and has no
/// way to be refused it. Each takes less than 64 KiB up to half a million keys, and less than a mebibyte up
/// to ten million.
const SHARDS: usize = 256;

/// A hash map. A reader neither waits nor makes another thread wait.
pub struct Map<K, V> {
    hasher: RandomState,
    /// Each is made with its first item.
    shards: Vec<OnceLock<papaya::HashMap<K, V>>>,
}

impl<K: Hash + Eq, V> Map<K, V> {
    /// A map with room for `count` items.
    pub fn with_capacity(count: usize) -> Self {
        let shard = || match count.div_ceil(SHARDS) {
            0 => OnceLock::new(),
            each => OnceLock::from(papaya::HashMap::with_capacity(each)),
        };
        Self { hasher: RandomState::new(), shards: (0..SHARDS).map(|_| shard()).collect() }
    }

    fn shard(&self, key: &K) -> &OnceLock<papaya::HashMap<K, V>> {
        &self.shards[(self.hasher.hash_one(key) >> 32) as usize % SHARDS]
    }

    /// Gives the key's value to `look`, and returns its result.
    pub fn look<R>(&self, key: &K, look: impl FnOnce(&V) -> R) -> Option<R> {
        self.shard(key).get()?.pin().get(key).map(look)
    }

    /// Gives a key another value.
    pub fn set(&self, key: K, value: V) {
        self.shard(&key).get_or_init(papaya::HashMap::new).pin().insert(key, value);
    }

    /// Takes a key out.
    pub fn remove(&self, key: &K) {
        if let Some(shard) = self.shard(key).get() {
            shard.pin().remove(key);
        }
    }
}
