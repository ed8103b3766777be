//! The content of a store after any batch of the workload, computed independently of the engine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use remanent::{Epoch, Lsn, Metadata, PageId, PageInfo, Value};

use super::diary::{Diary, Entry};
use super::workload::{Change, Shape, born, changes, is_restore, next, place, restore_target};

/// Number of earlier states that are kept.
pub const PAST_MAX: usize = 1000;

/// The pages and the root. A clone shares all bytes.
#[derive(Clone, Default)]
pub struct State {
    pub pages: BTreeMap<PageId, (PageInfo, Arc<Vec<u8>>)>,
    pub root: Metadata,
    /// Whether the store has tiers. Such a store moves pages with its own batches, which the workload does
    /// not predict, so neither places nor Lsns are compared.
    pub is_tiered: bool,
}

/// The state after a batch, and earlier states.
#[derive(Clone)]
pub struct Model {
    pub lsn: Lsn,
    pub state: State,
    past: BTreeMap<Lsn, State>,
    next_page: PageId,
    epoch_high: Epoch,
    /// The diary in which the writer records the targets of its restores.
    diary: Option<Diary>,
}

impl Model {
    /// Returns the model of an empty store whose restores can all be derived from the workload.
    pub fn new() -> Self {
        let (lsn, state, past) = (Lsn(0), State::default(), BTreeMap::new());
        Self { lsn, state, past, next_page: PageId(1), epoch_high: Epoch(0), diary: None }
    }

    /// Returns the model of an empty store whose writer keeps a diary.
    pub fn with_diary(path: &Path) -> Self {
        Self { diary: Some(Diary::open(path)), ..Self::new() }
    }

    /// Returns the model of a store with tiers.
    pub fn with_tiers(mut self) -> Self {
        self.state.is_tiered = true;
        self
    }

    /// Returns the model of a copy of the store, whose writers keep another diary.
    pub fn of_copy(&self, diary: &Path) -> Self {
        Self { diary: Some(Diary::open(diary)), ..self.clone() }
    }

    /// Returns the state after this batch, which may be an earlier one, or `None` if the state is no longer
    /// kept.
    pub fn at(&self, lsn: Lsn) -> Option<&State> {
        if lsn == self.lsn { Some(&self.state) } else { self.past.get(&lsn) }
    }

    /// Advances to a later batch, or stays at the current one.
    pub fn advance(&mut self, lsn: Lsn) {
        let numbered = self.diary.as_ref().map(Diary::numbered).unwrap_or_default();
        while self.lsn < lsn {
            self.past.insert(self.lsn, self.state.clone());
            if self.past.len() > PAST_MAX {
                self.past.pop_first();
            }
            self.lsn = next(self.lsn, self.state.is_tiered);
            if is_restore(self.lsn) {
                let told = self.diary.as_ref().and_then(|diary| diary.restored(self.lsn));
                self.restore(told.unwrap_or_else(|| restore_target(self.lsn)));
                continue;
            }
            self.next_page = numbered.get(&self.lsn).copied().unwrap_or(self.next_page);
            let changes = changes(self.lsn, &self.shape());
            changes.iter().for_each(|change| self.apply(change));
            // A move changes the Lsn of a page but not its epoch, whatever else the batch changes.
            for change in &changes {
                let Change::Move { page, .. } = change else { continue };
                self.state.pages.get_mut(page).unwrap().0.lsn = self.lsn;
            }
            self.state.root.insert("batch".to_owned(), Value::U64(self.lsn.0));
        }
    }

    /// Assigns ids to a batch's new pages if the writer was killed before it recorded them. No id is above
    /// `highest`.
    pub fn number_by(&mut self, lsn: Lsn, highest: PageId) {
        let diary = self.diary.clone().expect("a store with tiers has a diary");
        if self.lsn >= lsn || diary.numbered().contains_key(&lsn) {
            return;
        }
        while next(self.lsn, self.state.is_tiered) < lsn {
            self.advance(next(self.lsn, self.state.is_tiered));
        }
        let makes = |change: &&Change| matches!(change, Change::Create { .. } | Change::Clone { .. });
        let count = changes(lsn, &self.shape()).iter().filter(makes).count() as u64;
        if count > 0 {
            diary.write(&Entry::Numbered { lsn, first: PageId(highest.0 + 1 - count) });
        }
    }

    fn shape(&self) -> Shape {
        self.state.pages.iter().map(|(page, (info, _))| (*page, info.len)).collect()
    }

    /// Applies a restore. Pages whose content changed since `target` get an epoch above all earlier ones.
    /// Pages that only moved get the Lsn but keep their epoch.
    fn restore(&mut self, target: Lsn) {
        let now = std::mem::replace(&mut self.state, self.past[&target].clone());
        let epoch = Epoch(self.epoch_high.0 + 1);
        for (page, (info, _)) in &mut self.state.pages {
            let now = now.pages.get(page).map(|(now, _)| (now.epoch, now.lsn));
            if now == Some((info.epoch, info.lsn)) {
                continue;
            }
            info.lsn = self.lsn;
            if now.map(|(epoch, _)| epoch) != Some(info.epoch) {
                info.epoch = epoch;
                self.epoch_high = epoch;
            }
        }
    }

    fn apply(&mut self, change: &Change) {
        let n = self.lsn;
        match change {
            Change::Create { key, content } => {
                let mut info = PageInfo::new(self.next_page, content.len() as u64, place());
                info.key = Some(key.clone());
                info.metadata = born(n).into();
                self.add(info, Arc::new(content.clone()));
            }
            Change::Clone { source } => {
                let (copied, bytes) = self.state.pages[source].clone();
                let mut info = PageInfo::new(self.next_page, copied.len, copied.place);
                info.metadata = copied.metadata;
                self.add(info, bytes);
            }
            Change::Replace { page, content } => {
                let (info, bytes) = self.touch(*page);
                info.len = content.len() as u64;
                *bytes = content.clone();
            }
            Change::Write { page, offset, bytes } => {
                self.touch(*page).1[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            Change::WriteMasked { page, offset, mask, bytes } => {
                let target = &mut self.touch(*page).1[*offset as usize..][..bytes.len()];
                for (index, (target, source)) in target.chunks_mut(4).zip(bytes.chunks(4)).enumerate() {
                    if mask[index / 8] >> (index % 8) & 1 == 1 {
                        target.copy_from_slice(source);
                    }
                }
            }
            Change::Scatter { page, indices, values } => {
                let target = &mut self.touch(*page).1;
                for (index, value) in indices.iter().zip(values.chunks(8)) {
                    target[8 * *index as usize..][..8].copy_from_slice(value);
                }
            }
            Change::Fill { page, offset, len, pattern } => {
                let target = &mut self.touch(*page).1[*offset as usize..][..*len as usize];
                target.chunks_mut(8).for_each(|target| target.copy_from_slice(pattern));
            }
            Change::Resize { page, len } => {
                let (info, bytes) = self.touch(*page);
                info.len = *len;
                bytes.resize(*len as usize, 0);
            }
            Change::Move { page, place } => self.state.pages.get_mut(page).unwrap().0.place = *place,
            Change::SetMetadata { page, value } => {
                let (info, _) = self.touch(*page);
                info.metadata.make_mut().insert("touched".to_owned(), Value::U64(*value));
            }
            Change::Delete { page } => {
                self.state.pages.remove(page);
            }
        }
    }

    fn add(&mut self, mut info: PageInfo, bytes: Arc<Vec<u8>>) {
        info.epoch = Epoch(1);
        info.lsn = self.lsn;
        self.next_page = PageId(info.page.0 + 1);
        self.epoch_high = self.epoch_high.max(info.epoch);
        self.state.pages.insert(info.page, (info, bytes));
    }

    /// Returns a page for modification. The epoch of the page rises once per batch.
    fn touch(&mut self, page: PageId) -> (&mut PageInfo, &mut Vec<u8>) {
        let (info, bytes) = self.state.pages.get_mut(&page).unwrap();
        if info.lsn < self.lsn {
            info.lsn = self.lsn;
            info.epoch = Epoch(info.epoch.0 + 1);
            self.epoch_high = self.epoch_high.max(info.epoch);
        }
        (info, Arc::make_mut(bytes))
    }
}
