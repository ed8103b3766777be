//! Forked children of this process: a child's use of inherited handles, and how its parent hears of it.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// A child that has not ended after this many seconds hangs. Long, because a machine may be busy with other
/// work.
const PATIENCE_SECONDS: u32 = 120;

/// Runs `life` in a forked child and waits for the end of the child. `Err` says what went wrong there. The
/// child has copies of all that `life` reaches: a value that it takes out or drops is still there for the
/// parent.
///
/// The process has one thread that forks, and no other test runs in it (`machine::alone`).
pub fn in_child(mut life: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    // SAFETY: the C library makes its own locks, those of `malloc` among them, usable in the child. The child
    // runs `life`, which must not wait for a lock that another thread held: a child that does is ended by its
    // alarm.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: no signal handler is installed, so that the signal ends the child.
        unsafe { libc::alarm(PATIENCE_SECONDS) };
        let ended = catch_unwind(AssertUnwindSafe(&mut life));
        let complaint = match ended {
            Ok(Ok(())) => None,
            Ok(Err(complaint)) => Some(complaint),
            Err(_) => Some("the child panicked".to_owned()),
        };
        if let Some(complaint) = &complaint {
            // Not by `eprintln`: another thread of the parent may have held its lock.
            // SAFETY: the pointer and the length are those of a live string.
            unsafe { libc::write(2, complaint.as_ptr().cast(), complaint.len()) };
        }
        // SAFETY: ends the child at once: no destructor of the parent's runs in it.
        unsafe { libc::_exit(i32::from(complaint.is_some())) };
    }
    let mut status = 0;
    // SAFETY: `status` lives until the call returns.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(waited, child, "{}", std::io::Error::last_os_error());
    match status {
        0 => Ok(()),
        _ if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM => {
            Err("the child hangs".to_owned())
        }
        _ => Err(format!("the child ended with status {status:#x}")),
    }
}
