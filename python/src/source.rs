//! The sources from which pages and the root are read: an open store, a view of it, an earlier state or a
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
    pub struct LiveCell {
        owner: Arc<Store>,
        #[not_covariant]
        dependent: LiveView,
    }
}

pub enum Source {
    Store(Arc<Gate>),
    Live(LiveSource),
    Past(PastSource),
    Replica(Mutex<Replica>),
}

pub type LiveSource = Closable<HeldView>;

pub type PastSource = Closable<View>;

/// A view that one call may close while other calls read from it.
pub struct Closable<V> {
    opener: u32,
    pub path: String,
    view: Mutex<Option<Arc<V>>>,
}

/// A view and the handle that keeps its store open. The view is dropped first.
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

/// Locks a replica. The interpreter lock is released while the call waits.
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

    /// Returns the kind of the source, for errors after it was closed.
    pub fn handle(&self) -> crate::errors::Handle {
        match self {
            Source::Store(_) | Source::Replica(_) => crate::errors::STORE,
            Source::Live(_) => crate::errors::LIVE_VIEW,
            Source::Past(_) => crate::errors::VIEW,
        }
    }

    /// Runs a call that does not wait. Only a replica may first wait for a batch that is being applied.
    pub fn inspect<T>(&self, py: Python<'_>, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> Result<T> {
        match self {
            // The wait releases the interpreter lock.
            Source::Replica(replica) => run(&*locked(py, replica)),
            _ => self.with(run),
        }
    }

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
