//! The location of a page's bytes, for transports.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::store::MemoryDescriptor;

/// Converts a descriptor to a dict.
pub fn descriptor_to_py<'py>(py: Python<'py>, memory: &MemoryDescriptor) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    told.set_item("address", memory.address)?;
    told.set_item("len", memory.len)?;
    told.set_item("kind", memory.kind.to_string())?;
    told.set_item("gpu", memory.gpu)?;
    told.set_item("store", memory.store.to_string())?;
    told.set_item("page", memory.page.0)?;
    told.set_item("epoch", memory.epoch.0)?;
    Ok(told)
}
