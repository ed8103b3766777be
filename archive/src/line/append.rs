//! Appends runs, manifests and catalogs (rules 1, 3, 6, 7, 9 to 12, 16 and 17).

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use remanent_format::SnapshotId;

use super::request::{Attempt, Body, Known};
use super::{Line, Nonces, Writer};
use crate::bucket::Bucket;
use crate::error::{Damage, Error, Result};
use crate::local::{FilePiece, LocalStore, SealedFrames};
use crate::object::{
    BatchPoint, Boundary, Catalog, Content, DataKey, DataRef, INLINE_FRAMES_LEN_MAX, KeptSnapshot, Kind,
    LineObject, Manifest, Nonce, ObjectHeaderRaw, ObjectKey, PART_LEN_MAX, Part, Role, Run, crc64,
    encode_data_header,
};
use crate::rules::Rule;

/// Maximum number of parts that are uploaded concurrently. Each of them, and the part that is being read, uses 8 MiB of
/// memory, so an upload uses 64 MiB.
pub const UPLOADS_MAX: usize = 7;

/// A line object that was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Position of the object on the line.
    pub position: u64,
    /// Kind of the object.
    pub kind: Kind,
    /// The last archived batch. Every batch up to it may be acknowledged as archived.
    pub archived: BatchPoint,
}

/// A snapshot to archive, with the parts of every file that a restore of it needs.
#[derive(Clone, Debug)]
pub struct SnapshotParts {
    /// Number of the snapshot.
    pub snapshot: SnapshotId,
    /// The batch from which a restore of the snapshot replays the log.
    pub redo: BatchPoint,
    /// The batch up to which a restore of the snapshot replays the log.
    pub end: BatchPoint,
    /// Parts of links, image files and tables. If the snapshot follows a gap, they include parts of the frames from
    /// `redo` to `end`.
    pub parts: Vec<Part>,
    /// Whether batches below `redo` were not archived because their log was recycled (rule 28).
    pub follows_gap: bool,
}

/// A named snapshot to archive, with the parts of every file that it needs. A named snapshot needs no log, because its
/// pages are consistent without replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedParts {
    /// Number of the snapshot.
    pub snapshot: SnapshotId,
    /// The name, 1 to 64 bytes long.
    pub name: String,
    /// The last batch that the snapshot contains.
    pub batch: BatchPoint,
    /// Parts of links and image files.
    pub parts: Vec<Part>,
}

/// The contents of a line object before its position is known.
#[derive(Clone, Debug)]
pub(super) enum Draft {
    Run {
        frames: SealedFrames,
        data: Vec<DataRef>,
    },
    Manifest {
        manifest: Manifest,
        data: Vec<DataRef>,
    },
    /// `snapshots` are the kept snapshots without `new`. `data` are the files of `new`.
    Catalog {
        snapshots: Vec<KeptSnapshot>,
        new: Option<KeptSnapshot>,
        data: Vec<DataRef>,
    },
    Boundary(Boundary),
}

impl Draft {
    /// Returns true if the object lists parts that other objects may list as well.
    fn shares_parts(&self) -> bool {
        match self {
            Draft::Manifest { .. } => true,
            Draft::Run { data, .. } => data.iter().any(|entry| entry.part.role != Role::Frames),
            Draft::Catalog { data, .. } => !data.is_empty(),
            Draft::Boundary(_) => false,
        }
    }
}

/// An object to append, whose create may already have been sent.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    draft: Draft,
    /// The object for the current position, and its encoding. Neither changes until the outcome of the create is known
    /// (rule 3, [frozen]).
    frozen: Option<(LineObject, Vec<u8>)>,
}

/// The outcome of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AppendOutcome {
    Appended(Appended),
    /// The boundary of another process was found on the line, so the caller must create the draft again.
    Redraft,
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Appends the frames of `local` that are ready and not archived yet. Returns `None` if there are none.
    ///
    /// If an earlier append failed with an unknown outcome, this call completes that object instead, and returns it.
    ///
    /// # Errors
    /// Returns [`Error::Superseded`] if another writer created a fence. Returns [`Error::Unknown`] or [`Error::Bucket`]
    /// if the bucket cannot be reached; call again later.
    pub async fn append_run(&mut self, local: &dyn LocalStore) -> Result<Option<Appended>> {
        self.writer.ok_or(Error::NoFence)?;
        if let Some(appended) = self.complete_pending(local).await? {
            return Ok(Some(appended));
        }
        loop {
            let Some(frames) = local.sealed_frames(&self.view.archived)? else { return Ok(None) };
            self.check_continues(&frames)?;
            let data = self.upload_run(local, &frames).await?; // [ifirst]
            self.pending = Some(Pending { draft: Draft::Run { frames, data }, frozen: None });
            if let Some(appended) = self.complete_pending(local).await? {
                return Ok(Some(appended));
            }
            // [recheck] The boundary of another process may have released files that the run lists, so they are checked
            // again.
        }
    }

    /// Uploads the parts that a run lists: the files that its frames name, and the frames themselves if they name files
    /// or are too long for the line object.
    async fn upload_run(&mut self, local: &dyn LocalStore, frames: &SealedFrames) -> Result<Vec<DataRef>> {
        let mut data = Vec::new();
        let known = if frames.files.is_empty() { HashMap::new() } else { self.archived_parts() };
        for part in &frames.files {
            data.push(self.archive_part(local, part, &known).await?);
        }
        if frames.bytes.len() > INLINE_FRAMES_LEN_MAX || !data.is_empty() {
            for (index, bytes) in frames.bytes.chunks(PART_LEN_MAX).enumerate() {
                let offset = (index * PART_LEN_MAX) as u64;
                let file = frames.before.lsn.0 + 1;
                let part =
                    Part { role: Role::Frames, file, offset, len: bytes.len() as u64, crc: crc64(bytes) };
                data.push(self.upload(&part, bytes).await?);
            }
        }
        Ok(data)
    }

    /// Returns the data object of a part. Uploads the part if it is not in `known`, which contains the archived parts,
    /// and was not uploaded in advance.
    async fn archive_part(
        &mut self,
        local: &dyn LocalStore,
        part: &Part,
        known: &HashMap<Part, DataRef>,
    ) -> Result<DataRef> {
        match known.get(part).or_else(|| self.fresh.get(part)) {
            Some(entry) => Ok(*entry),
            None => self.upload(part, &local.read_part(part)?).await,
        }
    }

    /// Returns the elements of `parts` that must be uploaded before an object that lists `parts` is appended.
    #[must_use]
    pub fn missing_parts(&self, parts: &[Part]) -> Vec<Part> {
        let known = self.archived_parts();
        let is_missing = |part: &&Part| !known.contains_key(part) && !self.fresh.contains_key(part);
        parts.iter().filter(is_missing).copied().collect()
    }

    /// Uploads [missing](Line::missing_parts) parts of an object that will be appended later, up to [`UPLOADS_MAX`]
    /// concurrently. Other objects may be appended before that object.
    ///
    /// # Errors
    /// Returns the errors of [`append_run`](Line::append_run).
    pub async fn upload_ahead(&mut self, local: &dyn LocalStore, parts: &[Part]) -> Result<()> {
        let mut parts = parts.iter();
        self.upload_each(|_, object| {
            let Some(part) = parts.next() else { return Ok(None) };
            object.truncate(ObjectHeaderRaw::LEN);
            object.extend_from_slice(&local.read_part(part)?);
            Ok(Some(*part))
        })
        .await
    }

    /// Reads pieces of files and uploads those that the archive lacks, like [`upload_ahead`](Line::upload_ahead). Each
    /// piece is read once, with `read`, which returns its CRC-64, while earlier ones are uploaded. Returns the parts of
    /// the first pieces: of all of them, or of at least one if `must_pause` returns true.
    ///
    /// # Errors
    /// Returns the errors of `read` and of [`append_run`](Line::append_run). Pieces that were uploaded are not uploaded
    /// again by the next call.
    pub async fn upload_pieces(
        &mut self,
        pieces: &[FilePiece],
        read: impl Fn(&FilePiece, &mut [u8]) -> io::Result<u64>,
        mut must_pause: impl FnMut() -> bool,
    ) -> Result<Vec<Part>> {
        let known = self.archived_parts();
        let mut parts: Vec<Part> = Vec::new();
        self.upload_each(|line, object| {
            while let Some(piece) = pieces.get(parts.len()) {
                if !parts.is_empty() && must_pause() {
                    break;
                }
                object.resize(ObjectHeaderRaw::LEN + piece.len, 0);
                let payload = &mut object[ObjectHeaderRaw::LEN..];
                let part = piece.part(read(piece, payload)?);
                parts.push(part);
                if !known.contains_key(&part) && !line.fresh.contains_key(&part) {
                    return Ok(Some(part));
                }
            }
            Ok(None)
        })
        .await?;
        Ok(parts)
    }

    /// Uploads parts until `next` returns `None`, up to [`UPLOADS_MAX`] concurrently. `next` returns a part, and writes
    /// its bytes after [`ObjectHeaderRaw::LEN`] bytes into the given buffer, which may contain bytes of earlier parts.
    async fn upload_each(
        &mut self,
        mut next: impl FnMut(&Self, &mut Vec<u8>) -> Result<Option<Part>>,
    ) -> Result<()> {
        self.writer.ok_or(Error::NoFence)?;
        let sender = Line::new(self.archive);
        let mut running = FuturesUnordered::new();
        let mut spare: Vec<Vec<u8>> = Vec::new();
        let mut failure = None;
        let mut is_complete = false;
        loop {
            let is_waiting = is_complete || failure.is_some() || running.len() >= UPLOADS_MAX;
            // Polling the requests starts them, so that they are sent while the next part is read.
            let done =
                if is_waiting { running.next().await } else { running.next().now_or_never().flatten() };
            if let Some((entry, object, created)) = done {
                match created {
                    Ok(()) => self.note_uploaded(entry),
                    Err(error) => failure = failure.or(Some(error)),
                }
                spare.extend(Arc::into_inner(object)); // The memory is reused.
                continue;
            }
            if is_waiting {
                return failure.map_or(Ok(()), Err);
            }
            let mut object = spare.pop().unwrap_or_default();
            object.resize(object.len().max(ObjectHeaderRaw::LEN), 0);
            match next(self, &mut object)
                .and_then(|part| part.map(|part| self.address(part, object)).transpose())
            {
                Ok(Some((entry, object, nonce))) => running.push(sender.send_data(entry, object, nonce)),
                Ok(None) => is_complete = true,
                Err(error) => failure = Some(error),
            }
        }
    }

    /// Assigns a key to the data object of a part, and writes its header.
    fn address(&mut self, part: Part, mut object: Vec<u8>) -> Result<(DataRef, Arc<Vec<u8>>, Nonce)> {
        let store = self.view.store.ok_or(Error::NoFence)?;
        let key = self.data_key(&part)?;
        let nonce = self.archive.nonces.draw();
        let encoded = encode_data_header(store, key, nonce, part.crc, &mut object);
        encoded.map_err(|source| Error::TooLarge { key: ObjectKey::Data(key), source })?;
        Ok((DataRef { key, part }, Arc::new(object), nonce))
    }

    /// Creates a data object. Returns the result, the entry of the object, and its memory.
    async fn send_data(
        &self,
        entry: DataRef,
        object: Arc<Vec<u8>>,
        nonce: Nonce,
    ) -> (DataRef, Arc<Vec<u8>>, Result<()>) {
        let created = self.create_data(&entry, Body::Shared(&object), nonce).await;
        (entry, object, created)
    }

    /// Checks that the frames continue after the last archived batch.
    fn check_continues(&self, frames: &SealedFrames) -> Result<()> {
        let strict = self.archive.rules.follow(Rule::Lineage) && self.archive.rules.follow(Rule::Pred);
        if strict && frames.before != self.view.archived {
            let reason = crate::error::Divergence::NotOnLine;
            return Err(Error::Diverged { archived: self.view.archived, local: frames.before, reason });
        }
        Ok(())
    }

    /// Appends the manifest of a snapshot. First uploads the parts that are not archived yet (rules 9 to 12).
    ///
    /// # Errors
    /// Returns [`Error::EndNotArchived`] if the run that contains the end of the snapshot must be appended first, and
    /// the errors of [`append_run`](Line::append_run).
    pub async fn append_manifest(
        &mut self,
        local: &dyn LocalStore,
        snapshot: &SnapshotParts,
    ) -> Result<Appended> {
        self.writer.ok_or(Error::NoFence)?;
        self.complete_pending(local).await?;
        let archived = self.view.archived.lsn;
        // [mend] A restore can start from a manifest only if the frames up to its end are archived. After a gap, the
        // manifest itself lists these frames.
        if self.archive.rules.follow(Rule::Mend) && archived < snapshot.end.lsn && !snapshot.follows_gap {
            return Err(Error::EndNotArchived { end: snapshot.end.lsn.0, archived: archived.0 });
        }
        if !snapshot.follows_gap {
            self.load_runs(snapshot.redo.lsn).await?;
        }
        loop {
            let mut data = Vec::with_capacity(snapshot.parts.len());
            let known = self.archived_parts();
            for part in &snapshot.parts {
                data.push(self.archive_part(local, part, &known).await?);
            }
            let SnapshotParts { snapshot: number, redo, end, follows_gap, .. } = *snapshot;
            let manifest = Manifest { snapshot: number, start: 1, redo, end, follows_gap };
            self.pending = Some(Pending { draft: Draft::Manifest { manifest, data }, frozen: None });
            if let AppendOutcome::Appended(appended) = self.create_pending(Some(local)).await? {
                self.upload_late().await?;
                return Ok(appended);
            }
            // [recheck] The boundary of another process may have released parts of the snapshot, so they are checked
            // again.
        }
    }

    /// Appends a catalog that lists the kept named snapshots except those in `removed`, and in addition `new`. First
    /// uploads the parts of `new` that are not archived yet (rules 9 to 12 and 17). Returns `None` if nothing changes.
    ///
    /// If a kept snapshot has the name of `new`, `new` replaces it.
    ///
    /// # Errors
    /// Returns [`Error::EndNotArchived`] if the run that contains the batch of `new` must be appended first,
    /// [`Error::NotNewer`] if the archive keeps `new` or a newer named snapshot, and the errors of
    /// [`append_run`](Line::append_run).
    pub async fn append_catalog(
        &mut self,
        local: &dyn LocalStore,
        removed: &[SnapshotId],
        new: Option<&NamedParts>,
    ) -> Result<Option<Appended>> {
        self.writer.ok_or(Error::NoFence)?;
        self.complete_pending(local).await?;
        if let Some(new) = new {
            let archived = self.view.archived.lsn;
            // [mend] A restore of the end contains the batch of each named snapshot.
            if self.archive.rules.follow(Rule::Mend) && archived < new.batch.lsn {
                return Err(Error::EndNotArchived { end: new.batch.lsn.0, archived: archived.0 });
            }
            if let Some(newest) = self.view.catalog.last().filter(|newest| newest.snapshot >= new.snapshot) {
                return Err(Error::NotNewer { snapshot: new.snapshot, newest: newest.snapshot });
            }
        }
        loop {
            let mut data = Vec::new();
            let known = self.archived_parts();
            for part in new.map_or(&[][..], |new| &new.parts) {
                data.push(self.archive_part(local, part, &known).await?);
            }
            // Another process's boundary may have changed the catalog, so it is read again in each iteration.
            let stays = |kept: &&KeptSnapshot| {
                !removed.contains(&kept.snapshot) && new.is_none_or(|new| new.name != kept.name)
            };
            let snapshots: Vec<KeptSnapshot> = self.view.catalog.iter().filter(stays).cloned().collect();
            if new.is_none() && snapshots.len() == self.view.catalog.len() {
                return Ok(None);
            }
            let new = new.map(|new| KeptSnapshot {
                position: 0,
                nonce: Nonce::default(),
                snapshot: new.snapshot,
                batch: new.batch,
                name: new.name.clone(),
                bytes: data.iter().map(|entry| entry.part.len).sum(),
            });
            self.pending = Some(Pending { draft: Draft::Catalog { snapshots, new, data }, frozen: None });
            if let AppendOutcome::Appended(appended) = self.create_pending(Some(local)).await? {
                return Ok(Some(appended));
            }
            // [recheck] See `append_manifest`.
        }
    }

    /// Appends a catalog that lists only `snapshots`. If this fails, the next append completes it first.
    pub(super) async fn record_catalog(&mut self, snapshots: Vec<KeptSnapshot>) -> Result<()> {
        self.set_pending(Draft::Catalog { snapshots, new: None, data: Vec::new() });
        self.create_pending(None).await.map(drop)
    }

    /// Returns the named snapshots that the archive keeps, oldest first.
    #[must_use]
    pub fn catalog(&self) -> &[KeptSnapshot] {
        &self.view.catalog
    }

    /// Returns the parts that count as archived, with their data objects: those listed by objects at or above the
    /// newest boundary, and by the catalogs of kept snapshots (rule 11, [dedup]).
    fn archived_parts(&self) -> HashMap<Part, DataRef> {
        let lowest = if self.archive.rules.follow(Rule::Dedup) { self.view.start } else { 0 };
        let mut known = HashMap::new();
        for entry in self.view.kept_lists(lowest, &self.view.catalog) {
            known.entry(entry.part).or_insert(*entry);
        }
        known
    }

    /// Uploads a part under a new key (rules 9 and 12).
    async fn upload(&mut self, part: &Part, bytes: &[u8]) -> Result<DataRef> {
        let (entry, object, nonce) = self.data_object(part, bytes)?;
        if self.archive.rules.follow(Rule::IFirst) || part.role == Role::Frames {
            self.create_data(&entry, Body::Shared(&object), nonce).await?;
        } else {
            #[cfg(feature = "testing")]
            self.late.push((entry, object));
        }
        self.note_uploaded(entry);
        Ok(entry)
    }

    fn data_object(&mut self, part: &Part, bytes: &[u8]) -> Result<(DataRef, Arc<Vec<u8>>, Nonce)> {
        let mut object = Vec::with_capacity(ObjectHeaderRaw::LEN + bytes.len());
        object.resize(ObjectHeaderRaw::LEN, 0);
        object.extend_from_slice(bytes);
        self.address(*part, object)
    }

    fn note_uploaded(&mut self, entry: DataRef) {
        self.fresh.insert(entry.part, entry);
        self.uploaded += entry.part.len;
    }

    async fn create_data(&self, entry: &DataRef, object: Body<'_>, nonce: Nonce) -> Result<()> {
        let key = ObjectKey::Data(entry.key);
        match self.create(key, object, nonce).await? {
            Known::Ours => Ok(()),
            // Without unique keys, an existing object is assumed to have the same contents.
            Known::Others(_) if !self.archive.rules.follow(Rule::UKeys) => Ok(()),
            Known::Others(_) => Err(Error::Damaged { key, damage: Damage::Unexpected(Kind::Data) }),
        }
    }

    /// Uploads the data objects whose upload a test delayed.
    async fn upload_late(&mut self) -> Result<()> {
        #[cfg(feature = "testing")]
        for (entry, object) in std::mem::take(&mut self.late) {
            let header = crate::object::decode_header(&object);
            let nonce = header.map_err(|defect| Error::invalid(ObjectKey::Data(entry.key), defect))?.nonce;
            self.create_data(&entry, Body::Borrowed(&object), nonce).await?;
        }
        Ok(())
    }

    /// Returns a key for the next data object of this writer (rule 12, [ukeys]).
    fn data_key(&mut self, part: &Part) -> Result<DataKey> {
        let writer = self.writer.as_mut().ok_or(Error::NoFence)?;
        if !self.archive.rules.follow(Rule::UKeys) {
            return Ok(DataKey { term: 0, random: part.crc >> 2, index: part.file });
        }
        writer.data_objects += 1;
        let Writer { term, random, data_objects } = *writer;
        Ok(DataKey { term, random, index: data_objects })
    }

    /// Completes the object of an earlier append. Returns `None` if there is no such object, or if its draft must be
    /// created again.
    async fn complete_pending(&mut self, local: &dyn LocalStore) -> Result<Option<Appended>> {
        if self.pending.is_none() {
            return Ok(None);
        }
        match self.create_pending(Some(local)).await? {
            AppendOutcome::Appended(appended) => Ok(Some(appended)),
            AppendOutcome::Redraft => Ok(None),
        }
    }

    /// Creates the pending object at the next position, and repeats this at later positions while it finds boundaries
    /// of other processes (rule 6). `local` is used only if a test leaves out the rule [frozen].
    pub(super) async fn create_pending(&mut self, local: Option<&dyn LocalStore>) -> Result<AppendOutcome> {
        loop {
            let Some(pending) = &self.pending else { return Ok(AppendOutcome::Redraft) };
            let shares_parts = pending.draft.shares_parts();
            let (mut object, mut bytes) = match &pending.frozen {
                Some(frozen) => frozen.clone(),
                None => self.freeze(self.archive.nonces.draw())?,
            };
            let other = self.create_frozen(local, &mut object, &mut bytes).await?;
            let Some(other) = other else {
                if self.view.next == object.position {
                    self.view.apply(&object)?;
                }
                self.check_created(object.position).await?; // Until this succeeds, the object stays pending.
                self.pending = None;
                // From now on, these parts count as archived only while a kept object lists them.
                object.data.iter().for_each(|entry| _ = self.fresh.remove(&entry.part));
                let kind = object.content.kind();
                return Ok(AppendOutcome::Appended(Appended {
                    position: object.position,
                    kind,
                    archived: object.archived,
                }));
            };
            if let Err(error) = self.apply_foreign(&other) {
                self.check_created(object.position).await?; // A hole may contain objects of stalled writers.
                return Err(error);
            }
            if let Some(pending) = &mut self.pending {
                pending.frozen = None;
            }
            let recheck = shares_parts && self.archive.rules.follow(Rule::Recheck);
            if recheck || self.is_below_boundary() {
                self.pending = None;
                return Ok(AppendOutcome::Redraft);
            }
        }
    }

    /// Returns true if the pending object is a boundary, and another boundary starts at or above it.
    fn is_below_boundary(&self) -> bool {
        let Some(Pending { draft: Draft::Boundary(boundary), .. }) = &self.pending else {
            return false;
        };
        boundary.start <= self.view.start
    }

    /// Encodes the pending object for the next position. Later attempts send the same bytes (rule 3).
    fn freeze(&mut self, nonce: Nonce) -> Result<(LineObject, Vec<u8>)> {
        let Some(pending) = &self.pending else { return Err(Error::NoFence) };
        let object = self.place(pending.draft.clone(), nonce);
        let key = ObjectKey::Line(object.position);
        let bytes = object.encode().map_err(|source| Error::TooLarge { key, source })?;
        if let Some(pending) = &mut self.pending {
            pending.frozen = Some((object.clone(), bytes.clone()));
        }
        Ok((object, bytes))
    }

    /// Creates a frozen object. Returns the object of another process if the position is taken.
    async fn create_frozen(
        &mut self,
        local: Option<&dyn LocalStore>,
        object: &mut LineObject,
        bytes: &mut Vec<u8>,
    ) -> Result<Option<LineObject>> {
        let key = ObjectKey::Line(object.position);
        let mut in_doubt = false;
        for attempt in 1.. {
            match self.try_create(key, Body::Borrowed(bytes), object.nonce, &mut in_doubt).await? {
                Attempt::Known(Known::Ours) => return Ok(None),
                Attempt::Known(Known::Others(bytes)) => {
                    let other = LineObject::decode(&bytes, object.position, self.view.store);
                    return other.map(Some).map_err(|defect| Error::invalid(key, defect));
                }
                Attempt::Again(failure) => self.pause_create(key, attempt, failure).await?,
            }
            if let Some(local) = local.filter(|_| !self.archive.rules.follow(Rule::Frozen)) {
                self.thaw(local)?;
                (*object, *bytes) = self.freeze(object.nonce)?;
            }
        }
        unreachable!("the loop ends only by a return");
    }

    /// Adds later frames to a pending run, for a test that leaves out the rule [frozen].
    fn thaw(&mut self, local: &dyn LocalStore) -> Result<()> {
        let Some(Pending { draft: Draft::Run { frames, .. }, .. }) = &mut self.pending else { return Ok(()) };
        if let Some(later) = local.sealed_frames(&self.view.archived)? {
            *frames = later;
        }
        Ok(())
    }

    /// Handles an object of another process at this process's next position: applies a boundary, and returns an error
    /// for any other object (rule 6).
    fn apply_foreign(&mut self, other: &LineObject) -> Result<()> {
        let kind = other.content.kind();
        let found = ObjectKey::Line(other.position);
        match (kind, self.writer) {
            (Kind::Boundary, _) => {
                self.view.apply(other)?;
                if !self.archive.rules.follow(Rule::BComp) {
                    self.view.boundaries.clear();
                }
                Ok(())
            }
            (Kind::Fence, Some(writer)) => Err(Error::Superseded { term: writer.term, found }),
            (_, None) => Err(Error::Busy { position: other.position, kind }),
            // If a test leaves out fences, a writer detects its successor only here.
            (_, Some(writer)) if !self.archive.rules.follow(Rule::Fence) => {
                Err(Error::Superseded { term: writer.term, found })
            }
            (kind, Some(_)) => Err(Error::Damaged { key: found, damage: Damage::Unexpected(kind) }),
        }
    }

    /// Checks that no boundary starts above `position`, at which an object was created or found (rule 16, [check]). If
    /// a boundary does, the object at the position was deleted earlier, and a stalled process created it again.
    pub(super) async fn check_created(&mut self, position: u64) -> Result<()> {
        if !self.archive.rules.follow(Rule::Check) {
            return Ok(());
        }
        self.find_newer_boundary().await?;
        if self.view.start > position {
            let term = self.writer.map_or(position, |writer| writer.term);
            return Err(Error::Superseded { term, found: ObjectKey::Bound(self.view.bound) });
        }
        Ok(())
    }

    /// Returns the object that `draft` becomes at the next position.
    fn place(&self, draft: Draft, nonce: Nonce) -> LineObject {
        let view = &self.view;
        let term = self.term().unwrap_or(view.links.fence);
        match draft {
            Draft::Run { frames, data } => {
                let SealedFrames { before, after, bytes, files: _ } = frames;
                let frames = if data.is_empty() { bytes } else { Vec::new() };
                let content = Content::Run(Run { before, after, frames });
                LineObject { archived: after, ..self.next_object(term, nonce, data, content) }
            }
            Draft::Manifest { mut manifest, data } => {
                manifest.start =
                    if manifest.follows_gap { view.next } else { view.start_of(manifest.redo.lsn) };
                let archived = if manifest.follows_gap { manifest.end } else { view.archived };
                LineObject { archived, ..self.next_object(term, nonce, data, Content::Manifest(manifest)) }
            }
            Draft::Catalog { mut snapshots, new, data } => {
                snapshots.extend(new.map(|new| KeptSnapshot { position: view.next, nonce, ..new }));
                self.next_object(term, nonce, data, Content::Catalog(Catalog { snapshots }))
            }
            Draft::Boundary(mut boundary) => {
                boundary.number = view.boundary_number.max(view.bound) + 1;
                boundary.snapshots = view.catalog.clone();
                self.next_object(term, nonce, Vec::new(), Content::Boundary(boundary))
            }
        }
    }

    /// Returns an object for the next position that has the given contents and the links of the view.
    pub(super) fn next_object(
        &self,
        term: u64,
        nonce: Nonce,
        data: Vec<DataRef>,
        content: Content,
    ) -> LineObject {
        LineObject {
            store: self.view.store.unwrap_or(remanent_format::StoreId([0; 16])),
            position: self.view.next,
            term,
            nonce,
            nonce_before: self.view.nonce_before,
            links: self.view.links,
            archived: self.view.archived,
            data,
            content,
        }
    }

    /// Makes the writer treat `listed` as archived, like a directory that remembers archived parts. Has an effect only
    /// if a test leaves out [`Rule::Dedup`].
    #[cfg(feature = "testing")]
    pub fn remember(&mut self, listed: Vec<DataRef>) {
        self.view.listings.insert(0, listed);
    }

    /// Returns the data objects that the newest manifest lists.
    #[must_use]
    pub fn newest_listed(&self) -> &[DataRef] {
        let newest = self.view.manifest.and_then(|(position, _)| self.view.listings.get(&position));
        newest.map_or(&[], Vec::as_slice)
    }

    /// Returns true if the outcome of an append is unknown. The next [`append_run`](Line::append_run) completes it.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.pending.is_some()
    }

    pub(super) fn set_pending(&mut self, draft: Draft) {
        self.pending = Some(Pending { draft, frozen: None });
    }
}
