//! A copy of a store's pages in host memory, updated by the batches that a follower returns.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::image::proven::ProvenImage;
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::apply::apply;
use remanent_format::state::survey::Survey;
use remanent_format::state::table::PlanMode;
use remanent_format::{Defect, FileName, LogPoint, Lsn, Metadata, PageId, PageInfo, PageTable, Place};

use super::BatchSource;
use super::batch::{FollowedBatch, ImageSource, RestoredState};
use super::log_follower::LogFollower;
use super::position::FollowerPosition;
use super::survey::{ask, missing, newest_snapshot};
use crate::base::allocation::{collected, push};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Invalid, Result};

/// A replica of a store's pages and root after one batch, in host memory. The default value is the empty store, before
/// its first batch.
///
/// See [`Follower`](super::Follower) for an example.
#[derive(Clone, Debug)]
pub struct Replica {
    table: PageTable,
    contents: BTreeMap<PageId, Vec<u8>>,
    position: FollowerPosition,
}

impl Default for Replica {
    fn default() -> Self {
        Self { table: PageTable::new(), contents: BTreeMap::new(), position: FollowerPosition::BEGINNING }
    }
}

impl Replica {
    /// Loads the state of the newest snapshot from any disk, such as a simulated disk in a test. Other callers use
    /// [`Replica::from_snapshot`].
    ///
    /// # Errors
    /// The errors of [`Replica::from_snapshot`].
    #[doc(hidden)]
    pub fn from_snapshot_on(disk: &Arc<dyn Disk>) -> Result<Self> {
        // If the snapshot is recycled while it is read, a newer snapshot exists, and the read is repeated.
        let requested = ask(
            disk,
            Lsn(1),
            |_| true,
            |survey| match newest_snapshot(survey) {
                Some(_) => Self::load(disk, survey),
                None if survey.log.beginning().is_some() => Ok(Self::default()),
                None => Err(missing(disk, LogPoint { segment: 1, ..LogPoint::default() })),
            },
        );
        requested.map_err(|error| error.in_store(&disk.label()))
    }

    fn load(disk: &Arc<dyn Disk>, survey: &Survey) -> Result<Self> {
        let source = DiskSource::new(disk.clone());
        let base = survey.candidates().find_map(|candidate| candidate.ok().flatten());
        let base = base.expect("the caller found one");
        let resolution = survey.resolve(&source, Some(&base), Some(base.end))?;
        let contents = survey.load(&source, &resolution, u64::MAX)?;
        let mut proven = BTreeMap::new();
        for (page, bytes) in contents {
            // Each insertion allocates separately. Collecting into a map would make one long allocation, whose failure
            // aborts the process.
            let failed = |damage| source.archive_failure(&damage).unwrap_or_else(|| damage.into());
            proven.insert(page, bytes.map_err(failed)?);
        }
        let position = LogFollower::behind_end(disk.clone(), &survey.store, base.redo, base.end)?.position();
        Ok(Self { table: resolution.resolved.table, contents: proven, position })
    }

    /// Applies the next batch.
    ///
    /// The images that the batch names are verified before anything is changed, and then read into the memory of the
    /// pages. Apart from that memory, only one piece of an image is in memory at a time.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `batch` is not the next batch; [`Error::Overtaken`] or [`Error::Damaged`] if an image
    /// cannot be read; [`Error::OutOfMemory`]. The replica is then unchanged. If a verified image cannot be read again,
    /// the replica becomes empty, like [`Replica::default`].
    pub fn apply(&mut self, batch: &FollowedBatch) -> Result<()> {
        let (lsn, expected) = (batch.lsn(), self.table.lsn().next());
        if lsn != expected {
            return Err(Error::Invalid(Invalid::OutOfOrder { lsn, expected }));
        }
        let source = ImageSource::new(&batch.disk, lsn);
        let images = match batch.restored() {
            Some(restored) => self.restore(lsn, restored, &source)?,
            None => self.change(lsn, batch, &source)?,
        };
        for (page, image) in images {
            let Some(content) = self.contents.get_mut(&page) else { continue };
            if let Err(error) = source.fill(&image, content) {
                // The replica has neither the previous nor the new state.
                *self = Self::default();
                return Err(error);
            }
        }
        self.position = batch.position();
        Ok(())
    }

    /// Replaces all pages and the root with a restored state. Allocates memory for the changed pages and returns their
    /// images, which the caller must read into that memory.
    fn restore(
        &mut self,
        lsn: Lsn,
        restored: &RestoredState,
        source: &ImageSource<'_>,
    ) -> Result<Vec<(PageId, ProvenImage)>> {
        let version = |info: &PageInfo| (info.epoch, info.lsn);
        let is_changed =
            |info: &&PageInfo| self.table.get(info.page).as_ref().map(version) != Some(version(info));
        let changed = collected(restored.pages().iter().filter(is_changed))?;
        let mut images = Vec::new();
        for info in &changed {
            if let Some((image, len)) = restored.image_of(info.page)? {
                push(&mut images, (info.page, source.prove(&image, len)?))?;
            }
        }
        let mut created = BTreeMap::new();
        for info in &changed {
            self.reserve(&mut created, info.page, info.len)?;
        }
        // From here on, no step fails.
        self.contents.extend(created);
        for info in &changed {
            self.contents.get_mut(&info.page).expect("reserved").resize(info.len as usize, 0);
        }
        self.table.replace(lsn, restored.pages().iter().cloned(), restored.root().clone());
        self.table.index_keys().expect("the state that was restored had unique keys");
        self.contents.retain(|page, _| self.table.get(*page).is_some());
        Ok(images)
    }

    /// Applies the changes of a batch. Allocates memory for pages that the batch replaces with images, and returns the
    /// images, which the caller must read into that memory.
    fn change(
        &mut self,
        lsn: Lsn,
        batch: &FollowedBatch,
        source: &ImageSource<'_>,
    ) -> Result<Vec<(PageId, ProvenImage)>> {
        let damaged =
            |defect: Defect| Error::from(defect.at_lsn(FileName::Segment(batch.segment), batch.offset, lsn));
        let ops = decode_payload(&batch.payload).map_err(damaged)?;
        let changes = self
            .table
            .plan(lsn, &ops, PlanMode::Commit)
            .map_err(|(_, refusal)| damaged(Defect::from(refusal)))?;
        // All memory is allocated and all images are verified first, so that no later step can fail.
        let mut created = BTreeMap::new();
        let mut images = Vec::new();
        for at in &ops {
            match &at.op {
                Op::Image { page, len, image } => push(&mut images, (*page, source.prove(image, *len)?))?,
                Op::Create { page, len, .. } | Op::Resize { page, len } => {
                    self.reserve(&mut created, *page, *len)?;
                }
                _ => {}
            }
        }
        self.contents.extend(created);
        for at in &ops {
            if let Some(content) = at.op.page().and_then(|page| self.contents.get_mut(&page)) {
                apply(&at.op, content);
            }
        }
        self.table.install(&changes);
        for (page, state) in changes.pages() {
            if state.is_none() {
                self.contents.remove(page);
            }
        }
        // The batch makes no other change to the bytes of a page with an image, but it may have deleted the page
        // afterwards.
        Ok(images)
    }

    /// Reserves memory for a page of `len` bytes. If the page does not exist yet, its memory is added to `created`.
    fn reserve(&mut self, created: &mut BTreeMap<PageId, Vec<u8>>, page: PageId, len: u64) -> Result<()> {
        let old = self.contents.get_mut(&page);
        let content = old.unwrap_or_else(|| created.entry(page).or_default());
        let refused = Error::OutOfMemory { place: Place::Host, len };
        let Ok(whole) = usize::try_from(len) else { return Err(refused) };
        content.try_reserve_exact(whole.saturating_sub(content.len())).map_err(|_| refused)
    }

    /// Returns the position after the last applied batch, from which a follower for this replica can resume.
    #[must_use]
    pub fn position(&self) -> FollowerPosition {
        self.position
    }

    /// Returns the newest applied batch.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.table.lsn()
    }

    /// Returns all pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.table.pages()
    }

    /// Returns the length, version, key and metadata of a page, or `None` if the page does not exist.
    #[must_use]
    pub fn page(&self, page: PageId) -> Option<PageInfo> {
        self.table.get(page)
    }

    /// Returns the information of the page with key `key`, or `None` if no page has this key.
    #[must_use]
    pub fn page_by_key(&self, key: impl AsRef<[u8]>) -> Option<PageInfo> {
        self.table.get_key(key)
    }

    /// Returns the bytes of a page, or `None` if the page does not exist.
    #[must_use]
    pub fn bytes(&self, page: PageId) -> Option<&[u8]> {
        self.contents.get(&page).map(Vec::as_slice)
    }

    /// Returns the names and values of the root.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        self.table.root()
    }
}
