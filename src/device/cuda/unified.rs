//! Hints to the driver about the best location of managed memory.
//!
//! The driver stores a hint by address, for whole system pages. Hints are therefore removed before the memory is
//! allocated again.

use std::collections::BTreeSet;

use super::context::{Context, ContextGuard};
use super::driver::{CUdevice, CUstream};
use super::handles::Allocation;
use super::resource::Kind;
use crate::base::sync::Mutex;
use crate::device::{UnifiedHint, UnifiedSide};
use crate::error::Result;

/// `CU_DEVICE_CPU`: the device number that denotes the host.
const HOST: CUdevice = -1;

/// The driver's numbers for hints: `CUmem_advise`.
mod advice {
    pub const SET_READ_MOSTLY: u32 = 1;
    pub const UNSET_READ_MOSTLY: u32 = 2;
    pub const SET_PREFERRED: u32 = 3;
    pub const UNSET_PREFERRED: u32 = 4;
}

/// The addresses of the managed allocations that may have hints in the driver. A hint is recorded here so that it can
/// be removed when the memory is freed.
#[derive(Default)]
pub(super) struct UnifiedHints(Mutex<BTreeSet<u64>>);

impl UnifiedHints {
    /// Passes a hint for memory that is not empty to the driver. Copies are queued on `stream`.
    ///
    /// # Errors
    /// A device error.
    pub fn apply(
        &self,
        context: &'static Context,
        memory: &Allocation,
        hint: UnifiedHint,
        stream: CUstream,
    ) -> Result<()> {
        let entered = context.enter()?;
        let device = |side| if side == UnifiedSide::Gpu { context.device } else { HOST };
        // Recorded before the driver receives the hint, because removing a hint that was not set is harmless.
        if !matches!(hint, UnifiedHint::Fetch(_)) {
            self.0.lock().insert(memory.address);
        }
        match hint {
            UnifiedHint::Prefer(Some(side)) => {
                advise(&entered, context, memory, advice::SET_PREFERRED, device(side))
            }
            UnifiedHint::Prefer(None) => advise(&entered, context, memory, advice::UNSET_PREFERRED, HOST),
            UnifiedHint::ReadMostly(true) => advise(&entered, context, memory, advice::SET_READ_MOSTLY, HOST),
            UnifiedHint::ReadMostly(false) => {
                advise(&entered, context, memory, advice::UNSET_READ_MOSTLY, HOST)
            }
            UnifiedHint::Fetch(side) => {
                // SAFETY: the context is current, the memory is managed and not freed before the stream's
                // work is done, and the stream belongs to a lane.
                let queued =
                    unsafe { entered.prefetch(memory.address, memory.len as usize, device(side), stream) };
                queued.map_err(|code| context.fault(code))
            }
        }
    }

    /// Removes all hints for memory that is no longer in use.
    ///
    /// # Errors
    /// A device error.
    pub fn end(&self, context: &'static Context, memory: &Allocation) -> Result<()> {
        if memory.kind != Kind::Managed || !self.0.lock().remove(&memory.address) {
            return Ok(());
        }
        let entered = context.enter()?;
        advise(&entered, context, memory, advice::UNSET_READ_MOSTLY, HOST)?;
        advise(&entered, context, memory, advice::UNSET_PREFERRED, HOST)
    }
}

fn advise(
    entered: &ContextGuard<'_>,
    context: &'static Context,
    memory: &Allocation,
    advice: u32,
    device: CUdevice,
) -> Result<()> {
    // SAFETY: the context is current, and the memory is managed and not freed.
    let advised = unsafe { entered.advise(memory.address, memory.len as usize, advice, device) };
    advised.map_err(|code| context.fault(code))
}
