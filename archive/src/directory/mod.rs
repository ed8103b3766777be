//! Reads the store directories that are archived, and writes the directories of restores.
//!
//! [`ArchivedDirectory`] reads a store with [`remanent_format`] alone, without the engine. [`RestoreTarget`] writes a
//! directory that the engine can open.
//!
//! Both types require the writer lock of the directory. The engine defines this lock; the caller acquires it and passes
//! its guard as a [`WriterLock`]. [`ViewDirectory`] requires no lock, because it is a temporary directory of one
//! process.
//!
//! | file | purpose |
//! |---|---|
//! | `view.rs` | writes the temporary directory of a view, without image files |
//! | `restore.rs` | writes the parts and frames of a restored directory |
//! | `part_writers.rs` | threads that write frames and parts of image files, and read the parts back |
//! | `threads.rs` | the number of these threads, and other work on several threads |
//! | `opening.rs` | completes a restore: opening, verification, STORE |
//! | `unfetched.rs` | the file UNFETCHED |
//! | `live.rs` | reads the directory of a store that this process has open |
//! | `snapshot.rs` | reads a snapshot as parts |
//! | `named.rs` | reads and compares named snapshots |
//! | `log.rs` | reads frames under a durable mark |
//! | `record.rs` | the file ARCHIVE |
//! | `files.rs` | reads and durable writes |

mod view;
mod restore;
mod part_writers;
mod threads;
mod opening;
mod unfetched;
mod live;
mod snapshot;
mod named;
mod log;
mod record;
mod files;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

use remanent_format::limits::{NUMBER_MAX, STORE_RECORD_LEN_MAX};
use remanent_format::segment::SegmentHeader;
use remanent_format::state::survey::Survey;
use remanent_format::store::{StoreFile, StoreHeaderRaw};
use remanent_format::{Defect, FileName, Folder, Incarnation, LogPoint, Lsn, ReadAt, SnapshotId, StoreId};

use self::files::{StoreFiles, invalid};
use self::log::LogIndex;
use self::record::ArchiveRecord;
use crate::local::{FenceRecord, LocalStore, SealedFrames};
use crate::object::{BatchPoint, KeptSnapshot, Part, Role};

pub use named::NameChanges;
pub use restore::RestoreTarget;
pub use unfetched::UnfetchedParts;
pub use view::ViewDirectory;

/// Maximum length of STORE in bytes.
const STORE_LEN_MAX: u64 = (StoreHeaderRaw::LEN + STORE_RECORD_LEN_MAX) as u64;

/// The guard of the writer lock of a store directory. While the guard exists, no other handle, in this or another
/// process, can open the store for writing.
///
/// A type that implements this trait must hold the engine's lock, which combines several locks of the file LOCK. Any
/// other lock does not exclude the engine.
pub trait WriterLock: std::fmt::Debug + Send {}

/// A store directory that is archived. No other process may have the store open for writing.
///
/// Only batches that a durable mark proves are archived. The log files are synced before they are read, so that the
/// marks are durable as well (rule 7). An earlier failed sync is not detected if the process that wrote the log did not
/// report it.
///
/// The engine uses this type to archive its own open store: it reads the directory before it opens the store, and later
/// calls [`advance`](Self::advance) to state up to which batch the log may be archived.
#[derive(Debug)]
pub struct ArchivedDirectory {
    files: StoreFiles,
    store_file: Vec<u8>,
    survey: Survey,
    random: u64,
    is_open: bool,
    /// The named snapshots that existed when the directory was read, with their names.
    names_at_open: BTreeMap<SnapshotId, String>,
    log: LogIndex,
    record: RefCell<ArchiveRecord>,
    /// For each frame part of a snapshot that follows a gap: the point before its first frame, and the number of bytes
    /// of this frame that belong to earlier parts.
    frame_parts: HashMap<Part, (LogPoint, u64)>,
    _lock: Box<dyn WriterLock>,
}

impl ArchivedDirectory {
    /// Reads a store directory. `lock` is the writer lock of the directory; the value holds it until it is dropped.
    ///
    /// # Errors
    /// Returns an error of kind `NotFound` if `path` contains no store, and of kind `InvalidData` if STORE, the log or
    /// ARCHIVE is damaged.
    pub fn open(path: &Path, lock: Box<dyn WriterLock>) -> io::Result<Self> {
        let files = StoreFiles::new(path);
        let (store_file, store) = read_store(&files)?;
        // Syncs the marks, because a mark proves batches only if it is durable itself (rule 7, [mark]).
        for name in files.list(Folder::Log)? {
            if let Some(file @ FileName::Segment(_)) = FileName::parse(Folder::Log, &name) {
                files.sync(file)?;
            }
        }
        for folder in [Folder::Log, Folder::Snapshots, Folder::Pages, Folder::Root] {
            files.sync_folder(folder)?;
        }
        let record = RefCell::new(ArchiveRecord::read(&files, store.store)?);
        let survey = Survey::read_as(&files, store).map_err(invalid)?;
        let log = LogIndex::read(&survey, &files)?;
        let random = random_number()?;
        let names_at_open =
            survey.readable().filter_map(|link| Some((link.snapshot, link.name.clone()?))).collect();
        Ok(Self {
            files,
            store_file,
            survey,
            random,
            is_open: false,
            names_at_open,
            log,
            record,
            frame_parts: HashMap::new(),
            _lock: lock,
        })
    }

    /// Returns an error if the directory lacks parts of image files after a restore on demand. An open of the store
    /// with the archive fetches these parts.
    ///
    /// # Errors
    /// Returns an error of kind `Unsupported`.
    pub(crate) fn check_fetched(&self) -> io::Result<()> {
        match ReadAt::len(&self.files, FileName::Unfetched)? {
            None => Ok(()),
            Some(_) => {
                let unfetched = Defect::Unfetched.at(FileName::Unfetched, 0);
                Err(io::Error::new(io::ErrorKind::Unsupported, unfetched.to_string()))
            }
        }
    }

    /// Marks the store as open: this process archives the store while the store is open.
    #[must_use]
    pub fn of_open_store(self) -> Self {
        Self { is_open: true, ..self }
    }

    /// Records `url` in ARCHIVE: from now on, the store can be opened only with the archive at this URL (rule 25).
    /// Returns after the record is durable.
    ///
    /// # Errors
    /// Returns an error if the record cannot be written.
    pub fn record_url(&self, url: &str) -> io::Result<()> {
        let mut record = self.record.borrow_mut();
        if record.url == url {
            return Ok(());
        }
        let new = ArchiveRecord { url: url.to_owned(), ..record.clone() };
        new.publish(&self.files)?;
        *record = new;
        Ok(())
    }

    /// Returns the newest batch that a durable mark proved when the directory was read.
    #[must_use]
    pub fn proven(&self) -> BatchPoint {
        self.batch_point(self.log.end.proven)
    }

    /// Returns the last batch before a point of the log. At the start of an incarnation, this is the last batch of the
    /// previous incarnation.
    fn batch_point(&self, mut point: LogPoint) -> BatchPoint {
        let line = self.survey.log.line();
        while let Some((_, opening)) = line.iter().find(|(segment, opening)| opening.start(*segment) == point)
        {
            point = opening.predecessor;
        }
        let LogPoint { incarnation, lsn, chain, .. } = point;
        if lsn == Lsn(0) {
            return BatchPoint::default();
        }
        let found = BatchPoint { incarnation, lsn, chain };
        // If the opening was recycled, `incarnation` may be a later incarnation without batches. The record contains
        // the original incarnation.
        self.record.borrow().batch_at(&found).unwrap_or(found)
    }

    /// Records in ARCHIVE that `batches` are in the history of the directory. Returns after the record is durable.
    fn record_batches(&self, batches: &[BatchPoint]) -> io::Result<()> {
        let batches: Vec<BatchPoint> = batches.iter().filter(|batch| batch.lsn.0 > 0).copied().collect();
        let mut record = self.record.borrow_mut();
        if record.batches == batches {
            return Ok(());
        }
        let new = ArchiveRecord { batches, ..record.clone() };
        new.publish(&self.files)?;
        *record = new;
        Ok(())
    }
}

impl LocalStore for ArchivedDirectory {
    fn store(&self) -> StoreId {
        self.survey.store.store
    }

    fn store_file(&self) -> Vec<u8> {
        self.store_file.clone()
    }

    fn random(&self) -> u64 {
        self.random
    }

    fn is_open(&self) -> bool {
        self.is_open
    }

    fn knows_name(&self, kept: &KeptSnapshot) -> bool {
        let record = self.record.borrow();
        record.named.contains(&kept.snapshot)
            || record.lost.contains(&kept.snapshot)
            || self.names_at_open.get(&kept.snapshot) == Some(&kept.name)
    }

    fn newest(&self) -> BatchPoint {
        self.batch_point(self.log.end.accepted)
    }

    fn openings(&self) -> Vec<SegmentHeader> {
        let segments = self.survey.log.segments();
        let header = |segment| segments.get(segment).and_then(|found| found.header.as_ref().ok()).copied();
        self.survey.log.line().iter().filter_map(|(segment, _)| header(segment)).collect()
    }

    /// Returns the chain hash of a recorded batch or of a batch that the next opening keeps. Returns `None` for any
    /// other batch.
    fn chain_of(&self, incarnation: Incarnation, lsn: Lsn) -> io::Result<Option<u32>> {
        let record = self.record.borrow();
        let recorded =
            record.batches.iter().find(|batch| (batch.incarnation, batch.lsn) == (incarnation, lsn));
        if let Some(batch) = recorded {
            return Ok(Some(batch.chain));
        }
        drop(record);
        let found = self.point_at(lsn)?.map(|point| self.batch_point(point));
        Ok(found.filter(|batch| batch.incarnation == incarnation).map(|batch| batch.chain))
    }

    fn fences(&self) -> Vec<FenceRecord> {
        self.record.borrow().fences.clone()
    }

    fn record_fences(&mut self, fences: &[FenceRecord]) -> io::Result<()> {
        let record = self.record.get_mut();
        let new = ArchiveRecord { fences: fences.to_vec(), ..record.clone() };
        new.publish(&self.files)?;
        *record = new;
        Ok(())
    }

    fn sealed_frames(&self, archived: &BatchPoint) -> io::Result<Option<SealedFrames>> {
        self.frames_after(archived)
    }

    fn read_part(&self, part: &Part) -> io::Result<Vec<u8>> {
        if part.role == Role::Frames { self.read_frames(part) } else { self.files.read_part(part) }
    }
}

/// Returns the contents of STORE: the bytes, and the decoded file.
fn read_store(files: &StoreFiles) -> io::Result<(Vec<u8>, StoreFile)> {
    let bytes = files.read_whole(FileName::Store, STORE_LEN_MAX)?;
    let bytes = bytes.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no store in {}", files.root().display()))
    })?;
    let store = StoreFile::decode(&bytes).map_err(|defect| invalid(defect.at(FileName::Store, 0)))?;
    Ok((bytes, store))
}

/// Returns a random number for the keys of data objects.
fn random_number() -> io::Result<u64> {
    let mut bytes = [0; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(len) => filled += len,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(u64::from_le_bytes(bytes) & (NUMBER_MAX - 1))
}
