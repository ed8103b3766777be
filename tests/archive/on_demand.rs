//! Restores on demand: pages are fetched from the archive when they are read. `REMANENT_TEST_SIZE=full` kills 60
//! processes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use remanent::error::{ArchiveErrorKind, FileName};
use remanent::options::{ArchiveOptions, Create, MemoryOptions, PageLoad};
use remanent::{Ack, Error, Lsn, PageId, Place, SnapshotOptions, StatePoint, Store};

use crate::bed::{Bed, files, pause, plain_options, restore, restore_on_demand};
use crate::size::sized;

const PAGES: u64 = 24;
const LEN: u64 = 1 << 20;
const CHILD: &str = "REMANENT_ON_DEMAND_CHILD";

/// Returns the bytes of a page after it was last written in a generation.
fn bytes(page: u64, generation: u64) -> Vec<u8> {
    let mut word = page * 1000 + generation + 1;
    let mut next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (word >> 56) as u8
    };
    (0..LEN).map(|_| next()).collect()
}

/// Returns the last generation up to `now` that wrote a page. Generation 1 writes every page, and each later generation
/// every third page.
fn written(page: u64, now: u64) -> u64 {
    (2..=now).rev().find(|generation| page % 3 == generation % 3).unwrap_or(1)
}

fn write_generation(store: &Store, pages: &[PageId], generation: u64) {
    for page in (0..PAGES).filter(|page| written(*page, generation) == generation) {
        let mut batch = store.batch();
        batch.write(pages[page as usize], 0, &bytes(page, generation));
        store.commit(batch).unwrap();
    }
    store.commit(store.batch().set_root("generation", generation)).unwrap();
}

/// Archives a store with pages in memory and on disk. The archive contains a named snapshot, a snapshot, and a batch
/// after both.
fn archived(bed: &Bed) -> Vec<PageId> {
    let store = plain_options(Create::IfEmpty).open(bed.store()).unwrap();
    let mut batch = store.batch();
    (0..PAGES).for_each(|page| _ = batch.create(LEN, [Place::Host, Place::Disk][(page % 2) as usize]));
    let pages = store.commit(batch).unwrap().pages;
    write_generation(&store, &pages, 1);
    write_generation(&store, &pages, 2);
    store.snapshot_with(SnapshotOptions::new().name("second")).unwrap();
    write_generation(&store, &pages, 3);
    write_generation(&store, &pages, 4);
    store.snapshot().unwrap();
    store.commit(store.batch().set_root("last", 0_u64)).unwrap();
    store.close().unwrap();
    bed.push();
    pages
}

fn on_demand(root: &Path) -> remanent::Options {
    let url = format!("file://{}", root.join("bucket").display());
    let archive = ArchiveOptions::new(url).interval(Duration::from_millis(1));
    let memory = MemoryOptions::new().load(PageLoad::OnDemand);
    plain_options(Create::Never).archive(archive).memory(memory)
}

fn open(bed: &Bed) -> Store {
    on_demand(bed.root()).open(bed.path("restored")).unwrap()
}

fn generation(store: &Store) -> u64 {
    store.root().unwrap()["generation"].as_u64().unwrap()
}

/// Reads every page, and returns the error of each page that cannot be read. Asserts that all other pages have their
/// bytes.
fn read_all(store: &Store, pages: &[PageId]) -> BTreeMap<u64, Error> {
    let (mut errors, now) = (BTreeMap::new(), generation(store));
    for (page, id) in (0..PAGES).zip(pages) {
        match store.read_to_vec(*id) {
            Ok(found) => assert!(found == bytes(page, written(page, now)), "page {page}"),
            Err(error) => _ = errors.insert(page, error),
        }
    }
    errors
}

fn is_whole(directory: &Path) -> bool {
    !directory.join("UNFETCHED").exists()
}

fn wait_until_whole(directory: &Path) {
    for _ in 0..6000 {
        if is_whole(directory) {
            return;
        }
        pause(Duration::from_millis(10));
    }
    panic!("{} still lacks pages", directory.display());
}

fn kind(error: &Error) -> Option<ArchiveErrorKind> {
    if let Error::Archive(archive) = error { Some(archive.kind) } else { None }
}

/// Changes data objects of the archive that a restore on demand has not fetched, and returns the paths and bytes of the
/// changed objects.
fn change_objects(bed: &Bed, change: impl Fn(usize, &Path, &[u8])) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut objects = files(&bed.bucket().join("data"));
    let mut index = 0;
    objects.retain(|path, bytes| {
        // Pages are not compressible, and all other objects are shorter.
        let is_image = bytes.len() as u64 > LEN / 2;
        if is_image {
            change(index, path, bytes);
            index += 1;
        }
        is_image
    });
    objects
}

#[test]
fn pages_are_fetched_when_they_are_read() {
    let bed = Bed::new();
    let pages = archived(&bed);
    let fetched = restore_on_demand(&bed.url(), &bed.path("restored")).unwrap();
    let images = |path: &Path| -> u64 {
        use std::os::unix::fs::MetadataExt;
        let files = fs::read_dir(path.join("pages")).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
        files.map(|file| file.blocks() * 512).sum()
    };
    assert!(images(&bed.path("restored")) < LEN, "images were fetched");
    let store = open(&bed);
    assert_eq!((store.lsn(), generation(&store)), (fetched.batch.lsn, 4));
    assert_eq!(read_all(&store, &pages).len(), 0);
    store.wait_loaded().unwrap();
    write_generation(&store, &pages, 5);
    wait_until_whole(&bed.path("restored"));
    store.snapshot().unwrap();
    assert_eq!(read_all(&store, &pages).len(), 0);
    let named = Store::open_at(bed.path("restored"), StatePoint::Name("second".to_owned())).unwrap();
    let mut found = vec![0; LEN as usize];
    named.read(pages[4], 0, &mut found).unwrap();
    assert!(found == bytes(4, written(4, 2)));
    store.submit(store.batch().set_root("last", 1_u64)).unwrap().wait(Ack::Archived).unwrap();
    store.close().unwrap();
    // Another machine restores the batches that this machine archived.
    restore(&bed.url(), &bed.path("again")).unwrap();
    let store = on_demand(bed.root()).open(bed.path("again")).unwrap();
    assert_eq!((generation(&store), read_all(&store, &pages).len()), (5, 0));
}

#[test]
fn incomplete_directory_is_refused_by_name() {
    let bed = Bed::new();
    archived(&bed);
    let path = bed.path("restored");
    restore_on_demand(&bed.url(), &path).unwrap();
    let before = files(&path);
    let is_named = |error: Error| {
        assert!(
            matches!(&error, Error::Damaged(damage) if damage.damage.file == FileName::Unfetched),
            "{error}"
        );
    };
    is_named(Store::open_at(&path, StatePoint::Lsn(Lsn(3))).unwrap_err());
    is_named(plain_options(Create::Never).open(&path).unwrap_err());
    let again = restore(&bed.url(), &path).unwrap_err().to_string();
    assert!(again.contains("contains STORE"), "{again}");
    let pushed = bed.try_push(&path).unwrap_err().to_string();
    assert!(pushed.contains("UNFETCHED"), "{pushed}");
    assert!(before == files(&path), "a refused call has changed the directory");
}

#[test]
fn lost_objects_fail_only_their_pages() {
    let bed = Bed::new();
    let pages = archived(&bed);
    restore_on_demand(&bed.url(), &bed.path("restored")).unwrap();
    let objects = change_objects(&bed, |index, path, bytes| match index % 4 {
        0 => fs::remove_file(path).unwrap(),
        1 => {
            let mut damaged = bytes.to_vec();
            damaged[bytes.len() / 2] ^= 1;
            fs::write(path, damaged).unwrap();
        }
        _ => {}
    });
    assert!(objects.len() >= 4, "{} objects", objects.len());
    let store = open(&bed);
    for _ in 0..2 {
        let errors = read_all(&store, &pages);
        assert!(!errors.is_empty() && errors.len() < PAGES as usize, "{errors:?}");
        for error in errors.values() {
            assert_eq!(kind(error), Some(ArchiveErrorKind::Damaged), "{error}");
            assert!(error.to_string().contains("data/"), "{error}");
        }
    }
    // The store accepts batches, and takes no snapshot that lacks pages.
    store.commit(store.batch().set_root("other", 1_u64)).unwrap();
    store.close().unwrap();
    assert!(!is_whole(&bed.path("restored")));
    for (path, bytes) in &objects {
        fs::write(path, bytes).unwrap();
    }
    let store = open(&bed);
    assert_eq!(read_all(&store, &pages).len(), 0);
    store.wait_loaded().unwrap();
    wait_until_whole(&bed.path("restored"));
}

#[test]
fn pages_can_be_read_once_bucket_returns() {
    let bed = Bed::new();
    let pages = archived(&bed);
    restore_on_demand(&bed.url(), &bed.path("restored")).unwrap();
    let (data, away) = (bed.bucket().join("data"), bed.path("away"));
    fs::rename(&data, &away).unwrap();
    fs::write(&data, b"a file, so that no data object can be read").unwrap();
    let store = open(&bed);
    for page in [pages[0], pages[1]] {
        let error = store.read_to_vec(page).unwrap_err();
        assert_eq!(kind(&error), Some(ArchiveErrorKind::Bucket), "{error}");
    }
    assert_eq!(kind(&store.wait_loaded().unwrap_err()), Some(ArchiveErrorKind::Bucket));
    store.commit(store.batch().set_root("other", 1_u64)).unwrap();
    fs::remove_file(&data).unwrap();
    fs::rename(&away, &data).unwrap();
    assert_eq!(read_all(&store, &pages).len(), 0);
    wait_until_whole(&bed.path("restored"));
}

/// Until all pages are local, the archive gets neither snapshots nor image files that lack parts.
#[test]
fn missing_pages_are_never_archived() {
    let bed = Bed::new();
    let pages = archived(&bed);
    restore_on_demand(&bed.url(), &bed.path("restored")).unwrap();
    let objects = change_objects(&bed, |_, path, _| fs::remove_file(path).unwrap());
    let store = open(&bed);
    let named = store.snapshot_with(SnapshotOptions::new().name("third")).unwrap();
    store.submit(store.batch().set_root("archived", 1_u64)).unwrap().wait(Ack::Archived).unwrap();
    assert!(!store.wait_archived(named.id, Some(Duration::from_millis(300))).unwrap());
    for (path, bytes) in &objects {
        fs::write(path, bytes).unwrap();
    }
    store.close().unwrap();
    let store = open(&bed);
    assert_eq!(read_all(&store, &pages).len(), 0);
    assert!(store.wait_archived(named.id, None).unwrap());
    assert!(is_whole(&bed.path("restored")));
    store.close().unwrap();
    restore(&bed.url(), &bed.path("again")).unwrap();
    let store = on_demand(bed.root()).open(bed.path("again")).unwrap();
    assert_eq!(read_all(&store, &pages).len(), 0);
}

/// A restore to an earlier state names images in restored files. The batch of this restore is archived once these files
/// are local.
#[test]
fn batch_that_names_unfetched_images_waits_for_them() {
    let bed = Bed::new();
    let pages = archived(&bed);
    restore_on_demand(&bed.url(), &bed.path("restored")).unwrap();
    let store = open(&bed);
    store.restore(StatePoint::Name("second".to_owned())).unwrap();
    store.submit(store.batch().set_root("restored", 1_u64)).unwrap().wait(Ack::Archived).unwrap();
    assert_eq!((generation(&store), read_all(&store, &pages).len()), (2, 0));
    store.close().unwrap();
    restore(&bed.url(), &bed.path("again")).unwrap();
    let store = on_demand(bed.root()).open(bed.path("again")).unwrap();
    assert_eq!((generation(&store), read_all(&store, &pages).len()), (2, 0));
}

/// Restores the archive on demand unless the store exists. Then reads and commits until the process is killed, and
/// prints each durable step.
#[test]
fn child_uses_store_until_killed() {
    let Some(root) = std::env::var_os(CHILD) else { return };
    let root = PathBuf::from(root);
    println!("started");
    let path = root.join("restored");
    if !path.join("STORE").exists() {
        restore_on_demand(&format!("file://{}", root.join("bucket").display()), &path).unwrap();
    }
    let store = on_demand(&root).open(&path).unwrap();
    let pages: Vec<PageId> = store.pages().unwrap().map(|info| info.page).collect();
    let first = store.root().unwrap().get("step").and_then(|step| step.as_u64()).unwrap_or(0);
    for step in first + 1.. {
        let page = step * 5 % PAGES;
        assert!(store.read_to_vec(pages[page as usize]).unwrap() == bytes(page, written(page, 4)));
        let ticket = store.submit(store.batch().set_root("step", step)).unwrap();
        ticket.wait(Ack::Durable).unwrap();
        println!("step {step}");
        if step % 8 == 0 {
            store.snapshot().unwrap();
        }
    }
}

/// After each kill, the directory opens with every durable step, or the restore is repeated. Every page that can be
/// read has the expected bytes.
#[test]
fn killed_processes_lose_no_page_and_no_step() {
    let source = Bed::new();
    let pages = archived(&source);
    let (mut partial, mut unfinished) = (0, 0);
    for round in 0..sized(12, 60) {
        let bed = Bed::new();
        crate::bed::copy_directory(&source.bucket(), &bed.bucket());
        let mut last = 0;
        for life in 0..3 {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "on_demand::child_uses_store_until_killed", "--nocapture"])
                .env(CHILD, bed.root())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut out = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            while !line.contains("started") {
                line.clear();
                assert_ne!(out.read_line(&mut line).unwrap(), 0);
            }
            pause(Duration::from_millis((round * 37 + life * 11) % 120));
            child.kill().unwrap();
            child.wait().unwrap();
            for line in out.lines() {
                if let Some(step) = line.unwrap().trim().strip_prefix("step ") {
                    last = step.parse().unwrap();
                }
            }
            let path = bed.path("restored");
            partial += u64::from(path.join("STORE").exists() && !is_whole(&path));
            unfinished += u64::from(!path.join("STORE").exists());
        }
        let path = bed.path("restored");
        if !path.join("STORE").exists() {
            assert_eq!(last, 0, "a step was durable before the restore was complete");
            restore_on_demand(&bed.url(), &path).unwrap();
        }
        let store = open(&bed);
        let step = store.root().unwrap().get("step").and_then(|step| step.as_u64()).unwrap_or(0);
        assert!(step >= last, "step {step}, but {last} was durable");
        assert_eq!(read_all(&store, &pages).len(), 0);
        wait_until_whole(&path);
        let lsn = store.lsn();
        store.close().unwrap();
        let view = Store::open_at(&path, StatePoint::Lsn(lsn)).unwrap();
        view.prove_pages(&pages).unwrap();
    }
    println!("{unfinished} kills left an unfinished restore, {partial} a store without all pages");
    assert!(partial > 0, "no kill found a store without all pages");
}
