//! Devices and their primary contexts.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{call, call_in_context, code, stream};

/// The driver version that this library reports: the oldest one that the store accepts.
const VERSION: c_int = 12_040;

/// The value of `CU_STREAM_CAPTURE_MODE_RELAXED`.
const CAPTURE_RELAXED: c_uint = 2;

static DEVICES: AtomicU32 = AtomicU32::new(3);
/// Pairs of GPUs for which access from the first GPU to the memory of the second is enabled.
static PEERS: Mutex<BTreeSet<(u32, u32)>> = Mutex::new(BTreeSet::new());

/// A device's primary context. It is created by the first retain and never destroyed.
pub struct Context {
    pub device: u32,
    /// The error code of the fault that destroyed the context, or 0 while the context is valid.
    lost: AtomicU32,
}

thread_local! {
    static CURRENT: RefCell<Vec<&'static Context>> = const { RefCell::new(Vec::new()) };
    static CAPTURE_MODE: Cell<c_uint> = const { Cell::new(0) };
}

impl Context {
    fn of(device: u32) -> &'static Self {
        static CONTEXTS: Mutex<BTreeMap<u32, &'static Context>> = Mutex::new(BTreeMap::new());
        let new = || &*Box::leak(Box::new(Self { device, lost: AtomicU32::new(0) }));
        CONTEXTS.lock().unwrap().entry(device).or_insert_with(new)
    }

    /// Makes every later call in this context fail with `code`. The context's streams stop executing work.
    pub fn lose(&self, code: u32) {
        self.lost.store(code, Ordering::Release);
        stream::wake(self.device);
    }

    /// Returns the code of the fault that destroyed the context as an error, or `Ok` if the context is valid.
    pub fn check(&self) -> Result<(), u32> {
        match self.lost.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// Returns the context that is current on this thread, or the code of the fault that destroyed it.
pub fn current() -> Result<&'static Context, u32> {
    let current = CURRENT.with_borrow(|stack| stack.last().copied());
    let context = current.ok_or(code::INVALID_CONTEXT)?;
    context.check().map(|()| context)
}

/// Sets the current context of this thread. `None` leaves the thread without a context.
pub fn set_current(context: Option<&'static Context>) {
    CURRENT.with_borrow_mut(|stack| {
        _ = stack.pop();
        stack.extend(context);
    });
}

/// Returns true if the capture mode of this thread is relaxed, so that its calls cannot invalidate a capture.
pub fn is_relaxed() -> bool {
    CAPTURE_MODE.get() == CAPTURE_RELAXED
}

/// Destroys a device's context, as a fault with this code does.
pub fn lose(device: u32, code: u32) {
    Context::of(device).lose(code);
}

pub fn set_devices(count: u32) {
    DEVICES.store(count, Ordering::Release);
}

fn known(device: c_int) -> Result<u32, u32> {
    let device = u32::try_from(device).map_err(|_| code::INVALID_DEVICE)?;
    if device < DEVICES.load(Ordering::Acquire) { Ok(device) } else { Err(code::INVALID_DEVICE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> u32 {
    call(|| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    call(|| {
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *version = VERSION };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    call(|| {
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *count = DEVICES.load(Ordering::Acquire) as c_int };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    // SAFETY: the API requires the caller to pass valid pointers.
    call(|| known(ordinal).map(|_| unsafe { *device = ordinal }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> u32 {
    call(|| {
        known(device)?;
        let text = b"no GPU at all\0";
        assert!(len as usize >= text.len(), "room for a name");
        // SAFETY: the caller passes a buffer, and its length was checked above.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> u32 {
    call(|| {
        let device = known(device)?;
        let known = match attribute {
            // Unified addressing, managed memory, managed memory shared with the host, registered memory at
            // the host's addresses, 64-bit writes of streams.
            41 | 83 | 89 | 91 | 122 => 1,
            // Compute capability. It differs between devices, so that kernels are loaded both as PTX and as
            // machine code.
            75 => 9 - device as c_int % 2,
            76 => 0,
            _ => 0,
        };
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *value = known };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> u32 {
    call(|| {
        let retained = Context::of(known(device)?);
        retained.check()?;
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *context = std::ptr::from_ref(retained).cast_mut().cast() };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> u32 {
    call(|| {
        // SAFETY: the handle is null or was created by this driver, which never destroys contexts.
        let context = unsafe { context.cast::<Context>().as_ref() }.ok_or(code::INVALID_CONTEXT)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    })
}

/// Pops the current context. This call is never selected to fail, because the store cannot continue on a thread
/// whose context was not popped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> u32 {
    let Some(popped) = CURRENT.with_borrow_mut(Vec::pop) else { return code::INVALID_CONTEXT };
    // SAFETY: the API requires the caller to pass valid pointers.
    unsafe { *context = std::ptr::from_ref(popped).cast_mut().cast() };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> u32 {
    call(|| {
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *mode = CAPTURE_MODE.replace(*mode) };
        Ok(())
    })
}

/// Returns true if two GPUs are connected. GPUs `2n` and `2n + 1` are connected.
fn are_neighbours(one: u32, other: u32) -> bool {
    one / 2 == other / 2 && one != other
}

/// Returns true if `reader` has access to the memory of `owner`.
pub fn has_access(reader: u32, owner: u32) -> bool {
    reader == owner || PEERS.lock().unwrap().contains(&(reader, owner))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, reader: c_int, owner: c_int) -> u32 {
    call(|| {
        let answer = are_neighbours(known(reader)?, known(owner)?);
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *can = c_int::from(answer) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxEnablePeerAccess(owner: *mut c_void, _flags: c_uint) -> u32 {
    call_in_context(|reader| {
        // SAFETY: the handle is null or was created by this driver, which never destroys contexts.
        let owner = unsafe { owner.cast::<Context>().as_ref() }.ok_or(code::INVALID_CONTEXT)?;
        owner.check()?;
        if !are_neighbours(reader.device, owner.device) {
            return Err(code::PEER_UNSUPPORTED);
        }
        let is_new = PEERS.lock().unwrap().insert((reader.device, owner.device));
        if is_new { Ok(()) } else { Err(code::PEER_ALREADY) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> u32 {
    call_in_context(|_| {
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *least = 0 };
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *greatest = -5 };
        Ok(())
    })
}
