//! Page memory that callers own: tensors into which an open places pages, and the memory of released pages.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use remanent::device::{CallerMemory, DeviceBytes};
use remanent::options::MemoryOptions;
use remanent::{PageInfo, Result};

use crate::arguments;
use crate::errors::OrRaise;
use crate::gate::{Gate, check_process, detached};
use crate::memory::Input;
use crate::page_info::Info;

/// An exception that a caller's callback raised during an engine call.
#[derive(Clone, Default)]
pub struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// Returns the exception that the callback raised, if any, or else the result of the call.
    pub fn or<T>(&self, called: PyResult<T>) -> PyResult<T> {
        let raised = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (called, raised) {
            (Err(_), Some(raised)) => Err(raised),
            (called, _) => called,
        }
    }
}

/// Returns memory options with which an open requests the memory of each page from the callable `source`.
pub fn page_memory(memory: MemoryOptions, source: Py<PyAny>, raised: &Raised) -> MemoryOptions {
    let raised = raised.clone();
    memory.page_memory(move |info| {
        let asked = Python::attach(|py| ask(source.bind(py), info));
        asked.unwrap_or_else(|error| {
            *raised.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            // The callback can end the open only by unwinding. `resume_unwind` does not call the panic hook.
            std::panic::resume_unwind(Box::new("the source of page memory raised an exception"))
        })
    })
}

fn ask(source: &Bound<'_, PyAny>, info: &PageInfo) -> PyResult<Option<CallerMemory>> {
    let memory = source.call1((Info(info.clone()),))?;
    if memory.is_none() {
        return Ok(None);
    }
    Input::take_writable(&memory).map(|memory| Some(memory.caller_memory()))
}

/// Memory that belonged to a page and now belongs to the caller. Returned by `Store.release`.
///
/// `torch.as_tensor`, CuPy and Numba use GPU memory without a copy and keep it alive. If pages are in host
/// memory, `read` and `write` access the memory. If the page was in caller-owned memory, this object refers
/// to that memory.
///
/// The memory counts toward the budget of its place until this object is deleted.
///
/// >>> with remanent.Store(directory, device="host") as store:
/// ...     store["k"] = b"remanent"
/// ...     memory = store.release("k")
/// ...     memory.write(0, b"R")
/// ...     memory.read(), memory.read(2, 3), memory.place, "k" in store
/// (b'Remanent', b'man', 'host', False)
#[pyclass(frozen, name = "PageMemory", module = "remanent")]
pub struct PyPageMemory {
    opener: u32,
    path: String,
    bytes: Option<DeviceBytes>,
}

impl PyPageMemory {
    pub fn of(gate: &Gate, bytes: DeviceBytes) -> Self {
        Self { opener: std::process::id(), path: gate.path.clone(), bytes: Some(bytes) }
    }

    fn bytes(&self) -> &DeviceBytes {
        self.bytes.as_ref().expect("present until it is dropped")
    }

    fn part(&self, offset: u64, len: u64) -> Result<DeviceBytes> {
        check_process(self.opener)?;
        self.bytes().part(offset..offset.saturating_add(len))
    }
}

#[pymethods]
impl PyPageMemory {
    /// The length of the memory in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes().byte_len()
    }

    /// The place of the memory, such as "device:0".
    #[getter]
    fn place(&self) -> String {
        self.bytes().place().to_string()
    }

    /// The address at which kernels access the first byte, or None if they cannot access the memory.
    #[getter]
    fn address(&self) -> Option<u64> {
        self.bytes().address()
    }

    /// Returns `length` bytes from `offset` on. None reads to the end of the memory.
    ///
    /// :raises OutOfBoundsError: the range is not within the memory.
    #[pyo3(signature = (offset=0, length=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::optional_length)] length: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let len = length.unwrap_or_else(|| self.nbytes().saturating_sub(offset));
        let part = self.part(offset, len).or_raise(py, Some(&self.path))?;
        PyBytes::new_with(py, part.byte_len() as usize, |out| {
            py.detach(|| part.read(0, out)).or_raise(py, Some(&self.path))
        })
    }

    /// Replaces the bytes from `offset` on with `data`.
    ///
    /// :param data: contiguous bytes in host memory.
    /// :raises OutOfBoundsError: the range is not within the memory.
    /// :raises BufferError: `data` does not provide contiguous bytes.
    fn write(
        &self,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (py, data) = (data.py(), Input::take_host(data)?);
        let written = py.detach(|| self.part(offset, data.len() as u64)?.write(0, data.as_slice()));
        written.or_raise(py, Some(&self.path))
    }

    /// The memory by version 3 of the CUDA array interface, which CuPy, Numba and torch use to access GPU
    /// memory.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        let Some(address) = self.address() else {
            return Err(PyAttributeError::new_err("the memory is on the host; use `read`"));
        };
        let interface = PyDict::new(py);
        interface.set_item("data", (address, false))?;
        interface.set_item("shape", (self.nbytes(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("strides", py.None())?;
        // The store has no work in flight on this memory.
        interface.set_item("stream", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    fn __repr__(&self) -> String {
        format!("PageMemory(place={:?}, nbytes={})", self.place(), self.nbytes())
    }
}

impl Drop for PyPageMemory {
    fn drop(&mut self) {
        detached(self.bytes.take());
    }
}
