//! The directory of a store on disk: what an archive copies, and a restore into a new directory.
//!
//! [`ArchivedDirectory`] reads a store that no other process has open, through [`remanent_format`] alone.
//! [`RestoreTarget`] writes a directory that the engine opens.
//!
//! Both need the writer's lock of the directory. The lock is the engine's, and the caller passes its guard as a
//! [`WriterLock`].
//!
//! | file | purpose |
//! |---|---|
//! | `restore.rs` | a directory that is restored: parts, frames |
//! | `opening.rs` | the end of a restore: its own opening, proofs, STORE |
//! | `live.rs` | the directory of a store that this process has open |
//! | `snapshot.rs` | a snapshot as parts |
//! | `named.rs` | named snapshots |
//! | `log.rs` | frames under a durable mark |
//! | `record.rs` | the file ARCHIVE |
//! | `files.rs` | reads and durable writes |

mod restore;
mod opening;
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
use remanent_format::{FileName, Folder, Incarnation, LogPoint, Lsn, ReadAt, SnapshotId, StoreId};

use self::files::{StoreFiles, invalid};
use self::log::LogIndex;
use self::record::ArchiveRecord;
use crate::local::{FenceRecord, LocalStore, SealedFrames};
use crate::object::{BatchPoint, KeptSnapshot, Part, Role};

pub use named::NameChanges;
pub use restore::RestoreTarget;

/// Maximum length of STORE in bytes.
const STORE_LEN_MAX: u64 = (StoreHeaderRaw::LEN + STORE_RECORD_LEN_MAX) as u64;

/// A guard of the writer's lock of a store directory. While the guard lives, no other process and no other handle opens
/// the store for writing.
///
/// The type that implements this trait must hold the lock of the engine, which combines several locks of the file LOCK. A
/// lock of another kind does not exclude the engine.
pub trait WriterLock: std::fmt::Debug + Send {}

/// The directory of a store that no other process has open for writing, as an archive sees it.
///
/// Only batches that a durable mark proves are archived. The files of the log are synced before they are read, so that the
/// marks are durable, too (rule 7). A failed sync that the process that wrote the log did not report is not detected.
///
/// The engine itself archives an open store: it reads the directory before it opens the store, and then states by
/// [`advance`](Self::advance) how far the log may be archived.
#[derive(Debug)]
pub struct ArchivedDirectory {
    files: StoreFiles,
    store_file: Vec<u8>,
    survey: Survey,
    random: u64,
    is_open: bool,
    /// The named snapshots when the directory was read.
    names_at_open: BTreeMap<SnapshotId, String>,
    log: LogIndex,
    record: RefCell<ArchiveRecord>,
    /// The frames of parts after a gap: the point before the first frame, and the offset of the part after it.
    frame_parts: HashMap<Part, (LogPoint, u64)>,
    _lock: Box<dyn WriterLock>,
}

impl ArchivedDirectory {
    /// Reads the directory of a store. `lock` is the writer's lock of the directory, which is held until the value is
    /// dropped.
    ///
    /// # Errors
    /// Returns an error with the kind `NotFound` if there is no store at `path`, and with the kind `InvalidData` if STORE,
    /// the log or ARCHIVE is damaged.
    pub fn open(path: &Path, lock: Box<dyn WriterLock>) -> io::Result<Self> {
        let files = StoreFiles::new(path);
        let (store_file, store) = read_store(&files)?;
        // A mark counts only if it is durable itself (rule 7, [mark]).
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

    /// States that this process has the store open, and archives it meanwhile.
    #[must_use]
    pub fn of_open_store(self) -> Self {
        Self { is_open: true, ..self }
    }

    /// Records durably that the store may only be opened with the archive at `url` (rule 25).
    ///
    /// # Errors
    /// Returns the error of the disk.
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

    /// Returns the newest batch that a durable mark proves.
    #[must_use]
    pub fn proven(&self) -> BatchPoint {
        self.batch_point(self.log.end.proven)
    }

    /// Returns the batch at a point of the log: at the start of an incarnation, the last batch of the one before.
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
        // The opening may be missing, so that `incarnation` only continued the batch.
        self.record.borrow().batch_at(&found).unwrap_or(found)
    }

    /// Records durably that `batches` are in the history of the directory and may be archived.
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
        self.record.borrow().named.contains(&kept.snapshot)
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

    /// Returns the chain hash of a batch that the next opening keeps.
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

/// Returns the bytes of STORE and their content.
fn read_store(files: &StoreFiles) -> io::Result<(Vec<u8>, StoreFile)> {
    let bytes = files.read_whole(FileName::Store, STORE_LEN_MAX)?;
    let bytes = bytes.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no store in {}", files.root().display()))
    })?;
    let store = StoreFile::decode(&bytes).map_err(|defect| invalid(defect.at(FileName::Store, 0)))?;
    Ok((bytes, store))
}

/// Draws a random number that a name of an object can contain.
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
