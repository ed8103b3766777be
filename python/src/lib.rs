//! Remanent for Python: the module `remanent._store._native`.
//!
//! # Map
//!
//! A file imports only from those below it.
//!
//! | file | contents |
//! |---|---|
//! | `peers` | pages of other processes and hosts |
//! | `store` | the handle of an open store |
//! | `history` | snapshots and earlier states of a store |
//! | `follower` | batches as they are logged, and replicas |
//! | `operations` | the operations of a followed batch, as dicts |
//! | `changes` | the changes of each batch, once it is applied |
//! | `lease`, `pin` | access to a page's bytes in place; keeping a page at a constant address |
//! | `placement` | moving pages to a place |
//! | `ahead` | moving pages to a place before they are used |
//! | `read_many` | reading ranges of many pages with one call |
//! | `batch` | operations that take effect together |
//! | `page_creates`, `page_updates` | pages that a batch creates, and updates of pages to new bytes |
//! | `pending_batch` | the operations of a batch until it is submitted, and its submission |
//! | `new_page` | the handle of a page that a batch creates |
//! | `working_copy` | caller-owned memory whose changes are captured into a page |
//! | `ticket` | the handle to a submitted batch |
//! | `view` | views of an open store, and of earlier states |
//! | `blame` | the changes of a value; the search for the first bad version |
//! | `reader` | reading pages and the root from every kind of source |
//! | `source` | the sources of pages: an open store, a view, an earlier state or a replica |
//! | `page_name` | how callers name pages and states |
//! | `page_info` | the result of looking up a page |
//! | `snapshot` | kept snapshots, and the result of a prune |
//! | `loading` | waiting for pages that an open left on disk |
//! | `stats` | the report of an open, and the statistics of a store |
//! | `options` | how a store is opened, from strings and seconds |
//! | `shared_source` | a source that returns each item once, to one of several threads |
//! | `event_fd` | engine futures for an event loop |
//! | `log` | engine events for Python's `logging` |
//! | `blocks` | the new contents of a page of tensors |
//! | `extents` | the bytes of storage that a tensor uses |
//! | `flatten` | plain values as JSON, and the tensors among them |
//! | `array` | copies of pages that other libraries can use without another copy |
//! | `gate` | calls into a store: closing, forks, the interpreter's lock, Ctrl-C |
//! | `parallel` | work on many items by several threads |
//! | `memory` | bytes that a call reads, and buffers that it fills |
//! | `buffer_view` | a view of another object's bytes |
//! | `dtype`, `dlpack` | element types; the ABI of tensors |
//! | `untracked` | objects that the garbage collector does not scan |
//! | `values`, `errors` | metadata and errors as Python objects |
//!
//! # Rules
//!
//! 1. No call waits while it holds the interpreter's lock, and no value whose destructor waits is dropped
//!    while holding it.
//! 2. No thread of the store ever takes the interpreter's lock.
//! 3. The process is checked before any lock is taken: in a forked child, the holder of the lock may not
//!    exist.
//! 4. The store's memory cannot be written through an export.

mod peers;
mod store;
mod history;
mod follower;
mod operations;
mod changes;
mod lease;
mod pin;
mod placement;
mod ahead;
mod descriptor;
mod read_many;
mod device_reads;
mod batch;
mod page_creates;
mod page_updates;
mod working_copy;
mod pending_batch;
mod new_page;
mod ticket;
mod view;
mod blame;
mod reader;
mod source;
mod page_name;
mod page_info;
mod snapshot;
mod copiers;
mod load_pages;
mod loading;
mod stats;
mod options;
mod shared_source;
mod event_fd;
mod log;
mod blocks;
mod extents;
mod flatten;
mod arguments;
mod parallel;
mod array;
mod gate;
mod page_memory;
mod memory;
mod buffer_view;
mod dtype;
mod dlpack;
mod untracked;
mod values;
mod elements;
mod listed_versions;
mod errors;

use std::ffi::OsString;

use pyo3::prelude::*;

/// The native module with the engine of the package `remanent`.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::ahead::{PyPrefetch, PyReadAhead};
    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::batch::Batch;
    #[pymodule_export]
    use super::blame::{Bisect, PyValueChange};
    #[pymodule_export]
    use super::blocks::{ArrayLayout, Block};
    #[pymodule_export]
    use super::changes::{Lagged, PyAppliedBatch, PyAppliedPage, PyChangeStream};
    #[pymodule_export]
    use super::event_fd::{EventFd, Waiting};
    #[pymodule_export]
    use super::extents::{Extent, extents, extents_by_page, extents_within};
    #[pymodule_export]
    use super::follower::{PyFollowedBatch, PyFollower, PyReplica};
    #[pymodule_export]
    use super::lease::PyLease;
    #[pymodule_export]
    use super::log::{_log_end, _log_level, _log_mark, _log_take};
    #[pymodule_export]
    use super::new_page::PyNewPage;
    #[pymodule_export]
    use super::page_info::Info;
    #[pymodule_export]
    use super::page_memory::PyPageMemory;
    #[pymodule_export]
    use super::peers::{PyPageClient, PyPageServer};
    #[pymodule_export]
    use super::pin::PyPin;
    #[pymodule_export]
    use super::read_many::{PyManyBytes, PyReadMany};
    #[pymodule_export]
    use super::reader::Reader;
    #[pymodule_export]
    use super::snapshot::{Pruned, SnapshotInfo};
    #[pymodule_export]
    use super::store::PyStore;
    #[pymodule_export]
    use super::ticket::{Receipt, Ticket};
    #[pymodule_export]
    use super::view::{PyKeptStates, PyLiveView, PyView};
    #[pymodule_export]
    use super::working_copy::PyWorkingCopy;

    use remanent::StatePoint;

    use super::dtype::Dtype;
    use super::errors::OrRaise;
    use super::flatten::{Leaves, Walk};
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Runs the `remanent` command and returns its exit code. `program` is the command line that starts the
    /// command again, for subcommands that kill their own process.
    #[pyfunction]
    fn command(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
        py.detach(|| remanent_tools::main_as(program, arguments))
    }

    /// Closes all open stores. The package registers this function with `atexit`.
    #[pyfunction]
    fn close_all(py: Python<'_>) {
        peers::close_all(py);
        gate::close_all(py);
    }

    /// Returns the versions in the directory of a store, or of a run with several ranks, oldest first.
    #[pyfunction]
    fn versions(py: Python<'_>, path: std::path::PathBuf) -> PyResult<Vec<listed_versions::ListedVersion>> {
        listed_versions::list(py, path)
    }

    /// Returns the CRC-32 of each tensor, all of which are on one GPU such as "cuda:0".
    #[pyfunction]
    fn gpu_checksums(
        memory: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::device)] device: &str,
    ) -> PyResult<Vec<u32>> {
        super::load_pages::gpu_checksums(memory, device)
    }

    /// Returns a value as JSON text. `adapt` converts objects of other libraries. Objects that `leaves` accepts
    /// are collected there, and the text contains their names.
    #[pyfunction]
    #[pyo3(signature = (path, value, adapt, leaves=None))]
    fn flatten<'py>(
        path: String,
        value: &Bound<'py, PyAny>,
        adapt: &Bound<'py, PyAny>,
        leaves: Option<Leaves<'py>>,
    ) -> PyResult<String> {
        Walk::new(value.py(), path, adapt, leaves.as_ref()).flatten(value)
    }

    /// Parses the text of a state. Returns its kind ("lsn", "snapshot" or "name") and the number or name.
    #[pyfunction]
    fn state_point<'py>(
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::text)] text: &str,
    ) -> PyResult<(&'static str, Bound<'py, PyAny>)> {
        Ok(match text.parse().or_raise(py, None)? {
            StatePoint::Lsn(lsn) => ("lsn", lsn.0.into_pyobject(py)?.into_any()),
            StatePoint::Snapshot(id) => ("snapshot", id.0.into_pyobject(py)?.into_any()),
            StatePoint::Name(name) => ("name", name.into_pyobject(py)?.into_any()),
            other => unreachable!("no text is parsed as {other}"),
        })
    }

    /// Returns the name in `names` that is most similar to `wanted`, or None if none is similar.
    #[pyfunction]
    fn nearest(
        #[pyo3(from_py_with = arguments::text)] wanted: &str,
        #[pyo3(from_py_with = arguments::names)] names: Vec<String>,
    ) -> Option<String> {
        remanent::error::nearest(wanted, names.iter().map(String::as_str)).map(str::to_owned)
    }

    /// Escapes a name for use as a segment of a path in `flatten`.
    #[pyfunction]
    fn segment(name: &str) -> std::borrow::Cow<'_, str> {
        super::flatten::escaped(name)
    }

    /// Returns the NumPy name of an element type, its name in metadata, and its bytes per element. `name` can
    /// be either name.
    #[pyfunction]
    fn dtype(
        #[pyo3(from_py_with = arguments::name)] name: &str,
    ) -> PyResult<(&'static str, &'static str, usize)> {
        let dtype = Dtype::parse(name)?;
        Ok((dtype.name, dtype.short, dtype.item_size()))
    }
}
