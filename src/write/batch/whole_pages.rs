//! Finds the pages that a batch writes as a whole: one operation replaces all bytes of the page, and no other operation
//! of the batch changes them.
//!
//! If an image with the bytes of such a page is durable before the batch is logged, the log need not contain the bytes.
//! They are then written only once, because the next snapshot also refers to that image.

use std::collections::BTreeMap;

use remanent_format::image::ImageRef;
use remanent_format::{PageId, Place};

use super::{BatchStep, WriteBatch};
use crate::base::allocation::collected;
use crate::error::Result;

/// The minimum length in bytes of a page that is written to an image before its batch is logged. Shorter pages are
/// logged, because a reference to an image takes 80 bytes in the log, and the image has an overhead of 64 bytes.
pub(crate) const WHOLE_PAGE_LEN_MIN: u64 = 4096;

/// A page that a batch writes as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WholePage<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub page: PageId,
    /// The page's length in bytes before the batch, or `None` if the batch creates the page. The length is checked
    /// again under the submission lock.
    pub len_before: Option<u64>,
    /// The place in which the batch creates the page with its final length, or `None` if the page already exists or is
    /// resized. The memory of such a new page can be filled before the batch is logged.
    pub created_in: Option<Place>,
    /// The page's bytes after the batch.
    pub bytes: &'a [u8],
}

/// The images that contain the bytes of a batch's operations, by the operation's index.
pub(crate) type OpImages = BTreeMap<usize, ImageRef>;

/// The effect of all operations of a batch on the bytes and the length of one page.
pub(super) struct PageEffect {
    len_before: Option<u64>,
    len: Option<u64>,
    /// The place in which the batch created the page, or `None` if the page existed before or was resized since.
    created_in: Option<Place>,
    /// The index of the operation that replaced all bytes of the page, if no other operation changed its bytes.
    pub whole: Option<usize>,
    changed: bool,
}

impl WriteBatch {
    /// Returns the pages that the batch writes as a whole, if they total at least `bytes_min` bytes. `pages` contains
    /// the ids of the new pages. `len_of` returns the lengths of other pages.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn whole_pages(
        &self,
        pages: &[PageId],
        bytes_min: u64,
        len_of: impl Fn(PageId) -> Option<u64>,
    ) -> Result<Vec<WholePage<'_>>> {
        // Few batches write that many bytes. All others return here without the analysis below.
        let at_start = |step: &BatchStep| match step {
            BatchStep::Write { offset: 0, bytes, .. } => bytes.len() as u64,
            _ => 0,
        };
        if self.steps.iter().map(at_start).sum::<u64>() < bytes_min {
            return Ok(Vec::new());
        }
        let page_effects = self.page_effects(pages, len_of);
        let whole = page_effects.into_iter().filter_map(|(page, effect)| {
            let step = effect.whole?;
            let BatchStep::Write { bytes, .. } = &self.steps[step] else { return None };
            let PageEffect { len_before, created_in, .. } = effect;
            let whole = WholePage { step, page, len_before, created_in, bytes };
            (bytes.len() as u64 >= WHOLE_PAGE_LEN_MIN).then_some(whole)
        });
        let mut whole = collected(whole)?;
        whole.sort_unstable_by_key(|whole| whole.step);
        let bytes: u64 = whole.iter().map(|whole| whole.bytes.len() as u64).sum();
        Ok(if bytes < bytes_min { Vec::new() } else { whole })
    }

    /// Returns the effect of the batch on each page that it changes.
    pub(super) fn page_effects(
        &self,
        pages: &[PageId],
        len_of: impl Fn(PageId) -> Option<u64>,
    ) -> BTreeMap<PageId, PageEffect> {
        let mut page_effects: BTreeMap<PageId, PageEffect> = BTreeMap::new();
        let mut new_pages = pages.iter().copied();
        for (index, step) in self.steps.iter().enumerate() {
            let Some(page) = step.changes(pages, &mut new_pages) else { continue };
            let effect = page_effects.entry(page).or_insert_with(|| {
                let len = len_of(page);
                PageEffect { len_before: len, len, created_in: None, whole: None, changed: false }
            });
            match step {
                BatchStep::Create { len, place, .. } => {
                    (effect.len, effect.created_in) = (Some(*len), Some(*place));
                }
                BatchStep::Resize { len, .. } => {
                    (effect.whole, effect.len, effect.created_in) = (None, Some(*len), None);
                }
                BatchStep::Write { .. } | BatchStep::Source { .. } => {
                    let is_whole = match step {
                        BatchStep::Write { offset, bytes, .. } => {
                            *offset == 0 && effect.len == Some(bytes.len() as u64)
                        }
                        _ => true,
                    };
                    effect.whole = (is_whole && !effect.changed).then_some(index);
                    effect.changed = true;
                }
                _ => (effect.whole, effect.changed) = (None, true),
            }
        }
        page_effects
    }
}

impl BatchStep {
    /// Returns the page whose bytes or length the step changes, or `None` if it changes neither. A step that creates a
    /// page takes the page's id from `new_pages`.
    pub(super) fn changes(
        &self,
        pages: &[PageId],
        new_pages: &mut impl Iterator<Item = PageId>,
    ) -> Option<PageId> {
        match self {
            // A clone also writes its page, with the current bytes of its source.
            BatchStep::Create { .. } | BatchStep::Clone { .. } => new_pages.next(),
            BatchStep::Write { page, .. }
            | BatchStep::Source { page, .. }
            | BatchStep::Masked { page, .. }
            | BatchStep::Scatter { page, .. }
            | BatchStep::WriteDevice { page, .. }
            | BatchStep::ScatterDevice { page, .. }
            | BatchStep::Fill { page, .. }
            | BatchStep::Resize { page, .. }
            | BatchStep::Delete { page } => Some(page.resolve(pages)),
            BatchStep::Copy { target, .. } => Some(target.resolve(pages)),
            BatchStep::Capture { copy, .. } => Some(copy.page()),
            BatchStep::Move { .. }
            | BatchStep::SetMetadata { .. }
            | BatchStep::RemoveMetadata { .. }
            | BatchStep::SetRoot { .. }
            | BatchStep::RemoveRoot { .. }
            | BatchStep::Note { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::{Place, Width};

    use super::*;

    const OLD: PageId = PageId(7);
    const LEN: usize = WHOLE_PAGE_LEN_MIN as usize;

    /// Returns the indices of the operations in `batch` that write whole pages. Before the batch, the store contains
    /// one page.
    fn steps(batch: &WriteBatch) -> Vec<usize> {
        let pages: Vec<PageId> = (20..).map(PageId).take(batch.new_pages()).collect();
        let len_of = |page| (page == OLD).then_some(LEN as u64);
        batch.whole_pages(&pages, LEN as u64, len_of).unwrap().iter().map(|whole| whole.step).collect()
    }

    #[test]
    fn only_single_full_write_makes_whole_page() {
        type Build = fn(&mut WriteBatch);
        let rows: &[(&str, &[usize], Build)] = &[
            ("an old page", &[0], |b| _ = b.write(OLD, 0, &[1; LEN])),
            ("a new page", &[1], |b| {
                let page = b.create(LEN as u64, Place::Host).page();
                b.write(page, 0, &[1; LEN]);
            }),
            ("a page from bytes", &[1], |b| _ = b.create_from([1; LEN], Place::Host).page()),
            ("metadata beside it", &[1], |b| {
                b.set_metadata(OLD, "a", 1u64).write(OLD, 0, &[1; LEN]).set_metadata(OLD, "b", 2u64);
            }),
            ("moved before and after", &[1], |b| {
                b.move_to(OLD, Place::Pinned).write(OLD, 0, &[1; LEN]).move_to(OLD, Place::Host);
            }),
            ("resized before", &[1], |b| _ = b.resize(OLD, 2 * LEN as u64).write(OLD, 0, &[1; 2 * LEN])),
            ("resized after", &[], |b| _ = b.write(OLD, 0, &[1; LEN]).resize(OLD, LEN as u64)),
            ("resized to another length", &[], |b| _ = b.resize(OLD, 9).write(OLD, 0, &[1; LEN])),
            ("too short", &[], |b| {
                let page = b.create(LEN as u64 - 1, Place::Host).page();
                b.write(page, 0, &[1; LEN - 1]).write(OLD, 1, &[1; LEN - 1]);
            }),
            ("not at the start", &[], |b| _ = b.write(OLD, 1, &[1; LEN])),
            ("written before", &[], |b| _ = b.write(OLD, 3, &[1]).write(OLD, 0, &[1; LEN])),
            ("written after", &[], |b| _ = b.write(OLD, 0, &[1; LEN]).write(OLD, 3, &[1])),
            ("written twice", &[], |b| _ = b.write(OLD, 0, &[1; LEN]).write(OLD, 0, &[1; LEN])),
            ("sparse after", &[], |b| _ = b.write(OLD, 0, &[1; LEN]).scatter(OLD, Width::W1, &[1], &[1])),
            ("masked after", &[], |b| {
                _ = b.write(OLD, 0, &[1; LEN]).write_masked(OLD, 0, Width::W1, &[1], &[1])
            }),
            ("filled before", &[], |b| _ = b.fill(OLD, 0, 1, &[1]).write(OLD, 0, &[1; LEN])),
            ("deleted after", &[], |b| _ = b.write(OLD, 0, &[1; LEN]).delete(OLD)),
            ("a clone", &[], |b| {
                let page = b.clone_page(OLD);
                b.write(page, 0, &[1; LEN]);
            }),
            ("a page of unknown length", &[], |b| _ = b.write(PageId(8), 0, &[1; LEN])),
        ];
        for (why, expected, build) in rows {
            let mut batch = WriteBatch::default();
            build(&mut batch);
            assert_eq!(steps(&batch), *expected, "{why}");
        }
    }

    #[test]
    fn short_batches_keep_their_bytes_in_the_log() {
        let mut batch = WriteBatch::default();
        batch.write(OLD, 0, &[1; LEN]);
        let len_of = |_| Some(LEN as u64);
        assert_eq!(batch.whole_pages(&[], LEN as u64 + 1, len_of).unwrap(), []);
        let whole = WholePage {
            step: 0,
            page: OLD,
            len_before: Some(LEN as u64),
            created_in: None,
            bytes: &[1; LEN],
        };
        assert_eq!(batch.whole_pages(&[], LEN as u64, len_of).unwrap(), [whole]);
    }

    /// Memory that is filled in advance is allocated for the create, so the length must not change.
    #[test]
    fn created_place_is_kept_only_with_final_length() {
        let mut batch = WriteBatch::default();
        batch.create_from([1; LEN], Place::Pinned);
        let page = batch.create(10, Place::Host).page();
        batch.resize(page, LEN as u64).write(page, 0, &[1; LEN]).write(OLD, 0, &[1; LEN]);
        let len_of = |page| (page == OLD).then_some(LEN as u64);
        let found = batch.whole_pages(&[PageId(5), PageId(6)], 0, len_of).unwrap();
        let found = found.iter().map(|whole| (whole.page, whole.created_in));
        let expected = [(PageId(5), Some(Place::Pinned)), (PageId(6), None), (OLD, None)];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
