//! Batches that lengthen pages, whatever place the pages are in at that time.

use remanent::options::MemoryOptions;
use remanent::testing::sim_disk::SimDisk;
use remanent::tiers::Tiers;
use remanent::{Ack, Error, PageId, Place};

use super::{DEVICE, LEN, bytes, open, put};
use crate::files::small;

/// Several demoted pages grow in one batch beyond the size of the place that they are in.
#[test]
fn demoted_pages_may_grow_and_be_cloned() {
    let memory = MemoryOptions::new().budget(DEVICE, 16 * LEN).budget(Place::Pinned, 4 * LEN);
    let options = small().ack(Ack::Applied).memory(memory);
    let store = open(&SimDisk::new(), options.tiers(Tiers::new([DEVICE, Place::Pinned, Place::Disk])));
    let pages: Vec<PageId> = (0..3).map(|number| put(&store, number, 0, DEVICE)).collect();
    store.ensure(&pages, Place::Pinned).unwrap();

    let mut batch = store.batch();
    pages.iter().for_each(|page| _ = batch.resize(*page, 2 * LEN));
    batch.clone_page(pages[0]);
    let made = store.commit(batch).unwrap().pages;
    for (page, number) in pages.iter().zip(0..).chain([(&made[0], 0)]) {
        let mut expected = bytes(number, 0);
        expected.resize(2 * LEN as usize, 0);
        assert!(store.read_to_vec(*page).unwrap() == expected, "{page}");
    }

    // If the caller selected a place in which the page can never fit, the batch fails.
    let mut batch = store.batch();
    batch.create(5 * LEN, Place::Pinned);
    let refused = store.commit(batch).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { place: Place::Pinned, .. }), "{refused}");
}
