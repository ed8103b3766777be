//! Changing pages: batches on their way in, and what one waits on.

use std::sync::Arc;

use remanent_format::{Lsn, PageId, Position};

use super::{Store, StoreParts};
use crate::applier::{Applier, Leases};
use crate::base::process::ForkGuard;
use crate::device::RawStream;
use crate::error::{Error, Result};
use crate::log::Log;
use crate::options::Ack;
use crate::write::batch::WriteBatch;

#[cfg(doc)]
use crate::options::{LogIo, Options};

/// A committed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitReceipt {
    /// Its place in the log.
    pub position: Position,
    /// The pages that it created, in the order of its creates and clones.
    pub pages: Vec<PageId>,
}

/// A submitted batch, to wait for.
#[derive(Clone)]
pub struct Ticket {
    committed: CommitReceipt,
    waits: ForkGuard<TicketWait>,
}

/// What a ticket waits by.
#[derive(Clone)]
struct TicketWait {
    log: Arc<Log>,
    applier: Arc<Applier>,
    leases: Arc<Leases>,
}

impl Ticket {
    /// Where the batch lies in the log.
    #[must_use]
    pub fn position(&self) -> Position {
        self.committed.position
    }

    /// The pages that the batch created, in the order of its creates and clones.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.committed.pages
    }

    /// Waits until the batch is acknowledged at this level.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store failed before; [`Error::Forked`].
    pub fn wait(&self, ack: Ack) -> Result<()> {
        let TicketWait { log, applier, .. } = self.waits.check()?;
        wait(ack, self.committed.position.lsn, log, applier)
    }

    /// Lets work that is put on the caller's stream from now on see the batch. The stream waits on the device
    /// until the batch is applied; the host waits only until it is in the device's queue.
    ///
    /// # Errors
    /// [`Error::StreamRefused`] if a graph is being captured from the stream, if it is another device's, or if
    /// pages live in host memory; [`Error::Poisoned`] if the store failed before; [`Error::Forked`]; a device error.
    pub fn wait_on(&self, stream: RawStream) -> Result<()> {
        let TicketWait { applier, leases, .. } = self.waits.check()?;
        leases.signal(stream, applier.wait_applied(self.committed.position.lsn)?)
    }
}

impl Store {
    /// An empty batch.
    pub fn batch(&self) -> WriteBatch {
        WriteBatch::default()
    }

    /// Logs a batch, and returns at once with what one waits on. The batch is `Logged` then, so that it survives
    /// the death of the process; where the log is written directly ([`LogIo::Direct`]), only once [`Ticket::wait`]
    /// has returned for it.
    ///
    /// # Errors
    /// If the batch cannot be committed, with nothing changed: [`Error::UnknownPage`],
    /// [`Error::OutOfBounds`], [`Error::Conflict`], [`Error::KeyTaken`], [`Error::InvalidOperation`],
    /// [`Error::Limit`], [`Error::OverBudget`], [`Error::DiskFull`]; [`Error::Damaged`] as for [`Store::read`].
    /// [`Error::Poisoned`] after a failure.
    pub fn submit(&self, batch: WriteBatch) -> Result<Ticket> {
        let committed = self.log_batch(&batch)?;
        let StoreParts { log, applier, leases, .. } = &*self.parts;
        let (log, applier, leases) = (log.clone(), applier.clone(), leases.clone());
        Ok(Ticket { committed, waits: ForkGuard::new(TicketWait { log, applier, leases }) })
    }

    /// Submits a batch and waits for the acknowledgement that [`Options::ack`] names.
    ///
    /// # Errors
    /// As for [`Store::submit`], and [`Error::Poisoned`] if the store fails while waiting.
    pub fn commit(&self, batch: WriteBatch) -> Result<CommitReceipt> {
        // Without a ticket: what it holds is counted, and all threads count on the same three words.
        let committed = self.log_batch(&batch)?;
        wait(self.ack, committed.position.lsn, &self.parts.log, &self.parts.applier)?;
        Ok(committed)
    }

    fn log_batch(&self, batch: &WriteBatch) -> Result<CommitReceipt> {
        self.check_process()?;
        let (point, pages) = self.in_store(self.parts.committer.submit(batch))?;
        Ok(CommitReceipt { position: Position { incarnation: point.incarnation, lsn: point.lsn }, pages })
    }

    /// Waits until batch `lsn`, and every one before it, survives a power cut.
    ///
    /// # Errors
    /// [`Error::Limit`] if there is no such batch yet; [`Error::Poisoned`].
    pub fn wait_durable(&self, lsn: Lsn) -> Result<()> {
        self.check_process()?;
        let newest = self.parts.committer.lock().lsn();
        if lsn > newest {
            return Err(Error::Limit { what: "lsn to wait for", found: lsn.0, limit: newest.0 });
        }
        self.parts.log.wait_durable(lsn)
    }

    /// The newest batch that is logged; 0 in a forked child, which knows of none.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        if self.check_process().is_err() {
            return Lsn(0);
        }
        self.parts.versions.visible()
    }
}

/// Waits until a batch that was submitted is acknowledged at this level.
fn wait(ack: Ack, lsn: Lsn, log: &Log, applier: &Applier) -> Result<()> {
    match ack {
        Ack::Logged => log.wait_logged(lsn),
        Ack::Applied => applier.wait_applied(lsn).map(drop),
        Ack::Durable => log.wait_durable(lsn),
    }
}
