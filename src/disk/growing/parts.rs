//! Bytes that go into a file by mappings of parts of it.
//!
//! A part begins and ends where a step of the file's space does. A few parts are mapped at a time: memory
//! that is mapped counts as the process's own, and a snapshot of any length is to take little of it.

use std::ops::Range;
use std::sync::Arc;

use super::{STEP_LEN_MAX, STEP_LEN_MIN, Space};
use crate::base::sync::Mutex;
use crate::disk::{DiskFile, Window};
use crate::error::Result;
use crate::options::LogIo;

/// How many parts of a file stay mapped. A long image goes back to its head once it is written; that maps the
/// head's part again.
const MAPPED_MAX: usize = 3;

/// A file that is written through mappings of its parts.
pub(super) struct MappedParts {
    file: Arc<dyn DiskFile>,
    space: Space,
    parts: Mutex<Vec<Part>>,
}

/// Bytes of the file whose space was made in one step.
struct Part {
    range: Range<u64>,
    window: Option<Arc<dyn Window>>,
}

impl MappedParts {
    /// A file without parts.
    pub fn new(file: Arc<dyn DiskFile>, space: Space) -> Self {
        Self { space, file, parts: Mutex::default() }
    }

    /// Stores bytes. What their space does not suffice for is an error here, never a signal.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset + bytes.len() as u64;
        self.make_parts(end)?;
        let mut at = offset;
        while at < end {
            let (range, window) = self.window_at(at)?;
            let stop = end.min(range.end);
            let piece = &bytes[(at - offset) as usize..(stop - offset) as usize];
            // Outside of the lock: threads that write to other parts go on meanwhile.
            window.put(at - range.start, piece)?;
            at = stop;
        }
        Ok(())
    }

    /// Ends all mappings. No write is under way.
    pub fn unmap(&self) {
        for part in self.parts.lock().iter_mut() {
            let window = part.window.take();
            // The file is cut next: a thread that still stores would end the process.
            assert!(window.is_none_or(|window| Arc::strong_count(&window) == 1), "no write is under way");
        }
    }

    /// Notes a part up to `end` at least, with its space. Space that was there before is mapped in steps as
    /// well: a part of any length would count as the process's memory.
    fn make_parts(&self, end: u64) -> Result<()> {
        let mut parts = self.parts.lock();
        let start = parts.last().map_or(0, |part| part.range.end);
        if start >= end {
            return Ok(());
        }
        let mut reached = self.space.reach(end)?;
        if reached < end {
            // A file system that makes no space without bytes gets zeros. Those have theirs once they are
            // synced.
            reached = end.next_multiple_of(STEP_LEN_MIN);
            self.file.write_zeros(start, reached, LogIo::Mapped)?;
            self.file.sync()?;
        }
        let step = start.clamp(STEP_LEN_MIN, STEP_LEN_MAX);
        let to = reached.min((start + step).max(end).next_multiple_of(STEP_LEN_MIN));
        parts.push(Part { range: start..to, window: None });
        Ok(())
    }

    /// The part that holds this byte, mapped.
    fn window_at(&self, at: u64) -> Result<(Range<u64>, Arc<dyn Window>)> {
        let mut parts = self.parts.lock();
        let index = parts.partition_point(|part| part.range.end <= at);
        let range = parts[index].range.clone();
        let window = match &parts[index].window {
            Some(window) => window.clone(),
            None => {
                let mut mapped = parts.iter().enumerate().filter(|(_, part)| part.window.is_some());
                let oldest = mapped.next().map(|(oldest, _)| oldest);
                if mapped.count() + 1 >= MAPPED_MAX {
                    parts[oldest.expect("some are mapped")].window = None;
                }
                let window: Arc<dyn Window> = self.file.mapped_part(range.clone())?.into();
                parts[index].window = Some(window.clone());
                window
            }
        };
        Ok((range, window))
    }
}
