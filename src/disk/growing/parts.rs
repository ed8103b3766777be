//! Writes to a file through mappings of its parts.
//!
//! Each part begins and ends at a step of the file's space allocation. Only a few parts are mapped at a time, because
//! mapped memory counts as the process's own, and a snapshot of any length should use little memory.

use std::ops::Range;
use std::sync::Arc;

use super::{STEP_LEN_MAX, STEP_LEN_MIN, Space};
use crate::base::sync::Mutex;
use crate::disk::{DiskFile, Window};
use crate::error::Result;
use crate::options::LogIo;

/// The maximum number of parts of a file that are mapped at a time. The head of a long image is written last, after its
/// part was unmapped, and maps that part again.
const MAPPED_MAX: usize = 3;

/// Writes bytes to a file through mappings of its parts, at most [`MAPPED_MAX`] at a time.
pub(super) struct MappedParts {
    file: Arc<dyn DiskFile>,
    space: Space,
    parts: Mutex<Vec<Part>>,
}

/// A range of the file that is mapped and unmapped as a unit.
struct Part {
    range: Range<u64>,
    window: Option<Arc<dyn Window>>,
}

impl MappedParts {
    pub fn new(file: Arc<dyn DiskFile>, space: Space) -> Self {
        Self { space, file, parts: Mutex::default() }
    }

    /// Stores bytes at `offset`. If there is no space, returns an error instead of raising a signal.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset + bytes.len() as u64;
        self.make_parts(end)?;
        let mut at = offset;
        while at < end {
            let (range, window) = self.window_at(at)?;
            let stop = end.min(range.end);
            let piece = &bytes[(at - offset) as usize..(stop - offset) as usize];
            // The copy runs outside the lock, so that threads that write to other parts continue.
            window.put(at - range.start, piece)?;
            at = stop;
        }
        Ok(())
    }

    /// Removes all mappings. No write may be in progress.
    pub fn unmap(&self) {
        for part in self.parts.lock().iter_mut() {
            let window = part.window.take();
            // The file is truncated next. A store into the mapping after that would kill the process.
            assert!(window.is_none_or(|window| Arc::strong_count(&window) == 1), "no write is under way");
        }
    }

    /// Adds parts until they cover all bytes below `end`, and allocates their space. Space that is already allocated is
    /// mapped in steps too, because the whole length of a part counts as the process's memory.
    fn make_parts(&self, end: u64) -> Result<()> {
        let mut parts = self.parts.lock();
        let start = parts.last().map_or(0, |part| part.range.end);
        if start >= end {
            return Ok(());
        }
        let mut reached = self.space.reach(end)?;
        if reached < end {
            // The file system cannot allocate space without writing. Zeros are written instead, and the sync allocates
            // their space.
            reached = end.next_multiple_of(STEP_LEN_MIN);
            self.file.write_zeros(start, reached, LogIo::Mapped)?;
            self.file.sync()?;
        }
        let step = start.clamp(STEP_LEN_MIN, STEP_LEN_MAX);
        let to = reached.min((start + step).max(end).next_multiple_of(STEP_LEN_MIN));
        parts.push(Part { range: start..to, window: None });
        Ok(())
    }

    /// Returns the range and the window of the part that contains offset `at`. Maps the part if needed.
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
