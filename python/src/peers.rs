//! The sending of a store's pages to other processes and hosts over NIXL, and their retrieval.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use remanent::error::NixlError;
use remanent::nixl::{Agent, AgentOptions, Nixl, PageClient, PageServer};
use remanent::{Error, Result, Store};

use crate::arguments;
use crate::errors::{OrRaise, STORE, own, store_io};
use crate::gate::{check_process, detached, seconds};
use crate::store::PyStore;
use crate::values::metadata_to_py;

/// The time after which the thread of a server checks whether it must end.
const SLICE: Duration = Duration::from_millis(50);

/// Loads the library: from the paths that the engine searches, or else from the interpreter's folder of
/// packages, which the engine does not know.
fn load(py: Python<'_>) -> PyResult<Nixl> {
    static LOADED: OnceLock<Nixl> = OnceLock::new();
    if let Some(loaded) = LOADED.get() {
        return Ok(*loaded);
    }
    let folder: PathBuf = py.import("sysconfig")?.call_method1("get_path", ("platlib",))?.extract()?;
    let found = py.detach(|| match Nixl::load() {
        Err(Error::Nixl(error)) if matches!(*error, NixlError::NotFound { .. }) => {
            Nixl::load_from(folder).map_err(|_| Error::Nixl(error))
        }
        found => found,
    });
    let found = found.or_raise(py, None)?;
    Ok(*LOADED.get_or_init(|| found))
}

fn agent(py: Python<'_>, name: &str, timeout: f64) -> PyResult<Agent> {
    let nixl = load(py)?;
    let timeout = seconds(Some(timeout))?.unwrap_or_default();
    let options = AgentOptions::new(name).timeout(timeout).polled();
    py.detach(|| nixl.agent(&options)).or_raise(py, None)
}

/// The servers of this process, to be stopped before interpreter shutdown.
static SERVERS: Mutex<Vec<Weak<ServerThread>>> = Mutex::new(Vec::new());

/// The thread of a server.
struct ServerThread {
    opener: u32,
    is_over: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl ServerThread {
    /// Stops the thread after the pages that it is sending, and waits for its end.
    ///
    /// # Errors
    /// `Forked` in a forked child, in which the thread does not exist.
    fn end(&self) -> Result<()> {
        check_process(self.opener)?;
        self.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the thread was already printed.
            let _ = thread.join();
        }
        Ok(())
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        if self.end().is_err() {
            std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// Stops all servers of this process. Called before interpreter shutdown.
pub fn close_all(py: Python<'_>) {
    // In a forked child, a thread of the parent may hold the lock forever.
    let Ok(mut servers) = SERVERS.try_lock() else { return };
    let servers: Vec<_> = servers.drain(..).filter_map(|server| server.upgrade()).collect();
    py.detach(|| servers.iter().for_each(|server| drop(server.end())));
}

/// Sends the pages of a store to other processes and hosts, on a thread of its own. Must be closed before
/// the store.
#[pyclass(frozen, name = "PageServer", module = "remanent")]
pub struct PyPageServer {
    metadata: Vec<u8>,
    thread: Arc<ServerThread>,
}

/// Sends pages until `is_over` is set.
fn serve(store: &Store, agent: Agent, is_over: &AtomicBool) -> Result<()> {
    let mut server = PageServer::new(agent, store);
    while !is_over.load(Ordering::Relaxed) {
        server.serve(SLICE)?;
    }
    Ok(())
}

#[pymethods]
impl PyPageServer {
    #[new]
    #[pyo3(signature = (store, name, timeout))]
    fn new(
        store: &Bound<'_, PyStore>,
        #[pyo3(from_py_with = arguments::text)] name: &str,
        #[pyo3(from_py_with = arguments::seconds)] timeout: f64,
    ) -> PyResult<Self> {
        let py = store.py();
        let gate = store.get().gate();
        let path = gate.path.clone();
        let (handle, store) = gate.hold().or_raise_of(py, Some(&path), STORE)?;
        let agent = agent(py, name, timeout)?;
        let metadata = py.detach(|| agent.metadata()).or_raise(py, Some(&path))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let must_end = is_over.clone();
        let shown = path.clone();
        let run = move || {
            if let Err(error) = serve(&store, agent, &must_end) {
                tracing::error!(%error, store = shown, "a server of pages has stopped");
            }
            // A store can only be closed after all references and handles are dropped, in this order.
            drop(store);
            drop(handle);
        };
        let thread = Builder::new().name("remanent-serve".to_owned()).spawn(run).map_err(|error| {
            store_io(format!("{path}: a thread cannot be started: {error}"), "end threads, then try again")
        })?;
        let thread = Mutex::new(Some(thread));
        let thread = Arc::new(ServerThread { opener: std::process::id(), is_over, thread });
        if let Ok(mut servers) = SERVERS.try_lock() {
            servers.retain(|server| server.strong_count() > 0);
            servers.push(Arc::downgrade(&thread));
        }
        Ok(Self { metadata, thread })
    }

    /// The bytes with which a client connects to this server.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.metadata)
    }

    /// Stops the server after the pages that it is sending.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.thread.end()).or_raise(py, None)
    }
}

impl Drop for PyPageServer {
    fn drop(&mut self) {
        let thread = self.thread.clone();
        // In a forked child, the call fails, and the thread is left alone.
        Python::try_attach(|py| py.detach(|| drop(thread.end())));
    }
}

/// Fetches pages from a `PageServer`.
#[pyclass(frozen, name = "PageClient", module = "remanent")]
pub struct PyPageClient {
    opener: u32,
    client: Mutex<Option<PageClient>>,
}

#[pymethods]
impl PyPageClient {
    #[new]
    #[pyo3(signature = (metadata, name, length_max, timeout))]
    fn new(
        py: Python<'_>,
        metadata: Vec<u8>,
        #[pyo3(from_py_with = arguments::text)] name: &str,
        length_max: u64,
        #[pyo3(from_py_with = arguments::seconds)] timeout: f64,
    ) -> PyResult<Self> {
        let agent = agent(py, name, timeout)?;
        let client = py.detach(|| PageClient::connect(agent, &metadata, length_max)).or_raise(py, None)?;
        Ok(Self { opener: std::process::id(), client: Mutex::new(Some(client)) })
    }

    /// Fetches the newest version of the page with this key. Returns its bytes, which were verified by their
    /// checksum, and its metadata. Returns None if the page does not exist, is too long, or cannot be sent.
    fn fetch<'py>(
        &self,
        py: Python<'py>,
        key: Vec<u8>,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyDict>)>> {
        check_process(self.opener).or_raise(py, None)?;
        let fetched = py.detach(|| {
            let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
            client.as_mut().ok_or(Error::Closed).and_then(|client| client.fetch_key(&key))
        });
        let fetched = match fetched {
            Err(Error::Nixl(error))
                if matches!(*error, NixlError::Refused { .. } | NixlError::Corrupted { .. }) =>
            {
                tracing::warn!(%error, "a page of a peer was not fetched");
                None
            }
            Err(Error::Closed) => {
                return Err(own(
                    py,
                    "ClosedError",
                    "the client is closed",
                    "connect to the peer again",
                    None,
                ));
            }
            fetched => fetched.or_raise(py, None)?,
        };
        fetched
            .map(|page| Ok((PyBytes::new(py, &page.bytes), metadata_to_py(py, &page.metadata)?)))
            .transpose()
    }

    /// Disconnects from the server.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.opener).or_raise(py, None)?;
        py.detach(|| drop(self.client.lock().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }
}

impl Drop for PyPageClient {
    fn drop(&mut self) {
        detached(self.client.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}
