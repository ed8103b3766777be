//! Every call that fails, and every rank that is missing, gives a typed error and leaves nothing behind.

use std::time::Instant;

use remanent::error::Remedy;
use remanent::nccl::{Communicator, Element, NcclError, Rank, Reduction};
use remanent::{Error, Place, Result, Store};

use crate::ground::{Ground, PATIENCE, SHORT, store};

const GPU: Place = Place::Device(0);

fn nccl_error(result: Result<impl Sized>) -> NcclError {
    match result {
        Err(Error::Nccl(error)) => *error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("no error"),
    }
}

/// Commits to the store: a failed communicator does not affect it.
fn assert_usable(store: &Store) {
    let mut batch = store.batch();
    batch.create(10, GPU);
    store.commit(batch).unwrap();
}

fn reduce(communicator: &Communicator, store: &Store) -> Result<()> {
    let memory = store.device_bytes(64, GPU)?;
    communicator.all_reduce(&memory, &memory, Element::U8, Reduction::Max)?.wait()
}

/// Runs every operation once.
fn operate(communicator: &Communicator, store: &Store) -> Result<()> {
    let (one, two) = (store.device_bytes(64, GPU)?, store.device_bytes(128, GPU)?);
    communicator.all_reduce(&one, &one, Element::U8, Reduction::Max)?.wait()?;
    communicator.all_gather(&one, &two)?.wait()?;
    communicator.broadcast(0, &one, &one)?.wait()?;
    communicator.reduce_scatter(&two, &one, Element::U8, Reduction::Sum)?.wait()
}

#[test]
fn every_failing_call_is_a_typed_error() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    let calls = [
        "ncclCommInitRankConfig",
        "ncclCommGetAsyncError",
        "ncclAllReduce",
        "ncclAllGather",
        "ncclBroadcast",
        "ncclReduceScatter",
    ];
    let before = ground.alive();
    for (name, code) in calls.into_iter().flat_map(|name| [1, 2, 3, 6, 99].map(|code| (name, code))) {
        let id = ground.nccl.unique_id().unwrap();
        ground.arm(name, code);
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                let id = id.clone();
                scope.spawn(move || {
                    let store = store(rank);
                    let joined = ground.nccl.join(&id, Rank::new(rank, 2).gpu(rank).timeout(SHORT));
                    let result = joined.and_then(|communicator| {
                        let result = operate(&communicator, &store);
                        // A communicator that failed stays so.
                        if result.is_err() {
                            nccl_error(communicator.check());
                        }
                        result
                    });
                    assert_usable(&store);
                    result
                })
            });
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(ground.disarm(), "{name} was not called");
        let errors: Vec<NcclError> = results.into_iter().map(nccl_error).collect();
        let struck = errors.iter().find(|error| {
            matches!(error, NcclError::Failed { call, code: found, reason, .. }
                if *call == name && *found == code && reason == "a text of the fake library")
        });
        let struck = struck.unwrap_or_else(|| panic!("{name} fails with {code}: {errors:?}"));
        let error = Error::from(struck.clone());
        assert!(error.to_string().contains(name), "{error}");
        assert_eq!(error.remedy(), Remedy::Retry);
        assert!(
            errors
                .iter()
                .any(|error| matches!(error, NcclError::TimedOut { .. } | NcclError::JoinTimedOut { .. })),
            "the other rank waits in vain: {errors:?}"
        );
        assert_eq!(ground.alive(), before, "{name} fails with {code}: a communicator is left");
    }
}

#[test]
fn failing_end_of_communicator_leaves_store_usable() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    for (name, left) in [("ncclCommFinalize", 0), ("ncclCommDestroy", 1), ("ncclCommAbort", 1)] {
        let before = ground.alive();
        let communicators = ground.join(2, SHORT);
        let store = store(0);
        ground.arm(name, 3);
        if name == "ncclCommAbort" {
            communicators[0].abort();
        }
        drop(communicators);
        assert!(ground.disarm(), "{name} was not called");
        assert_usable(&store);
        // A communicator that the library does not free stays allocated; the other one is freed.
        assert_eq!(ground.alive() - before, left, "{name}");
    }
    ground.arm("ncclGetUniqueId", 2);
    assert!(matches!(nccl_error(ground.nccl.unique_id()), NcclError::Failed { code: 2, .. }));
}

#[test]
fn missing_rank_is_named_after_the_time_limit() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let id = ground.nccl.unique_id().unwrap();
    let started = Instant::now();
    let error = nccl_error(ground.nccl.join(&id, Rank::new(0, 2).timeout(SHORT)));
    assert_eq!(error, NcclError::JoinTimedOut { rank: 0, ranks: 2, waited: SHORT, absent: vec![1] });
    assert!(started.elapsed() >= SHORT);
    let text = error.to_string();
    assert!(
        text.ends_with("waited 0.4 s for other ranks to join; no process on this host joined as rank 1"),
        "{text}"
    );

    for (rank, ranks) in [(2, 2), (0, 0), (u32::MAX, u32::MAX), (0, u32::MAX)] {
        let error = nccl_error(ground.nccl.join(&id, Rank::new(rank, ranks).timeout(SHORT)));
        assert_eq!(error, NcclError::NoSuchRank { rank, ranks });
    }
    let unknown = ground.nccl.join(&id, Rank::new(0, 2).gpu(1 << 20).timeout(SHORT));
    assert!(matches!(unknown, Err(Error::Unavailable(_))), "{unknown:?}");
}

#[test]
fn second_process_of_a_rank_is_refused() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let id = ground.nccl.unique_id().unwrap();
    let ranks = [0, 0].map(|rank| Rank::new(rank, 2).gpu(0).timeout(SHORT));
    assert_eq!(nccl_error(ground.nccl.join_all(&id, ranks)), NcclError::RankTaken { rank: 0 });
}

#[test]
fn rank_that_ends_is_named() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let mut communicators = ground.join(2, SHORT);
    let last = communicators.pop().unwrap();
    last.abort();
    drop(last);
    let store = store(0);
    let error = nccl_error(reduce(&communicators[0], &store));
    let call = "ncclAllReduce";
    assert_eq!(error, NcclError::TimedOut { rank: 0, ranks: 2, call, waited: SHORT, ended: vec![1] });
    assert!(error.to_string().ends_with("not complete after 0.4 s; ended: rank 1"), "{error}");
    assert_eq!(nccl_error(reduce(&communicators[0], &store)), NcclError::Aborted { rank: 0, ranks: 2 });
    assert_usable(&store);
}

#[test]
fn missing_call_of_a_rank_times_out() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let communicators = ground.join(2, SHORT);
    let store = store(0);
    let error = nccl_error(reduce(&communicators[0], &store));
    // The rank exists, so it is not named as ended.
    assert!(matches!(error, NcclError::TimedOut { ref ended, .. } if ended.is_empty()), "{error:?}");
    assert_usable(&store);
}

#[test]
fn asynchronous_error_is_reported() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    let communicators = ground.join(2, PATIENCE);
    let store = store(0);
    let memory = store.device_bytes(64, GPU).unwrap();
    let queued = communicators[0].all_gather(&memory.part(0..32).unwrap(), &memory);
    assert!(matches!(queued, Err(Error::Refused(_))) || queued.is_ok());
    let target = store.device_bytes(128, GPU).unwrap();
    let queued = communicators[0].all_gather(&memory, &target).unwrap();
    ground.set_error(0, 6);
    let error = nccl_error(queued.wait());
    ground.set_error(0, 0);
    assert!(
        matches!(error, NcclError::Failed { rank: 0, call: "ncclCommGetAsyncError", code: 6, .. }),
        "{error:?}"
    );
    assert_eq!(nccl_error(communicators[0].check()), NcclError::Aborted { rank: 0, ranks: 2 });
    assert_usable(&store);
}

#[test]
fn stalled_library_times_out() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    let before = ground.alive();
    let communicators = ground.join(2, SHORT);
    let store = store(0);
    ground.stall(0);
    let error = nccl_error(reduce(&communicators[0], &store));
    assert!(matches!(error, NcclError::TimedOut { call: "ncclAllReduce", .. }), "{error:?}");
    let id = ground.nccl.unique_id().unwrap();
    let joined = ground.nccl.join(&id, Rank::new(0, 1).timeout(SHORT));
    assert!(matches!(nccl_error(joined), NcclError::JoinTimedOut { ref absent, .. } if absent.is_empty()));
    drop(communicators);
    ground.stall(u32::MAX);
    assert_eq!(ground.alive(), before);
    assert_usable(&store);
}

/// The first operation waits for the other rank in the call that queues it, because it makes the connections. Later
/// operations wait in the stream.
#[test]
#[expect(clippy::disallowed_methods, reason = "no signal tells that the other thread waits in the library")]
fn abort_ends_a_wait_in_another_thread() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let stores = [0, 1].map(store);
    for is_connected in [false, true] {
        let communicators = ground.join(2, PATIENCE);
        if is_connected {
            std::thread::scope(|scope| {
                for (communicator, store) in communicators.iter().zip(&stores) {
                    scope.spawn(move || reduce(communicator, store).unwrap());
                }
            });
        }
        let started = Instant::now();
        let error = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| nccl_error(reduce(&communicators[0], &stores[0])));
            std::thread::sleep(SHORT);
            communicators[0].abort();
            waiting.join().unwrap()
        });
        assert_eq!(error, NcclError::Aborted { rank: 0, ranks: 2 }, "connected: {is_connected}");
        assert!(started.elapsed() < PATIENCE / 2, "connected: {is_connected}");
        drop(communicators);
        assert_usable(&stores[0]);
    }
}

#[test]
fn dropped_operations_end_before_their_memory_is_freed() {
    let Some((ground, _turn)) = Ground::get() else { return };
    for round in 0..10 {
        let before = if ground.is_simulated() { ground.alive() } else { 0 };
        let results = ground.run(2, |communicator, store| {
            let mut batch = store.batch();
            batch.create_from(vec![communicator.rank() as u8 + 1; 100_000], GPU);
            let page = store.commit(batch).unwrap().pages[0];
            let target = store.device_bytes(200_000, GPU).unwrap();
            let lease = store.lease(page).unwrap();
            let queued = communicator.all_gather(&lease, &target).unwrap();
            // Dropped before the operation is complete, in any order.
            match round % 3 {
                0 => drop((communicator, lease, queued)),
                1 => drop((queued, lease, communicator)),
                _ => drop((lease, communicator, queued)),
            }
            let mut bytes = vec![0; 200_000];
            target.read(0, &mut bytes).unwrap();
            bytes
        });
        let expected: Vec<u8> = [1, 2].into_iter().flat_map(|byte| [byte; 100_000]).collect();
        assert!(results.iter().all(|bytes| *bytes == expected), "round {round}");
        if ground.is_simulated() {
            assert_eq!(ground.alive(), before);
        }
    }
}
