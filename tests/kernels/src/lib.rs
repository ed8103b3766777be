//! Launches the kernels of `kernels/*.cu` on the CPU.
//!
//! The same files that become PTX are compiled as C++ (`build.rs`, `machine.h`) and run by fibers
//! (`machine.cpp`), in an order that a seed decides. Addresses in tables are ordinary addresses.

use std::ffi::{CString, c_char, c_int, c_void};
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

/// The machine runs one launch at a time.
static MACHINE: Mutex<()> = Mutex::new(());

/// Launches a kernel that reads one table.
///
/// # Safety
/// Every address in the rows is valid for what the kernel does with it, and the rows are of the type that it
/// reads.
pub unsafe fn launch<Row>(kernel: Kernel, rows: &[Row], seed: u64) {
    // SAFETY: passed on; such a kernel reads no third argument.
    unsafe { launch_with(kernel, rows.as_ptr().cast(), rows.len(), std::ptr::null(), seed) }
}

/// Launches a kernel that applies pieces.
///
/// # Safety
/// Every address in the pieces is valid for what the kernel does with it, and the parts name pieces that are
/// there.
pub unsafe fn launch_apply(kernel: Kernel, parts: &[PartRow], pieces: &[PieceRow], seed: u64) {
    // SAFETY: passed on.
    unsafe { launch_with(kernel, parts.as_ptr().cast(), parts.len(), pieces.as_ptr().cast(), seed) }
}

/// # Safety
/// As those two say.
unsafe fn launch_with(kernel: Kernel, rows: *const c_void, count: usize, pieces: *const c_void, seed: u64) {
    let name = CString::new(kernel.name).expect("a name without a zero byte");
    let (mut rows, mut count, mut pieces) = (rows, count as u32, pieces);
    let mut arguments = [(&raw mut rows).cast(), (&raw mut count).cast(), (&raw mut pieces).cast()];
    let _machine = MACHINE.lock();
    // SAFETY: the arguments live until the call returns, which is when the kernel is done; what they point to
    // is the caller's promise.
    let result = unsafe {
        launch_on_cpu(name.as_ptr(), kernel.grid(count), kernel.threads, arguments.as_mut_ptr(), seed)
    };
    assert_eq!(result, 0, "there is no kernel {}", kernel.name);
}
