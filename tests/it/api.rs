//! The public interface from an application's point of view: chained calls, argument conversions, and ways to
//! wait.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::error::{Invalid, NoSuchState, Remedy, Taken};
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::options::{Compression, ImageIo, LogIo, LogOptions, PageLoad};
use remanent::store::ReadPages;
use remanent::testing::sim_disk::{DiskFault, Operation, SimDisk};
use remanent::{
    Ack, Error, Key, Lsn, Metadata, Options, PageId, Place, Result, Retention, SnapshotId, SnapshotOptions,
    StatePoint, Store, Ticket, Value,
};

/// Timeout, longer than any operation in these tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn store() -> Store {
    Store::temporary().unwrap()
}

/// A waker that counts its calls and unparks a thread.
struct Unpark(thread::Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// Polls a future until it is ready. Returns its output and the number of times that it was woken.
fn block_on<T>(future: impl Future<Output = T>) -> (T, usize) {
    let unpark = Arc::new(Unpark(thread::current(), AtomicUsize::new(0)));
    let waker = Waker::from(unpark.clone());
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return (output, unpark.1.load(Ordering::SeqCst)),
            Poll::Pending => thread::park_timeout(PATIENCE),
        }
    }
}

#[test]
fn builder_chain_commits_in_order() {
    let store = store();
    store.commit(store.batch().set_root("step", 1u64).note("first")).unwrap();
    assert_eq!(store.root().unwrap()["step"].as_u64(), Some(1));
    let mut batch = store.batch();
    batch.create(4, Place::Host).key("a");
    store.commit(&mut batch).unwrap();
    let again = store.commit(&mut batch).unwrap();
    assert!(again.pages.is_empty(), "what was committed is no longer in the batch");
}

#[test]
fn a_page_is_created_with_key_and_metadata_in_one_chain() {
    let store = store();
    let metadata = Metadata::from([("dtype".to_owned(), Value::from("bf16"))]);
    let mut batch = store.batch();
    let page = batch.create_from(*b"weights!", Place::Host).key("layer.0").metadata(metadata.clone()).page();
    batch.write(page, 0, b"W");
    let plain = batch.create(2, Place::Host).optional_key(None).page();
    assert_eq!((page.index(), plain.index()), (0, 1));
    let pages = store.commit(batch).unwrap().pages;
    let info = store.page_by_key(Key::new("layer.0").unwrap()).unwrap();
    assert_eq!((info.page, &*info.metadata), (pages[0], &metadata));
    assert_eq!(store.read_to_vec(pages[0]).unwrap(), b"Weights!");
    assert_eq!(store.page(pages[1]).unwrap().key, None);
}

#[test]
fn invalid_key_is_refused_at_commit() {
    let store = store();
    for key in [String::new(), "k".repeat(65)] {
        let mut batch = store.batch();
        batch.create(4, Place::Host).key(&key);
        let error = store.commit(batch).unwrap_err();
        assert!(
            matches!(&error, Error::Invalid(Invalid::Key(refused)) if refused.len == key.len()),
            "{error}"
        );
        assert_eq!((error.remedy(), store.lsn()), (Remedy::ChangeCall, Lsn(0)));
    }
    fn found() -> Result<Key> {
        Ok(Key::new("found")?)
    }
    assert_eq!(found().unwrap(), "found".try_into().unwrap());
}

#[test]
fn integers_convert_between_the_two_kinds_and_nothing_else_does() {
    for (value, unsigned, signed) in [
        (Value::from(5), Some(5), Some(5)),
        (Value::from(5_usize), Some(5), Some(5)),
        (Value::from(-5), None, Some(-5)),
        (Value::from(u64::MAX), Some(u64::MAX), None),
        (Value::from(5.0), None, None),
        (Value::from("5"), None, None),
    ] {
        assert_eq!((value.as_u64(), value.as_i64()), (unsigned, signed), "{value:?}");
    }
    assert_eq!(Value::from(0.5_f32).as_f64(), Some(0.5));
    assert_eq!(Value::from(true).as_bool(), Some(true));
    assert_eq!(Value::from("text").as_str(), Some("text"));
    assert_eq!(Value::from(&b"ab"[..]).as_bytes(), Some(&b"ab"[..]));
    assert_eq!(Value::from(vec![Value::Null]).as_list(), Some(&[Value::Null][..]));
    assert!(Value::from(Metadata::new()).as_map().unwrap().is_empty());
}

#[test]
fn restore_view_and_fork_accept_the_same_state_point() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path().join("store")).unwrap();
    let steps = |count: u64| {
        (1..=count).for_each(|step| _ = store.commit(store.batch().set_root("step", step)).unwrap())
    };
    steps(2);
    let named = store.snapshot_with(SnapshotOptions::new().name("two")).unwrap();
    assert_eq!((named.redo, named.end), (Lsn(2), Lsn(2)), "a named snapshot is exact");
    steps(1);
    for point in [StatePoint::Lsn(Lsn(2)), StatePoint::Snapshot(named.id), StatePoint::Name("two".to_owned())]
    {
        let looked = Store::open_at(directory.path().join("store"), &point).unwrap();
        assert_eq!(looked.root()["step"].as_u64(), Some(2), "{point}");
        store.restore(&point).unwrap();
        assert_eq!(store.root().unwrap()["step"].as_u64(), Some(2), "{point}");
        steps(1);
        let fork = directory.path().join(format!("fork {point}").replace(':', " "));
        store.fork(&fork, &point).unwrap();
        let fork = Store::open(fork).unwrap();
        assert_eq!(fork.root().unwrap()["step"].as_u64(), Some(2), "{point}");
    }
    let lsn = store.lsn();
    let refused = |point| store.restore(&point).unwrap_err();
    assert!(matches!(
        refused(StatePoint::Snapshot(SnapshotId(999))),
        Error::NoSuchState(NoSuchState::Snapshot { .. })
    ));
    assert!(matches!(
        refused(StatePoint::Name("three".to_owned())),
        Error::NoSuchState(NoSuchState::Name { .. })
    ));
    assert!(matches!(
        refused(StatePoint::Lsn(Lsn(999))),
        Error::NoSuchState(NoSuchState::OutsideWindow { .. })
    ));
    assert_eq!(store.lsn(), lsn, "nothing changed");
}

#[test]
fn snapshot_follows_options() {
    let store = store();
    let mut batch = store.batch();
    batch.create_from(vec![7; 10_000], Place::Host);
    store.commit(batch).unwrap();
    let exact = store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    assert_eq!((exact.redo, exact.end, exact.verified), (Lsn(1), Lsn(1), true));
    let both = store.snapshot_with(SnapshotOptions::new().name("n").only_published()).unwrap();
    assert_eq!((both.name.as_deref(), both.verified), (Some("n"), false));
    store.wait_verified().unwrap();
    assert!(store.snapshots().iter().all(|snapshot| snapshot.verified));
    let refused = |name: &str| store.snapshot_with(SnapshotOptions::new().name(name)).unwrap_err();
    assert!(matches!(refused("n"), Error::Taken(Taken::Name { .. })));
    assert!(matches!(refused(""), Error::Limit { .. }));
    assert!(matches!(refused(&"x".repeat(65)), Error::Limit { .. }));
}

#[test]
fn options_debug_shows_values() {
    let rules = Retention::default().snapshots_kept(7).log_kept(1 << 20);
    let options = Options::new()
        .ack(Ack::Durable)
        .log(LogOptions::new().io(LogIo::Buffered))
        .retention(rules.clone())
        .identity(*b"me");
    assert_eq!((options.ack, options.log.io), (Ack::Durable, Some(LogIo::Buffered)));
    assert_eq!((&options.retention, options.identity.as_deref()), (&rules, Some(&b"me"[..])));
    assert_eq!((options.log.segment_len, options.log.reserve_bytes), (16 << 20, None));
    assert_eq!(options.open_temporary().unwrap().retention(), rules);
}

#[test]
fn python_signature_states_the_defaults() {
    let signature = include_str!("../../python/src/store.rs");
    let Options { log, images, snapshots, retention, scrubs, memory, .. } = Options::new();
    let number = |value: Option<u64>| value.map_or_else(|| "None".to_owned(), |value| value.to_string());
    let seconds = |time: Option<Duration>| format!("{:?}", time.unwrap().as_secs_f64());
    assert_eq!((memory.load, memory.budget.limit(Place::Host)), (PageLoad::Eager, u64::MAX));
    assert_eq!((log.io, images.io, images.compression), (None, ImageIo::Auto, Compression::Zstd));
    for group in [
        "memory={'budget': None, 'load': 'eager', 'page_memory': None}".to_owned(),
        format!(
            "log={{'io': None, 'segment_len': {}, 'reserve_bytes': {}, 'spare_bytes': {}}}",
            log.segment_len,
            number(log.reserve_bytes),
            number(log.spare_bytes)
        ),
        "images={'io': 'auto', 'compression': True}".to_owned(),
        format!(
            "snapshots={{'log_bytes': {}, 'interval': {}, 'bytes_per_second': {}}}",
            number(snapshots.log_bytes),
            seconds(snapshots.interval),
            number(snapshots.bytes_per_second)
        ),
        format!(
            "retention={{'snapshots_kept': {}, 'snapshots_kept_for': {}, 'log_kept': {}}}",
            retention.snapshots_kept,
            seconds(Some(retention.snapshots_kept_for)),
            retention.log_kept
        ),
        format!(
            "scrubs={{'interval': {}, 'bytes_per_second': {}}}",
            seconds(scrubs.interval),
            number(scrubs.bytes_per_second)
        ),
    ] {
        assert!(signature.contains(&group), "{group}");
    }
}

/// Reads all pages through the methods that every reader implements.
fn all(pages: &impl ReadPages) -> Vec<(PageId, Option<Key>, Vec<u8>)> {
    let listed: Vec<_> = pages.pages().unwrap().collect();
    assert_eq!(listed.len() as u64, pages.page_count().unwrap());
    let read = |info: remanent::PageInfo| {
        assert_eq!(pages.page(info.page).unwrap().epoch, info.epoch);
        let bytes = pages.read_to_vec(info.page).unwrap();
        let mut last = [0];
        pages.read(info.page, info.len - 1, &mut last).unwrap();
        assert_eq!(bytes.last(), Some(&last[0]));
        let beyond = pages.read(info.page, info.len, &mut last).unwrap_err();
        assert!(matches!(beyond, Error::OutOfBounds { .. }), "{beyond}");
        if let Some(key) = &info.key {
            assert_eq!(pages.page_by_key(key.as_bytes()).unwrap().page, info.page);
        }
        (info.page, info.key, bytes)
    };
    let all = listed.into_iter().map(read).collect();
    assert!(matches!(pages.page(PageId(999)), Err(Error::UnknownPage { .. })));
    assert!(matches!(pages.page_by_key(b"none"), Err(Error::UnknownKey { .. })));
    assert!(matches!(pages.read_to_vec(PageId(999)), Err(Error::UnknownPage { .. })));
    all
}

#[test]
fn all_readers_return_the_same_pages() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let mut batch = store.batch();
    batch.set_root("step", 3u64);
    for (key, bytes) in [("layer.0", &b"zero"[..]), ("layer.1", b"one"), ("head", b"h")] {
        batch.create_from(bytes, Place::Host).key(key);
    }
    store.commit(batch).unwrap();
    let mut replica = Replica::default();
    let mut follower = Follower::open(directory.path(), FollowFrom::Beginning).unwrap();
    replica.apply(&follower.next(PATIENCE).unwrap().unwrap()).unwrap();

    let expected = all(&store);
    let live = store.view().unwrap();
    let looked = Store::open_read_only(directory.path()).unwrap();
    assert_eq!(all(&live), expected);
    assert_eq!(all(&looked), expected);
    assert_eq!(all(&replica), expected);
    let keyed = |pages: &dyn Fn() -> usize| assert_eq!(pages(), 2);
    keyed(&|| store.pages_with_prefix("layer.").unwrap().count());
    keyed(&|| live.pages_with_prefix("layer.").unwrap().count());
    keyed(&|| looked.pages_with_prefix("layer.").unwrap().count());
    keyed(&|| replica.pages_with_prefix("layer.").unwrap().count());
    for (lsn, root) in [
        (ReadPages::lsn(&store), ReadPages::root(&store)),
        (ReadPages::lsn(&live), ReadPages::root(&live)),
        (ReadPages::lsn(&looked), ReadPages::root(&looked)),
        (ReadPages::lsn(&replica), ReadPages::root(&replica)),
    ] {
        assert_eq!((lsn.unwrap(), root.unwrap()["step"].as_u64()), (Lsn(1), Some(3)));
    }
}

#[test]
fn a_follower_is_an_iterator_that_ends_with_its_first_error() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    for step in 1..=4u64 {
        store.commit(store.batch().set_root("step", step)).unwrap();
    }
    let mut follower = Follower::open(directory.path(), FollowFrom::Beginning).unwrap();
    let mut seen = Vec::new();
    for batch in &mut follower {
        seen.push(batch.unwrap().lsn().0);
        if seen.len() == 4 {
            break;
        }
    }
    assert_eq!(seen, [1, 2, 3, 4]);
    assert_eq!(follower.position().lsn, Lsn(4));
}

/// The modes of writing the log.
const WAYS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

#[test]
fn ticket_supports_poll_timeout_and_await() {
    for io in WAYS {
        let store = Options::new().log(LogOptions::new().io(io)).open_temporary().unwrap();
        for ack in [Ack::Logged, Ack::Applied, Ack::Durable] {
            let ticket = store.submit(store.batch().set_root("step", 1u64)).unwrap();
            assert!(ticket.wait_timeout(ack, PATIENCE).unwrap(), "{io} {ack:?}");
            assert!(ticket.is_acknowledged(ack).unwrap());
            assert!(ticket.wait_timeout(ack, Duration::ZERO).unwrap());
            let ticket = store.submit(store.batch().set_root("step", 2u64)).unwrap();
            block_on(ticket.acknowledged(ack)).0.unwrap();
            assert!(ticket.is_acknowledged(ack).unwrap());
            let (ready, woken) = block_on(ticket.acknowledged(ack));
            ready.unwrap();
            assert_eq!(woken, 0, "a batch that is acknowledged is ready at once");
        }
        assert!(
            store
                .submit(store.batch().set_root("step", 3u64))
                .unwrap()
                .wait_timeout(Ack::Durable, Duration::MAX)
                .unwrap()
        );
    }
}

#[test]
fn many_tasks_wait_for_one_sync() {
    let store = Options::new().log(LogOptions::new().io(LogIo::Buffered)).open_temporary().unwrap();
    let tickets: Vec<_> =
        (0..50u64).map(|step| store.submit(store.batch().set_root("step", step)).unwrap()).collect();
    block_on(async {
        for ticket in &tickets {
            ticket.acknowledged(Ack::Durable).await.unwrap();
        }
    });
    assert!(tickets.iter().all(|ticket| ticket.is_acknowledged(Ack::Durable).unwrap()));
    // After a future is dropped, no waker remains to be called.
    drop(store.submit(store.batch().set_root("step", 99u64)).unwrap().acknowledged(Ack::Durable));
    store.close().unwrap();
}

/// A waker that blocks the thread that calls it until the test releases it.
struct Holding(Mutex<mpsc::Receiver<()>>);

impl Wake for Holding {
    fn wake(self: Arc<Self>) {
        self.0.lock().unwrap().recv().unwrap();
    }
}

/// A prefetch of pages can be awaited, and a waiting task is woken if the prefetch is cancelled.
#[test]
fn prefetches_can_be_awaited() {
    let store = store();
    let mut batch = store.batch();
    (0..200).for_each(|_| _ = batch.create_from([1; 4096], Place::Disk));
    let pages = store.commit(batch).unwrap().pages;
    let (go_on, held) = mpsc::channel();
    let holding = Waker::from(Arc::new(Holding(Mutex::new(held))));
    // Repeat until a prefetch is awaited before it completes. The prefetching thread then blocks in this
    // waker.
    let mut places = [Place::Host, Place::Disk].into_iter().cycle();
    let mut first = loop {
        let mut coming = store.prefetch(&pages, places.next().unwrap()).unwrap();
        match Pin::new(&mut coming).poll(&mut Context::from_waker(&holding)) {
            Poll::Pending => break coming,
            Poll::Ready(came) => came.unwrap(),
        }
    };
    let mut second = store.prefetch(&pages[..1], Place::Pinned).unwrap();
    let unpark = Arc::new(Unpark(thread::current(), AtomicUsize::new(0)));
    let waker = Waker::from(unpark.clone());
    assert!(Pin::new(&mut second).poll(&mut Context::from_waker(&waker)).is_pending());
    second.cancel().unwrap();
    assert_eq!(unpark.1.load(Ordering::SeqCst), 1);
    block_on(second).0.unwrap();
    go_on.send(()).unwrap();
    block_on(&mut first).0.unwrap();
    assert!(store.page(pages[0]).unwrap().place != Place::Pinned, "it was given up");
    block_on(store.prefetch(&pages[..1], Place::Pinned).unwrap()).0.unwrap();
    assert_eq!(store.page(pages[0]).unwrap().place, Place::Pinned);
    store.close().unwrap();
}

#[test]
fn waiting_task_is_woken_on_failure() {
    for io in WAYS {
        let disk = SimDisk::new();
        let options = Options::new().log(LogOptions::new().io(io).segment_len(64 << 10));
        let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
        disk.fail(DiskFault { operation: Operation::SyncWindow, skip: 0, times: usize::MAX, errno: 5 });
        let ticket = store.submit(store.batch().set_root("step", 1u64)).unwrap();
        let (waited, _) = block_on(ticket.acknowledged(Ack::Durable));
        assert!(matches!(waited, Err(Error::Poisoned(_))), "{io}: {waited:?}");
        assert!(matches!(ticket.is_acknowledged(Ack::Durable), Err(Error::Poisoned(_))));
        assert!(matches!(ticket.wait_timeout(Ack::Durable, PATIENCE), Err(Error::Poisoned(_))));
    }
}

/// A waker that queries a ticket's acknowledgement inside `wake`, like an executor that polls the task
/// immediately.
struct AsksAtOnce(Mutex<Option<Ticket>>, mpsc::Sender<Result<bool>>);

impl Wake for AsksAtOnce {
    fn wake(self: Arc<Self>) {
        let ticket = self.0.lock().unwrap().take().expect("woken once");
        self.1.send(ticket.is_acknowledged(Ack::Durable)).unwrap();
    }
}

#[test]
fn a_task_may_be_polled_by_the_call_that_wakes_it() {
    let mut left = vec![Operation::Put, Operation::SyncWindow];
    for _ in 0..100 {
        let Some(&operation) = left.last() else { break };
        let disk = SimDisk::new();
        // No sync happens before the failure unless a caller requests it.
        let options = Options::new().log(LogOptions::new().io(LogIo::Buffered).segment_len(64 << 10));
        let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap();
        let ticket = store.submit(store.batch().set_root("step", 1u64)).unwrap();
        disk.fail(DiskFault { operation, skip: 0, times: usize::MAX, errno: 5 });
        let (send, answer) = mpsc::channel();
        let waker = Waker::from(Arc::new(AsksAtOnce(Mutex::new(Some(ticket.clone())), send)));
        let mut acknowledged = Box::pin(ticket.acknowledged(Ack::Durable));
        // The sync may complete, or the log may fail, before the poll returns. In that case, no task is
        // waiting.
        if let Poll::Ready(answer) = acknowledged.as_mut().poll(&mut Context::from_waker(&waker)) {
            let is_synced = operation == Operation::Put && answer.is_ok();
            assert!(is_synced || matches!(answer, Err(Error::Poisoned(_))), "{operation:?}: {answer:?}");
            continue;
        }
        let submitted = thread::spawn(move || store.submit(store.batch().set_root("step", 2u64)));
        let answer = answer.recv_timeout(PATIENCE).expect("the waker returns");
        match operation {
            // The first batch was logged. It is durable if its sync completed before the failure.
            Operation::Put => assert!(matches!(answer, Ok(true) | Err(Error::Poisoned(_))), "{answer:?}"),
            _ => assert!(matches!(answer, Err(Error::Poisoned(_))), "{answer:?}"),
        }
        _ = submitted.join().unwrap();
        left.pop();
    }
    assert!(left.is_empty(), "no task waited in a hundred attempts: {left:?}");
}

#[test]
fn store_opens_with_custom_device() {
    let directory = tempfile::tempdir().unwrap();
    let store = Options::new().open_with(directory.path(), Arc::new(HostDevice::new())).unwrap();
    assert_eq!(store.recovered().device, "host");
}

/// `put` looks up a key and creates the page in one call. With two separate calls, one of two concurrent
/// threads would get an error.
#[test]
fn put_succeeds_under_concurrent_key_changes() {
    const ROUNDS: usize = 50;
    for log_io in [LogIo::Buffered, LogIo::Direct] {
        let store =
            Options::new().log(LogOptions::new().io(log_io)).ack(Ack::Logged).open_temporary().unwrap();
        let key = Key::new("shared").unwrap();
        thread::scope(|scope| {
            for writer in 1..=3u8 {
                let (store, key) = (&store, &key);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let bytes = vec![writer; 1 + round % 5];
                        store.put(key, bytes, Place::Host).unwrap();
                    }
                });
            }
            let (store, key) = (&store, &key);
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    // Another thread may have deleted or changed the page in the meantime.
                    if let Ok(info) = store.page_by_key(key) {
                        let mut batch = store.batch();
                        batch.delete(info.page);
                        assert!(matches!(store.commit(batch), Ok(_) | Err(Error::UnknownPage { .. })));
                    }
                }
            });
        });
        let (page, position) = store.put(&key, b"last", Place::Host).unwrap();
        assert_eq!((store.page_count().unwrap(), store.lsn()), (1, position.lsn));
        let info = store.page_by_key(&key).unwrap();
        assert_eq!((info.page, store.read_to_vec(page).unwrap()), (page, b"last".to_vec()));
    }
}

/// Calls accept text for keys, names and states without a conversion.
#[test]
fn calls_take_text_for_keys_names_and_states() {
    let store = Store::temporary().unwrap();
    let (page, first) = store.put("a", b"one", Place::Host).unwrap();
    store.snapshot_with("before").unwrap();
    store.commit(store.batch().write("a", 0, b"two")).unwrap();
    assert_eq!(store.get("a").unwrap().as_deref(), Some(&b"two"[..]));

    for point in ["name:before", "before", "lsn:1"] {
        store.restore(point).unwrap();
        assert_eq!(store.get("a").unwrap().as_deref(), Some(&b"one"[..]), "{point}");
        store.put("a", b"two", Place::Host).unwrap();
    }
    store.restore(first.lsn).unwrap();
    let mut batch = store.batch();
    batch.delete(store.page(page).unwrap());
    store.commit(batch).unwrap();
    assert_eq!(store.get("a").unwrap(), None);

    assert!(matches!(store.restore("12"), Err(Error::Invalid(Invalid::StatePoint { .. }))));
    assert!(matches!(store.page_by_key("a"), Err(Error::UnknownKey { .. })));
    for unusable in [String::new(), "k".repeat(65)] {
        assert!(matches!(store.page_by_key(&unusable), Err(Error::Invalid(Invalid::Key(_)))));
        assert!(matches!(store.get(&unusable), Err(Error::Invalid(Invalid::Key(_)))));
        assert!(matches!(store.put(&unusable, b"", Place::Host), Err(Error::Invalid(Invalid::Key(_)))));
    }
    assert_eq!(store.page_count().unwrap(), 0);
}
