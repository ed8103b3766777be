//! Streams and events. Each stream is a thread that executes its work after random delays.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::context::{self, Context};
use crate::memory::{self, Kind};
use crate::{Done, call_in_context, code};

/// The first handle of a created stream. Smaller handles are default streams.
const HANDLE_MIN: u64 = 0x1000;
/// Maximum delay before an item of work.
const LATE_MAX: Duration = Duration::from_micros(300);
/// One in this number of items of work is delayed.
const LATE_ONE_IN: u64 = 4;

/// An item of work in a stream's queue.
#[derive(Clone)]
pub enum Work {
    Launch {
        name: CString,
        blocks: u32,
        threads: u32,
        rows: u64,
        row_count: u32,
        pieces: u64,
    },
    Copy {
        target: u64,
        source: u64,
        len: usize,
    },
    /// A copy of bytes that the call has already copied, because the source memory was not pinned.
    CopyFrom {
        target: u64,
        bytes: Vec<u8>,
    },
    Write {
        address: u64,
        value: u64,
    },
    /// A call of a function of the program, which may wait for anything except the driver.
    HostFunction {
        function: extern "C" fn(*mut c_void),
        data: u64,
    },
    /// A prefetch of managed memory. It has no effect, because all memory is in one location.
    Prefetch,
    Record {
        event: Arc<Event>,
        number: u64,
    },
    Wait {
        event: Arc<Event>,
        number: u64,
    },
    /// A wait until a four-byte word is at least this value.
    WaitValue {
        address: u64,
        value: u32,
    },
}

/// A graph capture from a stream.
struct Capture {
    work: Vec<Work>,
    /// Whether the capture is in global mode, in which calls of any thread can invalidate the capture.
    is_global: bool,
    is_spoiled: bool,
}

struct Stream {
    context: &'static Context,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// The number of completed items of work.
    done: u64,
    is_running: bool,
    is_ending: bool,
    is_over: bool,
    capture: Option<Capture>,
}

/// An event: the number of times that it was recorded, and the newest record that a stream has reached.
pub struct Event {
    device: u32,
    numbers: Mutex<(u64, u64)>,
    changed: Condvar,
}

static STREAMS: Mutex<BTreeMap<u64, Arc<Stream>>> = Mutex::new(BTreeMap::new());
static EVENTS: Mutex<BTreeMap<u64, Arc<Event>>> = Mutex::new(BTreeMap::new());
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(HANDLE_MIN);
/// Number of copies from one GPU to another.
static PEER_COPIES: AtomicU64 = AtomicU64::new(0);

/// Returns the number of a device's streams and events that have not been destroyed.
pub fn alive(device: u32) -> u64 {
    let streams = STREAMS.lock().unwrap().values().filter(|stream| stream.context.device == device).count();
    let events = EVENTS.lock().unwrap().values().filter(|event| event.device == device).count();
    (streams + events) as u64
}

/// Returns the number of copies from one GPU to another.
pub fn peer_copies() -> u64 {
    PEER_COPIES.load(Ordering::Relaxed)
}

/// Waits until all streams of a device have completed the work that is queued now.
pub fn drain(device: u32) -> Done {
    let streams: Vec<_> = STREAMS.lock().unwrap().values().cloned().collect();
    for stream in streams.iter().filter(|stream| stream.context.device == device) {
        stream.catch_up()?;
    }
    Ok(())
}

/// Wakes the streams of a device, so that they notice that its context is lost.
pub fn wake(device: u32) {
    let streams: Vec<_> = STREAMS.lock().unwrap().values().cloned().collect();
    for stream in streams.iter().filter(|stream| stream.context.device == device) {
        // A stream that checked the context before the loss is now waiting, or holds this lock.
        drop(stream.queue.lock().unwrap());
        stream.changed.notify_all();
    }
}

/// Waits until the streams of a device with a lost context have stopped. Then removes the streams and the
/// device's events.
pub fn forget(device: u32) {
    let streams: BTreeMap<_, _> = {
        let mut streams = STREAMS.lock().unwrap();
        let (lost, others) = std::mem::take(&mut *streams)
            .into_iter()
            .partition(|(_, stream)| stream.context.device == device);
        *streams = others;
        lost
    };
    for (_, stream) in streams {
        let mut queue = stream.queue.lock().unwrap();
        while !queue.is_over {
            queue = stream.wait(queue);
        }
    }
    EVENTS.lock().unwrap().retain(|_, event| event.device != device);
}

/// Queues work. A default stream executes it in this call, after all work that is queued on other streams.
pub fn queue(context: &'static Context, handle: *mut c_void, work: Work) -> Done {
    let handle = handle as u64;
    if handle < HANDLE_MIN {
        drain(context.device)?;
        return work.run();
    }
    let stream = of(handle)?;
    if stream.context.device != context.device {
        return Err(code::INVALID_HANDLE);
    }
    let mut queue = stream.queue.lock().unwrap();
    match &mut queue.capture {
        Some(capture) => capture.work.push(work),
        None => queue.work.push_back(work),
    }
    stream.changed.notify_all();
    Ok(())
}

/// Waits until a stream has completed the work that is queued now.
pub fn synchronize(context: &'static Context, handle: *mut c_void) -> Done {
    let handle = handle as u64;
    if handle < HANDLE_MIN {
        return drain(context.device);
    }
    of(handle)?.catch_up()
}

/// Starts a graph capture: from now on, the stream records its work. In mode 0 (global), a call of another
/// thread can invalidate the capture.
pub fn begin_capture(handle: *mut c_void, mode: c_uint) -> Done {
    let stream = of(handle as u64)?;
    let mut queue = stream.queue.lock().unwrap();
    if queue.capture.is_some() {
        return Err(code::CAPTURE_UNSUPPORTED);
    }
    queue.capture = Some(Capture { work: Vec::new(), is_global: mode == 0, is_spoiled: false });
    Ok(())
}

/// Ends a capture and returns the recorded work.
pub fn end_capture(handle: *mut c_void) -> Result<Vec<Work>, u32> {
    let capture = of(handle as u64)?.queue.lock().unwrap().capture.take();
    let capture = capture.ok_or(code::INVALID_VALUE)?;
    if capture.is_spoiled { Err(code::CAPTURE_INVALIDATED) } else { Ok(capture.work) }
}

/// Rejects a call that may wait while a graph is being captured, and invalidates that capture, unless the
/// thread's capture mode allows such calls.
pub fn refuse_in_capture() -> Done {
    if context::is_relaxed() {
        return Ok(());
    }
    let streams: Vec<_> = STREAMS.lock().unwrap().values().cloned().collect();
    let mut refused = Ok(());
    for stream in streams {
        let mut queue = stream.queue.lock().unwrap();
        if let Some(capture) = queue.capture.as_mut().filter(|capture| capture.is_global) {
            capture.is_spoiled = true;
            refused = Err(code::CAPTURE_UNSUPPORTED);
        }
    }
    refused
}

fn of(handle: u64) -> Result<Arc<Stream>, u32> {
    STREAMS.lock().unwrap().get(&handle).cloned().ok_or(code::INVALID_HANDLE)
}

fn event_of(handle: *mut c_void) -> Result<Arc<Event>, u32> {
    EVENTS.lock().unwrap().get(&(handle as u64)).cloned().ok_or(code::INVALID_HANDLE)
}

impl Stream {
    fn wait<'q>(&self, queue: MutexGuard<'q, Queue>) -> MutexGuard<'q, Queue> {
        self.changed.wait(queue).unwrap()
    }

    /// Waits until all work that is queued now is completed. More work may be queued in the meantime.
    fn catch_up(&self) -> Done {
        let mut queue = self.queue.lock().unwrap();
        let wanted = queue.done + queue.work.len() as u64 + u64::from(queue.is_running);
        while queue.done < wanted {
            self.context.check()?;
            queue = self.wait(queue);
        }
        Ok(())
    }

    fn run(&self, mut random: u64) {
        let mut queue = self.queue.lock().unwrap();
        loop {
            // The queued work of a lost context is never executed.
            if self.context.check().is_err() || (queue.is_ending && queue.work.is_empty()) {
                queue.is_over = true;
                self.changed.notify_all();
                return;
            }
            if queue.work.is_empty() {
                queue = self.wait(queue);
                continue;
            }
            let work = queue.work.pop_front().expect("looked at just now");
            queue.is_running = true;
            drop(queue);
            let drawn = next(&mut random);
            if drawn.is_multiple_of(LATE_ONE_IN) {
                be_late(LATE_MAX.mul_f64((drawn >> 32) as f64 / f64::from(u32::MAX)));
            }
            if let Err(code) = self.do_work(work) {
                self.context.lose(code);
            }
            queue = self.queue.lock().unwrap();
            queue.is_running = false;
            queue.done += 1;
            self.changed.notify_all();
        }
    }

    fn do_work(&self, work: Work) -> Done {
        if let Work::Wait { event, number } = &work {
            let mut numbers = event.numbers.lock().unwrap();
            while numbers.1 < *number {
                self.context.check()?;
                numbers = event.changed.wait_timeout(numbers, Duration::from_millis(1)).unwrap().0;
            }
            return Ok(());
        }
        if let Work::WaitValue { address, value } = work {
            // SAFETY: the address was checked when the wait was queued. A thread that frees the memory first
            // waits for the stream.
            let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            while word.load(Ordering::SeqCst) < value {
                self.context.check()?;
                be_late(LATE_MAX);
            }
            return Ok(());
        }
        self.context.check()?;
        work.run()
    }
}

impl Work {
    fn run(self) -> Done {
        match self {
            Work::Launch { name, blocks, threads, rows, row_count, pieces } => {
                let (mut rows, mut row_count, mut pieces) = (rows, row_count, pieces);
                let mut arguments =
                    [(&raw mut rows).cast(), (&raw mut row_count).cast(), (&raw mut pieces).cast()];
                // SAFETY: the arguments match the kernel's signature, and the caller guarantees that the
                // addresses in them are valid. A fault is reported.
                let launched = unsafe {
                    kernels_on_cpu::launch_by_name(
                        &name,
                        blocks,
                        threads,
                        &mut arguments,
                        rows ^ u64::from(blocks),
                    )
                };
                launched.map_err(|_fault| code::ILLEGAL_ADDRESS)
            }
            Work::Copy { target, source, len } => {
                // SAFETY: both ranges were checked when the copy was queued, and stay valid until it is done.
                unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, len) };
                Ok(())
            }
            Work::CopyFrom { target, bytes } => {
                // SAFETY: the range was checked when the copy was queued.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target as *mut u8, bytes.len()) };
                Ok(())
            }
            Work::Write { address, value } => {
                // SAFETY: the address was checked when the write was queued. Earlier work becomes visible
                // with the value.
                unsafe { AtomicU64::from_ptr(address as *mut u64) }.store(value, Ordering::SeqCst);
                Ok(())
            }
            Work::HostFunction { function, data } => {
                function(data as *mut c_void);
                Ok(())
            }
            Work::Prefetch => Ok(()),
            Work::Record { event, number } => {
                let mut numbers = event.numbers.lock().unwrap();
                numbers.1 = numbers.1.max(number);
                event.changed.notify_all();
                Ok(())
            }
            // A default stream has already waited for all other streams, and never waits for a word in
            // memory.
            Work::Wait { .. } => Ok(()),
            Work::WaitValue { .. } => Err(code::INVALID_HANDLE),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "being late is what this is for")]
fn be_late(time: Duration) {
    thread::sleep(time);
}

/// Returns the next number of a SplitMix64 generator.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut *mut c_void,
    _flags: c_uint,
    _priority: c_int,
) -> u32 {
    call_in_context(|context| {
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        let made = Arc::new(Stream { context, queue: Mutex::default(), changed: Condvar::new() });
        STREAMS.lock().unwrap().insert(handle, made.clone());
        thread::Builder::new()
            .name("stream of a fake driver".to_owned())
            .spawn(move || made.run(handle))
            .expect("a thread for a stream");
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *stream = handle as *mut c_void };
        Ok(())
    })
}

/// Destroys a stream without waiting. The stream first executes its queued work.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> u32 {
    call_in_context(|_| {
        let stream = STREAMS.lock().unwrap().remove(&(stream as u64)).ok_or(code::INVALID_HANDLE)?;
        stream.queue.lock().unwrap().is_ending = true;
        stream.changed.notify_all();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: *mut c_void) -> u32 {
    call_in_context(|_| {
        let stream = of(stream as u64)?;
        let queue = stream.queue.lock().unwrap();
        if queue.is_running || !queue.work.is_empty() { Err(code::NOT_READY) } else { Ok(()) }
    })
}

/// Returns the state of a graph capture from the stream: 0 if there is none, 1 if it is active, or 2 if it
/// was invalidated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_uint) -> u32 {
    call_in_context(|_| {
        let mut found = 0;
        if stream as u64 >= HANDLE_MIN
            && let Some(capture) = &of(stream as u64)?.queue.lock().unwrap().capture
        {
            found = if capture.is_spoiled { 2 } else { 1 };
        }
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *status = found };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> u32 {
    call_in_context(|context| {
        let event = event_of(event)?;
        let number = event.numbers.lock().unwrap().0;
        queue(context, stream, Work::Wait { event, number })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue64_v2(
    stream: *mut c_void,
    address: u64,
    value: u64,
    _flags: c_uint,
) -> u32 {
    call_in_context(|context| {
        if memory::kind_of(address, 8).is_none() || !address.is_multiple_of(8) {
            return Err(code::INVALID_VALUE);
        }
        queue(context, stream, Work::Write { address, value })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> u32 {
    call_in_context(|context| {
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        let made = Event { device: context.device, numbers: Mutex::default(), changed: Condvar::new() };
        EVENTS.lock().unwrap().insert(handle, Arc::new(made));
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *event = handle as *mut c_void };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> u32 {
    call_in_context(|context| {
        let event = event_of(event)?;
        let number = {
            let mut numbers = event.numbers.lock().unwrap();
            numbers.0 += 1;
            numbers.0
        };
        queue(context, stream, Work::Record { event, number })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: *mut c_void) -> u32 {
    call_in_context(|_| {
        refuse_in_capture()?;
        let event = event_of(event)?;
        let (recorded, passed) = *event.numbers.lock().unwrap();
        if passed < recorded { Err(code::NOT_READY) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> u32 {
    call_in_context(|_| EVENTS.lock().unwrap().remove(&(event as u64)).map(drop).ok_or(code::INVALID_HANDLE))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    target: u64,
    source: *const c_void,
    len: usize,
    stream: *mut c_void,
) -> u32 {
    call_in_context(|context| {
        if !matches!(memory::kind_of(target, len), Some(Kind::Device | Kind::Managed)) {
            return Err(code::INVALID_VALUE);
        }
        if memory::kind_of(source as u64, len) == Some(Kind::Pinned) {
            return queue(context, stream, Work::Copy { target, source: source as u64, len });
        }
        // SAFETY: the API requires the caller to pass valid pointers.
        let bytes = unsafe { std::slice::from_raw_parts(source.cast::<u8>(), len) }.to_vec();
        queue(context, stream, Work::CopyFrom { target, bytes })
    })
}

/// Copies to the host. If the host memory is not pinned, the copy is complete when the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    target: *mut c_void,
    source: u64,
    len: usize,
    stream: *mut c_void,
) -> u32 {
    call_in_context(|context| {
        if !matches!(memory::kind_of(source, len), Some(Kind::Device | Kind::Managed)) {
            return Err(code::INVALID_VALUE);
        }
        let is_pinned = memory::kind_of(target as u64, len) == Some(Kind::Pinned);
        queue(context, stream, Work::Copy { target: target as u64, source, len })?;
        if is_pinned { Ok(()) } else { drain(context.device) }
    })
}

/// Copies within the memory of one GPU.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, len: usize, stream: *mut c_void) -> u32 {
    call_in_context(|context| {
        let is_right = [target, source].into_iter().all(|at| memory::is_of_device(at, len, context.device));
        if !is_right {
            return Err(code::INVALID_VALUE);
        }
        queue(context, stream, Work::Copy { target, source, len })
    })
}

/// Copies to another GPU. Fails if peer access was not enabled. The real driver would then copy through the
/// host, and the store must never request such a copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeerAsync(
    target: u64,
    to: *mut c_void,
    source: u64,
    from: *mut c_void,
    len: usize,
    stream: *mut c_void,
) -> u32 {
    call_in_context(|context| {
        // SAFETY: the handle is null or was created by this driver, which never destroys contexts.
        let to = unsafe { to.cast::<Context>().as_ref() }.ok_or(code::INVALID_CONTEXT)?;
        // SAFETY: as above.
        let from = unsafe { from.cast::<Context>().as_ref() }.ok_or(code::INVALID_CONTEXT)?;
        let is_right = to.device == context.device
            && memory::is_of_device(target, len, to.device)
            && memory::is_of_device(source, len, from.device);
        if !is_right || !context::has_access(to.device, from.device) {
            return Err(code::INVALID_VALUE);
        }
        PEER_COPIES.fetch_add(1, Ordering::Relaxed);
        queue(context, stream, Work::Copy { target, source, len })
    })
}
