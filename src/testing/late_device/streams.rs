//! Emulated callers' streams. The work queued on a stream runs only when a caller waits for it.
//!
//! The emulated streams represent the streams of a GPU in tests of waits between threads. A held stream does not run,
//! like a stream with an endless kernel. A thread that waits for a held stream blocks until the stream is released. A
//! caller that makes the host wait for a lane behind a held stream causes a panic.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::{Device, Fence, RawStream};
use crate::error::{Error, Refused, Result};

/// A unit of work on an emulated stream. The work runs on the underlying device.
pub type StreamWork = Box<dyn FnOnce(&dyn Device) + Send>;

/// The streams of a device, by handle.
#[derive(Default)]
pub(super) struct Streams(BTreeMap<RawStream, LateStream>);

/// An emulated stream with its queue of entries.
#[derive(Default)]
pub(super) struct LateStream {
    pub queue: VecDeque<StreamEntry>,
    /// The number of entries queued so far.
    pub given: u64,
    /// The number of completed entries.
    pub reached: u64,
    pub is_held: bool,
    pub is_captured: bool,
    /// The number of threads that wait for the stream.
    pub waiting: usize,
}

pub(super) enum StreamEntry {
    Work(StreamWork),
    After(Fence),
    /// Waits until the given number of the other stream's entries are complete.
    AfterStream(RawStream, u64),
}

/// The next stream handle. Handles are unique across devices, and differ from the handle of the default stream.
static HANDLE_NEXT: AtomicU64 = AtomicU64::new(0x1000);

impl Streams {
    pub fn make(&mut self) -> RawStream {
        let stream = RawStream(HANDLE_NEXT.fetch_add(1, Ordering::Relaxed));
        self.0.insert(stream, LateStream::default());
        stream
    }

    /// Returns the stream with this handle.
    ///
    /// # Panics
    /// If the stream belongs to another device.
    pub fn of(&mut self, stream: RawStream) -> &mut LateStream {
        self.0.get_mut(&stream).expect("a stream of this device")
    }

    /// Returns the stream if it can be synchronized with lanes.
    ///
    /// # Errors
    /// [`Error::Refused`] if the stream belongs to another device or is being captured.
    pub fn usable(&mut self, stream: RawStream) -> Result<&mut LateStream> {
        let refused = |reason| Err(Error::Refused(Refused::Stream { stream: stream.handle(), reason }));
        match self.0.get_mut(&stream) {
            None => refused("it is no stream of this device"),
            Some(late) if late.is_captured => refused("a graph is being captured from it"),
            Some(late) => Ok(late),
        }
    }

    /// Returns whether a held stream must be released before `position` entries of `stream` can complete. `is_behind`
    /// returns whether a fence requires the release of a held stream.
    pub fn is_held(&self, stream: RawStream, position: u64, is_behind: &dyn Fn(Fence) -> bool) -> bool {
        let late = &self.0[&stream];
        let left = position.saturating_sub(late.reached) as usize;
        let mut entries = late.queue.iter().take(left);
        let is_in_the_way = |entry: &StreamEntry| match entry {
            StreamEntry::Work(_) => false,
            StreamEntry::After(fence) => is_behind(*fence),
            StreamEntry::AfterStream(other, position) => self.is_held(*other, *position, is_behind),
        };
        left > 0 && late.is_held || entries.any(is_in_the_way)
    }
}

impl LateStream {
    pub fn push(&mut self, entry: StreamEntry) {
        self.queue.push_back(entry);
        self.given += 1;
    }
}
