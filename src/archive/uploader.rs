//! The thread that archives an open store.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use remanent_archive::Error as Failure;
use remanent_archive::directory::{ArchivedDirectory, WriterLock};
use remanent_archive::line::{
    Appended, Archive, Line, Pruned, SnapshotParts, SystemNonces, Takeover, UPLOADS_MAX,
};
use remanent_archive::local::{FilePiece, LocalStore};
use remanent_archive::object::{Kind, Part};
use remanent_archive::remote::RemoteBucket;
use remanent_archive::rules::Rules;
use remanent_format::{Lsn, SnapshotId, StoreId};

use super::failures::{error_of, is_no_space, is_passing};
use super::holds::{self, LogHold};
use crate::base::sync::{Instant, mpsc};
use crate::engine::Engine;
use crate::error::{ArchiveErrorKind, Error, Result};
use crate::log::ArchiveProgress;
use crate::options::ArchiveOptions;
use crate::snapshot::Snapshots;

/// Number of runs after which the thread archives a snapshot (rule 21 of `remanent_archive::rules`).
const RUNS_MAX: u64 = 1024;
/// Number of bytes of log, or of uploaded parts, after which the thread archives a snapshot.
const RUN_BYTES_MAX: u64 = 1 << 30;
/// Pause after a failed round, in addition to the pauses between the attempts of each request.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Pause before the next attempt to take a snapshot for the archive, after a failed attempt.
const SNAPSHOT_AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Minimum time between two writes of the hint, and before the first write.
const HINT_EVERY: Duration = Duration::from_secs(10);
/// Maximum time for which closing the store archives the remaining batches.
const CLOSE_MAX: Duration = Duration::from_secs(30);

/// A writer lock without effect. The engine holds the real lock of the directory until the thread has ended.
#[derive(Debug)]
struct LockedByEngine;

impl WriterLock for LockedByEngine {}

/// The parts of the open store that the thread uses.
pub(super) struct OpenedStore {
    pub engine: Arc<Engine>,
    pub snapshots: Arc<Snapshots>,
    /// Whether the open found missing or damaged snapshots.
    pub has_lost_snapshots: bool,
}

/// The arguments of the thread.
pub(super) struct UploaderStart<'a> {
    pub options: ArchiveOptions,
    pub path: &'a Path,
    pub bucket: &'a RemoteBucket,
    pub progress: &'a ArchiveProgress,
    /// Delivers the parts of the store once it is open.
    pub opened: mpsc::Receiver<OpenedStore>,
    /// Sends one result before the open changes the directory, and another one after the fence was created.
    pub answers: mpsc::Sender<Result<()>>,
}

type StoreLine<'a> = Line<'a, RemoteBucket, SystemNonces>;

/// Archives until the store closes or the archive ends.
pub(super) fn run(start: UploaderStart<'_>) {
    let UploaderStart { options, path, bucket, progress, opened, answers } = start;
    let url = &options.url;
    let mut line = Line::new(Archive { bucket, nonces: &SystemNonces, rules: Rules::default() });
    let found = find(&mut line, path, bucket, takeover(&options));
    let is_found = found.is_ok();
    let directory = match found {
        Ok(directory) => {
            progress.advance(line.archived().lsn);
            directory
        }
        Err(failure) if !options.required && is_passing(&failure) => {
            tracing::warn!(error = %error_of(url, &failure), "the archive is checked later");
            None
        }
        Err(failure) => {
            let _ = answers.send(Err(error_of(url, &failure))); // Fails only if no caller waits for the answer.
            return;
        }
    };
    if answers.send(Ok(())).is_err() {
        return;
    }
    // If the channel is closed, the open has failed for another reason.
    let Ok(OpenedStore { engine, snapshots, has_lost_snapshots }) = opened.recv() else { return };
    let directory = match directory.map_or_else(|| read_directory(path), Ok) {
        Ok(directory) => directory,
        Err(error) => {
            let _ = answers.send(Err(error_of(url, &Failure::Local(error)))); // As above.
            return;
        }
    };
    let mut uploader = Uploader {
        options: &options,
        bucket,
        progress,
        line,
        path: path.to_owned(),
        directory,
        engine,
        snapshots,
        hold: None,
        is_found,
        runs: 0,
        bytes_before: 0,
        uploaded_before: 0,
        listed_before: 0,
        bytes_archived: 0,
        has_lost_snapshots,
        failed_names: BTreeMap::new(),
        snapshot: None,
        snapshot_after: Instant::now(),
        late_at: None,
        hint: 0,
        hint_after: Instant::now() + HINT_EVERY,
    };
    // The log is retained before the first snapshot of this open, which could otherwise recycle it.
    uploader.renew_hold();
    match uploader.fence() {
        Ok(()) => {}
        // A full disk must not prevent an open, because only an open store can free space.
        Err(failure) if !options.required && is_passing(&failure) || is_no_space(&failure) => {
            uploader.note_failure(&failure);
        }
        Err(failure) => {
            let _ = answers.send(Err(error_of(url, &failure))); // As above.
            return;
        }
    }
    if answers.send(Ok(())).is_ok() {
        uploader.live();
    }
    // Callers that still wait for a batch are notified that it is not archived.
    progress.end(Error::Closed);
}

fn takeover(options: &ArchiveOptions) -> Takeover {
    if options.takeover { Takeover::Permitted } else { Takeover::Refused }
}

/// Finds the end of the line, and checks that it is in the history of the directory. Returns `None` if the directory
/// contains no store.
fn find(
    line: &mut StoreLine<'_>,
    path: &Path,
    bucket: &RemoteBucket,
    takeover: Takeover,
) -> Result<Option<ArchivedDirectory>, Failure> {
    let directory = open_directory(path)?;
    let nobody = StoreId([0; 16]);
    let store = directory.as_ref().map_or(nobody, LocalStore::store);
    bucket.block_on(async {
        line.probe_and_find(store).await?;
        match (&directory, line.store()) {
            (Some(directory), _) => {
                line.check_lineage(directory, takeover)?;
                Ok(directory.remember(line.archived().lsn)?)
            }
            (None, Some(found)) => Err(Failure::IdentityMismatch { found, expected: nobody }),
            (None, None) => Ok(()),
        }
    })?;
    Ok(directory)
}

fn open_directory(path: &Path) -> io::Result<Option<ArchivedDirectory>> {
    match read_directory(path) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_directory(path: &Path) -> io::Result<ArchivedDirectory> {
    ArchivedDirectory::open(path, Box::new(LockedByEngine)).map(ArchivedDirectory::of_open_store)
}

/// The state of the thread.
pub(super) struct Uploader<'a> {
    pub(super) options: &'a ArchiveOptions,
    pub(super) bucket: &'a RemoteBucket,
    pub(super) progress: &'a ArchiveProgress,
    pub(super) line: StoreLine<'a>,
    /// The path at which `directory` was last read.
    path: PathBuf,
    pub(super) directory: ArchivedDirectory,
    pub(super) engine: Arc<Engine>,
    pub(super) snapshots: Arc<Snapshots>,
    /// The snapshot that retains the log, or `None` if the log after the last archived batch is not retained.
    hold: Option<LogHold>,
    /// Whether the end of the line is known.
    is_found: bool,
    /// Number of runs since the last archived snapshot.
    runs: u64,
    /// Number of bytes written to the log before the last snapshot was archived.
    bytes_before: u64,
    /// Number of bytes of parts that this process uploaded before the last snapshot was archived.
    uploaded_before: u64,
    /// Number of bytes of parts that earlier processes uploaded after the last archived snapshot.
    listed_before: u64,
    /// Number of bytes written to the log when all proven batches were last archived.
    bytes_archived: u64,
    /// Whether the directory has lost snapshots. A named snapshot that only the archive contains does not then count as
    /// given up.
    pub(super) has_lost_snapshots: bool,
    /// Number of failed attempts to archive each named snapshot.
    pub(super) failed_names: BTreeMap<SnapshotId, u32>,
    /// The last snapshot that was archived or rejected.
    snapshot: Option<SnapshotId>,
    /// The earliest time at which a snapshot may be taken for the archive.
    snapshot_after: Instant,
    /// The time at which a close stops archiving, or `None` before the store closes.
    pub(super) late_at: Option<Instant>,
    /// The position after the end of the line at the last write of the hint.
    hint: u64,
    /// The earliest time of the next write of the hint.
    hint_after: Instant,
}

impl Uploader<'_> {
    /// Archives in rounds until the store closes, the archive ends, or the log fails.
    fn live(mut self) {
        let mut is_failed = false;
        loop {
            let archived = self.line.archived().lsn;
            let is_behind = is_failed || self.line.has_pending();
            self.engine.log.wait_proven_after(archived, || is_behind || self.progress.is_called());
            self.progress.pause(Instant::now() + self.options.interval);
            let is_last = self.progress.must_stop();
            self.late_at = is_last.then(|| Instant::now() + CLOSE_MAX);
            self.progress.take_note_of_snapshots();
            let result = self.round(is_last);
            is_failed = result.is_err();
            match result {
                Ok(()) => {
                    self.progress.count(|stats| stats.last_failure = None);
                    if let Err(error) = self.engine.log.check() {
                        // The log has failed, so no later batch becomes durable.
                        return self.progress.end(error);
                    }
                    let is_waited_for = self.progress.wanted() > archived;
                    if self.line.archived().lsn == archived && is_waited_for && !is_last {
                        // A caller waits for a batch that no durable mark proves yet, because the disk is full.
                        self.progress.pause_after_failure(Instant::now() + AGAIN_AFTER);
                    }
                }
                Err(failure) if is_passing(&failure) => {
                    self.note_failure(&failure);
                    if is_no_space(&failure) {
                        // The retained log may be the reason why the disk is full.
                        self.hold = None;
                    }
                    if !is_last {
                        self.bound_log();
                        self.progress.pause_after_failure(Instant::now() + AGAIN_AFTER);
                    }
                }
                Err(failure) => return self.end(&failure),
            }
            if is_last {
                return;
            }
        }
    }

    /// Performs one round: archives all proven batches, named snapshots, and a snapshot if one is due. Batches for
    /// which callers wait are proven first.
    fn round(&mut self, is_last: bool) -> Result<(), Failure> {
        self.follow_directory()?;
        if self.line.term().is_none() {
            self.fence()?;
        }
        let wanted = if is_last { self.engine.log.length().0 } else { self.progress.wanted() };
        if wanted > self.engine.log.proven()
            && let Err(error) = self.engine.log.prove(wanted)
        {
            // The log has failed. Batches that were proven before are still archived.
            tracing::debug!(%error, "the last batches cannot be archived");
        }
        self.append_runs()?;
        self.renew_hold();
        self.bound_log();
        self.archive_names()?;
        if !is_last {
            self.archive_snapshot_if_due()?;
        }
        self.write_hint_if_due(is_last);
        Ok(())
    }

    /// Writes the hint, which states the position of the end of the line and so saves readers requests. A failure is
    /// logged and ignored.
    fn write_hint_if_due(&mut self, is_last: bool) {
        let (next, is_due) = (self.line.next(), is_last || Instant::now() >= self.hint_after);
        if self.hint == next || !is_due {
            return;
        }
        self.hint_after = Instant::now() + HINT_EVERY;
        match self.bucket.block_on(self.line.write_hint()) {
            Ok(()) => self.hint = next,
            Err(failure) => tracing::debug!(%failure, "the hint of the archive cannot be written"),
        }
    }

    /// Reads the store directory again if it was moved. The engine continues to use a moved directory.
    fn follow_directory(&mut self) -> Result<(), Failure> {
        let path = self.engine.disk.directory().map_err(io::Error::other)?;
        if let Some(path) = path.filter(|path| *path != self.path) {
            self.directory = read_directory(&path)?;
            self.directory.remember(self.line.archived().lsn)?;
            self.path = path;
        }
        Ok(())
    }

    /// Creates the fence of this open. First finds the end of the line if it is unknown.
    fn fence(&mut self) -> Result<(), Failure> {
        self.directory.reload_store()?;
        self.directory.advance(self.engine.log.proven())?;
        let takeover = takeover(self.options);
        let (line, directory) = (&mut self.line, &mut self.directory);
        if !self.is_found {
            self.bucket.block_on(line.probe_and_find(directory.store()))?;
            self.is_found = true;
        }
        let fenced = self.bucket.block_on(line.fence(directory, takeover));
        if self.line.term().is_none() {
            return fenced;
        }
        self.runs = self.line.next() - self.line.newest_manifest().unwrap_or_else(|| self.line.start());
        self.snapshot = self.line.manifest().map(|manifest| manifest.snapshot);
        (self.uploaded_before, self.listed_before) =
            (self.line.uploaded(), self.line.listed_after_manifest());
        self.directory.record_url(&self.options.url)?;
        self.begin_names()?;
        let term = self.line.term().unwrap_or_default();
        self.progress.count(|stats| stats.term = term);
        self.progress.advance(self.line.archived().lsn);
        tracing::info!(url = self.options.url, term, "archiving");
        fenced
    }

    /// Appends the proven batches as runs. First completes an earlier append whose outcome is unknown.
    fn append_runs(&mut self) -> Result<(), Failure> {
        let (proven, (_, bytes)) = (self.engine.log.proven(), self.engine.log.length());
        if !self.line.has_pending() && proven <= self.line.archived().lsn {
            return Ok(());
        }
        self.directory.advance(proven)?;
        while self.line.has_pending() || self.line.archived().lsn < proven {
            if self.late_at.is_some_and(|late_at| Instant::now() >= late_at) {
                return Ok(());
            }
            if !self.line.has_pending() && !self.directory.continues(&self.line.archived())? {
                return self.continue_after_gap();
            }
            let append = self.line.append_run(&self.directory);
            let Some(appended) = self.bucket.block_on(append)? else { break };
            self.note(&appended);
        }
        self.bytes_archived = bytes;
        Ok(())
    }

    /// Counts an appended object, and acknowledges its batches.
    pub(super) fn note(&mut self, appended: &Appended) {
        match appended.kind {
            Kind::Run => {
                self.runs += 1;
                self.progress.count(|stats| stats.runs += 1);
            }
            Kind::Manifest => {
                (self.runs, self.bytes_before) = (0, self.engine.log.length().1);
                (self.uploaded_before, self.listed_before) = (self.line.uploaded(), 0);
                self.snapshot = self.line.manifest().map(|manifest| manifest.snapshot);
                let follows_gap = self.line.manifest().is_some_and(|manifest| manifest.follows_gap);
                self.progress.count(|stats| {
                    stats.snapshots += 1;
                    stats.gaps += u64::from(follows_gap);
                });
            }
            _ => {}
        }
        self.progress.advance(appended.archived.lsn);
    }

    /// Archives the newest snapshot together with the log that it needs. Called if the log after the last archived
    /// batch was recycled (rule 28).
    fn continue_after_gap(&mut self) -> Result<(), Failure> {
        if self.progress.must_stop() {
            return Ok(()); // The next open archives the snapshot.
        }
        if self.lacks_parts() {
            return Err(Failure::Local(io::Error::other("the store still fetches pages from the archive")));
        }
        let Some((hold, end)) = self.hold_newest()? else {
            return Err(Failure::Local(io::Error::other("there is no snapshot to continue with yet")));
        };
        let id = hold.snapshot;
        // From now on, the log after this snapshot must be retained.
        self.hold = Some(hold);
        let proven = self.engine.log.prove(end).map_err(io::Error::other)?;
        self.directory.advance(proven)?;
        let (parts, pieces) = self.directory.snapshot(id, &self.line.archived())?;
        tracing::warn!(snapshot = %id, "the archive fell behind the kept log, and continues with a snapshot");
        self.archive_snapshot(parts, &pieces)
    }

    /// Returns true if only the archive contains some parts of image files, after a restore on demand. The thread then
    /// archives no snapshot, so that the archive keeps these parts.
    pub(super) fn lacks_parts(&self) -> bool {
        !self.engine.disk.unfetched_files().is_empty()
    }

    /// Archives the newest snapshot if enough runs or bytes were archived since the last snapshot.
    fn archive_snapshot_if_due(&mut self) -> Result<(), Failure> {
        if self.lacks_parts() {
            return Ok(());
        }
        let logged = self.engine.log.length().1.saturating_sub(self.bytes_before);
        let uploaded = self.line.uploaded() - self.uploaded_before + self.listed_before;
        if self.runs < RUNS_MAX && logged.max(uploaded) < RUN_BYTES_MAX {
            return Ok(());
        }
        let archived = self.line.archived();
        let Some((hold, end)) = self.hold_newest()? else { return Ok(()) };
        if self.snapshot == Some(hold.snapshot) {
            // The archive contains this snapshot, so a newer one is taken. A later round archives that snapshot.
            drop(hold);
            self.take_snapshot();
            return Ok(());
        }
        // A manifest follows the run that contains its end (rule 10).
        if end > archived.lsn {
            return Ok(());
        }
        let (parts, pieces) = self.directory.snapshot(hold.snapshot, &archived)?;
        match self.archive_snapshot(parts, &pieces) {
            // The snapshot needs log that the archive does not contain, or has too many parts. A newer snapshot may
            // succeed.
            Err(failure @ (Failure::StartNotKept { .. } | Failure::TooLarge { .. })) => {
                self.note_failure(&failure);
                self.snapshot = Some(hold.snapshot);
                Ok(())
            }
            result => result,
        }
    }

    /// Archives a snapshot, and deletes the objects that are then unnecessary. `pieces` lists the parts that must be
    /// read and uploaded first. Returns early if the store closes.
    fn archive_snapshot(&mut self, mut parts: SnapshotParts, pieces: &[FilePiece]) -> Result<(), Failure> {
        for missing in self.line.missing_parts(&parts.parts).chunks(UPLOADS_MAX) {
            if self.progress.must_stop() {
                return Ok(());
            }
            self.bucket.block_on(self.line.upload_ahead(&self.directory, missing))?;
        }
        let progress = self.progress;
        let Some(uploaded) = self.upload(pieces, || progress.must_stop())? else { return Ok(()) };
        parts.parts.extend(uploaded);
        let appended = self.bucket.block_on(self.line.append_manifest(&self.directory, &parts))?;
        self.note(&appended);
        let mut begun = Instant::now();
        let pruned = self.prune(&mut begun)?;
        tracing::info!(snapshot = %parts.snapshot, ?pruned, "archived a snapshot");
        Ok(())
    }

    /// Reads back every part of the newest manifest (rule 18), and then deletes the objects that are unnecessary
    /// because of the manifest. If the store closes, returns early; a prune after a later snapshot then deletes the
    /// objects.
    fn prune(&mut self, begun: &mut Instant) -> Result<Pruned, Failure> {
        let Some(mut verification) = self.line.verification() else { return Ok(Pruned::Nothing) };
        while !self.progress.must_stop() {
            let read = self.bucket.block_on(self.line.verify_next(&mut verification))?;
            if let Some(verified) = read {
                return self.bucket.block_on(self.line.prune(verified));
            }
            self.append_runs_if_due(begun)?;
        }
        Ok(Pruned::Nothing)
    }

    /// Uploads pieces of files, and returns them as parts. Appends runs between uploads, so that batches do not wait
    /// for a large snapshot. Returns `None` if `must_stop` returns true.
    pub(super) fn upload(
        &mut self,
        pieces: &[FilePiece],
        must_stop: impl Fn() -> bool,
    ) -> Result<Option<Vec<Part>>, Failure> {
        let mut parts = Vec::with_capacity(pieces.len());
        let mut begun = Instant::now();
        while let Some(left) = pieces.get(parts.len()..).filter(|left| !left.is_empty()) {
            if must_stop() {
                return Ok(None);
            }
            let (progress, archived, interval) =
                (self.progress, self.line.archived().lsn, self.options.interval);
            let must_pause = || progress.wanted() > archived || begun.elapsed() >= interval || must_stop();
            let directory = &self.directory;
            let read = |piece: &FilePiece, out: &mut [u8]| directory.read_piece(piece, out);
            parts.extend(self.bucket.block_on(self.line.upload_pieces(left, read, must_pause))?);
            self.append_runs_if_due(&mut begun)?;
        }
        Ok(Some(parts))
    }

    /// Appends runs during a longer operation, if a caller waits for a batch or if the interval has passed since
    /// `begun`.
    pub(super) fn append_runs_if_due(&mut self, begun: &mut Instant) -> Result<(), Failure> {
        if self.progress.is_called() || begun.elapsed() >= self.options.interval {
            self.append_runs()?;
            self.renew_hold();
            self.bound_log();
            *begun = Instant::now();
        }
        Ok(())
    }

    /// Locks the newest verified snapshot, and returns the lock with the snapshot's last batch. If no snapshot exists,
    /// starts taking one and returns `None`.
    fn hold_newest(&mut self) -> Result<Option<(LogHold, Lsn)>, Failure> {
        let held = holds::newest(&self.engine.disk, &self.snapshots).map_err(io::Error::other)?;
        if held.is_none() && self.snapshots.catalog.latest().catalog.snapshots.is_empty() {
            self.take_snapshot();
        }
        Ok(held)
    }

    /// Starts taking a snapshot for the archive. After a failure, a later round tries again.
    fn take_snapshot(&mut self) {
        if Instant::now() < self.snapshot_after {
            return;
        }
        if let Err(error) = self.snapshots.take_in_background(self.engine.log.length().0) {
            tracing::warn!(%error, "cannot take a snapshot for the archive; a later round tries again");
            self.snapshot_after = Instant::now() + SNAPSHOT_AGAIN_AFTER;
        }
    }

    fn renew_hold(&mut self) {
        let archived = self.is_found.then(|| self.line.archived().lsn);
        if let Err(error) = holds::renew(&self.engine.disk, &self.snapshots, archived, &mut self.hold) {
            tracing::warn!(%error, "cannot retain the log for the archive");
        }
    }

    /// Releases the log if more than `log_len_max` bytes are not archived.
    fn bound_log(&mut self) {
        let bytes = self.engine.log.length().1.saturating_sub(self.bytes_archived);
        if bytes > self.options.log_len_max
            && let Some(hold) = self.hold.take()
        {
            tracing::warn!(
                bytes,
                snapshot = %hold.snapshot,
                "the archive is too far behind; released the log that it needs"
            );
        }
    }

    pub(super) fn note_failure(&self, failure: &Failure) {
        let error = error_of(&self.options.url, failure);
        tracing::warn!(%error, "the archive is behind; the next round tries again");
        self.progress.count(|stats| {
            stats.failures += 1;
            stats.last_failure = Some(error);
        });
    }

    /// Stops archiving. If another writer created a fence, poisons the store, so that no later batch is acknowledged.
    fn end(&self, failure: &Failure) {
        let error = error_of(&self.options.url, failure);
        tracing::error!(%error, "the archive has ended");
        let is_superseded =
            matches!(&error, Error::Archive(archive) if archive.kind == ArchiveErrorKind::Superseded);
        if is_superseded {
            self.engine.poison.set(error.clone());
        }
        self.progress.end(error);
    }
}
