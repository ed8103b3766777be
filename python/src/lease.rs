//! `Lease`: temporary read access to a page's bytes in place.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::device::RawStream;
use remanent::{Error, Lease, PageId, Result, Store};
use self_cell::self_cell;

use crate::arguments;
use crate::array::{
    Aligned, Array, BufferParts, MemoryBytes, as_numpy, check_export, fill_buffer, release_buffer,
};
use crate::descriptor::descriptor_to_py;
use crate::dlpack::{self, Export};
use crate::dtype::{Dtype, layout};
use crate::errors::{LEASE, OrRaise, STORE, memory_refused};
use crate::gate::{Gate, Handle, check_process, detached};
use crate::page_info::Info;

self_cell! {
    struct LeaseCell {
        owner: Arc<Store>,
        #[covariant]
        dependent: Lease,
    }
}

/// A lease and the handle that keeps its store open. The lease is dropped first.
struct HeldLease {
    cell: LeaseCell,
    _handle: Handle,
}

/// Read access to a page in place. The bytes stay as they were when the lease began. Created by
/// `Store.lease`.
///
/// A memoryview or NumPy array accesses the store's own memory, read-only, and must be deleted before the
/// lease can end. DLPack returns a copy, because consumers such as torch ignore the read-only flag. With
/// `copy=False`, DLPack returns the memory itself to a consumer that respects the flag.
///
/// >>> import numpy
/// >>> with remanent.Store(directory, device="host") as store:
/// ...     store["k"] = bytes(range(6))
/// ...     with store.lease("k", "uint8", [2, 3]) as lease:
/// ...         int(numpy.asarray(lease)[1].sum())
/// 12
#[pyclass(frozen, name = "Lease", module = "remanent")]
pub struct PyLease {
    opener: u32,
    path: String,
    info: remanent::PageInfo,
    lsn: u64,
    dtype: &'static Dtype,
    shape: Vec<i64>,
    lease: Mutex<Option<Arc<HeldLease>>>,
    /// The number of views of the memory that other objects hold.
    exports: AtomicUsize,
}

impl PyLease {
    pub fn take(
        py: Python<'_>,
        gate: &Arc<Gate>,
        page: PageId,
        dtype: Option<&str>,
        shape: Option<Vec<usize>>,
    ) -> PyResult<Self> {
        let held = py.detach(|| {
            let (handle, store) = gate.hold()?;
            let cell = LeaseCell::try_new(store, |store| store.lease(page))?;
            Ok(HeldLease { cell, _handle: handle })
        });
        let held = held.or_raise_of(py, Some(&gate.path), STORE)?;
        let lease = held.cell.borrow_dependent();
        let (info, lsn) = (lease.info().clone(), lease.lsn().0);
        let (dtype, shape) = match layout(dtype, shape, &info, info.len as usize) {
            Ok(layout) => layout,
            Err(error) => {
                detached(held);
                return Err(error);
            }
        };
        Ok(Self {
            opener: std::process::id(),
            path: gate.path.clone(),
            info,
            lsn,
            dtype,
            shape: shape.iter().map(|dim| *dim as i64).collect(),
            lease: Mutex::new(Some(Arc::new(held))),
            exports: AtomicUsize::new(0),
        })
    }

    fn held(&self) -> Result<Arc<HeldLease>> {
        check_process(self.opener)?;
        self.lease.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)
    }

    fn inspect<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&Lease<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| run(self.held()?.cell.borrow_dependent())).or_raise_of(py, Some(&self.path), LEASE)
    }

    /// Waits until all batches in flight are applied and returns the address of the bytes.
    fn bytes_address(&self, py: Python<'_>) -> PyResult<usize> {
        self.inspect(py, |lease| lease.bytes().map(|bytes| bytes.as_ptr() as usize))
    }
}

#[pymethods]
impl PyLease {
    /// The page as it was when the lease began.
    #[getter]
    fn info(&self) -> Info {
        Info(self.info.clone())
    }

    /// The epoch of the leased version of the page.
    #[getter]
    fn epoch(&self) -> u64 {
        self.info.epoch.0
    }

    /// The Lsn of the newest batch whose changes are included in the bytes.
    #[getter]
    fn lsn(&self) -> u64 {
        self.lsn
    }

    /// The length of the page in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.info.len
    }

    /// The NumPy name of the element type, such as "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name
    }

    /// The length of each dimension in elements.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, &self.shape)
    }

    /// The address at which kernels access the bytes, or None if pages are only in host memory. Call `on`
    /// with a stream first.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.inspect(py, |lease| Ok(lease.address()))
    }

    /// Returns the location of the page's bytes as a dict, for a transport that registers memory (NIXL, UCX,
    /// verbs).
    ///
    /// The keys are "address", "len", "kind" ("device", "pinned", "host" or "unified"), "gpu" (the CUDA
    /// ordinal), "store", "page" and "epoch". The location is valid until the lease ends, so end the
    /// registration first. Transports may only read.
    ///
    /// :raises DeviceError: pages are only in host memory, or the page is empty.
    fn descriptor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        descriptor_to_py(py, &self.inspect(py, |lease| lease.descriptor())?)
    }

    /// Allows work that is queued on `stream` from now on to read the page.
    ///
    /// :param stream: a CUDA stream handle as an int.
    fn on(&self, py: Python<'_>, #[pyo3(from_py_with = arguments::stream)] stream: u64) -> PyResult<()> {
        self.inspect(py, |lease| {
            // SAFETY: the caller names a stream that it owns and keeps until the lease has ended.
            let stream = unsafe { RawStream::from_cuda(stream) };
            lease.on(stream).map(drop)
        })
    }

    /// Ends the lease. Does nothing if the lease has already ended.
    ///
    /// :raises MemoryRefusedError: views of the lease's memory still exist.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        let held = {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            let exports = self.exports.load(Ordering::Acquire);
            if lease.is_some() && exports > 0 {
                let message = format!("{exports} views of the lease's memory still exist");
                return Err(memory_refused(message, "delete these arrays and memoryviews first"));
            }
            lease.take()
        };
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
        let _ = (error, traceback);
        match self.end(py) {
            // Report the exception of the block and not this error. The frames of that exception may hold the
            // views.
            Err(_) if kind.is_some() => Ok(()),
            ended => ended,
        }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU, 0)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        check_export(stream.as_ref(), dl_device)?;
        if copy == Some(false) {
            // The store's own memory. A separate object counts the export, as for a memoryview.
            let owner = Bound::new(py, Exported::new(py, slf)?)?;
            let export = Export {
                address: owner.get().address,
                shape: &this.shape,
                dtype: this.dtype.dlpack(),
                owner: owner.into_any().unbind(),
                read_only: true,
                is_copy: false,
                versioned: max_version.is_some_and(|(major, _)| major >= 1),
            };
            return export.capsule(py);
        }
        // Consumers that ignore the read-only flag, such as torch, would write to the store's memory.
        let copied = this.inspect(py, |lease| {
            let bytes = lease.bytes()?;
            let mut copied = Aligned::zeros(bytes.len())?;
            copied.as_mut_slice().copy_from_slice(bytes);
            Ok(copied)
        })?;
        let shape: Vec<usize> = this.shape.iter().map(|dim| *dim as usize).collect();
        let array = Bound::new(py, Array::new(copied, this.dtype, &shape))?;
        let options = pyo3::types::PyDict::new(py);
        options.set_item("max_version", max_version)?;
        array.call_method("__dlpack__", (), Some(&options))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let Some(format) = this.dtype.format else {
            let name = this.dtype.name;
            return Err(memory_refused(
                format!("the buffer protocol has no format for {name}"),
                "use DLPack, or lease the page with dtype \"uint8\"",
            ));
        };
        // The view is counted before the lease is read, since another thread may be ending the lease.
        this.exports.fetch_add(1, Ordering::AcqRel);
        let address = match this.bytes_address(slf.py()) {
            Ok(address) => address,
            Err(error) => {
                this.exports.fetch_sub(1, Ordering::AcqRel);
                return Err(error);
            }
        };
        let parts = BufferParts {
            address,
            len: this.info.len as usize,
            item: this.dtype.item_size(),
            format: format.as_ptr(),
            shape: this.shape.as_ptr(),
            ndim: this.shape.len(),
            read_only: true,
        };
        // SAFETY: the interpreter passes a view to fill; the lease stays while the view is counted.
        let filled = unsafe { fill_buffer(view, flags, slf.clone().into_any(), parts) };
        if filled.is_err() {
            this.exports.fetch_sub(1, Ordering::AcqRel);
        }
        filled
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: this is the view that `__getbuffer__` filled, released once.
        unsafe { release_buffer(view) };
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns the bytes as a read-only NumPy array in the store's memory. The lease cannot end before the
    /// array is deleted.
    ///
    /// :raises MemoryRefusedError: NumPy and `ml_dtypes` have no such element type.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        as_numpy(slf, this.dtype, &this.shape, || {
            let owner = Bound::new(py, Exported::new(py, slf)?)?;
            let (address, len) = (owner.get().address, this.info.len as usize);
            Ok(MemoryBytes { address, len, read_only: true, owner: owner.into_any().unbind() })
        })
    }

    fn __repr__(&self) -> String {
        format!("Lease(page={}, epoch={}, nbytes={})", self.info.page, self.info.epoch, self.info.len)
    }
}

impl Drop for PyLease {
    fn drop(&mut self) {
        let held = self.lease.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        detached(held);
    }
}

/// An export of a lease's memory, by DLPack or as bytes. Exists as long as its consumer uses the memory.
#[pyclass(frozen, module = "remanent._store._native")]
struct Exported {
    address: usize,
    lease: Py<PyLease>,
}

impl Exported {
    fn new(py: Python<'_>, lease: &Bound<'_, PyLease>) -> PyResult<Self> {
        lease.get().exports.fetch_add(1, Ordering::AcqRel);
        // From here on, dropping it decrements the count.
        let mut exported = Self { address: 0, lease: lease.clone().unbind() };
        exported.address = lease.get().bytes_address(py)?;
        Ok(exported)
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        self.lease.get().exports.fetch_sub(1, Ordering::AcqRel);
    }
}
