//! Floor 6. Reading a snapshot's links by several threads: with small pages, one that does it alone takes as long for that
//! as for a fifth of loading them.
//!
//! Only links of which nothing is wrong are read so. What is wrong with the others, and what can be had of them, is for
//! [`Survey::read_by`] to say.
//!
//! [`Survey::read_by`]: remanent_format::rebuild::Survey::read_by

use remanent_format::manifest::{Manifest, Share};
use remanent_format::{FileName, ReadAt};
use zerocopy::FromZeros;

use crate::crew;
use crate::source::DiskSource;
use crate::sync::Mutex;

/// Threads that read and decode.
const THREADS_MAX: usize = 8;
/// Bytes that are read at once.
const READ_LEN: usize = 512 << 10;
/// Entries that are decoded at once.
const ENTRIES_AT_ONCE: usize = 4 << 10;

/// Threads for the entries.
pub(super) struct Crew;

impl Share for Crew {
    fn at_once(&self) -> usize {
        ENTRIES_AT_ONCE
    }

    fn share<T: Send, E: Send>(
        &self,
        count: usize,
        work: impl Fn(usize) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        crew::map(crew::threads(THREADS_MAX), count, || (), |(), piece| work(piece))
    }
}

/// Reads a link whose two copies are alike; gives its header checksum with it. `None` if it is short, or anything is not
/// as it should be.
pub(super) fn read(source: &DiskSource, file: FileName) -> Option<(Manifest, u32)> {
    let len = source.len(file).ok()??;
    let half = usize::try_from(len / 2).ok().filter(|half| len.is_multiple_of(2) && *half > READ_LEN)?;
    // Zeros that nobody has touched: each thread is the first to touch its own.
    let mut copy = u8::new_vec_zeroed(half).ok()?;
    let pieces: Vec<Mutex<&mut [u8]>> = copy.chunks_mut(READ_LEN).map(Mutex::new).collect();
    let read = |second: &mut Vec<u8>, piece: usize| {
        let (mut first, at) = (pieces[piece].lock(), (piece * READ_LEN) as u64);
        source.read_at(file, at, &mut first).map_err(drop)?;
        let second = &mut second[..first.len()];
        source.read_at(file, half as u64 + at, second).map_err(drop)?;
        if **first == *second { Ok(()) } else { Err(()) }
    };
    crew::map(crew::threads(THREADS_MAX), pieces.len(), || vec![0; READ_LEN], read).ok()?;
    drop(pieces);
    Manifest::decode_first_by(&copy, &Crew)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::manifest::{ManifestEntry, ManifestKind};
    use remanent_format::{Epoch, Folder, LogPoint, Lsn, PageId, PageInfo, Place, SnapshotId, StoreId};

    use super::*;
    use crate::disk::Disk;
    use crate::disk::sim::SimDisk;
    use crate::keeping::entry;

    const FILE: FileName = FileName::Manifest(1);

    /// Empty pages, more than are read or decoded at once.
    fn manifest() -> Manifest {
        let page = |page| -> ManifestEntry {
            let mut info = PageInfo::new(PageId(page), 0, Place::Host);
            (info.epoch, info.lsn) = (Epoch(1), Lsn(1));
            entry(&info, None)
        };
        let count = 4 * ENTRIES_AT_ONCE as u64 + 7;
        Manifest {
            kind: ManifestKind::Base,
            store: StoreId([7; 16]),
            snapshot: SnapshotId(1),
            name: None,
            created_unix_ms: 0,
            redo: LogPoint { lsn: Lsn(1), ..LogPoint::default() },
            end: Lsn(1),
            next_page: count + 1,
            epoch_high: Epoch(1),
            next_file: 1,
            tombstones: Vec::new(),
            entries: (1..=count).map(page).collect(),
            root: Arc::default(),
        }
    }

    fn read_from(bytes: &[u8]) -> Option<(Manifest, u32)> {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Snapshots).unwrap();
        disk.create(FILE).and_then(|file| file.write_at(0, bytes)).unwrap();
        read(&DiskSource::new(Arc::new(disk)), FILE)
    }

    #[test]
    fn a_link_is_read_only_where_nothing_is_wrong_with_either_copy() {
        let manifest = manifest();
        let whole = manifest.encode().unwrap();
        let half = whole.len() / 2;
        assert!(half > 2 * READ_LEN);
        assert_eq!(read_from(&whole), Some((manifest, Manifest::header_crc(&whole).unwrap())));
        for at in [0, 300, READ_LEN, half - 1, half, half + 300, half + READ_LEN, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert_eq!(read_from(&damaged), None, "byte {at}");
        }
        // Both alike, and both wrong.
        let mut damaged = whole.clone();
        [300, half + 300].into_iter().for_each(|at| damaged[at] ^= 1);
        assert_eq!(read_from(&damaged), None);
        for wrong in [&whole[..whole.len() - 1], &whole[..half], &[&whole[..], &[0; 8192]].concat()] {
            assert_eq!(read_from(wrong), None, "{} bytes", wrong.len());
        }
        assert_eq!(read(&DiskSource::new(Arc::new(SimDisk::new())), FILE), None, "no such file");
    }
}
