//! All disks behave identically. Random calls on a real directory, through each kind of window, and on the simulated
//! disk return the same results and leave the same bytes and names.

use std::io::ErrorKind;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use remanent::disk::dir::DirDisk;
use remanent::disk::{Disk, DiskFile, Hold, Window};
use remanent::error::{FileName, Folder};
use remanent::options::{ImageIo, LogIo};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Result, SnapshotId};

const BLOCK: u64 = 4096;

/// A call to the disk. Each `usize` is the index of a file or handle.
#[derive(Clone, Debug)]
enum Call {
    Create(usize),
    Open(usize),
    Close(usize),
    Rename(usize, usize),
    Remove(usize),
    SyncFolder,
    Write(usize, u64, Vec<u8>),
    Read(usize, u64, usize),
    SyncAndReadPast(usize, u64, usize),
    SyncAndReadProven(usize, u64, usize),
    Put(usize, u64, Vec<u8>),
    /// Reserves space. The numbers are the offset and the length in blocks of 4 KiB.
    Reserve(usize, u64, u64),
    Cut(usize, u64),
    /// Writes a block of 4 KiB with direct I/O. The numbers are that of the block, and the byte that fills it.
    WriteDirect(usize, u64, u8),
    /// Writes bytes to the end of a partial mapping.
    PutIntoPart(usize, u64, Vec<u8>),
}

const NAMES: [FileName; 3] = [FileName::Segment(1), FileName::Spare(2), FileName::Temporary(Folder::Log, 3)];

fn call() -> impl Strategy<Value = Call> {
    let name = || 0..NAMES.len();
    let offset = || prop_oneof![0_u64..20, 500_u64..530, 4080_u64..4100, 0_u64..10_000];
    let len = || prop_oneof![0_usize..20, 500_usize..1100];
    let bytes = || (any::<u8>(), len()).prop_map(|(byte, len)| vec![byte; len]);
    prop_oneof![
        2 => name().prop_map(Call::Create),
        2 => name().prop_map(Call::Open),
        1 => name().prop_map(Call::Close),
        1 => (name(), name()).prop_map(|(source, target)| Call::Rename(source, target)),
        1 => name().prop_map(Call::Remove),
        1 => Just(Call::SyncFolder),
        6 => (name(), offset(), bytes()).prop_map(|(file, offset, bytes)| Call::Write(file, offset, bytes)),
        3 => (name(), offset(), len()).prop_map(|(file, offset, len)| Call::Read(file, offset, len)),
        1 => (name(), offset(), len()).prop_map(|(file, offset, len)| Call::SyncAndReadPast(file, offset, len)),
        1 => (name(), offset(), len()).prop_map(|(file, offset, len)| Call::SyncAndReadProven(file, offset, len)),
        4 => (name(), offset(), bytes()).prop_map(|(file, offset, bytes)| Call::Put(file, offset, bytes)),
        2 => (name(), 0_u64..4, 1_u64..5).prop_map(|(file, from, len)| Call::Reserve(file, from, len)),
        1 => (name(), offset()).prop_map(|(file, len)| Call::Cut(file, len)),
        2 => (name(), 0_u64..6, any::<u8>()).prop_map(|(file, block, byte)| Call::WriteDirect(file, block, byte)),
        4 => (name(), offset(), bytes())
            .prop_map(|(file, offset, bytes)| Call::PutIntoPart(file, offset, bytes)),
    ]
}

/// The result of a call: the bytes that were read, or the kind of the error.
type Answer = std::result::Result<Vec<u8>, ErrorKind>;

fn answer(result: Result<Vec<u8>>) -> Answer {
    result.map_err(|error| match error {
        Error::Io { source, .. } => source.kind(),
        other => panic!("{other}"),
    })
}

/// A disk under test with some open files.
struct Subject {
    disk: Arc<dyn Disk>,
    io: LogIo,
    open: [Option<Arc<dyn DiskFile>>; NAMES.len()],
}

impl Subject {
    fn new(disk: Arc<dyn Disk>, io: LogIo) -> Self {
        disk.make_folder(Folder::Root).unwrap();
        disk.make_folder(Folder::Log).unwrap();
        Self { disk, io, open: [None, None, None] }
    }

    /// Makes the call. If the slot has no open file, a call that needs one returns an empty result.
    fn call(&mut self, call: &Call) -> Answer {
        let read = |len: usize, read: &dyn Fn(&mut [u8]) -> Result<()>| {
            let mut out = vec![0; len];
            answer(read(&mut out).map(|()| out))
        };
        match call {
            Call::Create(name) => {
                let created = self.disk.create(NAMES[*name]);
                answer(created.map(|file| self.open[*name] = Some(file)).map(|()| Vec::new()))
            }
            Call::Open(name) => {
                let opened = self.disk.open(NAMES[*name], true);
                answer(opened.map(|file| self.open[*name] = Some(file)).map(|()| Vec::new()))
            }
            Call::Close(slot) => {
                self.open[*slot] = None;
                Ok(Vec::new())
            }
            Call::Rename(source, target) => {
                answer(self.disk.rename(NAMES[*source], NAMES[*target]).map(|()| Vec::new()))
            }
            Call::Remove(name) => answer(self.disk.remove(NAMES[*name]).map(|()| Vec::new())),
            Call::SyncFolder => answer(self.disk.sync_folder(Folder::Log).map(|()| Vec::new())),
            Call::Write(slot, offset, bytes) => match &self.open[*slot] {
                Some(file) => answer(file.write_at(*offset, bytes).map(|()| Vec::new())),
                None => Ok(Vec::new()),
            },
            Call::Read(slot, offset, len) => match &self.open[*slot] {
                Some(file) => read(*len, &|out| file.read_at(*offset, out)),
                None => Ok(Vec::new()),
            },
            Call::SyncAndReadPast(slot, offset, len) => match &self.open[*slot] {
                Some(file) => {
                    file.sync().unwrap();
                    read(*len, &|out| file.read_bypassing_cache(*offset, out))
                }
                None => Ok(Vec::new()),
            },
            Call::SyncAndReadProven(slot, offset, len) => match &self.open[*slot] {
                Some(file) => {
                    file.sync().unwrap();
                    read(*len, &|out| file.read_bypassing_cache(*offset, out)).and_then(|bypassing_cache| {
                        let proven = read(*len, &|out| file.read_proven(*offset, out));
                        assert_eq!(proven.as_ref(), Ok(&bypassing_cache));
                        proven
                    })
                }
                None => Ok(Vec::new()),
            },
            Call::Put(slot, offset, bytes) => match &self.open[*slot] {
                Some(file)
                    if offset + bytes.len() as u64 <= file.len().unwrap() && file.len().unwrap() > 0 =>
                {
                    let window: Box<dyn Window> = file.window(self.io).unwrap();
                    window.put(*offset, bytes).unwrap();
                    window.sync(*offset, bytes.len() as u64).unwrap();
                    Ok(Vec::new())
                }
                _ => Ok(Vec::new()),
            },
            Call::Reserve(slot, from, len) => match &self.open[*slot] {
                Some(file) => answer(file.reserve(from * BLOCK, (from + len) * BLOCK).map(|done| {
                    assert!(done, "this file system makes space without bytes");
                    Vec::new()
                })),
                None => Ok(Vec::new()),
            },
            Call::Cut(slot, len) => match &self.open[*slot] {
                Some(file) => answer(file.cut(*len).map(|()| Vec::new())),
                None => Ok(Vec::new()),
            },
            Call::WriteDirect(slot, block, byte) => match &self.open[*slot] {
                Some(file) => {
                    let memory = vec![*byte; 2 * BLOCK as usize];
                    let start = memory.as_ptr().addr().wrapping_neg() % BLOCK as usize;
                    let bytes = &memory[start..start + BLOCK as usize];
                    let written = match self.disk.refuses_images(ImageIo::Direct).unwrap() {
                        None => file.write_direct(block * BLOCK, bytes),
                        Some(_) => file.write_at(block * BLOCK, bytes),
                    };
                    answer(written.map(|()| Vec::new()))
                }
                None => Ok(Vec::new()),
            },
            Call::PutIntoPart(slot, offset, bytes) => match &self.open[*slot] {
                Some(file) if !bytes.is_empty() && offset + bytes.len() as u64 <= file.len().unwrap() => {
                    // A hole has no allocated space, and a partial mapping needs allocated space.
                    let end = offset + bytes.len() as u64;
                    file.reserve(*offset, end).unwrap();
                    let start = offset / 2;
                    let part = file.mapped_part(start..end).unwrap();
                    part.put(offset - start, bytes).unwrap();
                    part.sync(offset - start, bytes.len() as u64).unwrap();
                    Ok(Vec::new())
                }
                _ => Ok(Vec::new()),
            },
        }
    }

    /// Returns the names on the disk, and the lengths of the open files.
    fn view(&self) -> (Vec<String>, Vec<Option<u64>>) {
        let lens = self.open.iter().map(|file| file.as_ref().map(|file| file.len().unwrap()));
        (self.disk.list(Folder::Log).unwrap(), lens.collect())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

    #[test]
    fn all_disks_behave_alike(calls in vec(call(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let real = |name| Arc::new(DirDisk::new(directory.path().join(name)));
        let mut subjects = [
            Subject::new(real("mapped"), LogIo::Mapped),
            Subject::new(real("buffered"), LogIo::Buffered),
            Subject::new(Arc::new(SimDisk::new()), LogIo::Mapped),
        ];
        for (index, call) in calls.iter().enumerate() {
            let answers = subjects.each_mut().map(|subject| (subject.call(call), subject.view()));
            prop_assert_eq!(&answers[0], &answers[2], "call {} on the mapped and the simulated disk", index);
            prop_assert_eq!(&answers[1], &answers[2], "call {} on the buffered and the simulated disk", index);
        }
    }
}

#[test]
fn snapshot_is_locked_by_readers_or_a_remover_not_both() {
    let directory = tempfile::tempdir().unwrap();
    let real = DirDisk::new(directory.path());
    real.make_folder(Folder::Root).unwrap();
    drop(real.lock().unwrap());
    let disks: [Arc<dyn Disk>; 2] = [Arc::new(real), Arc::new(SimDisk::new())];
    for disk in disks {
        let (first, other) = (SnapshotId(1), SnapshotId(2));
        let holds = [disk.hold(first).unwrap(), disk.hold(first).unwrap()];
        assert!(holds.iter().all(|hold| matches!(hold, Hold::Held(_))));
        for hold in holds {
            assert!(disk.try_retire(first).unwrap().is_none(), "{}: a reader is left", disk.label());
            assert!(disk.try_retire(other).unwrap().is_some(), "{}: this one has no reader", disk.label());
            drop(hold);
        }
        let going = disk.try_retire(first).unwrap();
        assert!(going.is_some(), "{}", disk.label());
        assert!(matches!(disk.hold(first).unwrap(), Hold::Retiring), "{}", disk.label());
        assert!(matches!(disk.hold(other).unwrap(), Hold::Held(_)), "{}", disk.label());
        drop(going);
        assert!(matches!(disk.hold(first).unwrap(), Hold::Held(_)), "{}", disk.label());
    }
}
