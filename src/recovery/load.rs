//! Bringing pages into device memory: images, then the log on top.
//!
//! Nothing on disk changes here, so a crash loses nothing.

use std::collections::{HashMap, VecDeque};

use remanent_format::image::ImageRef;
use remanent_format::manifest::Manifest;
use remanent_format::op::decode_payload;
use remanent_format::state::bases::Base;
use remanent_format::state::by_id::ById;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;
use remanent_format::state::trail::PageTrail;
use remanent_format::state::window::PageWindow;
use remanent_format::state::window::load_base;
use remanent_format::{Defect, FileName, LogPoint, Lsn, PageId, PageTable};

use super::catalog::CatalogDraft;
use super::image_loader::{ImageLoader, threads};
use super::log_reader::BatchRun;
use super::page_memory::PageMemories;
use super::page_sources::{ImageGroup, PageSources, SourceSorter};
use super::{Recovery, is_same, on_disk};
use crate::applier::{ListBuilder, PayloadAt, UnloadedPage, stage_aside};
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::device::{Command, CommandList, Device, Lane, Pending, StagingSpan};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result, copied};
use crate::images::read::ImageRequest;
use crate::memory::arena::{Arena, PageMemory};
use crate::memory::staging::StagingPool;
use crate::options::PageLoad;

/// Lists in flight while loading.
const IN_FLIGHT_MAX: usize = 8;

/// Pages that are loaded, and that no list uses any more: given back if the open fails after all.
pub(super) struct LoadedPages<'a> {
    arena: &'a Arena,
    pages: PageSet,
    /// The payloads of the batches that no mark proves, in order.
    pub tail: Vec<Vec<u8>>,
}

/// The memory of all pages.
#[derive(Default)]
pub(super) struct PageSet {
    /// Of those that are loaded.
    pub memory: ById<PageId, PageMemory>,
    /// Those that are not, for they are exactly what their images say.
    pub unloaded: Vec<UnloadedPage>,
}

impl PageSet {
    /// Gives all of it back.
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
    /// The pages, for good.
    pub fn keep(mut self) -> PageSet {
        std::mem::take(&mut self.pages)
    }
}

impl Drop for LoadedPages<'_> {
    fn drop(&mut self) {
        std::mem::take(&mut self.pages).give_back(self.arena);
    }
}

/// Loads the pages of a resolved table: images, then the log on top. What will be kept is looked up beside that.
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
    // I10: what the final table takes, before anything is allocated.
    let memories = PageMemories::reserve(recovery.arena, table)?;
    let mut loader = Loader {
        recovery,
        pages: PageSet::default(),
        on_host: Mutex::default(),
        list: ListBuilder::default(),
        in_flight: SubmittedLists {
            device: &*recovery.device,
            staging: recovery.staging,
            pending: VecDeque::new(),
        },
        tail: Vec::new(),
    };
    let from = match base {
        Some(manifest) => manifest.redo,
        None => survey.log.beginning().expect("resolved from it"),
    };
    let sorting = SourceSorter {
        table,
        bases: &bases,
        snapshot: base,
        is_verified: base.is_some_and(|base| is_verified(survey, base, resolution)),
        may_be_unloaded: recovery.options.page_load == PageLoad::OnDemand,
        from: from.lsn,
    };
    let PageSources { images, zeros, resized, late, beside } = sorting.sort(&memories);
    drop(bases);
    let late = NewerBases::of(late);
    // Sealed bytes are proven past the cache (I6): images, and frames up to the last mark, as far as following
    // them has not taken them from the medium.
    let sealed = DiskSource::past_cache(recovery.disk.clone());
    let load = || {
        loader.load_to_host(&sealed, table, &resized)?;
        loader.load_images(&sealed, table, &memories, images, &zeros)
    };
    let find = || CatalogDraft::look(&*recovery.disk, source, survey, base, resolution, beside);
    let (read, (found, ())) = parallel::join(load, || parallel::join(find, || memories.allocate()));
    let (memory, allocated) = memories.finish();
    loader.pages.memory = memory;
    // What there is no memory for cannot be loaded from an older snapshot either.
    let loaded = allocated.and(read).and_then(|unloaded| {
        loader.cool(unloaded);
        loader.apply(source, survey, resolution, from, &late)?;
        loader.in_flight.drain(0)
    });
    if loaded.is_err() {
        // Lists may still name the memory: one behind all of them tells when they are done. Where it does
        // not, the memory stays counted, and is warned of.
        let device = &*recovery.device;
        let drained = device.submit(Lane::Apply, CommandList::default()).and_then(|last| last.finish(device));
        if drained.is_ok() {
            std::mem::take(&mut loader.pages).give_back(recovery.arena);
        }
    }
    let loaded =
        loaded.map(|()| LoadedPages { arena: recovery.arena, pages: loader.pages, tail: loader.tail })?;
    Ok((loaded, found?))
}

/// Brings pages into device memory.
struct Loader<'a> {
    recovery: &'a Recovery<'a>,
    pages: PageSet,
    /// Pages whose length changes during replay are put together in host memory: on the device they are
    /// allocated once, at their final length.
    on_host: Mutex<HashMap<PageId, ResizedPage>>,
    list: ListBuilder,
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

/// Lists that were submitted.
struct SubmittedLists<'a> {
    device: &'a dyn Device,
    staging: &'a StagingPool,
    pending: VecDeque<Pending>,
}

/// The pages whose bases have later batches than those before which the replay begins. For all others each batch is
/// news.
#[derive(Default)]
struct NewerBases {
    pages: ById<PageId, Lsn>,
    newest: Lsn,
}

impl NewerBases {
    fn of(late: Vec<(PageId, Lsn)>) -> Self {
        let newest = late.iter().map(|(_, base)| *base).max().unwrap_or_default();
        Self { pages: late.into_iter().collect(), newest }
    }

    /// Whether a batch is to be applied to the bytes of a page of the table.
    fn applies(&self, page: PageId, lsn: Lsn) -> bool {
        lsn > self.newest || self.pages.get(page).is_none_or(|base| lsn > *base)
    }
}

/// Makes lists of batches, on the thread that reads them.
struct Deltas<'l> {
    memory: &'l ById<PageId, PageMemory>,
    on_host: &'l Mutex<HashMap<PageId, ResizedPage>>,
    late: &'l NewerBases,
    staging: &'l StagingPool,
}

impl Loader<'_> {
    /// The log behind the images.
    fn apply(
        &mut self,
        source: &DiskSource,
        survey: &Survey,
        resolution: &Resolution,
        from: LogPoint,
        late: &NewerBases,
    ) -> Result<()> {
        let end = resolution.end.as_ref().expect("followed to its end");
        let sealed_log = source.past_cache_once();
        let Self { recovery, pages, on_host, in_flight, tail, .. } = self;
        let deltas = Deltas { memory: &pages.memory, on_host, late, staging: recovery.staging };
        let list = |run| deltas.list(run);
        recovery.replay(&sealed_log, survey, from, end.proven.lsn, list, |list| in_flight.submit(list?))?;
        // What no mark proves is read through the cache: that is where it is.
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
                tail.extend(payloads?);
                in_flight.submit(list?)
            },
        )?;
        let on_host = std::mem::take(&mut *self.on_host.lock());
        let table = &resolution.resolved.table;
        for (page, resized) in on_host {
            let trail = match resized {
                ResizedPage::Whole(whole) => {
                    self.upload(page, 0, &whole.into_bytes())?;
                    continue;
                }
                ResizedPage::Windows(trail) => trail,
            };
            let len = table.get(page).expect("a page of the table").len;
            for from in (0..len).step_by(WINDOW_LEN as usize) {
                // All of it was proven, past the cache where it must be: what is read now is that, or an error.
                self.upload(page, from, &trail.window(source, &(from..len.min(from + WINDOW_LEN)))?)?;
            }
        }
        Ok(())
    }

    /// Puts pages whose length changes together in host memory, as far as replay begins with them, and as far as they
    /// fit.
    fn load_to_host(
        &mut self,
        sealed: &DiskSource,
        table: &PageTable,
        resized: &[(PageId, Base)],
    ) -> Result<()> {
        let mut held = 0_u64;
        for (page, base) in resized {
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

    /// Returns those that are left cold.
    fn load_images(
        &mut self,
        sealed: &DiskSource,
        table: &PageTable,
        memories: &PageMemories<'_>,
        images: ImageGroup,
        zeros: &[PageId],
    ) -> Result<Vec<(PageId, ImageRef)>> {
        let ImageGroup { mut proven, mut unproven, unloaded } = images;
        let Recovery { disk, device, staging, .. } = self.recovery;
        let target = |page: PageId| memories.of(page);
        let load = |source: &DiskSource, images: &mut [Vec<ImageRequest>]| {
            ImageLoader {
                device: &**device,
                staging,
                source,
                lanes: &[Lane::Apply, Lane::Drain],
                target: &target,
            }
            .load(images.iter_mut().map(Vec::as_mut_slice), threads())
        };
        load(sealed, &mut unproven)?;
        match load(&DiskSource::proven(disk.clone()), &mut proven) {
            // It may be the cache alone that is damaged.
            Err(Error::Damaged(_)) => load(sealed, &mut proven)?,
            loaded => loaded?,
        }
        // Last, for these are pages that the log creates: there is memory for them when there is for all others.
        for page in zeros {
            let (target, of) = (memories.of(*page)?, table.get(*page).expect("a page of the table"));
            if !device.allocates_zeros(of.place, of.len) {
                self.list.zero(target);
            }
        }
        self.in_flight.submit(self.list.take())?;
        Ok(unloaded)
    }

    /// Leaves pages cold.
    fn cool(&mut self, unloaded: Vec<(PageId, ImageRef)>) {
        if unloaded.is_empty() {
            return;
        }
        self.pages.unloaded.reserve_exact(unloaded.len());
        let PageSet { memory, unloaded: pages } = &mut self.pages;
        // Both ascend.
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
        assert!(unloaded.next().is_none(), "allocated for each page");
    }

    /// Queues the upload of a page's bytes from `offset` on.
    fn upload(&mut self, page: PageId, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut staged = self.recovery.staging.take(bytes.len())?;
        staged.copy_from_slice(bytes);
        let source = StagingSpan { index: 0, offset: 0, len: bytes.len() };
        let target = self.pages.memory[page].part(offset, bytes.len() as u64);
        let commands = vec![Command::Upload { source, target }];
        self.in_flight.submit(CommandList { commands, staging: vec![staged.into_staging()] })
    }
}

impl Deltas<'_> {
    /// What the batches of a run do to pages in device memory, in the order of the log. To those in host memory it
    /// is done.
    fn list(&self, run: BatchRun) -> Result<CommandList> {
        let mut list = ListBuilder::default();
        let mut on_host = self.on_host.lock();
        let index = list.payload_index();
        let mut staged = false;
        for batch in &run.batches {
            let lsn = batch.header.lsn;
            let payload = PayloadAt { index, offset: batch.payload.start };
            let ops = decode_payload(run.payload(batch)).map_err(|defect| batch.damage(defect))?;
            for (index, op) in ops.iter().enumerate() {
                // Pages without memory are gone in the end, or cold: then no batch here applies to them.
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
                        // An image is its page's base, so that no frame that names one applies here.
                        let aside = stage_aside(&op.op, &HashMap::new(), self.staging)?;
                        list.data(op, payload, memory, aside);
                        staged = true;
                    }
                }
            }
        }
        if staged {
            list.payload(run.memory);
        } else {
            self.staging.give(run.memory.into_staging());
        }
        Ok(list.take())
    }
}

impl SubmittedLists<'_> {
    fn submit(&mut self, list: CommandList) -> Result<()> {
        if list.commands.is_empty() && list.staging.is_empty() {
            return Ok(());
        }
        self.pending.push_back(self.device.submit(Lane::Apply, list)?);
        self.drain(IN_FLIGHT_MAX)
    }

    /// Waits until at most so many lists are in flight. (To give back at once what lists that are done have staged,
    /// so that less memory is read into in turn, gained nothing on a device whose lists are done when submitted.)
    fn drain(&mut self, in_flight_max: usize) -> Result<()> {
        while self.pending.len() > in_flight_max {
            let pending = self.pending.pop_front().expect("more than the maximum");
            for staging in pending.finish(self.device)? {
                self.staging.give(staging);
            }
        }
        Ok(())
    }
}

impl Recovery<'_> {
    /// Reads again the batches after `from` up to `until`: when the state was resolved they were there.
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
            // In the cache, that is: the medium has something else.
            return Err(Defect::Missing.at_lsn(FileName::Segment(from.segment), from.offset, until).into());
        }
        Ok(())
    }
}

/// Whether a frame records the snapshot from which recovery starts as verified.
fn is_verified(survey: &Survey, base: &Manifest, resolution: &Resolution) -> bool {
    let end = resolution.end.as_ref().expect("followed to its end");
    {
        let found = on_disk(survey, base.snapshot);
        end.verified.iter().any(|entry| is_same(found, entry))
    }
}
