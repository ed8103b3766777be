//! The expected content of a store: a simple model with one state for every Lsn. It shares no code with the
//! engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent::batch::{ByteSource, InitialCopy, NewPage, PageRef, Shadow, Width};
use remanent::follow::Replica;
use remanent::{Key, Metadata, PageId, PageInfo, Place, Store, Value, View, WriteBatch};

/// A page that an operation refers to: an existing page, or the n-th page that the same batch creates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    Page(PageId),
    New(usize),
}

impl Target {
    /// Returns the id of the page. `new` contains the ids of the pages that the batch creates.
    fn id(self, new: &[PageId]) -> PageId {
        match self {
            Target::Page(page) => page,
            Target::New(index) => new[index],
        }
    }
}

/// One operation of a batch.
#[derive(Clone, Debug)]
pub enum Act {
    Create {
        len: usize,
        key: Option<Key>,
        metadata: Metadata,
    },
    /// Creates a page from a source.
    Stream {
        bytes: Vec<u8>,
    },
    /// Replaces all bytes of a page, and its length, from a source.
    Replace {
        page: Target,
        bytes: Vec<u8>,
    },
    /// Captures all bytes of an existing page from a working copy.
    Capture {
        page: PageId,
        bytes: Vec<u8>,
    },
    Clone {
        source: Target,
    },
    Write {
        page: Target,
        offset: usize,
        bytes: Vec<u8>,
    },
    Masked {
        page: Target,
        offset: usize,
        width: Width,
        mask: Vec<u8>,
        bytes: Vec<u8>,
    },
    Scatter {
        page: Target,
        width: Width,
        indices: Vec<u32>,
        values: Vec<u8>,
    },
    Fill {
        page: Target,
        offset: usize,
        len: usize,
        pattern: Vec<u8>,
    },
    Resize {
        page: Target,
        len: usize,
    },
    Delete {
        page: Target,
    },
    Move {
        page: Target,
        place: Place,
    },
    SetMetadata {
        page: Target,
        name: String,
        value: u64,
    },
    RemoveMetadata {
        page: Target,
        name: String,
    },
    SetRoot {
        name: String,
        value: u64,
    },
    RemoveRoot {
        name: String,
    },
}

/// A source that supplies these bytes.
#[derive(Debug)]
struct OfBytes(Vec<u8>);

impl ByteSource for OfBytes {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<()> {
        let Self(own) = self;
        bytes.copy_from_slice(&own[offset as usize..offset as usize + bytes.len()]);
        Ok(())
    }
}

/// Builds the batch of these operations.
pub fn batch(store: &Store, acts: &[Act]) -> WriteBatch {
    let mut batch = store.batch();
    let mut new: Vec<NewPage> = Vec::new();
    for act in acts {
        let at = |page: &Target| match page {
            Target::Page(page) => PageRef::from(*page),
            Target::New(index) => PageRef::from(new[*index]),
        };
        match act {
            Act::Create { len, key, metadata } => {
                new.push(
                    batch
                        .create(*len as u64, Place::Host)
                        .optional_key(key.clone())
                        .metadata(metadata.clone())
                        .page(),
                );
            }
            Act::Stream { bytes } => {
                let source = Arc::new(OfBytes(bytes.clone()));
                new.push(batch.create_from_source(bytes.len() as u64, source, Place::Host).page());
            }
            Act::Replace { page, bytes } => {
                let source = Arc::new(OfBytes(bytes.clone()));
                batch.replace_from_source(at(page), bytes.len() as u64, source);
            }
            Act::Capture { page, bytes } => {
                let tensor = store.device_bytes(bytes.len() as u64, Place::Device(0)).unwrap();
                tensor.write(0, bytes).unwrap();
                // Each kind of shadow is used equally often.
                let shadow =
                    if page.0.is_multiple_of(2) { Shadow::Kept(Place::Host) } else { Shadow::Digest };
                let initial_copy = InitialCopy::Store;
                batch.capture(
                    &store.working_copy_in(*page, &tensor, Width::W1, shadow, initial_copy).unwrap(),
                );
            }
            Act::Clone { source } => {
                let source = at(source);
                new.push(batch.clone_page(source));
            }
            Act::Write { page, offset, bytes } => {
                batch.write(at(page), *offset as u64, bytes);
            }
            Act::Masked { page, offset, width, mask, bytes } => {
                batch.write_masked(at(page), *offset as u64, *width, mask, bytes);
            }
            Act::Scatter { page, width, indices, values } => {
                batch.scatter(at(page), *width, indices, values);
            }
            Act::Fill { page, offset, len, pattern } => {
                batch.fill(at(page), *offset as u64, *len as u64, pattern);
            }
            Act::Resize { page, len } => {
                batch.resize(at(page), *len as u64);
            }
            Act::Delete { page } => {
                batch.delete(at(page));
            }
            Act::Move { page, place } => {
                batch.move_to(at(page), *place);
            }
            Act::SetMetadata { page, name, value } => {
                batch.set_metadata(at(page), name.as_str(), *value);
            }
            Act::RemoveMetadata { page, name } => {
                batch.remove_metadata(at(page), name.as_str());
            }
            Act::SetRoot { name, value } => {
                batch.set_root(name.as_str(), *value);
            }
            Act::RemoveRoot { name } => {
                batch.remove_root(name.as_str());
            }
        }
    }
    batch
}

/// The expected content of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    pub key: Option<Key>,
    pub epoch: u64,
    pub lsn: u64,
    pub place: Place,
    pub metadata: Metadata,
    pub bytes: Vec<u8>,
}

/// The expected state of a whole store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    pub pages: BTreeMap<PageId, Arc<Page>>,
    pub root: Metadata,
}

impl State {
    /// Returns the state after one more batch. `new` contains the ids of the pages that the batch creates.
    fn after(&self, lsn: u64, acts: &[Act], new: &[PageId]) -> Self {
        let mut state = self.clone();
        let mut ids = new.iter().copied();
        for act in acts {
            state.apply(lsn, act, new, &mut ids);
        }
        // A move changes the Lsn of a page but not its epoch, whatever else the batch changes.
        let moved = acts.iter().filter_map(|act| match act {
            Act::Move { page, .. } => Some(page.id(new)),
            _ => None,
        });
        for page in moved {
            if let Some(page) = state.pages.get_mut(&page) {
                Arc::make_mut(page).lsn = lsn;
            }
        }
        assert_eq!(ids.next(), None, "one id for every page created");
        state
    }

    fn apply(&mut self, lsn: u64, act: &Act, new: &[PageId], ids: &mut impl Iterator<Item = PageId>) {
        let id = |page: &Target| page.id(new);
        let mut create = |page: Page| {
            self.pages.insert(ids.next().expect("an id for every page created"), Arc::new(page));
        };
        match act {
            Act::Create { len, key, metadata } => {
                let (key, metadata) = (key.clone(), metadata.clone());
                create(Page { key, epoch: 1, lsn, place: Place::Host, metadata, bytes: vec![0; *len] });
            }
            Act::Stream { bytes } => {
                let (place, metadata, bytes) = (Place::Host, Metadata::new(), bytes.clone());
                create(Page { key: None, epoch: 1, lsn, place, metadata, bytes });
            }
            Act::Replace { page, bytes } => self.touch(id(page), lsn).bytes.clone_from(bytes),
            Act::Capture { page, bytes } => self.touch(*page, lsn).bytes.clone_from(bytes),
            Act::Clone { source } => {
                let source = (*self.pages[&id(source)]).clone();
                self.pages.insert(
                    ids.next().expect("an id for every page created"),
                    Arc::new(Page { key: None, epoch: 1, lsn, ..source }),
                );
            }
            Act::Write { page, offset, bytes } => {
                self.touch(id(page), lsn).bytes[*offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Act::Masked { page, offset, width, mask, bytes } => {
                let target = &mut self.touch(id(page), lsn).bytes[*offset..offset + bytes.len()];
                let elements = target.chunks_mut(width.bytes()).zip(bytes.chunks(width.bytes()));
                for (index, (target, element)) in elements.enumerate() {
                    if mask[index / 8] & 1 << (index % 8) != 0 {
                        target.copy_from_slice(element);
                    }
                }
            }
            Act::Scatter { page, width, indices, values } => {
                let page = self.touch(id(page), lsn);
                for (index, value) in indices.iter().zip(values.chunks(width.bytes())) {
                    let at = *index as usize * width.bytes();
                    page.bytes[at..at + width.bytes()].copy_from_slice(value);
                }
            }
            Act::Fill { page, offset, len, pattern } => {
                let target = &mut self.touch(id(page), lsn).bytes[*offset..offset + len];
                target.chunks_mut(pattern.len()).for_each(|chunk| chunk.copy_from_slice(pattern));
            }
            Act::Resize { page, len } => self.touch(id(page), lsn).bytes.resize(*len, 0),
            Act::Delete { page } => {
                self.pages.remove(&id(page));
            }
            Act::Move { page, place } => {
                Arc::make_mut(self.pages.get_mut(&id(page)).expect("the page exists")).place = *place;
            }
            Act::SetMetadata { page, name, value } => {
                self.touch(id(page), lsn).metadata.insert(name.clone(), Value::from(*value));
            }
            Act::RemoveMetadata { page, name } => {
                self.touch(id(page), lsn).metadata.remove(name);
            }
            Act::SetRoot { name, value } => {
                self.root.insert(name.clone(), Value::from(*value));
            }
            Act::RemoveRoot { name } => {
                self.root.remove(name);
            }
        }
    }

    /// Returns a page for modification. The epoch rises once per batch, however many operations of the batch
    /// change the page.
    fn touch(&mut self, page: PageId, lsn: u64) -> &mut Page {
        let page = Arc::make_mut(self.pages.get_mut(&page).expect("the page exists"));
        if page.lsn != lsn {
            (page.lsn, page.epoch) = (lsn, page.epoch + 1);
        }
        page
    }

    /// Describes the first difference between two states.
    pub fn difference(&self, found: &State) -> Option<String> {
        for page in self.pages.keys().chain(found.pages.keys()) {
            let (expected, found) = (self.pages.get(page), found.pages.get(page));
            if expected != found {
                return Some(format!("page {page}: expected {expected:?}, found {found:?}"));
            }
        }
        (self.root != found.root).then(|| format!("root: expected {:?}, found {:?}", self.root, found.root))
    }
}

/// Returns a page with the metadata and bytes read from a store.
fn page_of(info: &PageInfo, bytes: Vec<u8>) -> Page {
    let PageInfo { key, epoch, lsn, place, metadata, .. } = info.clone();
    Page { key, epoch: epoch.0, lsn: lsn.0, place, metadata: (*metadata).clone(), bytes }
}

/// Reads the state of a store through its public interface.
pub fn read(store: &Store) -> remanent::Result<State> {
    let mut state = State { root: (*store.root()?).clone(), ..State::default() };
    for info in store.pages()? {
        let mut bytes = vec![0; info.len as usize];
        if info.len > 0 {
            store.read(info.page, 0, &mut bytes)?;
        }
        state.pages.insert(info.page, Arc::new(page_of(&info, bytes)));
    }
    Ok(state)
}

/// Reads the state of a view.
pub fn looked_at(old: &View) -> remanent::Result<State> {
    let mut state = State { root: (**old.root()).clone(), ..State::default() };
    for info in old.pages() {
        let mut bytes = vec![0; info.len as usize];
        old.read(info.page, 0, &mut bytes)?;
        let page = page_of(&info, bytes);
        state.pages.insert(info.page, Arc::new(page));
    }
    Ok(state)
}

/// Returns the state of a follower's replica.
pub fn replicated(replica: &Replica) -> State {
    let pages = replica.pages().map(|info| {
        let bytes = replica.bytes(info.page).expect("a replica has the bytes of its pages").to_vec();
        (info.page, Arc::new(page_of(&info, bytes)))
    });
    State { pages: pages.collect(), root: (**replica.root()).clone() }
}

/// Returns the state that the pure `rebuild` computed.
pub fn rebuilt(rebuilt: &remanent_format::state::rebuild::RebuiltStore) -> State {
    let pages = rebuilt.table.pages().map(|info| {
        let bytes = rebuilt.contents[&info.page].clone();
        (info.page, Arc::new(page_of(&info, bytes)))
    });
    State { pages: pages.collect(), root: (**rebuilt.table.root()).clone() }
}

/// The change at one Lsn.
#[derive(Clone, Debug)]
pub enum Step {
    Batch {
        acts: Vec<Act>,
        new: Vec<PageId>,
    },
    /// A restore of the state at an earlier Lsn.
    Restore {
        to: u64,
    },
}

/// The history of a store: its state at every Lsn from 0 on.
#[derive(Clone, Debug)]
pub struct Line {
    states: Vec<Arc<State>>,
    /// The Lsn of the first state. A fork does not have the earlier states of its source.
    first: u64,
}

impl Default for Line {
    fn default() -> Self {
        Self { states: vec![Arc::default()], first: 0 }
    }
}

impl Line {
    /// Returns the last Lsn of the history.
    pub fn last(&self) -> u64 {
        self.states.len() as u64 - 1
    }

    /// Returns the first Lsn that has a state.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns the history of a fork of the state at an Lsn.
    pub fn forked(mut self, lsn: u64) -> Self {
        self.cut(lsn);
        Self { first: lsn, ..self }
    }

    pub fn last_state(&self) -> &State {
        self.at(self.last())
    }

    pub fn at(&self, lsn: u64) -> &State {
        &self.states[usize::try_from(lsn).expect("as many states as batches")]
    }

    /// Removes the states after an Lsn, which a crash lost.
    pub fn cut(&mut self, lsn: u64) {
        self.states.truncate(usize::try_from(lsn).expect("as many states as batches") + 1);
        self.first = self.first.min(lsn);
    }

    pub fn push(&mut self, step: &Step) {
        let lsn = self.last() + 1;
        let now = self.at(lsn - 1);
        let next = match step {
            Step::Batch { acts, new } => now.after(lsn, acts, new),
            Step::Restore { to } => self.restored(lsn, *to),
        };
        self.states.push(Arc::new(next));
    }

    /// Returns the state after a restore. Pages whose content changed since `to` get this Lsn and an epoch
    /// above all that were ever assigned. Pages that only moved get the Lsn but keep their epoch.
    fn restored(&self, lsn: u64, to: u64) -> State {
        let pages = self.states.iter().flat_map(|state| state.pages.values());
        let epoch = pages.map(|page| page.epoch).max().unwrap_or(0) + 1;
        let mut state = self.at(to).clone();
        let now = self.at(lsn - 1);
        for (id, page) in &mut state.pages {
            let now = now.pages.get(id).map(|now| (now.epoch, now.lsn));
            if now != Some((page.epoch, page.lsn)) {
                let page = Arc::make_mut(page);
                page.lsn = lsn;
                if now.map(|(epoch, _)| epoch) != Some(page.epoch) {
                    page.epoch = epoch;
                }
            }
        }
        state
    }
}
