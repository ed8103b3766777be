//! Reads a state of the store from the line (rules 10, 22 to 24, 27 and 28).

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;

use futures_util::future::join_all;
use remanent_format::{Lsn, StoreId};

use super::ahead::LineAhead;
use super::request::READS_MAX;
use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Damage, Error, Result};
use crate::object::{
    BatchPoint, Content, DataKey, DataRef, Fence, KeptSnapshot, LineObject, Manifest, ObjectKey, Part,
    Payload, Role, Run, predecessor,
};

/// A receiver of a state that is read from the line, for example for a restore. After an error, the caller discards
/// everything that the sink has received, and reads again.
///
/// The calls arrive in this order:
///
/// 1. the newest fence below the first object that is read;
/// 2. the manifest and its parts, if there is a manifest;
/// 3. frames, parts of the files that the frames name, fences and truncations, in the order of the line;
/// 4. the named snapshots, newest first, each after the parts that it needs and that were not received before.
pub trait StateSink {
    /// Receives the manifest from which the state is rebuilt.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written.
    fn manifest(&mut self, manifest: &Manifest) -> io::Result<()>;

    /// Returns true if the sink fetches the parts of image files itself when it needs them. It then receives them by
    /// [`defer`](Self::defer) and not by [`part`](Self::part).
    fn defers_images(&self) -> bool {
        false
    }

    /// Receives a part of an image file that was not fetched.
    fn defer(&mut self, part: &ListedPart) {
        let _ = part;
    }

    /// Receives a part of a file. If parts overlap, the later call overwrites the earlier one.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written.
    fn part(&mut self, part: &Part, bytes: Payload) -> io::Result<()>;

    /// Returns the number of received parts and pieces that are in memory and not written yet. Fewer are fetched
    /// meanwhile.
    fn parts_in_memory(&self) -> usize {
        0
    }

    /// Receives a piece of the frames of the batches above `before`, up to and including `after`. Pieces may end within
    /// a frame. The sink skips frames at or below the manifest's `redo` and checks the chain hash of each frame.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written, or if the frames do not continue the state.
    fn frames(&mut self, before: &BatchPoint, after: &BatchPoint, piece: Payload) -> io::Result<()>;

    /// Receives a fence, which contains the STORE file and the headers of the segments that open an incarnation.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written.
    fn fence(&mut self, fence: &Fence) -> io::Result<()>;

    /// Discards the batches above `lsn`.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written.
    fn truncate(&mut self, lsn: Lsn) -> io::Result<()>;

    /// Receives a part of a file of a named snapshot. Files only grow, so this part never overwrites newer bytes.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written.
    fn named_part(&mut self, part: &Part, bytes: Payload) -> io::Result<()>;

    /// Receives a named snapshot after all of its parts were received.
    ///
    /// # Errors
    /// Returns an error if the local disk cannot be written.
    fn named(&mut self, snapshot: &KeptSnapshot, parts: &[Part]) -> io::Result<()>;
}

/// Returns true if the sink fetches this part itself.
fn is_deferred<S: StateSink>(sink: &S, part: &Part) -> bool {
    part.role == Role::Images && sink.defers_images()
}

/// A part of a file, and its location in the archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedPart {
    /// The part, and the key of its data object.
    pub entry: DataRef,
    /// Id of the store.
    pub store: StoreId,
    /// Position of the line object that lists the part, or for a named snapshot the lowest position that was kept when
    /// the list was read. Once a boundary has passed this position, the part may be deleted.
    pub lister: u64,
}

/// The end of a state that was read from an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoredEnd {
    /// Id of the store.
    pub store: StoreId,
    /// The last batch of the state.
    pub batch: BatchPoint,
    /// The highest incarnation number in the state. The opening of a restored directory has a higher number (rule 24).
    pub incarnation: u32,
    /// Position of the newest fence on the line.
    pub fence: u64,
    /// Number of named snapshots that were read.
    pub named: u64,
    /// Whether the newest fence belongs to a writer that archives the store while it is open.
    pub follows_open_store: bool,
}

/// Determines where the read of an earlier state ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    Batch,
    EndOfRun,
}

/// The part of the line from which a state is read.
#[derive(Clone, Copy)]
pub(super) struct Window {
    /// Position and content of the manifest from which the state is rebuilt, or `None` for the beginning of the line.
    pub manifest: Option<(u64, Manifest)>,
    /// The last batch of the state, or `None` for the end of the line.
    pub at: Option<Lsn>,
    pub until: Until,
    /// Whether the named snapshots up to the last batch are read.
    pub with_names: bool,
}

/// The progress of a read.
#[derive(Default)]
struct Reading {
    /// The last batch that was read.
    point: BatchPoint,
    /// The batch after which the log is needed. The first run may start at or below it.
    redo: BatchPoint,
    incarnation: u32,
    /// Position of the manifest, and the files of which it lists parts. Runs below the manifest contain older parts of
    /// these files.
    manifest: u64,
    files: HashSet<(Role, u64)>,
    /// For each received part of a file, by role, file number and offset: the position of the object that lists it, and
    /// the key of its data object.
    received: HashMap<(Role, u64, u64), (u64, DataKey)>,
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Reads the state at the end of the line that [`find`](Line::find) or [`claim`](Line::claim) found.
    ///
    /// # Errors
    /// Returns [`Error::Overtaken`] if a boundary permits deleting objects of this state; call `find` again. Returns
    /// [`Error::Damaged`] if an object is missing or invalid.
    pub async fn read_state<S: StateSink>(&mut self, sink: &mut S) -> Result<RestoredEnd> {
        self.read_end_state(true, sink).await
    }

    /// Reads the state at the end of the line, with or without the named snapshots.
    pub(super) async fn read_end_state<S: StateSink>(
        &mut self,
        with_names: bool,
        sink: &mut S,
    ) -> Result<RestoredEnd> {
        let manifest = self.view.manifest;
        let end =
            self.read_from(Window { manifest, at: None, until: Until::Batch, with_names }, sink).await?;
        if end.batch != self.view.archived {
            let damage = Damage::Gap { found: self.view.archived, expected: end.batch };
            return Err(Error::Damaged { key: ObjectKey::Line(self.view.next - 1), damage });
        }
        Ok(end)
    }

    /// Reads the state as of batch `lsn`.
    ///
    /// # Errors
    /// Returns [`Error::CutTooOld`] if no kept manifest ends at or below `lsn`, and the errors of
    /// [`read_state`](Line::read_state).
    pub async fn read_state_at<S: StateSink>(&mut self, lsn: Lsn, sink: &mut S) -> Result<RestoredEnd> {
        let manifest = self.manifest_before(lsn).await?;
        let window = Window { manifest, at: Some(lsn), until: Until::Batch, with_names: true };
        self.read_from(window, sink).await
    }

    /// Reads the state as of batch `lsn` plus the later batches of the same run.
    ///
    /// # Errors
    /// Returns the errors of [`read_state_at`](Line::read_state_at).
    pub async fn read_state_through<S: StateSink>(&mut self, lsn: Lsn, sink: &mut S) -> Result<RestoredEnd> {
        let manifest = self.manifest_before(lsn).await?;
        let window = Window { manifest, at: Some(lsn), until: Until::EndOfRun, with_names: true };
        self.read_from(window, sink).await
    }

    /// Returns the newest manifest that ends at or below `lsn`, or `None` if the line is kept from position 1.
    pub(super) async fn manifest_before(&mut self, lsn: Lsn) -> Result<Option<(u64, Manifest)>> {
        let found = self.kept_manifest(|manifest| manifest.end.lsn <= lsn).await?;
        if found.is_none() && self.view.start > 1 {
            return Err(Error::CutTooOld { lsn: lsn.0 });
        }
        Ok(found)
    }

    /// Returns the newest kept manifest that `is_wanted` accepts, with its position.
    pub(super) async fn kept_manifest(
        &mut self,
        mut is_wanted: impl FnMut(&Manifest) -> bool,
    ) -> Result<Option<(u64, Manifest)>> {
        let mut position = self.view.links.manifest;
        while position >= self.view.start {
            let object = self.need_line(position).await?;
            let Content::Manifest(manifest) = object.content else { break };
            if manifest.start >= self.view.start && is_wanted(&manifest) {
                return Ok(Some((position, manifest)));
            }
            position = object.links.manifest;
        }
        Ok(None)
    }

    pub(super) async fn read_from<S: StateSink>(
        &mut self,
        window: Window,
        sink: &mut S,
    ) -> Result<RestoredEnd> {
        let lowest = window.manifest.map_or(1, |(_, manifest)| manifest.start);
        match self.read_window(window, sink).await {
            Ok(end) => Ok(end),
            Err(error) => Err(self.unless_overtaken(error, lowest).await?),
        }
    }

    async fn read_window<S: StateSink>(&mut self, window: Window, sink: &mut S) -> Result<RestoredEnd> {
        let Window { manifest: newest, at, until, with_names } = window;
        let store = self.view.store.ok_or(Error::Empty)?;
        let mut reading = Reading::default();
        // `view.start` changes when a newer boundary is found, so its value is saved here.
        let (mut lowest, kept_from) = (1, self.view.start);
        if let Some((position, manifest)) = newest {
            lowest = manifest.start;
            // This fence has the STORE file and the openings of the frames that follow (rule 17).
            if let Some(kept) = self.fence_below(lowest).await? {
                sink.fence(&kept.content)?;
            }
            reading.manifest = position;
            self.read_manifest(position, &manifest, store, &mut reading, sink).await?;
            reading.redo = manifest.redo;
            reading.point = if manifest.follows_gap { manifest.end } else { manifest.redo };
        } else if self.view.start > 1 {
            let damage = Damage::NoStart;
            return Err(Error::Damaged { key: ObjectKey::Line(self.view.start), damage });
        }
        if let Some(kept) = &self.view.fence {
            reading.note(&kept.content);
        }
        let cuts = self.cuts(lowest, at).await?;
        self.read_line(lowest, at, &cuts, &mut reading, sink).await?;
        // [mend] A snapshot is taken while batches are written: its pages are consistent only after replay up to `end`.
        if let Some((position, manifest)) =
            newest.filter(|(_, manifest)| reading.point.lsn < manifest.end.lsn)
        {
            let damage = Damage::EndNotReached { end: manifest.end, found: reading.point };
            return Err(Error::Damaged { key: ObjectKey::Line(position), damage });
        }
        if let Some(lsn) = at.filter(|lsn| until == Until::Batch && *lsn < reading.point.lsn) {
            sink.truncate(lsn)?;
        }
        let mut named = 0;
        if with_names {
            named = self.read_named(at, kept_from, store, &mut reading, sink).await?;
        }
        // [rcheck] Some of the objects that were read may have been deleted and created again by a stalled process.
        if self.is_overtaken(lowest).await? {
            return Err(Error::Overtaken { position: lowest });
        }
        let incarnation = reading.incarnation.max(reading.point.incarnation.number);
        let follows_open_store = self.view.fence.as_ref().is_some_and(|kept| kept.content.follows_open_store);
        let (batch, fence) = (reading.point, self.view.links.fence);
        Ok(RestoredEnd { store, batch, incarnation, fence, named, follows_open_store })
    }

    /// Reads the named snapshots up to batch `at`, and returns their number. `kept_from` is the start of the boundary
    /// that keeps them.
    async fn read_named<S: StateSink>(
        &mut self,
        at: Option<Lsn>,
        kept_from: u64,
        store: StoreId,
        reading: &mut Reading,
        sink: &mut S,
    ) -> Result<u64> {
        let mut count = 0;
        let is_in_state = |kept: &&KeptSnapshot| at.is_none_or(|lsn| kept.batch.lsn <= lsn);
        let catalog = self.view.catalog.clone();
        let snapshots: Vec<&KeptSnapshot> = catalog.iter().rev().filter(is_in_state).collect();
        let mut lists = VecDeque::new();
        for (index, kept) in snapshots.iter().enumerate() {
            if lists.is_empty() {
                let next = snapshots[index..].iter().take(READS_MAX);
                lists.extend(join_all(next.map(|kept| self.kept_list(kept))).await);
            }
            let Some(listed) = lists.pop_front().transpose()?.flatten() else {
                return Err(self.missing(ObjectKey::Line(kept.position), kept_from).await?);
            };
            let mut wanted: Vec<DataRef> =
                listed.iter().filter(|entry| !reading.has_received(kept.position, entry)).copied().collect();
            wanted.retain(|entry| {
                let is_deferred = is_deferred(sink, &entry.part);
                if is_deferred {
                    sink.defer(&ListedPart { entry: *entry, store, lister: kept_from });
                    reading.receive(kept.position, entry);
                }
                !is_deferred
            });
            self.need_each_data(&wanted, store, kept_from, |entry, bytes| {
                sink.named_part(&entry.part, bytes)?;
                reading.receive(kept.position, entry);
                Ok(sink.parts_in_memory())
            })
            .await?;
            let parts: Vec<Part> = listed.iter().map(|entry| entry.part).collect();
            sink.named(kept, &parts)?;
            count += 1;
        }
        Ok(count)
    }

    /// Reads the parts that a manifest lists.
    async fn read_manifest<S: StateSink>(
        &mut self,
        position: u64,
        manifest: &Manifest,
        store: StoreId,
        reading: &mut Reading,
        sink: &mut S,
    ) -> Result<()> {
        sink.manifest(manifest)?;
        let listed = match self.view.listings.get(&position) {
            Some(listed) => listed.clone(),
            None => self.need_line(position).await?.data,
        };
        for entry in listed.iter().filter(|entry| entry.part.role != Role::Frames) {
            reading.files.insert((entry.part.role, entry.part.file));
            reading.receive(position, entry);
        }
        self.read_parts(&listed, store, position, &manifest.redo, &manifest.end, sink).await
    }

    /// Reads listed parts of files and of the frames after `before` up to `after`. The sink may fetch parts of files
    /// later.
    pub(super) async fn read_parts<S: StateSink>(
        &mut self,
        listed: &[DataRef],
        store: StoreId,
        lister: u64,
        before: &BatchPoint,
        after: &BatchPoint,
        sink: &mut S,
    ) -> Result<()> {
        let mut wanted = listed.to_vec();
        wanted.retain(|entry| {
            let is_deferred = is_deferred(sink, &entry.part);
            if is_deferred {
                sink.defer(&ListedPart { entry: *entry, store, lister });
            }
            !is_deferred
        });
        self.need_each_data(&wanted, store, lister, |entry, bytes| {
            match entry.part.role {
                Role::Frames => sink.frames(before, after, bytes)?,
                _ => sink.part(&entry.part, bytes)?,
            }
            Ok(sink.parts_in_memory())
        })
        .await
    }

    /// Returns the positions of the fences above `lowest` that cut the line below `at`, newest first.
    async fn cuts(&mut self, lowest: u64, at: Option<Lsn>) -> Result<Vec<u64>> {
        let Some(at) = at else { return Ok(Vec::new()) };
        let mut cuts = Vec::new();
        let mut position = self.view.links.fence;
        while position > lowest {
            let object = self.need_line(position).await?;
            let Content::Fence(fence) = &object.content else { break };
            if fence.cut.is_some_and(|cut| cut.lsn < at) {
                cuts.push(position);
            }
            position = object.links.fence;
        }
        Ok(cuts)
    }

    /// Reads the line from `lowest` to its end. With `at`, stops once the state contains this batch and no later fence
    /// in `cuts` cuts it off.
    async fn read_line<S: StateSink>(
        &mut self,
        lowest: u64,
        at: Option<Lsn>,
        cuts: &[u64],
        reading: &mut Reading,
        sink: &mut S,
    ) -> Result<()> {
        let missing = {
            let (files, manifest) = (std::mem::take(&mut reading.files), reading.manifest);
            let (redo, defers_images) = (reading.redo.lsn, sink.defers_images());
            let is_needed = |object: &LineObject, entry: &DataRef| {
                let is_run = matches!(&object.content, Content::Run(run) if run.after.lsn > redo);
                is_run && (object.position > manifest || !files.contains(&(entry.part.role, entry.part.file)))
            };
            let is_fetched = |object: &LineObject, entry: &DataRef| {
                is_needed(object, entry) && !(entry.part.role == Role::Images && defers_images)
            };
            let mut ahead = LineAhead::new(self, lowest..self.view.next, is_fetched);
            read_each(&mut ahead, lowest, at, cuts, &is_needed, reading, sink).await?
        };
        match missing {
            Some((key, position)) => Err(self.missing(key, position).await?),
            None => Ok(()),
        }
    }
}

/// Reads the objects of `ahead`, whose first position is `lowest`. Returns the key of a missing object, and the
/// position that contains or lists it.
async fn read_each<B: Bucket, N: Nonces, S: StateSink>(
    ahead: &mut LineAhead<'_, '_, B, N, impl Fn(&LineObject, &DataRef) -> bool>,
    lowest: u64,
    at: Option<Lsn>,
    cuts: &[u64],
    is_needed: impl Fn(&LineObject, &DataRef) -> bool,
    reading: &mut Reading,
    sink: &mut S,
) -> Result<Option<(ObjectKey, u64)>> {
    let mut nonce_before = None;
    for position in lowest.. {
        let is_reached = at.is_some_and(|lsn| lsn <= reading.point.lsn);
        if is_reached && cuts.iter().all(|cut| *cut < position) {
            break;
        }
        let Some(object) = ahead.next_object().await else { break };
        let Some(mut object) = object? else { return Ok(Some((ObjectKey::Line(position), position))) };
        if nonce_before.is_some_and(|nonce| nonce != object.nonce_before) {
            return Err(Error::Damaged { key: ObjectKey::Line(position), damage: Damage::NotNext });
        }
        nonce_before = Some(object.nonce);
        match &mut object.content {
            Content::Fence(fence) => reading.fence(fence, sink)?,
            Content::Manifest(manifest) => reading.check_gap(manifest, at)?,
            Content::Boundary(_) | Content::Catalog(_) => {}
            Content::Run(run) if run.after.lsn <= reading.redo.lsn => {}
            Content::Run(run) => {
                reading.check_continues(run, position)?;
                let (before, after) = (run.before, run.after);
                if object.data.is_empty() {
                    sink.frames(&before, &after, std::mem::take(&mut run.frames).into())?;
                }
                for entry in object.data.iter().filter(|entry| is_needed(&object, entry)) {
                    reading.receive(position, entry);
                    if is_deferred(sink, &entry.part) {
                        sink.defer(&ListedPart { entry: *entry, store: object.store, lister: position });
                        continue;
                    }
                    let Some(bytes) = ahead.next_data().await? else {
                        return Ok(Some((ObjectKey::Data(entry.key), position)));
                    };
                    match entry.part.role {
                        Role::Frames => sink.frames(&before, &after, bytes)?,
                        _ => sink.part(&entry.part, bytes)?,
                    }
                    ahead.set_kept(sink.parts_in_memory());
                }
                reading.point = after;
            }
        }
    }
    Ok(None)
}

impl Reading {
    /// Records that the part of `entry`, listed at `position`, was received.
    fn receive(&mut self, position: u64, entry: &DataRef) {
        let Part { role, file, offset, .. } = entry.part;
        self.received.insert((role, file, offset), (position, entry.key));
    }

    /// Returns true if the data object of `entry`, listed at `position`, was received, or a newer data object for the
    /// same part.
    fn has_received(&self, position: u64, entry: &DataRef) -> bool {
        let Part { role, file, offset, .. } = entry.part;
        let is_newer = |(lister, key): &(u64, DataKey)| *lister > position || *key == entry.key;
        self.received.get(&(role, file, offset)).is_some_and(is_newer)
    }

    /// Returns an error if batch `at` is among the batches that a manifest after a gap replaces (rule 28).
    fn check_gap(&self, manifest: &Manifest, at: Option<Lsn>) -> Result<()> {
        let (after, until) = (self.point.lsn, manifest.end.lsn);
        match at.filter(|at| manifest.follows_gap && after < *at && *at < until) {
            Some(at) => Err(Error::InGap { lsn: at.0, after: after.0, until: until.0 }),
            None => Ok(()),
        }
    }

    /// Checks that a run at `position` continues the state.
    fn check_continues(&self, run: &Run, position: u64) -> Result<()> {
        let is_first = self.point == self.redo && run.before.lsn <= self.redo.lsn;
        if run.before == self.point || is_first {
            return Ok(());
        }
        let damage = Damage::Gap { found: run.before, expected: self.point };
        Err(Error::Damaged { key: ObjectKey::Line(position), damage })
    }

    /// Records the incarnation numbers of a fence.
    fn note(&mut self, fence: &Fence) {
        let numbers = fence.openings.iter().filter_map(|header| header.opening);
        let highest = numbers.map(|opening| opening.incarnation.number).max();
        self.incarnation = self.incarnation.max(highest.unwrap_or(0));
    }

    /// Applies a fence: continues after the predecessor of each opening (W2 of `format/SPEC.md`), or after the point of
    /// a cut.
    fn fence<S: StateSink>(&mut self, fence: &Fence, sink: &mut S) -> Result<()> {
        self.note(fence);
        for point in fence.cut.into_iter().chain(fence.openings.iter().map(predecessor)) {
            if point.lsn < self.point.lsn {
                sink.truncate(point.lsn)?;
                self.point = point;
            }
        }
        Ok(sink.fence(fence)?)
    }
}
