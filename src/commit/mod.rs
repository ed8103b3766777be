//! Floor 6. Committing a batch: check everything, log it, then let it be seen.
//!
//! 1. Outside the lock: find what captures changed, stage what clones copy, write whole pages ahead, encode,
//!    fill in what only the device has seen, checksum, allocate page memory. Nothing so far is visible, and all of it can be taken back.
//! 2. Under the submission lock: preconditions, the plan, the append (I1: only now, with payload and
//!    checksum in hand, is an Lsn assigned), the table, the hand-over to the applier. The order of the lock
//!    is the order of the log and of the lane.
//!
//! A crash before the append loses a batch that nobody was told of; after it, recovery replays the batch.

mod born;
mod capture;
mod changes;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use remanent_format::limits::PAGE_LEN_MAX;
use remanent_format::op::{Op, OpAt, decode_payload};
use remanent_format::table::{Changes, PlanMode, Refusal};
use remanent_format::{Defect, Epoch, LogPoint, Lsn, PageId, PageInfo, PageTable, Place, StoreId};

use crate::applier::{Applier, Leases, Work, stage_aside};
use crate::arena::{Arena, PageMemory, Purpose};
use crate::batch::{CloneSource, Found, WholePage, WriteBatch};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::image_files::ImageFiles;
use crate::images::WrittenAhead;
use crate::keeping::KnownImages;
use crate::log::{Log, SpacePurpose};
use crate::options::Compression;
use crate::poison::Poison;
use crate::staging::{StagingBuf, StagingPool};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

use capture::Captures;
pub use capture::{Direction, Shadow};

/// How often clones are staged without the lock before the lock is held for it.
const CLONE_TRIES: usize = 3;

/// Turns batches into commits.
pub(crate) struct Committer {
    /// The state after the last logged batch.
    pub submitted: Mutex<PageTable>,
    /// The next page id. Ids are taken before a batch is known to be good; a failed one leaves a gap.
    pub next_page: AtomicU64,
    pub store: StoreId,
    pub log: Arc<Log>,
    pub applier: Arc<Applier>,
    pub leases: Arc<Leases>,
    pub device: Arc<dyn Device>,
    pub arena: Arc<Arena>,
    pub staging: Arc<StagingPool>,
    pub poison: Arc<Poison>,
    pub files: Arc<ImageFiles>,
    pub known: Arc<KnownImages>,
    pub compression: Compression,
    /// A batch that writes so many bytes of whole pages writes them ahead.
    pub ahead_bytes_min: u64,
}

/// A batch on its way into the log.
struct Draft<'a> {
    batch: &'a WriteBatch,
    payload: StagingBuf,
    payload_crc: u32,
    captures: &'a Captures<'a>,
    /// Pages copied for clones, and what they were.
    staged: Versions,
    /// Pages whose bytes are in images.
    whole: Vec<WholePage<'a>>,
    ahead: Option<WrittenAhead<'a>>,
}

/// Pages copied for clones.
type Contents = HashMap<PageId, CloneSource>;
/// The last change of each when it was copied: of its bytes, its metadata or its place.
type Versions = Vec<(PageId, Lsn)>;

impl Committer {
    /// The submission lock and the state behind it: nothing is committed while it is held.
    pub fn lock(&self) -> MutexGuard<'_, PageTable> {
        self.submitted.lock()
    }

    /// Logs a batch and hands it to the applier. Returns the end of its frame and its new pages.
    pub fn submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        self.poison.check()?;
        self.try_submit(batch).map_err(|error| self.poison.set_by_device(error))
    }

    fn try_submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let pages = self.new_pages(batch.new_pages() as u64);
        let sources = batch.clone_sources();
        batch.check_captures(&pages)?;
        let captures = self.capture(batch)?;
        let born_in = self.arrivals(batch)?;
        let mut tries = 0;
        loop {
            // Clones are staged first and their versions are checked under the lock, so that a slow copy
            // holds up nobody. Who loses that race too often stages under the lock.
            tries += 1;
            let held = (tries > CLONE_TRIES).then(|| self.submitted.lock());
            let (contents, staged) = self.stage(&sources, held.as_deref())?;
            let (whole, ahead) = self.write_ahead(batch, &pages, held.as_deref())?;
            let images = ahead.iter().flat_map(WrittenAhead::images).copied();
            let images = whole.iter().map(|whole| whole.step).zip(images).collect();
            let lens = self.lens(batch, held.as_deref());
            let found = Found { staged: contents, images, captured: &captures.found, lens };
            let encoded = batch.encode(&pages, found)?;
            let (payload, payload_crc) = self.fill(encoded, born_in)?;
            let draft = Draft { batch, payload, payload_crc, captures: &captures, staged, whole, ahead };
            if let Some(point) = self.log_draft(draft, held)? {
                self.refresh_shadows(captures);
                return Ok((point, pages));
            }
        }
    }

    /// The ids of so many new pages.
    fn new_pages(&self, count: u64) -> Vec<PageId> {
        if count == 0 {
            // Most batches: they leave the counter, and its neighbours, to the caches of other threads.
            return Vec::new();
        }
        let first = self.next_page.fetch_add(count, Ordering::Relaxed);
        (first..first + count).map(PageId).collect()
    }

    /// Writes the batch's whole pages to an image file, if they are worth one. The length of an old page is
    /// only looked at: it is checked again under the lock.
    fn write_ahead<'a>(
        &'a self,
        batch: &'a WriteBatch,
        pages: &[PageId],
        held: Option<&PageTable>,
    ) -> Result<(Vec<WholePage<'a>>, Option<WrittenAhead<'a>>)> {
        let len_in = |table: &PageTable, page| table.get(page).map(|info| info.len);
        let whole = batch.whole_pages(pages, self.ahead_bytes_min, |page| match held {
            Some(table) => len_in(table, page),
            None => len_in(&self.submitted.lock(), page),
        });
        if whole.is_empty() {
            return Ok((whole, None));
        }
        let contents: Vec<(PageId, &[u8])> = whole.iter().map(|whole| (whole.page, whole.bytes)).collect();
        let write = || WrittenAhead::write(&self.files, self.store, self.compression, &contents);
        match self.log.pool.with_surplus(write) {
            Ok(ahead) => Ok((whole, Some(ahead))),
            Err(error @ Error::DiskFull { .. }) => Err(error),
            Err(error) => Err(self.poison.set(error)),
        }
    }

    /// Copies the pages that the batch clones, and notes their versions.
    fn stage(&self, sources: &[PageId], held: Option<&PageTable>) -> Result<(Contents, Versions)> {
        let mut contents = HashMap::new();
        let mut versions = Vec::new();
        for &page in sources {
            let len_in = |table: &PageTable| table.get(page).map_or(0, |info| info.len);
            let len = held.map_or_else(|| len_in(&self.submitted.lock()), len_in);
            let whole = |info: &PageInfo| (0, info.len);
            let (info, _, bytes) = self.applier.read(&*self.device, &self.staging, page, len, whole)?;
            let metadata = (*info.metadata).clone();
            contents.insert(page, CloneSource { place: info.place, metadata, bytes: bytes.to_vec() });
            versions.push((page, info.lsn));
            self.staging.give(bytes.into_staging());
        }
        Ok((contents, versions))
    }

    /// The rest of a submission; `None` if a page changed after it was staged for a clone, or has another
    /// length or place than when its bytes were taken for all of it or memory was allocated for it.
    fn log_draft(
        &self,
        mut draft: Draft<'_>,
        held: Option<MutexGuard<'_, PageTable>>,
    ) -> Result<Option<LogPoint>> {
        let encoded = |defect: Defect| Error::InvalidOperation { index: 0, reason: defect.to_string() };
        let ops = decode_payload(&draft.payload).map_err(encoded)?;
        // Before an Lsn is taken: the applier waits for no page.
        self.applier.cold().wait(ops.iter().filter_map(|at| at.op.page()))?;
        self.leases
            .check_thread(ops.iter().filter(|at| reaches_bytes(&at.op)).filter_map(|at| at.op.page()))?;
        let whole: HashMap<PageId, &[u8]> =
            draft.whole.iter().map(|whole| (whole.page, whole.bytes)).collect();
        let asides = ops.iter().filter_map(|at| stage_aside(&at.op, &whole, &self.staging).transpose());
        let asides = asides.collect::<Result<VecDeque<_>>>()?;
        let memory = self.allocate(&ops, held.as_deref())?;
        let spares = match self.spares(&ops, held.as_deref()) {
            Ok(spares) => spares,
            Err(error) => {
                self.discard(memory);
                return Err(error);
            }
        };

        // Looking a hundred times whether it is free before sleeping won nothing on two processors: as many system
        // calls (4 in 1000 commits of 8 threads), and a tenth more of the processors' time.
        let mut table = held.unwrap_or_else(|| self.submitted.lock());
        let mut logged = || -> Result<Option<(LogPoint, Changes)>> {
            self.poison.check()?;
            let epoch_of = |page| table.get(page).map_or(Epoch(0), |info| info.epoch);
            let lsn_of = |page| table.get(page).map(|info| info.lsn);
            let home_of = |page| home_in(&table, page);
            // Who leases a page from now on gets it behind this batch.
            let has_spare = |page: &PageId| {
                spares.iter().any(|(spared, memory)| spared == page && Some(home(memory)) == home_of(*page))
            };
            if !self.leases.leased(changed_in_place(&ops)).iter().all(has_spare) {
                return Ok(None);
            }
            self.leases.check_unpinned(ops.iter().filter_map(|at| taken_elsewhere(&at.op, home_of)))?;
            let len_of = |page| home_of(page).map(|(_, len)| len);
            if draft.staged.iter().any(|(page, lsn)| lsn_of(*page) != Some(*lsn))
                || draft.whole.iter().any(|whole| len_of(whole.page) != whole.len_before)
            {
                return Ok(None);
            }
            if ops.iter().any(|at| goes_elsewhere(&at.op))
                && !memory.iter().map(home).eq(homes_made(&ops, home_of)?)
            {
                return Ok(None);
            }
            for (page, expected) in draft.batch.expectations().iter().copied().chain(draft.captures.epochs())
            {
                let found = epoch_of(page);
                if found != expected {
                    return Err(Error::Conflict { page, expected, found });
                }
            }
            let lsn = table.lsn().next();
            let changes = table
                .plan(lsn, &ops, PlanMode::Commit)
                .map_err(|(index, refusal)| refused(index, refusal))?;
            let purpose = if draft.batch.only_deletes() { SpacePurpose::Reserve } else { SpacePurpose::User };
            let appended = self.log.append(&draft.payload, draft.payload_crc, purpose);
            let point = appended.inspect_err(|error| {
                // Only a full disk leaves it certain that no frame names the images.
                if let (Some(ahead), false) = (&mut draft.ahead, matches!(error, Error::DiskFull { .. })) {
                    ahead.leave();
                }
            })?;
            assert!(point.lsn == lsn);
            Ok(Some((point, changes)))
        };
        match logged() {
            Ok(Some((point, changes))) => {
                table.install(&changes);
                draft.captures.belong_to(&changes);
                if let Some(ahead) = draft.ahead.take() {
                    // The next snapshot names them: they need not be written again.
                    for (whole, image) in draft.whole.iter().zip(ahead.images()) {
                        self.known.note_ahead(whole.page, point.lsn, *image, whole.bytes.len() as u64);
                    }
                    ahead.logged(point.segment);
                }
                let payload = draft.payload;
                self.applier.push(Work { point, payload, changes, memory, spares, asides });
                Ok(Some(point))
            }
            other => {
                drop(table);
                for staged in asides.into_iter().chain([draft.payload]) {
                    self.staging.give(staged.into_staging());
                }
                self.discard(memory.into_iter().chain(spares.into_iter().map(|(_, spare)| spare)));
                other.map(|_| None)
            }
        }
    }

    /// Page memory for the creates, resizes and moves of a batch, in their order: all of it or none. Where pages
    /// are is only looked at: it is checked again under the lock.
    fn allocate(&self, ops: &[OpAt<'_>], held: Option<&PageTable>) -> Result<VecDeque<PageMemory>> {
        let homes = homes_made(ops, |page| match held {
            Some(table) => home_in(table, page),
            None => home_in(&self.submitted.lock(), page),
        })?;
        self.allocate_all(Purpose::Page, &homes).map(VecDeque::from)
    }

    fn allocate_all(&self, purpose: Purpose, pages: &[(Place, u64)]) -> Result<Vec<PageMemory>> {
        match self.arena.allocate_all(purpose, pages) {
            // Deletes that are logged may not have reached the applier yet: whether a batch fits must not
            // depend on how far it has come.
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => {
                self.applier.turn(|_| Ok(()))?;
                self.arena.allocate_all(purpose, pages)
            }
            other => other,
        }
    }

    /// Memory to which pages move that a batch changes while they are leased: for all of them or none.
    fn spares(&self, ops: &[OpAt<'_>], held: Option<&PageTable>) -> Result<Vec<(PageId, PageMemory)>> {
        let mut spares = Vec::new();
        for page in self.leases.leased(changed_in_place(ops)) {
            let wanted =
                held.map_or_else(|| home_in(&self.submitted.lock(), page), |table| home_in(table, page));
            // A page that is not there is refused with its operation.
            let Some(wanted) = wanted else { continue };
            match self.allocate_all(Purpose::Spare, &[wanted]) {
                Ok(spare) => spares.extend(spare.into_iter().map(|spare| (page, spare))),
                // Meanwhile the applier came to a batch that moved it.
                Err(_) if self.leases.leased([page]).is_empty() => {}
                Err(error) => {
                    self.discard(spares.into_iter().map(|(_, spare)| spare));
                    return Err(error);
                }
            }
        }
        Ok(spares)
    }

    fn discard(&self, memory: impl IntoIterator<Item = PageMemory>) {
        for page in memory {
            if let Err(error) = self.arena.discard(page) {
                tracing::warn!(%error, "cannot give page memory back");
            }
        }
    }
}

/// Where a page is, or its memory: its place, and its length in bytes.
type Home = (Place, u64);

fn home_in(table: &PageTable, page: PageId) -> Option<Home> {
    table.get(page).map(|info| (info.place, info.len))
}

fn home(memory: &PageMemory) -> Home {
    (memory.place(), memory.byte_len())
}

/// What memory a batch's creates, resizes and moves need, in their order, where `home_of` tells of the pages
/// before the batch.
fn homes_made(ops: &[OpAt<'_>], home_of: impl Fn(PageId) -> Option<Home>) -> Result<Vec<Home>> {
    let mut made = Vec::new();
    let mut now: HashMap<PageId, Home> = HashMap::new();
    for at in ops {
        let old = |page| now.get(&page).copied().or_else(|| home_of(page)).ok_or(Error::UnknownPage { page });
        let (page, place, len) = match at.op {
            Op::Create { page, len, place, .. } => (page, place, len),
            Op::Resize { page, len } => (page, old(page)?.0, len),
            Op::Move { page, place } => match old(page)? {
                (here, _) if here == place => continue,
                (_, len) => (page, place, len),
            },
            _ => continue,
        };
        if len > PAGE_LEN_MAX {
            return Err(Error::Limit { what: "page length", found: len, limit: PAGE_LEN_MAX });
        }
        now.insert(page, (place, len));
        made.push((place, len));
    }
    Ok(made)
}

/// Whether an operation takes its page to other memory.
fn goes_elsewhere(op: &Op<'_>) -> bool {
    matches!(op, Op::Resize { .. } | Op::Move { .. })
}

/// The page that an operation takes out of the memory that it has before the batch.
fn taken_elsewhere(op: &Op<'_>, home_of: impl Fn(PageId) -> Option<Home>) -> Option<PageId> {
    match *op {
        Op::Resize { page, .. } | Op::Delete { page } => Some(page),
        Op::Move { page, place } => home_of(page).is_some_and(|(here, _)| here != place).then_some(page),
        _ => None,
    }
}

/// Whether an operation changes a page's bytes, or takes its memory away.
fn reaches_bytes(op: &Op<'_>) -> bool {
    op.changes_bytes() || matches!(op, Op::Image { .. } | Op::Delete { .. } | Op::Move { .. })
}

/// The pages that operations change where they lie: for the others there is new memory, or none.
fn changed_in_place<'a>(ops: &'a [OpAt<'_>]) -> impl Iterator<Item = PageId> + 'a {
    let in_place = |op: &Op<'_>| reaches_bytes(op) && !goes_elsewhere(op) && !matches!(op, Op::Delete { .. });
    ops.iter().filter(move |at| in_place(&at.op)).filter_map(|at| at.op.page())
}

fn refused(index: usize, refusal: Refusal) -> Error {
    match refusal {
        Refusal::UnknownPage(page) => Error::UnknownPage { page },
        Refusal::OutOfBounds { page, offset, len, page_len } => {
            Error::OutOfBounds { page, offset, len, page_len }
        }
        Refusal::KeyTaken { key, holder } => Error::KeyTaken { key, holder },
        Refusal::Limit { what, found, limit } => Error::Limit { what, found, limit },
        other => Error::InvalidOperation { index, reason: other.to_string() },
    }
}
