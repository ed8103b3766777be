//! Converts the report of an open and the statistics of a store to dicts.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use remanent::stats::Stats;
use remanent::store::RecoveryReport;

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

pub fn stats_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("logged", stats.logged.0)?;
    dict.set_item("applied", stats.applied.0)?;
    dict.set_item("durable", stats.durable.0)?;
    dict.set_item("batches", stats.log.batches)?;
    dict.set_item("log_bytes", stats.log.bytes)?;
    dict.set_item("syncs", stats.log.syncs)?;
    let on_disk = PyDict::new(py);
    on_disk.set_item("pages", stats.on_disk.pages)?;
    on_disk.set_item("bytes", stats.on_disk.bytes)?;
    dict.set_item("on_disk", on_disk)?;
    dict.set_item("pending_bytes", stats.pending_bytes)?;
    dict.set_item("staging_idle_bytes", stats.staging_idle_bytes)?;
    dict.set_item("snapshots_taken", stats.snapshots.taken)?;
    dict.set_item("snapshots_failed", stats.snapshots.failed)?;
    dict.set_item("scrubs_done", stats.scrubs.done)?;
    dict.set_item("damaged", stats.scrubs.damaged)?;
    dict.set_item("archive", archive_to_py(py, stats)?)?;
    let places = PyDict::new(py);
    for (place, usage) in &stats.places {
        let of_place = PyDict::new(py);
        of_place.set_item("used", usage.used())?;
        of_place.set_item("peak", usage.peak_bytes)?;
        if let Some((_, counted)) = stats.allocations.iter().find(|(of, _)| of == place) {
            of_place.set_item("allocations", counted.allocations)?;
            of_place.set_item("frees", counted.frees)?;
            of_place.set_item("refusals", counted.refusals)?;
        }
        places.set_item(place.to_string(), of_place)?;
    }
    dict.set_item("places", places)?;
    dict.set_item("tiers", tiers_to_py(py, stats)?)?;
    dict.set_item("moves", moves_to_py(py, stats)?)?;
    dict.set_item("transfers", transfers_to_py(py, stats)?)?;
    dict.set_item("lanes", lanes_to_py(py, stats)?)?;
    Ok(dict)
}

/// Converts the counters of the archive to a dict, or to None if there is no archive.
fn archive_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(archive) = &stats.archive else { return Ok(None) };
    let dict = PyDict::new(py);
    dict.set_item("archived", archive.archived.0)?;
    dict.set_item("runs", archive.runs)?;
    dict.set_item("snapshots", archive.snapshots)?;
    dict.set_item("named", archive.named)?;
    dict.set_item("gaps", archive.gaps)?;
    dict.set_item("failures", archive.failures)?;
    dict.set_item("last_failure", archive.last_failure.as_ref().map(ToString::to_string))?;
    Ok(Some(dict))
}

/// Converts the requests and evictions of each place to a dict.
fn tiers_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let tiers = PyDict::new(py);
    for tier in &stats.tiers {
        let dict = PyDict::new(py);
        dict.set_item("hits", tier.hits)?;
        dict.set_item("misses", tier.misses)?;
        dict.set_item("evictions", tier.evictions)?;
        dict.set_item("waits", tier.waits)?;
        dict.set_item("seconds", tier.waited.as_secs_f64())?;
        tiers.set_item(tier.place.to_string(), dict)?;
    }
    Ok(tiers)
}

/// Converts the pages that the store moved, by source and target place, to a list of dicts.
fn moves_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for of in &stats.moves {
        let dict = PyDict::new(py);
        dict.set_item("from", of.from.to_string())?;
        dict.set_item("to", of.to.to_string())?;
        dict.set_item("pages", of.pages)?;
        dict.set_item("bytes", of.bytes)?;
        dict.set_item("seconds", of.took.as_secs_f64())?;
        list.append(dict)?;
    }
    Ok(list)
}

/// Converts the transfers between places, which command lists of the device made, to a list of dicts.
fn transfers_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for of in &stats.transfers {
        let dict = PyDict::new(py);
        dict.set_item("from", of.from.to_string())?;
        dict.set_item("to", of.to.to_string())?;
        dict.set_item("pages", of.pages)?;
        dict.set_item("bytes", of.bytes)?;
        dict.set_item("lists", of.lists)?;
        dict.set_item("seconds", of.time.as_secs_f64())?;
        list.append(dict)?;
    }
    Ok(list)
}

/// Converts the counts of command lists and of waits for each lane, which is a queue of the device, to a
/// dict.
fn lanes_to_py<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let lanes = PyDict::new(py);
    for (lane, of) in &stats.lanes {
        let dict = PyDict::new(py);
        dict.set_item("lists", of.lists)?;
        dict.set_item("queued", of.queued)?;
        dict.set_item("queued_max", of.queued_max)?;
        dict.set_item("waits", of.waits)?;
        dict.set_item("seconds", of.wait_time.as_secs_f64())?;
        lanes.set_item(format!("{lane:?}").to_lowercase(), dict)?;
    }
    Ok(lanes)
}
