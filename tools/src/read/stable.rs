//! Repeated reads of a store, without a lock, while other processes may be writing to the store.
//!
//! Files can appear and disappear between two reads, and a frame can be read while a writer writes it. The store then
//! seems damaged although it is not. Damage is therefore reported only if the directory did not change during the read,
//! or if several reads found the same damage.

use std::io;

use remanent_format::Folder;

use crate::cli::exit::Failure;
use crate::read::store_dir::StoreDir;

/// Maximum number of reads of a store that changes.
const READS_MAX: usize = 5;

/// The names and inodes of all files in a directory, and the process that has the store open. Compared before and after
/// a read, to detect writes.
#[derive(PartialEq)]
struct DirectoryState {
    holder: Option<u32>,
    files: Vec<(Folder, String, u64)>,
}

impl DirectoryState {
    fn of(dir: &StoreDir) -> io::Result<Self> {
        let holder = dir.holder();
        Ok(Self { holder, files: dir.inodes()? })
    }
}

/// Calls `read_once` until a call finds no damage, until no process can have written during a call, or until the
/// maximum number of calls is reached. Each call receives the damage that all earlier calls found. Returns the result
/// of the last call and the damage to report.
///
/// # Errors
/// Returns an error of `read_once`. Returns [`Failure::Environment`] if every call found damage, but no damage was
/// found by all calls.
pub fn read_until_stable<T, D: PartialEq>(
    dir: &StoreDir,
    mut read_once: impl FnMut(Option<&[D]>) -> Result<T, Failure>,
    damage: impl Fn(&T) -> Vec<D>,
) -> Result<(T, Vec<D>), Failure> {
    let cannot = |error| Failure::Environment(format!("cannot list {}: {error}", dir.path().display()));
    let mut before = DirectoryState::of(dir).map_err(cannot)?;
    let mut lasting: Option<Vec<D>> = None;
    for reads_left in (0..READS_MAX).rev() {
        let result = read_once(lasting.as_deref())?;
        let mut found = damage(&result);
        if found.is_empty() {
            return Ok((result, found));
        }
        let now = DirectoryState::of(dir).map_err(cannot)?;
        let was_unchanged = now.holder.is_none() && now == before;
        before = now;
        if let Some(lasting) = &lasting
            && !was_unchanged
        {
            found.retain(|damage| lasting.contains(damage));
        }
        if was_unchanged || (reads_left == 0 && !found.is_empty()) {
            return Ok((result, found));
        }
        lasting = Some(found);
    }
    Err(Failure::Environment(format!(
        "{} changes faster than it can be read; try again, or fork the store and inspect the fork",
        dir.path().display()
    )))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    struct Reads {
        /// Damage that each call of `read_once` received.
        received: Vec<Vec<u8>>,
        /// Result of the last call, and the damage to report.
        outcome: Result<(usize, Vec<u8>), Failure>,
    }

    /// Reads a directory in which each read creates a file, so that the directory always changes.
    fn changing(reads: &[&[u8]]) -> Reads {
        let folder = tempfile::tempdir().unwrap();
        let dir = StoreDir::open(folder.path()).unwrap();
        let mut received = Vec::new();
        let outcome = read_until_stable(
            &dir,
            |before: Option<&[u8]>| {
                received.push(before.unwrap_or_default().to_vec());
                File::create(folder.path().join(received.len().to_string())).unwrap();
                Ok(received.len() - 1)
            },
            |read| reads[*read].to_vec(),
        );
        Reads { received, outcome }
    }

    #[test]
    fn persistent_damage_is_reported() {
        let reads = changing(&[b"abc", b"abd", b"bad", b"ba", b"cba"]);
        assert!(matches!(reads.outcome, Ok((4, damage)) if damage == b"ba"));
        let received: [&[u8]; 5] = [b"", b"abc", b"ab", b"ba", b"ba"];
        assert_eq!(reads.received, received);
    }

    #[test]
    fn reading_stops_at_first_clean_read() {
        let reads = changing(&[b"a", b"a", b"", b"a"]);
        assert!(matches!(reads.outcome, Ok((2, damage)) if damage.is_empty()));
        assert_eq!(reads.received.len(), 3);
    }

    #[test]
    fn varying_damage_means_concurrent_writes() {
        let reads = changing(&[b"a", b"b", b"c", b"d", b"e"]);
        assert!(matches!(reads.outcome, Err(Failure::Environment(text)) if text.contains("changes faster")));
        assert_eq!(reads.received.len(), READS_MAX);
    }

    #[test]
    fn unchanged_directory_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("log")).unwrap();
        let dir = StoreDir::open(folder.path()).unwrap();
        let mut reads = 0;
        let result = read_until_stable(
            &dir,
            |_: Option<&[u8]>| {
                reads += 1;
                Ok(())
            },
            |()| b"damage".to_vec(),
        );
        assert!(matches!(result, Ok(((), damage)) if damage == b"damage"));
        assert_eq!(reads, 1);
    }
}
