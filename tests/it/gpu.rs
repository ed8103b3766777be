//! The GPU that tests run on, where there is one. Where there is none they say so, past the capture of their
//! output, and do nothing: a run without a GPU is never taken for one with it.

use std::io::Write;
use std::sync::Arc;

use remanent::Error;
use remanent::device::cuda::CudaDevice;

/// A new device on the first GPU; `None`, said aloud, where there is none.
pub fn device() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(Arc::new(device)),
        Err(Error::DeviceUnavailable { reason, .. }) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            let mut uncaptured = std::io::stderr();
            writeln!(uncaptured, "SKIPPED on a GPU: {test}: {reason}").unwrap();
            None
        }
        Err(error) => panic!("the GPU is there and cannot be used: {error}"),
    }
}
