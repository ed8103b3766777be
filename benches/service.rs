//! Durable requests of an asynchronous service, with three ways to wait for the disk.
//!
//! ```sh
//! cargo bench --bench service -- DIRECTORY
//! ```
//!
//! 64 tasks on two worker threads repeatedly write 100 bytes, each to its own page, and each waits until its
//! write is durable. The ways take turns; the table shows the medians of five rounds.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark shows what it measured")]

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use remanent::{Ack, PageId, Place, Store, Ticket};

const TASKS: usize = 64;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(500);

/// How a task waits until a batch is durable.
#[derive(Clone, Copy)]
enum Way {
    /// On the runtime's own thread, which serves no other task meanwhile.
    Inline,
    /// On a thread that may block, one per waiting request.
    SpawnBlocking,
    /// As a future; no thread waits.
    Future,
}

const WAYS: [(&str, Way); 3] = [
    ("Ticket::wait inline", Way::Inline),
    ("Ticket::wait in spawn_blocking", Way::SpawnBlocking),
    ("Ticket::acknowledged as a future", Way::Future),
];

fn submit(store: &Store, page: PageId) -> remanent::Result<Ticket> {
    let mut batch = store.batch();
    batch.write(page, 0, &[7; 100]);
    store.submit(batch)
}

async fn request(store: &Arc<Store>, page: PageId, way: Way) -> Result<(), Box<dyn Error + Send + Sync>> {
    match way {
        Way::Inline => submit(store, page)?.wait(Ack::Durable)?,
        Way::SpawnBlocking => {
            let store = store.clone();
            tokio::task::spawn_blocking(move || submit(&store, page)?.wait(Ack::Durable)).await??;
        }
        Way::Future => submit(store, page)?.acknowledged(Ack::Durable).await?,
    }
    Ok(())
}

/// Returns the number of requests that all tasks together completed in a round.
async fn round(store: &Arc<Store>, pages: &[PageId], way: Way) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let (answered, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let tasks: Vec<_> = pages
        .iter()
        .map(|page| {
            let (store, page, answered, is_over) = (store.clone(), *page, answered.clone(), is_over.clone());
            tokio::spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    request(&store, page, way).await?;
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok::<(), Box<dyn Error + Send + Sync>>(())
            })
        })
        .collect();
    // A separate thread ends the round, because inline waits may block every thread of the runtime, including
    // its timer.
    let timer = std::thread::spawn(move || {
        #[allow(clippy::disallowed_methods, reason = "a round lasts a time, and no event ends it")]
        std::thread::sleep(ROUND);
        is_over.store(true, Ordering::Relaxed);
    });
    for task in tasks {
        task.await??;
    }
    timer.join().expect("the timer only sleeps");
    Ok(answered.load(Ordering::Relaxed))
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    // `cargo bench` adds `--bench`.
    let Some(directory) = std::env::args_os().skip(1).find(|argument| argument != "--bench") else {
        eprintln!("service: which directory? cargo bench --bench service -- DIRECTORY");
        return Ok(());
    };
    let directory = tempfile::tempdir_in(PathBuf::from(directory))?;
    let store = Arc::new(Store::open(directory.path())?);
    let mut batch = store.batch();
    (0..TASKS).for_each(|_| _ = batch.create(4096, Place::Host));
    let pages = store.commit(batch)?.pages;

    let mut figures: Vec<Vec<(f64, f64)>> = vec![Vec::new(); WAYS.len()];
    for _ in 0..ROUNDS {
        for (figures, (_, way)) in figures.iter_mut().zip(WAYS) {
            let (began, syncs) = (Instant::now(), store.stats().log.syncs);
            let answered = round(&store, &pages, way).await?;
            let seconds = began.elapsed().as_secs_f64();
            figures.push((answered as f64 / seconds, (store.stats().log.syncs - syncs) as f64 / seconds));
        }
    }
    println!("{:<36}{:>12}{:>12}", "", "requests/s", "syncs/s");
    for (figures, (name, _)) in figures.iter_mut().zip(WAYS) {
        figures.sort_by(|one, other| one.0.total_cmp(&other.0));
        let (requests, syncs) = figures[figures.len() / 2];
        println!("{name:<36}{requests:>12.0}{syncs:>12.0}");
    }
    let store = Arc::into_inner(store).expect("every task has ended");
    tokio::task::spawn_blocking(move || store.close()).await??;
    Ok(())
}
