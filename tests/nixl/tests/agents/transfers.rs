//! Transfers between two agents of one process, on the simulated library.

use std::fs::File;

use remanent::nixl::{FileRange, HostBuffer, NixlError, RegionKind};
use remanent::{DeviceChoice, Error, Place};

use crate::ground::{Ground, connect, failure, page, pattern, sent, store};

#[test]
fn leased_page_is_written_to_a_peer_with_a_notification() {
    let (ground, _turn) = Ground::get();
    for calls in [0, 3] {
        ground.delay(calls);
        let (owner, reader) = (ground.agent("owner"), ground.agent("reader"));
        let store = store(DeviceChoice::Host);
        let bytes = pattern(8192, 1);
        let source = owner.register(store.lease(page(&store, &bytes, Place::Host)).unwrap()).unwrap();
        let buffer = HostBuffer::new(10_000).unwrap();
        let region = reader.register(buffer.clone()).unwrap();
        let target = sent(&region);
        let (_, to_reader) = connect(&owner, &reader);
        // Swaps two ranges.
        let halves = [
            (source.range(0, 4096).unwrap(), target.range(4100, 4096).unwrap()),
            (source.range(4096, 4096).unwrap(), target.range(4, 4096).unwrap()),
        ];
        let transfer = owner.write(&to_reader, &halves, Some(b"written")).unwrap();
        transfer.wait().unwrap();
        let mut arrived = vec![0; 10_000];
        buffer.read(0, &mut arrived).unwrap();
        assert_eq!((&arrived[4..4100], &arrived[4100..8196]), (&bytes[4096..], &bytes[..4096]));
        assert!(arrived[..4].iter().chain(&arrived[8196..]).all(|byte| *byte == 0));
        let received = reader.notifications().unwrap();
        assert_eq!(received.len(), 1);
        assert_eq!((&*received[0].peer, &*received[0].bytes), (owner.name(), &b"written"[..]));
        assert_eq!(reader.notifications().unwrap(), []);
    }
}

#[test]
fn gpu_pages_are_readable_and_not_writable() {
    let (ground, _turn) = Ground::get();
    let (owner, reader) = (ground.agent("owner"), ground.agent("reader"));
    let store = store(DeviceChoice::Cuda(0));
    let (leased, pinned) = (pattern(4096, 2), pattern(4096, 3));
    let device = owner.register(store.lease(page(&store, &leased, Place::Device(0))).unwrap()).unwrap();
    let host = owner.register(store.pin(page(&store, &pinned, Place::Pinned)).unwrap()).unwrap();
    let (of_device, of_host) = (sent(&device), sent(&host));
    assert_eq!((of_device.kind(), of_host.kind()), (RegionKind::Device, RegionKind::Host));
    let (to_owner, _) = connect(&owner, &reader);

    // Reads into device memory and into a host buffer.
    let memory = store.device_bytes(4096, Place::Device(0)).unwrap();
    let target = reader.register(memory.clone()).unwrap();
    let copy = [(target.range(0, 4096).unwrap(), of_device.range(0, 4096).unwrap())];
    reader.read(&to_owner, &copy, None).unwrap().wait().unwrap();
    let mut arrived = vec![0; 4096];
    memory.read(0, &mut arrived).unwrap();
    assert!(arrived == leased);
    let buffer = HostBuffer::new(4096).unwrap();
    let target = reader.register(buffer.clone()).unwrap();
    let copy = [(target.range(0, 4096).unwrap(), of_host.range(0, 4096).unwrap())];
    reader.read(&to_owner, &copy, None).unwrap().wait().unwrap();
    buffer.read(0, &mut arrived).unwrap();
    assert!(arrived == pinned);

    // A write sends all batches that were submitted before it.
    let to_reader = owner.load_peer(&reader.metadata().unwrap()).unwrap();
    for round in 0..8_u8 {
        let mut batch = store.batch();
        batch.write(host.memory().page(), 0, &[round; 4096]);
        store.commit(batch).unwrap();
        let copy = [(host.range(0, 4096).unwrap(), sent(&target).range(0, 4096).unwrap())];
        owner.write(&to_reader, &copy, None).unwrap().wait().unwrap();
        buffer.read(0, &mut arrived).unwrap();
        assert!(arrived == [round; 4096], "round {round}");
    }

    let read_only = NixlError::InvalidTransfer { reason: "the target is read-only, as pages are" };
    for page in [&of_device, &of_host] {
        let copy = [(target.range(0, 4).unwrap(), page.range(0, 4).unwrap())];
        assert_eq!(failure(reader.write(&to_owner, &copy, None)), read_only);
    }
    let of_target = sent(&target);
    let copy = [(device.range(0, 4).unwrap(), of_target.range(0, 4).unwrap())];
    assert_eq!(failure(owner.read(&to_reader, &copy, None)), read_only);
}

#[test]
fn page_stays_leased_until_region_and_transfers_are_dropped() {
    let (ground, _turn) = Ground::get();
    let (owner, reader) = (ground.agent("owner"), ground.agent("reader"));
    let store = store(DeviceChoice::Host);
    let id = page(&store, &[7; 64], Place::Host);
    let source = owner.register(store.lease(id).unwrap()).unwrap();
    assert_eq!(source.memory().info().page, id);
    let buffer = HostBuffer::new(64).unwrap();
    let target = reader.register(buffer.clone()).unwrap();
    let (_, to_reader) = connect(&owner, &reader);
    let is_leased = || matches!(store.pin(id), Err(Error::Leased { .. }));

    ground.delay(2);
    let copy = [(source.range(0, 64).unwrap(), sent(&target).range(0, 64).unwrap())];
    let mut transfer = owner.write(&to_reader, &copy, None).unwrap();
    drop((source, copy));
    assert!(is_leased() && !transfer.is_complete().unwrap() && is_leased());
    assert!(transfer.is_complete().unwrap() && transfer.is_complete().unwrap());
    drop(transfer);
    assert!(!is_leased());

    // Dropping a transfer waits for it.
    let source = owner.register(store.lease(id).unwrap()).unwrap();
    let copy = [(source.range(0, 64).unwrap(), sent(&target).range(0, 64).unwrap())];
    buffer.write(0, &[0; 64]).unwrap();
    drop(owner.write(&to_reader, &copy, None).unwrap());
    let mut arrived = [0; 64];
    buffer.read(0, &mut arrived).unwrap();
    assert_eq!(arrived, [7; 64]);
}

#[test]
fn file_is_written_and_read() {
    let (ground, _turn) = Ground::get();
    let agent = ground.agent("files");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [0; 8192]).unwrap();
    let both = File::options().read(true).write(true).open(&path).unwrap();
    let file = agent.register(FileRange::writable(both, 8192)).unwrap();
    let buffer = HostBuffer::new(4096).unwrap();
    let memory = agent.register(buffer.clone()).unwrap();
    let bytes = pattern(4096, 4);
    buffer.write(0, &bytes).unwrap();
    let copy = |file: &remanent::nixl::Region<FileRange>| {
        [(memory.range(0, 4096).unwrap(), file.describe().range(4096, 4096).unwrap())]
    };
    agent.write(&agent.itself(), &copy(&file), None).unwrap().wait().unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[4096..], bytes);

    let file = agent.register(FileRange::new(File::open(&path).unwrap(), 8192)).unwrap();
    assert!(!file.describe().is_writable());
    buffer.write(0, &[0; 4096]).unwrap();
    agent.read(&agent.itself(), &copy(&file), None).unwrap().wait().unwrap();
    let mut arrived = vec![0; 4096];
    buffer.read(0, &mut arrived).unwrap();
    assert_eq!(arrived, bytes);
}

#[test]
fn invalid_transfers_are_refused_before_any_copy() {
    let (ground, _turn) = Ground::get();
    let (one, other) = (ground.agent("one"), ground.agent("other"));
    let region = one.register(HostBuffer::new(64).unwrap()).unwrap();
    let target = other.register(HostBuffer::new(64).unwrap()).unwrap();
    let (to_one, to_other) = connect(&one, &other);
    let local = |len| region.range(0, len).unwrap();
    let remote = |len| sent(&target).range(0, len).unwrap();
    let own = other.register(HostBuffer::new(64).unwrap()).unwrap();
    let file = FileRange::writable(tempfile::tempfile().unwrap(), 64);
    let file = one.register(file).unwrap();
    let cases = [
        (vec![], "it has no ranges"),
        (vec![(local(8), remote(9))], "the ranges of a pair have different lengths"),
        (vec![(own.range(0, 8).unwrap(), remote(8))], "a local range belongs to another agent"),
        (vec![(local(8), region.describe().range(0, 8).unwrap())], "a remote range belongs to another peer"),
        (
            vec![(local(8), remote(8)), (file.range(0, 8).unwrap(), remote(8))],
            "the ranges of one side have different kinds of memory",
        ),
    ];
    for (ranges, reason) in cases {
        for result in [one.write(&to_other, &ranges, None), one.read(&to_other, &ranges, None)] {
            assert_eq!(failure(result), NixlError::InvalidTransfer { reason });
        }
    }
    assert!(matches!(failure(region.range(60, 5)), NixlError::OutOfRegion { .. }));
    assert!(matches!(failure(sent(&target).range(0, 0)), NixlError::OutOfRegion { .. }));

    // Memory that was registered after the metadata was loaded can be used after newer metadata is loaded.
    let copy = [(local(8), sent(&own).range(0, 8).unwrap())];
    assert!(matches!(failure(one.write(&to_other, &copy, None)), NixlError::Failed { .. }));
    let to_other = one.load_peer(&other.metadata().unwrap()).unwrap();
    one.write(&to_other, &copy, None).unwrap().wait().unwrap();
    // A peer that was unloaded cannot be used. Its metadata can be loaded again.
    other.forget_peer(&to_one).unwrap();
    assert!(matches!(failure(other.notify(&to_one, b"?")), NixlError::Failed { meaning: "not found", .. }));
    let to_one = other.load_peer(&one.metadata().unwrap()).unwrap();
    other.notify(&to_one, b"").unwrap();
    assert_eq!(one.notifications().unwrap()[0].bytes, b"");
}

#[test]
fn agents_and_metadata_are_checked() {
    let (ground, _turn) = Ground::get();
    let agent = ground.agent("same");
    let second = ground.agent("same");
    assert_ne!(agent.name(), second.name());
    let own = agent.metadata().unwrap();
    let reason = "they are the metadata of this agent";
    assert_eq!(failure(agent.load_peer(&own)), NixlError::InvalidMetadata { reason });
    for len in 0..own.len() {
        assert!(matches!(failure(second.load_peer(&own[..len])), NixlError::InvalidMetadata { .. }));
    }
    for name in ["", "a\0b", &"n".repeat(65)] {
        let options = remanent::nixl::AgentOptions::new(name);
        assert!(matches!(failure(ground.nixl.agent(&options)), NixlError::InvalidName { .. }), "{name:?}");
    }
    // An empty page and a page without an address cannot be registered.
    let store = store(DeviceChoice::Host);
    let empty = page(&store, b"", Place::Host);
    assert!(matches!(failure(agent.register(store.lease(empty).unwrap())), NixlError::OutOfRegion { .. }));
    let id = page(&store, b"pinned", Place::Host);
    assert!(matches!(agent.register(store.pin(id).unwrap()), Err(Error::Unavailable(_))));
    assert!(store.lease(id).is_ok(), "the refused pin has ended");
}
