//! From one GPU's memory to another one's, past the host.
//!
//! For each pair of GPUs the driver says whether there is such a way: they hang at one switch, or at one bus.
//! Where there is none, bytes go by way of the host, which is the business of the caller.

use std::collections::BTreeMap;

use super::context::{Context, ContextGuard};
use super::driver::CUstream;
use crate::base::sync::Mutex;
use crate::error::Result;

/// Whether one GPU reaches the memory of another one. The first call for a pair opens the way.
///
/// # Errors
/// A fault that took the reader's context.
pub(super) fn reaches(reader: &'static Context, owner: &'static Context) -> Result<bool> {
    // Contexts stay as long as the process does, and so does the access between them.
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
    tracing::debug!(reader = reader.ordinal, owner = owner.ordinal, answer, "asked for a way between GPUs");
    pairs.insert(pair, answer);
    Ok(answer)
}

fn open(reader: &'static Context, owner: &'static Context) -> Result<bool> {
    let entered = reader.enter()?;
    let mut can = 0;
    // SAFETY: the driver handed out both GPUs, the pointer is to a live integer.
    let asked = unsafe { entered.can_access_peer(&mut can, reader.device, owner.device) };
    let opened = asked.and_then(|()| match can {
        0 => Ok(false),
        // SAFETY: the reader's context is current, the owner's is retained for good.
        _ => unsafe { entered.enable_peer_access(owner.handle(), 0) }.map(|()| true),
    });
    match opened {
        Ok(answer) => Ok(answer),
        // Another library of this process was here before.
        Err(code) if code.is_peer_already() => Ok(true),
        Err(code) if code.context_lost() => Err(reader.fault(code)),
        // The copy then goes by way of the host.
        Err(code) => {
            tracing::warn!(%code, reader = reader.ordinal, owner = owner.ordinal, "no way between GPUs");
            Ok(false)
        }
    }
}

/// Queues a copy from a GPU's memory to the memory of the one whose context is entered.
///
/// # Errors
/// A device error.
///
/// # Safety
/// `target` and `source` are `len` bytes of memory of these two GPUs, `stream` is of the first, and all of it
/// stays until the copy is done.
pub(super) unsafe fn copy(
    entered: &ContextGuard<'_>,
    stream: CUstream,
    (to, target): (&Context, u64),
    (from, source): (&Context, u64),
    len: u64,
) -> Result<()> {
    // SAFETY: the caller's promise; both contexts are retained for good.
    let queued =
        unsafe { entered.copy_peer(target, to.handle(), source, from.handle(), len as usize, stream) };
    queued.map_err(|code| to.fault(code))
}
