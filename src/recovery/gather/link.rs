//! Moves headers and page bytes between the ranks, through memory on the GPU that takes part in the exchange.

use remanent_format::Place;

use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::device::{CommandList, DIGEST_LEN, EngineDevice, Lane, Span, Staging};
use crate::error::{Error, Result, Unavailable};
use crate::memory::arena::{Arena, PageMemory, Purpose};
use crate::memory::staging::StagingPool;
use crate::options::GatherSource;
use crate::recovery::Recovery;

/// The lane on which the exchange runs. No other work of an open uses this lane.
pub(super) const LANE: Lane = Lane::Stage;

/// The header that each rank sends before the exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    /// Whether the rank takes part.
    pub takes_part: bool,
    /// Whether the rank exchanges pages even over a slow link.
    pub is_always: bool,
    /// The maximum length in bytes of a part of a round for which this rank has memory.
    pub round_len: u64,
    /// The total length of the pages in bytes.
    pub bytes: u64,
    pub fingerprint: [u8; DIGEST_LEN],
}

impl Header {
    /// The length of an encoded header in bytes.
    pub const LEN: u64 = 256;

    fn to_bytes(self) -> [u8; Self::LEN as usize] {
        let mut bytes = [0; Self::LEN as usize];
        let words = [u64::from(self.takes_part), u64::from(self.is_always), self.round_len, self.bytes];
        for (at, word) in bytes.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes[32..32 + DIGEST_LEN].copy_from_slice(&self.fingerprint);
        bytes
    }

    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        Self {
            takes_part: word(0) == 1,
            is_always: word(1) == 1,
            round_len: word(2),
            bytes: word(3),
            fingerprint: std::array::from_fn(|byte| bytes[32 + byte]),
        }
    }
}

/// The connection to the other ranks, through the device slot on which the exchange runs.
pub(super) struct Link<'a> {
    pub source: &'a GatherSource,
    pub staging: &'a StagingPool,
    /// The place of pages in the memory of this GPU.
    pub place: Place,
    device: &'a EngineDevice,
    arena: &'a Arena,
    headers: RoundMemory<'a>,
}

impl<'a> Link<'a> {
    /// Finds the device slot that is bound to the exchange's GPU, and allocates memory for the headers.
    ///
    /// # Errors
    /// `Error::Unavailable` if the store has no such slot; `Error::OverBudget`, `Error::OutOfMemory`, or a device
    /// error.
    pub fn new(recovery: &'a Recovery<'_>, source: &'a GatherSource) -> Result<Self> {
        let Recovery { arena, staging, options, device, .. } = recovery;
        let gpu = source.exchange.gpu();
        let len = Header::LEN * u64::from(source.exchange.ranks());
        let place = options.device_places().find(|place| device.gpu_at(*place) == Some(gpu));
        let place = place.ok_or_else(|| {
            let reason =
                "the communicator of the open uses it, and no device slot of the store does".to_owned();
            Error::Unavailable(Unavailable::Device { device: format!("cuda:{gpu}"), reason })
        })?;
        let headers = RoundMemory::new(arena, place, len)?;
        Ok(Self { source, staging, place, device, arena, headers })
    }

    pub fn rank(&self) -> u64 {
        self.source.exchange.rank().into()
    }

    pub fn ranks(&self) -> u64 {
        self.source.exchange.ranks().into()
    }

    /// Allocates memory on the GPU, within the budget.
    ///
    /// # Errors
    /// `Error::OverBudget`, `Error::OutOfMemory`, or a device error.
    pub fn allocate(&self, len: u64) -> Result<RoundMemory<'a>> {
        RoundMemory::new(self.arena, self.place, len)
    }

    /// Gathers the parts of all ranks in `memory`, each `len` bytes long, and waits for completion.
    ///
    /// # Errors
    /// `Error::Nccl`, or a device error. After an error the memory is never freed, because the exchange may still write
    /// to it.
    pub fn gather(&self, memory: &RoundMemory<'_>, len: u64) -> Result<()> {
        let begin = self.device.address(memory.part(0, len).memory).expect("memory of a GPU");
        memory.is_in_use.store(true, Ordering::Relaxed);
        self.source.exchange.gather(begin + self.rank() * len, begin, len)?;
        memory.is_in_use.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Sends this rank's header, and returns the headers of all ranks.
    ///
    /// # Errors
    /// `Error::Nccl`, or a device error.
    pub fn headers(&self, own: Header) -> Result<Vec<Header>> {
        let part = self.headers.part(self.rank() * Header::LEN, Header::LEN);
        self.staging.upload(LANE, part, &own.to_bytes())?;
        self.gather(&self.headers, Header::LEN)?;
        let mut all = vec![0; (Header::LEN * self.ranks()) as usize];
        self.staging.download(LANE, self.headers.part(0, Header::LEN * self.ranks()), &mut all)?;
        Ok(all.chunks_exact(Header::LEN as usize).map(Header::of).collect())
    }

    /// Runs a command list to completion, and returns its staging buffers.
    ///
    /// # Errors
    /// A device error.
    pub fn run(&self, list: CommandList) -> Result<Vec<Staging>> {
        self.device.finish(self.device.submit(LANE, list)?)
    }
}

/// Memory that an exchange has allocated from the arena. On drop it is freed, unless an exchange may still write to it.
pub(super) struct RoundMemory<'a> {
    arena: &'a Arena,
    memory: Option<PageMemory>,
    /// Whether an exchange may still write to the memory.
    is_in_use: AtomicBool,
}

impl<'a> RoundMemory<'a> {
    fn new(arena: &'a Arena, place: Place, len: u64) -> Result<Self> {
        let reserved = arena.reserve(Purpose::Gather, &[(place, len)])?;
        let memory = reserved.allocate(place, len)?;
        Ok(Self { arena, memory: Some(memory), is_in_use: AtomicBool::new(false) })
    }

    /// Returns a range of the memory.
    pub fn part(&self, offset: u64, len: u64) -> Span {
        self.memory.as_ref().expect("taken only by the drop").part(offset, len)
    }
}

impl Drop for RoundMemory<'_> {
    fn drop(&mut self) {
        let memory = self.memory.take().expect("taken only here");
        if *self.is_in_use.get_mut() {
            std::mem::forget(memory);
        } else if let Err(error) = self.arena.discard(memory) {
            tracing::warn!(%error, "memory of an exchange stays allocated");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_survives_the_exchange() {
        let header =
            Header { takes_part: true, is_always: true, round_len: 5, bytes: u64::MAX, fingerprint: [7; 16] };
        assert_eq!(Header::of(&header.to_bytes()), header);
        assert_eq!(Header::of(&Header::default().to_bytes()), Header::default());
    }
}
