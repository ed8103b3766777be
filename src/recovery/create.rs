//! Creates a store. This module decides which directories may become a store, and removes the files of an interrupted
//! creation.
//!
//! A creation publishes STORE last. A directory without STORE is empty, foreign, or an unfinished creation, which the
//! next creation restarts. If STORE were published first, a crash would leave a store without a log, which looks like a
//! store that lost its log.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use remanent_format::frame::{FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::limits::FRAME_ALIGN;
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::state::id_map::IdMap;
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{Defect, FileName, Folder, PageTable, ReadAt, StoreId};

use super::opening::{Predecessor, begin, random};
use super::{RecoveredStore, Recovery, ReplayBacklog};
use crate::applier::AppliedState;
use crate::base::wall_clock::unix_ms;
use crate::catalog::Catalog;
use crate::catalog::publish::{publish, without_spare};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;
use crate::options::Create;

/// The temporary name of STORE, which [`publish`](crate::catalog::publish::publish) also uses.
///
/// A fork creates this file first, complete and synced, to mark the directory as an unfinished fork. The image files of
/// a fork exist long before STORE has its final name. Without the mark, they would look like a store that lost its
/// STORE.
pub(crate) const CLAIM: FileName = FileName::Temporary(Folder::Root, 0);

/// Returns an error for a directory that is not a store and must not become a store. Changes nothing. Callers check the
/// directory before they lock it, because a lock file in a foreign directory would already be a change.
pub(crate) fn check_directory(disk: &dyn Disk, create: Create) -> Result<()> {
    let names = disk.list(Folder::Root)?;
    let is = |name: &String, file| FileName::parse(Folder::Root, name) == Some(file);
    // The directory is a store, and recovery checks its other files.
    if names.iter().any(|name| is(name, FileName::Store)) {
        return Ok(());
    }
    // `lost+found` exists in the root of a file system. The store's own file names without STORE come from an
    // interrupted creation. Any other name indicates a wrong path, which is left unchanged.
    let ours = |name: &String| {
        FileName::parse(Folder::Root, name).is_some()
            || Folder::INNER.iter().any(|folder| folder.name() == name)
            || name == "lost+found"
    };
    if let Some(found) = names.iter().find(|name| !ours(name)) {
        return Err(Error::NoStore { path: disk.label(), found: Some(found.clone()) });
    }
    match create {
        Create::IfEmpty => Ok(()),
        Create::Never => Err(Error::NoStore { path: disk.label(), found: None }),
    }
}

impl Recovery<'_> {
    /// Creates a new store: the first incarnation, then STORE. If a crash interrupts the creation, the directory
    /// contains segments without batches but no STORE, and the next creation removes the segments.
    pub(super) fn create(&self) -> Result<RecoveredStore> {
        start_over(&self.disk)?;
        let store = StoreFile {
            store: StoreId(random()?),
            features: Features::WRITTEN,
            record: StoreRecord {
                layout_fingerprint: self.options.layout_fingerprint,
                identity: self.options.identity.clone().unwrap_or_default(),
                created_unix_ms: unix_ms(),
                ancestors: Vec::new(),
            },
        };
        // The store's id is random, so that a file of another store that is copied here is recognized.
        let pool = self.pool(store.store)?;
        let (log, position) = begin(&pool, store.store, &Predecessor::default(), Vec::new())?;
        let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
        // This is the commit point of the creation. Segments and their names are durable by now.
        publish(&self.disk, FileName::Store, 0, &[&bytes], &without_spare)?;
        Ok(RecoveredStore {
            store,
            applied: AppliedState {
                table: PageTable::new(),
                memory: IdMap::default(),
                on_disk: self.disk_pages.table(IdMap::default()),
                unloaded: Arc::default(),
                point: log.point,
                deleted: None,
                cut: None,
                gathers: HashMap::new(),
            },
            submitted: PageTable::new(),
            changed: Vec::new(),
            log,
            catalog: Catalog {
                snapshots: BTreeMap::new(),
                tables: BTreeMap::new(),
                floor: None,
                unread: None,
                next_snapshot: 1,
                files: Arc::new(ImageFiles::new(
                    self.disk.clone(),
                    pool.image_spares().clone(),
                    self.disk_pages.clone(),
                    1,
                    [],
                )),
                known: Arc::default(),
                file_lens: BTreeMap::new(),
            },
            first_batch: None,
            pool,
            behind: ReplayBacklog::default(),
            recovered: self.report(position, true),
        })
    }
}

/// Removes the files of a creation or fork that a crash interrupted, and creates the folders.
///
/// 1. Check all files before any is removed. Otherwise the first segments could be removed when a later segment turns
///    out to contain batches.
/// 2. Create the folders durably.
/// 3. Remove the files. A crash during this step leaves fewer files, and the next creation continues.
pub(crate) fn start_over(disk: &Arc<dyn Disk>) -> Result<()> {
    // Step 1.
    let left = unfinished_files(disk)?;
    // Step 2.
    for folder in Folder::INNER {
        disk.make_folder(folder)?;
    }
    disk.sync_folder(Folder::Root)?;
    // Step 3.
    for file in left {
        disk.remove(file)?;
    }
    // The folders are synced, so that no removed file reappears in the new store after a power cut.
    Folder::INNER.into_iter().try_for_each(|folder| disk.sync_folder(folder))
}

/// Returns the files that an unfinished creation left in a directory without STORE.
///
/// # Errors
/// [`Error::Damaged`] if the directory contains other files, like a store that lost its STORE.
pub(crate) fn unfinished_files(disk: &Arc<dyn Disk>) -> Result<Vec<FileName>> {
    let source = DiskSource::new(disk.clone());
    let claimed = is_claimed(disk)?;
    // A restore from an archive creates ARCHIVE before any other file, and STORE after all others.
    if disk.list(Folder::Root)?.contains(&FileName::Archive.name()) {
        return Err(Defect::Missing.at(FileName::Store, 0).into());
    }
    let mut left = Vec::new();
    for folder in Folder::INNER {
        for file in disk.list(folder)?.iter().filter_map(|name| FileName::parse(folder, name)) {
            // Images and manifests belong to an interrupted fork if the directory is claimed, and otherwise to a store
            // that lost STORE.
            let is_more = match file {
                FileName::Pages(_) | FileName::Table(_) | FileName::Manifest(_) => !claimed,
                FileName::Segment(_) => holds_batch(&source, file)?,
                _ => false,
            };
            if is_more {
                return Err(Defect::Missing.at(FileName::Store, 0).into());
            }
            left.push(file);
        }
    }
    Ok(left)
}

/// Returns whether a segment contains a batch, which is never the case in an unfinished creation. Checks every possible
/// frame position, not only the starts of groups, because a batch may share the group of a seal.
fn holds_batch(source: &DiskSource, file: FileName) -> Result<bool> {
    /// The number of bytes to read at a time, because a segment may be gigabytes long.
    const WINDOW: usize = 1 << 20;
    // A segment that cannot be read may contain batches, so it is reported as an error.
    let unreadable = |error: std::io::Error| Error::from(Defect::of_read(&error).at(file, 0));
    let is_batch = |bytes: &[u8]| {
        UncheckedFrame::decode(bytes).is_ok_and(|frame| frame.unproven().kind == FrameKind::Batch)
    };
    let len = source.len(file).map_err(unreadable)?.unwrap_or(0);
    let mut bytes = Vec::new();
    let mut at = SEGMENT_HEADER_BLOCK;
    while at < len {
        bytes.resize(WINDOW.min((len - at) as usize), 0);
        source.read_at(file, at, &mut bytes).map_err(unreadable)?;
        if bytes.windows(FrameHeaderRaw::LEN).step_by(FRAME_ALIGN as usize).any(is_batch) {
            return Ok(true);
        }
        // A header that the end of the window cuts off is at the start of the next window.
        at += (WINDOW - FrameHeaderRaw::LEN) as u64;
    }
    Ok(false)
}

/// Returns whether the directory contains an unfinished fork, or an unfinished store created from a seed.
fn is_claimed(disk: &Arc<dyn Disk>) -> Result<bool> {
    if !disk.list(Folder::Root)?.contains(&CLAIM.name()) {
        return Ok(false);
    }
    let file = disk.open(CLAIM, false)?;
    let mut bytes = vec![0; usize::try_from(file.len()?).unwrap_or(0)];
    file.read_at(0, &mut bytes)?;
    Ok(StoreFile::decode(&bytes).is_ok())
}

/// Claims a directory for a store that is being created in it, by writing and syncing STORE under its temporary name.
/// The contents of this file distinguish a claim from a temporary file that a crash left.
pub(crate) fn claim(target: &Arc<dyn Disk>, store: &StoreFile) -> Result<()> {
    let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
    let file = target.create(CLAIM)?;
    file.write_at(0, &bytes)?;
    // The claim is synced before any other file is created. Without it, such files would look like a store that lost
    // STORE.
    file.sync()?;
    target.sync_folder(Folder::Root)
}
