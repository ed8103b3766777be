//! Determines which batches changed a range of a page.

use std::ops::Range;

use remanent_format::state::blame::{ValueChange, changes_of};
use remanent_format::state::survey::Survey;
use remanent_format::{Defect, PageId, Place};

use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::history::view::View;

/// The maximum length in bytes of a range that can be queried. Each change in the result contains two copies of the
/// range.
const RANGE_LEN_MAX: u64 = 64 << 10;

/// The maximum number of attempts to read the files while a writer removes some of them.
const ATTEMPTS: usize = 8;

impl View {
    /// Returns the changes to bytes `range` of a page up to this state, oldest first. Each change contains the batch,
    /// the bytes before and after it, the batch's note, and the root after the batch.
    ///
    /// The changes reach back as far as the log is kept without a gap. Earlier changes are determined from the kept
    /// snapshots. A batch that writes the same bytes again is not listed. A view keeps only its own state, so a prune
    /// by a writer may remove changes older than the view's snapshot.
    ///
    /// ```
    /// use remanent::history::ChangeCause;
    /// use remanent::{Place, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path)?;
    /// let mut batch = store.batch();
    /// let page = batch.create_from(*b"right", Place::Host).page();
    /// let page = store.commit(batch)?.pages[0];
    /// let mut batch = store.batch();
    /// batch.write(page, 0, b"wrong").note("step 2");
    /// let culprit = store.commit(batch)?;
    ///
    /// let changes = Store::open_read_only(&path)?.blame(page, 0..1)?;
    /// assert_eq!(changes[1].lsn, culprit.position.lsn);
    /// assert_eq!(changes[1].cause, ChangeCause::Batch);
    /// assert_eq!(changes[1].before.as_deref(), Some(&b"r"[..]));
    /// assert_eq!(changes[1].after.as_deref(), Some(&b"w"[..]));
    /// assert_eq!(changes[1].note.as_deref(), Some("step 2"));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Limit`] for a range of more than 64 KiB;
    /// [`Error::Damaged`] if an image of the page or the log is damaged; [`Error::Overtaken`] if a writer removes files
    /// faster than this call reads them; [`Error::OutOfMemory`], [`Error::Forked`].
    pub fn blame(&self, page: PageId, range: Range<u64>) -> Result<Vec<ValueChange>> {
        let (past, page_len) = (self.past()?, self.page(page)?.len);
        if range.start > range.end || range.end > page_len {
            let len = range.end.saturating_sub(range.start);
            return Err(Error::OutOfBounds { page, offset: range.start, len, page_len });
        }
        let found = range.end - range.start;
        if found > RANGE_LEN_MAX {
            return Err(Error::Limit { what: "bytes of a range to blame", found, limit: RANGE_LEN_MAX });
        }
        let mut before = None;
        for _ in 0..ATTEMPTS {
            let source = DiskSource::new(past.disk().clone());
            let read_changes =
                || changes_of(&source, &Survey::read(&source)?, page, range.clone(), past.lsn());
            let damage = match read_changes() {
                Ok(changes) => return Ok(changes),
                Err(damage) => damage,
            };
            match damage.defect {
                Defect::Memory { needed } => {
                    return Err(Error::OutOfMemory { place: Place::Host, len: needed });
                }
                Defect::Missing if past.disk().directory().is_err() => {
                    return Err(Error::NoStore { path: past.disk().label(), found: None });
                }
                // If a writer's change caused the failure, the next attempt finds a different one. The same damage
                // found twice is real, unless the state was removed. In that case, every attempt finds the same files
                // missing.
                _ if before.replace(damage.clone()).is_some_and(|before| before == damage) => {
                    if past.is_kept()? {
                        return Err(Error::from(damage).in_store(&past.disk().label()));
                    }
                    break;
                }
                _ => {}
            }
        }
        Err(past.overtaken())
    }
}
