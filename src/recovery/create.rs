//! A store's birth: which directory may become a store, what a creation cut short left there, and the new
//! store itself.
//!
//! STORE is the last file that a creation publishes. A directory without it is empty, foreign, or an
//! unfinished creation, which the next one starts over. Were STORE first, a crash would leave a store
//! without a log, which looks like a store that lost its log.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use remanent_format::frame::{FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::limits::FRAME_ALIGN;
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::state::by_id::ById;
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{Defect, FileName, Folder, PageTable, ReadAt, StoreId};

use super::opening::{Predecessor, begin, random};
use super::{RecoveredStore, Recovery, ReplayBacklog};
use crate::applier::AppliedState;
use crate::base::wall_clock::unix_ms;
use crate::catalog::Catalog;
use crate::catalog::publish::{of_no_spare, publish};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;
use crate::options::Create;

/// The temporary name of STORE; [`publish`](crate::catalog::publish::publish) gives it the same one.
///
/// A fork makes it first, whole and synced: its image files are there long before STORE has its name, and
/// without the claim they would look like a store that lost its STORE.
pub(crate) const CLAIM: FileName = FileName::Temporary(Folder::Root, 0);

/// Refuses a directory that must not become, or is not, a store. Touches nothing: this comes before the
/// lock, whose file would already be a trace in a foreign directory.
pub(crate) fn check_directory(disk: &dyn Disk, create: Create) -> Result<()> {
    let names = disk.list(Folder::Root)?;
    let is = |name: &String, file| FileName::parse(Folder::Root, name) == Some(file);
    // It is a store: recovery judges the rest.
    if names.iter().any(|name| is(name, FileName::Store)) {
        return Ok(());
    }
    // `lost+found` belongs to a file system whose root is the directory. The store's own names may be
    // there without STORE: a creation that a crash cut short. Any other name says that the path is wrong,
    // and that the directory is not to be filled.
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
    /// Creates a new store: the first incarnation, then STORE. Without STORE the directory is an
    /// unfinished creation: a crash before leaves segments without batches, which the next creation
    /// removes.
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
        // An identity of its own, drawn at random: files of another store that end up here are told by it.
        let pool = self.pool(store.store)?;
        let (log, position) = begin(&pool, store.store, &Predecessor::default(), Vec::new())?;
        let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
        // The commit point of the creation. Segments and their names are durable by now.
        publish(&self.disk, FileName::Store, 0, &[&bytes], &of_no_spare)?;
        Ok(RecoveredStore {
            store,
            applied: AppliedState {
                table: PageTable::new(),
                memory: ById::default(),
                on_disk: self.disk_pages.table(ById::default()),
                unloaded: Arc::default(),
                point: log.point,
                deleted: None,
                cut: None,
                catches: HashMap::new(),
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

/// Removes the remains of a creation, or of a fork, that a crash cut short, and makes the folders.
///
/// 1. Judge all files before any is removed. Judged one by one, the first segments could be gone when a later
///    one shows that it holds batches.
/// 2. Make the folders, durably.
/// 3. Remove the files. A crash here leaves fewer of them, and the next creation goes on.
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
    // Synced, so that no removed file comes back, after a power cut, in the new store.
    Folder::INNER.into_iter().try_for_each(|folder| disk.sync_folder(folder))
}

/// The files of a directory without STORE, which an unfinished creation has left.
///
/// # Errors
/// `Damaged` if they are more than that: of a store that lost its STORE.
pub(crate) fn unfinished_files(disk: &Arc<dyn Disk>) -> Result<Vec<FileName>> {
    let source = DiskSource::new(disk.clone());
    let claimed = is_claimed(disk)?;
    let mut left = Vec::new();
    for folder in Folder::INNER {
        for file in disk.list(folder)?.iter().filter_map(|name| FileName::parse(folder, name)) {
            // With a claim, images and manifests are those of a fork that was cut short.
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

/// Whether a segment of an unfinished creation holds a batch: then it is more than that. Every place at
/// which a frame may lie is looked at, not only those of groups: a batch may share the group of a seal.
fn holds_batch(source: &DiskSource, file: FileName) -> Result<bool> {
    /// Bytes that are looked at together: a segment may be gigabytes long.
    const WINDOW: usize = 1 << 20;
    // A segment that cannot be read may hold a batch: the creation is refused.
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
        // A header that the end of the window cuts is the first of the next window.
        at += (WINDOW - FrameHeaderRaw::LEN) as u64;
    }
    Ok(false)
}

/// Whether the directory was claimed for a fork, or for another store from a seed, that did not come to
/// its end.
fn is_claimed(disk: &Arc<dyn Disk>) -> Result<bool> {
    if !disk.list(Folder::Root)?.contains(&CLAIM.name()) {
        return Ok(false);
    }
    let file = disk.open(CLAIM, false)?;
    let mut bytes = vec![0; usize::try_from(file.len()?).unwrap_or(0)];
    file.read_at(0, &mut bytes)?;
    Ok(StoreFile::decode(&bytes).is_ok())
}

/// Claims a directory for a store that is being made elsewhere: STORE, whole and synced, under its
/// temporary name. Its content tells a claim from a temporary file that a crash cut short.
pub(crate) fn claim(target: &Arc<dyn Disk>, store: &StoreFile) -> Result<()> {
    let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
    let file = target.create(CLAIM)?;
    file.write_at(0, &bytes)?;
    // Durable before the first other file has its name: the claim is what tells those from a store that
    // lost STORE.
    file.sync()?;
    target.sync_folder(Folder::Root)
}
