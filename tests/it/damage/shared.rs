//! Failures known from other stores, with one test each: damage to bytes that all snapshots share, copies
//! with wrong checksums, tables that are newer than their restore, and files that are shorter than their
//! mapping.

use std::fs;

use remanent::error::FileName;
use remanent::options::{Compression, ImageIo, LogIo, LogOptions, SnapshotSchedule};
use remanent::testing::sim_disk::Operation;
use remanent::{Error, Options, Place, SnapshotId, SnapshotOptions, Store};
use remanent_format::frame::FrameKind;
use remanent_format::judge::{ImageProofs, judge};
use remanent_format::log::LogWalk;
use remanent_format::manifest::Manifest;
use remanent_format::state::survey::Survey;
use remanent_format::{Lsn, PageId};

use super::verdicts::{Work, options};
use crate::files::{Files, open_with};
use crate::with_options::With;

/// Returns the number of read calls of an open that finds no usable snapshot.
fn reads_of_an_open(files: &Files, damaged: FileName) -> usize {
    let disk = files.disk();
    let reads = || {
        let kinds = [Operation::Read, Operation::ReadBypassingCache, Operation::ReadProven];
        kinds.into_iter().map(|kind| disk.calls(kind)).sum::<usize>()
    };
    let before = reads();
    let opened = open_with(&disk, options(ImageIo::Buffered));
    let calls = reads() - before;
    match opened {
        Err(Error::Damaged(damage)) => assert_eq!(damage.file, damaged),
        // The log is complete, so no snapshot is needed.
        Ok(store) => assert_eq!(store.recovered().snapshot, None),
        Err(error) => panic!("{error}"),
    }
    calls
}

/// Returns a store with this many snapshots that share the image of one page, and with a log after them.
fn with_snapshots(count: u64) -> Files {
    let options = options(ImageIo::Buffered).with(|options| {
        options.retention.snapshots_kept = 100;
        options.images.compression = Compression::Off;
    });
    let mut work = Work::with_pages(&[3000, 500, 100], Place::Host, options);
    for _ in 0..count {
        let mut batch = work.store.batch();
        batch.fill(work.pages[1], 0, 500, &[3]).fill(work.pages[2], 0, 100, &[4]);
        work.store.commit(batch).unwrap();
        work.note();
        work.store.snapshot().unwrap();
    }
    work.commit(2);
    work.close("snapshots that share an image").files
}

#[test]
fn open_with_shared_damage_needs_linear_reads() {
    type Row = (&'static str, fn(&mut Files) -> FileName);
    let rows: [Row; 2] = [
        ("an image", |files| {
            let survey = Survey::read(files).unwrap();
            let newest = survey.snapshot(*survey.links.keys().next_back().unwrap()).unwrap();
            let image = newest.entries[0].image.unwrap();
            let file = FileName::Pages(image.file);
            files.0.get_mut(&file).unwrap()[image.offset as usize + 9] ^= 1;
            file
        }),
        ("the log", |files| {
            let survey = Survey::read(files).unwrap();
            let base = survey.candidates().next().unwrap().unwrap().unwrap();
            // Find the first batch after the newest snapshot. Later frames record this batch as durable.
            let mut walk = LogWalk::new(files, &survey.log, base.redo, survey.mark()).unwrap();
            let (segment, offset) = loop {
                let frame = walk.next().unwrap().expect("a batch follows");
                if frame.header.kind == FrameKind::Batch {
                    break (frame.header.segment, frame.header.offset as usize);
                }
            };
            let file = FileName::Segment(segment);
            files.0.get_mut(&file).unwrap()[offset + 90] ^= 1;
            file
        }),
    ];
    for (what, damage) in rows {
        let reads = |count| {
            let mut files = with_snapshots(count);
            let damaged = damage(&mut files);
            reads_of_an_open(&files, damaged)
        };
        let (one, twice) = (reads(8), reads(16));
        assert!(10 * twice <= 22 * one, "{what}: {one} reads, then {twice}");
    }
}

/// If both copies have wrong checksums, neither copy is used, and neither overwrites the other.
#[test]
fn repair_never_uses_copy_with_bad_checksum() {
    for name in [None, Some("kept")] {
        let mut work = Work::new(ImageIo::Buffered);
        work.commit(1);
        work.store.snapshot().unwrap();
        work.commit(1);
        let request = SnapshotOptions::new();
        let request = name.map_or(request.clone(), |name| request.clone().name(name));
        let newest = work.store.snapshot_with(request).unwrap().id;
        work.commit(1);
        let subject = work.close("two snapshots");
        let file = FileName::Manifest(newest.0);
        let sound = subject.files.0[&file].clone();
        for copies in 0..4_usize {
            let mut damaged = sound.clone();
            for copy in (0..2).filter(|copy| copies >> copy & 1 == 1) {
                damaged[copy * sound.len() / 2 + 300] ^= 1;
            }
            let mut files = subject.files.clone();
            files.0.insert(file, damaged.clone());
            let disk = files.disk();
            let store = open_with(&disk, options(ImageIo::Buffered)).unwrap();
            let from = store.recovered().snapshot;
            let what = format!("named {name:?}, copies {copies:02b}");
            if copies == 3 {
                assert_eq!(from, Some(SnapshotId(newest.0 - 1)), "{what}");
                assert_eq!(disk.bytes(file), Some(damaged), "{what}: it stays as evidence");
            } else {
                assert_eq!((from, disk.bytes(file)), (Some(newest), Some(sound.clone())), "{what}");
            }
            // In all cases, the open recovers the last state.
            assert_eq!(store.lsn(), *subject.states.keys().next_back().unwrap(), "{what}");
        }
    }
}

/// Replaces the table that the last restore's batch names.
fn exchange_table(files: &mut Files, change: impl FnOnce(&mut Manifest)) {
    let tables = files.names(|file| matches!(file, FileName::Table(_)));
    let [file] = tables[..] else { panic!("{tables:?}") };
    let (mut table, health) = Manifest::decode(&files.0[&file]).unwrap();
    let restored_before = health.header_crc.to_le_bytes();
    change(&mut table);
    let bytes = table.encode().unwrap();
    let crc: [u8; 4] = bytes[252..256].try_into().unwrap();
    files.0.insert(file, bytes);
    let mut exchanged = 0;
    for segment in files.segments() {
        let bytes = files.0.get_mut(&segment).unwrap();
        for at in (4096..bytes.len() - 4).step_by(4) {
            if bytes[at..at + 4] == restored_before {
                bytes[at..at + 4].copy_from_slice(&crc);
                exchanged += 1;
            }
        }
    }
    assert_eq!(exchanged, 1, "one batch names the table");
    files.fit();
}

#[test]
fn a_table_that_is_newer_than_its_restore_is_refused_at_open() {
    let mut work = Work::new(ImageIo::Buffered);
    let good = work.commit(2);
    work.store.snapshot().unwrap();
    work.commit(2);
    work.restore_to(good);
    let restored = work.store.lsn();
    work.commit(1);
    let subject = work.close("a restore");
    let mut files = subject.files;
    // Remove the snapshot after the restore, which would make the restore's table irrelevant.
    let newest = *files.names(|file| matches!(file, FileName::Manifest(_))).last().unwrap();
    files.0.remove(&newest);
    let opened = |files: &Files| {
        let verdict = judge(&Survey::read(files).unwrap(), files, &mut ImageProofs::new(files));
        let opened = open_with(&files.disk(), options(ImageIo::Buffered));
        assert_eq!(verdict.opens_from.is_some(), opened.is_ok(), "{verdict:?}");
        opened
    };
    let mut same = files.clone();
    exchange_table(&mut same, |table| table.created_unix_ms += 1);
    assert_eq!(opened(&same).unwrap().lsn(), restored.next());
    type Change = fn(&mut Manifest);
    let changes: [(&str, Change); 3] = [
        ("an entry that is newer", |table| {
            table.end = table.end.next();
            table.entries[0].lsn = table.end;
        }),
        ("an end that is above the restore", |table| table.end = Lsn(table.end.0 + 9)),
        ("tombstones", |table| {
            table.tombstones.push(remanent_format::manifest::Tombstone { page: PageId(1), lsn: Lsn(1) });
            table.entries.remove(0);
        }),
    ];
    for (what, change) in changes {
        let mut damaged = files.clone();
        exchange_table(&mut damaged, change);
        match opened(&damaged) {
            Err(Error::Damaged(damage)) => {
                assert!(damage.to_string().contains("of the restored table"), "{what}: {damage}");
            }
            other => panic!("{what}: {:?}", other.map(|store| store.recovered().clone())),
        }
    }
}

/// A process that is killed while a file grows can leave the file at any length. If the next process mapped
/// such a file at its full length, its first store to the missing part would raise SIGBUS.
#[test]
fn truncated_file_crashes_no_other_process() {
    let options = || {
        let options = Options::new().log(LogOptions::new().segment_len(64 << 10).io(LogIo::Mapped));
        options.snapshots(SnapshotSchedule::never()).with(|options| options.images.io = ImageIo::Mapped)
    };
    let source = tempfile::tempdir().unwrap();
    let store = options().open(source.path()).unwrap();
    let mut batch = store.batch();
    batch.create_from(vec![7; 20_000], Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    let work = |store: &Store| {
        for seed in 0..3 {
            let mut batch = store.batch();
            batch.fill(page, 0, 20_000, &[seed]);
            store.commit(batch)?;
            store.snapshot()?;
        }
        Ok::<(), Error>(())
    };
    work(&store).unwrap();
    store.close().unwrap();
    let lists = ["log", "pages"].map(|folder| fs::read_dir(source.path().join(folder)).unwrap());
    let names: Vec<_> = lists.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    let count =
        |end: &str| names.iter().filter(|name| name.extension().is_some_and(|ext| ext == end)).count();
    assert!(count("log") > 1 && count("spare") > 1 && count("pages") > 0, "{names:?}");
    let mut opened = 0;
    for name in &names {
        let whole = fs::metadata(name).unwrap().len();
        for len in [0, 4096 + 100, whole - 4096] {
            let target = tempfile::tempdir().unwrap();
            for folder in ["", "log", "pages", "snapshots"] {
                fs::create_dir_all(target.path().join(folder)).unwrap();
                for entry in fs::read_dir(source.path().join(folder)).unwrap() {
                    let entry = entry.unwrap();
                    if entry.file_type().unwrap().is_file() {
                        fs::copy(entry.path(), target.path().join(folder).join(entry.file_name())).unwrap();
                    }
                }
            }
            let cut = target.path().join(name.strip_prefix(source.path()).unwrap());
            fs::OpenOptions::new().write(true).open(cut).unwrap().set_len(len.min(whole)).unwrap();
            let what = format!("{} cut to {len}", name.display());
            match options().open(target.path()) {
                Ok(store) => {
                    opened += 1;
                    work(&store).unwrap_or_else(|error| panic!("{what}: {error}"));
                    store.close().unwrap();
                }
                Err(Error::Damaged(_)) => {}
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
    assert!(opened > 2, "{opened} opened");
    // The view opens the store after its files were truncated.
    let view = Store::open_read_only(source.path()).unwrap();
    for name in &names {
        fs::OpenOptions::new().write(true).open(name).unwrap().set_len(10).unwrap();
    }
    let mut bytes = vec![0; 20_000];
    assert!(matches!(view.read(page, 0, &mut bytes), Err(Error::Damaged(_) | Error::Overtaken { .. })));
}
