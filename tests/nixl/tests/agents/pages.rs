//! Page servers and page clients, on the simulated library.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use remanent::nixl::{Agent, AgentOptions, FetchedPage, NixlError, PageClient, PageServer, PeerReplica};
use remanent::options::SnapshotSchedule;
use remanent::{DeviceChoice, Epoch, Error, Key, Options, PageId, PageInfo, Place, Store};

use crate::ground::{Ground, failure, page, pattern, settings, store};

/// The time limit of calls that are expected to succeed.
const PATIENCE: Duration = Duration::from_secs(60);
const ROOM: u64 = 8192;

fn patient(ground: &Ground, name: &str) -> Agent {
    ground.nixl.agent(&AgentOptions::new(name).timeout(PATIENCE).polled()).unwrap()
}

/// Calls `work` with a client while a server of the store answers in another thread. Calls `between` after each call of
/// the server, with the number of pages that this call sent.
fn with_server<T>(
    ground: &Ground,
    store: &Store,
    mut between: impl FnMut(u64) + Send,
    work: impl FnOnce(&mut PageClient) -> T,
) -> T {
    let agent = patient(ground, "server");
    let metadata = agent.metadata().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let mut server = PageServer::new(agent, store);
            while !is_over.load(Ordering::SeqCst) {
                between(server.serve(Duration::ZERO).unwrap());
                std::thread::yield_now();
            }
            // The client has ended.
            server.serve(Duration::ZERO).unwrap();
            format!("{server:?}")
        });
        /// Stops the server, even if `work` panics.
        struct End<'b>(&'b AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let end = End(&is_over);
        let mut client = PageClient::connect(patient(ground, "client"), &metadata, ROOM).unwrap();
        let done = work(&mut client);
        drop(client);
        drop(end);
        let server = server.join().unwrap();
        assert!(server.contains("clients: 0"), "the client that ended is forgotten: {server}");
        done
    })
}

#[test]
fn fetched_pages_have_the_bytes_and_epoch_of_the_store() {
    let (ground, _turn) = Ground::get();
    for (device, places) in [
        (DeviceChoice::Host, vec![Place::Host, Place::Disk]),
        (DeviceChoice::Cuda(0), vec![Place::Device(0), Place::Pinned, Place::Host]),
    ] {
        for calls in [0, 2] {
            ground.delay(calls);
            let store = store(device);
            let lens = [0, 1, 4096, ROOM as usize];
            let pages: Vec<(PageId, Vec<u8>)> = places
                .iter()
                .flat_map(|place| lens.map(|len| (place, pattern(len, len as u64))))
                .map(|(place, bytes)| (page(&store, &bytes, *place), bytes))
                .collect();
            let key = Key::new("named").unwrap();
            let (named, _) = store.put(&key, b"first", Place::Host).unwrap();
            store.put(&key, b"second", Place::Host).unwrap();
            let pinned = store.pin(pages[1].0);
            with_server(
                ground,
                &store,
                |_| {},
                |client| {
                    let mut fetched = vec![None; pages.len()];
                    let ids: Vec<PageId> = pages.iter().map(|(page, _)| *page).collect();
                    client.fetch_many(&ids, |index, page| fetched[index] = Some(page)).unwrap();
                    for ((page, bytes), fetched) in pages.iter().zip(fetched) {
                        let fetched = fetched.expect("a page that exists");
                        let info = store.page(*page).unwrap();
                        assert_eq!((fetched.page, fetched.epoch, fetched.lsn), (*page, info.epoch, info.lsn));
                        assert_eq!(fetched.bytes, *bytes, "{info:?}");
                    }
                    let by_key = client.fetch_key("named").unwrap().unwrap();
                    assert_eq!((by_key.page, &*by_key.bytes), (named, &b"second"[..]));
                    assert_eq!(by_key.key.as_ref(), Some(&key));
                    assert_eq!(by_key.epoch, store.page(named).unwrap().epoch);
                    assert_eq!(client.fetch_key("nameless").unwrap(), None);
                    let missing = client.fetch(PageId(999));
                    assert!(matches!(missing, Err(Error::UnknownPage { page: PageId(999) })), "{missing:?}");
                },
            );
            drop(pinned);
        }
    }
}

#[test]
fn too_long_page_is_refused_with_its_length() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let long = page(&store, &pattern(ROOM as usize + 1, 1), Place::Host);
    with_server(
        ground,
        &store,
        |_| {},
        |client| {
            let error = failure(client.fetch(long));
            assert!(matches!(error, NixlError::Refused { .. }));
            assert!(
                error
                    .to_string()
                    .contains("it is 8193 bytes long, but the client accepts at most 8192 bytes"),
                "{error}"
            );
            let short = page(&store, b"short", Place::Host);
            assert_eq!(client.fetch(short).unwrap().bytes, b"short", "the client continues");
        },
    );
}

#[test]
fn damaged_page_is_fetched_again_and_then_reported() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let bytes = pattern(4096, 5);
    let id = page(&store, &bytes, Place::Host);
    with_server(
        ground,
        &store,
        |_| {},
        |client| {
            for flips in [1, 2] {
                ground.flip(flips);
                assert_eq!(client.fetch(id).unwrap().bytes, bytes);
            }
            ground.flip(3);
            let error = failure(client.fetch(id));
            assert!(matches!(error, NixlError::Corrupted { page, attempts: 3, .. } if page == id), "{error}");
            assert_eq!(client.fetch(id).unwrap().bytes, bytes);
        },
    );
}

#[test]
fn next_page_is_sent_while_caller_uses_earlier_one() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    // Twice as many pages as a client requests at a time, so each slot is used again.
    let contents: [Vec<u8>; 8] = std::array::from_fn(|seed| pattern(4096, seed as u64));
    let pages: Vec<PageId> = contents.iter().map(|bytes| page(&store, bytes, Place::Host)).collect();
    let sent = AtomicU64::new(0);
    let count = |more| {
        sent.fetch_add(more, Ordering::SeqCst);
    };
    let work = |client: &mut PageClient| {
        let (mut calls, mut fetched) = (0, vec![None; pages.len()]);
        let each = |index: usize, page: FetchedPage| {
            calls += 1;
            let expected = (calls + 4).min(pages.len() as u64);
            let started = Instant::now();
            while sent.load(Ordering::SeqCst) < expected && started.elapsed() < PATIENCE / 4 {
                std::thread::yield_now();
            }
            assert!(sent.load(Ordering::SeqCst) >= expected, "the server waits for the caller");
            assert_eq!(page.bytes, contents[index], "a page was overwritten by the next one in its slot");
            fetched[index] = Some(page.bytes);
        };
        client.fetch_many(&pages, each).unwrap();
        assert!(fetched.iter().zip(&contents).all(|(fetched, bytes)| fetched.as_ref() == Some(bytes)));
    };
    with_server(ground, &store, count, work);
}

#[test]
fn polled_agent_has_no_progress_thread() {
    let (ground, _turn) = Ground::get();
    let before = ground.progress_threads();
    let polled = patient(ground, "polled");
    assert_eq!(ground.progress_threads(), before);
    let other = ground.agent("other");
    assert_eq!(ground.progress_threads(), before + 1);
    drop((polled, other));
}

/// Replaces the contents of both pages in one batch.
fn set(store: &Store, pages: [PageId; 2], bytes: &[u8]) {
    let mut batch = store.batch();
    pages.into_iter().for_each(|page| {
        batch.write(page, 0, bytes);
    });
    store.commit(batch).unwrap();
}

#[test]
fn page_changed_during_fetch_is_fetched_again() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let pages = [page(&store, b"old!", Place::Host), page(&store, b"old!", Place::Host)];
    let mut changes = 0;
    let change = |sent| {
        if sent > 0 && changes < 3 {
            changes += 1;
            set(&store, pages, format!("new{changes}").as_bytes());
        }
    };
    let (lsn, fetched) = with_server(ground, &store, change, |client| client.fetch_state(&pages).unwrap());
    assert_eq!(changes, 3);
    assert_eq!(lsn, store.lsn());
    for (fetched, page) in fetched.iter().zip(pages) {
        assert_eq!((fetched.page, fetched.epoch, &*fetched.bytes), (page, Epoch(4), &b"new3"[..]));
    }
}

#[test]
fn constantly_changing_pages_are_reported() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let pages = [page(&store, b"old!", Place::Host), page(&store, b"old!", Place::Host)];
    let change = |sent| {
        if sent > 0 {
            set(&store, pages, b"new!");
        }
    };
    with_server(ground, &store, change, |client| {
        let error = failure(client.fetch_state(&pages));
        assert!(matches!(error, NixlError::Unsettled { rounds: 16, .. }), "{error}");
        let deleted = client.fetch_state(&[PageId(999)]);
        assert!(matches!(deleted, Err(Error::UnknownPage { .. })), "{deleted:?}");
    });
}

#[test]
fn late_bytes_of_abandoned_server_are_harmless() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let id = page(&store, &pattern(4096, 6), Place::Host);
    let agent = patient(ground, "server");
    let metadata = agent.metadata().unwrap();
    let client_agent = || ground.nixl.agent(&settings("client")).unwrap();
    let silent = failure(PageClient::connect(client_agent(), &metadata, ROOM));
    assert!(matches!(silent, NixlError::TimedOut { .. }), "{silent}");

    assert_eq!(agent.notifications().unwrap(), [], "requests to a server are no notifications");
    let mut server = PageServer::new(agent, &store);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| {
            let agent = ground.nixl.agent(&AgentOptions::new("client").timeout(Duration::from_millis(500)));
            PageClient::connect(agent.unwrap(), &metadata, ROOM).unwrap()
        });
        while !connecting.is_finished() {
            server.serve(Duration::ZERO).unwrap();
            std::thread::yield_now();
        }
        let mut client = connecting.join().unwrap();
        assert!(matches!(failure(client.fetch(id)), NixlError::TimedOut { .. }));
        assert!(matches!(failure(client.fetch(id)), NixlError::Lost { .. }));
        drop(client);
    });
    // The buffer is still registered, so a late page can be written to it.
    assert_eq!(server.serve(Duration::ZERO).unwrap(), 1);
}

#[test]
fn client_with_failed_transfer_can_reconnect() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let id = page(&store, b"page", Place::Host);
    let agent = patient(ground, "server");
    let metadata = agent.metadata().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut server = PageServer::new(agent, &store);
            while !is_over.load(Ordering::SeqCst) {
                server.serve(Duration::from_millis(1)).unwrap();
            }
        });
        let options = AgentOptions::new("client").timeout(Duration::from_secs(2));
        let connect = || PageClient::connect(ground.nixl.agent(&options).unwrap(), &metadata, ROOM).unwrap();
        let mut client = connect();
        ground.arm("nixl_capi_post_xfer_req", -2);
        let error = failure(client.fetch(id));
        is_over.store(!matches!(error, NixlError::TimedOut { .. }), Ordering::SeqCst);
        let again = connect().fetch(id).map(|page| page.bytes);
        is_over.store(true, Ordering::SeqCst);
        assert!(ground.disarm() && matches!(error, NixlError::TimedOut { .. }), "{error}");
        assert_eq!(again.unwrap(), b"page");
    });
}

/// Asserts that a replica has the newest state of a store.
fn assert_equal(replica: &PeerReplica, store: &Store) {
    let pages: Vec<PageInfo> = store.pages().unwrap().collect();
    assert_eq!(replica.pages().collect::<Vec<_>>(), pages);
    for info in &pages {
        let bytes = store.read_to_vec(info.page).unwrap();
        assert_eq!(replica.bytes(info.page), Some(&*bytes), "{info:?}");
        assert_eq!(replica.page(info.page).as_ref(), Some(info));
        if let Some(key) = &info.key {
            assert_eq!(replica.page_by_key(key.as_bytes()).as_ref(), Some(info));
        }
    }
    let view = store.view().unwrap();
    assert_eq!((replica.lsn(), replica.root()), (view.lsn(), &view.root()));
    assert_eq!((replica.store(), replica.position().lsn), (store.id(), view.lsn()));
}

#[test]
fn replica_fetches_state_and_then_changed_pages() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let mut batch = store.batch();
    for seed in 0..20 {
        let page = match seed % 3 {
            0 => batch.create_from(pattern(100 * seed, seed as u64), Place::Host).page(),
            1 => batch.create_from(pattern(100 * seed, seed as u64), Place::Disk).page(),
            _ => batch.create(64, Place::Host).key(format!("page {seed}")).page(),
        };
        batch.set_metadata(page, "seed", seed as u64);
    }
    batch.set_root("step", 1u64).set_root("note", "n".repeat(600 << 10));
    let pages = store.commit(batch).unwrap().pages;
    let work = |client: &mut PageClient| {
        let mut replica = client.replica().unwrap();
        assert_equal(&replica, &store);
        assert_eq!(replica.refresh(client).unwrap(), 0, "nothing has changed");

        let mut batch = store.batch();
        batch.write(pages[3], 0, b"changed").write(pages[4], 0, b"changed").delete(pages[5]);
        batch.create_from(b"new".to_vec(), Place::Host);
        batch.move_to(pages[6], Place::Disk);
        batch.resize(pages[7], 5).set_root("step", 2u64);
        store.commit(batch).unwrap();
        let fetched = replica.refresh(client).unwrap();
        assert_equal(&replica, &store);
        assert_eq!((replica.page(pages[5]), replica.bytes(pages[5])), (None, None));
        fetched
    };
    let fetched = with_server(ground, &store, |_| {}, work);
    assert_eq!(fetched, 4, "two writes, a resize and a new page");
}

#[test]
fn replica_is_state_after_one_batch() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let pages: [PageId; 6] = std::array::from_fn(|_| page(&store, &[0; 4], Place::Host));
    let change = |number: u32| {
        let mut batch = store.batch();
        for page in pages {
            batch.write(page, 0, &number.to_le_bytes());
        }
        batch.set_root("number", number);
        store.commit(batch).unwrap();
    };
    change(0);
    let mut number = 0;
    let between = |sent| {
        // Between two calls of the server, each of which sends some of the pages.
        if sent > 0 && number < 5 {
            number += 1;
            change(number);
        }
    };
    let work = |client: &mut PageClient| {
        let replica = client.replica().unwrap();
        let number = replica.root()["number"].as_u64().unwrap() as u32;
        assert_eq!(number, 5, "the pages changed while they were fetched");
        for page in pages {
            assert_eq!(replica.bytes(page), Some(&number.to_le_bytes()[..]));
        }
        assert_equal(&replica, &store);
    };
    with_server(ground, &store, between, work);
}

#[test]
fn failed_refresh_leaves_replica_unchanged() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    // More pages than a client requests at a time.
    let pages: [PageId; 6] = std::array::from_fn(|_| page(&store, b"old!", Place::Host));
    let set = |bytes: &[u8]| {
        let mut batch = store.batch();
        for page in pages {
            batch.write(page, 0, bytes);
        }
        store.commit(batch).unwrap();
    };
    let is_changing = AtomicBool::new(false);
    let change = |sent| {
        if sent > 0 && is_changing.load(Ordering::SeqCst) {
            set(b"new!");
        }
    };
    let work = |client: &mut PageClient| {
        let mut replica = client.replica().unwrap();
        let before: Vec<PageInfo> = replica.pages().collect();
        let assert_unchanged = |replica: &PeerReplica| {
            assert_eq!(replica.pages().collect::<Vec<_>>(), before);
            assert!(pages.iter().all(|page| replica.bytes(*page) == Some(b"old!")));
        };
        set(b"new!");
        is_changing.store(true, Ordering::SeqCst);
        let error = failure(replica.refresh(client));
        assert!(matches!(error, NixlError::Unsettled { rounds: 16, .. }), "{error}");
        assert_unchanged(&replica);

        is_changing.store(false, Ordering::SeqCst);
        let long = page(&store, &pattern(ROOM as usize + 1, 1), Place::Host);
        let error = failure(replica.refresh(client));
        assert!(error.to_string().contains("accepts at most 8192 bytes"), "{error}");
        assert_unchanged(&replica);

        let mut batch = store.batch();
        batch.delete(long);
        store.commit(batch).unwrap();
        assert_eq!(replica.refresh(client).unwrap(), 6);
        assert_equal(&replica, &store);
    };
    with_server(ground, &store, change, work);
}

/// Copies the files of a store.
fn copy_store(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_store(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn replica_does_not_mix_histories_of_store() {
    let (ground, _turn) = Ground::get();
    let folder = tempfile::tempdir().unwrap();
    let [path, copy] = ["store", "copy"].map(|name| folder.path().join(name));
    let open = |path: &Path| {
        let schedule = SnapshotSchedule::new().log_bytes(None).interval(None);
        Options::new().snapshots(schedule).device(DeviceChoice::Host).open(path).unwrap()
    };
    let original = open(&path);
    let pages = [page(&original, b"old!", Place::Host), page(&original, b"old!", Place::Host)];
    drop(original);
    copy_store(&path, &copy);
    let original = open(&path);
    set(&original, pages, b"lost");
    let mut replica = with_server(ground, &original, |_| {}, |client| client.replica().unwrap());
    assert_equal(&replica, &original);
    drop(original);

    // As after a crash that lost the last batch: the versions of the pages are equal, but not their bytes.
    let recovered = open(&copy);
    set(&recovered, pages, b"new!");
    assert_eq!(replica.page(pages[0]).unwrap().epoch, recovered.page(pages[0]).unwrap().epoch);
    assert_eq!(replica.lsn(), recovered.lsn());
    let fetched = with_server(ground, &recovered, |_| {}, |client| replica.refresh(client).unwrap());
    assert_eq!(fetched, 2);
    assert_equal(&replica, &recovered);

    let other = store(DeviceChoice::Host);
    page(&other, b"else", Place::Host);
    with_server(ground, &other, |_| {}, |client| replica.refresh(client).unwrap());
    assert_equal(&replica, &other);
}
