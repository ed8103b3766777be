//! Operations give the bytes that their descriptions state, in the order that the store's guards give them.

use remanent::device::DeviceBytes;
use remanent::error::Refused;
use remanent::nccl::{Communicator, Element, NcclError, Reduction};
use remanent::{Error, Place, Result, Store};

use crate::ground::Ground;

const GPU: Place = Place::Device(0);

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn memory(store: &Store, bytes: &[u8]) -> DeviceBytes {
    let memory = store.device_bytes(bytes.len() as u64, GPU).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

fn bytes_of(memory: &DeviceBytes) -> Vec<u8> {
    let mut bytes = vec![0; memory.byte_len() as usize];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn operations_move_and_reduce_bytes_of_all_ranks() {
    let Some((ground, _turn)) = Ground::get() else { return };
    const COUNT: u32 = 1000;
    let ranks = if ground.is_simulated() { 3 } else { 2 };
    ground.run(ranks, |communicator, store| {
        let rank = communicator.rank();
        let of = |rank: u32| (0..COUNT).map(move |at| 1000 * rank + at);
        let source = memory(store, &words(of(rank)));
        let target = memory(store, &words(of(99)));

        communicator.all_reduce(&source, &target, Element::U32, Reduction::Sum).unwrap().wait().unwrap();
        let sum = |at: u32| (0..ranks).map(|rank| 1000 * rank + at).sum::<u32>();
        assert!(bytes_of(&target) == words((0..COUNT).map(sum)));
        for (reduction, expected) in [(Reduction::Max, ranks - 1), (Reduction::Min, 0)] {
            communicator.all_reduce(&source, &target, Element::U32, reduction).unwrap();
            assert!(bytes_of(&target) == words(of(expected)), "{reduction:?}");
        }
        let own: Vec<u8> = (0..COUNT).flat_map(|_| (rank as f32 + 0.5).to_le_bytes()).collect();
        let floats = memory(store, &own);
        communicator.all_reduce(&floats, &floats, Element::F32, Reduction::Average).unwrap();
        let average = (0..ranks).map(|rank| rank as f32 + 0.5).sum::<f32>() / ranks as f32;
        assert!(bytes_of(&floats).chunks(4).all(|float| float == average.to_le_bytes()));

        communicator.broadcast(1, &source, &target).unwrap();
        assert!(bytes_of(&target) == words(of(1)));
        let all = memory(store, &vec![9; 4 * (COUNT * ranks) as usize]);
        communicator.all_gather(&source, &all).unwrap();
        assert!(bytes_of(&all) == words((0..ranks).flat_map(of)));
        communicator.reduce_scatter(&all, &target, Element::U32, Reduction::Sum).unwrap();
        assert!(bytes_of(&target) == words(of(rank).map(|word| ranks * word)));
        let own_part = all.part(u64::from(4 * COUNT * rank)..u64::from(4 * COUNT * (rank + 1))).unwrap();
        own_part.write(0, &words(of(rank + 50))).unwrap();
        communicator.all_gather(&own_part, &all).unwrap().wait().unwrap();
        assert!(bytes_of(&all) == words((0..ranks).flat_map(|rank| of(rank + 50))), "in place");
    });
}

#[test]
fn page_is_reduced_between_its_batches() {
    let Some((ground, _turn)) = Ground::get() else { return };
    const COUNT: u32 = 5000;
    ground.run(2, |communicator, store| {
        let mut batch = store.batch();
        let page = batch.create(4 * u64::from(COUNT), GPU).page();
        batch.write(page, 0, &words((0..COUNT).map(|at| at + communicator.rank())));
        let page = store.commit(batch).unwrap().pages[0];
        let mut expected: Vec<[u32; 2]> = (0..COUNT).map(|at| [at, at + 1]).collect();
        for round in 0..20_u32 {
            // Nothing here waits for the GPU: the guards order each step after the one before it.
            let target = store.device_bytes(4 * u64::from(COUNT), GPU).unwrap();
            let lease = store.lease(page).unwrap();
            communicator.all_reduce(&lease, &target, Element::U32, Reduction::Sum).unwrap();
            drop(lease);
            let mut batch = store.batch();
            batch.write_device(page, 0, &target);
            batch.write(page, 4 * u64::from(round), &words([7 + communicator.rank()]));
            store.commit(batch).unwrap();
            for both in &mut expected {
                *both = [both[0].wrapping_add(both[1]); 2];
            }
            expected[round as usize] = [7, 8];
            if round % 7 == 6 {
                let own = expected.iter().map(|both| both[communicator.rank() as usize]);
                assert!(store.read_to_vec(page).unwrap() == words(own), "round {round}");
            }
        }
    });
}

#[test]
fn operations_run_on_a_callers_stream() {
    let Some((ground, _turn)) = Ground::simulated() else { return };
    ground.run(2, |communicator, store| {
        let stream = ground.stream(communicator.gpu());
        let communicator = communicator.on(stream);
        assert_eq!(communicator.stream(), stream);
        let source = memory(store, &words([communicator.rank() + 1]));
        let target = memory(store, &words([0]));
        for _ in 0..20 {
            communicator.all_reduce(&source, &target, Element::U32, Reduction::Sum).unwrap();
            communicator.all_reduce(&target, &source, Element::U32, Reduction::Max).unwrap();
        }
        drop(source);
        let product = bytes_of(&target);
        // Rank 0 starts with 1 and rank 1 with 2: the first sum is 3, and each further one doubles it.
        assert_eq!(product, words([3 << 19]), "{product:?}");
    });
}

fn is_refused(result: Result<impl Sized>, words: &str) {
    match result {
        Err(Error::Refused(refused)) => assert!(refused.to_string().contains(words), "{refused}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused: {words}"),
    }
}

#[test]
fn unsuitable_memory_is_refused() {
    let Some((ground, _turn)) = Ground::get() else { return };
    let refused_before_others_are_needed = |communicator: &Communicator, store: &Store, other: &Store| {
        let [short, long, foreign] = [(store, 100), (store, 200), (other, 100)]
            .map(|(store, len)| store.device_bytes(len, GPU).unwrap());
        let reduce = |source: &DeviceBytes, target: &DeviceBytes, element| {
            communicator.all_reduce(source, target, element, Reduction::Sum)
        };
        is_refused(reduce(&short, &long, Element::U8), "writes 200 bytes elsewhere");
        is_refused(communicator.all_gather(&short, &short), "writes 100 bytes elsewhere");
        is_refused(communicator.all_gather(&short, &store.device_bytes(300, GPU).unwrap()), "writes 300");
        is_refused(reduce(&short, &short, Element::U64), "no multiple of 8 bytes");
        is_refused(
            reduce(&long.part(0..100).unwrap(), &long.part(50..150).unwrap(), Element::U8),
            "a part of it",
        );
        is_refused(communicator.all_gather(&long.part(0..100).unwrap(), &long), "a part of it");
        is_refused(reduce(&foreign, &foreign, Element::U8), "");
        let pinned = store.device_bytes(100, Place::Pinned).unwrap();
        is_refused(reduce(&pinned, &pinned, Element::U8), "not memory of GPU");
        let mut batch = store.batch();
        batch.create_in(&short);
        store.commit(batch).unwrap();
        let target = reduce(&long.part(0..100).unwrap(), &short, Element::U8);
        assert!(matches!(target, Err(Error::Refused(Refused::MemoryInUse { .. }))), "{target:?}");
        let root = communicator.broadcast(2, &long, &long);
        assert!(
            matches!(root, Err(Error::Nccl(error)) if *error == NcclError::NoSuchRank { rank: 2, ranks: 2 })
        );
        let nothing = store.device_bytes(0, GPU).unwrap();
        reduce(&nothing, &nothing, Element::U8).unwrap().wait().unwrap();
    };
    let mut communicators = ground.join(2, crate::ground::PATIENCE);
    let (store, other) = (crate::ground::store(1), crate::ground::store(0));
    // The communicator continues after each refusal: nothing was queued.
    refused_before_others_are_needed(&communicators[1], &store, &other);
    communicators[1].check().unwrap();
    // Neither rank calls the other one, so each can be dropped alone.
    communicators.clear();
}
