//! The process that a handle belongs to.
//!
//! A forked child inherits a copy of every handle, and none of the threads that serve it. The copy's view of
//! the log is out of date at once: a child that synced its copy of a group wrote it over the parent's later
//! ones, and batches that were acknowledged were gone. A lock that another thread held at the fork is never
//! released in the child. So a handle names the process that made it. In any other process it says
//! [`Error::Forked`], before it writes a byte and before it takes a lock. A value that it owns is dropped
//! only in its own process ([`ForkGuard`]).
//!
//! A check costs two loads. It makes no system call, which would be a tenth of a small commit.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memmap2::{MmapMut, MmapRaw};
use rustix::mm::{Advice, madvise};

use crate::error::{Error, Result};

/// The process that made a handle. The upper half holds its generation, which is above that of its parent;
/// the lower half holds its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u64);

impl Process {
    /// The process that runs this. Takes no lock: a child asks too, and the lock might have been held at the
    /// fork.
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

    /// Whether this process is the one that runs this: a forked child is another one.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Refuses a handle that was inherited by a forked child.
    ///
    /// # Errors
    /// [`Error::Forked`], in a process other than the one that made the handle.
    pub fn check(self) -> Result<()> {
        if self.is_current() { Ok(()) } else { Err(Error::Forked { opener: self.0 as u32 }) }
    }
}

#[cfg(test)]
impl Process {
    /// Another process, as a handle that a forked child inherited names it.
    pub fn parent() -> Self {
        Self(Self::current().0 + (1 << 32) + 1)
    }
}

/// A word that the kernel sets to 0 in every forked child; null before its first use. It holds the process,
/// as handles name it, or 0 until a handle asks.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// The newest generation. A child inherits it, and takes the next one: so a generation is above those of all
/// ancestors.
static NEWEST: AtomicU64 = AtomicU64::new(0);
/// The target of `WORD` where the system has no memory that a fork wipes; a process is known by its number
/// then.
static NO_WORD: AtomicU64 = AtomicU64::new(0);

/// The word, if the system could make one.
fn word() -> Option<&'static AtomicU64> {
    let mut word = WORD.load(Ordering::Acquire);
    if word.is_null() {
        word = make_word().unwrap_or_else(|error| {
            tracing::debug!(%error, "no memory that a fork wipes");
            publish(ptr::from_ref(&NO_WORD).cast_mut())
        });
    }
    // SAFETY: it points to a page that is never unmapped, and so is aligned, or to a static; only atomics
    // reach it.
    let word = unsafe { &*word };
    (!ptr::eq(word, &NO_WORD)).then_some(word)
}

/// Makes a word in a page of its own, which stays mapped as long as the process.
fn make_word() -> io::Result<*mut AtomicU64> {
    if cfg!(miri) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let page = MmapRaw::from(MmapMut::map_anon(size_of::<AtomicU64>())?);
    // SAFETY: the range is that of a private anonymous mapping that lives as long as `page`. The advice
    // changes nothing of it in this process.
    unsafe { madvise(page.as_mut_ptr().cast(), page.len(), Advice::LinuxWipeOnFork) }?;
    let made = page.as_mut_ptr().cast();
    let word = publish(made);
    if ptr::eq(word, made) {
        std::mem::forget(page);
    }
    Ok(word)
}

/// Makes this the word, unless another thread was first. Returns the first one's word.
fn publish(word: *mut AtomicU64) -> *mut AtomicU64 {
    let stored = WORD.compare_exchange(ptr::null_mut(), word, Ordering::AcqRel, Ordering::Acquire);
    stored.map_or_else(|first| first, |_| word)
}

/// A value that is dropped only by the process that made it. A forked child leaves it where it is: memory of
/// the parent's is not unmapped, given back or closed there, and no lock is taken for it.
#[derive(Debug)]
pub(crate) struct ForkGuard<T> {
    value: ManuallyDrop<T>,
    process: Process,
}

impl<T> ForkGuard<T> {
    /// Guards a value of this process.
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: Process::current() }
    }

    /// The value, for the process that made it.
    ///
    /// # Errors
    /// [`Error::Forked`], in any other process.
    pub fn check(&self) -> Result<&T> {
        self.process.check().map(|()| &*self.value)
    }

    /// Whether this process made it.
    pub fn is_own(&self) -> bool {
        self.process.is_current()
    }
}

#[cfg(test)]
impl<T> ForkGuard<T> {
    /// A guard as a forked child inherits it.
    pub fn inherited(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: Process::parent() }
    }
}

impl<T: Clone> Clone for ForkGuard<T> {
    /// A clone in a forked child is the parent's as well: it is never dropped there.
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
            // SAFETY: the value is not used after this: it is dropped here alone, and the guard goes with it.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A value that each process has for itself: a forked child begins with a new one. The parent's value might
/// be behind a lock that a thread of the parent's held at the fork.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(Process, T)>);

impl<T: Default + Sync> PerProcess<T> {
    /// No value yet.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of this process. The parent's value is left where it is.
    pub fn get(&'static self) -> &'static T {
        let mut newest = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: a pointer that is not null was given out by `Box::into_raw` below, and is never freed
            // after it was stored.
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
                    // SAFETY: it was made just above, and no other thread has seen it.
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
    fn a_process_is_itself_and_no_other() {
        let here = Process::current();
        assert_eq!(here, Process::current());
        here.check().unwrap();
        let elsewhere = std::thread::spawn(Process::current).join().unwrap();
        assert_eq!(elsewhere, here, "all threads of a process are of one process");
        let error = Process::parent().check().unwrap_err();
        assert!(matches!(error, Error::Forked { opener } if opener == std::process::id() + 1), "{error}");
    }

    #[test]
    fn a_value_of_another_process_is_not_dropped() {
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
