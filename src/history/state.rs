//! A state of a store on disk. The state is located, verified up to its page table, and read page by page. Restores,
//! forks and read-only handles start from such a state.
//!
//! 1. **Survey** the files. Choose the newest snapshot that ends at or before the requested state. If the last seal of
//!    the log permits replay from the beginning of the log, the beginning is an alternative.
//! 2. **Hold** the snapshot, so that a writer removes none of its files from now on (I8). The next steps detect files
//!    that the writer removed just before.
//! 3. **Follow** the log up to the state, and record the locations of each page's operations.
//! 4. **Check** that the images from which the pages are composed still exist. If an image is missing, read the last
//!    seal again, because no more files can be removed now. The seal states whether the image was lost or removed.
//!
//! The bytes of a page are read on demand, and verified with the checksums of steps 1 and 3. Concurrent changes by a
//! writer can therefore cause an error, but never wrong bytes.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use remanent_format::image::ImageRef;
use remanent_format::log::LogMap;
use remanent_format::manifest::Manifest;
use remanent_format::state::reach::{Reach, Role};
use remanent_format::state::replay::ResolvedState;
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::{OpLocations, ProvenPage};
use remanent_format::store::StoreFile;
use remanent_format::{
    Damage, Defect, FileName, Folder, LogPoint, Lsn, PageId, PageTable, Place, SnapshotId,
};

use crate::base::allocation::set_of;
use crate::base::sync::Mutex;
use crate::disk::source::DiskSource;
use crate::disk::{Disk, DiskLock, Hold};
use crate::error::{Error, NoSuchState, Result};
use crate::history::point::StatePoint;
use crate::history::windows::{Lookup, WHOLE_LEN_MAX, WINDOW_LEN_MIN, Windows};
use crate::recovery::create::unfinished_files;

/// The maximum number of attempts to find a state while a writer changes the files faster than they are read.
const ATTEMPTS: usize = 64;
/// The shortest and the longest delay before the files are read again, while a writer is removing the requested files.
/// On a busy disk, each sync of the writer takes tens of milliseconds.
const RETIRE_WAITS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// A state of a store on disk, from which pages are read on demand.
pub(crate) struct PastState {
    disk: Arc<dyn Disk>,
    store: StoreFile,
    base: Option<SnapshotId>,
    /// The segments from which the log is replayed up to the state. If one of the segments is removed, the state is
    /// lost.
    segments: BTreeSet<u64>,
    point: LogPoint,
    resolved: ResolvedState,
    op_locations: OpLocations,
    /// The open files from which pages are read. The files stay open between reads.
    source: Mutex<Arc<DiskSource>>,
    /// The long pages that were read before. Their images are verified only once.
    proven: Mutex<HashMap<PageId, Arc<ProvenPage>>>,
    windows: Mutex<Windows>,
    hold: Option<Box<dyn DiskLock>>,
    /// Whether every image file that the state needs was found.
    is_whole: bool,
}

/// Returns an error if the directory contains no store, or only the files of an unfinished creation. A store that has
/// lost its STORE file counts as damaged.
pub(crate) fn check_is_store(disk: &Arc<dyn Disk>) -> Result<()> {
    let has_record = || Ok::<_, Error>(disk.list(Folder::Root)?.contains(&FileName::Store.name()));
    if has_record()? {
        return Ok(());
    }
    let judged = unfinished_files(disk);
    // A writer may have completed the creation of the store in the meantime, and even committed.
    if has_record()? {
        Ok(())
    } else {
        Err(judged.err().unwrap_or(Error::NoStore { path: disk.label(), found: None }))
    }
}

/// The files of a store, with the results of one read.
pub(crate) struct KnownFiles {
    source: DiskSource,
    survey: Survey,
    /// The newest batch and the reach of the log, once they are needed. `None` if the log cannot be read to its end.
    log_end: OnceLock<Option<(Lsn, Reach)>>,
}

impl KnownFiles {
    /// Reads STORE, all manifests and the headers of all segments.
    ///
    /// # Errors
    /// [`Error::Damaged`] if STORE is damaged or a folder cannot be listed; [`Error::OutOfMemory`].
    pub fn read(disk: &Arc<dyn Disk>) -> Result<Self> {
        let source = DiskSource::new(disk.clone());
        let survey = Survey::read(&source)?;
        Ok(Self { source, survey, log_end: OnceLock::new() })
    }
}

/// The batch up to which the log is replayed to compose a state.
#[derive(Clone, Copy)]
enum Until {
    End,
    At(Lsn),
}

/// The result of a failed search, which is compared with the result of the next search.
#[derive(PartialEq)]
struct Attempt {
    snapshots: Vec<SnapshotId>,
    segments: Vec<u64>,
    /// The last batch that could be read from the log.
    reached: Lsn,
    /// The text of the error, because errors cannot be compared.
    error: String,
}

/// A failed search for a state, with its error and the last batch that the search reached.
struct NotFound {
    error: Error,
    /// The last batch that could be read from the log.
    reached: Lsn,
    /// Whether, during the search, a writer was removing a snapshot or the log after the snapshot.
    is_being_removed: bool,
}

impl Until {
    fn lsn(self) -> Option<Lsn> {
        match self {
            Until::End => None,
            Until::At(lsn) => Some(lsn),
        }
    }

    fn covers(self, end: Lsn) -> bool {
        self.lsn().is_none_or(|until| end <= until)
    }
}

impl PastState {
    /// Finds the state at `point`, or the newest state if `point` is `None`.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::NoSuchState`], [`Error::Damaged`]; [`Error::Overtaken`] if a writer
    /// removes files faster than this call reads them.
    pub fn open(disk: &Arc<dyn Disk>, point: Option<&StatePoint>) -> Result<Self> {
        check_is_store(disk)?;
        let mut before: Option<Attempt> = None;
        let mut was_in_parts = false;
        let [mut going_wait, longest_wait] = RETIRE_WAITS;
        for attempt in 1.. {
            let known = KnownFiles::read(disk)?;
            let survey = &known.survey;
            let until = until(survey, point)?;
            // Files that appear damaged are read twice before damage is reported.
            let NotFound { error, reached, is_being_removed } = match Self::search(disk, &known, until) {
                Ok(past) if past.is_whole || was_in_parts => return Ok(past),
                Ok(_) => {
                    was_in_parts = true;
                    continue;
                }
                Err(not_found) => not_found,
            };
            // If two attempts find different files, a longer log or a different error, a writer is active, and the
            // files changed while they were listed.
            let snapshots = survey.links.keys().copied().collect();
            let segments = segment_numbers(&survey.log);
            let now = Attempt { snapshots, segments, reached, error: error.to_string() };
            let is_first = before.is_none();
            let moved = before.is_some_and(|before| before != now);
            before = Some(now);
            let is_outside = matches!(error, Error::NoSuchState(NoSuchState::OutsideWindow { .. }));
            // While a writer removes segments of the log, it locks a snapshot, which can be used again afterwards.
            if !is_first && (!moved || is_outside) && !is_being_removed {
                return Err(error);
            }
            if moved && point.is_none() && reached > Lsn(0) {
                // The writer has committed more batches during this call. The last batch that the search reached was
                // the newest one at that time, so it is an acceptable result.
                if let Ok(past) = Self::search(disk, &known, Until::At(reached))
                    && past.is_whole
                {
                    return Ok(past);
                }
            }
            if attempt >= ATTEMPTS {
                return Err(Error::Overtaken {
                    lsn: reached,
                    snapshot: survey.links.keys().next_back().copied(),
                });
            }
            if is_being_removed {
                wait(going_wait);
                going_wait = longest_wait.min(going_wait * 2);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Finds the state after batch `lsn` like [`open`](Self::open), but reuses the earlier reads of files that still
    /// exist. Only an Lsn can identify the state, because names and numbers of snapshots may have been assigned to
    /// other states.
    ///
    /// # Errors
    /// The errors of `open`.
    pub fn open_known(disk: &Arc<dyn Disk>, known: &KnownFiles, lsn: Lsn) -> Result<Self> {
        match Self::search(disk, known, Until::At(lsn)) {
            Ok(past) if past.is_whole && past.has_files()? => Ok(past),
            // The files have changed since, or are damaged.
            _ => Self::open(disk, Some(&StatePoint::Lsn(lsn))),
        }
    }

    /// Tries to build the state from each snapshot, newest first, and then from the beginning of the log.
    fn search(disk: &Arc<dyn Disk>, known: &KnownFiles, until: Until) -> Result<Self, NotFound> {
        let KnownFiles { survey, source, .. } = known;
        let (mut first, mut reached, mut is_being_removed) = (None, Lsn(0), false);
        let mut in_parts = None;
        let mut oldest: Option<Lsn> = None;
        // The log is read to its end only if the newest snapshot is unsuitable.
        let log_end = || known.log_end.get_or_init(|| Reach::at_the_end(survey, source)).as_ref();
        let newest = survey.readable().next_back().map(|link| link.snapshot);
        for id in survey.links.keys().rev().map(|id| Some(*id)).chain([None]) {
            // The manifest states these two points itself, so the manifests on which it is based are not read yet.
            let (end, redo) = match id.map(|id| &survey.links[&id]) {
                Some(Ok((link, _))) => (link.end, Some(link.redo)),
                Some(Err(damage)) => {
                    first.get_or_insert(Error::from(damage.clone()));
                    continue;
                }
                None => (Lsn(0), survey.log.beginning()),
            };
            let Some(redo) = redo else { continue };
            // Replay may always start from the newest snapshot, which is usually the required one.
            let role = match id {
                Some(_) if id == newest => Role::Start,
                _ => role(survey, log_end().map(|(_, reach)| reach), id, redo),
            };
            // Without the log after it, an exact snapshot can still provide the state at its own end.
            if role == Role::Link || (role == Role::EndOnly && (until.lsn() != Some(end) || redo.lsn != end))
            {
                continue;
            }
            if role == Role::Start {
                oldest = Some(end);
            }
            if !until.covers(end) {
                continue;
            }
            let mut op_locations = OpLocations::default();
            let base = id.map(|id| survey.snapshot(id)).transpose().map_err(Error::from);
            let opened = base.and_then(|base| {
                Self::open_from(disk, source, survey, base.as_ref(), until, &mut op_locations)
            });
            match opened {
                Ok(Some(past)) => match past.has_images() {
                    Ok(true) => return Ok(Self { is_whole: true, ..past }),
                    // The lock on the snapshot now prevents the removal of its files. If replay may no longer start
                    // from it, a writer removed the missing files before. Otherwise they are lost.
                    Ok(false) if !is_promised(disk, id, until) => is_being_removed = true,
                    Ok(false) => _ = in_parts.get_or_insert(past),
                    Err(error) => _ = first.get_or_insert(error),
                },
                Ok(None) => is_being_removed = true,
                Err(error @ Error::NoSuchState(NoSuchState::OutsideWindow { .. })) => {
                    return Err(NotFound { error, reached, is_being_removed });
                }
                Err(error) => _ = first.get_or_insert(error),
            }
            reached = reached.max(op_locations.point().lsn);
        }
        // Some images are lost. Only the pages that need them are unreadable.
        if let Some(past) = in_parts {
            return Ok(past);
        }
        let nothing = || match (until, oldest) {
            (Until::At(requested), Some(oldest)) if requested < oldest => {
                outside_window(survey, requested, oldest, log_end())
            }
            _ => survey.log.chain_break().cloned().unwrap_or_else(|| missing(survey)).into(),
        };
        Err(NotFound { error: first.unwrap_or_else(nothing), reached, is_being_removed })
    }

    /// Reads the log from one snapshot up to the state. Returns `None` if the snapshot or the log after the snapshot is
    /// being removed.
    fn open_from(
        disk: &Arc<dyn Disk>,
        source: &DiskSource,
        survey: &Survey,
        base: Option<&Arc<Manifest>>,
        until: Until,
        op_locations: &mut OpLocations,
    ) -> Result<Option<Self>> {
        let id = base.map(|manifest| manifest.snapshot);
        let hold = match disk.hold(id.unwrap_or_default())? {
            Hold::Held(lock) => Some(lock),
            Hold::Retiring => return Ok(None),
            Hold::Impossible => None,
        };
        let resolution = op_locations.follow(survey, source, base, until.lsn())?;
        let newest = resolution.resolved.table.lsn();
        if let Until::At(requested) = until
            && let Some(end) = resolution.end
            && newest < requested
        {
            let reach = Reach::of(survey, &end.verified);
            let (oldest, below) = (reach.opens_at().unwrap_or_default(), reach.below());
            return Err(Error::NoSuchState(NoSuchState::OutsideWindow { requested, oldest, newest, below }));
        }
        let redo = base.map(|manifest| manifest.redo).or_else(|| survey.log.beginning());
        let redo = redo.expect("the log was followed from there");
        let point = if op_locations.point() == LogPoint::default() { redo } else { op_locations.point() };
        let followed = survey.log.segments().range(redo.segment..=point.segment.max(redo.segment));
        let past = Self {
            disk: disk.clone(),
            store: survey.store.clone(),
            base: id,
            segments: followed.map(|(number, _)| *number).chain([redo.segment]).collect(),
            point,
            resolved: resolution.resolved,
            op_locations: std::mem::take(op_locations),
            source: Mutex::new(Arc::new(DiskSource::new(disk.clone()))),
            proven: Mutex::default(),
            windows: Mutex::default(),
            hold,
            is_whole: false,
        };
        // Before the snapshot was locked, a writer may have removed it, or reused its first segment, so that the log
        // appears to end there. A writer that is opening the store reuses the last segments, whose batches it has
        // copied.
        let had_files = survey.log.segments().contains_key(&redo.segment);
        Ok((!had_files || past.has_files()?).then_some(past))
    }

    /// Returns whether all images from which the pages are composed exist. An image can be missing for three reasons:
    ///
    /// - The image was lost.
    /// - The writer removed the image before the snapshot was held.
    /// - The snapshot's link is kept only for later snapshots. An older snapshot and the log after it provide the
    ///   state.
    fn has_images(&self) -> Result<bool> {
        let present: BTreeSet<String> = self.disk.list(Folder::Pages)?.into_iter().collect();
        let images = self.resolved.bases.iter().filter_map(|(_, base)| base.image);
        let files = set_of(images.flat_map(|image| image.files()).map(|(file, _)| file));
        let gone = files.into_iter().map(FileName::Pages).find(|file| !present.contains(&file.name()));
        match gone {
            None => Ok(true),
            Some(file) if self.has_files()? => {
                tracing::debug!(%file, "images are gone that this state is made from");
                Ok(false)
            }
            Some(file) => {
                tracing::debug!(%file, "removed before it could be held");
                Err(self.overtaken())
            }
        }
    }

    /// Returns the batch after which the store had this state.
    pub fn lsn(&self) -> Lsn {
        self.resolved.table.lsn()
    }

    /// Returns the end of the state's last batch in the log.
    pub fn point(&self) -> LogPoint {
        self.point
    }

    /// Returns the snapshot from which the log is replayed, or `None` for the beginning of the log.
    pub fn base(&self) -> Option<SnapshotId> {
        self.base
    }

    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    pub fn store(&self) -> &StoreFile {
        &self.store
    }

    pub fn table(&self) -> &PageTable {
        &self.resolved.table
    }

    /// Returns the image whose bytes equal those of the page in this state. Returns `None` if later batches must be
    /// applied to an image.
    pub fn exact_image(&self, page: PageId) -> Option<ImageRef> {
        self.op_locations.exact_image(&self.resolved, page)
    }

    /// Fills `out` with a page's bytes starting at `offset`.
    ///
    /// Ranges of a long page are composed window by window, and recent windows are cached. If a whole page is read, the
    /// bytes of its image are read directly into `out` and checksummed in the same pass. Later operations are then
    /// written over these bytes, unless one of them changed the length of the page.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::OutOfBounds`]; [`Error::Damaged`] in the data of this page;
    /// [`Error::OutOfMemory`]; [`Error::Overtaken`] if the state could not be held and was removed.
    pub fn read(&self, page: PageId, mut offset: u64, mut out: &mut [u8]) -> Result<()> {
        let (len, page_len) = (out.len() as u64, self.page_len(page)?);
        if offset.checked_add(len).is_none_or(|end| end > page_len) {
            return Err(Error::OutOfBounds { page, offset, len, page_len });
        }
        if len == page_len
            && self
                .read_with_retry(|source| self.op_locations.read_into(source, &self.resolved, page, out))?
        {
            return Ok(());
        }
        while !out.is_empty() {
            let (from, bytes) = self.window(page, page_len, offset, out.len() as u64)?;
            let bytes = &bytes[(offset - from) as usize..];
            let (filled, rest) = out.split_at_mut(bytes.len().min(out.len()));
            filled.copy_from_slice(&bytes[..filled.len()]);
            offset += filled.len() as u64;
            out = rest;
        }
        Ok(())
    }

    /// Passes all bytes of a page to `sink`, in order and piece by piece. The first argument of `sink` is the offset.
    ///
    /// # Errors
    /// The errors of [`PastState::read`] and of `sink`.
    pub fn stream(&self, page: PageId, mut sink: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let (mut at, page_len) = (0, self.page_len(page)?);
        while at < page_len {
            let (from, bytes) = self.window(page, page_len, at, WINDOW_LEN_MIN)?;
            let bytes = &bytes[(at - from) as usize..];
            sink(at, bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Reads everything from which a page is composed, piece by piece, and verifies it.
    ///
    /// # Errors
    /// The errors of [`PastState::read`].
    pub fn prove(&self, page: PageId) -> Result<()> {
        self.page_len(page)?;
        self.read_with_retry(|source| self.op_locations.check(source, &self.resolved, page))
    }

    /// Returns the image of a page whose length no later operation changed, and whether later operations changed its
    /// bytes. Returns `None` for any other page.
    pub fn image_below(&self, page: PageId) -> Option<(ImageRef, bool)> {
        let base = self.op_locations.base_in_place(&self.resolved, page)?;
        base.image.map(|image| (image, self.exact_image(page).is_none()))
    }

    /// Returns the ranges of a page that differ from its [`image_below`](Self::image_below). Close ranges are joined.
    pub fn changed_ranges(&self, page: PageId, gap_min: u64) -> Vec<Range<u64>> {
        self.op_locations.changed_ranges(page, gap_min)
    }

    /// Writes the operations of a page over `bytes`, which are bytes of its [`image_below`](Self::image_below) from
    /// offset `from` on.
    ///
    /// # Errors
    /// The errors of [`PastState::read`].
    pub fn write_over(&self, page: PageId, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.read_with_retry(|source| self.op_locations.write_over(source, page, from, bytes))
    }

    /// Returns the length of a page in bytes.
    ///
    /// # Errors
    /// [`Error::UnknownPage`].
    pub fn page_len(&self, page: PageId) -> Result<u64> {
        self.table().get(page).map(|info| info.len).ok_or(Error::UnknownPage { page })
    }

    /// Returns a window of a page that contains the byte at `offset`, and the offset at which the window begins.
    /// `wanted` is the number of bytes that the caller reads from `offset` on.
    fn window(&self, page: PageId, page_len: u64, offset: u64, wanted: u64) -> Result<(u64, Arc<Vec<u8>>)> {
        let next = match self.windows.lock().get(page, page_len, offset, wanted) {
            Lookup::Held(from, bytes) => return Ok((from, bytes)),
            Lookup::Missing(next) => next,
        };
        // No lock is held while the window is read. In the worst case, two threads read the same window.
        let bytes = if next == (0..page_len) && page_len <= WHOLE_LEN_MAX {
            self.read_with_retry(|source| self.op_locations.load(source, &self.resolved, page))?
        } else {
            let proven = self.proven.lock().get(&page).cloned();
            let proven = match proven {
                Some(proven) => proven,
                None => {
                    let prove = |source: &DiskSource| self.op_locations.prove(source, &self.resolved, page);
                    let proven = Arc::new(self.read_with_retry(prove)?);
                    self.proven.lock().insert(page, proven.clone());
                    proven
                }
            };
            self.read_with_retry(|source| self.op_locations.window(source, &proven, &next))?
        };
        let bytes = Arc::new(bytes);
        self.windows.lock().insert(page, next.start, bytes.clone());
        Ok((next.start, bytes))
    }

    /// Calls `read`. On damage, reopens the files and calls `read` once more, because the writer may have reused an
    /// open file. The files of an archive are never reused.
    pub fn read_with_retry<T>(&self, mut read: impl FnMut(&DiskSource) -> Result<T, Damage>) -> Result<T> {
        let source = self.source.lock().clone();
        match read(&source) {
            Ok(read) => return Ok(read),
            Err(damage) => source.archive_failure(&damage).map_or(Ok(()), Err)?,
        }
        let anew = Arc::new(DiskSource::new(self.disk.clone()));
        *self.source.lock() = anew.clone();
        let damage = match read(&anew) {
            Ok(read) => return Ok(read),
            Err(damage) => damage,
        };
        if damage.defect == Defect::Missing {
            // If the directory was removed, this returns an error, because every file would appear to be missing.
            self.disk.directory()?;
        }
        match damage.defect {
            Defect::Memory { needed } => Err(Error::OutOfMemory { place: Place::Host, len: needed }),
            Defect::Missing if !self.is_kept()? => Err(self.overtaken()),
            // The writer has reused the file since it was opened.
            _ if anew.is_gone(damage.file) && !self.is_kept()? => Err(self.overtaken()),
            // The error names the store, because during a fork there are two stores.
            _ => Err(Error::from(damage).in_store(&self.disk.label())),
        }
    }

    /// Returns whether no writer can have removed a file that this state needs. The existing files do not prove that: a
    /// writer may keep a manifest as a link of later snapshots, and the log after it, without the images.
    pub fn is_kept(&self) -> Result<bool> {
        let promised = is_promised(&self.disk, self.base, Until::At(self.lsn()));
        Ok(promised && (self.hold.is_some() || self.has_files()?))
    }

    /// Returns whether the files that a writer removes first still exist: the snapshot's manifest and the log segments.
    /// The log is checked too, because a manifest may be kept for later snapshots.
    fn has_files(&self) -> Result<bool> {
        // A file name identifies the kind of the file, so names of both folders can share a set.
        let mut present: BTreeSet<String> = self.disk.list(Folder::Log)?.into_iter().collect();
        present.extend(self.disk.list(Folder::Snapshots)?);
        let segments = self.segments.iter().map(|number| FileName::Segment(*number));
        let mut first = segments.chain(self.base.map(|id| FileName::Manifest(id.0)));
        Ok(first.all(|file| present.contains(&file.name())))
    }

    /// Returns the error for a reader whose state a writer has removed.
    pub fn overtaken(&self) -> Error {
        let names = self.disk.list(Folder::Snapshots).unwrap_or_default();
        let snapshots = names.iter().filter_map(|name| match FileName::parse(Folder::Snapshots, name) {
            Some(FileName::Manifest(number)) => Some(SnapshotId(number)),
            _ => None,
        });
        Error::Overtaken { lsn: self.lsn(), snapshot: snapshots.max() }
    }
}

#[expect(clippy::disallowed_methods, reason = "a writer in another process gives no signal")]
fn wait(time: Duration) {
    std::thread::sleep(time);
}

/// Returns the batch that `point` refers to, according to `survey`.
fn until(survey: &Survey, point: Option<&StatePoint>) -> Result<Until> {
    Ok(match point {
        None => Until::End,
        Some(StatePoint::Lsn(lsn)) => Until::At(*lsn),
        Some(StatePoint::Snapshot(id)) => match survey.links.get(id) {
            Some(Ok((manifest, _))) => Until::At(manifest.end),
            Some(Err(damage)) => return Err(damage.clone().into()),
            None => return Err(Error::NoSuchState(NoSuchState::Snapshot { snapshot: *id })),
        },
        Some(StatePoint::Name(name)) => {
            let mut newest_first = survey.readable().rev();
            let named = newest_first.find(|manifest| manifest.name.as_ref() == Some(name));
            let known = || survey.readable().filter_map(|manifest| manifest.name.as_deref());
            Until::At(named.ok_or_else(|| Error::no_snapshot_named(name, known()))?.end)
        }
    })
}

/// Returns whether, according to the last seal, replay may start from the given snapshot or the beginning of the log.
/// If the seal cannot be read, the result makes the caller report missing files as lost, not as removed.
fn is_promised(disk: &Arc<dyn Disk>, base: Option<SnapshotId>, until: Until) -> bool {
    let mut before = None;
    for _ in 0..ATTEMPTS {
        let source = DiskSource::new(disk.clone());
        let Ok(survey) = Survey::read(&source) else { return true };
        if let Some((_, reach)) = Reach::at_the_end(&survey, &source) {
            return reach.leads_to(base, until.lsn());
        }
        // A writer may have removed a file during the survey. If so, the next survey finds other files.
        let files = (survey.links.into_keys().collect::<Vec<_>>(), segment_numbers(&survey.log));
        if before.replace(files.clone()).is_some_and(|before| before == files) {
            return true;
        }
    }
    false
}

fn segment_numbers(log: &LogMap) -> Vec<u64> {
    log.segments().keys().copied().collect()
}

/// Returns the role of a candidate that is not the newest snapshot. The log of the candidate begins at `redo`. The last
/// seal, from which `reach` was computed, states what the candidate can be used for. `reach` is `None` without a
/// readable seal.
fn role(survey: &Survey, reach: Option<&Reach>, id: Option<SnapshotId>, redo: LogPoint) -> Role {
    match (reach, id) {
        (Some(reach), Some(id)) => reach.role(id),
        (Some(reach), None) if reach.beginning().is_some() => Role::Start,
        (Some(_), None) => Role::Link,
        // Without a readable seal, every candidate whose segment exists is tried.
        (None, _) if survey.log.segments().contains_key(&redo.segment) => Role::Start,
        (None, _) => Role::EndOnly,
    }
}

/// Returns the error for a batch before the retained range, which states that range. `oldest` is the end of the oldest
/// candidate from which replay may start. `log_end` contains the newest batch and the reach of the log, if the log can
/// be followed.
fn outside_window(survey: &Survey, requested: Lsn, oldest: Lsn, log_end: Option<&(Lsn, Reach)>) -> Error {
    let (oldest, newest, below) = match log_end {
        Some((newest, reach)) => (reach.opens_at().unwrap_or_default(), *newest, reach.below()),
        None => (oldest, survey.mark(), Vec::new()),
    };
    Error::NoSuchState(NoSuchState::OutsideWindow { requested, oldest, newest, below })
}

fn missing(survey: &Survey) -> Damage {
    let first = survey.log.segments().keys().next().copied().unwrap_or(1);
    Defect::Missing.at_lsn(FileName::Segment(first), 0, Lsn(1))
}
