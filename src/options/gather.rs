//! Options for loading pages together with other ranks.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;

/// The condition under which ranks divide the loading of pages among themselves and exchange the loaded pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GatherMode {
    /// Exchanges pages only if the link between the ranks is faster than any bus between host and GPU, as NVLink is.
    /// The open measures the link.
    #[default]
    IfFaster,
    /// Always exchanges pages. Use this for storage that is slower than the link between the ranks.
    Always,
}

/// Exchanges bytes of GPU memory between the ranks of an open.
pub(crate) trait ImageExchange: Send + Sync {
    fn rank(&self) -> u32;

    fn ranks(&self) -> u32;

    /// Returns the ordinal of the rank's GPU among those visible to the process.
    fn gpu(&self) -> u32;

    /// Copies `len` bytes from address `source` of each rank, in rank order, to address `target` of every rank, and
    /// waits for completion. The source may be the rank's own part of the target. Nothing else may use the memory
    /// during the call.
    ///
    /// # Errors
    /// `Error::Nccl` if a rank is missing or the library fails; a device error.
    fn gather(&self, source: u64, target: u64, len: u64) -> Result<()>;
}

/// An exchange that clones of the options share.
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
