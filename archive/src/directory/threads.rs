//! Work on the files of a restore by several threads.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Maximum number of threads.
const THREADS_MAX: usize = 4;

/// Returns the number of threads that read and write the files of a restore.
pub(super) fn count() -> usize {
    thread::available_parallelism().map_or(1, usize::from).clamp(2, THREADS_MAX)
}

/// Calls `work` with each item, on several threads. After an error, no further item is started.
///
/// # Errors
/// Returns an error of `work`.
pub(super) fn for_each<T: Sync>(items: &[T], work: impl Fn(&T) -> io::Result<()> + Sync) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = work(item) {
                next.store(items.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 1..count().min(items.len()) {
            let thread = thread::Builder::new().name("remanent-restore".to_owned());
            // If no further thread can be started, the running ones do all of the work.
            let Ok(thread) = thread.spawn_scoped(scope, run) else { break };
            threads.push(thread);
        }
        let mut result = run();
        for thread in threads {
            let ended = thread.join();
            result = result
                .and(ended.unwrap_or_else(|_| Err(io::Error::other("a thread of the restore panicked"))));
        }
        result
    })
}
