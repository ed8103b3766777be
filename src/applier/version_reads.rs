//! Reads ranges of many pages, provided that each page still has a given version. Used for the images of pages that a
//! batch moves to disk.

use std::ops::Range;
use std::sync::Arc;

use remanent_format::{Lsn, PageId, Place};

use super::Applier;
use super::reads::{gather_ranges, len_of};
use crate::base::allocation::{collected, push};
use crate::device::EngineDevice;
use crate::device::sums::transfer_corrupted;
use crate::error::Result;
use crate::memory::staging::{StagingBuf, StagingPool};

/// A range of a version of a page in memory.
#[derive(Clone)]
pub(crate) struct VersionRange {
    pub page: PageId,
    /// The Lsn of the batch that created this version. If the page has another Lsn, the read returns `None`.
    pub lsn: Lsn,
    /// The byte range within the page.
    pub range: Range<u64>,
}

impl Applier {
    /// Reads the bytes of all ranges, one after another, between two batches. Checksums from both sides of the bus are
    /// compared. Returns `None` if one of the pages now has another version or is on disk.
    ///
    /// # Errors
    /// `OutOfMemory`; a device error, including the error for bytes that changed in transit twice.
    pub fn read_versions(
        &self,
        device: &EngineDevice,
        staging: &Arc<StagingPool>,
        ranges: &[VersionRange],
    ) -> Result<Option<StagingBuf>> {
        self.unloaded().wait(ranges.iter().map(|version| version.page))?;
        let len = ranges.iter().map(|version| len_of(&version.range)).sum::<u64>();
        for _ in 0..2 {
            let (staged, pool) = (staging.take(len as usize)?, staging.clone());
            let versions = collected(ranges.iter().cloned())?;
            let drain = self.turn(move |turn| {
                let mut ranges = Vec::new();
                for VersionRange { page, lsn, range } in versions {
                    let now = turn.applied.table.get(page);
                    if !now.is_some_and(|now| now.lsn == lsn && now.place != Place::Disk) {
                        pool.put(staged.into_staging());
                        return Ok(None);
                    }
                    push(&mut ranges, (page, range))?;
                }
                Ok(Some(gather_ranges(turn, &ranges, len, staged, Some(&pool))?.1))
            })?;
            let Some(drain) = drain else { return Ok(None) };
            if let Some(drained) = drain.finish_once(device)? {
                return Ok(Some(drained.bytes));
            }
            tracing::warn!(
                device = device.label(),
                "bytes were damaged in transit to the host; repeating the transfer"
            );
        }
        Err(transfer_corrupted(device, "bytes of pages"))
    }
}
