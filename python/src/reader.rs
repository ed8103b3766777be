//! `Reader`: reads pages and the root from an open store, a view, an earlier state or a replica.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use remanent::store::ReadPages;
use remanent::{Error, Key, PageInfo, Result};

use crate::arguments;
use crate::array::{Aligned, Array};
use crate::device_reads::read_device;
use crate::dtype::layout;
use crate::errors::{OrRaise, key_to_py, memory_refused, to_py_with};
use crate::memory::{Input, Output};
use crate::page_info::Info;
use crate::page_name::{PageName, prefix_of};
use crate::source::Source;
use crate::values::{ROOT, metadata_to_py};

/// The number of attempts to read a page into memory whose length was looked up before. After these, the
/// engine determines the length itself.
const TRIES: usize = 2;

/// The largest number of pages whose keys are compared with an unknown key.
const COMPARED_KEYS_MAX: u64 = 1000;

/// Reads a whole page into memory that `make` allocates for the page's length.
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
        // An unchanged version means that the length did not change during the read.
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

/// Read access to pages and the root. The base class of `Store`, `LiveView`, `View` and `Replica`.
///
/// A page is named by its id (int), its key (str or bytes) or its `PageInfo`. A reader is a mapping from keys
/// to bytes. Iteration yields the keys, as str if they are UTF-8. `pages` also returns pages without a key.
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

    fn inspect<T>(&self, py: Python<'_>, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> PyResult<T> {
        self.source.inspect(py, run).or_raise_of(py, self.source.path(), self.source.handle())
    }

    /// Runs a call without the interpreter lock.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&dyn ReadPages) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.source.with(run)).or_raise_of(py, self.source.path(), self.source.handle())
    }

    pub fn find(&self, name: &Bound<'_, PyAny>) -> PyResult<PageInfo> {
        self.found(name.py(), &PageName::take(name)?)
    }

    /// Looks up a page. The error for an unknown key suggests the most similar key.
    fn found(&self, py: Python<'_>, name: &PageName) -> PyResult<PageInfo> {
        match self.source.inspect(py, |pages| name.find(pages)) {
            Err(error @ Error::UnknownKey { .. }) => Err(self.unknown_key(py, &error)),
            found => found.or_raise_of(py, self.source.path(), self.source.handle()),
        }
    }

    fn unknown_key(&self, py: Python<'_>, error: &Error) -> PyErr {
        let similar = match error {
            Error::UnknownKey { key } => key.as_str().and_then(|key| self.similar_key(py, key)),
            _ => None,
        };
        let addition = similar.map_or_else(String::new, |key| format!("; did you mean {key:?}?"));
        to_py_with(py, error, &addition, self.source.path())
    }

    /// Returns the key that is most similar to `wanted`. Returns `None` if there are too many keys to
    /// compare.
    fn similar_key(&self, py: Python<'_>, wanted: &str) -> Option<String> {
        let similar = |pages: &dyn ReadPages| {
            if pages.page_count()? > COMPARED_KEYS_MAX {
                return Ok(None);
            }
            let keys: Vec<Key> = pages.pages()?.filter_map(|info| info.key).collect();
            Ok(remanent::error::nearest(wanted, keys.iter().filter_map(|key| key.as_str()))
                .map(str::to_owned))
        };
        self.source.inspect(py, similar).ok().flatten()
    }

    /// Reads a whole page directly into the memory of a new bytes object.
    fn whole<'py>(&self, py: Python<'py>, name: &PageName) -> PyResult<Bound<'py, PyBytes>> {
        for _ in 0..TRIES {
            let info = self.found(py, name)?;
            let mut read = Ok(());
            let bytes = PyBytes::new_with(py, info.len as usize, |memory| {
                read = py.detach(|| self.source.with(|pages| pages.read(info.page, 0, memory)));
                Ok(())
            })?;
            match read {
                Ok(()) => {}
                Err(Error::OutOfBounds { .. } | Error::UnknownPage { .. }) => continue,
                Err(error) => {
                    return Err(error).or_raise_of(py, self.source.path(), self.source.handle());
                }
            }
            // An unchanged version means that the length did not change during the read.
            if self.inspect(py, |pages| name.find(pages)).is_ok_and(|after| after == info) {
                return Ok(bytes);
            }
        }
        let bytes = self.call(py, |pages| pages.read_to_vec(name.find(pages)?.page))?;
        Ok(PyBytes::new(py, &bytes))
    }
}

#[pymethods]
impl Reader {
    /// Returns an HTML table of the pages and the root for notebooks. Contents of pages are not shown.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("remanent._store.html")?.call_method1("reader", (slf,))
    }

    /// The Lsn of the newest batch that is visible in this reader.
    #[getter]
    fn lsn(&self, py: Python<'_>) -> PyResult<u64> {
        self.inspect(py, |pages| pages.lsn().map(|lsn| lsn.0))
    }

    /// The root, which is the store's own metadata, as a read-only copy. To change entries, use
    /// `Batch.set_root`.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     with store.batch() as batch:
    /// ...         batch.set_root("step", 7)
    /// ...     try:
    /// ...         store.root["step"] = 8
    /// ...     except TypeError as error:
    /// ...         print(error)
    /// ...     store.root
    /// the root is a read-only copy; use batch.set_root(name, value) or batch.remove_root(name)
    /// {'step': 7}
    #[getter]
    fn root<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let root = self.inspect(py, |pages| pages.root())?;
        ROOT.freeze(metadata_to_py(py, &root)?)
    }

    /// The number of pages, including those without a key.
    #[getter]
    fn page_count(&self, py: Python<'_>) -> PyResult<u64> {
        self.inspect(py, |pages| pages.page_count())
    }

    /// Returns the length, epoch, place, key and metadata of a page.
    ///
    /// :raises UnknownPageError: no page has this id.
    /// :raises UnknownKeyError: no page has this key.
    fn info(&self, page: &Bound<'_, PyAny>) -> PyResult<Info> {
        self.find(page).map(Info)
    }

    /// Returns the `PageInfo` of all pages, or of those whose keys begin with `prefix` (str or bytes),
    /// ordered by id.
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

    /// Returns all keys, ordered by the ids of their pages.
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

    /// Returns the keys with which IPython completes `store["`.
    fn _ipython_key_completions_<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.keys(py)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |pages| Ok(pages.pages()?.filter(|info| info.key.is_some()).count()))
    }

    fn __bool__(&self) -> bool {
        true
    }

    fn __contains__(&self, page: &Bound<'_, PyAny>) -> PyResult<bool> {
        let name = PageName::take(page)?;
        self.inspect(page.py(), |pages| match name.find(pages) {
            Ok(_) => Ok(true),
            Err(Error::UnknownKey { .. } | Error::UnknownPage { .. }) => Ok(false),
            Err(error) => Err(error),
        })
    }

    fn __getitem__<'py>(&self, page: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        self.whole(page.py(), &PageName::take(page)?)
    }

    /// Returns the bytes of a whole page, or `default` if the page does not exist.
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

    /// Returns `length` bytes of a page from `offset` on. None reads to the end of the page.
    ///
    /// :raises UnknownPageError: no page has this id.
    /// :raises UnknownKeyError: no page has this key.
    /// :raises OutOfBoundsError: the range is not within the page.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written.
    /// :raises OvertakenError: this is a view, and its bytes are no longer kept.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"remanent"
    /// ...     store.read("k", 2, 3), store.read("k", 6)
    /// (b'man', b'nt')
    #[pyo3(signature = (page, offset=0, length=None))]
    fn read<'py>(
        &self,
        page: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::optional_length)] length: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (py, name) = (page.py(), PageName::take(page)?);
        if offset == 0 && length.is_none() {
            return self.whole(py, &name);
        }
        let page = self.found(py, &name)?.page;
        let (page, len) = self.inspect(py, |pages| {
            let info = pages.page(page)?;
            let len = length.unwrap_or_else(|| info.len.saturating_sub(offset));
            // The range is checked before any memory is allocated for it.
            if offset.checked_add(len).is_none_or(|end| end > info.len) {
                return Err(Error::OutOfBounds { page: info.page, offset, len, page_len: info.len });
            }
            Ok((info.page, len))
        })?;
        PyBytes::new_with(py, len as usize, |memory| self.call(py, |pages| pages.read(page, offset, memory)))
    }

    /// Fills `out` with the bytes of a page from `offset` on, and returns their number, which is the length
    /// of `out`.
    ///
    /// :param out: contiguous, writable host memory: a bytearray, a NumPy array, or a tensor with
    ///     `__dlpack__`. An open store whose pages are on a GPU also accepts a tensor on that GPU. Such a
    ///     tensor is filled after the work that is queued on its current stream, from the GPU's memory or
    ///     from pages on disk.
    /// :raises BufferError: `out` is not writable or is on another device. Other errors are those of `read`;
    ///     after one of them, part of `out` may have changed.
    ///
    /// >>> out = bytearray(4)
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = b"remanent"
    /// ...     store.read_into("k", out, 4), out
    /// (4, bytearray(b'nent'))
    #[pyo3(signature = (page, out, offset=0))]
    fn read_into(
        &self,
        page: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
    ) -> PyResult<usize> {
        let name = PageName::take(page)?;
        let mut out = match (Input::take_writable(out)?, &self.source) {
            (Input::Host(bytes), _) => Output::of(bytes),
            (Input::Cuda(bytes), Source::Store(gate)) => {
                let len = bytes.len() as usize;
                gate.call(page.py(), |store| {
                    read_device(store, vec![(name.find(store)?.page, offset, bytes)])
                })?;
                return Ok(len);
            }
            (Input::Cuda(_), _) => {
                let message = "only an open store can read into GPU memory";
                return Err(memory_refused(message, "use View.load, or pass host memory"));
            }
        };
        let bytes = &mut out;
        self.call(page.py(), move |pages| {
            let bytes = bytes.as_mut_slice();
            pages.read(name.find(pages)?.page, offset, bytes)?;
            Ok(bytes.len())
        })
    }

    /// Returns a copy of a whole page as an array that torch, JAX and NumPy can use without another copy.
    ///
    /// :param dtype: the element type, such as "float32" or "F32". None uses the dtype in the page's
    ///     metadata, or "uint8".
    /// :param shape: the length of each dimension in elements. None uses the shape in the page's metadata, or
    ///     one dimension.
    /// :raises ValueError: the page's length does not match `dtype` and `shape`. Other errors are those of
    ///     `read`.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = bytes(8)
    /// ...     store.array("k", "float32")
    /// Array(dtype="float32", shape=[2])
    #[pyo3(signature = (page, dtype=None, shape=None))]
    fn array(
        &self,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::optional_dtype)] dtype: Option<&str>,
        #[pyo3(from_py_with = arguments::shape)] shape: Option<Vec<usize>>,
    ) -> PyResult<Array> {
        let (py, name) = (page.py(), PageName::take(page)?);
        // Rejects a wrong dtype or shape before the page is read.
        let info = self.found(py, &name)?;
        layout(dtype, shape.clone(), &info, info.len as usize)?;
        let (info, mut bytes) = self.call(py, |pages| {
            read_whole(pages, &name, |_, len| Aligned::zeros(len), Aligned::as_mut_slice)
        })?;
        let (dtype, shape) = layout(dtype, shape, &info, bytes.as_mut_slice().len())?;
        Ok(Array::new(bytes, dtype, &shape))
    }

    /// Returns a copy of a whole page as a NumPy array. `dtype` and `shape` are those of `array`, and errors
    /// are those of `array` and of `Array.numpy`.
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
        #[pyo3(from_py_with = arguments::optional_dtype)] dtype: Option<&str>,
        #[pyo3(from_py_with = arguments::shape)] shape: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Bound::new(page.py(), self.array(page, dtype, shape)?)?.call_method0("numpy")
    }
}
