//! The plan of a batch: one pure function says what the batch changes in a page table, or why it cannot.

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

/// The changes of one batch: the final state of every page that it touches.
#[derive(Clone, Debug, PartialEq)]
pub struct Changes {
    /// The batch's number.
    pub lsn: Lsn,
    /// Inline if it is one page, as most often. A committer's thread makes these and the applier drops them.
    /// If one thread frees memory that another allocated, both wait for the allocator's lock.
    pages: SmallVec<[(PageId, Option<PageInfo>); 1]>,
    /// The root, if it changed.
    pub root: Option<Arc<Metadata>>,
    /// One past the highest page id created.
    pub(super) next_page: u64,
}

impl Changes {
    /// The pages touched, in the order of their first mention; `None` is a page that is gone.
    #[must_use]
    pub fn pages(&self) -> &[(PageId, Option<PageInfo>)] {
        &self.pages
    }
}

/// Why a batch cannot follow a state. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// An operation names a page that does not exist.
    #[error("there is no page {0}")]
    UnknownPage(PageId),
    /// A create names a page that exists, or that the batch deleted.
    #[error("page {0} exists")]
    PageExists(PageId),
    /// A range does not lie within its page.
    #[error("bytes {offset}..+{len} are outside page {page} of {page_len} bytes")]
    OutOfBounds {
        /// The page's id.
        page: PageId,
        /// The first byte of the range.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// The page's length.
        page_len: u64,
    },
    /// Another page has the key.
    #[error("key {key} is page {holder}'s")]
    KeyTaken {
        /// The key asked for.
        key: Key,
        /// The page that holds it.
        holder: PageId,
    },
    /// A length is over its limit.
    #[error("{what} is {found}, over the limit of {limit}")]
    Limit {
        /// The value that is too large.
        what: &'static str,
        /// The size found.
        found: u64,
        /// The limit exceeded.
        limit: u64,
    },
    /// An image is not all that a batch does to the bytes of its page.
    #[error("an image of page {0} comes with other changes of its bytes")]
    ImageNotAlone(PageId),
    /// An image is not as long as its page.
    #[error("an image of {len} bytes for page {page} of {page_len} bytes")]
    ImageLen {
        /// The page's id.
        page: PageId,
        /// The image's length.
        len: u64,
        /// The page's length.
        page_len: u64,
    },
    /// A restore is not an operation on this table: it replaces it.
    #[error("a restore stands alone in its batch")]
    Restore,
    /// There is no memory to say what the batch changes.
    #[error("there is no memory for {needed} bytes")]
    Memory {
        /// Bytes that were asked for.
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

/// What it takes to have room for `count` items more of this type.
fn no_memory<T>(count: usize) -> Refusal {
    Refusal::Memory { needed: (count.saturating_mul(size_of::<T>())) as u64 }
}

/// Which rules a plan checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanMode {
    /// A new batch: everything.
    Commit,
    /// A batch from the log, over images caught at different times: keys are checked on the final state
    /// only, by [`PageTable::index_keys`].
    Replay,
}

/// The batch's own view of the pages that it touches.
struct Overlay<'a> {
    table: &'a PageTable,
    lsn: Lsn,
    /// The pages' states so far, in the order of their first mention; `None` is a page that is gone. They are
    /// what the plan returns: copied at its end, the pages of a long batch would be fresh memory once more.
    pages: SmallVec<[(PageId, Option<PageInfo>); 1]>,
    /// What the batch did to each of them.
    marks: SmallVec<[PageMark; 8]>,
    /// Whether the ids of the pages rise. Then a page is found by halving. Long batches mostly go through
    /// their pages in order, and hashing each page took a third of such a batch's plan.
    is_rising: bool,
    /// The index of each page among them. It is kept only if they are many and their ids do not rise: most
    /// batches touch one page or two.
    index: HashMap<PageId, usize>,
}

/// Up to this number of touched pages are searched one by one.
const UNINDEXED_MAX: usize = 8;

/// What a batch did to a page so far.
#[derive(Clone, Copy)]
struct PageMark {
    content: Content,
    /// Whether this batch has raised its epoch already.
    is_raised: bool,
}

/// The effect of a batch on a page's bytes so far.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// At most its length changed.
    Kept,
    Changed,
    /// An image takes their place: nothing else of the batch may.
    Image,
}

impl Overlay<'_> {
    fn position(&self, page: PageId) -> Option<usize> {
        if self.is_rising {
            // Most often the page is the last one, or comes after it.
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

    /// A page that was touched, if it is there.
    fn get(&self, page: PageId) -> Option<&PageInfo> {
        self.pages[self.position(page)?].1.as_ref()
    }

    /// Creates or deletes a page.
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
            // Pages that came while the ids rose, or were few, are not in the index yet.
            let missing = self.pages.iter().enumerate().skip(self.index.len());
            let refused = |_| no_memory::<(PageId, usize)>(2 * at);
            self.index.try_reserve(missing.len()).map_err(refused)?;
            self.index.extend(missing.map(|(at, (page, _))| (*page, at)));
        }
        Ok(at)
    }

    /// The state of the page at an index, unless it is gone.
    fn state(&mut self, at: usize) -> Result<&mut PageInfo, Refusal> {
        let (page, state) = &mut self.pages[at];
        state.as_mut().ok_or(Refusal::UnknownPage(*page))
    }

    /// The index of a page that moves: this batch is its last change, and its epoch stays.
    fn touch_place(&mut self, page: PageId) -> Result<usize, Refusal> {
        if let Some(at) = self.position(page) {
            return Ok(at);
        }
        let mut info = self.table.get(page).ok_or(Refusal::UnknownPage(page))?;
        info.lsn = self.lsn;
        self.push(page, Some(info), PageMark { content: Content::Kept, is_raised: false })
    }

    /// The index of a page that changes: its epoch rises once a batch.
    fn touch(&mut self, page: PageId) -> Result<usize, Refusal> {
        let at = self.touch_place(page)?;
        let is_raised = std::mem::replace(&mut self.marks[at].is_raised, true);
        let info = self.state(at)?;
        if !is_raised {
            info.epoch = next_epoch(info.epoch)?;
        }
        Ok(at)
    }

    /// The page's state for changing it.
    fn touch_info(&mut self, page: PageId) -> Result<&mut PageInfo, Refusal> {
        let at = self.touch(page)?;
        self.state(at)
    }

    /// The page for changing its bytes from `Kept` or `Changed` to `content`.
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

    /// Has an image take the place of the page's bytes.
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
    /// The changes of a batch with number `lsn` (SPEC R2).
    ///
    /// # Errors
    /// A [`Refusal`], with the operation's index; nothing is changed.
    pub fn plan<'a>(
        &self,
        lsn: Lsn,
        ops: impl IntoIterator<Item = &'a OpAt<'a>>,
        mode: PlanMode,
    ) -> Result<Changes, (usize, Refusal)> {
        let (pages, marks, index) = (SmallVec::new(), SmallVec::new(), HashMap::new());
        let mut overlay = Overlay { table: self, lsn, pages, marks, is_rising: true, index };
        let mut root: Option<Arc<Metadata>> = None;
        let mut next_page = self.next_page;
        // Keys given and freed by this batch, in its order.
        let mut keys_new: HashMap<Key, PageId> = HashMap::new();
        let mut keys_freed: HashSet<Key> = HashSet::new();
        // Sizes are checked once, at the end: entries set and removed in one batch cost one encoding.
        let mut metadata_grown: Vec<(usize, PageId)> = Vec::new();
        let mut root_grown: Option<usize> = None;

        for (index, OpAt { op, .. }) in ops.into_iter().enumerate() {
            let mut step = || -> Result<(), Refusal> {
                match op {
                    Op::Create { page, len, place, key, metadata } => {
                        check_page_len(*len)?;
                        check_place(*place)?;
                        // Nor does an id come back in the batch that deletes its page. A reader that starts a
                        // page from its create has all of this batch to apply, and would apply the old page's
                        // changes to the new one.
                        let is_used = overlay.position(*page).is_some() || self.pages.get(*page).is_some();
                        if is_used {
                            return Err(Refusal::PageExists(*page));
                        }
                        check_number("page id", page.0, NUMBER_MAX - 1)?;
                        if let (Some(key), PlanMode::Commit) = (key, mode) {
                            let old = self.keys.get(key).filter(|_| !keys_freed.contains(key));
                            if let Some(holder) = keys_new.get(key).or(old) {
                                return Err(Refusal::KeyTaken { key: key.clone(), holder: *holder });
                            }
                            let count = keys_new.len();
                            keys_new.try_reserve(1).map_err(|_| no_memory::<(Key, PageId)>(2 * count))?;
                            keys_new.insert(key.clone(), *page);
                        }
                        next_page = next_page.max(page.0 + 1);
                        overlay.set(
                            *page,
                            Some(PageInfo {
                                page: *page,
                                key: key.clone(),
                                len: *len,
                                epoch: Epoch(1),
                                lsn,
                                place: *place,
                                metadata: metadata.clone().into(),
                            }),
                        )?;
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
                    Op::Delete { page } => {
                        let key = overlay.touch_info(*page)?.key.clone();
                        if let Some(key) = key {
                            keys_new.remove(&key);
                            let count = keys_freed.len();
                            keys_freed.try_reserve(1).map_err(|_| no_memory::<Key>(2 * count))?;
                            keys_freed.insert(key);
                        }
                        overlay.set(*page, None)?;
                    }
                    Op::SetMetadata { page, name, value } => {
                        let info = overlay.touch_info(*page)?;
                        info.metadata.make_mut().insert(name.clone(), value.clone());
                        let count = metadata_grown.len();
                        metadata_grown.try_reserve(1).map_err(|_| no_memory::<(usize, PageId)>(2 * count))?;
                        metadata_grown.push((index, *page));
                    }
                    Op::RemoveMetadata { page, name } => {
                        overlay.touch_info(*page)?.metadata.make_mut().remove(*name);
                    }
                    Op::SetRoot { name, value } => {
                        let root = root.get_or_insert_with(|| self.root.clone());
                        Arc::make_mut(root).insert(name.clone(), value.clone());
                        root_grown = Some(index);
                    }
                    Op::RemoveRoot { name } => {
                        Arc::make_mut(root.get_or_insert_with(|| self.root.clone())).remove(*name);
                    }
                    Op::Note { .. } => {}
                    Op::Restore { .. } => return Err(Refusal::Restore),
                }
                Ok(())
            };
            step().map_err(|refusal| (index, refusal))?;
        }

        for (index, page) in metadata_grown {
            if let Some(info) = overlay.get(page) {
                check_metadata_len("metadata", &info.metadata, METADATA_LEN_MAX)
                    .map_err(|refusal| (index, refusal))?;
            }
        }
        if let (Some(index), Some(root)) = (root_grown, &root) {
            check_metadata_len("root", root, ROOT_LEN_MAX).map_err(|refusal| (index, refusal))?;
        }
        Ok(Changes { lsn, pages: overlay.pages, root, next_page })
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

/// The epoch after this one.
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
