//! A GPU's context: created once per process, and current on a thread only during the store's own calls.
//!
//! This is the primary context, shared with the CUDA runtime and everything built on it, so the caller's kernels can
//! use the same addresses. It is never released, because the next open would have to create it again.
//!
//! Every driver call uses [`ContextGuard`], which restores the caller's own context afterwards. During the call it
//! relaxes the thread's capture mode: otherwise a query would invalidate a capture that the caller has in progress on
//! another stream.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Deref;
use std::sync::OnceLock;

use super::driver::{CUcontext, CUdevice, Driver};
use super::errors::Code;
use crate::base::sync::Mutex;
use crate::error::{Error, Result};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls of this thread invalidate no capture.
const CAPTURE_RELAXED: u32 = 2;

/// The driver's numbers for device attributes: `CUdevice_attribute`.
mod attribute {
    pub const UNIFIED_ADDRESSING: i32 = 41;
    pub const CAPABILITY_MAJOR: i32 = 75;
    pub const CAPABILITY_MINOR: i32 = 76;
    pub const MANAGED_MEMORY: i32 = 83;
    pub const CONCURRENT_MANAGED_ACCESS: i32 = 89;
    pub const HOST_ADDRESSES: i32 = 91;
    pub const WRITE_64_BITS: i32 = 122;
}

/// A GPU, and this process's context on it.
pub(super) struct Context {
    driver: &'static Driver,
    raw: RawContext,
    /// The driver's handle of the GPU.
    pub device: CUdevice,
    /// The GPU's number among the process's GPUs.
    pub ordinal: u32,
    /// The GPU's product name.
    pub name: String,
    /// The GPU's compute capability times ten: 90 for 9.0.
    pub capability: u32,
    /// Whether the GPU can use managed memory.
    pub has_managed_memory: bool,
    /// Whether the GPU can use managed memory concurrently with the host, and supports hints for it.
    pub takes_hints: bool,
    /// Whether the GPU accesses registered memory at the host's addresses.
    pub knows_host_addresses: bool,
    /// The fault that destroyed the context. Empty while the context is usable.
    lost: OnceLock<Error>,
}

/// The handle of a context.
struct RawContext(CUcontext);

// SAFETY: the handle is an opaque id, which the driver accepts on any thread.
unsafe impl Send for RawContext {}
// SAFETY: the same.
unsafe impl Sync for RawContext {}

impl Context {
    /// Returns the context of the GPU with this number, or the reason why it is unavailable.
    pub fn of(ordinal: u32) -> Result<&'static Self, String> {
        static CONTEXTS: Mutex<BTreeMap<u32, &'static Context>> = Mutex::new(BTreeMap::new());
        let mut contexts = CONTEXTS.lock();
        if let Some(context) = contexts.get(&ordinal) {
            return Ok(context);
        }
        let driver = Driver::get()?;
        let count = driver.count().map_err(|code| code.to_string())?;
        if ordinal >= count {
            return Err(format!("the CUDA driver lists {count} GPUs, numbered from 0"));
        }
        let context: &'static Self = Box::leak(Box::new(Self::make(driver, ordinal)?));
        contexts.insert(ordinal, context);
        Ok(context)
    }

    fn make(driver: &'static Driver, ordinal: u32) -> Result<Self, String> {
        let mut device: CUdevice = 0;
        // SAFETY: the driver is initialized, the pointer is to a live handle.
        unsafe { driver.device(&mut device, ordinal as c_int) }.map_err(|code| code.to_string())?;
        let ask = |attribute| -> Result<u32, String> {
            let mut value = 0;
            // SAFETY: the device was handed out above, the pointer is to a live integer.
            let requested = unsafe { driver.device_attribute(&mut value, attribute, device) };
            requested.map(|()| value.max(0) as u32).map_err(|code| code.to_string())
        };
        if ask(attribute::UNIFIED_ADDRESSING)? == 0 {
            return Err("host and GPU do not share their addresses".to_owned());
        }
        if ask(attribute::WRITE_64_BITS)? == 0 {
            return Err("its streams cannot write 64-bit values".to_owned());
        }
        let capability = 10 * ask(attribute::CAPABILITY_MAJOR)? + ask(attribute::CAPABILITY_MINOR)?;
        if capability < 80 {
            return Err(format!(
                "it has compute capability {}.{}, but 8.0 is required",
                capability / 10,
                capability % 10
            ));
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device was handed out above, the pointer is to a live handle.
        unsafe { driver.retain_context(&mut raw, device) }.map_err(|code| code.to_string())?;
        Ok(Self {
            driver,
            raw: RawContext(raw),
            device,
            ordinal,
            name: name(driver, device).map_err(|code| code.to_string())?,
            capability,
            has_managed_memory: ask(attribute::MANAGED_MEMORY)? != 0,
            takes_hints: ask(attribute::CONCURRENT_MANAGED_ACCESS)? != 0,
            knows_host_addresses: ask(attribute::HOST_ADDRESSES)? != 0,
            lost: OnceLock::new(),
        })
    }

    /// Returns the context's handle, for driver calls that take two contexts.
    pub fn handle(&self) -> CUcontext {
        self.raw.0
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// The fault that destroyed the context; the driver's error.
    pub fn enter(&self) -> Result<ContextGuard<'_>> {
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        // SAFETY: the context is retained permanently.
        unsafe { self.driver.push_context(self.raw.0) }.map_err(|code| self.fault(code))?;
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: the pointer is to a live integer, which holds one of the modes.
        let exchanged = unsafe { self.driver.exchange_capture_mode(&mut mode) };
        let entered = ContextGuard { context: self, capture_mode: exchanged.is_ok().then_some(mode) };
        exchanged.map_err(|code| self.fault(code))?;
        Ok(entered)
    }

    /// Calls `ask`, which queries whether an event has happened, and returns the answer. The driver's "not ready" is
    /// the answer `false` rather than an error.
    ///
    /// # Errors
    /// A device error.
    pub fn query(&self, ask: impl FnOnce(&ContextGuard<'_>) -> Result<(), Code>) -> Result<bool> {
        match ask(&self.enter()?) {
            Ok(()) => Ok(true),
            Err(code) if code.is_not_ready() => Ok(false),
            Err(code) => Err(self.fault(code)),
        }
    }

    /// Converts a driver's error code to an error. If the context is lost, records the error, so that no later call
    /// uses the context.
    pub fn fault(&self, code: Code) -> Error {
        let error = Error::from(code);
        if code.context_lost() {
            tracing::error!(%error, gpu = self.ordinal, "the process's context on the GPU is lost");
            return self.lost.get_or_init(|| error).clone();
        }
        error
    }
}

/// Keeps a context current on this thread until it is dropped. Driver calls are made through it.
pub(super) struct ContextGuard<'c> {
    context: &'c Context,
    /// The thread's own capture mode, restored on drop.
    capture_mode: Option<u32>,
}

impl Deref for ContextGuard<'_> {
    type Target = Driver;
    fn deref(&self) -> &Driver {
        self.context.driver
    }
}

impl Drop for ContextGuard<'_> {
    /// Restores the caller's mode and context. If this fails, the next call fails too and reports the error.
    fn drop(&mut self) {
        if let Some(mut mode) = self.capture_mode {
            // SAFETY: the pointer is to a live integer, which holds the mode that the driver returned.
            let _said_by_the_next_call = unsafe { self.exchange_capture_mode(&mut mode) };
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context on top is the one that `enter` pushed: every call in between pops what it
        // pushes.
        let _said_by_the_next_call = unsafe { self.pop_context(&mut popped) };
    }
}

fn name(driver: &Driver, device: CUdevice) -> Result<String, Code> {
    let mut name = [0_u8; 128];
    // SAFETY: the driver writes at most the given number of bytes, including the terminating zero.
    unsafe { driver.device_name(name.as_mut_ptr().cast(), name.len() as c_int, device) }?;
    let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..len]).into_owned())
}
