//! Floor 5. Reading many images: in the order of their files, neighbours in one read. A store of tiny pages
//! would else ask the medium once a page.

use remanent_format::image::ImageRef;
use remanent_format::rebuild::check_image;
use remanent_format::{Damage, Defect, FileName, PageId, ReadAt};

use crate::error::Result;
use crate::source::DiskSource;

/// Images are read in runs of at most this many bytes, unless one is longer.
const RUN_BYTES: u64 = 4 << 20;

/// An image to read.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub page: PageId,
    /// The page's length in bytes.
    pub len: u64,
    pub image: ImageRef,
}

/// Reads images; `each` gets every page's bytes, proven, in no order that means anything.
///
/// # Errors
/// [`crate::Error::Damaged`]; what `each` returns.
pub(crate) fn read_runs(
    source: &DiskSource,
    mut wanted: Vec<Wanted>,
    mut each: impl FnMut(PageId, &[u8]) -> Result<()>,
) -> Result<()> {
    wanted.sort_unstable_by_key(|wanted| (wanted.image.file, wanted.image.offset));
    let mut rest = &wanted[..];
    while let Some(Wanted { image: first, .. }) = rest.first() {
        let run_end = first.offset + RUN_BYTES.max(first.stored_len);
        let in_run =
            |image: &ImageRef| image.file == first.file && image.offset + image.stored_len <= run_end;
        let (run, after) = rest.split_at(rest.iter().take_while(|wanted| in_run(&wanted.image)).count());
        rest = after;
        let last = &run.last().expect("at least the first").image;
        // Once more before it is an error: who overwrites memory cannot go back.
        let bytes = read_run(source, first, last).or_else(|_| read_run(source, first, last))?;
        for Wanted { page, len, image } in run {
            let at = (image.offset - first.offset) as usize;
            let stored = &bytes[at..at + image.stored_len as usize];
            let content = image
                .decode(stored.into(), *len)
                .map_err(|defect| defect.at(FileName::Pages(image.file), image.offset))?;
            each(*page, &content)?;
        }
    }
    Ok(())
}

/// Proves images. One that is longer than a run is read piece by piece.
///
/// # Errors
/// [`crate::Error::Damaged`].
pub(crate) fn prove(source: &DiskSource, wanted: impl IntoIterator<Item = Wanted>) -> Result<()> {
    let (long, short): (Vec<_>, Vec<_>) =
        wanted.into_iter().partition(|wanted| wanted.image.stored_len > RUN_BYTES);
    long.iter().try_for_each(|Wanted { image, len, .. }| check_image(source, image, *len))?;
    read_runs(source, short, |_, _| Ok(()))
}

/// The bytes from one image to another one behind it in the same file. What is not there is not allocated.
fn read_run(source: &DiskSource, first: &ImageRef, last: &ImageRef) -> Result<Vec<u8>, Damage> {
    let file = FileName::Pages(first.file);
    let at = |defect: Defect| defect.at(file, first.offset);
    let unreadable = |error: std::io::Error| at(Defect::Unreadable(error.to_string()));
    let have = source.len(file).map_err(unreadable)?.ok_or_else(|| at(Defect::Missing))?;
    let needed = last.offset + last.stored_len;
    if have < needed {
        return Err(at(Defect::Truncated { needed, have }));
    }
    let mut bytes = vec![0; (needed - first.offset) as usize];
    source.read_at(file, first.offset, &mut bytes).map_err(unreadable)?;
    Ok(bytes)
}
