//! Collects the operations of a batch until the batch is submitted.
//!
//! Threads share a batch, whose lock is held while operations are added. No Python code runs under that lock:
//! no exception is created, and no object of the caller is dropped. Otherwise a thread that waits for the
//! lock of the batch could hold the interpreter lock that the Python code needs. A free-threaded interpreter
//! also cannot stop a thread that waits for this lock.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use remanent::batch::{NewPage, PageRef};
use remanent::{Ack, Error, Key, PageId, WriteBatch};

use crate::elements::PageLayout;
use crate::errors::{invalid, own};
use crate::gate::{Gate, detached};
use crate::new_page::PyNewPage;
use crate::page_name::PageName;
use crate::ticket::{Committed, Ticket};

const NEW_BATCH: &str = "create a new batch with store.batch()";

/// A page that is named in an operation of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchPage {
    New(NewPage),
    Stored(PageId),
}

impl From<BatchPage> for PageRef<'_> {
    fn from(page: BatchPage) -> Self {
        match page {
            BatchPage::New(page) => page.into(),
            BatchPage::Stored(page) => page.into(),
        }
    }
}

/// The reason why a batch accepts no more operations.
#[derive(Clone, Copy)]
enum BatchEnd {
    Submitting,
    /// The batch was committed with this Lsn.
    Committed(u64),
    /// The commit failed before the batch was logged.
    Refused,
    /// The `with` block of the batch raised an exception.
    Discarded,
}

impl BatchEnd {
    fn message(self) -> String {
        match self {
            Self::Submitting => "another thread is submitting this batch".to_owned(),
            Self::Committed(lsn) => format!("this batch was already committed as lsn {lsn}"),
            Self::Refused => "the commit of this batch failed, and nothing was logged".to_owned(),
            Self::Discarded => "this batch was discarded because its block raised an exception".to_owned(),
        }
    }
}

/// A batch to which threads add operations until one of them submits the batch.
pub struct PendingBatch {
    pub gate: Arc<Gate>,
    /// The acknowledgement that a commit waits for; `None` uses the store's default.
    ack: Option<Ack>,
    state: Mutex<PendingState>,
}

struct PendingState {
    batch: Result<WriteBatch, BatchEnd>,
    /// The element types that the metadata of pages states after the operations so far.
    layouts: HashMap<BatchPage, PageLayout>,
    created: HashMap<Key, NewPage>,
    /// The bytes that the updates of this batch log or keep in memory until the next snapshot.
    logged: u64,
    updated: HashSet<PageId>,
    committed: Option<Committed>,
}

impl PendingBatch {
    pub fn new(gate: Arc<Gate>, ack: Option<Ack>) -> Self {
        let state = PendingState {
            batch: Ok(WriteBatch::default()),
            layouts: HashMap::new(),
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

    /// Adds operations. If the batch accepts none, `add` and all values in it are dropped after the lock is
    /// released.
    fn add<T>(&self, add: impl FnOnce(&mut WriteBatch) -> T) -> Result<T, BatchEnd> {
        let mut state = self.lock();
        state.batch.as_mut().map(add).map_err(|end| *end)
    }

    /// Returns the exception for a batch that accepts no more operations.
    fn ended(&self, py: Python<'_>, end: BatchEnd) -> PyErr {
        own(py, "ClosedError", &end.message(), NEW_BATCH, Some(&self.gate.path))
    }

    /// Adds operations by calling `add`.
    ///
    /// # Errors
    /// `ClosedError` if the batch accepts no more operations.
    pub fn build<T>(&self, py: Python<'_>, add: impl FnOnce(&mut WriteBatch) -> T) -> PyResult<T> {
        self.add(add).map_err(|end| self.ended(py, end))
    }

    /// Adds operations that copy the caller's bytes, without the interpreter lock. `add` must only borrow the
    /// bytes: dropping them needs the interpreter lock, for which a thread must not wait while it holds the
    /// batch.
    ///
    /// # Errors
    /// `ClosedError` if the batch accepts no more operations.
    pub fn copy_in<T: Send>(
        &self,
        py: Python<'_>,
        add: impl FnOnce(&mut WriteBatch) -> T + Send,
    ) -> PyResult<T> {
        py.detach(|| self.add(add)).map_err(|end| self.ended(py, end))
    }

    /// Creates a page. Later calls of the batch can refer to the page by its key.
    ///
    /// # Errors
    /// `ClosedError` if the batch accepts no more operations.
    pub fn create(
        &self,
        py: Python<'_>,
        key: Option<&Key>,
        layout: PageLayout,
        add: impl FnOnce(&mut WriteBatch) -> NewPage + Send,
    ) -> PyResult<PyNewPage> {
        let created = py.detach(|| {
            let mut state = self.lock();
            let page = state.batch.as_mut().map(add).map_err(|end| *end)?;
            state.layouts.insert(BatchPage::New(page), layout);
            if let Some(key) = key {
                state.created.insert(key.clone(), page);
            }
            Ok(page)
        });
        created.map(PyNewPage).map_err(|end| self.ended(py, end))
    }

    /// Returns the page that a caller names, from this batch or from the store.
    ///
    /// # Errors
    /// `TypeError` if the object is not the name of a page, and `UnknownKeyError` if no page has the key.
    pub fn page(&self, object: &Bound<'_, PyAny>) -> PyResult<BatchPage> {
        if let Ok(new) = object.cast::<PyNewPage>() {
            return Ok(BatchPage::New(new.get().0));
        }
        match PageName::take(object)? {
            PageName::Id(page) => Ok(BatchPage::Stored(page)),
            PageName::Key(key) => match self.created(&key) {
                Some(new) => Ok(BatchPage::New(new)),
                None => self.page_by_key(object.py(), &key).map(BatchPage::Stored),
            },
        }
    }

    /// Returns the page of the store that a caller names.
    ///
    /// # Errors
    /// `TypeError`, `UnknownKeyError`, and `ValueError` for a page that the batch creates.
    pub fn page_of_store(&self, object: &Bound<'_, PyAny>) -> PyResult<PageId> {
        let own = || {
            invalid(
                "a page that this batch creates has no contents to compare with",
                "pass the contents to create, or use write",
            )
        };
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
        self.gate.inspect(py, |store| store.page_by_key(key)).map(|info| info.page)
    }

    /// Returns the element type that a page's metadata states after the operations so far. The result is
    /// empty for a missing page, which makes the commit fail.
    ///
    /// # Errors
    /// `ClosedError` if the store is closed.
    pub fn layout(&self, py: Python<'_>, page: BatchPage) -> PyResult<PageLayout> {
        if let Some(known) = self.lock().layouts.get(&page) {
            return Ok(known.clone());
        }
        let BatchPage::Stored(page) = page else { return Ok(PageLayout::default()) };
        self.gate.inspect(py, |store| match store.page(page) {
            Err(Error::UnknownPage { .. }) => Ok(PageLayout::default()),
            found => found.map(|info| PageLayout::from(&info)),
        })
    }

    /// Adds operations that change the element type in a page's metadata. `add` returns the new element type.
    ///
    /// # Errors
    /// `ClosedError` if the batch accepts no more operations.
    pub fn build_layout(
        &self,
        py: Python<'_>,
        page: BatchPage,
        add: impl FnOnce(&mut WriteBatch, PageLayout) -> PageLayout,
    ) -> PyResult<()> {
        let before = self.layout(py, page)?;
        let added = {
            let mut state = self.lock();
            let PendingState { batch, layouts, .. } = &mut *state;
            batch.as_mut().map_err(|end| *end).map(|batch| _ = layouts.insert(page, add(batch, before)))
        };
        added.map_err(|end| self.ended(py, end))
    }

    /// Returns the bytes that the updates of this batch log or keep in memory until the next snapshot.
    pub fn logged(&self) -> u64 {
        self.lock().logged
    }

    /// Adds the update of a page, of which a batch may have only one, because a second update would ignore
    /// the first. `logged` is the number of bytes that the update logs.
    ///
    /// # Errors
    /// `ValueError` if the batch already contains an update of the page, and `ClosedError` if the batch accepts no more
    /// operations.
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
                Err(end) => Err(*end),
                Ok(_) if !updated.insert(page) => Ok(false),
                Ok(batch) => {
                    add(batch);
                    *all += logged;
                    Ok(true)
                }
            }
        };
        if !is_first.map_err(|end| self.ended(py, end))? {
            let message = "the batch already contains an update of this page";
            return Err(invalid(message, "commit the batch, and use another one for the second update"));
        }
        Ok(())
    }

    pub fn is_open(&self) -> bool {
        self.lock().batch.is_ok()
    }

    /// Returns the state of the batch as text for `repr`.
    pub fn state_text(&self) -> String {
        match self.lock().batch.as_ref() {
            Ok(batch) => format!("open, operations={}", batch.operations()),
            Err(BatchEnd::Submitting) => "submitting".to_owned(),
            Err(BatchEnd::Committed(lsn)) => format!("committed, lsn={lsn}"),
            Err(BatchEnd::Refused) => "refused".to_owned(),
            Err(BatchEnd::Discarded) => "discarded".to_owned(),
        }
    }

    pub fn discard(&self) {
        let operations = std::mem::replace(&mut self.lock().batch, Err(BatchEnd::Discarded));
        detached(operations);
    }

    /// Calls `inspect` with the position and the pages of the committed batch.
    ///
    /// # Errors
    /// `ClosedError` if the batch is not committed.
    pub fn committed<T>(&self, py: Python<'_>, inspect: impl FnOnce(&Committed) -> T) -> PyResult<T> {
        let inspected = self.lock().committed.as_ref().map(inspect);
        let path = Some(self.gate.path.as_str());
        let refused = || own(py, "ClosedError", "the batch is not committed", "commit it first", path);
        inspected.ok_or_else(refused)
    }

    /// Submits the batch to the store of this gate.
    ///
    /// # Errors
    /// `ValueError` if the batch belongs to another store, `ClosedError` if it was already submitted or
    /// discarded, and errors of the submission.
    pub fn submit(&self, py: Python<'_>, gate: &Arc<Gate>) -> PyResult<Ticket> {
        if !Arc::ptr_eq(gate, &self.gate) {
            let remedy = "commit it to the store whose batch() created it";
            return Err(invalid("the batch belongs to another store", remedy));
        }
        let operations = {
            let mut state = self.lock();
            match &state.batch {
                Ok(_) => std::mem::replace(&mut state.batch, Err(BatchEnd::Submitting)),
                Err(end) => Err(*end),
            }
        };
        let operations = operations.map_err(|end| self.ended(py, end))?;
        let submitted = gate.call(py, |store| store.submit(operations));
        let mut state = self.lock();
        let Ok(ticket) = submitted else {
            state.batch = Err(BatchEnd::Refused);
            drop(state);
            return submitted.map(|ticket| Ticket { ticket, path: gate.path.clone() });
        };
        let ticket = Ticket { ticket, path: gate.path.clone() };
        let committed = ticket.committed();
        state.batch = Err(BatchEnd::Committed(committed.position.lsn.0));
        state.committed = Some(committed);
        drop(state);
        Ok(ticket)
    }

    /// Submits the batch and waits, in slices, for an acknowledgement. The acknowledgement is `ack`, or else
    /// that of the batch, or else that of the store.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit), and errors of the wait.
    pub fn commit(&self, py: Python<'_>, gate: &Arc<Gate>, ack: Option<Ack>) -> PyResult<Ticket> {
        let ticket = self.submit(py, gate)?;
        ticket.wait_for(py, ack.or(self.ack).unwrap_or(gate.ack), None)?;
        Ok(ticket)
    }
}
