//! The location of a page's bytes, for transports.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::store::MemoryDescriptor;

pub fn descriptor_to_py<'py>(py: Python<'py>, memory: &MemoryDescriptor) -> PyResult<Bound<'py, PyDict>> {
    let descriptor = PyDict::new(py);
    descriptor.set_item("address", memory.address)?;
    descriptor.set_item("len", memory.len)?;
    descriptor.set_item("kind", memory.kind.to_string())?;
    descriptor.set_item("gpu", memory.gpu)?;
    descriptor.set_item("store", memory.store.to_string())?;
    descriptor.set_item("page", memory.page.0)?;
    descriptor.set_item("epoch", memory.epoch.0)?;
    Ok(descriptor)
}
