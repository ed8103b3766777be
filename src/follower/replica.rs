//! A copy of a store's pages in host memory, kept up by the batches that a follower hands over.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::op::{Op, decode_payload};
use remanent_format::state::apply::apply;
use remanent_format::state::survey::Survey;
use remanent_format::state::table::PlanMode;
use remanent_format::{Defect, FileName, Key, LogPoint, Lsn, Metadata, PageId, PageInfo, PageTable};

use super::Follower;
use super::batch::{FollowedBatch, RestoredState};
use super::position::FollowerPosition;
use super::survey::{ask, missing, newest_snapshot};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// Pages, root and bytes as they were after one batch. The default is the empty store, before its first
/// batch.
///
/// See [`Follower`] for an example.
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
    /// The state of the newest snapshot on any disk: the way in for tests. Callers use
    /// [`Replica::from_snapshot`].
    ///
    /// # Errors
    /// As for [`Replica::from_snapshot`].
    #[doc(hidden)]
    pub fn from_snapshot_on(disk: &Arc<dyn Disk>) -> Result<Self> {
        // An error while the snapshot is recycled is no answer: a newer snapshot is there.
        let asked = ask(
            disk,
            Lsn(1),
            |_| true,
            |survey| match newest_snapshot(survey) {
                Some(_) => Self::load(disk, survey),
                None if survey.log.beginning().is_some() => Ok(Self::default()),
                None => Err(missing(disk, LogPoint { segment: 1, ..LogPoint::default() })),
            },
        );
        asked.map_err(|error| error.in_store(&disk.label()))
    }

    fn load(disk: &Arc<dyn Disk>, survey: &Survey) -> Result<Self> {
        let source = DiskSource::new(disk.clone());
        let base = survey.candidates().find_map(|candidate| candidate.ok().flatten());
        let base = base.expect("the caller found one");
        let resolution = survey.resolve(&source, Some(&base), Some(base.end))?;
        let contents = survey.load(&source, &resolution, u64::MAX)?;
        let contents = contents
            .into_iter()
            .map(|(page, bytes)| Ok((page, bytes?)))
            .collect::<Result<_, remanent_format::Damage>>()?;
        let position = Follower::behind_end(disk.clone(), &survey.store, base.redo, base.end)?.position();
        Ok(Self { table: resolution.resolved.table, contents, position })
    }

    /// Applies the next batch.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] if it is not the next one; [`Error::Overtaken`] or [`Error::Damaged`] if a
    /// restored page cannot be read. The replica is as it was.
    pub fn apply(&mut self, batch: &FollowedBatch) -> Result<()> {
        let (lsn, expected) = (batch.lsn(), self.table.lsn().next());
        if lsn != expected {
            return Err(Error::OutOfOrder { lsn, expected });
        }
        match batch.restored() {
            Some(restored) => self.restore(lsn, restored)?,
            None => self.change(lsn, batch)?,
        }
        self.position = batch.position();
        Ok(())
    }

    /// Replaces everything by a restored state. A page that stays as it was is not read.
    fn restore(&mut self, lsn: Lsn, restored: &RestoredState) -> Result<()> {
        let version = |info: &PageInfo| (info.epoch, info.lsn);
        let mut changed = BTreeMap::new();
        for info in restored.pages() {
            if self.table.get(info.page).as_ref().map(version) != Some(version(info)) {
                changed.insert(info.page, restored.read(info.page)?);
            }
        }
        self.table.replace(lsn, restored.pages().iter().cloned(), restored.root().clone());
        self.table.index_keys().expect("the state that was restored had unique keys");
        self.contents.retain(|page, _| self.table.get(*page).is_some());
        self.contents.extend(changed);
        Ok(())
    }

    fn change(&mut self, lsn: Lsn, batch: &FollowedBatch) -> Result<()> {
        let damaged =
            |defect: Defect| Error::from(defect.at_lsn(FileName::Segment(batch.segment), batch.offset, lsn));
        let ops = decode_payload(&batch.payload).map_err(damaged)?;
        let changes = self
            .table
            .plan(lsn, &ops, PlanMode::Commit)
            .map_err(|(_, refusal)| damaged(Defect::Batch(refusal.to_string())))?;
        // All memory is taken and all files are read first: from then on nothing fails.
        let mut created = BTreeMap::new();
        let mut images = BTreeMap::new();
        for at in &ops {
            if let Op::Image { page, .. } = at.op {
                images.insert(page, batch.image(page)?);
            }
            if let Op::Create { page, len, .. } | Op::Resize { page, len } = at.op {
                let old = self.contents.get_mut(&page);
                let content = old.unwrap_or_else(|| created.entry(page).or_default());
                reserve(content, len).ok_or_else(|| damaged(Defect::Memory { needed: len }))?;
            }
        }
        self.contents.extend(created);
        for at in &ops {
            if let Some(content) = at.op.page().and_then(|page| self.contents.get_mut(&page)) {
                apply(&at.op, content);
            }
        }
        // An image is the only change of bytes on its page in a batch; the page may be gone again.
        self.contents.extend(images);
        self.table.install(&changes);
        for (page, state) in changes.pages() {
            if state.is_none() {
                self.contents.remove(page);
            }
        }
        Ok(())
    }

    /// The position after the last batch applied: a follower for this replica goes on from it.
    #[must_use]
    pub fn position(&self) -> FollowerPosition {
        self.position
    }

    /// The newest batch applied.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.table.lsn()
    }

    /// All pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.table.pages()
    }

    /// A page's length, version, key and metadata.
    #[must_use]
    pub fn page(&self, page: PageId) -> Option<PageInfo> {
        self.table.get(page)
    }

    /// The page that has this key.
    #[must_use]
    pub fn page_by_key(&self, key: &Key) -> Option<PageInfo> {
        self.table.get_key(key)
    }

    /// The bytes of a page.
    #[must_use]
    pub fn bytes(&self, page: PageId) -> Option<&[u8]> {
        self.contents.get(&page).map(Vec::as_slice)
    }

    /// The root's names and values.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        self.table.root()
    }
}

/// Makes room for `len` bytes in all; `None` if there is none.
fn reserve(content: &mut Vec<u8>, len: u64) -> Option<()> {
    let more = usize::try_from(len).ok()?.saturating_sub(content.len());
    content.try_reserve_exact(more).ok()
}
