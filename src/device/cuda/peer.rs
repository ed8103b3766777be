//! Direct copies between the memories of two GPUs.
//!
//! For each pair of GPUs the driver reports whether a direct path exists, for example through a common switch or bus.
//! Without a direct path, the caller must copy through the host.

use std::collections::BTreeMap;

use super::context::{Context, ContextGuard};
use super::driver::CUstream;
use crate::base::sync::Mutex;
use crate::error::Result;

/// Returns whether the GPU of `reader` can access the memory of the GPU of `owner`. The first call for a pair of GPUs
/// enables the access.
///
/// # Errors
/// A fault that destroyed the reader's context.
pub(super) fn reaches(reader: &'static Context, owner: &'static Context) -> Result<bool> {
    // Contexts last as long as the process, and so does the access between them.
    static PAIRS: Mutex<BTreeMap<(u32, u32), bool>> = Mutex::new(BTreeMap::new());
    if reader.ordinal == owner.ordinal {
        return Ok(true);
    }
    let mut pairs = PAIRS.lock();
    let pair = (reader.ordinal, owner.ordinal);
    if let Some(known) = pairs.get(&pair) {
        return Ok(*known);
    }
    let answer = open(reader, owner)?;
    tracing::debug!(
        reader = reader.ordinal,
        owner = owner.ordinal,
        answer,
        "checked for a direct path between GPUs"
    );
    pairs.insert(pair, answer);
    Ok(answer)
}

fn open(reader: &'static Context, owner: &'static Context) -> Result<bool> {
    let entered = reader.enter()?;
    let mut can = 0;
    // SAFETY: the driver handed out both GPUs, the pointer is to a live integer.
    let requested = unsafe { entered.can_access_peer(&mut can, reader.device, owner.device) };
    let opened = requested.and_then(|()| match can {
        0 => Ok(false),
        // SAFETY: the reader's context is current, the owner's is retained permanently.
        _ => unsafe { entered.enable_peer_access(owner.handle(), 0) }.map(|()| true),
    });
    match opened {
        Ok(answer) => Ok(answer),
        // Another library in this process has already enabled the access.
        Err(code) if code.is_peer_already() => Ok(true),
        Err(code) if code.context_lost() => Err(reader.fault(code)),
        // There is no direct path, so the caller copies through the host.
        Err(code) => {
            tracing::warn!(%code, reader = reader.ordinal, owner = owner.ordinal, "no direct path between GPUs");
            Ok(false)
        }
    }
}

/// Queues a copy from a GPU's memory to the memory of the GPU whose context is entered.
///
/// # Errors
/// A device error.
///
/// # Safety
/// `target` is `len` bytes of memory of the entered GPU, and `source` is `len` bytes of memory of the other GPU.
/// `stream` belongs to the entered GPU. The stream and both ranges stay valid until the copy is done.
pub(super) unsafe fn copy(
    entered: &ContextGuard<'_>,
    stream: CUstream,
    (to, target): (&Context, u64),
    (from, source): (&Context, u64),
    len: u64,
) -> Result<()> {
    // SAFETY: the caller's promise; both contexts are retained permanently.
    let queued =
        unsafe { entered.copy_peer(target, to.handle(), source, from.handle(), len as usize, stream) };
    queued.map_err(|code| to.fault(code))
}
