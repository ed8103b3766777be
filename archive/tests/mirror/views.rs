//! Views of an archive: states whose image parts are fetched later.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use remanent::error::FileName;
use remanent::{Lsn, SnapshotId, StatePoint, Store};
use remanent_archive::Error;
use remanent_archive::bucket::{Bucket, BucketError, Creation};
use remanent_archive::directory::ViewDirectory;
use remanent_archive::line::{Archive, Line, ListedPart, ViewPoint, fetch_part, status};
use remanent_archive::mirror::{self, ViewedState};
use remanent_archive::object::{Folder, ObjectKey, Role};
use remanent_archive::rules::Rules;
use remanent_archive::testing::bucket::{SimBucket, reschedule};

use crate::bed::{Bed, Life, State, block_on};

/// A bucket that records requests, and that lets other processes run before each one.
struct RecordingBucket {
    bucket: SimBucket,
    gets: RefCell<Vec<ObjectKey>>,
}

impl Bucket for RecordingBucket {
    async fn create(&self, key: ObjectKey, _bytes: &[u8]) -> Result<Creation, BucketError> {
        panic!("a view creates {key}");
    }

    async fn put(&self, key: ObjectKey, _bytes: &[u8]) -> Result<(), BucketError> {
        panic!("a view writes {key}");
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        self.gets.borrow_mut().push(key);
        reschedule().await;
        self.bucket.get(key, range).await
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        panic!("a view lists {}", folder.name());
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        panic!("a view deletes {key}");
    }

    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        self.bucket.pause(attempt, failure).await
    }
}

/// A view of an archive, whose files are in a directory.
struct SimView {
    bucket: RecordingBucket,
    directory: tempfile::TempDir,
    point: ViewPoint,
    state: ViewedState,
}

impl SimView {
    fn open(bed: &Bed, point: &ViewPoint) -> remanent_archive::Result<Self> {
        block_on(Self::open_later(bed, point))
    }

    async fn open_later(bed: &Bed, point: &ViewPoint) -> remanent_archive::Result<Self> {
        let bucket = RecordingBucket { bucket: bed.bucket(), gets: RefCell::default() };
        let directory = tempfile::tempdir().unwrap();
        let archive = Archive { bucket: &bucket, nonces: &bucket.bucket, rules: Rules::default() };
        let files = ViewDirectory::new(directory.path());
        let state = mirror::view(&mut Line::new(archive), &files, point).await?;
        Ok(Self { bucket, directory, point: point.clone(), state })
    }

    fn fetch(&self, part: &ListedPart) -> remanent_archive::Result<Vec<u8>> {
        let archive = Archive { bucket: &self.bucket, nonces: &self.bucket.bucket, rules: Rules::default() };
        block_on(fetch_part(archive, part))
    }

    /// Fetches all images, and reads the whole state.
    fn read(&self) -> State {
        let pages = self.directory.path().join("pages");
        for entry in fs::read_dir(&pages).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(
                name.to_str().unwrap().ends_with(".table"),
                "{name:?} was fetched when the view was opened"
            );
        }
        for part in &self.state.images {
            let bytes = self.fetch(part).unwrap();
            let file = FileName::Pages(part.entry.part.file);
            let path = pages.join(file.name());
            let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(path).unwrap();
            file.write_all_at(&bytes, part.entry.part.offset).unwrap();
        }
        self.opened()
    }

    fn opened(&self) -> State {
        let path = self.directory.path();
        let view = match &self.point {
            ViewPoint::End => Store::open_read_only(path),
            ViewPoint::Batch(lsn) => Store::open_at(path, StatePoint::Lsn(*lsn)),
            ViewPoint::Snapshot(snapshot) => Store::open_at(path, StatePoint::Snapshot(*snapshot)),
            ViewPoint::Name(name) => Store::open_at(path, StatePoint::Name(name.clone())),
        };
        State::of_view(&view.unwrap())
    }
}

fn objects(bed: &Bed) -> BTreeMap<ObjectKey, Vec<u8>> {
    bed.world.borrow().objects.iter().map(|(key, bytes)| (*key, bytes.to_vec())).collect()
}

/// Commits, takes a snapshot and pushes.
fn push_with_snapshot(bed: &Bed, life: &mut Life, batches: usize) {
    let store = life.work(batches);
    store.snapshot().unwrap();
    store.close().unwrap();
    bed.push(&life.path).unwrap();
}

#[test]
fn views_show_every_kept_state_and_change_nothing() {
    for seed in 50..54 {
        let bed = Bed::new(seed);
        let mut life = Life::new(seed);
        let store = life.work(9);
        life.name(&store, "first");
        store.close().unwrap();
        bed.push(&life.path).unwrap();
        for _ in 0..3 {
            push_with_snapshot(&bed, &mut life, 5);
            life.work(3).close().unwrap();
            bed.push(&life.path).unwrap();
        }
        let before = objects(&bed);
        let newest = *life.states.keys().next_back().unwrap();
        let end = SimView::open(&bed, &ViewPoint::End).unwrap();
        assert!(end.read() == life.states[&newest], "seed {seed}: the end");
        let name = SimView::open(&bed, &ViewPoint::Name("first".to_owned())).unwrap();
        assert!(name.read() == life.states[&life.names["first"]], "seed {seed}: the named snapshot");
        let mut kept = BTreeSet::new();
        for (lsn, state) in &life.states {
            match SimView::open(&bed, &ViewPoint::Batch(Lsn(*lsn))) {
                Ok(view) => {
                    assert!(view.read() == *state, "seed {seed}: lsn {lsn}");
                    kept.insert(*lsn);
                }
                Err(Error::CutTooOld { .. }) => {}
                Err(error) => panic!("seed {seed}: lsn {lsn}: {error}"),
            }
        }
        assert!(kept.len() > 3 && kept.len() < life.states.len(), "seed {seed}: {kept:?}");
        assert!(kept.contains(&life.names["first"]) && kept.contains(&newest), "seed {seed}: {kept:?}");
        assert!(objects(&bed) == before);
        // The writer continues.
        life.work(2).close().unwrap();
        bed.push(&life.path).unwrap();
    }
}

#[test]
fn snapshots_are_found_by_number() {
    let bed = Bed::new(55);
    let mut life = Life::new(55);
    let store = life.work(6);
    let first = store.snapshot().unwrap();
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    life.work(1).close().unwrap();
    bed.push(&life.path).unwrap();
    let bucket = bed.bucket();
    let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
    let found = block_on(status(archive)).unwrap();
    let view = SimView::open(&bed, &ViewPoint::Snapshot(first.id));
    let view = view.unwrap_or_else(|error| panic!("{error}: {found:?}"));
    assert!(view.read() == life.states[&first.end.0]);
    let store = life.work(1);
    life.name(&store, "a");
    let named = store.snapshots().iter().find(|info| info.name.is_some()).unwrap().id;
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    push_with_snapshot(&bed, &mut life, 3);
    let view = SimView::open(&bed, &ViewPoint::Snapshot(named)).unwrap();
    assert!(view.read() == life.states[&life.names["a"]]);
    let unknown = SimView::open(&bed, &ViewPoint::Snapshot(SnapshotId(999))).map(drop);
    assert!(matches!(unknown, Err(Error::UnknownSnapshot { .. })), "{unknown:?}");
    let unknown = SimView::open(&bed, &ViewPoint::Name("b".to_owned())).map(drop);
    assert!(matches!(unknown, Err(Error::UnknownName { .. })), "{unknown:?}");
    let empty = SimView::open(&Bed::new(1), &ViewPoint::End).map(drop);
    assert!(matches!(empty, Err(Error::Empty)), "{empty:?}");
}

/// The number of requests depends on the log after the snapshot, not on images and older objects.
#[test]
fn open_fetches_no_images_and_few_objects() {
    let bed = Bed::new(56);
    let mut life = Life::new(56);
    for _ in 0..12 {
        push_with_snapshot(&bed, &mut life, 8);
    }
    let bucket = bed.bucket();
    let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
    let status = block_on(status(archive)).unwrap();
    let (end, runs) = (status.end, status.line_objects());
    for point in [ViewPoint::End, ViewPoint::Batch(status.archived.lsn)] {
        let view = SimView::open(&bed, &point).unwrap();
        let images: BTreeSet<ObjectKey> =
            view.state.images.iter().map(|part| ObjectKey::Data(part.entry.key)).collect();
        assert!(images.len() > 5, "{} images", images.len());
        assert!(view.state.images.iter().all(|part| part.entry.part.role == Role::Images));
        let gets = view.bucket.gets.take();
        assert!(gets.iter().all(|key| !images.contains(key)), "an image was fetched");
        let data = gets.iter().filter(|key| matches!(key, ObjectKey::Data(_))).count() as u64;
        let line = gets.len() as u64 - data;
        let logarithm = u64::from(u64::BITS - end.leading_zeros());
        assert!(line <= runs + 8 * logarithm, "{line} requests for {end} objects, {runs} of which are read");
        // Manifests and tables: one object for each link of the snapshot.
        assert!(data <= 16, "{data} data objects");
        view.fetch(&view.state.images[0]).unwrap();
        assert_eq!(view.bucket.gets.take(), [ObjectKey::Data(view.state.images[0].entry.key)]);
    }
}

#[test]
fn parts_behind_a_boundary_are_overtaken() {
    let bed = Bed::new(57);
    let mut life = Life::new(57);
    push_with_snapshot(&bed, &mut life, 12);
    let view = SimView::open(&bed, &ViewPoint::End).unwrap();
    let kept = objects(&bed);
    let mut overtaken = 0;
    for _ in 0..6 {
        push_with_snapshot(&bed, &mut life, 12);
        for part in &view.state.images {
            let key = ObjectKey::Data(part.entry.key);
            match view.fetch(part) {
                Ok(bytes) => assert!(kept[&key].ends_with(&bytes)),
                Err(Error::Overtaken { .. }) => {
                    assert!(!bed.has(key));
                    overtaken += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(overtaken > 0);
}

#[test]
fn missing_and_damaged_parts_are_named() {
    let bed = Bed::new(58);
    let mut life = Life::new(58);
    push_with_snapshot(&bed, &mut life, 12);
    for _ in 0..3 {
        push_with_snapshot(&bed, &mut life, 6);
    }
    let view = SimView::open(&bed, &ViewPoint::End).unwrap();
    let objects = objects(&bed);
    for part in &view.state.images {
        let key = ObjectKey::Data(part.entry.key);
        let bytes = &objects[&key];
        for at in [3, 40, 127, bytes.len() / 2, bytes.len() - 1] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 16;
            bed.world.borrow_mut().objects.insert(key, flipped.into());
            let found = view.fetch(part).unwrap_err();
            assert!(matches!(&found, Error::Damaged { key: found, .. } if *found == key), "{found}");
        }
        bed.world.borrow_mut().objects.remove(&key);
        let found = view.fetch(part).unwrap_err();
        assert!(matches!(&found, Error::Damaged { key: found, .. } if *found == key), "{found}");
        assert!(found.to_string().contains("missing"), "{found}");
        bed.world.borrow_mut().objects.insert(key, bytes.clone().into());
    }
    assert!(view.state.images.len() > 3);
}

/// Boundaries pass while a view is being opened. The view then shows a newer state, or reads of its images return an
/// error.
#[test]
fn open_of_view_survives_boundaries() {
    let mut moved = 0;
    for polls in (1..40).step_by(3) {
        let bed = Bed::new(59);
        let mut life = Life::new(59);
        let store = life.work(4);
        life.name(&store, "kept");
        store.close().unwrap();
        bed.push(&life.path).unwrap();
        push_with_snapshot(&bed, &mut life, 4);
        for point in [ViewPoint::End, ViewPoint::Name("kept".to_owned())] {
            let mut opening = pin!(SimView::open_later(&bed, &point));
            let before = *life.states.keys().next_back().unwrap();
            let early = poll_some(opening.as_mut(), polls);
            for _ in 0..3 {
                push_with_snapshot(&bed, &mut life, 2);
            }
            let view = match early {
                Some(view) => view.unwrap(),
                None => block_on(opening).unwrap(),
            };
            let lsn = view.state.end.batch.lsn.0;
            moved += u32::from(point == ViewPoint::End && lsn > before);
            let expected = if point == ViewPoint::End { lsn } else { life.names["kept"] };
            assert_eq!(expected, lsn);
            let images: Result<Vec<_>, _> = view.state.images.iter().map(|part| view.fetch(part)).collect();
            match images {
                Ok(_) => assert!(view.read() == life.states[&lsn]),
                Err(Error::Overtaken { .. }) => assert!(point == ViewPoint::End),
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(moved > 2, "no boundary passed during an open");
}

/// Polls a future at most `count` times.
fn poll_some<F: Future>(mut future: Pin<&mut F>, count: u32) -> Option<F::Output> {
    for _ in 0..count {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Some(output);
        }
    }
    None
}
