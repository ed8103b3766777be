//! The three modes of writing image files produce identical files.

use std::collections::BTreeMap;

use remanent::disk::Disk;
use remanent::error::{FileName, Folder, Invalid};
use remanent::options::{Compression, ImageIo, ImageOptions, Retention};
use remanent::testing::sim_disk::{Moment, Operation, SimDisk};
use remanent::{Error, Options, PageId, Place, Store};

use crate::files::{Files, State, open_with, small};
use crate::kill::workload::Random;

const WAYS: [ImageIo; 3] = [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct];

/// Options with one chunk per snapshot, so that images are in the order of the pages.
fn options() -> Options {
    small().retention(Retention::new().snapshots_kept(4))
}

fn images(disk: &SimDisk) -> BTreeMap<FileName, Vec<u8>> {
    Files::of(disk).0.into_iter().filter(|(file, _)| matches!(file, FileName::Pages(_))).collect()
}

/// Creates pages of many lengths, takes snapshots, and restores a state. Two pages have images of a batch,
/// one of which is compressible and longer than a piece.
fn work(store: &Store) -> State {
    let mut batch = store.batch();
    for (seed, len) in [(1, 1), (2, 100), (3, 5000), (4, 20_000)] {
        let page = batch.create(len, Place::Host).page();
        batch.write(page, 0, &Random(seed).bytes(len - 1));
    }
    let pages: Vec<PageId> = store.commit(batch).unwrap().pages;
    let mut batch = store.batch();
    batch.create_from(Random(5).bytes(30_000), Place::Host);
    // Use a separate batch for each, because two threads may write the images of one batch in either order.
    store.commit(batch).unwrap();
    let mut batch = store.batch();
    let mut long = vec![0; (5 << 20) + 77];
    for (at, byte) in long.iter_mut().enumerate() {
        *byte = (at / 1000) as u8;
    }
    batch.create_from(long, Place::Host);
    let then = store.commit(batch).unwrap().position.lsn;
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(pages[2], 7, b"changed").write(pages[3], 9000, b"changed");
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    store.restore(remanent::StatePoint::Lsn(then)).unwrap();
    State::of(store)
}

#[test]
fn all_image_io_modes_write_the_same_files() {
    for compression in [Compression::Off, Compression::Zstd] {
        let made = SimDisk::new();
        open_with(&made, options()).unwrap().close().unwrap();
        let now = Moment { event: made.events(), tear: None };
        let mut found = Vec::new();
        for io in WAYS {
            let disk = made.after_kill(now);
            let store =
                open_with(&disk, options().images(ImageOptions::new().compression(compression).io(io)))
                    .unwrap();
            let state = work(&store);
            store.close().unwrap();
            // The open uses another mode of writing images than the one that wrote the files.
            let other = WAYS[(found.len() + 1) % WAYS.len()];
            let store = open_with(&disk, options().images(ImageOptions::new().io(other))).unwrap();
            assert_eq!(State::of(&store), state, "{io}");
            assert_eq!(store.recovered().image_io, other.to_string());
            found.push(images(&disk));
            // Check that each mode was used and not only requested.
            let calls =
                [Operation::MapPart, Operation::WriteDirect].map(|operation| disk.calls(operation) > 0);
            let expected = [io == ImageIo::Mapped, io == ImageIo::Direct];
            assert_eq!(calls, expected, "{io}");
        }
        assert!(found[0].len() >= 3, "{:?}", found[0].keys());
        for (io, images) in WAYS.iter().zip(&found) {
            let lens = |images: &BTreeMap<FileName, Vec<u8>>| -> Vec<_> {
                images.iter().map(|(file, bytes)| (*file, bytes.len())).collect()
            };
            assert_eq!(lens(images), lens(&found[1]), "{io}, {compression:?}");
            assert!(*images == found[1], "{io}, {compression:?}: other bytes");
        }
    }
}

#[test]
fn unsupported_log_io_is_invalid_option() {
    for io in [ImageIo::Mapped, ImageIo::Direct] {
        let disk = SimDisk::new();
        disk.refuse_images(io);
        let refused = open_with(&disk, options().images(ImageOptions::new().io(io))).unwrap_err();
        assert!(matches!(refused, Error::Invalid(Invalid::Option { option: "images.io", .. })), "{refused}");
        assert!(refused.to_string().contains(&io.to_string()), "{refused}");
        // The failed open created no file, and another mode is accepted.
        assert!(Disk::list(&disk, Folder::Log).unwrap().is_empty());
        open_with(&disk, options()).unwrap().close().unwrap();
    }
}
