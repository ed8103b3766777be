//! The simulated driver and the simulated library, or the real ones with `REMANENT_ON_GPUS=1`.

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use libloading::{Library, Symbol};
use remanent::device::RawStream;
use remanent::device::cuda::CudaDevice;
use remanent::nccl::{Communicator, Nccl, Rank};
use remanent::options::SnapshotSchedule;
use remanent::{Options, Store};

/// The time limit of ranks that are not expected to fail.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The time limit of ranks that wait in vain.
pub const SHORT: Duration = Duration::from_millis(400);

/// The libraries that the ranks use.
pub struct Ground {
    pub nccl: Nccl,
    /// The simulated driver and library; `None` on GPUs.
    fakes: Option<(Library, Library)>,
}

impl Ground {
    /// Returns the libraries and exclusive use of them, or `None` with a message if the machine has fewer than two GPUs.
    pub fn get() -> Option<(&'static Self, MutexGuard<'static, ()>)> {
        static GROUND: OnceLock<Option<Ground>> = OnceLock::new();
        static TURN: Mutex<()> = Mutex::new(());
        // A failed test does not affect the next one, so a poisoned lock is ignored.
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let ground = GROUND.get_or_init(Self::load).as_ref();
        if ground.is_none() {
            eprintln!("SKIPPED: two GPUs and NCCL are needed");
        }
        Some((ground?, turn))
    }

    /// Returns the libraries if they are the simulated ones.
    pub fn simulated() -> Option<(&'static Self, MutexGuard<'static, ()>)> {
        let (ground, turn) = Self::get()?;
        if ground.fakes.is_none() {
            eprintln!("SKIPPED: faults are injected into the simulated library only");
            return None;
        }
        Some((ground, turn))
    }

    fn load() -> Option<Self> {
        if std::env::var_os("REMANENT_ON_GPUS").is_some() {
            let nccl = Nccl::load().inspect_err(|error| eprintln!("{error}")).ok()?;
            let count = CudaDevice::count().inspect_err(|error| eprintln!("{error}")).ok()?;
            return (count >= 2).then_some(Self { nccl, fakes: None });
        }
        // SAFETY: the library runs nothing when it is loaded.
        let driver = unsafe { Library::new(built("libfake_cuda.so")) }.expect("the driver of this test");
        CudaDevice::count().expect("a driver that starts");
        // SAFETY: the same.
        let library = unsafe { Library::new(built("libfake_nccl.so")) }.expect("the library of this test");
        let nccl = Nccl::load_from(built("libfake_nccl.so")).expect("all functions");
        Some(Self { nccl, fakes: Some((driver, library)) })
    }

    pub fn is_simulated(&self) -> bool {
        self.fakes.is_some()
    }

    /// Makes the next call of a function of NCCL fail with `code`.
    pub fn arm(&self, name: &str, code: u32) {
        self.arm_nth(name, 1, code);
    }

    /// Makes the `nth` call from now on of a function of NCCL fail with `code`.
    pub fn arm_nth(&self, name: &str, nth: u64, code: u32) {
        // SAFETY: the signature that the library's `faults.rs` gives it.
        let arm: Symbol<unsafe extern "C" fn(*const i8, u64, u32)> = unsafe { self.own(b"fake_nccl_arm") };
        let name = CString::new(name).unwrap();
        // SAFETY: the pointer is to a live string.
        unsafe { arm(name.as_ptr().cast(), nth, code) };
    }

    /// Disarms the fault; returns whether a call failed with it.
    pub fn disarm(&self) -> bool {
        // SAFETY: the same.
        let disarm: Symbol<extern "C" fn() -> u32> = unsafe { self.own(b"fake_nccl_disarm") };
        disarm() == 0
    }

    /// Sets the asynchronous error of a rank; 0 ends it.
    pub fn set_error(&self, rank: u32, code: u32) {
        // SAFETY: the same.
        let set: Symbol<extern "C" fn(u32, u32)> = unsafe { self.own(b"fake_nccl_set_error") };
        set(rank, code);
    }

    /// Makes the calls of a rank never complete; `u32::MAX` for none.
    pub fn stall(&self, rank: u32) {
        // SAFETY: the same.
        let stall: Symbol<extern "C" fn(u32)> = unsafe { self.own(b"fake_nccl_stall") };
        stall(rank);
    }

    /// Returns the number of communicators that were not freed.
    pub fn alive(&self) -> u64 {
        // SAFETY: the same.
        let alive: Symbol<extern "C" fn() -> u64> = unsafe { self.own(b"fake_nccl_alive") };
        alive()
    }

    /// Looks up a function of the simulated library.
    ///
    /// # Safety
    /// The function has the signature `F`.
    unsafe fn own<F>(&self, name: &[u8]) -> Symbol<'_, F> {
        let (_, library) = self.fakes.as_ref().expect("the simulated library");
        // SAFETY: passed on.
        unsafe { library.get(name) }.expect("a function of the library")
    }

    /// Joins as all ranks, each on the GPU with its number.
    pub fn join(&self, ranks: u32, timeout: Duration) -> Vec<Communicator> {
        let id = self.nccl.unique_id().unwrap();
        let ranks = (0..ranks).map(|rank| Rank::new(rank, ranks).gpu(rank).timeout(timeout));
        self.nccl.join_all(&id, ranks).unwrap()
    }

    /// Runs `work` for each rank in a thread of its own, with a new store on the rank's GPU.
    pub fn run<T: Send>(&self, ranks: u32, work: impl Fn(Communicator, &Store) -> T + Sync) -> Vec<T> {
        let communicators = self.join(ranks, PATIENCE);
        std::thread::scope(|scope| {
            let work = &work;
            let running = communicators.into_iter().map(|communicator| {
                scope.spawn(move || {
                    let store = store(communicator.gpu());
                    work(communicator, &store)
                })
            });
            let running: Vec<_> = running.collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Creates a caller's stream on a GPU of the simulated driver. It is never destroyed.
    pub fn stream(&self, gpu: u32) -> RawStream {
        let (driver, _) = self.fakes.as_ref().expect("the simulated driver");
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: CUDA's signatures.
        let retain: Symbol<extern "C" fn(*mut *mut c_void, i32) -> u32> =
            unsafe { driver.get(b"cuDevicePrimaryCtxRetain") }.unwrap();
        // SAFETY: the same.
        let push: Symbol<extern "C" fn(*mut c_void) -> u32> =
            unsafe { driver.get(b"cuCtxPushCurrent_v2") }.unwrap();
        // SAFETY: the same.
        let pop: Symbol<extern "C" fn(*mut *mut c_void) -> u32> =
            unsafe { driver.get(b"cuCtxPopCurrent_v2") }.unwrap();
        // SAFETY: the same.
        let create: Symbol<extern "C" fn(*mut *mut c_void, u32) -> u32> =
            unsafe { driver.get(b"cuStreamCreate") }.unwrap();
        assert_eq!((retain(&mut context, gpu as i32), push(context), create(&mut stream, 1)), (0, 0, 0));
        assert_eq!(pop(&mut context), 0);
        // SAFETY: the stream was created just now and is never destroyed.
        unsafe { RawStream::from_cuda(stream as u64) }
    }
}

/// Returns options without background snapshots.
pub fn options() -> Options {
    Options::new().snapshots(SnapshotSchedule::new().log_bytes(None).interval(None))
}

/// Opens a temporary store on a GPU.
pub fn store(gpu: u32) -> Store {
    options().device(remanent::DeviceChoice::Cuda(gpu)).open_temporary().unwrap()
}

/// Returns the path of a library that cargo built: next to the test binary, or one folder up.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let folders: Vec<&Path> = test.ancestors().skip(1).take(2).collect();
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is in none of {folders:?}"))
}
