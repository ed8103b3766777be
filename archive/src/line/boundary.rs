//! Appends boundaries, copies them to `bound/`, and deletes the objects that they release (rules 14, 15 and 17 to 20).
//!
//! A *boundary* is a line object that states the lowest position to keep, its start. It releases the objects below the
//! start, except the catalogs of the named snapshots that it lists, and the data objects that no remaining object
//! lists. A *sweep* deletes released objects. Sweeps lag one boundary behind: after boundary *k* was appended, a sweep
//! deletes the objects that boundary *k* - 1 released. A reader that started before boundary *k* thus still finds the
//! objects that boundary *k* releases.

use std::collections::{BTreeSet, HashSet};

use super::append::{AppendOutcome, Draft};
use super::request::{Body, Known, READS_MAX};
use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Damage, Error, Result};
use crate::object::{
    Bound, Boundary, Content, DataKey, DataRef, Folder, KeptFence, KeptSnapshot, Manifest, ObjectKey,
};
use crate::rules::Rule;

/// Proof that the bucket contains every part of a manifest with the stated bytes (rule 18). Required by
/// [`prune`](Line::prune).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    manifest: u64,
}

impl Verified {
    /// Creates the proof for the manifest at a position. The caller guarantees that the server verified the checksum of
    /// every part during its upload.
    #[must_use]
    pub fn by_server(manifest: u64) -> Self {
        Self { manifest }
    }
}

/// The progress of reading back a manifest: the parts that were not read yet (rule 18).
#[derive(Clone, Debug)]
pub struct Verification {
    manifest: u64,
    left: Vec<DataRef>,
}

/// The result of a prune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pruned {
    /// Nothing was released: there is no manifest, a boundary starts at or above the start of the newest manifest, or
    /// the proof belongs to another manifest.
    Nothing,
    /// A boundary was appended, and the objects that the previous boundary released were deleted.
    Boundary {
        /// Number of the new boundary.
        number: u64,
        /// The lowest position that the new boundary keeps.
        start: u64,
        /// Number of deleted objects.
        swept: Swept,
    },
}

/// The changes that a prune would make.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrunePlan {
    /// Number of the boundary that would be appended.
    pub number: u64,
    /// The lowest position that the boundary would keep.
    pub start: u64,
    /// Keys of the objects that would be deleted: those that the newest existing boundary released.
    pub deletes: Vec<ObjectKey>,
}

/// The number of objects that a sweep deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Number of deleted line objects.
    pub line_objects: u64,
    /// Number of deleted data objects.
    pub data_objects: u64,
    /// Number of deletes that the bucket rejected. The sweep continues after a rejected delete, and the next sweep
    /// repeats it.
    pub refused: u64,
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Reads back every part of the newest manifest, and returns a proof that all are intact (rule 18). Returns `None`
    /// if there is no manifest.
    ///
    /// # Errors
    /// Returns [`Error::Damaged`] if a part is missing or invalid.
    pub async fn verify_manifest(&mut self) -> Result<Option<Verified>> {
        let Some(mut verification) = self.verification() else { return Ok(None) };
        loop {
            if let Some(verified) = self.verify_next(&mut verification).await? {
                return Ok(Some(verified));
            }
        }
    }

    /// Starts reading back the newest manifest part by part. Skips parts that this handle has already read back for an
    /// earlier manifest. Returns `None` if there is no manifest.
    #[must_use]
    pub fn verification(&mut self) -> Option<Verification> {
        let (manifest, _) = self.view.manifest?;
        let mut left = self.view.listings.get(&manifest).cloned().unwrap_or_default();
        let listed: HashSet<DataKey> = left.iter().map(|entry| entry.key).collect();
        self.verified.retain(|key| listed.contains(key));
        left.retain(|entry| !self.verified.contains(&entry.key));
        Some(Verification { manifest, left })
    }

    /// Reads back a few parts concurrently. Returns the proof after the last part, and `None` before. Other objects may
    /// be appended between two calls.
    ///
    /// # Errors
    /// Returns the errors of [`verify_manifest`](Line::verify_manifest).
    pub async fn verify_next(&mut self, verification: &mut Verification) -> Result<Option<Verified>> {
        let count = verification.left.len().min(READS_MAX);
        let entries = verification.left.split_off(verification.left.len() - count);
        let Some(store) = self.view.store.filter(|_| count > 0) else {
            return Ok(Some(Verified { manifest: verification.manifest }));
        };
        let mut read = Vec::with_capacity(count);
        let result = self.need_each_data(&entries, store, verification.manifest, |entry, _| {
            read.push(entry.key);
            Ok(0)
        });
        let result = result.await;
        self.verified.extend(read);
        result.map(|()| None)
    }

    /// Returns the position of the newest manifest, or `None` if there is none.
    #[must_use]
    pub fn newest_manifest(&self) -> Option<u64> {
        self.view.manifest.map(|(position, _)| position)
    }

    /// Appends a boundary that starts at the start of the newest manifest, and deletes the objects that the previous
    /// boundary released. The boundary keeps the named snapshots of the newest catalog. A process without a fence may
    /// also call this, after [`find`](Line::find).
    ///
    /// Returns [`Pruned::Nothing`] if there is nothing to release, or if `verified` belongs to another manifest.
    ///
    /// # Errors
    /// Returns [`Error::AppendPending`] if an earlier append is not complete, [`Error::Busy`] if this process has no
    /// fence and a writer appended concurrently, and the errors of [`append_run`](Line::append_run).
    pub async fn prune(&mut self, verified: Verified) -> Result<Pruned> {
        if self.has_pending() {
            return Err(Error::AppendPending);
        }
        let Some((position, manifest)) = self.view.manifest else { return Ok(Pruned::Nothing) };
        let start = self.boundary_start(position, &manifest);
        if start <= self.view.start || verified.manifest != position {
            return Ok(Pruned::Nothing);
        }
        self.complete_boundaries().await?;
        let before = self.view.start;
        if !self.archive.rules.follow(Rule::BFirst) {
            self.sweep(start, before, &self.view.catalog.clone()).await?;
        }
        let Some(number) = self.append_boundary(start, position).await? else {
            return Ok(Pruned::Nothing);
        };
        self.complete_boundaries().await?;
        // [lag] Deletes lag one boundary behind: a reader has the time until the next boundary to finish (rule 19).
        let lags = self.archive.rules.follow(Rule::Lag);
        let swept = self
            .sweep_boundary(if lags { number - 1 } else { number }, if lags { before } else { start })
            .await?;
        Ok(Pruned::Boundary { number, start, swept })
    }

    /// Returns the changes that [`prune`](Line::prune) would make, or `None` if it would change nothing. This call
    /// itself changes nothing. Call [`find`](Line::find) first.
    ///
    /// # Errors
    /// Returns [`Error::Damaged`] or [`Error::Bucket`] if an object cannot be read.
    pub async fn would_prune(&mut self) -> Result<Option<PrunePlan>> {
        let Some((position, manifest)) = self.view.manifest else { return Ok(None) };
        let start = self.boundary_start(position, &manifest);
        if start <= self.view.start {
            return Ok(None);
        }
        let mut plan = PrunePlan { number: self.view.boundary_number + 1, start, deletes: Vec::new() };
        let number = self.view.boundary_number;
        if number == 0 {
            return Ok(Some(plan));
        }
        let (start, kept) = self.boundary_of(number).await?;
        let before = if number > 1 { self.start_of_bound(number - 1).await? } else { 1 };
        let positions = self.positions_below(start, start, &kept).await?;
        let left: Vec<u64> = positions.iter().copied().filter(|position| *position < before).collect();
        if let Some(data) = self.dead_data(start, &kept, &left).await? {
            let line = positions.into_iter().map(ObjectKey::Line);
            plan.deletes.extend(data.into_iter().map(ObjectKey::Data).chain(line));
            plan.deletes.sort_unstable();
        }
        Ok(Some(plan))
    }

    /// Returns the start of a boundary over a manifest: the position of the run that contains its `redo` (rule 17,
    /// [redo]).
    fn boundary_start(&self, position: u64, manifest: &Manifest) -> u64 {
        if self.archive.rules.follow(Rule::Redo) { manifest.start } else { position }
    }

    /// Appends a boundary (rule 14, [bline]). Returns its number, or `None` if another boundary starts at or above
    /// `start`.
    async fn append_boundary(&mut self, start: u64, manifest: u64) -> Result<Option<u64>> {
        let fence = self.fence_below(start).await?;
        let snapshots = self.view.catalog.clone();
        let number = self.view.bound + 1;
        let boundary = Boundary { number, start, manifest, fence, snapshots };
        if !self.archive.rules.follow(Rule::BLine) {
            self.copy_to_free_number(&boundary).await?;
            return Ok(Some(self.view.bound));
        }
        self.set_pending(Draft::Boundary(boundary.clone()));
        let AppendOutcome::Appended(appended) = self.create_pending(None).await? else { return Ok(None) };
        // The number of this boundary. The check after its create may already have found newer boundaries.
        let own = self.view.boundaries.get(&appended.position).map(|object| Bound { object: object.clone() });
        let number = own.map_or(self.view.boundary_number, |bound| bound.number());
        if !self.archive.rules.follow(Rule::BComp) {
            self.copy_to_free_number(&boundary).await?;
        }
        Ok(Some(number))
    }

    /// Returns the newest fence below `start`, which a restore from there needs (rule 17).
    pub(super) async fn fence_below(&mut self, start: u64) -> Result<Option<KeptFence>> {
        let mut position = self.view.links.fence;
        while position >= start {
            position = self.need_line(position).await?.links.fence;
        }
        if position == 0 {
            return Ok(None);
        }
        if position >= self.view.start {
            let object = self.need_line(position).await?;
            let nonce = object.nonce;
            let Content::Fence(content) = object.content else {
                return Err(Error::Damaged { key: ObjectKey::Line(position), damage: Damage::NotNext });
            };
            return Ok(Some(KeptFence { position, nonce, content }));
        }
        // The copy of a boundary may be missing if its writer stopped between the two creates.
        if let Some(Content::Boundary(boundary)) =
            self.view.boundaries.values().next_back().map(|object| &object.content)
        {
            return Ok(boundary.fence.clone());
        }
        let bound = self.get_bound(self.view.bound).await?;
        Ok(bound.and_then(|bound| bound.boundary().and_then(|boundary| boundary.fence.clone())))
    }

    /// Creates the missing copies of the boundaries that this process found on the line (rule 15, [bcomp]). All
    /// processes create the same bytes, so it does not matter which one is first.
    ///
    /// # Errors
    /// Returns [`Error::Superseded`] if the copy with this number belongs to another boundary.
    pub(super) async fn complete_boundaries(&mut self) -> Result<()> {
        let rules = self.archive.rules;
        if !rules.follow(Rule::BComp) || !rules.follow(Rule::Chain) {
            self.view.boundaries.clear();
            return Ok(());
        }
        while let Some((_, object)) = self.view.boundaries.pop_first() {
            let bound = Bound { object };
            let number = bound.number();
            if number <= self.view.bound {
                continue;
            }
            let key = ObjectKey::Bound(number);
            let bytes = bound.encode().map_err(|source| Error::TooLarge { key, source })?;
            let position = bound.object.position;
            let known = self.create(key, Body::Borrowed(&bytes), bound.object.nonce).await;
            if known.is_err() {
                self.view.boundaries.insert(position, bound.object);
            }
            if let Known::Others(_) = known? {
                let term = self.term().unwrap_or(self.view.links.fence);
                return Err(Error::Superseded { term, found: key });
            }
            self.view.bound = number;
        }
        Ok(())
    }

    /// Copies a boundary to the first free number, for a test that leaves out the rule [bcomp] or [bline].
    async fn copy_to_free_number(&mut self, boundary: &Boundary) -> Result<()> {
        if !self.archive.rules.follow(Rule::Chain) {
            return Ok(());
        }
        loop {
            let number = self.view.bound + 1;
            let content = Content::Boundary(Boundary { number, ..boundary.clone() });
            let term = self.term().unwrap_or(self.view.links.fence);
            let object = self.next_object(term, self.archive.nonces.draw(), Vec::new(), content);
            let key = ObjectKey::Bound(number);
            let nonce = object.nonce;
            let bytes = Bound { object }.encode().map_err(|source| Error::TooLarge { key, source })?;
            let known = self.create(key, Body::Borrowed(&bytes), nonce).await?;
            self.view.bound = number;
            let Known::Others(bytes) = known else { break };
            let other = Bound::decode(&bytes, number, None).map_err(|defect| Error::invalid(key, defect))?;
            if other.boundary().is_some_and(|other| other.start >= boundary.start) {
                break;
            }
        }
        self.view.start = self.view.start.max(boundary.start);
        Ok(())
    }

    /// Deletes the objects that boundary `number` released. `start_known` is the start of the boundary, for a test that
    /// leaves out the copies.
    async fn sweep_boundary(&mut self, number: u64, start_known: u64) -> Result<Swept> {
        if number == 0 {
            return Ok(Swept::default());
        }
        if !self.archive.rules.follow(Rule::Chain) {
            return self.sweep(start_known, 1, &self.view.catalog.clone()).await;
        }
        // [exact] Applies the boundary with this number, not a newer one: this process has not read the line up to a
        // newer one.
        let (start, kept) = if self.archive.rules.follow(Rule::Exact) {
            self.boundary_of(number).await?
        } else {
            (self.view.start, self.view.catalog.clone())
        };
        let before = if number > 1 { self.start_of_bound(number - 1).await? } else { 1 };
        self.sweep(start, before, &kept).await
    }

    /// Returns the start of a boundary whose copy must exist.
    pub(super) async fn start_of_bound(&mut self, number: u64) -> Result<u64> {
        self.boundary_of(number).await.map(|(start, _)| start)
    }

    /// Returns the start of a boundary and the named snapshots that it keeps.
    async fn boundary_of(&mut self, number: u64) -> Result<(u64, Vec<KeptSnapshot>)> {
        let of = |boundary: &Boundary| (boundary.start, boundary.snapshots.clone());
        if let Some(bound) = self.get_bound(number).await? {
            return Ok(bound.boundary().map(of).unwrap_or_default());
        }
        // The writer of the boundary may have stopped before it created the copy.
        let mut found = self.view.boundaries.values().filter_map(|object| match &object.content {
            Content::Boundary(boundary) if boundary.number == number => Some(of(boundary)),
            _ => None,
        });
        found.next().ok_or_else(|| Error::missing(ObjectKey::Bound(number)))
    }

    /// Deletes the line objects below `start` except the catalogs of `kept`, and the data objects that neither these
    /// catalogs nor the objects from `start` on list. Earlier sweeps deleted the objects below `before`.
    ///
    /// The caller must have read the line from `start` up to a boundary above it. Objects appended later list only data
    /// that these objects list, or data with new keys (rules 11 and 12).
    async fn sweep(&mut self, start: u64, before: u64, kept: &[KeptSnapshot]) -> Result<Swept> {
        // [names] The named snapshots of the boundary are kept (rule 17).
        let kept = if self.archive.rules.follow(Rule::Names) { kept } else { &[] };
        let positions = self.positions_below(start, before, kept).await?;
        let left: Vec<u64> = positions.iter().copied().filter(|position| *position < before).collect();
        let Some(dead) = self.dead_data(start, kept, &left).await? else { return Ok(Swept::default()) };
        let mut swept = Swept::default();
        for key in dead {
            let deleted = self.delete(ObjectKey::Data(key)).await;
            *if deleted { &mut swept.data_objects } else { &mut swept.refused } += 1;
        }
        // Line objects are deleted last: after an interrupted sweep, the next one still needs their lists. The same
        // applies after a refused delete, for example because of an object lock.
        if swept.refused > 0 {
            return Ok(swept);
        }
        for position in positions {
            let deleted = self.delete(ObjectKey::Line(position)).await;
            *if deleted { &mut swept.line_objects } else { &mut swept.refused } += 1;
        }
        if self.archive.rules.follow(Rule::Dedup) {
            let kept: HashSet<u64> = self.view.catalog.iter().map(|kept| kept.position).collect();
            self.view.listings.retain(|position, _| *position >= start || kept.contains(position));
        }
        Ok(swept)
    }

    /// Returns the sorted keys of the data objects that no object from `start` on and no catalog of `kept` lists. Also
    /// reads the lists of the objects at the positions `left`, which earlier sweeps did not delete; they may be
    /// missing.
    ///
    /// Returns `None` if nothing may be deleted: the object at `start` is missing, or a catalog of `kept` is missing or
    /// damaged, so that it is unknown which data it shares with other objects.
    async fn dead_data(
        &self,
        start: u64,
        kept: &[KeptSnapshot],
        left: &[u64],
    ) -> Result<Option<Vec<DataKey>>> {
        let Some(first) = self.get_line(start).await? else { return Ok(None) };
        let mut keys: HashSet<DataKey> = self.view.kept_lists(start, &[]).map(|entry| entry.key).collect();
        for kept in kept.iter().filter(|kept| kept.position < start) {
            let listed = match self.kept_list(kept).await {
                Ok(Some(listed)) => listed,
                Ok(None) | Err(Error::Damaged { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            keys.extend(listed.iter().map(|entry| entry.key));
        }
        let kept = keys;
        let mut dead: HashSet<DataKey> = HashSet::new();
        let mut position = first.links.listing;
        while position > 0 {
            // An earlier sweep deleted this object, and before that the data objects that it listed.
            let Some(object) = self.get_line(position).await? else { break };
            dead.extend(object.data.iter().map(|entry| entry.key).filter(|key| !kept.contains(key)));
            position = object.links.listing;
        }
        for position in left {
            let listed = match self.get_line(*position).await {
                Ok(found) => found.map_or_else(Vec::new, |object| object.data),
                // A hole may contain the object of a stalled process of another store.
                Err(Error::Damaged { .. }) => Vec::new(),
                Err(error) => return Err(error),
            };
            dead.extend(listed.iter().map(|entry| entry.key).filter(|key| !kept.contains(key)));
        }
        dead.extend(self.unlisted(&kept).await?);
        let mut dead: Vec<_> = dead.into_iter().collect();
        dead.sort_unstable();
        Ok(Some(dead))
    }

    /// Returns the keys of data objects that no kept object lists and whose writer is superseded (rule 20, [unnamed]).
    /// Objects that the listing does not contain yet are found by a later sweep.
    async fn unlisted(&self, kept: &HashSet<DataKey>) -> Result<Vec<DataKey>> {
        let rules = self.archive.rules;
        if !rules.follow(Rule::UKeys) {
            return Ok(Vec::new());
        }
        let newest_term = self.view.links.fence;
        let mut unlisted = Vec::new();
        for name in self.list(Folder::Data).await? {
            let Some(ObjectKey::Data(key)) = ObjectKey::parse(&name) else { continue };
            let is_superseded = key.term < newest_term || !rules.follow(Rule::Unnamed);
            if is_superseded && !kept.contains(&key) {
                unlisted.push(key);
            }
        }
        Ok(unlisted)
    }

    /// Returns the sorted positions of the line objects to delete: the objects below `before` that the bucket still
    /// lists, and all objects from `before` up to `start`. Excludes the catalogs of `kept`.
    async fn positions_below(&self, start: u64, before: u64, kept: &[KeptSnapshot]) -> Result<Vec<u64>> {
        let names = self.list(Folder::Line).await?;
        let left = names.iter().filter_map(|name| match ObjectKey::parse(name) {
            Some(ObjectKey::Line(position)) if position < before => Some(position),
            _ => None,
        });
        let is_kept = |position: &u64| kept.iter().any(|kept| kept.position == *position);
        let positions = left.chain(before..start).filter(|position| !is_kept(position));
        let positions: BTreeSet<u64> = positions.collect();
        Ok(positions.into_iter().collect())
    }
}
