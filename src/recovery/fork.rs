//! Floor 6. Forks: a new store that begins at a state of another one.
//!
//! The pages that some image holds exactly are not copied: the image file gets a second name in the new
//! directory. Image files are written once and then only unlinked, so neither store can change what the other
//! one reads. They go on carrying the id of the store that wrote them, and STORE lists these ids.
//!
//! The new store keeps Lsns, epochs and page ids; its log begins behind the state's batch, as if older log
//! had been recycled.
//!
//! 1. Choose the image files to share.
//! 2. Claim the directory: STORE, whole and synced, under its temporary name. From here until 6 whoever comes
//!    finds an unfinished fork, and may start over.
//! 3. Link image files; write the other pages' images. Synced, and proven past the cache.
//! 4. Begin the first incarnation.
//! 5. Publish the manifest, whose `redo` is the beginning of that incarnation.
//! 6. Give STORE its name. **This rename is the commit point.**
//!
//! The first open finds a snapshot that no seal records as verified, and publishes it anew.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw, ImagePurpose, ImageRef};
use remanent_format::limits::{ANCESTORS_MAX, SEGMENT_LEN_MIN};
use remanent_format::log::LogEnd;
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind};
use remanent_format::store::{StoreFile, StoreRecord};
use remanent_format::{FileName, Folder, PageId, PageInfo, ReadAt, SnapshotId, StoreId};

use super::opening::{Predecessor, begin, random};
use super::{check_directory, start_over};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::images::ImageWriter;
use crate::keeping::{entry, unix_ms};
use crate::log::SegmentPool;
use crate::options::{Compression, Create};
use crate::past::Past;
use crate::publish::{check_published, publish};
use crate::runs::{prove, wanted};
use crate::source::DiskSource;

/// The temporary name of STORE; [`publish`] gives it the same one.
const CLAIM: FileName = FileName::Temporary(Folder::Root, 0);

/// Makes a store of a state; returns its id.
pub(crate) fn fork(past: &Past, target: &Arc<dyn Disk>) -> Result<StoreId> {
    check_directory(&**target, Create::IfEmpty)?;
    if target.list(Folder::Root)?.contains(&FileName::Store.name()) {
        return Err(Error::ForeignDirectory { path: target.label(), found: FileName::Store.name() });
    }
    target.make_folder(Folder::Root)?;
    let _lock = target.lock()?;
    start_over(target)?;
    // 1.
    let exact: BTreeMap<PageId, ImageRef> = past
        .table()
        .pages()
        .filter(|info| info.len > 0)
        .filter_map(|info| Some((info.page, past.exact_image(info.page)?)))
        .collect();
    let writers = writers(past, exact.values().map(|image| image.file).collect());
    // 2.
    let ancestors: BTreeSet<[u8; 16]> = writers.values().map(|store| store.0).collect();
    let parent = past.store();
    let store = StoreFile {
        store: StoreId(random()?),
        features: parent.features,
        record: StoreRecord {
            created_unix_ms: unix_ms(),
            ancestors: ancestors.into_iter().map(StoreId).collect(),
            ..parent.record.clone()
        },
    };
    claim(target, &store)?;
    // 3.
    let mut shared = BTreeSet::new();
    for number in writers.keys() {
        if target.link(&**past.disk(), FileName::Pages(*number))? {
            shared.insert(*number);
        }
    }
    let images: HashMap<PageId, ImageRef> =
        exact.into_iter().filter(|(_, image)| shared.contains(&image.file)).collect();
    let number = shared.last().map_or(1, |last| last + 1);
    let images = write_images(past, target, store.store, images, number)?;
    // 4.
    let point = past.point();
    let end =
        LogEnd { accepted: point, proven: point, torn: None, verified: Vec::new(), harmless: Vec::new() };
    let before = Predecessor { segment: point.segment + 1, end: Some(end), tail: Vec::new() };
    let pool = Arc::new(SegmentPool::new(target.clone(), store.store, SEGMENT_LEN_MIN, 0)?);
    let (log, _) = begin(&pool, store.store, &before, Vec::new())?;
    // 5.
    let entries: Vec<ManifestEntry> =
        past.table().pages().map(|info| entry(info, images.get(&info.page).copied())).collect();
    let manifest = Manifest {
        kind: ManifestKind::Base,
        store: store.store,
        snapshot: SnapshotId(1),
        name: None,
        created_unix_ms: unix_ms(),
        redo: log.point,
        end: past.lsn(),
        next_page: past.table().next_page(),
        epoch_high: past.table().epoch_high(),
        next_file: number + 1,
        entries,
        tombstones: Vec::new(),
        root: past.table().root().clone(),
    };
    assert!(manifest.redo.lsn == manifest.end); // The state is exact.
    let file = FileName::Manifest(manifest.snapshot.0);
    let bytes = manifest.encode().map_err(|defect| Error::from(defect.at(file, 0)))?;
    publish(target, file, manifest.snapshot.0, &bytes)?;
    check_published(target, file, &bytes)?;
    // 6.
    target.rename(CLAIM, FileName::Store)?;
    target.sync_folder(Folder::Root)?;
    tracing::info!(store = %store.store, parent = %parent.store, lsn = %past.lsn(), shared = shared.len(), "forked");
    Ok(store.store)
}

/// Whether the directory was claimed by a fork that did not come to its end.
pub(super) fn is_claimed(disk: &Arc<dyn Disk>) -> Result<bool> {
    if !disk.list(Folder::Root)?.contains(&CLAIM.name()) {
        return Ok(false);
    }
    let file = disk.open(CLAIM, false)?;
    let mut bytes = vec![0; usize::try_from(file.len()?).unwrap_or(0)];
    file.read_at(0, &mut bytes)?;
    Ok(StoreFile::decode(&bytes).is_ok())
}

fn claim(target: &Arc<dyn Disk>, store: &StoreFile) -> Result<()> {
    let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
    let file = target.create(CLAIM)?;
    file.write_at(0, &bytes)?;
    file.sync()?;
    target.sync_folder(Folder::Root)
}

/// Which stores wrote these image files. A file whose header cannot be read is not shared, nor is one more
/// ancestor than STORE has room for: what they hold is written anew.
fn writers(past: &Past, files: BTreeSet<u64>) -> BTreeMap<u64, StoreId> {
    let source = DiskSource::new(past.disk().clone());
    let mut ancestors = BTreeSet::new();
    let writer = |number: &u64| {
        let mut bytes = [0; ImageFileHeaderRaw::LEN];
        source.read_at(FileName::Pages(*number), 0, &mut bytes).ok()?;
        ImageFileHeader::decode(&bytes).ok().filter(|header| header.file == *number)
    };
    let mut found = BTreeMap::new();
    for number in files {
        let Some(header) = writer(&number) else { continue };
        if ancestors.contains(&header.store.0) || ancestors.len() < ANCESTORS_MAX {
            ancestors.insert(header.store.0);
            found.insert(number, header.store);
        }
    }
    found
}

/// Step 3: images of the pages that share none.
fn write_images(
    past: &Past,
    target: &Arc<dyn Disk>,
    store: StoreId,
    mut images: HashMap<PageId, ImageRef>,
    number: u64,
) -> Result<HashMap<PageId, ImageRef>> {
    prove(&DiskSource::past_cache(target.clone()), wanted(past.table().pages(), &images))?;
    let is_missing = |info: &&PageInfo| info.len > 0 && !images.contains_key(&info.page);
    let rest: Vec<PageInfo> = past.table().pages().filter(is_missing).cloned().collect();
    if rest.is_empty() {
        target.sync_folder(Folder::Pages)?;
        return Ok(images);
    }
    let (purpose, compression) = (ImagePurpose::Snapshot, Compression::default());
    let mut writer = ImageWriter::create(target.clone(), store, number, purpose, compression)?;
    let written = writer.write_pages(&rest, |index| Ok(past.load(rest[index].page)?.into()))?;
    writer.sync()?;
    writer.verify()?;
    images.extend(rest.iter().map(|info| info.page).zip(written));
    Ok(images)
}
