//! Batches with sources implemented by the caller, which may use the store while they are read.

use std::io;
use std::sync::{Arc, Weak};

use remanent::batch::ByteSource;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, PageId, Place, Store};

use super::{DEVICE, LEN, ROOM, open, put, two_tiers};
use crate::faults::watched;

/// A source that leases a page, and thereby moves it to memory, whenever the source is read.
#[derive(Debug)]
struct LeasingSource {
    store: Weak<Store>,
    page: PageId,
}

impl ByteSource for LeasingSource {
    fn read_at(&self, _offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let store = self.store.upgrade().expect("it commits");
        // Also lease from another thread, because a source may use several threads.
        std::thread::scope(|scope| {
            scope.spawn(|| _ = store.lease(self.page));
        });
        _ = store.lease(self.page);
        bytes.fill(1);
        Ok(())
    }
}

/// The batch finds no space, even after all other calls are complete, because pages are leased.
#[test]
fn source_promotes_pages_while_batch_waits_for_room() {
    watched("a source that leases", || {
        let store = Arc::new(open(&SimDisk::new(), two_tiers().ack(Ack::Applied)));
        let leased = put(&store, 0, 0, DEVICE);
        let page = put(&store, 1, 0, Place::Disk);
        let source = Arc::new(LeasingSource { store: Arc::downgrade(&store), page });
        let lease = store.lease(leased).unwrap();
        let mut batch = store.batch();
        batch.create_from_source(ROOM * LEN, source.clone(), DEVICE);
        let refused = store.commit(batch).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { place: DEVICE, .. }), "{refused}");
        drop(lease);
        let mut batch = store.batch();
        batch.create_from_source((ROOM - 4) * LEN, source, DEVICE);
        store.commit(batch).unwrap();
    });
}
