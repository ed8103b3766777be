//! Surveys every file with several threads. With small pages, reading a snapshot's links with a single thread takes a
//! fifth of the time to load the pages. The log is surveyed concurrently, because it does not depend on the links.
//!
//! Several threads read only intact links. For all other links, [`read_links`] determines the damage and the
//! recoverable parts, so that all tools use the same rules.
//!
//! This module writes nothing to disk, so a crash loses nothing.

use remanent_format::log::LogMap;
use remanent_format::manifest::{Manifest, ManifestHeaderRaw, WorkPool};
use remanent_format::state::survey::{Survey, read_links, read_store};
use remanent_format::{Damage, FileName, ReadAt};
use zerocopy::FromZeros;

use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::disk::source::DiskSource;

/// The maximum number of threads that read and decode links.
const THREADS_MAX: usize = 8;
/// The number of bytes of a link that one thread reads at a time.
const READ_LEN: usize = 512 << 10;
/// The number of manifest entries that a thread decodes at a time.
const ENTRIES_AT_ONCE: usize = 4 << 10;

/// Distributes the decoding of a manifest's entries among several threads.
pub(super) struct EntryThreads;

impl WorkPool for EntryThreads {
    fn pieces_len(&self) -> usize {
        ENTRIES_AT_ONCE
    }

    fn map_pieces<P: Send, T: Send, E: Send>(
        &self,
        pieces: Vec<P>,
        work: impl Fn(P) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        parallel::for_each(parallel::threads(THREADS_MAX), pieces, work)
    }

    fn join<A: Send, B>(&self, other: impl FnOnce() -> A + Send, here: impl FnOnce() -> B) -> (A, B) {
        parallel::join(other, here)
    }
}

/// Surveys the files, like the single-threaded [`Survey::read`].
///
/// # Errors
/// Same as [`Survey::read`].
pub(super) fn read(source: &DiskSource) -> Result<Survey, Damage> {
    let store = read_store(source)?;
    // Log and links are independent and read concurrently, because each waits for the disk.
    let (log, links) = parallel::join(
        || LogMap::read(source, store.store),
        || read_links(source, &store, &|link| read_link(source, link)),
    );
    Ok(Survey { log: log?, links: links?, store })
}

/// Reads a link whose two copies are equal, and returns the link with its header checksum. Returns `None` if the file
/// is too short or damaged in any way.
fn read_link(source: &DiskSource, file: FileName) -> Option<(Manifest, u32)> {
    let mut header = [0; ManifestHeaderRaw::LEN];
    source.read_at(file, 0, &mut header).ok()?;
    // The length in the header may be damaged and request a TiB of memory, so it is compared with the length of the
    // file (I9).
    let copy_len = Manifest::copy_len(&header)?;
    let is_whole = source.len(file).ok()?? == 2 * copy_len;
    let half = usize::try_from(copy_len).ok().filter(|half| is_whole && *half > READ_LEN)?;
    // The system maps zeroed memory when it is first touched. Each thread first touches its own pieces.
    let mut copy = u8::new_vec_zeroed(half).ok()?;
    let pieces: Vec<Mutex<&mut [u8]>> = copy.chunks_mut(READ_LEN).map(Mutex::new).collect();
    let read = |second: &mut Option<Vec<u8>>, piece: usize| {
        let second = second.as_mut().ok_or(())?;
        let (mut first, at) = (pieces[piece].lock(), (piece * READ_LEN) as u64);
        source.read_at(file, at, &mut first).map_err(drop)?;
        let second = &mut second[..first.len()];
        source.read_at(file, copy_len + at, second).map_err(drop)?;
        if **first == *second { Ok(()) } else { Err(()) }
    };
    // If memory is unavailable, the file is left to the single-threaded reader, which handles all errors.
    let equip = || u8::new_vec_zeroed(READ_LEN).ok();
    parallel::map_indexed(parallel::threads(THREADS_MAX), pieces.len(), equip, read).ok()?;
    drop(pieces);
    // Both copies have the same bytes, so verifying the first one suffices.
    Manifest::decode_first_by(&copy, &EntryThreads)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::limits::SEGMENT_LEN_MIN;
    use remanent_format::segment::{SegmentHeader, SegmentHeaderRaw};
    use remanent_format::store::{StoreFile, StoreRecord};
    use remanent_format::{Folder, SnapshotId, StoreId};

    use super::*;
    use crate::catalog::sample::of_empty_pages;
    use crate::disk::Disk;
    use crate::testing::sim_disk::{Operation, SimDisk};

    const FILE: FileName = FileName::Manifest(1);
    const STORE: StoreId = StoreId([7; 16]);

    /// Returns a manifest with more pages than a thread reads or decodes at a time.
    fn manifest() -> Manifest {
        of_empty_pages(4 * ENTRIES_AT_ONCE as u64 + 7)
    }

    /// Returns a disk with a link file that contains `bytes`.
    fn disk_with(bytes: &[u8]) -> SimDisk {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Snapshots).unwrap();
        disk.create(FILE).and_then(|file| file.write_at(0, bytes)).unwrap();
        disk
    }

    /// Writes `bytes` as a link file, and reads the link with several threads.
    fn read_from(bytes: &[u8]) -> Option<(Manifest, u32)> {
        read_link(&DiskSource::new(Arc::new(disk_with(bytes))), FILE)
    }

    /// Threads read only intact links. For damaged links, a single function determines what can be recovered.
    #[test]
    fn link_is_used_only_with_two_good_copies() {
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
        // Both copies are equal, and both are wrong.
        let mut damaged = whole.clone();
        [300, half + 300].into_iter().for_each(|at| damaged[at] ^= 1);
        assert_eq!(read_from(&damaged), None);
        for wrong in [&whole[..whole.len() - 1], &whole[..half], &[&whole[..], &[0; 8192]].concat()] {
            assert_eq!(read_from(wrong), None, "{} bytes", wrong.len());
        }
        assert_eq!(read_link(&DiskSource::new(Arc::new(SimDisk::new())), FILE), None, "no such file");
    }

    /// A damaged length in a header must not make a thread allocate that much memory (I9).
    #[test]
    fn link_with_inconsistent_length_is_not_read_further() {
        let whole = manifest().encode().unwrap();
        let mut nameless = whole.clone();
        nameless[0] ^= 1;
        for wrong in [&[&whole[..], &[0; 8192]].concat()[..], &whole[..whole.len() - 8192], &nameless[..]] {
            let disk = disk_with(wrong);
            assert_eq!(read_link(&DiskSource::new(Arc::new(disk.clone())), FILE), None);
            assert_eq!(disk.calls(Operation::Read), 1, "{} bytes", wrong.len());
        }
    }

    /// Several threads must find the same files as one thread. The cases are: no STORE, a long and a short link, a
    /// damaged copy of each, a link under another link's name, a segment, and a file that is not a segment.
    #[test]
    fn several_threads_find_same_result_as_one() {
        let disk = disk_with(&manifest().encode().unwrap());
        let store = StoreFile { store: STORE, features: Default::default(), record: StoreRecord::default() };
        Folder::INNER.into_iter().for_each(|folder| disk.make_folder(folder).unwrap());
        let put = |file, bytes: &[u8]| disk.create(file).and_then(|open| open.write_at(0, bytes)).unwrap();
        let both = || {
            let source = DiskSource::new(Arc::new(disk.clone()));
            (format!("{:?}", read(&source)), format!("{:?}", Survey::read(&source)))
        };
        let (without, expected) = both();
        assert!(without == expected && without.contains("Missing"), "no STORE: {without}");

        put(FileName::Store, &store.encode().unwrap());
        let short = Manifest { entries: Vec::new(), snapshot: SnapshotId(2), ..manifest() };
        put(FileName::Manifest(2), &short.encode().unwrap());
        put(FileName::Manifest(3), &short.encode().unwrap());
        for (number, link) in [(4, manifest()), (5, short)] {
            let mut bytes = Manifest { snapshot: SnapshotId(number), ..link }.encode().unwrap();
            bytes[260] ^= 1;
            put(FileName::Manifest(number), &bytes);
        }
        let header = SegmentHeader { store: STORE, segment: 1, segment_len: SEGMENT_LEN_MIN, opening: None };
        let mut segment = vec![0; SEGMENT_LEN_MIN as usize];
        segment[..SegmentHeaderRaw::LEN].copy_from_slice(&header.encode());
        put(FileName::Segment(1), &segment);
        put(FileName::Segment(2), &[7; 100]);
        let (by_threads, by_one) = both();
        // `assert_eq` would print two very long texts.
        assert!(by_threads == by_one && by_one.starts_with("Ok"), "{}", by_one.len());
        assert!(by_one.contains("is_blank: true") && by_one.contains("manifest's number"));
        assert_eq!(by_one.matches("manifest body").count(), 2);
    }
}
