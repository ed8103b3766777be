//! Floor 5. Pages' bytes on their way to the host, past the lane of deltas.
//!
//! A long copy to the host takes milliseconds, and no delta behind it is applied meanwhile. So in lane order bytes
//! are only copied aside on the device, which takes 30 µs for 64 MiB on an H200, and go to the host from there,
//! on a lane of their own. Where the budget leaves no room for the copies, bytes go to the host in lane order:
//! that keeps deltas waiting for longer, and a store that fills its budget has its reads and its snapshots.

use std::sync::Arc;

use remanent_format::Place;

use super::Turn;
use crate::arena::{Arena, PageMemory};
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Span, StagingSpan};
use crate::error::{Error, Result};
use crate::staging::{StagingBuf, StagingPool};

/// Bytes that were caught between two batches, to be brought to the host.
pub(crate) struct Drain {
    len: usize,
    copies: Copies,
}

/// Where the copies are.
enum Copies {
    /// On the device, behind this fence.
    Aside(PageMemory, Fence, Arc<Arena>),
    /// On their way to the host.
    UnderWay(Pending),
}

impl Turn<'_> {
    /// Catches ranges of pages as they are now, each for its offset among `len` bytes; what no range covers is
    /// unspecified. They are copied aside in `place`.
    ///
    /// # Errors
    /// A device error; the one with which the pages' bytes were lost.
    pub fn drain(
        &self,
        place: Place,
        sources: Vec<(Span, u64)>,
        len: u64,
        staging: &StagingPool,
    ) -> Result<Drain> {
        self.intact()?;
        match self.arena.allocate_scratch(place, len) {
            Ok(area) => {
                let commands = vec![Command::Gather { sources, target: area.span() }];
                match self.submit(CommandList { commands, staging: Vec::new() }) {
                    Ok(pending) => {
                        let copies = Copies::Aside(area, pending.fence(), self.arena.clone());
                        Ok(Drain { len: len as usize, copies })
                    }
                    Err(error) => {
                        self.arena.discard(area)?;
                        Err(error)
                    }
                }
            }
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => {
                self.drain_in_order(sources, len, staging)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`drain`](Self::drain), without copies on the device: deltas wait until all is at the host.
    ///
    /// # Errors
    /// As for `drain`; `OutOfMemory`.
    pub fn drain_in_order(
        &self,
        sources: Vec<(Span, u64)>,
        len: u64,
        staging: &StagingPool,
    ) -> Result<Drain> {
        self.intact()?;
        let len = usize::try_from(len).map_err(|_| Error::OutOfMemory { place: Place::Host, len })?;
        let download = |(source, at): (Span, u64)| {
            let target = StagingSpan { index: 0, offset: at as usize, len: source.len as usize };
            Command::Download { source, target }
        };
        let commands = sources.into_iter().map(download).collect();
        let staging = vec![staging.take(len)?.into_staging()];
        Ok(Drain { len, copies: Copies::UnderWay(self.submit(CommandList { commands, staging })?) })
    }
}

impl Drain {
    /// The fence behind the last use of the pages.
    pub fn fence(&self) -> Fence {
        match &self.copies {
            Copies::Aside(_, fence, _) => *fence,
            Copies::UnderWay(pending) => pending.fence(),
        }
    }

    /// Waits until the bytes are at the host. Not for the applier's thread.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn finish(self, device: &dyn Device, staging: &StagingPool) -> Result<StagingBuf> {
        let drained = match self.copies {
            Copies::UnderWay(pending) => pending.finish(device)?,
            Copies::Aside(area, fence, arena) => {
                let (last_use, drained) = match queue(device, staging, &area, fence, self.len) {
                    Ok(pending) => (pending.fence(), pending.finish(device)),
                    Err(error) => (fence, Err(error)),
                };
                match &drained {
                    Ok(_) => arena.discard(area)?,
                    // It may still be in use.
                    Err(_) => arena.retire(area, last_use),
                }
                drained?
            }
        };
        Ok(StagingBuf::new(drained.into_iter().next().expect("one staging went in"), self.len))
    }
}

fn queue(
    device: &dyn Device,
    staging: &StagingPool,
    area: &PageMemory,
    fence: Fence,
    len: usize,
) -> Result<Pending> {
    let staging = vec![staging.take(len)?.into_staging()];
    device.after(Lane::Drain, fence)?;
    let target = StagingSpan { index: 0, offset: 0, len };
    let commands = vec![Command::Download { source: area.span(), target }];
    device.submit(Lane::Drain, CommandList { commands, staging })
}
