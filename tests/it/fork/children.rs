//! Forked child processes: their use of inherited handles, and how the parent receives their results.

use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::event::{PollFd, PollFlags, Timespec};

/// Number of seconds after which a child that has not ended is considered hung. The number is large, because
/// a machine may be busy.
const PATIENCE_SECONDS: u32 = 120;

/// Runs `life` in a forked child and waits for the child to end. Returns the error message of the child as
/// `Err`. The child works on copies of all values that `life` refers to, so a value that it moves or drops
/// still exists in the parent.
///
/// This process has only the thread that forks, and no other test runs in it (`machine::alone`).
pub fn in_child(mut life: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let status = wait(fork(&mut life));
    match status {
        0 => Ok(()),
        _ if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM => {
            Err("the child hangs".to_owned())
        }
        _ => Err(format!("the child ended with status {status:#x}")),
    }
}

/// Forks a child that runs `life` and exits. The exit status is 0 if `life` succeeds.
fn fork(life: &mut dyn FnMut() -> Result<(), String>) -> libc::pid_t {
    // SAFETY: the C library makes its own locks usable in the child, including those of `malloc`. The child
    // runs `life`, which must not wait for a lock that another thread held. The alarm ends a child that does.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child > 0 {
        return child;
    }
    // SAFETY: no signal handler is installed, so that the signal ends the child.
    unsafe { libc::alarm(PATIENCE_SECONDS) };
    let ended = catch_unwind(AssertUnwindSafe(life));
    let complaint = match ended {
        Ok(Ok(())) => None,
        Ok(Err(complaint)) => Some(complaint),
        Err(_) => Some("the child panicked".to_owned()),
    };
    if let Some(complaint) = &complaint {
        // Do not use `eprintln`, because another thread of the parent may have held its lock.
        // SAFETY: the pointer and the length belong to a live string.
        unsafe { libc::write(2, complaint.as_ptr().cast(), complaint.len()) };
    }
    // SAFETY: `_exit` ends the child immediately and runs no destructor of the parent.
    unsafe { libc::_exit(i32::from(complaint.is_some())) }
}

/// Waits for a child to end, and returns its status.
fn wait(child: libc::pid_t) -> libc::c_int {
    let mut status = 0;
    // SAFETY: `status` lives until the call returns.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(waited, child, "{}", std::io::Error::last_os_error());
    status
}

/// A child that runs until it is killed. Dropping this value also ends the children of the child.
pub struct LivingChild {
    process: libc::pid_t,
    /// The read end of a pipe. It reports the end of file once the child and all of its children have ended.
    lives: io::PipeReader,
}

impl LivingChild {
    /// Forks a child that runs `life`, keeps the returned value and waits. Returns when `life` has returned.
    pub fn fork<Kept>(mut life: impl FnMut() -> Kept) -> Self {
        let (mut lives, done) = io::pipe().unwrap();
        let process = fork(&mut || {
            // The child gets its own process group, so that all of its processes can be ended together.
            rustix::process::setpgid(None, None).unwrap();
            let _kept = life();
            (&done).write_all(&[1]).unwrap();
            loop {
                std::thread::park();
            }
        });
        drop(done);
        lives.read_exact(&mut [0]).expect("the child ended early");
        Self { process, lives }
    }

    /// Kills the child. Its own children keep running.
    pub fn kill(&self) {
        // SAFETY: the process is a child of this process, and no call has waited for it yet.
        unsafe { libc::kill(self.process, libc::SIGKILL) };
        assert!(libc::WIFSIGNALED(wait(self.process)));
    }

    /// Returns true if the child or one of its own children is still running.
    pub fn has_living_process(&self) -> bool {
        let mut ready = [PollFd::new(&self.lives, PollFlags::IN)];
        rustix::event::poll(&mut ready, Some(&Timespec::default())).unwrap() == 0
    }
}

impl Drop for LivingChild {
    fn drop(&mut self) {
        // SAFETY: the group belongs to this child, and its number has not been reused.
        unsafe { libc::kill(-self.process, libc::SIGKILL) };
    }
}

/// Forks a child that does nothing for as long as a test may take.
pub fn fork_a_bystander() {
    // SAFETY: as in `fork`. The child makes only two system calls.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: no signal handler is installed.
        unsafe { libc::alarm(PATIENCE_SECONDS) };
        loop {
            // SAFETY: `pause` waits for a signal and accesses no memory.
            unsafe { libc::pause() };
        }
    }
}
