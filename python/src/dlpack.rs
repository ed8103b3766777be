//! DLPack: the structures of its ABI, imports of other libraries' tensors, and exports of copies.
//!
//! Source: `dlpack.h` 1.1 and the Python specification of the data interchange standard.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::errors::memory_refused;

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;
pub const CUDA_HOST: i32 = 3;
pub const CUDA_MANAGED: i32 = 13;

const READ_ONLY: u64 = 1;
/// The tensor is a copy owned by the consumer.
const IS_COPIED: u64 = 2;

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    ordinal: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlDtype {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDtype,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

#[repr(C)]
struct DlVersion {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct DlManagedVersioned {
    version: DlVersion,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// A tensor of another library, which is kept alive until this value is dropped.
pub struct Imported {
    pub address: usize,
    pub len: usize,
    pub device: i32,
    /// The number of the device among the devices of the same kind.
    pub ordinal: i32,
    pub read_only: bool,
    pub elements: Elements,
    managed: Managed,
}

/// Makes the device of a CUDA tensor of torch the current one. Returns the context manager that ends this, or `None` if
/// the object is not such a tensor. Torch exports only tensors on the current device.
fn torch_device<'py>(object: &Bound<'py, PyAny>, device: i32) -> PyResult<Option<Bound<'py, PyAny>>> {
    if !matches!(device, CUDA | CUDA_MANAGED) {
        return Ok(None);
    }
    let modules = object.py().import("sys")?.getattr("modules")?;
    let Ok(torch) = modules.get_item("torch") else { return Ok(None) };
    if !object.is_instance(&torch.getattr("Tensor")?)? {
        return Ok(None);
    }
    let current = torch.getattr("cuda")?.call_method1("device", (object.getattr("device")?,))?;
    current.call_method0("__enter__")?;
    Ok(Some(current))
}

enum Managed {
    Old(NonNull<DlManaged>),
    Versioned(NonNull<DlManagedVersioned>),
}

// SAFETY: the protocol allows a tensor to be used and deleted on any thread; its memory is only used as plain
// bytes, under the contract that its owner does not access it in the meantime.
unsafe impl Send for Imported {}
// SAFETY: as above; sharing exposes only the address.
unsafe impl Sync for Imported {}

impl Imported {
    /// Imports a tensor from an object with `__dlpack__`.
    ///
    /// # Errors
    /// `BufferError` if the tensor is not contiguous or is in unsupported memory, and errors of the object.
    pub fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        let arguments = PyDict::new(py);
        arguments.set_item("max_version", (1, 0))?;
        if matches!(device, CUDA | CUDA_MANAGED) {
            // The legacy default stream, for which the store waits before it reads the bytes.
            arguments.set_item("stream", 1)?;
        }
        let current = torch_device(object, device)?;
        let capsule = match object.call_method("__dlpack__", (), Some(&arguments)) {
            // Producers from before version 1 do not know this argument.
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
                arguments.del_item("max_version")?;
                object.call_method("__dlpack__", (), Some(&arguments))
            }
            called => called,
        };
        if let Some(current) = current {
            current.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        }
        let capsule = capsule?;
        let capsule = capsule.cast_into::<PyCapsule>().map_err(PyErr::from)?;
        let imported = Self::of_capsule(&capsule)?;
        match imported.device {
            CPU | CUDA | CUDA_HOST | CUDA_MANAGED => Ok(imported),
            other => Err(memory_refused(
                format!("DLPack device type {other} is not supported"),
                "copy the tensor to the host first",
            )),
        }
    }

    fn of_capsule(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        // SAFETY: the capsule is alive; the name is compared, not kept.
        let is_versioned =
            unsafe { pyo3::ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME_VERSIONED.as_ptr()) } == 1;
        let (name, used) = if is_versioned { (NAME_VERSIONED, USED_VERSIONED) } else { (NAME, USED) };
        // SAFETY: the capsule is alive; for a wrong name the call returns null and sets an exception.
        let pointer = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
        let Some(pointer) = NonNull::new(pointer) else { return Err(PyErr::fetch(capsule.py())) };
        let (managed, tensor, flags) = if is_versioned {
            let managed = pointer.cast::<DlManagedVersioned>();
            // SAFETY: a capsule of this name holds this structure, alive until its deleter is called.
            let version = unsafe { &(*managed.as_ptr()).version };
            if version.major != 1 {
                return Err(memory_refused(
                    format!("DLPack version {} is not supported", version.major),
                    "export the tensor by DLPack version 1, or as a NumPy array",
                ));
            }
            // SAFETY: as above, and of a known version.
            let flags = unsafe { (*managed.as_ptr()).flags };
            // SAFETY: as above; only the address is taken.
            let tensor = unsafe { &raw const (*managed.as_ptr()).tensor };
            (Managed::Versioned(managed), tensor, flags)
        } else {
            let managed = pointer.cast::<DlManaged>();
            // SAFETY: a capsule of this name holds this structure, alive until its deleter is called.
            (Managed::Old(managed), unsafe { &raw const (*managed.as_ptr()).tensor }, 0)
        };
        // SAFETY: the capsule is alive, and the name is a constant. From here on this value owns the tensor.
        if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        let mut imported = Self {
            address: 0,
            len: 0,
            device: 0,
            ordinal: 0,
            read_only: flags & READ_ONLY != 0,
            elements: Elements::Bytes,
            managed,
        };
        // SAFETY: the tensor lives as long as the value that owns it.
        let tensor = unsafe { &*tensor };
        imported.device = tensor.device.kind;
        imported.ordinal = tensor.device.ordinal;
        imported.len = contiguous_len(tensor)?;
        imported.elements = elements(tensor);
        imported.address = tensor.data as usize + tensor.byte_offset as usize;
        Ok(imported)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        match self.managed {
            Managed::Old(managed) => {
                // SAFETY: the tensor is owned by this value and is not used afterwards.
                if let Some(deleter) = unsafe { (*managed.as_ptr()).deleter } {
                    // SAFETY: called once, with the structure that it belongs to.
                    unsafe { deleter(managed.as_ptr()) };
                }
            }
            Managed::Versioned(managed) => {
                // SAFETY: the tensor is owned by this value and is not used afterwards.
                if let Some(deleter) = unsafe { (*managed.as_ptr()).deleter } {
                    // SAFETY: called once, with the structure that it belongs to.
                    unsafe { deleter(managed.as_ptr()) };
                }
            }
        }
    }
}

/// Returns the element type and shape of a tensor. The length of the tensor must have been validated.
fn elements(tensor: &DlTensor) -> Elements {
    let shape = match tensor.ndim {
        0 => &[],
        // SAFETY: the structure states this number of dimensions, and is alive.
        ndim => unsafe { std::slice::from_raw_parts(tensor.shape, ndim as usize) },
    };
    let DlDtype { code, bits, lanes } = tensor.dtype;
    let unnamed = || format!("DLPack code {code}, {bits} bits, {lanes} lanes");
    Elements::of(Dtype::of_dlpack(tensor.dtype), shape.iter().map(|dim| *dim as u64).collect(), unnamed)
}

/// Returns the length of a tensor in bytes.
///
/// # Errors
/// `BufferError` if the elements are not contiguous.
fn contiguous_len(tensor: &DlTensor) -> PyResult<usize> {
    let ndim = usize::try_from(tensor.ndim).map_err(|_| impossible("a negative number of dimensions"))?;
    let dims = |pointer: *const i64| {
        if ndim == 0 || pointer.is_null() {
            return None;
        }
        // SAFETY: the structure states that there are `ndim` entries, and is alive.
        Some(unsafe { std::slice::from_raw_parts(pointer, ndim) })
    };
    let shape = dims(tensor.shape).unwrap_or(&[]);
    let bits = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes);
    if !bits.is_multiple_of(8) {
        // Producers differ in whether such elements are packed or take a byte each.
        return Err(memory_refused(
            format!("elements of {bits} bits are not supported; pass a uint8 array of their bytes"),
            "pass a uint8 array of their bytes",
        ));
    }
    let mut elements = 1_usize;
    let strides = dims(tensor.strides);
    let is_empty = shape.contains(&0);
    for (at, length) in shape.iter().enumerate().rev() {
        let length = usize::try_from(*length).map_err(|_| impossible("a negative length"))?;
        if let Some(strides) = strides
            && !is_empty
            && length != 1
            && usize::try_from(strides[at]) != Ok(elements)
        {
            return Err(memory_refused("the tensor is not contiguous", "pass tensor.contiguous()"));
        }
        elements =
            elements.checked_mul(length).ok_or_else(|| impossible("a length of more than 2^64 bytes"))?;
    }
    elements.checked_mul(bits / 8).ok_or_else(|| impossible("a length of more than 2^64 bytes"))
}

fn impossible(what: &str) -> PyErr {
    memory_refused(format!("the tensor has {what}"), "pass a tensor from a library that implements DLPack")
}

pub struct Export<'a> {
    pub address: usize,
    pub shape: &'a [i64],
    pub dtype: DlDtype,
    /// The object that is kept alive until the consumer releases the tensor.
    pub owner: Py<PyAny>,
    pub read_only: bool,
    pub is_copy: bool,
    /// Whether the consumer supports DLPack version 1, the first version with a read-only flag.
    pub versioned: bool,
}

struct Context {
    _owner: Py<PyAny>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Export<'_> {
    /// Returns the DLPack capsule for a consumer.
    ///
    /// # Errors
    /// `BufferError` for read-only memory if the consumer does not support the read-only flag.
    pub fn capsule<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.read_only && !self.versioned {
            return Err(memory_refused(
                "the consumer does not support read-only tensors",
                "omit copy=False, so that a copy is returned",
            ));
        }
        let mut strides = vec![1; self.shape.len()];
        for at in (1..self.shape.len()).rev() {
            strides[at - 1] = strides[at] * self.shape[at].max(1);
        }
        let context = Box::new(Context { _owner: self.owner, shape: self.shape.to_vec(), strides });
        let context = Box::into_raw(context);
        let tensor = DlTensor {
            data: self.address as *mut c_void,
            device: DlDevice { kind: CPU, ordinal: 0 },
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            // SAFETY: the context was created just above; the vectors do not move with it.
            shape: unsafe { (*context).shape.as_mut_ptr() },
            // SAFETY: as above.
            strides: unsafe { (*context).strides.as_mut_ptr() },
            byte_offset: 0,
        };
        let (pointer, name, destructor): (*mut c_void, &CStr, pyo3::ffi::PyCapsule_Destructor) =
            if self.versioned {
                let mut flags = 0;
                if self.read_only {
                    flags |= READ_ONLY;
                }
                if self.is_copy {
                    flags |= IS_COPIED;
                }
                let managed = DlManagedVersioned {
                    version: DlVersion { major: 1, minor: 0 },
                    context: context.cast(),
                    deleter: Some(delete_versioned),
                    flags,
                    tensor,
                };
                (Box::into_raw(Box::new(managed)).cast(), NAME_VERSIONED, end_versioned)
            } else {
                let managed = DlManaged { tensor, context: context.cast(), deleter: Some(delete_old) };
                (Box::into_raw(Box::new(managed)).cast(), NAME, end_old)
            };
        // SAFETY: pointer, name and destructor belong together, and the name is a constant.
        let capsule = unsafe { pyo3::ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor)) };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }
}

unsafe extern "C" fn delete_old(managed: *mut DlManaged) {
    // SAFETY: created by `Box::into_raw` in `capsule`, and deleted once.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: as above.
    let context = unsafe { Box::from_raw(managed.context.cast::<Context>()) };
    release(context);
}

unsafe extern "C" fn delete_versioned(managed: *mut DlManagedVersioned) {
    // SAFETY: created by `Box::into_raw` in `capsule`, and deleted once.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: as above.
    let context = unsafe { Box::from_raw(managed.context.cast::<Context>()) };
    release(context);
}

/// Drops the objects that an export keeps alive. Consumers call a deleter on any thread, with or without the
/// interpreter lock, and even after interpreter shutdown.
fn release(context: Box<Context>) {
    let mut context = Some(context);
    Python::try_attach(|_| drop(context.take()));
    // Without an interpreter, its objects no longer exist.
    std::mem::forget(context);
}

/// Destroys a capsule without a version that no consumer has used.
unsafe extern "C" fn end_old(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: the capsule is being destroyed; a used one has another name.
    if unsafe { pyo3::ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) } == 1 {
        // SAFETY: the capsule is valid under this name.
        let pointer = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
        // SAFETY: the pointer that `capsule` stored, not deleted yet.
        unsafe { delete_old(pointer.cast()) };
    }
}

/// Destroys a versioned capsule that no consumer has used.
unsafe extern "C" fn end_versioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: the capsule is being destroyed; a used one has another name.
    if unsafe { pyo3::ffi::PyCapsule_IsValid(capsule, NAME_VERSIONED.as_ptr()) } == 1 {
        // SAFETY: the capsule is valid under this name.
        let pointer = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule, NAME_VERSIONED.as_ptr()) };
        // SAFETY: the pointer that `capsule` stored, not deleted yet.
        unsafe { delete_versioned(pointer.cast()) };
    }
}
