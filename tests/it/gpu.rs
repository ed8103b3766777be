//! The GPU for tests, if one is present. Otherwise, tests print a message that bypasses the capture of test
//! output and do nothing, so that a run without a GPU cannot be mistaken for one with a GPU.
//!
//! [`Caller`] represents the program that uses a store, and has its own memory and streams.

use std::cell::Cell;
use std::ffi::c_void;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use remanent::Error;
use remanent::device::cuda::CudaDevice;
use remanent::device::host::HostDevice;
use remanent::device::{Device, RawStream};
use remanent::error::Unavailable;

use crate::machine;

/// Returns a new device on the first GPU, or prints a message and returns `None` if no GPU is present.
pub fn device() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(Arc::new(device)),
        Err(Error::Unavailable(Unavailable::Device { reason, .. })) => {
            skipped(&reason);
            None
        }
        Err(error) => panic!("the GPU is there and cannot be used: {error}"),
    }
}

thread_local! {
    static IS_ON_GPU: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of a test on the host device, and on a GPU if one is present. The body opens its stores on
/// this thread, with the devices that [`under_test`] returns.
pub fn on_each_device(test: impl Fn()) {
    /// Resets the thread's device when dropped, because the next test on this thread may be another one.
    struct Leaves;
    impl Drop for Leaves {
        fn drop(&mut self) {
            IS_ON_GPU.set(false);
        }
    }
    test();
    if device().is_some() {
        let _leaves = Leaves;
        IS_ON_GPU.set(true);
        test();
    }
}

/// Returns a new device: on a GPU if the test runs [on one](on_each_device), otherwise a host device.
pub fn under_test() -> Arc<dyn Device> {
    match IS_ON_GPU.get() {
        true => device().expect("it was there before"),
        false => Arc::new(HostDevice::new()),
    }
}

/// Returns new devices on the first two GPUs, or prints a message and returns `None` if there are fewer.
pub fn two() -> Option<[Arc<dyn Device>; 2]> {
    with_first(1)
}

/// Returns new devices on the first and the third GPU, between which the fake driver permits no peer access.
/// Prints a message and returns `None` if there are fewer.
pub fn two_apart() -> Option<[Arc<dyn Device>; 2]> {
    with_first(2)
}

fn with_first(other: u32) -> Option<[Arc<dyn Device>; 2]> {
    let first = device()?;
    match CudaDevice::open(other) {
        Ok(other) => Some([first, Arc::new(other)]),
        Err(Error::Unavailable(Unavailable::Device { reason, .. })) => {
            skipped(&reason);
            None
        }
        Err(error) => panic!("GPU {other} is there and cannot be used: {error}"),
    }
}

/// Runs the body of a test on a GPU in its own process, like [`machine::alone`]. In a shared process, a
/// thread that frees driver memory waits for every stream of the GPU, and blocks other threads in the
/// meantime. At the end of another test, this would deadlock with a test that [holds a stream](Stream::hold)
/// until the store has completed some work.
pub fn alone<Test: FnOnce() + Send + 'static>(body: Test) {
    if machine::is_alone() || device().is_some() {
        machine::alone(body);
    }
}

fn skipped(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let mut uncaptured = std::io::stderr();
    writeln!(uncaptured, "SKIPPED on a GPU: {test}: {reason}").unwrap();
}

/// Calls a driver function and asserts that it succeeds.
macro_rules! call {
    ($($call:tt)*) => {{
        // SAFETY: the `Caller` made its context current. Pointers refer to live values of the right types,
        // and handles are valid as long as the values that contain them.
        let result = unsafe { sys::$($call)* };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS, stringify!($($call)*));
    }};
}

/// Returns the driver's CUDA version as major and minor number, or `None` if there is no driver.
pub fn driver_version() -> Option<(i32, i32)> {
    CudaDevice::count().ok()?;
    let mut version = 0;
    // SAFETY: the driver exists, and the pointer refers to a live value of the right type.
    let result = unsafe { sys::cuDriverGetVersion(&mut version) };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    Some((version / 1000, version % 1000 / 10))
}

/// A program that uses the first GPU together with the store. Its context is current on this thread.
pub struct Caller {
    context: sys::CUcontext,
    /// Only one caller exists at a time, because the driver rejects calls of other threads during a graph
    /// capture.
    _alone: MutexGuard<'static, ()>,
}

// SAFETY: a context handle is only a number, which the driver accepts on any thread.
unsafe impl Sync for Caller {}

impl Caller {
    /// Returns a new caller, or prints a message and returns `None` if no GPU is present.
    pub fn new() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        device()?;
        let mut context = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, 0));
        let caller = Self { context, _alone: alone };
        caller.enter();
        Some(caller)
    }

    /// Makes the context current on this thread as well.
    pub fn enter(&self) {
        call!(cuCtxSetCurrent(self.context));
    }

    /// Creates a stream that does not wait for the default stream.
    pub fn stream(&self) -> Stream {
        let mut raw = std::ptr::null_mut();
        call!(cuStreamCreate(&mut raw, 1));
        Stream { raw }
    }

    /// Returns the default stream of the context.
    pub fn default_stream(&self) -> Stream {
        Stream { raw: std::ptr::null_mut() }
    }

    /// Allocates GPU memory filled with zeros.
    pub fn memory(&self, len: u64) -> Memory {
        let mut address = 0;
        call!(cuMemAlloc_v2(&mut address, len as usize));
        call!(cuMemsetD8_v2(address, 0, len as usize));
        Memory { address, len }
    }

    /// Returns the number of free bytes of GPU memory, as reported by the driver.
    pub fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total));
        free as u64
    }

    /// Returns true if the address is in memory that the driver allocated for this process.
    pub fn knows(&self, address: u64) -> bool {
        let mut kind = 0_u32;
        let requested = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: the context is current, and the pointer refers to a live value of the right type.
        let result = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), requested, address) };
        assert!(matches!(result, sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_INVALID_VALUE));
        result == sys::CUresult::CUDA_SUCCESS
    }
}

/// Length of a mapping in bytes. Every GPU supports this length.
pub const MAPPING_LEN: u64 = 2 << 20;

/// A reserved address range to which memory is mapped piece by piece, as an allocator of expandable segments
/// does.
pub struct Segment {
    pub address: u64,
    reserved_len: usize,
    mapped_len: usize,
    mappings: Vec<sys::CUmemGenericAllocationHandle>,
}

impl Caller {
    /// Reserves a range for `reserved` mappings, and maps the first `mapped` of them.
    pub fn segment(&self, mapped: usize, reserved: usize) -> Segment {
        const LEN: usize = MAPPING_LEN as usize;
        let mut address = 0;
        call!(cuMemAddressReserve(&mut address, reserved * LEN, 0, 0, 0));
        // SAFETY: all-zero bytes are a valid value of this struct.
        let mut wanted: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        wanted.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let map = |at: usize| {
            let mut mapping = 0;
            call!(cuMemCreate(&mut mapping, LEN, &wanted, 0));
            call!(cuMemMap(address + (at * LEN) as u64, LEN, 0, mapping, 0));
            mapping
        };
        let mappings = (0..mapped).map(map).collect();
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: wanted.location, flags };
        call!(cuMemSetAccess(address, mapped * LEN, &access, 1));
        Segment { address, reserved_len: reserved * LEN, mapped_len: mapped * LEN, mappings }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        call!(cuMemUnmap(self.address, self.mapped_len));
        self.mappings.iter().for_each(|mapping| call!(cuMemRelease(*mapping)));
        call!(cuMemAddressFree(self.address, self.reserved_len));
    }
}

/// Returns the bytes that the host reads at an address of GPU memory.
pub fn host_sees(address: u64, len: u64) -> Vec<u8> {
    // SAFETY: tests pass the memory of a host page that they have leased, and none of their kernels writes to
    // it.
    unsafe { std::slice::from_raw_parts(address as *const u8, len as usize) }.to_vec()
}

/// Caller-owned device memory.
pub struct Memory {
    pub address: u64,
    len: u64,
}

impl Memory {
    /// Returns the bytes of the memory.
    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0_u8; self.len as usize];
        call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address, bytes.len()));
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        call!(cuMemFree_v2(self.address));
    }
}

/// A stream of the caller.
pub struct Stream {
    raw: sys::CUstream,
}

impl Stream {
    /// Returns the stream in the form that the store accepts.
    pub fn raw(&self) -> RawStream {
        // SAFETY: the stream belongs to the first GPU's primary context, and tests drop it after the leases
        // of their stores.
        unsafe { RawStream::from_cuda(self.raw as u64) }
    }

    /// Queues a copy of `len` bytes on the stream.
    pub fn copy(&self, target: u64, source: u64, len: u64) {
        call!(cuMemcpyAsync(target, source, len as usize, self.raw));
    }

    /// Blocks the stream until [`Hold::let_go`] is called. Only for tests that run [`alone`].
    pub fn hold(&self) -> Hold {
        assert!(machine::is_alone(), "no other test may run while a stream stands still");
        let mut word = std::ptr::null_mut::<c_void>();
        call!(cuMemHostAlloc(&mut word, 4, 3));
        let hold = Hold { word: word.cast() };
        hold.set(0);
        // The stream waits until the word is at least 1.
        call!(cuStreamWaitValue32_v2(self.raw, word as u64, 1, 0));
        hold
    }

    /// Returns true if all work that was queued on the stream is complete.
    pub fn is_done(&self) -> bool {
        // SAFETY: the stream is live, and its context is current.
        let result = unsafe { sys::cuStreamQuery(self.raw) };
        assert!(matches!(result, sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY));
        result == sys::CUresult::CUDA_SUCCESS
    }

    pub fn synchronize(&self) {
        call!(cuStreamSynchronize(self.raw));
    }

    /// Starts a graph capture in global mode, the strictest one.
    pub fn capture(&self) -> Capture<'_> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        call!(cuStreamBeginCapture_v2(self.raw, mode));
        Capture { stream: self }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            call!(cuStreamDestroy_v2(self.raw));
        }
    }
}

/// The word in memory that a blocked stream waits for.
pub struct Hold {
    word: *mut u32,
}

impl Hold {
    /// Unblocks the stream.
    pub fn let_go(self) {
        self.set(1);
    }

    fn set(&self, value: u32) {
        // SAFETY: the word is in pinned host memory that is never freed.
        unsafe { self.word.write_volatile(value) };
    }
}

/// A running graph capture.
pub struct Capture<'s> {
    stream: &'s Stream,
}

impl Capture<'_> {
    /// Ends the capture, and returns the graph.
    pub fn end(self) -> Graph {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        call!(cuStreamEndCapture(self.stream.raw, &mut graph));
        call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        call!(cuGraphDestroy(graph));
        Graph { executable }
    }
}

/// A graph that can be launched.
pub struct Graph {
    executable: sys::CUgraphExec,
}

impl Graph {
    pub fn launch(&self, stream: &Stream) {
        call!(cuGraphLaunch(self.executable, stream.raw));
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        call!(cuGraphExecDestroy(self.executable));
    }
}
