//! A disk that runs a callback between two reads, at a point that the test selects, so that a test can try
//! every point in turn. The disk can also simulate a damaged page cache over an intact medium, and records
//! which threads make direct reads.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use remanent::disk::{Disk, DiskFile, DiskLock, Hold, Window};
use remanent::error::{FileName, Folder};
use remanent::options::{ImageIo, LogIo};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Result, SnapshotId};

type Strike = Box<dyn FnOnce() + Send>;

/// A disk that reads the files of `inner`, and runs the callback `strike` before the read with index `at`,
/// counted from 0.
pub struct InterruptedDisk {
    inner: SimDisk,
    moment: Arc<Moment>,
}

#[derive(Default)]
struct Moment {
    reads: AtomicUsize,
    bytes: AtomicU64,
    at: usize,
    thread: Option<&'static str>,
    strike: Mutex<Option<Strike>>,
    cache_is_damaged: bool,
    bypassing_cache: Mutex<HashSet<ThreadId>>,
}

impl InterruptedDisk {
    pub fn new(inner: &SimDisk, at: usize, strike: impl FnOnce() + Send + 'static) -> Self {
        let moment = Moment { at, strike: Mutex::new(Some(Box::new(strike))), ..Moment::default() };
        Self { inner: inner.clone(), moment: Arc::new(moment) }
    }

    /// Returns a disk without a callback.
    pub fn never(inner: &SimDisk) -> Self {
        Self::new(inner, usize::MAX, || {})
    }

    /// Returns a disk that runs the callback before the first read by the thread with this name.
    pub fn of_thread(inner: &SimDisk, name: &'static str, strike: impl FnOnce() + Send + 'static) -> Self {
        let strike = Mutex::new(Some(Box::new(strike) as Strike));
        let moment = Moment { at: usize::MAX, thread: Some(name), strike, ..Moment::default() };
        Self { inner: inner.clone(), moment: Arc::new(moment) }
    }

    /// Returns a disk without a callback whose page cache returns wrong bytes for every read.
    pub fn with_damaged_cache(inner: &SimDisk) -> Self {
        let moment = Moment { at: usize::MAX, cache_is_damaged: true, ..Moment::default() };
        Self { inner: inner.clone(), moment: Arc::new(moment) }
    }

    /// Returns the threads that have made direct reads since the last call.
    pub fn bypassing_cache(&self) -> HashSet<ThreadId> {
        std::mem::take(&mut self.moment.bypassing_cache.lock().unwrap())
    }

    /// Returns the number of bytes read from files since the last call.
    pub fn bytes_read(&self) -> u64 {
        self.moment.bytes.swap(0, Ordering::SeqCst)
    }

    /// Returns the number of reads so far. If it is at most `at`, the callback has not run.
    pub fn reads(&self) -> usize {
        self.moment.reads.load(Ordering::SeqCst)
    }
}

impl Moment {
    fn pass(&self) {
        let is_now = self.reads.fetch_add(1, Ordering::SeqCst) == self.at;
        let is_its = self.thread.is_some() && thread::current().name() == self.thread;
        if is_now || is_its {
            let strike = self.strike.lock().unwrap().take();
            assert!(strike.is_some() || is_its, "there is one read of this number");
            strike.into_iter().for_each(|strike| strike());
        }
    }
}

impl Disk for InterruptedDisk {
    fn check_writer(&self) -> remanent::Result<()> {
        self.inner.check_writer()
    }

    fn label(&self) -> String {
        self.inner.label()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        self.inner.lock()
    }

    fn is_locked(&self) -> Result<bool> {
        self.inner.is_locked()
    }

    fn is_held(&self, id: SnapshotId) -> Result<bool> {
        self.inner.is_held(id)
    }

    fn hold(&self, id: SnapshotId) -> Result<Hold> {
        self.moment.pass();
        self.inner.hold(id)
    }

    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        self.inner.try_retire(id)
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        self.moment.pass();
        Disk::list(&self.inner, folder)
    }

    fn make_folder(&self, folder: Folder) -> Result<()> {
        self.inner.make_folder(folder)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        let inner = self.inner.create(file)?;
        Ok(Arc::new(InterruptedFile { inner, moment: self.moment.clone() }))
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        self.moment.pass();
        let inner = self.inner.open(file, write)?;
        Ok(Arc::new(InterruptedFile { inner, moment: self.moment.clone() }))
    }

    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        self.inner.rename(source, target)
    }

    fn remove(&self, file: FileName) -> Result<()> {
        self.inner.remove(file)
    }

    fn refuses(&self, io: LogIo) -> Result<Option<String>> {
        self.inner.refuses(io)
    }

    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>> {
        self.inner.refuses_images(io)
    }
}

struct InterruptedFile {
    inner: Arc<dyn DiskFile>,
    moment: Arc<Moment>,
}

impl DiskFile for InterruptedFile {
    fn has_one_name(&self) -> Result<bool> {
        self.inner.has_one_name()
    }

    fn len(&self) -> Result<u64> {
        self.moment.pass();
        self.inner.len()
    }

    fn write_zeros(&self, offset: u64, end: u64, io: LogIo) -> Result<()> {
        self.inner.write_zeros(offset, end, io)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write_at(offset, bytes)
    }

    fn reserve(&self, offset: u64, end: u64) -> Result<bool> {
        self.inner.reserve(offset, end)
    }

    fn write_direct(&self, offset: u64, blocks: &[u8]) -> Result<()> {
        self.inner.write_direct(offset, blocks)
    }

    fn cut(&self, len: u64) -> Result<()> {
        self.inner.cut(len)
    }

    fn mapped_part(&self, range: Range<u64>) -> Result<Box<dyn Window>> {
        self.inner.mapped_part(range)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.moment.pass();
        self.moment.bytes.fetch_add(out.len() as u64, Ordering::SeqCst);
        self.inner.read_at(offset, out)
    }

    fn read_bypassing_cache(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.moment.pass();
        self.moment.bytes.fetch_add(out.len() as u64, Ordering::SeqCst);
        self.moment.bypassing_cache.lock().unwrap().insert(thread::current().id());
        self.inner.read_bypassing_cache(offset, out)
    }

    fn read_proven(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.moment.pass();
        self.moment.bytes.fetch_add(out.len() as u64, Ordering::SeqCst);
        self.inner.read_proven(offset, out)?;
        if self.moment.cache_is_damaged {
            // Change all bytes, because a direct read starts at a block boundary before the requested bytes.
            out.iter_mut().for_each(|byte| *byte ^= 1);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    fn window(&self, io: LogIo) -> Result<Box<dyn Window>> {
        self.inner.window(io)
    }
}
