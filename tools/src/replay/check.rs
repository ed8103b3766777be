//! Compares a store with the state that a trace produces: the pages, their epochs and their bytes.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use remanent::{Error, PageInfo, Store};
use remanent_format::state::rebuild::{RebuildOptions, RebuiltStore, rebuild};
use remanent_format::{Defect, Epoch, FileName, Key, Metadata, PageId, Value};

use crate::cli::exit::Failure;
use crate::cli::memory::available;
use crate::read::store_dir::StoreDir;
use crate::replay::simulate::{Expected, Rule, Simulation};
use crate::replay::trace::Trace;

/// Name of the root entry that contains the number of the last request.
pub const REQUEST: &str = "request";

/// A page that was found in a store.
#[derive(Clone, Copy, Debug)]
struct FoundPage<'a> {
    /// Id of the page.
    page: PageId,
    /// Key of the page. If `replay` created the page, the key is a hash id in decimal.
    key: Option<&'a Key>,
    /// Epoch of the page.
    epoch: Epoch,
    /// Bytes of the page.
    bytes: &'a [u8],
}

/// A difference between a store and its expected state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The root contains a different request number.
    Root {
        /// The expected request number, or `None` before the first request.
        expected: Option<u64>,
        /// The value of the root entry, or `None` if there is no entry.
        found: Option<Value>,
    },
    /// The page with this hash id is missing from the store.
    Missing(u64),
    /// The store contains a page that the trace does not produce.
    Unexpected(PageId, Option<Key>),
    /// A page has the wrong epoch.
    Epoch {
        /// The hash id of the page.
        hash_id: u64,
        /// The expected epoch.
        expected: u64,
        /// The epoch that was found.
        found: Epoch,
    },
    /// A page has the wrong length.
    Len {
        /// The hash id of the page.
        hash_id: u64,
        /// The expected length in bytes.
        expected: usize,
        /// The length that was found, in bytes.
        found: usize,
    },
    /// A page has the wrong bytes.
    Bytes {
        /// The hash id of the page.
        hash_id: u64,
        /// The offset of the first wrong byte.
        offset: usize,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Root { expected, found } => {
                let expected = expected.map_or("nothing".to_owned(), |request| request.to_string());
                write!(f, "root entry {REQUEST}: {found:?}, expected {expected}")
            }
            Difference::Missing(hash_id) => write!(f, "page {hash_id}: missing"),
            Difference::Unexpected(page, Some(key)) => {
                write!(f, "page {key}: unexpected (page number {page})")
            }
            Difference::Unexpected(page, None) => write!(f, "page number {page}: unexpected, without a key"),
            Difference::Epoch { hash_id, expected, found } => {
                write!(f, "page {hash_id}: epoch {found}, expected {expected}")
            }
            Difference::Len { hash_id, expected, found } => {
                write!(f, "page {hash_id}: {found} bytes long, expected {expected}")
            }
            Difference::Bytes { hash_id, offset } => {
                write!(f, "page {hash_id}: wrong bytes, the first at offset {offset}")
            }
        }
    }
}

/// The comparison of the store's epochs with the expected epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epochs {
    /// Epochs must be equal.
    Exact,
    /// Epochs may be higher than expected, because restoring a snapshot raises epochs.
    AtLeast,
}

/// Returns the number of the last request that a root contains, or `None` if no request was replayed. Returns an error
/// if the root entry is not a number.
pub fn last_request(root: &Metadata) -> Result<Option<u64>, String> {
    match root.get(REQUEST) {
        None => Ok(None),
        Some(Value::U64(request)) => Ok(Some(*request)),
        Some(other) => Err(format!("root entry {REQUEST} is {other:?}, which was not written by a replay")),
    }
}

/// Returns the hash id that a key represents, or `None` if the key is not a hash id.
pub fn hash_id(key: &Key) -> Option<u64> {
    let hash_id = key.as_str()?.parse().ok()?;
    // A hash id has exactly one spelling, without a sign or leading zeros.
    (key_of(hash_id) == *key).then_some(hash_id)
}

/// Returns the key of the page with a hash id.
pub fn key_of(hash_id: u64) -> Key {
    Key::new(hash_id.to_string()).expect("a number has 1 to 20 digits")
}

/// Simulates a trace up to and including request `last`. Returns an error if the trace ends earlier.
pub fn simulate(rule: Rule, trace: &mut Trace, last: Option<u64>) -> Result<Simulation, Failure> {
    let mut simulation = Simulation::new(rule);
    while simulation.last_request() < last {
        let Some(hash_ids) = trace.next() else {
            let (found, has) = (last.unwrap_or_default(), simulation.next_request());
            return Err(Failure::Environment(format!(
                "the store contains the trace up to request {found}, but the trace has only {has} requests"
            )));
        };
        simulation.request(&hash_ids?);
    }
    Ok(simulation)
}

/// Computes the state to which recovery would bring the store in a directory. The engine is not used.
pub fn recovered(dir: &Path) -> Result<RebuiltStore, Failure> {
    let options = RebuildOptions { page_bytes_max: available(), ..RebuildOptions::default() };
    let dir = StoreDir::open(dir)?;
    rebuild(&dir, &options).map_err(|damage| match damage.defect {
        Defect::Missing if damage.file == FileName::Store => dir.no_store(),
        _ => Failure::Damage(damage.to_string()),
    })
}

/// Returns all differences between a rebuilt store and the simulation.
pub fn compare(simulation: &Simulation, epochs: Epochs, rebuilt: &RebuiltStore) -> Vec<Difference> {
    let infos: Vec<PageInfo> = rebuilt.table.pages().collect();
    let found = infos.iter().map(|info| FoundPage {
        page: info.page,
        key: info.key.as_ref(),
        epoch: info.epoch,
        bytes: &rebuilt.contents[&info.page],
    });
    differences(simulation, epochs, rebuilt.table.root(), found)
}

/// Returns all differences between an open store and the simulation.
pub fn compare_open(simulation: &Simulation, store: &Store) -> Result<Vec<Difference>, Error> {
    let pages: Vec<PageInfo> = store.pages()?.collect();
    let read = |info: &PageInfo| {
        let mut bytes = vec![0; info.len as usize];
        store.read(info.page, 0, &mut bytes).map(|_| bytes)
    };
    let contents = pages.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let found = pages.iter().zip(&contents).map(|(info, bytes)| FoundPage {
        page: info.page,
        key: info.key.as_ref(),
        epoch: info.epoch,
        bytes,
    });
    Ok(differences(simulation, Epochs::Exact, &*store.root()?, found))
}

/// Returns all differences between a store and the simulation. The root and unexpected pages are listed first, then the
/// pages by hash id.
fn differences<'a>(
    simulation: &Simulation,
    epochs: Epochs,
    root: &Metadata,
    pages: impl Iterator<Item = FoundPage<'a>>,
) -> Vec<Difference> {
    let mut differences = Vec::new();
    let expected = simulation.last_request();
    if root.get(REQUEST) != expected.map(Value::U64).as_ref() {
        differences.push(Difference::Root { expected, found: root.get(REQUEST).cloned() });
    }

    let mut missing: HashMap<u64, &Expected> =
        simulation.pages().iter().map(|(id, page)| (*id, page)).collect();
    let mut wrong = Vec::new();
    for found in pages {
        let expected = found.key.and_then(hash_id).and_then(|id| Some((id, missing.remove(&id)?)));
        match expected {
            Some((hash_id, page)) => {
                let of_page = page_differences(simulation.rule().page_len, epochs, hash_id, page, found);
                wrong.extend(of_page.map(|difference| (hash_id, difference)));
            }
            None => differences.push(Difference::Unexpected(found.page, found.key.cloned())),
        }
    }
    wrong.extend(missing.into_keys().map(|hash_id| (hash_id, Difference::Missing(hash_id))));
    wrong.sort_by_key(|(hash_id, _)| *hash_id);
    differences.extend(wrong.into_iter().map(|(_, difference)| difference));
    differences
}

/// Returns the differences of one page: its epoch, and its length or its bytes.
fn page_differences(
    page_len: usize,
    epochs: Epochs,
    hash_id: u64,
    page: &Expected,
    found: FoundPage<'_>,
) -> impl Iterator<Item = Difference> {
    let epoch_fits = match epochs {
        Epochs::Exact => found.epoch.0 == page.epoch,
        Epochs::AtLeast => found.epoch.0 >= page.epoch,
    };
    let epoch =
        (!epoch_fits).then_some(Difference::Epoch { hash_id, expected: page.epoch, found: found.epoch });
    let content = if found.bytes.len() == page_len {
        let expected = page.bytes(hash_id, page_len);
        let offset = (0..page_len).find(|&offset| expected[offset] != found.bytes[offset]);
        offset.map(|offset| Difference::Bytes { hash_id, offset })
    } else {
        Some(Difference::Len { hash_id, expected: page_len, found: found.bytes.len() })
    };
    epoch.into_iter().chain(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The id, key, epoch and bytes of each page in a store.
    type Pages = Vec<(PageId, Option<Key>, Epoch, Vec<u8>)>;

    fn simulation() -> Simulation {
        let mut simulation = Simulation::new(Rule { page_len: 128, pages_max: 3 });
        simulation.request(&[10, 11, 12]);
        simulation.request(&[12, 13]);
        simulation
    }

    fn exact(simulation: &Simulation) -> (Metadata, Pages) {
        let mut ids: Vec<u64> = simulation.pages().keys().copied().collect();
        ids.sort_unstable();
        let page = |(number, id): (usize, &u64)| {
            let page = &simulation.pages()[id];
            (PageId(number as u64 + 1), Some(key_of(*id)), Epoch(page.epoch), page.bytes(*id, 128))
        };
        let root = Metadata::from([(REQUEST.to_owned(), Value::U64(1))]);
        (root, ids.iter().enumerate().map(page).collect())
    }

    fn check(epochs: Epochs, change: impl FnOnce(&mut Metadata, &mut Pages)) -> Vec<Difference> {
        let simulation = simulation();
        let (mut root, mut pages) = exact(&simulation);
        change(&mut root, &mut pages);
        let found = pages.iter().map(|(page, key, epoch, bytes)| FoundPage {
            page: *page,
            key: key.as_ref(),
            epoch: *epoch,
            bytes,
        });
        differences(&simulation, epochs, &root, found)
    }

    #[test]
    fn exact_replay_reports_no_difference() {
        assert_eq!(check(Epochs::Exact, |_, _| {}), []);
    }

    #[test]
    fn every_kind_of_difference_is_found() {
        let exact = |change: fn(&mut Metadata, &mut Pages)| check(Epochs::Exact, change);
        assert_eq!(
            exact(|root, _| {
                root.insert(REQUEST.to_owned(), Value::U64(2));
            }),
            [Difference::Root { expected: Some(1), found: Some(Value::U64(2)) }]
        );
        assert_eq!(exact(|root, _| root.clear()), [Difference::Root { expected: Some(1), found: None }]);
        assert_eq!(
            exact(|_, pages| {
                pages.remove(0);
            }),
            [Difference::Missing(11)]
        );
        let ghost = Key::new("10").unwrap();
        assert_eq!(
            exact(|_, pages| pages.push((PageId(9), Some(Key::new("10").unwrap()), Epoch(1), vec![]))),
            [Difference::Unexpected(PageId(9), Some(ghost))]
        );
        assert_eq!(
            exact(|_, pages| pages.push((PageId(9), None, Epoch(1), vec![]))),
            [Difference::Unexpected(PageId(9), None)]
        );
        assert_eq!(
            exact(|_, pages| pages[1].2 = Epoch(3)),
            [Difference::Epoch { hash_id: 12, expected: 2, found: Epoch(3) }]
        );
        assert_eq!(
            exact(|_, pages| pages[1].3.truncate(64)),
            [Difference::Len { hash_id: 12, expected: 128, found: 64 }]
        );
        assert_eq!(
            exact(|_, pages| {
                pages[0].2 = Epoch(9);
                pages[0].3[77] ^= 1;
            }),
            [
                Difference::Epoch { hash_id: 11, expected: 1, found: Epoch(9) },
                Difference::Bytes { hash_id: 11, offset: 77 },
            ]
        );
    }

    #[test]
    fn second_page_with_the_same_key_is_unexpected() {
        let twice = check(Epochs::Exact, |_, pages| {
            let copy = pages[0].clone();
            pages.push((PageId(9), copy.1, copy.2, copy.3));
        });
        assert_eq!(twice, [Difference::Unexpected(PageId(9), Some(key_of(11)))]);
    }

    #[test]
    fn epochs_never_decrease_on_restore() {
        assert_eq!(check(Epochs::AtLeast, |_, pages| pages[1].2 = Epoch(7)), []);
        assert_eq!(
            check(Epochs::AtLeast, |_, pages| pages[1].2 = Epoch(1)),
            [Difference::Epoch { hash_id: 12, expected: 2, found: Epoch(1) }]
        );
    }

    #[test]
    fn hash_id_key_has_one_spelling() {
        assert_eq!(hash_id(&key_of(0)), Some(0));
        assert_eq!(hash_id(&key_of(u64::MAX)), Some(u64::MAX));
        for foreign in ["", "00", "+1", "1 ", "x", "18446744073709551616"] {
            if let Ok(key) = Key::new(foreign) {
                assert_eq!(hash_id(&key), None, "{foreign}");
            }
        }
    }

    #[test]
    fn foreign_root_is_reported() {
        assert_eq!(last_request(&Metadata::new()), Ok(None));
        let text = Metadata::from([(REQUEST.to_owned(), Value::String("1".to_owned()))]);
        assert!(last_request(&text).is_err());
    }
}
