//! Streams of callers, emulated: queues that stand still until a caller must have them run.
//!
//! They stand for a GPU's streams in tests of waits between threads. A stream that is held does not run, like
//! one with an endless kernel in it. A thread that waits for the stream itself waits until it is let go. A
//! caller that makes the host wait for a lane after such a stream is found out by a panic.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::{Device, Fence, RawStream};
use crate::error::{Error, Result};

/// The work that a stream does at its turn, with the device beneath.
pub type StreamWork = Box<dyn FnOnce(&dyn Device) + Send>;

/// The streams of a device, by their handles.
#[derive(Default)]
pub(super) struct Streams(BTreeMap<RawStream, LateStream>);

/// One stream and its entries.
#[derive(Default)]
pub(super) struct LateStream {
    pub queue: VecDeque<StreamEntry>,
    /// Number of entries ever queued.
    pub given: u64,
    /// Number of entries that are done.
    pub reached: u64,
    pub is_held: bool,
    pub is_captured: bool,
    /// Number of threads that wait for it.
    pub waiting: usize,
}

pub(super) enum StreamEntry {
    Work(StreamWork),
    After(Fence),
    /// Another stream comes first, as far as this entry.
    AfterStream(RawStream, u64),
}

/// The next handle. No stream is the default one, and none is another device's.
static HANDLE_NEXT: AtomicU64 = AtomicU64::new(0x1000);

impl Streams {
    pub fn make(&mut self) -> RawStream {
        let stream = RawStream(HANDLE_NEXT.fetch_add(1, Ordering::Relaxed));
        self.0.insert(stream, LateStream::default());
        stream
    }

    /// The stream with this handle.
    ///
    /// # Panics
    /// If it was not made here.
    pub fn of(&mut self, stream: RawStream) -> &mut LateStream {
        self.0.get_mut(&stream).expect("a stream of this device")
    }

    /// The stream, if lanes may wait for it and it for them.
    ///
    /// # Errors
    /// `StreamRefused` if it is no stream of this device, or is being captured.
    pub fn usable(&mut self, stream: RawStream) -> Result<&mut LateStream> {
        let refused = |reason| Err(Error::StreamRefused { stream: stream.handle(), reason });
        match self.0.get_mut(&stream) {
            None => refused("it is no stream of this device"),
            Some(late) if late.is_captured => refused("a graph is being captured from it"),
            Some(late) => Ok(late),
        }
    }

    /// Whether a stream must be let go before this number of its entries are done. `is_behind` answers the
    /// same for a fence.
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
