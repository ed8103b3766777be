//! Plans of batches. A pure function computes the changes that a batch makes to a page table, or the reason why the
//! batch is invalid.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::check_range;
use super::{PageInfo, PageTable};
use crate::defect::Defect;
use crate::ids::{Epoch, Key, Lsn, PageId, Place};
use crate::limits::{DEVICE_ORDINAL_MAX, METADATA_LEN_MAX, NUMBER_MAX, PAGE_LEN_MAX, ROOT_LEN_MAX};
use crate::op::{Op, OpAt};
use crate::value::{Metadata, encode_metadata};

/// The changes that one batch makes to a page table, as [`PageTable::plan`] computes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Changes {
    /// The Lsn of the batch.
    pub lsn: Lsn,
    /// Final states of the pages that the batch changes, in the order of their first operation. A list of one page, the
    /// most common case, is stored inline, because a heap allocation can make the committing thread wait for the lock
    /// of the allocator.
    pages: SmallVec<[(PageId, Option<PageInfo>); 1]>,
    /// The new root, or `None` if the batch does not change the root.
    pub root: Option<Arc<Metadata>>,
    /// One more than the highest page id that the batch created.
    pub(super) next_page: u64,
}

impl Changes {
    /// Returns the pages that the batch changes, in the order of their first operation. The description of a deleted
    /// page is `None`.
    #[must_use]
    pub fn pages(&self) -> &[(PageId, Option<PageInfo>)] {
        &self.pages
    }
}

/// The reason why a batch cannot be applied to a page table. The table is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// An operation names a page that does not exist.
    #[error("page {0} does not exist")]
    UnknownPage(PageId),
    /// A create operation names a page that already exists, or a page that the batch deleted.
    #[error("page {0} already exists")]
    PageExists(PageId),
    /// The range of an operation exceeds its page.
    #[error("bytes {offset}..+{len} are outside page {page} of {page_len} bytes")]
    OutOfBounds {
        /// The id of the page.
        page: PageId,
        /// Offset of the range in the page, in bytes.
        offset: u64,
        /// The length of the range in bytes.
        len: u64,
        /// The length of the page in bytes.
        page_len: u64,
    },
    /// A create operation requests a key that belongs to another page.
    #[error("key {key} already belongs to page {holder}")]
    KeyTaken {
        /// The requested key.
        key: Key,
        /// The page to which the key belongs.
        holder: PageId,
    },
    /// A number or length exceeds its limit.
    #[error("{what} is {found}, over the limit of {limit}")]
    Limit {
        /// Name of the number or length.
        what: &'static str,
        /// Value that was found.
        found: u64,
        /// Largest permitted value.
        limit: u64,
    },
    /// A batch replaces a page with an image and also changes the bytes of the page.
    #[error("the batch contains an image of page {0} and other changes of its bytes")]
    ImageNotAlone(PageId),
    /// The length of an image differs from that of its page.
    #[error("image length is {len} bytes, but page {page} has {page_len} bytes")]
    ImageLen {
        /// The id of the page.
        page: PageId,
        /// The length of the image in bytes.
        len: u64,
        /// The length of the page in bytes.
        page_len: u64,
    },
    /// The batch contains a restore. [`PageTable::plan`] does not plan restores, because a restore replaces the whole
    /// table.
    #[error("a restore must be the only operation of its batch")]
    Restore,
    /// There is not enough memory for the plan.
    #[error("cannot allocate {needed} bytes")]
    Memory {
        /// Number of bytes that were requested.
        needed: u64,
    },
}

impl From<Refusal> for Defect {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Memory { needed } => Defect::Memory { needed },
            refusal => Defect::Batch(refusal.to_string()),
        }
    }
}

/// Returns the refusal for a failed reservation of `count` items.
fn no_memory<T>(count: usize) -> Refusal {
    Refusal::Memory { needed: (count.saturating_mul(size_of::<T>())) as u64 }
}

/// Selects the checks of [`PageTable::plan`]: those for a new batch, or those for a batch that replay reads from the
/// log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanMode {
    /// Checks all rules. Used for a new batch.
    Commit,
    /// Checks all rules except those about keys. Used for a batch from the log, because the pages may already include
    /// later batches. [`PageTable::index_keys`] checks the keys after replay.
    Replay,
}

/// The page states that a plan has computed so far. Pages that the batch has not changed are read from the table.
struct Overlay<'a> {
    table: &'a PageTable,
    lsn: Lsn,
    /// Current states of the changed pages, in the order of their first operation. The state of a deleted page is
    /// `None`. The plan returns this list without copying it, because a copy for a long batch needs much memory.
    pages: SmallVec<[(PageId, Option<PageInfo>); 1]>,
    /// Effects of the batch on each changed page, in the order of `pages`.
    marks: SmallVec<[PageMark; 8]>,
    /// Whether the ids in `pages` ascend, so that binary search finds a page. Long batches usually change pages in
    /// ascending order, and a hash lookup for each page would take a third of the time to plan such a batch.
    is_rising: bool,
    /// Index in `pages` of each changed page. Used only for many pages whose ids do not ascend.
    index: HashMap<PageId, usize>,
}

/// Maximum number of changed pages that are searched linearly.
const UNINDEXED_MAX: usize = 8;

/// The effect of a batch on one page so far.
#[derive(Clone, Copy)]
struct PageMark {
    content: Content,
    /// Whether the batch has already raised the epoch of the page.
    is_raised: bool,
}

/// The effect of a batch on the bytes of one page so far.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// The bytes are unchanged, but the length may have changed.
    Kept,
    Changed,
    /// An image replaces the bytes, so no other operation may change the bytes.
    Image,
}

impl Overlay<'_> {
    fn position(&self, page: PageId) -> Option<usize> {
        if self.is_rising {
            // Usually the page is the last one, or has a higher id.
            let last = self.pages.len().checked_sub(1)?;
            match self.pages[last].0.cmp(&page) {
                Ordering::Less => None,
                Ordering::Equal => Some(last),
                Ordering::Greater => self.pages.binary_search_by_key(&page, |(touched, _)| *touched).ok(),
            }
        } else if self.pages.len() <= UNINDEXED_MAX {
            self.pages.iter().position(|(touched, _)| *touched == page)
        } else {
            self.index.get(&page).copied()
        }
    }

    /// Returns the current state of a changed page, or `None` if the batch deleted the page or has not changed it.
    fn get(&self, page: PageId) -> Option<&PageInfo> {
        self.pages[self.position(page)?].1.as_ref()
    }

    /// Sets the state of a page that the batch created or deleted.
    fn set(&mut self, page: PageId, state: Option<PageInfo>) -> Result<(), Refusal> {
        let mark = PageMark { content: Content::Kept, is_raised: true };
        match self.position(page) {
            Some(at) => (self.pages[at].1, self.marks[at]) = (state, mark),
            None => _ = self.push(page, state, mark)?,
        }
        Ok(())
    }

    fn push(&mut self, page: PageId, state: Option<PageInfo>, mark: PageMark) -> Result<usize, Refusal> {
        let at = self.pages.len();
        self.pages.try_reserve(1).map_err(|_| no_memory::<(PageId, Option<PageInfo>)>(2 * at))?;
        self.marks.try_reserve(1).map_err(|_| no_memory::<PageMark>(2 * at))?;
        self.is_rising &= self.pages.last().is_none_or(|(last, _)| *last < page);
        self.pages.push((page, state));
        self.marks.push(mark);
        if !self.is_rising && self.pages.len() > UNINDEXED_MAX {
            // Also add the pages that were touched before the index was needed.
            let missing = self.pages.iter().enumerate().skip(self.index.len());
            let refused = |_| no_memory::<(PageId, usize)>(2 * at);
            self.index.try_reserve(missing.len()).map_err(refused)?;
            self.index.extend(missing.map(|(at, (page, _))| (*page, at)));
        }
        Ok(at)
    }

    /// Returns the state of the page at an index of `pages`. Returns an error if the batch deleted the page.
    fn state(&mut self, at: usize) -> Result<&mut PageInfo, Refusal> {
        let (page, state) = &mut self.pages[at];
        state.as_mut().ok_or(Refusal::UnknownPage(*page))
    }

    /// Adds a moved page to `pages` without raising the page's epoch. Returns the index of the page.
    fn touch_place(&mut self, page: PageId) -> Result<usize, Refusal> {
        if let Some(at) = self.position(page) {
            return Ok(at);
        }
        let mut info = self.table.get(page).ok_or(Refusal::UnknownPage(page))?;
        info.lsn = self.lsn;
        self.push(page, Some(info), PageMark { content: Content::Kept, is_raised: false })
    }

    /// Adds a page to `pages` and raises the page's epoch once per batch. Returns the index of the page.
    fn touch(&mut self, page: PageId) -> Result<usize, Refusal> {
        let at = self.touch_place(page)?;
        let is_raised = std::mem::replace(&mut self.marks[at].is_raised, true);
        let info = self.state(at)?;
        if !is_raised {
            info.epoch = next_epoch(info.epoch)?;
        }
        Ok(at)
    }

    /// Adds a page to `pages`, and returns its state for modification. Raises the epoch of the page once per batch.
    fn touch_info(&mut self, page: PageId) -> Result<&mut PageInfo, Refusal> {
        let at = self.touch(page)?;
        self.state(at)
    }

    /// Adds a page to `pages` because its bytes change, and returns its state for modification. Returns an error if the
    /// batch combines an image of the page with another change of the page's bytes.
    fn touch_content(&mut self, page: PageId, content: Content) -> Result<&mut PageInfo, Refusal> {
        let at = self.touch(page)?;
        let before = &mut self.marks[at].content;
        if *before == Content::Image || (content == Content::Image && *before != Content::Kept) {
            return Err(Refusal::ImageNotAlone(page));
        }
        if content != Content::Kept {
            *before = content;
        }
        self.state(at)
    }

    /// Adds a page to `pages` because an image replaces its bytes. Checks that the image has the length of the page.
    fn touch_image(&mut self, page: PageId, len: u64) -> Result<(), Refusal> {
        let page_len = self.touch_content(page, Content::Image)?.len;
        if len == page_len { Ok(()) } else { Err(Refusal::ImageLen { page, len, page_len }) }
    }

    fn touch_range(&mut self, page: PageId, offset: u64, len: u64) -> Result<(), Refusal> {
        let page_len = self.touch_content(page, Content::Changed)?.len;
        check_range(page, page_len, offset, len)
    }
}

impl PageTable {
    /// Computes the changes that batch `lsn` makes to the table (SPEC R2). The table is not modified.
    ///
    /// # Errors
    /// Returns a [`Refusal`] and the index of the operation if an operation is invalid.
    pub fn plan<'a>(
        &self,
        lsn: Lsn,
        ops: impl IntoIterator<Item = &'a OpAt<'a>>,
        mode: PlanMode,
    ) -> Result<Changes, (usize, Refusal)> {
        let mut planner = Planner::new(self, lsn, mode);
        for (index, OpAt { op, .. }) in ops.into_iter().enumerate() {
            planner.add(index, op).map_err(|refusal| (index, refusal))?;
        }
        planner.finish()
    }
}

/// A plan under construction: the changes of the operations that were added so far.
struct Planner<'a> {
    overlay: Overlay<'a>,
    mode: PlanMode,
    root: Option<Arc<Metadata>>,
    next_page: u64,
    /// Keys that the batch has assigned so far.
    keys_new: HashMap<Key, PageId>,
    /// Keys that the batch has freed so far.
    keys_freed: HashSet<Key>,
    /// The pages whose metadata may have grown, each with the index of the operation. Lengths are checked at the end,
    /// so that many entries of a page need one encoding.
    metadata_grown: Vec<(usize, PageId)>,
    /// The index of the last operation that may have extended the root.
    root_grown: Option<usize>,
}

impl<'a> Planner<'a> {
    fn new(table: &'a PageTable, lsn: Lsn, mode: PlanMode) -> Self {
        let (pages, marks, index) = (SmallVec::new(), SmallVec::new(), HashMap::new());
        Self {
            overlay: Overlay { table, lsn, pages, marks, is_rising: true, index },
            mode,
            root: None,
            next_page: table.next_page,
            keys_new: HashMap::new(),
            keys_freed: HashSet::new(),
            metadata_grown: Vec::new(),
            root_grown: None,
        }
    }

    /// Adds the operation with this index in the batch.
    fn add(&mut self, index: usize, op: &Op<'_>) -> Result<(), Refusal> {
        let overlay = &mut self.overlay;
        match op {
            Op::Create { page, len, place, key, metadata } => {
                let (page, key, metadata) = (*page, key.clone(), metadata.clone().into());
                let (lsn, len, place) = (overlay.lsn, *len, *place);
                self.create(PageInfo { page, key, len, epoch: Epoch(1), lsn, place, metadata })?;
            }
            Op::Write { page, .. }
            | Op::Masked { page, .. }
            | Op::Scatter { page, .. }
            | Op::Fill { page, .. } => {
                let (offset, len) = op.range().expect("these operations have one");
                overlay.touch_range(*page, offset, len)?;
            }
            Op::Resize { page, len } => {
                check_page_len(*len)?;
                overlay.touch_content(*page, Content::Kept)?.len = *len;
            }
            Op::Image { page, len, .. } => overlay.touch_image(*page, *len)?,
            Op::Move { page, place } => {
                check_place(*place)?;
                let at = overlay.touch_place(*page)?;
                overlay.state(at)?.place = *place;
            }
            Op::Delete { page } => self.delete(*page)?,
            Op::SetMetadata { page, name, value } => {
                let info = overlay.touch_info(*page)?;
                info.metadata.make_mut().insert(name.clone(), value.clone());
                let count = self.metadata_grown.len();
                self.metadata_grown.try_reserve(1).map_err(|_| no_memory::<(usize, PageId)>(2 * count))?;
                self.metadata_grown.push((index, *page));
            }
            Op::RemoveMetadata { page, name } => {
                overlay.touch_info(*page)?.metadata.make_mut().remove(*name);
            }
            Op::SetRoot { name, value } => {
                self.root_mut().insert(name.clone(), value.clone());
                self.root_grown = Some(index);
            }
            Op::RemoveRoot { name } => _ = self.root_mut().remove(*name),
            Op::Note { .. } => {}
            Op::Restore { .. } => return Err(Refusal::Restore),
        }
        Ok(())
    }

    fn create(&mut self, info: PageInfo) -> Result<(), Refusal> {
        let page = info.page;
        check_page_len(info.len)?;
        check_place(info.place)?;
        // An id is not reused, even in the batch that deletes its page. A reader that starts a page at its create
        // applies the whole batch, which would include changes of the old page.
        if self.overlay.position(page).is_some() || self.overlay.table.pages.get(page).is_some() {
            return Err(Refusal::PageExists(page));
        }
        check_number("page id", page.0, NUMBER_MAX - 1)?;
        if let (Some(key), PlanMode::Commit) = (&info.key, self.mode) {
            self.assign_key(key, page)?;
        }
        self.next_page = self.next_page.max(page.0 + 1);
        self.overlay.set(page, Some(info))
    }

    /// Assigns a key to a new page. Returns an error if another page has the key at this point of the batch.
    fn assign_key(&mut self, key: &Key, page: PageId) -> Result<(), Refusal> {
        let old = self.overlay.table.keys.get(key.as_bytes()).filter(|_| !self.keys_freed.contains(key));
        if let Some(holder) = self.keys_new.get(key).or(old) {
            return Err(Refusal::KeyTaken { key: key.clone(), holder: *holder });
        }
        let count = self.keys_new.len();
        self.keys_new.try_reserve(1).map_err(|_| no_memory::<(Key, PageId)>(2 * count))?;
        self.keys_new.insert(key.clone(), page);
        Ok(())
    }

    fn delete(&mut self, page: PageId) -> Result<(), Refusal> {
        if let Some(key) = self.overlay.touch_info(page)?.key.clone() {
            self.keys_new.remove(&key);
            let count = self.keys_freed.len();
            self.keys_freed.try_reserve(1).map_err(|_| no_memory::<Key>(2 * count))?;
            self.keys_freed.insert(key);
        }
        self.overlay.set(page, None)
    }

    fn root_mut(&mut self) -> &mut Metadata {
        Arc::make_mut(self.root.get_or_insert_with(|| self.overlay.table.root.clone()))
    }

    /// Checks the lengths of the metadata and the root, and returns the changes.
    fn finish(self) -> Result<Changes, (usize, Refusal)> {
        for (index, page) in self.metadata_grown {
            if let Some(info) = self.overlay.get(page) {
                check_metadata_len("metadata", &info.metadata, METADATA_LEN_MAX)
                    .map_err(|refusal| (index, refusal))?;
            }
        }
        if let (Some(index), Some(root)) = (self.root_grown, &self.root) {
            check_metadata_len("root", root, ROOT_LEN_MAX).map_err(|refusal| (index, refusal))?;
        }
        let Overlay { lsn, pages, .. } = self.overlay;
        Ok(Changes { lsn, pages, root: self.root, next_page: self.next_page })
    }
}

fn check_place(place: Place) -> Result<(), Refusal> {
    match place {
        Place::Device(ordinal) if ordinal > DEVICE_ORDINAL_MAX => Err(Refusal::Limit {
            what: "device ordinal",
            found: ordinal.into(),
            limit: DEVICE_ORDINAL_MAX.into(),
        }),
        _ => Ok(()),
    }
}

/// Returns the next epoch, or an error if the next epoch exceeds its limit.
pub(super) fn next_epoch(epoch: Epoch) -> Result<Epoch, Refusal> {
    check_number("page's epoch", epoch.0.saturating_add(1), NUMBER_MAX)?;
    Ok(Epoch(epoch.0 + 1))
}

fn check_number(what: &'static str, found: u64, limit: u64) -> Result<(), Refusal> {
    if found <= limit { Ok(()) } else { Err(Refusal::Limit { what, found, limit }) }
}

fn check_page_len(len: u64) -> Result<(), Refusal> {
    if len <= PAGE_LEN_MAX {
        Ok(())
    } else {
        Err(Refusal::Limit { what: "page length", found: len, limit: PAGE_LEN_MAX })
    }
}

fn check_metadata_len(what: &'static str, metadata: &Metadata, limit: usize) -> Result<(), Refusal> {
    encode_metadata(metadata, limit).map(|_| ()).map_err(|_| Refusal::Limit {
        what,
        found: encode_metadata(metadata, usize::MAX).map_or(u64::MAX, |bytes| bytes.len() as u64),
        limit: limit as u64,
    })
}
