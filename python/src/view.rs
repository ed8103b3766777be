//! `LiveView`, an open store as of one batch; `View`, an earlier state; and `KeptStates`, which opens many.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::history::KeptStates;
use remanent::{Lsn, Store, View};

use crate::arguments;
use crate::blame::{PyValueChange, blame};
use crate::errors::{OrRaise, VIEW};
use crate::load_pages::load_pages;
use crate::options::viewed_archive;
use crate::page_name::{PageName, page_names, state_point};
use crate::reader::Reader;
use crate::source::{PastSource, Source};

/// The pages and the root of an open store as of one batch. Created by `Store.view`. The store cannot be
/// closed before the view.
///
/// The view keeps no contents of pages. Reading a page that has changed since the view was created raises
/// `OvertakenError`.
///
/// >>> store = remanent.Store(directory)
/// >>> store["k"] = b"old"
/// >>> with store.view() as view:
/// ...     store["k"] = b"new"
/// ...     try:
/// ...         view["k"]
/// ...     except remanent.OvertakenError:
/// ...         "changed", view.info("k").lsn, store.info("k").lsn
/// ('changed', 1, 2)
/// >>> store.close()
#[pyclass(frozen, name = "LiveView", module = "remanent", extends = Reader)]
pub struct PyLiveView;

#[pymethods]
impl PyLiveView {
    /// Closes the view. Its store can then be closed.
    fn close(slf: PyRef<'_, Self>) -> PyResult<()> {
        let reader = slf.as_super();
        let Source::Live(live) = &reader.source else { unreachable!("the source of a LiveView") };
        live.close().or_raise(slf.py(), Some(&live.path))
    }

    fn __repr__(slf: PyRef<'_, Self>) -> String {
        described("LiveView", slf.as_super())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        slf: PyRef<'_, Self>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, error, traceback);
        Self::close(slf)
    }
}

/// Returns a reader as text for `repr`, without reading any page.
fn described(kind: &str, reader: &Reader) -> String {
    let path = reader.source.path().unwrap_or_default();
    match reader.source.with(|pages| pages.lsn()) {
        Ok(lsn) => format!("{kind}({path:?}, lsn={lsn})"),
        // The reader is closed, or inherited by a forked child.
        Err(_) => format!("{kind}({path:?}, closed)"),
    }
}

/// A read-only state of a store. The writer's lock is not taken, so a writer in any process can run
/// concurrently. As a context manager, the view is closed at the end of the block.
///
/// :param path: the directory of the store.
/// :param at: the state: an Lsn, "lsn:N", "snapshot:N", the name of a snapshot or a `SnapshotInfo`; None
///     opens the newest state. Write a name that has one of the other forms as "name:S".
/// :raises NoStoreError: the directory contains no store.
/// :raises NoStateError: the state is not retained.
/// :raises DamagedError: bytes on disk differ from the bytes that were written.
/// :raises OvertakenError: a writer removes files of the state faster than they can be read.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = b"then"
/// ...     store["k"] = b"now!"
/// ...     remanent.View(directory, 1)["k"], remanent.View(directory)["k"]
/// (b'then', b'now!')
#[pyclass(frozen, name = "View", module = "remanent", extends = Reader)]
pub struct PyView;

impl PyView {
    fn past(reader: &Reader) -> &PastSource {
        let Source::Past(past) = &reader.source else { unreachable!("the source of a View") };
        past
    }
}

#[pymethods]
impl PyView {
    #[new]
    #[pyo3(signature = (path, at=None))]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::path)] path: std::path::PathBuf,
        at: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let point = at.map(|at| state_point(&at)).transpose()?;
        crate::log::update_level(py)?;
        let view = py.detach(|| match &point {
            Some(point) => Store::open_at(&path, point),
            None => Store::open_read_only(&path),
        });
        let path = path.display().to_string();
        let view = view.or_raise(py, Some(&path))?;
        let reader = Reader::new(Source::Past(PastSource::new(view, path)));
        Ok(PyClassInitializer::from(reader).add_subclass(Self))
    }

    /// Opens a state of an archive without restoring it, and returns its `View`. The archive is not changed, and its
    /// writer continues. The credential needs to read only.
    ///
    /// The call fetches the log of the state into a temporary folder, which is removed with the view. Parts of images,
    /// up to 8 MiB each, are fetched when a page in them is read. A named snapshot needs no log.
    ///
    /// :param archive: the archive; see `ArchiveOptions`. Only `url`, `settings` and `cache_len_max` are used.
    /// :param at: the state, as for the constructor; None opens the newest state.
    /// :raises ArchiveError: the archive cannot be reached or is empty, or an object is damaged or missing. Reads of
    ///     pages also raise this error.
    /// :raises NoStateError: the archive does not keep the state.
    /// :raises OvertakenError: a writer removes data of the state faster than it can be read. Reads of pages also raise
    ///     this error, at the earliest after two newer snapshots. A named snapshot is kept.
    ///
    /// >>> import pathlib
    /// >>> folder = pathlib.Path(directory + "-archive")
    /// >>> folder.mkdir()
    /// >>> with remanent.Store(directory, archive={"url": folder.as_uri()}) as store:
    /// ...     store["k"] = b"best"
    /// ...     _ = store.wait_archived(store.snapshot("best"))
    /// ...     store["k"] = b"last"
    /// >>> with remanent.View.open_archive({"url": folder.as_uri()}, "best") as view:
    /// ...     view["k"], view.lsn
    /// (b'best', 1)
    #[staticmethod]
    #[pyo3(signature = (archive, at=None))]
    fn open_archive(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::archive)] archive: Bound<'_, PyDict>,
        at: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Py<Self>> {
        let archive = viewed_archive(&archive)?;
        let point = at.map(|at| state_point(&at)).transpose()?;
        crate::log::update_level(py)?;
        let view = py.detach(|| match &point {
            Some(point) => View::open_archive_at(&archive, point),
            None => View::open_archive(&archive),
        });
        let reader = Reader::new(Source::Past(PastSource::new(view.or_raise(py, None)?, archive.url)));
        Py::new(py, PyClassInitializer::from(reader).add_subclass(Self))
    }

    /// The identity of the store as hexadecimal text.
    #[getter]
    fn id(slf: PyRef<'_, Self>) -> PyResult<String> {
        let past = Self::past(slf.as_super());
        Ok(past.get().or_raise_of(slf.py(), Some(&past.path), VIEW)?.id().to_string())
    }

    /// The number of the snapshot from which the state is computed, or None if it is computed from the
    /// beginning of the log.
    #[getter]
    fn base(slf: PyRef<'_, Self>) -> PyResult<Option<u64>> {
        let past = Self::past(slf.as_super());
        Ok(past.get().or_raise_of(slf.py(), Some(&past.path), VIEW)?.base().map(|id| id.0))
    }

    /// Returns the changes of a page's bytes up to this state, oldest first, as a list of `ValueChange`.
    ///
    /// The result covers the batches in the log. Earlier changes are found by comparing the snapshots that
    /// are still kept. A batch that writes the same bytes again is not a change.
    ///
    /// :param offset: the offset of the bytes in the page.
    /// :param length: the number of bytes, up to 65536. None uses the length of an element according to the
    ///     page's metadata, or 1.
    /// :raises UnknownPageError: no page has this id.
    /// :raises UnknownKeyError: no page has this key.
    /// :raises OutOfBoundsError: the range is not within the page.
    /// :raises InvalidError: `length` is not 1 to 65536.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written.
    /// :raises OvertakenError: a writer removes files faster than they can be read.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["w"] = bytes([1, 2, 3])
    /// ...     with store.batch(note="step 2") as batch:
    /// ...         batch.write("w", 1, b"\x07")
    /// ...     changes = remanent.View(directory).blame("w", 1)
    /// >>> [(change.lsn, change.before, change.after) for change in changes]
    /// [(1, None, b'\x02'), (2, b'\x02', b'\x07')]
    #[pyo3(signature = (page, offset, length=None))]
    fn blame(
        slf: PyRef<'_, Self>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::optional_length)] length: Option<u64>,
    ) -> PyResult<Vec<PyValueChange>> {
        let (name, past) = (PageName::take(page)?, Self::past(slf.as_super()));
        let changes = page.py().detach(|| blame(&*past.get()?, &name, offset, length));
        changes.or_raise_of(page.py(), Some(&past.path), VIEW)
    }

    /// Reads many whole pages into caller-owned memory, with several threads. Every byte is verified by a
    /// checksum, on a GPU after the copy to the GPU.
    ///
    /// The first load to a GPU creates a driver context and up to 64 MiB of pinned host memory, which the
    /// process keeps until it ends.
    ///
    /// :param pages: a dict from pages to contiguous, writable memory of the page's length: bytearrays, NumPy
    ///     arrays or tensors.
    /// :param device: the device of all of the memory: "host", or a GPU such as "cuda:0".
    /// :raises BufferError: the memory for a page is on another device or is not writable.
    /// :raises OutOfBoundsError: the memory for a page does not have the page's length.
    /// :raises MemoryRefusedError: the memory for two pages overlaps. Other errors are those of `read`; after
    ///     one of them, any of the memory may have changed.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"], store["v"] = b"keys", b"values"
    /// >>> keys, values = bytearray(4), bytearray(6)
    /// >>> remanent.View(directory).load({"k": keys, "v": values})
    /// >>> keys, values
    /// (bytearray(b'keys'), bytearray(b'values'))
    #[pyo3(signature = (pages, device="host"))]
    fn load(
        slf: PyRef<'_, Self>,
        #[pyo3(from_py_with = arguments::pages)] pages: Bound<'_, PyDict>,
        #[pyo3(from_py_with = arguments::device)] device: &str,
    ) -> PyResult<()> {
        load_pages(Self::past(slf.as_super()), &pages, device)
    }

    /// Verifies that whole pages can be read, with several threads. All bytes from which the pages are
    /// computed are read and compared with their checksums. Use this method before overwriting data that
    /// would otherwise be lost.
    ///
    /// :param pages: an iterable of pages.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written. Other errors are those of
    ///     `read`.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"], store["v"] = b"keys", b"values"
    /// >>> remanent.View(directory).prove(["k", "v"])
    fn prove(slf: PyRef<'_, Self>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, past) = (pages.py(), Self::past(slf.as_super()));
        let names = page_names(pages)?;
        let proven = py.detach(|| {
            let view = past.get()?;
            let pages = names.iter().map(|name| Ok(name.find(&*view)?.page));
            view.prove_pages(&pages.collect::<remanent::Result<Vec<_>>>()?)
        });
        proven.or_raise_of(py, Some(&past.path), VIEW)
    }

    /// Returns the CRC-32 of each page's bytes without reading them, or None for a page that batches changed after its
    /// image was written.
    fn _image_checksums(slf: PyRef<'_, Self>, pages: &Bound<'_, PyAny>) -> PyResult<Vec<Option<u32>>> {
        let (py, past) = (pages.py(), Self::past(slf.as_super()));
        let names = page_names(pages)?;
        let checksums = py.detach(|| {
            let view = past.get()?;
            let checksums = names.iter().map(|name| view.image_checksum(name.find(&*view)?.page));
            checksums.collect::<remanent::Result<Vec<_>>>()
        });
        checksums.or_raise_of(py, Some(&past.path), VIEW)
    }

    /// Creates a store at `path` whose history begins at this state, and returns the new store's id. Images
    /// are shared, not copied.
    fn fork(
        slf: PyRef<'_, Self>,
        #[pyo3(from_py_with = arguments::path)] path: std::path::PathBuf,
    ) -> PyResult<String> {
        let (py, past) = (slf.py(), Self::past(slf.as_super()));
        let forked = py.detach(|| past.get()?.fork(&path));
        forked.or_raise_of(py, Some(&past.path), VIEW).map(|id| id.to_string())
    }

    /// Closes the view. Files that only this state needs may then be removed.
    fn close(slf: PyRef<'_, Self>) -> PyResult<()> {
        let past = Self::past(slf.as_super());
        past.close().or_raise(slf.py(), Some(&past.path))
    }

    fn __repr__(slf: PyRef<'_, Self>) -> String {
        described("View", slf.as_super())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        slf: PyRef<'_, Self>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, error, traceback);
        Self::close(slf)
    }
}

/// The files of a store, read once to open many of its earlier states.
///
/// :param path: the directory of the store.
/// :raises NoStoreError: the directory contains no store.
/// :raises DamagedError: bytes on disk differ from the bytes that were written.
#[pyclass(frozen, name = "KeptStates", module = "remanent")]
pub struct PyKeptStates {
    path: String,
    states: KeptStates,
}

#[pymethods]
impl PyKeptStates {
    #[new]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::path)] path: std::path::PathBuf,
    ) -> PyResult<Self> {
        let states = py.detach(|| KeptStates::read(&path));
        let path = path.display().to_string();
        Ok(Self { states: states.or_raise(py, Some(&path))?, path })
    }

    /// Opens the state after batch `lsn` and returns its `View`.
    fn view(&self, py: Python<'_>, #[pyo3(from_py_with = arguments::lsn)] lsn: u64) -> PyResult<Py<PyView>> {
        let view = py.detach(|| self.states.open(Lsn(lsn))).or_raise(py, Some(&self.path))?;
        let reader = Reader::new(Source::Past(PastSource::new(view, self.path.clone())));
        Py::new(py, PyClassInitializer::from(reader).add_subclass(PyView))
    }
}
