//! The operations of a batch until it is submitted, and how it is.
//!
//! Threads share a batch, and its lock is held for as long as operations are added. Nothing of Python's runs
//! meanwhile: no exception is made, and no object of the caller's is dropped. Another thread that has the
//! interpreter's lock, or that a free-threaded interpreter must stop, may be waiting for the batch.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use remanent::{Ack, Error, Key, NewPage, PageId, PageRef, WriteBatch};

use crate::errors::{OrRaise, own};
use crate::gate::{Gate, detached};
use crate::new_page::PyNewPage;
use crate::page_name::PageName;
use crate::ticket::{Committed, Ticket};

/// A batch that threads add operations to, until one of them submits it.
pub struct PendingBatch {
    pub gate: Arc<Gate>,
    /// The acknowledgement that a commit of it waits for; the store's own if none is named.
    ack: Option<Ack>,
    state: Mutex<PendingState>,
}

struct PendingState {
    /// `None` once it is submitted or given up.
    batch: Option<WriteBatch>,
    /// The keys of pages that this batch creates.
    created: HashMap<Key, NewPage>,
    /// Bytes that its updates log, or keep waiting.
    logged: u64,
    /// The pages that it updates.
    updated: HashSet<PageId>,
    committed: Option<Committed>,
}

impl PendingBatch {
    pub fn new(gate: Arc<Gate>, ack: Option<Ack>) -> Self {
        let state = PendingState {
            batch: Some(WriteBatch::default()),
            created: HashMap::new(),
            logged: 0,
            updated: HashSet::new(),
            committed: None,
        };
        Self { gate, ack, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, PendingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds operations; `add`, if it is not called, is dropped after the lock, with all that it holds.
    fn add<T>(&self, add: impl FnOnce(&mut WriteBatch) -> T) -> remanent::Result<T> {
        let mut state = self.lock();
        match &mut state.batch {
            Some(batch) => Ok(add(batch)),
            None => Err(Error::Closed),
        }
    }

    /// Adds operations; `add` says which.
    ///
    /// # Errors
    /// `ClosedError`.
    pub fn build<T>(&self, py: Python<'_>, add: impl FnOnce(&mut WriteBatch) -> T) -> PyResult<T> {
        self.add(add).or_raise(py, Some(&self.gate.path))
    }

    /// Adds operations that copy the caller's bytes, without the interpreter's lock. `add` borrows them:
    /// dropping them takes that lock, for which a thread must not wait while it has the batch.
    ///
    /// # Errors
    /// `ClosedError`.
    pub fn copy_in<T: Send>(
        &self,
        py: Python<'_>,
        add: impl FnOnce(&mut WriteBatch) -> T + Send,
    ) -> PyResult<T> {
        py.detach(|| self.add(add)).or_raise(py, Some(&self.gate.path))
    }

    /// Creates a page, which calls that follow may name by its key.
    ///
    /// # Errors
    /// `ClosedError`.
    pub fn create(
        &self,
        py: Python<'_>,
        key: Option<&Key>,
        add: impl FnOnce(&mut WriteBatch) -> NewPage + Send,
    ) -> PyResult<PyNewPage> {
        let created = py.detach(|| {
            let mut state = self.lock();
            let page = match &mut state.batch {
                Some(batch) => add(batch),
                None => return Err(Error::Closed),
            };
            if let Some(key) = key {
                state.created.insert(key.clone(), page);
            }
            Ok(page)
        });
        created.or_raise(py, Some(&self.gate.path)).map(PyNewPage)
    }

    /// The page that a caller names: of this batch, or of the store.
    ///
    /// # Errors
    /// `TypeError`, `UnknownKeyError`.
    pub fn page(&self, object: &Bound<'_, PyAny>) -> PyResult<PageRef> {
        if let Ok(new) = object.cast::<PyNewPage>() {
            return Ok(new.get().0.into());
        }
        match PageName::take(object)? {
            PageName::Id(page) => Ok(page.into()),
            PageName::Key(key) => match self.created(&key) {
                Some(new) => Ok(new.into()),
                None => self.page_by_key(object.py(), &key).map(Into::into),
            },
        }
    }

    /// The page of the store that a caller names.
    ///
    /// # Errors
    /// `TypeError`, `UnknownKeyError`; `ValueError` for a page that the batch creates.
    pub fn page_of_store(&self, object: &Bound<'_, PyAny>) -> PyResult<PageId> {
        let own = || PyValueError::new_err("a page that the batch creates holds nothing to compare with");
        if object.cast::<PyNewPage>().is_ok() {
            return Err(own());
        }
        match PageName::take(object)? {
            PageName::Id(page) => Ok(page),
            PageName::Key(key) => match self.created(&key) {
                Some(_) => Err(own()),
                None => self.page_by_key(object.py(), &key),
            },
        }
    }

    fn created(&self, key: &Key) -> Option<NewPage> {
        self.lock().created.get(key).copied()
    }

    fn page_by_key(&self, py: Python<'_>, key: &Key) -> PyResult<PageId> {
        self.gate.look(py, |store| store.page_by_key(key)).map(|info| info.page)
    }

    /// Bytes that its updates log, or keep waiting.
    pub fn logged(&self) -> u64 {
        self.lock().logged
    }

    /// Adds the one update of a page that a batch may have: a second one would not know of the first. `add`
    /// is not called for a second one. With the bytes that it logs.
    ///
    /// # Errors
    /// `ValueError`, `ClosedError`.
    pub fn update(
        &self,
        py: Python<'_>,
        page: PageId,
        logged: u64,
        add: impl FnOnce(&mut WriteBatch),
    ) -> PyResult<()> {
        let is_first = {
            let mut state = self.lock();
            let PendingState { batch, updated, logged: all, .. } = &mut *state;
            match batch {
                None => Err(Error::Closed),
                Some(_) if !updated.insert(page) => Ok(false),
                Some(batch) => {
                    add(batch);
                    *all += logged;
                    Ok(true)
                }
            }
        };
        if !is_first.or_raise(py, Some(&self.gate.path))? {
            return Err(PyValueError::new_err("the batch has an update of this page already"));
        }
        Ok(())
    }

    /// Whether it is neither submitted nor given up.
    pub fn is_open(&self) -> bool {
        self.lock().batch.is_some()
    }

    /// Drops its operations.
    pub fn give_up(&self) {
        let operations = self.lock().batch.take();
        detached(operations);
    }

    /// What the batch became.
    ///
    /// # Errors
    /// `ClosedError` if it is not committed.
    pub fn committed<T>(&self, py: Python<'_>, look: impl FnOnce(&Committed) -> T) -> PyResult<T> {
        let looked = self.lock().committed.as_ref().map(look);
        let path = Some(self.gate.path.as_str());
        looked.ok_or_else(|| own(py, "ClosedError", "the batch is not committed", "commit it first", path))
    }

    /// Submits the batch to the store of this gate.
    ///
    /// # Errors
    /// `ValueError` if it is another store's; `ClosedError` if it is submitted or given up; as a submit.
    pub fn submit(&self, py: Python<'_>, gate: &Arc<Gate>) -> PyResult<Ticket> {
        if !Arc::ptr_eq(gate, &self.gate) {
            return Err(PyValueError::new_err("the batch is another store's"));
        }
        let operations = self.lock().batch.take();
        let operations = operations.ok_or(Error::Closed).or_raise(py, Some(&gate.path))?;
        let ticket = gate.call(py, |store| store.submit(operations))?;
        let ticket = Ticket { ticket, path: gate.path.clone() };
        self.lock().committed = Some(ticket.committed());
        Ok(ticket)
    }

    /// Submits the batch and waits for an acknowledgement, in slices: the one named, else the batch's, else
    /// the store's.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit); as a wait.
    pub fn commit(&self, py: Python<'_>, gate: &Arc<Gate>, ack: Option<Ack>) -> PyResult<Ticket> {
        let ticket = self.submit(py, gate)?;
        ticket.wait_for(py, ack.or(self.ack).unwrap_or(gate.ack), None)?;
        Ok(ticket)
    }
}
