//! Waits, with a progress bar, for pages that an open left on disk.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::gate::{Gate, wait};

/// Waits until all pages are loaded, up to `timeout`, and returns whether they are. `progress` is passed to
/// `remanent._util.progress.Bar`.
pub fn wait_loaded(
    py: Python<'_>,
    gate: &Gate,
    timeout: Option<Duration>,
    progress: Option<bool>,
) -> PyResult<bool> {
    let unloaded = || gate.inspect(py, |store| Ok(store.unloaded_pages().bytes));
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut left = unloaded()?;
    let bar = py.import("remanent._util.progress")?.getattr("Bar")?.call1((left, "loading", progress))?;
    let waited = loop {
        let time_left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let is_last = time_left.is_some_and(|left| left <= BAR_INTERVAL);
        let part = time_left.map_or(BAR_INTERVAL, |left| left.min(BAR_INTERVAL));
        match wait_part(py, gate, part) {
            Ok(false) if !is_last => {}
            done => break done,
        }
        let now = unloaded()?;
        bar.call_method1("add", (left.saturating_sub(now),))?;
        left = now;
    };
    bar.call_method0("close")?;
    waited
}

const BAR_INTERVAL: Duration = Duration::from_millis(200);

/// Waits until all pages are loaded, up to `timeout`, without a progress bar. Returns whether they are.
fn wait_part(py: Python<'_>, gate: &Gate, timeout: Duration) -> PyResult<bool> {
    let mut first = true;
    wait(py, Some(timeout), Some(&gate.path), |slice| {
        let call = gate.enter()?;
        if call.unloaded_pages().pages == 0 {
            // A page that cannot be loaded is not counted; this call reports it.
            return call.wait_loaded().map(|()| true);
        }
        // The first check does not sleep, so a timeout of zero ends after it.
        if !std::mem::take(&mut first) {
            #[allow(
                clippy::disallowed_methods,
                reason = "the engine can only wait for this without a time limit"
            )]
            std::thread::sleep(slice.min(Duration::from_millis(2)));
        }
        Ok(false)
    })
}
