//! Lookups and views during commits. A batch is visible completely or not at all, only logged batches are
//! visible, and a batch reported by a completed call is logged.

use std::time::Duration;

use remanent::options::LogIo;
use remanent::{Ack, Lsn, Store, Value};

use crate::ground::{Ground, PAGE_LEN, bytes, log, options};
use crate::runner::{at_once, explore};

const WAYS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

/// Returns the count of a writer in the root.
fn count(root: &remanent::Metadata, writer: usize) -> u64 {
    match root.get(&writer.to_string()) {
        Some(Value::U64(count)) => *count,
        None => 0,
        other => panic!("{other:?}"),
    }
}

fn count_now(store: &Store, writer: usize) -> u64 {
    count(&store.root().unwrap(), writer)
}

#[test]
fn view_is_of_one_logged_batch() {
    explore(|time| {
        for io in WAYS {
            let ground = Ground::new(time, options().log(log().io(io)), 1);
            let write = || ground.count_to(2, 0, Ack::Durable);
            let look = || {
                let early = ground.store.view().unwrap();
                for _ in 0..2 {
                    let view = ground.store.view().unwrap();
                    let (left, _) = ground.after_kill();
                    // I1
                    assert!(left >= view.lsn(), "batch {} was seen, and a kill leaves {left}", view.lsn());
                    // Batch 1 created the pages, and batch n + 1 counted to n in both.
                    let lsns = ground.pages(0).map(|page| view.page(page).unwrap().lsn);
                    assert_eq!(lsns, [view.lsn(); 2]);
                    assert_eq!((count(&view.root(), 0), view.page_count()), (view.lsn().0 - 1, 2));
                    assert!(view.pages().all(|info| info.lsn == view.lsn()));
                }
                // The view has the state of its own batch, whatever was removed since.
                let lsns = ground.pages(0).map(|page| early.page(page).unwrap().lsn);
                assert_eq!((lsns, count(&early.root(), 0)), ([early.lsn(); 2], early.lsn().0 - 1));
            };
            at_once(&[&write, &look]);
            ground.close(Lsn(3), Duration::ZERO);
        }
    });
}

#[test]
fn logged_batches_are_visible_and_never_regress() {
    explore(|time| {
        for io in WAYS {
            let ground = Ground::new(time, options().log(log().io(io)), 2);
            let write = |writer: usize| {
                for number in 1..=2 {
                    let lsn = ground.count(writer, number, Ack::Logged).unwrap();
                    assert!(ground.store.lsn() >= lsn);
                    assert_eq!(count_now(&ground.store, writer), number);
                    let page = ground.store.page(ground.pages(writer)[1]).unwrap();
                    assert_eq!((page.lsn, page.epoch.0), (lsn, 1 + number));
                    assert_eq!(ground.read(writer), number);
                }
            };
            let look = || {
                let root = count_now(&ground.store, 0);
                let page = ground.store.page(ground.pages(0)[0]).unwrap().epoch.0 - 1;
                let mut read = vec![0; PAGE_LEN as usize];
                let info = ground.store.read_into(ground.pages(0)[1], &mut read).unwrap();
                assert_eq!(read, bytes(info.epoch.0 - 1));
                assert!(root <= page && page < info.epoch.0, "lookups and reads go forward");
            };
            at_once(&[&|| write(0), &|| write(1), &look]);
            ground.close(Lsn(5), Duration::ZERO);
        }
    });
}
