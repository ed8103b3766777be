//! The part of `remanent-bench archive` that measures the upload and the restore of a snapshot. The ceilings are loops
//! of the same requests with the same client.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remanent::options::ArchiveOptions;
use remanent::{Ack, SnapshotOptions, Store};
use remanent_archive::bucket::{Bucket, BucketError};
use remanent_archive::object::{DataKey, Folder, ObjectKey};
use remanent_archive::remote::{RemoteBucket, RemoteOptions};
use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::exit::Failure;

use crate::figures::{Figure, Group, Unit, rate};
use crate::room::{self, BenchStop, Room};
use crate::transfer;

/// The number of concurrent requests of a loop. With a server on the same machine, more requests are not faster.
const REQUESTS: usize = 8;
/// The length in bytes of an object that a loop creates, which is the maximum length of a part in an archive.
const OBJECT_LEN: usize = 8 << 20;
/// The length in bytes of a file that the loop of the disk writes, and of its reads.
const FILE_LEN: u64 = 64 << 20;
const READ_LEN: usize = 1 << 20;
/// The number of threads of the loop of the disk, as of a restore.
const DISK_THREADS: usize = 2;
const PAGE_LEN: u64 = 1 << 20;
const NAME: &str = "benchmark";

/// The rates at which a snapshot is uploaded and restored, with one value per round.
pub struct SnapshotFigures {
    puts: Figure,
    upload: Figure,
    gets: Figure,
    disk: Figure,
    restore: Figure,
    len: u64,
}

impl SnapshotFigures {
    pub fn new(len: u64) -> Self {
        let figure = |name: &str, ceiling: Option<&str>| Figure {
            ceiling: ceiling.map(str::to_owned),
            ..Figure::new(name, Unit::BytesPerSecond)
        };
        Self {
            puts: figure("a loop of PUT requests", None),
            upload: figure("upload", Some("a loop of PUT requests")),
            gets: figure("a loop of GET requests", None),
            disk: figure("a loop that writes, syncs and reads files", None),
            restore: figure("restore", Some("a loop of GET requests")),
            len,
        }
    }

    /// Measures one round. `archive` and `other` are empty archives. The loop creates its objects in `other`.
    pub fn measure(
        &mut self,
        room: &Room,
        archive: &ArchiveOptions,
        other: &ArchiveOptions,
    ) -> Result<(), BenchStop> {
        let took = put_objects(&open(other)?, self.len)?;
        self.puts.push(rate(self.len, took));
        let store = room.open("archived", room::options().archive(archive.clone()))?;
        create_pages(&store, room, self.len)?;
        let snapshot = store.snapshot_with(SnapshotOptions::new().name(NAME))?;
        // A snapshot is archived once it was read back from the disk.
        store.wait_verified()?;
        let begun = Instant::now();
        store.wait_archived(snapshot.id, None)?;
        self.upload.push(rate(self.len, begun.elapsed()));
        store.close()?;
        let (read, took) = get_objects(&open(archive)?)?;
        self.gets.push(rate(read, took));
        let (written, took) = write_files(&room.path("written"), read)?;
        self.disk.push(rate(written, took));
        let target = room.path("restored");
        let arguments = ["restore", &target.display().to_string(), "--from", &archive.url];
        let begun = Instant::now();
        remanent_tools::run(&arguments, &mut Vec::new())?;
        // A restore reads the same objects as the loop: the snapshot, and the log from which the store can be rebuilt.
        self.restore.push(rate(read, begun.elapsed()));
        fs::remove_dir_all(room.path("archived"))?;
        Ok(fs::remove_dir_all(target)?)
    }

    pub fn into_group(self) -> Group {
        Group {
            title: format!("a snapshot of {} MiB", self.len >> 20),
            figures: vec![self.puts, self.upload, self.gets, self.disk, self.restore],
        }
    }
}

fn open(archive: &ArchiveOptions) -> Result<RemoteBucket, BenchStop> {
    let bucket = RemoteBucket::open(&archive.url, RemoteOptions::default());
    bucket.map_err(|error| BenchStop::Failed(Failure::Environment(error.to_string())))
}

/// Creates pages with a total length of `len` bytes, and waits until their batches are archived.
fn create_pages(store: &Store, room: &Room, len: u64) -> Result<(), BenchStop> {
    let mut random = SplitMix64::new(len);
    let mut bytes = vec![0; PAGE_LEN as usize];
    let mut last = None;
    for _ in 0..len / PAGE_LEN {
        room.check()?;
        random.fill(&mut bytes);
        let mut batch = store.batch();
        let page = batch.create(PAGE_LEN, room.place).page();
        batch.write(page, 0, &bytes);
        let ticket = store.submit(batch)?;
        ticket.wait(Ack::Applied)?;
        last = Some(ticket);
    }
    if let Some(last) = last {
        last.wait(Ack::Archived)?;
    }
    Ok(())
}

/// Creates objects with a total length of at least `len` bytes. Returns the time that this took.
fn put_objects(bucket: &RemoteBucket, len: u64) -> Result<Duration, BenchStop> {
    let keys: Vec<ObjectKey> = (1..=len.div_ceil(OBJECT_LEN as u64))
        .map(|index| ObjectKey::Data(DataKey { term: 1, random: 1, index }))
        .collect();
    let bytes = Arc::new(transfer::random(OBJECT_LEN).to_vec());
    let begun = Instant::now();
    for_each(&keys, |key| bucket.block_on(bucket.create_shared(key, &bytes)).map(drop))?;
    Ok(begun.elapsed())
}

/// Reads all data objects of an archive. Returns their total length in bytes, and the time that this took.
fn get_objects(bucket: &RemoteBucket) -> Result<(u64, Duration), BenchStop> {
    let names = bucket.block_on(bucket.list(Folder::Data)).map_err(refused)?;
    let keys: Vec<ObjectKey> = names.iter().filter_map(|name| ObjectKey::parse(name)).collect();
    let read = AtomicUsize::new(0);
    let begun = Instant::now();
    for_each(&keys, |key| {
        let found = bucket.block_on(bucket.get(key, None))?;
        read.fetch_add(found.map_or(0, |bytes| bytes.len()), Ordering::Relaxed);
        Ok(())
    })?;
    Ok((read.into_inner() as u64, begun.elapsed()))
}

/// Writes at least `len` bytes to files in a new folder, syncs them, and reads them back from the medium, as a restore
/// does. Returns their total length in bytes, and the time that this took.
fn write_files(folder: &Path, len: u64) -> Result<(u64, Duration), BenchStop> {
    fs::create_dir(folder)?;
    let bytes = transfer::random(OBJECT_LEN);
    let files: Vec<_> = (0..len.div_ceil(FILE_LEN)).map(|index| folder.join(index.to_string())).collect();
    let begun = Instant::now();
    work_on(&files, DISK_THREADS, |path| -> io::Result<()> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        for offset in (0..FILE_LEN).step_by(OBJECT_LEN) {
            file.write_all_at(&bytes, offset)?;
        }
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        let mut piece = vec![0; READ_LEN];
        (0..FILE_LEN).step_by(READ_LEN).try_for_each(|offset| file.read_exact_at(&mut piece, offset))
    })?;
    let took = begun.elapsed();
    fs::remove_dir_all(folder)?;
    Ok((files.len() as u64 * FILE_LEN, took))
}

/// Calls `request` with each key, in [`REQUESTS`] concurrent threads.
fn for_each(
    keys: &[ObjectKey],
    request: impl Fn(ObjectKey) -> Result<(), BucketError> + Sync,
) -> Result<(), BenchStop> {
    work_on(keys, REQUESTS, |key| request(*key)).map_err(refused)
}

/// Calls `work` with each item, in concurrent threads.
fn work_on<T: Sync, E: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item)?;
        }
        Ok(())
    };
    let finished: Vec<Result<(), E>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    finished.into_iter().collect()
}

fn refused(error: BucketError) -> BenchStop {
    BenchStop::Failed(Failure::Environment(format!("a request to the bucket failed: {error}")))
}
