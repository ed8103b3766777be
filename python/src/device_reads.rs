//! Reads of an open store into caller-owned GPU memory.

use std::ops::Range;

use remanent::device::DeviceBytes;
use remanent::{Error, PageId, Result, Store};

use crate::memory::CudaBytes;

/// Reads ranges of pages, as of one batch, into memory on the store's GPU, and returns the Lsn of the batch.
/// Each range is as long as its memory.
///
/// # Errors
/// As for [`Store::read_device`].
pub fn read_device(store: &Store, ranges: Vec<(PageId, u64, CudaBytes)>) -> Result<u64> {
    let mut adopted: Vec<(PageId, u64, DeviceBytes)> = Vec::with_capacity(ranges.len());
    for (page, offset, out) in ranges {
        if out.len() == 0 {
            // Empty memory has no address. There is nothing to read as long as the offset is within the page.
            check_bounds(store, page, offset)?;
            continue;
        }
        adopted.push((page, offset, out.adopt(store)?));
    }
    let named: Vec<_> = adopted.iter().map(|(page, offset, bytes)| (*page, *offset, bytes)).collect();
    store.read_device(&named).map(|lsn| lsn.0)
}

fn check_bounds(store: &Store, page: PageId, offset: u64) -> Result<()> {
    let page_len = store.page(page)?.len;
    if offset > page_len { Err(Error::OutOfBounds { page, offset, len: 0, page_len }) } else { Ok(()) }
}

/// Reads ranges of pages, as of one batch, into memory on the GPU, with one buffer per range.
pub fn fill_device(store: &Store, ranges: &[(PageId, Range<u64>)], outs: Vec<CudaBytes>) -> Result<u64> {
    let ranges = ranges.iter().zip(outs).map(|((page, range), out)| (*page, range.start, out));
    read_device(store, ranges.collect())
}
