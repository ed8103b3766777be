//! An open store.
//!
//! Its methods stand in groups, each with the room that does the work:
//!
//! | methods | room |
//! |---|---|
//! | `Store`, `path`, `id`, `closed`, `recovered`, `stats` | `options`, `stats` |
//! | `put`, `batch`, `submit`, `commit`, `wait_durable` | `batch`, `pending_batch`, `ticket` |
//! | `ensure`, `promote`, `demote`; `prefetch`, `read_ahead` | `placement`; `ahead` |
//! | `view`, `lease`, `pin`, `working_copy`, `release` | those of their names; `page_memory` |
//! | `read_many`, `read_many_into`; `changes` | `read_many`; `changes` |
//! | `blame`, `bisect`, `snapshot`, `snapshots`, `restore`, `fork`, `prune` | `history` |
//! | `compare`, `scrub`, `audit`, `wait_loaded`, `trim` | `loading`, and the engine |
//! | `close` | `gate` |
//!
//! What reads pages and root is `reader`'s.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
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
use crate::options::{OpenKeywords, ack, open, place, width};
use crate::page_memory::PyPageMemory;
use crate::page_name::key;
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

/// A store directory, open for reading and writing: pages, root, log, snapshots.
///
/// One writer at a time; threads share the object. As a context manager it closes at the end. Lengths are in
/// bytes, times in seconds.
///
/// :param path: the directory; made, with those above it, if it is missing or empty and `create` allows it.
/// :param ack: what commits wait for: "applied", "logged" (survives the death of the process), "durable" (a
///     power cut).
/// :param device: "auto", "host" or "cuda:N"; `slots` binds "device:N" to one of several.
/// :param log_io: "mapped", "buffered" or "direct"; None chooses. `image_io` likewise for images of pages.
/// :param budget: bytes by place, such as `{"host": 1 << 30}`; a place that is not named has no limit.
/// :param tiers: an order of places, such as `["device:0", "pinned", "disk"]`. Where one is full, pages that
///     are not used go to the next one by themselves. `eviction` says which leave first: "s3-fifo" or "lru".
/// :param identity: the caller's own description of the store; given again, it must be the same.
/// :param layout_fingerprint: 32 bytes that say on what the meaning of pages depends; likewise.
/// :param snapshots_kept: how many of the newest snapshots are kept; `snapshots_kept_for` (seconds) and
///     `log_kept` (bytes) keep more.
/// :param page_load: "eager", or "on_demand": pages are loaded when they are asked for.
/// :param snapshot_log_bytes: a snapshot is taken by itself after so long a log; None: not for this reason.
///     `snapshot_interval` (seconds) likewise; `scrub_interval` for scrubs.
/// :param page_memory: a callable that is asked for each page that has bytes, by its PageInfo, as the open
///     finds it: for memory as long as the page, in the same place, to put the page into, such as a tensor
///     of a model; None has the store take its own. No work may be under way there. The page lives in it as
///     after `Batch.create_in`. It is called by other threads, and what it raises ends the open.
/// :raises LockedError: another process has it open. NoStoreError, ForeignDirectoryError, MismatchError,
///     InvalidError, DeviceError, OverBudgetError; DamagedError if bytes under a durable mark are not what
///     they were.
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

#[pymethods]
impl PyStore {
    #[new]
    #[pyo3(signature = (path, *, create=true, ack="logged", device="auto", slots=None, log_io=None,
        image_io="buffered", segment_len=16777216, reserve_bytes=None, spare_bytes=None, budget=None, tiers=None,
        eviction="s3-fifo", identity=None, layout_fingerprint=None, snapshots_kept=2, snapshots_kept_for=0.0, log_kept=0, compression=true,
        page_load="eager", snapshot_log_bytes=Some(268435456), snapshot_interval=Some(60.0),
        snapshot_bytes_per_second=None, scrub_interval=Some(86400.0), scrub_bytes_per_second=Some(67108864),
        page_memory=None))]
    #[allow(clippy::too_many_arguments, reason = "each is an option, given by its name")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::path)] path: PathBuf,
        #[pyo3(from_py_with = arguments::create)] create: bool,
        #[pyo3(from_py_with = arguments::ack)] ack: &str,
        #[pyo3(from_py_with = arguments::device)] device: &str,
        #[pyo3(from_py_with = arguments::slots)] slots: Option<Vec<String>>,
        #[pyo3(from_py_with = arguments::log_io)] log_io: Option<String>,
        #[pyo3(from_py_with = arguments::image_io)] image_io: &str,
        #[pyo3(from_py_with = arguments::segment_len)] segment_len: u64,
        #[pyo3(from_py_with = arguments::reserve_bytes)] reserve_bytes: Option<u64>,
        #[pyo3(from_py_with = arguments::spare_bytes)] spare_bytes: Option<u64>,
        #[pyo3(from_py_with = arguments::budget)] budget: Option<Bound<'_, PyDict>>,
        #[pyo3(from_py_with = arguments::tiers)] tiers: Option<Vec<String>>,
        #[pyo3(from_py_with = arguments::eviction)] eviction: &str,
        #[pyo3(from_py_with = arguments::identity)] identity: Option<Vec<u8>>,
        #[pyo3(from_py_with = arguments::layout_fingerprint)] layout_fingerprint: Option<[u8; 32]>,
        #[pyo3(from_py_with = arguments::snapshots_kept)] snapshots_kept: usize,
        #[pyo3(from_py_with = arguments::snapshots_kept_for)] snapshots_kept_for: f64,
        #[pyo3(from_py_with = arguments::log_kept)] log_kept: u64,
        #[pyo3(from_py_with = arguments::compression)] compression: bool,
        #[pyo3(from_py_with = arguments::page_load)] page_load: &str,
        #[pyo3(from_py_with = arguments::snapshot_log_bytes)] snapshot_log_bytes: Option<u64>,
        #[pyo3(from_py_with = arguments::snapshot_interval)] snapshot_interval: Option<f64>,
        #[pyo3(from_py_with = arguments::snapshot_bytes_per_second)] snapshot_bytes_per_second: Option<u64>,
        #[pyo3(from_py_with = arguments::scrub_interval)] scrub_interval: Option<f64>,
        #[pyo3(from_py_with = arguments::scrub_bytes_per_second)] scrub_bytes_per_second: Option<u64>,
        page_memory: Option<Py<PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let given = OpenKeywords {
            create,
            ack: ack.to_owned(),
            device: device.to_owned(),
            slots,
            log_io,
            image_io: image_io.to_owned(),
            segment_len,
            reserve_bytes,
            spare_bytes,
            budget,
            tiers,
            eviction: eviction.to_owned(),
            identity,
            layout_fingerprint,
            snapshots_kept,
            snapshots_kept_for,
            log_kept,
            compression,
            page_load: page_load.to_owned(),
            snapshot_log_bytes,
            snapshot_interval,
            snapshot_bytes_per_second,
            scrub_interval,
            scrub_bytes_per_second,
            page_memory,
        };
        let gate = open(py, &path, given)?;
        let reader = Reader::new(Source::Store(gate.clone()));
        Ok(PyClassInitializer::from(reader).add_subclass(Self { gate }))
    }

    /// The store's directory, as it was given.
    #[getter]
    fn path(&self) -> &str {
        &self.gate.path
    }

    /// Where the store's directory is now, as an absolute path: it may have been moved since the store was
    /// opened.
    ///
    /// :raises NoStoreError: if it was removed.
    #[getter]
    fn directory(&self, py: Python<'_>) -> PyResult<OsString> {
        self.gate.look(py, |store| Ok(here(store)?.into_os_string()))
    }

    /// The store's identity, as hexadecimal text, drawn at random when it was created.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        self.gate.look(py, |store| Ok(store.id().to_string()))
    }

    /// Whether the store is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// What the open found and did: a read-only dict.
    ///
    /// >>> with remanent.Store(directory, device="host") as store:
    /// ...     store.recovered["created"], store.recovered["lsn"], store.recovered["device"]
    /// (True, 0, 'host')
    #[getter]
    fn recovered<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze(report_to_py(py, self.gate.look(py, |store| Ok(store.recovered().clone()))?)?)
    }

    /// Counts and sizes since the store was opened; bytes where nothing else is said.
    ///
    /// "on_disk": pages in the place "disk", and their bytes. "pending_bytes": host memory that holds what
    /// batches wrote to these since their newest images. "places": page memory by place; "tiers": what
    /// `ensure` asked for, and what left to make room; "moves": pages that the store moved; "transfers",
    /// "lanes": what the device's lists moved, and how long they were waited for.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"abc"
    /// ...     stats = store.stats()
    /// >>> stats["places"]["host"]["used"], stats["places"]["host"]["allocations"], stats["moves"]
    /// (3, 1, [])
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_to_py(py, &self.gate.look(py, |store| Ok(store.stats()))?)
    }

    /// Sets the contents of the page with this key, in one batch; creates it if there is none. Returns its
    /// id.
    ///
    /// Of an array the metadata take `dtype` and `shape`, so that `numpy` and `array` return it as it was.
    /// Plain bytes remove these entries. `store[key] = data` does the same.
    ///
    /// :param data: contiguous host memory: bytes, a NumPy array, a tensor. :param place: where a new page
    ///     lives.
    /// :raises InvalidTypeError: the elements have no name in metadata, as dates and structures of NumPy.
    ///     Nothing changed.
    /// :raises OverBudgetError, DiskFullError: nothing changed. InvalidError for a key that is not 1 to 64
    ///     bytes long.
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
        let put_layout = |batch: &mut WriteBatch, page, info: Option<&PageInfo>| {
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

    /// A batch: a context manager that commits at the end, and does nothing on an exception.
    ///
    /// :param ack: what its commit waits for; the store's `ack` if None. :param note: a remark of up to 64
    ///     KiB.
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
        self.gate.look(py, |_| Ok(()))?;
        let batch = Batch::new(self.gate.clone(), ack.map(self::ack).transpose()?);
        if let Some(note) = note {
            batch.note(py, note)?;
        }
        Ok(batch)
    }

    /// Logs a batch, and returns at once with what one waits on.
    ///
    /// :raises ConflictError, UnknownPageError, OutOfBoundsError, TakenError, OverBudgetError, DiskFullError:
    ///     nothing changed. PoisonedError after a failure.
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

    /// Submits a batch and waits for an acknowledgement: the one named, else the batch's, else the store's.
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

    /// Waits until batch `lsn`, and every one before it, survives a power cut.
    #[pyo3(signature = (lsn=None))]
    fn wait_durable(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_lsn)] lsn: Option<u64>,
    ) -> PyResult<()> {
        self.gate.call(py, |store| store.wait_durable(lsn.map_or_else(|| store.lsn(), Lsn)))
    }

    /// Lets all these pages live in one place. Those that are not there move, in one batch, or in several of
    /// 4,096 pages and 256 MiB where there are more; where there are tiers, others leave if there is no room.
    /// Returns the number of the last batch, None if all were there.
    ///
    /// :param pages: an iterable of pages. :param place: "host", "pinned", "device:N" or "disk".
    /// :raises UnknownPageError, UnknownKeyError: nothing moved.
    /// :raises OverBudgetError, LeasedError: the batch that was refused moved nothing.
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

    /// As `ensure`, ahead of the caller and by another thread: returns at once. The pages move some at a
    /// time, in the order given, after those of earlier calls.
    ///
    /// :raises UnknownPageError, UnknownKeyError. All else is told by `Prefetch.wait`.
    fn prefetch(
        &self,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<PyPrefetch> {
        let place = self::place(pages.py(), place)?;
        PyPrefetch::begin(pages.py(), &self.gate, pages, place)
    }

    /// Goes through `steps`, an iterable of iterables of pages, whose pages come to a place ahead of their
    /// use. End it, by going to its end or as a context manager, before the store is closed.
    ///
    /// :raises UnknownPageError, UnknownKeyError, OverBudgetError, LeasedError, DamagedError: by the step.
    fn read_ahead(
        &self,
        steps: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<PyReadAhead> {
        let place = self::place(steps.py(), place)?;
        PyReadAhead::begin(steps.py(), &self.gate, steps, place)
    }

    /// Moves pages to the first of the store's tiers, as `ensure` does.
    ///
    /// :raises InvalidError: the store was opened without tiers. As for `ensure`.
    fn promote(&self, pages: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        move_pages(&self.gate, pages, Store::promote)
    }

    /// Moves pages to the next of the store's tiers, each from where it is: for a caller that knows that it
    /// will not need them soon.
    ///
    /// :raises InvalidError: the store was opened without tiers. As for `ensure`.
    ///
    /// >>> options = {"device": "host", "tiers": ["host", "disk"], "budget": {"host": 4096}}
    /// >>> with remanent.Store(directory, **options) as store:
    /// ...     for number in range(4):
    /// ...         store[f"{number}"] = bytes(2048)
    /// ...     store.demote(["3"])
    /// ...     store.info("3").place, len(store)
    /// ('disk', 4)
    fn demote(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        move_pages(&self.gate, pages, |store, pages| store.demote(pages).map(|()| None)).map(drop)
    }

    /// Pages and root as they are now; they stay so, whatever is committed. Close it before the store.
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

    /// Leases a page: its bytes are read where they lie, as they are now, while batches go on. End it before
    /// the store.
    ///
    /// :param dtype: the kind of elements, as "float32" or "F32"; that of the page's metadata if None, else
    ///     "uint8".
    /// :param shape: in elements; that of the page's metadata if None, else one dimension.
    /// :raises UnknownPageError, DamagedError; ValueError if the page is not as long as that.
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

    /// Pins a page: it keeps its address, and batches change it there. End it before the store.
    ///
    /// :raises UnknownPageError, UnknownKeyError, DamagedError; LeasedError while the page is leased, or
    ///     work on a lease's streams may still read it.
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

    /// Makes memory a working copy of a page: an array, a tensor, on the device that holds pages or, where
    /// that is the host, there. `Batch.capture` takes what changed in it to the page.
    ///
    /// :param memory: writable, contiguous, as long as the page. It is held until the copy is gone, and must
    ///     not be freed underneath, as by `resize_` of a torch storage.
    /// :param width: bytes of an element, 1, 2, 4, 8 or 16: an element changes as a whole.
    /// :param shadow: what it is compared with. "page": the page itself, which must lie in memory. A place,
    ///     such as "host": a copy there, as long as the page. "digests": 16 bytes of host memory for each 64
    ///     KiB, which are logged whole where they changed.
    /// :param load: whether the memory takes the page's bytes now. Else it stays as it is, and the page takes
    ///     its bytes with the next capture.
    /// :raises UnknownPageError, UnknownKeyError; InvalidError for an array of another dtype than the page's;
    ///     MemoryRefusedError for memory of another length, no whole
    ///     number of elements, or of another device; PlaceUnavailableError for "page" of a page on disk.
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

    /// Takes a page out of the store, and gives its memory to the caller: for recovered weights that go on as
    /// a model's. The page is gone from every later open when this returns.
    ///
    /// A page that lives in a tensor of the caller's (`Batch.create_in`) leaves that to the caller.
    ///
    /// :raises UnknownPageError, UnknownKeyError, DamagedError; LeasedError while it is leased or pinned;
    ///     DeviceError if it is on disk, and has no memory. Nothing changed.
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

    /// Begins to read ranges of many pages, all as of one batch: the newest one submitted so far, or a later
    /// one. Wait for what it returns, or `await` it.
    ///
    /// :param pages: an iterable of pages, of (page, offset) and of (page, offset, length), in bytes.
    /// :raises UnknownPageError, UnknownKeyError, OutOfBoundsError, DamagedError; OutOfMemoryError where all
    ///     such reads whose bytes are held would take more than 256 MiB together.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["a"], store["b"] = b"remanent", b"pages"
    /// ...     store.read_many(["b", ("a", 2, 3)]).result().tolist()
    /// [b'pages', b'man']
    fn read_many(&self, pages: &Bound<'_, PyAny>) -> PyResult<PyReadMany> {
        let py = pages.py();
        PyReadMany::begin(py, &self.gate, FoundRanges::take(&self.gate, pages)?)
    }

    /// Reads ranges of many pages, all as of one batch, into buffers of the caller's. Returns the batch's
    /// number.
    ///
    /// :param pages: as for `read_many`. :param outs: an iterable of as many contiguous, writable buffers of
    ///     the host, each exactly as long as its range; or, where pages live on a GPU, of tensors there, of
    ///     which no two overlap.
    /// :raises BufferError, ValueError: nothing was read. As for `read_many`. If the call fails, buffers of
    ///     the host are as they were, and any of a GPU may be filled.
    ///
    /// >>> a, b = bytearray(8), bytearray(2)
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["a"], store["b"] = b"remanent", b"pages"
    /// ...     store.read_many_into(["a", ("b", 0, 2)], [a, b]), a, b
    /// (2, bytearray(b'remanent'), bytearray(b'pa'))
    fn read_many_into(&self, pages: &Bound<'_, PyAny>, outs: &Bound<'_, PyAny>) -> PyResult<u64> {
        fill(pages.py(), &self.gate, FoundRanges::take(&self.gate, pages)?, outs)
    }

    /// What each batch changes from now on, told once it is applied: an iterator, also an asynchronous one.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.changes() as changes:
    /// ...         store["k"] = b"v"
    /// ...         changes.next(timeout=60), changes.next(timeout=0)
    /// (AppliedBatch(lsn=1, pages=1), None)
    fn changes(&self, py: Python<'_>) -> PyResult<PyChangeStream> {
        PyChangeStream::begin(py, &self.gate)
    }

    /// The changes of bytes of a page up to now, the oldest first: as `View.blame` of the newest state.
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

    /// The first bad version of this store: as `remanent.bisect`, up to the newest state if `bad` is None.
    ///
    /// >>> with remanent.Store(directory, log_kept=1 << 30) as store:
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

    /// Takes a snapshot while commits go on, and removes what is not kept any more.
    ///
    /// :param name: 1 to 64 bytes; keeps the snapshot until `prune` gives the name up, and makes it exact.
    /// :param exact: the state of one batch, so that it needs no log. :param verify: whether the call waits
    ///     until it was read back. Ctrl-C takes effect after the call.
    /// :raises TakenError, DiskFullError, OutOfMemoryError: nothing changed.
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

    /// Reads the images back that long batches wrote ahead since the last snapshot, of new pages and of pages
    /// on disk that were written whole; returns how many bytes of pages. The next snapshot does so before it
    /// names them: a caller that has many batches to commit before it has that done meanwhile. Ctrl-C takes
    /// effect after the call.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.batch() as batch:
    /// ...         _ = batch.create(bytes(20 << 20), place="disk")
    /// ...     store.prove_written_ahead()
    /// 20971520
    fn prove_written_ahead(&self, py: Python<'_>) -> PyResult<u64> {
        self.gate.call(py, |store| store.prove_written_ahead())
    }

    /// The snapshots kept, the oldest first.
    fn snapshots(&self, py: Python<'_>) -> PyResult<Vec<SnapshotInfo>> {
        self.gate.look(py, |store| Ok(store.snapshots().iter().map(SnapshotInfo::from).collect()))
    }

    /// Takes all pages and the root back to an earlier state, in one more batch. Returns its Lsn.
    ///
    /// :param at: an Lsn, "lsn:N", "snapshot:N", the name of a snapshot or a SnapshotInfo. A name that looks
    ///     like one of the others is written "name:S".
    /// :raises NoStateError: the state is not kept. LeasedError while any page is leased. Nothing changed.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"good"
    /// ...     store["k"] = b"bad!"
    /// ...     store.restore("lsn:1"), store["k"]
    /// (3, b'good')
    fn restore(&self, py: Python<'_>, at: &Bound<'_, PyAny>) -> PyResult<u64> {
        history::restore(py, &self.gate, at)
    }

    /// Makes a new store in `path` that begins at a state of this one. Returns its id. Images are shared, not
    /// copied.
    ///
    /// :param at: as for `restore`. :raises NoStateError, ForeignDirectoryError, DiskFullError.
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

    /// Removes what these rules do not keep; rules that are not given are the store's own.
    ///
    /// :param give_up: names that keep a snapshot no longer. :param names_only: only those go; the newest
    ///     snapshot stays in any case.
    /// :param dry_run: says what would go, and removes nothing.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     first, second = store.snapshot("first"), store.snapshot("second")
    /// ...     [info.name for info in store.prune(give_up=["first"], names_only=True).snapshots]
    /// ['first']
    #[pyo3(signature = (*, snapshots_kept=None, snapshots_kept_for=None, log_kept=None, give_up=Vec::new(),
        names_only=false, dry_run=false))]
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

    /// Compares two pages of equal length, element by element. Returns how many differ, and the first that
    /// does.
    ///
    /// :param width: bytes of an element: 1, 2, 4, 8 or 16. :raises InvalidError if the lengths differ.
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

    /// Reads all that lies on disk and is needed, and mends from memory what is damaged. Returns the damage.
    fn scrub(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let report = self.gate.call(py, |store| store.scrub())?;
        Ok(report.damage.iter().map(ToString::to_string).collect())
    }

    /// Looks whether memory is what the batches made it. Returns the pages that are not, by key or id.
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

    /// Waits until all pages are loaded, up to `timeout` seconds; says whether they are.
    ///
    /// :param progress: False draws no bar; None draws one for long work if standard error is a terminal and
    ///     tqdm is installed.
    #[pyo3(signature = (timeout=None, *, progress=None))]
    fn wait_loaded(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
        #[pyo3(from_py_with = arguments::progress)] progress: Option<bool>,
    ) -> PyResult<bool> {
        wait_loaded(py, &self.gate, seconds(timeout)?, progress)
    }

    /// Gives back memory that no page uses any more. Returns the bytes that went back to the driver.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.gate.call(py, |store| store.trim())
    }

    /// Makes everything durable, seals the log and releases the directory. Closing twice is fine.
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
            // The block's own exception says more; its frames may hold leases.
            Err(_) if kind.is_some() => Ok(()),
            closed => closed,
        }
    }

    fn __repr__(&self) -> String {
        let state = if self.gate.is_closed() { ", closed" } else { "" };
        format!("Store({:?}{state})", self.gate.path)
    }
}
