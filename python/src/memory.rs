//! Caller-owned memory: bytes that a call reads, and buffers that a call fills.
//!
//! Objects are accepted if they have the buffer protocol (bytes, memoryview, NumPy arrays), `__dlpack__`
//! (torch, JAX, CuPy) or `__cuda_array_interface__` (Numba). Calls run without the interpreter lock, and
//! callers must not change the memory during a call. If another thread writes to the memory, the call sees a
//! mixture of old and new bytes, as in any library that reads buffers without the lock.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::batch::ByteSource;
use remanent::device::RawStream;
use remanent::device::{CallerMemory, DeviceBytes, HostMemory};
use remanent::error::Refused;
use remanent::{DeviceChoice, Place, Store};

use crate::buffer_view::BufferView;
use crate::copiers::copier;
use crate::dlpack::{self, Imported};
use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::errors::{invalid_type, is_invalid_type, memory_refused};

pub enum Input {
    Host(HostBytes),
    Cuda(CudaBytes),
}

/// Bytes in host memory, which stay in place as long as this value exists.
pub struct HostBytes {
    address: usize,
    len: usize,
    elements: Elements,
    _owner: Owner,
}

pub struct CudaBytes {
    address: u64,
    len: u64,
    /// The CUDA number of the GPU, or `None` if the producer does not provide it.
    ordinal: Option<u32>,
    stream: Option<u64>,
    elements: Elements,
    owner: Box<dyn std::any::Any + Send + Sync>,
}

enum Owner {
    None,
    Buffer { _buffer: BufferView },
    Tensor { _tensor: Imported },
}

impl HostBytes {
    pub const EMPTY: Self = Self { address: 0, len: 0, elements: Elements::Bytes, _owner: Owner::None };

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn elements(&self) -> &Elements {
        &self.elements
    }

    pub fn as_slice(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps the bytes in place as long as its owner here exists; by this module's
        // contract the caller does not touch them while the call runs.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }
}

impl std::fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} caller-owned bytes", self.len)
    }
}

/// A source of bytes for a commit. The caller must not change the bytes before the commit.
impl ByteSource for HostBytes {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(offset).ok();
        let here = at.and_then(|at| self.as_slice().get(at..at.checked_add(bytes.len())?));
        bytes.copy_from_slice(here.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl CudaBytes {
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn elements(&self) -> &Elements {
        &self.elements
    }

    /// Returns the bytes as a source for a batch of a store whose pages are not on this GPU.
    ///
    /// # Errors
    /// `Refused` if the producer does not provide the number of its GPU.
    pub fn source(self) -> remanent::Result<Arc<dyn ByteSource>> {
        let Some(ordinal) = self.ordinal else {
            let reason = "its producer does not state the GPU; pass a tensor with __dlpack__".to_owned();
            return Err(remanent::Error::Refused(Refused::Memory { len: self.len, reason }));
        };
        let copier = copier(DeviceChoice::Cuda(ordinal))?;
        let bytes = self.adopt_by(|memory| copier.caller_bytes(memory))?;
        Ok(Arc::new(copier.source(bytes)?))
    }

    /// Returns the bytes after a store's device has adopted the memory.
    ///
    /// # Errors
    /// `Refused` if pages are in host memory, or if the device does not know the memory.
    pub fn adopt(self, store: &Store) -> remanent::Result<DeviceBytes> {
        self.adopt_by(|memory| store.caller_bytes(memory))
    }

    /// Returns the bytes after a device has adopted the memory by `adopt`; see [`adopt`](Self::adopt).
    ///
    /// # Errors
    /// As for `adopt`.
    pub fn adopt_by(
        self,
        adopt: impl FnOnce(&CallerMemory) -> remanent::Result<DeviceBytes>,
    ) -> remanent::Result<DeviceBytes> {
        // SAFETY: the owner is the object that states where its memory is, and lives as long as this.
        let memory = unsafe { CallerMemory::from_cuda(self.address, self.len, self.owner) };
        let bytes = adopt(&memory)?;
        Ok(match self.stream {
            // SAFETY: the producer named the stream as its own, and the stream lives as long as its memory.
            Some(stream) => bytes.on(unsafe { RawStream::from_cuda(stream) }),
            None => bytes,
        })
    }
}

impl Input {
    /// Returns an object's bytes for reading.
    ///
    /// # Errors
    /// `TypeError` if the object provides no bytes, and `BufferError` if the bytes are not contiguous.
    pub fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::take_for(object, false)
    }

    /// Returns an object's memory for reading and writing.
    ///
    /// # Errors
    /// As for [`Input::take`], and `BufferError` if the memory is read-only.
    pub fn take_writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::take_for(object, true)
    }

    fn take_for(object: &Bound<'_, PyAny>, is_written: bool) -> PyResult<Self> {
        let has_dlpack = object.hasattr("__dlpack__")?;
        // SAFETY: the object is alive.
        if unsafe { pyo3::ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            match BufferView::take(object) {
                Ok(buffer) => return host_buffer(object, buffer, is_written).map(Input::Host),
                // The buffer protocol has no format for some element types that DLPack describes: JAX arrays
                // of bfloat16 and float8 reject the buffer protocol and support DLPack.
                Err(refused) if has_dlpack && !is_invalid_type(object.py(), &refused) => {}
                Err(refused) => return Err(refused),
            }
        }
        // DLPack is tried before the older interface, because only then does torch order the work of its
        // current stream.
        if has_dlpack {
            // torch exports such a tensor's stored bytes without applying the pending negation.
            if let Some(is_neg) = object.getattr_opt("is_neg")?
                && is_neg.call0()?.is_truthy()?
            {
                return Err(memory_refused(
                    "the tensor has the negative bit set",
                    "pass tensor.resolve_neg()",
                ));
            }
            let tensor = Imported::take(object)?;
            if is_written && tensor.read_only {
                return Err(memory_refused("the tensor is read-only", "pass a writable tensor"));
            }
            return Ok(match tensor.device {
                dlpack::CUDA | dlpack::CUDA_MANAGED => Input::Cuda(CudaBytes {
                    address: tensor.address as u64,
                    len: tensor.len as u64,
                    ordinal: u32::try_from(tensor.ordinal).ok(),
                    stream: Some(1),
                    elements: tensor.elements.clone(),
                    owner: Box::new(tensor),
                }),
                _ => Input::Host(host_tensor(tensor)),
            });
        }
        if object.hasattr("__cuda_array_interface__")? {
            return cuda_array(object, is_written).map(Input::Cuda);
        }
        Err(invalid_type(
            format!(
                "{} has no bytes: neither the buffer protocol nor __dlpack__ nor __cuda_array_interface__",
                object.get_type().name()?
            ),
            "pass bytes, a NumPy array or a tensor",
        ))
    }

    /// Returns the element type and shape, as far as they are known.
    pub fn elements(&self) -> &Elements {
        match self {
            Input::Host(bytes) => bytes.elements(),
            Input::Cuda(bytes) => bytes.elements(),
        }
    }

    pub fn byte_len(&self) -> u64 {
        match self {
            Input::Host(bytes) => bytes.len() as u64,
            Input::Cuda(bytes) => bytes.len(),
        }
    }

    /// Returns the memory for an open that places a page in it. The open does not wait for a stream, because
    /// no work may be in flight on the memory.
    pub fn caller_memory(self) -> CallerMemory {
        match self {
            Input::Host(bytes) => CallerMemory::from_host(Output(bytes), Place::Host),
            // SAFETY: the owner is the object that states where its memory is, and lives as long as this.
            Input::Cuda(bytes) => unsafe { CallerMemory::from_cuda(bytes.address, bytes.len, bytes.owner) },
        }
    }

    /// Returns the memory after a store's device has adopted it.
    ///
    /// # Errors
    /// `Refused` if the device does not know the memory.
    pub fn adopt(self, store: &Store) -> remanent::Result<DeviceBytes> {
        match self {
            Input::Host(bytes) => store.caller_bytes(&CallerMemory::from_host(Output(bytes), Place::Host)),
            Input::Cuda(bytes) => bytes.adopt(store),
        }
    }

    /// Returns an object's bytes, which must be in host memory.
    ///
    /// # Errors
    /// As for [`Input::take`], and `BufferError` for GPU memory.
    pub fn take_host(object: &Bound<'_, PyAny>) -> PyResult<HostBytes> {
        match Self::take(object)? {
            Input::Host(bytes) => Ok(bytes),
            Input::Cuda(_) => Err(memory_refused(
                "the bytes must be in host memory, not in GPU memory",
                "copy the tensor to the host first",
            )),
        }
    }
}

fn host_tensor(tensor: Imported) -> HostBytes {
    let elements = tensor.elements.clone();
    HostBytes {
        address: tensor.address,
        len: tensor.len,
        elements,
        _owner: Owner::Tensor { _tensor: tensor },
    }
}

fn host_buffer(object: &Bound<'_, PyAny>, buffer: BufferView, is_written: bool) -> PyResult<HostBytes> {
    if !buffer.is_contiguous() && buffer.len() > 0 {
        return Err(memory_refused("the buffer is not contiguous", "pass numpy.ascontiguousarray(array)"));
    }
    if is_written && buffer.is_read_only() {
        return Err(memory_refused("the buffer is read-only", "pass writable memory, such as a bytearray"));
    }
    Ok(HostBytes {
        address: buffer.address(),
        len: buffer.len(),
        elements: buffer.elements(object)?,
        _owner: Owner::Buffer { _buffer: buffer },
    })
}

/// Returns memory that an object exports by version 3 of `__cuda_array_interface__`.
fn cuda_array(object: &Bound<'_, PyAny>, is_written: bool) -> PyResult<CudaBytes> {
    let interface = object.getattr("__cuda_array_interface__")?;
    let interface = interface.cast::<PyDict>().map_err(PyErr::from)?;
    let field =
        |name: &str| interface.get_item(name)?.ok_or_else(|| interface_refused(format!("has no {name:?}")));
    let (address, is_read_only): (u64, bool) = field("data")?.extract()?;
    if is_written && is_read_only {
        return Err(memory_refused("the array is read-only", "pass a writable array"));
    }
    let shape: Vec<u64> = field("shape")?.extract()?;
    let typestr: String = field("typestr")?.extract()?;
    let item: u64 = typestr
        .get(2..)
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| interface_refused(format!("has typestr {typestr:?}, which has no size")))?;
    let strides: Option<Vec<i64>> = interface
        .get_item("strides")?
        .filter(|strides| !strides.is_none())
        .map(|it| it.extract())
        .transpose()?;
    let mut len = item;
    for (at, length) in shape.iter().enumerate().rev() {
        if let Some(strides) = &strides
            && *length != 1
            && strides.get(at).copied() != i64::try_from(len).ok()
        {
            return Err(memory_refused("the array is not contiguous", "copy it to a contiguous array first"));
        }
        len = len
            .checked_mul(*length)
            .ok_or_else(|| interface_refused("has a length of more than 2^64 bytes".to_owned()))?;
    }
    let stream: Option<u64> = interface
        .get_item("stream")?
        .filter(|stream| !stream.is_none())
        .map(|it| it.extract())
        .transpose()?;
    // Without a stream, the producer states that no work is in flight. Waiting for the default stream costs
    // little.
    Ok(CudaBytes {
        address,
        len,
        ordinal: None,
        stream: stream.or(Some(1)),
        elements: elements_of(&typestr, &shape, item),
        owner: Box::new(object.clone().unbind()),
    })
}

fn interface_refused(what: String) -> PyErr {
    memory_refused(
        format!("__cuda_array_interface__ {what}"),
        "pass an array from a library that implements version 3 of the interface",
    )
}

/// Returns the element type and shape for the interface's type string, such as `<f4`.
fn elements_of(typestr: &str, shape: &[u64], item: u64) -> Elements {
    let (order, kind) = typestr.split_at(typestr.len().min(1));
    let format = match kind.as_bytes().first() {
        Some(b'b') => "?",
        Some(b'i') => "b",
        Some(b'u') => "B",
        Some(b'f') => "f",
        Some(b'c') => "Zf",
        _ => "unknown",
    };
    let order = if order == ">" { ">" } else { "<" };
    let dtype = Dtype::of_format(format!("{order}{format}").as_bytes(), item as usize);
    Elements::of(dtype, shape.to_vec(), || typestr.to_owned())
}

pub struct Output(HostBytes);

impl Output {
    /// Wraps the memory of a writable object. The memory must be on the host.
    pub fn of(bytes: HostBytes) -> Self {
        Self(bytes)
    }

    pub fn addresses(&self) -> Range<usize> {
        self.0.address..self.0.address + self.0.len
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.0.len == 0 {
            return &mut [];
        }
        // SAFETY: the exporter stated that the bytes exist and are writable, and keeps them in place; by this
        // module's contract the caller does not touch them while the call runs.
        unsafe { std::slice::from_raw_parts_mut(self.0.address as *mut u8, self.0.len) }
    }
}

impl HostMemory for Output {
    fn byte_len(&self) -> u64 {
        self.0.len() as u64
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.0.as_slice()[range]
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.as_mut_slice()[range]
    }
}
