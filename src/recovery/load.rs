//! Bringing pages into device memory: images, then the log on top of them.
//!
//! [`load`] is the recipe; each of its steps is a helper. [`Recovery::open`](super::Recovery::open) calls
//! it once for each snapshot that it tries. Nothing on disk changes here, so a crash loses nothing.

use remanent_format::image::ImageRef;
use remanent_format::manifest::Manifest;
use remanent_format::state::bases::Base;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::PageTrail;
use remanent_format::state::window::load_base;
use remanent_format::{Defect, FileName, LogPoint, Lsn, PageId, PageTable};

use super::Recovery;
use super::catalog::CatalogDraft;
use super::deltas::{Deltas, HostPages, NewerBases, ResizedPage};
use super::image_loader::{ImageLoader, threads};
use super::lent_pages::LentPages;
use super::loaded_pages::{LoadedPages, PageSet};
use super::log_reader::BatchRun;
use super::lowered_pages::{ImagedPages, LoweredPages};
use super::page_memory::PageMemories;
use super::page_sources::{ImageGroup, PageSources, SourceSorter};
use super::submitted_lists::SubmittedLists;
use super::verified_snapshots::is_verified;
use crate::applier::{ListBuilder, UnloadedPage};
use crate::base::allocation::{append, copied, insert, make_room};
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::device::{CommandList, Lane};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, SummedBy, prove};
use crate::memory::arena::Arena;
use crate::options::PageLoad;

/// Loads the pages of a resolved table: images, then the log on top. Meanwhile it looks up what will be
/// kept on disk.
///
/// The order of the steps matters:
///
/// 1. **Claim** memory for the final table (I10), the caller's where it has some for a page. Allocated page
///    by page instead, a table over the budget would be noticed only after gigabytes had been read. Where
///    there are tiers, pages that have no room go to slower places first.
/// 2. **Sort** the pages by what they are made from.
/// 3. **Load** images, **allocate** memory and **look up** what is kept, all three at once: one after the
///    other, allocating alone took a third of the time that pages of 16 KiB take to load.
/// 4. **Set apart** the pages that stay unloaded, so that the replay finds no memory for them. Whatever
///    it wrote there, the page loader would overwrite later.
/// 5. **Replay** the log. Done before 3, an image that goes up late would overwrite what a batch wrote.
/// 6. **Finish**: wait for the lists. Memory given back before would be written to by a list in flight.
pub(super) fn load<'a, 's>(
    recovery: &Recovery<'a>,
    source: &DiskSource,
    survey: &'s Survey,
    base: Option<&Manifest>,
    resolution: &mut Resolution,
) -> Result<(LoadedPages<'a>, CatalogDraft<'s>)> {
    let bases = std::mem::take(&mut resolution.resolved.bases);
    let resolution = &*resolution;
    let table = &resolution.resolved.table;
    // 1.
    let asked = recovery.options.page_memory.as_ref();
    let lent = LentPages::ask(recovery.arena, &recovery.device, asked, table)?;
    let imaged = ImagedPages { bases: &bases, snapshot: base };
    let lowered = match &recovery.options.tiers {
        Some(tiers) => {
            LoweredPages::find(table, &imaged, tiers, &recovery.options.budget, |page| lent.has(page))?
        }
        None => None,
    };
    let placed = lowered.as_ref().map_or(table, |lowered| &lowered.table);
    let memories = PageMemories::reserve(recovery.arena, placed, lent)?;
    // 2.
    let from = replay_start(survey, base);
    // Unverified, a snapshot's images are loaded at once, also on demand: nothing has read them back yet
    // (I7).
    let sorter = SourceSorter {
        table,
        placed,
        bases: &bases,
        snapshot: base,
        is_verified: base.is_some_and(|base| is_verified(survey, base, resolution)),
        may_be_unloaded: recovery.options.page_load == PageLoad::OnDemand,
        from: from.lsn,
    };
    let sources = sorter.sort(&memories)?;
    // Sorted, they are not needed any more: their memory goes before images are read.
    drop(bases);
    let PageSources { images, zeros, resized, on_disk, late, beside } = sources;
    let late = NewerBases::of(late);
    // 3.
    let mut loader = Loader::new(recovery);
    // Sealed bytes are proven past the cache (I6): images, and frames up to the last mark, unless
    // following the log already took them from the medium.
    let sealed = DiskSource::past_cache(recovery.disk.clone());
    let load = || {
        loader.find_on_disk(&sealed, &on_disk)?;
        loader.load_to_host(&sealed, table, &resized)?;
        loader.load_images(&sealed, placed, &memories, images, &zeros)
    };
    let look_up = || CatalogDraft::look(&*recovery.disk, source, survey, base, resolution, beside);
    let (read, (draft, ())) = parallel::join(load, || parallel::join(look_up, || memories.allocate()));
    // A refusal of memory is reported before damage: for an older snapshot there would be no memory
    // either, so trying one would hide the reason.
    let unloaded = loader.take_memory(memories).and(read);
    // 4. to 6.
    let replayed = unloaded.and_then(|unloaded| {
        loader.set_apart(unloaded)?;
        loader.replay(source, survey, resolution, from, &late)
    });
    let mut loaded = loader.finish(recovery.arena, replayed)?;
    loaded.lowered = lowered;
    Ok((loaded, draft?))
}

/// The point after which the log is replayed.
fn replay_start(survey: &Survey, base: Option<&Manifest>) -> LogPoint {
    match base {
        Some(manifest) => manifest.redo,
        None => survey.log.beginning().expect("resolved from it"),
    }
}

/// Brings pages into device memory.
struct Loader<'a> {
    recovery: &'a Recovery<'a>,
    pages: PageSet,
    /// Pages whose length changes during replay are put together in host memory: on the device they are
    /// allocated once, at their final length.
    on_host: Mutex<HostPages>,
    /// Commands that make pages of zeros.
    list: ListBuilder,
    /// Lists that the device may still work on: while there is one, no page memory is given back.
    in_flight: SubmittedLists<'a>,
    tail: Vec<Vec<u8>>,
}

/// Bytes of pages that are put together in host memory at once.
const ON_HOST_MAX: u64 = 64 << 20;
/// Bytes of one page that are put together at once where all of it would be too much.
const WINDOW_LEN: u64 = 8 << 20;

impl<'a> Loader<'a> {
    /// A loader that has loaded nothing yet.
    fn new(recovery: &'a Recovery<'a>) -> Self {
        let (device, staging) = (&*recovery.device, recovery.staging);
        Self {
            recovery,
            pages: PageSet::default(),
            on_host: Mutex::default(),
            list: ListBuilder::default(),
            in_flight: SubmittedLists::new(device, staging),
            tail: Vec::new(),
        }
    }

    /// Step 3, for pages whose length changes: puts them together in host memory, as the replay begins with
    /// them, and as far as they fit.
    fn load_to_host(
        &mut self,
        sealed: &DiskSource,
        table: &PageTable,
        resized: &[(PageId, Base)],
    ) -> Result<()> {
        let mut held = 0_u64;
        for (page, base) in resized {
            // I10: no more than the final length is kept, however long the page is on its way.
            let final_len = table.get(*page).expect("every base is a page's").len;
            let resized = if held.saturating_add(final_len) <= ON_HOST_MAX {
                held += final_len;
                ResizedPage::Whole(load_base(sealed, base, final_len)?)
            } else {
                ResizedPage::Windows(PageTrail::prove(sealed, *page, base)?)
            };
            insert(&mut self.on_host.lock().resized, *page, resized)?;
        }
        Ok(())
    }

    /// Finds the images of the pages that stay on disk. Those that nothing has read back yet are read now,
    /// because the new incarnation relies on them (I7).
    fn find_on_disk(&self, sealed: &DiskSource, pages: &[(PageId, Base, bool)]) -> Result<()> {
        let unproven = pages.iter().filter(|(.., is_proven)| !is_proven);
        let wanted = unproven.filter_map(|(page, base, _)| {
            Some(ImageRequest { page: *page, len: base.len, image: base.image? })
        });
        prove(sealed, wanted)?;
        let Recovery { disk_pages, .. } = self.recovery;
        let page = |(page, base, _): &(PageId, Base, bool)| match base.image {
            Some(image) => (*page, disk_pages.page(Some(disk_pages.proven_image(image, base.len)))),
            None => (*page, disk_pages.zeros(base.len)),
        };
        self.on_host.lock().on_disk = pages.iter().map(page).collect();
        Ok(())
    }

    /// Step 3, for all other pages: brings images into device memory. Returns the pages that are left
    /// unloaded.
    fn load_images(
        &mut self,
        sealed: &DiskSource,
        table: &PageTable,
        memories: &PageMemories<'_>,
        images: ImageGroup,
        zeros: &[PageId],
    ) -> Result<Vec<(PageId, ImageRef)>> {
        // All lanes that bring bulk bytes, in turns: no snapshot is drained during an open, and while the
        // device sums what one lane brought, the others use the bus.
        let ImageGroup { mut proven, mut unproven, unloaded } = images;
        let Recovery { disk, device, staging, .. } = self.recovery;
        let target = |page: PageId| memories.of(page);
        let load = |source: &DiskSource, images: &mut [Vec<ImageRequest>]| {
            ImageLoader {
                device: &**device,
                staging,
                source,
                lanes: &[Lane::Apply, Lane::Drain, Lane::Load],
                target: &target,
                summed_by: SummedBy::Device,
            }
            .load(images.iter_mut().map(Vec::as_mut_slice), threads())
        };
        // No frame says that these were ever read back: a lying disk shows here, before the new
        // incarnation relies on them (I6, I7).
        load(sealed, &mut unproven)?;
        match load(&DiskSource::proven(disk.clone()), &mut proven) {
            // The cached copy alone may be damaged: the medium decides.
            Err(Error::Damaged(_)) => load(sealed, &mut proven)?,
            loaded => loaded?,
        }
        // Pages that the log creates come last. They lie at the end of the table, so that their memory is
        // allocated last: waiting for it earlier would keep a thread from reading images.
        for page in zeros {
            let (target, of) = (memories.of(*page)?, table.get(*page).expect("a page of the table"));
            // Long host memory comes zeroed from the system. Writing zeros would touch gigabytes before
            // their use. A caller's memory holds anything.
            if memories.is_lent(*page)? || !device.allocates_zeros(of.place, of.len) {
                self.list.try_zero(target)?;
            }
        }
        self.in_flight.submit(self.list.take())?;
        Ok(unloaded)
    }

    /// Takes over the memory that was allocated, also where some was refused: the pages of a failed open
    /// are given back through it.
    fn take_memory(&mut self, memories: PageMemories<'_>) -> Result<()> {
        let (memory, allocated) = memories.finish();
        self.pages.memory = memory;
        allocated
    }

    /// Step 4: sets pages that stay unloaded apart, with their memory. The replay finds no memory for
    /// them then, and leaves them alone.
    fn set_apart(&mut self, unloaded: Vec<(PageId, ImageRef)>) -> Result<()> {
        if unloaded.is_empty() {
            return Ok(());
        }
        make_room(&mut self.pages.unloaded, unloaded.len())?;
        let PageSet { memory, unloaded: pages, .. } = &mut self.pages;
        // Both lists ascend.
        let mut unloaded = unloaded.into_iter().peekable();
        let all = std::mem::take(memory).into_items();
        *memory = all
            .filter_map(|(page, memory)| match unloaded.next_if(|(unloaded, _)| *unloaded == page) {
                Some((_, image)) => {
                    pages.push(UnloadedPage { page, image, memory });
                    None
                }
                None => Some((page, memory)),
            })
            .collect();
        // I10: memory was claimed for each page of the table, also for those that are loaded later.
        assert!(unloaded.next().is_none(), "allocated for each page");
        Ok(())
    }

    /// Step 5: replays the log on top of the images.
    fn replay(
        &mut self,
        source: &DiskSource,
        survey: &Survey,
        resolution: &Resolution,
        from: LogPoint,
        late: &NewerBases,
    ) -> Result<()> {
        let end = resolution.end.as_ref().expect("followed to its end");
        assert!(from.lsn <= end.proven.lsn); // I6: a manifest's end is a mark, and its `redo` lies before it.
        let sealed_log = source.past_cache_once();
        let Self { recovery, pages, on_host, in_flight, tail, .. } = self;
        // A list is made on the thread that reads the run, and submitted on this one, in the order of the
        // log: deltas of one page must not overtake each other.
        let crosses_bus = recovery.device.crosses_bus();
        let deltas = Deltas { memory: &pages.memory, on_host, late, staging: recovery.staging, crosses_bus };
        let list = |run| deltas.list(run);
        recovery.replay(&sealed_log, survey, from, end.proven.lsn, list, |list| in_flight.submit(list?))?;
        // Batches above the last mark are read through the cache: the cache may be the only place that
        // has them (I6). A read past it could find less than the walk found.
        let list_and_payloads = |run: BatchRun| {
            let payloads = run.batches.iter().map(|batch| copied(run.payload(batch)));
            (payloads.collect::<Result<Vec<_>>>(), deltas.list(run))
        };
        recovery.replay(
            source,
            survey,
            end.proven,
            end.accepted.lsn,
            list_and_payloads,
            |(payloads, list)| {
                // Copied: the run's memory goes to the device, and the payloads are needed until the
                // opening segment is written.
                append(tail, payloads?)?;
                in_flight.submit(list?)
            },
        )?;
        // I6: each accepted batch that no mark proves is carried on, and none twice. A missing one would
        // be acknowledged by the new opening and be nowhere.
        assert!(tail.len() as u64 == end.accepted.lsn.0 - end.proven.lsn.0);
        let HostPages { resized, on_disk } = std::mem::take(&mut *self.on_host.lock());
        self.pages.on_disk = on_disk;
        let table = &resolution.resolved.table;
        for (page, resized) in resized {
            let len = table.get(page).expect("a page of the table").len;
            let trail = match resized {
                ResizedPage::Whole(whole) => {
                    let whole = whole.into_bytes();
                    // I10: the page has the length that was claimed for it.
                    assert!(whole.len() as u64 == len);
                    self.upload(page, 0, &whole)?;
                    continue;
                }
                ResizedPage::Windows(trail) => trail,
            };
            for from in (0..len).step_by(WINDOW_LEN as usize) {
                // All of it was proven, past the cache where it must be: a read now gives the same bytes, or
                // an error.
                self.upload(page, from, &trail.window(source, &(from..len.min(from + WINDOW_LEN)))?)?;
            }
        }
        self.in_flight.drain(0)
    }

    /// Uploads a page's bytes from `offset` on, which were put together in host memory, and holds what
    /// arrived against them. Such pages are few, so this waits.
    fn upload(&self, page: PageId, offset: u64, bytes: &[u8]) -> Result<()> {
        let Recovery { staging, .. } = self.recovery;
        if bytes.is_empty() {
            return Ok(());
        }
        staging.upload(Lane::Apply, self.pages.memory[page].part(offset, bytes.len() as u64), bytes)
    }

    /// Step 6: what was loaded, or the memory given back.
    fn finish(mut self, arena: &Arena, loaded: Result<()>) -> Result<LoadedPages<'_>> {
        if loaded.is_err() {
            // Lists may still name the memory. One more list, after all of them in the lane, tells when
            // they are done. If the device fails at that, the memory stays counted, and a warning says
            // so: given back, it could be written to by a list of the failed open while another page lies
            // there.
            let device = self.in_flight.device;
            let drained =
                device.submit(Lane::Apply, CommandList::default()).and_then(|last| last.finish(device));
            if drained.is_ok() {
                std::mem::take(&mut self.pages).give_back(arena);
            }
        }
        loaded.map(|()| LoadedPages { arena, pages: self.pages, tail: self.tail, lowered: None })
    }
}

impl Recovery<'_> {
    /// Reads the batches after `from` up to `until` again: they were there when the state was resolved.
    fn replay<T: Send>(
        &self,
        source: &DiskSource,
        survey: &Survey,
        from: LogPoint,
        until: Lsn,
        make: impl Fn(BatchRun) -> T + Sync,
        each: impl FnMut(T) -> Result<()>,
    ) -> Result<()> {
        let stopped = self.frames(source, survey).read(from, Some(until), make, each)?;
        if stopped.point.lsn < until {
            // The walk found them in the cache, and the medium has something else: a sync lied (I6).
            return Err(Defect::Missing.at_lsn(FileName::Segment(from.segment), from.offset, until).into());
        }
        Ok(())
    }
}
