//! The part of the line that a process has read or appended.

use std::collections::BTreeMap;

use remanent_format::{Lsn, StoreId};

use crate::error::{Damage, Error, Result};
use crate::object::{
    BatchPoint, Boundary, Content, DataRef, Fence, KeptFence, KeptSnapshot, LineObject, Links, Manifest,
    Nonce, ObjectKey,
};

/// The part of the line that a process has read or appended: the newest object of each kind, and the lists of data
/// objects. The lists are those of all objects from the newest boundary's start on, and those of all kept snapshots.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// The id of the store, once an object was read.
    pub store: Option<StoreId>,
    /// The position for the next object.
    pub next: u64,
    /// The nonce of the object before the next position.
    pub nonce_before: Nonce,
    /// The links that the next object must contain.
    pub links: Links,
    /// The last archived batch.
    pub archived: BatchPoint,
    /// The lowest position that is kept: the start of the newest known boundary, or 1.
    pub start: u64,
    /// Number of the newest boundary whose copy was found or created, or 0.
    pub bound: u64,
    /// Number of the newest known boundary, or 0.
    pub boundary_number: u64,
    /// Boundaries found on the line that may have no copy yet, by position.
    pub boundaries: BTreeMap<u64, LineObject>,
    /// The newest fence.
    pub fence: Option<KeptFence>,
    /// Position and content of the newest manifest.
    pub manifest: Option<(u64, Manifest)>,
    /// The named snapshots that the archive keeps.
    pub catalog: Vec<KeptSnapshot>,
    /// Lists of data objects, by the position of the object that contains the list.
    pub listings: BTreeMap<u64, Vec<DataRef>>,
    /// Position and last Lsn of each run at or above the start of the newest manifest.
    pub runs: Vec<(u64, Lsn)>,
    /// `runs` contains every run with a batch above this Lsn.
    pub runs_above: Lsn,
}

impl Default for View {
    fn default() -> Self {
        Self {
            store: None,
            next: 1,
            nonce_before: Nonce::default(),
            links: Links::default(),
            archived: BatchPoint::default(),
            start: 1,
            bound: 0,
            boundary_number: 0,
            boundaries: BTreeMap::new(),
            fence: None,
            manifest: None,
            catalog: Vec::new(),
            listings: BTreeMap::new(),
            runs: Vec::new(),
            runs_above: Lsn(0),
        }
    }
}

impl View {
    /// Applies the object at the next position.
    pub fn apply(&mut self, object: &LineObject) -> Result<()> {
        let position = object.position;
        debug_assert_eq!(position, self.next);
        if object.nonce_before != self.nonce_before {
            return Err(Error::Damaged { key: ObjectKey::Line(position), damage: Damage::NotNext });
        }
        self.store.get_or_insert(object.store);
        match &object.content {
            Content::Fence(fence) => self.apply_fence(object, fence),
            Content::Run(run) => self.runs.push((position, run.after.lsn)),
            Content::Manifest(manifest) => {
                self.manifest = Some((position, *manifest));
                self.runs.retain(|(run, _)| *run >= manifest.start);
            }
            Content::Boundary(boundary) => {
                self.apply_boundary(object, boundary);
                self.catalog = boundary.snapshots.clone();
            }
            Content::Catalog(catalog) => self.catalog = catalog.snapshots.clone(),
        }
        if !object.data.is_empty() {
            self.listings.insert(position, object.data.clone());
        }
        self.links = object.links.after(object);
        self.archived = object.archived;
        self.nonce_before = object.nonce;
        self.next = position + 1;
        Ok(())
    }

    fn apply_fence(&mut self, object: &LineObject, fence: &Fence) {
        let kept = KeptFence { position: object.position, nonce: object.nonce, content: fence.clone() };
        self.fence = Some(kept);
        if fence.cut.is_some() && self.manifest.is_some_and(|(position, _)| position != object.links.manifest)
        {
            self.manifest = None; // The newest manifest is above the cut.
        }
        self.cut_catalog(fence);
    }

    /// Removes the named snapshots that a fence cuts off.
    pub fn cut_catalog(&mut self, fence: &Fence) {
        if let Some(cut) = fence.cut {
            self.catalog.retain(|kept| kept.batch.lsn <= cut.lsn);
        }
    }

    /// Returns the data objects listed by the objects from `start` on, and by the catalogs of `kept` below it. Lists
    /// that were not read are skipped.
    pub fn kept_lists<'a>(
        &'a self,
        start: u64,
        kept: &'a [KeptSnapshot],
    ) -> impl Iterator<Item = &'a DataRef> {
        let below = kept.iter().map(|kept| kept.position).filter(move |position| *position < start);
        let below = below.filter_map(|position| self.listings.get(&position));
        self.listings.range(start..).map(|(_, listed)| listed).chain(below).flatten()
    }

    pub fn apply_boundary(&mut self, object: &LineObject, boundary: &Boundary) {
        self.boundary_number = self.boundary_number.max(boundary.number);
        self.start = self.start.max(boundary.start);
        self.boundaries.insert(object.position, object.clone());
    }

    /// Returns the position of the first known run with a batch above `redo`, or the next position if there is none.
    pub fn start_of(&self, redo: Lsn) -> u64 {
        self.runs.iter().find(|(_, after)| *after > redo).map_or(self.next, |(position, _)| *position)
    }
}
