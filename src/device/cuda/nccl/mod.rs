//! Collective operations between GPUs, performed by NVIDIA's library NCCL.
//!
//! `search` lists the paths at which the library may be installed, `library` loads it and looks up its functions,
//! `codes` names its error codes, `rank` is one rank of a communicator, and `presence` detects which ranks still exist
//! on this host. The safe operations are in [`Communicator`].

mod codes;
mod library;
mod presence;
mod rank;
mod search;

use std::fmt;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use self::library::{Library, RawId, Version};
use self::rank::{JoiningRank, NcclRank};
use crate::device::Communicator;
use crate::error::{NcclError, Result};

/// The time limit for joins and operations, unless another one is set.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The library NCCL, loaded at run time.
///
/// ```no_run
/// use remanent::nccl::{Nccl, Rank};
/// # fn send_to_other_ranks(_: [u8; 128]) {}
/// let nccl = Nccl::load()?;
/// let id = nccl.unique_id()?; // in one process, which sends it to the others
/// send_to_other_ranks(id.to_bytes());
/// let communicator = nccl.join(&id, Rank::new(0, 2).gpu(0))?; // in each process, with its rank and GPU
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Nccl(&'static Library);

impl Nccl {
    /// Loads the library and looks up its functions. The result stays the same for the lifetime of the process.
    ///
    /// If the environment variable `REMANENT_NCCL` is set, it names the library or its folder, and no other location is
    /// tried. Otherwise, these locations are tried in order:
    ///
    /// 1. `libnccl.so.2` by the dynamic linker, which finds a library that the process has already loaded;
    /// 2. `libnccl.so` in the same way;
    /// 3. `nvidia/nccl/lib/libnccl.so.2` in folders of Python packages, where the wheels that torch depends on install
    ///    it. The folders are those of `VIRTUAL_ENV`, `CONDA_PREFIX`, `PYTHONPATH`, the user and the system.
    ///
    /// # Errors
    /// [`Error::Nccl`](crate::Error::Nccl) with [`NcclError::NotFound`], which lists everything that was tried,
    /// [`NcclError::MissingSymbol`] or [`NcclError::TooOld`].
    pub fn load() -> Result<Self> {
        static LOADED: OnceLock<Result<Library, NcclError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Library::open_first(&search::candidates()));
        Ok(Self(loaded.as_ref().map_err(NcclError::clone)?))
    }

    /// Loads the library at this path, which may also be the folder that contains `libnccl.so.2`. The library stays
    /// loaded for the lifetime of the process, because its threads may run until then.
    ///
    /// # Errors
    /// Same as [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Self> {
        let library = Library::open_first(&search::at(path.as_ref()))?;
        Ok(Self(Box::leak(Box::new(library))))
    }

    /// Returns the path or name by which the library was loaded.
    #[must_use]
    pub fn path(&self) -> &str {
        self.0.path()
    }

    /// Returns the version of the library: major, minor, patch.
    #[must_use]
    pub fn version(&self) -> (u32, u32, u32) {
        let Version(major, minor, patch) = self.0.version();
        (major, minor, patch)
    }

    /// Creates the id of a new communicator. One process creates the id and sends it to the others, and each rank joins
    /// with it once. The library listens on a network interface of this process until all ranks have joined.
    ///
    /// # Errors
    /// [`NcclError::Failed`].
    pub fn unique_id(&self) -> Result<UniqueId> {
        Ok(UniqueId(self.0.unique_id()?))
    }

    /// Joins a communicator as one rank, and returns when all ranks have joined.
    ///
    /// # Errors
    /// [`Error::Unavailable`](crate::Error::Unavailable) for a GPU that cannot be used, [`NcclError::NoSuchRank`],
    /// [`NcclError::RankTaken`], [`NcclError::JoinTimedOut`], [`NcclError::Failed`].
    pub fn join(&self, id: &UniqueId, rank: Rank) -> Result<Communicator> {
        JoiningRank::start(self.0, &id.0, &rank)?.finish().map(into_communicator)
    }

    /// Joins a communicator as several ranks of this process, each on its own GPU, and returns when all ranks have
    /// joined. Afterwards each rank needs its own thread for its calls, because an operation may wait for the other
    /// ranks to call it.
    ///
    /// # Errors
    /// Same as [`join`](Self::join).
    pub fn join_all(
        &self,
        id: &UniqueId,
        ranks: impl IntoIterator<Item = Rank>,
    ) -> Result<Vec<Communicator>> {
        // All ranks start before the first one waits for the others.
        let joining: Result<Vec<_>> =
            ranks.into_iter().map(|rank| JoiningRank::start(self.0, &id.0, &rank)).collect();
        let joined: Result<Vec<NcclRank>> = joining?.into_iter().map(JoiningRank::finish).collect();
        Ok(joined?.into_iter().map(into_communicator).collect())
    }
}

fn into_communicator(rank: NcclRank) -> Communicator {
    Communicator::new(rank)
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("path", &self.path()).field("version", &self.version()).finish()
    }
}

/// The id of a communicator: 128 bytes, which one process creates and sends to the others.
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId(RawId);

impl UniqueId {
    /// The length of an id in bytes.
    pub const LEN: usize = 128;

    /// Returns the bytes of the id, for other processes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        self.0.0
    }

    /// Restores an id from the bytes that another process got from [`to_bytes`](Self::to_bytes).
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(RawId(bytes))
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:016x})", presence::hash(&self.0.0))
    }
}

/// One rank of a communicator: its number, its GPU and its time limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    rank: u32,
    ranks: u32,
    gpu: u32,
    timeout: Duration,
}

impl Rank {
    /// Returns rank number `rank` of `ranks`, on GPU 0 and with a time limit of five minutes.
    #[must_use]
    pub fn new(rank: u32, ranks: u32) -> Self {
        Self { rank, ranks, gpu: 0, timeout: TIMEOUT }
    }

    /// Sets the GPU, by its number among those visible to the process. Default: 0. Two ranks need two GPUs.
    #[must_use]
    pub fn gpu(mut self, gpu: u32) -> Self {
        self.gpu = gpu;
        self
    }

    /// Sets how long the rank waits for the other ranks, when it joins and in each operation. Default: five minutes.
    ///
    /// After this time the communicator is aborted, and the call returns an error that names the ranks on this host
    /// that have ended.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}
