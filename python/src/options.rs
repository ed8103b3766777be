//! Options as Python passes them: keywords and dicts, strings for choices, seconds for times, `None` for off.

use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::options::{ArchiveOptions, Compression, Create, ImageIo, LogIo, MemoryOptions, PageLoad};
use remanent::tiers::Tiers;
use remanent::{Ack, DeviceChoice, Options, Place};

use crate::arguments::{
    self, BOOL, DICT, DICT_OR_NONE, SECONDS, SECONDS_OR_NONE, TEXT, TEXT_OR_NONE, TEXTS, UNSIGNED,
    UNSIGNED_OR_NONE,
};
use crate::errors::{OrRaise, invalid, invalid_type};
use crate::gate::{Gate, seconds};
use crate::page_memory::{Raised, page_memory};

/// The remedy for an unknown place.
const PLACES: &str = "pass \"host\", \"pinned\", \"disk\" or \"device:N\"";

const TEXTS_OR_NONE: &str = "a list of str, or None";
const BYTES_OR_NONE: &str = "bytes or None";
const FINGERPRINT_OR_NONE: &str = "32 bytes, or None";

/// The acknowledgements by name.
pub const ACKS: &[(&str, Ack)] = &[
    ("applied", Ack::Applied),
    ("logged", Ack::Logged),
    ("durable", Ack::Durable),
    ("archived", Ack::Archived),
];
const LOG_IOS: &[(&str, LogIo)] =
    &[("mapped", LogIo::Mapped), ("buffered", LogIo::Buffered), ("direct", LogIo::Direct)];
const IMAGE_IOS: &[(&str, ImageIo)] = &[
    ("auto", ImageIo::Auto),
    ("mapped", ImageIo::Mapped),
    ("buffered", ImageIo::Buffered),
    ("direct", ImageIo::Direct),
];
const LOADS: &[(&str, PageLoad)] = &[("eager", PageLoad::Eager), ("on_demand", PageLoad::OnDemand)];
/// Whether an eviction policy is LRU.
const EVICTIONS: &[(&str, bool)] = &[("s3-fifo", false), ("lru", true)];

fn one_of<T: Copy>(option: &str, word: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choices.iter().find(|(name, _)| *name == word).map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        let names = names.join(", ");
        invalid(format!("{option} must be one of {names}, not {word:?}"), format!("pass one of {names}"))
    })
}

/// Parses the name of an acknowledgement.
pub fn ack(word: &str) -> PyResult<Ack> {
    one_of("ack", word, ACKS)
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
        invalid(format!("width must be 1, 2, 4, 8 or 16 bytes, not {bytes}"), "pass one of these widths")
    })
}

/// Opens a store with the given keyword options.
///
/// # Errors
/// `TypeError` and `ValueError` for options, exceptions of `page_memory`, and errors of the open.
pub fn open(py: Python<'_>, path: &Path, given: Option<&Bound<'_, PyDict>>) -> PyResult<Arc<Gate>> {
    let raised = Raised::default();
    let options = options(py, given, &raised)?;
    let (ack, shown) = (options.ack, path.display().to_string());
    crate::log::update_level(py)?;
    let store = raised.or(py.detach(|| options.open(path)).or_raise(py, Some(&shown)))?;
    Ok(Gate::new(store, path, ack))
}

/// The options of one group, or all options, by name. [`Given::take`] removes an option. The options that
/// remain in the end are unknown.
struct Given<'py> {
    /// The name of the group followed by a dot, or nothing.
    prefix: &'static str,
    is_given: bool,
    values: Bound<'py, PyDict>,
    /// The known names, with their groups, for the error about an unknown option.
    known: Vec<String>,
}

impl<'py> Given<'py> {
    fn new(py: Python<'py>, prefix: &'static str, values: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        let is_given = values.is_some();
        let values = values.map_or_else(|| Ok(PyDict::new(py)), PyDictMethods::copy)?;
        Ok(Self { prefix, is_given, values, known: Vec::new() })
    }

    /// Returns the value of an option, if it is given.
    fn take<T>(&mut self, name: &str, expected: &str) -> PyResult<Option<T>>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let full = format!("{}{name}", self.prefix);
        let value = match self.values.get_item(name)? {
            Some(value) => {
                self.values.del_item(name)?;
                Some(arguments::value(&value, &full, expected)?)
            }
            None => None,
        };
        self.known.push(full);
        Ok(value)
    }

    /// Sets `target` to the value of an option, if it is given.
    fn set<T>(&mut self, name: &str, expected: &str, target: &mut T) -> PyResult<()>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        if let Some(value) = self.take(name, expected)? {
            *target = value;
        }
        Ok(())
    }

    /// Sets `target` to one of `choices`, if the option is given.
    fn choose<T: Copy>(&mut self, name: &str, choices: &[(&str, T)], target: &mut T) -> PyResult<()> {
        if let Some(word) = self.take::<String>(name, TEXT)? {
            *target = one_of(&format!("{}{name}", self.prefix), &word, choices)?;
        }
        Ok(())
    }

    /// Sets `target` to a time in seconds or `None`, if the option is given.
    fn set_interval(&mut self, name: &str, target: &mut Option<Duration>) -> PyResult<()> {
        if let Some(given) = self.take(name, SECONDS_OR_NONE)? {
            *target = seconds(given)?;
        }
        Ok(())
    }

    /// Removes an option whose value is `None`.
    fn remove_none(&self, name: &str) -> PyResult<()> {
        match self.values.get_item(name)? {
            Some(value) if value.is_none() => self.values.del_item(name),
            _ => Ok(()),
        }
    }

    /// Reads the options of a group, and returns the result of `read`.
    fn group<T>(
        &mut self,
        (name, prefix): (&str, &'static str),
        read: impl FnOnce(&mut Given<'py>) -> PyResult<T>,
    ) -> PyResult<T> {
        let py = self.values.py();
        let values = self.take::<Bound<'py, PyDict>>(name, DICT)?;
        let mut group = Given::new(py, prefix, values.as_ref())?;
        let read = read(&mut group)?;
        group.refuse_unknown()?;
        self.known.append(&mut group.known);
        Ok(read)
    }

    /// Returns an error if an option was not taken. The error suggests the known name that is most similar.
    fn refuse_unknown(&self) -> PyResult<()> {
        let Some((name, _)) = self.values.iter().next() else { return Ok(()) };
        let name = name.str()?.to_string();
        let full = format!("{}{name}", self.prefix);
        // Most unknown options are names in a group that were passed without the group.
        let in_group = self.known.iter().find(|known| known.split('.').nth(1) == Some(&name));
        let nearest = match in_group {
            Some(known) => Some(known.clone()),
            None => {
                let found = self.values.py().import("difflib")?.getattr("get_close_matches")?.call1((
                    &full,
                    self.known.clone(),
                    1,
                    0.5,
                ))?;
                found.extract::<Vec<String>>()?.pop()
            }
        };
        let hint = nearest.map_or_else(String::new, |nearest| match nearest.split_once('.') {
            Some((group, name)) if self.prefix.is_empty() => {
                format!("; did you mean {group}={{{name:?}: …}}?")
            }
            Some((_, name)) => format!("; did you mean {name:?}?"),
            None => format!("; did you mean {nearest}?"),
        });
        let known = self.known.join(", ");
        Err(invalid_type(format!("unknown option {full}{hint}"), format!("pass one of {known}")))
    }
}

/// Converts keyword options to engine options. An exception that `page_memory` raises is stored in `raised`.
fn options(py: Python<'_>, given: Option<&Bound<'_, PyDict>>, raised: &Raised) -> PyResult<Options> {
    let device = |text: &str| text.parse::<DeviceChoice>().or_raise(py, None);
    let mut given = Given::new(py, "", given)?;
    let mut options = Options::new();
    if let Some(create) = given.take("create", BOOL)? {
        options.create = if create { Create::IfEmpty } else { Create::Never };
    }
    given.choose("ack", ACKS, &mut options.ack)?;
    if let Some(text) = given.take::<String>("device", TEXT)? {
        options.device = device(&text)?;
    }
    if let Some(slots) = given.take::<Option<Vec<String>>>("slots", TEXTS_OR_NONE)?.flatten() {
        options.slots = slots.iter().map(|slot| device(slot)).collect::<PyResult<_>>()?;
    }
    given.set("identity", BYTES_OR_NONE, &mut options.identity)?;
    given.set("layout_fingerprint", FINGERPRINT_OR_NONE, &mut options.layout_fingerprint)?;
    given.group(("memory", "memory."), |memory| set_memory(memory, &mut options.memory, raised))?;
    given.remove_none("tiers")?;
    options.tiers = given.group(("tiers", "tiers."), tiers)?;
    given.group(("log", "log."), |log| {
        if let Some(word) = log.take::<Option<String>>("io", TEXT_OR_NONE)? {
            options.log.io = word.map(|word| one_of("log.io", &word, LOG_IOS)).transpose()?;
        }
        log.set("segment_len", UNSIGNED, &mut options.log.segment_len)?;
        log.set("reserve_bytes", UNSIGNED_OR_NONE, &mut options.log.reserve_bytes)?;
        log.set("spare_bytes", UNSIGNED_OR_NONE, &mut options.log.spare_bytes)
    })?;
    given.group(("images", "images."), |images| {
        images.choose("io", IMAGE_IOS, &mut options.images.io)?;
        if let Some(is_compressed) = images.take("compression", BOOL)? {
            options.images.compression = if is_compressed { Compression::Zstd } else { Compression::Off };
        }
        Ok(())
    })?;
    given.group(("snapshots", "snapshots."), |snapshots| {
        snapshots.set("log_bytes", UNSIGNED_OR_NONE, &mut options.snapshots.log_bytes)?;
        snapshots.set_interval("interval", &mut options.snapshots.interval)?;
        snapshots.set("bytes_per_second", UNSIGNED_OR_NONE, &mut options.snapshots.bytes_per_second)
    })?;
    given.group(("retention", "retention."), |retention| {
        retention.set("snapshots_kept", UNSIGNED, &mut options.retention.snapshots_kept)?;
        if let Some(age) = retention.take("snapshots_kept_for", SECONDS)? {
            options.retention.snapshots_kept_for = seconds(Some(age))?.unwrap_or_default();
        }
        retention.set("log_kept", UNSIGNED, &mut options.retention.log_kept)
    })?;
    given.group(("scrubs", "scrubs."), |scrubs| {
        scrubs.set_interval("interval", &mut options.scrubs.interval)?;
        scrubs.set("bytes_per_second", UNSIGNED_OR_NONE, &mut options.scrubs.bytes_per_second)
    })?;
    given.remove_none("archive")?;
    options.archive = given.group(("archive", "archive."), archive)?;
    given.refuse_unknown()?;
    Ok(options)
}

/// Sets the given options of the group `memory`. An exception that `page_memory` raises is stored in `raised`.
fn set_memory(given: &mut Given<'_>, memory: &mut MemoryOptions, raised: &Raised) -> PyResult<()> {
    let py = given.values.py();
    if let Some(limits) = given.take::<Option<Bound<'_, PyDict>>>("budget", DICT_OR_NONE)?.flatten() {
        for (name, bytes) in limits.iter() {
            let name: String = arguments::value(&name, "a place in memory.budget", TEXT)?;
            let bytes =
                arguments::value(&bytes, &format!("memory.budget[{name:?}]"), "a number of bytes (int)")?;
            *memory = mem::take(memory).budget(place(py, &name)?, bytes);
        }
    }
    given.choose("load", LOADS, &mut memory.load)?;
    let source = given.take::<Option<Py<PyAny>>>("page_memory", "a callable or None")?.flatten();
    if let Some(source) = source {
        if !source.bind(py).is_callable() {
            return Err(invalid_type(
                "memory.page_memory must be a callable or None",
                "pass a function that takes a PageInfo",
            ));
        }
        *memory = page_memory(mem::take(memory), source, raised);
    }
    Ok(())
}

/// Returns the options of the group `tiers`, or `None` if the group is not given.
fn tiers(given: &mut Given<'_>) -> PyResult<Option<Tiers>> {
    let places = given.take::<Vec<String>>("places", TEXTS)?;
    let mut is_lru = false;
    given.choose("eviction", EVICTIONS, &mut is_lru)?;
    let Some(places) = places else {
        if given.is_given {
            return Err(invalid_type(
                "tiers has no places",
                "pass tiers.places, such as [\"host\", \"disk\"]",
            ));
        }
        return Ok(None);
    };
    let py = given.values.py();
    let places = places.iter().map(|name| place(py, name)).collect::<PyResult<Vec<_>>>()?;
    let tiers = Tiers::new(places);
    Ok(Some(if is_lru { tiers.lru() } else { tiers }))
}

/// Converts the options of an archive that a view shows.
///
/// # Errors
/// `TypeError` and `ValueError` for options.
pub fn viewed_archive(values: &Bound<'_, PyDict>) -> PyResult<ArchiveOptions> {
    let mut given = Given::new(values.py(), "archive.", Some(values))?;
    let archive = archive_options(&mut given)?;
    given.refuse_unknown()?;
    Ok(archive)
}

/// Returns the options of the group `archive`, or `None` if the group is not given.
fn archive(given: &mut Given<'_>) -> PyResult<Option<ArchiveOptions>> {
    let archive = archive_options(given)?;
    Ok(given.is_given.then_some(archive))
}

fn archive_options(given: &mut Given<'_>) -> PyResult<ArchiveOptions> {
    let url = given.take::<String>("url", TEXT)?;
    if url.is_none() && given.is_given {
        return Err(invalid_type("archive has no url", "pass archive.url, such as \"s3://bucket/run-7\""));
    }
    let mut archive = ArchiveOptions::new(url.unwrap_or_default());
    if let Some(settings) = given.take::<Option<Bound<'_, PyDict>>>("settings", DICT_OR_NONE)?.flatten() {
        for (name, value) in settings.iter() {
            let name: String = arguments::value(&name, "a name in archive.settings", TEXT)?;
            let value = arguments::value(&value, &format!("archive.settings[{name:?}]"), TEXT)?;
            archive.settings.push((name, value));
        }
    }
    if let Some(interval) = given.take("interval", SECONDS)? {
        archive.interval = seconds(Some(interval))?.unwrap_or_default();
    }
    given.set("log_len_max", UNSIGNED, &mut archive.log_len_max)?;
    given.set("required", BOOL, &mut archive.required)?;
    given.set("takeover", BOOL, &mut archive.takeover)?;
    given.set("cache_len_max", UNSIGNED, &mut archive.cache_len_max)?;
    Ok(archive)
}
