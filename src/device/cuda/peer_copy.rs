//! Copies from memory that one GPU can access to memory that another one can access, without a wait on the
//! host.
//!
//! Lanes of two GPUs wait for each other through events. The copy runs after the work queued on both lanes,
//! and work queued on either lane later runs after the copy. Bytes take one of these paths:
//!
//! | from | to | path |
//! |---|---|---|
//! | a GPU's memory | another GPU's | directly between the GPUs, if the driver supports it |
//! | a GPU's memory | another GPU's | otherwise through two alternating pinned blocks: one is read while the other is written |
//! | a GPU's memory | the host's, or managed | the first GPU's kernels write it |
//! | the host's, or managed | a GPU's | the second GPU's kernels read it |
//!
//! Kernels write to host memory instead of the copy engine, whose own queue (see `bulk_copies`) may make a
//! thread wait.

use std::sync::Arc;

use super::CudaDevice;
use super::abi::PieceRow;
use super::areas::Area;
use super::handles::Allocation;
use super::memory::DeviceBlock;
use super::peer;
use super::plan::{LaunchPlan, PlannedPiece};
use super::resource::Kind;
use crate::device::{CommandList, Device, Fence, Lane, Pending, ReturnedStaging, Span};
use crate::error::Result;

/// Length, in bytes, of the blocks through which bytes are relayed. The bus needs longer for one block than the host
/// needs for the launches.
const RELAY_LEN: u64 = 4 << 20;

/// Queues a copy from memory of another device to memory of `to`. Returns `None` if the copy must pass through the
/// host.
///
/// # Errors
/// A device error; a part of the copy may have been queued.
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
    // Memory that a caller has pinned may be accessible to one GPU only.
    let is_foreign = |memory: Allocation| memory.is_adopted && memory.kind != Kind::Device;
    if is_foreign(source_in) || is_foreign(target_in) {
        return Ok(None);
    }
    from.check_running()?;
    let (reader, writer) = (to.lane(lane), from.lane(lane));
    reader.follow(writer)?;
    let copied = match (source_in.kind, target_in.kind) {
        (Kind::Device, Kind::Device) if peer::reaches(to.context, from.context)? => {
            copy_direct(to, from, lane, bytes)?
        }
        (Kind::Device, Kind::Device) => relay(to, from, lane, bytes)?,
        (Kind::Device, _) => {
            writer.follow(reader)?;
            // SAFETY: both ranges were checked by `at`. Their owner neither releases nor changes them before the
            // copy's fence, as `copy_from` requires, and the lanes of both devices follow each other.
            unsafe { from.queue(lane, &bytes.plan(), Vec::new(), Vec::new()) }?;
            reader.follow(writer)?;
            to.submit(lane, CommandList::default())?
        }
        // SAFETY: the same.
        _ => unsafe { to.queue(lane, &bytes.plan(), Vec::new(), Vec::new()) }?,
    };
    writer.follow(reader)?;
    Ok(Some(copied))
}

/// A range of bytes to copy: its source address, its target address and its length.
#[derive(Clone, Copy)]
struct PeerCopy {
    source: u64,
    target: u64,
    len: u64,
}

impl PeerCopy {
    /// Returns the kernel launches that copy the bytes.
    fn plan(self) -> LaunchPlan {
        let mut plan = LaunchPlan::default();
        plan.piece(PlannedPiece {
            row: PieceRow::dense(self.target, self.source, self.len),
            target_len: self.len,
            target: Area::Memory(Kind::Device, 0),
            sources: [Some(Area::Memory(Kind::Device, 1)), None],
        });
        plan.flush();
        plan
    }
}

fn copy_direct(to: &CudaDevice, from: &CudaDevice, lane: Lane, bytes: PeerCopy) -> Result<Pending> {
    let returned = Arc::<ReturnedStaging>::default();
    let timeline = to.lane(lane);
    let turn = timeline.turn();
    let entered = to.context.enter()?;
    let (target, source) = ((to.context, bytes.target), (from.context, bytes.source));
    let queued = if bytes.len == 0 {
        Ok(())
    } else {
        // SAFETY: the memory belongs to these GPUs and was checked to contain the ranges; the caller leaves
        // it unchanged until the fence has passed.
        unsafe { peer::copy(&entered, timeline.stream(), target, source, bytes.len) }
    };
    let value = to.end(turn, &entered, &returned, Vec::new(), queued)?;
    Ok(Pending::new(Fence { lane, value }, returned))
}

/// Copies through pinned host memory, one block at a time.
fn relay(to: &CudaDevice, from: &CudaDevice, lane: Lane, bytes: PeerCopy) -> Result<Pending> {
    let block_len = bytes.len.min(RELAY_LEN);
    let blocks = [to.block(Kind::Pinned, block_len)?, to.block(Kind::Pinned, block_len)?];
    let relayed = relay_by(&blocks, to, from, lane, bytes);
    match relayed.and_then(|()| to.context.enter()) {
        Ok(entered) => {
            // The list is ended on this lane, which executes all reads, and each read follows its write.
            let returned = Arc::<ReturnedStaging>::default();
            let turn = to.lane(lane).turn();
            let value = to.end(turn, &entered, &returned, blocks.into(), Ok(()))?;
            Ok(Pending::new(Fence { lane, value }, returned))
        }
        Err(error) => {
            // Queued copies may still use the blocks.
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
        // 1. Write the block. Reads of the other block may be in flight; reads of this one are done.
        let write = PeerCopy { source: bytes.source + begin, target: block.address, len };
        // SAFETY: the source is page memory, as in `copy`. `relay` owns the blocks, and gives them to the lane
        // of `to`, which follows all writes, or leaks them.
        unsafe { from.queue(lane, &write.plan(), Vec::new(), Vec::new()) }?;
        // 2. The next write, to the other block, waits for the reads of that block, which are already queued.
        writer.follow(reader)?;
        // 3. Read the block, after the write.
        reader.follow(writer)?;
        let read = PeerCopy { source: block.address, target: bytes.target + begin, len };
        // SAFETY: the same; the target is page memory, as in `copy`.
        unsafe { to.queue(lane, &read.plan(), Vec::new(), Vec::new()) }?;
    }
    Ok(())
}
