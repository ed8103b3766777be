//! Reads ranges of many pages with one call, as of one batch.

use std::ffi::c_int;
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use remanent::store::{ManyBytes, ReadMany, ReadPages};
use remanent::{Error, PageId, PageInfo, Result};

use crate::arguments;
use crate::array::{BufferParts, fill_buffer, release_buffer};
use crate::device_reads::fill_device;
use crate::dtype::layout;
use crate::errors::{OrRaise, invalid, invalid_type, memory_refused, out_of_bounds};
use crate::event_fd::{EventFd, SharedWaker};
use crate::gate::{Gate, check_process, seconds, wait};
use crate::memory::{Input, Output};
use crate::page_name::{PageName, each_page, iterable};

/// The ranges that a caller passes, looked up in the store.
pub struct FoundRanges {
    ranges: Vec<(PageId, Range<u64>)>,
    infos: Vec<PageInfo>,
}

impl FoundRanges {
    /// Parses an iterable of pages and of tuples (page, offset) and (page, offset, length).
    ///
    /// # Errors
    /// `TypeError`; `UnknownPageError`, `UnknownKeyError`, `OutOfBoundsError`.
    pub fn take(gate: &Gate, pages: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = pages.py();
        let mut named = Vec::new();
        for item in each_page(pages)? {
            let item = item?;
            let Ok(tuple) = item.cast::<PyTuple>() else {
                named.push((PageName::take(&item)?, 0, None));
                continue;
            };
            if !(2..=3).contains(&tuple.len()) {
                let message = "a range must be a page, (page, offset) or (page, offset, length)";
                return Err(invalid_type(message, "pass pages, or tuples of this form"));
            }
            let length =
                if tuple.len() == 3 { arguments::optional_length(&tuple.get_item(2)?)? } else { None };
            let offset = arguments::offset(&tuple.get_item(1)?)?;
            named.push((PageName::take(&tuple.get_item(0)?)?, offset, length));
        }
        gate.inspect(py, |store| {
            let mut found = Self { ranges: Vec::new(), infos: Vec::new() };
            for (name, offset, length) in named {
                let info = name.find(store as &dyn ReadPages)?;
                let len: u64 = length.unwrap_or_else(|| info.len.saturating_sub(offset));
                let end = offset.checked_add(len).filter(|end| *end <= info.len);
                let page_len = info.len;
                let end = end.ok_or(Error::OutOfBounds { page: info.page, offset, len, page_len })?;
                found.ranges.push((info.page, offset..end));
                found.infos.push(info);
            }
            Ok(found)
        })
    }
}

/// A read of many ranges in flight. Call `wait` or `result`, or `await` the object. Created by
/// `Store.read_many`.
///
/// >>> import asyncio
/// >>> store = remanent.Store(directory)
/// >>> store["a"], store["b"] = b"first", b"second"
/// >>> read = store.read_many(["a", ("b", 3)])
/// >>> read.wait(timeout=60), read.result().tolist()
/// (True, [b'first', b'ond'])
/// >>> async def lengths():
/// ...     return len(await store.read_many(["a", "b"]))
/// >>> asyncio.run(lengths())
/// 2
/// >>> store.close()
#[pyclass(frozen, name = "ReadMany", module = "remanent")]
pub struct PyReadMany {
    opener: u32,
    path: String,
    infos: Arc<[PageInfo]>,
    /// Notified once the read is done.
    waiters: Arc<SharedWaker>,
    state: Mutex<ReadProgress>,
}

enum ReadProgress {
    Pending(ReadMany),
    Done(Arc<ManyBytes>),
    Failed(Error),
}

impl ReadProgress {
    fn end(&mut self, outcome: Result<ManyBytes>) {
        *self = match outcome {
            Ok(bytes) => Self::Done(Arc::new(bytes)),
            Err(error) => Self::Failed(error),
        };
    }
}

impl PyReadMany {
    pub fn begin(py: Python<'_>, gate: &Gate, found: FoundRanges) -> PyResult<Self> {
        let read = gate.call(py, |store| store.read_many(&found.ranges))?;
        Ok(Self {
            opener: std::process::id(),
            path: gate.path.clone(),
            infos: found.infos.into(),
            waiters: Arc::default(),
            state: Mutex::new(ReadProgress::Pending(read)),
        })
    }

    fn state(&self) -> Result<MutexGuard<'_, ReadProgress>> {
        check_process(self.opener)?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits up to `timeout` and returns whether the read is done.
    fn wait_up_to(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<bool> {
        let waker = Waker::from(self.waiters.clone());
        wait(py, timeout, Some(&self.path), |slice| {
            let before = self.waiters.count();
            if self.poll(&waker)? {
                return Ok(true);
            }
            // The lock is not held here: other threads and tasks may poll in the meantime.
            self.waiters.wait(before, slice);
            self.poll(&waker)
        })
    }

    /// Polls once and returns whether the read is done.
    fn poll(&self, waker: &Waker) -> Result<bool> {
        let mut state = self.state()?;
        if let ReadProgress::Pending(read) = &mut *state {
            match std::pin::Pin::new(read).poll(&mut Context::from_waker(waker)) {
                Poll::Ready(outcome) => state.end(outcome),
                Poll::Pending => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Returns the bytes of a completed read.
    fn bytes(&self) -> Result<Arc<ManyBytes>> {
        match &*self.state()? {
            ReadProgress::Done(bytes) => Ok(bytes.clone()),
            ReadProgress::Failed(error) => Err(error.clone()),
            ReadProgress::Pending(_) => unreachable!("called after the read is done"),
        }
    }
}

/// Reads ranges, as of one batch, into caller-owned buffers of the same lengths, and returns the batch's Lsn.
/// An interrupted call leaves the buffers unchanged.
pub fn fill(py: Python<'_>, gate: &Gate, found: FoundRanges, outs: &Bound<'_, PyAny>) -> PyResult<u64> {
    let outs = iterable(outs, "outs must be an iterable of buffers, such as a list")?
        .map(|out| Input::take_writable(&out?))
        .collect::<PyResult<Vec<_>>>()?;
    if outs.len() != found.ranges.len() {
        let message = format!("{} buffers were passed for {} ranges", outs.len(), found.ranges.len());
        return Err(invalid(message, "pass one buffer per range"));
    }
    for (index, (out, (_, range))) in outs.iter().zip(&found.ranges).enumerate() {
        let (given, wanted) = (out.byte_len(), range.end - range.start);
        if given != wanted {
            let message = format!("buffer {index} has {given} bytes, but its range has {wanted}");
            return Err(invalid(message, "pass buffers with the lengths of their ranges"));
        }
    }
    let (mut on_host, mut on_gpu) = (Vec::new(), Vec::new());
    for out in outs {
        match out {
            Input::Host(bytes) => on_host.push(Output::of(bytes)),
            Input::Cuda(bytes) => on_gpu.push(bytes),
        }
    }
    match (on_host.is_empty(), on_gpu.is_empty()) {
        (_, true) => {}
        (true, false) => return gate.call(py, |store| fill_device(store, &found.ranges, on_gpu)),
        (false, false) => {
            return Err(memory_refused(
                "some of the buffers are on the host, and some on a GPU",
                "make one call for each",
            ));
        }
    }
    let read = PyReadMany::begin(py, gate, found)?;
    read.wait_up_to(py, None)?;
    let outs = &mut on_host;
    let filled = py.detach(move || {
        let bytes = read.bytes()?;
        for (index, out) in outs.iter_mut().enumerate() {
            out.as_mut_slice().copy_from_slice(bytes.get(index));
        }
        Ok(bytes.lsn().0)
    });
    filled.or_raise(py, Some(&gate.path))
}

#[pymethods]
impl PyReadMany {
    /// Returns whether the read has completed or failed. If True, `result` does not wait.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.poll(&Waker::from(self.waiters.clone())).or_raise(py, Some(&self.path))
    }

    /// Waits until the read is done. Returns False if this takes more than `timeout` seconds. Ctrl-C ends the
    /// wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<bool> {
        self.wait_up_to(py, seconds(timeout)?)
    }

    /// Waits until the read is done and returns its bytes.
    ///
    /// :raises UnknownPageError: a batch deleted a page before the read.
    /// :raises OutOfBoundsError: a batch shortened a page before the read.
    /// :raises ClosedError: the store was closed before the read began.
    /// :raises PoisonedError: an earlier failure stopped the store.
    fn result(&self, py: Python<'_>) -> PyResult<PyManyBytes> {
        self.wait_up_to(py, None)?;
        let bytes = self.bytes().or_raise(py, Some(&self.path))?;
        Ok(PyManyBytes::new(self, bytes))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let task = slf.py().import("remanent._store.aio")?.call_method1("read", (slf,))?;
        task.call_method0("__await__")
    }

    /// Returns whether the read is done. If not, `event_fd` will report `id` once the read is done.
    fn _poll(&self, py: Python<'_>, event_fd: &Bound<'_, EventFd>, id: u64) -> PyResult<bool> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        self.waiters.add(event_fd.get(), id);
        self.done(py)
    }

    fn __repr__(&self) -> String {
        format!("ReadMany(ranges={})", self.infos.len())
    }
}

/// The bytes of many ranges of pages, all as of one batch. Returned by `ReadMany.result`.
///
/// The object is a sequence of bytes. `numpy(index)` and memoryview access the store's own buffer, read-only
/// and without a copy. The buffer returns to the store once this object and all views of it are deleted. All
/// such buffers together use at most 256 MiB.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["a"], store["b"] = bytes(range(4)), b"b"
/// ...     many = store.read_many(["a", "b"]).result()
/// >>> many[1], many.numpy(0, "uint16").tolist(), many.lsn, bytes(memoryview(many))
/// (b'b', [256, 770], 2, b'\x00\x01\x02\x03b')
#[pyclass(frozen, sequence, name = "ManyBytes", module = "remanent")]
pub struct PyManyBytes {
    opener: u32,
    path: String,
    infos: Arc<[PageInfo]>,
    bytes: Arc<ManyBytes>,
    /// The length of the whole buffer in bytes, in the type that the buffer protocol needs.
    shape: [i64; 1],
}

impl PyManyBytes {
    fn new(read: &PyReadMany, bytes: Arc<ManyBytes>) -> Self {
        let shape = [bytes.as_bytes().len() as i64];
        Self { opener: read.opener, path: read.path.clone(), infos: read.infos.clone(), bytes, shape }
    }

    fn bytes(&self, py: Python<'_>) -> PyResult<&ManyBytes> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        Ok(&self.bytes)
    }

    /// Converts a Python index, which counts from the end if negative, to the index of a range.
    fn index(&self, index: isize) -> PyResult<usize> {
        let count = self.bytes.count();
        let from_start = if index < 0 { count.checked_add_signed(index) } else { Some(index as usize) };
        from_start
            .filter(|index| *index < count)
            .ok_or_else(|| out_of_bounds(format!("index {index} is outside the {count} ranges")))
    }
}

#[pymethods]
impl PyManyBytes {
    /// The Lsn of the batch whose state the bytes show.
    #[getter]
    fn lsn(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.bytes(py)?.lsn().0)
    }

    /// The total length of all ranges in bytes.
    #[getter]
    fn nbytes(&self) -> i64 {
        self.shape[0]
    }

    fn __len__(&self) -> usize {
        self.bytes.count()
    }

    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::number)] index: isize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.bytes(py)?;
        Ok(PyBytes::new(py, bytes.get(self.index(index)?)))
    }

    /// Returns the ranges as a list of bytes objects.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let bytes = self.bytes(py)?;
        PyList::new(py, (0..bytes.count()).map(|index| PyBytes::new(py, bytes.get(index))))
    }

    /// Returns one range as a read-only NumPy array in the store's buffer.
    ///
    /// :param index: the index of the range in the call.
    /// :param dtype: the element type, such as "float32" or "F32". None uses the dtype in the page's
    ///     metadata, or "uint8".
    /// :param shape: the length of each dimension in elements. None uses the shape in the page's metadata if
    ///     the range is the whole page, and otherwise one dimension.
    /// :raises ValueError: the length of the range does not match `dtype` and `shape`.
    /// :raises MemoryRefusedError: NumPy and `ml_dtypes` have no such element type.
    #[pyo3(signature = (index, dtype=None, shape=None))]
    fn numpy<'py>(
        slf: &Bound<'py, Self>,
        #[pyo3(from_py_with = arguments::number)] index: isize,
        #[pyo3(from_py_with = arguments::optional_dtype)] dtype: Option<&str>,
        #[pyo3(from_py_with = arguments::shape)] shape: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let index = this.index(index)?;
        let range = this.bytes(py)?.range(index);
        let mut info = this.infos[index].clone();
        if range.len() as u64 != info.len {
            // The shape in the metadata is that of the whole page.
            info.metadata.make_mut().remove("shape");
        }
        let (dtype, shape) = layout(dtype, shape, &info, range.len())?;
        let options = PyDict::new(py);
        options.set_item("dtype", dtype.numpy(py)?)?;
        options.set_item("buffer", slf)?;
        options.set_item("offset", range.start)?;
        py.import("numpy")?.call_method("ndarray", (shape,), Some(&options))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let parts = BufferParts {
            address: this.bytes(slf.py())?.as_bytes().as_ptr() as usize,
            len: this.shape[0] as usize,
            item: 1,
            format: c"B".as_ptr(),
            shape: this.shape.as_ptr(),
            ndim: 1,
            read_only: true,
        };
        // SAFETY: the interpreter passes a view to fill; the bytes live as long as this object, which the
        // view keeps alive.
        unsafe { fill_buffer(view, flags, slf.clone().into_any(), parts) }
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: this is the view that `__getbuffer__` filled, released once.
        unsafe { release_buffer(view) };
    }

    fn __repr__(&self) -> String {
        format!("ManyBytes(ranges={}, nbytes={})", self.bytes.count(), self.shape[0])
    }
}
