//! Compaction: image files of which little is still named give their last images to the next snapshot.
//!
//! A snapshot names images of older files for the pages that did not change, and a file stays as long as one
//! of them is named (I8). A file with one such page would stay for good. So a snapshot gathers the pages of
//! such files as if they had changed; once the older snapshots are gone, so are the files.
//!
//! Nothing is removed here: a crash loses nothing.

use remanent_format::image::IMAGE_HEADER_BLOCK;
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{FileName, ReadAt};

use super::Snapshots;
use crate::catalog::Catalog;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// A file is emptied when less than one byte in `LIVE_SHARE` of it is named...
const LIVE_SHARE: u64 = 2;
/// ...and at least this number of bytes is not: a file that is short because little changed is left alone.
const WASTE_BYTES_MIN: u64 = 4 * GROUP_ALIGN;
/// Beyond this number of files, the shortest are emptied, whatever is named of them.
const FILES_MAX: usize = 256;
/// A snapshot writes again as many bytes as it writes anyway, or this number if that is more.
pub(super) const CARRY_BYTES_MAX: u64 = 4 << 20;

/// An image file that the newest snapshot names.
#[derive(Clone, Copy, Debug)]
struct ImageFile {
    number: u64,
    /// Its length in bytes, without its header.
    len: u64,
    /// The bytes that the newest snapshot names.
    newest_bytes: u64,
    /// The most bytes that any kept snapshot names.
    live_bytes: u64,
}

impl Snapshots {
    /// Chooses the image files to empty, with the bytes to write again, the most wasteful first.
    pub(super) fn wasteful_files(&self, catalog: &mut Catalog) -> Result<Vec<(u64, u64)>> {
        let Some(newest) = catalog.snapshots.values().next_back() else { return Ok(Vec::new()) };
        let mut files = Vec::new();
        for (&number, &newest_bytes) in &newest.files {
            // A file that stays for another reason is not worth emptying: its space would not come back.
            let by_name = |kept: &&crate::catalog::RetainedSnapshot| {
                kept.info.name.is_some() && kept.files.contains_key(&number)
            };
            if catalog.is_in_table(number) || catalog.snapshots.values().any(|kept| by_name(&kept)) {
                continue;
            }
            let len = match catalog.file_lens.get(&number) {
                Some(len) => *len,
                None => self.measure(FileName::Pages(number))?.saturating_sub(IMAGE_HEADER_BLOCK),
            };
            // Measured once: a file never changes its length.
            catalog.file_lens.insert(number, len);
            files.push(ImageFile { number, len, newest_bytes, live_bytes: catalog.live_bytes(number) });
        }
        catalog.file_lens.retain(|number, _| newest.files.contains_key(number));
        Ok(choose(files))
    }

    /// Measures a file in bytes. A file that is gone has nothing left to give, and is for a scrub to notice.
    fn measure(&self, file: FileName) -> Result<u64> {
        let len = DiskSource::new(self.engine.disk.clone()).len(file);
        Ok(len.map_err(|source| Error::io("measure", file, None, source))?.unwrap_or(0))
    }
}

/// Chooses what to empty: the files with the smallest share of named bytes first, then the shortest of
/// too many.
fn choose(mut files: Vec<ImageFile>) -> Vec<(u64, u64)> {
    let is_wasteful = |file: &ImageFile| {
        file.live_bytes.saturating_mul(LIVE_SHARE) < file.len
            && file.len.saturating_sub(file.live_bytes) >= WASTE_BYTES_MIN
    };
    files.sort_by_key(|file| (!is_wasteful(file), file.newest_bytes, file.number));
    let wasteful = files.iter().filter(|file| is_wasteful(file)).count();
    let count = wasteful.max(files.len().saturating_sub(FILES_MAX));
    files.truncate(count);
    files.into_iter().map(|file| (file.number, file.newest_bytes)).collect()
}
