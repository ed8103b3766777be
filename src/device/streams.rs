//! Callers' streams, and points of them, as devices name them.

use std::any::Any;
use std::sync::Arc;

/// A stream of the caller's, as the device names it: for a GPU the handle of a CUDA stream (`CUstream`,
/// `cudaStream_t`, `torch.cuda.Stream.cuda_stream`) as a number.
///
/// The code that makes one, by `RawStream::from_cuda`, vouches for the handle, for a driver follows any
/// number that it is given. A device that knows no streams refuses all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawStream(pub(crate) u64);

impl RawStream {
    /// Whether it is a default stream: every GPU has one by the same handle.
    pub(crate) fn is_default(self) -> bool {
        // The one of old, and the two that CUDA names: legacy, and one for each thread.
        self.0 <= 2
    }

    /// The handle as a number.
    #[must_use]
    pub fn handle(self) -> u64 {
        self.0
    }
}

/// A point of a caller's stream, as the device that gave it knows it. Clones are the same point.
#[derive(Clone)]
pub struct StreamEvent(Arc<dyn Any + Send + Sync>);

impl StreamEvent {
    /// A point. For devices.
    pub fn new(point: impl Any + Send + Sync) -> Self {
        Self(Arc::new(point))
    }

    /// What the device made it of.
    ///
    /// # Panics
    /// If another kind of device did.
    #[must_use]
    pub fn of<T: Any>(&self) -> &T {
        self.0.downcast_ref().expect("a point that this device gave")
    }
}

impl std::fmt::Debug for StreamEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamEvent")
    }
}
