//! How an open shares the loading of pages with other ranks.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;

/// When the ranks of an open load a part of the pages each, and exchange the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GatherMode {
    /// If the exchange is faster than any bus between host and GPU, as over NVLink. The open measures it.
    #[default]
    IfFaster,
    /// Always, for storage that is slower than the link between the ranks.
    Always,
}

/// The exchange of bytes of GPU memory between the ranks of an open.
pub(crate) trait ImageExchange: Send + Sync {
    fn rank(&self) -> u32;

    fn ranks(&self) -> u32;

    /// Returns the number of the rank's GPU among those visible to the process.
    fn gpu(&self) -> u32;

    /// Copies `len` bytes at the address `source` of each rank, in the order of the ranks, to the address `target` of all
    /// ranks, and waits. The source may be the rank's own part of the target. Nothing else uses the memory meanwhile.
    ///
    /// # Errors
    /// `Nccl` if a rank is missing or the library failed; a device error.
    fn gather(&self, source: u64, target: u64, len: u64) -> Result<()>;
}

/// An exchange, shared by clones of the options.
#[derive(Clone)]
pub(crate) struct GatherSource {
    pub exchange: Arc<dyn ImageExchange>,
    pub mode: GatherMode,
}

impl fmt::Debug for GatherSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, ranks) = (self.exchange.rank(), self.exchange.ranks());
        write!(f, "GatherSource({:?}, rank {rank} of {ranks})", self.mode)
    }
}
