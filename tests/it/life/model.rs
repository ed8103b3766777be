//! The expected content of a store, derived from its documentation. A page consists of layers of patterns,
//! and there is one state for each batch.
//!
//! The bytes of a page can be computed from its layers, so the model of a store of many GiB needs a few KiB.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::text::{Change, Pattern};
use super::worker::checksum_of;

/// Alignment of groups, chunks and manifests in bytes.
const BLOCK_LEN: u64 = 4096;
/// Number of bytes of a page in a manifest: its entry, key and metadata, in two copies.
const ENTRY_BYTES: u64 = 2 * 256;

/// A page in one state.
#[derive(Clone, Debug)]
pub struct Page {
    pub len: u64,
    pub key: Option<String>,
    /// The last batch that changed the bytes of the page. A store needs one image per page and version.
    version: u64,
    /// The layers from the oldest to the newest. All are within the page.
    layers: Arc<Vec<(Range<u64>, Pattern)>>,
    /// The checksum of the page's bytes, computed on demand.
    sum: std::cell::Cell<Option<u32>>,
}

impl Page {
    fn new(len: u64, key: Option<String>, pattern: Pattern, version: u64) -> Self {
        Self { len, key, version, layers: Arc::new(vec![(0..len, pattern)]), sum: None.into() }
    }

    fn write(&mut self, range: Range<u64>, pattern: Pattern, version: u64) {
        let layers = Arc::make_mut(&mut self.layers);
        layers.retain(|(old, _)| old.start < range.start || old.end > range.end);
        layers.push((range, pattern));
        self.version = version;
        self.sum.set(None);
    }

    fn resize(&mut self, len: u64, version: u64) {
        let layers = Arc::make_mut(&mut self.layers);
        for (range, _) in layers.iter_mut() {
            range.end = range.end.min(len);
        }
        layers.retain(|(range, _)| range.start < range.end);
        if len > self.len {
            layers.push((self.len..len, Pattern::ZEROS));
        }
        self.len = len;
        self.version = version;
        self.sum.set(None);
    }

    /// Fills `out` with the page's bytes from `offset` on.
    fn fill(&self, offset: u64, out: &mut [u8]) {
        let window = offset..offset + out.len() as u64;
        for (range, pattern) in &*self.layers {
            let common = range.start.max(window.start)..range.end.min(window.end);
            if common.start < common.end {
                let part = (common.start - offset) as usize..(common.end - offset) as usize;
                pattern.fill(common.start, &mut out[part]);
            }
        }
    }

    fn checksum(&self) -> u32 {
        let sum =
            self.sum.get().unwrap_or_else(|| checksum_of(self.len, |offset, out| self.fill(offset, out)));
        self.sum.set(Some(sum));
        sum
    }

    /// Returns the maximum size of the page's image: the payload, a header, and a chunk that contains only
    /// this image.
    fn image_bytes(&self) -> u64 {
        if self.len == 0 { 0 } else { self.len.next_multiple_of(BLOCK_LEN) + 2 * BLOCK_LEN }
    }
}

/// The store's state after one batch.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub pages: BTreeMap<u64, Page>,
    pub root: u64,
    next_page: u64,
    /// The maximum number of bytes of the batch in the log and in the image files that the batch wrote.
    log_bytes: u64,
}

impl State {
    /// Returns the state in the format in which a worker reports its state.
    pub fn line(&self, lsn: u64) -> String {
        let mut line = format!("{lsn} {}", self.root);
        for (id, page) in &self.pages {
            let key = page.key.as_deref().unwrap_or("-");
            line += &format!(" {id}:{}:{key}:{:08x}", page.len, page.checksum());
        }
        line
    }

    pub fn page_bytes(&self) -> u64 {
        self.pages.values().map(|page| page.len).sum()
    }
}

/// A snapshot that the store lists.
#[derive(Clone, Debug)]
pub struct Kept {
    pub id: u64,
    /// The time of the snapshot, according to the worker's clock.
    pub unix_ms: u64,
    pub redo: u64,
    pub end: u64,
    pub name: Option<String>,
}

/// Every state since the store was created.
pub struct Model {
    states: Vec<State>,
    /// The id that the open store assigns to the next page. A failed batch uses up the ids of its pages until
    /// the store is reopened.
    next_page: u64,
}

impl Model {
    pub fn new() -> Self {
        Self { states: vec![State { next_page: 1, ..State::default() }], next_page: 1 }
    }

    pub fn lsn(&self) -> u64 {
        self.states.len() as u64 - 1
    }

    pub fn now(&self) -> &State {
        self.states.last().expect("there is always the empty store")
    }

    /// Adds the state after one more batch.
    pub fn commit(&mut self, changes: &[Change]) {
        let version = self.lsn() + 1;
        let mut state = State { next_page: self.next_page, ..self.now().clone() };
        // The frame header, the payload head, the padding of a group, and the next seal.
        state.log_bytes = 4 * BLOCK_LEN;
        for change in changes {
            state.log_bytes += 256;
            match change {
                Change::Create { len, key } => state.create(*len, key, Pattern::ZEROS, version),
                Change::CreateFrom { len, key, pattern } => {
                    state.create(*len, key, *pattern, version);
                    state.log_bytes += len + 2 * BLOCK_LEN;
                }
                Change::Write { page, offset, len, pattern } => {
                    state.page(*page).write(*offset..offset + len, *pattern, version);
                    state.log_bytes += len + 2 * BLOCK_LEN;
                }
                Change::Replace { page, len, pattern } => {
                    let page = state.page(*page);
                    page.resize(*len, version);
                    page.write(0..*len, *pattern, version);
                    state.log_bytes += len + 2 * BLOCK_LEN;
                }
                Change::Resize { page, len } => state.page(*page).resize(*len, version),
                Change::Delete { page } => drop(state.pages.remove(page)),
                Change::SetRoot { value } => state.root = *value,
            }
        }
        // A batch without a new page does not log the ids that were skipped.
        if state.next_page == self.next_page {
            state.next_page = self.now().next_page;
        } else {
            self.next_page = state.next_page;
        }
        self.states.push(state);
    }

    /// Records that a batch failed.
    pub fn refuse(&mut self, changes: &[Change]) {
        let is_new = |change: &&Change| matches!(change, Change::Create { .. } | Change::CreateFrom { .. });
        self.next_page += changes.iter().filter(is_new).count() as u64;
    }

    /// Records that the store was reopened.
    pub fn reopen(&mut self) {
        self.next_page = self.now().next_page;
    }

    /// Adds one batch whose state is that of an earlier batch.
    pub fn restore(&mut self, lsn: u64) {
        let mut state = self.states[lsn as usize].clone();
        state.next_page = self.now().next_page;
        state.log_bytes = 4 * BLOCK_LEN;
        self.states.push(state);
    }

    /// Returns the maximum size of the directory: twice the images that the kept snapshots name and the next
    /// one writes, the log since the oldest snapshot that keeps its log, the images that batches in that log
    /// wrote, and `constant`.
    pub fn disk_bytes_max(&self, kept: &[Kept], constant: u64) -> u64 {
        let mut named = BTreeMap::new();
        let now = self.lsn();
        let ends = kept.iter().flat_map(|snapshot| [snapshot.redo, snapshot.end]).chain([now]);
        let ends: BTreeSet<u64> = ends.collect();
        for (id, page) in ends.iter().flat_map(|lsn| &self.states[*lsn as usize].pages) {
            named.insert((*id, page.version), page.image_bytes() + ENTRY_BYTES);
        }
        let images: u64 = named.values().sum();
        let log_from =
            kept.iter().filter(|snapshot| snapshot.name.is_none()).map(|snapshot| snapshot.redo).min();
        let log_from = log_from.unwrap_or(0) as usize;
        let log: u64 = self.states[log_from + 1..].iter().map(|state| state.log_bytes).sum();
        2 * images + log + constant
    }
}

impl State {
    fn page(&mut self, id: u64) -> &mut Page {
        self.pages.get_mut(&id).expect("a page of the state")
    }

    fn create(&mut self, len: u64, key: &Option<String>, pattern: Pattern, version: u64) {
        self.pages.insert(self.next_page, Page::new(len, key.clone(), pattern, version));
        self.next_page += 1;
    }
}
