//! The loaded driver library, with typed wrappers for its test-only entry points.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};

use libloading::{Library, Symbol};
use remanent::device::RawStream;
use remanent::device::cuda::CudaDevice;

pub struct Driver {
    library: Library,
}

impl Driver {
    /// Returns the driver with exclusive use of it, because the call counter is global to the process.
    pub fn get() -> (&'static Self, MutexGuard<'static, ()>) {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        static TURN: Mutex<()> = Mutex::new(());
        // A failed test must not affect the next one, so a poisoned lock is ignored.
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let driver = DRIVER.get_or_init(|| {
            // SAFETY: loading the library runs no code.
            let library = unsafe { Library::new(built()) }.expect("the driver that is built with this test");
            // The presence of a driver is queried once per process, so this call must not be selected to
            // fail. The store's own tests cover drivers that fail to initialize.
            CudaDevice::count().expect("a driver that starts");
            Driver { library }
        });
        (driver, turn)
    }

    /// Makes the `nth` call from now on fail with `code`.
    pub fn arm(&self, nth: u64, code: u32) {
        // SAFETY: the type is the signature in the driver's `faults.rs`.
        let arm: Symbol<extern "C" fn(u64, u32)> = unsafe { self.own(b"fake_driver_arm") };
        arm(nth, code);
    }

    /// Destroys a device's context with a fault immediately.
    pub fn lose(&self, device: u32, code: u32) {
        // SAFETY: as above.
        let lose: Symbol<extern "C" fn(u32, u32)> = unsafe { self.own(b"fake_driver_lose") };
        lose(device, code);
    }

    /// Disarms the fault. Returns true if a call failed with this fault.
    pub fn disarm(&self) -> bool {
        // SAFETY: as above.
        let disarm: Symbol<extern "C" fn() -> u32> = unsafe { self.own(b"fake_driver_disarm") };
        disarm() == 0
    }

    /// Returns true if the call that failed last may have been part of releasing a resource.
    pub fn struck_giving_back(&self) -> bool {
        // SAFETY: as above.
        let giving: Symbol<extern "C" fn() -> u32> = unsafe { self.own(b"fake_driver_struck_giving_back") };
        giving() != 0
    }

    /// Returns the number of a device's streams, events and allocations that have not been released.
    pub fn alive(&self, device: u32) -> u64 {
        // SAFETY: as above.
        let alive: Symbol<extern "C" fn(u32) -> u64> = unsafe { self.own(b"fake_driver_alive") };
        alive(device)
    }

    /// Releases all resources of a device whose context is lost.
    pub fn forget(&self, device: u32) {
        // SAFETY: as above.
        let forget: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_driver_forget") };
        forget(device);
    }

    /// Makes all later registrations of host memory fail with `code`, or succeed again if `code` is 0.
    pub fn refuse_registrations(&self, code: u32) {
        // SAFETY: as above.
        let refuse: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_driver_refuse_registrations") };
        refuse(code);
    }

    /// Sets the number of devices that the process sees.
    pub fn set_devices(&self, count: u32) {
        // SAFETY: as above.
        let set_devices: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_driver_set_devices") };
        set_devices(count);
    }

    /// Returns the number of copies made directly from one device to another.
    pub fn peer_copies(&self) -> u64 {
        // SAFETY: as above.
        let copies: Symbol<extern "C" fn() -> u64> = unsafe { self.own(b"fake_driver_peer_copies") };
        copies()
    }

    /// Creates a caller's stream on a device.
    pub fn stream(&'static self, device: u32) -> CallerStream {
        let mut raw = std::ptr::null_mut();
        self.within(device, || {
            // SAFETY: the type is CUDA's signature.
            let create: Symbol<extern "C" fn(*mut *mut c_void, u32) -> u32> =
                unsafe { self.own(b"cuStreamCreate") };
            assert_eq!(create(&mut raw, 1), 0);
        });
        CallerStream { driver: self, device, raw }
    }

    /// Runs `work` with the device's context current.
    fn within(&self, device: u32, work: impl FnOnce()) {
        let mut context = std::ptr::null_mut();
        // SAFETY: the type is CUDA's signature.
        let retain: Symbol<extern "C" fn(*mut *mut c_void, i32) -> u32> =
            unsafe { self.own(b"cuDevicePrimaryCtxRetain") };
        // SAFETY: as above.
        let push: Symbol<extern "C" fn(*mut c_void) -> u32> = unsafe { self.own(b"cuCtxPushCurrent_v2") };
        // SAFETY: as above.
        let pop: Symbol<extern "C" fn(*mut *mut c_void) -> u32> = unsafe { self.own(b"cuCtxPopCurrent_v2") };
        assert_eq!(retain(&mut context, device as i32), 0);
        assert_eq!(push(context), 0);
        work();
        assert_eq!(pop(&mut context), 0);
    }

    /// Looks up an entry point.
    ///
    /// # Safety
    ///
    /// The entry point must have the signature `F`.
    unsafe fn own<F>(&self, name: &[u8]) -> Symbol<'_, F> {
        // SAFETY: the caller guarantees the signature.
        unsafe { self.library.get(name) }.expect("an entry point of the driver")
    }
}

/// A stream of a program that uses a store. If the context is lost, `forget` removes the stream with its
/// device.
pub struct CallerStream {
    driver: &'static Driver,
    device: u32,
    raw: *mut c_void,
}

// SAFETY: the handle is only a number, which the driver accepts on any thread.
unsafe impl Send for CallerStream {}

impl CallerStream {
    /// Returns the stream in the form that the store accepts.
    pub fn raw(&self) -> RawStream {
        // SAFETY: the stream belongs to the store's device, and is dropped after the store.
        unsafe { RawStream::from_cuda(self.raw as u64) }
    }

    /// Destroys the stream.
    pub fn destroy(self) {
        self.driver.within(self.device, || {
            // SAFETY: the type is CUDA's signature.
            let destroy: Symbol<extern "C" fn(*mut c_void) -> u32> =
                unsafe { self.driver.own(b"cuStreamDestroy_v2") };
            assert_eq!(destroy(self.raw), 0);
        });
    }
}

/// Returns the path of the library that cargo built, which is in the folder of the test binary or its parent.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let folders: Vec<&Path> = test.ancestors().skip(1).take(2).collect();
    let found = folders.iter().map(|folder| folder.join("libfake_cuda.so")).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("libfake_cuda.so is in none of {folders:?}"))
}
