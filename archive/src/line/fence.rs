//! Starts a term: claims, lineage checks and fences (rules 4, 5 and 29).

use remanent_format::Incarnation;

use super::request::{Body, Known};
use super::{Line, Nonces, Writer};
use crate::bucket::Bucket;
use crate::error::{Divergence, Error, Result};
use crate::local::{FenceRecord, LocalStore};
use crate::object::{BatchPoint, Content, Fence, KeptSnapshot, LineObject, Nonce, ObjectKey, predecessor};
use crate::rules::Rule;

/// Maximum number of recorded fences. If it is exceeded, the oldest record of unknown outcome is dropped.
const FENCES_MAX: usize = 256;

/// Whether a directory may create a fence if it has no record of the newest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// Reject the directory unless it recorded the newest fence, and contains or contained every named snapshot of the
    /// archive.
    Refused,
    /// Accept the directory, because the user guarantees that the writer of the newest fence will never continue. The
    /// last archived batch must still be in the history of the directory.
    Permitted,
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Starts a term: creates a fence, before anything is uploaded (rule 4). Call [`find`](Line::find) first, and call
    /// [`check_lineage`](Line::check_lineage) before the directory publishes its new opening.
    ///
    /// # Errors
    /// Returns the errors of [`check_lineage`](Line::check_lineage) with nothing changed, [`Error::Superseded`] if
    /// another writer created a fence first, and [`Error::Unknown`] if the bucket can no longer be reached. If
    /// [`term`](Line::term) returns a value after an error, the term has started, and the next append completes the
    /// remaining steps.
    pub async fn fence<L: LocalStore>(&mut self, local: &mut L, takeover: Takeover) -> Result<()> {
        self.check_lineage(local, takeover)?;
        self.fence_at(local, takeover, None).await?;
        let known: Vec<KeptSnapshot> =
            self.view.catalog.iter().filter(|kept| local.knows_name(kept)).cloned().collect();
        if known.len() == self.view.catalog.len() || !self.archive.rules.follow(Rule::Fence) {
            return Ok(());
        }
        // After a takeover, unknown names are removed before the directory can reuse the numbers of their files.
        self.record_catalog(known).await
    }

    /// Creates the fence of a directory whose lineage was checked. If `cut` is set, the fence cuts the line at this
    /// batch (rule 8).
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
            // A repeated call must send the same bytes to the same position, because an earlier create may still take
            // effect (rules 2 and 3).
            let tried = self.tried_fence.filter(|(position, _)| *position == self.view.next);
            let nonce = tried.map_or_else(|| self.archive.nonces.draw(), |(_, nonce)| nonce);
            self.tried_fence = Some((self.view.next, nonce));
            let object = self.fence_object(local, nonce, cut);
            // The nonce is made durable before it is used. Otherwise, after a crash, the directory would not recognize
            // its own fence.
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
            // Another object took the position, so the line has changed. The lineage is checked again (rule 5).
            self.check_lineage(local, takeover)?;
        };
        let term = self.view.links.fence;
        self.check_created(term).await?;
        local.record_fences(&[FenceRecord { position: term, nonce, is_confirmed: true }])?;
        self.complete_boundaries().await?;
        // This process may append only from here on. After an earlier error, the caller repeats the call.
        self.writer = Some(Writer { term, random: local.random(), data_objects: 0 });
        Ok(())
    }

    /// Starts a restore by creating a fence without openings, because the restore has no directory yet. The caller then
    /// reads the state up to the fence, restores it, and calls [`fence`](Line::fence). If a restore read the state
    /// first, a busy writer would always append before the fence is created.
    ///
    /// `nonce` must be durable in the directory that is being restored. The call uses the same nonce at every position
    /// that it tries, because the fence can never appear at a position where another object was found. Returns the
    /// record of the fence, which the caller stores in the directory.
    ///
    /// # Errors
    /// Returns [`Error::Empty`] if the archive contains no fence, and the errors of [`fence`](Line::fence).
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

    /// Creates a fence at the next position. If the position is taken by another object, applies that object to the
    /// view and returns false.
    async fn create_fence(&mut self, object: &LineObject) -> Result<bool> {
        let key = ObjectKey::Line(object.position);
        let bytes = object.encode().map_err(|source| Error::TooLarge { key, source })?;
        match self.create(key, Body::Borrowed(&bytes), object.nonce).await? {
            Known::Ours => {
                self.view.apply(object)?;
                Ok(true)
            }
            Known::Others(bytes) => {
                let other = LineObject::decode(&bytes, object.position, None);
                let other = other.map_err(|defect| Error::invalid(key, defect))?;
                if other.store != object.store {
                    return Err(Error::IdentityMismatch { found: other.store, expected: object.store });
                }
                if let Err(error) = self.view.apply(&other) {
                    self.check_created(object.position).await?; // A hole may contain objects of stalled processes.
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

    /// Checks that the last archived batch is in the history of the directory (rule 5), that the archive belongs to
    /// this store, and that it has not lost objects (rule 29).
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
            // If a test leaves out fences, no nonce is recorded, and the check relies on the batches alone.
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
        // [pred] An older copy of a directory may contain the last archived batches without a mark that proves them.
        // Its next opening drops these batches.
        if self.archive.rules.follow(Rule::Pred) && !is_proven(local, &archived) {
            return Err(diverged(Divergence::Unproven));
        }
        Ok(())
    }
}

/// Returns true if the directory keeps batch `archived`: no opening follows its incarnation, or the next one has a
/// predecessor at or above the batch.
fn is_proven<L: LocalStore>(local: &L, archived: &BatchPoint) -> bool {
    let after = |incarnation: Incarnation| incarnation.number > archived.incarnation.number;
    let openings = local.openings();
    let next =
        openings.iter().find(|header| header.opening.is_some_and(|opening| after(opening.incarnation)));
    next.is_none_or(|header| predecessor(header).lsn >= archived.lsn)
}

/// Returns the lowest predecessor of the openings in a fence, if it is below the last archived batch.
fn lowest_predecessor(object: &LineObject) -> Option<BatchPoint> {
    let Content::Fence(fence) = &object.content else { return None };
    let lowest = fence.openings.iter().map(predecessor).min_by_key(|point| point.lsn);
    lowest.filter(|point| point.lsn < object.archived.lsn)
}

/// Adds the record of a fence. Drops unconfirmed records of lower positions, which other objects took.
fn record_fence<L: LocalStore>(local: &mut L, record: FenceRecord) -> Result<()> {
    let mut fences = local.fences();
    fences.retain(|known| known.is_confirmed || known.position >= record.position);
    fences.retain(|known| *known != record);
    fences.push(record);
    // If the fence of a dropped record was created after all, the directory needs a takeover.
    while fences.len() > FENCES_MAX
        && let Some(oldest) = fences.iter().position(|known| !known.is_confirmed)
    {
        fences.remove(oldest);
    }
    Ok(local.record_fences(&fences)?)
}
