//! Locks on byte ranges of a file. A lock has one of two kinds of owner:
//!
//! | owner | the system releases the lock | in a forked child |
//! |---|---|---|
//! | an open file (`F_OFD_SETLK`) | with the last descriptor of the open file | shared with the parent |
//! | a process (`F_SETLK`) | when the process ends, or closes *any* descriptor of the file | not inherited |
//!
//! Two locks conflict if their ranges overlap, at least one of them is exclusive, and their owners differ. An open file
//! and its process are different owners, so a process that acquires both kinds of lock acquires them on separate
//! ranges.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr;

/// The kind of owner of a lock. The owner determines when the system releases the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    OpenFile,
    Process,
}

/// The mode of a lock: shared or exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Other owners may hold shared locks on the same bytes.
    Shared,
    /// No other owner may hold a lock on the same bytes.
    Exclusive,
}

/// The end of a range without an upper bound. Such a range covers all later bytes, even if the file grows.
pub(super) const NO_END: u64 = u64::MAX;

/// A lock of another owner that conflicts with a requested lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    pub mode: Mode,
    /// The id of the process that owns the lock, or `None` if an open file or a process of another namespace owns the
    /// lock.
    pub process: Option<u32>,
}

/// Acquires a lock on `range`. Returns `false` if another owner's lock conflicts with the request.
pub(super) fn try_lock(file: &File, owner: Owner, mode: Mode, range: Range<u64>) -> io::Result<bool> {
    let command = match owner {
        Owner::OpenFile => libc::F_OFD_SETLK,
        Owner::Process => libc::F_SETLK,
    };
    match call(file, command, &mut described(mode.kind(), range)?) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Releases the lock of an open file on `range`. All descriptors of the open file lose the lock.
pub(super) fn unlock(file: &File, range: Range<u64>) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, &mut described(libc::F_UNLCK, range)?)
}

/// Returns the first lock that prevents another open file from acquiring an exclusive lock on `range`. The query
/// acquires no lock.
pub(super) fn conflict(file: &File, range: Range<u64>) -> io::Result<Option<Conflict>> {
    let mut lock = described(Mode::Exclusive.kind(), range)?;
    call(file, libc::F_OFD_GETLK, &mut lock).or_else(|error| {
        // The kernel supports only process locks.
        if is_lock_unsupported(&error) { call(file, libc::F_GETLK, &mut lock) } else { Err(error) }
    })?;
    let mode = match libc::c_int::from(lock.l_type) {
        libc::F_UNLCK => return Ok(None),
        libc::F_RDLCK => Mode::Shared,
        _ => Mode::Exclusive,
    };
    // The system reports -1 for an open file, and 0 for a process that is not visible.
    let process = u32::try_from(lock.l_pid).ok().filter(|process| *process != 0);
    Ok(Some(Conflict { mode, process }))
}

/// Returns whether `error` means that the file system or the kernel does not support this kind of lock.
pub(super) fn is_lock_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP))
}

impl Mode {
    fn kind(self) -> libc::c_int {
        match self {
            Self::Shared => libc::F_RDLCK,
            Self::Exclusive => libc::F_WRLCK,
        }
    }
}

/// Builds the `flock` structure that describes a lock of type `kind` on `range`.
fn described(kind: libc::c_int, range: Range<u64>) -> io::Result<libc::flock> {
    let offset = |at: u64| libc::off_t::try_from(at).map_err(io::Error::other);
    // A length of 0 represents all bytes from the start on.
    let len = if range.end == NO_END { 0 } else { offset(range.end)? - offset(range.start)? };
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset(range.start)?,
        l_len: len,
        l_pid: 0,
    })
}

fn call(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and each of these commands reads and writes
    // only the structure passed to it, which lives until the call returns.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, ptr::from_mut(lock)) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
