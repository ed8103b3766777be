//! Batches that identify pages by keys instead of ids.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use remanent::batch::{ByteSource, PageRef, Width};
use remanent::error::{Invalid, Taken};
use remanent::options::{LogIo, LogOptions};
use remanent::{Error, Key, Options, PageId, PageInfo, Place, Result, Store};

/// A source of bytes with value 5 that records whether it was read.
#[derive(Debug, Default)]
struct Fives(AtomicBool);

impl ByteSource for Fives {
    fn read_at(&self, _: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.store(true, Ordering::SeqCst);
        bytes.fill(5);
        Ok(())
    }
}

/// Creates a store with the pages `a` and `b`.
fn store_of_two() -> (Store, [PageId; 2]) {
    let store = Store::temporary().unwrap();
    let (a, _) = store.put("a", [1; 16], Place::Host).unwrap();
    let (b, _) = store.put("b", [2; 16], Place::Host).unwrap();
    (store, [a, b])
}

/// Runs each operation that takes a page, and returns all pages with their contents.
fn run_every_operation(store: &Store, a: PageRef, b: PageRef) -> Vec<(PageInfo, Vec<u8>)> {
    let memory = store.device_bytes(4, Place::Host).unwrap();
    memory.write(0, &[1, 0, 0, 0]).unwrap();
    let mut batch = store.batch();
    batch.write(a, 0, b"zz").fill(a, 2, 2, &[9]).write_masked(a, 4, Width::W1, &[0b10], &[0, 8]);
    batch.scatter(a, Width::W1, &[6], &[7]).write_device(a, 8, &memory).copy(b, 0..2, a, 14);
    batch.write_changes(a, Width::W1, b"zz", b"zy").resize(a, 20).move_to(a, Place::Pinned);
    batch.set_metadata(a, "kept", 1u64).set_metadata(a, "gone", 2u64).remove_metadata(a, "gone");
    batch.clone_page(b);
    store.commit(batch).unwrap();

    let mut batch = store.batch();
    batch.scatter_device(a, Width::W4, &memory, &memory).replace_from_source(
        b,
        3,
        Arc::new(Fives::default()),
    );
    store.commit(batch).unwrap();
    store.pages().unwrap().map(|info| (info.clone(), store.read_to_vec(info.page).unwrap())).collect()
}

#[test]
fn every_operation_accepts_a_key() {
    let (by_id, [a, b]) = store_of_two();
    let (by_key, _) = store_of_two();
    let expected = run_every_operation(&by_id, a.into(), b.into());
    assert_eq!(expected.len(), 3);
    assert_eq!(run_every_operation(&by_key, "a".into(), b"b".into()), expected);

    by_key.commit(by_key.batch().delete("a").delete(&Key::new("b").unwrap())).unwrap();
    assert_eq!(by_key.page_count().unwrap(), 1);
}

#[test]
fn key_follows_the_earlier_operations_of_its_batch() {
    let (store, [a, _]) = store_of_two();
    let mut batch = store.batch();
    batch.write("a", 0, b"old").delete("a");
    batch.create(3, Place::Host).key("a");
    batch.create(3, Place::Host).key("c");
    batch.write("a", 0, b"new").write("c", 0, b"sea").delete("c");
    batch.create_from(*b"second", Place::Host).key("c");
    batch.write("c", 0, b"S");
    let pages = store.commit(batch).unwrap().pages;
    assert!(!store.contains(a).unwrap());
    assert_eq!(store.page_by_key("a").unwrap().page, pages[0]);
    assert_eq!(store.get("a").unwrap().as_deref(), Some(&b"new"[..]));
    assert_eq!(store.get("c").unwrap().as_deref(), Some(&b"Second"[..]));

    let mut batch = store.batch();
    batch.create(3, Place::Host).key("a");
    batch.write("a", 0, b"two");
    assert!(
        matches!(store.commit(batch), Err(Error::Taken(Taken::Key { holder, .. })) if holder == pages[0])
    );
}

#[test]
fn unknown_key_leaves_the_store_unchanged() {
    let (store, [a, _]) = store_of_two();
    let before = (store.lsn(), store.pages().unwrap().collect::<Vec<_>>());
    let refused = |unknown: &str, add: &dyn Fn(&mut remanent::WriteBatch)| {
        let source = Arc::new(Fives::default());
        let mut batch = store.batch();
        batch.replace_from_source("b", 3, source.clone()).write(a, 0, b"changed");
        add(&mut batch);
        let error = store.commit(batch).unwrap_err();
        assert!(
            matches!(&error, Error::UnknownKey { key } if key.as_str() == Some(unknown)),
            "{unknown}: {error}"
        );
        assert!(error.to_string().contains(unknown));
        assert!(
            !source.0.load(Ordering::SeqCst),
            "{unknown}: the batch was refused before it read its source"
        );
    };
    refused("none", &|batch| _ = batch.write("none", 0, b"x"));
    refused("late", &|batch| {
        batch.write("late", 0, b"x");
        batch.create(1, Place::Host).key("late");
    });
    refused("a", &|batch| _ = batch.delete("a").write("a", 0, b"x"));
    refused("a", &|batch| _ = batch.delete(a).copy("b", 0..1, "a", 0));
    refused("new", &|batch| {
        let page = batch.create(1, Place::Host).key("new").page();
        batch.delete(page).write("new", 0, b"x");
    });
    // The key exists, but another operation names a deleted page by its id.
    let error = store.commit(store.batch().delete("a").write(a, 0, b"x")).unwrap_err();
    assert!(matches!(error, Error::UnknownPage { page } if page == a), "{error}");
    for unusable in [String::new(), "k".repeat(65)] {
        let error = store.commit(store.batch().write(&unusable, 0, b"x")).unwrap_err();
        assert!(matches!(error, Error::Invalid(Invalid::Key(_))), "{error}");
    }
    assert_eq!((store.lsn(), store.pages().unwrap().collect::<Vec<_>>()), before);
}

#[test]
fn key_is_looked_up_in_submitted_batches() {
    // With a direct log, lookups do not return a batch before it is logged.
    let options = Options::new().log(LogOptions::new().io(LogIo::Direct));
    let store = options.open_temporary().unwrap();
    for round in 0..20_u8 {
        let mut batch = store.batch();
        batch.create(1, Place::Host).key("page");
        store.submit(batch).unwrap();
        store.submit(store.batch().write("page", 0, &[round])).unwrap();
        assert_eq!(
            store.commit(store.batch().delete("page")).unwrap().position.lsn.0,
            3 * (u64::from(round) + 1)
        );
    }
}

/// Another thread repeatedly replaces the page that has the key. Each batch uses the page that has the key when the
/// batch is logged.
#[test]
fn key_names_its_current_page_under_contention() {
    const WRITES: u64 = 2000;
    let store = Store::temporary().unwrap();
    store.put("page", [0; 8], Place::Host).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let replacer = scope.spawn(|| -> Result<u64> {
            let mut replaced = 0;
            while !done.load(Ordering::SeqCst) {
                let mut batch = store.batch();
                batch.delete("page");
                batch.create(8, Place::Host).key("page");
                store.commit(batch)?;
                replaced += 1;
            }
            Ok(replaced)
        });
        let written = (1..=WRITES).try_for_each(|count| {
            let mut batch = store.batch();
            batch.write("page", 0, &count.to_le_bytes()).set_metadata("page", "count", count);
            store.commit(batch).map(drop)
        });
        done.store(true, Ordering::SeqCst);
        written.unwrap();
        assert!(replacer.join().unwrap().unwrap() > 0);
    });
}
