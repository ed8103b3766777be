//! Forks: new stores that begin at a state of another store.
//!
//! If an image contains exactly the bytes of a page, the page is not copied. Instead, the image file gets a second name
//! in the new directory. A store never overwrites an image file with two names (I13), so neither store can change bytes
//! that the other store reads. These files keep the id of the store that wrote them, and STORE lists these ids.
//! `seed.rs` describes the steps in the new directory and the results of a crash during each step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw, ImageRef};
use remanent_format::limits::ANCESTORS_MAX;
use remanent_format::{FileName, ReadAt, StoreId};

use super::seed::{InitialState, SharedImages, create};
use crate::base::allocation::{map_of, set_of};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::history::state::PastState;

/// Creates a store from a state and returns the id of the new store.
pub(crate) fn fork(past: &PastState, target: &Arc<dyn Disk>) -> Result<StoreId> {
    let pages = past.table().pages().filter(|info| info.len > 0);
    let images = map_of(pages.filter_map(|info| Some((info.page, past.exact_image(info.page)?))));
    let files = images.values().flat_map(|image: &ImageRef| image.files());
    let writers = writers(past, set_of(files.map(|(file, _)| file)));
    let shared = SharedImages { disk: Some(past.disk().clone()), writers, images };
    let parent = past.store();
    let origin = InitialState {
        features: parent.features,
        record: parent.record.clone(),
        table: past.table().clone(),
        point: past.point(),
    };
    let made = create(&origin, &shared, target, &mut |info, offset, out| past.read(info.page, offset, out));
    let store = made.map_err(|error: Error| error.in_store(&target.label()))?;
    tracing::info!(%store, parent = %parent.store, lsn = %past.lsn(), "forked");
    Ok(store)
}

/// Returns the image files that the fork can share, each with the store that wrote it. A file is not shared if its
/// header cannot be read, or if its writer would exceed the number of ancestors in STORE. The images of such a file are
/// written again.
fn writers(past: &PastState, files: BTreeSet<u64>) -> BTreeMap<u64, StoreId> {
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
