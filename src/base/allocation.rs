//! Lists and maps that may grow too long for memory: a refusal is an error, not the end of the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use crate::error::{Error, Result};

/// Makes room for `count` items more.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn make_room<T>(items: &mut Vec<T>, count: usize) -> Result<()> {
    let len = items.len();
    items.try_reserve(count).map_err(|_| Error::no_memory(items_len::<T>(len.saturating_add(count))))
}

/// Adds an item to a list that may grow too long.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result<()> {
    make_room(items, 1)?;
    items.push(item);
    Ok(())
}

/// Adds items to a list that may grow too long.
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

/// A list of items, which may be too many.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    append(&mut all, items)?;
    Ok(all)
}

/// A map of items. It asks for short memory only. `collect` does not: it sorts all items in one piece of
/// memory first, which cannot be refused.
pub(crate) fn map_of<K: Ord, T>(items: impl IntoIterator<Item = (K, T)>) -> BTreeMap<K, T> {
    let mut map = BTreeMap::new();
    map.extend(items);
    map
}

/// A set of items. As [`map_of`], it asks for short memory only.
pub(crate) fn set_of<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let mut set = BTreeSet::new();
    set.extend(items);
    set
}

/// Adds an item to a map that may grow too large.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn insert<K: Eq + Hash, T>(map: &mut HashMap<K, T>, key: K, item: T) -> Result<()> {
    let count = 2 * (map.len() + 1);
    map.try_reserve(1).map_err(|_| Error::no_memory(items_len::<(K, T)>(count)))?;
    map.insert(key, item);
    Ok(())
}

/// A copy of what may be too much.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn copied<T: Copy>(items: &[T]) -> Result<Vec<T>> {
    let mut copy = Vec::new();
    make_room(&mut copy, items.len())?;
    copy.extend_from_slice(items);
    Ok(copy)
}

/// The length in bytes of memory for `count` items.
fn items_len<T>(count: usize) -> u64 {
    count.saturating_mul(size_of::<T>()) as u64
}
