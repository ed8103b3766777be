//! Compares the versions that readers find with the page table after every batch, including during concurrent writes.
//! Miri runs all of these tests.

use std::sync::atomic::AtomicBool;
use std::thread;

use remanent_format::op::{Op, OpAt};
use remanent_format::state::table::PlanMode;
use remanent_format::{Epoch, Place, Value};

use super::*;

const STEPS: u64 = if cfg!(miri) { 60 } else { 3000 };

/// A page table that a writer changes, and the versions that readers find.
struct TestTable {
    table: PageTable,
    versions: Arc<Versions>,
    logged: Arc<AtomicU64>,
}

impl TestTable {
    fn new() -> Self {
        let (table, logged) = (PageTable::new(), Arc::new(AtomicU64::new(0)));
        let versions = Arc::new(Versions::new(&table, Some(logged.clone()), |_| None, None));
        Self { table, versions, logged }
    }

    /// Installs a batch without logging it.
    fn submit(&mut self, ops: &[Op<'_>]) {
        let ops: Vec<OpAt<'_>> = ops.iter().map(|op| OpAt { op: op.clone(), body_at: 0 }).collect();
        let lsn = self.table.lsn().next();
        let changes = self.table.plan(lsn, &ops, PlanMode::Commit).unwrap();
        self.table.install(&changes);
        self.versions.install(&changes);
        self.versions.show(lsn);
    }

    /// Logs all submitted batches.
    fn log(&self) {
        self.logged.store(self.table.lsn().0, Ordering::Release);
    }

    fn commit(&mut self, ops: &[Op<'_>]) {
        self.submit(ops);
        self.log();
    }

    fn versions_of(&self, page: u64) -> usize {
        let newest = self.versions.pages.with(PageId(page), |slot| slot.newest.get()).flatten();
        newest.map_or(0, |newest| newest.chain_len())
    }
}

fn create(page: u64, key: Option<&Key>) -> Op<'static> {
    let metadata = Metadata::default();
    Op::Create { page: PageId(page), len: page % 1000, place: Place::Host, key: key.cloned(), metadata }
}

fn resize(page: u64, len: u64) -> Op<'static> {
    Op::Resize { page: PageId(page), len }
}

fn write(page: u64) -> Op<'static> {
    Op::Write { page: PageId(page), offset: 0, bytes: &[] }
}

fn move_to(page: u64, place: Place) -> Op<'static> {
    Op::Move { page: PageId(page), place }
}

/// Returns a place for a number, so that consecutive numbers have different places.
fn place_of(number: u64) -> Place {
    [Place::Host, Place::Device(63), Place::Disk][number as usize % 3]
}

fn set_root(value: u64) -> Op<'static> {
    Op::SetRoot { name: "at".to_owned(), value: Value::U64(value) }
}

fn key(number: u64) -> Key {
    Key::new(format!("key {number}")).unwrap()
}

/// Checks that a view shows the table after the view's batch.
fn check(view: &TableView<'_>, table: &PageTable) {
    assert_eq!(view.lsn(), table.lsn());
    let mut from = Some(PageId(0));
    let listed = std::iter::from_fn(|| {
        let info = view.next(from?)?;
        from = info.page.0.checked_add(1).map(PageId);
        Some(info)
    });
    assert!(listed.eq(table.pages()), "at {}", table.lsn());
    assert_eq!(view.root(), (table.root().clone(), table.pages().len() as u64));
    for number in 0..8 {
        assert_eq!(
            view.page_by_key(key(number).as_bytes()),
            table.get_key(key(number)),
            "at {}",
            table.lsn()
        );
    }
}

#[test]
fn every_view_equals_table_of_its_batch() {
    let mut ground = TestTable::new();
    let mut random = 11_u64;
    let mut draw = |end: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % end
    };
    let mut tables = vec![ground.table.clone()];
    let mut next = 1;
    for step in 0..STEPS / 3 {
        let live: Vec<PageInfo> = ground.table.pages().collect();
        let drawn = live.get(draw(live.len().max(1) as u64) as usize);
        let ops = match (draw(7), drawn) {
            (0 | 1, _) | (_, None) => {
                // There are gaps between ids, some of them long.
                next += 1 + draw(3) * draw(3) * draw(200);
                let free = (0..8).map(key).find(|key| ground.table.get_key(key).is_none());
                vec![create(next, free.as_ref().filter(|_| step % 2 == 0)), set_root(step)]
            }
            (2, Some(info)) => vec![Op::Delete { page: info.page }],
            (3, Some(info)) if info.key.is_some() => {
                next += 1;
                vec![Op::Delete { page: info.page }, create(next, info.key.as_ref())]
            }
            (4, Some(info)) => vec![
                Op::SetMetadata { page: info.page, name: "step".to_owned(), value: Value::U64(step) },
                set_root(step),
            ],
            (5, Some(info)) => vec![move_to(info.page.0, place_of(step)), write(info.page.0)],
            (_, Some(info)) => vec![resize(info.page.0, step)],
        };
        ground.submit(&ops);
        tables.push(ground.table.clone());
        // As with a direct log, batches become visible later than they are installed.
        let logged = ground.table.lsn().0 - draw(3).min(ground.table.lsn().0);
        ground.logged.fetch_max(logged, Ordering::AcqRel);
        let at = ground.versions.visible();
        let now = &tables[at.0 as usize];
        check(&ground.versions.view(), now);
        for info in &live {
            let found = ground.versions.page(info.page, |entry| entry.info(info.page));
            assert_eq!(found, now.get(info.page));
        }
    }
}

#[test]
fn files_needed_by_view_stay_and_others_are_truncated() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, Some(&key(1))), create(2, None)]);
    let versions = ground.versions.clone();
    let (early, early_table) = (versions.view(), ground.table.clone());
    for len in 0..200 {
        ground.commit(&[resize(1, len)]);
    }
    let (late, late_table) = (versions.view(), ground.table.clone());
    ground.commit(&[Op::Delete { page: PageId(1) }, create(3, Some(&key(1))), set_root(1)]);
    for len in 0..200 {
        ground.commit(&[resize(2, len)]);
    }
    assert_eq!((ground.versions_of(1), ground.versions_of(2)), (202, 201));
    check(&early, &early_table);
    check(&late, &late_table);
    drop(early);
    // Each batch unlinks slightly more versions than it supersedes.
    let more = |ground: &mut TestTable| {
        for len in 0..800 {
            ground.commit(&[resize(3, len)]);
        }
    };
    more(&mut ground);
    check(&late, &late_table);
    assert_eq!(ground.versions_of(1), 2, "the last one, and that it is gone");
    drop(late);
    more(&mut ground);
    assert_eq!((ground.versions_of(1), ground.versions_of(2)), (0, 1));
    check(&versions.view(), &ground.table);
    assert_eq!(versions.keys.with(&key(1), |holders| holders.earlier.len()), Some(0));
    // Empty chunks and rows are removed.
    ground.commit(&[Op::Delete { page: PageId(2) }, Op::Delete { page: PageId(3) }]);
    for number in 0..200 {
        ground.commit(&[create((1 << 40) + number, None)]);
        ground.commit(&[resize((1 << 40) + number, 1)]);
    }
    assert_eq!(versions.pages.row_count(), 1);
    assert_eq!(versions.keys.with(&key(1), |_| ()), None);
}

/// A page that moves keeps its version and epoch. Each view shows the place after its own batch.
#[test]
fn moved_page_is_visible_at_each_place_in_turn() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, Some(&key(1)))]);
    for lsn in 2..50 {
        ground.submit(&[move_to(1, place_of(lsn))]);
        // The batch is not logged yet, so the previous place is visible.
        let info = ground.versions.page(PageId(1), |page| page.info(PageId(1))).unwrap();
        let before = if lsn == 2 { Place::Host } else { place_of(lsn - 1) };
        assert_eq!((info.place, info.epoch.0, info.lsn.0), (before, 1, lsn - 1));
        ground.log();
        check(&ground.versions.view(), &ground.table);
    }
    assert_eq!(ground.versions_of(1), 1);
    let versions = ground.versions.clone();
    let (view, table) = (versions.view(), ground.table.clone());
    ground.commit(&[move_to(1, Place::Pinned)]);
    assert_eq!(ground.versions_of(1), 1, "the view has the older state");
    ground.commit(&[move_to(1, Place::Unified)]);
    check(&view, &table);
    check(&versions.view(), &ground.table);
    assert_eq!(ground.versions_of(1), 2);
}

/// A batch that changes only bytes must allocate nothing while no view needs the previous state.
#[test]
fn page_memory_is_stable_under_writes() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, Some(&key(1)))]);
    for epoch in 2..50 {
        ground.submit(&[write(1)]);
        // The batch is not logged yet, so the previous state is visible.
        let info = ground.versions.page(PageId(1), |page| page.info(PageId(1))).unwrap();
        assert_eq!((info.epoch.0, info.lsn.0), (epoch - 1, epoch - 1));
        ground.log();
        check(&ground.versions.view(), &ground.table);
    }
    assert_eq!(ground.versions_of(1), 1);
    // No state is overwritten that a view needs, or that readers need while nothing is logged.
    let versions = ground.versions.clone();
    let (view, table) = (versions.view(), ground.table.clone());
    (0..5).for_each(|_| ground.commit(&[write(1)]));
    (0..5).for_each(|_| ground.submit(&[write(1)]));
    check(&view, &table);
    let info = versions.page(PageId(1), |page| page.info(PageId(1))).unwrap();
    assert_eq!((info.epoch.0, info.lsn.0), (54, 54));
    ground.log();
    check(&versions.view(), &ground.table);
    assert!(ground.versions_of(1) > 1);
}

/// Tests a batch that fills new chunks. The batch contains the pages on both sides of each chunk border, a page that is
/// deleted in the same batch, and pages that are not ordered by id.
#[test]
fn batch_creates_many_pages() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, Some(&key(1)))]);
    let keys: Vec<Key> = (0..900).map(key).collect();
    let mut ops: Vec<Op<'_>> = (200..900).map(|page| create(page, keys.get(page as usize))).collect();
    ops.push(Op::Delete { page: PageId(700) });
    ground.submit(&ops);
    assert!(ground.versions.page(PageId(200), |_| ()).is_none(), "not logged");
    ground.log();
    check(&ground.versions.view(), &ground.table);
    let falling: Vec<Op<'_>> = (1000..1400).rev().step_by(3).map(|page| create(page, None)).collect();
    ground.commit(&falling);
    check(&ground.versions.view(), &ground.table);
    assert_eq!(ground.versions.root(|_, page_count| page_count), 1 + 699 + 134);
    let deletes: Vec<Op<'_>> = (200..700).map(|page| Op::Delete { page: PageId(page) }).collect();
    ground.commit(&deletes);
    check(&ground.versions.view(), &ground.table);
}

/// Tests batches with more pages than the writer's cache, which walk from chunk to chunk: in ascending and descending
/// order of ids, over existing pages, new pages in old chunks and new pages in new chunks. Small batches that use the
/// cache run in between.
#[test]
fn batch_of_many_pages_changes_each_page() {
    let mut ground = TestTable::new();
    let creates: Vec<Op<'_>> = (1..700).map(|page| create(page, None)).collect();
    ground.commit(&creates);
    let rising: Vec<Op<'_>> = (1..700).map(write).collect();
    let falling: Vec<Op<'_>> = (1..700).rev().map(write).collect();
    let mixed: Vec<Op<'_>> = (1..900)
        .map(|page| match page {
            1..700 if page % 5 == 0 => resize(page, 7),
            1..700 => write(page),
            _ => create(page, None),
        })
        .collect();
    for (ops, times) in [(&rising, 3), (&falling, 3), (&mixed, 1), (&rising, 3)] {
        ground.commit(&[write(3), write(300)]);
        let versions = ground.versions.clone();
        let (view, table) = (versions.view(), ground.table.clone());
        for _ in 0..times {
            ground.submit(ops);
            check(&view, &table);
            ground.log();
            check(&versions.view(), &ground.table);
        }
        check(&view, &table);
    }
    // No view needs the old states, so batches that change only bytes create no versions.
    let count = |ground: &TestTable| (1..700).map(|page| ground.versions_of(page)).sum::<usize>();
    ground.commit(&rising);
    let before = count(&ground);
    ground.commit(&rising);
    assert!(count(&ground) <= before);
}

#[test]
fn a_long_chain_is_dropped_without_a_deep_stack() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, None)]);
    // No batch is logged, so no version is unlinked.
    for len in 0..if cfg!(miri) { 100 } else { 300_000 } {
        ground.submit(&[resize(1, len)]);
    }
    assert_eq!(ground.versions.page(PageId(1), |page| page.info(PageId(1)).len), Some(1));
}

#[test]
fn restore_adds_and_removes_pages() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, Some(&key(1))), create(2, None)]);
    let old: Vec<PageInfo> = ground.table.pages().collect();
    ground.commit(&[Op::Delete { page: PageId(1) }, create(3, Some(&key(1)))]);
    let lsn = ground.table.lsn().next();
    let mut pages = old;
    (pages[0].lsn, pages[0].epoch) = (lsn, Epoch(9));
    let root: Arc<Metadata> = Arc::new([("at".to_owned(), Value::U64(7))].into_iter().collect());
    ground.table.replace(lsn, pages.iter().cloned(), root.clone());
    ground.table.index_keys().unwrap();
    ground.versions.replace(lsn, &pages, &root);
    assert_eq!(
        ground.versions.page_by_key(key(1).as_bytes(), |page, _| page),
        Some(PageId(3)),
        "not logged yet"
    );
    ground.log();
    check(&ground.versions.view(), &ground.table);
    for len in 0..200 {
        ground.commit(&[resize(2, len)]);
    }
    check(&ground.versions.view(), &ground.table);
    assert_eq!((ground.versions_of(3), ground.versions.page(PageId(3), |_| ())), (0, None));
}

#[test]
fn salvaged_page_reappears_and_accepts_changes() {
    let mut ground = TestTable::new();
    ground.commit(&[create(1, None), create(2, None)]);
    ground.commit(&[write(1)]);
    let mut pages: Vec<PageInfo> = ground.table.pages().collect();
    ground.commit(&[Op::Delete { page: PageId(1) }]);
    for len in 0..200 {
        ground.commit(&[resize(2, len)]);
    }
    assert_eq!(ground.versions_of(1), 0, "forgotten");
    let lsn = ground.table.lsn().next();
    pages.iter_mut().for_each(|info| (info.lsn, info.epoch) = (lsn, Epoch(1000)));
    let root = ground.table.root().clone();
    ground.table.replace(lsn, pages.iter().cloned(), root.clone());
    ground.versions.replace(lsn, &pages, &root);
    ground.log();
    for _ in 0..10 {
        ground.commit(&[write(1)]);
        check(&ground.versions.view(), &ground.table);
    }
}

/// Each batch of the writer sets two pages, a key that is passed from page to page, and the root to the same count.
/// Readers must never find different counts.
#[test]
fn batches_are_atomic_and_reads_monotonic() {
    let mut ground = TestTable::new();
    let held = key(0);
    let written = 9_000_000;
    let pages = [create(1, None), create(2, None), create(3, Some(&held)), create(written, None)];
    ground.commit(&[&pages[..], &[set_root(0)]].concat());
    ground.commit(&[resize(1, 0), resize(2, 0)]);
    let (versions, logged, mut table) = (&ground.versions, &ground.logged, ground.table);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for count in 1..=STEPS {
                let before = table.get_key(&held).unwrap().page;
                let ops = [
                    resize(1, count),
                    set_root(count),
                    Op::Delete { page: before },
                    create(3 + count, Some(&held)),
                    resize(2, count),
                    write(written),
                    move_to(written, place_of(count)),
                ];
                let ops: Vec<OpAt<'_>> = ops.into_iter().map(|op| OpAt { op, body_at: 0 }).collect();
                let changes = table.plan(table.lsn().next(), &ops, PlanMode::Commit).unwrap();
                table.install(&changes);
                versions.install(&changes);
                versions.show(changes.lsn);
                // Some batches are logged together, as by one sync.
                if count % 3 != 1 || count == STEPS {
                    logged.store(table.lsn().0, Ordering::Release);
                }
            }
            is_over.store(true, Ordering::Release);
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let mut last = (Lsn(0), 0, PageId(0));
                while !is_over.load(Ordering::Acquire) {
                    let view = versions.view();
                    let at = view.lsn().0 - 2;
                    let lens = [1, 2].map(|page| view.page(PageId(page)).unwrap().len);
                    assert_eq!(lens, [at, at]);
                    let info = view.page(PageId(written)).unwrap();
                    assert_eq!((info.epoch.0, info.lsn.0), (1 + at, if at == 0 { 1 } else { view.lsn().0 }));
                    assert_eq!(info.place, place_of(at));
                    let (root, page_count) = view.root();
                    assert_eq!((root.get("at"), page_count), (Some(&Value::U64(at)), 4));
                    assert_eq!(view.page_by_key(held.as_bytes()).unwrap().page, PageId(3 + at));
                    drop(view);
                    let visible = versions.visible();
                    let len = versions.page(PageId(2), |page| page.info(PageId(1)).len).unwrap();
                    let holder = versions
                        .page_by_key(held.as_bytes(), |page, _| page)
                        .expect("some page always has it");
                    assert!(len + 2 >= visible.0 && holder.0 >= 3 + len, "what was visible stays");
                    assert!((visible, len, holder) >= last);
                    last = (visible, len, holder);
                }
            });
        }
        writer.join().unwrap();
    });
}
