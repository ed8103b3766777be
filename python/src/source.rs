//! What pages and root are read from: an open store, a view of it, an earlier state, a replica.

use std::sync::{Arc, Mutex, PoisonError};

use remanent::{Error, LiveView, ReadPages, Replica, Result, Store, View};
use self_cell::self_cell;

use crate::gate::{Gate, Handle, check_process, detached};

self_cell! {
    /// A view beside the store that it borrows from.
    pub struct LiveCell {
        owner: Arc<Store>,
        #[not_covariant]
        dependent: LiveView,
    }
}

/// What pages are read from.
pub enum Source {
    Store(Arc<Gate>),
    Live(LiveSource),
    Past(PastSource),
    Replica(Mutex<Replica>),
}

/// A view of an open store, until it is closed.
pub struct LiveSource {
    opener: u32,
    pub path: String,
    view: Mutex<Option<Arc<HeldView>>>,
}

/// A view, and after it in the order of dropping the count that keeps its store open.
struct HeldView {
    cell: LiveCell,
    _handle: Handle,
}

/// An earlier state, until it is closed.
pub struct PastSource {
    opener: u32,
    pub path: String,
    view: Mutex<Option<Arc<View>>>,
}

impl LiveSource {
    pub fn new(gate: &Arc<Gate>) -> Result<Self> {
        let (handle, store) = gate.hold()?;
        let cell = LiveCell::try_new(store, |store| store.view())?;
        let view = Mutex::new(Some(Arc::new(HeldView { cell, _handle: handle })));
        Ok(Self { opener: std::process::id(), path: gate.path.clone(), view })
    }

    pub fn close(&self) -> Result<()> {
        check_process(self.opener)?;
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner).take();
        detached(view);
        Ok(())
    }
}

impl PastSource {
    pub fn new(view: View, path: String) -> Self {
        Self { opener: std::process::id(), path, view: Mutex::new(Some(Arc::new(view))) }
    }

    pub fn get(&self) -> Result<Arc<View>> {
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

impl Source {
    pub fn path(&self) -> Option<&str> {
        match self {
            Source::Store(gate) => Some(&gate.path),
            Source::Live(live) => Some(&live.path),
            Source::Past(past) => Some(&past.path),
            Source::Replica(_) => None,
        }
    }

    /// Runs a call on the pages.
    pub fn with<T>(&self, run: impl FnOnce(&dyn ReadPages) -> Result<T>) -> Result<T> {
        match self {
            Source::Store(gate) => run(&*gate.enter()?),
            Source::Live(live) => {
                check_process(live.opener)?;
                let view = live.view.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let view = view.ok_or(Error::Closed)?;
                let read = view.cell.with_dependent(|_, view| run(view));
                // Closed meanwhile by another thread, it ends here.
                detached(view);
                read
            }
            Source::Past(past) => run(&*past.get()?),
            Source::Replica(replica) => run(&*replica.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}
