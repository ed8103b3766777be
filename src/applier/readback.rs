//! Pages' bytes on their way to the host, past the lane of deltas.
//!
//! A long copy to the host takes milliseconds, and the deltas queued after it wait meanwhile. So in lane
//! order the bytes are only copied aside on the device, which takes 30 µs for 64 MiB on an H200. From there
//! they go to the host on a lane of their own. Where the budget leaves no room for the copies, the bytes go
//! to the host in lane order. Deltas then wait for longer, but a store that fills its budget still has its
//! reads and its snapshots.
//!
//! The caller brings the staging for the bytes, made before the turn. A GPU pins 1.5 GB/s, so a long
//! staging takes seconds, and neither deltas nor other users of the room for copies may wait for that.

use std::sync::Arc;

use remanent_format::Place;

use super::Turn;
use crate::base::allocation::{collected, push};
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Span, Staging, StagingSpan};
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory};
use crate::memory::staging::StagingBuf;

/// Bytes that were caught between two batches, to be brought to the host.
pub(crate) struct Drain {
    len: usize,
    copies: CopySource,
}

/// The place of the caught bytes.
enum CopySource {
    /// In copies on the device.
    Aside(AsideBuffer),
    /// On their way to the host.
    UnderWay(Pending),
}

/// Copies of bytes on the device.
struct AsideBuffer {
    /// The copies, one after the other.
    pieces: Vec<PageMemory>,
    /// The copies are complete once this fence has passed.
    caught: Fence,
    arena: Arc<Arena>,
    /// The host memory that the copies go to, after its first `from` bytes.
    staging: StagingBuf,
    from: u64,
}

impl Turn<'_> {
    /// Catches ranges of pages as they are now, each for its offset among `len` bytes; bytes that no range
    /// covers are unspecified. The ranges are copied aside in `place`, and go from there to `staged`, after
    /// its first `from` bytes.
    ///
    /// # Errors
    /// A device error; the error with which the pages' bytes were lost; `OutOfMemory`.
    pub fn drain(
        &self,
        place: Place,
        sources: Vec<(Span, u64)>,
        len: u64,
        staged: StagingBuf,
        from: u64,
    ) -> Result<Drain> {
        assert!(from + len <= staged.len() as u64);
        self.intact()?;
        match self.arena.allocate_scratch(place, len) {
            Ok(pieces) => self.copy_aside(pieces, sources, staged, from),
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => self.download(sources, staged, from),
            Err(error) => Err(error),
        }
    }

    /// As [`drain`](Self::drain), without copies on the device: deltas wait until all bytes are at the host.
    ///
    /// # Errors
    /// As for `drain`.
    pub fn drain_in_order(&self, sources: Vec<(Span, u64)>, staged: StagingBuf, from: u64) -> Result<Drain> {
        self.intact()?;
        self.download(sources, staged, from)
    }

    fn copy_aside(
        &self,
        pieces: Vec<PageMemory>,
        sources: Vec<(Span, u64)>,
        staging: StagingBuf,
        from: u64,
    ) -> Result<Drain> {
        let mut parts: Vec<Vec<(Span, u64)>> = pieces.iter().map(|_| Vec::new()).collect();
        let piece_len = pieces.first().map_or(1, PageMemory::byte_len);
        for (mut source, mut at) in sources {
            while source.len > 0 {
                let (number, offset) = (at / piece_len, at % piece_len);
                let len = source.len.min(piece_len - offset);
                push(&mut parts[number as usize], (Span { len, ..source }, offset))?;
                source = Span { offset: source.offset + len, len: source.len - len, ..source };
                at += len;
            }
        }
        let gather = |(piece, sources): (&PageMemory, _)| Command::Gather { sources, target: piece.span() };
        let commands = pieces.iter().zip(parts).map(gather).collect();
        match self.submit(CommandList { commands, staging: Vec::new() }) {
            Ok(pending) => {
                let (caught, arena) = (pending.fence(), self.arena.clone());
                let len = staging.len();
                Ok(Drain {
                    len,
                    copies: CopySource::Aside(AsideBuffer { pieces, caught, arena, staging, from }),
                })
            }
            Err(error) => {
                pieces.into_iter().try_for_each(|piece| self.arena.discard(piece))?;
                Err(error)
            }
        }
    }

    fn download(&self, sources: Vec<(Span, u64)>, staging: StagingBuf, from: u64) -> Result<Drain> {
        let len = staging.len();
        assert!(sources.iter().all(|(source, at)| from + at + source.len <= len as u64), "it all fits");
        let download = |(source, at): (Span, u64)| {
            let target = StagingSpan { index: 0, offset: (from + at) as usize, len: source.len as usize };
            Command::Download { source, target }
        };
        let commands = collected(sources.into_iter().map(download))?;
        let list = CommandList { commands, staging: vec![staging.into_staging()] };
        Ok(Drain { len, copies: CopySource::UnderWay(self.submit(list)?) })
    }
}

impl Drain {
    /// The fence after the last use of the pages.
    pub fn fence(&self) -> Fence {
        match &self.copies {
            CopySource::Aside(aside) => aside.caught,
            CopySource::UnderWay(pending) => pending.fence(),
        }
    }

    /// Waits until the bytes are at the host. Not for the applier's thread.
    ///
    /// # Errors
    /// A device error.
    pub fn finish(self, device: &dyn Device) -> Result<StagingBuf> {
        let drained = match self.copies {
            CopySource::UnderWay(pending) => pending.finish(device)?,
            CopySource::Aside(aside) => aside.finish(device)?,
        };
        Ok(StagingBuf::new(drained.into_iter().next().expect("one staging went in"), self.len))
    }
}

impl AsideBuffer {
    fn finish(self, device: &dyn Device) -> Result<Vec<Staging>> {
        let Self { pieces, caught, arena, staging, from } = self;
        let (last_use, drained) = match queue(device, &pieces, caught, staging, from as usize) {
            Ok(pending) => (pending.fence(), pending.finish(device)),
            Err(error) => (caught, Err(error)),
        };
        match &drained {
            Ok(_) => pieces.into_iter().try_for_each(|piece| arena.discard(piece))?,
            // The copies may still be in use.
            Err(_) => pieces.into_iter().for_each(|piece| arena.retire(piece, last_use)),
        }
        drained
    }
}

fn queue(
    device: &dyn Device,
    pieces: &[PageMemory],
    caught: Fence,
    staging: StagingBuf,
    from: usize,
) -> Result<Pending> {
    device.after(Lane::Drain, caught)?;
    let mut offset = from;
    let download = |piece: &PageMemory| {
        // The last piece may be longer than the bytes in it.
        let len = (staging.len() - offset).min(piece.byte_len() as usize);
        let target = StagingSpan { index: 0, offset, len };
        offset += len;
        Command::Download { source: piece.part(0, len as u64), target }
    };
    let commands = pieces.iter().map(download).collect();
    device.submit(Lane::Drain, CommandList { commands, staging: vec![staging.into_staging()] })
}
