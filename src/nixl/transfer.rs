//! Transfers between ranges of two agents.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::endpoint::{Endpoint, Peer};
use super::library::{Library, Owned, Progress, Raw};
use super::region::{LocalRange, RegionKind, Registered, RemoteRange, ranges};
use crate::error::{NixlError, Result};

/// Time for which a waiting thread yields before it starts to sleep.
const YIELDING: Duration = Duration::from_micros(200);
/// Maximum time between two checks of the status of a transfer.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// The direction of a transfer. The numbers are those of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read = 0,
    Write = 1,
}

/// A transfer that has started. Returned by [`Agent::write`](super::Agent::write) and
/// [`Agent::read`](super::Agent::read).
///
/// The transfer keeps the memory of its local ranges alive. Dropping an unfinished transfer waits for its end like
/// [`Transfer::wait`], because the library cannot cancel a transfer, and bytes could still arrive.
#[must_use = "dropping a transfer waits for it, and ignores a failure"]
pub struct Transfer<'m> {
    agent: Arc<Endpoint>,
    peer: String,
    operation: Operation,
    /// The request, or `None` after the transfer has ended or was abandoned.
    request: Option<Request>,
    started: Instant,
    /// Keeps the local ranges registered.
    held: Vec<Arc<dyn Registered + 'm>>,
}

/// A handle to a request of the library.
struct Request(Raw);

// SAFETY: the library accepts calls of an agent with strict synchronization on any thread.
unsafe impl Send for Request {}
// SAFETY: all calls to the library need a unique reference to the transfer.
unsafe impl Sync for Request {}

impl<'m> Transfer<'m> {
    pub(super) fn start(
        agent: &Arc<Endpoint>,
        peer: &Peer,
        operation: Operation,
        pairs: &[(LocalRange<'m>, RemoteRange)],
        notification: Option<&[u8]>,
    ) -> Result<Self> {
        let raw_agent = agent.raw()?;
        let (local_kind, remote_kind) = check(agent, peer, operation, pairs)?;
        if operation == Operation::Write {
            pairs.iter().try_for_each(|(local, _)| local.region.wait_written())?;
        }
        let library = agent.library();
        let failed = |fault| agent.failed(fault);
        let local = ranges(agent, local_kind, pairs.iter().map(|(local, _)| (local.address(), local.len)))?;
        let remote =
            ranges(agent, remote_kind, pairs.iter().map(|(_, remote)| (remote.address(), remote.len)))?;
        let arguments = notification.map(|message| arguments(agent, message)).transpose()?;
        let raw_arguments = arguments.as_ref().map_or(std::ptr::null_mut(), Owned::raw);
        let mut request: Raw = std::ptr::null_mut();
        // SAFETY: all handles are live, the name ends with a zero byte, and the pointer points to a live handle.
        unsafe {
            library.create_request(
                raw_agent,
                operation as c_int,
                local.raw(),
                remote.raw(),
                peer.raw_name().as_ptr(),
                &mut request,
                raw_arguments,
            )
        }
        .map_err(failed)?;
        let mut transfer = Self {
            agent: agent.clone(),
            peer: peer.name().to_owned(),
            operation,
            request: Some(Request(request)),
            started: Instant::now(),
            held: pairs.iter().map(|(local, _)| local.region.clone()).collect(),
        };
        // SAFETY: the agent and the request are live, and `held` keeps the local ranges valid.
        match unsafe { library.post_request(raw_agent, request, raw_arguments) } {
            Ok(Progress::InFlight) => {}
            Ok(Progress::Done) => transfer.release(),
            Err(fault) => {
                transfer.release();
                return Err(agent.failed(fault));
            }
        }
        Ok(transfer)
    }

    /// Returns true if the transfer is complete. Does not wait.
    ///
    /// # Errors
    /// [`NixlError::Failed`] if the transfer has failed, which also ends it; [`Error::Forked`](crate::Error::Forked).
    pub fn is_complete(&mut self) -> Result<bool> {
        let raw = self.agent.raw()?;
        let Some(Request(request)) = self.request else { return Ok(true) };
        // SAFETY: the agent and the request are live.
        match unsafe { self.agent.library().request_status(raw, request) } {
            Ok(Progress::InFlight) => Ok(false),
            Ok(Progress::Done) => {
                self.release();
                Ok(true)
            }
            Err(fault) => {
                self.release();
                Err(self.agent.failed(fault))
            }
        }
    }

    /// Waits until the transfer is complete. After a write, the memory of the peer contains the bytes.
    ///
    /// # Errors
    /// [`NixlError::Failed`]; [`NixlError::TimedOut`] if the agent's time limit is exceeded, in which case the memory
    /// of the local ranges stays registered for the lifetime of the process; [`Error::Forked`](crate::Error::Forked).
    pub fn wait(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        let limit = self.agent.timeout();
        while !self.is_complete()? {
            let waited = self.started.elapsed();
            if waited >= limit {
                self.abandon();
                let (agent, peer) = (self.agent.name().to_owned(), self.peer.clone());
                return Err(NixlError::TimedOut { agent, peer, waited: limit }.into());
            }
            pause(waited);
        }
        Ok(())
    }

    /// Frees the request of a transfer that has ended.
    fn release(&mut self) {
        let (Some(Request(request)), Ok(raw)) = (self.request.take(), self.agent.raw()) else { return };
        let library = self.agent.library();
        // SAFETY: the agent and the request are live.
        let released = unsafe { library.release_request(raw, request) };
        // SAFETY: the request was released, or the library refuses this call.
        let freed = released.and_then(|_| unsafe { library.destroy_request(request) });
        if let Err(fault) = freed {
            let error = self.agent.failed(fault);
            tracing::warn!(%error, "cannot free a request");
        }
    }

    /// Abandons the transfer: leaks the request and the memory of the local ranges.
    fn abandon(&mut self) {
        self.request = None;
        self.held.drain(..).for_each(std::mem::forget);
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        if self.request.is_none() {
            return;
        }
        if self.agent.raw().is_err() {
            // In a forked child, the parent's transfer continues.
            self.abandon();
        } else if let Err(error) = self.finish() {
            tracing::warn!(%error, "a dropped transfer failed");
        }
    }
}

impl fmt::Debug for Transfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("operation", &self.operation)
            .field("peer", &self.peer)
            .field("is_complete", &self.request.is_none())
            .finish()
    }
}

/// Checks the ranges of a transfer. Returns the kinds of the local and of the remote memory.
fn check(
    agent: &Arc<Endpoint>,
    peer: &Peer,
    operation: Operation,
    pairs: &[(LocalRange<'_>, RemoteRange)],
) -> Result<(RegionKind, RegionKind), NixlError> {
    let invalid = |reason| Err(NixlError::InvalidTransfer { reason });
    let Some((first_local, first_remote)) = pairs.first() else { return invalid("it has no ranges") };
    let kinds = (first_local.region.location().kind, first_remote.region.kind());
    for (local, remote) in pairs {
        let (from, to) = (local.region.location(), &remote.region);
        if local.len != remote.len {
            return invalid("the ranges of a pair have different lengths");
        }
        if !Arc::ptr_eq(local.region.agent(), agent) {
            return invalid("a local range belongs to another agent");
        }
        if to.agent() != peer.name() {
            return invalid("a remote range belongs to another peer");
        }
        if (from.kind, to.kind()) != kinds {
            return invalid("the ranges of one side have different kinds of memory");
        }
        let is_writable = match operation {
            Operation::Read => from.is_writable,
            Operation::Write => to.is_writable(),
        };
        if !is_writable {
            return invalid("the target is read-only, as pages are");
        }
    }
    Ok(kinds)
}

/// Creates the optional arguments of a request, with its notification.
fn arguments(agent: &Endpoint, message: &[u8]) -> Result<Owned> {
    let library = agent.library();
    let failed = |fault| agent.failed(fault);
    // SAFETY: the pointer points to a live handle.
    let create = |arguments: *mut Raw| unsafe { library.create_arguments(arguments) };
    let arguments = Owned::create(library, create, Library::destroy_arguments).map_err(failed)?;
    let raw = arguments.raw();
    // SAFETY: the arguments are live, and the pointer points to the message.
    unsafe { library.set_notification(raw, message.as_ptr().cast(), message.len()) }.map_err(failed)?;
    // SAFETY: the arguments are live.
    unsafe { library.enable_notification(raw, true) }.map_err(failed)?;
    Ok(arguments)
}

/// Pauses the calling thread, which has already waited for `waited`, before it checks a transfer again. The library
/// does not signal the end of a transfer.
#[expect(clippy::disallowed_methods, reason = "the library does not signal the end of a transfer")]
pub(super) fn pause(waited: Duration) {
    if waited < YIELDING {
        std::thread::yield_now();
    } else {
        std::thread::sleep((waited / 16).min(SLEEP_MAX));
    }
}
