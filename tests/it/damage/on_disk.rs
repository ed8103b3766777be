//! Damage to stores with pages on disk: an image, an overlay over an image, an image that a capture wrote,
//! and later changes in the log.
//!
//! An open does not read images that were verified before, so the damage is detected when the page is read.
//! The error then names the file, all other pages can be read, and the store continues to work.

use crate::with_options::With;
use remanent::Options;
use remanent::batch::{InitialCopy, Shadow};
use remanent::options::{Compression, ImageOptions, Retention};
use remanent_format::image::Codec;

use super::*;

/// Options with which all but the shortest pages may have overlays.
pub fn options() -> Options {
    small()
        .images(ImageOptions::new().chunk_len(4096).compression(Compression::Off))
        .retention(Retention::new().log_kept(1 << 30))
        .with(|options| options.log.reserve_bytes = Some(0))
}

fn bytes(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| mix(seed << 32 | at) as u8).collect()
}

/// Returns a cleanly closed store with these pages: one with an overlay, one that was captured, one that the
/// log changed after its image, one that is unchanged, and one in memory.
pub fn victim() -> Victim {
    // Length of the captured page, which is long enough for a capture to write an image.
    const CAPTURED_LEN: u64 = 6 << 10;
    let disk = SimDisk::new();
    let mut states = BTreeMap::new();
    let mut store = open_with(&disk, options().with(|options| options.images.io = ImageIo::Direct)).unwrap();
    let mut batch = store.batch();
    for (seed, len) in [3000, CAPTURED_LEN, 3000, 3000].into_iter().enumerate() {
        batch.create_from(bytes(seed as u64, len), Place::Disk);
    }
    batch.create_from(bytes(4, 700), Place::Host);
    let pages = store.commit(batch).unwrap().pages;
    states.insert(store.lsn(), State::of(&store));
    let mut commit = |store: &Store, fill: &dyn Fn(&mut remanent::WriteBatch)| {
        let mut batch = store.batch();
        fill(&mut batch);
        store.commit(batch).unwrap();
        states.insert(store.lsn(), State::of(store));
    };
    store.snapshot().unwrap();
    let capture = |store: &Store, seed| {
        let tensor = store.device_bytes(CAPTURED_LEN, Place::Device(0)).unwrap();
        tensor.write(0, &bytes(seed, CAPTURED_LEN)).unwrap();
        let (shadow, initial_copy) = (Shadow::Digest, InitialCopy::Store);
        store.working_copy_in(pages[1], &tensor, Width::W1, shadow, initial_copy).unwrap()
    };
    let image_files = || Files::of(&disk).names(|file| file.folder() == Folder::Pages);
    for round in 0..2 {
        commit(&store, &|batch| _ = batch.write(pages[0], 700 * round + 9, &bytes(20 + round, 30)));
        let before = image_files();
        let copy = capture(&store, 10 + round);
        commit(&store, &|batch| _ = batch.capture(&copy));
        assert!(image_files().iter().any(|file| !before.contains(file)), "much of it changed");
        drop(copy);
        if round == 0 {
            store.snapshot().unwrap();
            store.close().unwrap();
            store = open_with(&disk, options().with(|options| options.images.io = ImageIo::Mapped)).unwrap();
        }
    }
    commit(&store, &|batch| _ = batch.write(pages[2], 100, b"later").fill(pages[4], 3, 90, &[7]));
    let (last, files) = (store.lsn(), store.close().map(|()| Files::of(&disk)).unwrap());
    let survey = Survey::read(&files).unwrap();
    let newest = survey.snapshot(SnapshotId(2)).unwrap();
    let is_overlay = |page| {
        let entry = newest.entries.iter().find(|entry| entry.page == page).unwrap();
        matches!(entry.image.unwrap().codec, Codec::Overlay(_))
    };
    assert_eq!(
        pages[..4].iter().map(|page| is_overlay(*page)).collect::<Vec<_>>(),
        [true, false, false, false]
    );
    Victim { files, states, last, marked: last, older: Vec::new() }
}

/// Returns the pages with images in these files.
pub fn pages_in(victim: &Victim, files: &[FileName]) -> BTreeSet<PageId> {
    let survey = Survey::read(&victim.files).unwrap();
    let base = survey.candidates().next().unwrap().unwrap();
    let state = survey.resolve(&victim.files, base.as_ref(), None).unwrap();
    let bases = state.resolved.bases.iter().filter_map(|(page, base)| Some((page, base.image?)));
    let lies_in = |(page, image): (PageId, remanent_format::image::ImageRef)| {
        let mut found = image.files().map(|(file, _)| FileName::Pages(file));
        found.any(|file| files.contains(&file)).then_some(page)
    };
    bases.filter_map(lies_in).collect()
}

/// Returns the files whose content changed.
pub fn changed(victim: &Victim, files: &Files) -> Vec<FileName> {
    let names = victim.files.0.keys().filter(|name| victim.files.0.get(name) != files.0.get(name));
    names.copied().collect()
}

/// The results of opening and reading damaged stores.
#[derive(Debug, Default)]
struct Outcomes {
    whole: usize,
    refused: usize,
    /// Number of opened stores in which each page could not be read.
    pages: BTreeMap<PageId, usize>,
}

impl Outcomes {
    /// Opens damaged files and reads all pages. At most `pages_max` pages may be unreadable.
    fn add(&mut self, victim: &Victim, what: &str, files: &Files, pages_max: usize) {
        let changed = changed(victim, files);
        let state = &victim.states[&victim.last];
        let disk = files.disk();
        let store = match open_with(&disk, options().with(|options| options.images.io = image_io(draw(what))))
        {
            Ok(store) => store,
            Err(Error::Damaged(damage)) => {
                // If segments were swapped, the error may name another segment than the damaged one.
                let is_log = changed.iter().any(|file| file.folder() == Folder::Log);
                assert!(is_log || changed.contains(&damage.file), "{what}: {damage}");
                assert_eq!(victim.rebuild(what, files), Verdict::Refused, "{what}: {damage}");
                verdicts::agrees(what, files, Err(&damage));
                self.refused += 1;
                return;
            }
            Err(error) => panic!("{what}: {error}"),
        };
        assert_eq!(store.recovered().position.lsn, victim.last, "{what}");
        let mut lost = BTreeSet::new();
        for info in &state.pages {
            match store.read_to_vec(info.page) {
                Ok(bytes) => assert!(bytes == state.contents[&info.page], "{what}: page {}", info.page),
                Err(Error::Damaged(damage)) => {
                    assert!(changed.contains(&damage.file), "{what}: page {}: {damage}", info.page);
                    assert_eq!(info.place, Place::Disk, "{what}: {damage}");
                    lost.insert(info.page);
                }
                Err(error) => panic!("{what}: page {}: {error}", info.page),
            }
        }
        let (_, verdict) = verdicts::agrees(what, files, Ok(store.recovered())).unwrap();
        assert_eq!(verdicts::damaged_pages(&verdict), lost, "{what}: the pages that are called damaged");
        if lost.is_empty() {
            assert!(State::of(&store) == *state, "{what}");
            self.whole += 1;
            return;
        }
        assert!(lost.len() <= pages_max && lost.is_subset(&pages_in(victim, &changed)), "{what}: {lost:?}");
        mend(&store, state, &lost, what);
        drop(store);
        let store = open_with(&disk, options()).unwrap_or_else(|error| panic!("{what}: mended: {error}"));
        for (page, bytes) in &state.contents {
            assert!(store.read_to_vec(*page).unwrap() == *bytes, "{what}: page {page}, mended");
        }
        lost.into_iter().for_each(|page| *self.pages.entry(page).or_default() += 1);
    }
}

/// Checks that the store continues to work: a batch rewrites the unreadable pages, and a snapshot is taken.
fn mend(store: &Store, state: &State, lost: &BTreeSet<PageId>, what: &str) {
    let mut batch = store.batch();
    lost.iter().for_each(|page| _ = batch.write(*page, 0, &state.contents[page]));
    store.commit(batch).unwrap_or_else(|error| panic!("{what}: {error}"));
    for page in lost {
        assert!(
            store.read_to_vec(*page).unwrap() == state.contents[page],
            "{what}: page {page}, written anew"
        );
    }
    store.snapshot().unwrap_or_else(|error| panic!("{what}: {error}"));
}

#[test]
fn rebuild_detects_bit_flip_in_disk_pages() {
    let [whole, cut, traceless, refused] = flip_every_byte(&victim());
    assert_eq!((cut, traceless), (0, 0));
    assert!(whole >= at_least(5_000) && refused >= at_least(1000), "{whole} whole, {refused} refused");
}

#[test]
fn bit_flip_on_disk_page_is_detected_and_affects_only_it() {
    let victim = victim();
    let written = |(file, at): &(FileName, usize)| {
        file.folder() == Folder::Pages && !is_in_zeros(&victim.files, (*file, *at))
    };
    let places: Vec<_> = (0..victim.files.bytes_len()).map(|number| place(&victim.files, number)).collect();
    let images: Vec<_> = places.into_iter().filter(written).collect();
    let outcomes = std::sync::Mutex::new(Outcomes::default());
    let step = if is_long() { 1 } else { 13 };
    sweep(&victim.files, images.len() / step, |files, number| {
        let place = images[number * step];
        let bit = mix(number as u64) % 8;
        flip(files, place, bit);
        let mut own = Outcomes::default();
        own.add(&victim, &format!("bit {bit} of {place:?}"), files, 1);
        let mut all = outcomes.lock().unwrap();
        all.whole += own.whole;
        all.refused += own.refused;
        own.pages.into_iter().for_each(|(page, count)| *all.pages.entry(page).or_default() += count);
        drop(all);
        flip(files, place, bit);
    });
    let Outcomes { whole, refused, pages } = outcomes.into_inner().unwrap();
    // Pages with an overlay and pages with plain images could not be read. The open verifies the captured
    // image, because it has not been read back before.
    assert!(pages.len() >= 3 && pages.values().all(|count| *count >= at_least(10)), "{pages:?}");
    assert!(whole >= at_least(10) && refused >= at_least(10), "{whole} whole, {refused} refused");
}

#[test]
fn damaged_files_of_disk_pages_affect_only_their_pages() {
    let victim = victim();
    let outcomes = std::cell::RefCell::new(Outcomes::default());
    damage_files(&victim.files, &Files::default(), |what, files| {
        outcomes.borrow_mut().add(&victim, what, files, usize::MAX);
    });
    let Outcomes { whole, refused, pages } = outcomes.into_inner();
    assert!(
        pages.len() >= 3 && whole >= at_least(100) && refused >= at_least(50),
        "{whole}, {refused}, {pages:?}"
    );
}
