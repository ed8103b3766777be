//! The copiers of this process: one per GPU from or to which tensors were copied without a store on that GPU.

use std::sync::{Arc, Mutex, PoisonError};

use remanent::history::DeviceCopier;
use remanent::{DeviceChoice, Result};

/// The copiers, each with the process that created it. A forked child creates its own.
///
/// Copiers are kept until the process ends, because creating a GPU's context and pinned memory takes longer
/// than many copies.
static COPIERS: Mutex<Vec<(u32, DeviceChoice, Arc<DeviceCopier>)>> = Mutex::new(Vec::new());

/// Returns this process's copier for a device, which the first call creates.
///
/// # Errors
/// `Unavailable` if the device cannot be opened.
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
