//! The history of a byte range of a page. It lists the batches that changed the bytes, for example to find the cause of
//! a wrong number in a weight.
//!
//! The history starts where the log is kept without a gap. Before that point, it compares the kept snapshots. Memory is
//! allocated for the range only, and nothing is written. Bytes are proven before they are used (I9).

use std::ops::Range;
use std::sync::Arc;

use crate::defect::{Damage, Defect};
use crate::frame::FrameKind;
use crate::ids::{LogPoint, Lsn, PageId, SnapshotId};
use crate::image::ImageRef;
use crate::image::proven::ProvenImage;
use crate::log::LogWalk;
use crate::manifest::{Manifest, ManifestEntry};
use crate::names::{FileName, ReadAt};
use crate::op::{Op, decode_payload};
use crate::state::reach::{Reach, Role};
use crate::state::survey::Survey;
use crate::state::window::{PageWindow, load_window};
use crate::value::Metadata;

/// The cause of a change of the bytes of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeCause {
    /// A batch changed the value.
    Batch,
    /// A restore of an earlier state changed the value.
    Restore,
    /// The bytes differ between two kept snapshots. The batch that changed them is no longer kept.
    Snapshot,
}

/// A change of the bytes of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValueChange {
    /// The Lsn of the batch that changed the bytes. For [`ChangeCause::Snapshot`], the Lsn of the last batch that
    /// changed the page.
    pub lsn: Lsn,
    /// The cause of the change.
    pub cause: ChangeCause,
    /// The bytes before the change, or `None` if the page did not exist or did not contain the whole range.
    pub before: Option<Vec<u8>>,
    /// The bytes after the change, or `None` if the page does not exist or does not contain the whole range.
    pub after: Option<Vec<u8>>,
    /// The note of the batch, or `None` if the batch has no note.
    pub note: Option<String>,
    /// The root of the store after the batch, or `None` if the root is not known.
    pub root: Option<Arc<Metadata>>,
}

/// Returns the changes of a range of a page up to batch `until`, oldest first. A batch that writes bytes equal to the
/// previous bytes is not listed.
///
/// # Errors
/// Returns [`Damage`] if the log up to batch `until` cannot be read from any start. Also returns [`Damage`] if an image
/// of the page is damaged, or if there is not enough memory for the range.
pub fn changes_of(
    source: &dyn ReadAt,
    survey: &Survey,
    page: PageId,
    range: Range<u64>,
    until: Lsn,
) -> Result<Vec<ValueChange>, Damage> {
    History { source, survey, page, range, until }.changes()
}

struct History<'h> {
    source: &'h dyn ReadAt,
    survey: &'h Survey,
    page: PageId,
    range: Range<u64>,
    until: Lsn,
}

/// The page in a kept snapshot.
struct PastVersion<'h> {
    /// The newest link of the snapshot.
    newest: &'h Manifest,
    /// The page's entry, or `None` if the snapshot does not contain the page.
    entry: Option<&'h ManifestEntry>,
}

/// The bytes of the range at the current point of the log, with the changes so far.
#[derive(Clone)]
struct Follower<'h> {
    history: &'h History<'h>,
    /// The image and the length of the page in the last snapshot, or `None` if that snapshot did not contain the page.
    loaded: Option<(Option<ImageRef>, u64)>,
    /// Current bytes of the range, or `None` while the page does not exist.
    window: Option<PageWindow>,
    /// Lsn of the newest batch whose changes `window` includes.
    window_lsn: Lsn,
    root: Arc<Metadata>,
    /// Lsn from which on `root` is known.
    root_lsn: Lsn,
    changes: Vec<ValueChange>,
}

impl<'h> History<'h> {
    fn changes(&'h self) -> Result<Vec<ValueChange>, Damage> {
        let survey = self.survey;
        // A manifest that is kept only as a link of later snapshots may name images that were deleted.
        let reach = Reach::at_the_end(survey, self.source).map(|(_, reach)| reach);
        let is_kept = |id: &&SnapshotId| reach.as_ref().is_none_or(|reach| reach.role(**id) != Role::Link);
        let whole = survey.links.keys().filter(is_kept).filter_map(|id| {
            let (newest, _) = survey.link(*id).ok()?;
            Some(PastVersion { newest, entry: survey.entry(*id, self.page).ok()? })
        });
        let versions: Vec<PastVersion<'_>> = whole.filter(|past| past.newest.end <= self.until).collect();
        // Start from the oldest candidate from which the log is complete, so that the history is as long as possible.
        // Snapshots up to the start cover the time before the start.
        let mut follower = Follower::new(self);
        let mut stopped_by = Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1));
        let mut start = survey.log.beginning();
        let mut versions = versions.iter();
        loop {
            if let Some(from) = start {
                match follower.followed(from) {
                    Ok(changes) => return Ok(changes),
                    Err(damage) => stopped_by = damage,
                }
            }
            let Some(past) = versions.next() else { return Err(stopped_by) };
            follower.begin(past)?;
            start = Some(past.newest.redo);
        }
    }

    /// Loads the page that an entry of a manifest describes.
    fn named(&self, entry: &ManifestEntry) -> Result<PageWindow, Damage> {
        self.load(entry.image, entry.len)
    }

    /// Loads a page from its image, or from zeros if there is no image.
    fn load(&self, image: Option<ImageRef>, len: u64) -> Result<PageWindow, Damage> {
        // The image is proven as a whole before any of its bytes are used (I9).
        let image = image.map(|image| ProvenImage::prove(self.source, &image, len)).transpose()?;
        load_window(self.source, len, image.as_ref(), self.range.clone())
    }
}

impl<'h> Follower<'h> {
    fn new(history: &'h History<'h>) -> Self {
        Self {
            history,
            loaded: None,
            window: None,
            window_lsn: Lsn(0),
            root: Arc::default(),
            root_lsn: Lsn(0),
            changes: Vec::new(),
        }
    }

    /// Returns the current bytes of the range. Returns `None` if the page does not exist or does not contain the whole
    /// range.
    fn value(&self) -> Option<Vec<u8>> {
        let bytes = self.window.as_ref()?.bytes();
        let Range { start, end } = &self.history.range;
        // The window is shorter than the range if the page ends inside the range.
        (bytes.len() as u64 == end - start).then(|| bytes.to_vec())
    }

    /// Records a change if the current bytes differ from `before`.
    fn note(&mut self, lsn: Lsn, cause: ChangeCause, before: Option<Vec<u8>>, note: Option<String>) {
        let after = self.value();
        if before != after {
            let root = (lsn >= self.root_lsn).then(|| self.root.clone());
            self.changes.push(ValueChange { lsn, cause, before, after, note, root });
        }
    }

    /// Replaces the page with its version in a snapshot, and records a change if the bytes differ.
    fn begin(&mut self, past: &PastVersion<'_>) -> Result<(), Damage> {
        let before = self.value();
        let loaded = past.entry.map(|entry| (entry.image, entry.len));
        // Most snapshots share the image with the snapshot before, and the image is then proven once.
        if loaded.is_none() || self.loaded != loaded {
            self.window = past.entry.map(|entry| self.history.named(entry)).transpose()?;
            self.loaded = loaded;
        }
        (self.root, self.root_lsn) = (past.newest.root.clone(), past.newest.end);
        self.window_lsn = past.entry.map_or(Lsn(0), |entry| entry.lsn);
        self.note(self.window_lsn, ChangeCause::Snapshot, before, None);
        Ok(())
    }

    /// Reads the log from a point up to the requested batch, and returns all changes. The follower itself stays at its
    /// point.
    fn followed(&self, from: LogPoint) -> Result<Vec<ValueChange>, Damage> {
        let History { source, survey, until, .. } = *self.history;
        let mut walk = LogWalk::new(source, &survey.log, from, survey.mark())?;
        let mut follower = self.clone();
        while walk.point().lsn < until {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind == FrameKind::Batch {
                let (lsn, file) = (frame.header.lsn, FileName::Segment(frame.header.segment));
                follower.batch(lsn, frame.payload, file, frame.header.offset)?;
            }
        }
        // A writer may have removed a part of the log during the walk. The history would then be incomplete.
        let LogPoint { lsn, segment, offset, .. } = walk.point();
        if lsn < until {
            return Err(Defect::Missing.at_lsn(FileName::Segment(segment), offset, Lsn(lsn.0 + 1)));
        }
        Ok(follower.changes)
    }

    fn batch(&mut self, lsn: Lsn, payload: &[u8], file: FileName, offset: u64) -> Result<(), Damage> {
        let at = |defect: Defect| defect.at_lsn(file, offset, lsn);
        let ops = decode_payload(payload).map_err(at)?;
        let before = self.value();
        let (mut note, mut cause) = (None, ChangeCause::Batch);
        for op in ops.iter().map(|at| &at.op) {
            match op {
                Op::Note { text } => note = Some((*text).to_owned()),
                // The root of a snapshot includes all batches up to its `end`.
                Op::SetRoot { name, value } if lsn > self.root_lsn => {
                    Arc::make_mut(&mut self.root).insert(name.clone(), value.clone());
                }
                Op::RemoveRoot { name } if lsn > self.root_lsn => {
                    Arc::make_mut(&mut self.root).remove(*name);
                }
                Op::Restore { table, table_crc, .. } => {
                    let History { source, survey, page, .. } = *self.history;
                    let table = survey.read_table(source, *table, *table_crc)?;
                    let entry = table.entries.iter().find(|entry| entry.page == page);
                    self.window = entry.map(|entry| self.history.named(entry)).transpose()?;
                    (self.root, self.window_lsn, cause) = (table.root.clone(), lsn, ChangeCause::Restore);
                }
                op if op.page() == Some(self.history.page) && lsn > self.window_lsn => self.apply(op)?,
                _ => {}
            }
        }
        self.note(lsn, cause, before, note);
        Ok(())
    }

    fn apply(&mut self, op: &Op<'_>) -> Result<(), Damage> {
        match op {
            Op::Create { .. } => self.window = Some(self.history.load(None, 0)?),
            Op::Image { len, image, .. } => self.window = Some(self.history.load(Some(*image), *len)?),
            Op::Delete { .. } => self.window = None,
            _ => {}
        }
        if let Some(window) = &mut self.window {
            let len = window.page_len();
            let is_within =
                |(start, count): (u64, u64)| start.checked_add(count).is_some_and(|end| end <= len);
            // The operation was checked when the state was resolved, so it exceeds the page only if the files have
            // changed since.
            if op.range().is_none_or(is_within) {
                window.apply(op);
            }
        }
        Ok(())
    }
}
