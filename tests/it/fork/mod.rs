//! A forked child inherits the parent's handles but none of its threads. Each call on such a handle fails
//! before it writes a byte or waits for a lock. Inherited handles neither lock out another process nor free a
//! resource.

pub(crate) mod children;
mod locks;

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use remanent::batch::{Shadow, Width};
use remanent::device::{RawStream, UnifiedHint, UnifiedSupport};
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::options::{LogIo, LogOptions, SnapshotSchedule};
use remanent::snapshot::SnapshotPhase;
use remanent::{
    Ack, DeviceChoice, Error, Key, Lsn, Options, PageId, Place, SnapshotOptions, StatePoint, Store,
    WriteBatch,
};

use crate::direct_io;
use crate::earlier_states::Ends;
use crate::machine::alone;
use children::in_child;

#[test]
fn forked_child_neither_uses_nor_locks_store() {
    let directory = tempfile::tempdir().unwrap();
    let options = || Options::new().log(LogOptions::new().segment_len(16 << 10));
    let store = Arc::new(options().open(directory.path()).unwrap());
    let mut batch = store.batch();
    batch.create(16, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];

    // `cat` runs until its standard input ends. Until its `exec`, it is a fork of this process.
    let mut command = Command::new("cat");
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let inherited = store.clone();
    let use_in_the_child = move || {
        let forked = |result: remanent::Result<()>| matches!(result, Err(Error::Forked { .. }));
        let mut bytes = [0; 16];
        let refused = forked(inherited.read(page, 0, &mut bytes).map(drop))
            && forked(inherited.wait_durable(Lsn(1)))
            && forked(inherited.submit(inherited.batch()).map(drop))
            && forked(inherited.snapshot().map(drop))
            && forked(inherited.pages().map(drop));
        // `spawn` returns this value in the parent.
        if refused { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    };
    // SAFETY: only calls that are safe after a fork may be made between fork and exec. Each of these calls
    // compares the process id with that of the opener, finds a difference, and returns an error that owns no
    // memory. It takes no lock, allocates and frees no memory, and waits for no thread.
    unsafe { command.pre_exec(use_in_the_child) };
    let mut child = command.spawn().expect("every call in the child is refused as forked");

    // The parent's handle is unaffected.
    let mut bytes = [1; 16];
    assert_eq!(store.read(page, 0, &mut bytes).unwrap(), Lsn(1));
    assert_eq!(bytes, [0; 16]);
    drop(command);
    Arc::into_inner(store).unwrap().close().unwrap();
    let again = options().open(directory.path()).unwrap();
    assert_eq!(again.lsn(), Lsn(1));
    assert_eq!(child.try_wait().unwrap(), None, "the child must have outlived the parent's handle");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// Asserts that a call failed because this process did not open the store.
fn refused<T>(call: &str, result: remanent::Result<T>) -> Result<(), String> {
    match result {
        Err(Error::Forked { opener }) if opener == std::os::unix::process::parent_id() => Ok(()),
        Err(error) => Err(format!("{call}: {error}\n")),
        Ok(_) => Err(format!("{call}: not refused\n")),
    }
}

/// Options of a store whose files are created quickly.
fn small() -> Options {
    Options::new().device(DeviceChoice::Host).log(LogOptions::new().segment_len(64 << 10))
}

/// Returns a batch that sets the 8 bytes of a page.
fn set(store: &Store, page: PageId, number: u64) -> WriteBatch {
    let mut batch = store.batch();
    batch.write(page, 0, &number.to_le_bytes());
    batch
}

fn number_in(store: &Store, page: PageId) -> u64 {
    let mut bytes = [0; 8];
    store.read(page, 0, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Number of forks of the parent over all modes of writing the log, and between two opens of its store.
const FORKS: usize = 1000;
const FORKS_BETWEEN_OPENINGS: usize = 20;

#[test]
fn a_thousand_children_change_nothing_during_durable_commits() {
    alone(|| {
        let ways = [LogIo::Mapped, LogIo::Buffered, direct_io::log_io()];
        for log_io in ways {
            let directory = tempfile::tempdir().unwrap();
            let mut told = Vec::new();
            for _ in 0..FORKS.div_ceil(ways.len() * FORKS_BETWEEN_OPENINGS) {
                told = fork_during_commits(directory.path(), log_io, &told);
            }
        }
    });
}

/// Opens the store, which must contain the batches that were acknowledged before, and forks children while
/// threads commit. Returns the acknowledged content of each of the three pages.
fn fork_during_commits(path: &Path, log_io: LogIo, told: &[u64]) -> Vec<u64> {
    let options = Options::new().log(LogOptions::new().segment_len(64 << 10).io(log_io)).ack(Ack::Durable);
    let store = options.open(path).unwrap_or_else(|error| panic!("{log_io}: {error}"));
    let mut pages: Vec<PageId> = store.pages().unwrap().map(|info| info.page).collect();
    let found: Vec<u64> = pages.iter().map(|page| number_in(&store, *page)).collect();
    assert_eq!(found, told, "{log_io}: what was acknowledged, and what is there");
    if pages.is_empty() {
        let mut batch = store.batch();
        (0..3).for_each(|_| _ = batch.create(8, Place::Host).page());
        pages = store.commit(batch).unwrap().pages;
    }
    let first = told.first().copied().unwrap_or(0);
    let stop = AtomicBool::new(false);
    let told = std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        let committers: Vec<_> = pages[1..]
            .iter()
            .map(|page| {
                let (store, stop) = (&store, &stop);
                scope.spawn(move || {
                    let mut number = number_in(store, *page);
                    while !stop.load(Ordering::Relaxed) {
                        number += 1;
                        store.commit(set(store, *page, number)).unwrap();
                    }
                    number
                })
            })
            .collect();
        let mut follower = Follower::open(path, FollowFrom::Snapshot).unwrap();
        let view = Store::open_read_only(path).unwrap();
        let mut failure = Ok(());
        let mut last = first;
        for number in first + 1..=first + FORKS_BETWEEN_OPENINGS as u64 {
            let mut ticket = Some(store.submit(set(&store, pages[0], number)).unwrap());
            failure = failure.and(in_child(|| {
                let ticket = ticket.take().expect("a copy of the parent's");
                refused("wait for Durable", ticket.wait(Ack::Durable))?;
                refused("wait for Logged", ticket.clone().wait(Ack::Logged))?;
                refused("wait for Applied", ticket.wait(Ack::Applied))?;
                refused("wait_durable", store.wait_durable(Lsn(1)))?;
                refused("commit", store.commit(set(&store, pages[0], 0)))?;
                refused("next", follower.next(Duration::MAX))?;
                refused("read", view.read(pages[0], 0, &mut [0; 8]))?;
                let _without_a_lock = (store.lsn(), store.stats(), store.snapshots(), store.unloaded_pages());
                drop(ticket);
                Ok(())
            }));
            ticket.expect("the child took its own copy").wait(Ack::Durable).unwrap();
            last = number;
            if failure.is_err() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let numbers = committers.into_iter().map(|committer| committer.join().unwrap());
        let told: Vec<u64> = [last].into_iter().chain(numbers).collect();
        failure.unwrap_or_else(|failure| panic!("{log_io}: {failure}"));
        told
    });
    store.close().unwrap();
    told
}

#[test]
fn forked_child_calls_fail_and_drops_free_nothing() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // A background snapshot runs so slowly that it keeps its locks until the test ends.
        let options =
            small().snapshots(SnapshotSchedule::new().log_bytes(256 << 10).bytes_per_second(4 << 10));
        let store = options.open(path).unwrap();
        let mut batch = store.batch();
        (0..4).for_each(|_| _ = batch.create(256 << 10, Place::Host).page());
        let pages = store.commit(batch).unwrap().pages;
        let first = store.snapshot().unwrap();
        let mut batch = store.batch();
        // Do not write whole pages, because these would be written to an image file instead of the log.
        pages.iter().for_each(|page| _ = batch.write(*page, 0, &[7; 128 << 10]));
        let mut ticket = Some(store.submit(batch).unwrap());
        ticket.as_ref().unwrap().wait(Ack::Durable).unwrap();
        while store.stats().snapshots.phase == SnapshotPhase::Idle {
            std::thread::yield_now();
        }
        let mut follower = Some(Follower::open(path, FollowFrom::Beginning).unwrap());
        let mut view = Some(Store::open_at(path, StatePoint::Snapshot(first.id)).unwrap());
        let memory = store.device_bytes(16, Place::Host).unwrap();
        let copy = store.working_copy(pages[0], Width::W1, Shadow::Page).unwrap();
        let mut temporary = Some(small().open_temporary().unwrap());
        let fork = path.join("fork");
        let mut kept = Some(copy.clone());
        let mut store = Some(store);
        let mut everything = |store: &mut Option<Store>| {
            let here = store.as_ref().expect("a copy of the parent's");
            let mut lease = Some(here.lease(pages[1]).unwrap());
            let mut pin = Some(here.pin(pages[2]).unwrap());
            let mut as_of = Some(here.view().unwrap());
            let mut listed = Some(here.pages().unwrap());
            let mut read = Some(here.read_many(&[(pages[1], 0..4)]).unwrap());
            let mut many = Some(here.read_many(&[(pages[1], 0..4)]).unwrap().wait().unwrap());
            let mut changes = Some(here.changes().unwrap());
            let mut ahead = Some(here.read_ahead(Place::Host).unwrap());
            ahead.as_mut().unwrap().push(&pages[..1]).unwrap();
            // SAFETY: the host device dereferences no stream handle.
            let stream = unsafe { RawStream::from_cuda(1) };
            let outcome = in_child(|| {
                refused("read", here.read(pages[0], 0, &mut [0; 8]))?;
                refused("lease", here.lease(pages[0]))?;
                refused("pin", here.pin(pages[0]))?;
                refused("wait_warm", here.wait_loaded())?;
                refused("page", here.page(pages[0]))?;
                refused("page_by_key", here.page_by_key(Key::new("key").unwrap()))?;
                refused("pages", here.pages())?;
                refused("view", here.view())?;
                refused("contains", here.contains(pages[0]))?;
                refused("contains_key", here.contains_key(Key::new("key").unwrap()))?;
                refused("page_count", here.page_count())?;
                refused("read_key", here.read_key(Key::new("key").unwrap(), 0, &mut [0; 8]))?;
                refused("read_to_vec", here.read_to_vec(pages[0]))?;
                refused("read_into", here.read_into(pages[0], &mut Vec::new()))?;
                refused("root", here.root())?;
                refused("submit", here.submit(here.batch()))?;
                refused("commit", here.commit(here.batch()))?;
                refused("wait_durable", here.wait_durable(Lsn(1)))?;
                refused("snapshot", here.snapshot())?;
                refused("publish_snapshot", here.snapshot_with(SnapshotOptions::new().only_published()))?;
                refused("wait_verified", here.wait_verified())?;
                refused("snapshot_exact", here.snapshot_with(SnapshotOptions::new().exact()))?;
                refused("snapshot_named", here.snapshot_with(SnapshotOptions::new().name("name")))?;
                refused("would_prune", here.would_prune(&here.retention()))?;
                refused("prune", here.prune(&here.retention()))?;
                refused("restore_from_snapshot", here.restore(StatePoint::Snapshot(first.id)))?;
                refused("restore_to", here.restore(StatePoint::Lsn(Lsn(1))))?;
                refused("scrub", here.scrub())?;
                refused("trim", here.trim())?;
                refused("device_bytes", here.device_bytes(16, Place::Host))?;
                refused("release", here.release(pages[0]))?;
                refused("working_copy", here.working_copy(pages[0], Width::W1, Shadow::Page))?;
                refused("reload", here.reload(&copy))?;
                refused("audit", here.audit())?;
                refused("compare", here.compare(pages[0], pages[1], Width::W1))?;
                refused("read_many", here.read_many(&[(pages[0], 0..1)]))?;
                refused("changes", here.changes())?;
                refused("ensure", here.ensure(&pages, Place::Pinned))?;
                refused("prefetch", here.prefetch(&pages, Place::Host))?;
                refused("read_ahead", here.read_ahead(Place::Host))?;
                refused("hint_unified", here.hint_unified(pages[0], UnifiedHint::ReadMostly(true)))?;
                refused("fork", here.fork(&fork, StatePoint::Lsn(Lsn(1))))?;
                // These calls cannot return an error. They return an empty result, and wait for no thread.
                let stats = here.stats();
                let (lsn, snapshots, unloaded) = (here.lsn(), here.snapshots(), here.unloaded_pages());
                if here.unified_memory() != UnifiedSupport::default() {
                    return Err("memory of the parent's\n".to_owned());
                }
                let nothing = (lsn, stats.logged, snapshots.len(), unloaded.pages) == (Lsn(0), Lsn(0), 0, 0);
                if !nothing {
                    return Err(format!("{lsn} {stats:?} {snapshots:?} {unloaded:?}\n"));
                }
                here.reset_peaks();
                here.wait_for_snapshots(u64::MAX);
                here.wait_for_scrubs(u64::MAX);

                let ticket = ticket.take().unwrap();
                refused("Ticket::wait", ticket.wait(Ack::Durable))?;
                refused("Ticket::wait_on", ticket.wait_on(stream))?;
                let mut follower = follower.take().unwrap();
                refused("Follower::next", follower.next(Duration::ZERO))?;
                let view = view.take().unwrap();
                refused("Snapshot::read", view.read(pages[0], 0, &mut [0; 8]))?;
                refused("Snapshot::page", view.page(pages[0]))?;
                refused("Snapshot::fork", view.fork(&fork))?;
                let (lease, pin) = (lease.take().unwrap(), pin.take().unwrap());
                refused("Lease::bytes", lease.bytes())?;
                refused("Lease::on", lease.on(stream).map(drop))?;
                refused("Pin::on", pin.on(stream).map(drop))?;
                let (as_of, mut listed) = (as_of.take().unwrap(), listed.take().unwrap());
                refused("ReadView::page", as_of.page(pages[0]))?;
                refused("ReadView::page_by_key", as_of.page_by_key(Key::new("key").unwrap()))?;
                refused("ReadView::read", as_of.read(pages[0], 0, &mut [0; 8]))?;
                let seen = (as_of.lsn(), as_of.page_count(), as_of.contains(pages[0]), as_of.root().len());
                if seen != (Lsn(0), 0, false, 0) || as_of.pages().count() + listed.by_ref().count() > 0 {
                    return Err(format!("a view of the parent's: {seen:?}\n"));
                }
                drop((as_of, listed));
                let (read, many) = (read.take().unwrap(), many.take().unwrap());
                let mut changes = changes.take().unwrap();
                let mut ahead = ahead.take().unwrap();
                refused("ReadAhead::push", ahead.push(&pages))?;
                refused("ReadAhead::next_step", ahead.next_step())?;
                drop(ahead);
                refused("ReadMany::is_ready", read.is_ready())?;
                refused("ReadMany::wait_timeout", read.wait_timeout(Duration::MAX))?;
                refused("ReadMany::wait", read.wait())?;
                refused("ChangeStream::next_timeout", changes.next_timeout(Duration::MAX))?;
                if (many.lsn(), many.as_bytes(), many.get(0)) != (Lsn(0), &[][..], &[][..])
                    || changes.next().is_some()
                {
                    return Err(format!("bytes or changes of the parent's: {many:?}\n"));
                }
                drop((many, changes));
                refused("DeviceBytes::write", memory.write(0, &[1]))?;
                refused("DeviceBytes::read", memory.read(0, &mut [0]))?;
                if lease.address().or(pin.address()).or(memory.address()).is_some() {
                    return Err("an address of the parent's\n".to_owned());
                }
                drop((ticket, follower, view, kept.take()));
                refused("Lease::end", lease.end())?;
                drop(pin);
                refused("close", temporary.take().unwrap().close())?;
                // A child can open stores that no process has open. It cannot open the parent's store.
                let own = small().open_temporary().map_err(|error| error.to_string())?;
                own.commit(own.batch()).map_err(|error| error.to_string())?;
                own.close().map_err(|error| error.to_string())?;
                match small().open(path) {
                    Err(Error::Locked { .. }) => Ok(()),
                    other => Err(format!("{other:?}\n")),
                }
            });
            // The parent's handles are unaffected.
            assert!(lease.unwrap().bytes().unwrap()[..128 << 10] == [7; 128 << 10]);
            assert_eq!(pin.unwrap().page(), pages[2]);
            assert_eq!(
                (read.unwrap().wait().unwrap().get(0), many.unwrap().get(0)),
                (&[7; 4][..], &[7; 4][..])
            );
            assert_eq!(changes.unwrap().next_timeout(Duration::ZERO).unwrap(), None);
            assert_eq!(ahead.unwrap().next_step().unwrap().unwrap(), pages[..1]);
            assert!(as_of.unwrap().contains(pages[0]) && listed.unwrap().eq(here.pages().unwrap()));
            outcome
        };
        everything(&mut store).unwrap();
        // The handles stay valid after a child closes and drops its copies, and finally its copy of the
        // store.
        in_child(|| refused("close", store.take().unwrap().close())).unwrap();

        let store = store.unwrap();
        assert!(!fork.exists());
        ticket.unwrap().wait(Ack::Applied).unwrap();
        assert_eq!(follower.unwrap().next(Duration::from_secs(60)).unwrap().unwrap().lsn(), Lsn(1));
        let temporary = temporary.unwrap();
        temporary.commit(temporary.batch()).unwrap();
        temporary.snapshot().unwrap();
        memory.write(0, &[9]).unwrap();
        store.reload(&kept.unwrap()).unwrap();
        store.commit(set(&store, pages[0], 5)).unwrap();
        store.close().unwrap();
        let store = small().open(path).unwrap();
        assert_eq!(number_in(&store, pages[0]), 5);
        // The view still keeps its snapshot, although a child dropped its copy of the view.
        let view = view.unwrap();
        store.snapshot().unwrap();
        let pruned = store.would_prune(&store.retention().snapshots_kept(1).log_kept(0)).unwrap();
        assert!(pruned.snapshots.iter().all(|info| info.id != first.id), "{pruned:?}");
        view.read(pages[0], 0, &mut [1; 8]).unwrap();
    });
}

/// A replica is memory of its own process. A child can continue its copy with a new follower.
#[test]
fn forked_child_continues_with_replica_copy() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let store =
            Options::new().log(LogOptions::new().segment_len(64 << 10)).open(directory.path()).unwrap();
        let mut batch = store.batch();
        batch.create(8, Place::Host);
        let page = store.commit(batch).unwrap().pages[0];
        store.snapshot().unwrap();
        let mut replica = Replica::from_snapshot(directory.path()).unwrap();
        store.commit(set(&store, page, 3)).unwrap();
        in_child(|| {
            let follow = || -> remanent::Result<()> {
                let from = FollowFrom::Position(replica.position());
                let mut follower = Follower::open(directory.path(), from)?;
                let batch = follower.next(Duration::from_secs(60))?.expect("it is logged");
                replica.apply(&batch)
            };
            let mut follow = follow;
            follow().map_err(|error| error.to_string())?;
            let bytes = replica.bytes(page).map(<[u8]>::to_vec);
            if bytes == Some(3u64.to_le_bytes().to_vec()) { Ok(()) } else { Err(format!("{bytes:?}\n")) }
        })
        .unwrap();
        assert_eq!(replica.bytes(page), Some(&[0; 8][..]));
    });
}

/// A lock in the child's own store must not refer to threads that were waiting in the parent at the time of
/// the fork, because the child may reuse the memory of their stacks for its own threads.
#[test]
fn forked_child_uses_own_store_while_parent_threads_wait() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let durable = || small().ack(Ack::Durable);
        let store = durable().open(directory.path()).unwrap();
        let mut batch = store.batch();
        batch.create(8, Place::Host);
        let page = store.commit(batch).unwrap().pages[0];
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    store.commit(set(&store, page, number)).unwrap();
                }
            });
            let mut outcome = Ok(());
            for _ in 0..20 {
                outcome = outcome.and(in_child(|| {
                    let lives = || {
                        let own = durable().open_temporary()?;
                        let mut batch = own.batch();
                        batch.create(8, Place::Host);
                        let page = own.commit(batch)?.pages[0];
                        for number in 1..=20 {
                            own.commit(set(&own, page, number))?;
                        }
                        own.snapshot()?;
                        own.close()
                    };
                    lives().map_err(|error: Error| error.to_string())
                }));
            }
            stop.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
        store.close().unwrap();
    });
}
