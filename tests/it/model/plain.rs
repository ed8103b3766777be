//! The model: pages in a map, which is changed one step at a time. A draft is a batch together with the state
//! that the batch would produce.

use std::collections::BTreeMap;

use remanent::batch::{NewPage, PageRef, Width};
use remanent::error::{Invalid, Taken, Unavailable};
use remanent::snapshot::SnapshotInfo;
use remanent::{Epoch, Error, Key, Metadata, PageId, Place, SnapshotId, Value, WriteBatch};

use super::history::{Bad, KEYS, NAMES, Step, TIERS};

/// A page, with all properties that a store reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    pub key: Option<Key>,
    pub epoch: u64,
    pub lsn: u64,
    pub place: Place,
    pub metadata: Metadata,
    pub bytes: Vec<u8>,
}

/// The state of a store, and the history that the store must keep.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub pages: BTreeMap<PageId, Page>,
    pub root: Metadata,
    pub lsn: u64,
    /// Deleted pages.
    pub gone: Vec<PageId>,
    /// The kept snapshots, with their batches.
    pub snapshots: BTreeMap<SnapshotId, u64>,
    /// The names of snapshots.
    pub names: BTreeMap<SnapshotId, String>,
    /// Whether the store takes background snapshots. If so, the list of snapshots is taken from the store.
    pub in_background: bool,
    /// Whether the store moves pages with batches that the model does not predict. If so, the model contains
    /// the place that was requested last, and the page is in this place or in a lower tier. Its Lsn is
    /// unknown, and there are additional batches between those of the model.
    pub is_cramped: bool,
    /// The batch from which on the log is kept. A snapshot of an earlier batch can only be viewed.
    log_from: u64,
    /// The states after earlier batches.
    past: BTreeMap<u64, Past>,
    /// The highest epoch of any page so far.
    epoch_high: u64,
    /// The highest page id assigned so far.
    page_high: PageId,
}

/// Returns true if a page that was requested in `requested` may be in `found`. Tiers demote pages, but never
/// promote them without a request.
pub fn is_there_or_lower(requested: Place, found: Place) -> bool {
    let rank = |place| TIERS.iter().position(|tier| *tier == place);
    match (rank(requested), rank(found)) {
        (Some(requested), Some(found)) => found >= requested,
        _ => found == requested,
    }
}

/// The state after an earlier batch, with the highest numbers that were assigned by then.
#[derive(Clone, Debug)]
struct Past {
    pages: BTreeMap<PageId, Page>,
    root: Metadata,
    gone: Vec<PageId>,
    epoch_high: u64,
    page_high: PageId,
}

/// The kind of error with which a batch must fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    Conflict,
    OutOfBounds,
    UnknownPage,
    KeyTaken,
    Invalid,
    Place,
    Limit,
}

impl Refusal {
    pub const COUNT: usize = 7;

    pub fn is(self, error: &Error) -> bool {
        let found = match error {
            Error::Conflict { .. } => Refusal::Conflict,
            Error::OutOfBounds { .. } => Refusal::OutOfBounds,
            Error::UnknownPage { .. } => Refusal::UnknownPage,
            Error::Taken(Taken::Key { .. }) => Refusal::KeyTaken,
            Error::Invalid(Invalid::Operation { .. }) => Refusal::Invalid,
            Error::Unavailable(Unavailable::Place { .. }) => Refusal::Place,
            Error::Limit { .. } => Refusal::Limit,
            _ => return false,
        };
        self == found
    }
}

impl Model {
    /// Applies the changes of batch `lsn`. `created` contains the ids that the store assigned.
    pub fn install(&mut self, lsn: u64, changed: Changed, created: &[PageId]) {
        self.leave_to(lsn);
        assert_eq!(created.len(), changed.created, "one id for each create and clone");
        for page in created {
            assert!(*page > self.page_high, "page id {page} was given before");
            self.page_high = *page;
        }
        for slot in changed.slots {
            let page = match slot.name {
                Name::Old(page) => page,
                Name::New(_, index) => created[index],
            };
            match slot.page {
                Some(mut state) => {
                    if slot.touched || slot.moved {
                        state.lsn = self.lsn;
                    }
                    // A move does not change the epoch.
                    state.epoch += u64::from(slot.touched);
                    self.epoch_high = self.epoch_high.max(state.epoch);
                    self.pages.insert(page, state);
                }
                None => {
                    self.pages.remove(&page);
                    self.gone.push(page);
                }
            }
        }
        self.root = changed.root;
    }

    /// Records that a page was requested to be in a place, in a store that moves pages itself. `lsn` is the
    /// newest batch after the call.
    pub fn told_to(&mut self, page: PageId, place: Place, lsn: u64) {
        // In earlier states, the page is in the place that was requested then, or in a lower one. After a
        // promotion, the place requested now also satisfies this condition for the earlier states.
        if !is_there_or_lower(place, self.pages[&page].place) {
            self.leave_to(lsn);
        }
        self.pages.get_mut(&page).expect("it was picked").place = place;
    }

    /// Moves a page with a separate batch. Returns true if the page was in another place.
    pub fn move_to(&mut self, page: PageId, place: Place) -> bool {
        if self.pages[&page].place == place {
            return false;
        }
        self.leave();
        let moved = self.pages.get_mut(&page).expect("it was picked");
        (moved.place, moved.lsn) = (place, self.lsn);
        true
    }

    /// Sets a page's bytes with a separate batch.
    pub fn capture(&mut self, lsn: u64, page: PageId, bytes: Vec<u8>) {
        self.leave_to(lsn);
        let changed = self.pages.get_mut(&page).expect("it was picked");
        (changed.bytes, changed.lsn, changed.epoch) = (bytes, self.lsn, changed.epoch + 1);
        self.epoch_high = self.epoch_high.max(changed.epoch);
    }

    /// Selects one of the existing pages.
    pub fn page(&self, pick: usize) -> Option<PageId> {
        self.pages.keys().nth(pick % self.pages.len().max(1)).copied()
    }

    /// Keeps the current state as a snapshot. Also keeps the `count` newest snapshots and those with names,
    /// and removes all others.
    pub fn keep(&mut self, snapshot: SnapshotId, name: Option<&str>, count: usize) {
        if self.in_background {
            return;
        }
        assert!(self.snapshots.keys().all(|kept| *kept < snapshot), "{snapshot} was given before");
        self.snapshots.insert(snapshot, self.lsn);
        self.names.extend(name.map(|name| (snapshot, name.to_owned())));
        self.retain(count, None);
    }

    /// Removes snapshots that neither the count nor a name keeps. The snapshot of a released name stays if
    /// the count keeps it. Counts only snapshots after which the log is kept. The log before the oldest counted
    /// snapshot is removed.
    pub fn retain(&mut self, count: usize, given_up: Option<&str>) {
        if self.in_background {
            return;
        }
        let with_log = self.snapshots.iter().filter(|(_, end)| **end >= self.log_from);
        let with_log: Vec<(SnapshotId, u64)> = with_log.map(|(id, end)| (*id, *end)).collect();
        let oldest_counted = with_log.get(with_log.len().saturating_sub(count));
        if with_log.len() >= count {
            self.log_from = oldest_counted.map_or(self.log_from, |(_, end)| *end);
        }
        let oldest_counted = oldest_counted.map(|(id, _)| *id);
        let names = &self.names;
        let is_named = |id: &SnapshotId| names.get(id).is_some_and(|name| Some(name.as_str()) != given_up);
        self.snapshots.retain(|id, _| Some(*id) >= oldest_counted || is_named(id));
        self.names.retain(|id, _| self.snapshots.contains_key(id));
    }

    /// Removes the snapshot with this name unless it is the newest. Returns true if no snapshot has the name
    /// afterwards.
    pub fn give_up(&mut self, name: &str) -> bool {
        let newest = self.snapshots.keys().next_back().copied();
        let Some((&id, _)) = self.names.iter().find(|(_, held)| *held == name) else { return true };
        if Some(id) == newest {
            return false;
        }
        self.snapshots.remove(&id);
        self.names.remove(&id);
        true
    }

    /// Selects one of the names of snapshots.
    pub fn named(&self, pick: usize) -> Option<String> {
        self.names.values().nth(pick % self.names.len().max(1)).cloned()
    }

    /// Adopts the store's list of snapshots, which must include all named snapshots.
    pub fn adopt(&mut self, listed: &[SnapshotInfo]) {
        for (id, name) in &self.names {
            let info =
                listed.iter().find(|info| info.id == *id).unwrap_or_else(|| panic!("{name:?} is gone"));
            assert_eq!((info.name.as_ref(), info.end.0), (Some(name), self.snapshots[id]));
        }
        self.snapshots = listed.iter().map(|info| (info.id, info.end.0)).collect();
        self.names = listed.iter().filter_map(|info| Some((info.id, info.name.clone()?))).collect();
    }

    /// Selects one of the kept snapshots, or returns `None` if there are none.
    pub fn snapshot(&self, pick: usize) -> Option<SnapshotId> {
        self.snapshots.keys().nth(pick % self.snapshots.len().max(1)).copied()
    }

    /// Stores the current state as that of the last batch. Called before the next batch.
    fn leave(&mut self) {
        self.leave_to(self.lsn + 1);
    }

    /// Stores the current state as the state before batch `lsn`.
    fn leave_to(&mut self, lsn: u64) {
        assert!(lsn > self.lsn || self.is_cramped && lsn == self.lsn, "batch {lsn} comes after {}", self.lsn);
        let past = Past {
            pages: self.pages.clone(),
            root: self.root.clone(),
            gone: self.gone.clone(),
            epoch_high: self.epoch_high,
            page_high: self.page_high,
        };
        self.past.insert(self.lsn, past);
        self.lsn = lsn;
    }

    /// Removes the batches after `lsn`, which a crash lost. Only the store knows which snapshots remain, so
    /// its list is adopted.
    pub fn lose(&mut self, lsn: u64, listed: &[SnapshotInfo]) {
        if lsn < self.lsn {
            let Past { pages, root, gone, epoch_high, page_high } = self.past[&lsn].clone();
            self.past.retain(|earlier, _| *earlier < lsn);
            self.snapshots.retain(|_, end| *end <= lsn);
            *self = Self { pages, root, gone, epoch_high, page_high, lsn, ..std::mem::take(self) };
        }
        self.in_background = true;
        self.adopt(listed);
    }

    /// Returns the state after a batch as a model.
    pub fn at(&self, lsn: u64) -> Self {
        let (pages, root) = match self.past(lsn) {
            Some(past) => (past.pages.clone(), past.root.clone()),
            None => (self.pages.clone(), self.root.clone()),
        };
        Self { pages, root, lsn, in_background: true, is_cramped: self.is_cramped, ..Self::default() }
    }

    /// Returns the state after a batch, or `None` for the current state. For a batch that the model does not
    /// predict, returns the state of the previous batch.
    fn past(&self, lsn: u64) -> Option<&Past> {
        let is_present = lsn >= self.lsn;
        (!is_present).then(|| self.past.range(..=lsn).next_back().expect("the empty store is the first").1)
    }

    /// Returns the oldest batch from which on every batch is guaranteed to be restorable. This is the batch
    /// of the second newest snapshot followed by kept log, or of the oldest one.
    pub fn oldest(&self) -> u64 {
        let with_log = self.snapshots.values().filter(|end| **end >= self.log_from).copied();
        with_log.clone().rev().nth(1).or(with_log.last()).unwrap_or(0)
    }

    /// Restores an earlier state with the batch `position`. Pages whose content changed since then get an
    /// epoch above all others. Pages that only moved keep their epoch.
    pub fn restore(&mut self, lsn: u64, position: u64) {
        self.leave_to(position);
        let epoch = self.epoch_high + 1;
        let Past { pages: old, root, .. } = self.past(lsn).expect("it is past").clone();
        let now = std::mem::take(&mut self.pages);
        self.gone.extend(now.keys().filter(|page| !old.contains_key(page)));
        self.gone.retain(|page| !old.contains_key(page));
        for (page, mut state) in old {
            let now = now.get(&page);
            if now.is_none_or(|now| now.lsn != state.lsn) {
                state.lsn = self.lsn;
            }
            if now.is_none_or(|now| now.epoch != state.epoch) {
                state.epoch = epoch;
                self.epoch_high = epoch;
            }
            self.pages.insert(page, state);
        }
        self.root = root;
    }
}

/// The changes that a batch would make to the model.
pub struct Changed {
    slots: Vec<Slot>,
    created: usize,
    root: Metadata,
}

/// A page during a batch.
#[derive(Clone, Debug)]
struct Slot {
    name: Name,
    /// The page, or `None` if it is deleted.
    page: Option<Page>,
    touched: bool,
    moved: bool,
}

#[derive(Clone, Copy, Debug)]
enum Name {
    Old(PageId),
    /// A new page, with its index among the pages that the batch creates.
    New(NewPage, usize),
}

impl From<Name> for PageRef<'_> {
    fn from(name: Name) -> Self {
        match name {
            Name::Old(page) => page.into(),
            Name::New(page, _) => page.into(),
        }
    }
}

/// A batch under construction, with its changes.
pub struct Draft<'a> {
    model: &'a Model,
    batch: WriteBatch,
    changed: Changed,
}

impl<'a> Draft<'a> {
    pub fn new(model: &'a Model) -> Self {
        let slot = |(id, page): (&PageId, &Page)| Slot {
            name: Name::Old(*id),
            page: Some(page.clone()),
            touched: false,
            moved: false,
        };
        let slots = model.pages.iter().map(slot).collect();
        let changed = Changed { slots, created: 0, root: model.root.clone() };
        Self { model, batch: WriteBatch::default(), changed }
    }

    /// Returns the batch and its changes to the model. A batch that must fail gets some more steps after the
    /// invalid one. Their changes would be visible if any step were executed.
    pub fn finish(mut self, refusal: Option<Refusal>) -> (WriteBatch, Changed) {
        if refusal.is_some() {
            self.batch.set_root("refused", true);
            self.batch.create(5, Place::Host);
        }
        (self.batch, self.changed)
    }

    /// Adds a step. Returns the expected error if the step is invalid. Skips a step that needs a page if no
    /// page exists.
    pub fn step(&mut self, step: &Step) -> Option<Refusal> {
        match step {
            Step::Create { len, place, key, metadata } => {
                let key = key.map(|key| Key::new(KEYS[key]).unwrap());
                let metadata: Metadata =
                    metadata.iter().map(|(name, value)| (NAMES[*name].to_owned(), value.clone())).collect();
                let new = self
                    .batch
                    .create(u64::from(*len), *place)
                    .optional_key(key.clone())
                    .metadata(metadata.clone())
                    .page();
                let taken = key.is_some() && self.live().any(|page| page.key == key);
                let bytes = vec![0; usize::from(*len)];
                self.add(new, Page { key, epoch: 0, lsn: 0, place: *place, metadata, bytes });
                return taken.then_some(Refusal::KeyTaken);
            }
            Step::Clone { page } => {
                let slot = self.pick(*page)?;
                let copied = self.changed.slots[slot].page.clone().unwrap();
                let new = self.batch.clone_page(self.changed.slots[slot].name);
                self.add(new, Page { key: None, epoch: 0, lsn: 0, ..copied });
            }
            Step::Write { page, at, bytes } => {
                let (name, target) = self.touch(*page)?;
                let at = usize::from(*at) % (target.bytes.len() + 1);
                let bytes = &bytes[..bytes.len().min(target.bytes.len() - at)];
                target.bytes[at..at + bytes.len()].copy_from_slice(bytes);
                self.batch.write(name, at as u64, bytes);
            }
            Step::Masked { page, width, at, mask, seed } => {
                let (name, target) = self.touch(*page)?;
                let at = usize::from(*at) % (target.bytes.len() + 1);
                let count = mask.len().min((target.bytes.len() - at) / width.bytes());
                let bytes = drawn(*seed, count * width.bytes());
                let mut bits = vec![0; count.div_ceil(8)];
                for (element, _) in mask[..count].iter().enumerate().filter(|(_, set)| **set) {
                    bits[element / 8] |= 1 << (element % 8);
                    let range = element * width.bytes()..(element + 1) * width.bytes();
                    target.bytes[at..][range.clone()].copy_from_slice(&bytes[range]);
                }
                self.batch.write_masked(name, at as u64, *width, &bits, &bytes);
            }
            Step::Scatter { page, width, indices, seed } => {
                let (name, target) = self.touch(*page)?;
                let elements = target.bytes.len() / width.bytes();
                let mut distinct: Vec<u32> = Vec::new();
                for index in indices.iter().filter(|_| elements > 0) {
                    let index = (usize::from(*index) % elements) as u32;
                    if !distinct.contains(&index) {
                        distinct.push(index);
                    }
                }
                let values = drawn(*seed, distinct.len() * width.bytes());
                for (index, value) in distinct.iter().zip(values.chunks(width.bytes())) {
                    target.bytes[*index as usize * width.bytes()..][..width.bytes()].copy_from_slice(value);
                }
                self.batch.scatter(name, *width, &distinct, &values);
            }
            Step::Fill { page, width, at, count, seed } => {
                let (name, target) = self.touch(*page)?;
                let at = usize::from(*at) % (target.bytes.len() + 1);
                let count = usize::from(*count) % ((target.bytes.len() - at) / width.bytes() + 1);
                let pattern = drawn(*seed, width.bytes());
                let len = count * width.bytes();
                target.bytes[at..at + len].copy_from_slice(&pattern.repeat(count));
                self.batch.fill(name, at as u64, len as u64, &pattern);
            }
            Step::Resize { page, len } => {
                let (name, target) = self.touch(*page)?;
                target.bytes.resize(usize::from(*len), 0);
                self.batch.resize(name, u64::from(*len));
            }
            Step::Replace { page, len, seed } => {
                let (name, target) = self.touch(*page)?;
                let bytes = drawn(*seed, usize::from(*len));
                target.bytes.clone_from(&bytes);
                self.batch.resize(name, u64::from(*len)).write(name, 0, &bytes);
            }
            Step::Delete { page } => {
                let slot = self.pick(*page)?;
                self.changed.slots[slot].page = None;
                self.batch.delete(self.changed.slots[slot].name);
            }
            Step::Move { page, place } => {
                let slot = self.pick(*page)?;
                let slot = &mut self.changed.slots[slot];
                // If a page moves to or from disk, the move must precede its other changes.
                let is_on_disk = |place| place == Place::Disk;
                let crosses = is_on_disk(slot.page.as_ref()?.place) != is_on_disk(*place);
                // If the store moves pages itself, any page may be on disk.
                if (crosses || self.model.is_cramped) && (slot.touched || slot.moved) {
                    return None;
                }
                slot.moved = true;
                slot.page.as_mut()?.place = *place;
                self.batch.move_to(slot.name, *place);
            }
            Step::SetMetadata { page, name: entry, value } => {
                let (name, target) = self.touch(*page)?;
                target.metadata.insert(NAMES[*entry].to_owned(), value.clone());
                self.batch.set_metadata(name, NAMES[*entry], value.clone());
            }
            Step::RemoveMetadata { page, name: entry } => {
                let (name, target) = self.touch(*page)?;
                target.metadata.remove(NAMES[*entry]);
                self.batch.remove_metadata(name, NAMES[*entry]);
            }
            Step::SetRoot { name, value } => {
                self.changed.root.insert(NAMES[*name].to_owned(), value.clone());
                self.batch.set_root(NAMES[*name], value.clone());
            }
            Step::RemoveRoot { name } => {
                self.changed.root.remove(NAMES[*name]);
                self.batch.remove_root(NAMES[*name]);
            }
            Step::Note(text) => {
                self.batch.note(text.clone());
            }
            Step::Expect { page } => {
                let (id, epoch) = self.pick_committed(*page)?;
                self.batch.expect_epoch(id, Epoch(epoch));
            }
            Step::ExpectGone { page } => {
                let id = self.model.gone.get(page % self.model.gone.len().max(1)).copied();
                self.batch.expect_epoch(id.unwrap_or(PageId(u64::MAX)), Epoch(0));
            }
            Step::Bad(bad) => return self.bad(bad),
        }
        None
    }

    /// Adds an invalid step.
    fn bad(&mut self, bad: &Bad) -> Option<Refusal> {
        let refusal = match bad {
            Bad::Conflict { page, off_by } => {
                let (id, epoch) = self.pick_committed(*page)?;
                self.batch.expect_epoch(id, Epoch(epoch.checked_add_signed((*off_by).into())?));
                Refusal::Conflict
            }
            Bad::WriteOutside { page, past } => {
                let (name, len) = self.named(*page)?;
                let offset = if *past == 0 { u64::MAX } else { (len + usize::from(*past)) as u64 };
                self.batch.write(name, offset, &[1]);
                Refusal::OutOfBounds
            }
            Bad::FillOutside { page } => {
                let (name, len) = self.named(*page)?;
                self.batch.fill(name, len as u64, 4, &[1, 2]);
                Refusal::OutOfBounds
            }
            Bad::ScatterOutside { page, width } => {
                let (name, len) = self.named(*page)?;
                let index = (len / width.bytes()) as u32;
                self.batch.scatter(name, *width, &[index], &vec![1; width.bytes()]);
                Refusal::OutOfBounds
            }
            Bad::MaskedOutside { page, width } => {
                let (name, len) = self.named(*page)?;
                let at = len.saturating_sub(width.bytes() - 1) as u64;
                // If the page is shorter than an element, the range starts at 0 and is too long.
                self.batch.write_masked(
                    name,
                    at,
                    *width,
                    &[1],
                    &vec![1; width.bytes() * (len / width.bytes() + 1).min(8)],
                );
                Refusal::OutOfBounds
            }
            Bad::SameElementTwice { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.scatter(name, Width::W1, &[0, 1, 0], &[1, 2, 3]);
                Refusal::Invalid
            }
            Bad::PatternOfThree { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.fill(name, 0, 0, &[1, 2, 3]);
                Refusal::Invalid
            }
            Bad::FillNotWhole { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.fill(name, 0, 3, &[1, 2]);
                Refusal::Invalid
            }
            Bad::MaskTooShort { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.write_masked(name, 0, Width::W1, &[0xFF], &[0; 9]);
                Refusal::Invalid
            }
            Bad::ValuesTooFew { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.scatter(name, Width::W4, &[0], &[1, 2, 3]);
                Refusal::Invalid
            }
            Bad::GonePage { pick, what } => {
                let deleted_here = self.changed.slots.iter().filter(|slot| slot.page.is_none());
                let mut gone: Vec<PageRef> = deleted_here.map(|slot| slot.name.into()).collect();
                gone.extend(self.model.gone.iter().map(|page| PageRef::from(*page)));
                gone.extend([PageId(0), PageId(u64::MAX)].map(PageRef::from));
                let page = gone[pick % gone.len()];
                match what {
                    0 => drop(self.batch.write(page, 0, &[]).delete(page)),
                    1 => drop(self.batch.resize(page, 9)),
                    2 => drop(self.batch.delete(page)),
                    3 => drop(self.batch.set_metadata(page, "a", 1u64)),
                    4 => drop(self.batch.clone_page(page)),
                    5 => drop(self.batch.move_to(page, Place::Pinned)),
                    _ => drop(self.batch.scatter(page, Width::W1, &[], &[])),
                }
                Refusal::UnknownPage
            }
            Bad::KeyTaken { pick } => {
                let keys: Vec<Key> = self.live().filter_map(|page| page.key.clone()).collect();
                let key = keys.get(pick % keys.len().max(1))?.clone();
                self.batch.create(1, Place::Host).key(key);
                Refusal::KeyTaken
            }
            Bad::PlaceNowhere => {
                self.batch.create(1, Place::Device(64));
                Refusal::Place
            }
            Bad::MoveNowhere { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.move_to(name, Place::Device(64));
                Refusal::Place
            }
            Bad::TooLong => {
                self.batch.create((1 << 40) + 1, Place::Host);
                Refusal::Limit
            }
            Bad::LongName { page } => {
                let (name, _) = self.named(*page)?;
                self.batch.set_metadata(name, "n".repeat(256), true);
                Refusal::Limit
            }
            Bad::LongMetadata { page } => {
                let (name, _) = self.named(*page)?;
                // Each entry alone is short enough, but the two together are not.
                for entry in ["one", "two"] {
                    self.batch.set_metadata(name, entry, vec![0u8; 40 << 10]);
                }
                Refusal::Limit
            }
            Bad::DeepValue => {
                let deep = (0..40).fold(Value::Null, |inner, _| Value::List(vec![inner]));
                self.batch.set_root("deep", deep);
                Refusal::Limit
            }
            Bad::LongNote => {
                self.batch.note("n".repeat((64 << 10) + 1));
                Refusal::Limit
            }
        };
        Some(refusal)
    }

    fn live(&self) -> impl Iterator<Item = &Page> {
        self.changed.slots.iter().filter_map(|slot| slot.page.as_ref())
    }

    /// Selects a page that exists at this point of the batch.
    fn pick(&self, pick: usize) -> Option<usize> {
        let live: Vec<usize> =
            (0..self.changed.slots.len()).filter(|slot| self.changed.slots[*slot].page.is_some()).collect();
        live.get(pick % live.len().max(1)).copied()
    }

    /// Selects a page that existed before the batch, to which preconditions refer.
    fn pick_committed(&self, pick: usize) -> Option<(PageId, u64)> {
        let pages = &self.model.pages;
        pages.iter().nth(pick % pages.len().max(1)).map(|(id, page)| (*id, page.epoch))
    }

    fn named(&self, pick: usize) -> Option<(Name, usize)> {
        let slot = &self.changed.slots[self.pick(pick)?];
        slot.page.as_ref().map(|page| (slot.name, page.bytes.len()))
    }

    /// Selects an existing page for changes.
    fn touch(&mut self, pick: usize) -> Option<(Name, &mut Page)> {
        let slot = self.pick(pick)?;
        let slot = &mut self.changed.slots[slot];
        slot.touched = true;
        slot.page.as_mut().map(|page| (slot.name, page))
    }

    fn add(&mut self, new: NewPage, page: Page) {
        let name = Name::New(new, self.changed.created);
        self.changed.created += 1;
        self.changed.slots.push(Slot { name, page: Some(page), touched: true, moved: false });
    }
}

/// Returns bytes that differ from each other and from those of other seeds.
fn drawn(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed.wrapping_add((at as u8).wrapping_mul(37))).collect()
}
