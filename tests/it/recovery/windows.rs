//! Replay in windows that several threads read, compared with replay by one thread and with `rebuild`. The
//! windows are so short that frames cross the ends of windows and of the chunks in them, and some frames are
//! longer than a window.
//!
//! Whatever is damaged, all of them must return the same state, the same cut or the same error, to the byte.
//! A thread that finishes early must not change the result (I4).

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::error::{Damage, FileName, TornTail};
use remanent::testing::sim_disk::{Moment, SimDisk};
use remanent::{Error, Lsn, PageId, Place, Store};
use remanent_format::frame::FrameKind;
use remanent_format::log::frames_of_segment;
use remanent_format::state::rebuild::rebuild;
use remanent_format::state::survey::Survey;

use crate::files::{Files, State, open_with, small};
use crate::gpu;
use crate::kill::workload::Random;
use crate::with_options::With;

/// Lengths of windows in bytes. 0 selects one thread. Chunks are blocks of 4096 bytes.
const WINDOWS: [u64; 4] = [0, 4 << 10, 12 << 10, 40 << 10];

/// The result of an open.
#[derive(Debug, PartialEq)]
enum Opened {
    Whole { state: State, last: Lsn, torn: Option<TornTail>, copied: u64 },
    Refused(Damage),
}

/// Opens a copy of the files with windows of this length. Several threads apply deltas, however few deltas
/// there are.
fn open_by(files: &Files, window_len: u64) -> Opened {
    let device = Arc::new(HostDevice::new().parallel_from(if window_len == 0 { u64::MAX } else { 1 }));
    let options = small().with(|options| options.log.replay_window_len = Some(window_len));
    match Store::open_on(Arc::new(files.disk()), device, options) {
        Ok(store) => {
            let recovered = store.recovered();
            Opened::Whole {
                state: State::of(&store),
                last: recovered.position.lsn,
                torn: recovered.torn.clone(),
                copied: recovered.copied_batches,
            }
        }
        Err(Error::Damaged(damage)) => Opened::Refused(damage.damage.clone()),
        Err(error) => panic!("{error}"),
    }
}

/// Opens the files in all ways and asserts that the results are equal. Returns the result.
fn agreed(what: &str, files: &Files) -> Opened {
    let [alone, windows @ ..] = WINDOWS.map(|len| open_by(files, len));
    for (opened, len) in windows.iter().zip(&WINDOWS[1..]) {
        assert!(*opened == alone, "{what}: by windows of {len}: {opened:?}, alone: {alone:?}");
    }
    match (&alone, rebuild(files, &Default::default())) {
        (Opened::Whole { state, .. }, Ok(rebuilt)) => {
            assert!(State::rebuilt(&rebuilt) == *state, "{what}: rebuilt otherwise");
        }
        (Opened::Refused(damage), Err(rebuilt)) => assert_eq!(*damage, rebuilt, "{what}"),
        (opened, rebuilt) => panic!("{what}: opened {opened:?}, rebuilt {rebuilt:?}"),
    }
    alone
}

/// Returns a store without a snapshot that was killed or closed. Its batches repeatedly change the same few
/// bytes with every kind of operation, and resize a page. Some frames are short, cross chunks, or are longer
/// than windows, and some start a group.
fn victim(is_killed: bool) -> Files {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 128 << 10)).unwrap();
    let mut batch = store.batch();
    for len in [40_000, 3000, 900] {
        batch.create(len, Place::Host);
    }
    let pages = store.commit(batch).unwrap().pages;
    for number in 1..=24_u64 {
        commit(&store, &pages, number);
        if number % 6 == 0 && (!is_killed || number < 20) {
            store.wait_durable(store.lsn()).unwrap();
        }
    }
    if is_killed {
        let dead = disk.after_kill(Moment { event: disk.events(), tear: None });
        return Files::of(&dead);
    }
    store.close().unwrap();
    Files::of(&disk)
}

fn commit(store: &Store, pages: &[PageId], number: u64) {
    let byte = number as u8;
    let mut batch = store.batch();
    let len = [40, 300, 5000, 17_000, 36_000][(number % 5) as usize];
    batch.write(pages[0], number * 3, &vec![byte; len]);
    batch.write(pages[0], 0, &[!byte; 70]).set_root("step", number);
    let indices: Vec<u32> = (0..20).map(|index| index * 3 + number as u32 % 3).collect();
    batch.scatter(pages[1], Width::W4, &indices, &[byte; 80]);
    batch.fill(pages[1], 16, 200, &[byte, 1]).write_masked(
        pages[1],
        8,
        Width::W1,
        &[0x55, 0xaa],
        &[byte; 16],
    );
    if number.is_multiple_of(8) {
        batch.resize(pages[2], 800 + number);
    }
    batch.write(pages[2], number, &[byte; 500]);
    store.commit(batch).unwrap();
}

/// Returns the segment, offset and payload length of each batch's frame.
fn frames(files: &Files) -> Vec<(FileName, u64, u64)> {
    let store = Survey::read(files).unwrap().store.store;
    let of_segment = |file: FileName| {
        let FileName::Segment(number) = file else { panic!("{file} is no segment") };
        frames_of_segment(files, store, number).into_iter().filter_map(move |frame| {
            let header = *frame.unproven();
            let place = (file, header.offset, u64::from(header.payload_len));
            (header.kind == FrameKind::Batch).then_some(place)
        })
    };
    files.segments().into_iter().flat_map(of_segment).collect()
}

fn flip(files: &mut Files, (file, offset): (FileName, u64)) {
    files.0.get_mut(&file).unwrap()[offset as usize] ^= 1;
}

#[test]
fn windowed_walk_matches_single_thread_on_damaged_frames() {
    for is_killed in [false, true] {
        let mut files = victim(is_killed);
        let whole = agreed("whole", &files);
        assert!(matches!(&whole, Opened::Whole { last: Lsn(25), torn: None, .. }), "{whole:?}");
        let frames = frames(&files);
        assert_eq!(frames.len(), 25);
        let (mut refused, mut cut) = (0, 0);
        let mut count = |opened| match opened {
            Opened::Refused(_) => refused += 1,
            Opened::Whole { torn: Some(_), .. } => cut += 1,
            Opened::Whole { .. } => panic!("the damage was not seen"),
        };
        for (index, &(file, offset, len)) in frames.iter().enumerate() {
            // Damage the header's Lsn, and the first, the middle and the last byte of the payload.
            for at in [offset + 48, offset + 80, offset + 80 + len / 2, offset + 80 + len - 1] {
                flip(&mut files, (file, at));
                count(agreed(&format!("frame {index}, byte {}", at - offset), &files));
                flip(&mut files, (file, at));
            }
            for (other, &(other_file, other_offset, other_len)) in frames.iter().enumerate().skip(index + 1) {
                let places = [(file, offset + 80 + len / 3), (other_file, other_offset + 79 + other_len)];
                places.iter().for_each(|place| flip(&mut files, *place));
                count(agreed(&format!("frames {index} and {other}"), &files));
                places.iter().for_each(|place| flip(&mut files, *place));
            }
        }
        assert!(refused > 100 && (cut > 10) == is_killed, "{refused} refused, {cut} cut");
    }
}

type NewDevice = fn() -> Option<Arc<dyn Device>>;

/// Lists of thousands of deltas, which several threads count and prepare for a GPU.
#[test]
fn many_short_deltas_replay_equally_with_threads() {
    let mut random = Random(11);
    let disk = SimDisk::new();
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 4 << 20)).unwrap();
    let mut batch = store.batch();
    (0..40).for_each(|page| _ = batch.create(if page == 0 { 300 } else { 9000 }, Place::Device(0)));
    let pages = store.commit(batch).unwrap().pages;
    for number in 0..150_u64 {
        let mut batch = store.batch();
        for _ in 0..500 {
            // A sixth of the deltas belong to one page and overlap.
            let page = pages[random.below(40 + 8).saturating_sub(8) as usize];
            let page_len = if page == pages[0] { 300 } else { 9000 };
            let len = 1 + random.below(150);
            let offset = random.below(page_len - len + 1);
            match random.below(8) {
                // Consecutive deltas are prepared together. A fill is not a delta.
                0 if number % 75 == 0 => batch.fill(page, offset, len, &[number as u8]),
                1 => batch.scatter(page, Width::W1, &[0, 5, 7, 299], &random.bytes(4)),
                2 => batch.write_masked(page, 8, Width::W2, &[random.below(256) as u8], &random.bytes(16)),
                _ => batch.write(page, offset, &random.bytes(len)),
            };
        }
        store.commit(batch).unwrap();
    }
    let expected = State::of(&store);
    store.close().unwrap();
    let files = Files::of(&disk);
    let host: NewDevice = || Some(Arc::new(HostDevice::new().parallel_from(1)));
    let gpu: NewDevice = || gpu::device().map(|gpu| gpu as Arc<dyn Device>);
    for device in [host, gpu] {
        let mut counted = Vec::new();
        // The lists contain a few deltas, thousands of deltas, or all of them.
        for window_len in [0, 64 << 10, 1 << 20, 16 << 20] {
            let Some(device) = device() else { continue };
            let what = format!("{} by windows of {window_len}", device.label());
            let options = small().with(|options| options.log.replay_window_len = Some(window_len));
            let store = Store::open_on(Arc::new(files.disk()), device, options).unwrap();
            assert!(State::of(&store) == expected, "{what}");
            let stats = store.stats();
            let moved = stats.transfers.iter().filter(|row| row.from == Place::Host);
            counted.push(moved.map(|row| (row.to, row.pages, row.bytes)).collect::<Vec<_>>());
        }
        assert!(counted.windows(2).all(|two| two[0] == two[1]), "{counted:?}");
    }
}
