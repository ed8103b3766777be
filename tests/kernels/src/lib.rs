//! Launches the kernels of `kernels/*.cu` on the CPU.
//!
//! The source files that are compiled to PTX are compiled here as C++ (`build.rs`, `machine.h`). Each GPU
//! thread is a fiber (`machine.cpp`), and a seed determines the order in which the fibers run. Addresses in
//! tables are ordinary addresses.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Mutex;

use remanent::device::cuda::abi::{Kernel, PartRow, PieceRow};

unsafe extern "C" {
    fn launch_on_cpu(
        name: *const c_char,
        blocks: u32,
        threads: u32,
        arguments: *mut *mut c_void,
        seed: u64,
    ) -> c_int;
}

/// Locked during a launch, because the simulator executes one launch at a time.
static MACHINE: Mutex<()> = Mutex::new(());

/// Launches a kernel that reads one table.
///
/// # Safety
/// Every address in the rows must be valid for the kernel's accesses, and the rows must have the type that
/// the kernel reads.
pub unsafe fn launch<Row>(kernel: Kernel, rows: &[Row], seed: u64) {
    // SAFETY: the caller upholds the contract of the called function, and such a kernel reads no third
    // argument.
    unsafe { launch_with(kernel, rows.as_ptr().cast(), rows.len(), std::ptr::null(), seed) }
}

/// Launches a kernel that applies pieces.
///
/// # Safety
/// Every address in the pieces must be valid for the kernel's accesses, and the parts must refer to existing
/// pieces.
pub unsafe fn launch_apply(kernel: Kernel, parts: &[PartRow], pieces: &[PieceRow], seed: u64) {
    // SAFETY: the caller upholds the contract of the called function.
    unsafe { launch_with(kernel, parts.as_ptr().cast(), parts.len(), pieces.as_ptr().cast(), seed) }
}

/// A kernel accessed unmapped memory. Its earlier writes remain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IllegalAddress;

/// Launches a kernel as a driver does: by its name, with pointers to the values of its arguments.
///
/// # Errors
/// Returns [`IllegalAddress`] if the kernel accesses unmapped memory.
///
/// # Panics
/// Panics if there is no kernel with this name.
///
/// # Safety
/// The arguments must match the kernel's signature, and every address in them must be valid for the kernel's
/// accesses, or unmapped.
pub unsafe fn launch_by_name(
    name: &CStr,
    blocks: u32,
    threads: u32,
    arguments: &mut [*mut c_void],
    seed: u64,
) -> Result<(), IllegalAddress> {
    let _machine = MACHINE.lock();
    // SAFETY: the arguments live until the call returns, and the kernel has ended by then. The caller
    // guarantees the addresses in the arguments.
    match unsafe { launch_on_cpu(name.as_ptr(), blocks, threads, arguments.as_mut_ptr(), seed) } {
        0 => Ok(()),
        -2 => Err(IllegalAddress),
        _ => panic!("there is no kernel {name:?}"),
    }
}

/// Launches a kernel of the store with the grid that its number of rows requires.
///
/// # Safety
/// The requirements of [`launch`] and [`launch_apply`] apply.
unsafe fn launch_with(kernel: Kernel, rows: *const c_void, count: usize, pieces: *const c_void, seed: u64) {
    let name = CString::new(kernel.name).expect("a name without a zero byte");
    let (mut rows, mut count, mut pieces) = (rows, count as u32, pieces);
    let mut arguments = [(&raw mut rows).cast(), (&raw mut count).cast(), (&raw mut pieces).cast()];
    let (blocks, threads) = (kernel.grid(count), kernel.threads);
    // SAFETY: the caller upholds the contract of the called function.
    let launched = unsafe { launch_by_name(&name, blocks, threads, &mut arguments, seed) };
    launched.expect("all addresses are valid");
}
