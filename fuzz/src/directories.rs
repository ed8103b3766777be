//! Opens generated store directories in every supported way.
//!
//! The guarantees: no input causes a panic, a hang, or an allocation beyond the budget and the length of the
//! files. Where several of the pure rebuild, a read-only view, a salvage that reports exact pages, and the
//! engine produce a state, their states are equal. A store that opens accepts a batch, closes, and reopens
//! with that batch. A store that is rejected because of its bytes is unchanged.

use std::sync::Arc;
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::FileName;
use remanent::follow::{FollowFrom, Follower};
use remanent::options::{Create, LogOptions, MemoryOptions, SnapshotSchedule};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, Place, Store, View};
use remanent_format::limits::DEVICE_ORDINAL_MAX;
use remanent_format::salvage::{PageRemains, Salvage};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::store::StoreFile;

use crate::files::{Files, State};

/// The maximum total length of pages that are loaded.
const PAGE_BYTES_MAX: u64 = 1 << 16;

/// Tests a store directory given as an archive of its files: unchanged, and with its checksums corrected.
pub fn directory(data: &[u8]) {
    let files = Files::from_archive(data);
    let mut fitted = files.clone();
    fitted.fit();
    if fitted != files {
        examine(&fitted);
    }
    examine(&files);
}

/// Opens the files in every way. Returns true if the store opens.
pub fn examine(files: &Files) -> bool {
    let options = RebuildOptions { page_bytes_max: PAGE_BYTES_MAX, ..RebuildOptions::default() };
    let rebuilt = rebuild(files, &options).ok();
    let pure = rebuilt.as_ref().map(State::rebuilt);
    // A view and a salvage use the newest snapshot even if its images are damaged, and do not detect that
    // damage. If a rebuild skipped that snapshot, generated files may produce another state from an older
    // snapshot.
    let newest = pure.as_ref().filter(|_| rebuilt.is_some_and(|rebuilt| rebuilt.skipped.is_empty()));
    let disk = files.disk();
    check_view(&disk, newest);
    salvage(files, newest);
    follow(&disk);
    let store = match open(&disk) {
        Ok(store) => store,
        Err(Error::Damaged(damage)) => {
            assert!(Files::of(&disk) == *files, "refused, but modified: {damage}");
            return false;
        }
        Err(_) => return false,
    };
    if store.recovered().created {
        return false;
    }
    let state = State::of(&store);
    if let Some(pure) = pure {
        assert_eq!(state, pure, "the engine and the rebuild disagree");
    }
    go_on(&disk, store, state);
    true
}

fn open(disk: &SimDisk) -> Result<Store, Error> {
    let places =
        (0..=DEVICE_ORDINAL_MAX).map(Place::Device).chain([Place::Pinned, Place::Host, Place::Unified]);
    let memory = places.fold(MemoryOptions::new(), |memory, place| memory.budget(place, PAGE_BYTES_MAX));
    let options = Options::new()
        .create(Create::Never)
        .log(LogOptions::new().segment_len(16 << 10).reserve_bytes(0))
        .memory(memory)
        .snapshots(SnapshotSchedule::never());
    Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options)
}

/// Checks that an opened store accepts a batch and a snapshot, and contains both after a reopen.
fn go_on(disk: &SimDisk, store: Store, state: State) {
    let mut batch = store.batch();
    batch.set_root("opened", true);
    let len = state.pages.first().map_or(0, |info| info.len);
    if len > 0 {
        batch.write(state.pages[0].page, len - 1, &[0x5a]);
    }
    match store.commit(batch) {
        Ok(_) => {}
        // A number or a length in the files is already at its maximum, so no batch can be added.
        Err(Error::Limit { .. }) => return,
        Err(error) => panic!("the opened store rejects a batch: {error}"),
    }
    let after = State::of(&store);
    assert_eq!(after.root.get("opened"), Some(&true.into()));
    if len > 0 {
        assert_eq!(after.contents[&state.pages[0].page].last(), Some(&0x5a));
    }
    if let Err(error) = store.snapshot() {
        assert!(matches!(error, Error::Limit { .. }), "no snapshot of what opened: {error}");
    }
    store.close().unwrap_or_else(|error| panic!("what opened does not close: {error}"));
    let store = open(disk).unwrap_or_else(|error| panic!("what opened once is refused: {error}"));
    assert_eq!(State::of(&store), after, "another state when opened again");
    let rebuilt = rebuild(disk, &RebuildOptions::default());
    let rebuilt = rebuilt.unwrap_or_else(|damage| panic!("what the engine wrote is refused: {damage}"));
    assert_eq!(State::rebuilt(&rebuilt), after, "the rebuild of what the engine wrote");
}

/// Checks that a read-only view returns each page as in the rebuilt state.
fn check_view(disk: &SimDisk, newest: Option<&State>) {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    let Ok(seen) = View::open_on(&disk, None) else { return };
    if let Some(newest) = newest {
        assert!(seen.pages().eq(newest.pages.iter().cloned()), "a look shows other pages");
        assert_eq!(**seen.root(), newest.root, "a look shows another root");
    }
    for info in seen.pages().filter(|info| info.len <= PAGE_BYTES_MAX) {
        let mut bytes = vec![0; info.len as usize];
        let read = seen.read(info.page, 0, &mut bytes);
        if let Some(newest) = newest {
            assert!(read.is_ok(), "a look misses {}: {read:?}", info.page);
            assert!(bytes == newest.contents[&info.page], "a look shows other bytes of {}", info.page);
        }
    }
}

/// Checks that a page that salvage reports as exact equals the page of the rebuilt state.
fn salvage(files: &Files, newest: Option<&State>) {
    let Some(Ok(store)) = files.0.get(&FileName::Store).map(|bytes| StoreFile::decode(bytes)) else { return };
    let Ok(salvage) = Salvage::read(files, store, PAGE_BYTES_MAX) else { return };
    let table = &salvage.state().table;
    let newest =
        newest.filter(|newest| salvage.state().is_whole && table.pages().eq(newest.pages.iter().cloned()));
    for info in table.pages() {
        if let (PageRemains::Exact(bytes), Some(newest)) = (salvage.find(&info), newest) {
            let bytes = salvage.window(&bytes, 0..info.len).unwrap();
            assert!(bytes == newest.contents[&info.page], "salvage shows other bytes of {}", info.page);
        }
    }
}

/// Checks that followers receive batches until they fail or reach the end of the log, even without a writer.
fn follow(disk: &SimDisk) {
    for from in [FollowFrom::Beginning, FollowFrom::Snapshot] {
        let Ok(mut follower) = Follower::open_on(Arc::new(disk.clone()), from) else { continue };
        let mut last = None;
        while let Ok(Some(batch)) = follower.next(Duration::ZERO) {
            assert!(last < Some(batch.position().lsn), "batches come in order");
            last = Some(batch.position().lsn);
        }
    }
}
