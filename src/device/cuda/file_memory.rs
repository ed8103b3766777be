//! File memory: mappings that the driver pins, so that the GPU can copy directly to the bytes of a file.
//!
//! If a mapping were removed while the GPU may still write to it, the GPU would write to pages that the system has
//! reassigned. A mapping is therefore removed only after the driver has unpinned it. If the driver fails to, for
//! example after losing the context, the mapping stays until the process ends.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::ManuallyDrop;

use super::context::Context;
use super::errors::Code;
use crate::base::sync::Mutex;
use crate::disk::FileMemory;
use crate::error::{Error, Refused, Result};

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: every GPU can access the memory, at the host's
/// address.
const FLAGS: u32 = 3;

/// The mappings registered with the driver, by address.
#[derive(Default)]
pub(super) struct RegisteredMappings {
    mappings: Mutex<BTreeMap<u64, Box<dyn FileMemory>>>,
}

impl RegisteredMappings {
    /// Pins a mapping with the driver.
    ///
    /// # Errors
    /// `Refused`, `OutOfMemory`, a device error. On failure the mapping is removed.
    pub fn register(&self, context: &Context, mapping: Box<dyn FileMemory>) -> Result<()> {
        let (address, len) = (mapping.address(), mapping.byte_len());
        let refused = |reason: String| Error::Refused(Refused::Memory { len, reason });
        if !context.knows_host_addresses {
            return Err(refused("this GPU gives registered memory addresses of its own".to_owned()));
        }
        let entered = context.enter()?;
        // SAFETY: the context is current. The range is a mapping, which this table owns and leaves in place
        // until it is unregistered. The table borrows no bytes of it, so only lanes access them.
        let registered = unsafe { entered.register_host(address as *mut c_void, len as usize, FLAGS) };
        match registered {
            Ok(()) => {
                self.mappings.lock().insert(address, mapping);
                Ok(())
            }
            Err(code) if code.context_lost() => Err(context.fault(code)),
            // The file system's pages cannot be pinned, or a system limit was reached.
            Err(code) => Err(refused(code.to_string())),
        }
    }

    /// Unpins the mapping at this address with the driver, and removes it.
    ///
    /// # Errors
    /// A device error; the mapping then stays until the process ends.
    pub fn unregister(&self, context: &Context, address: u64) -> Result<()> {
        let mapping = self.mappings.lock().remove(&address).expect("registered at this address");
        // The mapping is dropped only after the driver has unpinned it, because the GPU may use it until then.
        let mapping = ManuallyDrop::new(mapping);
        let entered = context.enter()?;
        // SAFETY: the context is current. The mapping was registered at this address, and the caller has
        // waited for its last use in the lanes.
        let unregistered = unsafe { entered.unregister_host(address as *mut c_void) };
        unregistered.map_err(|code: Code| context.fault(code))?;
        drop(ManuallyDrop::into_inner(mapping));
        Ok(())
    }

    /// Unregisters all remaining mappings as [`unregister`](Self::unregister) does. No lane may have work.
    pub fn unregister_all(&self, context: &Context) {
        let left: Vec<u64> = self.mappings.lock().keys().copied().collect();
        for address in left {
            if let Err(error) = self.unregister(context, address) {
                tracing::warn!(%error, "a file's memory stays mapped until the process ends");
            }
        }
    }

    /// Leaks all remaining mappings, because lanes may still write to them.
    pub fn leave(&self) {
        std::mem::take(&mut *self.mappings.lock()).into_values().for_each(std::mem::forget);
    }
}
