//! Converts the operations of a followed batch to Python objects.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use remanent::batch::Op;

use crate::array::{Aligned, Array};
use crate::dtype::Dtype;
use crate::errors::key_to_py;
use crate::parallel;
use crate::values::{metadata_to_py, to_py};

/// The number of indices from which an additional thread is used.
const INDICES_PER_THREAD: usize = 256 << 10;

/// Decodes the indices of sparse deltas to four bytes each. Uses several threads if there are many indices.
pub fn plain_indices(ops: &[Op<'_>]) -> remanent::Result<Vec<Option<Aligned>>> {
    let plain = |op: &Op<'_>| match op {
        Op::Scatter { indices, .. } => {
            let mut plain = Aligned::zeros(4 * indices.len())?;
            indices.copy_to(plain.as_mut_slice());
            Ok(Some(plain))
        }
        _ => Ok(None),
    };
    let count_of = |op: &Op<'_>| if let Op::Scatter { indices, .. } = op { indices.len() } else { 0 };
    let all = ops.iter().map(count_of).sum::<usize>();
    parallel::map(ops, 1 + all / INDICES_PER_THREAD, "remanent-indices", plain)
}

/// The form in which a dict contains the bytes of an operation.
pub enum BytesForm<'p> {
    /// Bytes. The indices of a sparse delta are decoded to four bytes each.
    Own { indices: Option<Aligned> },
    /// Offsets (start, end) in this payload. Indices are also offsets, to their encoding in the log.
    Within(&'p [u8]),
}

pub fn operation_to_py<'py>(
    py: Python<'py>,
    op: &Op<'_>,
    form: BytesForm<'_>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let payload = if let BytesForm::Within(payload) = form { Some(payload) } else { None };
    let bytes = |bytes: &[u8]| match payload {
        None => Ok(PyBytes::new(py, bytes).into_any()),
        Some(payload) => {
            let start = bytes.as_ptr() as usize - payload.as_ptr() as usize;
            PyTuple::new(py, [start, start + bytes.len()]).map(Bound::into_any)
        }
    };
    let kind = match op {
        Op::Create { page, len, place, key, metadata } => {
            dict.set_item("page", page.0)?;
            dict.set_item("length", len)?;
            dict.set_item("place", place.to_string())?;
            dict.set_item("key", key.as_ref().map(|key| key_to_py(py, key)))?;
            dict.set_item("metadata", metadata_to_py(py, metadata)?)?;
            "create"
        }
        Op::Write { page, offset, bytes: written } => {
            dict.set_item("page", page.0)?;
            dict.set_item("offset", offset)?;
            dict.set_item("bytes", bytes(written)?)?;
            "write"
        }
        Op::Masked { page, offset, width, mask, bytes: written } => {
            dict.set_item("page", page.0)?;
            dict.set_item("offset", offset)?;
            dict.set_item("width", width.bytes())?;
            dict.set_item("mask", bytes(mask)?)?;
            dict.set_item("bytes", bytes(written)?)?;
            "masked"
        }
        Op::Scatter { page, width, base, indices, values } => {
            dict.set_item("page", page.0)?;
            dict.set_item("width", width.bytes())?;
            dict.set_item("base", base)?;
            match form {
                BytesForm::Own { indices: plain } => {
                    let plain = plain.expect("decoded for each sparse delta");
                    let array = Array::new(plain, Dtype::parse("uint32")?, &[indices.len()]);
                    dict.set_item("indices", array)?;
                }
                BytesForm::Within(_) => {
                    dict.set_item("indices", bytes(indices.as_bytes())?)?;
                    dict.set_item("gaps", indices.is_gap_coded())?;
                    dict.set_item("count", indices.len())?;
                }
            }
            dict.set_item("values", bytes(values)?)?;
            "scatter"
        }
        Op::Fill { page, offset, len, pattern } => {
            dict.set_item("page", page.0)?;
            dict.set_item("offset", offset)?;
            dict.set_item("length", len)?;
            dict.set_item("pattern", bytes(pattern)?)?;
            "fill"
        }
        Op::Resize { page, len } => {
            dict.set_item("page", page.0)?;
            dict.set_item("length", len)?;
            "resize"
        }
        Op::Delete { page } => {
            dict.set_item("page", page.0)?;
            "delete"
        }
        Op::SetMetadata { page, name, value } => {
            dict.set_item("page", page.0)?;
            dict.set_item("name", name)?;
            dict.set_item("value", to_py(py, value)?)?;
            "set_metadata"
        }
        Op::RemoveMetadata { page, name } => {
            dict.set_item("page", page.0)?;
            dict.set_item("name", name)?;
            "remove_metadata"
        }
        Op::SetRoot { name, value } => {
            dict.set_item("name", name)?;
            dict.set_item("value", to_py(py, value)?)?;
            "set_root"
        }
        Op::RemoveRoot { name } => {
            dict.set_item("name", name)?;
            "remove_root"
        }
        Op::Note { text } => {
            dict.set_item("text", text)?;
            "note"
        }
        Op::Image { page, len, .. } => {
            dict.set_item("page", page.0)?;
            dict.set_item("length", len)?;
            "image"
        }
        Op::Restore { restored, .. } => {
            dict.set_item("lsn", restored.0)?;
            "restore"
        }
        other => {
            if let Some(page) = other.page() {
                dict.set_item("page", page.0)?;
            }
            "other"
        }
    };
    dict.set_item("kind", kind)?;
    Ok(dict)
}
