//! The handle of an open store.
//!
//! Its methods fall into groups, each implemented by other modules:
//!
//! | methods | module |
//! |---|---|
//! | `Store`, `path`, `id`, `closed`, `recovered`, `stats` | `options`, `stats` |
//! | `put`, `batch`, `submit`, `commit`, `wait_durable` | `batch`, `pending_batch`, `ticket` |
//! | `ensure`, `promote`, `demote`; `prefetch`, `read_ahead` | `placement`; `ahead` |
//! | `view`, `lease`, `pin`, `working_copy`, `release` | modules of the same names; `page_memory` |
//! | `read_many`, `read_many_into`; `changes` | `read_many`; `changes` |
//! | `blame`, `bisect`, `snapshot`, `snapshots`, `restore`, `fork`, `prune` | `history` |
//! | `compare`, `scrub`, `audit`, `wait_loaded`, `trim` | `loading`, and the engine |
//! | `close` | `gate` |
//!
//! The methods that read pages and the root are in `reader`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use remanent::batch::PageRef;
use remanent::{Lsn, PageInfo, Store, WriteBatch};

use crate::ahead::{PyPrefetch, PyReadAhead};
use crate::arguments;
use crate::batch::Batch;
use crate::blame::PyValueChange;
use crate::changes::PyChangeStream;
use crate::elements::PageLayout;
use crate::errors::{OrRaise, STORE, key_to_py};
use crate::gate::{Gate, seconds};
use crate::history::{self, here};
use crate::lease::PyLease;
use crate::loading::wait_loaded;
use crate::memory::Input;
use crate::options::{ack, open, place, width};
use crate::page_memory::PyPageMemory;
use crate::page_name::{key, snapshot_id, snapshot_point, state_point};
use crate::pin::PyPin;
use crate::placement::move_pages;
use crate::read_many::{FoundRanges, PyReadMany, fill};
use crate::reader::Reader;
use crate::snapshot::{Pruned, SnapshotInfo, retention};
use crate::source::{LiveSource, Source};
use crate::stats::{report_to_py, stats_to_py};
use crate::ticket::{Receipt, Ticket};
use crate::values::REPORT;
use crate::view::PyLiveView;
use crate::working_copy::PyWorkingCopy;

/// A store directory, open for reading and writing: pages, root, log and snapshots.
///
/// A store has one writer at a time; threads can share the object. Used as a context manager, it is closed at
/// the end of the block. Lengths are in bytes, times in seconds.
///
/// :param path: the directory.
/// :param create: whether to create the store, with its parent directories, if the directory is missing or
///     empty.
/// :param ack: what commits wait for by default: "applied", "logged" (survives the death of the process), "durable"
///     (survives a power cut) or "archived" (survives the loss of the machine; needs `archive`).
/// :param device: the device that holds the pages: "auto", "host" or "cuda:N".
/// :param slots: a list of devices to which the places "device:0", "device:1", … refer. None binds all of
///     them to `device`.
/// :param identity: bytes that identify the application. If a later open passes other bytes, it raises `MismatchError`.
/// :param layout_fingerprint: 32 bytes that identify the layout of the data within pages, such as a hash of the model's
///     configuration. If a later open passes other bytes, it raises `MismatchError`.
/// :param memory: how much memory pages may use, and how an open loads them; see `MemoryOptions`.
/// :param tiers: the order of places through which unused pages are demoted; see `TierOptions`. None demotes
///     nothing.
/// :param log: how the log is written; see `LogOptions`.
/// :param images: how images of pages are written; see `ImageOptions`.
/// :param snapshots: when snapshots are taken in the background; see `SnapshotSchedule`.
/// :param retention: which snapshots and how much log are kept; see `RetentionOptions`.
/// :param scrubs: when the data on disk is scrubbed in the background; see `ScrubSchedule`.
/// :param archive: where the store is archived while it is open; see `ArchiveOptions`. None archives nothing.
/// :raises LockedError: another process has the store open.
/// :raises NoStoreError, ForeignDirectoryError, MismatchError, InvalidError, DeviceError, OverBudgetError:
///     the store cannot be opened with these arguments.
/// :raises ArchiveError: the archive cannot be reached, or does not end in the history of this directory.
/// :raises DamagedError: durable bytes on disk differ from the bytes that were written.
///
/// >>> store = remanent.Store(directory, device="host", ack="durable")
/// >>> store["config"] = b"a = 1"
/// >>> store["config"], list(store), "config" in store
/// (b'a = 1', ['config'], True)
/// >>> store.close()
#[pyclass(frozen, name = "Store", module = "remanent", extends = Reader)]
pub struct PyStore {
    gate: Arc<Gate>,
}

impl PyStore {
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }
}

#[pymethods]
impl PyStore {
    #[new]
    #[pyo3(signature = (path, **options), text_signature = "(path, *, create=True, ack='logged', device='auto', \
slots=None, identity=None, layout_fingerprint=None, \
memory={'budget': None, 'load': 'eager', 'page_memory': None}, tiers=None, \
log={'io': None, 'segment_len': 16777216, 'reserve_bytes': None, 'spare_bytes': None}, \
images={'io': 'auto', 'compression': True}, \
snapshots={'log_bytes': 268435456, 'interval': 60.0, 'bytes_per_second': None}, \
retention={'snapshots_kept': 2, 'snapshots_kept_for': 0.0, 'log_kept': 0}, \
scrubs={'interval': 86400.0, 'bytes_per_second': 67108864}, archive=None)")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::path)] path: PathBuf,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let gate = open(py, &path, options)?;
        let reader = Reader::new(Source::Store(gate.clone()));
        Ok(PyClassInitializer::from(reader).add_subclass(Self { gate }))
    }

    /// The path of the store's directory, as passed to the constructor.
    #[getter]
    fn path(&self) -> &str {
        &self.gate.path
    }

    /// The current absolute path of the store's directory, even after the directory was moved.
    ///
    /// :raises NoStoreError: the directory was removed.
    #[getter]
    fn directory(&self, py: Python<'_>) -> PyResult<OsString> {
        self.gate.inspect(py, |store| Ok(here(store)?.into_os_string()))
    }

    /// The identity of the store as hexadecimal text, chosen at random when the store is created.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        self.gate.inspect(py, |store| Ok(store.id().to_string()))
    }

    /// Whether the store is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// A report of what the open found and did, as a read-only dict.
    ///
    /// >>> with remanent.Store(directory, device="host") as store:
    /// ...     store.recovered["created"], store.recovered["lsn"], store.recovered["device"]
    /// (True, 0, 'host')
    #[getter]
    fn recovered<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze(report_to_py(py, self.gate.inspect(py, |store| Ok(store.recovered().clone()))?)?)
    }

    /// Returns counts and sizes since the store was opened, in bytes unless stated otherwise.
    ///
    /// "on_disk" counts the pages in the place "disk" and their bytes. "pending_bytes" is the host memory for changes
    /// to these pages since their newest images. "places" is page memory by place. "tiers" counts the pages that
    /// `ensure` requested and the pages that were evicted to free memory. "moves" counts pages that the store moved.
    /// "transfers" and "lanes" count the bytes that the device's command lists moved, and the time that calls waited
    /// for them. A lane is a queue of command lists for one purpose. "archive" counts what was archived, or is None.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"abc"
    /// ...     stats = store.stats()
    /// >>> stats["places"]["host"]["used"], stats["places"]["host"]["allocations"], stats["moves"]
    /// (3, 1, [])
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_to_py(py, &self.gate.inspect(py, |store| Ok(store.stats()))?)
    }

    /// Sets the contents of the page with key `key` in one batch, creating the page if it does not exist.
    /// Returns the page's id.
    ///
    /// For an array, the metadata entries `dtype` and `shape` are set. `numpy` and `array` then return an
    /// array of the same type and shape. Bytes remove these entries. `store[key] = data` does the same.
    ///
    /// :param data: contiguous host memory: bytes, a NumPy array or a tensor.
    /// :param place: the place of a new page: "host", "pinned", "device:N" or "disk".
    /// :raises InvalidTypeError: metadata has no name for the element type, such as NumPy's dates and
    ///     structures. Nothing changed.
    /// :raises OverBudgetError: the page does not fit in the budget of its place. Nothing changed.
    /// :raises DiskFullError: the disk has no space for the batch. Nothing changed.
    /// :raises InvalidError: the key is not 1 to 64 bytes long.
    ///
    /// >>> import numpy
    /// >>> with remanent.Store(directory) as store:
    /// ...     page = store.put("k", b"one")
    /// ...     page == store.put("k", memoryview(b"longer")), store[page]
    /// ...     store["a"] = numpy.ones((2, 3), "float32")
    /// ...     store.numpy("a").shape, store.info("a").metadata
    /// (True, b'longer')
    /// ((2, 3), {'dtype': 'F32', 'shape': [2, 3]})
    #[pyo3(signature = (key, data, *, place="host"))]
    fn put(
        &self,
        key: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<u64> {
        let py = key.py();
        let (key, place, data) = (self::key(key)?, self::place(py, place)?, Input::take_host(data)?);
        let layout = data.elements().layout()?;
        let put_layout = |batch: &mut WriteBatch, page: PageRef<'_>, info: Option<&PageInfo>| {
            info.map(PageLayout::from).unwrap_or_default().put(batch, page, layout.as_ref());
        };
        let put = |store: &Store| store.put_with(&key, data.as_slice(), place, put_layout);
        self.gate.call(py, put).map(|(page, _)| page.0)
    }

    fn __setitem__(&self, key: &Bound<'_, PyAny>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        self.put(key, data, "host").map(drop)
    }

    fn __delitem__(slf: PyRef<'_, Self>, page: &Bound<'_, PyAny>) -> PyResult<()> {
        let page = slf.as_super().find(page)?.page;
        slf.gate.call(slf.py(), |store| {
            let mut batch = store.batch();
            batch.delete(page);
            store.commit(batch).map(drop)
        })
    }

    /// Returns a new `Batch`. As a context manager, the batch is committed at the end of the block and
    /// discarded if the block raises an exception.
    ///
    /// :param ack: the acknowledgement that the commit waits for: "applied", "logged", "durable" or "archived". None uses
    ///     the store's `ack`.
    /// :param note: a remark of up to 64 KiB that is stored in the log.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.batch(note="first") as batch:
    /// ...         page = batch.create(4, key="p")
    /// ...         batch.write(page, 1, b"ab")
    /// ...     store["p"], batch.lsn
    /// (b'\x00ab\x00', 1)
    #[pyo3(signature = (*, ack=None, note=None))]
    fn batch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_ack)] ack: Option<&str>,
        #[pyo3(from_py_with = arguments::optional_note)] note: Option<&str>,
    ) -> PyResult<Batch> {
        self.gate.inspect(py, |_| Ok(()))?;
        let batch = Batch::new(self.gate.clone(), ack.map(self::ack).transpose()?);
        if let Some(note) = note {
            batch.note(py, note)?;
        }
        Ok(batch)
    }

    /// Logs `batch` and returns a `Ticket` without waiting for durability.
    ///
    /// :raises Error: the batch is rejected, for example with `ConflictError`, `UnknownPageError`,
    ///     `OutOfBoundsError`, `TakenError`, `OverBudgetError` or `DiskFullError`. Nothing changed.
    /// :raises PoisonedError: an earlier failure stopped the store.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     ticket = store.submit(store.batch(note="empty"))
    /// ...     ticket.wait(60.0, "durable")
    /// True
    fn submit(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::batch)] batch: Bound<'_, Batch>,
    ) -> PyResult<Ticket> {
        batch.get().0.submit(py, &self.gate)
    }

    /// Submits `batch` and waits for its acknowledgement, which is `ack`, or else that of the batch, or else
    /// that of the store. Returns a `Receipt`. Errors are those of `submit`.
    #[pyo3(signature = (batch, ack=None))]
    fn commit(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::batch)] batch: Bound<'_, Batch>,
        #[pyo3(from_py_with = arguments::optional_ack)] ack: Option<&str>,
    ) -> PyResult<Receipt> {
        let ack = ack.map(self::ack).transpose()?;
        batch.get().0.commit(py, &self.gate, ack).map(|ticket| Receipt(ticket.committed()))
    }

    /// Waits until batch `lsn` and all earlier batches survive a power cut. None waits for the newest batch.
    #[pyo3(signature = (lsn=None))]
    fn wait_durable(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_lsn)] lsn: Option<u64>,
    ) -> PyResult<()> {
        self.gate.call(py, |store| store.wait_durable(lsn.map_or_else(|| store.lsn(), Lsn)))
    }

    /// Moves `pages` to `place`. Pages already at `place` are unchanged.
    ///
    /// The pages move in one batch, or in several batches of 4,096 pages and 256 MiB each. With tiers, other
    /// pages are evicted if the place is full. Returns the Lsn of the last batch, or None if all pages were
    /// already at `place`.
    ///
    /// :param pages: an iterable of pages.
    /// :param place: "host", "pinned", "device:N" or "disk".
    /// :raises UnknownPageError: no page has one of the ids. Nothing moved.
    /// :raises UnknownKeyError: no page has one of the keys. Nothing moved.
    /// :raises OverBudgetError: the pages do not fit in the budget of `place`. Earlier batches stay moved.
    /// :raises LeasedError: a page is leased or pinned. Earlier batches stay moved.
    ///
    /// >>> with remanent.Store(directory, device="host") as store:
    /// ...     store["a"], store["b"] = b"one", b"two"
    /// ...     store.ensure(["a", "b"], "disk"), store.ensure(["a"], "disk")
    /// ...     store.info("a").place, store["a"]
    /// (3, None)
    /// ('disk', b'one')
    fn ensure(
        &self,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<Option<u64>> {
        let place = self::place(pages.py(), place)?;
        move_pages(&self.gate, pages, |store, pages| store.ensure(pages, place))
    }

    /// Starts moving `pages` to `place` in the background and returns a `Prefetch` immediately.
    ///
    /// The pages move a few at a time, in order, after the pages of earlier calls.
    ///
    /// :raises UnknownPageError: no page has one of the ids. Nothing moves.
    /// :raises UnknownKeyError: no page has one of the keys. Nothing moves. All other errors are raised by
    ///     `Prefetch.wait`.
    fn prefetch(
        &self,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<PyPrefetch> {
        let place = self::place(pages.py(), place)?;
        PyPrefetch::begin(pages.py(), &self.gate, pages, place)
    }

    /// Returns a `ReadAhead`, which iterates over `steps` and moves the pages of each step to `place` before
    /// their use.
    ///
    /// Exhaust the iterator, or close it as a context manager, before the store is closed.
    ///
    /// :param steps: an iterable of iterables of pages.
    /// :raises Error: a step's pages cannot be moved, for example with `UnknownKeyError`, `OverBudgetError`
    ///     or `LeasedError`. Raised by the iterator at that step.
    fn read_ahead(
        &self,
        steps: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<PyReadAhead> {
        let place = self::place(steps.py(), place)?;
        PyReadAhead::begin(steps.py(), &self.gate, steps, place)
    }

    /// Moves pages to the first of the store's tiers, in the same way as `ensure`.
    ///
    /// :raises InvalidError: the store was opened without tiers. Other errors are those of `ensure`.
    fn promote(&self, pages: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        move_pages(&self.gate, pages, Store::promote)
    }

    /// Moves each page from its tier to the next lower tier. Use this for pages that are not needed soon.
    ///
    /// :raises InvalidError: the store was opened without tiers. Other errors are those of `ensure`.
    ///
    /// >>> options = {"device": "host", "tiers": {"places": ["host", "disk"]}, "memory": {"budget": {"host": 4096}}}
    /// >>> with remanent.Store(directory, **options) as store:
    /// ...     for number in range(4):
    /// ...         store[f"{number}"] = bytes(2048)
    /// ...     store.demote(["3"])
    /// ...     store.info("3").place, len(store)
    /// ('disk', 4)
    fn demote(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        move_pages(&self.gate, pages, |store, pages| store.demote(pages).map(|()| None)).map(drop)
    }

    /// Returns a `LiveView` of the pages and the root at the newest batch. Later commits do not change the
    /// view. Close the view before the store.
    ///
    /// >>> store = remanent.Store(directory)
    /// >>> with store.view() as view:
    /// ...     store["k"] = b"new"
    /// ...     list(view), list(store)
    /// ([], ['k'])
    /// >>> store.close()
    fn view(&self, py: Python<'_>) -> PyResult<Py<PyLiveView>> {
        let live = py.detach(|| LiveSource::of(&self.gate)).or_raise_of(py, Some(&self.gate.path), STORE)?;
        let reader = Reader::new(Source::Live(live));
        Py::new(py, PyClassInitializer::from(reader).add_subclass(PyLiveView))
    }

    /// Returns a `Lease`, with which a page's current bytes can be read in place. Batches that change the
    /// page do not change these bytes. End the lease before closing the store.
    ///
    /// :param dtype: the element type, such as "float32" or "F32". None uses the dtype in the page's
    ///     metadata, or "uint8".
    /// :param shape: the length of each dimension in elements. None uses the shape in the page's metadata, or
    ///     one dimension.
    /// :raises UnknownPageError: no page has this id.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written.
    /// :raises ValueError: the page's length does not match `dtype` and `shape`.
    ///
    /// >>> with remanent.Store(directory, device="host") as store:
    /// ...     store["k"] = b"then"
    /// ...     with store.lease("k") as lease:
    /// ...         store["k"] = b"now!"
    /// ...         bytes(lease), memoryview(lease).readonly
    /// (b'then', True)
    #[pyo3(signature = (page, dtype=None, shape=None))]
    fn lease(
        slf: PyRef<'_, Self>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::optional_dtype)] dtype: Option<&str>,
        #[pyo3(from_py_with = arguments::shape)] shape: Option<Vec<usize>>,
    ) -> PyResult<PyLease> {
        let page = slf.as_super().find(page)?.page;
        PyLease::take(slf.py(), &slf.gate, page, dtype, shape)
    }

    /// Returns a `Pin`, which keeps the address of a page constant. Batches change the page in place. End the
    /// pin before closing the store.
    ///
    /// :raises UnknownPageError: no page has this id.
    /// :raises UnknownKeyError: no page has this key.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written.
    /// :raises LeasedError: the page is leased, or work on a stream of a lease may still read it.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"v"
    /// ...     with store.pin("k"), store.batch() as batch:
    /// ...         batch.write("k", 0, b"w")
    /// ...     store["k"]
    /// b'w'
    fn pin(slf: PyRef<'_, Self>, page: &Bound<'_, PyAny>) -> PyResult<PyPin> {
        let page = slf.as_super().find(page)?.page;
        PyPin::take(slf.py(), &slf.gate, page)
    }

    /// Returns a `WorkingCopy`, through which `Batch.capture` commits changes of `memory` to a page.
    ///
    /// :param memory: a writable, contiguous array or tensor with the length of the page. The memory must be on the
    ///     device of the store's pages, or in host memory if pages are on the host. The working copy keeps the memory
    ///     alive. The memory must not be freed by other means, such as `resize_` of a torch storage.
    /// :param width: the bytes per element: 1, 2, 4, 8 or 16. Changes are detected and logged by element.
    /// :param shadow: the reference with which the memory is compared. "page" uses the page itself, which
    ///     must be in memory. A place, such as "host", uses a copy of the page in that place. "digests" uses
    ///     16 bytes of host memory per 64 KiB; chunks that changed are then logged completely.
    /// :param load: whether to copy the page's bytes to `memory` now. If False, `memory` keeps its contents,
    ///     and the next capture commits them to the page.
    /// :raises UnknownPageError: no page has this id.
    /// :raises UnknownKeyError: no page has this key.
    /// :raises InvalidError: the dtype of the array differs from that of the page.
    /// :raises MemoryRefusedError: the memory has another length, is not a whole number of elements, or is on
    ///     another device.
    /// :raises DeviceError: `shadow` is "page" and the page is on disk.
    #[pyo3(signature = (page, memory, *, width=1, shadow="page", load=false))]
    fn working_copy(
        slf: PyRef<'_, Self>,
        page: &Bound<'_, PyAny>,
        memory: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::width)] width: usize,
        #[pyo3(from_py_with = arguments::shadow)] shadow: &str,
        #[pyo3(from_py_with = arguments::load)] load: bool,
    ) -> PyResult<PyWorkingCopy> {
        let info = slf.as_super().find(page)?;
        let (page, memory) = (info.page, Input::take_writable(memory)?);
        memory.elements().check_fit(&PageLayout::from(&info))?;
        PyWorkingCopy::make(slf.py(), &slf.gate, page, memory, (width, shadow), load)
    }

    /// Removes a page from the store and returns its memory as a `PageMemory`, for example for recovered
    /// weights that a model continues to use. After the call, no later open finds the page.
    ///
    /// If the page is in caller-owned memory (`Batch.create_in`), the memory stays with the caller.
    ///
    /// :raises UnknownPageError: no page has this id.
    /// :raises UnknownKeyError: no page has this key.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written. Nothing changed.
    /// :raises LeasedError: the page is leased or pinned. Nothing changed.
    /// :raises DeviceError: the page is on disk and has no memory. Nothing changed.
    ///
    /// >>> with remanent.Store(directory, device="host") as store:
    /// ...     store["w"] = b"weights"
    /// ...     store.release("w").read(), len(store)
    /// (b'weights', 0)
    fn release(slf: PyRef<'_, Self>, page: &Bound<'_, PyAny>) -> PyResult<PyPageMemory> {
        let page = slf.as_super().find(page)?.page;
        let bytes = slf.gate.call(slf.py(), |store| store.release(page))?;
        Ok(PyPageMemory::of(&slf.gate, bytes))
    }

    /// Starts to read ranges of many pages and returns a `ReadMany`, on which to wait. All ranges are as of
    /// one batch, which is the newest one submitted so far or a later one.
    ///
    /// :param pages: an iterable of pages, (page, offset) pairs and (page, offset, length) triples. Offsets
    ///     and lengths are in bytes.
    /// :raises UnknownPageError: no page has one of the ids.
    /// :raises UnknownKeyError: no page has one of the keys.
    /// :raises OutOfBoundsError: a range is not within its page.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written.
    /// :raises OutOfMemoryError: the bytes of all reads in use would exceed 256 MiB together.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["a"], store["b"] = b"remanent", b"pages"
    /// ...     store.read_many(["b", ("a", 2, 3)]).result().tolist()
    /// [b'pages', b'man']
    fn read_many(&self, pages: &Bound<'_, PyAny>) -> PyResult<PyReadMany> {
        let py = pages.py();
        PyReadMany::begin(py, &self.gate, FoundRanges::take(&self.gate, pages)?)
    }

    /// Reads ranges of many pages, as of one batch, into caller-owned buffers. Returns the Lsn of the batch.
    ///
    /// :param pages: as for `read_many`.
    /// :param outs: an iterable of contiguous, writable buffers in host memory, one per range and of the same
    ///     length. If pages are on a GPU, tensors on that GPU are also accepted, which must not overlap.
    /// :raises BufferError: a buffer is not writable or contiguous. Nothing was read.
    /// :raises ValueError: the number or lengths of the buffers do not match the ranges. Nothing was read.
    ///     Other errors are those of `read_many`. After an error, host buffers are unchanged, but GPU buffers
    ///     may have been filled.
    ///
    /// >>> a, b = bytearray(8), bytearray(2)
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["a"], store["b"] = b"remanent", b"pages"
    /// ...     store.read_many_into(["a", ("b", 0, 2)], [a, b]), a, b
    /// (2, bytearray(b'remanent'), bytearray(b'pa'))
    fn read_many_into(&self, pages: &Bound<'_, PyAny>, outs: &Bound<'_, PyAny>) -> PyResult<u64> {
        fill(pages.py(), &self.gate, FoundRanges::take(&self.gate, pages)?, outs)
    }

    /// Returns a `ChangeStream` of the changes of each batch from now on. A batch is reported once it is
    /// applied. The stream is an iterator and an asynchronous iterator.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.changes() as changes:
    /// ...         store["k"] = b"v"
    /// ...         changes.next(timeout=60), changes.next(timeout=0)
    /// (AppliedBatch(lsn=1, pages=1), None)
    fn changes(&self, py: Python<'_>) -> PyResult<PyChangeStream> {
        PyChangeStream::begin(py, &self.gate)
    }

    /// Returns the changes of a page's bytes up to the newest state, oldest first; see `View.blame`.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     for value in (b"good", b"bad!"):
    /// ...         store["k"] = value
    /// ...     [(change.lsn, change.after) for change in store.blame("k", 0, 4)]
    /// [(1, b'good'), (2, b'bad!')]
    #[pyo3(signature = (page, offset, length=None))]
    fn blame(
        &self,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::optional_length)] length: Option<u64>,
    ) -> PyResult<Vec<PyValueChange>> {
        history::blame(&self.gate, page, offset, length)
    }

    /// Returns the Lsn of the first bad state of this store; see `remanent.bisect`. If `bad` is None, the
    /// search ends at the newest state.
    ///
    /// >>> with remanent.Store(directory, retention={"log_kept": 1 << 30}) as store:
    /// ...     for step in range(20):
    /// ...         store["loss"] = b"nan" if step >= 13 else b"0.5"
    /// ...     store.bisect(lambda view: view["loss"] != b"nan", good=1)
    /// 14
    #[pyo3(signature = (is_good, *, good, bad=None))]
    fn bisect<'py>(
        &self,
        is_good: &Bound<'py, PyAny>,
        good: &Bound<'py, PyAny>,
        bad: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        history::bisect(&self.gate, is_good, good, bad)
    }

    /// Takes a snapshot while commits continue, and removes snapshots and files that are no longer kept.
    /// Ctrl-C takes effect after the call.
    ///
    /// :param name: a name of 1 to 64 bytes, which keeps the snapshot until the name is passed to `prune` as `give_up`.
    ///     A named snapshot is always exact.
    /// :param exact: whether the snapshot contains the state of a single batch, so that the state can be
    ///     restored without the log.
    /// :param verify: whether to wait until the snapshot was read back and verified.
    /// :raises TakenError: another snapshot has this name. Nothing changed.
    /// :raises DiskFullError: the disk has no space for the snapshot. Nothing changed.
    /// :raises OutOfMemoryError: there is not enough memory for the snapshot. Nothing changed.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"v"
    /// ...     store.snapshot("before tuning").name, [info.end for info in store.snapshots()]
    /// ('before tuning', [1])
    #[pyo3(signature = (name=None, *, exact=false, verify=true))]
    fn snapshot(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_name)] name: Option<String>,
        #[pyo3(from_py_with = arguments::exact)] exact: bool,
        #[pyo3(from_py_with = arguments::verify)] verify: bool,
    ) -> PyResult<SnapshotInfo> {
        history::snapshot(py, &self.gate, name, exact, verify)
    }

    /// Reads back and verifies the images that batches have written since the last snapshot. Returns the total length
    /// of the verified pages in bytes. Ctrl-C takes effect after the call.
    ///
    /// Long batches write such images for new pages, and for pages on disk that they write completely. The
    /// next snapshot verifies them before it names them. A caller that commits many batches before that
    /// snapshot can do a part of this work earlier.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.batch() as batch:
    /// ...         _ = batch.create(bytes(20 << 20), place="disk")
    /// ...     store.verify_pending_images()
    /// 20971520
    fn verify_pending_images(&self, py: Python<'_>) -> PyResult<u64> {
        self.gate.call(py, |store| store.verify_pending_images())
    }

    /// Returns the kept snapshots, oldest first.
    fn snapshots(&self, py: Python<'_>) -> PyResult<Vec<SnapshotInfo>> {
        self.gate.inspect(py, |store| Ok(store.snapshots().iter().map(SnapshotInfo::from).collect()))
    }

    /// Waits until the archive keeps a named snapshot. Returns False if this takes more than `timeout` seconds.
    /// From then on, a store that is restored from the archive contains the snapshot, until its name is given up.
    ///
    /// :param snapshot: the number of the snapshot, or its `SnapshotInfo`.
    /// :raises NoStateError: the snapshot is not kept, or was removed before it was archived.
    /// :raises ArchiveError: the store has no archive, the archive has ended, or the snapshot has no name or
    ///     cannot be archived.
    ///
    /// >>> import pathlib
    /// >>> folder = pathlib.Path(directory + "-archive")
    /// >>> folder.mkdir()
    /// >>> with remanent.Store(directory, archive={"url": folder.as_uri()}) as store:
    /// ...     store["k"] = b"v"
    /// ...     store.wait_archived(store.snapshot("before tuning"))
    /// True
    #[pyo3(signature = (snapshot, timeout=None))]
    fn wait_archived(
        &self,
        py: Python<'_>,
        snapshot: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<bool> {
        history::wait_archived(py, &self.gate, snapshot_id(snapshot)?, seconds(timeout)?)
    }

    /// Restores all pages and the root to an earlier state. The restore is one more batch, whose Lsn is
    /// returned.
    ///
    /// :param at: the state: an Lsn, "lsn:N", "snapshot:N", the name of a snapshot or a `SnapshotInfo`. Write
    ///     a name that has one of the other forms as "name:S".
    /// :raises NoStateError: the state is not retained. Nothing changed.
    /// :raises LeasedError: a page is leased or pinned. Nothing changed.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"good"
    /// ...     store["k"] = b"bad!"
    /// ...     store.restore("lsn:1"), store["k"]
    /// (3, b'good')
    fn restore(&self, py: Python<'_>, at: &Bound<'_, PyAny>) -> PyResult<u64> {
        history::restore(py, &self.gate, &state_point(at)?)
    }

    /// Restores all pages and the root to the state at the end of a kept snapshot. Does the same as `restore`
    /// with the snapshot, and returns the Lsn of the restoring batch.
    ///
    /// :param snapshot: the number of the snapshot, or its `SnapshotInfo`.
    /// :raises NoStateError: the snapshot is not kept. Nothing changed.
    /// :raises LeasedError: a page is leased or pinned. Nothing changed.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"good"
    /// ...     snapshot = store.snapshot()
    /// ...     store["k"] = b"bad!"
    /// ...     store.restore_from_snapshot(snapshot.id), store["k"]
    /// (3, b'good')
    fn restore_from_snapshot(&self, py: Python<'_>, snapshot: &Bound<'_, PyAny>) -> PyResult<u64> {
        history::restore(py, &self.gate, &snapshot_point(snapshot)?)
    }

    /// Creates a store at `path` whose history begins at a state of this store, and returns the new store's
    /// id. Images are shared, not copied.
    ///
    /// :param at: the state, as for `restore`.
    /// :raises NoStateError: the state is not retained. No store was created.
    /// :raises ForeignDirectoryError: `path` is not empty. No store was created.
    /// :raises DiskFullError: the disk has no space for the new store. No store was created.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"v"
    /// ...     identity = store.fork(directory + "-fork", store.lsn)
    /// >>> remanent.View(directory + "-fork")["k"]
    /// b'v'
    fn fork(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::path)] path: PathBuf,
        at: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        history::fork(py, &self.gate, &path, at)
    }

    /// Removes the snapshots and files that no rule keeps, and returns a `Pruned`. For a rule that is None,
    /// the store's own rule is used.
    ///
    /// :param give_up: names to remove, which then no longer keep their snapshots.
    /// :param names_only: whether to remove only the snapshots named in `give_up`. The newest snapshot is
    ///     always kept.
    /// :param dry_run: whether to return what would be removed, without removing it.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     first, second = store.snapshot("first"), store.snapshot("second")
    /// ...     [info.name for info in store.prune(give_up=["first"], names_only=True).snapshots]
    /// ['first']
    #[pyo3(signature = (*, snapshots_kept=None, snapshots_kept_for=None, log_kept=None, give_up=Vec::new(),
        names_only=false, dry_run=false),
        text_signature = "($self, *, snapshots_kept=None, snapshots_kept_for=None, log_kept=None, give_up=(), \
        names_only=False, dry_run=False)")]
    #[allow(clippy::too_many_arguments, reason = "each is a rule, given by its name")]
    fn prune(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_snapshots_kept)] snapshots_kept: Option<usize>,
        #[pyo3(from_py_with = arguments::optional_snapshots_kept_for)] snapshots_kept_for: Option<f64>,
        #[pyo3(from_py_with = arguments::optional_log_kept)] log_kept: Option<u64>,
        #[pyo3(from_py_with = arguments::give_up)] give_up: Vec<String>,
        #[pyo3(from_py_with = arguments::names_only)] names_only: bool,
        #[pyo3(from_py_with = arguments::dry_run)] dry_run: bool,
    ) -> PyResult<Pruned> {
        let age = seconds(snapshots_kept_for)?;
        history::prune(py, &self.gate, dry_run, |store| {
            retention(store, snapshots_kept, age, log_kept, &give_up, names_only)
        })
    }

    /// Compares two pages of equal length element by element. Returns the number of elements that differ, and
    /// the index of the first one or None.
    ///
    /// :param width: the bytes per element: 1, 2, 4, 8 or 16.
    /// :raises InvalidError: the pages have different lengths.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["a"], store["b"] = b"weights, before", b"weights, behind"
    /// ...     store.compare("a", "b")
    /// (4, 11)
    #[pyo3(signature = (left, right, *, width=1))]
    fn compare(
        slf: PyRef<'_, Self>,
        left: &Bound<'_, PyAny>,
        right: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::width)] width: usize,
    ) -> PyResult<(u64, Option<u64>)> {
        let reader = slf.as_super();
        let (left, right, width) = (reader.find(left)?.page, reader.find(right)?.page, self::width(width)?);
        let compared = slf.gate.call(slf.py(), |store| store.compare(left, right, width))?;
        Ok((compared.differing, compared.first))
    }

    /// Reads and verifies all files that the store needs, and repairs damage from memory. Returns a list of
    /// descriptions of the damage that was found.
    fn scrub(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let report = self.gate.call(py, |store| store.scrub())?;
        Ok(report.damage.iter().map(ToString::to_string).collect())
    }

    /// Checks that page memory matches the committed batches. Returns the pages that do not match, by key or
    /// id.
    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let audit = self.gate.call(py, |store| store.audit())?;
        let list = PyList::empty(py);
        for changed in &audit.changed {
            match &changed.key {
                Some(key) => list.append(key_to_py(py, key))?,
                None => list.append(changed.page.0)?,
            }
        }
        Ok(list)
    }

    /// Waits until all pages are loaded. Returns False if this takes more than `timeout` seconds.
    ///
    /// :param progress: False disables the progress bar. None shows it for long waits if standard error is a
    ///     terminal and tqdm is installed.
    #[pyo3(signature = (timeout=None, *, progress=None))]
    fn wait_loaded(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
        #[pyo3(from_py_with = arguments::progress)] progress: Option<bool>,
    ) -> PyResult<bool> {
        wait_loaded(py, &self.gate, seconds(timeout)?, progress)
    }

    /// Releases memory that no page uses any more. Returns the number of bytes that were returned to the
    /// driver.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.gate.call(py, |store| store.trim())
    }

    /// Makes all batches durable, seals the log and releases the directory. Does nothing if the store is
    /// already closed.
    ///
    /// :raises InUseError: leases, pins or views still use the store. The store stays open.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.gate.close(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (error, traceback);
        match self.gate.close(py) {
            // Report the exception of the block and not this error. The frames of that exception may hold leases.
            Err(_) if kind.is_some() => Ok(()),
            closed => closed,
        }
    }

    fn __repr__(&self) -> String {
        let state = if self.gate.is_closed() { ", closed" } else { "" };
        format!("Store({:?}{state})", self.gate.path)
    }
}
