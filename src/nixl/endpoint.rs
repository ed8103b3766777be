//! The handle, backends and received messages of an agent.

use std::ffi::{CStr, CString, c_char, c_void};
use std::time::Duration;

use super::library::{AgentConfig, Fault, Library, Owned, Raw};
use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::error::{Error, IoAction, IoObject, NixlError, Result};

/// The default time limit of transfers.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum length in bytes of an agent name without its random part, and of the name or value of a parameter.
const NAME_LEN_MAX: usize = 64;
const PARAM_LEN_MAX: usize = 4096;

/// The settings of an [`Agent`](super::Agent).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentOptions {
    name: String,
    backends: Vec<Backend>,
    timeout: Duration,
    is_polled: bool,
}

impl AgentOptions {
    /// Creates options with the given name, up to 64 bytes long, the backend [`Backend::ucx`], and a time limit of 30
    /// seconds.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), backends: vec![Backend::ucx()], timeout: TIMEOUT, is_polled: false }
    }

    /// Sets the backends. Memory is registered with each backend that supports its kind.
    #[must_use]
    pub fn backends(mut self, backends: impl IntoIterator<Item = Backend>) -> Self {
        self.backends = backends.into_iter().collect();
        self
    }

    /// Sets the time limit of transfers. The default is 30 seconds.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Creates the agent without a background thread. The agent then makes progress only in calls: of a
    /// [`PageServer`](super::PageServer) or [`PageClient`](super::PageClient), which poll, of
    /// [`Agent::notifications`](super::Agent::notifications), or of its transfers. A polled agent is faster, because
    /// the background thread waits actively for a lock that is held while bytes are copied.
    ///
    /// Do not use this setting if peers connect to the agent or access its memory while the process makes no such
    /// calls.
    #[must_use]
    pub fn polled(mut self) -> Self {
        self.is_polled = true;
        self
    }
}

/// A plug-in of NIXL that transfers bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    plugin: String,
    params: Vec<(String, String)>,
}

impl Backend {
    /// Returns the backend for transfers between processes and hosts. UCX selects shared memory, TCP or RDMA within the
    /// limits of its environment variables, for example `UCX_TLS` and `UCX_NET_DEVICES`.
    #[must_use]
    pub fn ucx() -> Self {
        Self::plugin("UCX")
    }

    /// Returns the backend for transfers between memory and files of this host.
    #[must_use]
    pub fn posix() -> Self {
        Self::plugin("POSIX")
    }

    /// Returns the backend of the plug-in with this name.
    #[must_use]
    pub fn plugin(name: impl Into<String>) -> Self {
        Self { plugin: name.into(), params: Vec::new() }
    }

    /// Sets a parameter of the plug-in. NIXL ignores parameters that the plug-in does not define.
    #[must_use]
    pub fn param(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.params.push((name.into(), value.into()));
        self
    }
}

/// The state that all clones of an agent share. Dropping it destroys the agent.
pub(super) struct Endpoint {
    library: &'static Library,
    name: String,
    raw: RawAgent,
    opener: Process,
    timeout: Duration,
    /// Received notifications that no call has returned yet.
    inbox: Mutex<Vec<Notification>>,
}

/// A handle to an agent of the library.
struct RawAgent(Raw);

// SAFETY: the agent has strict synchronization, so the library accepts its calls on any thread.
unsafe impl Send for RawAgent {}
// SAFETY: as above.
unsafe impl Sync for RawAgent {}

/// Another agent whose metadata was loaded. Returned by [`Agent::load_peer`](super::Agent::load_peer).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub(super) name: String,
    pub(super) raw_name: CString,
}

impl Peer {
    /// Returns the name of the agent.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn raw_name(&self) -> &CStr {
        &self.raw_name
    }
}

/// A message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notification {
    /// Name of the agent that sent the message.
    pub peer: String,
    /// The message.
    pub bytes: Vec<u8>,
}

impl Endpoint {
    /// Creates an agent and its backends.
    ///
    /// # Errors
    /// `InvalidName`, `Failed`; errors of the system.
    pub fn create(library: &'static Library, options: &AgentOptions) -> Result<Self> {
        let AgentOptions { name, backends, timeout, is_polled } = options;
        checked("agent name", name, NAME_LEN_MAX)?;
        // Two agents with the same name cannot reach each other. A peer would also mistake a restarted agent for the
        // previous one of the same name.
        let name = format!("{name}-{:016x}", random()?);
        let raw_name = checked("agent name", &name, usize::MAX)?;
        let config = AgentConfig::shared(!is_polled);
        let mut raw: Raw = std::ptr::null_mut();
        // SAFETY: the pointers point to live values.
        unsafe { library.create_agent(raw_name.as_ptr(), &config, &mut raw) }
            .map_err(|fault| fault.of_agent(&name))?;
        let inner = Self {
            library,
            name,
            raw: RawAgent(raw),
            opener: Process::current(),
            timeout: *timeout,
            inbox: Mutex::default(),
        };
        for backend in backends {
            inner.add(backend)?;
        }
        Ok(inner)
    }

    pub fn library(&self) -> &'static Library {
        self.library
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the handle of the agent for a call to the library.
    ///
    /// # Errors
    /// `Forked`.
    pub fn raw(&self) -> Result<Raw> {
        self.opener.check().map(|()| self.raw.0)
    }

    /// Converts a failed library call for this agent to an error.
    pub fn failed(&self, fault: Fault) -> Error {
        fault.of_agent(&self.name).into()
    }

    /// Creates a backend in the agent.
    fn add(&self, backend: &Backend) -> Result<()> {
        let library = self.library;
        let failed = |fault| self.failed(fault);
        // SAFETY: the pointer points to a live handle.
        let create = |params: *mut Raw| unsafe { library.create_params(params) };
        let params = Owned::create(library, create, Library::destroy_params).map_err(failed)?;
        for (key, value) in &backend.params {
            let key = checked("parameter name", key, PARAM_LEN_MAX)?;
            let value = checked("parameter value", value, PARAM_LEN_MAX)?;
            // SAFETY: the parameters are live, and the strings end with a zero byte.
            unsafe { library.add_param(params.raw(), key.as_ptr(), value.as_ptr()) }.map_err(failed)?;
        }
        let plugin = checked("plug-in name", &backend.plugin, NAME_LEN_MAX)?;
        let agent = self.raw()?;
        let params = params.raw();
        let create =
            // SAFETY: the agent and the parameters are live, and the name ends with a zero byte.
            |backend: *mut Raw| unsafe { library.create_backend(agent, plugin.as_ptr(), params, backend) };
        // Dropping the value frees only the handle. The backend belongs to the agent.
        Owned::create(library, create, Library::destroy_backend).map_err(failed)?;
        Ok(())
    }

    /// Returns the received notifications that `select` accepts, and removes them from the inbox. The other
    /// notifications remain in the inbox.
    pub fn take(&self, select: impl Fn(&Notification) -> bool) -> Result<Vec<Notification>> {
        self.receive()?;
        Ok(self.inbox.lock().extract_if(.., |message| select(message)).collect())
    }

    /// Moves the notifications that have arrived from the library to the inbox.
    fn receive(&self) -> Result<()> {
        let (library, agent) = (self.library, self.raw()?);
        let failed = |fault| self.failed(fault);
        // SAFETY: the pointer points to a live handle.
        let create = |map: *mut Raw| unsafe { library.create_notifications(map) };
        let owned = Owned::create(library, create, Library::destroy_notifications).map_err(failed)?;
        let map = owned.raw();
        // SAFETY: the agent and the map are live.
        unsafe { library.take_notifications(agent, map, std::ptr::null_mut()) }.map_err(failed)?;
        let mut senders = 0;
        // SAFETY: the map is live, and the pointer points to a live number.
        unsafe { library.count_senders(map, &mut senders) }.map_err(failed)?;
        for sender in 0..senders {
            let mut name: *const c_char = std::ptr::null();
            // SAFETY: the map is live, and the index is below its length.
            unsafe { library.sender_at(map, sender, &mut name) }.map_err(failed)?;
            let mut count = 0;
            // SAFETY: the map is live and contains the name.
            unsafe { library.count_notifications(map, name, &mut count) }.map_err(failed)?;
            // SAFETY: the name ends with a zero byte and lives as long as the map.
            let peer = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            for index in 0..count {
                let (mut data, mut len): (*const c_void, usize) = (std::ptr::null(), 0);
                // SAFETY: the map is live and contains the name, and the index is below the count.
                unsafe { library.notification_at(map, name, index, &mut data, &mut len) }.map_err(failed)?;
                let bytes = if len == 0 {
                    Vec::new()
                } else {
                    // SAFETY: the message has this length and lives as long as the map.
                    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec()
                };
                self.inbox.lock().push(Notification { peer: peer.clone(), bytes });
            }
        }
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // A forked child must not use the agent of its parent.
        let Ok(raw) = self.raw() else { return };
        // SAFETY: all registrations and transfers of the agent have ended or were leaked, and the handle is not used
        // again.
        if let Err(fault) = unsafe { self.library.destroy_agent(raw) } {
            let error = self.failed(fault);
            tracing::warn!(%error, "cannot destroy an agent");
        }
    }
}

/// An allocation that the library returned. Dropping this value frees the allocation.
pub(super) struct Allocated(pub Raw);

impl Drop for Allocated {
    fn drop(&mut self) {
        // SAFETY: the library allocated the memory with `malloc` for its caller.
        unsafe { libc::free(self.0) };
    }
}

/// Checks the length of a string, and converts the string for the library. `what` names the string in errors.
///
/// # Errors
/// `InvalidName`.
fn checked(what: &'static str, text: &str, limit: usize) -> Result<CString> {
    let invalid = || NixlError::InvalidName { what, found: text.to_owned(), limit };
    let is_invalid = text.is_empty() || text.len() > limit;
    let checked = CString::new(text).ok().filter(|_| !is_invalid);
    Ok(checked.ok_or_else(invalid)?)
}

/// Returns a random number.
pub(super) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    // The system always returns this few bytes in one call.
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Error::system(IoAction::Draw, IoObject::Randomness, errno.into()))?;
    Ok(u64::from_le_bytes(bytes))
}
