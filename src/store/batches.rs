//! Changing pages: batches on their way in.

use remanent_format::{Lsn, Position};

use super::Store;
use super::ticket::{CommitReceipt, Ticket, wait};
use crate::error::{Error, Result};
use crate::write::batch::WriteBatch;

#[cfg(doc)]
use crate::options::{LogIo, Options};

impl Store {
    /// An empty batch.
    pub fn batch(&self) -> WriteBatch {
        WriteBatch::default()
    }

    /// Logs a batch, and returns at once with what one waits on. The batch is `Logged` then, so that it
    /// survives the death of the process; where the log is written directly ([`LogIo::Direct`]), only once
    /// [`Ticket::wait`] has returned for it.
    ///
    /// # Errors
    /// If the batch cannot be committed, with nothing changed: [`Error::UnknownPage`],
    /// [`Error::OutOfBounds`], [`Error::Conflict`], [`Error::KeyTaken`], [`Error::InvalidOperation`],
    /// [`Error::Limit`], [`Error::OverBudget`], [`Error::DiskFull`]; [`Error::Damaged`] as for
    /// [`Store::read`]. [`Error::Poisoned`] after a failure.
    pub fn submit(&self, batch: impl Into<WriteBatch>) -> Result<Ticket> {
        let committed = self.log_batch(&batch.into())?;
        Ok(Ticket::new(committed, self.parts.engine.0.clone()))
    }

    /// Submits a batch and waits for the acknowledgement that [`Options::ack`] names.
    ///
    /// # Errors
    /// As for [`Store::submit`], and [`Error::Poisoned`] if the store fails while waiting.
    pub fn commit(&self, batch: impl Into<WriteBatch>) -> Result<CommitReceipt> {
        // Without a ticket: the engine that it holds is counted, and all threads count on the same word.
        let committed = self.log_batch(&batch.into())?;
        wait(self.parts.options.ack, committed.position.lsn, self.engine())?;
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
        self.engine().log.wait_durable(lsn)
    }

    /// The newest batch that is logged; 0 in a forked child, which knows of none.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        if self.check_process().is_err() {
            return Lsn(0);
        }
        self.engine().versions.visible()
    }
}
