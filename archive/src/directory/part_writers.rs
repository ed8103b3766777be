//! Threads that write frames and parts of image files, and read the parts back, while further ones are received.

use std::collections::BTreeSet;
use std::io;
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use remanent_format::FileName;

use super::files::{StoreFiles, file_of};
use super::threads;
use crate::object::{Part, Payload};

/// Number of bytes that a thread writes before it syncs them and reads parts back.
const PROVE_EVERY: u64 = 64 << 20;

/// The channel from which the threads take parts and frames.
type PartReceiver = Mutex<Receiver<Job>>;

/// Whether a directory is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    /// Everything is synced and read back.
    Proven,
    /// Nothing is synced, because the directory is temporary.
    Temporary,
}

/// A write to a file.
#[derive(Debug)]
enum Job {
    Part(Part, Payload),
    Frames(Extents, Arc<Payload>),
}

/// The frames of a segment that a piece contains, in the order of their offsets.
#[derive(Debug)]
pub(super) struct Extents {
    pub segment: u64,
    /// For each extent: its offset in the segment, and its bytes in the piece.
    extents: Vec<(u64, Range<usize>)>,
}

impl Extents {
    pub fn new(segment: u64, offset: u64, bytes: Range<usize>) -> Self {
        Self { segment, extents: vec![(offset, bytes)] }
    }

    /// Adds a frame. Frames that follow each other both in the segment and in the piece become one extent.
    pub fn push(&mut self, offset: u64, bytes: Range<usize>) {
        match self.extents.last_mut() {
            Some((last, known)) if *last + known.len() as u64 == offset && known.end == bytes.start => {
                known.end = bytes.end;
            }
            _ => self.extents.push((offset, bytes)),
        }
    }

    /// Writes the frames. Returns their number of bytes.
    pub fn write(self, files: &StoreFiles, piece: &Payload) -> io::Result<u64> {
        let frames = self.extents.iter().map(|(offset, bytes)| (*offset, &piece[bytes.clone()]));
        files.write_extents(FileName::Segment(self.segment), frames)
    }
}

/// The threads that write the files of one restore. Dropping the value discards what is not written yet.
#[derive(Debug)]
pub(super) struct PartWriters {
    /// `Some` until the threads are stopped.
    parts: Option<SyncSender<Job>>,
    threads: Vec<JoinHandle<io::Result<Vec<Part>>>>,
    shared: Arc<Shared>,
    /// The receiving end of `parts`, or `None` after the threads were started. From then on, only the threads hold the
    /// receiving end, so that a send fails once all threads have ended.
    receiver: Option<Arc<PartReceiver>>,
}

/// What a thread wrote since it last synced.
#[derive(Default)]
struct Written {
    parts: Vec<Part>,
    segments: BTreeSet<u64>,
}

#[derive(Debug)]
struct Shared {
    files: StoreFiles,
    durability: Durability,
    /// Number of parts and pieces of frames that the threads received and did not write yet.
    in_memory: AtomicUsize,
    /// Whether a thread has failed, or the parts are discarded.
    is_stopped: AtomicBool,
}

impl PartWriters {
    /// Creates the writers of the files of a directory. The first part starts the threads.
    pub fn new(files: &StoreFiles, durability: Durability) -> Self {
        // Without a buffer, so that each part in memory is counted.
        let (parts, receiver) = sync_channel(0);
        let shared = Shared {
            files: files.clone(),
            durability,
            in_memory: AtomicUsize::new(0),
            is_stopped: AtomicBool::new(false),
        };
        let receiver = Some(Arc::new(Mutex::new(receiver)));
        Self { parts: Some(parts), threads: Vec::new(), shared: Arc::new(shared), receiver }
    }

    /// Passes a part to a thread, which writes the part. Waits until a thread is free. The part must not overlap an
    /// earlier part.
    ///
    /// # Errors
    /// Returns the first error of a thread.
    pub fn write(&mut self, part: Part, bytes: Payload) -> io::Result<()> {
        self.send(Job::Part(part, bytes))
    }

    /// Passes frames of `piece` to a thread, like [`write`](Self::write).
    ///
    /// # Errors
    /// Returns the first error of a thread.
    pub fn write_frames(&mut self, extents: Extents, piece: Arc<Payload>) -> io::Result<()> {
        self.send(Job::Frames(extents, piece))
    }

    fn send(&mut self, job: Job) -> io::Result<()> {
        if let Some(receiver) = self.receiver.take() {
            self.start(&receiver)?;
        }
        self.shared.in_memory.fetch_add(1, Ordering::Relaxed);
        let is_stopped = self.shared.is_stopped.load(Ordering::Relaxed);
        if is_stopped || self.parts.as_ref().is_none_or(|parts| parts.send(job).is_err()) {
            self.join()?;
            return Err(io::Error::other("the threads of the restore have ended"));
        }
        Ok(())
    }

    /// Returns the number of parts and pieces of frames that are not written yet.
    pub fn parts_in_memory(&self) -> usize {
        self.shared.in_memory.load(Ordering::Relaxed)
    }

    /// Waits until everything is written and all parts are read back. Returns the parts.
    ///
    /// # Errors
    /// Returns the first error of a thread.
    pub fn finish(mut self) -> io::Result<Vec<Part>> {
        self.join()
    }

    fn start(&mut self, receiver: &Arc<PartReceiver>) -> io::Result<()> {
        for _ in 0..threads::count() {
            let (shared, receiver) = (self.shared.clone(), receiver.clone());
            let thread = thread::Builder::new().name("remanent-restore".to_owned());
            match thread.spawn(move || shared.run(&receiver)) {
                Ok(thread) => self.threads.push(thread),
                // One thread suffices.
                Err(_) if !self.threads.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn join(&mut self) -> io::Result<Vec<Part>> {
        self.parts = None;
        let mut proven = Vec::new();
        let mut failure = None;
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(Ok(parts)) => proven.extend(parts),
                Ok(Err(error)) => failure = failure.or(Some(error)),
                Err(_) => failure = failure.or(Some(io::Error::other("a thread of the restore panicked"))),
            }
        }
        failure.map_or(Ok(proven), Err)
    }
}

impl Drop for PartWriters {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        // The restore has failed or starts over, so the error is not needed.
        let _ = self.join();
    }
}

impl Shared {
    /// Writes until there is nothing more to write. Returns the parts that were read back.
    fn run(&self, receiver: &PartReceiver) -> io::Result<Vec<Part>> {
        let result = self.write_parts(receiver);
        if result.is_err() {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
        result
    }

    fn write_parts(&self, receiver: &PartReceiver) -> io::Result<Vec<Part>> {
        let (mut proven, mut written, mut len) = (Vec::new(), Written::default(), 0);
        while let Some(job) = self.receive(receiver) {
            len += match job {
                Job::Part(part, bytes) => {
                    self.files.write_at(file_of(part.role, part.file)?, part.offset, &bytes)?;
                    written.parts.push(part);
                    part.len
                }
                Job::Frames(extents, piece) => {
                    written.segments.insert(extents.segment);
                    extents.write(&self.files, &piece)?
                }
            };
            self.in_memory.fetch_sub(1, Ordering::Relaxed);
            if len >= PROVE_EVERY {
                proven.extend(self.prove(mem::take(&mut written))?);
                len = 0;
            }
        }
        if !self.is_stopped.load(Ordering::Relaxed) {
            proven.extend(self.prove(written)?);
        }
        Ok(proven)
    }

    /// Returns the next job, or `None` if there are no more or the writers are stopped.
    fn receive(&self, receiver: &PartReceiver) -> Option<Job> {
        let next = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
        next.filter(|_| !self.is_stopped.load(Ordering::Relaxed))
    }

    /// Syncs the files that were written, and reads the parts back from the medium. The log is read back once it is
    /// complete.
    fn prove(&self, Written { parts, segments }: Written) -> io::Result<Vec<Part>> {
        if self.durability == Durability::Temporary {
            return Ok(Vec::new());
        }
        segments.into_iter().try_for_each(|segment| self.files.sync(FileName::Segment(segment)))?;
        let files: BTreeSet<_> = parts.iter().map(|part| (part.role, part.file)).collect();
        for (role, file) in files {
            self.files.sync_and_drop_cache(file_of(role, file)?)?;
        }
        parts.iter().try_for_each(|part| self.files.check_part(part))?;
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::StoreId;

    use super::*;
    use crate::object::{DataKey, DataRef, Nonce, Role, crc64, encode_data};

    const LEN: usize = 100_000;

    fn part(index: u64) -> (Part, Payload) {
        let bytes: Vec<u8> = (0..LEN).map(|at| (at as u64 * 7 + index) as u8).collect();
        let offset = index * LEN as u64;
        let part = Part { role: Role::Images, file: 3, offset, len: LEN as u64, crc: crc64(&bytes) };
        let (store, key) = (StoreId([1; 16]), DataKey { term: 1, random: 1, index });
        let object = encode_data(store, key, Nonce([1; 16]), &bytes).unwrap();
        (part, Payload::decode(object, &DataRef { key, part }, store).unwrap())
    }

    fn files(root: &std::path::Path) -> StoreFiles {
        let files = StoreFiles::new(root);
        files.make_folders().unwrap();
        files
    }

    #[test]
    fn written_parts_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let mut writers = PartWriters::new(&files, Durability::Proven);
        let parts: Vec<Part> = (0..50).map(|index| part(index).0).collect();
        (0..50).for_each(|index| writers.write(parts[index as usize], part(index).1).unwrap());
        let mut proven = writers.finish().unwrap();
        proven.sort_unstable();
        assert_eq!(proven, parts);
        parts.iter().for_each(|part| files.check_part(part).unwrap());
    }

    /// A restore fails if a part on the disk differs from the received part, as after a faulty write.
    #[test]
    fn wrong_bytes_on_disk_fail_the_restore() {
        let folder = tempfile::tempdir().unwrap();
        let mut writers = PartWriters::new(&files(folder.path()), Durability::Proven);
        for index in 0..5 {
            let (mut part, bytes) = part(index);
            part.crc ^= u64::from(index == 2);
            writers.write(part, bytes).unwrap();
        }
        let error = writers.finish().unwrap_err();
        assert!(error.to_string().contains("has changed at offset 200000"), "{error}");
    }

    /// A failed thread stops the other threads, and wakes a caller that waits for a free thread.
    #[test]
    fn failed_write_ends_the_restore() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        std::fs::remove_dir(folder.path().join("pages")).unwrap();
        let mut writers = PartWriters::new(&files, Durability::Proven);
        let failed = (0..50).find_map(|index| {
            let (part, bytes) = part(index);
            writers.write(part, bytes).err()
        });
        let error = failed.unwrap_or_else(|| writers.finish().unwrap_err());
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
    }
}
