//! Finds the newest boundary and the end of the line by GET (rules 15 and 22).

use super::view::View;
use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Error, Result};
use crate::object::{Bound, Content, DataRef, Folder, Hint, KeptFence, KeptSnapshot, LineObject, ObjectKey};
use crate::rules::Rule;

/// Number of attempts to find the end. Each failed attempt was overtaken by a boundary.
const FIND_ATTEMPTS: u32 = 12;

/// Determines which lists of data objects are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lists {
    /// Every kept list. A writer needs them all.
    All,
    /// Only the list of the newest manifest, so that the number of requests does not depend on the number of objects.
    OfManifest,
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Finds the end of the line. Also reads the newest manifest and every kept list of data objects (rule 22).
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] if a boundary overtook every attempt, [`Error::Damaged`] if an object is missing or
    /// invalid, and [`Error::Bucket`] if the bucket cannot be reached.
    pub async fn find(&mut self) -> Result<()> {
        self.find_with(Lists::All).await
    }

    /// Finds the end of the line for a reader. The number of requests grows with the logarithm of the number of
    /// objects. A writer calls [`find`](Line::find).
    ///
    /// # Errors
    /// Returns the errors of [`find`](Line::find).
    pub async fn find_to_read(&mut self) -> Result<()> {
        self.find_with(Lists::OfManifest).await
    }

    /// Finds the end of the line. Also reads the newest manifest and the given lists of data objects.
    pub(super) async fn find_with(&mut self, lists: Lists) -> Result<()> {
        let hint = self.hint().await;
        for _ in 0..FIND_ATTEMPTS {
            self.view = View { store: self.view.store, ..View::default() };
            self.newest_boundary(hint.map_or(0, |hint| hint.bound)).await?;
            let start = self.view.start;
            let found = self.read_end(start, hint.map_or(0, |hint| hint.end), lists).await;
            if let Err(error) = found {
                match self.unless_overtaken(error, start).await? {
                    Error::Overtaken { .. } => continue,
                    error => return Err(error),
                }
            }
            if !self.archive.rules.follow(Rule::RCheck) {
                return Ok(());
            }
            // [rcheck] If the range has become a hole, the last object that was read is not the end.
            let known = self.view.bound;
            self.find_newer_boundary().await?;
            if self.view.bound == known || self.newest_bound_start(known).await? <= start {
                return Ok(());
            }
        }
        Err(Error::Overtaken { position: self.view.start })
    }

    /// Returns the start of the newest boundary that was found by GET if its number is above `known`, and 0 otherwise.
    async fn newest_bound_start(&self, known: u64) -> Result<u64> {
        if self.view.bound <= known {
            return Ok(0);
        }
        let bound = self.get_bound(self.view.bound).await?;
        Ok(bound.as_ref().and_then(Bound::boundary).map_or(0, |boundary| boundary.start))
    }

    /// Returns the hint, or `None` if it is missing, invalid or unreadable. A hint only saves requests.
    async fn hint(&self) -> Option<Hint> {
        let bytes = self.archive.bucket.get(ObjectKey::Newest, None).await.ok()??;
        Hint::decode(&bytes, self.view.store).ok()
    }

    /// Finds the newest boundary by an exponential and then a binary search (rule 15, [chain]). The search starts at
    /// number `hint` if that boundary exists.
    async fn newest_boundary(&mut self, hint: u64) -> Result<()> {
        if !self.archive.rules.follow(Rule::Chain) {
            return Ok(());
        }
        let mut newest = None;
        if hint > self.view.bound {
            newest = self.get_bound(hint).await?;
        }
        let mut low = newest.as_ref().map_or(self.view.bound, Bound::number);
        let mut step = 1;
        while let Some(bound) = self.get_bound(low + step).await? {
            low = bound.number();
            newest = Some(bound);
            step *= 2;
        }
        // `low` exists (or is the initial number), `high` does not.
        let mut high = low + step;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match self.get_bound(middle).await? {
                Some(bound) => {
                    low = middle;
                    newest = Some(bound);
                }
                None => high = middle,
            }
        }
        if let Some(bound) = &newest {
            self.apply_bound(bound);
        }
        Ok(())
    }

    /// Looks for boundaries above the newest known one. If there is none, this takes a single GET.
    pub(super) async fn find_newer_boundary(&mut self) -> Result<()> {
        self.newest_boundary(0).await
    }

    pub(super) fn apply_bound(&mut self, bound: &Bound) {
        let Some(boundary) = bound.boundary() else { return };
        // After the line was read, its newest objects determine the catalog.
        if self.view.next == 1 && boundary.number > self.view.bound {
            self.view.catalog = boundary.snapshots.clone();
        }
        self.view.bound = self.view.bound.max(boundary.number);
        self.view.boundary_number = self.view.boundary_number.max(boundary.number);
        self.view.start = self.view.start.max(boundary.start);
        self.view.store.get_or_insert(bound.object.store);
        self.apply_kept_fence(&boundary.fence);
    }

    fn apply_kept_fence(&mut self, kept: &Option<KeptFence>) {
        let Some(kept) = kept else { return };
        if self.view.fence.as_ref().is_none_or(|known| known.position < kept.position) {
            self.view.fence = Some(kept.clone());
        }
    }

    /// Finds the end of the line above `start`, from which the line has no missing positions, and reads the objects
    /// that it links to.
    async fn read_end(&mut self, start: u64, hint: u64, lists: Lists) -> Result<()> {
        if !self.exists(ObjectKey::Line(start)).await? {
            if start == 1 {
                return Ok(()); // Empty, or a boundary has passed; the caller checks which.
            }
            return Err(self.missing(ObjectKey::Line(start), start).await?);
        }
        let mut known = start;
        if hint > known && self.exists(ObjectKey::Line(hint)).await? {
            known = hint;
        }
        let end = self.end_after(known).await?;
        let last = self.need_line(end).await?;
        self.read_back(&last, start, lists).await
    }

    /// Returns the last position of the line, by an exponential and then a binary search. The object at `known` must
    /// exist, and no position between `known` and the end may be missing.
    pub(super) async fn end_after(&self, known: u64) -> Result<u64> {
        let (mut low, mut step) = (known, 1);
        while self.exists(ObjectKey::Line(low + step)).await? {
            low += step;
            step *= 2;
        }
        let mut high = low + step;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.exists(ObjectKey::Line(middle)).await? { low = middle } else { high = middle }
        }
        Ok(low)
    }

    /// Reads the objects that the last object links to: boundaries without copies, the newest fence and manifest, and
    /// objects with lists of data objects.
    async fn read_back(&mut self, last: &LineObject, lowest: u64, lists: Lists) -> Result<()> {
        self.view.store = Some(last.store);
        let links = last.links.after(last);
        self.view.links = links;
        self.view.next = last.position + 1;
        self.view.nonce_before = last.nonce;
        self.view.archived = last.archived;
        self.view.runs_above = last.archived.lsn;
        self.read_boundaries(links.boundary, lowest).await?;
        if links.fence >= self.view.start.max(lowest) {
            let object = self.need_line(links.fence).await?;
            let Content::Fence(fence) = object.content else { return Err(self.wrong_link(links.fence)) };
            self.view.fence = Some(KeptFence { position: links.fence, nonce: object.nonce, content: fence });
        }
        if links.manifest >= self.view.start.max(lowest) {
            let object = self.need_line(links.manifest).await?;
            let Content::Manifest(manifest) = object.content else {
                return Err(self.wrong_link(links.manifest));
            };
            self.view.manifest = Some((links.manifest, manifest));
            self.view.listings.insert(links.manifest, object.data);
        }
        self.read_catalog(lowest).await?;
        if lists == Lists::OfManifest {
            return Ok(());
        }
        let mut position = links.listing;
        while position >= self.view.start.max(lowest) {
            let object = self.need_line(position).await?;
            self.view.listings.insert(position, object.data);
            position = object.links.listing;
        }
        for kept in self.view.catalog.clone() {
            // A missing or damaged catalog must not prevent a writer from opening.
            match self.kept_list(&kept).await {
                Ok(Some(listed)) => _ = self.view.listings.insert(kept.position, listed),
                Ok(None) | Err(Error::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads the kept named snapshots from the newest catalog or boundary, and drops those that a later fence cuts off.
    async fn read_catalog(&mut self, lowest: u64) -> Result<()> {
        let (catalog, newest) = (self.view.links.catalog, self.view.links.boundary);
        if catalog > newest && catalog >= self.view.start.max(lowest) {
            let Content::Catalog(content) = self.need_line(catalog).await?.content else {
                return Err(self.wrong_link(catalog));
            };
            self.view.catalog = content.snapshots;
        } else if let Some(object) = self.view.boundaries.get(&newest)
            && let Content::Boundary(boundary) = &object.content
        {
            self.view.catalog = boundary.snapshots.clone();
        }
        if let Some(fence) = self.view.fence.clone().filter(|fence| fence.position > catalog.max(newest)) {
            self.view.cut_catalog(&fence.content);
        }
        Ok(())
    }

    /// Returns the data objects of a kept snapshot, or `None` if the catalog that lists them no longer exists.
    pub(super) async fn kept_list(&self, kept: &KeptSnapshot) -> Result<Option<Vec<DataRef>>> {
        if let Some(listed) = self.view.listings.get(&kept.position) {
            return Ok(Some(listed.clone()));
        }
        let object = self.get_line(kept.position).await?;
        // A hole may contain another object, created by a stalled writer.
        Ok(object.filter(|object| object.nonce == kept.nonce).map(|object| object.data))
    }

    /// Reads the boundaries of the line that have no copy yet.
    async fn read_boundaries(&mut self, newest: u64, lowest: u64) -> Result<()> {
        let mut position = newest;
        while self.archive.rules.follow(Rule::BComp) && position >= lowest {
            let object = self.need_line(position).await?;
            let Content::Boundary(boundary) = &object.content else { return Err(self.wrong_link(position)) };
            if boundary.number <= self.view.bound {
                break;
            }
            self.view.apply_boundary(&object, boundary);
            self.apply_kept_fence(&boundary.fence.clone());
            position = object.links.boundary;
        }
        Ok(())
    }

    fn wrong_link(&self, position: u64) -> Error {
        Error::Damaged { key: ObjectKey::Line(position), damage: crate::error::Damage::NotNext }
    }

    /// Lists the names in the folders of the archive that are not keys of an archive object. The protocol ignores them.
    ///
    /// # Errors
    /// Returns [`Error::Bucket`] if a listing fails.
    pub async fn unknown_names(&self) -> Result<Vec<String>> {
        let mut unknown = Vec::new();
        for folder in [Folder::Line, Folder::Bound, Folder::Data] {
            let names = self.list(folder).await?;
            unknown.extend(names.into_iter().filter(|name| ObjectKey::parse(name).is_none()));
        }
        Ok(unknown)
    }

    /// Returns the names that a listing of `folder` contains.
    pub(super) async fn list(&self, folder: Folder) -> Result<Vec<String>> {
        for attempt in 1.. {
            match self.archive.bucket.list(folder).await {
                Ok(names) => return Ok(names),
                Err(source) if self.archive.bucket.pause(attempt, &source).await => {}
                Err(source) => return Err(Error::Bucket { action: "list", key: ObjectKey::Newest, source }),
            }
        }
        unreachable!("the loop ends only by a return");
    }

    /// Overwrites the hint with the current end of the line. A writer calls this at most once every ten seconds and
    /// ignores errors.
    ///
    /// # Errors
    /// Returns [`Error::Bucket`] if the request fails.
    pub async fn write_hint(&self) -> Result<()> {
        let Some(store) = self.view.store else { return Ok(()) };
        let hint =
            Hint { end: self.view.next - 1, manifest: self.view.links.manifest, bound: self.view.bound };
        let bytes = hint.encode(store, self.term().unwrap_or(0));
        let failed = |source| Error::Bucket { action: "put", key: ObjectKey::Newest, source };
        self.archive.bucket.put(ObjectKey::Newest, &bytes).await.map_err(failed)
    }
}
