//! A workload of a store on one GPU or several, and the state that must exist after it.

use std::path::Path;
use std::sync::Arc;

use remanent::batch::{Shadow, Width};
use remanent::device::cuda::CudaDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{CallerMemory, Device, RawStream};
use remanent::device::{UnifiedHint, UnifiedSide};
use remanent::disk::dir::DirDisk;
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::{Ack, Lease, Lsn, Options, PageId, PageInfo, Place, Result, Store, Value};

use crate::driver::CallerStream;

const PLACES: [Place; 3] = [Place::Device(0), Place::Pinned, Place::Unified];
/// Length of each page in bytes. More than one warp writes the page, and the length is not a multiple of any
/// block size.
const LEN: u64 = 3001;
/// Length in bytes of an additional page, which is downloaded in three pieces.
const LONG_LEN: u64 = (2 << 20) + 5000;
/// Number of changed bytes of that page, which is more than a short bitmap covers.
const CHANGED_LEN: usize = 540_000;
/// Every byte at a multiple of this number is set to the number of the step. All other bytes are 0.
const CHANGED_EVERY: usize = 1000;

fn device(gpus: &[u32]) -> Result<Arc<dyn Device>> {
    let open = |gpu: &u32| CudaDevice::open(*gpu).map(|gpu| Arc::new(gpu) as Arc<dyn Device>);
    let mut parts = gpus.iter().map(open).collect::<Result<Vec<_>>>()?;
    Ok(if parts.len() == 1 { parts.remove(0) } else { Arc::new(MultiDevice::new(parts)) })
}

pub struct Work {
    directory: tempfile::TempDir,
    /// A caller's stream on the first GPU, for store operations that accept a stream.
    stream: Option<CallerStream>,
    /// The number of GPUs that have pages.
    slots: u32,
    pages: Vec<PageId>,
    long: Option<PageId>,
    /// The newest acknowledged step. The store may also be at the next step, which may have been logged.
    acknowledged: i64,
    tried: i64,
}

/// The observable state of a store.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    lsn: Lsn,
    step: Value,
    pages: Vec<(PageInfo, Vec<u8>)>,
}

impl Work {
    pub fn new() -> Self {
        // Use a memory file system if possible, because this test is not about the disk.
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let directory = tempfile::tempdir_in(root).expect("a folder for a store");
        Self { directory, stream: None, slots: 1, pages: Vec::new(), long: None, acknowledged: 0, tried: 0 }
    }

    /// Creates a workload that also has a long page, kernels and a caller's stream.
    pub fn with_kernels(stream: CallerStream) -> Self {
        Self { stream: Some(stream), ..Self::new() }
    }

    /// Returns the caller's stream. Call this method after the store is closed.
    pub fn into_stream(self) -> Option<CallerStream> {
        self.stream
    }

    pub fn open(&self, device: Arc<dyn Device>) -> Result<Store> {
        let quiet = Options::new().snapshots(SnapshotSchedule::never());
        let options = quiet.log(LogOptions::new().segment_len(64 << 10));
        Store::open_on(Arc::new(DirDisk::new(self.directory.path())), device, options)
    }

    /// Runs the workload on these GPUs, one per slot. `arm` is called before the first call that may fail.
    pub fn live(&mut self, gpus: &[u32], arm: impl FnOnce()) -> Result<()> {
        self.slots = gpus.len() as u32;
        match self.stream.as_ref().map(CallerStream::raw) {
            None => self.live_plainly(gpus, arm),
            Some(stream) => self.live_with_kernels(gpus, stream, arm),
        }
    }

    fn live_plainly(&mut self, gpus: &[u32], arm: impl FnOnce()) -> Result<()> {
        arm();
        let store = self.open(device(gpus)?)?;
        self.begin(&store)?;
        self.step(&store)?;
        store.snapshot()?;
        self.step(&store)?;
        self.check(&store)?;
        store.trim()?;
        store.close()?;
        // Recovery loads images and replays the log after them.
        let store = self.open(device(gpus)?)?;
        self.check(&store)?;
        store.close()
    }

    /// Runs the additional steps of the workload that need kernels.
    fn live_with_kernels(&mut self, gpus: &[u32], stream: RawStream, arm: impl FnOnce()) -> Result<()> {
        let store = self.open(device(gpus)?)?;
        self.begin(&store)?;
        arm();
        self.step_by_kernels(&store, stream)?;
        self.check(&store)?;
        assert_eq!(store.audit()?.changed, []);
        store.snapshot()?;
        store.close()
    }

    /// Returns all places that a page can be in.
    fn places(&self) -> Vec<Place> {
        PLACES.into_iter().chain((1..self.slots).map(Place::Device)).collect()
    }

    /// Creates the pages: one in each place, and additional pages for the kernels.
    pub fn begin(&mut self, store: &Store) -> Result<()> {
        let mut batch = store.batch();
        for place in self.places() {
            batch.create(LEN, place);
        }
        if self.stream.is_some() {
            // A page for captures, and the long page.
            batch.create(LEN, PLACES[0]);
            batch.create(LONG_LEN, PLACES[0]);
        }
        batch.set_root("step", 0_i64);
        let mut pages = store.commit(batch)?.pages;
        self.long = self.stream.as_ref().and_then(|_| pages.pop());
        self.pages = pages;
        Ok(())
    }

    /// Commits a batch that changes every byte of every page by fill, write and scatter, and moves each page
    /// to the next place.
    pub fn step(&mut self, store: &Store) -> Result<()> {
        self.tried += 1;
        let byte = self.tried as u8;
        let mut batch = store.batch();
        let places = self.places();
        for (number, page) in self.pages.iter().enumerate() {
            batch.fill(*page, 0, LEN, &[byte ^ 0xFF]);
            batch.write(*page, 0, &vec![byte; LEN as usize - 2]);
            batch.move_to(*page, places[(number + self.tried as usize) % places.len()]);
            batch.scatter(*page, Width::W1, &[LEN as u32 - 1, LEN as u32 - 2], &[byte; 2]);
        }
        batch.set_root("step", self.tried);
        store.commit(batch)?;
        self.acknowledged = self.tried;
        for page in &self.pages {
            if store.page(*page)?.place == Place::Unified {
                store.hint_unified(*page, UnifiedHint::ReadMostly(true))?;
                store.hint_unified(*page, UnifiedHint::Fetch(UnifiedSide::Gpu))?;
            }
        }
        Ok(())
    }

    /// Commits the next step with bytes that exist only on the device. They are written, scattered and
    /// captured while the changed pages are leased on `stream`.
    fn step_by_kernels(&mut self, store: &Store, stream: RawStream) -> Result<()> {
        self.tried += 1;
        let byte = self.tried as u8;
        let long = self.long.expect("there is one where there is a stream");
        let memory = store.device_bytes(5 * LEN, PLACES[0])?;
        let indices: Vec<u8> = (0..LEN as u32).rev().flat_map(u32::to_le_bytes).collect();
        memory.write(0, &indices)?;
        memory.write(4 * LEN, &vec![byte; LEN as usize])?;
        let (indices, values) = (memory.part(0..4 * LEN)?, memory.part(4 * LEN..5 * LEN)?);
        // SAFETY: the memory belongs to the store, and `memory` keeps it allocated.
        let adopted = unsafe {
            let address = values.address().expect("a GPU's memory has one");
            store.caller_bytes(&CallerMemory::from_cuda(address, LEN, memory.clone()))?
        };
        let leases = [store.lease(self.pages[0])?, store.lease(long)?];
        for lease in &leases {
            lease.on(stream)?;
        }
        let long_copy = store.working_copy(long, Width::W1, Shadow::Page)?;
        let copy = store.working_copy(self.pages[0], Width::W1, Shadow::Kept(PLACES[0]))?;
        let (last, others) = self.pages.split_last().expect("one for each place, and one more");
        let digested = store.working_copy(*last, Width::W1, Shadow::Digest)?;
        let mut changed = vec![0; CHANGED_LEN];
        changed.iter_mut().step_by(CHANGED_EVERY).for_each(|changed| *changed = byte);
        long_copy.bytes().write(0, &changed)?;
        copy.bytes().write(0, &vec![byte; LEN as usize])?;
        digested.bytes().write(0, &vec![byte; LEN as usize])?;
        // A change of a leased page is rejected only on the thread that holds the lease.
        let mut batch = store.batch();
        let range = 0..CHANGED_LEN as u64;
        batch.capture_ranges(&long_copy, &[range]).capture(&copy).capture(&digested);
        batch.write_device(self.pages[1], 0, &adopted);
        batch.scatter_device(self.pages[2], Width::W1, &indices, &values.on(stream));
        for page in &others[3..] {
            batch.write_device(*page, 0, &values);
        }
        batch.set_root("step", self.tried);
        let submitted = std::thread::scope(|scope| scope.spawn(|| store.submit(batch)).join());
        let ticket = submitted.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        ticket.wait_on(stream)?;
        ticket.wait(Ack::Logged)?;
        self.acknowledged = self.tried;
        let mut copied = vec![0; CHANGED_LEN];
        long_copy.bytes().read(0, &mut copied)?;
        assert!(copied == changed, "a working copy without a write is another one");
        leases.into_iter().try_for_each(Lease::end)
    }

    /// Reads the content of all pages.
    pub fn state(&self, store: &Store) -> Result<State> {
        let with_bytes = |info: PageInfo| {
            let mut bytes = vec![0; info.len as usize];
            store.read(info.page, 0, &mut bytes)?;
            Ok((info, bytes))
        };
        Ok(State {
            lsn: store.lsn(),
            step: store.root()?["step"].clone(),
            pages: store.pages()?.map(with_bytes).collect::<Result<_>>()?,
        })
    }

    /// Asserts that all pages of the store are at the same step, and that this step is not older than the
    /// newest acknowledged step.
    pub fn check(&self, store: &Store) -> Result<()> {
        let root = store.root()?;
        let Some(Value::I64(step)) = root.get("step") else {
            assert!(self.pages.is_empty(), "the batch that was acknowledged first is gone");
            return Ok(());
        };
        assert!((self.acknowledged..=self.tried).contains(step), "step {step} and not {}", self.acknowledged);
        for page in &self.pages {
            let mut bytes = [0; LEN as usize];
            store.read(*page, 0, &mut bytes)?;
            assert!(bytes.iter().all(|byte| *byte == *step as u8), "{page} is not at step {step}");
        }
        if let Some(long) = self.long {
            let mut bytes = vec![0; LONG_LEN as usize];
            store.read(long, 0, &mut bytes)?;
            let is_changed = |at: usize| at < CHANGED_LEN && at.is_multiple_of(CHANGED_EVERY);
            let expected = |at| if is_changed(at) { *step as u8 } else { 0 };
            let differs = (0..bytes.len()).find(|at| bytes[*at] != expected(*at));
            assert_eq!(differs, None, "the long page is not at step {step}");
        }
        Ok(())
    }
}
