//! The compiled kernels, embedded in the library.
//!
//! `kernels/build.py` compiles them, and `tests/it/kernels.rs` checks that they match their sources. Machine code for
//! the newest architecture saves the driver a translation of a quarter of a second. PTX supports all other
//! architectures from compute capability 8.0.

/// The compiled forms of one `.cu` file.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// The file's name without its extension.
    pub name: &'static str,
    /// PTX for every GPU of compute capability 8.0 or later, and every driver of CUDA 12.4 or later.
    pub ptx: &'static str,
    /// Machine code for GPUs of compute capability 9.x.
    pub cubin_sm_90: &'static [u8],
}

macro_rules! module {
    ($name:literal) => {
        Module {
            name: $name,
            ptx: include_str!(concat!("../../../kernels/compiled/", $name, ".compute_80.ptx")),
            cubin_sm_90: include_bytes!(concat!("../../../kernels/compiled/", $name, ".sm_90.cubin")),
        }
    };
}

/// All modules. A [`Kernel`](super::abi::Kernel) refers to its module by its index in this array.
pub const MODULES: [Module; 6] = [
    module!("apply"),
    module!("crc"),
    module!("diff"),
    module!("digest"),
    module!("select"),
    module!("validate"),
];
