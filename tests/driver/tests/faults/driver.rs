//! The loaded driver library, with typed wrappers of its test-only entry points.

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
    /// Returns the driver and exclusive use of it: the count of calls is global to the process.
    pub fn get() -> (&'static Self, MutexGuard<'static, ()>) {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        static TURN: Mutex<()> = Mutex::new(());
        // A failed test does not affect the next one, so a poisoned lock is ignored.
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let driver = DRIVER.get_or_init(|| {
            // SAFETY: the library runs nothing when it is loaded.
            let library = unsafe { Library::new(built()) }.expect("the driver that is built with this test");
            // The presence of a driver is queried once per process, so this call must not be made to fail.
            // The store's own tests cover drivers that do not start.
            CudaDevice::count().expect("a driver that starts");
            Driver { library }
        });
        (driver, turn)
    }

    /// Makes the `nth` call from now on fail with `code`.
    pub fn arm(&self, nth: u64, code: u32) {
        // SAFETY: the signature that the driver's `faults.rs` gives it.
        let arm: Symbol<extern "C" fn(u64, u32)> = unsafe { self.own(b"fake_driver_arm") };
        arm(nth, code);
    }

    /// Destroys a device's context with a fault at once.
    pub fn lose(&self, device: u32, code: u32) {
        // SAFETY: the same.
        let lose: Symbol<extern "C" fn(u32, u32)> = unsafe { self.own(b"fake_driver_lose") };
        lose(device, code);
    }

    /// Disarms the fault; returns whether a call failed with it.
    pub fn disarm(&self) -> bool {
        // SAFETY: the same.
        let disarm: Symbol<extern "C" fn() -> u32> = unsafe { self.own(b"fake_driver_disarm") };
        disarm() == 0
    }

    /// Whether the call that failed last may have been part of releasing a resource.
    pub fn struck_giving_back(&self) -> bool {
        // SAFETY: the same.
        let giving: Symbol<extern "C" fn() -> u32> = unsafe { self.own(b"fake_driver_struck_giving_back") };
        giving() != 0
    }

    /// Returns the number of a device's streams, events and allocations that were not released.
    pub fn alive(&self, device: u32) -> u64 {
        // SAFETY: the same.
        let alive: Symbol<extern "C" fn(u32) -> u64> = unsafe { self.own(b"fake_driver_alive") };
        alive(device)
    }

    /// Releases all resources of a device whose context is lost.
    pub fn forget(&self, device: u32) {
        // SAFETY: the same.
        let forget: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_driver_forget") };
        forget(device);
    }

    /// Makes all later registrations of host memory fail with `code`; 0 allows them again.
    pub fn refuse_registrations(&self, code: u32) {
        // SAFETY: the same.
        let refuse: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_driver_refuse_registrations") };
        refuse(code);
    }

    /// Sets the number of devices that the process sees.
    pub fn set_devices(&self, count: u32) {
        // SAFETY: the same.
        let set_devices: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_driver_set_devices") };
        set_devices(count);
    }

    /// Returns the number of copies that went directly from one device to another.
    pub fn peer_copies(&self) -> u64 {
        // SAFETY: the same.
        let copies: Symbol<extern "C" fn() -> u64> = unsafe { self.own(b"fake_driver_peer_copies") };
        copies()
    }

    /// Creates a caller's stream on a device.
    pub fn stream(&'static self, device: u32) -> CallerStream {
        let mut raw = std::ptr::null_mut();
        self.within(device, || {
            // SAFETY: CUDA's signature.
            let create: Symbol<extern "C" fn(*mut *mut c_void, u32) -> u32> =
                unsafe { self.own(b"cuStreamCreate") };
            assert_eq!(create(&mut raw, 1), 0);
        });
        CallerStream { driver: self, device, raw }
    }

    /// Runs `work` with the device's context current.
    fn within(&self, device: u32, work: impl FnOnce()) {
        let mut context = std::ptr::null_mut();
        // SAFETY: CUDA's signature.
        let retain: Symbol<extern "C" fn(*mut *mut c_void, i32) -> u32> =
            unsafe { self.own(b"cuDevicePrimaryCtxRetain") };
        // SAFETY: the same.
        let push: Symbol<extern "C" fn(*mut c_void) -> u32> = unsafe { self.own(b"cuCtxPushCurrent_v2") };
        // SAFETY: the same.
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
        // SAFETY: passed on.
        unsafe { self.library.get(name) }.expect("an entry point of the driver")
    }
}

/// A stream of a program that uses a store. `forget` removes it with its device, if the context is lost.
pub struct CallerStream {
    driver: &'static Driver,
    device: u32,
    raw: *mut c_void,
}

// SAFETY: the handle is a name, which the driver takes on any thread.
unsafe impl Send for CallerStream {}

impl CallerStream {
    /// Returns the stream in the form that the store accepts.
    pub fn raw(&self) -> RawStream {
        // SAFETY: the stream is of the device on which the store is, and is dropped after it.
        unsafe { RawStream::from_cuda(self.raw as u64) }
    }

    /// Destroys the stream.
    pub fn destroy(self) {
        self.driver.within(self.device, || {
            // SAFETY: CUDA's signature.
            let destroy: Symbol<extern "C" fn(*mut c_void) -> u32> =
                unsafe { self.driver.own(b"cuStreamDestroy_v2") };
            assert_eq!(destroy(self.raw), 0);
        });
    }
}

/// Returns the path of the library that cargo built: next to the test binary, or one folder up.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let folders: Vec<&Path> = test.ancestors().skip(1).take(2).collect();
    let found = folders.iter().map(|folder| folder.join("libfake_cuda.so")).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("libfake_cuda.so is in none of {folders:?}"))
}
