//! `Pin`: a page that keeps its address while batches change it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::device::RawStream;
use remanent::{Error, PageId, Pin, Result, Store};
use self_cell::self_cell;

use crate::arguments;
use crate::descriptor::descriptor_to_py;
use crate::errors::{OrRaise, PIN, STORE};
use crate::gate::{Gate, Handle, check_process, detached};

self_cell! {
    struct PinCell {
        owner: Arc<Store>,
        #[covariant]
        dependent: Pin,
    }
}

/// A pin and the handle that keeps its store open. The pin is dropped first.
struct HeldPin {
    cell: PinCell,
    _handle: Handle,
}

/// Keeps the address of a page constant, for captured CUDA graphs and other users of pointers. Created by
/// `Store.pin`.
///
/// Batches change the page in place. Kernels that read the page at the same time may see part of a change, so
/// wait for them before a commit. Kernels must not write to the page, because their writes would not be
/// logged. Operations that would change the page's address raise `LeasedError` and change nothing: resizing,
/// moving, deleting or leasing the page, and `restore`.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = b"here"
/// ...     with store.pin("k") as pin:
/// ...         store["k"] = b"new!"
/// ...         try:
/// ...             del store["k"]
/// ...         except remanent.LeasedError as error:
/// ...             error.page == pin.page, store["k"]
/// ...     del store["k"]
/// (True, b'new!')
#[pyclass(frozen, name = "Pin", module = "remanent")]
pub struct PyPin {
    opener: u32,
    path: String,
    page: u64,
    len: u64,
    pin: Mutex<Option<Arc<HeldPin>>>,
}

impl PyPin {
    pub fn take(py: Python<'_>, gate: &Arc<Gate>, page: PageId) -> PyResult<Self> {
        let held = py.detach(|| {
            let (handle, store) = gate.hold()?;
            let cell = PinCell::try_new(store, |store| store.pin(page))?;
            Ok(HeldPin { cell, _handle: handle })
        });
        let held = held.or_raise_of(py, Some(&gate.path), STORE)?;
        let pin = held.cell.borrow_dependent();
        Ok(Self {
            opener: std::process::id(),
            path: gate.path.clone(),
            page: pin.page().0,
            len: pin.byte_len(),
            pin: Mutex::new(Some(Arc::new(held))),
        })
    }

    fn inspect<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&Pin<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| {
            check_process(self.opener)?;
            let held =
                self.pin.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)?;
            // If another thread ended the pin meanwhile, the pin is dropped here, still without the
            // interpreter's lock.
            run(held.cell.borrow_dependent())
        })
        .or_raise_of(py, Some(&self.path), PIN)
    }
}

#[pymethods]
impl PyPin {
    /// The id of the pinned page.
    #[getter]
    fn page(&self) -> u64 {
        self.page
    }

    /// The length of the page in bytes, which does not change.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len
    }

    /// The address at which kernels access the bytes, constant while the pin exists. None if pages are only
    /// in host memory, or if the page is empty.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.inspect(py, |pin| Ok(pin.address()))
    }

    /// Returns the location of the page's bytes as a dict, for a transport that registers memory (NIXL, UCX,
    /// verbs).
    ///
    /// The keys are "address", "len", "kind" ("device", "pinned", "host" or "unified"), "gpu" (the CUDA
    /// ordinal), "store", "page" and "epoch". The location is valid until the pin ends, so end the
    /// registration first. Transports may only read.
    ///
    /// :raises DeviceError: pages are only in host memory, or the page is empty.
    fn descriptor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        descriptor_to_py(py, &self.inspect(py, |pin| pin.descriptor())?)
    }

    /// Makes work that is queued on `stream` from now on see all batches submitted so far. The stream waits
    /// on the device, and the call returns immediately.
    ///
    /// :param stream: a CUDA stream handle as an int.
    /// :raises DeviceError: a graph is being captured from the stream, the stream belongs to another device,
    ///     or pages are in host memory.
    /// :raises ClosedError: the pin has ended.
    fn on(&self, py: Python<'_>, #[pyo3(from_py_with = arguments::stream)] stream: u64) -> PyResult<()> {
        self.inspect(py, |pin| {
            // SAFETY: the caller names a stream that it owns and keeps until the pin has ended.
            let stream = unsafe { RawStream::from_cuda(stream) };
            pin.on(stream).map(drop)
        })
    }

    /// Ends the pin, after which the page may be moved. Does nothing if the pin has already ended.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        let held = self.pin.lock().unwrap_or_else(PoisonError::into_inner).take();
        detached(held);
        Ok(())
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
        let _ = (kind, error, traceback);
        self.end(py)
    }

    fn __repr__(&self) -> String {
        format!("Pin(page={}, nbytes={})", self.page, self.len)
    }
}

impl Drop for PyPin {
    fn drop(&mut self) {
        detached(self.pin.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}
