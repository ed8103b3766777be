//! `WorkingCopy`: caller-owned memory whose changes are captured into a page.

use std::sync::Arc;

use pyo3::prelude::*;
use remanent::PageId;
use remanent::batch::{InitialCopy, Shadow};

use crate::gate::{Gate, detached};
use crate::memory::Input;
use crate::options::{place, width};

/// Caller-owned memory whose changes `Batch.capture` logs to a page. Created by `Store.working_copy`.
///
/// Writes to the memory do not change the page until a capture is committed. A working copy belongs to one
/// version of its page, and each capture advances it to the next version. If another batch changes the page,
/// captures raise `ConflictError` until `reload` is called.
///
/// >>> import numpy
/// >>> store = remanent.Store(directory, device="host")
/// >>> weights = numpy.zeros(1_000_000, "float32")
/// >>> store["weights"] = weights
/// >>> copy = store.working_copy("weights", weights, width=4)
/// >>> weights[::100_000] = 1
/// >>> logged = store.stats()["log_bytes"]
/// >>> with store.batch() as batch:
/// ...     batch.capture(copy)
/// >>> store["weights"] == weights.tobytes(), store.stats()["log_bytes"] - logged < 1000
/// (True, True)
/// >>> store.close()
#[pyclass(frozen, name = "WorkingCopy", module = "remanent")]
pub struct PyWorkingCopy {
    gate: Arc<Gate>,
    copy: Option<remanent::batch::WorkingCopy>,
}

impl PyWorkingCopy {
    pub fn make(
        py: Python<'_>,
        gate: &Arc<Gate>,
        page: PageId,
        memory: Input,
        (width, shadow): (usize, &str),
        is_loaded: bool,
    ) -> PyResult<Self> {
        let width = self::width(width)?;
        let shadow = match shadow {
            "page" => Shadow::Page,
            "digests" => Shadow::Digest,
            place => Shadow::Kept(self::place(py, place)?),
        };
        let initial_copy = if is_loaded { InitialCopy::Load } else { InitialCopy::Store };
        let copy = gate.call(py, |store| {
            let memory = memory.adopt(store)?;
            store.working_copy_in(page, &memory, width, shadow, initial_copy)
        })?;
        Ok(Self { gate: gate.clone(), copy: Some(copy) })
    }

    pub fn copy(&self) -> &remanent::batch::WorkingCopy {
        self.copy.as_ref().expect("present until it is dropped")
    }
}

#[pymethods]
impl PyWorkingCopy {
    /// The id of the page.
    #[getter]
    fn page(&self) -> u64 {
        self.copy().page().0
    }

    /// The length of the memory in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.copy().bytes().byte_len()
    }

    /// The epoch of the page version to which the memory corresponds, or 0 if there is none.
    #[getter]
    fn epoch(&self) -> u64 {
        self.copy().epoch().0
    }

    /// Copies the page's bytes to the memory, replacing its contents. Use this method after a conflict, or to
    /// discard changes that were not captured.
    ///
    /// :raises UnknownPageError: the page was deleted.
    /// :raises DamagedError: bytes on disk differ from the bytes that were written.
    /// :raises MemoryRefusedError: the page's length changed.
    fn reload(&self, py: Python<'_>) -> PyResult<()> {
        self.gate.call(py, |store| store.reload(self.copy()))
    }

    fn __repr__(&self) -> String {
        format!("WorkingCopy(page={}, nbytes={}, epoch={})", self.page(), self.nbytes(), self.epoch())
    }
}

impl Drop for PyWorkingCopy {
    fn drop(&mut self) {
        detached(self.copy.take());
    }
}
