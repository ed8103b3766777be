//! Warming: pages that an open left cold are brought into memory while the store is in use.
//!
//! A few threads take pages in the order of their files, and before them what somebody waits for. Each page is read
//! from its image and proven, then the applier gets its memory, then who waits goes on.
//!
//! Nothing on disk depends on how far this has come, so a crash loses nothing: what is cold is exactly what the
//! images of the newest snapshot say, no batch changes a cold page, and nothing is removed from disk while there is
//! one. An image that does not hold poisons the store before anything is removed, so that an open which loads
//! everything still finds whatever could stand in for it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::PageId;

use super::image_loader::{ImageLoader, threads};
use crate::applier::{Applier, UnloadedPage, UnloadedSet};
use crate::base::parallel;
use crate::base::poison::{PanicPoisons, Poison};
use crate::base::sync::Mutex;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::device::{CommandList, Device, Lane, Span};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, RUN_BYTES};
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;

/// Who waits for a page has what lies behind it loaded, too, up to so many bytes: little enough not to wait for it.
const ASKED_BYTES: u64 = 256 << 10;
/// Threads for a long page: each of its loaders may be at one.
const LONG_THREADS_MAX: usize = 4;
/// Nobody knows a page's memory before it is warm, so its bytes need not go up in the order of batches; and behind
/// a snapshot's long copies they hold up no batch.
const LANE: Lane = Lane::Drain;

/// After a shortage the next try waits for so long.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

/// What warming needs.
pub(crate) struct PageLoaderParts {
    pub disk: Arc<dyn Disk>,
    pub device: Arc<dyn Device>,
    pub arena: Arc<Arena>,
    pub staging: Arc<StagingPool>,
    pub applier: Arc<Applier>,
    pub poison: Arc<Poison>,
}

/// The threads.
pub(crate) struct PageLoader {
    parts: Arc<PageLoaderParts>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl PageLoader {
    /// Starts them, if any page is cold.
    pub fn start(parts: PageLoaderParts) -> Result<Self> {
        let parts = Arc::new(parts);
        let thread = if parts.unloaded().is_any() {
            let poisons =
                PanicPoisons { poison: parts.poison.clone(), thread: "the thread that loads pages" };
            let life = LoaderLoop(parts.clone());
            let thread = threads::start("remanent-warm", move || {
                let _poisons = poisons;
                life.live();
            });
            let thread = thread.map_err(|error| Error::thread("the thread that loads pages", error));
            Some(thread.inspect_err(|_| parts.give_back())?)
        } else {
            None
        };
        Ok(Self { parts, thread: Mutex::new(thread) })
    }

    /// Ends them, when what they have in hand is loaded. Pages that are cold then stay on disk.
    pub fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        self.parts.unloaded().end(Error::Closed);
        if thread.join().is_err() {
            tracing::error!("the thread that loads pages panicked");
        }
        self.parts.give_back();
    }
}

/// What the threads do as long as they live. Where that ends, nobody must wait for them.
struct LoaderLoop(Arc<PageLoaderParts>);

impl LoaderLoop {
    fn live(&self) {
        let Self(parts) = self;
        let threads = threads();
        let load_all = |(): &mut (), _| {
            parts.load_all();
            Ok::<(), Infallible>(())
        };
        let Ok(_) = parallel::map_indexed(threads, threads, || (), load_all);
    }
}

impl Drop for LoaderLoop {
    fn drop(&mut self) {
        let Self(parts) = self;
        parts.unloaded().end(parts.poison.check().err().unwrap_or(Error::Closed));
    }
}

impl PageLoaderParts {
    fn unloaded(&self) -> &UnloadedSet {
        self.applier.unloaded()
    }

    /// Loads pages until there are none left.
    fn load_all(&self) {
        // Only what was proven on the medium once is ever cold.
        let proven = DiskSource::proven(self.disk.clone());
        while let Some(pages) = self.unloaded().take(ASKED_BYTES, RUN_BYTES) {
            self.load(&proven, pages);
        }
    }

    /// Loads pages. Where an image does not hold, each for itself and from the medium: so it is known which one, and
    /// that it is not the cache alone that is damaged.
    fn load(&self, proven: &DiskSource, pages: Vec<UnloadedPage>) {
        match self.read_patiently(proven, &pages) {
            Ok(true) => self.install(pages),
            Ok(false) => self.unloaded().give_up(pages),
            Err(Error::Damaged(_)) => {
                let medium = DiskSource::past_cache(self.disk.clone());
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

    /// As [`read`](Self::read), again and again while the system is short of something that this takes: callers wait
    /// for the page meanwhile, and the store goes on when the shortage ends. `false` if the store closes before.
    fn read_patiently(&self, source: &DiskSource, pages: &[UnloadedPage]) -> Result<bool> {
        loop {
            match self.read(source, pages) {
                Err(error) if error.is_shortage() => {
                    tracing::warn!(%error, "pages are loaded when the shortage ends");
                    if self.unloaded().is_over_within(SHORTAGE_PAUSE) {
                        return Ok(false);
                    }
                }
                read => return read.map(|()| true),
            }
        }
    }

    /// A page cannot be loaded, nor any other if this is not about its image.
    fn fail(&self, unloaded: UnloadedPage, error: Error) {
        let error = error.in_store(&self.disk.label());
        tracing::error!(%error, page = %unloaded.page, "a page cannot be loaded");
        let poisoned = self.poison.set(error.clone());
        if !matches!(error, Error::Damaged(_)) {
            self.unloaded().end(poisoned);
        }
        self.unloaded().fail(unloaded, error);
    }

    fn read(&self, source: &DiskSource, pages: &[UnloadedPage]) -> Result<()> {
        let wanted = |unloaded: &UnloadedPage| ImageRequest {
            page: unloaded.page,
            len: unloaded.memory.byte_len(),
            image: unloaded.image,
        };
        let mut images: Vec<ImageRequest> = pages.iter().map(wanted).collect();
        let targets: HashMap<PageId, Span> =
            pages.iter().map(|unloaded| (unloaded.page, unloaded.memory.span())).collect();
        let target = |page: PageId| Ok(targets[&page]);
        let loader = ImageLoader {
            device: &*self.device,
            staging: &self.staging,
            source,
            lanes: &[LANE],
            target: &target,
        };
        loader.load(std::iter::once(&mut *images), parallel::threads(LONG_THREADS_MAX))
    }

    /// Hands pages that are loaded to the applier, and lets those go on who wait for them.
    fn install(&self, pages: Vec<UnloadedPage>) {
        let warm: Vec<(PageId, u64)> =
            pages.iter().map(|unloaded| (unloaded.page, unloaded.memory.byte_len())).collect();
        let installed = self.applier.turn(move |turn| {
            pages
                .iter()
                .for_each(|unloaded| turn.versions.moved(unloaded.page, unloaded.memory.span().memory));
            turn.applied.memory.extend(pages.into_iter().map(|unloaded| (unloaded.page, unloaded.memory)));
            Ok(())
        });
        match installed {
            Ok(()) => self.unloaded().loaded(warm),
            Err(error) => self.unloaded().end(error),
        }
    }

    /// Gives back the memory of pages that stayed cold.
    fn give_back(&self) {
        let memory = self.unloaded().take_memory();
        if memory.is_empty() {
            return;
        }
        // One list behind all others tells when those are done that name it. Where it does not, the memory stays
        // counted, and is warned of.
        let last = self.device.submit(LANE, CommandList::default());
        if let Err(error) = last.and_then(|last| last.finish(&*self.device)) {
            tracing::warn!(%error, "memory of pages that were not loaded stays allocated");
            return;
        }
        for memory in memory {
            if let Err(error) = self.arena.discard(memory) {
                tracing::warn!(%error, "cannot give page memory back");
            }
        }
    }
}
