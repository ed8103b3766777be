//! Transfers page memory between processes and hosts with NVIDIA NIXL. Requires the feature `nixl`.
//!
//! An [`Agent`] registers memory: leased and pinned pages, device memory, host buffers and files. Two agents exchange
//! their [metadata](Agent::metadata) as bytes, over any channel. Then each agent can write to the other's memory, read
//! from it, and send notifications.
//!
//! ```no_run
//! use remanent::nixl::{AgentOptions, HostBuffer, Nixl, RemoteRegion};
//! # fn send(_: Vec<u8>) {}
//! # fn receive() -> Vec<u8> { Vec::new() }
//! # let store = remanent::Store::temporary()?;
//! # let page = remanent::PageId(1);
//! let agent = Nixl::load()?.agent(&AgentOptions::new("owner"))?;
//! let page = agent.register(store.lease(page)?)?;
//! send(agent.metadata()?);
//!
//! let peer = agent.load_peer(&receive())?;
//! let target = RemoteRegion::from_bytes(&receive())?; // the peer's `Region::describe`
//! let len = page.byte_len();
//! agent.write(&peer, &[(page.range(0, len)?, target.range(0, len)?)], Some(b"written"))?.wait()?;
//! # Ok::<(), remanent::Error>(())
//! ```
//!
//! A [`PageServer`] sends pages of its store to [`PageClient`]s, which verify each page on arrival. A [`PeerReplica`] is a
//! copy of such a store after one batch.
//!
//! **Trust.** A peer that has the metadata of an agent can access all memory that the agent has registered. Exchange
//! metadata only with processes that you trust as much as your own.
//!
//! **Environment variables.** NIXL and UCX read their environment variables when the library is loaded. Set these
//! variables before the process starts:
//!
//! | variable | effect |
//! |---|---|
//! | `UCX_DEBUG_SIGNO=0` | UCX does not install a handler for SIGHUP |
//! | `UCX_MEM_EVENTS=n` | UCX does not replace `mmap` and related functions of the C library |
//! | `NIXL_LOG_LEVEL=FATAL`, `UCX_LOG_LEVEL=fatal` | NIXL and UCX print only fatal errors |
//! | `UCX_MODULES=^ib` | UCX does not load its InfiniBand modules, with which a process can crash at its end |
//! | `UCX_TLS=shm,tcp,self,cuda` | on a single host: shared memory, TCP for notifications, and GPU memory |
//!
//! `search` lists the paths where the library may be installed, and `library` loads it. `endpoint`, `agent`, `region`
//! and `transfer` provide the safe operations. `metadata` contains the metadata of an agent, and `wire` the encoding of
//! everything that agents exchange. `server` and `client` exchange pages with the messages in `message`. `state` encodes
//! the page table and the root, from which `replica` detects the pages that changed.

mod agent;
mod client;
mod endpoint;
mod library;
mod message;
mod metadata;
mod region;
mod replica;
mod search;
mod server;
mod state;
mod transfer;
mod version;
mod wire;

use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

pub use self::agent::Agent;
pub use self::client::{FetchedPage, PageClient};
pub use self::endpoint::{AgentOptions, Backend, Notification, Peer};
use self::library::Library;
pub use self::region::{
    FileRange, HostBuffer, LocalRange, Memory, Region, RegionKind, RemoteRange, RemoteRegion,
};
pub use self::replica::PeerReplica;
pub use self::server::PageServer;
pub use self::transfer::Transfer;
use self::version::Version;
pub use crate::error::NixlError;
use crate::error::Result;

/// The NIXL library, loaded at run time.
#[derive(Clone, Copy)]
pub struct Nixl(&'static Library);

impl Nixl {
    /// Loads the library. Later calls return the same result for the lifetime of the process.
    ///
    /// If the environment variable `REMANENT_NIXL` is set, only its value is searched: the path of the library, of its
    /// folder, or of a folder of Python packages. Otherwise, these locations are searched in order:
    ///
    /// 1. `libnixl_capi.so`, found by the dynamic linker or already loaded by the process;
    /// 2. the wheels `nixl-cu12` and `nixl-cu13` in the folders of Python packages of `VIRTUAL_ENV`, `CONDA_PREFIX`,
    ///    `PYTHONPATH`, the user and the system.
    ///
    /// # Errors
    /// [`Error::Nixl`](crate::Error::Nixl) with [`NixlError::NotFound`], which lists every path that was tried,
    /// [`NixlError::MissingSymbol`] or [`NixlError::OtherVersion`].
    pub fn load() -> Result<Self> {
        static LOADED: OnceLock<Result<Library, NixlError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Library::open_first(&search::candidates()));
        Ok(Self(loaded.as_ref().map_err(NixlError::clone)?))
    }

    /// Loads the library at `path`: the path of the library, of its folder, or of a folder of Python packages. The
    /// library stays loaded for the lifetime of the process, because its threads may run until the end of the process.
    ///
    /// # Errors
    /// Same as [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Self> {
        let library = Library::open_first(&search::at(path.as_ref()))?;
        Ok(Self(Box::leak(Box::new(library))))
    }

    /// Returns the path of the library file.
    #[must_use]
    pub fn path(&self) -> &str {
        self.0.path()
    }

    /// Returns the version of the library as major, minor and patch. Returns `None` if the library is not part of a
    /// wheel, because the library itself does not report its version.
    #[must_use]
    pub fn version(&self) -> Option<(u16, u16, u16)> {
        self.0.version().map(|Version(major, minor, patch)| (major, minor, patch))
    }

    /// Creates an agent.
    ///
    /// # Errors
    /// [`NixlError::InvalidName`]; [`NixlError::Failed`], for example if a plug-in does not exist or is not supported
    /// on this machine; [`Error::Io`](crate::Error::Io) if the system returns no random bytes.
    pub fn agent(&self, options: &AgentOptions) -> Result<Agent> {
        Agent::create(self.0, options)
    }
}

impl fmt::Debug for Nixl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nixl").field("path", &self.path()).field("version", &self.version()).finish()
    }
}
