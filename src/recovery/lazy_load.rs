//! The page loader, which loads the pages that an open did not load while the store is in use.
//!
//! A few threads load pages in file order. Pages that callers wait for are loaded first. The image of a page is read
//! and verified, then the applier receives the page's memory, then the waiting callers are woken. In any other order, a
//! caller could read bytes that no checksum has covered.
//!
//! The progress is not recorded on disk, so a crash loses nothing. An unloaded page equals its image in the newest
//! snapshot, no batch changes the page, and no file is removed while any page is unloaded. A damaged image poisons the
//! store before any file is removed, so that an open that loads all pages can still use older data.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::PageId;

use super::image_loader::{ImageLoader, threads};
use crate::applier::{UnloadedPage, UnloadedSet};
use crate::base::allocation::{collected, insert};
use crate::base::parallel;
use crate::base::poison::PoisonOnPanic;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::device::{CommandList, Lane, SHORT_COPY_LEN_MAX, Span};
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, RUN_BYTES, SummedBy};

/// The maximum number of bytes of adjacent pages in the file that are loaded together with a page that a caller waits
/// for. Loading so few bytes does not noticeably delay the caller.
const FOLLOWING_BYTES_MAX: u64 = 256 << 10;
/// The maximum number of threads that load one long page. Several long pages may be loaded at the same time.
const LONG_THREADS_MAX: usize = 4;
/// The lanes for loading. No batch uses a page's memory before the page is loaded, so the upload order does not matter.
/// On these lanes, uploads may queue behind a snapshot's long copies without delaying any batch.
const LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// The delay after a shortage of memory or another resource before the next attempt to load a page.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

/// The delay before pages that cannot be fetched from an archive are loaded again.
const FETCH_PAUSE: Duration = Duration::from_millis(250);

/// A handle to the threads that load pages.
pub(crate) struct PageLoader {
    loads: Loads,
    /// The main loading thread, which starts the other loading threads, or `None` if no page was unloaded.
    thread: Option<JoinHandle<()>>,
}

impl PageLoader {
    /// Starts the loading threads if any page is unloaded.
    pub fn start(engine: Arc<Engine>) -> Result<Self> {
        let loads = Loads { engine, begun: Arc::default() };
        let thread = if loads.unloaded().is_any() {
            let poison = loads.engine.poison.clone();
            let poisons = PoisonOnPanic { poison, thread: "the thread that loads pages" };
            let life = LoaderLoop(loads.clone());
            let thread = threads::start("remanent-load", move || {
                let _poisons = poisons;
                life.live();
            });
            let thread = thread.map_err(|error| Error::thread("the thread that loads pages", error));
            // Without the thread no page would ever be loaded, so the open fails, and the memory is freed.
            Some(thread.inspect_err(|_| loads.give_back())?)
        } else {
            None
        };
        Ok(Self { loads, thread })
    }
}

impl Drop for PageLoader {
    /// Stops the threads after they have loaded their current pages. All other unloaded pages remain on disk.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.loads.unloaded().end(Error::Closed);
        if thread.join().is_err() {
            tracing::error!("the thread that loads pages panicked");
        }
        // The memory is freed only now, because a running thread could still write to it.
        self.loads.give_back();
    }
}

/// Runs the main loading thread. When the thread ends, even by a panic, waiting callers get an error.
struct LoaderLoop(Loads);

impl LoaderLoop {
    /// Loads pages on several threads. Returns when no page is left or the store closes.
    fn live(&self) {
        let Self(loads) = self;
        let threads = threads();
        let load_all = |(): &mut (), _| {
            loads.load_all();
            Ok::<(), Infallible>(())
        };
        let Ok(_) = parallel::map_indexed(threads, threads, || (), load_all);
    }
}

impl Drop for LoaderLoop {
    fn drop(&mut self) {
        let Self(loads) = self;
        loads.unloaded().end(loads.engine.poison.check().err().unwrap_or(Error::Closed));
    }
}

/// Loads unloaded pages into the running engine. Each loading thread has a clone.
#[derive(Clone)]
struct Loads {
    engine: Arc<Engine>,
    /// The number of loads begun so far, from which the first lane of the next load is computed. Most loads have a
    /// single list.
    begun: Arc<AtomicUsize>,
}

impl Loads {
    /// Returns the set of unloaded pages. The applier has no memory for these pages. Code that accesses a page without
    /// waiting for it therefore panics instead of reading wrong bytes.
    fn unloaded(&self) -> &UnloadedSet {
        self.engine.applier.unloaded()
    }

    fn load_all(&self) {
        // Pages are left unloaded only if their images were verified on the medium (I7), so the images may be read
        // through the page cache.
        let proven = DiskSource::proven(self.engine.disk.clone());
        while let Some(pages) = self.unloaded().take(FOLLOWING_BYTES_MAX, RUN_BYTES) {
            self.load(&proven, pages);
        }
    }

    /// Loads some pages. If an image is damaged, reads each page again separately, with O_DIRECT. That identifies the
    /// damaged image, and succeeds if only the page cache was damaged.
    fn load(&self, proven: &DiskSource, pages: Vec<UnloadedPage>) {
        match self.read_patiently(proven, &pages) {
            // A page counts as loaded only when all of it is verified.
            Ok(true) => self.install(pages),
            // The store is closing. The page is intact on disk.
            Ok(false) => self.unloaded().give_up(pages),
            Err(error) if error.is_passing_fetch() => self.put_back(pages, &error),
            Err(error) if matches!(error, Error::Damaged(_)) || error.is_of_fetch() => {
                // A separate read with O_DIRECT reports the damaged page, and succeeds if only the page cache was
                // damaged.
                let medium = DiskSource::bypassing_cache(self.engine.disk.clone());
                for unloaded in pages {
                    match self.read_patiently(&medium, std::slice::from_ref(&unloaded)) {
                        Ok(true) => self.install(vec![unloaded]),
                        Ok(false) => self.unloaded().give_up(vec![unloaded]),
                        Err(error) if error.is_passing_fetch() => self.put_back(vec![unloaded], &error),
                        Err(error) => self.fail(unloaded, error),
                    }
                }
            }
            Err(error) => pages.into_iter().for_each(|unloaded| self.fail(unloaded, error.clone())),
        }
    }

    /// Calls [`read`](Self::read) repeatedly while the system is short of a resource. Callers keep waiting for the
    /// page, because an error would make a transient shortage look like a lost page. Returns `false` if the store
    /// closes before the pages are read.
    fn read_patiently(&self, source: &DiskSource, pages: &[UnloadedPage]) -> Result<bool> {
        loop {
            match self.read(source, pages) {
                Err(error) if error.is_shortage() => {
                    tracing::warn!(%error, "pages are loaded when the shortage ends");
                    // Closing the store ends the pause immediately.
                    if self.unloaded().is_over_within(SHORTAGE_PAUSE) {
                        return Ok(false);
                    }
                }
                read => return read.map(|()| true),
            }
        }
    }

    /// Puts pages back that cannot be fetched from an archive at present, and waits before the next pages are loaded.
    fn put_back(&self, pages: Vec<UnloadedPage>, error: &Error) {
        tracing::warn!(%error, "pages cannot be fetched from the archive now; the store tries again");
        self.unloaded().put_back(pages, &error.clone().in_store(&self.engine.disk.label()));
        self.unloaded().is_over_within(FETCH_PAUSE);
    }

    /// Reports a page as failed, and poisons the store. If the page's image is not the cause, reports all other
    /// unloaded pages as failed, too.
    ///
    /// The store is poisoned first, because a later snapshot could remove files that can replace the image. A page that
    /// the archive has lost has no such files.
    fn fail(&self, unloaded: UnloadedPage, error: Error) {
        let error = error.in_store(&self.engine.disk.label());
        tracing::error!(%error, page = %unloaded.page, "a page cannot be loaded");
        if error.is_of_fetch() {
            self.unloaded().fail(unloaded, error);
            return;
        }
        // The store is poisoned first, because after that no file is removed from disk.
        let poisoned = self.engine.poison.set(error.clone());
        if !matches!(error, Error::Damaged(_)) {
            self.unloaded().end(poisoned);
        }
        self.unloaded().fail(unloaded, error);
    }

    /// Reads and verifies the images of `pages`, directly into the memory of the pages.
    fn read(&self, source: &DiskSource, pages: &[UnloadedPage]) -> Result<()> {
        let wanted = |unloaded: &UnloadedPage| ImageRequest {
            page: unloaded.page,
            len: unloaded.memory.byte_len(),
            image: unloaded.image,
        };
        let mut images = collected(pages.iter().map(wanted))?;
        // No batch and no reader has access to this memory yet, so it can be left partly filled.
        let mut targets: HashMap<PageId, Span> = HashMap::new();
        for unloaded in pages {
            insert(&mut targets, unloaded.page, unloaded.memory.span())?;
        }
        let target = |page: PageId| Ok(targets[&page]);
        let is_short = pages.iter().all(|unloaded| unloaded.memory.byte_len() <= SHORT_COPY_LEN_MAX);
        // Any lane may be used for any page, so a counter distributes the loads.
        let mut lanes = LANES;
        lanes.rotate_left(self.begun.fetch_add(1, Ordering::Relaxed) % LANES.len());
        let loader = ImageLoader {
            device: &self.engine.device,
            staging: &self.engine.staging,
            source,
            lanes: &lanes,
            target: &target,
            // Callers wait for short pages. If the host computes the checksum, no second read is needed to distinguish
            // a damaged image from a device error.
            summed_by: if is_short { SummedBy::Host } else { SummedBy::Device },
        };
        let loaded = loader.load(std::iter::once(&mut *images), parallel::threads(LONG_THREADS_MAX));
        loaded.map_err(|error| source.cause_of(error))
    }

    /// Passes loaded pages to the applier, and wakes the callers that wait for the pages.
    ///
    /// The applier adds the memory of the pages between two batches, so that no batch finds only some of it. The
    /// callers are woken after that.
    fn install(&self, pages: Vec<UnloadedPage>) {
        let loaded: Vec<(PageId, u64)> =
            pages.iter().map(|unloaded| (unloaded.page, unloaded.memory.byte_len())).collect();
        let installed = self.engine.applier.turn(move |turn| {
            pages
                .iter()
                .for_each(|unloaded| turn.versions.moved(unloaded.page, unloaded.memory.span().memory));
            // Memory and versions are updated between the same two batches.
            turn.applied.memory.extend(pages.into_iter().map(|unloaded| (unloaded.page, unloaded.memory)));
            Ok(())
        });
        match installed {
            Ok(()) => self.unloaded().loaded(loaded),
            Err(error) => self.unloaded().end(error),
        }
    }

    /// Frees the memory of pages that were never loaded.
    fn give_back(&self) {
        let mut memory = self.unloaded().take_memory().peekable();
        if memory.peek().is_none() {
            return;
        }
        // A lane runs its lists in order, so an empty list completes when no list uses this memory any more. If the
        // device fails, the memory stays counted in the budget, and a warning is logged.
        let device = &*self.engine.device;
        let last = |lane: &Lane| {
            device.submit(*lane, CommandList::default()).and_then(|last| device.finish(last)).map(drop)
        };
        if let Err(error) = LANES.iter().try_for_each(last) {
            tracing::warn!(%error, "memory of pages that were not loaded stays allocated");
            return;
        }
        self.engine.arena.discard_all(memory);
    }
}
