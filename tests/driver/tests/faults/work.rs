//! A store's life on a GPU, or on several, each step once, and what must be there afterwards.

use std::path::Path;
use std::sync::Arc;

use remanent::device::Device;
use remanent::device::cuda::CudaDevice;
use remanent::device::several::SeveralDevices;
use remanent::disk::dir::DirDisk;
use remanent::{Lsn, Options, PageId, PageInfo, Place, Result, Store, Value, Width};

const PLACES: [Place; 3] = [Place::Device(0), Place::Pinned, Place::Unified];
/// Length of each page: more than one warp writes, and no multiple of anything.
const LEN: u64 = 3001;

fn device(gpus: &[u32]) -> Result<Arc<dyn Device>> {
    let open = |gpu: &u32| CudaDevice::open(*gpu).map(|gpu| Arc::new(gpu) as Arc<dyn Device>);
    let mut parts = gpus.iter().map(open).collect::<Result<Vec<_>>>()?;
    Ok(if parts.len() == 1 { parts.remove(0) } else { Arc::new(SeveralDevices::new(parts)) })
}

pub struct Work {
    directory: tempfile::TempDir,
    /// How many GPUs there are for pages.
    slots: u32,
    pages: Vec<PageId>,
    /// The newest step that was acknowledged, and the newest that was tried.
    acknowledged: i64,
    tried: i64,
}

/// All that there is to know of a store's state.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    lsn: Lsn,
    step: Value,
    pages: Vec<(PageInfo, Vec<u8>)>,
}

impl Work {
    pub fn new() -> Self {
        // In memory where that can be: what a disk does is not the question.
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let directory = tempfile::tempdir_in(root).expect("a folder for a store");
        Self { directory, slots: 1, pages: Vec::new(), acknowledged: 0, tried: 0 }
    }

    pub fn open(&self, device: Arc<dyn Device>) -> Result<Store> {
        let quiet = Options::default().snapshot_interval(None).snapshot_log_bytes(None);
        let options = quiet.segment_len(64 << 10);
        Store::open_on(Arc::new(DirDisk::new(self.directory.path())), device, options)
    }

    /// Each GPU has a slot, in this order.
    pub fn live(&mut self, gpus: &[u32]) -> Result<()> {
        self.slots = gpus.len() as u32;
        let store = self.open(device(gpus)?)?;
        self.begin(&store)?;
        self.step(&store)?;
        store.snapshot()?;
        self.step(&store)?;
        self.check(&store)?;
        store.trim()?;
        store.close()?;
        // Recovery: images, and the log behind them.
        let store = self.open(device(gpus)?)?;
        self.check(&store)?;
        store.close()
    }

    /// Everywhere that a page can be.
    fn places(&self) -> Vec<Place> {
        PLACES.into_iter().chain((1..self.slots).map(Place::Device)).collect()
    }

    /// The pages, each a place.
    pub fn begin(&mut self, store: &Store) -> Result<()> {
        let mut batch = store.batch();
        for place in self.places() {
            batch.create(LEN, place);
        }
        batch.set_root("step", 0_i64);
        self.pages = store.commit(batch)?.pages;
        Ok(())
    }

    /// A batch that changes every byte of every page, by fill, write and scatter, and moves each to the next place
    /// on its way.
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
        Ok(())
    }

    /// What lies in the store now, read back page by page.
    pub fn state(&self, store: &Store) -> Result<State> {
        let with_bytes = |info: PageInfo| {
            let mut bytes = vec![0; info.len as usize];
            store.read(info.page, 0, &mut bytes)?;
            Ok((info, bytes))
        };
        Ok(State {
            lsn: store.lsn(),
            step: store.root()?["step"].clone(),
            pages: store.pages()?.into_iter().map(with_bytes).collect::<Result<_>>()?,
        })
    }

    /// The store is at one step in all its pages, no older than the newest that was acknowledged.
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
        Ok(())
    }
}
