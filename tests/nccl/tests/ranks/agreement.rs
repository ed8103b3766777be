//! Ranks whose pages are equal agree, and a single flipped bit is found with its page and rank.

use remanent::nccl::{Agreement, Communicator, NcclError};
use remanent::options::MemoryOptions;
use remanent::{Error, Lsn, PageId, Place, Store};

use crate::ground::{Ground, options};

const GPU: Place = Place::Device(0);

/// The lengths and places of the pages: short and long, empty, of several chunks, and in every place.
const PAGES: [(u64, Place); 9] = [
    (10, GPU),
    (0, GPU),
    (200_000, GPU),
    (65_536, GPU),
    (65_537, Place::Pinned),
    (300_000, Place::Host),
    (150_000, Place::Disk),
    (0, Place::Disk),
    (4096, Place::Unified),
];

fn contents(number: usize, len: u64) -> Vec<u8> {
    (0..len).map(|at| (at as usize * (number + 3) + at as usize / 251) as u8).collect()
}

/// Creates the pages. The stores of all ranks get the same ids.
fn fill(store: &Store) -> Vec<PageId> {
    let mut batch = store.batch();
    for (number, (len, place)) in PAGES.into_iter().enumerate() {
        let page = batch.create_from(contents(number, len), place);
        if number == 2 {
            page.key("third");
        }
    }
    store.commit(batch).unwrap().pages.to_vec()
}

fn write(store: &Store, page: PageId, offset: u64, bytes: &[u8]) {
    let mut batch = store.batch();
    batch.write(page, offset, bytes);
    store.commit(batch).unwrap();
}

fn agree(communicator: &Communicator, store: &Store) -> Agreement {
    store.agrees(communicator).unwrap()
}

#[test]
fn equal_replicas_agree() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let found = ground.run(2, |communicator, store| {
        let empty = agree(&communicator, store);
        assert!(empty.is_equal() && (empty.pages, empty.bytes) == (0, 0));
        fill(store);
        // Equal contents by other batches: one rank writes in two steps.
        if communicator.rank() == 1 {
            write(store, PageId(3), 5, &[1, 2]);
            write(store, PageId(3), 5, &contents(2, 7)[5..]);
        }
        agree(&communicator, store)
    });
    assert_eq!(found[0], found[1]);
    let bytes: u64 = PAGES.iter().map(|(len, _)| len).sum();
    assert!(found[0].is_equal());
    assert_eq!((found[0].pages, found[0].bytes), (PAGES.len() as u64, bytes));
    assert_eq!(found[0].lsns, [Lsn(1), Lsn(3)]);
}

#[test]
fn each_diverged_page_is_named_with_its_ranks() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let ranks = if ground.is_simulated() { 3 } else { 2 };
    ground.run(ranks, |communicator, store| {
        let pages = fill(store);
        for (number, (len, _)) in PAGES.into_iter().enumerate().filter(|(_, (len, _))| *len > 0) {
            for at in [0, len / 2, len - 1] {
                let byte = contents(number, len)[at as usize];
                if communicator.rank() == 1 {
                    write(store, pages[number], at, &[byte ^ 16]);
                }
                let found = agree(&communicator, store);
                let named: Vec<_> = found.diverged.iter().map(|of| (of.page, of.groups.clone())).collect();
                let groups = if ranks == 3 { vec![vec![0, 2], vec![1]] } else { vec![vec![0], vec![1]] };
                assert_eq!(named, [(pages[number], groups)], "byte {at} of page {number}");
                write(store, pages[number], at, &[byte]);
                assert!(agree(&communicator, store).is_equal(), "byte {at} of page {number} is restored");
            }
        }
    });
}

#[test]
fn agreement_follows_submitted_batches() {
    let Some((ground, _turn)) = Ground::get() else { return };
    ground.run(2, |communicator, store| {
        let pages = fill(store);
        for round in 0..30_u8 {
            // The batch may still be in flight when the pages are digested.
            let differs = round % 3 == 0;
            let byte = if differs { 100 + communicator.rank() as u8 } else { round };
            write(store, pages[2], u64::from(round), &[byte]);
            let found = agree(&communicator, store);
            assert_eq!(found.diverged.len(), usize::from(differs), "round {round}");
            write(store, pages[2], u64::from(round), &[7]);
        }
    });
}

#[test]
fn different_pages_are_an_error_with_the_rank() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let errors = ground.run(2, |communicator, store| {
        fill(store);
        if communicator.rank() == 1 {
            let mut batch = store.batch();
            batch.create(5, GPU);
            store.commit(batch).unwrap();
        }
        let error = store.agrees(&communicator).unwrap_err();
        communicator.check().unwrap();
        error
    });
    for error in errors {
        let Error::Nccl(error) = error else { panic!("{error}") };
        let text = error.to_string();
        assert!(matches!(*error, NcclError::Unlike { rank: 1, .. }), "{text}");
        let bytes: u64 = PAGES.iter().map(|(len, _)| len).sum();
        let expected = format!("it has 10 pages with {} bytes at batch 2, not 9 pages", bytes + 5);
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn rank_that_fails_ends_the_comparison_of_all() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    let errors = ground.run(2, |communicator, _| {
        // Rank 1 has no memory for the key of digests in one of the places.
        let memory = MemoryOptions::new();
        let memory = if communicator.rank() == 1 { memory.budget(Place::Pinned, 100) } else { memory };
        let options = options().memory(memory).device(remanent::DeviceChoice::Cuda(communicator.gpu()));
        let store = options.open_temporary().unwrap();
        let mut batch = store.batch();
        batch.create(100, Place::Pinned);
        store.commit(batch).unwrap();
        store.agrees(&communicator).unwrap_err()
    });
    assert!(matches!(&errors[0], Error::Nccl(error) if matches!(**error, NcclError::Unlike { rank: 1, .. })));
    assert!(matches!(errors[1], Error::OverBudget { .. }), "{}", errors[1]);
}

#[test]
fn store_on_another_gpu_is_refused() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let communicators = ground.join(2, crate::ground::PATIENCE);
    let store = crate::ground::store(0);
    let error = store.agrees(&communicators[1]).unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && error.to_string().contains("no pages on GPU 1"), "{error}");
}
