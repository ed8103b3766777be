//! Compaction: a snapshot also rewrites the images that are still in use in mostly unused image files.
//!
//! For pages that did not change, a snapshot refers to images in older files. A file is kept as long as any snapshot
//! refers to one of its images (I8), so a single page that never changes would keep a whole file. Therefore a snapshot
//! gathers the pages in mostly unused files as if they had changed. The files are removed together with the older
//! snapshots.
//!
//! No file is removed here, so a crash loses nothing.

use remanent_format::image::IMAGE_HEADER_BLOCK;
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{FileName, ReadAt};

use super::Snapshots;
use crate::catalog::Catalog;
use crate::disk::source::DiskSource;
use crate::error::{Error, IoAction, Result};

/// The inverse of the live share below which compaction rewrites a file. The live share is the part of the file's bytes
/// that a kept snapshot names.
const LIVE_SHARE: u64 = 2;
/// The minimum number of unused bytes in a file that compaction rewrites. A file that is short because few pages
/// changed is kept.
const WASTE_BYTES_MIN: u64 = 4 * GROUP_ALIGN;
/// The maximum number of image files. Compaction rewrites the files with the fewest live bytes if there are more.
const FILES_MAX: usize = 256;
/// The number of bytes that a snapshot may always rewrite for compaction. If its changed pages have more bytes, the
/// snapshot may rewrite as many bytes as they have.
pub(super) const CARRY_BYTES_MAX: u64 = 4 << 20;

/// An image file that the newest snapshot names, with the byte counts from which its waste is computed.
#[derive(Clone, Copy, Debug)]
struct ImageFile {
    number: u64,
    /// The length of the file in bytes, without its header.
    len: u64,
    /// The number of bytes of the file that the newest snapshot names.
    newest_bytes: u64,
    /// The maximum, over all kept snapshots, of the number of bytes in the file that a snapshot names.
    live_bytes: u64,
}

impl Snapshots {
    /// Chooses the image files to rewrite, most wasteful first, and returns the number of bytes to rewrite for each.
    pub(super) fn wasteful_files(&self, catalog: &mut Catalog) -> Result<Vec<(u64, u64)>> {
        let Some(newest) = catalog.snapshots.values().next_back() else { return Ok(Vec::new()) };
        let mut files = Vec::new();
        for (&number, &newest_bytes) in &newest.files {
            // A file that a named snapshot needs is kept anyway, so rewriting its images would free no space.
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
            // The length is cached, because the length of an image file never changes.
            catalog.file_lens.insert(number, len);
            files.push(ImageFile { number, len, newest_bytes, live_bytes: catalog.live_bytes(number) });
        }
        catalog.file_lens.retain(|number, _| newest.files.contains_key(number));
        Ok(choose(files))
    }

    /// Returns the length of a file in bytes, or 0 if the file is missing. Missing files are reported by scrubs.
    fn measure(&self, file: FileName) -> Result<u64> {
        let len = DiskSource::new(self.engine.disk.clone()).len(file);
        Ok(len.map_err(|source| Error::io(IoAction::Inspect, file, None, source))?.unwrap_or(0))
    }
}

/// Chooses the files to rewrite: all wasteful files and, if too many files remain, the files with the fewest live
/// bytes.
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
