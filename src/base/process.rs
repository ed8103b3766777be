//! Detects the use of a handle in a forked child.
//!
//! A forked child inherits a copy of every handle, but none of the threads that serve the handle. The copied state of
//! the log is immediately out of date. When a child synced its copy of a group, it overwrote later groups of the
//! parent, and acknowledged batches were lost. A lock that another thread held at the fork is never released in the
//! child. Therefore a handle records the process that created it. In any other process, a call returns
//! [`Error::Forked`] before it writes a byte or takes a lock. A value that the handle owns is dropped only in the
//! process that created it ([`ForkGuard`]).
//!
//! A check costs two loads. A system call instead would take a tenth of the time of a small commit.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memmap2::{MmapMut, MmapRaw};
use rustix::mm::{Advice, madvise};

use crate::error::{Error, Result};

/// The identity of a process, recorded by each handle that the process creates. The upper half is a generation number,
/// greater than that of the parent process. The lower half is the process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u64);

impl Process {
    /// Returns the identity of the running process. Takes no lock, because a forked child also calls this function, and
    /// another thread might have held the lock at the fork.
    pub fn current() -> Self {
        let Some(word) = word() else { return Self(std::process::id().into()) };
        Self(match word.load(Ordering::Relaxed) {
            0 => {
                let generation = NEWEST.fetch_add(1, Ordering::Relaxed) + 1;
                let first = generation << 32 | u64::from(std::process::id());
                let stored = word.compare_exchange(0, first, Ordering::Relaxed, Ordering::Relaxed);
                stored.map_or_else(|before| before, |_| first)
            }
            process => process,
        })
    }

    /// Returns whether `self` is the running process. For the process recorded in an inherited handle, a forked child
    /// gets `false`.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Returns an error if `self` is not the running process.
    ///
    /// # Errors
    /// [`Error::Forked`] in a process other than the one that created the handle.
    pub fn check(self) -> Result<()> {
        if self.is_current() { Ok(()) } else { Err(Error::Forked { opener: self.0 as u32 }) }
    }
}

#[cfg(test)]
impl Process {
    /// Returns a process other than the running process, to simulate a handle that a forked child has inherited.
    pub fn parent() -> Self {
        Self(Self::current().0 + (1 << 32) + 1)
    }
}

/// A pointer to a word that the kernel resets to 0 in every forked child, or null before the first use. The word
/// contains the [`Process`], or 0 until [`Process::current`] is called.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// The newest generation number. A child inherits this counter and increments it, so the child's generation is greater
/// than those of all its ancestors.
static NEWEST: AtomicU64 = AtomicU64::new(0);
/// The word that `WORD` points to on a system that cannot reset memory on fork. Processes are then identified by
/// process id only.
static NO_WORD: AtomicU64 = AtomicU64::new(0);

/// Returns the word that the kernel resets on fork, or `None` if the system does not support such a reset.
fn word() -> Option<&'static AtomicU64> {
    let mut word = WORD.load(Ordering::Acquire);
    if word.is_null() {
        word = make_word().unwrap_or_else(|error| {
            tracing::debug!(%error, "the system cannot reset memory on fork");
            publish(ptr::from_ref(&NO_WORD).cast_mut())
        });
    }
    // SAFETY: the pointer refers to a page that is never unmapped, and is therefore aligned, or to a static;
    // the target is accessed only through atomics.
    let word = unsafe { &*word };
    (!ptr::eq(word, &NO_WORD)).then_some(word)
}

/// Allocates the word in a separate page. The page stays mapped for the lifetime of the process.
fn make_word() -> io::Result<*mut AtomicU64> {
    if cfg!(miri) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let page = MmapRaw::from(MmapMut::map_anon(size_of::<AtomicU64>())?);
    // SAFETY: the range is a private anonymous mapping that lives as long as `page`. The advice does not
    // change its content in this process.
    unsafe { madvise(page.as_mut_ptr().cast(), page.len(), Advice::LinuxWipeOnFork) }?;
    let made = page.as_mut_ptr().cast();
    let word = publish(made);
    if ptr::eq(word, made) {
        std::mem::forget(page);
    }
    Ok(word)
}

/// Stores `word` in `WORD` unless another thread has already stored a word. Returns the stored word.
fn publish(word: *mut AtomicU64) -> *mut AtomicU64 {
    let stored = WORD.compare_exchange(ptr::null_mut(), word, Ordering::AcqRel, Ordering::Acquire);
    stored.map_or_else(|first| first, |_| word)
}

/// A value that only the process that created it drops. A forked child leaks the value. As a result, the child does not
/// unmap, free or close resources of the parent, and takes no lock for the value.
#[derive(Debug)]
pub(crate) struct ForkGuard<T> {
    value: ManuallyDrop<T>,
    process: Process,
}

impl<T> ForkGuard<T> {
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: Process::current() }
    }

    /// Returns the value if the calling process created it.
    ///
    /// # Errors
    /// [`Error::Forked`] in any other process.
    pub fn check(&self) -> Result<&T> {
        self.process.check().map(|()| &*self.value)
    }

    pub fn is_own(&self) -> bool {
        self.process.is_current()
    }
}

#[cfg(test)]
impl<T> ForkGuard<T> {
    /// Creates a guard that appears to have been inherited by a forked child.
    pub fn inherited(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: Process::parent() }
    }
}

impl<T: Clone> Clone for ForkGuard<T> {
    /// Clones the value. A clone that is made in a forked child also belongs to the parent, so the child never drops
    /// the clone.
    fn clone(&self) -> Self {
        Self { value: self.value.clone(), process: self.process }
    }
}

impl<T> Deref for ForkGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ForkGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for ForkGuard<T> {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: the value is dropped only here and not used afterwards, because the guard is dropped
            // too.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A value with a separate instance in each process. A forked child creates a new instance, because the parent's value
/// may contain a lock that one of the parent's threads held at the fork.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(Process, T)>);

impl<T: Default + Sync> PerProcess<T> {
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value of this process. The first call in a process creates the value, without access to the value
    /// that the parent created.
    pub fn get(&'static self) -> &'static T {
        let mut newest = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: a non-null pointer was returned by `Box::into_raw` below, and is never freed once it
            // was stored.
            let inherited = unsafe { newest.as_ref() };
            if let Some((process, value)) = inherited
                && process.is_current()
            {
                return value;
            }
            let made = Box::into_raw(Box::new((Process::current(), T::default())));
            match self.0.compare_exchange(newest, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => newest = made,
                Err(first) => {
                    // SAFETY: the box was created just above, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(made) });
                    newest = first;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn process_identity_is_unique() {
        let here = Process::current();
        assert_eq!(here, Process::current());
        here.check().unwrap();
        let elsewhere = std::thread::spawn(Process::current).join().unwrap();
        assert_eq!(elsewhere, here, "all threads of a process are of one process");
        let error = Process::parent().check().unwrap_err();
        assert!(matches!(error, Error::Forked { opener } if opener == std::process::id() + 1), "{error}");
    }

    #[test]
    fn value_is_not_dropped_in_other_process() {
        let value = Arc::new(());
        drop(ForkGuard::new(value.clone()));
        assert_eq!(Arc::strong_count(&value), 1);
        let inherited = ForkGuard::inherited(value.clone());
        assert!(inherited.check().is_err() && !inherited.is_own());
        drop(inherited);
        assert_eq!(Arc::strong_count(&value), 2, "it was dropped");
    }

    #[test]
    fn another_process_has_another_value() {
        static VALUE: PerProcess<AtomicU64> = PerProcess::new();
        VALUE.get().store(7, Ordering::Relaxed);
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 7);
        let inherited = Box::leak(Box::new((Process::parent(), AtomicU64::new(8))));
        VALUE.0.store(inherited, Ordering::Release);
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 0);
    }
}
