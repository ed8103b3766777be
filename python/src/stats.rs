//! What an open did, and what a store counts, as dicts.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::{RecoveryReport, Stats};

/// What an open found and did.
pub fn report_to_py(py: Python<'_>, report: RecoveryReport) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("created", report.created)?;
    dict.set_item("lsn", report.position.lsn.0)?;
    dict.set_item("snapshot", report.snapshot.map(|id| id.0))?;
    dict.set_item("replayed_batches", report.replayed_batches)?;
    dict.set_item("replayed_bytes", report.replayed_bytes)?;
    dict.set_item("copied_batches", report.copied_batches)?;
    dict.set_item("unloaded_pages", report.unloaded_pages)?;
    dict.set_item("lowered_pages", report.lowered_pages)?;
    dict.set_item("torn", report.torn.is_some())?;
    let harmless: Vec<String> = report.harmless.iter().map(ToString::to_string).collect();
    dict.set_item("harmless", harmless)?;
    dict.set_item("device", report.device)?;
    dict.set_item("log_io", report.log_io)?;
    dict.set_item("image_io", report.image_io)?;
    dict.set_item("seconds", report.elapsed.as_secs_f64())?;
    Ok(dict)
}

/// Counts and sizes.
pub fn stats_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("logged", stats.logged.0)?;
    dict.set_item("applied", stats.applied.0)?;
    dict.set_item("durable", stats.durable.0)?;
    dict.set_item("batches", stats.log.batches)?;
    dict.set_item("log_bytes", stats.log.bytes)?;
    dict.set_item("syncs", stats.log.syncs)?;
    dict.set_item("snapshots_taken", stats.snapshots.taken)?;
    dict.set_item("snapshots_failed", stats.snapshots.failed)?;
    dict.set_item("scrubs_done", stats.scrubs.done)?;
    dict.set_item("damaged", stats.scrubs.damaged)?;
    let places = PyDict::new(py);
    for (place, usage) in &stats.places {
        let of_place = PyDict::new(py);
        of_place.set_item("used", usage.used())?;
        of_place.set_item("peak", usage.peak_bytes)?;
        places.set_item(place.to_string(), of_place)?;
    }
    dict.set_item("places", places)?;
    Ok(dict)
}
