//! Continues the line at an earlier batch (rule 8).

use super::fence::Takeover;
use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Divergence, Error, Result};
use crate::local::LocalStore;
use crate::object::BatchPoint;

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Starts a term with a fence that cuts the line at `point`. Until a boundary passes them, the batches above
    /// `point` can still be read by incarnation and Lsn. Named snapshots above `point` are removed from the catalog.
    ///
    /// Before this call, the caller must [claim](Line::claim) the archive, restore the state at `point` with
    /// [`read_state_at`](Line::read_state_at), and give the directory its own opening.
    ///
    /// # Errors
    /// Returns [`Error::Diverged`] if `point` is not in the history of the directory or if the directory has not
    /// recorded the newest fence, [`Error::CutTooOld`] if no kept manifest ends at or below `point`, and the errors of
    /// [`fence`](Line::fence).
    pub async fn fence_with_cut<L: LocalStore>(&mut self, local: &mut L, point: BatchPoint) -> Result<()> {
        let diverged = |reason| Error::Diverged { archived: point, local: local.newest(), reason };
        if local.chain_of(point.incarnation, point.lsn)? != Some(point.chain) {
            return Err(diverged(Divergence::NotOnLine));
        }
        let newest = self.view.fence.as_ref().map(|fence| fence.nonce);
        if newest.is_none_or(|nonce| local.fences().iter().all(|record| record.nonce != nonce)) {
            return Err(diverged(Divergence::UnknownFence));
        }
        // A restore of the end must start from a manifest without batches above the cut.
        let manifest = self.manifest_before(point.lsn).await?;
        self.view.manifest = manifest;
        self.view.links.manifest = manifest.map_or(0, |(position, _)| position);
        self.view.runs.clear();
        self.view.runs_above = point.lsn;
        let kept = self.view.catalog.len();
        self.fence_at(local, Takeover::Refused, Some(point)).await?;
        if self.view.catalog.len() < kept {
            self.record_catalog(self.view.catalog.clone()).await?;
        }
        Ok(())
    }
}
