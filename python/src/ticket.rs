//! `Ticket`, the handle to a submitted batch, and `Receipt`, the result of a commit.

use pyo3::prelude::*;
use remanent::Position;

use crate::arguments;
use crate::errors::OrRaise;
use crate::gate::{seconds, wait};
use crate::options::{ACKS, ack};
use crate::values::REPORT;

#[derive(Clone)]
pub struct Committed {
    pub position: Position,
    pub pages: Vec<u64>,
}

/// The position of a committed batch in the log, and the ids of the pages that the batch created. Returned by
/// `Store.commit`.
#[pyclass(frozen, module = "remanent")]
pub struct Receipt(pub Committed);

#[pymethods]
impl Receipt {
    /// The Lsn of the batch.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.position.lsn.0
    }

    /// The Lsn of the batch and the incarnation of the store that acknowledged it, as text.
    #[getter]
    fn position(&self) -> String {
        position_text(self.0.position)
    }

    /// The ids of the pages that the batch created, in the order of its creates and clones.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.0.pages.iter().copied())
    }

    fn __repr__(&self) -> String {
        format!("Receipt(lsn={}, pages={:?})", self.lsn(), self.0.pages)
    }
}

pub fn position_text(position: Position) -> String {
    format!("{}:{}", position.incarnation, position.lsn)
}

/// A handle to a submitted batch, on which to wait for an acknowledgement. `await ticket` waits until the
/// batch is durable. Created by `Store.submit`.
///
/// >>> import asyncio
/// >>> store = remanent.Store(directory)
/// >>> async def put(key, value):
/// ...     batch = store.batch()
/// ...     batch.create(value, key=key)
/// ...     ticket = store.submit(batch)
/// ...     await ticket
/// ...     return ticket.lsn, ticket.is_acknowledged("durable")
/// >>> asyncio.run(put("k", b"v"))
/// (1, True)
/// >>> store.close()
#[pyclass(frozen, module = "remanent")]
pub struct Ticket {
    pub ticket: remanent::Ticket,
    pub path: String,
}

impl Ticket {
    pub fn committed(&self) -> Committed {
        let pages = self.ticket.pages().iter().map(|page| page.0).collect();
        Committed { position: self.ticket.position(), pages }
    }

    pub fn wait_for(
        &self,
        py: Python<'_>,
        ack: remanent::Ack,
        timeout: Option<std::time::Duration>,
    ) -> PyResult<bool> {
        wait(py, timeout, Some(&self.path), |slice| self.ticket.wait_timeout(ack, slice))
    }
}

#[pymethods]
impl Ticket {
    /// The Lsn of the batch.
    #[getter]
    fn lsn(&self) -> u64 {
        self.ticket.position().lsn.0
    }

    /// The Lsn of the batch and the incarnation of the store that acknowledged it, as text.
    #[getter]
    fn position(&self) -> String {
        position_text(self.ticket.position())
    }

    /// The ids of the pages that the batch created, in the order of its creates and clones.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.ticket.pages().iter().map(|page| page.0))
    }

    /// Returns whether the batch has the acknowledgement `ack`, without waiting.
    #[pyo3(signature = (ack="durable"))]
    fn is_acknowledged(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::ack)] ack: &str,
    ) -> PyResult<bool> {
        self.ticket.is_acknowledged(self::ack(ack)?).or_raise(py, Some(&self.path))
    }

    /// Waits until the batch has the acknowledgement `ack`. Returns False if this takes more than `timeout`
    /// seconds. Ctrl-C ends the wait, and the batch stays submitted.
    ///
    /// :raises PoisonedError: an earlier failure stopped the store, so that the batch will never be
    ///     acknowledged.
    ///
    /// >>> with remanent.Store(directory) as store:
    /// ...     store.submit(store.batch(note="n")).wait(timeout=60, ack="applied")
    /// True
    #[pyo3(signature = (timeout=None, ack="durable"))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
        #[pyo3(from_py_with = arguments::ack)] ack: &str,
    ) -> PyResult<bool> {
        self.wait_for(py, self::ack(ack)?, seconds(timeout)?)
    }

    /// Waits asynchronously until the batch has the acknowledgement `ack`.
    #[pyo3(signature = (ack="durable"))]
    fn acknowledged<'py>(
        slf: &Bound<'py, Self>,
        #[pyo3(from_py_with = arguments::ack)] ack: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        self::ack(ack)?;
        slf.py().import("remanent._store.aio")?.call_method1("acknowledged", (slf, ack))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::acknowledged(slf, "durable")?.call_method0("__await__")
    }

    /// Returns None if the batch is acknowledged. Otherwise `event_fd` will report `id` once it is.
    fn _poll(
        &self,
        py: Python<'_>,
        event_fd: &Bound<'_, crate::event_fd::EventFd>,
        id: u64,
        #[pyo3(from_py_with = arguments::ack)] ack: &str,
    ) -> PyResult<Option<crate::event_fd::Waiting>> {
        crate::event_fd::poll(&self.ticket, event_fd.get(), id, self::ack(ack)?)
            .or_raise(py, Some(&self.path))
    }

    fn __repr__(&self) -> String {
        let reached = ACKS.iter().rev().find(|(_, ack)| self.ticket.is_acknowledged(*ack).unwrap_or(false));
        // `is_acknowledged` and `wait` raise the reason for which a batch will not be acknowledged.
        let reached = match reached {
            Some((name, _)) => name,
            None if self.ticket.is_acknowledged(remanent::Ack::Durable).is_ok() => "pending",
            None => "not acknowledged",
        };
        format!("Ticket(lsn={}, {reached})", self.lsn())
    }
}
