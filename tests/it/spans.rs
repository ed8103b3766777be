//! Spans for `tracing`. Each long operation has a span with the name of the call.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use remanent::batch::{Shadow, Width};
use remanent::device::host::HostDevice;
use remanent::options::MemoryOptions;
use remanent::testing::sim_disk::SimDisk;
use remanent::tiers::Tiers;
use remanent::{Ack, Place, Store};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::files::small;
use crate::machine;

const DEVICE: Place = Place::Device(0);

/// The spans that were opened, keyed by name, with the fields of the last one.
#[derive(Clone, Default)]
struct Spans {
    opened: Arc<Mutex<BTreeMap<&'static str, BTreeMap<&'static str, String>>>>,
    next: Arc<AtomicU64>,
}

struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields(BTreeMap::new());
        span.record(&mut fields);
        self.opened.lock().unwrap().insert(span.metadata().name(), fields.0);
        Id::from_u64(self.next.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Spans {
    /// Returns the names of the spans that were opened since the last call.
    fn taken(&self) -> BTreeMap<&'static str, BTreeMap<&'static str, String>> {
        std::mem::take(&mut *self.opened.lock().unwrap())
    }
}

/// Spans of other threads are visible only to a subscriber of the whole process.
#[test]
fn long_operations_have_spans() {
    machine::alone(|| {
        let spans = Spans::default();
        tracing::subscriber::set_global_default(spans.clone()).unwrap();
        let memory = MemoryOptions::new().budget(DEVICE, 16 << 10);
        let options = small().memory(memory).tiers(Tiers::new([DEVICE, Place::Disk]).free_part(4));
        let store = Store::open_on(Arc::new(SimDisk::new()), Arc::new(HostDevice::new()), options).unwrap();
        let has = |names: &[&str]| {
            let found = spans.taken();
            for name in names {
                assert!(found.contains_key(name), "no {name} among {found:?}");
            }
            found
        };
        has(&["open"]);

        let mut batch = store.batch();
        (0..2).for_each(|_| _ = batch.create_from([1; 4096], DEVICE));
        let ticket = store.submit(batch).unwrap();
        ticket.wait(Ack::Durable).unwrap();
        has(&["commit", "sync"]);
        let pages = ticket.pages().to_vec();

        store.demote(&pages[..1]).unwrap();
        let found = has(&["demote", "ensure"]);
        assert_eq!((&*found["demote"]["pages"], &*found["ensure"]["place"]), ("1", "disk"));
        store.promote(&pages).unwrap();
        let found = has(&["promote", "ensure"]);
        assert_eq!((&*found["ensure"]["pages"], &*found["ensure"]["place"]), ("2", "device:0"));
        store.prefetch(&pages, Place::Disk).unwrap().wait().unwrap();
        let found = has(&["prefetch"]);
        assert_eq!((&*found["prefetch"]["pages"], &*found["prefetch"]["place"]), ("2", "disk"));

        let copy = store.working_copy(pages[0], Width::W1, Shadow::Page);
        assert!(copy.is_err(), "it is on disk");
        store.promote(&pages[..1]).unwrap();
        let copy = store.working_copy(pages[0], Width::W1, Shadow::Page).unwrap();
        spans.taken();
        store.commit(store.batch().set_root("step", 1u64)).unwrap();
        assert!(!has(&["commit"]).contains_key("capture"), "nothing was captured");
        let mut batch = store.batch();
        batch.capture(&copy);
        store.commit(batch).unwrap();
        has(&["capture", "commit"]);

        // Create more pages than fit, so that the thread of the tiers evicts some.
        for _ in 0..6 {
            let mut batch = store.batch();
            batch.create_from([1; 4096], DEVICE);
            store.commit(batch).unwrap();
        }
        has(&["make_room"]);
        store.snapshot().unwrap();
        has(&["snapshot"]);
    });
}
