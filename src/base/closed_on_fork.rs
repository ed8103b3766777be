//! Files that are closed in forked children.
//!
//! A lock of an open file description (`F_OFD_SETLK`) is held until the last descriptor of the file is closed, and a
//! forked child inherits a copy of every descriptor. Without this module, a child that outlives its parent would keep
//! the parent's locks. [`ClosedOnFork`] registers its descriptor, and a `pthread_atfork` handler closes all registered
//! descriptors in each child. An `exec` also closes them (`O_CLOEXEC`).
//!
//! The handlers take no lock and allocate no memory, because another thread may hold any lock at a fork. A descriptor
//! can be registered only after the file is opened, and a child that is forked between these two steps keeps its copy
//! open. Therefore [`ClosedOnFork::open`] counts the forks, and opens the file again if a fork overlapped with the
//! call. Callers lock the file only after this call, so such a copy holds no lock.
//!
//! A child of a bare `clone` system call runs no handlers. Such a child keeps the descriptors until it ends or calls
//! `exec`. A child of `vfork` or `posix_spawn` runs no handlers either, and calls `exec` immediately.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::process::{ForkGuard, PerProcess};
use super::sync::Mutex;

/// A file whose descriptor is closed in every forked child. Only the process that opened the file drops the value.
#[derive(Debug)]
pub(crate) struct ClosedOnFork {
    file: ForkGuard<File>,
    slot: &'static Slot,
}

/// The maximum time that [`ClosedOnFork::open`] waits until no fork is in progress. The wait exceeds the
/// duration of one fork only if several threads fork continuously.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pause between two checks for forks in progress, about the duration of a fork.
const PAUSE: Duration = Duration::from_micros(50);

impl ClosedOnFork {
    /// Opens a file with `open`, which may be called more than once, and registers the descriptor.
    ///
    /// # Errors
    /// The error of `open`; `WouldBlock` if forks in other threads follow each other without a gap; `OutOfMemory` if
    /// the system cannot register the handlers.
    #[expect(
        clippy::disallowed_methods,
        reason = "a handler of a fork takes no lock, so it can wake no thread"
    )]
    pub fn open(open: impl Fn() -> io::Result<File>) -> io::Result<Self> {
        register_handlers()?;
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(forks) = forks_at_rest() {
                let file = open()?;
                let slot = Slot::take(&file);
                if STARTED.load(Ordering::SeqCst) == forks {
                    return Ok(Self { file: ForkGuard::new(file), slot });
                }
                slot.release();
            }
            if Instant::now() >= until {
                return Err(io::Error::from_raw_os_error(libc::EAGAIN));
            }
            std::thread::sleep(PAUSE);
        }
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns whether this process opened the file. In a forked child, the descriptor is closed, and its number may
    /// belong to another file.
    pub fn is_own(&self) -> bool {
        self.file.is_own()
    }
}

impl Drop for ClosedOnFork {
    fn drop(&mut self) {
        // In a forked child, the descriptor was closed when the child was created, and the slot may be in use for
        // another file.
        if self.is_own() {
            // The slot is released before the descriptor is closed: another file may reuse the number, and children
            // must not close that file.
            self.slot.release();
        }
    }
}

/// The registry entry of one descriptor that children must close. Slots are reused and never freed, because the handler
/// in a child traverses them without a lock.
#[derive(Debug)]
struct Slot {
    /// The descriptor, or [`FREE`] if the slot is unused.
    descriptor: AtomicI32,
    next: AtomicPtr<Slot>,
}

const FREE: i32 = -1;

/// The head of the linked list of slots.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

impl Slot {
    /// Registers the descriptor of `file` in a free slot, or in a new slot if none is free.
    fn take(file: &File) -> &'static Self {
        let descriptor = file.as_raw_fd();
        let is_taken = |slot: &&Slot| {
            slot.descriptor.compare_exchange(FREE, descriptor, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        slots().find(is_taken).unwrap_or_else(|| {
            let first = SLOTS.load(Ordering::Acquire);
            let slot: &'static Self = Box::leak(Box::new(Self {
                descriptor: AtomicI32::new(descriptor),
                next: AtomicPtr::new(first),
            }));
            slot.link();
            slot
        })
    }

    fn link(&'static self) {
        let this = ptr::from_ref(self).cast_mut();
        let mut first = self.next.load(Ordering::Relaxed);
        while let Err(other) = SLOTS.compare_exchange(first, this, Ordering::SeqCst, Ordering::SeqCst) {
            self.next.store(other, Ordering::Relaxed);
            first = other;
        }
    }

    fn release(&self) {
        self.descriptor.store(FREE, Ordering::SeqCst);
    }
}

/// Returns all slots, used or free.
fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: a pointer to a slot is null or comes from `Box::leak`, and slots are never freed.
    let slot = |pointer: &AtomicPtr<Slot>| unsafe { pointer.load(Ordering::Acquire).as_ref() };
    std::iter::successors(slot(&SLOTS), move |previous| slot(&previous.next))
}

/// The number of forks that have begun in this process.
static STARTED: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of completed forks, or `None` while a fork is in progress.
fn forks_at_rest() -> Option<u64> {
    // The order of these loads matters. If a fork begins between them, the two counters differ, and the result is
    // `None`.
    let ended = ENDED.load(Ordering::SeqCst);
    (STARTED.load(Ordering::SeqCst) == ended).then_some(ended)
}

extern "C" fn before_fork() {
    STARTED.fetch_add(1, Ordering::SeqCst);
}

/// Runs in the parent after each fork, including a failed fork.
extern "C" fn after_fork() {
    ENDED.fetch_add(1, Ordering::SeqCst);
}

/// Runs in the forked child. Only the calling thread exists there.
extern "C" fn in_child() {
    // Forks that other threads had begun are in progress only in the parent.
    ENDED.store(STARTED.load(Ordering::SeqCst), Ordering::SeqCst);
    for slot in slots() {
        let descriptor = slot.descriptor.swap(FREE, Ordering::SeqCst);
        if descriptor != FREE {
            // SAFETY: the descriptor is the child's copy of a registered descriptor, which the child never
            // uses, because `ClosedOnFork` does not access it there.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// Registers the fork handlers, once for a process and its children.
fn register_handlers() -> io::Result<()> {
    static ARE_REGISTERED: AtomicBool = AtomicBool::new(false);
    static REGISTERING: PerProcess<Mutex<()>> = PerProcess::new();
    let _one_at_a_time = REGISTERING.get().lock();
    if ARE_REGISTERED.load(Ordering::Relaxed) || cfg!(miri) {
        return Ok(());
    }
    // SAFETY: the handlers are functions of this module that take no lock, allocate nothing, and make no
    // system call but `close`, as is required in a fork of a multithreaded process.
    let failed = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    ARE_REGISTERED.store(true, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_registered_and_closed_ones_are_not() {
        // A number above all descriptors that other tests in this process use.
        const NUMBER_MIN: i32 = 900;
        let registered =
            |descriptor| slots().filter(|slot| slot.descriptor.load(Ordering::SeqCst) == descriptor).count();
        let file = ClosedOnFork::open(|| {
            let file = File::open("/dev/null")?;
            Ok(rustix::io::fcntl_dupfd_cloexec(&file, NUMBER_MIN)?.into())
        });
        let file = file.unwrap();
        let descriptor = file.file().as_raw_fd();
        assert_eq!(registered(descriptor), 1);
        drop(file);
        assert_eq!(registered(descriptor), 0);
    }

    #[test]
    fn open_overlapping_fork_is_retried() {
        let opens = AtomicU64::new(0);
        let file = ClosedOnFork::open(|| {
            if opens.fetch_add(1, Ordering::Relaxed) == 0 {
                // Simulates a fork by another thread.
                before_fork();
                after_fork();
            }
            File::open("/dev/null")
        });
        assert!(file.is_ok() && opens.load(Ordering::Relaxed) >= 2);
    }
}
