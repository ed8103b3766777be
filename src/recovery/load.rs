//! Loads pages into device memory: first the images, and then the changes in the log.
//!
//! [`load`] runs the steps. [`Recovery::open`](super::Recovery::open) calls [`load`] once for each snapshot that it
//! tries. This module writes nothing to disk, so a crash loses nothing.

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
use super::page_sources::{ImageGroup, PageOnDisk, PageSources, Proof, SourceSorter};
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

/// Loads the pages of a resolved table, and concurrently determines the files to keep on disk.
///
/// The order of the steps matters:
///
/// 1. **Claim** memory for the final table (I10), except for pages with caller-owned memory. If memory were allocated
///    page by page instead, a table over the budget would be detected only after gigabytes had been read. With tiers,
///    pages that do not fit are first moved to slower places.
/// 2. **Sort** the pages by their sources.
/// 3. **Load** images, **allocate** memory and **determine** the files to keep, all concurrently. In sequence,
///    allocation alone took a third of the time to load pages of 16 KiB.
/// 4. **Remove** the pages that stay unloaded from the set of pages that replay changes. Otherwise the page loader
///    would later overwrite the result of the replay.
/// 5. **Replay** the log. The replay must follow step 3, because a later upload of an image would overwrite changes of
///    batches.
/// 6. **Finish**: wait for the command lists. A list in flight would write to memory that is freed earlier.
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
    // Step 1.
    let requested = recovery.options.memory.page_memory.as_ref();
    let lent = LentPages::ask(recovery.arena, &recovery.device, requested, table)?;
    let imaged = ImagedPages { bases: &bases, snapshot: base };
    let lowered = match &recovery.options.tiers {
        Some(tiers) => {
            LoweredPages::find(table, &imaged, tiers, &recovery.options.memory.budget, |page| lent.has(page))?
        }
        None => None,
    };
    let placed = lowered.as_ref().map_or(table, |lowered| &lowered.table);
    let memories = PageMemories::reserve(recovery.arena, placed, lent)?;
    // Step 2.
    let from = replay_start(survey, base);
    // The images of an unverified snapshot have not been read back (I7), so they are loaded now even with on-demand
    // loading.
    let sorter = SourceSorter {
        table,
        placed,
        bases: &bases,
        snapshot: base,
        is_verified: base.is_some_and(|base| is_verified(survey, base, resolution)),
        may_be_unloaded: recovery.options.memory.load == PageLoad::OnDemand,
        from: from.lsn,
        mark: resolution.end.as_ref().map_or(Lsn(0), |end| end.proven.lsn),
    };
    let sources = sorter.sort(&memories)?;
    // The bases are no longer needed. This frees memory before images are read.
    drop(bases);
    let PageSources { images, zeros, resized, on_disk, late, replay_images } = sources;
    let late = NewerBases::of(late);
    // Step 3.
    let mut loader = Loader::new(recovery);
    // Durable bytes are read with O_DIRECT (I6): images, and frames up to the last durable mark. Frames that the first
    // pass over the log already read from the medium are not read again.
    let sealed = DiskSource::bypassing_cache(recovery.disk.clone());
    let load = || {
        loader.find_on_disk(&sealed, &on_disk)?;
        loader.load_to_host(&sealed, table, &resized)?;
        loader.load_images(&sealed, placed, &memories, images, &zeros)
    };
    let look_up = || CatalogDraft::read(&*recovery.disk, source, survey, base, resolution, replay_images);
    let (read, (draft, ())) = parallel::join(load, || parallel::join(look_up, || memories.allocate()));
    // A lack of memory is returned before damage. If damage were returned, an older snapshot would be tried, for which
    // memory is missing too.
    let unloaded = loader.take_memory(memories).and(read);
    // Steps 4 to 6.
    let replayed = unloaded.and_then(|unloaded| {
        loader.set_apart(unloaded)?;
        loader.replay(source, survey, resolution, from, &late)
    });
    let mut loaded = loader.finish(recovery.arena, replayed)?;
    loaded.lowered = lowered;
    Ok((loaded, draft?))
}

/// Returns the point after which the log is replayed: the `redo` of the snapshot `base`, or the beginning of the log.
fn replay_start(survey: &Survey, base: Option<&Manifest>) -> LogPoint {
    match base {
        Some(manifest) => manifest.redo,
        None => survey.log.beginning().expect("resolved from it"),
    }
}

/// Loads images into device memory and replays the log. Used for one attempt to load one snapshot.
struct Loader<'a> {
    recovery: &'a Recovery<'a>,
    pages: PageSet,
    /// The pages that the host changes during replay. These include resized pages, because the device allocates a page
    /// once, with its final length.
    on_host: Mutex<HostPages>,
    /// The commands that fill new pages with zeros.
    list: ListBuilder,
    /// The command lists that the device may still execute. Page memory may be freed only after the last of them
    /// completes.
    in_flight: SubmittedLists<'a>,
    tail: Vec<Vec<u8>>,
}

/// The maximum total length of resized pages that are kept completely in host memory.
const ON_HOST_MAX: u64 = 64 << 20;
/// The length of the windows in which a resized page is assembled if the page does not fit in host memory.
const WINDOW_LEN: u64 = 8 << 20;

impl<'a> Loader<'a> {
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

    /// Performs step 3 for pages whose length changes during replay: loads their bytes into host memory. Pages that do
    /// not fit there are assembled after the replay.
    fn load_to_host(
        &mut self,
        sealed: &DiskSource,
        table: &PageTable,
        resized: &[(PageId, Base)],
    ) -> Result<()> {
        let mut held = 0_u64;
        for (page, base) in resized {
            // I10: at most the page's final length is kept in memory, even if the page is temporarily longer.
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

    /// Creates the pages that stay on disk from their images, and verifies the images that [`Proof::Now`] marks.
    fn find_on_disk(&self, sealed: &DiskSource, pages: &[PageOnDisk]) -> Result<()> {
        let unproven = pages.iter().filter(|page| page.proof == Proof::Now);
        let wanted = unproven.filter_map(|PageOnDisk { page, base, .. }| {
            Some(ImageRequest { page: *page, len: base.len, image: base.image? })
        });
        prove(sealed, wanted)?;
        let Recovery { disk_pages, .. } = self.recovery;
        let page = |PageOnDisk { page, base, proof }: &PageOnDisk| match (base.image, proof) {
            (Some(image), Proof::AtRead) => (*page, disk_pages.page(Some(disk_pages.image(image, base.len)))),
            (Some(image), _) => (*page, disk_pages.page(Some(disk_pages.proven_image(image, base.len)))),
            (None, _) => (*page, disk_pages.zeros(base.len)),
        };
        self.on_host.lock().on_disk = pages.iter().map(page).collect();
        Ok(())
    }

    /// Performs step 3 for the pages in device memory: loads their images. Returns the pages that are left unloaded.
    fn load_images(
        &mut self,
        sealed: &DiskSource,
        table: &PageTable,
        memories: &PageMemories<'_>,
        images: ImageGroup,
        zeros: &[PageId],
    ) -> Result<Vec<(PageId, ImageRef)>> {
        // Loads use all lanes for bulk copies. No snapshot is being taken during an open, and while the device computes
        // checksums of the bytes that one lane has copied, the other lanes can use the bus.
        #[cfg_attr(
            feature = "nccl",
            expect(unused_mut, reason = "without the feature it is loaded as it is")
        )]
        let ImageGroup { mut proven, mut unproven, unloaded } = images;
        let Recovery { disk, device, staging, .. } = self.recovery;
        let target = |page: PageId| memories.of(page);
        let load = |source: &DiskSource, images: &mut [Vec<ImageRequest>]| {
            ImageLoader {
                device,
                staging,
                source,
                lanes: &[Lane::Apply, Lane::Drain, Lane::Load],
                target: &target,
                summed_by: SummedBy::Device,
            }
            .load(images.iter_mut().map(Vec::as_mut_slice), threads())
        };
        // No frame states that these images were read back. If the disk has lost one, this is detected here, before the
        // new incarnation relies on it (I6, I7).
        load(sealed, &mut unproven)?;
        let load_proven =
            |images: &mut [Vec<ImageRequest>]| match load(&DiskSource::proven(disk.clone()), images) {
                // The damage may be limited to the page cache, so the images are read again from the medium.
                Err(Error::Damaged(_)) => load(sealed, images),
                loaded => loaded,
            };
        #[cfg(feature = "nccl")]
        let mut proven = self.recovery.gather(table, memories, proven, &load_proven)?;
        load_proven(&mut proven)?;
        // Pages that the log creates have the highest ids, so their memory is allocated last. Waiting for it earlier
        // would keep a thread from reading images.
        for page in zeros {
            let (target, of) = (memories.of(*page)?, table.get(*page).expect("a page of the table"));
            // The system provides large host allocations already zeroed, and writing zeros again would touch gigabytes.
            // Caller-owned memory may contain any bytes.
            if memories.is_lent(*page)? || !device.allocates_zeros(of.place, of.len) {
                self.list.try_zero(target)?;
            }
        }
        self.in_flight.submit(self.list.take())?;
        Ok(unloaded)
    }

    /// Takes over the allocated memory, so that a failed open frees it. Then returns the error if an allocation has
    /// failed.
    fn take_memory(&mut self, memories: PageMemories<'_>) -> Result<()> {
        let (memory, allocated) = memories.finish();
        self.pages.memory = memory;
        allocated
    }

    /// Performs step 4: moves the memory of unloaded pages out of the set of pages that replay changes.
    fn set_apart(&mut self, unloaded: Vec<(PageId, ImageRef)>) -> Result<()> {
        if unloaded.is_empty() {
            return Ok(());
        }
        make_room(&mut self.pages.unloaded, unloaded.len())?;
        let PageSet { memory, unloaded: pages, .. } = &mut self.pages;
        // Both lists are in ascending order.
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
        // I10: memory was allocated for each unloaded page.
        assert!(unloaded.next().is_none(), "allocated for each page");
        Ok(())
    }

    /// Performs step 5: replays the log on top of the images.
    fn replay(
        &mut self,
        source: &DiskSource,
        survey: &Survey,
        resolution: &Resolution,
        from: LogPoint,
        late: &NewerBases,
    ) -> Result<()> {
        let end = resolution.end.as_ref().expect("followed to its end");
        assert!(from.lsn <= end.proven.lsn); // I6: a manifest's end is a durable mark, and its `redo` is before it.
        let sealed_log = source.bypassing_cache_once();
        let Self { recovery, pages, on_host, in_flight, tail, .. } = self;
        // Lists are built on another thread, and submitted on this thread in log order, because the order of a page's
        // deltas must not change.
        let crosses_bus = recovery.device.crosses_bus();
        let deltas = Deltas { memory: &pages.memory, on_host, late, staging: recovery.staging, crosses_bus };
        let list = |run| deltas.list(run);
        recovery.replay(&sealed_log, survey, from, end.proven.lsn, list, |list| in_flight.submit(list?))?;
        // Batches above the last durable mark are read through the page cache, which may be the only place that
        // contains them (I6). With O_DIRECT, fewer batches might be found than in the first pass over the log.
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
                // The payloads are copied, because they are needed until the opening segment is written, and the
                // command list owns the memory of the run.
                append(tail, payloads?)?;
                in_flight.submit(list?)
            },
        )?;
        // I6: the new incarnation copies each accepted batch that no mark covers exactly once. If one were missing, the
        // new opening would acknowledge a batch that does not exist.
        assert!(tail.len() as u64 == end.accepted.lsn.0 - end.proven.lsn.0);
        let HostPages { resized, on_disk } = std::mem::take(&mut *self.on_host.lock());
        self.pages.on_disk = on_disk;
        let table = &resolution.resolved.table;
        for (page, resized) in resized {
            let len = table.get(page).expect("a page of the table").len;
            let trail = match resized {
                ResizedPage::Whole(whole) => {
                    let whole = whole.into_bytes();
                    // I10: the page has the length for which memory was allocated.
                    assert!(whole.len() as u64 == len);
                    self.upload(page, 0, &whole)?;
                    continue;
                }
                ResizedPage::Windows(trail) => trail,
            };
            for from in (0..len).step_by(WINDOW_LEN as usize) {
                // The sources of the page were verified before, so this read returns the same bytes or an error.
                self.upload(page, from, &trail.window(source, &(from..len.min(from + WINDOW_LEN)))?)?;
            }
        }
        self.in_flight.drain(0)
    }

    /// Uploads a part of a page that was assembled in host memory, starting at `offset`. Waits for the upload and
    /// verifies its checksum. Such pages are rare, so waiting costs little.
    fn upload(&self, page: PageId, offset: u64, bytes: &[u8]) -> Result<()> {
        let Recovery { staging, .. } = self.recovery;
        if bytes.is_empty() {
            return Ok(());
        }
        staging.upload(Lane::Apply, self.pages.memory[page].part(offset, bytes.len() as u64), bytes)
    }

    /// Performs step 6: waits for the command lists, and returns the loaded pages or, after an error, frees their
    /// memory.
    fn finish(mut self, arena: &Arena, loaded: Result<()>) -> Result<LoadedPages<'_>> {
        if loaded.is_err() {
            // The lane runs its lists in order, so an empty list completes after all lists that use the memory. If the
            // device fails, the memory is not freed: a list of the failed open could write to it after it was assigned
            // to another page.
            let device = self.in_flight.device;
            let drained =
                device.submit(Lane::Apply, CommandList::default()).and_then(|last| device.finish(last));
            if drained.is_ok() {
                std::mem::take(&mut self.pages).give_back(arena);
            }
        }
        loaded.map(|()| LoadedPages { arena, pages: self.pages, tail: self.tail, lowered: None })
    }
}

impl Recovery<'_> {
    /// Reads the batches after `from` up to `until` a second time, for replay. The first pass over the log has
    /// determined the page table from the same batches.
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
            // The first pass has found the batches in the page cache, but the medium contains other bytes, so a sync
            // failed without an error (I6).
            return Err(Defect::Missing.at_lsn(FileName::Segment(from.segment), from.offset, until).into());
        }
        Ok(())
    }
}
