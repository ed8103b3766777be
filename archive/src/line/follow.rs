//! Follows the line: reads its objects in order as they are appended, in bounded memory (rules 22, 23 and 27).

use std::collections::VecDeque;

use remanent_format::{Lsn, StoreId};

use super::restore::ListedPart;
use super::{Archive, Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Damage, Error, Result};
use crate::object::{BatchPoint, Content, Fence, LineObject, Manifest, Nonce, ObjectKey, Role};

/// Maximum number of objects that are read concurrently. Line objects then use up to 32 MiB of memory.
const AHEAD_MAX: u64 = 8;

/// The batch after which a follower starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowPoint {
    /// Starts with the first batch of the store.
    Beginning,
    /// Starts after the end of the newest manifest, or with the first batch if there is none.
    Manifest,
    /// Starts after a batch.
    Batch(Lsn),
}

/// A fence that cuts the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Position of the fence.
    pub position: u64,
    /// The batch at which the line continues.
    pub batch: BatchPoint,
    /// The lowest incarnation that the fence starts.
    pub incarnation: u32,
}

/// A position on the line from which its objects are read in order. The cursor keeps a few objects in memory, but not
/// the lists of data objects that a [`Line`] keeps.
#[derive(Clone, Debug)]
pub struct LineCursor {
    store: StoreId,
    /// Position of the next object.
    next: u64,
    /// The nonce of the object before it, if that object was read.
    nonce_before: Option<Nonce>,
    /// Objects from the next position on.
    ahead: VecDeque<LineObject>,
    /// Number of objects that the next read requests.
    window: u64,
    /// Number and start of the newest known boundary.
    bound: u64,
    start: u64,
}

/// The result of [`LineCursor::find`].
#[derive(Clone, Debug)]
pub struct FoundCursor {
    /// A cursor at or before the object that contains the batch.
    pub cursor: LineCursor,
    /// The newest fence below the cursor.
    pub fence: Option<Fence>,
    /// The cuts that the line contains, oldest first.
    pub cuts: Vec<Cut>,
    /// The newest manifest of the line.
    pub manifest: Option<Manifest>,
}

impl LineCursor {
    /// Finds the object that contains the batch at `point`. If the batch is not archived yet, the cursor is at the end
    /// of the line. The caller compares the batch, because another batch with its Lsn may be archived.
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] if the batches after `point` are not kept, [`Error::Empty`], and the errors of
    /// [`Line::find`].
    pub async fn find<B: Bucket, N: Nonces>(
        archive: Archive<'_, B, N>,
        point: FollowPoint,
    ) -> Result<FoundCursor> {
        let mut line = Line::new(archive);
        line.find_to_read().await?;
        let store = line.store().ok_or(Error::Empty)?;
        let start = line.start();
        match line.cursor_at(point, store, start).await {
            Ok(found) => Ok(found),
            Err(error) => Err(line.unless_overtaken(error, start).await?),
        }
    }

    /// Returns the id of the store.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.store
    }

    /// Returns true if the next object was already read, so that [`next`](LineCursor::next) sends no request.
    #[must_use]
    pub fn has_next(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Returns the next object, or `None` if it does not exist yet. While objects exist, up to eight of them are read
    /// concurrently.
    ///
    /// If the next object does not exist, the call takes one GET. It does not detect that a boundary has passed the
    /// position; [`check_kept`](LineCursor::check_kept) detects this. Each read of objects takes one more GET, which
    /// excludes objects that a stalled writer created again at deleted positions (rule 22).
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] if a boundary has passed the position, [`Error::Damaged`] if the object is invalid
    /// or does not continue the line, and [`Error::Bucket`] if the bucket cannot be reached. The cursor has not moved.
    pub async fn next<B: Bucket, N: Nonces>(
        &mut self,
        archive: Archive<'_, B, N>,
    ) -> Result<Option<LineObject>> {
        if self.ahead.is_empty() {
            let mut line = self.line(archive);
            let read = self.read(&mut line).await;
            (self.bound, self.start) = (line.view.bound, line.view.start);
            match read {
                Ok(()) => {}
                Err(error) => {
                    self.ahead.clear();
                    return Err(line.unless_overtaken(error, self.next).await?);
                }
            }
        }
        let Some(object) = self.ahead.pop_front() else { return Ok(None) };
        self.nonce_before = Some(object.nonce);
        self.next = object.position + 1;
        Ok(Some(object))
    }

    /// Checks that no boundary has passed the next position. Takes one GET, and one more after a new boundary.
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] if a boundary has passed the position, and [`Error::Bucket`] if the bucket cannot
    /// be reached.
    pub async fn check_kept<B: Bucket, N: Nonces>(&mut self, archive: Archive<'_, B, N>) -> Result<()> {
        let mut line = self.line(archive);
        let is_overtaken = line.is_overtaken(self.next).await?;
        (self.bound, self.start) = (line.view.bound, line.view.start);
        if is_overtaken { Err(Error::Overtaken { position: self.next }) } else { Ok(()) }
    }

    /// Returns the frames of a run that [`next`](LineCursor::next) returned.
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] or [`Error::Damaged`] if a data object is missing or invalid, and [`Error::Bucket`]
    /// if the bucket cannot be reached.
    pub async fn frames<B: Bucket, N: Nonces>(
        &self,
        archive: Archive<'_, B, N>,
        object: &LineObject,
    ) -> Result<Vec<u8>> {
        let Content::Run(run) = &object.content else { return Ok(Vec::new()) };
        if object.data.is_empty() {
            return Ok(run.frames.clone());
        }
        let mut listed = object.data.clone();
        listed.retain(|entry| entry.part.role == Role::Frames);
        let mut frames = Vec::new();
        let receive = |_: &_, bytes: crate::object::Payload| {
            frames.extend_from_slice(&bytes);
            Ok(0)
        };
        let mut line = self.line(archive);
        line.need_each_data(&listed, self.store, object.position, receive).await?;
        Ok(frames)
    }

    /// Returns the parts of files that a run names. [`fetch_part`](super::fetch_part) fetches a part.
    #[must_use]
    pub fn listed_files(&self, object: &LineObject) -> Vec<ListedPart> {
        let files = object.data.iter().filter(|entry| entry.part.role != Role::Frames);
        let listed = |entry: &_| ListedPart { entry: *entry, store: self.store, lister: object.position };
        files.map(listed).collect()
    }

    /// Returns a handle that has read only the newest boundary of the line.
    fn line<'a, B: Bucket, N: Nonces>(&self, archive: Archive<'a, B, N>) -> Line<'a, B, N> {
        let mut line = Line::new(archive);
        line.view.store = Some(self.store);
        (line.view.bound, line.view.start) = (self.bound, self.start);
        line
    }

    /// Reads the next objects.
    async fn read<B: Bucket, N: Nonces>(&mut self, line: &mut Line<'_, B, N>) -> Result<()> {
        let mut nonce_before = self.nonce_before;
        let found = line.read_ahead(self.next, self.next + self.window).await;
        for (position, object) in (self.next..).zip(found) {
            let object = match object {
                Ok(Some(object)) => object,
                Ok(None) => break,
                // The next call reads this object again.
                Err(_) if !self.ahead.is_empty() => break,
                Err(error) => return Err(error),
            };
            if nonce_before.is_some_and(|nonce| nonce != object.nonce_before) {
                if !self.ahead.is_empty() {
                    break;
                }
                return Err(Error::Damaged { key: ObjectKey::Line(position), damage: Damage::NotNext });
            }
            nonce_before = Some(object.nonce);
            self.ahead.push_back(object);
        }
        self.window = if self.ahead.is_empty() { 1 } else { (2 * self.window).min(AHEAD_MAX) };
        // [rcheck]
        if !self.ahead.is_empty() && line.is_overtaken(self.next).await? {
            return Err(Error::Overtaken { position: self.next });
        }
        Ok(())
    }
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    async fn cursor_at(&mut self, point: FollowPoint, store: StoreId, start: u64) -> Result<FoundCursor> {
        let manifest = self.view.manifest.map(|(_, manifest)| manifest);
        let lsn = match (point, manifest) {
            (FollowPoint::Batch(lsn), _) => lsn,
            (FollowPoint::Manifest, Some(manifest)) => manifest.end.lsn,
            (FollowPoint::Beginning | FollowPoint::Manifest, _) => Lsn(0),
        };
        if lsn == Lsn(0) && start > 1 {
            return Err(Error::Overtaken { position: 1 });
        }
        let cuts = self.all_cuts(start).await?;
        // Objects below a cut that removed the batch belong to another branch.
        let cut = cuts.iter().rev().find(|cut| cut.batch.lsn < lsn);
        let (mut low, mut high) = (cut.map_or(start, |cut| cut.position), self.view.next);
        // The first object at or after which the batch is archived.
        while low < high {
            let middle = low + (high - low) / 2;
            if self.need_line(middle).await?.archived.lsn >= lsn { high = middle } else { low = middle + 1 }
        }
        let fence = self.fence_below(low).await?.map(|kept| kept.content);
        let (bound, start) = (self.view.bound, self.view.start);
        let ahead = VecDeque::new();
        let cursor = LineCursor { store, next: low, nonce_before: None, ahead, window: 1, bound, start };
        Ok(FoundCursor { cursor, fence, cuts, manifest })
    }

    /// Returns the cuts at or above `lowest`, oldest first.
    async fn all_cuts(&mut self, lowest: u64) -> Result<Vec<Cut>> {
        let mut cuts = Vec::new();
        let mut position = self.view.links.fence;
        while position >= lowest && position > 0 {
            let object = self.need_line(position).await?;
            let Content::Fence(fence) = &object.content else { break };
            cuts.extend(Cut::of(position, fence));
            position = object.links.fence;
        }
        cuts.reverse();
        Ok(cuts)
    }
}

impl Cut {
    /// Returns the cut of a fence at `position`, if it cuts the line.
    #[must_use]
    pub fn of(position: u64, fence: &Fence) -> Option<Self> {
        let openings = fence.openings.iter().filter_map(|header| header.opening);
        let incarnation = openings.map(|opening| opening.incarnation.number).min();
        fence.cut.map(|batch| Self { position, batch, incarnation: incarnation.unwrap_or(u32::MAX) })
    }
}
