//! Bringing pages into device memory: images, then the log on top of them.
//!
//! [`load`] is the recipe; each of its steps is a helper. [`Recovery::open`](super::Recovery::open) calls
//! it once for each snapshot that it tries. Nothing on disk changes here, so a crash loses nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};

use remanent_format::image::ImageRef;
use remanent_format::manifest::Manifest;
use remanent_format::op::decode_payload;
use remanent_format::state::bases::{Base, Bases};
use remanent_format::state::by_id::ById;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::PageTrail;
use remanent_format::state::window::PageWindow;
use remanent_format::state::window::load_base;
use remanent_format::{Defect, FileName, LogPoint, Lsn, PageId, PageTable};

use super::catalog::CatalogDraft;
use super::image_loader::{ImageLoader, threads};
use super::lent_pages::LentPages;
use super::log_reader::{BatchRun, LoggedBatch};
use super::page_memory::PageMemories;
use super::page_sources::{ImageGroup, PageSources, SourceSorter};
use super::{Recovery, is_same, on_disk};
use crate::applier::{ListBuilder, PayloadAt, UnloadedPage, UnloadedSet, stage_aside};
use crate::base::allocation::{append, copied, make_room};
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::device::sums::{changed_on_the_way, sums_in};
use crate::device::{Command, CommandList, Device, Lane, Pending, StagingSpan};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, SummedBy};
use crate::memory::arena::{Arena, PageMemory};
use crate::memory::staging::StagingPool;
use crate::options::PageLoad;

/// Lists in flight while pages are loaded. Each owns its staging until it is done, so this bounds that
/// memory.
const IN_FLIGHT_MAX: usize = 8;
/// Bytes of such staging. One list more may be in flight.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// Loaded pages that no list uses any more. If the open fails after all, dropping this gives their memory
/// back, so that an older snapshot finds the whole budget (I10).
pub(super) struct LoadedPages<'a> {
    /// The arena that the memory goes back to.
    arena: &'a Arena,
    pages: PageSet,
    /// The payloads of the batches that no mark proves, in order. The new incarnation copies them (I5, I6).
    pub tail: Vec<Vec<u8>>,
}

/// The memory of all pages of the table.
#[derive(Default)]
pub(super) struct PageSet {
    /// Memory of the pages that are loaded.
    pub memory: ById<PageId, PageMemory>,
    /// Pages that are not loaded yet: each is exactly what its image says.
    pub unloaded: Vec<UnloadedPage>,
}

impl PageSet {
    /// Gives all memory back. The caller knows that no list names it any more.
    fn give_back(self, arena: &Arena) {
        let loaded = self.memory.into_items().map(|(_, memory)| memory);
        for memory in loaded.chain(self.unloaded.into_iter().map(|unloaded| unloaded.memory)) {
            if let Err(error) = arena.discard(memory) {
                tracing::warn!(%error, "cannot give page memory back");
            }
        }
    }
}

impl LoadedPages<'_> {
    /// Takes the pages for good: nothing gives their memory back any more.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn keep(mut self) -> Result<(ById<PageId, PageMemory>, UnloadedSet)> {
        let PageSet { memory, unloaded } = &mut self.pages;
        let unloaded = UnloadedSet::new(std::mem::take(unloaded)).map_err(|(error, pages)| {
            *unloaded = pages;
            error
        })?;
        Ok((std::mem::take(memory), unloaded))
    }
}

impl Drop for LoadedPages<'_> {
    fn drop(&mut self) {
        std::mem::take(&mut self.pages).give_back(self.arena);
    }
}

/// Loads the pages of a resolved table: images, then the log on top. Meanwhile it looks up what will be
/// kept on disk.
///
/// The order of the steps matters:
///
/// 1. **Claim** memory for the final table (I10), the caller's where it has some for a page. Allocated page
///    by page instead, a table over the budget would be noticed only after gigabytes had been read.
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
    let memories = PageMemories::reserve(recovery.arena, table, lent)?;
    // 2.
    let from = replay_start(survey, base);
    let sources = sort_sources(recovery, survey, base, resolution, &bases, from, &memories)?;
    // Sorted, they are not needed any more: their memory goes before images are read.
    drop(bases);
    let PageSources { images, zeros, resized, late, beside } = sources;
    let late = NewerBases::of(late);
    // 3.
    let mut loader = Loader::new(recovery);
    // Sealed bytes are proven past the cache (I6): images, and frames up to the last mark, unless
    // following the log already took them from the medium.
    let sealed = DiskSource::past_cache(recovery.disk.clone());
    let load = || {
        loader.load_to_host(&sealed, table, &resized)?;
        loader.load_images(&sealed, table, &memories, images, &zeros)
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
    let loaded = loader.finish(recovery.arena, replayed)?;
    Ok((loaded, draft?))
}

/// The point after which the log is replayed.
fn replay_start(survey: &Survey, base: Option<&Manifest>) -> LogPoint {
    match base {
        Some(manifest) => manifest.redo,
        None => survey.log.beginning().expect("resolved from it"),
    }
}

/// Step 2 of [`load`]: what each page of the table is made from.
fn sort_sources(
    recovery: &Recovery<'_>,
    survey: &Survey,
    base: Option<&Manifest>,
    resolution: &Resolution,
    bases: &Bases,
    from: LogPoint,
    memories: &PageMemories<'_>,
) -> Result<PageSources> {
    // Unverified, a snapshot's images are loaded at once, also on demand: nothing has read them back yet
    // (I7).
    let sorter = SourceSorter {
        table: &resolution.resolved.table,
        bases,
        snapshot: base,
        is_verified: base.is_some_and(|base| is_verified(survey, base, resolution)),
        may_be_unloaded: recovery.options.page_load == PageLoad::OnDemand,
        from: from.lsn,
    };
    sorter.sort(memories)
}

/// Brings pages into device memory.
struct Loader<'a> {
    recovery: &'a Recovery<'a>,
    pages: PageSet,
    /// Pages whose length changes during replay are put together in host memory: on the device they are
    /// allocated once, at their final length.
    on_host: Mutex<HashMap<PageId, ResizedPage>>,
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

/// A page whose length changes during replay.
enum ResizedPage {
    /// Its bytes: no more than it has in the end.
    Whole(PageWindow),
    /// It is put together after the replay, window by window.
    Windows(PageTrail),
}

/// Lists that were submitted and not waited for.
struct SubmittedLists<'a> {
    device: &'a dyn Device,
    staging: &'a StagingPool,
    /// The oldest list first, each with the bytes of its staging.
    pending: VecDeque<(Pending, usize)>,
    /// The sum of these bytes.
    pending_bytes: usize,
}

/// The pages whose bases are newer than the batch after which the replay begins. For all other pages each
/// batch that is read is news.
///
/// A snapshot is gathered while batches go on, so its image of a page may hold batches after `redo`.
/// Applied again, after-images give the same bytes (I2). But a batch from before a resize may write past
/// the end of the page that the image holds.
#[derive(Default)]
struct NewerBases {
    /// The newest batch that the base of each such page holds.
    pages: ById<PageId, Lsn>,
    /// The newest of these batches: after it, every batch applies to every page.
    newest: Lsn,
}

impl NewerBases {
    /// Takes the pages, each with the newest batch that its base holds.
    fn of(late: Vec<(PageId, Lsn)>) -> Self {
        let newest = late.iter().map(|(_, base)| *base).max().unwrap_or_default();
        Self { pages: late.into_iter().collect(), newest }
    }

    /// Whether a batch is to be applied to the bytes of a page of the table.
    fn applies(&self, page: PageId, lsn: Lsn) -> bool {
        // Most batches are newer than every base: they need no look-up a page.
        lsn > self.newest || self.pages.get(page).is_none_or(|base| lsn > *base)
    }
}

/// Makes lists of batches, ahead of the thread that submits them.
struct Deltas<'l> {
    /// Where pages lie on the device. Deleted and unloaded ones have none.
    memory: &'l ById<PageId, PageMemory>,
    on_host: &'l Mutex<HashMap<PageId, ResizedPage>>,
    /// The batches that a page's base holds already.
    late: &'l NewerBases,
    staging: &'l StagingPool,
}

impl<'a> Loader<'a> {
    /// A loader that has loaded nothing yet.
    fn new(recovery: &'a Recovery<'a>) -> Self {
        let (device, staging) = (&*recovery.device, recovery.staging);
        Self {
            recovery,
            pages: PageSet::default(),
            on_host: Mutex::default(),
            list: ListBuilder::default(),
            in_flight: SubmittedLists { device, staging, pending: VecDeque::new(), pending_bytes: 0 },
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
            self.on_host.lock().insert(*page, resized);
        }
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
        let PageSet { memory, unloaded: pages } = &mut self.pages;
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
        let deltas = Deltas { memory: &pages.memory, on_host, late, staging: recovery.staging };
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
        let on_host = std::mem::take(&mut *self.on_host.lock());
        let table = &resolution.resolved.table;
        for (page, resized) in on_host {
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
        let Recovery { device, staging, .. } = self.recovery;
        if bytes.is_empty() {
            return Ok(());
        }
        let target = self.pages.memory[page].part(offset, bytes.len() as u64);
        let upload = || {
            let mut staged = staging.take(bytes.len())?;
            staged.copy_from_slice(bytes);
            let source = StagingSpan { index: 0, offset: 0, len: bytes.len() };
            let mut list = CommandList {
                commands: vec![Command::Upload { source, target }],
                staging: vec![staged.into_staging()],
            };
            if device.crosses_bus() {
                staging.add_sums(&mut list, vec![target])?;
            }
            let returned = device.submit(Lane::Apply, list)?.finish(&**device)?;
            let found = returned.get(1).and_then(|sums| sums_in(sums).next());
            returned.into_iter().for_each(|used| staging.give(used));
            Ok::<_, Error>(found.is_none_or(|sum| sum == crc32fast::hash(bytes)))
        };
        // A bit that turned over once must not fail an open.
        if upload()? || upload()? { Ok(()) } else { Err(changed_on_the_way(&**device, "a page")) }
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
        loaded.map(|()| LoadedPages { arena, pages: self.pages, tail: self.tail })
    }
}

impl Deltas<'_> {
    /// Makes the list of a run's batches for pages in device memory, in the order of the log. Batches of
    /// pages in host memory are applied at once.
    fn list(&self, run: BatchRun) -> Result<CommandList> {
        // One thread has lists made, so this lock is never waited for.
        let mut on_host = self.on_host.lock();
        let parts = if on_host.is_empty() {
            run.by_threads(|batches| self.part(&run, batches, &mut HashMap::new()))?
        } else {
            vec![self.part(&run, &run.batches, &mut on_host)?]
        };
        let mut list = ListBuilder::default();
        for part in parts {
            list.append(part)?;
        }
        // The device reads deltas from where the frames were read: the list owns that memory until it is
        // done.
        if list.is_empty() {
            self.staging.give(run.memory.into_staging());
        } else {
            list.payload(run.memory);
        }
        Ok(list.take())
    }

    /// The part of a list that some batches of a run are.
    fn part(
        &self,
        run: &BatchRun,
        batches: &[LoggedBatch],
        on_host: &mut HashMap<PageId, ResizedPage>,
    ) -> Result<ListBuilder> {
        let mut list = ListBuilder::default();
        let index = list.payload_index();
        for batch in batches {
            let lsn = batch.header.lsn;
            let payload = PayloadAt { index, offset: batch.payload.start };
            let ops = decode_payload(run.payload(batch)).map_err(|defect| batch.damage(defect))?;
            list.make_room(&ops)?;
            for (index, op) in ops.iter().enumerate() {
                // A page without memory is deleted by a later batch, or stays unloaded: then no batch
                // here changes it.
                let memory = op.op.page().and_then(|page| Some((page, self.memory.get(page)?)));
                let Some((page, memory)) = memory else { continue };
                if !self.late.applies(page, lsn) {
                    continue;
                }
                match on_host.get_mut(&page) {
                    Some(ResizedPage::Whole(whole)) => whole.apply(&op.op),
                    Some(ResizedPage::Windows(trail)) => trail
                        .note(&batch.header, run.payload(batch), &ops, index)
                        .map_err(|defect| batch.damage(defect))?,
                    None => {
                        // No frame that names an image applies here: the image is its page's base from that
                        // batch on.
                        let aside = stage_aside(&op.op, &BTreeMap::new(), self.staging)?;
                        list.data(op, payload, memory, aside);
                    }
                }
            }
        }
        Ok(list)
    }
}

impl SubmittedLists<'_> {
    /// Submits a list, unless it is empty, and waits while too many are in flight.
    fn submit(&mut self, list: CommandList) -> Result<()> {
        if list.commands.is_empty() && list.staging.is_empty() {
            return Ok(());
        }
        let bytes = list.staging.iter().map(|staging| staging.len()).sum();
        self.pending.push_back((self.device.submit(Lane::Apply, list)?, bytes));
        self.pending_bytes += bytes;
        while self.pending.len() > 1 && self.pending_bytes > IN_FLIGHT_BYTES_MAX {
            self.finish_oldest()?;
        }
        self.drain(IN_FLIGHT_MAX)
    }

    /// Waits until at most `in_flight_max` lists are in flight, and gives the staging of the others back.
    fn drain(&mut self, in_flight_max: usize) -> Result<()> {
        while self.pending.len() > in_flight_max {
            self.finish_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest list: it is done first, for a lane does its lists in order.
    fn finish_oldest(&mut self) -> Result<()> {
        let Some((oldest, bytes)) = self.pending.pop_front() else { return Ok(()) };
        self.pending_bytes -= bytes;
        for staging in oldest.finish(self.device)? {
            self.staging.give(staging);
        }
        Ok(())
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

/// Whether a frame records the snapshot from which recovery starts as verified (I7).
fn is_verified(survey: &Survey, base: &Manifest, resolution: &Resolution) -> bool {
    let end = resolution.end.as_ref().expect("followed to its end");
    let found = on_disk(survey, base.snapshot);
    end.verified.iter().any(|entry| is_same(found, entry))
}
