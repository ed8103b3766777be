//! Publishes small files: STORE, manifests, and tables.
//!
//! A file is written under a temporary name, synced and renamed, and the folder is synced. A crash after the rename
//! leaves the complete file. A crash before the rename may leave a temporary file, which the next open removes. If
//! there is no space for a new file, a spare of the log becomes the temporary file.

use std::sync::Arc;

use remanent_format::manifest::{Manifest, ManifestKind};
use remanent_format::{Defect, FileName, Place};

use crate::base::aligned_buf::AlignedBuf;
use crate::base::allocation::make_room;
use crate::base::parallel;
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result};

/// The number of bytes that a thread reads back at a time. Reading a long manifest in one piece took longer, because of
/// the memory allocation.
const READ_LEN: usize = (1 << 20) - (64 << 10);
/// The number of manifest entries that a thread encodes at a time.
const ENTRIES_AT_ONCE: usize = 8 << 10;
/// The maximum number of threads that encode a manifest, read it back, or read back images that batches wrote before
/// they were logged. No other part of a snapshot runs at the same time. With small pages, this work took a tenth of the
/// snapshot's time on a single thread.
pub(super) const THREADS_MAX: usize = 4;

/// A function that turns a spare into a file with the given temporary name and length in bytes, if there is no space
/// for a new file. The function returns `None` if no spare is available.
pub(crate) type CreateFromSpare<'a> = dyn Fn(FileName, u64) -> Result<Option<Arc<dyn DiskFile>>> + 'a;

/// A [`CreateFromSpare`] for callers that must not use spares. Always returns `None`.
pub(crate) fn without_spare(_temporary: FileName, _len: u64) -> Result<Option<Arc<dyn DiskFile>>> {
    Ok(None)
}

/// Publishes a manifest or a table and reads the file back with up to `threads_max` threads, bypassing the page cache
/// (I7). Returns the checksum of the file's header. Other files state this checksum when they refer to the file.
pub(crate) fn publish_manifest(
    disk: &Arc<dyn Disk>,
    manifest: &Manifest,
    threads_max: usize,
    spare: &CreateFromSpare,
) -> Result<u32> {
    let published = publish_unchecked(disk, manifest, threads_max, spare)?;
    published.check()?;
    Ok(published.header_crc)
}

/// Publishes a file like [`publish_manifest`], but does not read the file back. The caller does so later with
/// [`PublishedFile::check`].
pub(crate) fn publish_unchecked(
    disk: &Arc<dyn Disk>,
    manifest: &Manifest,
    threads_max: usize,
    spare: &CreateFromSpare,
) -> Result<PublishedFile> {
    assert!(manifest.redo.lsn <= manifest.end); // I7: a replay from `redo` reaches the end.
    let number = manifest.snapshot.0;
    let file = match manifest.kind {
        ManifestKind::Base | ManifestKind::Change { .. } => FileName::Manifest(number),
        ManifestKind::Table => FileName::Table(number),
    };
    let threads = parallel::threads(threads_max.min(THREADS_MAX));
    let encoded = EncodedManifest::of(manifest, file, threads)?;
    let bytes = encoded.bytes();
    let header_crc = Manifest::header_crc(bytes[0]).map_err(|defect| defect.at(file, 0))?;
    publish(disk, file, number, &bytes, spare)?;
    Ok(PublishedFile { header_crc, disk: disk.clone(), file, encoded, threads })
}

/// A manifest or a table that has been renamed to its final name but not yet been read back.
pub(crate) struct PublishedFile {
    /// The checksum of the file's header. Other files state this checksum when they refer to the file.
    pub header_crc: u32,
    disk: Arc<dyn Disk>,
    file: FileName,
    encoded: EncodedManifest,
    threads: usize,
}

impl PublishedFile {
    /// Reads the file back from the disk, bypassing the page cache, and compares it with the bytes that were written
    /// (I7).
    ///
    /// # Errors
    /// Damage if the bytes differ, or the I/O error of the read.
    pub fn check(&self) -> Result<()> {
        check_published(&self.disk, self.file, &self.encoded.bytes(), self.threads)
    }
}

/// The encoded bytes of a manifest or a table, for a file that contains two copies of them.
struct EncodedManifest {
    /// The parts of one copy, in order. Their concatenation is the encoded manifest.
    pieces: Vec<Vec<u8>>,
}

impl EncodedManifest {
    /// Encodes `manifest` for `file` with up to `threads` threads.
    fn of(manifest: &Manifest, file: FileName, threads: usize) -> Result<Self> {
        let count = manifest.entries.len();
        let encode = |(): &mut (), piece: usize| {
            let start = piece * ENTRIES_AT_ONCE;
            manifest.encode_entries(start..count.min(start + ENTRIES_AT_ONCE))
        };
        let pieces = count.div_ceil(ENTRIES_AT_ONCE).max(1);
        let entries = parallel::map_indexed(threads, pieces, || (), encode);
        let pieces = entries.and_then(|entries| manifest.encode_around(entries));
        Ok(Self { pieces: pieces.map_err(|defect| Error::from(defect.at(file, 0)))? })
    }

    /// Returns the parts of the file's content, in order: two copies of the encoded manifest.
    fn bytes(&self) -> Vec<&[u8]> {
        let copy = || self.pieces.iter().map(Vec::as_slice);
        copy().chain(copy()).collect()
    }
}

/// Writes the concatenation of `bytes` to a temporary file, syncs the file, and durably renames it to `file`. If there
/// is no space, the call fails and at most the number of spares has changed.
pub(crate) fn publish(
    disk: &Arc<dyn Disk>,
    file: FileName,
    number: u64,
    bytes: &[&[u8]],
    spare: &CreateFromSpare,
) -> Result<()> {
    let temporary = FileName::Temporary(file.folder(), number);
    let write = |open: Arc<dyn DiskFile>| {
        let mut at = 0;
        for piece in bytes {
            open.write_at(at, piece)?;
            at += piece.len() as u64;
        }
        open.sync()
    };
    let remove = |_: &Error| {
        if let Err(error) = disk.remove(temporary) {
            tracing::warn!(%error, "cannot remove an unfinished file; the next open will");
        }
    };
    let rename = |()| disk.rename(temporary, file);
    let finish = |open| write(open).and_then(rename).inspect_err(remove);
    let len = byte_len(bytes) as u64;
    let written = match disk.create(temporary).and_then(finish) {
        Err(error) if error.is_no_space() => match spare(temporary, len)? {
            Some(open) => finish(open),
            None => Err(error),
        },
        written => written,
    };
    written.map_err(|error| if error.is_no_space() { Error::disk_full(file, len) } else { error })?;
    disk.sync_folder(file.folder())
}

/// Reads a published manifest or table back, bypassing the page cache, and compares it with the bytes written (I7).
fn check_published(disk: &Arc<dyn Disk>, file: FileName, written: &[&[u8]], threads: usize) -> Result<()> {
    let (open, len) = (disk.open(file, false)?, byte_len(written));
    let area_len = len.min(READ_LEN);
    let is_same = |area: &mut Option<AlignedBuf>, piece: usize| {
        let at = piece * READ_LEN;
        let no_memory = Error::OutOfMemory { place: Place::Host, len: area_len as u64 };
        let found = &mut area.as_mut().ok_or(no_memory)?[..READ_LEN.min(len - at)];
        open.read_bypassing_cache(at as u64, found)?;
        Ok::<_, Error>(is_at(at, found, written))
    };
    let pieces = len.div_ceil(READ_LEN);
    let are_same = parallel::map_indexed(threads, pieces, || AlignedBuf::try_new(area_len), is_same)?;
    if are_same.into_iter().all(|is_same| is_same) {
        return Ok(());
    }
    let mut found = Vec::new();
    make_room(&mut found, len)?;
    found.resize(len, 0);
    open.read_bypassing_cache(0, &mut found)?;
    let (_, health) = Manifest::decode(&found).map_err(|defect| Error::from(defect.at(file, 0)))?;
    let differs = Defect::Field { what: "manifest that differs from the one written", found: 0 };
    Err(health.defects.into_iter().flatten().next().unwrap_or(differs).at(file, 0).into())
}

fn byte_len(pieces: &[&[u8]]) -> usize {
    pieces.iter().map(|piece| piece.len()).sum()
}

/// Returns whether the concatenation of `pieces` contains `found` at offset `at`.
fn is_at(mut at: usize, mut found: &[u8], pieces: &[&[u8]]) -> bool {
    for piece in pieces {
        let here = &piece[at.min(piece.len())..];
        at -= piece.len() - here.len();
        let len = here.len().min(found.len());
        if found[..len] != here[..len] {
            return false;
        }
        found = &found[len..];
    }
    found.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::sample::of_empty_pages;
    use crate::testing::sim_disk::{DiskFault, ENOSPC, Operation, SimDisk};

    #[test]
    fn manifest_written_in_pieces_equals_its_whole_encoding() {
        let file = FileName::Manifest(1);
        let at_once = ENTRIES_AT_ONCE as u64;
        for count in [0, 1, at_once, at_once + 1, 3 * at_once + 5] {
            let (sim, manifest) = (SimDisk::new(), of_empty_pages(count));
            let disk: Arc<dyn Disk> = Arc::new(sim.clone());
            disk.make_folder(file.folder()).unwrap();
            let crc = publish_manifest(&disk, &manifest, usize::MAX, &without_spare).unwrap();
            let whole = manifest.encode().unwrap();
            assert_eq!(sim.bytes(file).unwrap(), whole, "{count}");
            let encoded = EncodedManifest::of(&manifest, file, 1).unwrap();
            let bytes = encoded.bytes();
            let check = || check_published(&disk, file, &bytes, parallel::threads(THREADS_MAX));
            assert_eq!(crc.to_le_bytes(), whole[252..256], "{count}");
            for at in
                [8, whole.len() / 2 - 1, whole.len() / 2 + 300.min(whole.len() / 2 - 1), whole.len() - 1]
            {
                sim.damage(file, at as u64, &[whole[at] ^ 1]);
                check().unwrap_err();
                sim.damage(file, at as u64, &whole[at..at + 1]);
            }
            check().unwrap();
        }
    }

    #[test]
    fn failed_file_creation_removes_nothing() {
        let file = FileName::Manifest(1);
        for (operation, removed) in [(Operation::Create, 0), (Operation::Write, 1), (Operation::Sync, 1)] {
            let sim = SimDisk::new();
            let disk: Arc<dyn Disk> = Arc::new(sim.clone());
            disk.make_folder(file.folder()).unwrap();
            sim.fail(DiskFault { operation, skip: 0, times: 1, errno: ENOSPC });
            let published = publish_manifest(&disk, &of_empty_pages(1), usize::MAX, &without_spare);
            let error = published.unwrap_err();
            assert!(matches!(error, Error::DiskFull { .. }), "{operation:?}: {error}");
            assert_eq!(sim.calls(Operation::Remove), removed, "{operation:?}");
            assert_eq!(disk.list(file.folder()).unwrap(), [""; 0], "{operation:?}");
        }
    }

    #[test]
    fn bytes_are_located_among_pieces() {
        let pieces: [&[u8]; 5] = [b"ab", b"", b"c", b"defg", b"h"];
        let whole = pieces.concat();
        for start in 0..=whole.len() {
            for end in start..=whole.len() {
                let mut found = whole[start..end].to_vec();
                assert!(is_at(start, &found, &pieces), "{start}..{end}");
                for at in 0..found.len() {
                    found[at] ^= 1;
                    assert!(!is_at(start, &found, &pieces), "{start}..{end}: {at}");
                    found[at] ^= 1;
                }
            }
            assert!(!is_at(start, &[&whole[start..], b"i"].concat(), &pieces), "{start}: more than there is");
        }
    }
}
