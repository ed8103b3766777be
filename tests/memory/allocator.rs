//! The allocator of this binary: the system's, which counts the bytes that it hands out, and refuses one
//! allocation that a test chooses.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes handed out now, and the most that ever were since a measurement began.
static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Held by the test that runs: counts are the whole process's.
static ALONE: Mutex<()> = Mutex::new(());

/// Allocations of more bytes are refused.
static REFUSED_ABOVE: AtomicUsize = AtomicUsize::new(0);
/// How many long allocations until one is refused; not positive if none is.
static UNTIL_REFUSED: AtomicIsize = AtomicIsize::new(0);

#[expect(clippy::print_stderr, reason = "the place of a refusal, for the reader of a failed case")]
fn is_refused(len: usize) -> bool {
    let refused = len > REFUSED_ABOVE.load(Ordering::Relaxed)
        && UNTIL_REFUSED.load(Ordering::Relaxed) > 0
        && UNTIL_REFUSED.fetch_sub(1, Ordering::Relaxed) == 1;
    if refused && std::env::var_os("REMANENT_REFUSALS_TRACE").is_some() {
        eprintln!("refused {len}\n{}", std::backtrace::Backtrace::force_capture());
    }
    refused
}

fn grown(len: usize) {
    let now = NOW.fetch_add(len, Ordering::Relaxed) + len;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

fn shrunk(len: usize) {
    NOW.fetch_sub(len, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came; the rest only adds up numbers.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
            return ptr::null_mut();
        }
        grown(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
            return ptr::null_mut();
        }
        grown(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrunk(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if is_refused(new_size) {
            return ptr::null_mut();
        }
        // Where memory moves, both the old and the new are there for a while.
        grown(new_size);
        shrunk(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Lets no other test of this binary run meanwhile.
pub fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work`, and returns how many bytes more than before were in use at once.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}

/// Runs `work` with the `number`th allocation of more than `len` bytes from now on refused. Returns whether
/// it came to that.
pub fn refuse<T>(number: isize, len: usize, work: impl FnOnce() -> T) -> (T, bool) {
    REFUSED_ABOVE.store(len, Ordering::Relaxed);
    UNTIL_REFUSED.store(number, Ordering::Relaxed);
    let done = work();
    (done, UNTIL_REFUSED.swap(0, Ordering::Relaxed) <= 0)
}
