//! The copiers of this process, one for each GPU that tensors were copied from or to without a store on it.

use std::sync::{Arc, Mutex, PoisonError};

use remanent::history::DeviceCopier;
use remanent::{DeviceChoice, Result};

/// The copiers, each with the process that created it: a forked child creates its own.
///
/// They stay until the process ends: creating a GPU's context and pinned memory takes longer than many
/// copies.
static COPIERS: Mutex<Vec<(u32, DeviceChoice, Arc<DeviceCopier>)>> = Mutex::new(Vec::new());

/// Returns the copier for a device.
///
/// # Errors
/// `DeviceUnavailable`.
pub fn copier(device: DeviceChoice) -> Result<Arc<DeviceCopier>> {
    let process = std::process::id();
    let mut copiers = COPIERS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = copiers.iter().find(|(of, on, _)| (*of, *on) == (process, device));
    if let Some((.., copier)) = known {
        return Ok(copier.clone());
    }
    let copier = Arc::new(DeviceCopier::open(device)?);
    copiers.push((process, device, copier.clone()));
    Ok(copier)
}
