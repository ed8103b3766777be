//! The long form uses pages of gigabytes. Each operation runs in its own process, which may map the bytes of
//! the pages and 2 GiB more. `REMANENT_LONG_PAGES=8192x1,1024x8` lists lengths in MiB and numbers of pages.
//! `REMANENT_TOOL` is the path of the built command, whose inspections are then also measured. Prints one row
//! for each operation.
#![allow(clippy::print_stdout, reason = "the long form prints a table")]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use remanent::batch::Width;
use remanent::disk::dir::DirReader;
use remanent::follow::{Follower, Replica};
use remanent::options::{MemoryOptions, PageLoad, Retention, SnapshotSchedule};
use remanent::{Lsn, Options, PageId, Place, SnapshotOptions, StatePoint, Store, View};
use remanent_format::salvage::{PageRemains, Salvage};
use remanent_format::state::survey::read_store;
use rustix::process::{Resource, Rlimit, setrlimit};

const CASE: &str = "REMANENT_LONG_CASE";
const MIB: u64 = 1 << 20;
/// Number of bytes that a process may map in addition to the pages, including its code and the stacks of its
/// threads.
const BESIDE_MAX: u64 = 2 << 30;

/// Pages of a store: their length and number.
#[derive(Clone, Copy)]
struct Pages {
    len: u64,
    count: u64,
}

impl Pages {
    fn parse(text: &str) -> Self {
        let (mib, count) = text.split_once('x').unwrap();
        Self { len: mib.parse::<u64>().unwrap() * MIB, count: count.parse().unwrap() }
    }

    fn ids(self) -> impl Iterator<Item = PageId> {
        (1..=self.count).map(PageId)
    }
}

/// Returns the content of one mebibyte, half of which is compressible.
fn content(page: PageId, mebibyte: u64, salt: u8) -> Vec<u8> {
    let mut state = page.0 << 40 ^ mebibyte << 8 ^ u64::from(salt) ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = vec![mebibyte as u8 ^ salt; MIB as usize];
    for word in bytes[..MIB as usize / 2].chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// Returns true if each `change` writes this mebibyte.
fn is_changed(mebibyte: u64) -> bool {
    mebibyte % 97 == 5
}

fn change(store: &Store, pages: Pages, salt: u8) {
    for page in pages.ids() {
        for mebibyte in (0..pages.len / MIB).filter(|mebibyte| is_changed(*mebibyte)) {
            let mut batch = store.batch();
            batch.write(page, mebibyte * MIB, &content(page, mebibyte, salt));
            store.commit(batch).unwrap();
        }
        let indices: Vec<u32> = (0..1000).map(|n| (n * (pages.len / 4 / 1000)) as u32 | 1).collect();
        let mut batch = store.batch();
        batch.scatter(page, Width::W4, &indices, &vec![salt; 4000]);
        store.commit(batch).unwrap();
    }
}

/// Checks every 61st mebibyte of each page, and all changed ones.
fn check(pages: Pages, salt: u8, read: &mut dyn FnMut(PageId, u64, &mut [u8])) {
    let mut found = vec![0; MIB as usize];
    for page in pages.ids() {
        for mebibyte in (0..pages.len / MIB).filter(|at| at % 61 == 0 || is_changed(*at)) {
            read(page, mebibyte * MIB, &mut found);
            let mut expected = content(page, mebibyte, if is_changed(mebibyte) { salt } else { 0 });
            for element in (0..1000).map(|n| 4 * ((n * (pages.len / 4 / 1000)) | 1)) {
                if salt > 0 && element / MIB == mebibyte {
                    expected[(element % MIB) as usize..][..4].fill(salt);
                }
            }
            assert!(found == expected, "page {page}, mebibyte {mebibyte}");
        }
    }
}

fn options() -> Options {
    Options::new().snapshots(SnapshotSchedule::never()).retention(Retention::new().log_kept(u64::MAX))
}

fn check_view(view: &View, pages: Pages, salt: u8) {
    check(pages, salt, &mut |page, offset, out| view.read(page, offset, out).unwrap());
}

/// An operation: its name, whether the pages are in memory, and its function, which receives the directory of
/// the store.
type Operation = (&'static str, bool, fn(&Path, Pages));

const OPERATIONS: [Operation; 11] = [
    ("create", true, |path, pages| {
        let store = options().open(path).unwrap();
        let mut batch = store.batch();
        pages.ids().for_each(|_| _ = batch.create(pages.len, Place::Host).page());
        store.commit(batch).unwrap();
        for page in pages.ids() {
            for mebibyte in 0..pages.len / MIB {
                let mut batch = store.batch();
                batch.write(page, mebibyte * MIB, &content(page, mebibyte, 0));
                store.commit(batch).unwrap();
            }
        }
        store.snapshot().unwrap();
        change(&store, pages, 1);
        store.close().unwrap();
    }),
    ("view", false, |path, pages| check_view(&Store::open_read_only(path).unwrap(), pages, 1)),
    ("fork", false, |path, pages| {
        let view = Store::open_read_only(path).unwrap();
        let forked = path.with_extension("forked");
        view.fork(&forked).unwrap();
        check_view(&Store::open_read_only(&forked).unwrap(), pages, 1);
        std::fs::remove_dir_all(&forked).unwrap();
    }),
    ("salvage", false, |path, pages| {
        let source = DirReader::new(path);
        let salvage = Salvage::read(&source, read_store(&source).unwrap(), u64::MAX).unwrap();
        let mut found = Vec::new();
        for page in pages.ids() {
            match salvage.find(&salvage.state().table.get(page).unwrap()) {
                PageRemains::Exact(bytes) => found.push(bytes),
                other => panic!("{other:?}"),
            }
        }
        check(pages, 1, &mut |page, offset, out| {
            let window = offset..offset + out.len() as u64;
            out.copy_from_slice(&salvage.window(&found[page.0 as usize - 1], window).unwrap());
        });
    }),
    ("replica", true, |path, pages| {
        let mut replica = Replica::from_snapshot(path).unwrap();
        let mut follower = Follower::open(path, replica.position().into()).unwrap();
        while let Some(batch) = follower.next(Duration::ZERO).unwrap() {
            replica.apply(&batch).unwrap();
        }
        check(pages, 1, &mut |page, offset, out| {
            out.copy_from_slice(&replica.bytes(page).unwrap()[offset as usize..][..out.len()]);
        });
    }),
    ("open", true, |path, pages| {
        let store = options().open(path).unwrap();
        check(pages, 1, &mut |page, offset, out| _ = store.read(page, offset, out).unwrap());
        store.close().unwrap();
    }),
    ("open on demand", true, |path, pages| {
        let store = options().memory(MemoryOptions::new().load(PageLoad::OnDemand)).open(path).unwrap();
        check(pages, 1, &mut |page, offset, out| _ = store.read(page, offset, out).unwrap());
        store.close().unwrap();
    }),
    ("audit", true, |path, pages| {
        let store = options().open(path).unwrap();
        let audit = store.audit().unwrap();
        assert_eq!((audit.by_replay, audit.changed.len()), (pages.count, 0));
        store.close().unwrap();
    }),
    ("snapshot", true, |path, _| {
        let store = options().open(path).unwrap();
        store.snapshot_with(SnapshotOptions::new().name("changed")).unwrap();
        store.close().unwrap();
    }),
    ("scrub", true, |path, _| {
        let store = options().open(path).unwrap();
        assert!(store.scrub().unwrap().damage.is_empty());
        store.close().unwrap();
    }),
    ("restore", true, |path, pages| {
        let store = options().open(path).unwrap();
        let then = store.lsn();
        change(&store, pages, 2);
        assert!(then > Lsn(0));
        store.restore(StatePoint::Lsn(then)).unwrap();
        check(pages, 1, &mut |page, offset, out| _ = store.read(page, offset, out).unwrap());
        store.close().unwrap();
    }),
];

/// Returns the maximum memory that this process has used so far, in MiB.
fn highest_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() >> 10
}

/// Runs one operation in a child process.
#[test]
fn case() {
    let Ok(case) = std::env::var(CASE) else { return };
    let [name, pages, directory] = case.splitn(3, ':').collect::<Vec<_>>()[..] else { panic!("{case}") };
    let (pages, path) = (Pages::parse(pages), Path::new(directory));
    let (_, has_pages, work) = OPERATIONS.iter().find(|(other, ..)| *other == name).unwrap();
    let own = if *has_pages { pages.len * pages.count } else { 0 };
    let limit = Some(own + BESIDE_MAX);
    setrlimit(Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
    work(path, pages);
    println!("ROW {own} {}", highest_mib());
}

#[test]
fn gigabyte_pages_need_at_most_2_gib_extra() {
    let Ok(lens) = std::env::var("REMANENT_LONG_PAGES") else { return };
    println!("| pages, MiB | operation | highest, MiB | of which pages | seconds |\n|---|---|---|---|---|");
    for lens in lens.split(',') {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("store");
        for (name, ..) in OPERATIONS {
            let start = Instant::now();
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "long_form::case", "--nocapture", "--test-threads", "1"])
                .env(CASE, format!("{name}:{lens}:{}", path.display()))
                .output()
                .unwrap();
            let (told, seconds) = (String::from_utf8_lossy(&child.stdout), start.elapsed().as_secs());
            let why = String::from_utf8_lossy(&child.stderr);
            assert!(child.status.success(), "{lens} {name}: {:?}: {told}{why}", child.status);
            let row = told.lines().find_map(|line| line.split_once("ROW ")).expect("a row").1;
            let (own, highest) = row.split_once(' ').unwrap();
            let own = own.parse::<u64>().unwrap() / MIB;
            println!("| {lens} | {name} | {highest} | {own} | {seconds} |");
        }
        tools(lens, &path);
    }
}

/// Runs the commands that read pages, if `REMANENT_TOOL` is set.
fn tools(lens: &str, path: &Path) {
    let Ok(tool) = std::env::var("REMANENT_TOOL") else { return };
    let (path, target) = (path.to_str().unwrap(), path.with_extension("page"));
    let target = target.to_str().unwrap();
    for args in [
        &["pages", path][..],
        &["dump", path, "1", "-o", target],
        &["diff", path, "--from", "name:changed"],
        &["salvage", path],
    ] {
        let start = Instant::now();
        let limited = format!("ulimit -v {} && exec \"$0\" \"$@\"", BESIDE_MAX >> 10);
        let run = Command::new("sh").args(["-c", &limited, &tool]).args(args).output().unwrap();
        // `diff` exits with status 1 if there are differences.
        let told = String::from_utf8_lossy(&run.stderr);
        assert!(matches!(run.status.code(), Some(0 | 1)) && told.is_empty(), "{lens} {args:?}: {told}");
        println!("| {lens} | `{}` | at most 2048 | 0 | {} |", args[0], start.elapsed().as_secs());
    }
}
