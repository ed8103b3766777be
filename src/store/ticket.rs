//! Handles to submitted batches. A thread or a task can wait for an acknowledgement, with or without a timeout.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use remanent_format::{Lsn, PageId, Position};

use crate::base::process::ForkGuard;
use crate::base::sync::Instant;
use crate::base::wakers::Wakers;
use crate::device::RawStream;
use crate::engine::Engine;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::options::Ack;

/// The position of a committed batch in the log, and the pages that it created.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommitReceipt {
    /// The batch's position in the log.
    pub position: Position,
    /// The pages that the batch created, in the order of its create and clone operations.
    pub pages: Vec<PageId>,
}

/// A handle to a submitted batch, returned by [`Store::submit`](crate::Store::submit). Use the handle to wait until the
/// batch is acknowledged.
///
/// ```
/// use std::time::Duration;
/// use remanent::{Ack, Store};
/// let store = Store::temporary()?;
/// let ticket = store.submit(store.batch().set_root("step", 1u64))?;
/// assert!(ticket.is_acknowledged(Ack::Logged)?, "a mapped log has it by now");
/// assert!(ticket.wait_timeout(Ack::Durable, Duration::from_secs(60))?);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ticket {
    committed: CommitReceipt,
    engine: ForkGuard<Arc<Engine>>,
}

/// A future that completes when a batch is acknowledged. Returned by [`Ticket::acknowledged`].
#[derive(Debug)]
#[must_use = "a future does nothing until it is awaited"]
pub struct Acknowledged {
    ticket: Ticket,
    ack: Ack,
    /// The id under which the waker is registered, or `None` before the first poll.
    id: Option<usize>,
}

impl Ticket {
    pub(super) fn new(committed: CommitReceipt, engine: Arc<Engine>) -> Self {
        Self { committed, engine: ForkGuard::new(engine) }
    }

    /// Returns the batch's position in the log.
    #[must_use]
    pub fn position(&self) -> Position {
        self.committed.position
    }

    /// Returns the pages that the batch created, in the order of its create and clone operations.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.committed.pages
    }

    /// Returns whether the batch is acknowledged at level `ack`. Neither waits nor starts a sync.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the batch is not acknowledged and never will be; [`Error::Archive`] for `Ack::Archived`
    /// if the store has no archive or the archive has ended; [`Error::Forked`].
    pub fn is_acknowledged(&self, ack: Ack) -> Result<bool> {
        let Engine { log, applier, .. } = &**self.engine.check()?;
        let lsn = self.committed.position.lsn;
        match ack {
            Ack::Logged => log.is_logged(lsn),
            Ack::Applied => applier.is_applied(lsn),
            Ack::Durable => log.is_durable(lsn),
            Ack::Archived => self.engine.check()?.archive()?.is_archived(lsn),
        }
    }

    /// Waits until the batch is acknowledged at level `ack`.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store has failed; [`Error::Archive`] for `Ack::Archived` if the store has no archive
    /// or the archive has ended, and [`Error::Closed`] if the store was closed before; [`Error::Forked`].
    pub fn wait(&self, ack: Ack) -> Result<()> {
        wait(ack, self.committed.position.lsn, self.engine.check()?)
    }

    /// Waits for at most `timeout`, and returns whether the batch is acknowledged at level `ack`. A thread of the store
    /// starts the sync that the batch needs. The sync continues if the timeout expires first.
    ///
    /// # Errors
    /// Same as [`Ticket::wait`].
    pub fn wait_timeout(&self, ack: Ack, timeout: Duration) -> Result<bool> {
        let Engine { log, applier, .. } = &**self.engine.check()?;
        let Some(until) = Instant::now().checked_add(timeout) else { return self.wait(ack).map(|()| true) };
        let lsn = self.committed.position.lsn;
        match ack {
            Ack::Logged => log.wait_logged_until(lsn, until),
            Ack::Applied => applier.wait_applied_until(lsn, until),
            Ack::Durable => log.wait_durable_until(lsn, until),
            Ack::Archived => self.engine.check()?.ask_to_archive(lsn)?.wait(lsn, Some(until)),
        }
    }

    /// Returns a future that completes when the batch is acknowledged at level `ack`. Any executor can poll the future.
    /// A thread of the store runs the sync that the batch needs, so no executor thread blocks.
    ///
    /// ```
    /// # use std::{pin::pin, sync::Arc, task::{Context, Poll, Wake, Waker}, thread};
    /// # struct Unpark(thread::Thread);
    /// # impl Wake for Unpark { fn wake(self: Arc<Self>) { self.0.unpark() } }
    /// # fn block_on<T>(future: impl Future<Output = T>) -> T {
    /// #     let mut future = pin!(future);
    /// #     let waker = Waker::from(Arc::new(Unpark(thread::current())));
    /// #     loop {
    /// #         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
    /// #             Poll::Ready(output) => return output,
    /// #             Poll::Pending => thread::park(),
    /// #         }
    /// #     }
    /// # }
    /// use remanent::{Ack, Store};
    /// let store = Store::temporary()?;
    /// let ticket = store.submit(store.batch().set_root("step", 1u64))?;
    /// block_on(async { ticket.acknowledged(Ack::Durable).await })?;
    /// assert!(ticket.is_acknowledged(Ack::Durable)?);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// The future returns the errors of [`Ticket::wait`].
    pub fn acknowledged(&self, ack: Ack) -> Acknowledged {
        Acknowledged { ticket: self.clone(), ack, id: None }
    }

    /// Makes `stream` wait on the device until the batch is applied, so that work enqueued on the stream after this
    /// call observes the batch. The host waits only until the batch is in the device's queue.
    ///
    /// # Errors
    /// [`Error::Refused`] if a graph is being captured from the stream, if the stream belongs to another device,
    /// or if pages are in host memory; [`Error::Poisoned`] if the store has failed; [`Error::Forked`]; a device error.
    pub fn wait_on(&self, stream: RawStream) -> Result<()> {
        let Engine { applier, leases, .. } = &**self.engine.check()?;
        leases.signal(stream, applier.wait_applied(self.committed.position.lsn)?)
    }
}

impl Acknowledged {
    /// Returns the set of wakers with which the future must register for its acknowledgement level.
    fn wakers(&self) -> Result<&Wakers> {
        let Engine { log, applier, .. } = &**self.ticket.engine.check()?;
        Ok(match self.ack {
            Ack::Applied => applier.wakers(),
            Ack::Logged | Ack::Durable => log.wakers(),
            Ack::Archived => self.ticket.engine.check()?.archive()?.wakers(),
        })
    }

    fn poll_once(&mut self, context: &mut Context<'_>) -> Result<bool> {
        if self.ticket.is_acknowledged(self.ack)? {
            return Ok(true);
        }
        let lsn = self.ticket.position().lsn;
        let wakers = self.wakers()?;
        let id = self.id.unwrap_or_else(|| wakers.id());
        wakers.add(id, lsn, context.waker());
        self.id = Some(id);
        let Engine { log, applier, .. } = &**self.ticket.engine.check()?;
        match self.ack {
            Ack::Applied => applier.expedite(lsn),
            Ack::Logged | Ack::Durable => log.ask_for_sync(),
            Ack::Archived => _ = self.ticket.engine.check()?.ask_to_archive(lsn)?,
        }
        // The batch may have been acknowledged before the waker was registered.
        self.ticket.is_acknowledged(self.ack)
    }
}

impl Future for Acknowledged {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        match self.poll_once(context) {
            Ok(false) => Poll::Pending,
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for Acknowledged {
    fn drop(&mut self) {
        if let (Some(id), Ok(wakers)) = (self.id, self.wakers()) {
            wakers.remove(id);
        }
    }
}

/// Waits until batch `lsn` is acknowledged at level `ack`.
pub(super) fn wait(ack: Ack, lsn: Lsn, engine: &Engine) -> Result<()> {
    let Engine { log, applier, .. } = engine;
    match ack {
        Ack::Logged => log.wait_logged(lsn),
        Ack::Applied => applier.wait_applied(lsn).map(drop),
        Ack::Durable => log.wait_durable(lsn),
        Ack::Archived => engine.ask_to_archive(lsn)?.wait(lsn, None).map(drop),
    }
}
