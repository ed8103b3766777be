//! Pages and root that can be read, from whatever: an open store, a view, an earlier state, a replica.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};
use remanent::{Error, Key, LiveView, PageId, PageInfo, ReadPages, Replica, Result, StatePoint, Store, View};
use self_cell::self_cell;

use crate::array::{Aligned, Array};
use crate::dtype::layout;
use crate::errors::{OrRaise, key_to_py};
use crate::gate::{Gate, Handle, check_process, detached};
use crate::memory::Output;
use crate::values::metadata_to_py;

/// How often a page is read into memory of its old length before the engine finds out the length itself.
const TRIES: usize = 2;

/// A page as a caller names it: by its id, by its key, or by what was looked up before.
pub enum PageName {
    Id(PageId),
    Key(Key),
}

impl PageName {
    /// Reads a name.
    ///
    /// # Errors
    /// `TypeError`, `InvalidError`.
    pub fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(info) = object.cast::<Info>() {
            return Ok(Self::Id(info.get().0.page));
        }
        if object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>() {
            return key(object).map(Self::Key);
        }
        match object.extract::<u64>() {
            Ok(id) => Ok(Self::Id(PageId(id))),
            Err(_) => Err(PyTypeError::new_err(format!(
                "a page is named by its id (int), its key (str or bytes) or its PageInfo, not by {}",
                object.get_type().name()?
            ))),
        }
    }

    /// The page as it is in these pages.
    pub fn find(&self, pages: &dyn ReadPages) -> Result<PageInfo> {
        match self {
            Self::Id(page) => pages.page(*page),
            Self::Key(key) => pages.page_by_key(key),
        }
    }
}

/// A key from text or bytes.
pub fn key(object: &Bound<'_, PyAny>) -> PyResult<Key> {
    let key = if let Ok(text) = object.cast::<PyString>() {
        Key::new(text.to_str()?)
    } else if let Ok(bytes) = object.cast::<PyBytes>() {
        Key::new(bytes.as_bytes())
    } else {
        let kind = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!("a key is str or bytes, not {kind}")));
    };
    key.map_err(Error::from).or_raise(object.py(), None)
}

/// A state as a caller names it: an Lsn, the text of one of the three kinds, or a snapshot.
pub fn state_point(object: &Bound<'_, PyAny>) -> PyResult<StatePoint> {
    if let Ok(text) = object.cast::<PyString>() {
        return text.to_str()?.parse().or_raise(object.py(), None);
    }
    if let Ok(snapshot) = object.cast::<crate::snapshot::SnapshotInfo>() {
        return Ok(StatePoint::Snapshot(remanent::SnapshotId(snapshot.get().id)));
    }
    match object.extract::<u64>() {
        Ok(lsn) => Ok(StatePoint::Lsn(remanent::Lsn(lsn))),
        Err(_) => Err(PyTypeError::new_err(format!(
            "a state is an Lsn (int), \"lsn:N\", \"snapshot:N\", \"name:S\" or a SnapshotInfo, not {}",
            object.get_type().name()?
        ))),
    }
}

/// A page's length in bytes, version, key and metadata.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = b"v"
/// ...     store.info("k")
/// PageInfo(page=1, key=k, length=1, epoch=1, lsn=1, place=host)
#[pyclass(frozen, name = "PageInfo", module = "remanent", eq)]
#[derive(PartialEq)]
pub struct Info(pub PageInfo);

#[pymethods]
impl Info {
    /// The page's id.
    #[getter]
    fn page(&self) -> u64 {
        self.0.page.0
    }

    /// Its key, or None: text where it is UTF-8, else bytes.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.key.as_ref().map(|key| key_to_py(py, key))
    }

    /// Its length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.0.len
    }

    /// Its version: one more with each batch that changes content, length or metadata.
    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch.0
    }

    /// The batch that changed or moved it last.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// Where it lives: "host", "pinned", "device:N".
    #[getter]
    fn place(&self) -> String {
        self.0.place.to_string()
    }

    /// Its metadata, as a dict of its own.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata_to_py(py, &self.0.metadata)
    }

    fn __repr__(&self) -> String {
        let key = self.0.key.as_ref().map_or_else(String::new, |key| format!(", key={key}"));
        let PageInfo { page, len, epoch, lsn, place, .. } = &self.0;
        format!("PageInfo(page={page}{key}, length={len}, epoch={epoch}, lsn={lsn}, place={place})")
    }
}

self_cell! {
    /// A view beside the store that it borrows from.
    pub struct LiveCell {
        owner: Arc<Store>,
        #[not_covariant]
        dependent: LiveView,
    }
}

/// What pages are read from.
pub enum Source {
    Store(Arc<Gate>),
    Live(LiveSource),
    Past(PastSource),
    Replica(Mutex<Replica>),
}

/// A view of an open store, until it is closed.
pub struct LiveSource {
    opener: u32,
    path: String,
    view: Mutex<Option<Arc<HeldView>>>,
}

/// A view, and after it in the order of dropping the count that keeps its store open.
struct HeldView {
    cell: LiveCell,
    _handle: Handle,
}

/// An earlier state, until it is closed.
pub struct PastSource {
    opener: u32,
    path: String,
    view: Mutex<Option<Arc<View>>>,
}

impl LiveSource {
    pub fn new(gate: &Arc<Gate>) -> Result<Self> {
        let (handle, store) = gate.hold()?;
        let cell = LiveCell::try_new(store, |store| store.view())?;
        let view = Mutex::new(Some(Arc::new(HeldView { cell, _handle: handle })));
        Ok(Self { opener: std::process::id(), path: gate.path.clone(), view })
    }

    pub fn close(&self) -> Result<()> {
        check_process(self.opener)?;
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner).take();
        detached(view);
        Ok(())
    }
}

impl PastSource {
    pub fn new(view: View, path: String) -> Self {
        Self { opener: std::process::id(), path, view: Mutex::new(Some(Arc::new(view))) }
    }

    pub fn get(&self) -> Result<Arc<View>> {
        check_process(self.opener)?;
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)
    }

    pub fn close(&self) -> Result<()> {
        check_process(self.opener)?;
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner).take();
        detached(view);
        Ok(())
    }
}

impl Source {
    pub fn path(&self) -> Option<&str> {
        match self {
            Source::Store(gate) => Some(&gate.path),
            Source::Live(live) => Some(&live.path),
            Source::Past(past) => Some(&past.path),
            Source::Replica(_) => None,
        }
    }

    /// Runs a call on the pages.
    fn with<T>(&self, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> Result<T> {
        match self {
            Source::Store(gate) => run(&*gate.enter()?),
            Source::Live(live) => {
                check_process(live.opener)?;
                let view = live.view.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let view = view.ok_or(Error::Closed)?;
                let read = view.cell.with_dependent(|_, view| run(view));
                // Closed meanwhile by another thread, it ends here.
                detached(view);
                read
            }
            Source::Past(past) => run(&*past.get()?),
            Source::Replica(replica) => run(&*replica.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

/// A whole page, into memory that `make` gives for its length.
fn read_whole<M>(
    pages: &dyn ReadPages,
    name: &PageName,
    mut make: impl FnMut(&PageInfo, usize) -> Result<M>,
    slice: impl Fn(&mut M) -> &mut [u8],
) -> Result<(PageInfo, M)> {
    let length = |info: &PageInfo| {
        usize::try_from(info.len)
            .map_err(|_| Error::OutOfMemory { place: remanent::Place::Host, len: info.len })
    };
    for _ in 0..TRIES {
        let info = name.find(pages)?;
        let mut memory = make(&info, length(&info)?)?;
        match pages.read(info.page, 0, slice(&mut memory)) {
            Ok(()) => {}
            Err(Error::OutOfBounds { .. } | Error::UnknownPage { .. }) => continue,
            Err(error) => return Err(error),
        }
        // If it is at the version that was looked up, it was as long as that all the time.
        if name.find(pages).is_ok_and(|after| after == info) {
            return Ok((info, memory));
        }
    }
    let info = name.find(pages)?;
    let bytes = pages.read_to_vec(info.page)?;
    let mut memory = make(&info, bytes.len())?;
    slice(&mut memory).copy_from_slice(&bytes);
    Ok((info, memory))
}

/// Pages and root that can be read: the base of `Store`, `LiveView`, `View` and `Replica`.
///
/// A page is named by its id (int), its key (str or bytes) or its PageInfo. A mapping from keys to bytes:
/// iteration gives the keys, as text where they are UTF-8; pages without a key are found by `pages`.
///
/// >>> def total(pages: remanent.Reader) -> int:
/// ...     return sum(info.length for info in pages.pages())
/// >>> with remanent.Store(directory) as store:
/// ...     store["a"] = b"four"
/// ...     total(store), total(remanent.View(directory))
/// (4, 4)
#[pyclass(frozen, subclass, module = "remanent")]
pub struct Reader {
    pub source: Source,
}

impl Reader {
    pub fn new(source: Source) -> Self {
        Self { source }
    }

    /// A look that waits for nothing.
    fn look<T>(&self, py: Python<'_>, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> PyResult<T> {
        self.source.with(run).or_raise(py, self.source.path())
    }

    /// A call without the interpreter's lock.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&dyn ReadPages) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.source.with(run)).or_raise(py, self.source.path())
    }

    pub fn find(&self, name: &Bound<'_, PyAny>) -> PyResult<PageInfo> {
        let page = PageName::take(name)?;
        self.look(name.py(), |pages| page.find(pages))
    }

    /// A whole page, read into the memory of the object that is returned.
    fn whole<'py>(&self, py: Python<'py>, name: &PageName) -> PyResult<Bound<'py, PyBytes>> {
        for _ in 0..TRIES {
            let info = self.look(py, |pages| name.find(pages))?;
            let mut read = Ok(());
            let bytes = PyBytes::new_with(py, info.len as usize, |memory| {
                read = py.detach(|| self.source.with(|pages| pages.read(info.page, 0, memory)));
                Ok(())
            })?;
            match read {
                Ok(()) => {}
                Err(Error::OutOfBounds { .. } | Error::UnknownPage { .. }) => continue,
                Err(error) => return Err(error).or_raise(py, self.source.path()),
            }
            // If it is at the version that was looked up, it was as long as that all the time.
            if self.look(py, |pages| name.find(pages)).is_ok_and(|after| after == info) {
                return Ok(bytes);
            }
        }
        let bytes = self.call(py, |pages| pages.read_to_vec(name.find(pages)?.page))?;
        Ok(PyBytes::new(py, &bytes))
    }
}

#[pymethods]
impl Reader {
    /// The newest batch that is seen here.
    #[getter]
    fn lsn(&self, py: Python<'_>) -> PyResult<u64> {
        self.look(py, |pages| pages.lsn().map(|lsn| lsn.0))
    }

    /// The root: the store's own metadata, as a dict of its own.
    #[getter]
    fn root<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let root = self.look(py, |pages| pages.root())?;
        metadata_to_py(py, &root)
    }

    /// The number of pages, those without a key included.
    #[getter]
    fn page_count(&self, py: Python<'_>) -> PyResult<u64> {
        self.look(py, |pages| pages.page_count())
    }

    /// A page's length, version, key and metadata.
    fn info(&self, page: &Bound<'_, PyAny>) -> PyResult<Info> {
        self.find(page).map(Info)
    }

    /// All pages in the order of their ids, or those whose keys begin with `prefix` (str or bytes).
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     for key in ("layer.0/w", "layer.1/w", "head"):
    /// ...         store[key] = b"w"
    /// ...     len(store.pages("layer.")), len(store.pages())
    /// (2, 3)
    #[pyo3(signature = (prefix=None))]
    fn pages<'py>(&self, py: Python<'py>, prefix: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyList>> {
        let prefix = prefix.map(|prefix| prefix_of(&prefix)).transpose()?;
        let has = |info: &PageInfo| match &prefix {
            Some(prefix) => info.key.as_ref().is_some_and(|key| key.as_bytes().starts_with(prefix)),
            None => true,
        };
        let infos: Vec<PageInfo> = self.call(py, |pages| Ok(pages.pages()?.filter(has).collect()))?;
        let list = PyList::empty(py);
        for info in infos {
            list.append(Bound::new(py, Info(info))?)?;
        }
        Ok(list)
    }

    /// All keys, in the order of their pages' ids.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let keys: Vec<Key> =
            self.call(py, |pages| Ok(pages.pages()?.filter_map(|info| info.key).collect()))?;
        let list = PyList::empty(py);
        for key in keys {
            list.append(key_to_py(py, &key))?;
        }
        Ok(list)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.keys(py)?.try_iter()?.into_any())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |pages| Ok(pages.pages()?.filter(|info| info.key.is_some()).count()))
    }

    fn __bool__(&self) -> bool {
        true
    }

    fn __contains__(&self, page: &Bound<'_, PyAny>) -> PyResult<bool> {
        let name = PageName::take(page)?;
        self.look(page.py(), |pages| match name.find(pages) {
            Ok(_) => Ok(true),
            Err(Error::UnknownKey { .. } | Error::UnknownPage { .. }) => Ok(false),
            Err(error) => Err(error),
        })
    }

    fn __getitem__<'py>(&self, page: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        self.whole(page.py(), &PageName::take(page)?)
    }

    /// A whole page as bytes, or `default` if there is no such page.
    #[pyo3(signature = (page, default=None))]
    fn get<'py>(
        &self,
        page: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.__contains__(page)? {
            return self.__getitem__(page).map(|bytes| Some(bytes.into_any()));
        }
        Ok(default)
    }

    /// Bytes of a page from `offset` on, to its end or `length` of them.
    ///
    /// :raises UnknownPageError, UnknownKeyError, OutOfBoundsError, DamagedError; OvertakenError of a view.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"remanent"
    /// ...     store.read("k", 2, 3), store.read("k", 6)
    /// (b'man', b'nt')
    #[pyo3(signature = (page, offset=0, length=None))]
    fn read<'py>(
        &self,
        page: &Bound<'py, PyAny>,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (py, name) = (page.py(), PageName::take(page)?);
        if offset == 0 && length.is_none() {
            return self.whole(py, &name);
        }
        let (page, len) = self.look(py, |pages| {
            let info = name.find(pages)?;
            let len = length.unwrap_or_else(|| info.len.saturating_sub(offset));
            // Checked before memory is taken for it.
            if offset.checked_add(len).is_none_or(|end| end > info.len) {
                return Err(Error::OutOfBounds { page: info.page, offset, len, page_len: info.len });
            }
            Ok((info.page, len))
        })?;
        PyBytes::new_with(py, len as usize, |memory| self.call(py, |pages| pages.read(page, offset, memory)))
    }

    /// Fills `out` with bytes of a page from `offset` on, as many as it holds. Returns how many.
    ///
    /// :param out: contiguous, writable memory of the host: bytearray, NumPy, or a tensor with `__dlpack__`.
    /// :raises BufferError: `out` cannot be written. As for `read`; then some of `out` may have changed.
    ///
    /// >>> out = bytearray(4)
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"remanent"
    /// ...     store.read_into("k", out, 4), out
    /// (4, bytearray(b'nent'))
    #[pyo3(signature = (page, out, offset=0))]
    fn read_into(&self, page: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>, offset: u64) -> PyResult<usize> {
        let (name, mut out) = (PageName::take(page)?, Output::take(out)?);
        let bytes = &mut out;
        self.call(page.py(), move |pages| {
            let bytes = bytes.as_mut_slice();
            pages.read(name.find(pages)?.page, offset, bytes)?;
            Ok(bytes.len())
        })
    }

    /// A copy of a whole page, as an array that torch, JAX and NumPy take without another copy.
    ///
    /// :param dtype: the kind of elements, as "float32" or "F32"; that of the page's metadata if None, else
    ///     "uint8".
    /// :param shape: in elements; that of the page's metadata if None, else one dimension.
    /// :raises ValueError: the page is not as long as that. As for `read`.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = bytes(8)
    /// ...     store.array("k", "float32")
    /// Array(dtype="float32", shape=[2])
    #[pyo3(signature = (page, dtype=None, shape=None))]
    fn array(
        &self,
        page: &Bound<'_, PyAny>,
        dtype: Option<&str>,
        shape: Option<Vec<usize>>,
    ) -> PyResult<Array> {
        let (py, name) = (page.py(), PageName::take(page)?);
        // A wrong dtype or shape is refused before the page is read.
        let info = self.look(py, |pages| name.find(pages))?;
        layout(dtype, shape.clone(), &info, info.len as usize)?;
        let (info, mut bytes) = self.call(py, |pages| {
            read_whole(pages, &name, |_, len| Aligned::zeros(len), Aligned::as_mut_slice)
        })?;
        let (dtype, shape) = layout(dtype, shape, &info, bytes.as_mut_slice().len())?;
        Ok(Array::new(bytes, dtype, &shape))
    }

    /// A copy of a whole page, as a NumPy array. `dtype`, `shape` and errors are those of `array`.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.batch() as batch:
    /// ...         page = batch.create(b"\1\2\3\4", metadata={"dtype": "U8", "shape": [2, 2]})
    /// ...     store.numpy(batch.pages[0]).tolist()
    /// [[1, 2], [3, 4]]
    #[pyo3(signature = (page, dtype=None, shape=None))]
    fn numpy<'py>(
        &self,
        page: &Bound<'py, PyAny>,
        dtype: Option<&str>,
        shape: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Bound::new(page.py(), self.array(page, dtype, shape)?)?.call_method0("numpy")
    }
}

fn prefix_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes().to_vec());
    }
    match object.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes().to_vec()),
        Err(_) => Err(PyValueError::new_err("a prefix is str or bytes")),
    }
}

/// Pages and root of an open store as of one batch. Made by `Store.view`; its store cannot be closed before
/// it.
///
/// It keeps no page's bytes: reading a page that has changed since raises OvertakenError.
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
    /// Lets go of the view; its store can be closed then.
    fn close(slf: PyRef<'_, Self>) -> PyResult<()> {
        let reader = slf.as_super();
        let Source::Live(live) = &reader.source else { unreachable!("made with one") };
        live.close().or_raise(slf.py(), Some(&live.path))
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

/// A state of a store, read-only, without a lock, beside a writer in any process; as a context manager it
/// closes.
///
/// :param at: an Lsn, "lsn:N", "snapshot:N", "name:S" or a SnapshotInfo; the newest state if None.
/// :raises NoStoreError, NoStateError; DamagedError; OvertakenError where no lock can be taken.
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
        let Source::Past(past) = &reader.source else { unreachable!("made with one") };
        past
    }
}

#[pymethods]
impl PyView {
    #[new]
    #[pyo3(signature = (path, at=None))]
    fn new(
        py: Python<'_>,
        path: std::path::PathBuf,
        at: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let point = at.map(|at| state_point(&at)).transpose()?;
        let view = py.detach(|| match &point {
            Some(point) => Store::open_at(&path, point),
            None => Store::open_read_only(&path),
        });
        let path = path.display().to_string();
        let view = view.or_raise(py, Some(&path))?;
        let reader = Reader::new(Source::Past(PastSource::new(view, path)));
        Ok(PyClassInitializer::from(reader).add_subclass(Self))
    }

    /// The identity of the store, as hexadecimal text.
    #[getter]
    fn id(slf: PyRef<'_, Self>) -> PyResult<String> {
        let past = Self::past(slf.as_super());
        Ok(past.get().or_raise(slf.py(), Some(&past.path))?.id().to_string())
    }

    /// The snapshot that the state is computed from; None is the log's beginning.
    #[getter]
    fn base(slf: PyRef<'_, Self>) -> PyResult<Option<u64>> {
        let past = Self::past(slf.as_super());
        Ok(past.get().or_raise(slf.py(), Some(&past.path))?.base().map(|id| id.0))
    }

    /// Makes a new store, with an id of its own, that begins at this state. Returns its id.
    fn fork(slf: PyRef<'_, Self>, path: std::path::PathBuf) -> PyResult<String> {
        let (py, past) = (slf.py(), Self::past(slf.as_super()));
        let forked = py.detach(|| past.get()?.fork(&path));
        forked.or_raise(py, Some(&past.path)).map(|id| id.to_string())
    }

    /// Lets go of the state: what only it needs may be removed then.
    fn close(slf: PyRef<'_, Self>) -> PyResult<()> {
        let past = Self::past(slf.as_super());
        past.close().or_raise(slf.py(), Some(&past.path))
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
