//! A trace of allocations: the calls that a program made to an allocator, in order.
//!
//! A file has one JSON object per line, plain or compressed with zstd: `{"alloc": 7, "len": 4096}` and
//! `{"free": 7}`. An id names one block from its `alloc` to its `free`, and may then be reused for another block.
//! A line may have more fields, such as the stream of a GPU, which are ignored. A trace of cache requests is
//! converted to allocations by a simulated LRU cache: a missing block is allocated, and the least recently
//! used one is freed once the cache is full.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::Path;

use remanent::PageId;
use remanent::tiers::{EvictionPolicy, Lru};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::trace::TraceLines;
use serde::Deserialize;

/// One call of an allocator. A slot is a dense index that names one live block at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Allocate { slot: usize, len: u64 },
    Free { slot: usize },
}

/// The calls of a trace.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AllocationTrace {
    pub events: Vec<Event>,
    /// The maximum number of blocks that are live at once.
    pub slots: usize,
    /// The maximum number of requested bytes that are live at once.
    pub live_peak_bytes: u64,
}

/// One line of a trace. Other fields are ignored.
#[derive(Deserialize)]
struct EventLine {
    alloc: Option<u64>,
    free: Option<u64>,
    len: Option<u64>,
}

/// Builds a trace from calls that name blocks by ids.
#[derive(Default)]
struct TraceBuilder {
    trace: AllocationTrace,
    /// Slots and lengths of live blocks, by id.
    live: HashMap<u64, (usize, u64)>,
    live_bytes: u64,
    unused: Vec<usize>,
}

impl TraceBuilder {
    fn allocate(&mut self, id: u64, len: u64) -> Result<(), &'static str> {
        let Some(live_bytes) = self.live_bytes.checked_add(len) else {
            return Err("total length exceeds any memory");
        };
        if len == 0 {
            return Err("allocation of 0 bytes");
        }
        let slot = self.unused.pop().unwrap_or(self.trace.slots);
        if self.live.insert(id, (slot, len)).is_some() {
            return Err("allocation of an id that is not freed yet");
        }
        self.live_bytes = live_bytes;
        self.trace.slots = self.trace.slots.max(slot + 1);
        self.trace.live_peak_bytes = self.trace.live_peak_bytes.max(live_bytes);
        self.trace.events.push(Event::Allocate { slot, len });
        Ok(())
    }

    fn free(&mut self, id: u64) -> Result<(), &'static str> {
        let (slot, len) = self.live.remove(&id).ok_or("free of an id that is not allocated")?;
        self.live_bytes -= len;
        self.unused.push(slot);
        self.trace.events.push(Event::Free { slot });
        Ok(())
    }
}

impl AllocationTrace {
    /// Reads a trace file.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let (mut lines, mut builder) = (TraceLines::open(path)?, TraceBuilder::default());
        while let Some(line) = lines.next_value::<EventLine>() {
            let added = match line? {
                EventLine { alloc: Some(id), free: None, len: Some(len) } => builder.allocate(id, len),
                EventLine { alloc: None, free: Some(id), .. } => builder.free(id),
                _ => Err("expected `alloc` with `len`, or `free`"),
            };
            added.map_err(|reason| lines.defect(reason))?;
        }
        Ok(builder.trace)
    }

    /// Returns the allocations of an LRU cache that holds `held` blocks of one length and serves `requests`.
    pub fn of_cache(requests: &[Vec<u64>], held: usize, len: u64) -> Self {
        let (mut builder, mut there) = (TraceBuilder::default(), HashSet::new());
        let mut policy = Lru::default();
        for page in requests.iter().flatten().map(|id| PageId(*id)) {
            if there.contains(&page) {
                policy.used(page);
                continue;
            }
            if there.len() >= held
                && let Some(victim) = policy.victim()
            {
                there.remove(&victim);
                builder.free(victim.0).expect("the block is live");
            }
            there.insert(page);
            policy.arrived(page, 1);
            builder.allocate(page.0, len).expect("the block is not live");
        }
        builder.trace
    }

    /// Writes the trace to a file, for use with another allocator.
    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        let write = || -> std::io::Result<()> {
            let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
            for event in &self.events {
                match event {
                    Event::Allocate { slot, len } => writeln!(file, r#"{{"alloc": {slot}, "len": {len}}}"#)?,
                    Event::Free { slot } => writeln!(file, r#"{{"free": {slot}}}"#)?,
                }
            }
            file.into_inner()?.sync_all()
        };
        write().map_err(|error| Failure::Environment(format!("cannot write {}: {error}", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Result<AllocationTrace, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        AllocationTrace::read(file.path())
    }

    #[test]
    fn trace_is_read_and_written_with_its_peaks() {
        let lines = br#"{"alloc": 70, "len": 512, "stream": 0}
{"alloc": 71, "len": 1}
{"free": 70}
{"alloc": 70, "len": 100}
{"free": 71}
"#;
        let trace = read(lines).unwrap();
        let allocate = |slot, len| Event::Allocate { slot, len };
        let free = |slot| Event::Free { slot };
        assert_eq!(trace.events, [allocate(0, 512), allocate(1, 1), free(0), allocate(0, 100), free(1)]);
        assert_eq!((trace.slots, trace.live_peak_bytes), (2, 513));
        let written = tempfile::NamedTempFile::new().unwrap();
        trace.write(written.path()).unwrap();
        assert_eq!(AllocationTrace::read(written.path()).unwrap(), trace);
        assert_eq!(read(&zstd::encode_all(&lines[..], 1).unwrap()).unwrap(), trace);
        assert_eq!(read(b"").unwrap(), AllocationTrace::default());
    }

    #[test]
    fn bad_line_is_reported() {
        for (bad, said) in [
            (r#"{"alloc": 1, "len": 5}"#, "not freed yet"),
            (r#"{"free": 2}"#, "not allocated"),
            (r#"{"alloc": 2, "len": 0}"#, "0 bytes"),
            (r#"{"alloc": 2, "len": 18446744073709551615}"#, "any memory"),
            (r#"{"alloc": 2}"#, "expected `alloc`"),
            (r#"{"alloc": 2, "free": 1, "len": 5}"#, "expected `alloc`"),
            (r#"{"alloc": -1, "len": 5}"#, "invalid value"),
            ("{", "EOF"),
        ] {
            let content = format!("{{\"alloc\": 1, \"len\": 5}}\n{bad}\n");
            let Err(Failure::Environment(message)) = read(content.as_bytes()) else { panic!("{bad}") };
            assert!(message.contains(":2: ") && message.contains(said), "{message}");
        }
    }

    #[test]
    fn cache_frees_least_recently_used_block() {
        let trace = AllocationTrace::of_cache(&[vec![1, 2], vec![1, 3], vec![2]], 2, 64);
        let allocate = |slot| Event::Allocate { slot, len: 64 };
        let free = |slot| Event::Free { slot };
        // Block 3 replaces 2, then 2 replaces 1.
        assert_eq!(trace.events, [allocate(0), allocate(1), free(1), allocate(1), free(0), allocate(0)]);
        assert_eq!((trace.slots, trace.live_peak_bytes), (2, 128));
    }
}
