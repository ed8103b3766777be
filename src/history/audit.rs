//! The audit: a check that page memory matches the committed batches.
//!
//! Only batches may change pages. If a caller's kernel writes to a page, the change is not detected until a crash
//! loses it or a snapshot makes it permanent. An audit detects such changes.
//!
//! 1. **Open** the current state on disk: the newest snapshot, and the log after it.
//! 2. **Checksum** the pages on the device, one chunk at a time. Each chunk is processed between two batches, so that
//!    its checksums belong to one state.
//! 3. **Compare** each checksum with the stored checksum if an image contains exactly the page. Otherwise compose the
//!    page from image and log.
//! 4. **Repeat** for the pages that batches changed since step 1: compute their checksums again, and open the state
//!    that belongs to exactly these checksums. Thus even pages that change constantly are compared, and no step is
//!    repeated.
//!
//! The audit writes nothing, so a crash loses nothing.

use remanent_format::{Epoch, Key, Lsn, PageId, PageInfo};

use crate::base::allocation::{collected, push};
use crate::catalog::CatalogLock;
use crate::device::CommandList;
use crate::device::sums::{sum_each, sums_in, sums_len};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::state::PastState;
use crate::images::{CHUNK_BYTES, chunks};
use crate::memory::staging::StagingBuf;

/// The result of an audit: the number of compared pages, and the pages that differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Audit {
    /// The number of pages compared. Pages of length 0, and pages deleted during the audit, are not counted.
    pub pages: u64,
    /// The total length of the compared pages in bytes.
    pub bytes: u64,
    /// The number of pages compared with the checksum of an image, without reading their bytes from disk.
    pub by_image: u64,
    /// The number of pages composed from an image and the log, or from the log alone.
    pub by_replay: u64,
    /// The pages whose bytes differ from the committed batches.
    pub changed: Vec<ChangedPage>,
}

/// A page that was changed without a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangedPage {
    /// The id of the page.
    pub page: PageId,
    /// The key of the page, if it has one.
    pub key: Option<Key>,
    /// The version of the page that the committed batches define.
    pub epoch: Epoch,
    /// The offset in bytes of the first byte that differs. `None` if a batch changed the page before its bytes could be
    /// compared.
    pub first_difference: Option<u64>,
}

/// Compares the pages of a running store with the files on disk, for one audit.
pub(crate) struct Auditor<'a> {
    pub engine: &'a Engine,
    /// The catalog. The audit holds its lock, which prevents the recycling of files.
    pub catalog: &'a CatalogLock,
}

/// The number of bytes of a page that are compared at a time.
const COMPARED_AT_ONCE: usize = 4 << 20;

/// The checksums of some pages, computed on the device after the same batch.
struct PageSums {
    pages: Vec<(PageInfo, u32)>,
    lsn: Lsn,
}

impl Auditor<'_> {
    /// Compares all current pages with the committed batches.
    ///
    /// # Errors
    /// - A device error.
    /// - [`Error::Damaged`] in the files from which a page is composed.
    /// - The errors of [`PastState::open`].
    pub fn run(&self) -> Result<Audit> {
        let mut audit = Audit::default();
        // Step 1. While the catalog is locked, no file that the state needs can be removed.
        let (pages, begin) = {
            let _keeping = self.catalog.lock();
            let (pages, lsn) = self.pages()?;
            if pages.is_empty() {
                return Ok(audit);
            }
            (pages, self.past(lsn)?)
        };
        // Steps 2 and 3.
        let mut changed_since = Vec::new();
        for chunk in chunks(&pages, CHUNK_BYTES, |(_, len)| *len)? {
            for (info, sum) in self.sum(chunk)?.pages {
                if begin.table().get(info.page).is_some_and(|then| then.epoch == info.epoch) {
                    self.compare(&mut audit, &begin, &info, sum)?;
                } else {
                    push(&mut changed_since, (info.page, info.len))?;
                }
            }
        }
        drop(begin);
        // Step 4.
        for chunk in chunks(&changed_since, CHUNK_BYTES, |(_, len)| *len)? {
            let (sums, past) = {
                let _keeping = self.catalog.lock();
                let sums = self.sum(chunk)?;
                let past = self.past(sums.lsn)?;
                (sums, past)
            };
            for (info, sum) in sums.pages {
                self.compare(&mut audit, &past, &info, sum)?;
            }
        }
        Ok(audit)
    }

    /// Returns the current pages with their lengths, and the newest applied batch.
    fn pages(&self) -> Result<(Vec<(PageId, u64)>, Lsn)> {
        self.engine.applier.turn(|turn| {
            let pages = turn.applied.table.pages().map(|info| (info.page, info.len));
            Ok((collected(pages.filter(|(_, len)| *len > 0))?, turn.applied.point.lsn))
        })
    }

    /// Opens the state on disk after batch `lsn`. The batch must have been applied, and is therefore logged.
    fn past(&self, lsn: Lsn) -> Result<PastState> {
        PastState::open(&self.engine.disk, Some(&StatePoint::Lsn(lsn)))
    }

    /// Computes the checksums of all pages in `pages` that still exist, after the same batch.
    fn sum(&self, pages: &[(PageId, u64)]) -> Result<PageSums> {
        let wanted = collected(pages.iter().map(|(page, _)| *page))?;
        self.engine.applier.unloaded().wait(wanted.iter().copied())?;
        let staging = self.engine.staging.take(sums_len(wanted.len()))?.into_staging();
        let (infos, on_disk, lsn, pending) = self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let known = wanted.into_iter().filter_map(|page| turn.applied.table.get(page));
            let (mut infos, mut on_disk) = (Vec::new(), Vec::new());
            for info in known.filter(|info| info.len > 0) {
                match turn.applied.on_disk.get(info.page) {
                    Some(page) => push(&mut on_disk, (info, page.clone()))?,
                    None => push(&mut infos, info)?,
                }
            }
            let sources = collected(infos.iter().map(|info| turn.applied.memory[info.page].span()))?;
            let commands = vec![sum_each(sources, 0)];
            let pending = turn.submit(CommandList { commands, staging: vec![staging] })?;
            Ok((infos, on_disk, turn.applied.point.lsn, pending))
        })?;
        let staging = self.engine.device.finish(pending)?.pop().expect("one staging went in");
        let found = StagingBuf::new(staging, sums_len(infos.len()));
        let mut pages = collected(infos.into_iter().zip(sums_in(&found)))?;
        self.engine.staging.put(found.into_staging());
        for (info, page) in on_disk {
            let sum = page.sum()?;
            push(&mut pages, (info, sum))?;
        }
        Ok(PageSums { pages, lsn })
    }

    /// Compares a page's checksum with the checksum of the same version of the page on disk.
    fn compare(&self, audit: &mut Audit, past: &PastState, info: &PageInfo, sum: u32) -> Result<()> {
        audit.pages += 1;
        audit.bytes += info.len;
        let implied = match past.exact_image(info.page) {
            Some(image) => {
                audit.by_image += 1;
                image.raw_crc
            }
            None => {
                audit.by_replay += 1;
                let mut sum = crc32fast::Hasher::new();
                past.stream(info.page, |_, bytes| {
                    sum.update(bytes);
                    Ok(())
                })?;
                sum.finalize()
            }
        };
        if implied != sum {
            let first_difference = self.first_difference(past, info)?;
            let PageInfo { page, ref key, epoch, .. } = *info;
            tracing::warn!(%page, ?first_difference, "a page was changed without a batch");
            audit.changed.push(ChangedPage { page, key: key.clone(), epoch, first_difference });
        }
        Ok(())
    }

    /// Returns the offset at which a page first differs from a state on disk. Returns `None` if a batch has changed the
    /// page since its checksum was computed.
    fn first_difference(&self, past: &PastState, info: &PageInfo) -> Result<Option<u64>> {
        let (mut first, mut has_changed) = (None, false);
        past.stream(info.page, |at, expected| {
            for (expected, at) in expected.chunks(COMPARED_AT_ONCE).zip((at..).step_by(COMPARED_AT_ONCE)) {
                if first.is_some() || has_changed {
                    break;
                }
                let (epoch, len) = (info.epoch, expected.len() as u64);
                let range = move |now: &PageInfo| if now.epoch == epoch { (at, len) } else { (0, 0) };
                let (now, _, found) = match self.engine.applier.read(
                    &self.engine.device,
                    &self.engine.staging,
                    info.page,
                    len,
                    range,
                ) {
                    Ok(read) => read,
                    Err(Error::UnknownPage { .. }) => {
                        has_changed = true;
                        break;
                    }
                    Err(error) => return Err(error),
                };
                has_changed = now.epoch != epoch;
                if !has_changed {
                    let differs =
                        expected.iter().zip(&*found).position(|(expected, found)| expected != found);
                    first = differs.map(|within| at + within as u64);
                }
                self.engine.staging.put(found.into_staging());
            }
            Ok(())
        })?;
        Ok(first.filter(|_| !has_changed))
    }
}
