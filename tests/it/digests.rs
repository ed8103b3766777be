//! Working copies that are compared by digests. Whole chunks are captured, each change is captured once, and
//! unchanged chunks need no memory.

use std::sync::{Arc, Mutex};

use remanent::batch::{InitialCopy, Shadow, Width, WorkingCopy};
use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, DIGEST_CHUNK_LEN, DIGEST_KEY_LEN, Device, Lane, Pending, Span};
use remanent::options::{Compression, ImageOptions, LogOptions, MemoryOptions};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Store};

use crate::device_ops::{PLACE, content, open, page};
use crate::kill::workload::Random;

const CHUNK: u64 = DIGEST_CHUNK_LEN;

fn host() -> Store {
    open(&SimDisk::new(), Arc::new(HostDevice::new()))
}

fn capture(store: &Store, copy: &WorkingCopy) -> remanent::Result<u64> {
    let before = store.stats().log.bytes;
    let mut batch = store.batch();
    batch.capture(copy);
    store.commit(batch)?;
    Ok(store.stats().log.bytes - before)
}

/// Returns the number of chunks that a capture logged.
fn chunks_captured(store: &Store, copy: &WorkingCopy) -> u64 {
    let logged = capture(store, copy).unwrap();
    let chunks = logged / CHUNK;
    assert!(logged - chunks * CHUNK < 8192, "{logged} bytes logged, beside whole chunks");
    chunks
}

#[test]
fn digest_capture_logs_changed_chunks() {
    let store = host();
    let mut plain = Random(1).bytes(40 * CHUNK);
    let page = page(&store, &plain);
    let copy = store.working_copy(page, Width::W2, Shadow::Digest).unwrap();
    assert_eq!(chunks_captured(&store, &copy), 0, "nothing changed since it was loaded");
    let epoch = copy.epoch();
    let changes: [&[u64]; 4] = [&[0], &[CHUNK - 1, CHUNK], &[7 * CHUNK, 8 * CHUNK, 39 * CHUNK + 5], &[]];
    for (round, changes) in changes.into_iter().enumerate() {
        for at in changes {
            plain[*at as usize] ^= 1;
            copy.bytes().write(*at, &plain[*at as usize..][..1]).unwrap();
        }
        let logged = chunks_captured(&store, &copy);
        assert_eq!(logged, changes.len() as u64, "round {round}");
        assert!(content(&store, page) == plain, "round {round}");
    }
    assert!(copy.epoch() > epoch);
    // Write bytes that are equal to the current bytes.
    copy.bytes().write(100, &plain[100..5000]).unwrap();
    assert_eq!(chunks_captured(&store, &copy), 0);
    // Change a byte, then revert the change. Both captures log the chunk.
    for byte in [9, plain[3]] {
        copy.bytes().write(3, &[byte]).unwrap();
        assert_eq!(chunks_captured(&store, &copy), 1);
        assert_eq!(content(&store, page)[3], byte);
    }
}

#[test]
fn ranges_are_widened_to_chunks() {
    let store = host();
    let len = 5 * CHUNK + 1000;
    let page = page(&store, &vec![0; len as usize]);
    let copy = store.working_copy(page, Width::W1, Shadow::Digest).unwrap();
    copy.bytes().write(0, &vec![1; len as usize]).unwrap();
    let mut expected = vec![0; len as usize];
    let mut batch = store.batch();
    batch.capture_ranges(&copy, &[CHUNK + 5..CHUNK + 6, len - 1..len, 3 * CHUNK..3 * CHUNK]);
    store.commit(batch).unwrap();
    expected[CHUNK as usize..2 * CHUNK as usize].fill(1);
    expected[5 * CHUNK as usize..].fill(1);
    assert!(content(&store, page) == expected);
    // Changes outside of the captured ranges are still uncaptured. Changes inside are not captured again.
    assert_eq!(chunks_captured(&store, &copy), 4);
    assert!(content(&store, page).iter().all(|byte| *byte == 1));
}

/// Memory that was stored as a page becomes the page's working copy. There are no digests yet, so the first
/// capture logs all of it.
#[test]
fn first_capture_of_stored_memory_logs_all_of_it() {
    let store = host();
    let page = page(&store, &vec![7; 3 * CHUNK as usize]);
    let tensor = store.device_bytes(3 * CHUNK, PLACE).unwrap();
    tensor.write(0, &vec![7; 3 * CHUNK as usize]).unwrap();
    let copy = store.working_copy_in(page, &tensor, Width::W1, Shadow::Digest, InitialCopy::Store).unwrap();
    // Capture a part first. The digests of the rest are still unknown.
    let mut batch = store.batch();
    batch.capture_ranges(&copy, &[0..1, 5..6]);
    store.commit(batch).unwrap();
    assert_eq!(chunks_captured(&store, &copy), 2);
    assert_eq!(chunks_captured(&store, &copy), 0);
    store.reload(&copy).unwrap();
    assert_eq!(chunks_captured(&store, &copy), 0, "what is loaded is known");
}

#[test]
fn changes_found_by_refused_batch_are_found_again() {
    let store = host();
    let page = page(&store, &vec![0; 2 * CHUNK as usize]);
    let copy = store.working_copy(page, Width::W1, Shadow::Digest).unwrap();
    copy.bytes().write(CHUNK, &[1]).unwrap();
    let mut batch = store.batch();
    batch.capture(&copy).expect_epoch(page, remanent::Epoch(99));
    assert!(matches!(store.commit(batch), Err(Error::Conflict { .. })));
    assert_eq!(chunks_captured(&store, &copy), 1);
    assert_eq!(content(&store, page)[CHUNK as usize], 1);
}

/// The time at which a caller's kernel writes to a working copy that is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// After the copy was compared.
    Looked,
    /// After the changes were gathered, before their digests are computed.
    Gathered,
}

/// A host device that simulates a kernel that writes during a capture.
struct Meddling {
    inner: HostDevice,
    /// The time of the write, or `None` after the write.
    at: Mutex<Option<Moment>>,
}

impl Meddling {
    /// Writes to two of three chunks: one that the comparison found to be changed, and one that it did not.
    fn meddle(&self, lane: Lane, copy: Span) {
        let fill = |chunk: u64| Command::Fill {
            target: Span { offset: chunk * CHUNK, len: 8, ..copy },
            pattern: [5; 16],
            width: Width::W1,
        };
        let list = CommandList { commands: vec![fill(0), fill(1)], staging: Vec::new() };
        self.inner.submit(lane, list).unwrap().finish(&self.inner).unwrap();
    }
}

impl Device for Meddling {
    forward!(inner: label allocate release staging reached wait after places_and_abilities);

    fn submit(&self, lane: Lane, mut list: CommandList) -> remanent::Result<Pending> {
        let mut at = self.at.lock().unwrap();
        let digests = list.commands.iter().any(|command| matches!(command, Command::Digest { .. }));
        let (moment, copy) = match list.commands.first() {
            Some(Command::Digest { sources, .. }) => (Moment::Looked, sources[0]),
            Some(Command::Gather { sources, .. }) if digests => (Moment::Gathered, sources[0].0),
            Some(Command::Copy { source, .. }) if digests => (Moment::Gathered, *source),
            _ => return self.inner.submit(lane, list),
        };
        if *at != Some(moment) {
            return self.inner.submit(lane, list);
        }
        *at = None;
        if moment == Moment::Gathered {
            let gather = CommandList { commands: vec![list.commands.remove(0)], staging: Vec::new() };
            self.inner.submit(lane, gather)?.finish(&self.inner)?;
            self.meddle(lane, copy);
            return self.inner.submit(lane, list);
        }
        let pending = self.inner.submit(lane, list)?;
        self.inner.wait(pending.fence())?;
        self.meddle(lane, copy);
        Ok(pending)
    }
}

/// The kept digests are those of the captured bytes. If they were computed from the compared bytes, or from
/// the later content of the copy, a concurrent change would never be captured.
#[test]
fn a_change_in_the_middle_of_a_capture_is_not_lost() {
    for (place, moment) in [PLACE, Place::Disk]
        .into_iter()
        .flat_map(|place| [(place, Moment::Looked), (place, Moment::Gathered)])
    {
        let device = Arc::new(Meddling { inner: HostDevice::new(), at: Mutex::new(None) });
        let options = Options::new()
            .images(ImageOptions::new().compression(Compression::Off))
            .log(LogOptions::new().segment_len(64 << 10));
        let store = Store::open_on(Arc::new(SimDisk::new()), device.clone(), options).unwrap();
        let mut batch = store.batch();
        batch.create_from(vec![0; 3 * CHUNK as usize], place);
        let page = store.commit(batch).unwrap().pages[0];
        let tensor = store.device_bytes(3 * CHUNK, PLACE).unwrap();
        let copy =
            store.working_copy_in(page, &tensor, Width::W1, Shadow::Digest, InitialCopy::Load).unwrap();
        // A third of a page on disk changes. The capture writes an image of the whole page.
        copy.bytes().write(100, &[1]).unwrap();
        *device.at.lock().unwrap() = Some(moment);
        capture(&store, &copy).unwrap();
        assert_eq!(*device.at.lock().unwrap(), None, "a kernel wrote");
        capture(&store, &copy).unwrap();
        let mut expected = vec![0; 3 * CHUNK as usize];
        expected[100] = 1;
        expected[..8].fill(5);
        expected[CHUNK as usize..][..8].fill(5);
        let found = store.read_to_vec(page).unwrap();
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "{place:?}, {moment:?}");
    }
}

/// The state exists in the caller's memory and on disk, without another copy. In addition to the tensor, a
/// capture needs one piece of 32 MiB and the key of the digests.
#[test]
fn capture_needs_memory_for_one_piece() {
    const WAVE: u64 = 32 << 20;
    const LEN: u64 = 2 * WAVE + 5 * CHUNK + 77;
    let budget =
        MemoryOptions::new().budget(PLACE, LEN + WAVE + DIGEST_KEY_LEN + 4096).budget(Place::Disk, 64 << 20);
    let budget =
        [Place::Host, Place::Pinned].into_iter().fold(budget, |budget, place| budget.budget(place, 0));
    let options = || {
        Options::new()
            .images(ImageOptions::new().compression(Compression::Off))
            .log(LogOptions::new().segment_len(1 << 20))
            .memory(budget.clone())
    };
    let disk = SimDisk::new();
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options()).unwrap();
    let mut batch = store.batch();
    batch.create(LEN, Place::Disk);
    let page: PageId = store.commit(batch).unwrap().pages[0];
    let tensor = store.device_bytes(LEN, PLACE).unwrap();
    let copy = store.working_copy_in(page, &tensor, Width::W1, Shadow::Digest, InitialCopy::Load).unwrap();
    let mut plain = vec![0_u8; LEN as usize];
    // A few chunks are logged, half of the page is written as an image, and more than one piece is logged.
    let rounds = [(5, LEN / CHUNK / 3), (5, 2), (9, 1), (11, 5)];
    for (salt, every) in rounds {
        for chunk in (0..LEN / CHUNK + 1).step_by(every as usize) {
            let at = chunk * CHUNK + 70;
            plain[at as usize] = plain[at as usize].wrapping_add(salt);
            copy.bytes().write(at, &plain[at as usize..][..1]).unwrap();
        }
        let logged = capture(&store, &copy).unwrap();
        assert_eq!(logged > CHUNK, every > 4, "every {every}: {logged} bytes in the log");
        assert!(store.read_to_vec(page).unwrap() == plain, "every {every}");
        assert!(capture(&store, &copy).unwrap() < 4096, "every {every}: nothing is left to capture");
    }
    drop((copy, tensor, store));
    let store = Store::open_on(Arc::new(disk), Arc::new(HostDevice::new()), options()).unwrap();
    assert!(store.read_to_vec(page).unwrap() == plain);
}
