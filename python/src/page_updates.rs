//! Updates of pages to new bytes. The elements that differ are logged, or the whole page is written if too
//! many differ.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use remanent::batch::{ByteSource, PageChanges, Width};
use remanent::error::{IoAction, IoObject};
use remanent::{Error, PageId, PageInfo, Place, Store, WriteBatch};

use crate::elements::{Elements, Layout, PageLayout};
use crate::errors::OrRaise;
use crate::memory::{HostBytes, Input};
use crate::parallel;
use crate::pending_batch::{BatchPage, PendingBatch};

/// The inverse of the maximum share of a page that is logged as changes. A page with more changes is written
/// completely.
const LOGGED_PART: u64 = 4;
/// The default limit for the bytes that the updates of a batch log together. The limit is well below that for
/// changes that wait for a snapshot.
const LOGGED_MAX: u64 = 48 << 20;
/// The number of bytes of a page that are compared at once.
const COMPARED_LEN: usize = 4 << 20;
/// The number of bytes for which another thread is worthwhile.
const COMPARED_BY_THREAD: u64 = 4 << 20;
/// The number of bytes that are compared first, at the start and in the middle of a page. If more than the
/// allowed part differs in both, most of the page has changed and need not be read.
const PROBED_LEN: usize = 64 << 10;
/// The shortest page for which comparing these two parts first is worthwhile.
const PROBES_LEN_MIN: usize = 4 * PROBED_LEN;
/// The alignment of the middle part, which is a multiple of every element width.
const MIDDLE_ALIGN: usize = 4 << 10;

enum NewBytes {
    Host(HostBytes),
    /// Bytes on a GPU, which are copied to the host in pieces, and their length.
    External(Arc<dyn ByteSource>, u64),
}

impl NewBytes {
    /// Returns an object's bytes, and their element type and shape.
    ///
    /// # Errors
    /// `TypeError`, `BufferError` or `MemoryRefusedError` if the bytes cannot be used.
    fn take(py: Python<'_>, path: &str, object: &Bound<'_, PyAny>) -> PyResult<(Self, Elements)> {
        let input = Input::take(object)?;
        let elements = input.elements().clone();
        let bytes = match input {
            Input::Host(bytes) => Self::Host(bytes),
            Input::Cuda(bytes) if bytes.len() == 0 => Self::Host(HostBytes::EMPTY),
            Input::Cuda(bytes) => {
                let len = bytes.len();
                let source = py.detach(|| bytes.source()).or_raise(py, Some(path))?;
                Self::External(source, len)
            }
        };
        Ok((bytes, elements))
    }

    fn len(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::External(_, len) => *len,
        }
    }

    /// Returns a piece of the bytes. A piece that is not in host memory is copied to `held`.
    fn piece<'b>(&'b self, at: usize, len: usize, held: &'b mut Vec<u8>) -> remanent::Result<&'b [u8]> {
        match self {
            Self::Host(bytes) => Ok(&bytes.as_slice()[at..at + len]),
            Self::External(source, _) => {
                held.resize(len, 0);
                let refused = |error| Error::Io {
                    action: IoAction::Read,
                    object: IoObject::Source { index: 0, offset: at as u64 },
                    store: None,
                    source: Arc::new(error),
                };
                source.read_at(at as u64, held).map_err(refused)?;
                Ok(held)
            }
        }
    }

    /// Converts the bytes to a source that the commit reads.
    fn into_source(self) -> Arc<dyn ByteSource> {
        match self {
            Self::Host(bytes) => Arc::new(bytes),
            Self::External(source, _) => source,
        }
    }
}

/// An update of a page to new bytes, which are compared in elements of `width` bytes.
struct Update {
    page: PageId,
    data: NewBytes,
    layout: Option<Layout>,
    width: Width,
}

/// Adds updates of pages to a batch: (page, new bytes, element width). The pages are compared by several threads.
/// Returns the number of elements that differ for each page, or `None` if the whole page is written.
///
/// # Errors
/// Errors of resolving a page, of taking the bytes and of reading, and `ValueError` for a second update of
/// the same page.
pub fn update_many<'py>(
    pending: &PendingBatch,
    py: Python<'py>,
    updates: impl IntoIterator<Item = (Bound<'py, PyAny>, Bound<'py, PyAny>, Width)>,
    logged_max: Option<u64>,
) -> PyResult<Vec<Option<u64>>> {
    let gate = &pending.gate;
    let take = |(page, data, width): (Bound<'py, PyAny>, Bound<'py, PyAny>, Width)| {
        let page = pending.page_of_store(&page)?;
        let (data, elements) = NewBytes::take(py, &gate.path, &data)?;
        Ok(Update { page, data, layout: elements.layout()?, width })
    };
    let updates = updates.into_iter().map(take).collect::<PyResult<Vec<_>>>()?;
    let left = AtomicU64::new(logged_max.unwrap_or(LOGGED_MAX).saturating_sub(pending.logged()));
    let threads = updates.iter().map(|update| update.data.len() / COMPARED_BY_THREAD).sum::<u64>() as usize;
    let compared = gate.call(py, |store| {
        parallel::map(&updates, 1 + threads, "remanent-updates", |update| changes(store, update, &left))
    })?;
    updates.into_iter().zip(compared).map(|(update, found)| add(py, pending, update, found)).collect()
}

/// Adds an update of one page. Same as [`update_many`].
pub fn update(
    pending: &PendingBatch,
    page: &Bound<'_, PyAny>,
    data: &Bound<'_, PyAny>,
    width: Width,
    logged_max: Option<u64>,
) -> PyResult<Option<u64>> {
    let updates = [(page.clone(), data.clone(), width)];
    update_many(pending, page.py(), updates, logged_max).map(|counts| counts[0])
}

/// Adds the update of a page to a batch. Returns the number of elements that differ, or `None` if the whole page is
/// written.
fn add(
    py: Python<'_>,
    pending: &PendingBatch,
    update: Update,
    (info, changes): (PageInfo, Changes),
) -> PyResult<Option<u64>> {
    let Update { page, data, layout, .. } = update;
    let (count, logged) = match &changes {
        Some((changes, cost)) => (Some(changes.count()), *cost),
        None => (None, 0),
    };
    let len = data.len();
    pending.update(py, page, logged, |batch| {
        batch.expect_epoch(page, info.epoch);
        match changes {
            Some((changes, _)) => changes.put(batch, page),
            None if len == 0 => _ = batch.resize(page, 0),
            None => _ = batch.replace_from_source(page, len, data.into_source()),
        }
    })?;
    if layout.is_some() || info.len != len {
        let put = |batch: &mut WriteBatch, before: PageLayout| match &layout {
            Some(layout) => before.put(batch, page.into(), Some(layout)),
            None => before.put_len(batch, page.into(), len),
        };
        pending.build_layout(py, BatchPage::Stored(page), put)?;
    }
    Ok(count)
}

/// Returns the changes from a page to its new bytes, the bytes that they need, and the page as it was when compared.
/// The bytes are subtracted from `left`. The changes are `None` if they need more than `left` bytes or if the page must
/// be written completely.
fn changes(store: &Store, update: &Update, left: &AtomicU64) -> remanent::Result<(PageInfo, Changes)> {
    let Update { page, ref data, width, .. } = *update;
    let info = store.page(page)?;
    if info.len != data.len() {
        return Ok((info, None));
    }
    let comparison = Comparison { store, info: &info, data, width, left: left.load(Ordering::Relaxed) };
    let changes = if comparison.is_mostly_changed()? {
        None
    } else {
        match comparison.scan() {
            // If only the cached copy is damaged, a read of the medium succeeds.
            Ok(None) | Err(Error::Damaged(_)) => comparison.read()?,
            Ok(Some(changes)) => changes,
            Err(error) => return Err(error),
        }
    };
    // Another thread may have taken some of the bytes in the meantime.
    let claim =
        |cost| left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left: u64| left.checked_sub(cost));
    Ok((info, changes.filter(|(_, cost)| claim(*cost).is_ok())))
}

/// A comparison of a page with new bytes of the same length.
struct Comparison<'a> {
    store: &'a Store,
    info: &'a PageInfo,
    data: &'a NewBytes,
    width: Width,
    /// The number of bytes that the changes may need.
    left: u64,
}

/// The changes of a page and the bytes that they need, or `None` if the page must be written completely.
type Changes = Option<(PageChanges, u64)>;

impl Comparison<'_> {
    /// Returns whether two short parts of the page show that the page must be written completely. A wrong answer costs
    /// time or space, but the page is written correctly.
    fn is_mostly_changed(&self) -> remanent::Result<bool> {
        let len = self.data.len() as usize;
        if len < PROBES_LEN_MIN {
            return Ok(false);
        }
        let middle = len / 2 / MIDDLE_ALIGN * MIDDLE_ALIGN;
        let (first, second) = (self.changed_at(0)?, self.changed_at(middle)?);
        // With no budget left, it does not matter which elements differ: one difference means that the whole page is
        // written.
        let most = PROBED_LEN as u64 / LOGGED_PART;
        Ok(if self.left == 0 { first > 0 || second > 0 } else { first > most && second > most })
    }

    /// Returns the number of bytes in elements that differ in a short part of the page.
    fn changed_at(&self, at: usize) -> remanent::Result<u64> {
        let mut held = Vec::new();
        let after = self.data.piece(at, PROBED_LEN, &mut held)?;
        let width = self.width.bytes();
        let estimated = self.store.estimate_difference(self.info, at as u64, self.width, after)?;
        if let Some(count) = estimated {
            return Ok((count * width) as u64);
        }
        let mut before = vec![0; PROBED_LEN];
        self.store.read(self.info.page, at as u64, &mut before)?;
        let elements = before.chunks(width).zip(after.chunks(width));
        Ok((elements.filter(|(before, after)| before != after).count() * width) as u64)
    }

    /// Compares the page while it is read and verified once. Returns `None` if the page is better read in parts.
    fn scan(&self) -> remanent::Result<Option<Changes>> {
        let (mut changes, mut held) = (PageChanges::new(self.width), Vec::new());
        let mut failed = None;
        let scanned = self.store.scan(self.info, |at, before| {
            match self.data.piece(at as usize, before.len(), &mut held) {
                Ok(after) if self.adds(&mut changes, at, before, after) => return ControlFlow::Continue(()),
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
            ControlFlow::Break(())
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(scanned.map(|is_complete| is_complete.then(|| self.complete(changes))))
    }

    /// Compares the page with reads of its parts.
    fn read(&self) -> remanent::Result<Changes> {
        let (len, mut held) = (self.data.len() as usize, Vec::new());
        let mut before = vec![0; COMPARED_LEN.min(len)];
        let mut changes = PageChanges::new(self.width);
        for at in (0..len).step_by(COMPARED_LEN) {
            let after = self.data.piece(at, COMPARED_LEN.min(len - at), &mut held)?;
            let before = &mut before[..after.len()];
            self.store.read(self.info.page, at as u64, before)?;
            if !self.adds(&mut changes, at as u64, before, after) {
                return Ok(None);
            }
        }
        Ok(Some(self.complete(changes)))
    }

    /// Adds the differences of one piece to `changes`. Returns whether logging all changes so far costs less than
    /// writing the whole page.
    fn adds(&self, changes: &mut PageChanges, at: u64, before: &[u8], after: &[u8]) -> bool {
        if self.left == 0 {
            return before == after;
        }
        changes.compare(at, before, after);
        changes.cost() <= self.data.len() / LOGGED_PART && taken(self.info, changes) <= self.left
    }

    fn complete(&self, mut changes: PageChanges) -> (PageChanges, u64) {
        let taken = taken(self.info, &mut changes);
        (changes, taken)
    }
}

/// Returns the bytes that changes need until the next snapshot: in the log or, for a page on disk, in the
/// memory for its changes.
fn taken(info: &PageInfo, changes: &mut PageChanges) -> u64 {
    if info.place == Place::Disk { changes.pending_bytes().max(changes.cost()) } else { changes.cost() }
}
