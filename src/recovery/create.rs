//! Creating a store: which directories may become a store, the remains of an interrupted creation, and the
//! new store itself.
//!
//! STORE is the last file that a creation publishes. A directory without it is empty, foreign, or an
//! unfinished creation, which the next one restarts. If STORE came first, a crash would leave a store without
//! a log, which looks like a store that lost its log.

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

/// The temporary name of STORE, which is also the one that [`publish`](crate::catalog::publish::publish)
/// uses.
///
/// A fork creates this file first, whole and synced: its image files exist long before STORE has its name,
/// and without this claim they would look like a store that lost its STORE.
pub(crate) const CLAIM: FileName = FileName::Temporary(Folder::Root, 0);

/// Refuses a directory that is not a store and must not become one. Touches nothing: this runs before
/// locking, because the lock file would already be a trace in a foreign directory.
pub(crate) fn check_directory(disk: &dyn Disk, create: Create) -> Result<()> {
    let names = disk.list(Folder::Root)?;
    let is = |name: &String, file| FileName::parse(Folder::Root, name) == Some(file);
    // The directory is a store: recovery checks the rest.
    if names.iter().any(|name| is(name, FileName::Store)) {
        return Ok(());
    }
    // `lost+found` belongs to a file system whose root is this directory. The store's own names without STORE
    // come from an interrupted creation. Any other name means that the path is wrong and must not be written
    // to.
    let ours = |name: &String| {
        FileName::parse(Folder::Root, name).is_some()
            || Folder::INNER.iter().any(|folder| folder.name() == name)
            || name == "lost+found"
    };
    if let Some(found) = names.iter().find(|name| !ours(name)) {
        return Err(Error::ForeignDirectory { path: disk.label(), found: found.clone() });
    }
    match create {
        Create::IfEmpty => Ok(()),
        Create::Never => Err(Error::NoStore { path: disk.label() }),
    }
}

impl Recovery<'_> {
    /// Creates a new store: the first incarnation, then STORE. Without STORE the directory is an unfinished
    /// creation: an earlier crash leaves segments without batches, which the next creation removes.
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
        // A random id of the store's own: files of another store that end up here are recognized by it.
        let pool = self.pool(store.store)?;
        let (log, position) = begin(&pool, store.store, &Predecessor::default(), Vec::new())?;
        let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
        // The commit point of the creation. Segments and their names are durable by now.
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

/// Removes the remains of a creation or fork that a crash interrupted, and creates the folders.
///
/// 1. Check all files before removing any. Otherwise the first segments could be gone when a later one turns
///    out to contain batches.
/// 2. Create the folders, durably.
/// 3. Remove the files. A crash here leaves fewer of them, and the next creation continues.
pub(crate) fn start_over(disk: &Arc<dyn Disk>) -> Result<()> {
    // 1.
    let left = unfinished_files(disk)?;
    // 2.
    for folder in Folder::INNER {
        disk.make_folder(folder)?;
    }
    disk.sync_folder(Folder::Root)?;
    // 3.
    for file in left {
        disk.remove(file)?;
    }
    // Synced, so that after a power cut no removed file reappears in the new store.
    Folder::INNER.into_iter().try_for_each(|folder| disk.sync_folder(folder))
}

/// Lists the files that an unfinished creation left in a directory without STORE.
///
/// # Errors
/// `Damaged` if the directory contains more than that, as of a store that lost its STORE.
pub(crate) fn unfinished_files(disk: &Arc<dyn Disk>) -> Result<Vec<FileName>> {
    let source = DiskSource::new(disk.clone());
    let claimed = is_claimed(disk)?;
    let mut left = Vec::new();
    for folder in Folder::INNER {
        for file in disk.list(folder)?.iter().filter_map(|name| FileName::parse(folder, name)) {
            // With a claim, images and manifests are those of an interrupted fork.
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

/// Whether a segment contains a batch, which no unfinished creation does. Checks every possible frame
/// position, not only the starts of groups: a batch may share the group of a seal.
fn holds_batch(source: &DiskSource, file: FileName) -> Result<bool> {
    /// The number of bytes to check at a time: a segment may be gigabytes long.
    const WINDOW: usize = 1 << 20;
    // A segment that cannot be read may contain a batch: the creation is refused.
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
        // A header cut by the end of the window is the first one of the next window.
        at += (WINDOW - FrameHeaderRaw::LEN) as u64;
    }
    Ok(false)
}

/// Whether the directory was claimed for a fork, or for a store from a seed, that was not finished.
fn is_claimed(disk: &Arc<dyn Disk>) -> Result<bool> {
    if !disk.list(Folder::Root)?.contains(&CLAIM.name()) {
        return Ok(false);
    }
    let file = disk.open(CLAIM, false)?;
    let mut bytes = vec![0; usize::try_from(file.len()?).unwrap_or(0)];
    file.read_at(0, &mut bytes)?;
    Ok(StoreFile::decode(&bytes).is_ok())
}

/// Claims a directory for a store that is being created elsewhere, by writing and syncing STORE under its
/// temporary name. Its content distinguishes a claim from a temporary file left by a crash.
pub(crate) fn claim(target: &Arc<dyn Disk>, store: &StoreFile) -> Result<()> {
    let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
    let file = target.create(CLAIM)?;
    file.write_at(0, &bytes)?;
    // Durable before any other file has its name: the claim distinguishes those files from a store that lost
    // STORE.
    file.sync()?;
    target.sync_folder(Folder::Root)
}
