//! Reads that bypass the page cache, for callers that need the bytes on the medium (I6).
//!
//! Direct reads need aligned memory, offset and length. If one of them is not aligned, the bytes are read into an
//! aligned buffer and copied.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use remanent_format::limits::GROUP_ALIGN;
use rustix::fs::{CWD, Mode, OFlags};

use crate::base::aligned_buf::{AlignedBuf, is_aligned};

/// The maximum number of bytes that one read through the aligned buffer returns. Rounded to whole blocks, the read
/// covers at most one mebibyte.
pub(super) const BOUNCE_LEN_MAX: usize = (1 << 20) - GROUP_ALIGN as usize;

/// The value that replaces [`BOUNCE_LEN_MAX`] if memory is short. An allocation of this length does not fail.
const BOUNCE_LEN_SHORT: usize = 32 << 10;

/// Reopens the file for reads that bypass the page cache. Returns `None` if the file system does not support such
/// reads.
pub(super) fn reopen_direct(file: &File) -> Option<File> {
    reopen(file, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC).ok()
}

/// Reopens the same file with other flags. The path under `/proc` leads to the file even after a rename. On a system
/// without `/proc`, the call fails.
pub(super) fn reopen(file: &File, flags: OFlags) -> rustix::io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::openat(CWD, path, flags, Mode::empty()).map(File::from)
}

/// Fills `out` from the medium. If memory, offset and length are aligned, the read needs no copy. Otherwise the bytes
/// are copied from an aligned buffer.
pub(super) fn read_direct(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    if is_aligned(offset, out) {
        return file.read_exact_at(out, offset);
    }
    read_through_area(offset, out, |area, at| file.read_at(area, at))
}

/// Fills `out` through an aligned buffer. `read` may be interrupted or read fewer bytes than requested, and is then
/// repeated.
fn read_through_area(
    offset: u64,
    out: &mut [u8],
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let align = GROUP_ALIGN as usize;
    let bounce_len = out.len().saturating_add(2 * align).next_multiple_of(align).min(BOUNCE_LEN_MAX);
    // If memory is short, the read uses a smaller buffer instead of failing.
    let short = || AlignedBuf::new(bounce_len.min(BOUNCE_LEN_SHORT));
    let mut bounce = AlignedBuf::try_new(bounce_len).unwrap_or_else(short);
    let bounce_len = bounce.len();
    let mut done = 0;
    while done < out.len() {
        let at = offset.checked_add(done as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        let skip = (at % GROUP_ALIGN) as usize;
        let wanted = (skip + out.len() - done).next_multiple_of(align).min(bounce_len);
        let len = match read(&mut bounce[..wanted], at - skip as u64) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            len => len?,
        };
        // A read that ends inside a block has reached the end of the file.
        let usable = len.saturating_sub(skip).min(out.len() - done);
        if usable == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out[done..done + usable].copy_from_slice(&bounce[skip..skip + usable]);
        done += usable;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_interrupted_direct_reads_are_resumed() {
        let file: Vec<u8> = (0..20_000).map(|index| (index % 251) as u8).collect();
        let mut interrupted = false;
        // Reads one block at a time, and every second call is interrupted.
        let mut read = |bounce: &mut [u8], at: u64| {
            interrupted = !interrupted;
            if interrupted {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let rest = &file[(at as usize).min(file.len())..];
            let len = rest.len().min(GROUP_ALIGN as usize);
            bounce[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        };
        for (offset, len) in [(0, 20_000), (5000, 12_000), (4095, 2), (19_999, 1)] {
            let mut out = vec![0; len];
            read_through_area(offset as u64, &mut out, &mut read).unwrap();
            assert!(out == file[offset..offset + len], "{offset}+{len}");
        }
        for (offset, len) in [(20_000, 1), (19_999, 2)] {
            let error = read_through_area(offset, &mut vec![0; len], &mut read).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{offset}+{len}");
        }
    }
}
