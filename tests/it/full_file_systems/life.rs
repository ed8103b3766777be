//! One life of a store on a disk with little space. Its steps cover all guarantees about a full disk.

use remanent::disk::Disk;
use remanent::options::{Compression, ImageOptions, LogIo};
use remanent::{Error, Options, PageId, Place, SnapshotOptions, StatePoint, Store};

use super::RESERVE;
use crate::damage::mix;
use crate::direct_io;
use crate::faults::disk_full::{is_held, until};
use crate::files::{State, small};
use crate::with_options::With;

/// Length in bytes of the pages in a life.
pub const LIFE_LEN: u64 = 64 << 10;

/// Returns incompressible bytes.
pub fn noise(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| mix(seed << 32 | at) as u8).collect()
}

pub fn life_options(io: LogIo) -> Options {
    let options = small()
        .images(ImageOptions::new().io(direct_io::image_io(io)))
        .with(|options| options.log.io = Some(io));
    options.with(|options| {
        options.log.segment_len = 64 << 10;
        options.retention.snapshots_kept = 1;
        options.images.compression = Compression::Off;
    })
}

/// How a life opens and forks its store, and when it reopens the store.
pub struct Ways<'w> {
    /// The disk of the store.
    pub disk: &'w dyn Disk,
    pub open: &'w dyn Fn() -> Result<Store, Error>,
    /// Forks the newest state, compares the fork with the store by calling [`is_fork_of`], and removes the
    /// fork.
    pub fork: &'w dyn Fn(&Store) -> Result<(), Error>,
    /// Whether the store is closed and opened after each step instead of after each round.
    pub each_step: bool,
    /// Whether the file system may refuse a new file although there is space for its bytes, as XFS does. The
    /// reserve used by deletes then cannot be refilled until more space is free, and later deletes may be
    /// refused.
    pub refuses_files: bool,
}

/// Counts of the events in lives, so that a test can assert that each case occurred.
#[derive(Debug, Default)]
pub struct Course {
    pub lives: usize,
    /// Number of lives that end with all pages deleted and no space in use.
    pub to_the_end: usize,
    pub steps: usize,
    pub refused: usize,
    pub opens: usize,
    pub forks: usize,
    /// Number of snapshots without an image, which start at the `redo` of the previous snapshot.
    pub thin: usize,
    pub restores: usize,
}

impl Course {
    pub fn add(&mut self, other: &Self) {
        self.lives += other.lives;
        self.to_the_end += other.to_the_end;
        self.steps += other.steps;
        self.refused += other.refused;
        self.opens += other.opens;
        self.forks += other.forks;
        self.thin += other.thin;
        self.restores += other.restores;
    }

    /// Prints the counts, and asserts that the lives were sometimes, but not always, short of space. A store
    /// that is reopened after each step reserves all space for opens, so it seldom has space for a fork or a
    /// restore.
    #[expect(clippy::print_stdout, reason = "the figures of the long run")]
    pub fn show(&self, disk: &str, each_step: bool) {
        println!("{disk}: {self:?}");
        let Self { to_the_end, refused, forks, thin, restores, .. } = *self;
        assert!(refused > 0, "{disk}: {self:?}");
        // On XFS, few lives with an open after each step complete, or include a delete that is followed by a
        // thin snapshot.
        let has_space = to_the_end > 0 && thin > 0 && forks > 0 && restores > 0;
        assert!(each_step || has_space, "{disk}: {self:?}");
    }
}

/// Runs a call that may be refused on a full disk. Asserts that a refused call changed nothing.
pub fn changes_nothing_if_refused<T>(
    why: &str,
    store: &Store,
    call: impl FnOnce() -> Result<T, Error>,
) -> bool {
    let before = State::of(store);
    match call() {
        Ok(_) => true,
        Err(error) => {
            assert!(matches!(error, Error::DiskFull { .. }), "{why}: {error}");
            assert_eq!(State::of(store), before, "{why}");
            false
        }
    }
}

/// Compares a fork with its source.
pub fn is_fork_of(why: &str, store: &Store, fork: Store) {
    assert_eq!(State::of(&fork), State::of(store), "{why}: a fork");
    fork.close().unwrap_or_else(|error| panic!("{why}: the close of a fork: {error}"));
}

/// A store on a full disk, and the steps taken so far.
struct Life<'w> {
    why: String,
    ways: &'w Ways<'w>,
    store: Option<Store>,
    course: Course,
}

impl Life<'_> {
    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn first_page(&self) -> PageId {
        self.store().pages().unwrap().next().unwrap().page
    }

    /// Takes a step that may be refused. Returns true if it succeeded.
    fn may<T>(&mut self, what: &str, step: impl FnOnce(&Store) -> Result<T, Error>) -> bool {
        let store = self.store.as_ref().unwrap();
        let is_taken = changes_nothing_if_refused(&format!("{}, {what}", self.why), store, || step(store));
        self.course.refused += usize::from(!is_taken);
        self.stepped(what);
        is_taken
    }

    /// Takes a step that must not be refused.
    fn must<T>(&mut self, what: &str, step: impl FnOnce(&Store) -> Result<T, Error>) -> T {
        let done = step(self.store()).unwrap_or_else(|error| panic!("{}, {what}: {error}", self.why));
        self.stepped(what);
        done
    }

    /// Takes a step that frees space and uses a part of the reserve. Returns true if it succeeded.
    fn frees<T>(&mut self, what: &str, step: impl FnOnce(&Store) -> Result<T, Error>) -> bool {
        if self.ways.refuses_files {
            return self.may(what, step);
        }
        self.must(what, step);
        true
    }

    fn stepped(&mut self, what: &str) {
        self.course.steps += 1;
        if self.ways.each_step {
            self.reopen(what);
        }
    }

    fn reopen(&mut self, after: &str) {
        let state = State::of(self.store());
        let why = &self.why;
        let closed = self.store.take().unwrap().close();
        closed.unwrap_or_else(|error| panic!("{why}: a close after {after}: {error}"));
        let opened = (self.ways.open)();
        let opened = opened.unwrap_or_else(|error| panic!("{why}: an open after {after}: {error}"));
        assert_eq!(State::of(&opened), state, "{why}: opened after {after}");
        self.store = Some(opened);
        self.course.opens += 1;
    }

    /// Takes a snapshot. The first value states whether it succeeded. If it was refused, the store may have
    /// taken a thin snapshot, which frees the space of deleted pages, and the second value states whether it
    /// did.
    fn snapshot(&mut self, what: &str) -> (bool, bool) {
        let newest = |store: &Store| store.snapshots().pop().map(|info| (info.redo, info.end));
        let (before, mut after) = (newest(self.store()), None);
        let is_taken = self.may(what, |store| {
            let taken = store.snapshot();
            after = newest(store);
            taken
        });
        let is_thin =
            before.zip(after).is_some_and(|(before, after)| after.0 == before.0 && after.1 > before.1);
        self.course.thin += usize::from(is_thin);
        (is_taken, is_thin)
    }
}

fn create(store: &Store, seed: u64) -> Result<PageId, Error> {
    let mut batch = store.batch();
    let page = batch.create(LIFE_LEN, Place::Host).page();
    batch.write(page, 0, &noise(seed, LIFE_LEN / 2));
    store.commit(batch).map(|committed| committed.pages[0])
}

/// Creates a page whose content is written to an image file before the page's batch.
fn create_from(store: &Store, seed: u64) -> Result<(), Error> {
    let mut batch = store.batch();
    batch.create_from(noise(seed, LIFE_LEN), Place::Host);
    store.commit(batch).map(drop)
}

fn write(store: &Store, page: PageId, seed: u64) -> Result<(), Error> {
    let mut batch = store.batch();
    batch.write(page, 8, &noise(seed, 2000));
    store.commit(batch).map(drop)
}

fn delete(store: &Store, pages: impl Iterator<Item = PageId>) -> Result<(), Error> {
    let mut batch = store.batch();
    pages.for_each(|page| _ = batch.delete(page));
    store.commit(batch).map(drop)
}

/// Removes all snapshots except the newest, including named ones.
fn prune(store: &Store) -> Result<(), Error> {
    let names = store.snapshots().into_iter().filter_map(|info| info.name);
    let retention = names.fold(store.retention(), |retention, name| retention.give_up(name));
    store.prune(&retention).map(drop)
}

/// Runs a life on a disk on which `fill` leaves little space. A refused call must change nothing. Batches
/// that only delete, prunes, closes and opens must not be refused. At the end, the space of all deleted pages
/// must be free.
pub fn life(why: &str, ways: &Ways<'_>, fill: impl FnOnce()) -> Course {
    let store = Some((ways.open)().unwrap());
    let course = Course { lives: 1, ..Course::default() };
    let mut life = Life { why: why.to_owned(), ways, store, course };
    for seed in 0..4 {
        create(life.store(), seed).unwrap();
        life.store().snapshot().unwrap();
    }
    for info in life.store().pages().unwrap() {
        write(life.store(), info.page, 9).unwrap();
    }
    life.store().wait_durable(life.store().lsn()).unwrap();
    // A thread of the store fills the reserve after the batches.
    until(|| is_held(ways.disk, RESERVE));
    fill();
    for left in (0..3).rev() {
        life.why = format!("{why}, {left} left");
        for seed in 0..4 {
            let page = life.first_page();
            life.may("a write", |store| write(store, page, seed));
        }
        let (is_gathered, _) = life.snapshot("a snapshot");
        life.may("a bulk create", |store| create_from(store, 70 + left));
        let is_forked = life.may("a fork", ways.fork);
        life.course.forks += usize::from(is_forked);
        let page = life.first_page();
        let delete_it = |store: &Store| delete(store, [page].into_iter());
        // The reserve from before the disk became full suffices for this step, unless opens also use it.
        let is_first = left == 2 && !(ways.refuses_files && ways.each_step);
        if is_first {
            life.must("a delete", delete_it);
        } else {
            life.frees("a delete", delete_it);
        }
        // Only a thin snapshot fits. An earlier restore would prevent it. A larger snapshot would also
        // prevent it, because the page's image would then share a file with others.
        let (is_taken, is_thin) = life.snapshot("a snapshot after the delete");
        assert!(
            !is_first || is_gathered || is_taken || is_thin,
            "{}: the space of a deleted page was not given back",
            life.why
        );
        let is_restored = life.may("a restore", |store| {
            store.restore(StatePoint::Snapshot(store.snapshots().pop().unwrap().id))
        });
        life.course.restores += usize::from(is_restored);
        life.may("a create", |store| create(store, 50 + left));
        life.may("a named snapshot", |store| {
            store.snapshot_with(SnapshotOptions::new().name(format!("with {left} left")))
        });
        life.must("a prune", prune);
        if !ways.each_step {
            life.reopen("a round");
        }
    }
    life.why = format!("{why}, at the end");
    let delete_all = |store: &Store| delete(store, store.pages().unwrap().map(|info| info.page));
    let is_empty = life.frees("the delete of all pages", delete_all);
    if is_empty && life.frees("a snapshot of nothing", |store| store.snapshot()) {
        life.must("a prune", prune);
        life.frees("a create", |store| create(store, 100));
        life.frees("a snapshot", |store| store.snapshot());
        life.course.to_the_end += 1;
    }
    life.store.take().unwrap().close().unwrap();
    life.course
}
