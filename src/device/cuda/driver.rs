//! The CUDA driver library, located at run time without a panic if it is missing.
//!
//! The bindings of the library look up a symbol at its first call, panic if it is missing, and read the result as an
//! enum that lacks the codes of newer drivers. Therefore the entry points used here are looked up together, once, and
//! return numbers. [`Driver::get`] reports a missing or outdated driver before anything is called.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
pub(super) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream,
};

use super::errors::Code;

/// The oldest supported driver version, in the driver's numbering: 12.4.
const VERSION_MIN: c_int = 12_040;

macro_rules! entry_points {
    ($($name:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        /// The entry points of the driver library. A value exists only if all of them were found.
        pub(super) struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Driver {
            fn load() -> Result<Self, String> {
                Ok(Self { $($name: symbol($symbol)?,)* })
            }

            $(
                #[doc = concat!("Calls the driver's `", $symbol, "`.")]
                ///
                /// # Safety
                /// The caller must follow the rules of CUDA's driver API for this function.
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's")]
                pub unsafe fn $name(&self, $($argument: $type),*) -> Result<(), Code> {
                    // SAFETY: the caller's promise; the pointer is the entry point of that signature.
                    Code::check($symbol, unsafe { (self.$name)($($argument),*) })
                }
            )*
        }
    };
}

entry_points! {
    init = "cuInit" (flags: c_uint);
    version = "cuDriverGetVersion" (version: *mut c_int);
    device_count = "cuDeviceGetCount" (count: *mut c_int);
    device = "cuDeviceGet" (device: *mut CUdevice, ordinal: c_int);
    device_name = "cuDeviceGetName" (name: *mut c_char, len: c_int, device: CUdevice);
    device_attribute = "cuDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: CUdevice);
    retain_context = "cuDevicePrimaryCtxRetain" (context: *mut CUcontext, device: CUdevice);
    push_context = "cuCtxPushCurrent_v2" (context: CUcontext);
    pop_context = "cuCtxPopCurrent_v2" (context: *mut CUcontext);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut c_uint);
    priority_range = "cuCtxGetStreamPriorityRange" (least: *mut c_int, greatest: *mut c_int);
    create_stream = "cuStreamCreateWithPriority" (stream: *mut CUstream, flags: c_uint, priority: c_int);
    destroy_stream = "cuStreamDestroy_v2" (stream: CUstream);
    query_stream = "cuStreamQuery" (stream: CUstream);
    capture_status = "cuStreamIsCapturing" (stream: CUstream, status: *mut c_uint);
    wait_event = "cuStreamWaitEvent" (stream: CUstream, event: CUevent, flags: c_uint);
    write_value = "cuStreamWriteValue64_v2" (stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    create_event = "cuEventCreate" (event: *mut CUevent, flags: c_uint);
    record_event = "cuEventRecord" (event: CUevent, stream: CUstream);
    query_event = "cuEventQuery" (event: CUevent);
    destroy_event = "cuEventDestroy_v2" (event: CUevent);
    memory_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    pointer_attribute = "cuPointerGetAttribute" (value: *mut c_void, attribute: c_uint, address: CUdeviceptr);
    allocate = "cuMemAlloc_v2" (address: *mut CUdeviceptr, len: usize);
    allocate_managed = "cuMemAllocManaged" (address: *mut CUdeviceptr, len: usize, flags: c_uint);
    advise = "cuMemAdvise" (address: CUdeviceptr, len: usize, advice: c_uint, device: CUdevice);
    prefetch = "cuMemPrefetchAsync" (address: CUdeviceptr, len: usize, target: CUdevice, stream: CUstream);
    free = "cuMemFree_v2" (address: CUdeviceptr);
    allocate_host = "cuMemHostAlloc" (address: *mut *mut c_void, len: usize, flags: c_uint);
    free_host = "cuMemFreeHost" (address: *mut c_void);
    register_host = "cuMemHostRegister_v2" (address: *mut c_void, len: usize, flags: c_uint);
    unregister_host = "cuMemHostUnregister" (address: *mut c_void);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (target: CUdeviceptr, source: *const c_void, len: usize, stream: CUstream);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (target: *mut c_void, source: CUdeviceptr, len: usize, stream: CUstream);
    copy_within = "cuMemcpyDtoDAsync_v2" (target: CUdeviceptr, source: CUdeviceptr, len: usize, stream: CUstream);
    can_access_peer = "cuDeviceCanAccessPeer" (can: *mut c_int, reader: CUdevice, owner: CUdevice);
    enable_peer_access = "cuCtxEnablePeerAccess" (owner: CUcontext, flags: c_uint);
    copy_peer = "cuMemcpyPeerAsync" (target: CUdeviceptr, to: CUcontext, source: CUdeviceptr, from: CUcontext, len: usize, stream: CUstream);
    load_module = "cuModuleLoadData" (module: *mut CUmodule, image: *const c_void);
    function = "cuModuleGetFunction" (function: *mut CUfunction, module: CUmodule, name: *const c_char);
    launch = "cuLaunchKernel" (
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

impl Driver {
    /// Returns the initialized driver, or the reason why it is unavailable. The result stays the same for the
    /// lifetime of the process.
    pub fn get() -> Result<&'static Driver, String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::find).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Self, String> {
        // SAFETY: loading libcuda runs its constructors, which require nothing from the process.
        if !unsafe { sys::is_culib_present() } {
            return Err("there is no CUDA driver: libcuda.so.1 was not found".to_owned());
        }
        let driver = Self::load()?;
        // SAFETY: no driver call precedes this one.
        unsafe { driver.init(0) }.map_err(|code| format!("the CUDA driver does not start: {code}"))?;
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        unsafe { driver.version(&mut version) }.map_err(|code| code.to_string())?;
        if version < VERSION_MIN {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the CUDA driver has version {major}.{minor}, but 12.4 is required"));
        }
        Ok(driver)
    }

    /// Returns the number of GPUs visible to the process.
    pub fn count(&self) -> Result<u32, Code> {
        let mut count = 0;
        // SAFETY: the driver is initialized, the pointer is to a live integer.
        unsafe { self.device_count(&mut count) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }
}

/// Looks up an entry point of the library; `F` is its signature.
fn symbol<F: Copy>(name: &str) -> Result<F, String> {
    // SAFETY: the library is present, so this finds it and does not panic.
    let library = unsafe { sys::culib() };
    // SAFETY: the callers name CUDA's entry points with the signatures from its 12.4 headers. An entry point
    // never changes its signature: a new signature gets a new name.
    let entry = unsafe { library.get::<F>(name.as_bytes()) };
    entry.map(|entry| *entry).map_err(|_| format!("the CUDA driver is too old: it has no {name}"))
}
