//! Transfers of page memory between processes and hosts, by NVIDIA's library NIXL, with the feature `nixl`.
//!
//! An [`Agent`] registers memory: leased and pinned pages, device memory, host buffers and files. Two agents exchange
//! their [metadata](Agent::metadata) as bytes, by any means. Afterwards each of them can write to the other's memory,
//! read it, and send notifications.
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
//! A [`PageServer`] sends pages of its store to [`PageClient`]s, which verify each page when it arrives.
//!
//! **Trust.** A peer that has an agent's metadata can access all memory that the agent has registered. Exchange
//! metadata only with processes that are trusted like threads of this one.
//!
//! **The process.** The library reads its variables when it is loaded. Set these before the process starts:
//!
//! | variable | effect |
//! |---|---|
//! | `UCX_DEBUG_SIGNO=0` | UCX does not take SIGHUP over |
//! | `UCX_MEM_EVENTS=n` | UCX does not replace `mmap` and related functions of the C library |
//! | `NIXL_LOG_LEVEL=FATAL`, `UCX_LOG_LEVEL=fatal` | the library and UCX print only fatal errors |
//! | `UCX_TLS=shm,tcp,self,cuda` | between processes of one host: shared memory, TCP for notifications, and GPUs if any |
//!
//! `search` lists the places where the library may be, `library` loads it and looks up its functions, `endpoint`,
//! `agent`, `region` and `transfer` contain the safe operations, `metadata` the metadata of an agent, and `wire` their
//! encoding. `server` and `client` exchange pages by the messages in `message`.

mod agent;
mod client;
mod endpoint;
mod library;
mod message;
mod metadata;
mod region;
mod search;
mod server;
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
pub use self::server::PageServer;
pub use self::transfer::Transfer;
use self::version::Version;
pub use crate::error::NixlError;
use crate::error::Result;

/// The library NIXL, loaded at run time.
#[derive(Clone, Copy)]
pub struct Nixl(&'static Library);

impl Nixl {
    /// Loads the library and looks up its functions. The result stays the same for the lifetime of the process.
    ///
    /// If the variable `REMANENT_NIXL` is set, it names the library, its folder, or a folder of Python packages, and no
    /// other place is searched. Otherwise these are searched, in this order:
    ///
    /// 1. `libnixl_capi.so` by the dynamic linker, which finds a library that the process has already loaded;
    /// 2. the wheels `nixl-cu12` and `nixl-cu13` in the folders of Python packages: of `VIRTUAL_ENV`, `CONDA_PREFIX`,
    ///    `PYTHONPATH`, the user and the system.
    ///
    /// # Errors
    /// [`Error::Nixl`](crate::Error::Nixl) with [`NixlError::NotFound`], which lists everything that was tried,
    /// [`NixlError::MissingSymbol`] or [`NixlError::OtherVersion`].
    pub fn load() -> Result<Self> {
        static LOADED: OnceLock<Result<Library, NixlError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Library::open_first(&search::candidates()));
        Ok(Self(loaded.as_ref().map_err(NixlError::clone)?))
    }

    /// Loads the library at this path, which may also be the library's folder or a folder of Python packages. The
    /// library stays loaded for the lifetime of the process, because its threads may run until then.
    ///
    /// # Errors
    /// Same as [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Self> {
        let library = Library::open_first(&search::at(path.as_ref()))?;
        Ok(Self(Box::leak(Box::new(library))))
    }

    /// Returns the path of the library.
    #[must_use]
    pub fn path(&self) -> &str {
        self.0.path()
    }

    /// Returns the version of the library: major, minor, patch. Returns `None` for a library that is not part of a
    /// wheel, because the library itself does not report its version.
    #[must_use]
    pub fn version(&self) -> Option<(u16, u16, u16)> {
        self.0.version().map(|Version(major, minor, patch)| (major, minor, patch))
    }

    /// Creates an agent.
    ///
    /// # Errors
    /// [`NixlError::InvalidName`]; [`NixlError::Failed`], also for a plug-in that does not exist or cannot be used on
    /// this machine; [`Error::Io`](crate::Error::Io) if the system returns no random bytes.
    pub fn agent(&self, options: &AgentOptions) -> Result<Agent> {
        Agent::create(self.0, options)
    }
}

impl fmt::Debug for Nixl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nixl").field("path", &self.path()).field("version", &self.version()).finish()
    }
}
