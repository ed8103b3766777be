//! A temporary shortage of open files, memory or threads. Only the call that needs the resource fails, and
//! the same store works again when the shortage ends. `docs/failures.md` lists which failures poison a store
//! and which do not.

use std::path::Path;

use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;
use remanent::error::{FileName, Folder, IoObject, Remedy};
use remanent::follow::{FollowFrom, Follower};
use remanent::options::{LogIo, MemoryOptions, PageLoad, ScrubSchedule};
use remanent::testing::sim_disk::{DiskFault, Operation};
use remanent::testing::thread_refusals;
use remanent::{SnapshotOptions, StatePoint};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::direct_io;
use crate::files::SPARES_FOR_OPENS;
use crate::machine::alone;
use crate::with_options::With;

/// Error numbers of shortages: too many open files in the process or in the system, no memory, and no thread
/// or another temporary shortage.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;
const ENOMEM: i32 = 12;
const EAGAIN: i32 = 11;

/// The operations that open or map a file.
const OPERATIONS: [Operation; 3] = [Operation::Create, Operation::Open, Operation::Window];
/// Length of a note whose batch needs its own segment.
const LONG: usize = 20_000;

fn is_the_shortage(error: &Error) -> bool {
    let text = error.to_string();
    [EMFILE, ENFILE, ENOMEM, EAGAIN].iter().any(|errno| text.contains(&format!("(os error {errno})")))
}

/// Runs `case` with a failure of the first, the second, … operation of these kinds, once or until the
/// shortage ends. `case` returns true if the fault was hit.
fn at_every_moment(case: impl Fn(DiskFault) -> bool + Send + Sync + Copy + 'static) {
    let kinds = [(1, EMFILE), (usize::MAX, EMFILE), (2, ENOMEM), (1, ENFILE), (usize::MAX, EAGAIN)];
    at_every_fault(&OPERATIONS, &kinds, case);
}

fn fails_one_call_and_goes_on(fault: DiskFault, options: Options) -> bool {
    let disk = SimDisk::new();
    let device = Gauge::host();
    let store = open_with(&disk, device.clone(), options).unwrap();
    let mut line = Line::begin(&store);
    disk.fail(fault);
    let outcome = line.work(&store).and_then(|()| line.commit_with_note(&store, Ack::Logged, LONG));
    let struck = disk.faults_left() < fault.times;
    disk.clear_faults();
    if let Err(error) = &outcome {
        assert!(error.to_string().contains(" of the store in a simulated disk"), "{error}");
    }
    match outcome {
        Ok(()) => {}
        // The restore was logged but could not read an image again after verifying it, so the store cannot
        // load the restored state.
        Err(error @ Error::Poisoned(_)) => {
            assert!(is_the_shortage(&error) && fault.operation == Operation::Open, "{error}");
            assert_eq!(error.remedy(), Remedy::Reopen, "{error}");
            drop(store);
            assert_eq!(open_on_host(&disk).unwrap().lsn().0, line.logged + 1, "{error}");
            return struck;
        }
        Err(error) => {
            assert!(is_the_shortage(&error), "{error}");
            assert_eq!(error.remedy(), Remedy::Retry, "{error}");
        }
    }
    // The shortage has ended, and the same store continues to work.
    line.work(&store).unwrap();
    line.check_read(&store).unwrap();
    store.wait_verified().unwrap();
    store.prune(&store.retention()).unwrap();
    let scrubbed = store.scrub().unwrap();
    assert!(scrubbed.damage.is_empty(), "{scrubbed:?}");
    store.close().unwrap();
    assert_eq!(device.live(), 0, "page memory was not given back");
    line.check(&open_on_host(&disk.after_power_cut()).unwrap(), line.durable);
    line.check(&open_on_host(&disk).unwrap(), line.logged);
    struck
}

#[test]
fn shortage_fails_one_call_only() {
    at_every_moment(|fault| fails_one_call_and_goes_on(fault, small()));
}

/// The segment for a long frame replaces a short segment. If the new segment cannot be mapped, a frame that
/// was written to the short one would be in no named file.
#[test]
fn unmappable_long_segment_loses_no_frame() {
    for io in [LogIo::Mapped, LogIo::Direct] {
        watched("a long segment", move || {
            let disk = SimDisk::new();
            let store =
                open_with(&disk, Gauge::host(), small().with(|options| options.log.io = Some(io))).unwrap();
            let mut line = Line::begin(&store);
            line.commits(&store, 3).unwrap();
            // Wait until no segment is under construction.
            while held(&disk) < 2 + SPARES_FOR_OPENS {
                std::thread::yield_now();
            }
            // The fault may affect the thread that creates segments, which retries, instead of a commit.
            let refused = (0..100).find_map(|_| {
                disk.fail(DiskFault { operation: Operation::Window, skip: 0, times: 1, errno: EMFILE });
                line.commit_with_note(&store, Ack::Logged, LONG).err()
            });
            let refused = refused.expect("the fault strikes a commit");
            assert!(is_the_shortage(&refused), "{refused}");
            disk.clear_faults();
            line.commits(&store, 20).unwrap();
            store.wait_durable(store.lsn()).unwrap();
            line.check(&open_on_host(&disk.after_power_cut()).unwrap(), line.logged);
            line.commit_with_note(&store, Ack::Durable, LONG).unwrap();
            line.check(&open_on_host(&disk.after_power_cut()).unwrap(), line.logged);
        });
    }
}

fn held(disk: &SimDisk) -> usize {
    let names = remanent::disk::Disk::list(disk, Folder::Log).unwrap();
    let is_spare = |name: &&String| matches!(FileName::parse(Folder::Log, name), Some(FileName::Spare(_)));
    names.iter().filter(is_spare).count()
}

#[test]
fn shortage_in_the_background_fails_no_call() {
    // Every second segment triggers a snapshot.
    at_every_moment(|fault| {
        fails_one_call_and_goes_on(
            fault,
            small().with(|options| options.snapshots.log_bytes = Some(24 << 10)),
        )
    });
}

/// A file that cannot be read during a shortage is neither damaged nor missing. The open uses no older
/// snapshot instead, and removes no file.
#[test]
fn a_shortage_during_an_open_fails_that_open() {
    at_every_moment(|fault| {
        let disk = SimDisk::new();
        // The store has no spares, which an open would use before it creates a segment.
        let options = || small().with(|options| options.log.reserve_bytes = Some(0));
        let open_on_host = |disk: &SimDisk| open_with(disk, Gauge::host(), options());
        let store = open_on_host(&disk).unwrap();
        let mut line = Line::begin(&store);
        for _ in 0..2 {
            line.commits(&store, 3).unwrap();
            store.snapshot().unwrap();
        }
        line.commits(&store, 2).unwrap();
        let kept = store.snapshots();
        store.close().unwrap();
        disk.fail(fault);
        let opened = open_on_host(&disk);
        let struck = disk.faults_left() < fault.times;
        disk.clear_faults();
        match opened {
            Ok(store) => line.check(&store, line.logged),
            Err(error) => {
                assert!(is_the_shortage(&error) && !matches!(error, Error::Damaged(_)), "{error}");
                assert_eq!(error.remedy(), Remedy::Retry, "{error}");
            }
        }
        let store = open_on_host(&disk).unwrap();
        line.check(&store, line.logged);
        let ids =
            |kept: &[remanent::snapshot::SnapshotInfo]| kept.iter().map(|info| info.id).collect::<Vec<_>>();
        assert_eq!(ids(&store.snapshots()), ids(&kept));
        struck
    });
}

/// Returns a store that was closed after a snapshot.
fn closed() -> (SimDisk, Line) {
    let disk = SimDisk::new();
    let store = open_on_host(&disk).unwrap();
    let mut line = Line::begin(&store);
    line.commits(&store, 3).unwrap();
    store.snapshot().unwrap();
    store.close().unwrap();
    (disk, line)
}

#[test]
fn pages_are_loaded_when_the_shortage_ends() {
    watched("on demand", || {
        let (disk, mut line) = closed();
        let device = Arc::new(HostDevice::new());
        for skip in 0..40 {
            let fault = DiskFault { operation: Operation::Open, skip, times: 3, errno: EMFILE };
            disk.fail(fault);
            match open_with(
                &disk,
                device.clone(),
                small().memory(MemoryOptions::new().load(PageLoad::OnDemand)),
            ) {
                Ok(store) => {
                    line.check_read(&store).unwrap();
                    store.wait_loaded().unwrap();
                    store.commit(store.batch()).unwrap();
                    line.logged += 1;
                    line.steps.push(line.steps[line.steps.len() - 1]);
                    let _may_fail_too = store.snapshot();
                    disk.clear_faults();
                    store.close().unwrap();
                }
                Err(error) => assert!(is_the_shortage(&error), "{error}"),
            }
            disk.clear_faults();
        }
    });
}

/// A prefetch of a page that cannot be loaded during the shortage does not delay a close.
#[test]
fn close_does_not_wait_for_prefetches() {
    watched("prefetch", || {
        let (disk, line) = closed();
        let fault =
            DiskFault { operation: Operation::ReadProven, skip: 0, times: usize::MAX / 2, errno: EMFILE };
        disk.fail(fault);
        let on_demand = small().memory(MemoryOptions::new().load(PageLoad::OnDemand));
        let store = open_with(&disk, Arc::new(HostDevice::new()), on_demand).unwrap();
        assert!(store.unloaded_pages().pages > 0);
        let pages: Vec<PageId> = store.pages().unwrap().map(|info| info.page).collect();
        let coming = store.prefetch(&pages, Place::Host).unwrap();
        // The prefetch is waiting for a file, or will wait until the store is closed.
        assert!(!coming.wait_timeout(Duration::from_millis(20)).unwrap());
        drop(store);
        let ended = coming.wait().unwrap_err();
        assert!(matches!(ended, Error::Closed), "{ended}");
        disk.clear_faults();
        line.check_read(&open_on_host(&disk).unwrap()).unwrap();
    });
}

#[test]
fn scrub_does_not_report_shortage_as_damage() {
    watched("scrub", || {
        for skip in 0.. {
            let disk = SimDisk::new();
            let store = open_on_host(&disk).unwrap();
            let mut line = Line::begin(&store);
            line.commits(&store, 3).unwrap();
            store.snapshot().unwrap();
            line.commits(&store, 3).unwrap();
            let before = store.snapshots().len();
            disk.fail(DiskFault { operation: Operation::Open, skip, times: 1, errno: EMFILE });
            let scrubbed = store.scrub();
            let struck = disk.faults_left() == 0;
            match scrubbed {
                Ok(scrubbed) => {
                    assert!(scrubbed.damage.is_empty() && scrubbed.mended.is_none(), "{scrubbed:?}")
                }
                Err(error) => assert!(is_the_shortage(&error), "{error}"),
            }
            assert_eq!(store.snapshots().len(), before, "nothing was to be mended");
            disk.clear_faults();
            assert!(store.scrub().unwrap().damage.is_empty());
            if !struck {
                assert!(skip > 0);
                return;
            }
        }
    });
}

/// Returns the number of threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Waits until this process has at most `before` threads. The system lists a thread for a short time after it
/// was joined.
fn await_threads(before: usize) {
    while threads() > before {
        std::thread::yield_now();
    }
}

#[test]
fn open_that_cannot_start_a_thread_leaks_nothing() {
    alone(|| {
        let (disk, line) = closed();
        let hour = Some(Duration::from_secs(3600));
        let options = || {
            small()
                .memory(MemoryOptions::new().load(PageLoad::OnDemand))
                .scrubs(ScrubSchedule::new().interval(hour))
                .with(|options| options.snapshots.interval = hour)
        };
        let before = threads();
        for name in ["keeper", "maker", "apply", "load", "snapshot", "scrub"] {
            let device = Gauge::host();
            thread_refusals::refuse(Some(&format!("remanent-{name}")));
            let error = open_with(&disk, device.clone(), options()).unwrap_err();
            assert_eq!(thread_refusals::refuse(None), [format!("remanent-{name}")]);
            assert!(
                matches!(error, Error::Io { object: IoObject::Thread { .. }, .. }) && is_the_shortage(&error),
                "{error}"
            );
            assert_eq!(error.remedy(), Remedy::Retry, "{error}");
            assert!(error.to_string().contains("of the store in a simulated disk"), "{error}");
            assert_eq!(device.live(), 0, "{name}");
            await_threads(before);
            let store = open_with(&disk, device.clone(), options()).unwrap();
            line.check(&store, line.logged);
            store.close().unwrap();
            assert_eq!(device.live(), 0, "{name}");
            await_threads(before);
        }
    });
}

/// An open store has all threads that it requires. Other threads are optional, and their work is done without
/// them.
#[test]
fn store_continues_without_new_threads() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let [path, fork] = ["store", "fork"].map(|name| directory.path().join(name));
        let options = || small().device(remanent::DeviceChoice::Host);
        let store = options().open(&path).unwrap();
        let mut line = Line::begin(&store);
        // Several threads write the images of these pages.
        let large = options().open(directory.path().join("large")).unwrap();
        let mut batch = large.batch();
        let page = batch.create(8 << 20, Place::Host).page();
        batch.fill(page, 0, 8 << 20, &[7]);
        let page = large.commit(batch).unwrap().pages[0];
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        thread_refusals::refuse(Some(""));
        large.snapshot().unwrap();
        let restored = large.restore(StatePoint::Lsn(large.lsn())).unwrap();
        assert!(large.read_to_vec(page).unwrap() == vec![7; 8 << 20], "at {restored:?}");
        line.work(&store).unwrap();
        store.snapshot_with(SnapshotOptions::new().only_published()).unwrap();
        store.wait_verified().unwrap();
        assert!(store.snapshots().iter().all(|snapshot| snapshot.verified));
        store.prune(&store.retention()).unwrap();
        assert!(store.scrub().unwrap().damage.is_empty());
        assert!(store.audit().unwrap().changed.is_empty());
        store.fork(&fork, StatePoint::Lsn(store.lsn())).unwrap();
        let view = Store::open_at(&path, StatePoint::Lsn(store.lsn())).unwrap();
        view.read(line.page, 0, &mut [0; 8]).unwrap();
        // The follower polls, because no file event reaches it.
        let mut follower = Follower::open(&path, FollowFrom::Snapshot).unwrap();
        while follower.next(Duration::ZERO).unwrap().is_some() {}
        line.commit(&store, Ack::Logged).unwrap();
        assert_eq!(follower.next(Duration::from_secs(60)).unwrap().unwrap().lsn(), store.lsn());
        let refused = options().open(&fork).unwrap_err();
        assert!(matches!(&refused, Error::Io { object: IoObject::Thread { .. }, .. }), "{refused}");
        assert!(refused.to_string().contains(fork.to_str().unwrap()), "{refused}");
        store.close().unwrap();
        let refused = thread_refusals::refuse(None);
        for name in ["crew", "both", "verify", "watch"] {
            let was_refused = refused.contains(&format!("remanent-{name}"));
            assert!(was_refused || cores < 2, "the work has no use for a thread {name}: {refused:?}");
        }
        line.check(&options().open(&path).unwrap(), line.logged);
    });
}

#[test]
fn threads_are_started_in_one_place() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut places) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let source = std::fs::read_to_string(&path).unwrap();
                let engine = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
                if ["thread::Builder", "thread::spawn("].iter().any(|start| engine.contains(start)) {
                    places.push(path.strip_prefix(&root).unwrap().to_owned());
                }
            }
        }
    }
    assert_eq!(places, [Path::new("base/sync/threads.rs")]);
}

/// Returns the tests that the table of failures names.
fn tests_of_the_table(table: &str) -> Vec<String> {
    let rows = table.lines().filter(|line| line.starts_with("| ") && line.ends_with("` |"));
    let last = rows.filter_map(|row| row.trim_end_matches(" |").rsplit_once("| ")?.1.strip_prefix('`'));
    last.filter_map(|name| Some(name.strip_suffix('`')?.to_owned())).collect()
}

#[test]
fn every_row_of_the_table_of_failures_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.join("docs/failures.md")).unwrap();
    let named = tests_of_the_table(&table);
    let rows = table.lines().filter(|line| line.starts_with("| ")).count();
    assert_eq!(named.len(), rows - 1, "a row names no test: {named:?}");
    let folders = ["tests/it", "tests/memory"];
    let sources: String =
        folders.into_iter().flat_map(|folder| crate::layout::read(folder).into_values()).collect();
    for name in named {
        assert!(sources.contains(&format!("#[test]\nfn {name}()")), "there is no test {name}");
    }
}

/// Prevents the process from opening another file while `work` runs.
fn without_descriptors<T>(work: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::Nofile);
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let highest =
        open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok()).max().unwrap();
    setrlimit(Resource::Nofile, Rlimit { current: Some(highest + 1), ..before }).unwrap();
    // A new descriptor gets the lowest free number, so this uses up all descriptors.
    let _all: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    let done = work();
    setrlimit(Resource::Nofile, before).unwrap();
    done
}

#[test]
fn descriptor_exhaustion_fails_calls_not_store() {
    alone(|| {
        for log_io in [LogIo::Mapped, LogIo::Buffered, direct_io::log_io()] {
            let directory = tempfile::tempdir().unwrap();
            out_of_descriptors(directory.path(), log_io);
        }
    });
}

fn out_of_descriptors(path: &Path, log_io: LogIo) {
    let options =
        || small().device(remanent::DeviceChoice::Host).with(|options| options.log.io = Some(log_io));
    let store = options().open(path).unwrap();
    let mut line = Line::begin(&store);
    line.work(&store).unwrap();
    // A background thread may close a descriptor at any time, so that a call succeeds.
    let mut times_refused = [0; 8];
    for _ in 0..3 {
        let refused = without_descriptors(|| {
            // The descriptor of a full segment is closed, so each commit may get a descriptor.
            let commits = (0..50).find_map(|_| line.commits(&store, 3).err());
            assert!(commits.as_ref().is_none_or(is_the_shortage), "{log_io}: {commits:?}");
            // Take all descriptors that the commits have closed.
            let _all: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
            let kept = store.snapshots();
            let refusals = [
                store.snapshot().err(),
                store.snapshot_with(SnapshotOptions::new().name("short")).err(),
                store.prune(&store.retention().snapshots_kept(1)).err(),
                store.restore(StatePoint::Snapshot(kept[0].id)).err(),
                store.scrub().err(),
                store.audit().err(),
                Store::open_at(path, StatePoint::Snapshot(kept[0].id)).err(),
                Follower::open(path, FollowFrom::Beginning).err(),
            ];
            line.check_read(&store).unwrap();
            refusals
        });
        for (index, refused) in refused.into_iter().enumerate() {
            let Some(refused) = refused else { continue };
            times_refused[index] += 1;
            assert!(is_the_shortage(&refused), "{log_io}: call {index}: {refused}");
            assert!(
                refused.to_string().contains(path.to_str().unwrap()),
                "{log_io}: call {index}: {refused}"
            );
            assert!(
                !matches!(refused, Error::Poisoned(_) | Error::Damaged(_)),
                "{log_io}: {index}: {refused}"
            );
        }
        // Descriptors are available again, and the same store continues to work.
        line.work(&store).unwrap();
        line.check_read(&store).unwrap();
        assert!(store.scrub().unwrap().damage.is_empty());
    }
    assert!(times_refused.iter().all(|times| *times > 0), "{log_io}: {times_refused:?}");
    // A store that is closed without descriptors writes a seal if it can.
    without_descriptors(|| store.close()).unwrap();
    line.check(&options().open(path).unwrap(), line.logged);
}

/// If the limit is below all descriptor numbers in use, the system reports EINVAL for another descriptor of
/// an open file.
#[test]
fn window_without_free_descriptor_is_a_shortage() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        disk.make_folder(Folder::Log).unwrap();
        let file = disk.create(FileName::Segment(1)).unwrap();
        file.write_zeros(0, 8192, LogIo::Buffered).unwrap();
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
        let windows = [LogIo::Mapped, LogIo::Buffered].map(|io| file.window(io).err());
        setrlimit(Resource::Nofile, before).unwrap();
        // A mapped window of a file in memory needs no descriptor.
        assert!(windows[1].is_some());
        for error in windows.into_iter().flatten() {
            assert!(is_the_shortage(&error), "{error}");
        }
    });
}
