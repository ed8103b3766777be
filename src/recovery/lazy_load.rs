//! The page loader: pages that an open left unloaded are brought into memory while the store is in use.
//!
//! A few threads take pages in the order of their files; pages that a caller waits for come first. Each
//! page is read from its image and proven, then the applier gets its memory, then the waiting callers go
//! on. In another order a caller could read bytes that no checksum was held against.
//!
//! Nothing on disk depends on how far this has come, so a crash loses nothing. An unloaded page is
//! exactly what the image of the newest snapshot says, no batch changes it, and nothing is removed from
//! disk while there is one. An image that does not hold poisons the store before anything is removed, so
//! that an open which loads everything still finds whatever could stand in for it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::PageId;

use super::image_loader::{ImageLoader, threads};
use crate::applier::{UnloadedPage, UnloadedSet};
use crate::base::allocation::{collected, insert};
use crate::base::parallel;
use crate::base::poison::PanicPoisons;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::device::{CommandList, Lane, SHORT_COPY_LEN_MAX, Span};
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, RUN_BYTES, SummedBy};

/// A caller that waits for a page has the pages after it in the file loaded, too, up to this number of
/// bytes: few enough that it need not wait for them.
const ASKED_BYTES: u64 = 256 << 10;
/// Threads for a long page: each of its loaders may be at one.
const LONG_THREADS_MAX: usize = 4;
/// No batch knows a page's memory before it is loaded, so its bytes need not go up in the order of
/// batches. On these lanes they may queue up with a snapshot's long copies, and hold up no batch.
const LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// The pause after a shortage, before the next try.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

/// The threads that load pages, as the store holds them.
pub(crate) struct PageLoader {
    loads: Loads,
    /// The thread that the others are helpers of; `None` if no page was unloaded.
    thread: Option<JoinHandle<()>>,
}

impl PageLoader {
    /// Starts the threads, if any page is unloaded.
    pub fn start(engine: Arc<Engine>) -> Result<Self> {
        let loads = Loads { engine, begun: Arc::default() };
        let thread = if loads.unloaded().is_any() {
            let poison = loads.engine.poison.clone();
            let poisons = PanicPoisons { poison, thread: "the thread that loads pages" };
            let life = LoaderLoop(loads.clone());
            let thread = threads::start("remanent-load", move || {
                let _poisons = poisons;
                life.live();
            });
            let thread = thread.map_err(|error| Error::thread("the thread that loads pages", error));
            // Without the thread no page would ever be loaded: the open fails, and its memory is given back.
            Some(thread.inspect_err(|_| loads.give_back())?)
        } else {
            None
        };
        Ok(Self { loads, thread })
    }
}

impl Drop for PageLoader {
    /// Ends the threads, when the pages that they have in hand are loaded. All other unloaded pages stay
    /// on disk.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.loads.unloaded().end(Error::Closed);
        if thread.join().is_err() {
            tracing::error!("the thread that loads pages panicked");
        }
        // Only now: a loader that still runs could write to the memory.
        self.loads.give_back();
    }
}

/// The life of the loading threads. However it ends, a panic included, no caller waits for a page after it.
struct LoaderLoop(Loads);

impl LoaderLoop {
    /// Loads on several threads, and returns when no page is left, or the store closes.
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

/// Loading pages into the engine that is running: what each of the threads does.
#[derive(Clone)]
struct Loads {
    engine: Arc<Engine>,
    /// Counts the loads, so that they begin on the lanes in turns: most have a single list.
    begun: Arc<AtomicUsize>,
}

impl Loads {
    /// The pages that are not loaded. The applier has no memory for them: code that forgets to wait for
    /// one meets a panic, and no wrong bytes.
    fn unloaded(&self) -> &UnloadedSet {
        self.engine.applier.unloaded()
    }

    /// Loads pages until none is left.
    fn load_all(&self) {
        // Only pages whose images were proven on the medium once are ever left unloaded (I7): the cache
        // may serve them.
        let proven = DiskSource::proven(self.engine.disk.clone());
        while let Some(pages) = self.unloaded().take(ASKED_BYTES, RUN_BYTES) {
            self.load(&proven, pages);
        }
    }

    /// Loads some pages. Where an image does not hold, each page is loaded alone and from the medium.
    /// That tells which image is damaged, and that it is not damaged in the cache alone.
    fn load(&self, proven: &DiskSource, pages: Vec<UnloadedPage>) {
        match self.read_patiently(proven, &pages) {
            // A page counts as loaded only when all of it is proven.
            Ok(true) => self.install(pages),
            // The store closes. The page stays where it is whole: on disk.
            Ok(false) => self.unloaded().give_up(pages),
            Err(Error::Damaged(_)) => {
                // Alone and past the cache: the damage has its page's name then, and is of the medium.
                let medium = DiskSource::past_cache(self.engine.disk.clone());
                for unloaded in pages {
                    match self.read_patiently(&medium, std::slice::from_ref(&unloaded)) {
                        Ok(true) => self.install(vec![unloaded]),
                        Ok(false) => self.unloaded().give_up(vec![unloaded]),
                        Err(error) => self.fail(unloaded, error),
                    }
                }
            }
            Err(error) => pages.into_iter().for_each(|unloaded| self.fail(unloaded, error.clone())),
        }
    }

    /// Reads as [`read`](Self::read) does, again and again while the system is short of something that
    /// this takes. Callers wait for the page meanwhile, and the store goes on when the shortage ends:
    /// failing them would make a passing shortage look like a lost page. `false` if the store closes
    /// before.
    fn read_patiently(&self, source: &DiskSource, pages: &[UnloadedPage]) -> Result<bool> {
        loop {
            match self.read(source, pages) {
                Err(error) if error.is_shortage() => {
                    tracing::warn!(%error, "pages are loaded when the shortage ends");
                    // The pause ends at once when the store closes.
                    if self.unloaded().is_over_within(SHORTAGE_PAUSE) {
                        return Ok(false);
                    }
                }
                read => return read.map(|()| true),
            }
        }
    }

    /// Fails a page that cannot be loaded. If the reason is not its image, no other page can be loaded
    /// either.
    ///
    /// The store is poisoned first: a snapshot taken after this could let go of what stands in for the image.
    fn fail(&self, unloaded: UnloadedPage, error: Error) {
        let error = error.in_store(&self.engine.disk.label());
        tracing::error!(%error, page = %unloaded.page, "a page cannot be loaded");
        // Poisoned first: nothing is removed from disk after this.
        let poisoned = self.engine.poison.set(error.clone());
        if !matches!(error, Error::Damaged(_)) {
            self.unloaded().end(poisoned);
        }
        self.unloaded().fail(unloaded, error);
    }

    /// Reads and proves the images of these pages, straight into their memory.
    fn read(&self, source: &DiskSource, pages: &[UnloadedPage]) -> Result<()> {
        let wanted = |unloaded: &UnloadedPage| ImageRequest {
            page: unloaded.page,
            len: unloaded.memory.byte_len(),
            image: unloaded.image,
        };
        let mut images = collected(pages.iter().map(wanted))?;
        // Bytes go straight to the pages' own memory. No batch and no reader knows it yet, so a failure
        // leaves nothing to undo.
        let mut targets: HashMap<PageId, Span> = HashMap::new();
        for unloaded in pages {
            insert(&mut targets, unloaded.page, unloaded.memory.span())?;
        }
        let target = |page: PageId| Ok(targets[&page]);
        let is_short = pages.iter().all(|unloaded| unloaded.memory.byte_len() <= SHORT_COPY_LEN_MAX);
        // Any order will do: a counter is enough to spread the loads.
        let mut lanes = LANES;
        lanes.rotate_left(self.begun.fetch_add(1, Ordering::Relaxed) % LANES.len());
        let loader = ImageLoader {
            device: &*self.engine.device,
            staging: &self.engine.staging,
            source,
            lanes: &lanes,
            target: &target,
            // Callers wait for short pages: damage is told from a fault of the device without a second read.
            summed_by: if is_short { SummedBy::Host } else { SummedBy::Device },
        };
        loader.load(std::iter::once(&mut *images), parallel::threads(LONG_THREADS_MAX))
    }

    /// Hands pages that are loaded to the applier, and lets the callers go on that wait for them.
    ///
    /// In a turn, so that no batch is applied while the memory changes hands. Only after it the waiting
    /// callers are woken: woken before, they would find no memory in the applier's state.
    fn install(&self, pages: Vec<UnloadedPage>) {
        let loaded: Vec<(PageId, u64)> =
            pages.iter().map(|unloaded| (unloaded.page, unloaded.memory.byte_len())).collect();
        let installed = self.engine.applier.turn(move |turn| {
            pages
                .iter()
                .for_each(|unloaded| turn.versions.moved(unloaded.page, unloaded.memory.span().memory));
            // In the same turn as the versions: no batch comes between the two.
            turn.applied.memory.extend(pages.into_iter().map(|unloaded| (unloaded.page, unloaded.memory)));
            Ok(())
        });
        match installed {
            Ok(()) => self.unloaded().loaded(loaded),
            Err(error) => self.unloaded().end(error),
        }
    }

    /// Gives back the memory of pages that stayed unloaded.
    fn give_back(&self) {
        let mut memory = self.unloaded().take_memory().peekable();
        if memory.peek().is_none() {
            return;
        }
        // One more list, after all others in each lane, tells when the lists that name this memory are
        // done. If the device fails at that, the memory stays counted, and a warning says so.
        let device = &*self.engine.device;
        let last = |lane: &Lane| {
            device.submit(*lane, CommandList::default()).and_then(|last| last.finish(device)).map(drop)
        };
        if let Err(error) = LANES.iter().try_for_each(last) {
            tracing::warn!(%error, "memory of pages that were not loaded stays allocated");
            return;
        }
        self.engine.arena.discard_all(memory);
    }
}
