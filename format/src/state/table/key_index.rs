//! The index from keys to pages, divided into many small hash maps.
//!
//! A hash map that grows temporarily needs memory for twice as many keys. While a logged batch is installed, a failed
//! allocation cannot be reported as an error, so every map must stay small.

use std::collections::HashMap;

use crate::ids::{Key, PageId};

/// Number of hash maps. Each map uses less than 64 KiB for up to half a million keys in total, and less than 1 MiB for
/// up to ten million keys.
const SHARDS: usize = 512;

/// A map from keys to page ids.
#[derive(Clone, Debug, Default)]
pub(super) struct KeyIndex {
    /// Hash maps, selected by a hash of the key. The list is empty until the first key is inserted.
    shards: Vec<HashMap<Key, PageId>>,
}

impl KeyIndex {
    fn shard(key: &[u8]) -> usize {
        // The map hashes the key again, so a fast hash is sufficient here.
        crc32fast::hash(key) as usize % SHARDS
    }

    pub fn get(&self, key: &[u8]) -> Option<&PageId> {
        if self.shards.is_empty() { None } else { self.shards[Self::shard(key)].get(key) }
    }

    pub fn insert(&mut self, key: Key, page: PageId) -> Option<PageId> {
        if self.shards.is_empty() {
            self.shards.resize_with(SHARDS, HashMap::new);
        }
        let shard = Self::shard(key.as_bytes());
        self.shards[shard].insert(key, page)
    }

    pub fn remove(&mut self, key: &Key) -> Option<PageId> {
        if self.shards.is_empty() {
            return None;
        }
        let shard = Self::shard(key.as_bytes());
        self.shards[shard].remove(key)
    }

    pub fn clear(&mut self) {
        self.shards.clear();
    }

    fn len(&self) -> usize {
        self.shards.iter().map(HashMap::len).sum()
    }
}

/// Compares the keys and pages, but not their distribution among the maps.
impl PartialEq for KeyIndex {
    fn eq(&self, other: &Self) -> bool {
        let mut pairs = self.shards.iter().flatten();
        self.len() == other.len() && pairs.all(|(key, page)| other.get(key.as_bytes()) == Some(page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_index_finds_inserted_keys_in_any_order() {
        let key = |number: u64| Key::new(number.to_le_bytes()).unwrap();
        let (mut one, mut other) = (KeyIndex::default(), KeyIndex::default());
        assert!(one == other && one.get(key(1).as_bytes()).is_none() && one.remove(&key(1)).is_none());
        for number in 0..5000 {
            assert_eq!(one.insert(key(number), PageId(number)), None);
            assert_eq!(other.insert(key(4999 - number), PageId(4999 - number)), None);
        }
        assert!(one == other, "whatever the order");
        assert_eq!(one.insert(key(7), PageId(8)), Some(PageId(7)));
        assert!(one != other);
        assert_eq!(other.remove(&key(7)), Some(PageId(7)));
        assert!(
            one != other
                && one.get(key(7).as_bytes()) == Some(&PageId(8))
                && other.get(key(7).as_bytes()).is_none()
        );
        one.clear();
        assert!(one == KeyIndex::default());
    }
}
