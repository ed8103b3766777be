//! Work on many items by several threads.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use remanent::Result;

const THREADS_MAX: usize = 8;

/// Calls `work` for each item and returns the results in the order of the items. Uses up to `wanted` threads named
/// `name`, but at most one per processor. The threads take the items one after another. If a thread cannot be started,
/// the others do its work.
///
/// # Errors
/// An error that `work` returned. The remaining items may then be skipped.
pub fn map<T: Sync, R: Send>(
    items: &[T],
    wanted: usize,
    name: &str,
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = wanted.min(THREADS_MAX).min(processors).min(items.len());
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let share = || {
        let mut results = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { break };
            let result = work(item).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            results.push((at, result));
        }
        Ok(results)
    };
    let shares: Vec<Result<Vec<(usize, R)>>> = thread::scope(|scope| {
        let start = |_| thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, share).ok();
        let others: Vec<_> = (1..threads).filter_map(start).collect();
        let own = share();
        let joined = others
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        std::iter::once(own).chain(joined).collect()
    });
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    for share in shares {
        for (at, result) in share? {
            results[at] = Some(result);
        }
    }
    Ok(results.into_iter().map(|result| result.expect("no item was skipped")).collect())
}
