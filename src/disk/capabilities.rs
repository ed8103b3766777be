//! Determines which kinds of writes the file system supports, before the store writes its first file. Also determines
//! whether the file system's report of cached pages can be trusted.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{FileName, Folder};
use rustix::fs::{CWD, Mode, OFlags, StatFs};
use rustix::io::Errno;

use super::direct;
use super::direct_read::reopen;
use crate::base::aligned_buf::AlignedBuf;

/// The magic number that ext2, ext3 and ext4 share.
const EXT: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;
const BTRFS: u64 = 0x9123_683e;
const F2FS: u64 = 0xf2f5_2010;
/// The magic number of tmpfs.
const TMPFS: u64 = 0x0102_1994;

fn magic(system: &StatFs) -> u64 {
    // The field is signed on some platforms and unsigned on others. The magic numbers have 32 bits.
    system.f_type as u64 & 0xffff_ffff
}

/// Returns whether the kernel's page cache is the only cache of the file system and always contains whole pages. If
/// blocks are shorter than pages, the kernel may report a page as uncached although one of its blocks is cached.
pub(super) fn has_no_other_cache(file: &File) -> rustix::io::Result<bool> {
    let system = rustix::fs::fstatfs(file)?;
    let is_known = matches!(magic(&system), EXT | XFS | BTRFS | F2FS);
    Ok(is_known && system.f_bsize as u64 >= rustix::param::page_size() as u64)
}

/// Returns whether `file` exists only in memory, in pages that a mapping of the file shares.
pub(super) fn is_in_memory(file: &File) -> rustix::io::Result<bool> {
    Ok(magic(&rustix::fs::fstatfs(file)?) == TMPFS)
}

/// Returns whether files below `path` exist only in memory.
pub(super) fn is_below_tmpfs(path: &Path) -> rustix::io::Result<bool> {
    Ok(magic(&rustix::fs::statfs(path)?) == TMPFS)
}

/// Returns the reason why files below `path` must not be written through a shared mapping, or `None` if a mapping is
/// safe.
pub(super) fn mapping_refused(path: &Path) -> rustix::io::Result<Option<String>> {
    refusal(magic(&rustix::fs::statfs(path)?), || shares_extents(path))
}

/// Returns the reason why files on the file system with this magic number must not be written through a shared mapping,
/// or `None` if a mapping is safe. A mapping is unsafe if a write to a synced page can need new space, because on a
/// full disk such a write kills the process with SIGBUS.
fn refusal(
    magic: u64,
    shares_extents: impl FnOnce() -> rustix::io::Result<bool>,
) -> rustix::io::Result<Option<String>> {
    let reason = match magic {
        EXT | TMPFS => return Ok(None),
        XFS if shares_extents()? => "XFS with reflinks needs space to write to a shared extent",
        XFS => return Ok(None),
        BTRFS => "btrfs copies on write",
        0x2fc1_2fc1 => "ZFS copies on write",
        F2FS => "F2FS never writes in place",
        0x794c_7630 => "overlayfs may move a file between layers",
        0x6573_5546 => "behind FUSE it is unknown where writes go",
        0x6969 => "NFS is a network file system",
        0xfe53_4d42 | 0xff53_4d42 => "SMB is a network file system",
        0x0102_1997 => "9P is a network file system",
        unknown => return Ok(Some(format!("file system {unknown:#x} is not known to write in place"))),
    };
    Ok(Some(reason.to_owned()))
}

/// Returns whether files below `path` can share extents, by trying to clone one unnamed file into another. On a full
/// disk, the function clones an existing file into itself instead, without changing the file. An unknown result counts
/// as shared.
fn shares_extents(path: &Path) -> rustix::io::Result<bool> {
    let nameless = || {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)
    };
    let cloned = || {
        let (source, target) = (nameless()?, nameless()?);
        rustix::io::write(&source, &[1; 4096])?;
        Ok(rustix::fs::ioctl_ficlone(&target, &source))
    };
    match cloned() {
        Ok(Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY | Errno::NOSYS)) => Ok(false),
        Ok(_) => Ok(true),
        Err(Errno::NOSPC | Errno::DQUOT) => {
            let Ok(Some(existing)) = file_below(path) else { return Ok(true) };
            let file = rustix::fs::openat(CWD, existing, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
            // A file system that supports clones rejects this one as invalid.
            Ok(rustix::fs::ioctl_ficlone(&file, &file) != Err(Errno::OPNOTSUPP))
        }
        Err(Errno::IO) => Err(Errno::IO),
        Err(_) => Ok(true),
    }
}

/// Returns the reason why writes that bypass the page cache fail below `path`, or `None` if they succeed.
///
/// Writes a block of an unnamed file, because some file systems accept the flags when a file is opened and reject the
/// write. If there is no space for a block, reads the first block of an existing file instead, because a store on a
/// full disk must open so that pages can be deleted.
///
/// # Errors
/// An I/O error if the disk fails. An error for lack of space if neither the write nor such a read is possible.
pub(super) fn direct_refused(path: &Path) -> io::Result<Option<String>> {
    let flags = direct::FLAGS | OFlags::TMPFILE;
    let nameless = rustix::fs::openat(CWD, path, flags, Mode::RUSR | Mode::WUSR);
    let written = nameless.map_err(io::Error::from).and_then(|nameless| {
        // The test reopens its file because a window does so, too.
        let file = reopen(&File::from(nameless), direct::FLAGS)?;
        file.write_all_at(&AlignedBuf::new(GROUP_ALIGN as usize), 0)
    });
    direct_verdict(match written {
        Err(full) if matches!(full.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            file_below(path)?.map_or(Err(full), |existing| {
                let file = File::from(rustix::fs::openat(CWD, &existing, direct::FLAGS, Mode::empty())?);
                file.read_exact_at(&mut AlignedBuf::new(GROUP_ALIGN as usize), 0)
            })
        }
        written => written,
    })
}

/// Returns the path of a log segment or an image file that is at least one block long. Searches `folder` first, then
/// the log folder next to `folder`.
fn file_below(folder: &Path) -> io::Result<Option<PathBuf>> {
    let sibling = folder.with_file_name(Folder::Log.name());
    for folder in [folder, &sibling] {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let parsed = |inner| name.to_str().and_then(|name| FileName::parse(inner, name));
            let is_known = matches!(parsed(Folder::Log), Some(FileName::Segment(_)))
                || matches!(parsed(Folder::Pages), Some(FileName::Pages(_)));
            if is_known && entry.metadata()?.len() >= GROUP_ALIGN {
                return Ok(Some(entry.path()));
            }
        }
    }
    Ok(None)
}

/// Converts the result of a test write to the reason why direct writes are unsupported, or to an I/O error if the disk
/// failed.
pub(super) fn direct_verdict(written: io::Result<()>) -> io::Result<Option<String>> {
    let says_the_disk = [Errno::IO, Errno::NOSPC, Errno::DQUOT].map(|errno| Some(errno.raw_os_error()));
    match written {
        Ok(()) => Ok(None),
        Err(error) if says_the_disk.contains(&error.raw_os_error()) => Err(error),
        Err(error) => Ok(Some(format!("direct writes are not possible here: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_is_allowed_only_where_writes_are_in_place() {
        let unasked = || panic!("only XFS is asked for shared extents");
        for in_place in [0xef53, 0x0102_1994] {
            assert_eq!(refusal(in_place, unasked), Ok(None));
        }
        for (magic, word) in
            [(0x9123_683e, "btrfs"), (0x794c_7630, "overlayfs"), (0x6969, "NFS"), (0x1234, "0x1234")]
        {
            let reason = refusal(magic, unasked).unwrap().unwrap();
            assert!(reason.contains(word), "{reason}");
        }
        assert_eq!(refusal(0x5846_5342, || Ok(false)), Ok(None));
        assert!(refusal(0x5846_5342, || Ok(true)).unwrap().unwrap().contains("reflinks"));
        assert_eq!(refusal(0x5846_5342, || Err(Errno::IO)), Err(Errno::IO));
    }
}
