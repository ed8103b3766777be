//! Pages are demoted and promoted while other threads change them. No place exceeds its budget, no thread
//! waits for space forever, and a crash preserves acknowledged batches, wherever the pages are.

use std::time::Duration;

use remanent::options::MemoryOptions;
use remanent::testing::sync::Mutex;
use remanent::tiers::Tiers;
use remanent::{Ack, Options, PageId, Place};

use crate::ground::{Ground, PAGE_LEN, options};
use crate::runner::{Time, at_once, explore};

/// Number of pages that fit into the first place.
const ROOM: u64 = 3;

fn tiered() -> Options {
    let memory = MemoryOptions::new().budget(Place::Host, ROOM * PAGE_LEN);
    options().ack(Ack::Applied).memory(memory).tiers(Tiers::new([Place::Host, Place::Disk]).lru())
}

/// Returns a store whose writer has two pages in the first place, and which has three more pages of ones on
/// disk.
fn ground(time: Time) -> (Ground, Vec<PageId>) {
    let ground = Ground::new(time, tiered(), 1);
    let mut batch = ground.store.batch();
    for _ in 0..3 {
        batch.create_from([1; PAGE_LEN as usize], Place::Disk);
    }
    let on_disk = ground.store.commit(batch).unwrap().pages;
    (ground, on_disk)
}

/// Checks the bytes of `others` and that the budget of host memory was respected, and closes the store.
fn close(ground: Ground, others: &[PageId]) {
    for page in others {
        assert_eq!(ground.store.read_to_vec(*page).unwrap(), [1; PAGE_LEN as usize]);
    }
    let peak =
        ground.store.stats().places.iter().find(|(place, _)| *place == Place::Host).unwrap().1.peak_bytes;
    assert!(peak <= ROOM * PAGE_LEN, "{peak} bytes at once");
    // A demotion waits for the page's image, and a caller that waits for space checks again at intervals.
    ground.close_moving(Duration::from_secs(3600));
}

#[test]
fn pages_change_during_demotion_and_promotion() {
    explore(|time| {
        let (ground, others) = ground(time);
        let write = || ground.count_to(2, 0, Ack::Durable);
        let climb = || {
            for page in &others {
                ground.store.ensure(&[*page], Place::Host).unwrap();
            }
        };
        let read = || _ = ground.read(0);
        at_once(&[&write, &climb, &read]);
        assert_eq!(ground.read(0), 2);
        close(ground, &others);
    });
}

#[test]
fn two_oversized_callers_both_make_progress() {
    explore(|time| {
        let (ground, others) = ground(time);
        let own = ground.pages(0);
        let [one, other] = [[others[0], others[1]], [own[0], others[2]]];
        at_once(&[&|| _ = ground.store.ensure(&one, Place::Host).unwrap(), &|| {
            _ = ground.store.ensure(&other, Place::Host).unwrap()
        }]);
        close(ground, &others);
    });
}

#[test]
fn snapshot_is_complete_during_moves() {
    explore(|time| {
        let (ground, others) = ground(time);
        let write = || ground.count_to(2, 0, Ack::Logged);
        let snapshot = || _ = ground.store.snapshot().unwrap();
        let climb = || _ = ground.store.ensure(&others[..2], Place::Host).unwrap();
        at_once(&[&write, &snapshot, &climb]);
        ground.check();
        assert_eq!(ground.read(0), 2);
        close(ground, &others);
    });
}

/// One caller uses pages that the store prefetches in order, another drops its read-ahead halfway, and a
/// third changes pages that may be moving.
#[test]
fn prefetched_pages_are_ready_on_time() {
    explore(|time| {
        let (ground, others) = ground(time);
        let came = Mutex::new(Vec::new());
        let go_through = || {
            let mut ahead = ground.store.read_ahead(Place::Host).unwrap();
            for page in &others {
                ahead.push(&[*page]).unwrap();
            }
            while let Some(step) = ahead.next_step().unwrap() {
                came.lock().extend(step);
            }
        };
        let give_up = || {
            let coming = ground.store.prefetch(&ground.pages(0), Place::Host).unwrap();
            coming.cancel().unwrap();
            coming.wait().unwrap();
        };
        let write = || ground.count_to(1, 0, Ack::Applied);
        at_once(&[&go_through, &give_up, &write]);
        assert_eq!(came.into_inner(), others);
        close(ground, &others);
    });
}
