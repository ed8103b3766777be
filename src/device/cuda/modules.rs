//! The compiled kernels, embedded.
//!
//! `kernels/build.py` makes them; `tests/it/kernels.rs` holds them against their sources. Machine code for
//! the newest architecture spares a driver the quarter of a second that translating takes; PTX serves all
//! others from compute capability 8.0 on.

/// The compiled forms of one `.cu` file.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// The file's name without its ending.
    pub name: &'static str,
    /// For every GPU of compute capability 8.0 and above, and every driver of CUDA 12.4 and above.
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

/// All modules. A [`Kernel`](super::abi::Kernel) names its module by the index here.
pub const MODULES: [Module; 6] = [
    module!("apply"),
    module!("crc"),
    module!("diff"),
    module!("digest"),
    module!("select"),
    module!("validate"),
];
