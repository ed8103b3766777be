//! Creates pages of a batch from a caller's content.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::batch::CreatePage;
use remanent::{Key, Metadata, Place};

use crate::arguments;
use crate::elements::{Elements, new_metadata};
use crate::errors::OrRaise;
use crate::gate::detached;
use crate::memory::Input;
use crate::new_page::PyNewPage;
use crate::page_name::key;
use crate::pending_batch::PendingBatch;
use crate::values::metadata_from_py;

pub struct NewPageTerms {
    key: Option<Key>,
    metadata: Metadata,
}

impl NewPageTerms {
    /// Parses the key and the metadata.
    ///
    /// # Errors
    /// `TypeError`, `InvalidError` or `OverflowError` if the key or a metadata value is invalid.
    pub fn take(key: Option<Bound<'_, PyAny>>, metadata: Option<Bound<'_, PyDict>>) -> PyResult<Self> {
        let key = key.map(|key| self::key(&key)).transpose()?;
        let metadata = metadata.map(|metadata| metadata_from_py(&metadata)).transpose()?.unwrap_or_default();
        Ok(Self { key, metadata })
    }
}

/// Creates a page with a caller's bytes or, if `content` is a number, with that many zeros.
///
/// # Errors
/// `TypeError`, `BufferError` or `MemoryRefusedError` if the content or memory cannot be used, and `ClosedError` if the
/// batch accepts no more operations.
pub fn create(
    pending: &PendingBatch,
    content: &Bound<'_, PyAny>,
    terms: NewPageTerms,
    place: Place,
    at_commit: bool,
) -> PyResult<PyNewPage> {
    let (py, gate) = (content.py(), &pending.gate);
    let NewPageTerms { key, metadata } = terms;
    let is_len = content.hasattr("__index__")? && !content.hasattr("__dlpack__")?;
    let input = if is_len { None } else { Some(Input::take(content)?) };
    let elements = input.as_ref().map_or(&Elements::Bytes, Input::elements);
    let (metadata, layout) = new_metadata(metadata, elements)?;
    let named = |created: CreatePage<'_>| created.optional_key(key.clone()).metadata(metadata).page();
    let Some(input) = input else {
        let len: u64 = arguments::value(content, "content", "bytes, or a length from 0 to 2^64 - 1")?;
        return pending.create(py, key.as_ref(), layout, |batch| named(batch.create(len, place)));
    };
    match input {
        Input::Host(bytes) if at_commit && bytes.len() > 0 => {
            let (len, source) = (bytes.len() as u64, Arc::new(bytes));
            pending
                .create(py, key.as_ref(), layout, |batch| named(batch.create_from_source(len, source, place)))
        }
        Input::Host(bytes) => pending.create(py, key.as_ref(), layout, |batch| {
            let bytes = bytes.as_slice();
            // The page is created with a length and then written, because a write returns an error if the
            // memory for the copy cannot be allocated.
            let new = named(batch.create(bytes.len() as u64, place));
            if !bytes.is_empty() {
                batch.write(new, 0, bytes);
            }
            new
        }),
        // A store on a GPU adopts the bytes below. For any other store, the commit copies them piece by
        // piece.
        Input::Cuda(bytes)
            if at_commit && bytes.len() > 0 && gate.inspect(py, |store| Ok(!store.supports_streams()))? =>
        {
            let len = bytes.len();
            let source = py.detach(|| bytes.source()).or_raise(py, Some(&gate.path))?;
            pending
                .create(py, key.as_ref(), layout, |batch| named(batch.create_from_source(len, source, place)))
        }
        Input::Cuda(bytes) => {
            let len = bytes.len();
            let bytes = if len == 0 { None } else { Some(gate.call(py, |store| bytes.adopt(store))?) };
            pending.create(py, key.as_ref(), layout, |batch| {
                let new = named(batch.create(len, place));
                if let Some(bytes) = &bytes {
                    batch.write_device(new, 0, bytes);
                }
                new
            })
        }
    }
}

/// Creates a page in caller-owned memory. The page starts with the memory's contents, or with zeros.
///
/// # Errors
/// `TypeError`, `BufferError` or `MemoryRefusedError` if the content or memory cannot be used, and `ClosedError` if the
/// batch accepts no more operations.
pub fn create_in(
    pending: &PendingBatch,
    memory: &Bound<'_, PyAny>,
    terms: NewPageTerms,
    zeros: bool,
) -> PyResult<PyNewPage> {
    let py = memory.py();
    let NewPageTerms { key, metadata } = terms;
    let memory = Input::take_writable(memory)?;
    let (metadata, layout) = new_metadata(metadata, memory.elements())?;
    let bytes = pending.gate.call(py, |store| memory.adopt(store))?;
    let created = pending.create(py, key.as_ref(), layout, |batch| {
        let new = batch.create_in(&bytes).optional_key(key.clone()).metadata(metadata).page();
        if !zeros && bytes.byte_len() > 0 {
            batch.write_device(new, 0, &bytes);
        }
        new
    });
    detached(bytes);
    created
}
