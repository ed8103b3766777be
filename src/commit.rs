//! Floor 6. Committing a batch: check everything, log it, then let it be seen.
//!
//! 1. Outside the lock: stage what clones copy, encode, checksum, allocate page memory. Nothing so far is
//!    visible, and all of it can be taken back.
//! 2. Under the submission lock: preconditions, the plan, the append (I1: only now, with payload and
//!    checksum in hand, is an Lsn assigned), the table, the hand-over to the applier. The order of the lock
//!    is the order of the log and of the lane.
//!
//! A crash before the append loses a batch that nobody was told of; after it, recovery replays the batch.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use remanent_format::limits::PAGE_LEN_MAX;
use remanent_format::op::{Op, OpAt, decode_payload};
use remanent_format::table::{Changes, PlanMode, Refusal};
use remanent_format::{Defect, Epoch, LogPoint, PageId, PageTable, Place};

use crate::applier::{Applier, Work, stage_aside};
use crate::arena::{Arena, PageMemory};
use crate::batch::{CloneSource, WriteBatch};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::log::{Log, SpacePurpose};
use crate::poison::Poison;
use crate::staging::StagingPool;

/// How often clones are staged without the lock before the lock is held for it.
const CLONE_TRIES: usize = 3;

/// Turns batches into commits.
pub(crate) struct Committer {
    /// The state after the last logged batch.
    submitted: Mutex<PageTable>,
    /// The next page id. Ids are taken before a batch is known to be good; a failed one leaves a gap.
    next_page: AtomicU64,
    log: Arc<Log>,
    applier: Arc<Applier>,
    device: Arc<dyn Device>,
    arena: Arc<Arena>,
    staging: Arc<StagingPool>,
    poison: Arc<Poison>,
}

/// Pages copied for clones.
type Contents = HashMap<PageId, CloneSource>;
/// The epochs at which they were copied.
type Epochs = Vec<(PageId, Epoch)>;

impl Committer {
    pub fn new(
        table: PageTable,
        log: Arc<Log>,
        applier: Arc<Applier>,
        device: Arc<dyn Device>,
        arena: Arc<Arena>,
        staging: Arc<StagingPool>,
        poison: Arc<Poison>,
    ) -> Self {
        let next_page = AtomicU64::new(table.next_page());
        Self { submitted: Mutex::new(table), next_page, log, applier, device, arena, staging, poison }
    }

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
        let count = batch.new_pages() as u64;
        let first = self.next_page.fetch_add(count, Ordering::Relaxed);
        let pages: Vec<PageId> = (first..first + count).map(PageId).collect();
        let sources = batch.clone_sources();
        let mut tries = 0;
        loop {
            // Clones are staged first and their epochs are checked under the lock, so that a slow copy
            // holds up nobody. Who loses that race too often stages under the lock.
            tries += 1;
            let held = (tries > CLONE_TRIES).then(|| self.submitted.lock());
            let (staged, epochs) = self.stage(&sources)?;
            let payload = batch.encode(&pages, staged)?;
            if let Some(point) = self.log_payload(batch, &payload, &epochs, held)? {
                return Ok((point, pages));
            }
        }
    }

    /// Copies the pages that the batch clones, and notes their epochs.
    fn stage(&self, sources: &[PageId]) -> Result<(Contents, Epochs)> {
        let mut contents = HashMap::new();
        let mut epochs = Vec::new();
        for &page in sources {
            let (info, _, bytes) =
                self.applier.read(&*self.device, &self.staging, page, |info| (0, info.len))?;
            let metadata = (*info.metadata).clone();
            contents.insert(page, CloneSource { place: info.place, metadata, bytes: bytes.to_vec() });
            epochs.push((page, info.epoch));
            self.staging.give(bytes.into_staging());
        }
        Ok((contents, epochs))
    }

    /// The rest of a submission; `None` if a page changed after it was staged for a clone.
    fn log_payload(
        &self,
        batch: &WriteBatch,
        payload: &[u8],
        staged: &[(PageId, Epoch)],
        held: Option<MutexGuard<'_, PageTable>>,
    ) -> Result<Option<LogPoint>> {
        let encoded = |defect: Defect| Error::InvalidOperation { index: 0, reason: defect.to_string() };
        let ops = decode_payload(payload).map_err(encoded)?;
        let payload_crc = crc32fast::hash(payload);
        let mut payload_staged = self.staging.take(payload.len())?;
        payload_staged.copy_from_slice(payload);
        let asides = ops.iter().map(|at| stage_aside(&at.op, &self.staging)).filter_map(Result::transpose);
        let asides = asides.collect::<Result<VecDeque<_>>>()?;
        let memory = self.allocate(&ops, held.as_deref())?;

        let mut table = held.unwrap_or_else(|| self.submitted.lock());
        let logged = || -> Result<Option<(LogPoint, Changes)>> {
            self.poison.check()?;
            let epoch_of = |page| table.get(page).map_or(Epoch(0), |info| info.epoch);
            if staged.iter().any(|(page, epoch)| epoch_of(*page) != *epoch) {
                return Ok(None);
            }
            for &(page, expected) in batch.expectations() {
                let found = epoch_of(page);
                if found != expected {
                    return Err(Error::Conflict { page, expected, found });
                }
            }
            let lsn = table.lsn().next();
            let changes = table
                .plan(lsn, &ops, PlanMode::Commit)
                .map_err(|(index, refusal)| refused(index, refusal))?;
            let purpose = if batch.only_deletes() { SpacePurpose::Reserve } else { SpacePurpose::User };
            let point = self.log.append(payload, payload_crc, purpose)?;
            assert!(point.lsn == lsn);
            Ok(Some((point, changes)))
        };
        match logged() {
            Ok(Some((point, changes))) => {
                table.install(&changes);
                self.applier.push(Work { point, payload: payload_staged, changes, memory, asides });
                Ok(Some(point))
            }
            other => {
                drop(table);
                for staged in asides.into_iter().chain([payload_staged]) {
                    self.staging.give(staged.into_staging());
                }
                self.discard(memory);
                other.map(|_| None)
            }
        }
    }

    /// Page memory for the creates and resizes of a batch, in their order: all of it or none.
    fn allocate(&self, ops: &[OpAt<'_>], held: Option<&PageTable>) -> Result<VecDeque<PageMemory>> {
        let mut memory = VecDeque::new();
        let mut created: HashMap<PageId, Place> = HashMap::new();
        for at in ops {
            let wanted = match at.op {
                Op::Create { page, len, place, .. } => {
                    created.insert(page, place);
                    Some((place, len))
                }
                Op::Resize { page, len } => {
                    let place_in = |table: &PageTable| table.get(page).map(|info| info.place);
                    let place = created.get(&page).copied().or_else(|| match held {
                        Some(table) => place_in(table),
                        None => place_in(&self.submitted.lock()),
                    });
                    Some((place.ok_or(Error::UnknownPage { page })?, len))
                }
                _ => None,
            };
            let Some((place, len)) = wanted else { continue };
            match self.allocate_one(place, len) {
                Ok(page) => memory.push_back(page),
                Err(error) => {
                    self.discard(memory);
                    return Err(error);
                }
            }
        }
        Ok(memory)
    }

    fn allocate_one(&self, place: Place, len: u64) -> Result<PageMemory> {
        if len > PAGE_LEN_MAX {
            return Err(Error::Limit { what: "page length", found: len, limit: PAGE_LEN_MAX });
        }
        match self.arena.allocate(place, len) {
            // Deletes that are logged may not have reached the applier yet: whether a batch fits must not
            // depend on how far it has come.
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => {
                self.applier.turn(|_| Ok(()))?;
                self.arena.allocate(place, len)
            }
            other => other,
        }
    }

    fn discard(&self, memory: VecDeque<PageMemory>) {
        for page in memory {
            if let Err(error) = self.arena.discard(page) {
                tracing::warn!(%error, "cannot give page memory back");
            }
        }
    }
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
