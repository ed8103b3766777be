//! Host, device and managed memory. All of it is host memory, at addresses that the host and the "GPU" share.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{call_in_context, code, stream};

/// Length of each device's memory in bytes.
const DEVICE_BYTES: usize = 1 << 30;
/// Maximum number of pinned bytes that can be allocated for each device.
const PINNED_BYTES: usize = 4 << 30;
/// The alignment of the real driver's allocations.
const ALIGN: usize = 512;
/// The byte that fills newly allocated memory.
const JUNK: u8 = 0xCD;
const FREED: u8 = 0xDD;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Device,
    Managed,
    Pinned,
}

struct Allocation {
    len: usize,
    kind: Kind,
    device: u32,
    /// Whether this is registered caller-owned memory.
    is_registered: bool,
    /// Whether this is a mapping in a reserved address range.
    is_mapping: bool,
}

/// Alignment of the lengths of mappings, in bytes.
const MAPPING_ALIGN: usize = 2 << 20;

/// The error code with which registrations of memory fail, or 0 if they succeed.
static REGISTER_REFUSAL: AtomicU32 = AtomicU32::new(0);

/// Makes all later registrations fail with `code`, or succeed again if `code` is 0.
pub fn refuse_registrations(code: u32) {
    REGISTER_REFUSAL.store(code, Ordering::Relaxed);
}

static ALLOCATIONS: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());
/// Lengths of the reserved address ranges, keyed by their first address.
static RESERVED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Returns the number of a device's allocations that have not been freed.
pub fn alive(device: u32) -> u64 {
    ALLOCATIONS.lock().unwrap().values().filter(|allocation| allocation.device == device).count() as u64
}

/// Returns the kind of memory that contains the range, or `None` if the driver neither allocated nor
/// registered it.
pub fn kind_of(address: u64, len: usize) -> Option<Kind> {
    let allocations = ALLOCATIONS.lock().unwrap();
    let (begin, allocation) = allocations.range(..=address).next_back()?;
    (address + len as u64 <= end_of(&allocations, *begin, allocation)).then_some(allocation.kind)
}

/// Returns the end of the memory that contains `begin`. Adjacent mappings count as one region.
fn end_of(allocations: &BTreeMap<u64, Allocation>, begin: u64, allocation: &Allocation) -> u64 {
    let mut end = begin + allocation.len as u64;
    while allocation.is_mapping
        && let Some(next) =
            allocations.get(&end).filter(|next| next.is_mapping && next.device == allocation.device)
    {
        end += next.len as u64;
    }
    end
}

/// Returns true if the range is memory of this device.
pub fn is_of_device(address: u64, len: usize, device: u32) -> bool {
    let allocations = ALLOCATIONS.lock().unwrap();
    let found = allocations.range(..=address).next_back();
    found.is_some_and(|(begin, found)| {
        let within = address + len as u64 <= end_of(&allocations, *begin, found);
        within && found.kind == Kind::Device && found.device == device
    })
}

fn used(allocations: &BTreeMap<u64, Allocation>, device: u32, pinned: bool) -> usize {
    let counted =
        |allocation: &&Allocation| allocation.device == device && (allocation.kind == Kind::Pinned) == pinned;
    allocations.values().filter(counted).map(|allocation| allocation.len).sum()
}

fn allocate(device: u32, kind: Kind, len: usize) -> Result<u64, u32> {
    if len == 0 {
        return Err(code::INVALID_VALUE);
    }
    let pinned = kind == Kind::Pinned;
    let limit = if pinned { PINNED_BYTES } else { DEVICE_BYTES };
    let mut allocations = ALLOCATIONS.lock().unwrap();
    if len > limit - used(&allocations, device, pinned) {
        return Err(code::OUT_OF_MEMORY);
    }
    let layout = Layout::from_size_align(len, ALIGN).map_err(|_| code::OUT_OF_MEMORY)?;
    // SAFETY: the layout is not empty.
    let bytes = unsafe { std::alloc::alloc(layout) };
    assert!(!bytes.is_null(), "memory for {len} bytes");
    // SAFETY: the bytes were allocated above.
    unsafe { bytes.write_bytes(JUNK, len) };
    allocations
        .insert(bytes as u64, Allocation { len, kind, device, is_registered: false, is_mapping: false });
    Ok(bytes as u64)
}

/// Frees memory after all queued work of the device, as the real driver does.
fn free(device: u32, address: u64, is_kind: impl Fn(Kind) -> bool) -> Result<(), u32> {
    stream::refuse_in_capture()?;
    stream::drain(device)?;
    let mut allocations = ALLOCATIONS.lock().unwrap();
    let is_it = |found: &&Allocation| {
        found.device == device && is_kind(found.kind) && !found.is_registered && !found.is_mapping
    };
    let found = allocations.get(&address).filter(is_it);
    let len = found.ok_or(code::INVALID_VALUE)?.len;
    allocations.remove(&address);
    deallocate(address, len);
    Ok(())
}

/// Frees all memory of a device whose context is lost, after its streams have stopped.
pub fn forget(device: u32) {
    let mut allocations = ALLOCATIONS.lock().unwrap();
    allocations.retain(|address, allocation| {
        let stays = allocation.device != device;
        if !stays && !allocation.is_registered && !allocation.is_mapping {
            deallocate(*address, allocation.len);
        }
        stays
    });
}

fn deallocate(address: u64, len: usize) {
    let layout = Layout::from_size_align(len, ALIGN).expect("allocated by it");
    let bytes = address as *mut u8;
    // SAFETY: `allocate` allocated the bytes, they are not freed yet, and no queued work uses them.
    unsafe { bytes.write_bytes(FREED, len) };
    // SAFETY: `allocate` allocated the bytes with this layout.
    unsafe { std::alloc::dealloc(bytes, layout) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    call_in_context(|context| {
        let used = used(&ALLOCATIONS.lock().unwrap(), context.device, false);
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *free = DEVICE_BYTES - used };
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *total = DEVICE_BYTES };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> u32 {
    call_in_context(|context| {
        stream::refuse_in_capture()?;
        let allocated = allocate(context.device, Kind::Device, len)?;
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *address = allocated };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocManaged(address: *mut u64, len: usize, _flags: c_uint) -> u32 {
    call_in_context(|context| {
        stream::refuse_in_capture()?;
        let allocated = allocate(context.device, Kind::Managed, len)?;
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *address = allocated };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, len: usize, _flags: c_uint) -> u32 {
    call_in_context(|context| {
        stream::refuse_in_capture()?;
        let allocated = allocate(context.device, Kind::Pinned, len)?;
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *address = allocated as *mut c_void };
        Ok(())
    })
}

/// Accepts advice for managed memory, without any effect, because all memory is in one location.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAdvise(address: u64, len: usize, advice: c_uint, device: c_int) -> u32 {
    call_in_context(|context| {
        let is_known = (1..=6).contains(&advice) && (device == -1 || device == context.device as c_int);
        if len == 0 || !is_known || kind_of(address, len) != Some(Kind::Managed) {
            return Err(code::INVALID_VALUE);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPrefetchAsync(address: u64, len: usize, target: c_int, stream: *mut c_void) -> u32 {
    call_in_context(|context| {
        let is_known = target == -1 || target == context.device as c_int;
        if len == 0 || !is_known || kind_of(address, len) != Some(Kind::Managed) {
            return Err(code::INVALID_VALUE);
        }
        stream::queue(context, stream, stream::Work::Prefetch)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    call_in_context(|context| free(context.device, address, |kind| kind != Kind::Pinned))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: *mut c_void) -> u32 {
    call_in_context(|context| free(context.device, address as u64, |kind| kind == Kind::Pinned))
}

/// Pins caller-owned memory. The range must consist of whole pages, as a mapped file does.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(address: *mut c_void, len: usize, _flags: c_uint) -> u32 {
    call_in_context(|context| {
        stream::refuse_in_capture()?;
        match REGISTER_REFUSAL.load(Ordering::Relaxed) {
            0 => {}
            refusal => return Err(refusal),
        }
        let begin = address as u64;
        if len == 0 || !begin.is_multiple_of(4096) {
            return Err(code::INVALID_VALUE);
        }
        let mut allocations = ALLOCATIONS.lock().unwrap();
        let before = allocations.range(..begin + len as u64).next_back();
        if before.is_some_and(|(other, found)| other + found.len as u64 > begin) {
            return Err(code::HOST_ALREADY_REGISTERED);
        }
        let device = context.device;
        allocations.insert(
            begin,
            Allocation { len, kind: Kind::Pinned, device, is_registered: true, is_mapping: false },
        );
        Ok(())
    })
}

/// Unpins registered memory. Waits for all queued work of the device, although the store never relies on this
/// wait.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(address: *mut c_void) -> u32 {
    call_in_context(|context| {
        stream::refuse_in_capture()?;
        stream::drain(context.device)?;
        let mut allocations = ALLOCATIONS.lock().unwrap();
        match allocations.get(&(address as u64)) {
            Some(found) if found.is_registered => {
                allocations.remove(&(address as u64));
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    })
}

/// Returns an attribute of the allocation that contains an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: u64) -> u32 {
    call_in_context(|_| {
        let allocations = ALLOCATIONS.lock().unwrap();
        let found = allocations.range(..=address).next_back();
        let (begin, found) =
            found.filter(|(begin, found)| address < **begin + found.len as u64).ok_or(code::INVALID_VALUE)?;
        let (answer, len) = match attribute {
            // The memory type: host or device.
            2 => (if found.kind == Kind::Pinned { 1 } else { 2 }, 4),
            // Whether the memory is managed, and the device of the memory.
            8 => (u64::from(found.kind == Kind::Managed), 4),
            9 => (u64::from(found.device), 4),
            // Whether the memory can be exported to other processes. Mappings cannot be exported.
            10 => (u64::from(!found.is_mapping && found.kind == Kind::Device), 4),
            // Start and length of the allocation, or of the reserved range that contains a mapping.
            11 => (reserved(*begin, found).0, 8),
            12 => (reserved(*begin, found).1, 8),
            // Length and start of the mapping.
            18 if found.is_mapping => (found.len as u64, 8),
            19 if found.is_mapping => (*begin, 8),
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller passes a buffer of `len` bytes, as this attribute requires.
        unsafe { value.cast::<u8>().copy_from(answer.to_le_bytes().as_ptr(), len) };
        Ok(())
    })
}

/// Returns the start and length of the reserved range that contains the memory.
fn reserved(begin: u64, found: &Allocation) -> (u64, u64) {
    let within =
        RESERVED.lock().unwrap().range(..=begin).next_back().map(|(start, len)| (*start, *len as u64));
    within.filter(|_| found.is_mapping).unwrap_or((begin, found.len as u64))
}

/// Reserves an address range. The range cannot be accessed until memory is mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    len: usize,
    _align: usize,
    _wanted: u64,
    _flags: u64,
) -> u32 {
    call_in_context(|_| {
        let layout = reserved_layout(len)?;
        // SAFETY: the layout is not empty.
        let bytes = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!bytes.is_null(), "memory for {len} bytes");
        RESERVED.lock().unwrap().insert(bytes as u64, len);
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *address = bytes as u64 };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(address: u64, len: usize) -> u32 {
    call_in_context(|_| {
        let layout = reserved_layout(len)?;
        let allocations = ALLOCATIONS.lock().unwrap();
        if allocations.range(address..address + len as u64).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        RESERVED.lock().unwrap().remove(&address).ok_or(code::INVALID_VALUE)?;
        // SAFETY: the range was reserved with this layout, and no memory is mapped in it.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        Ok(())
    })
}

fn reserved_layout(len: usize) -> Result<Layout, u32> {
    if len == 0 || !len.is_multiple_of(MAPPING_ALIGN) {
        return Err(code::INVALID_VALUE);
    }
    Layout::from_size_align(len, MAPPING_ALIGN).map_err(|_| code::OUT_OF_MEMORY)
}

/// Allocates device memory without an address. The handle is the number of the device plus one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(handle: *mut u64, len: usize, wanted: *const c_int, _flags: u64) -> u32 {
    call_in_context(|_| {
        if !len.is_multiple_of(MAPPING_ALIGN) {
            return Err(code::INVALID_VALUE);
        }
        // The number of the device is the fourth word of the requested properties.
        // SAFETY: the API requires the caller to pass valid pointers.
        let device = unsafe { *wanted.add(3) };
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *handle = device as u64 + 1 };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(address: u64, len: usize, _offset: usize, handle: u64, _flags: u64) -> u32 {
    call_in_context(|_| {
        let device = (handle - 1) as u32;
        let mapping = Allocation { len, kind: Kind::Device, device, is_registered: false, is_mapping: true };
        let before = ALLOCATIONS.lock().unwrap().insert(address, mapping);
        if before.is_some() { Err(code::INVALID_VALUE) } else { Ok(()) }
    })
}

/// Does nothing, because every mapping can always be read and written.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(address: u64, len: usize, _access: *const c_void, _count: usize) -> u32 {
    call_in_context(|_| kind_of(address, len).map(drop).ok_or(code::INVALID_VALUE))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(address: u64, len: usize) -> u32 {
    call_in_context(|context| {
        stream::drain(context.device)?;
        let mut allocations = ALLOCATIONS.lock().unwrap();
        allocations.retain(|at, found| !found.is_mapping || !(address..address + len as u64).contains(at));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(_handle: u64) -> u32 {
    call_in_context(|_| Ok(()))
}
