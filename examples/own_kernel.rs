//! A caller's kernel changes a page on a GPU, and the store logs the change.
//!
//! ```sh
//! cargo run --example own_kernel
//! ```
//!
//! A caller never writes to a page directly. Its kernel writes to a *working copy*, and a capture logs the
//! difference before it changes the page. Without a GPU, the example prints a message and succeeds.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

#[cfg(feature = "cuda")]
fn main() -> remanent::Result<()> {
    gpu::run()
}

#[cfg(not(feature = "cuda"))]
fn main() {
    eprintln!("SKIPPED: this build is without the feature `cuda`");
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::ffi::c_void;
    use std::ptr;

    use cudarc::driver::sys;
    use remanent::batch::{InitialCopy, Shadow, Width};
    use remanent::device::RawStream;
    use remanent::error::Unavailable;
    use remanent::{DeviceChoice, Error, Options, Place, Result};

    /// Adds one to every hundredth byte. A real kernel would be compiled by nvcc or NVRTC.
    const PTX: &str = r"
        .version 7.0
        .target sm_50
        .address_size 64
        .visible .entry bump(.param .u64 bytes, .param .u32 count) {
            .reg .pred %beyond;
            .reg .b32 %index, %block, %threads, %count, %byte;
            .reg .b64 %address, %offset;
            ld.param.u64 %address, [bytes];
            ld.param.u32 %count, [count];
            cvta.to.global.u64 %address, %address;
            mov.u32 %block, %ctaid.x;
            mov.u32 %threads, %ntid.x;
            mov.u32 %index, %tid.x;
            mad.lo.u32 %index, %block, %threads, %index;
            setp.ge.u32 %beyond, %index, %count;
            @%beyond bra done;
            mul.wide.u32 %offset, %index, 100;
            add.u64 %address, %address, %offset;
            ld.global.u8 %byte, [%address];
            add.u32 %byte, %byte, 1;
            st.global.u8 [%address], %byte;
        done:
            ret;
        }
    ";
    const LEN: u64 = 1 << 20;

    /// Calls a driver function, which must succeed.
    macro_rules! call {
        ($call:ident($($argument:expr),* $(,)?)) => {{
            // SAFETY: pointers refer to live values of the right types, and handles to live objects of this
            // context.
            let result = unsafe { sys::$call($($argument),*) };
            assert_eq!(result, sys::CUresult::CUDA_SUCCESS, stringify!($call));
        }};
    }

    pub fn run() -> Result<()> {
        let store = match Options::new().device(DeviceChoice::Cuda(0)).open_temporary() {
            Err(Error::Unavailable(Unavailable::Device { reason, .. })) => {
                eprintln!("SKIPPED: there is no GPU here: {reason}");
                return Ok(());
            }
            opened => opened?,
        };

        let mut batch = store.batch();
        batch.create(LEN, Place::Device(0)).key("embedding");
        let page = store.commit(batch)?.pages[0];

        // 1. Load the caller's kernel and create its stream, in the GPU's primary context.
        let mut context = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, 0));
        call!(cuCtxSetCurrent(context));
        let (mut module, mut bump, mut stream) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let source = std::ffi::CString::new(PTX).expect("text without a zero byte");
        call!(cuModuleLoadData(&mut module, source.as_ptr().cast()));
        call!(cuModuleGetFunction(&mut bump, module, c"bump".as_ptr()));
        call!(cuStreamCreate(&mut stream, 1));

        // 2. Create a copy of the page that kernels may write, for use on that stream: on the device, the
        //    store's work on the copy waits for all work queued on the stream so far. The shadow contains the
        //    state of the copy at its last capture. SAFETY: the handle is a stream of this context, and the
        //    stream is destroyed after its last use below.
        let raw = unsafe { RawStream::from_cuda(stream as u64) };
        let memory = store.device_bytes(LEN, Place::Device(0))?.on(raw);
        let copy = store.working_copy_in(page, &memory, Width::W1, Shadow::Page, InitialCopy::Load)?;
        let mut address = copy.bytes().address().expect("memory of a GPU has an address");
        let mut count = u32::try_from(LEN.div_ceil(100)).expect("a short page");
        let mut parameters = [(&raw mut address).cast::<c_void>(), (&raw mut count).cast::<c_void>()];
        let (blocks, threads) = (count.div_ceil(256), 256);
        let (arguments, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
        call!(cuLaunchKernel(bump, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, extra));

        // 3. The capture runs after the kernel, finds the changed elements, and logs them.
        let logged = store.stats().log.bytes;
        let mut batch = store.batch();
        batch.capture(&copy).set_root("step", 1u64);
        store.commit(batch)?;
        println!("{count} bytes of {LEN} changed, {} bytes were logged", store.stats().log.bytes - logged);

        let bytes = store.read_to_vec(page)?;
        let expected = |index: usize| u8::from(index.is_multiple_of(100));
        assert!(bytes.iter().enumerate().all(|(index, byte)| *byte == expected(index)));
        call!(cuStreamDestroy_v2(stream));
        call!(cuModuleUnload(module));
        call!(cuDevicePrimaryCtxRelease_v2(0));
        Ok(())
    }
}
