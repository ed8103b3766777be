//! Reading a state whose images are fetched later, without changing the archive (rules 23 and 27).

use remanent_format::{Lsn, SnapshotId};

use super::restore::{ListedPart, RestoredEnd, StateSink, Until, Window};
use super::{Archive, Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Error, Result};
use crate::object::{KeptSnapshot, Manifest, ObjectKey, Payload};

/// The state of an archive that a view shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewPoint {
    /// The end of the line.
    End,
    /// The state after a batch.
    Batch(Lsn),
    /// The state of a snapshot that the archive keeps.
    Snapshot(SnapshotId),
    /// The state of a named snapshot.
    Name(String),
}

/// Fetches a part, and compares its bytes with the checksum in the list.
///
/// # Errors
/// Returns [`Error::Overtaken`] if the part was deleted after a boundary passed its list, [`Error::Damaged`] with the
/// name of the data object if it is missing for another reason or invalid, and [`Error::Bucket`] if the bucket cannot
/// be reached.
pub async fn fetch_part<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    part: &ListedPart,
) -> Result<Vec<u8>> {
    let mut line = Line::new(archive);
    line.view.store = Some(part.store);
    line.need_data(&part.entry, part.store, part.lister).await.map(Payload::into_bytes)
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Reads a state of the line, without other named snapshots. Call [`find_to_read`](Line::find_to_read) first. The
    /// state at a batch or a snapshot may be followed by the later batches of the same run.
    ///
    /// # Errors
    /// Returns [`Error::CutTooOld`], [`Error::InGap`], [`Error::UnknownSnapshot`] or [`Error::UnknownName`] if the
    /// archive does not keep the state, and the errors of [`read_state`](Line::read_state).
    pub async fn read_view<S: StateSink>(&mut self, point: &ViewPoint, sink: &mut S) -> Result<RestoredEnd> {
        match point {
            ViewPoint::End => self.read_end_state(false, sink).await,
            ViewPoint::Batch(lsn) if *lsn >= self.view.archived.lsn => self.read_end_state(false, sink).await,
            ViewPoint::Batch(lsn) => match self.manifest_before(*lsn).await {
                // The state before the first batch needs the fence, too.
                Ok(manifest) => self.read_through(manifest, (*lsn).max(Lsn(1)), sink).await,
                Err(error @ Error::CutTooOld { .. }) => {
                    let kept = self.kept_snapshot(|kept| kept.batch.lsn == *lsn).ok_or(error)?;
                    self.read_kept(&kept, sink).await
                }
                Err(error) => Err(error),
            },
            ViewPoint::Snapshot(snapshot) => {
                if let Some((position, manifest)) = self.manifest_of(*snapshot).await? {
                    return self.read_through(Some((position, manifest)), manifest.end.lsn, sink).await;
                }
                let kept = self.kept_snapshot(|kept| kept.snapshot == *snapshot);
                let unknown = Error::UnknownSnapshot { snapshot: *snapshot };
                self.read_kept(&kept.ok_or(unknown)?, sink).await
            }
            ViewPoint::Name(name) => {
                let kept = self.kept_snapshot(|kept| kept.name == *name);
                self.read_kept(&kept.ok_or_else(|| Error::UnknownName { name: name.clone() })?, sink).await
            }
        }
    }

    /// Returns the oldest batch such that the archive keeps its state and every later state.
    ///
    /// # Errors
    /// Returns the errors of [`find`](Line::find).
    pub async fn oldest(&mut self) -> Result<Lsn> {
        if self.view.start == 1 {
            return Ok(Lsn(0));
        }
        let mut oldest = self.view.archived.lsn;
        self.kept_manifest(|manifest| {
            oldest = manifest.end.lsn;
            false
        })
        .await?;
        Ok(oldest)
    }

    async fn read_through<S: StateSink>(
        &mut self,
        manifest: Option<(u64, Manifest)>,
        lsn: Lsn,
        sink: &mut S,
    ) -> Result<RestoredEnd> {
        let window = Window { manifest, at: Some(lsn), until: Until::EndOfRun, with_names: false };
        self.read_from(window, sink).await
    }

    async fn manifest_of(&mut self, snapshot: SnapshotId) -> Result<Option<(u64, Manifest)>> {
        self.kept_manifest(|manifest| manifest.snapshot == snapshot).await
    }

    /// Returns the newest named snapshot that `is_wanted` accepts.
    fn kept_snapshot(&self, is_wanted: impl FnMut(&&KeptSnapshot) -> bool) -> Option<KeptSnapshot> {
        self.view.catalog.iter().rev().find(is_wanted).cloned()
    }

    /// Reads the state of a named snapshot. The snapshot is exact, so that the state needs no frames.
    async fn read_kept<S: StateSink>(&mut self, kept: &KeptSnapshot, sink: &mut S) -> Result<RestoredEnd> {
        // A search for newer boundaries changes the start.
        let kept_from = self.view.start;
        match self.read_kept_from(kept, kept_from, sink).await {
            Ok(end) => Ok(end),
            Err(error) => Err(self.unless_overtaken(error, kept_from).await?),
        }
    }

    async fn read_kept_from<S: StateSink>(
        &mut self,
        kept: &KeptSnapshot,
        kept_from: u64,
        sink: &mut S,
    ) -> Result<RestoredEnd> {
        let store = self.view.store.ok_or(Error::Empty)?;
        let KeptSnapshot { snapshot, batch, position, .. } = *kept;
        let Some(listed) = self.kept_list(kept).await? else {
            return Err(self.missing(ObjectKey::Line(position), kept_from).await?);
        };
        let mut follows_open_store = false;
        if let Some(fence) = &self.view.fence {
            follows_open_store = fence.content.follows_open_store;
            sink.fence(&fence.content)?;
        }
        let manifest = Manifest { snapshot, start: position, redo: batch, end: batch, follows_gap: false };
        sink.manifest(&manifest)?;
        self.read_parts(&listed, store, kept_from, &batch, &batch, sink).await?;
        // [rcheck] Some of the objects that were read may have been deleted.
        if self.is_overtaken(kept_from).await? {
            return Err(Error::Overtaken { position: kept_from });
        }
        let (incarnation, fence) = (batch.incarnation.number, self.view.links.fence);
        Ok(RestoredEnd { store, batch, incarnation, fence, named: 0, follows_open_store })
    }
}
