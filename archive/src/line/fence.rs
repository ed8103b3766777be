//! Beginning a term: claims, lineage, and fences (rules 4, 5 and 29).

use remanent_format::Incarnation;

use super::request::Known;
use super::{Line, Nonces, Writer};
use crate::bucket::Bucket;
use crate::error::{Divergence, Error, Result};
use crate::local::{FenceRecord, LocalStore};
use crate::object::{BatchPoint, Content, Fence, KeptSnapshot, LineObject, Nonce, ObjectKey, predecessor};
use crate::rules::Rule;

/// Number of recorded fences beyond which the oldest one of unknown outcome is forgotten.
const FENCES_MAX: usize = 256;

/// Whether a directory may fence an archive whose newest fence it did not create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// The directory must have created the newest fence.
    Refused,
    /// The maker of the newest fence is gone for good. The lineage of batches is checked in any case.
    Permitted,
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Begins a term with a fence, before anything is uploaded (rule 4). Call [`find`](Line::find) first, and
    /// [`check_lineage`](Line::check_lineage) before the directory publishes its new opening.
    ///
    /// # Errors
    /// Returns the errors of [`check_lineage`](Line::check_lineage) with nothing changed, [`Error::Superseded`] if
    /// another writer was faster, and [`Error::Unknown`] if the bucket cannot be reached any more. If a term began
    /// nevertheless, the next append completes what is left.
    pub async fn fence<L: LocalStore>(&mut self, local: &mut L, takeover: Takeover) -> Result<()> {
        self.check_lineage(local, takeover)?;
        self.fence_at(local, takeover, None).await?;
        let known: Vec<KeptSnapshot> =
            self.view.catalog.iter().filter(|kept| local.knows_name(kept)).cloned().collect();
        if known.len() == self.view.catalog.len() || !self.archive.rules.follow(Rule::Fence) {
            return Ok(());
        }
        // The takeover gives up these names before the directory can use the numbers of their files again.
        self.record_catalog(known).await
    }

    /// Creates the fence of a directory whose lineage was checked. `cut` is the last batch that the line keeps (rule 8).
    pub(super) async fn fence_at<L: LocalStore>(
        &mut self,
        local: &mut L,
        takeover: Takeover,
        cut: Option<BatchPoint>,
    ) -> Result<()> {
        if !self.archive.rules.follow(Rule::Fence) {
            self.writer =
                Some(Writer { term: self.view.links.fence, random: local.random(), data_objects: 0 });
            return Ok(());
        }
        let nonce = loop {
            // A repeated call sends the same bytes to the same position (rules 2 and 3): until then, its fence is in doubt.
            let tried = self.tried_fence.filter(|(position, _)| *position == self.view.next);
            let nonce = tried.map_or_else(|| self.archive.nonces.draw(), |(_, nonce)| nonce);
            self.tried_fence = Some((self.view.next, nonce));
            let object = self.fence_object(local, nonce, cut);
            // The nonce is durable before it is used: otherwise a crash leaves a fence that the directory does not know.
            record_fence(local, FenceRecord { position: object.position, nonce, is_confirmed: false })?;
            if self.create_fence(&object).await? {
                break nonce;
            }
            if cut.is_some() {
                return Err(Error::Superseded {
                    term: object.position,
                    found: ObjectKey::Line(object.position),
                });
            }
            // Another object took the position: the line has changed, and the lineage is checked again (rule 5).
            self.check_lineage(local, takeover)?;
        };
        let term = self.view.links.fence;
        self.check_created(term).await?;
        local.record_fences(&[FenceRecord { position: term, nonce, is_confirmed: true }])?;
        self.complete_boundaries().await?;
        // Only now may this process append: a call that failed before is repeated, with another fence.
        self.writer = Some(Writer { term, random: local.random(), data_objects: 0 });
        Ok(())
    }

    /// Begins a term without a directory: creates a fence without openings. The caller then reads the state up to the
    /// fence, restores it, and calls [`fence`](Line::fence). Reading first would lose every race to a busy writer.
    ///
    /// `nonce` is durable in the directory that is being restored. It serves for every position that is tried: where
    /// another object was found, this fence can never appear. Returns the record of the fence, which the directory keeps.
    ///
    /// # Errors
    /// Returns [`Error::Empty`] if there is nothing to restore, and the errors of [`fence`](Line::fence).
    pub async fn claim(&mut self, nonce: Nonce) -> Result<FenceRecord> {
        loop {
            let Some(newest) = &self.view.fence else { return Err(Error::Empty) };
            let fence = Fence { openings: Vec::new(), cut: None, ..newest.content.clone() };
            let object = self.next_object(self.view.next, nonce, Vec::new(), Content::Fence(fence));
            let object = LineObject { store: self.view.store.ok_or(Error::Empty)?, ..object };
            if self.create_fence(&object).await? {
                self.check_created(object.position).await?;
                return Ok(FenceRecord { position: object.position, nonce, is_confirmed: true });
            }
        }
    }

    /// Creates a fence at the next position. Returns false if another object is there, which is absorbed.
    async fn create_fence(&mut self, object: &LineObject) -> Result<bool> {
        let key = ObjectKey::Line(object.position);
        let bytes = object.encode().map_err(|source| Error::TooLarge { key, source })?;
        match self.create(key, &bytes, object.nonce).await? {
            Known::Ours => {
                self.view.absorb(object)?;
                Ok(true)
            }
            Known::Others(bytes) => {
                let other = LineObject::decode(&bytes, object.position, None);
                let other = other.map_err(|defect| Error::invalid(key, defect))?;
                if other.store != object.store {
                    return Err(Error::IdentityMismatch { found: other.store, expected: object.store });
                }
                if let Err(error) = self.view.absorb(&other) {
                    self.check_created(object.position).await?; // In a hole, objects of stalled openers do not fit.
                    return Err(error);
                }
                Ok(false)
            }
        }
    }

    fn fence_object<L: LocalStore>(&self, local: &L, nonce: Nonce, cut: Option<BatchPoint>) -> LineObject {
        let archived = cut.unwrap_or(self.view.archived);
        let openings = local.openings().into_iter().filter(|header| {
            header.opening.is_some_and(|opening| opening.incarnation.number > archived.incarnation.number)
        });
        let fence = Fence {
            store_file: local.store_file(),
            openings: openings.collect(),
            cut,
            follows_open_store: local.is_open(),
        };
        let position = self.view.next;
        let mut object = self.next_object(position, nonce, Vec::new(), Content::Fence(fence));
        object.store = local.store();
        object.archived = archived;
        if !self.archive.rules.follow(Rule::Pred) || !self.archive.rules.follow(Rule::Lineage) {
            object.archived = lowest_predecessor(&object).unwrap_or(archived);
        }
        object
    }

    /// Checks that the archive's end is in the history of the directory (rule 5), and that the archive is this store's
    /// and has not lost objects (rule 29).
    ///
    /// # Errors
    /// Returns [`Error::Diverged`], [`Error::ArchiveLost`] or [`Error::IdentityMismatch`]. Nothing was changed.
    pub fn check_lineage<L: LocalStore>(&self, local: &L, takeover: Takeover) -> Result<()> {
        let fences = local.fences();
        let confirmed =
            fences.iter().filter(|record| record.is_confirmed).map(|record| record.position).max();
        if let Some(recorded) = confirmed.filter(|position| *position >= self.view.next) {
            return Err(Error::ArchiveLost { recorded, end: self.view.next - 1 });
        }
        let Some(store) = self.view.store else { return Ok(()) };
        if store != local.store() {
            return Err(Error::IdentityMismatch { found: store, expected: local.store() });
        }
        let archived = self.view.archived;
        let diverged = |reason| Error::Diverged { archived, local: local.newest(), reason };
        if self.archive.rules.follow(Rule::Lineage) {
            let newest = self.view.fence.as_ref().map(|fence| fence.nonce);
            let is_known = newest.is_none_or(|nonce| fences.iter().any(|record| record.nonce == nonce));
            // Without fences there is nothing to know: a test then relies on the batches alone.
            if !is_known && takeover == Takeover::Refused && self.archive.rules.follow(Rule::Fence) {
                return Err(diverged(Divergence::UnknownFence));
            }
            let is_complete = self.view.catalog.iter().all(|kept| local.knows_name(kept));
            if !is_complete && takeover == Takeover::Refused {
                return Err(diverged(Divergence::UnknownName));
            }
            if archived.lsn.0 > 0
                && local.chain_of(archived.incarnation, archived.lsn)? != Some(archived.chain)
            {
                return Err(diverged(Divergence::NotOnLine));
            }
        }
        // [pred] An older copy of the directory can read the last archived batches without a mark. Its opening drops them.
        if self.archive.rules.follow(Rule::Pred) && !is_proven(local, &archived) {
            return Err(diverged(Divergence::Unproven));
        }
        Ok(())
    }
}

/// Returns true if no opening of the directory drops `archived`: the opening after its incarnation states a predecessor at
/// or above it.
fn is_proven<L: LocalStore>(local: &L, archived: &BatchPoint) -> bool {
    let after = |incarnation: Incarnation| incarnation.number > archived.incarnation.number;
    let openings = local.openings();
    let next =
        openings.iter().find(|header| header.opening.is_some_and(|opening| after(opening.incarnation)));
    next.is_none_or(|header| predecessor(header).lsn >= archived.lsn)
}

/// Returns the lowest predecessor of a fence's openings, if one is below the archived end.
fn lowest_predecessor(object: &LineObject) -> Option<BatchPoint> {
    let Content::Fence(fence) = &object.content else { return None };
    let lowest = fence.openings.iter().map(predecessor).min_by_key(|point| point.lsn);
    lowest.filter(|point| point.lsn < object.archived.lsn)
}

/// Adds a record of a fence. Records of positions that other objects took are dropped.
fn record_fence<L: LocalStore>(local: &mut L, record: FenceRecord) -> Result<()> {
    let mut fences = local.fences();
    fences.retain(|known| known.is_confirmed || known.position >= record.position);
    fences.retain(|known| *known != record);
    fences.push(record);
    // Without the record of a fence that was created after all, the directory needs a takeover.
    while fences.len() > FENCES_MAX
        && let Some(oldest) = fences.iter().position(|known| !known.is_confirmed)
    {
        fences.remove(oldest);
    }
    Ok(local.record_fences(&fences)?)
}
