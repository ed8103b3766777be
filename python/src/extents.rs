//! Torch tensors and the bytes of storage that they use, determined for each tensor at each save.
//!
//! Torch has no interface that returns all of these values at once, so the properties of its objects are
//! queried by name, as in Python.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::ops::Range;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PyList, PyString, PyTuple};

use crate::errors;
use crate::untracked::{untrack, untracked};

/// A plain tensor and the bytes of storage that the tensor uses.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct Extent {
    #[pyo3(get)]
    name: Py<PyString>,
    #[pyo3(get)]
    tensor: Py<PyAny>,
    #[pyo3(get)]
    device: Py<PyAny>,
    #[pyo3(get)]
    nbytes: u64,
    /// Whether the storage contains all elements. After a storage was freed or shortened, as by `resize_(0)`
    /// in sharded trainers, its tensors keep their shapes and have an invalid address.
    #[pyo3(get)]
    is_there: bool,
    /// The address of the storage. `device_hash` is the hash of the device to which the address belongs.
    base: u64,
    device_hash: isize,
    addresses: Range<u64>,
}

/// The torch types and functions that `extents` needs.
#[derive(FromPyObject)]
pub struct Kinds<'py> {
    /// The type of plain tensors, which consist only of their elements.
    tensor: Bound<'py, PyAny>,
    /// The layout of tensors whose elements are in a storage.
    strided: Bound<'py, PyAny>,
    /// The element types that can be stored, except for complex types, whose views may be conjugated.
    real: Bound<'py, PyFrozenSet>,
    /// The function called with the name and value of each other tensor. Returns the plain tensor to store,
    /// or raises an error.
    plain: Bound<'py, PyAny>,
}

type Extents<'py> = Vec<Bound<'py, Extent>>;

#[pymethods]
impl Extent {
    /// The device and the address that identify the tensor's storage.
    #[getter]
    fn storage(&self, py: Python<'_>) -> (Py<PyAny>, u64) {
        (self.device.clone_ref(py), self.base)
    }

    /// The offset of the first byte that the tensor uses from the beginning of the storage.
    #[getter]
    fn start(&self) -> u64 {
        self.addresses.start - self.base
    }

    /// The offset of the end of the last byte that the tensor uses from the beginning of the storage.
    #[getter]
    fn end(&self) -> u64 {
        self.addresses.end - self.base
    }
}

impl Kinds<'_> {
    /// Returns whether a tensor is plain and can be stored unchanged, with as few queries as possible,
    /// because each query is a call.
    fn is_plain(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let flag = |name| tensor.getattr(name)?.is_truthy();
        Ok(tensor.get_type().is(&self.tensor)
            && self.real.contains(tensor.getattr(intern!(py, "dtype"))?)?
            && tensor.getattr(intern!(py, "layout"))?.is(&self.strided)
            && !flag(intern!(py, "requires_grad"))?
            && !flag(intern!(py, "is_nested"))?
            && !flag(intern!(py, "is_meta"))?
            && !tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?)
    }
}

/// Returns the extents of tensors. Calls `kinds.plain` for each tensor that is not plain.
///
/// :raises RefusedError: tensors share memory through two storages, so they would be restored separately.
#[pyfunction]
pub fn extents<'py>(tensors: &Bound<'py, PyDict>, kinds: Kinds<'_>) -> PyResult<Extents<'py>> {
    let py = tensors.py();
    let mut found = Vec::with_capacity(tensors.len());
    for (name, given) in tensors.items().extract::<Vec<(Bound<'_, PyString>, Bound<'_, PyAny>)>>()? {
        let tensor = if kinds.is_plain(&given)? { given } else { kinds.plain.call1((&name, given))? };
        let nbytes = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
        let storage = match tensor.call_method0(intern!(py, "untyped_storage")) {
            Ok(storage) => storage,
            // A wrapper that claims to be a plain tensor.
            Err(error) => return Err(kinds.plain.call1((&name, &tensor)).err().unwrap_or(error)),
        };
        let base = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let addresses = if nbytes == 0 { base..base } else { addresses(&tensor, nbytes)? };
        let held: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let is_there = nbytes == 0 || addresses.end - base <= held;
        let device = tensor.getattr(intern!(py, "device"))?;
        let device_hash = device.hash()?;
        let (name, tensor, device) = (name.unbind(), tensor.unbind(), device.unbind());
        let extent = Extent { name, tensor, device, nbytes, is_there, base, device_hash, addresses };
        found.push(untracked(py, extent)?);
    }
    refuse_two_storages(py, &found)?;
    Ok(found)
}

fn refuse_two_storages(py: Python<'_>, found: &Extents<'_>) -> PyResult<()> {
    let has_memory = |extent: &&Extent| extent.nbytes > 0 && extent.base != 0 && extent.is_there;
    let mut sorted: Vec<&Extent> = found.iter().map(Bound::get).filter(has_memory).collect();
    sorted.sort_unstable_by_key(|extent| (extent.device_hash, extent.addresses.start));
    // The extent with the highest end so far.
    let mut furthest: Option<&Extent> = None;
    for extent in sorted {
        let last = furthest.filter(|last| last.device_hash == extent.device_hash);
        if let Some(last) = last
            && extent.addresses.start < last.addresses.end
            && extent.base != last.base
        {
            let message = format!(
                "{}: the tensor shares memory with {} through another storage, so they would be restored separately",
                extent.name.bind(py).to_string_lossy(),
                last.name.bind(py).to_string_lossy()
            );
            let remedy = "use views of a single tensor, or store a copy of one of them";
            return Err(errors::own(py, "RefusedError", &message, remedy, None));
        }
        if last.is_none_or(|last| extent.addresses.end > last.addresses.end) {
            furthest = Some(extent);
        }
    }
    Ok(())
}

/// Divides extents into those within the memory of `tensors`, on any device, and all others. Extents that
/// share a storage with other bytes are among the others.
#[pyfunction]
pub fn extents_within<'py>(
    extents: Extents<'py>,
    tensors: Vec<Bound<'py, PyAny>>,
) -> PyResult<(Extents<'py>, Extents<'py>)> {
    let mut ranges = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let nbytes = tensor.getattr(intern!(tensor.py(), "nbytes"))?.extract()?;
        if nbytes > 0 {
            ranges.push(addresses(&tensor, nbytes)?);
        }
    }
    ranges.sort_unstable_by_key(|range| range.start);
    // Merges ranges that touch.
    ranges.dedup_by(|next, last| {
        let touch = next.start <= last.end;
        last.end = if touch { last.end.max(next.end) } else { last.end };
        touch
    });
    let is_within = |extent: &Extent| {
        let Range { start, end } = extent.addresses;
        let before = ranges.partition_point(|range| range.start <= start);
        extent.nbytes == 0 || before > 0 && end <= ranges[before - 1].end
    };
    let others = extents.iter().map(Bound::get).filter(|extent| !is_within(extent));
    let shared: HashSet<u64> = others.map(|extent| extent.base).collect();
    Ok(extents.into_iter().partition(|extent| !shared.contains(&extent.get().base)))
}

/// Groups extents by page. Extents that overlap in memory share a page and are ordered by address. Each empty
/// extent has a page of its own, before all others.
#[pyfunction]
pub fn extents_by_page<'py>(py: Python<'py>, extents: Extents<'py>) -> PyResult<Bound<'py, PyList>> {
    let (empty, held): (Extents<'py>, Extents<'py>) =
        extents.into_iter().partition(|extent| extent.get().nbytes == 0);
    // Storages are ordered by their first tensors, in the order of the state.
    let mut first = HashMap::new();
    let mut sorted = Vec::with_capacity(held.len());
    for extent in held {
        let Range { start, end } = extent.get().addresses;
        let storage = (extent.get().device_hash, extent.get().base);
        let number = *first.entry(storage).or_insert(sorted.len());
        sorted.push((number, start, end, extent));
    }
    sorted.sort_by_key(|&(number, start, end, _)| (number, start, end));
    let pages = PyList::empty(py);
    let append = |page: Extents<'py>| {
        let page = PyTuple::new(py, page)?;
        untrack(&page);
        pages.append(page)
    };
    for extent in empty {
        append(vec![extent])?;
    }
    let mut page: Extents<'py> = Vec::new();
    let mut reached = (0, 0);
    for (number, start, end, extent) in sorted {
        if !page.is_empty() && (number, start) >= reached {
            append(mem::take(&mut page))?;
        }
        reached = if page.is_empty() { (number, end) } else { reached.max((number, end)) };
        page.push(extent);
    }
    if !page.is_empty() {
        append(page)?;
    }
    Ok(pages)
}

/// Returns the addresses of the bytes that a tensor uses. The tensor must not be empty.
fn addresses(tensor: &Bound<'_, PyAny>, nbytes: u64) -> PyResult<Range<u64>> {
    let py = tensor.py();
    let start = tensor.call_method0(intern!(py, "data_ptr"))?.extract::<u64>()?;
    if tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
        return Ok(start..start + nbytes);
    }
    let width = tensor.getattr(intern!(py, "itemsize"))?.extract::<u64>()?;
    let shape = tensor.getattr(intern!(py, "shape"))?.extract::<Vec<u64>>()?;
    let stride = tensor.call_method0(intern!(py, "stride"))?.extract::<Vec<u64>>()?;
    let last: u64 = shape.iter().zip(stride).map(|(size, stride)| (size - 1) * stride).sum();
    Ok(start..start + width * (last + 1))
}
