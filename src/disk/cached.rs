//! Reads the cached bytes of a file without reading the uncached bytes from the medium.
//!
//! A non-blocking read (`RWF_NOWAIT`) stops at the end of the cached bytes. Since Linux 5.20, such a read still starts
//! readahead for the following bytes. If the caller then reads the following bytes with direct I/O, the disk reads them
//! twice: for 256 MiB of uncached bytes read 4 MiB at a time, 512 MiB came from the disk. Therefore this module
//! requests a single page first, so that only 0.1 % of the uncached bytes is read twice.

use std::fs::File;
use std::io::IoSliceMut;

use remanent_format::limits::GROUP_ALIGN;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// Fills `out` with the cached bytes of the file from `offset` on. Returns the number of bytes read. If fewer bytes
/// than the length of `out` are read, the first missing byte is at a block boundary.
pub(super) fn read_cached(file: &File, offset: u64, out: &mut [u8]) -> usize {
    let probed = out.len().min((GROUP_ALIGN - offset % GROUP_ALIGN) as usize);
    let mut done = 0;
    let mut wanted = probed;
    while done < wanted {
        let mut area = [IoSliceMut::new(&mut out[done..wanted])];
        match preadv2(file, &mut area, offset + done as u64, ReadWriteFlags::NOWAIT) {
            Err(Errno::INTR) => continue,
            // No more bytes are cached, the file ends, or the file system does not support the flag. The caller reads
            // the remaining bytes.
            Ok(0) | Err(_) => break,
            Ok(len) => done += len,
        }
        if done == probed {
            wanted = out.len();
        }
    }
    if done == out.len() {
        return done;
    }
    let end = offset + done as u64;
    done.saturating_sub((end % GROUP_ALIGN) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_bytes_are_read_and_rest_is_block_aligned() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..20_000).map(|index| (index % 251) as u8).collect();
        std::fs::write(path.path(), &bytes).unwrap();
        let file = File::open(path.path()).unwrap();
        // The bytes were just written, so a correct query reports them as cached. Some file systems do not support the
        // query.
        let can_be_asked = read_cached(&file, 0, &mut [0]) == 1;
        for (offset, len, cached) in [
            (0, 20_000, 20_000),
            (4095, 2, 2),
            (5000, 0, 0),
            (123, 19_877, 19_877),
            // No bytes past the end of the file are cached.
            (0, 20_001, 16_384),
            (16_384, 5000, 0),
            (19_999, 2, 0),
            (123, 20_000, 16_384 - 123),
            (30_000, 10, 0),
        ] {
            let mut out = vec![0xee; len];
            let found = read_cached(&file, offset as u64, &mut out);
            assert_eq!(found, if can_be_asked { cached } else { 0 }, "{offset}+{len}");
            assert!(out[..found] == bytes[offset.min(20_000)..][..found], "{offset}+{len}");
        }
    }
}
