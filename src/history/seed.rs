//! Creates a store from a seed: a new store that begins at a state assembled elsewhere.
//!
//! The new store keeps the Lsns, epochs and page ids of the state. Its log begins after the state's batch, as if the
//! older log had been recycled.
//!
//! 1. Claim the directory: write and sync STORE under its temporary name. Until step 5, any process that opens the
//!    directory finds an unfinished store, and may restart the creation.
//! 2. Link shared image files, and write the images of the other pages. Sync the files, and verify them from the
//!    medium.
//! 3. Begin the first incarnation.
//! 4. Publish the manifest, whose `redo` is the beginning of that incarnation.
//! 5. Rename STORE to its final name. **This rename is the commit point.**
//!
//! The first open finds a snapshot that no seal records as verified, and publishes it again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::image::{ImagePurpose, ImageRef};
use remanent_format::limits::SEGMENT_LEN_MIN;
use remanent_format::log::LogEnd;
use remanent_format::manifest::{Manifest, ManifestKind};
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{FileName, Folder, LogPoint, PageId, PageInfo, PageTable, SnapshotId, StoreId};

use crate::base::allocation::{collected, map_of};
use crate::base::wall_clock::unix_ms;
use crate::catalog::entry;
use crate::catalog::publish::{publish_manifest, without_spare};
use crate::disk::Disk;
use crate::disk::image_spares::ImageSpares;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{prove, wanted};
use crate::images::{ImageWriter, PageRead};
use crate::log::{SegmentPool, SegmentRules};
use crate::options::{Create, ImageOptions, LogIo};
use crate::recovery::create::{CLAIM, check_directory, claim, start_over};
use crate::recovery::opening::{Predecessor, begin, random};

/// The state with which a new store begins.
#[derive(Clone, Debug)]
pub struct InitialState {
    /// The features that the files of the original store use.
    pub features: Features,
    /// The record of the original store. The new store gets its own creation time and ancestors.
    pub record: StoreRecord,
    /// The pages and the root of the state.
    pub table: PageTable,
    /// The end of the state's last batch in the original log.
    pub point: LogPoint,
}

/// The image files of another store that the new store shares.
#[derive(Default)]
pub(crate) struct SharedImages {
    /// The disk that contains the shared files, or `None` if no file is shared.
    pub disk: Option<Arc<dyn Disk>>,
    /// The numbers of the shared files, each with the store that wrote the file.
    pub writers: BTreeMap<u64, StoreId>,
    /// The images that contain exactly the pages of the state, including images in files that are not shared.
    pub images: BTreeMap<PageId, ImageRef>,
}

/// Returns an error if the directory contains a store or other files, so that no store can be created in it.
///
/// # Errors
/// [`Error::NoStore`] with the name of the first such file.
pub(crate) fn check_directory_is_free(target: &dyn Disk) -> Result<()> {
    check_directory(target, Create::IfEmpty)?;
    if target.list(Folder::Root)?.contains(&FileName::Store.name()) {
        return Err(Error::NoStore { path: target.label(), found: Some(FileName::Store.name()) });
    }
    Ok(())
}

/// Creates a store that begins at a state and returns the id of the new store. `read` provides the bytes of each
/// non-empty page without a shared image. If `read` fails, the creation fails and leaves no store.
pub(crate) fn create<E: From<Error>>(
    origin: &InitialState,
    shared: &SharedImages,
    target: &Arc<dyn Disk>,
    read: PageRead<'_, E>,
) -> Result<StoreId, E> {
    check_directory_is_free(&**target)?;
    target.make_folder(Folder::Root).map_err(no_space)?;
    let _lock = target.lock().map_err(no_space)?;
    start_over(target).map_err(no_space)?;
    // Step 1.
    let ancestors: BTreeSet<[u8; 16]> = shared.writers.values().map(|store| store.0).collect();
    let store = StoreFile {
        store: StoreId(random()?),
        features: origin.features.with_written(),
        record: StoreRecord {
            created_unix_ms: unix_ms(),
            ancestors: ancestors.into_iter().map(StoreId).collect(),
            ..origin.record.clone()
        },
    };
    claim(target, &store).map_err(no_space)?;
    // Step 2.
    let mut linked = BTreeSet::new();
    if let Some(disk) = &shared.disk {
        for number in shared.writers.keys() {
            if target.link(&**disk, FileName::Pages(*number)).map_err(no_space)? {
                linked.insert(*number);
            }
        }
    }
    let is_linked = |image: &ImageRef| image.files().all(|(file, _)| linked.contains(&file));
    let images = shared.images.iter().filter(|(_, image)| is_linked(image));
    let images: BTreeMap<PageId, ImageRef> = map_of(images.map(|(page, image)| (*page, *image)));
    let number = linked.last().map_or(1, |last| last + 1);
    let images = write_images(&origin.table, target, store.store, images, number, read)?;
    // Step 3.
    let point = origin.point;
    let end =
        LogEnd { accepted: point, proven: point, torn: None, verified: Vec::new(), harmless: Vec::new() };
    let (segment, newest) = (point.segment + 1, point.incarnation);
    let before = Predecessor { segment, newest, end: Some(end), tail: Vec::new() };
    let rules = SegmentRules { len: SEGMENT_LEN_MIN, reserve: 0, spare_bytes: 0 };
    let image_spares = Arc::new(ImageSpares::none(target.clone(), store.store));
    let pool = SegmentPool::new(target.clone(), store.store, rules, LogIo::Buffered, image_spares)?;
    let pool = Arc::new(pool);
    let (log, _) = begin(&pool, store.store, &before, Vec::new())?;
    // Step 4.
    let table = &origin.table;
    let entries = collected(table.pages().map(|info| entry(&info, images.get(&info.page).copied())))?;
    let manifest = Manifest {
        kind: ManifestKind::Base,
        store: store.store,
        snapshot: SnapshotId(1),
        name: None,
        created_unix_ms: unix_ms(),
        redo: log.point,
        end: table.lsn(),
        next_page: table.next_page(),
        epoch_high: table.epoch_high(),
        next_file: number + 1,
        // No image file belongs to a batch of the new store.
        ahead_from: number + 1,
        entries,
        tombstones: Vec::new(),
        root: table.root().clone(),
    };
    assert!(manifest.redo.lsn == manifest.end); // The state is exact, so the manifest's `redo` equals its end.
    publish_manifest(target, &manifest, usize::MAX, &without_spare)?;
    // Step 5.
    target.rename(CLAIM, FileName::Store).map_err(no_space)?;
    target.sync_folder(Folder::Root)?;
    tracing::info!(store = %store.store, lsn = %table.lsn(), linked = linked.len(), "founded");
    Ok(store.store)
}

/// Converts an error about missing disk space to [`Error::DiskFull`]. The files written so far do not form a store.
fn no_space(error: Error) -> Error {
    match error {
        Error::Io { .. } if error.is_no_space() => Error::disk_full(FileName::Store, SEGMENT_LEN_MIN),
        error => error,
    }
}

/// Creates a store like [`create`], from a state without shared files.
pub(crate) fn create_alone<E: From<Error>>(
    origin: &InitialState,
    target: &Arc<dyn Disk>,
    read: PageRead<'_, E>,
) -> Result<StoreId, E> {
    create(origin, &SharedImages::default(), target, read)
}

/// Performs the second part of step 2: writes images of the pages without a shared image.
fn write_images<E: From<Error>>(
    table: &PageTable,
    target: &Arc<dyn Disk>,
    store: StoreId,
    mut images: BTreeMap<PageId, ImageRef>,
    number: u64,
    read: PageRead<'_, E>,
) -> Result<BTreeMap<PageId, ImageRef>, E> {
    prove(&DiskSource::bypassing_cache(target.clone()), wanted(table.pages(), &images))?;
    let is_missing = |info: &PageInfo| info.len > 0 && !images.contains_key(&info.page);
    let rest = collected(table.pages().filter(is_missing))?;
    if rest.is_empty() {
        target.sync_folder(Folder::Pages)?;
        return Ok(images);
    }
    let (purpose, options) = (ImagePurpose::Snapshot, ImageOptions::default());
    let writer = ImageWriter::create(target.clone(), store, number, purpose, options)?;
    let written = writer.write_pages(&rest, read)?;
    writer.sync()?;
    writer.verify()?;
    images.extend(rest.iter().map(|info| info.page).zip(written));
    Ok(images)
}
