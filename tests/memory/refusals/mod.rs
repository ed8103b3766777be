//! A failed allocation is an ordinary error. If any long allocation of an operation fails, the process
//! survives, the call reports that there was not enough memory, the state is unchanged, and the same store
//! continues to work.
//!
//! A failed allocation that is not handled aborts the process, so each operation runs in a child process. The
//! child makes the first long allocation fail, then the second, and so on, until the operation completes
//! without a failure. If the child aborts, the next child continues after the allocation that aborted it, so
//! that one run finds all such allocations. With `REMANENT_REFUSALS_TRACE` set, each failed allocation is
//! printed with its stack.
//!
//! There is no list of exceptions. Maps of third-party crates, whose allocations cannot return an error, are
//! kept small. For example, the engine divides the keys among 256 maps.

mod long;
mod many;

use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use remanent::disk::dir::DirReader;
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::history::InitialState;
use remanent::options::{MemoryOptions, PageLoad, SnapshotSchedule};
use remanent::{
    Error, Lsn, Options, PageId, PageInfo, Result, SnapshotOptions, StatePoint, Store, View, WriteBatch,
};
use remanent_format::salvage::{PageRemains, Salvage};
use remanent_format::store::StoreFile;

use crate::allocator::{alone, refuse};
use crate::size::sized;

/// Only allocations longer than this number of bytes fail.
const REFUSED_ABOVE: usize = 64 << 10;
/// Environment variable of a child: the subject, the operation and the number of the first allocation that
/// fails.
const CASE: &str = "REMANENT_REFUSED";
const DIRECTORY: &str = "REMANENT_REFUSED_IN";
/// The exit code of a child that has tried all allocations.
const DONE: i32 = 42;
/// Up to this number, every allocation of an operation fails in turn. Of later allocations, a decreasing
/// share fails. With `REMANENT_REFUSALS_EVERY` set, every allocation fails in turn.
const EACH_UP_TO: isize = 4;
/// Number of pages that are compared byte by byte: all pages if there are few, otherwise a sample.
const LOOKS: usize = 500;

fn options() -> Options {
    Options::new().snapshots(SnapshotSchedule::never())
}

/// A store on which operations are executed.
struct Subject {
    name: &'static str,
    prepare: fn(&Path),
    operations: &'static [(&'static str, Operation)],
}

const SUBJECTS: [Subject; 2] = [
    Subject { name: "long", prepare: long::prepare, operations: &long::LONG },
    Subject { name: "many", prepare: many::prepare, operations: &many::MANY },
];

/// An operation, and its preparation before allocations fail.
#[derive(Clone, Copy)]
enum Operation {
    /// Opens the directory itself.
    Outside(fn(&Path) -> Result<()>),
    /// Commits a batch that is built before allocations fail.
    Commit(fn(&Store) -> WriteBatch),
    /// Makes a call, after a preparation.
    Call(fn(&Store), fn(&Store, &Path) -> Result<()>),
}

use Operation::{Call, Commit, Outside};

const fn call(run: fn(&Store, &Path) -> Result<()>) -> Operation {
    Call(|_| (), run)
}

fn fork(store: &Store, directory: &Path) -> Result<()> {
    let fork = directory.with_extension("fork");
    _ = std::fs::remove_dir_all(&fork);
    store.fork(fork, StatePoint::Lsn(store.lsn())).map(drop)
}

/// Publishes a snapshot, and waits until a thread has verified it.
fn publish(store: &Store, _: &Path) -> Result<()> {
    store.snapshot_with(SnapshotOptions::new().only_published())?;
    store.wait_verified()
}

fn restore_newest(store: &Store, _: &Path) -> Result<()> {
    let newest = store.snapshots().pop().unwrap().id;
    store.restore(StatePoint::Snapshot(newest)).map(drop)
}

fn restore_the_batch_before(store: &Store, _: &Path) -> Result<()> {
    store.restore(StatePoint::Lsn(Lsn(store.lsn().0 - 1))).map(drop)
}

fn scrub(store: &Store, _: &Path) -> Result<()> {
    let report = store.scrub()?;
    assert!(report.damage.is_empty(), "refused memory is no damage: {:?}", report.damage);
    Ok(())
}

fn follow(directory: &Path) -> Result<()> {
    let mut replica = Replica::from_snapshot(directory)?;
    let mut follower = Follower::open(directory, FollowFrom::Position(replica.position()))?;
    while let Some(batch) = follower.next(Duration::ZERO)? {
        replica.apply(&batch)?;
    }
    Ok(())
}

fn open(directory: &Path) -> Result<()> {
    options().open(directory).and_then(|store| store.close())
}

fn open_on_demand(directory: &Path) -> Result<()> {
    let store = options().memory(MemoryOptions::new().load(PageLoad::OnDemand)).open(directory)?;
    let read = store.read(PageId(1), 0, &mut [0; 5]);
    store.close()?;
    read.map(drop)
}

fn read_view(view: &View) -> Result<()> {
    let mut bytes = [0; 1000];
    view.pages()
        .take(3)
        .try_for_each(|info| view.read(info.page, 0, &mut bytes[..info.len.min(1000) as usize]))
}

/// Creates a new store from all intact parts of an old one, as the command `salvage` does.
fn salvage(directory: &Path) -> Result<()> {
    let target = directory.with_extension("salvaged");
    _ = std::fs::remove_dir_all(&target);
    let reader = DirReader::new(directory);
    let store = StoreFile::decode(&std::fs::read(directory.join("STORE")).unwrap()).unwrap();
    let (features, record) = (store.features, store.record.clone());
    let found = Salvage::read(&reader, store, 1 << 30)?;
    let state = found.state();
    let seed = InitialState { features, record, table: state.table.clone(), point: state.point };
    let load = |info: &PageInfo, offset: u64, out: &mut [u8]| match found.find(info) {
        PageRemains::Exact(bytes) => {
            let window = found.window(&bytes, offset..offset + out.len() as u64)?;
            out.copy_from_slice(&window);
            Ok(())
        }
        PageRemains::Lost(damage) => Err(Error::from(damage)),
        PageRemains::Older { .. } => panic!("{}: only an older version was found", info.page),
    };
    Store::create_at(target, &seed, load).map(drop)
}

/// All reported properties of a store's pages, and the bytes of some of them.
#[derive(PartialEq)]
struct Seen {
    pages: Vec<PageInfo>,
    bytes: Vec<Vec<u8>>,
}

fn observe(store: &Store) -> Seen {
    let pages: Vec<PageInfo> = store.pages().unwrap().collect();
    let step = pages.len().div_ceil(LOOKS).max(1);
    let bytes = pages.iter().step_by(step).map(|info| store.read_to_vec(info.page).unwrap()).collect();
    Seen { pages, bytes }
}

fn find(case: &str) -> (&'static str, Operation) {
    let (subject, name) = case.split_once('/').unwrap();
    let subject = SUBJECTS.iter().find(|other| other.name == subject).unwrap();
    *subject.operations.iter().find(|(other, _)| *other == name).unwrap()
}

/// Returns true if a failed allocation in this operation may poison the store, because a page cannot be
/// loaded, or a logged restore cannot be loaded. After such a restore, the next open has the restored state.
fn may_stop(name: &str) -> bool {
    ["open on demand", "open that loads all later", "restore", "restore to a batch"].contains(&name)
}

/// Operations of several batches. If a later batch fails, the earlier ones remain.
const MAY_CHANGE: [&str; 3] = ["resize", "leased page that changes", "exact snapshot beside commits"];

/// Returns the number of the next allocation to fail.
fn next(number: isize) -> isize {
    let is_each = number < EACH_UP_TO || std::env::var_os("REMANENT_REFUSALS_EVERY").is_some();
    if is_each { number + 1 } else { number + number / 2 }
}

/// Makes the allocations of one operation fail, one after the other, in a child process.
#[test]
fn case() {
    let (Ok(case), Ok(directory)) = (std::env::var(CASE), std::env::var(DIRECTORY)) else { return };
    let (case, first) = case.rsplit_once(':').unwrap();
    let directory = Path::new(&directory);
    let (name, operation) = find(case);
    long::make_inputs();
    let mut open_store: Option<Store> = None;
    let before_all = observe(&options().open(directory).unwrap());
    let mut number: isize = first.parse().unwrap();
    loop {
        std::fs::write(directory.with_extension("number"), number.to_string()).unwrap();
        let (result, is_refused) = match operation {
            Outside(run) => refuse(number, REFUSED_ABOVE, || run(directory)),
            Commit(_) | Call(..) => {
                let store = open_store.get_or_insert_with(|| options().open(directory).unwrap());
                let mut batch = None;
                match operation {
                    Commit(build) => batch = Some(build(store)),
                    Call(prepare, _) => prepare(store),
                    Outside(_) => unreachable!(),
                }
                let before = observe(store);
                let outcome = refuse(number, REFUSED_ABOVE, || match operation {
                    Commit(_) => store.commit(batch.take().unwrap()).map(drop),
                    Call(_, run) => run(store, directory),
                    Outside(_) => unreachable!(),
                });
                let lsn = store.lsn();
                let mut more = store.batch();
                more.set_root("number", number as u64);
                match store.commit(more) {
                    Ok(_) if outcome.0.is_err() && !MAY_CHANGE.contains(&name) => {
                        assert!(observe(store) == before, "{case}:{number}: it changed something");
                    }
                    Ok(_) => {}
                    Err(Error::Poisoned(_)) if may_stop(name) => {
                        open_store = None;
                        let store = options().open(directory).unwrap();
                        if store.lsn() < lsn {
                            assert!(observe(&store) == before, "{case}:{number}: it changed something");
                        }
                    }
                    Err(error) => {
                        panic!("{case}:{number}: the store goes on: {error}, after {:?}", outcome.0)
                    }
                }
                outcome
            }
        };
        if let Err(error) = &result {
            let refused = match error {
                Error::Poisoned(first) if may_stop(name) => &**first,
                error => error,
            };
            let is_right = is_refused && matches!(refused, Error::OutOfMemory { len, .. } if *len > 0);
            assert!(is_right, "{case}:{number}: {error:?}");
        } else if !is_refused {
            break;
        }
        assert!(number < 5000, "{case} makes ever more long allocations");
        number = next(number);
    }
    // Acknowledged batches exist after the next open.
    let expected = match open_store {
        Some(store) => {
            let seen = observe(&store);
            store.audit().unwrap();
            store.close().unwrap();
            seen
        }
        None => before_all,
    };
    let store = options().open(directory).unwrap();
    assert!(observe(&store) == expected, "{case}: all is there when it is opened again");
    std::process::exit(DONE);
}

#[test]
fn refused_memory_never_aborts_or_poisons() {
    let _alone = alone();
    // Run only operations whose names contain this text.
    let only = std::env::var("REMANENT_REFUSALS").ok();
    let templates = SUBJECTS.each_ref().map(|subject| {
        let template = tempfile::tempdir().unwrap();
        (subject.prepare)(template.path());
        template
    });
    let all = SUBJECTS.iter().zip(&templates).flat_map(|(subject, template)| {
        subject.operations.iter().map(|(name, _)| (format!("{}/{name}", subject.name), template.path()))
    });
    let sample_one_of = if only.is_some() { 1 } else { sized(4, 1) };
    let wanted =
        all.filter(|(case, _)| only.as_ref().is_none_or(|only| case.contains(only))).step_by(sample_one_of);
    let waiting = Mutex::new(wanted);
    let (failed, cases) = (Mutex::new(Vec::new()), AtomicIsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                loop {
                    let Some((case, template)) = waiting.lock().unwrap().next() else { return };
                    let (refused, faults) = refuse_each(&case, template);
                    cases.fetch_add(refused, Ordering::Relaxed);
                    failed.lock().unwrap().extend(faults);
                }
            });
        }
    });
    let (failed, cases) = (failed.into_inner().unwrap(), cases.into_inner());
    assert!(only.is_some() || cases > sized(60, 400), "{cases} allocations were refused");
    assert!(failed.is_empty(), "{} cases failed:\n{}", failed.len(), failed.join("\n"));
}

/// Runs the child processes of one operation. Returns the number of failed allocations, and the violations.
fn refuse_each(case: &str, template: &Path) -> (isize, Vec<String>) {
    let (mut first, mut failed) = (1, Vec::new());
    loop {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("store");
        copy(template, &directory);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "refusals::case", "--nocapture", "--test-threads", "1"])
            .env(CASE, format!("{case}:{first}"))
            .env(DIRECTORY, &directory)
            .output()
            .unwrap();
        let number = std::fs::read_to_string(directory.with_extension("number"));
        let number: isize = number.map_or(0, |number| number.parse().unwrap());
        if child.status.code() == Some(DONE) {
            return (number - 1, failed);
        }
        let told = String::from_utf8_lossy(&child.stderr);
        failed.push(format!("{case}, allocation {number}: {:?}: {told}", child.status));
        if number < first || failed.len() > 30 {
            return (0, failed);
        }
        first = next(number);
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for found in std::fs::read_dir(from).unwrap() {
        let found = found.unwrap();
        let target = to.join(found.file_name());
        if found.file_type().unwrap().is_dir() {
            copy(&found.path(), &target);
        } else {
            std::fs::copy(found.path(), target).unwrap();
        }
    }
}
