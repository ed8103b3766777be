//! Memory that pages live in and callers hold: tensors that an open puts pages into, and what a released page
//! leaves.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use remanent::{CallerMemory, DeviceBytes, Options, PageInfo, Result};

use crate::arguments;
use crate::errors::OrRaise;
use crate::gate::{Gate, check_process, detached};
use crate::memory::Input;
use crate::page_info::Info;

/// What a callback of the caller's raised, while the engine called it.
#[derive(Clone, Default)]
pub struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// The result of the call that called back, unless the callback raised: then what it raised.
    pub fn or<T>(&self, called: PyResult<T>) -> PyResult<T> {
        let raised = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (called, raised) {
            (Err(_), Some(raised)) => Err(raised),
            (called, _) => called,
        }
    }
}

/// Options of an open that asks `source`, a callable, for the memory of each page.
pub fn page_memory(options: Options, source: Py<PyAny>, raised: &Raised) -> Options {
    let raised = raised.clone();
    options.page_memory(move |info| {
        let asked = Python::attach(|py| ask(source.bind(py), info));
        asked.unwrap_or_else(|error| {
            *raised.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            // The one way to end the open. It is no panic of this thread's: no hook is told of it.
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

/// Memory that was a page's, and is the caller's now. Made by `Store.release`.
///
/// Of a GPU's, `torch.as_tensor`, CuPy and Numba take it without a copy, and hold it as long as they use it.
/// Where pages live on the host, `read` and `write` reach it. A page that lived in a tensor of the caller's
/// leaves that: then this is another name of it.
///
/// It counts in the budget of its place until it is gone.
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
    /// There until it is dropped.
    bytes: Option<DeviceBytes>,
}

impl PyPageMemory {
    pub fn of(gate: &Gate, bytes: DeviceBytes) -> Self {
        Self { opener: std::process::id(), path: gate.path.clone(), bytes: Some(bytes) }
    }

    fn bytes(&self) -> &DeviceBytes {
        self.bytes.as_ref().expect("it is there until it is dropped")
    }

    fn part(&self, offset: u64, len: u64) -> Result<DeviceBytes> {
        check_process(self.opener)?;
        self.bytes().part(offset..offset.saturating_add(len))
    }
}

#[pymethods]
impl PyPageMemory {
    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes().byte_len()
    }

    /// The place where it lies.
    #[getter]
    fn place(&self) -> String {
        self.bytes().place().to_string()
    }

    /// The address at which kernels find the first byte; None where pages live on the host.
    #[getter]
    fn address(&self) -> Option<u64> {
        self.bytes().address()
    }

    /// Bytes from `offset` on, to the end or `length` of them.
    ///
    /// :raises OutOfBoundsError.
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

    /// Replaces bytes from `offset` on.
    ///
    /// :param data: contiguous bytes of the host. :raises OutOfBoundsError, BufferError.
    fn write(
        &self,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (py, data) = (data.py(), Input::take_host(data)?);
        let written = py.detach(|| self.part(offset, data.len() as u64)?.write(0, data.as_slice()));
        written.or_raise(py, Some(&self.path))
    }

    /// Version 3 of the interface by which CuPy, Numba and torch take a GPU's memory.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        let Some(address) = self.address() else {
            return Err(PyAttributeError::new_err("the memory lies on the host: `read` gives its bytes"));
        };
        let interface = PyDict::new(py);
        interface.set_item("data", (address, false))?;
        interface.set_item("shape", (self.nbytes(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("strides", py.None())?;
        // Nothing of the store's is under way there.
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
