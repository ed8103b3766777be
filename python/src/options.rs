//! Options as Python passes them: strings for choices, seconds for times, `None` for off.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::options::{Compression, Create, ImageIo, LogIo, PageLoad};
use remanent::tiers::Tiers;
use remanent::{Ack, DeviceChoice, Options, Place};

use crate::arguments;
use crate::errors::{OrRaise, invalid, invalid_type};
use crate::gate::{Gate, seconds};
use crate::page_memory::{Raised, page_memory};

/// The remedy for an unknown place.
const PLACES: &str = "give \"host\", \"pinned\", \"disk\" or \"device:N\"";

fn one_of<T: Copy>(option: &str, word: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choices.iter().find(|(name, _)| *name == word).map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        let names = names.join(", ");
        invalid(format!("{option} is one of {names}, not {word:?}"), format!("give one of {names}"))
    })
}

/// Parses the name of an acknowledgement.
pub fn ack(word: &str) -> PyResult<Ack> {
    one_of("ack", word, &[("applied", Ack::Applied), ("logged", Ack::Logged), ("durable", Ack::Durable)])
}

/// Parses the name of a place.
pub fn place(py: Python<'_>, text: &str) -> PyResult<Place> {
    text.parse().map_err(|error: remanent::error::UnknownPlace| {
        crate::errors::own(py, "InvalidError", &error.to_string(), PLACES, None)
    })
}

/// Converts an element width from its number of bytes.
pub fn width(bytes: usize) -> PyResult<remanent::batch::Width> {
    remanent::batch::Width::from_bytes(bytes).ok_or_else(|| {
        invalid(format!("elements are 1, 2, 4, 8 or 16 bytes wide, not {bytes}"), "give one of these widths")
    })
}

/// Opens a store.
///
/// # Errors
/// `ValueError`, `InvalidError` for options; what `page_memory` raises; errors of an open.
pub fn open(py: Python<'_>, path: &Path, given: OpenKeywords<'_>) -> PyResult<Arc<Gate>> {
    let (raised, ack) = (Raised::default(), ack(&given.ack)?);
    let options = given.into_options(py, &raised)?;
    let shown = path.display().to_string();
    crate::log::update_level(py)?;
    let store = raised.or(py.detach(|| options.open(path)).or_raise(py, Some(&shown)))?;
    Ok(Gate::new(store, path, ack))
}

/// All options of an open, as passed by keyword.
pub struct OpenKeywords<'py> {
    pub create: bool,
    pub ack: String,
    pub device: String,
    pub slots: Option<Vec<String>>,
    pub log_io: Option<String>,
    pub image_io: String,
    pub segment_len: u64,
    pub reserve_bytes: Option<u64>,
    pub spare_bytes: Option<u64>,
    pub budget: Option<Bound<'py, PyDict>>,
    pub tiers: Option<Vec<String>>,
    pub eviction: String,
    pub identity: Option<Vec<u8>>,
    pub layout_fingerprint: Option<[u8; 32]>,
    pub snapshots_kept: usize,
    pub snapshots_kept_for: f64,
    pub log_kept: u64,
    pub compression: bool,
    pub page_load: String,
    pub snapshot_log_bytes: Option<u64>,
    pub snapshot_interval: Option<f64>,
    pub snapshot_bytes_per_second: Option<u64>,
    pub scrub_interval: Option<f64>,
    pub scrub_bytes_per_second: Option<u64>,
    pub page_memory: Option<Py<PyAny>>,
}

impl OpenKeywords<'_> {
    /// Converts these to engine options. What `page_memory` raises is stored in `raised`.
    fn into_options(self, py: Python<'_>, raised: &Raised) -> PyResult<Options> {
        let choice = |text: &str| text.parse::<DeviceChoice>().or_raise(py, None);
        let images =
            [("mapped", ImageIo::Mapped), ("buffered", ImageIo::Buffered), ("direct", ImageIo::Direct)];
        let loads = [("eager", PageLoad::Eager), ("on_demand", PageLoad::OnDemand)];
        let mut options = Options::new().ack(ack(&self.ack)?).device(choice(&self.device)?);
        options.create = if self.create { Create::IfEmpty } else { Create::Never };
        options.images.io = one_of("image_io", &self.image_io, &images)?;
        options.images.compression = if self.compression { Compression::Zstd } else { Compression::Off };
        options.log.segment_len = self.segment_len;
        options.log.reserve_bytes = self.reserve_bytes;
        options.log.spare_bytes = self.spare_bytes;
        options.retention.snapshots_kept = self.snapshots_kept;
        options.retention.snapshots_kept_for =
            seconds(Some(self.snapshots_kept_for))?.unwrap_or(Duration::ZERO);
        options.retention.log_kept = self.log_kept;
        options.memory.load = one_of("page_load", &self.page_load, &loads)?;
        options.snapshots.log_bytes = self.snapshot_log_bytes;
        options.snapshots.interval = seconds(self.snapshot_interval)?;
        options.snapshots.bytes_per_second = self.snapshot_bytes_per_second;
        options.scrubs.interval = seconds(self.scrub_interval)?;
        options.scrubs.bytes_per_second = self.scrub_bytes_per_second;
        if let Some(slots) = self.slots {
            options = options.slots(slots.iter().map(|slot| choice(slot)).collect::<PyResult<Vec<_>>>()?);
        }
        if let Some(word) = self.log_io {
            let ways = [("mapped", LogIo::Mapped), ("buffered", LogIo::Buffered), ("direct", LogIo::Direct)];
            options.log.io = Some(one_of("log_io", &word, &ways)?);
        }
        if let Some(limits) = self.budget {
            for (name, bytes) in limits.iter() {
                let name: String = arguments::value(&name, "a place in budget", "a str")?;
                let bytes =
                    arguments::value(&bytes, &format!("budget[{name:?}]"), "a number of bytes (int)")?;
                options.memory = options.memory.budget(place(py, &name)?, bytes);
            }
        }
        let policies = [("s3-fifo", false), ("lru", true)];
        let is_lru = one_of("eviction", &self.eviction, &policies)?;
        if let Some(names) = self.tiers {
            let places = names.iter().map(|name| place(py, name)).collect::<PyResult<Vec<_>>>()?;
            let tiers = Tiers::new(places);
            options = options.tiers(if is_lru { tiers.lru() } else { tiers });
        }
        if let Some(identity) = self.identity {
            options = options.identity(identity);
        }
        if let Some(fingerprint) = self.layout_fingerprint {
            options = options.layout_fingerprint(fingerprint);
        }
        if let Some(source) = self.page_memory {
            if !source.bind(py).is_callable() {
                return Err(invalid_type(
                    "page_memory is a callable or None",
                    "give a function that takes a PageInfo",
                ));
            }
            options.memory = page_memory(options.memory, source, raised);
        }
        Ok(options)
    }
}
