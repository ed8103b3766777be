//! Fallible allocation for lists and maps that may grow large. A failed allocation returns an error instead of aborting
//! the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use crate::error::{Error, Result};

/// Reserves capacity for `count` more items in `items`.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn make_room<T>(items: &mut Vec<T>, count: usize) -> Result<()> {
    let len = items.len();
    items.try_reserve(count).map_err(|_| Error::no_memory(items_len::<T>(len.saturating_add(count))))
}

/// Appends an item to a list.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result<()> {
    make_room(items, 1)?;
    items.push(item);
    Ok(())
}

/// Appends items to a list.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn append<T>(items: &mut Vec<T>, more: impl IntoIterator<Item = T>) -> Result<()> {
    let more = more.into_iter();
    make_room(items, more.size_hint().0)?;
    for item in more {
        push(items, item)?;
    }
    Ok(())
}

/// Collects items into a list.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    append(&mut all, items)?;
    Ok(all)
}

/// Collects items into a map, with small allocations only. `collect` would instead sort all items in a single
/// allocation, and a failure of that allocation would abort the process.
pub(crate) fn map_of<K: Ord, T>(items: impl IntoIterator<Item = (K, T)>) -> BTreeMap<K, T> {
    let mut map = BTreeMap::new();
    map.extend(items);
    map
}

/// Collects items into a set with small allocations only, like [`map_of`].
pub(crate) fn set_of<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let mut set = BTreeSet::new();
    set.extend(items);
    set
}

/// Inserts an item into a map.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn insert<K: Eq + Hash, T>(map: &mut HashMap<K, T>, key: K, item: T) -> Result<()> {
    let count = 2 * (map.len() + 1);
    map.try_reserve(1).map_err(|_| Error::no_memory(items_len::<(K, T)>(count)))?;
    map.insert(key, item);
    Ok(())
}

/// Copies a slice into a new list.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn copied<T: Copy>(items: &[T]) -> Result<Vec<T>> {
    let mut copy = Vec::new();
    make_room(&mut copy, items.len())?;
    copy.extend_from_slice(items);
    Ok(copy)
}

fn items_len<T>(count: usize) -> u64 {
    count.saturating_mul(size_of::<T>()) as u64
}
