//! The simulated CUDA driver and the simulated NIXL library.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use libloading::{Library, Symbol};
use remanent::nixl::{Agent, AgentOptions, Backend, Nixl, NixlError, Peer, Region, RemoteRegion};
use remanent::options::SnapshotSchedule;
use remanent::{DeviceChoice, Error, Options, PageId, Place, Store};

/// The libraries that the tests use.
pub struct Ground {
    pub nixl: Nixl,
    library: Library,
    _driver: Library,
}

impl Ground {
    /// Returns the libraries, and a guard for exclusive use of them.
    pub fn get() -> (&'static Self, MutexGuard<'static, ()>) {
        static GROUND: OnceLock<Ground> = OnceLock::new();
        static TURN: Mutex<()> = Mutex::new(());
        // A failed test must not affect the next one, so a poisoned lock is ignored.
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let ground = GROUND.get_or_init(Self::load);
        ground.delay(0);
        ground.flip(0);
        ground.disarm();
        (ground, turn)
    }

    fn load() -> Self {
        // SAFETY: the library runs nothing when it is loaded.
        let driver = unsafe { Library::new(built("libfake_cuda.so")) }.expect("the driver of this test");
        // SAFETY: as above.
        let library = unsafe { Library::new(built("libfake_nixl.so")) }.expect("the library of this test");
        let nixl = Nixl::load_from(built("libfake_nixl.so")).expect("all functions");
        Self { nixl, library, _driver: driver }
    }

    /// Makes the next call of a function of NIXL return `status`.
    pub fn arm(&self, name: &str, status: i32) {
        // SAFETY: the signature that the library's `faults.rs` gives it.
        let arm: Symbol<unsafe extern "C" fn(*const i8, u64, i32)> = unsafe { self.own(b"fake_nixl_arm") };
        let name = CString::new(name).unwrap();
        // SAFETY: the pointer points to a live string.
        unsafe { arm(name.as_ptr().cast(), 1, status) };
    }

    /// Removes the injected fault. Returns true if a call has failed because of it.
    pub fn disarm(&self) -> bool {
        // SAFETY: as above.
        let disarm: Symbol<extern "C" fn() -> u32> = unsafe { self.own(b"fake_nixl_disarm") };
        disarm() == 0
    }

    /// Keeps each transfer in flight for a number of status calls. `u64::MAX` means forever.
    pub fn delay(&self, calls: u64) {
        // SAFETY: as above.
        let delay: Symbol<extern "C" fn(u64)> = unsafe { self.own(b"fake_nixl_delay") };
        delay(calls);
    }

    /// Flips a bit in each of the next `transfers` transfers.
    pub fn flip(&self, transfers: u64) {
        // SAFETY: as above.
        let flip: Symbol<extern "C" fn(u64)> = unsafe { self.own(b"fake_nixl_flip") };
        flip(transfers);
    }

    /// Returns the number of objects that the library created and did not free.
    pub fn alive(&self) -> u64 {
        // SAFETY: as above.
        let alive: Symbol<extern "C" fn() -> u64> = unsafe { self.own(b"fake_nixl_alive") };
        alive()
    }

    /// Returns the number of agents with a progress thread.
    pub fn progress_threads(&self) -> u64 {
        // SAFETY: as above.
        let threads: Symbol<extern "C" fn() -> u64> = unsafe { self.own(b"fake_nixl_progress_threads") };
        threads()
    }

    /// Looks up a function of the simulated library.
    ///
    /// # Safety
    /// The function must have the signature `F`.
    unsafe fn own<F>(&self, name: &[u8]) -> Symbol<'_, F> {
        // SAFETY: the caller of this function guarantees the same conditions.
        unsafe { self.library.get(name) }.expect("a function of the library")
    }

    pub fn agent(&self, name: &str) -> Agent {
        self.nixl.agent(&settings(name)).unwrap()
    }
}

/// Returns the options of an agent with a short time limit for transfers.
pub fn settings(name: &str) -> AgentOptions {
    AgentOptions::new(name)
        .backends([Backend::ucx(), Backend::posix().param("use_uring", "true")])
        .timeout(Duration::from_millis(50))
}

/// Loads the metadata of two agents into each other. Returns each agent as a peer of the other.
pub fn connect(one: &Agent, other: &Agent) -> (Peer, Peer) {
    let of_other = one.load_peer(&other.metadata().unwrap()).unwrap();
    (other.load_peer(&one.metadata().unwrap()).unwrap(), of_other)
}

/// Encodes and decodes the description of a region, as if it were sent to a peer.
pub fn sent<M: remanent::nixl::Memory>(region: &Region<M>) -> RemoteRegion {
    RemoteRegion::from_bytes(&region.describe().to_bytes()).unwrap()
}

/// Returns the NIXL error of a failed call.
pub fn failure<T: std::fmt::Debug>(result: remanent::Result<T>) -> NixlError {
    match result {
        Err(Error::Nixl(error)) => *error,
        other => panic!("{other:?}"),
    }
}

/// Opens a temporary store without background snapshots.
pub fn store(device: DeviceChoice) -> Store {
    let schedule = SnapshotSchedule::new().log_bytes(None).interval(None);
    Options::new().snapshots(schedule).device(device).open_temporary().unwrap()
}

/// Creates a page with the given contents.
pub fn page(store: &Store, bytes: &[u8], place: Place) -> PageId {
    let mut batch = store.batch();
    batch.create_from(bytes.to_vec(), place);
    store.commit(batch).unwrap().pages[0]
}

/// Returns bytes that depend on their position and on `seed`.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 56) as u8
    };
    (0..len).map(|_| next(&mut state)).collect()
}

/// Returns the path of a library that cargo has built: in the folder of the test binary, or one folder up.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let folders: Vec<&Path> = test.ancestors().skip(1).take(2).collect();
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is in none of {folders:?}"))
}
