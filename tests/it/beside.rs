//! What is committed beside a snapshot, at moments that the test chooses: between two of its gathers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Fence, Lane, MemoryId, Pending, Staging};
use remanent::disk::dir::DirDisk;
use remanent::{Options, PageId, Place, Result, Store};

/// Called by the thread that takes the snapshot, with the store and the number of pages gathered so far.
type Between = Box<dyn FnMut(&Store, usize) + Send>;

/// A host device that calls back whenever a gathered area goes to the host.
struct Gathering {
    inner: HostDevice,
    gathered: AtomicUsize,
    between: Mutex<Option<Between>>,
    store: OnceLock<Weak<Store>>,
}

impl Device for Gathering {
    fn label(&self) -> String {
        self.inner.label()
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.inner.allocate(place, len)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        self.inner.release(memory)
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        self.inner.staging(len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        for command in &list.commands {
            if let Command::Gather { sources, .. } = command {
                self.gathered.fetch_add(sources.len(), Ordering::SeqCst);
            }
        }
        if lane == Lane::Drain {
            // Taken out while it runs: what it commits must not call it again.
            let between = self.between.lock().unwrap().take();
            if let Some(mut between) = between {
                let store = self.store.get().and_then(Weak::upgrade).expect("the store is open");
                between(&store, self.gathered.load(Ordering::SeqCst));
                *self.between.lock().unwrap() = Some(between);
            }
        }
        self.inner.submit(lane, list)
    }

    fn reached(&self, lane: Lane) -> u64 {
        self.inner.reached(lane)
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.inner.wait(fence)
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        self.inner.after(lane, fence)
    }
}

/// A store in `directory` whose snapshots are interrupted by `between`.
fn open(
    directory: &std::path::Path,
    options: Options,
    between: impl FnMut(&Store, usize) + Send + 'static,
) -> Arc<Store> {
    let device = Arc::new(Gathering {
        inner: HostDevice::new(),
        gathered: AtomicUsize::new(0),
        between: Mutex::new(Some(Box::new(between))),
        store: OnceLock::new(),
    });
    let store = Store::open_on(Arc::new(DirDisk::new(directory)), device.clone(), options).unwrap();
    let store = Arc::new(store);
    device.store.set(Arc::downgrade(&store)).expect("set once");
    store
}

fn bytes(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// A restore writes anew what changed between its capture and the snapshot's end: here every page, more of
/// them than one chunk may have.
#[test]
fn a_restore_of_many_tiny_pages_fills_several_chunks() {
    const COUNT: usize = 70_000;
    let directory = tempfile::tempdir().unwrap();
    let fill = |store: &Store, value: u64| {
        let mut batch = store.batch();
        for page in 1..=COUNT as u64 {
            batch.write(PageId(page), 0, &(page ^ value << 32).to_le_bytes());
        }
        store.commit(batch).unwrap();
    };
    let store = open(directory.path(), Options::default(), move |store, gathered| {
        if gathered == COUNT {
            fill(store, 1);
        }
    });
    let mut batch = store.batch();
    for _ in 0..COUNT {
        batch.create(8, Place::Host);
    }
    store.commit(batch).unwrap();
    let snapshot = store.snapshot().unwrap();
    assert!(snapshot.redo < snapshot.end, "{snapshot:?}");
    fill(&store, 2);
    store.restore_from_snapshot(snapshot.id).unwrap();
    let check = |store: &Store| {
        for page in (1..=COUNT as u64).step_by(997).chain([COUNT as u64]) {
            assert_eq!(bytes(store, PageId(page)), (page ^ 1 << 32).to_le_bytes(), "page {page}");
        }
    };
    check(&store);
    drop(store);
    check(&Store::open(directory.path(), Options::default()).unwrap());
}
