//! The global allocator of this binary. It counts the bytes allocated from the system allocator, and can make
//! one selected allocation fail.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of allocated bytes.
static NOW: AtomicUsize = AtomicUsize::new(0);
/// Maximum number of allocated bytes since a measurement began.
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Held by the running test, because the counts are global to the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Only allocations of more bytes than this can be made to fail.
static REFUSED_ABOVE: AtomicUsize = AtomicUsize::new(0);
/// Number of long allocations up to the one that fails. Not positive if none fails.
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

// SAFETY: every call is passed unchanged to the system allocator. Otherwise, only counters change.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
            return ptr::null_mut();
        }
        grown(layout.size());
        // SAFETY: the caller upholds the contract of the called function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
            return ptr::null_mut();
        }
        grown(layout.size());
        // SAFETY: the caller upholds the contract of the called function.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrunk(layout.size());
        // SAFETY: the caller upholds the contract of the called function.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if is_refused(new_size) {
            return ptr::null_mut();
        }
        // When an allocation moves, the old and the new memory exist at the same time.
        grown(new_size);
        shrunk(layout.size());
        // SAFETY: the caller upholds the contract of the called function.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Blocks other tests of this binary until the guard is dropped.
pub fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work`. Returns its result and the maximum number of additionally allocated bytes.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}

/// Runs `work`, during which the `number`th allocation of more than `len` bytes fails. Also returns true if
/// that allocation was reached.
pub fn refuse<T>(number: isize, len: usize, work: impl FnOnce() -> T) -> (T, bool) {
    REFUSED_ABOVE.store(len, Ordering::Relaxed);
    UNTIL_REFUSED.store(number, Ordering::Relaxed);
    let done = work();
    (done, UNTIL_REFUSED.swap(0, Ordering::Relaxed) <= 0)
}
