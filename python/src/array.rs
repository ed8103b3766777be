//! `Array`, a copy of a page that other libraries can use without another copy.

use std::ffi::c_int;
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use crate::dlpack::{self, Export};
use crate::dtype::Dtype;
use crate::errors::memory_refused;

/// The alignment at which JAX uses memory without a copy, in bytes.
const ALIGN: usize = 64;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Cell([u8; ALIGN]);

/// Bytes whose address is a multiple of 64.
pub struct Aligned {
    cells: Vec<Cell>,
    len: usize,
}

impl Aligned {
    pub fn zeros(len: usize) -> remanent::Result<Self> {
        let count = len.div_ceil(ALIGN);
        let mut cells = Vec::new();
        cells
            .try_reserve_exact(count)
            .map_err(|_| remanent::Error::OutOfMemory { place: remanent::Place::Host, len: len as u64 })?;
        cells.resize(count, Cell([0; ALIGN]));
        Ok(Self { cells, len })
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.cells.as_flattened_mut_bytes()[..self.len]
    }

    fn address(&self) -> usize {
        self.cells.as_ptr() as usize
    }
}

trait Bytes {
    fn as_flattened_mut_bytes(&mut self) -> &mut [u8];
}

impl Bytes for Vec<Cell> {
    fn as_flattened_mut_bytes(&mut self) -> &mut [u8] {
        let len = self.len() * ALIGN;
        // SAFETY: cells are only bytes, contiguous and without padding.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), len) }
    }
}

/// A copy of a page's bytes that the caller owns, with an element type and a shape. Accessible by `numpy()`,
/// memoryview and `from_dlpack`.
///
/// The memory is aligned to 64 bytes, so that JAX uses it without another copy. Created by `Reader.array`.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = bytes(range(8))
/// ...     array = store.array("k", "int16", [2, 2])
/// >>> array.shape, array.nbytes, array.numpy().tolist()
/// ((2, 2), 8, [[256, 770], [1284, 1798]])
#[pyclass(frozen, module = "remanent")]
pub struct Array {
    bytes: Aligned,
    dtype: &'static Dtype,
    shape: Vec<i64>,
}

impl Array {
    pub fn new(bytes: Aligned, dtype: &'static Dtype, shape: &[usize]) -> Self {
        Self { bytes, dtype, shape: shape.iter().map(|dim| *dim as i64).collect() }
    }
}

#[pymethods]
impl Array {
    /// The NumPy name of the element type, such as "int16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name
    }

    /// The length of each dimension in elements.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes.len
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
        let py = slf.py();
        check_export(stream.as_ref(), dl_device)?;
        let this = slf.get();
        let (source, owner) = match copy {
            // A separate copy that neither this array nor another consumer shares.
            Some(true) => {
                let mut copied =
                    Aligned::zeros(this.bytes.len).map_err(|error| crate::errors::to_py(py, &error, None))?;
                // SAFETY: these are this array's bytes, which live as long as the array.
                let own =
                    unsafe { std::slice::from_raw_parts(this.bytes.address() as *const u8, this.bytes.len) };
                copied.as_mut_slice().copy_from_slice(own);
                let array = Self { bytes: copied, dtype: this.dtype, shape: this.shape.clone() };
                let array = Bound::new(py, array)?;
                (array.get().bytes.address(), array.into_any().unbind())
            }
            _ => (this.bytes.address(), slf.clone().into_any().unbind()),
        };
        let export = Export {
            address: source,
            shape: &this.shape,
            dtype: this.dtype.dlpack(),
            owner,
            read_only: false,
            is_copy: copy == Some(true),
            versioned: max_version.is_some_and(|(major, _)| major >= 1),
        };
        export.capsule(py)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let Some(format) = this.dtype.format else {
            let name = this.dtype.name;
            return Err(memory_refused(
                format!("the buffer protocol has no format for {name}"),
                "use DLPack, or read the page with dtype \"uint8\"",
            ));
        };
        let parts = BufferParts {
            address: this.bytes.address(),
            len: this.bytes.len,
            item: this.dtype.item_size(),
            format: format.as_ptr(),
            shape: this.shape.as_ptr(),
            ndim: this.shape.len(),
            read_only: false,
        };
        // SAFETY: the interpreter passes a view to fill; the memory it refers to lives as long as this
        // object, which the view keeps alive.
        unsafe { fill_buffer(view, flags, slf.into_any(), parts) }
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: this is the view that `__getbuffer__` filled, released once.
        unsafe { release_buffer(view) };
    }

    /// Returns a NumPy array that uses the same memory. If NumPy lacks the element type, such as bfloat16,
    /// the array has the corresponding dtype of `ml_dtypes`.
    ///
    /// :raises MemoryRefusedError: `ml_dtypes` cannot be imported, or also lacks the element type.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        as_numpy(slf, this.dtype, &this.shape, || {
            let (address, len) = (this.bytes.address(), this.bytes.len);
            Ok(MemoryBytes { address, len, read_only: false, owner: slf.clone().into_any().unbind() })
        })
    }

    fn __repr__(&self) -> String {
        format!("Array(dtype={:?}, shape={:?})", self.dtype.name, self.shape)
    }
}

/// Returns a NumPy array that uses an exporter's memory. `bytes` exports the same memory as bytes, for
/// elements for which the buffer protocol has no format.
pub fn as_numpy<'py, T>(
    exporter: &Bound<'py, T>,
    dtype: &Dtype,
    shape: &[i64],
    bytes: impl FnOnce() -> PyResult<MemoryBytes>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = exporter.py();
    let wanted = dtype.numpy(py)?;
    // A memoryview comes first: for an object that refuses its buffer, NumPy would create an array that holds
    // the object itself.
    let array = |object: &Bound<'py, PyAny>| {
        py.import("numpy")?.call_method1("asarray", (PyMemoryView::from(object)?,))
    };
    if dtype.format.is_some() {
        return array(exporter.as_any());
    }
    let bytes = array(Bound::new(py, bytes()?)?.as_any())?;
    bytes.call_method1("view", (wanted,))?.call_method1("reshape", (PyTuple::new(py, shape)?,))
}

/// Exports another object's memory as bytes, and keeps that object alive.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct MemoryBytes {
    pub address: usize,
    pub len: usize,
    pub read_only: bool,
    pub owner: Py<PyAny>,
}

#[pymethods]
impl MemoryBytes {
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the interpreter passes a view to fill; the view keeps this object, and thus the owner, alive.
        match unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                this.address as *mut std::ffi::c_void,
                this.len as isize,
                c_int::from(this.read_only),
                flags,
            )
        } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

/// Returns an error if a DLPack consumer requests a stream or device that an export of host memory does not
/// support.
pub fn check_export(stream: Option<&Bound<'_, PyAny>>, dl_device: Option<(i32, i32)>) -> PyResult<()> {
    // -1 means that no stream needs to wait, which is always true here.
    if let Some(stream) = stream
        && stream.extract::<i64>()? != -1
    {
        return Err(memory_refused("host memory has no streams", "omit stream, or pass -1"));
    }
    match dl_device {
        None | Some((dlpack::CPU, _)) => Ok(()),
        Some(_) => Err(memory_refused(
            "the bytes are in host memory",
            "omit dl_device, and move the tensor afterwards",
        )),
    }
}

/// The contents of a buffer-protocol view. The exporter keeps the shape and format alive.
pub struct BufferParts {
    pub address: usize,
    pub len: usize,
    pub item: usize,
    pub format: *const std::ffi::c_char,
    pub shape: *const i64,
    pub ndim: usize,
    pub read_only: bool,
}

/// Fills a buffer-protocol view.
///
/// # Safety
/// `view` must be a view to fill, and the parts must live as long as `owner`.
pub unsafe fn fill_buffer(
    view: *mut ffi::Py_buffer,
    flags: c_int,
    owner: Bound<'_, PyAny>,
    parts: BufferParts,
) -> PyResult<()> {
    if view.is_null() {
        return Err(memory_refused("the caller passed no view to fill", "pass a view"));
    }
    if parts.read_only && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
        return Err(memory_refused(
            "the memory belongs to the store and is read-only",
            "request a read-only buffer, or copy the page with store.numpy(page)",
        ));
    }
    // SAFETY: by this function's contract. An isize is 64 bits, as is a dimension.
    let view = unsafe { &mut *view };
    let mut strides = vec![parts.item as isize; parts.ndim];
    let shape: &[i64] = match parts.ndim {
        0 => &[],
        // SAFETY: by this function's contract there are this many dimensions.
        ndim => unsafe { std::slice::from_raw_parts(parts.shape, ndim) },
    };
    for at in (1..parts.ndim).rev() {
        strides[at - 1] = strides[at] * shape[at] as isize;
    }
    // A consumer of an empty buffer may still read its address.
    view.buf = parts.address as *mut std::ffi::c_void;
    view.len = parts.len as isize;
    view.readonly = c_int::from(parts.read_only);
    view.itemsize = parts.item as isize;
    let wants = |flag: c_int| flags & flag == flag;
    view.format = if wants(ffi::PyBUF_FORMAT) { parts.format.cast_mut() } else { ptr::null_mut() };
    view.ndim = parts.ndim as c_int;
    view.shape = if wants(ffi::PyBUF_ND) { parts.shape.cast_mut().cast() } else { ptr::null_mut() };
    let strides = Box::into_raw(Box::new(strides));
    view.internal = strides.cast();
    // SAFETY: allocated just above, and freed when the view is released.
    let strides = unsafe { (*strides).as_mut_ptr() };
    view.strides = if wants(ffi::PyBUF_STRIDES) { strides } else { ptr::null_mut() };
    view.suboffsets = ptr::null_mut();
    view.obj = owner.into_ptr();
    Ok(())
}

/// Frees the memory that `fill_buffer` allocated for a view.
///
/// # Safety
/// `view` must have been filled by [`fill_buffer`] and be released only once.
pub unsafe fn release_buffer(view: *mut ffi::Py_buffer) {
    // SAFETY: by this function's contract.
    let strides = unsafe { (*view).internal.cast::<Vec<isize>>() };
    // SAFETY: created by `Box::into_raw` when the view was filled.
    drop(unsafe { Box::from_raw(strides) });
}
