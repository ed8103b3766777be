//! Updates of pages to new bytes. The elements that differ are logged, or the whole page is written if too
//! many differ.

use std::sync::Arc;

use pyo3::prelude::*;
use remanent::batch::{ByteSource, PageChanges, Width};
use remanent::error::{IoAction, IoObject};
use remanent::{Error, PageId, PageInfo, Place, Store, WriteBatch};

use crate::elements::{Elements, PageLayout};
use crate::errors::OrRaise;
use crate::memory::{HostBytes, Input};
use crate::pending_batch::{BatchPage, PendingBatch};

/// A page is written completely if its changes need more than one part in this many.
const LOGGED_PART: u64 = 4;
/// The default limit for the bytes that the updates of a batch log together. The limit is well below that for
/// changes that wait for a snapshot.
const LOGGED_MAX: u64 = 48 << 20;
/// The number of bytes of a page that are compared at once.
const COMPARED_LEN: usize = 4 << 20;
/// The number of bytes that are compared first, at the start and in the middle of a page. If more than the
/// allowed part differs in both, most of the page has changed and need not be read.
const PROBED_LEN: usize = 64 << 10;
/// The shortest page for which comparing these two parts first is worthwhile.
const PROBES_LEN_MIN: usize = 4 * PROBED_LEN;
/// The alignment of the middle part, which is a multiple of every element width.
const MIDDLE_ALIGN: usize = 4 << 10;

enum NewBytes {
    Host(HostBytes),
    /// Bytes on a GPU, which are copied to the host in pieces, and their length.
    External(Arc<dyn ByteSource>, u64),
}

impl NewBytes {
    /// Returns an object's bytes, and their element type and shape.
    ///
    /// # Errors
    /// `TypeError`, `BufferError`, `MemoryRefusedError`.
    fn take(py: Python<'_>, path: &str, object: &Bound<'_, PyAny>) -> PyResult<(Self, Elements)> {
        let input = Input::take(object)?;
        let elements = input.elements().clone();
        let bytes = match input {
            Input::Host(bytes) => Self::Host(bytes),
            Input::Cuda(bytes) if bytes.len() == 0 => Self::Host(HostBytes::EMPTY),
            Input::Cuda(bytes) => {
                let len = bytes.len();
                let source = py.detach(|| bytes.source()).or_raise(py, Some(path))?;
                Self::External(source, len)
            }
        };
        Ok((bytes, elements))
    }

    fn len(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::External(_, len) => *len,
        }
    }

    /// Returns a piece of the bytes. A piece that is not in host memory is copied to `held`.
    fn piece<'b>(&'b self, at: usize, len: usize, held: &'b mut Vec<u8>) -> remanent::Result<&'b [u8]> {
        match self {
            Self::Host(bytes) => Ok(&bytes.as_slice()[at..at + len]),
            Self::External(source, _) => {
                held.resize(len, 0);
                let refused = |error| Error::Io {
                    action: IoAction::Read,
                    object: IoObject::Source { index: 0, offset: at as u64 },
                    store: None,
                    source: Arc::new(error),
                };
                source.read_at(at as u64, held).map_err(refused)?;
                Ok(held)
            }
        }
    }

    /// Converts the bytes to a source that the commit reads.
    fn into_source(self) -> Arc<dyn ByteSource> {
        match self {
            Self::Host(bytes) => Arc::new(bytes),
            Self::External(source, _) => source,
        }
    }
}

/// Adds an update of a page to `data` to a batch. Returns the number of elements that differ, or `None` if
/// the whole page is written.
///
/// # Errors
/// Errors of resolving the page, of taking the bytes and of reading, and `ValueError` for a second update of
/// the same page.
pub fn update(
    pending: &PendingBatch,
    page: &Bound<'_, PyAny>,
    data: &Bound<'_, PyAny>,
    width: Width,
    logged_max: Option<u64>,
) -> PyResult<Option<u64>> {
    let (py, gate) = (page.py(), &pending.gate);
    let page = pending.page_of_store(page)?;
    let (data, elements) = NewBytes::take(py, &gate.path, data)?;
    let layout = elements.layout()?;
    let left = logged_max.unwrap_or(LOGGED_MAX).saturating_sub(pending.logged());
    let (info, changes) = gate.call(py, |store| changes(store, page, &data, width, left))?;
    let (count, logged) = match &changes {
        Some((changes, cost)) => (Some(changes.count()), *cost),
        None => (None, 0),
    };
    let len = data.len();
    pending.update(py, page, logged, |batch| {
        batch.expect_epoch(page, info.epoch);
        match changes {
            Some((changes, _)) => changes.put(batch, page),
            None if len == 0 => _ = batch.resize(page, 0),
            None => _ = batch.replace_from_source(page, len, data.into_source()),
        }
    })?;
    if layout.is_some() || info.len != len {
        let put = |batch: &mut WriteBatch, before: PageLayout| match &layout {
            Some(layout) => before.put(batch, page.into(), Some(layout)),
            None => before.put_len(batch, page.into(), len),
        };
        pending.build_layout(py, BatchPage::Stored(page), put)?;
    }
    Ok(count)
}

/// Computes the changes from a page to `data`, the bytes that they need, and the page as it was compared. The
/// changes are `None` if they need more than `left` bytes or if the page must be written completely.
fn changes(
    store: &Store,
    page: PageId,
    data: &NewBytes,
    width: Width,
    left: u64,
) -> remanent::Result<(PageInfo, Option<(PageChanges, u64)>)> {
    let info = store.page(page)?;
    if info.len != data.len() {
        return Ok((info, None));
    }
    let (data_len, mut held) = (data.len() as usize, Vec::new());
    let mut before = vec![0; COMPARED_LEN.min(data_len)];
    if left == 0 {
        // With no budget left, it does not matter which elements differ: one difference means that the whole
        // page is written. A page that changed a lot differs early.
        let (mut at, mut len) = (0, PROBED_LEN);
        while at < data_len {
            let after = data.piece(at, len.min(data_len - at), &mut held)?;
            store.read(page, at as u64, &mut before[..after.len()])?;
            if before[..after.len()] != *after {
                return Ok((info, None));
            }
            (at, len) = (at + after.len(), COMPARED_LEN);
        }
        return Ok((info, Some((PageChanges::new(width), 0))));
    }
    if data_len >= PROBES_LEN_MIN {
        let mut mostly_changed = |at: usize| {
            let (before, after) = (&mut before[..PROBED_LEN], data.piece(at, PROBED_LEN, &mut held)?);
            store.read(page, at as u64, before)?;
            let elements = before.chunks(width.bytes()).zip(after.chunks(width.bytes()));
            let changed = elements.filter(|(before, after)| before != after).count() * width.bytes();
            Ok::<_, Error>(changed as u64 > PROBED_LEN as u64 / LOGGED_PART)
        };
        let middle = data_len / 2 / MIDDLE_ALIGN * MIDDLE_ALIGN;
        if mostly_changed(0)? && mostly_changed(middle)? {
            return Ok((info, None));
        }
    }
    let mut changes = PageChanges::new(width);
    for at in (0..data_len).step_by(COMPARED_LEN) {
        let after = data.piece(at, COMPARED_LEN.min(data_len - at), &mut held)?;
        let before = &mut before[..after.len()];
        store.read(page, at as u64, before)?;
        changes.compare(at as u64, before, after);
        if changes.cost() > data.len() / LOGGED_PART || taken(&info, &mut changes) > left {
            return Ok((info, None));
        }
    }
    let taken = taken(&info, &mut changes);
    Ok((info, Some((changes, taken))))
}

/// Returns the bytes that changes need until the next snapshot: in the log or, for a page on disk, in the
/// memory for its changes.
fn taken(info: &PageInfo, changes: &mut PageChanges) -> u64 {
    if info.place == Place::Disk { changes.pending_bytes().max(changes.cost()) } else { changes.cost() }
}
