//! `Batch`, a batch under construction, and its operations.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use remanent::batch::PageChanges;
use remanent::{Ack, Epoch, PageId};

use crate::arguments;
use crate::elements::Elements;
use crate::errors::{invalid, invalid_type};
use crate::gate::Gate;
use crate::memory::Input;
use crate::new_page::PyNewPage;
use crate::options::{place, width};
use crate::page_creates::{NewPageTerms, create, create_in};
use crate::page_updates::{update, update_many};
use crate::pending_batch::{BatchPage, PendingBatch};
use crate::values::{REPORT, from_py};
use crate::working_copy::PyWorkingCopy;

const UINT32: &str = "pass numpy.array(indices, dtype=\"uint32\")";

/// Operations that become visible and durable together or not at all, in the order of the calls. Created by
/// `Store.batch`.
///
/// Bytes in host memory are copied by the call that receives them, and bytes in GPU memory are read by the
/// commit. Offsets and lengths are in bytes, and widths in bytes per element. A call looks up a key among the
/// batch's own new pages first and then in the store. A commit fails and changes nothing if a page is
/// missing, a range is outside its page, or a key already exists.
///
/// >>> store = remanent.Store(directory)
/// >>> with store.batch() as batch:
/// ...     page = batch.create(b"0123456789", key="p")
/// ...     batch.scatter(page, [1, 8], b"!?")
/// ...     batch.fill(page, 3, 4, b"ab")
/// ...     batch.set_metadata(page, "kind", "text")
/// ...     batch.set_root("step", 7)
/// >>> store["p"], store.info("p").metadata, store.root
/// (b'0!2abab7?9', {'kind': 'text'}, {'step': 7})
/// >>> store.close()
#[pyclass(frozen, module = "remanent")]
pub struct Batch(pub PendingBatch);

impl Batch {
    pub fn new(gate: Arc<Gate>, ack: Option<Ack>) -> Self {
        Self(PendingBatch::new(gate, ack))
    }

    /// Returns an error if `elements` have another type than the page and are written to a part of it.
    fn check_fit(&self, py: Python<'_>, page: BatchPage, elements: &Elements) -> PyResult<()> {
        match elements {
            Elements::Bytes => Ok(()),
            elements => elements.check_fit(&self.0.layout(py, page)?),
        }
    }
}

#[pymethods]
impl Batch {
    /// Creates a page with the bytes of `content`, or filled with zeros. Returns a `NewPage`.
    ///
    /// For an array, the metadata entries `dtype` and `shape` are set unless `metadata` contains one of them.
    /// `Reader.numpy` and `Reader.array` then return an array of the same type and shape.
    ///
    /// :param content: bytes, a NumPy array, a tensor, or the length in bytes (int) of a page of zeros.
    /// :param key: a key of 1 to 64 bytes.
    /// :param place: "host", "pinned", "device:N" or "disk".
    /// :param metadata: plain values by name.
    /// :param at_commit: whether the commit reads the bytes instead of this call. The bytes must not change
    ///     until then. If True, a store whose pages are on the host also accepts a tensor on a GPU, by
    ///     DLPack.
    /// :raises TypeError: `content` does not provide bytes.
    /// :raises BufferError: the bytes are not contiguous.
    /// :raises MemoryRefusedError: the bytes are on a GPU, but the store's pages are not.
    ///
    /// >>> with remanent.Store(directory) as store, store.batch() as batch:
    /// ...     batch.create(16), batch.create(b"bytes", key="k")
    /// (NewPage(index=0), NewPage(index=1))
    #[pyo3(signature = (content, *, key=None, place="host", metadata=None, at_commit=false))]
    fn create(
        &self,
        py: Python<'_>,
        content: &Bound<'_, PyAny>,
        key: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
        #[pyo3(from_py_with = arguments::metadata)] metadata: Option<Bound<'_, PyDict>>,
        #[pyo3(from_py_with = arguments::at_commit)] at_commit: bool,
    ) -> PyResult<PyNewPage> {
        let terms = NewPageTerms::take(key, metadata)?;
        create(&self.0, content, terms, self::place(py, place)?, at_commit)
    }

    /// Creates a page in caller-owned memory, such as a model's tensor. The page has the length and place of
    /// the memory. Returns a `NewPage`. The page's initial contents are those of the memory at the commit,
    /// after the work that is queued on the memory's current stream during this call.
    ///
    /// After the commit, only the store writes to the memory, after it has logged the change. Kernels of the
    /// caller read the page under `Store.pin` or `Store.lease`. The page keeps the memory alive. The memory
    /// must not be freed by other means, such as `resize_` of a torch storage. The page leaves the memory
    /// when it is deleted, released, resized, moved, or changed during a lease. The next commit or
    /// `Store.trim` then drops the reference. After the next open, the page is in the store's own memory,
    /// unless the `page_memory` argument of `Store` provides this memory again. The memory does not count
    /// toward any budget.
    ///
    /// :param memory: contiguous, writable memory on the store's device: a NumPy array or a tensor.
    /// :param key: a key of 1 to 64 bytes.
    /// :param metadata: plain values by name.
    /// :param zeros: whether to fill the memory with zeros instead of using its contents.
    /// :raises TypeError: `memory` does not provide memory.
    /// :raises BufferError: the memory is not contiguous or not writable.
    /// :raises MemoryRefusedError: the memory is on another device. Raised by the commit if the memory
    ///     overlaps that of another page.
    ///
    /// >>> weights = bytearray(b"weights")
    /// >>> with remanent.Store(directory, device="host") as store:
    /// ...     with store.batch() as batch:
    /// ...         page = batch.create_in(weights, key="w")
    /// ...     with store.batch(ack="applied") as batch:
    /// ...         batch.write("w", 0, b"W")
    /// ...     bytes(weights), store["w"]
    /// (b'Weights', b'Weights')
    #[pyo3(signature = (memory, *, key=None, metadata=None, zeros=false))]
    fn create_in(
        &self,
        memory: &Bound<'_, PyAny>,
        key: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::metadata)] metadata: Option<Bound<'_, PyDict>>,
        #[pyo3(from_py_with = arguments::zeros)] zeros: bool,
    ) -> PyResult<PyNewPage> {
        create_in(&self.0, memory, NewPageTerms::take(key, metadata)?, zeros)
    }

    /// Replaces the bytes of a page from `offset` on with `data`. The page's metadata does not change.
    ///
    /// :raises InvalidError: `data` is an array whose dtype differs from the page's.
    #[pyo3(signature = (page, offset, data))]
    fn write(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (page, data) = (self.0.page(page)?, Input::take(data)?);
        self.check_fit(py, page, data.elements())?;
        match data {
            Input::Host(bytes) => self.0.copy_in(py, |batch| {
                batch.write(page, offset, bytes.as_slice());
            }),
            Input::Cuda(bytes) if bytes.len() == 0 => Ok(()),
            Input::Cuda(bytes) => {
                let bytes = self.0.gate.call(py, |store| bytes.adopt(store))?;
                self.0.build(py, |batch| {
                    batch.write_device(page, offset, &bytes);
                })
            }
        }
    }

    /// Changes a page from `before` to `after` by logging the elements that differ, and returns their number.
    /// The page must contain `before`, and both must have the length of the page.
    ///
    /// :raises InvalidError: `before` and `after` have different lengths.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store["k"] = bytes(4000)
    /// ...     with store.batch() as batch:
    /// ...         batch.write_changes("k", bytes(4000), bytes(2000) + b"!" + bytes(1999))
    /// 1
    #[pyo3(signature = (page, before, after, *, width=1))]
    fn write_changes(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        before: &Bound<'_, PyAny>,
        after: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::width)] width: usize,
    ) -> PyResult<u64> {
        let (page, width) = (self.0.page(page)?, self::width(width)?);
        let (before, after) = (Input::take_host(before)?, Input::take_host(after)?);
        if before.len() != after.len() {
            let message = format!("before has {} bytes, but after has {}", before.len(), after.len());
            return Err(invalid(message, "pass values of the same length"));
        }
        self.check_fit(py, page, after.elements())?;
        self.0.copy_in(py, |batch| {
            let mut changes = PageChanges::new(width);
            changes.compare(0, before.as_slice(), after.as_slice());
            let count = changes.count();
            changes.put(batch, page);
            count
        })
    }

    /// Changes the contents of a page to `data`, after comparing `data` with the page's current contents.
    ///
    /// `data` can be in host memory or, by DLPack, on a GPU. GPU memory is read after the work that is queued
    /// on the current stream. No other operation of the batch may change the page's bytes.
    ///
    /// Elements that differ are logged. Instead, the whole page is written once, outside the log, in three
    /// cases: the differences need more than a quarter of the page, all updates of the batch together need
    /// more than `logged_max` bytes, or the length changes. In these cases the commit reads `data`, which
    /// must not change before. For a page of 256 KiB or more, the beginning and the middle are compared
    /// first.
    ///
    /// For an array, the metadata entries `dtype` and `shape` are set as by `create`. For bytes, the metadata
    /// changes only if the length does, as by `resize`.
    ///
    /// Logged changes to a page on disk stay in memory until the next snapshot. `logged_max` counts that
    /// memory, which is about 600 bytes for a single element.
    ///
    /// :returns: the number of elements that differ, or None if the whole page is written.
    /// :raises ConflictError: raised by the commit if another batch changed the page after this call.
    ///
    /// >>> store = remanent.Store(directory)
    /// >>> store["k"] = bytes(100_000)
    /// >>> with store.batch() as batch:
    /// ...     batch.update("k", bytes(50_000) + b"!" + bytes(49_999))
    /// 1
    /// >>> with store.batch() as batch:
    /// ...     print(batch.update("k", b"!" * 100_000))
    /// None
    /// >>> store.close()
    #[pyo3(signature = (page, data, *, width=1, logged_max=None))]
    fn update(
        &self,
        page: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::width)] width: usize,
        #[pyo3(from_py_with = arguments::logged_max)] logged_max: Option<u64>,
    ) -> PyResult<Option<u64>> {
        update(&self.0, page, data, self::width(width)?, logged_max)
    }

    /// Adds an `update` for each (page, data, width) in `updates`, compared by several threads. Returns the list of
    /// their results. Adds either all updates or, if one is refused before it is compared, none.
    #[pyo3(signature = (updates, *, logged_max=None))]
    fn _update_many(
        &self,
        py: Python<'_>,
        updates: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>, usize)>,
        #[pyo3(from_py_with = arguments::logged_max)] logged_max: Option<u64>,
    ) -> PyResult<Vec<Option<u64>>> {
        let updates = updates.into_iter().map(|(page, data, width)| Ok((page, data, self::width(width)?)));
        update_many(&self.0, py, updates.collect::<PyResult<Vec<_>>>()?, logged_max)
    }

    /// Captures a working copy into its page. Logs the elements that changed or, for a copy with digests, the
    /// chunks of 64 KiB that changed.
    ///
    /// The memory is read when the batch is committed or submitted, after the work that is then queued on the
    /// device's default stream. The memory may change once that call returns. No other operation of the batch
    /// may change the page's bytes. If the page is on disk and more than a quarter of it changed, or its
    /// changes do not fit in memory, all of its bytes are written to a separate file that the log names. If
    /// the page is in memory, its changes count toward the limit of a batch, 1 GiB.
    ///
    /// :param ranges: (offset, end) pairs in bytes to which the comparison is limited. With digests, the
    ///     ranges are extended to whole chunks. Changes outside the ranges are found by a later capture that
    ///     covers them.
    #[pyo3(signature = (copy, ranges=None))]
    fn capture(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::copy)] copy: Bound<'_, PyWorkingCopy>,
        #[pyo3(from_py_with = arguments::ranges)] ranges: Option<Vec<(u64, u64)>>,
    ) -> PyResult<()> {
        let copy = copy.get().copy();
        self.0.build(py, |batch| match ranges {
            Some(ranges) => {
                let ranges: Vec<_> = ranges.into_iter().map(|(start, end)| start..end).collect();
                batch.capture_ranges(copy, &ranges);
            }
            None => _ = batch.capture(copy),
        })
    }

    /// Replaces elements of a page from byte `offset` on. An element is replaced if its bit in `mask` is 1.
    /// Bits are counted from the lowest bit of each byte.
    #[pyo3(signature = (page, offset, mask, data, *, width=1))]
    fn write_masked(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        mask: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::width)] width: usize,
    ) -> PyResult<()> {
        let (page, width) = (self.0.page(page)?, self::width(width)?);
        let (mask, data) = (Input::take_host(mask)?, Input::take_host(data)?);
        self.check_fit(py, page, data.elements())?;
        self.0.copy_in(py, |batch| {
            batch.write_masked(page, offset, width, mask.as_slice(), data.as_slice());
        })
    }

    /// Replaces single elements. Each index in `indices`, which must be distinct, receives the value at the
    /// same position in `values`.
    #[pyo3(signature = (page, indices, values, *, width=1))]
    fn scatter(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::width)] width: usize,
    ) -> PyResult<()> {
        let (page, width) = (self.0.page(page)?, self::width(width)?);
        // SAFETY: the object is alive.
        let indices: Vec<u32> = if unsafe { pyo3::ffi::PyObject_CheckBuffer(indices.as_ptr()) } == 1 {
            let buffer = pyo3::buffer::PyBuffer::<u32>::get(indices)
                .map_err(|_| invalid_type("indices must be a list of ints or a buffer of uint32", UINT32))?;
            // PyO3 reads them in the machine's byte order.
            if cfg!(target_endian = "little") && buffer.format().to_bytes().starts_with(b">") {
                return Err(invalid_type("indices must have the machine's byte order", UINT32));
            }
            buffer.to_vec(py)?
        } else {
            arguments::value(indices, "indices", "a list of ints from 0 to 2^32 - 1")?
        };
        let values = Input::take_host(values)?;
        self.check_fit(py, page, values.elements())?;
        self.0.copy_in(py, |batch| {
            batch.scatter(page, width, &indices, values.as_slice());
        })
    }

    /// Repeats `pattern`, which has 1, 2, 4, 8 or 16 bytes, over `length` bytes of a page from `offset` on.
    #[pyo3(signature = (page, offset, length, pattern))]
    fn fill(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::length)] length: u64,
        #[pyo3(from_py_with = arguments::pattern)] pattern: Bound<'_, PyBytes>,
    ) -> PyResult<()> {
        let page = self.0.page(page)?;
        self.0.build(py, |batch| {
            batch.fill(page, offset, length, pattern.as_bytes());
        })
    }

    /// Shortens a page, or extends it with zeros, to `length` bytes. Removes `shape` from the page's
    /// metadata, and `dtype` if the new length does not fit it, unless the batch has set these entries.
    fn resize(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::length)] length: u64,
    ) -> PyResult<()> {
        let page = self.0.page(page)?;
        self.0.build_layout(py, page, |batch, layout| {
            batch.resize(page, length);
            layout.put_len(batch, page.into(), length)
        })
    }

    /// Deletes a page. The page's key can then be used again.
    fn delete(&self, py: Python<'_>, page: &Bound<'_, PyAny>) -> PyResult<()> {
        let page = self.0.page(page)?;
        self.0.build(py, |batch| {
            batch.delete(page);
        })
    }

    /// Moves a page to `place`: "host", "pinned", "device:N" or "disk".
    fn move_to(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::place)] place: &str,
    ) -> PyResult<()> {
        let (page, place) = (self.0.page(page)?, self::place(py, place)?);
        self.0.build(py, |batch| {
            batch.move_to(page, place);
        })
    }

    /// Creates a page with the bytes and metadata of another page. Returns a `NewPage`.
    fn clone_page(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<PyNewPage> {
        let source = self.0.page(source)?;
        let layout = self.0.layout(py, source)?;
        self.0.create(py, None, layout, |batch| batch.clone_page(source))
    }

    /// Copies `length` bytes of page `source`, from `start` on, to page `target`, from `offset` on.
    #[pyo3(signature = (source, start, length, target, offset))]
    fn copy(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::start)] start: u64,
        #[pyo3(from_py_with = arguments::length)] length: u64,
        target: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
    ) -> PyResult<()> {
        let (source, target) = (self.0.page(source)?, self.0.page(target)?);
        let end = start
            .checked_add(length)
            .ok_or_else(|| invalid("the range ends beyond 2^64 bytes", "use a smaller offset or length"))?;
        self.0.build(py, |batch| {
            batch.copy(source, start..end, target, offset);
        })
    }

    /// Sets an entry of a page's metadata to a plain value.
    fn set_metadata(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::name)] name: &str,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (page, value) = (self.0.page(page)?, from_py(value)?);
        self.0.build_layout(py, page, |batch, mut layout| {
            layout.state(name, Some(&value));
            batch.set_metadata(page, name, value);
            layout
        })
    }

    /// Removes an entry of a page's metadata, if the entry exists.
    fn remove_metadata(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::name)] name: &str,
    ) -> PyResult<()> {
        let page = self.0.page(page)?;
        self.0.build_layout(py, page, |batch, mut layout| {
            layout.state(name, None);
            batch.remove_metadata(page, name);
            layout
        })
    }

    /// Sets an entry of the store's root to a plain value.
    fn set_root(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::name)] name: &str,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let value = from_py(value)?;
        self.0.build(py, |batch| {
            batch.set_root(name, value);
        })
    }

    /// Removes an entry of the store's root, if the entry exists.
    fn remove_root(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::name)] name: &str,
    ) -> PyResult<()> {
        self.0.build(py, |batch| {
            batch.remove_root(name);
        })
    }

    /// Sets the note of the batch, a remark of up to 64 KiB that is stored in the log.
    pub fn note(&self, py: Python<'_>, #[pyo3(from_py_with = arguments::text)] text: &str) -> PyResult<()> {
        self.0.build(py, |batch| {
            batch.note(text);
        })
    }

    /// Makes the commit raise `ConflictError` unless the page's epoch is `epoch`.
    fn expect_epoch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::page_id)] page: u64,
        #[pyo3(from_py_with = arguments::epoch)] epoch: u64,
    ) -> PyResult<()> {
        self.0.build(py, |batch| {
            batch.expect_epoch(PageId(page), Epoch(epoch));
        })
    }

    /// The ids of the pages that the batch created. Available after the commit.
    ///
    /// :raises ClosedError: the batch is not committed.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.0.committed(py, |committed| committed.pages.clone())?)
    }

    /// The Lsn of the batch. Available after the commit.
    ///
    /// :raises ClosedError: the batch is not committed.
    #[getter]
    fn lsn(&self, py: Python<'_>) -> PyResult<u64> {
        self.0.committed(py, |committed| committed.position.lsn.0)
    }

    fn __repr__(&self) -> String {
        format!("Batch({:?}, {})", self.0.gate.path, self.0.state_text())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (error, traceback);
        let pending = &slf.get().0;
        if kind.is_some() {
            // The block raised an exception, so the batch is discarded.
            pending.discard();
            return Ok(());
        }
        // The block has already committed or submitted the batch.
        if !pending.is_open() {
            return Ok(());
        }
        pending.commit(slf.py(), &pending.gate, None).map(drop)
    }
}
