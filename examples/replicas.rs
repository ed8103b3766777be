//! Replicas on two GPUs. They are opened together, averaged, and compared.
//!
//! ```sh
//! cargo run --example replicas --features nccl
//! ```
//!
//! Each rank is a thread here. In a training run it is a process, which receives the id from rank 0. Without two GPUs
//! and NCCL the example prints a message and succeeds.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

#[cfg(feature = "nccl")]
fn main() -> remanent::Result<()> {
    ranks::run()
}

#[cfg(not(feature = "nccl"))]
fn main() {
    eprintln!("SKIPPED: this build is without the feature `nccl`");
}

#[cfg(feature = "nccl")]
mod ranks {
    use std::path::Path;

    use remanent::device::cuda::CudaDevice;
    use remanent::nccl::{Communicator, Element, GatherMode, Nccl, Rank, Reduction};
    use remanent::options::MemoryOptions;
    use remanent::{DeviceChoice, Options, Place, Result};

    const RANKS: u32 = 2;
    const WEIGHTS: u64 = 1 << 20;

    pub fn run() -> Result<()> {
        let nccl = match (Nccl::load(), CudaDevice::count()) {
            (Ok(nccl), Ok(count)) if count >= RANKS => nccl,
            (nccl, count) => {
                eprintln!("SKIPPED: two GPUs and NCCL are needed: {nccl:?}, GPUs: {count:?}");
                return Ok(());
            }
        };
        let id = nccl.unique_id()?;
        let communicators = nccl.join_all(&id, (0..RANKS).map(|rank| Rank::new(rank, RANKS).gpu(rank)))?;
        let directory = tempfile::tempdir().expect("a temporary directory");
        std::thread::scope(|scope| {
            let ranks: Vec<_> = communicators
                .into_iter()
                .map(|communicator| scope.spawn(|| train(communicator, directory.path())))
                .collect();
            ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank panicked"))
        })
    }

    fn train(communicator: Communicator, directory: &Path) -> Result<()> {
        let rank = communicator.rank();
        let path = directory.join(format!("replica-{rank}"));
        let options = Options::new().device(DeviceChoice::Cuda(communicator.gpu()));

        // Each rank starts with its own gradient, and logs the average of all ranks.
        let store = options.clone().open(&path)?;
        let mut batch = store.batch();
        let weights = batch.create(4 * WEIGHTS, Place::Device(0)).key("weights").page();
        let gradient = store.device_bytes(4 * WEIGHTS, Place::Device(0))?;
        let own: Vec<u8> = (0..WEIGHTS).flat_map(|_| (rank as f32 + 1.0).to_le_bytes()).collect();
        gradient.write(0, &own)?;
        communicator.all_reduce(&gradient, &gradient, Element::F32, Reduction::Average)?;
        batch.write_device(weights, 0, &gradient); // waits for the operation
        store.commit(batch)?;
        let agreement = store.agrees(&communicator)?;
        println!("rank {rank}: {} pages, equal on all ranks: {}", agreement.pages, agreement.is_equal());
        store.snapshot()?;
        store.close()?;

        // One rank reads each page from disk, and the other rank receives the page.
        let memory = MemoryOptions::new().gather(&communicator, GatherMode::Always);
        let store = options.memory(memory).open(&path)?;
        println!("rank {rank}: {:?}", store.recovered().gather);
        store.close()
    }
}
