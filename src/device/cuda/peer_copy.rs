//! From memory that one GPU reaches to memory that another one reaches, without a wait on the host.
//!
//! Lanes of two GPUs wait for each other by events: the copy comes behind what is queued on both, and what is queued
//! on either from then on comes behind the copy. By which way bytes go:
//!
//! | from | to | way |
//! |---|---|---|
//! | a GPU's memory | another GPU's | past the host, where the driver knows a way |
//! | a GPU's memory | another GPU's | else by two blocks of pinned memory, in turn: one is read while the other is written |
//! | a GPU's memory | the host's, or managed | the first GPU's kernels write it |
//! | the host's, or managed | a GPU's | the second GPU's kernels read it |
//!
//! Kernels and not the copy engine write to the host's memory: that engine has a queue of its own (see `bulk`), at
//! which whoever queues may have to wait.

use std::sync::Arc;

use super::CudaDevice;
use super::abi::PieceRow;
use super::handles::Allocation;
use super::memory::DeviceBlock;
use super::peer;
use super::plan::{Area, LaunchPlan, PlannedPiece};
use super::resource::Kind;
use crate::device::{CommandList, Device, Fence, Lane, Pending, ReturnedStaging, Span};
use crate::error::Result;

/// Bytes of a block by which bytes go where no other way is: what takes a bus longer than the launches that a block
/// costs take the host.
const RELAY_LEN: u64 = 4 << 20;

/// Queues a copy to memory of `to`; `None` if the host must take part.
///
/// # Errors
/// A device error; a part may have been queued.
pub(super) fn copy(
    to: &CudaDevice,
    from: &CudaDevice,
    lane: Lane,
    source: Span,
    target: Span,
) -> Result<Option<Pending>> {
    let (source_in, target_in) = (from.pages.named(source.memory), to.pages.named(target.memory));
    let bytes = PeerCopy { source: source_in.at(source), target: target_in.at(target), len: source.len };
    assert_eq!(source.len, target.len, "a copy between ranges of different lengths");
    // What a caller pinned need not be pinned for every GPU.
    let is_foreign = |memory: Allocation| memory.is_adopted && memory.kind != Kind::Device;
    if is_foreign(source_in) || is_foreign(target_in) {
        return Ok(None);
    }
    from.check_running()?;
    let (reader, writer) = (to.lane(lane), from.lane(lane));
    reader.follow(writer)?;
    let copied = match (source_in.kind, target_in.kind) {
        (Kind::Device, Kind::Device) if peer::reaches(to.context, from.context)? => {
            past_the_host(to, from, lane, bytes)?
        }
        (Kind::Device, Kind::Device) => relay(to, from, lane, bytes)?,
        (Kind::Device, _) => {
            writer.follow(reader)?;
            from.queue(lane, &bytes.plan(), Vec::new(), Vec::new())?;
            reader.follow(writer)?;
            to.submit(lane, CommandList::default())?
        }
        _ => to.queue(lane, &bytes.plan(), Vec::new(), Vec::new())?,
    };
    writer.follow(reader)?;
    Ok(Some(copied))
}

/// Bytes that go from one address to another.
#[derive(Clone, Copy)]
struct PeerCopy {
    source: u64,
    target: u64,
    len: u64,
}

impl PeerCopy {
    /// Kernels that copy them.
    fn plan(self) -> LaunchPlan {
        let mut plan = LaunchPlan::default();
        plan.piece(PlannedPiece {
            row: PieceRow::dense(self.target, self.source, self.len),
            target_len: self.len,
            target: Area::Memory(0),
            sources: [Some(Area::Memory(1)), None],
        });
        plan.flush();
        plan
    }
}

fn past_the_host(to: &CudaDevice, from: &CudaDevice, lane: Lane, bytes: PeerCopy) -> Result<Pending> {
    let returned = Arc::<ReturnedStaging>::default();
    let timeline = to.lane(lane);
    let turn = timeline.turn();
    let entered = to.context.enter()?;
    let (target, source) = ((to.context, bytes.target), (from.context, bytes.source));
    let queued = if bytes.len == 0 {
        Ok(())
    } else {
        // SAFETY: the memory is of these GPUs, and was checked to hold the ranges; who asks lets it be until the
        // fence has passed.
        unsafe { peer::copy(&entered, timeline.stream(), target, source, bytes.len) }
    };
    let value = to.end(turn, &entered, &returned, Vec::new(), queued)?;
    Ok(Pending::new(Fence { lane, value }, returned))
}

/// By way of the host's memory, a block at a time.
fn relay(to: &CudaDevice, from: &CudaDevice, lane: Lane, bytes: PeerCopy) -> Result<Pending> {
    let block_len = bytes.len.min(RELAY_LEN);
    let blocks = [to.block(Kind::Pinned, block_len)?, to.block(Kind::Pinned, block_len)?];
    let relayed = relay_by(&blocks, to, from, lane, bytes);
    match relayed.and_then(|()| to.context.enter()) {
        Ok(entered) => {
            // The end comes behind all reads, and they come behind all writes.
            let returned = Arc::<ReturnedStaging>::default();
            let turn = to.lane(lane).turn();
            let value = to.end(turn, &entered, &returned, blocks.into(), Ok(()))?;
            Ok(Pending::new(Fence { lane, value }, returned))
        }
        Err(error) => {
            // What is queued may still use them.
            blocks.into_iter().for_each(std::mem::forget);
            Err(error)
        }
    }
}

fn relay_by(
    blocks: &[DeviceBlock; 2],
    to: &CudaDevice,
    from: &CudaDevice,
    lane: Lane,
    bytes: PeerCopy,
) -> Result<()> {
    let (reader, writer) = (to.lane(lane), from.lane(lane));
    for (begin, block) in (0..bytes.len).step_by(RELAY_LEN as usize).zip(blocks.iter().cycle()) {
        let len = RELAY_LEN.min(bytes.len - begin);
        // 1. The block is written: the reads of the one before it may be under way, those of itself are done.
        let write = PeerCopy { source: bytes.source + begin, target: block.address, len };
        from.queue(lane, &write.plan(), Vec::new(), Vec::new())?;
        // 2. What is written next, to the other block, waits for the reads of that one, which are queued by now.
        writer.follow(reader)?;
        // 3. The block is read, behind the write.
        reader.follow(writer)?;
        let read = PeerCopy { source: block.address, target: bytes.target + begin, len };
        to.queue(lane, &read.plan(), Vec::new(), Vec::new())?;
    }
    Ok(())
}
