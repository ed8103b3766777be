//! Callers' streams and points in them, as devices identify them.

use std::any::Any;
use std::sync::Arc;

/// A caller's stream, identified by a number. For a GPU this is the handle of a CUDA stream (`CUstream`,
/// `cudaStream_t`, `torch.cuda.Stream.cuda_stream`).
///
/// `RawStream::from_cuda` is unsafe: its caller guarantees that the handle is valid, because a driver dereferences any
/// number it is given. A device without streams rejects every handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawStream(pub(crate) u64);

impl RawStream {
    /// Returns whether this is a default stream. All GPUs have default streams with the same handles.
    pub(crate) fn is_default(self) -> bool {
        // The null stream, and the two that CUDA names: legacy and per-thread.
        self.0 <= 2
    }

    /// Returns the handle as a number.
    #[must_use]
    pub fn handle(self) -> u64 {
        self.0
    }
}

/// A point in a caller's stream, in the representation of the device that recorded it. Clones refer to the same point.
#[derive(Clone)]
pub struct StreamEvent(Arc<dyn Any + Send + Sync>);

impl StreamEvent {
    /// Wraps a device's representation of a point in a stream. For implementations of devices.
    pub fn new(point: impl Any + Send + Sync) -> Self {
        Self(Arc::new(point))
    }

    /// Returns the device's representation of the point.
    ///
    /// # Panics
    /// If a device of another kind created the point.
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
