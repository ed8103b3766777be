//! Finds the newest boundary and the end of the line by GET (rules 15 and 22).

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::{join, join_all};

use super::view::View;
use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Error, Result};
use crate::object::{
    Bound, Content, DataKey, DataRef, Folder, Hint, KeptFence, KeptSnapshot, LineObject, Links, ObjectKey,
    Role,
};
use crate::rules::Rule;

/// Maximum number of attempts to find the end. An attempt fails if a boundary overtakes it.
const FIND_ATTEMPTS: u32 = 12;

/// Line objects that were read, by position.
type Linked = BTreeMap<u64, LineObject>;

/// Maximum number of objects for which a search looks concurrently.
const PROBES_MAX: u64 = 16;
/// Number of objects for which a search first looks: boundaries, boundaries after the one in a hint, and positions. For
/// positions after the one in a hint, see [`Hint::PROBES`].
const FIRST_BOUNDS: u32 = 6;
const HINTED_BOUNDS: u32 = 1;
const FIRST_POSITIONS: u32 = 8;

/// Determines which lists of data objects are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lists {
    /// Every kept list. A writer needs all of them.
    All,
    /// Only the list of the newest manifest, so that the number of requests does not depend on the number of objects.
    OfManifest,
}

/// Returns the last number above `low` for which `look` finds an object, with the object, or `low` if there is none. No
/// number between `low` and the last one may be missing. First looks for `first` numbers concurrently, at distances 1,
/// 3, 7 and so on, and then divides the range between the last found and the first missing number.
///
/// If objects are created meanwhile, the result was the last number at some time during the search.
async fn last_after<T, F>(low: u64, first: u32, look: impl Fn(u64) -> F) -> Result<(u64, Option<T>)>
where
    F: Future<Output = Result<Option<T>>>,
{
    let (base, mut low, mut high, mut found) = (low, low, None, None);
    let mut distances = (1..63).map(|power| (1_u64 << power) - 1);
    let mut count = first as usize;
    loop {
        let numbers: Vec<u64> = match high {
            None => distances.by_ref().take(count).map(|distance| base + distance).collect(),
            Some(high) => {
                let step = (high - low - 1) / (PROBES_MAX + 1) + 1;
                (1..).map(|index| low + index * step).take_while(|number| *number < high).collect()
            }
        };
        count = PROBES_MAX as usize;
        if numbers.is_empty() {
            return Ok((low, found));
        }
        for (number, answer) in numbers.iter().zip(join_all(numbers.iter().map(|n| look(*n))).await) {
            match answer? {
                Some(object) if *number > low => (low, found) = (*number, Some(object)),
                None if *number > low => {
                    high = Some(high.map_or(*number, |high: u64| high.min(*number)));
                }
                _ => {}
            }
        }
        high = high.filter(|high| *high > low);
    }
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Finds the end of the line. Also reads the newest manifest and every kept list of data objects (rule 22).
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] if a boundary overtook every attempt, [`Error::Damaged`] if an object is missing or
    /// invalid, and [`Error::Bucket`] if the bucket cannot be reached.
    pub async fn find(&mut self) -> Result<()> {
        self.find_with(Lists::All, Rule::RCheck).await
    }

    /// Finds the end of the line for a reader. The number of requests grows with the logarithm of the number of
    /// objects. A writer calls [`find`](Line::find).
    ///
    /// # Errors
    /// Returns the errors of [`find`](Line::find).
    pub async fn find_to_read(&mut self) -> Result<()> {
        self.find_with(Lists::OfManifest, Rule::RCheck).await
    }

    /// Finds the end of the line for a [`claim`](Line::claim), like [`find_to_read`](Line::find_to_read). Does not look
    /// for newer boundaries at the end: the claim does so after its create (rule 16, [`Rule::Check`]).
    ///
    /// # Errors
    /// Returns the errors of [`find`](Line::find).
    pub async fn find_to_claim(&mut self) -> Result<()> {
        self.find_with(Lists::OfManifest, Rule::Check).await
    }

    /// Finds the end of the line. Also reads the newest manifest and the given lists of data objects. `check` is the
    /// rule by which the process detects that a boundary has passed the end: [`Rule::RCheck`], or [`Rule::Check`] if
    /// the process creates the next object.
    pub(super) async fn find_with(&mut self, lists: Lists, check: Rule) -> Result<()> {
        let hint = self.hint().await.unwrap_or_default();
        for _ in 0..FIND_ATTEMPTS {
            self.view = View { store: self.view.store, ..View::default() };
            self.newest_boundary(hint.bound, FIRST_BOUNDS).await?;
            let start = self.view.start;
            let found = self.read_end(start, hint.end, lists).await;
            if let Err(error) = found {
                match self.unless_overtaken(error, start).await? {
                    Error::Overtaken { .. } => continue,
                    error => return Err(error),
                }
            }
            // An archive that looks empty may have a boundary that has passed its first object.
            if check != Rule::RCheck && self.view.next > 1 || !self.archive.rules.follow(Rule::RCheck) {
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

    /// Finds the newest boundary by a search (rule 15, [chain]), which starts at number `hint` if that boundary exists.
    /// First looks for `first` boundaries concurrently.
    async fn newest_boundary(&mut self, hint: u64, first: u32) -> Result<()> {
        if !self.archive.rules.follow(Rule::Chain) {
            return Ok(());
        }
        let line = &*self;
        // Only the newest one is decoded: damage of another must not prevent the search.
        let look = |number| line.get(ObjectKey::Bound(number));
        let low = line.view.bound;
        let mut newest = None;
        if hint > low {
            let (at, after) = join(look(hint), last_after(hint, HINTED_BOUNDS, look)).await;
            if let Some(bytes) = at? {
                let (number, after) = after?;
                newest = Some((number, after.unwrap_or(bytes)));
            }
        }
        if newest.is_none() {
            let (number, found) = last_after(low, first, look).await?;
            newest = found.map(|bytes| (number, bytes));
        }
        if let Some((number, bytes)) = &newest {
            let bound = self.decode_bound(*number, bytes)?;
            self.apply_bound(&bound);
        }
        Ok(())
    }

    /// Searches for boundaries above the newest known boundary. If there is none, the search takes a single GET.
    pub(super) async fn find_newer_boundary(&mut self) -> Result<()> {
        self.newest_boundary(0, 1).await
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
        let line = &*self;
        let exists = |position| line.exists(ObjectKey::Line(position));
        let (has_start, end) = if hint > start {
            let at_hint = join(exists(hint), line.end_after(hint, Hint::PROBES));
            let (has_start, (has_hint, end)) = join(exists(start), at_hint).await;
            (has_start?, if has_hint? { Some(end?) } else { None })
        } else {
            let (has_start, end) = join(exists(start), line.end_after(start, FIRST_POSITIONS)).await;
            (has_start?, Some(end?))
        };
        // A prefetched answer may be older than the boundary, whose first object was then created after the request.
        if !has_start && (start == 1 || !self.exists(ObjectKey::Line(start)).await?) {
            if start == 1 {
                return Ok(()); // The line is empty, or a boundary has passed. The caller distinguishes the two cases.
            }
            return Err(self.missing(ObjectKey::Line(start), start).await?);
        }
        let end = match end {
            Some(end) => end,
            None => self.end_after(start, FIRST_POSITIONS).await?,
        };
        let last = self.need_line(end).await?;
        self.read_back(&last, start, lists).await
    }

    /// Returns the last position of the line, by a search that first looks for `first` positions concurrently. The
    /// object at `known` must exist, and no position between `known` and the end may be missing.
    pub(super) async fn end_after(&self, known: u64, first: u32) -> Result<u64> {
        let look = |position| async move { Ok(self.exists(ObjectKey::Line(position)).await?.then_some(())) };
        Ok(last_after(known, first, look).await?.0)
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
        let mut ahead = self.read_linked(last, lowest).await;
        self.read_boundaries(links.boundary, lowest, &mut ahead).await?;
        if links.fence >= self.view.start.max(lowest) {
            let object = self.linked(links.fence, &mut ahead).await?;
            let Content::Fence(fence) = object.content else { return Err(self.wrong_link(links.fence)) };
            self.view.fence = Some(KeptFence { position: links.fence, nonce: object.nonce, content: fence });
        }
        if links.manifest >= self.view.start.max(lowest) {
            let object = self.linked(links.manifest, &mut ahead).await?;
            let Content::Manifest(manifest) = object.content else {
                return Err(self.wrong_link(links.manifest));
            };
            self.view.manifest = Some((links.manifest, manifest));
            self.view.listings.insert(links.manifest, object.data);
        }
        self.read_catalog(lowest, &mut ahead).await?;
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

    /// Concurrently reads the objects to which the last object links. If a read fails, the caller repeats it.
    async fn read_linked(&self, last: &LineObject, lowest: u64) -> Linked {
        let Links { fence, boundary, manifest, catalog, listing: _ } = last.links.after(last);
        let linked: BTreeSet<u64> = [fence, boundary, manifest, catalog].into();
        let positions = linked.into_iter().filter(|position| (lowest..last.position).contains(position));
        let read = |position| async move { (position, self.get_line(position).await) };
        let found = join_all(positions.map(read)).await.into_iter();
        let found = found.filter_map(|(position, object)| Some((position, object.ok()??)));
        found.chain([(last.position, last.clone())]).collect()
    }

    /// Returns an object that was read, or reads it.
    async fn linked(&mut self, position: u64, ahead: &mut Linked) -> Result<LineObject> {
        match ahead.get(&position) {
            Some(object) => Ok(object.clone()),
            None => self.need_line(position).await,
        }
    }

    /// Reads the kept named snapshots from the newest catalog or boundary, and drops those that a later fence cuts off.
    async fn read_catalog(&mut self, lowest: u64, ahead: &mut Linked) -> Result<()> {
        let (catalog, newest) = (self.view.links.catalog, self.view.links.boundary);
        if catalog > newest && catalog >= self.view.start.max(lowest) {
            let Content::Catalog(content) = self.linked(catalog, ahead).await?.content else {
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
    async fn read_boundaries(&mut self, newest: u64, lowest: u64, ahead: &mut Linked) -> Result<()> {
        let mut position = newest;
        while self.archive.rules.follow(Rule::BComp) && position >= lowest {
            let object = self.linked(position, ahead).await?;
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

    /// Returns the hint at the objects that a restore of the end reads.
    pub(crate) fn hint_at_end(&self) -> Hint {
        let view = &self.view;
        let Links { manifest, fence, boundary, catalog, listing: _ } = view.links;
        let start = view.manifest.map_or(view.start, |(_, manifest)| manifest.start);
        let kept = view.catalog.iter().map(|kept| kept.position);
        let lines = [view.start, fence, boundary, catalog].into_iter().chain(kept.rev());
        let lines: BTreeSet<u64> = lines.filter(|position| *position > 0).take(Hint::LINES_MAX).collect();
        let after = view.listings.range(start.max(manifest + 1)..).map(|(_, listed)| listed);
        let kept = view.catalog.iter().rev().filter_map(|kept| view.listings.get(&kept.position));
        let listed = view.listings.get(&manifest).into_iter().chain(after).chain(kept).flatten();
        // A restore on demand fetches images later, and other restores have further requests to send meanwhile.
        let mut data: Vec<DataKey> = Vec::new();
        for entry in listed.filter(|entry| entry.part.role != Role::Images) {
            if data.len() < Hint::DATA_MAX && !data.contains(&entry.key) {
                data.push(entry.key);
            }
        }
        let (end, bound) = (view.next - 1, view.bound);
        Hint { end, manifest, bound, start, lines: lines.into_iter().collect(), data }
    }

    /// Overwrites the hint with the current end of the line. A writer calls this at most once every ten seconds and
    /// ignores errors.
    ///
    /// # Errors
    /// Returns [`Error::Bucket`] if the request fails.
    pub async fn write_hint(&self) -> Result<()> {
        let Some(store) = self.view.store else { return Ok(()) };
        let bytes = self.hint_at_end().encode(store, self.term().unwrap_or(0));
        let failed = |source| Error::Bucket { action: "put", key: ObjectKey::Newest, source };
        self.archive.bucket.put(ObjectKey::Newest, &bytes).await.map_err(failed)
    }
}
