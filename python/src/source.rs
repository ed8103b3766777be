//! The sources that pages and the root are read from: an open store, a view of it, an earlier state or a
//! replica.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use remanent::follow::Replica;
use remanent::store::{LiveView, ReadPages};
use remanent::{Error, Result, Store, View};
use self_cell::self_cell;

use crate::gate::{Gate, Handle, check_process, detached};

self_cell! {
    /// A view and the store that it borrows from.
    pub struct LiveCell {
        owner: Arc<Store>,
        #[not_covariant]
        dependent: LiveView,
    }
}

/// A source of pages.
pub enum Source {
    Store(Arc<Gate>),
    Live(LiveSource),
    Past(PastSource),
    Replica(Mutex<Replica>),
}

/// A view of an open store, until it is closed.
pub type LiveSource = Closable<HeldView>;

/// An earlier state, until it is closed.
pub type PastSource = Closable<View>;

/// A view that one call may close while others read from it.
pub struct Closable<V> {
    opener: u32,
    pub path: String,
    view: Mutex<Option<Arc<V>>>,
}

/// A view, followed in drop order by the count that keeps its store open.
pub struct HeldView {
    cell: LiveCell,
    _handle: Handle,
}

impl LiveSource {
    pub fn of(gate: &Arc<Gate>) -> Result<Self> {
        let (handle, store) = gate.hold()?;
        let cell = LiveCell::try_new(store, |store| store.view())?;
        Ok(Self::new(HeldView { cell, _handle: handle }, gate.path.clone()))
    }
}

impl<V: Send + Sync> Closable<V> {
    pub fn new(view: V, path: String) -> Self {
        Self { opener: std::process::id(), path, view: Mutex::new(Some(Arc::new(view))) }
    }

    pub fn get(&self) -> Result<Arc<V>> {
        check_process(self.opener)?;
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)
    }

    pub fn close(&self) -> Result<()> {
        check_process(self.opener)?;
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner).take();
        detached(view);
        Ok(())
    }
}

/// Locks a replica, waiting without the interpreter's lock.
pub fn locked<'r>(py: Python<'_>, replica: &'r Mutex<Replica>) -> MutexGuard<'r, Replica> {
    replica.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
}

impl Source {
    pub fn path(&self) -> Option<&str> {
        match self {
            Source::Store(gate) => Some(&gate.path),
            Source::Live(live) => Some(&live.path),
            Source::Past(past) => Some(&past.path),
            Source::Replica(_) => None,
        }
    }

    /// Returns how errors name the source once it is closed.
    pub fn handle(&self) -> crate::errors::Handle {
        match self {
            Source::Store(_) | Source::Replica(_) => crate::errors::STORE,
            Source::Live(_) => crate::errors::LIVE_VIEW,
            Source::Past(_) => crate::errors::VIEW,
        }
    }

    /// Runs a call that waits for nothing except, for a replica, a batch that is being applied.
    pub fn inspect<T>(&self, py: Python<'_>, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> Result<T> {
        match self {
            // Other threads can run Python code while this waits.
            Source::Replica(replica) => run(&*locked(py, replica)),
            _ => self.with(run),
        }
    }

    /// Runs a call on the pages.
    pub fn with<T>(&self, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> Result<T> {
        match self {
            Source::Store(gate) => run(&*gate.enter()?),
            Source::Live(live) => {
                let view = live.get()?;
                let read = view.cell.with_dependent(|_, view| run(view));
                // If another thread closed the view meanwhile, the view is dropped here.
                detached(view);
                read
            }
            Source::Past(past) => run(&*past.get()?),
            Source::Replica(replica) => run(&*replica.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}
