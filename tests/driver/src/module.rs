//! Modules and functions. Kernels run on the CPU, so the driver only searches a module image for the kernel's
//! name.

use std::ffi::{CStr, CString, c_char, c_uint, c_void};

use crate::stream::{self, Work};
use crate::{call_in_context, code};

/// Maximum number of image bytes that are read if the end of the image cannot be determined.
const IMAGE_LEN_MAX: usize = 1 << 20;

/// A kernel, identified by its name.
struct Function(CString);

/// Returns the length of an image: PTX text up to its zero byte, or a cubin up to the end of its headers.
unsafe fn image_len(image: *const u8) -> usize {
    // SAFETY: an image of either form is longer than this.
    let head = unsafe { std::slice::from_raw_parts(image, 64) };
    if !head.starts_with(b"\x7fELF") {
        // SAFETY: the caller passes text that ends in a zero byte.
        return unsafe { CStr::from_ptr(image.cast()) }.to_bytes().len();
    }
    let number =
        |at: usize, len: usize| head[at..at + len].iter().rfold(0, |sum, byte| sum << 8 | *byte as usize);
    // The tables of sections and of segments are at the end of the file. Each triple contains the positions
    // of the table's offset, entry length and count.
    let ends = [(0x28, 0x3a, 0x3c), (0x20, 0x36, 0x38)];
    ends.map(|(at, len, count)| number(at, 8) + number(len, 2) * number(count, 2))
        .into_iter()
        .max()
        .unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> u32 {
    call_in_context(|_| {
        // SAFETY: the API requires the caller to pass valid pointers.
        let len = unsafe { image_len(image.cast()) };
        if len == 0 || len > IMAGE_LEN_MAX {
            return Err(code::INVALID_IMAGE);
        }
        // SAFETY: the image has this length.
        let bytes = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), len) }.to_vec();
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *module = Box::into_raw(Box::new(bytes)).cast() };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> u32 {
    call_in_context(|_| {
        // SAFETY: the handle is null or was created above, and modules are never freed.
        let image = unsafe { module.cast::<Vec<u8>>().as_ref() }.ok_or(code::INVALID_HANDLE)?;
        // SAFETY: the API requires the caller to pass valid pointers.
        let name = unsafe { CStr::from_ptr(name) };
        if !image.windows(name.count_bytes()).any(|window| window == name.to_bytes()) {
            return Err(code::NOT_FOUND);
        }
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *function = Box::into_raw(Box::new(Function(name.to_owned()))).cast() };
        Ok(())
    })
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "as many as CUDA's")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    call_in_context(|context| {
        // SAFETY: the handle is null or was created above, and functions are never freed.
        let Function(name) = unsafe { function.cast::<Function>().as_ref() }.ok_or(code::INVALID_HANDLE)?;
        if (grid_y, grid_z, block_y, block_z, shared_bytes) != (1, 1, 1, 1, 0) || grid_x == 0 || block_x == 0
        {
            return Err(code::INVALID_VALUE);
        }
        // Copy the parameters before the call returns. All kernels take a table and the number of its rows,
        // and some take another table.
        // SAFETY: the caller passes parameters that match the signatures of the existing kernels.
        let rows = unsafe { (*parameters).cast::<u64>().read_unaligned() };
        // SAFETY: as above.
        let row_count = unsafe { (*parameters.add(1)).cast::<u32>().read_unaligned() };
        // SAFETY: as above.
        let has_pieces = name.to_bytes().starts_with(b"apply").then(|| unsafe { *parameters.add(2) });
        // SAFETY: as above.
        let pieces = has_pieces.map_or(0, |pieces| unsafe { pieces.cast::<u64>().read_unaligned() });
        stream::queue(
            context,
            stream,
            Work::Launch { name: name.clone(), blocks: grid_x, threads: block_x, rows, row_count, pieces },
        )
    })
}
