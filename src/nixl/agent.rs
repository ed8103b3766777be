//! An agent: an endpoint of transfers between processes and hosts.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::endpoint::{AgentOptions, Allocated, Endpoint, Notification, Peer};
use super::library::{Library, Raw};
use super::message::{MAGIC, Message};
use super::metadata::Metadata;
use super::region::{LocalRange, Memory, Region, RemoteRange};
use super::transfer::{Operation, Transfer};
#[cfg(doc)]
use crate::error::Error;
use crate::error::{NixlError, Result};

/// An endpoint of transfers to and from other agents. Clones refer to the same agent. All threads may use an agent
/// concurrently.
///
/// An agent belongs to the process that created it. In a forked child, its methods return [`Error::Forked`], and
/// dropping it frees nothing.
#[derive(Clone)]
pub struct Agent(Arc<Endpoint>);

impl Agent {
    pub(super) fn create(library: &'static Library, options: &AgentOptions) -> Result<Self> {
        Ok(Self(Arc::new(Endpoint::create(library, options)?)))
    }

    /// Returns the name of the agent: the name in its options, followed by a random part.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the metadata that a peer needs to reach this agent and its registered memory. After this agent has
    /// registered more memory, peers must load the new metadata to access that memory.
    ///
    /// # Errors
    /// [`NixlError::Failed`]; [`Error::Forked`].
    pub fn metadata(&self) -> Result<Vec<u8>> {
        let (mut data, mut len): (Raw, usize) = (std::ptr::null_mut(), 0);
        // SAFETY: the agent is live, and the pointers point to live values.
        unsafe { self.0.library().local_metadata(self.0.raw()?, &mut data, &mut len) }
            .map_err(|fault| self.0.failed(fault))?;
        let blob = Allocated(data);
        // SAFETY: the library returned an allocation of this length.
        let blob = unsafe { std::slice::from_raw_parts(blob.0.cast::<u8>(), len) };
        Ok(Metadata { library: self.0.library().version(), agent: self.0.name().to_owned(), blob }.to_bytes())
    }

    /// Loads the metadata of another agent, and returns that agent as a peer. If metadata of the same agent was loaded
    /// earlier, adds the memory that the agent has registered since.
    ///
    /// # Errors
    /// [`NixlError::InvalidMetadata`], [`NixlError::OtherPeerVersion`], [`NixlError::Failed`]; [`Error::Forked`].
    pub fn load_peer(&self, metadata: &[u8]) -> Result<Peer> {
        let raw = self.0.raw()?;
        let metadata = Metadata::from_bytes(metadata)?;
        metadata.check_version(self.0.library().version())?;
        if metadata.agent == self.0.name() {
            return Err(NixlError::InvalidMetadata { reason: "they are the metadata of this agent" }.into());
        }
        let mut name: *mut c_char = std::ptr::null_mut();
        let blob = metadata.blob;
        // SAFETY: the agent is live, and the pointers point to live values.
        unsafe { self.0.library().load_remote_metadata(raw, blob.as_ptr().cast(), blob.len(), &mut name) }
            .map_err(|fault| self.0.failed(fault))?;
        let name = Allocated(name.cast());
        // SAFETY: the library returned a string that ends with a zero byte.
        let raw_name = unsafe { CStr::from_ptr(name.0.cast()) }.to_owned();
        if raw_name.as_bytes() != metadata.agent.as_bytes() {
            return Err(
                NixlError::InvalidMetadata { reason: "they contain two different agent names" }.into()
            );
        }
        Ok(Peer { name: metadata.agent, raw_name })
    }

    /// Unloads the metadata of a peer. The metadata can be loaded again.
    ///
    /// # Errors
    /// [`NixlError::Failed`]; [`Error::Forked`].
    pub fn forget_peer(&self, peer: &Peer) -> Result<()> {
        // SAFETY: the agent is live, and the name ends with a zero byte.
        let forgotten =
            unsafe { self.0.library().invalidate_remote_metadata(self.0.raw()?, peer.raw_name().as_ptr()) };
        forgotten.map(|_| ()).map_err(|fault| self.0.failed(fault))
    }

    /// Returns this agent as a peer, for transfers within this process, for example between memory and a file.
    #[must_use]
    pub fn itself(&self) -> Peer {
        let name = self.0.name().to_owned();
        let raw_name = CString::new(name.clone()).expect("the name was checked when the agent was created");
        Peer { name, raw_name }
    }

    /// Registers memory for transfers. The returned [`Region`] keeps the memory alive.
    ///
    /// # Errors
    /// [`NixlError::UnsupportedMemory`]; [`NixlError::OutOfRegion`] if the memory is empty; [`NixlError::Failed`];
    /// [`Error::Unavailable`] if the memory has no address; [`Error::Refused`] for [`DeviceBytes`] in which a page is
    /// stored; [`Error::Forked`]. After an error, the memory is dropped.
    ///
    /// [`DeviceBytes`]: crate::device::DeviceBytes
    pub fn register<M: Memory>(&self, memory: M) -> Result<Region<M>> {
        self.0.raw()?;
        Region::register(&self.0, memory)
    }

    /// Starts writing ranges of this agent to ranges of a peer. Both ranges of a pair must have the same length. If
    /// `notification` is given, the peer receives it after the bytes.
    ///
    /// # Errors
    /// [`NixlError::InvalidTransfer`], [`NixlError::Failed`]; [`Error::Forked`].
    pub fn write<'m>(
        &self,
        peer: &Peer,
        ranges: &[(LocalRange<'m>, RemoteRange)],
        notification: Option<&[u8]>,
    ) -> Result<Transfer<'m>> {
        Transfer::start(&self.0, peer, Operation::Write, ranges, notification)
    }

    /// Starts reading ranges of a peer into ranges of this agent. Both ranges of a pair must have the same length. If
    /// `notification` is given, the peer receives it after the bytes were read.
    ///
    /// Over TCP, if the reading process disappears during a read, the process that owns the memory can crash. If this
    /// is a risk, the owner should write the bytes instead.
    ///
    /// # Errors
    /// [`NixlError::InvalidTransfer`], [`NixlError::Failed`]; [`Error::Forked`].
    pub fn read<'m>(
        &self,
        peer: &Peer,
        ranges: &[(LocalRange<'m>, RemoteRange)],
        notification: Option<&[u8]>,
    ) -> Result<Transfer<'m>> {
        Transfer::start(&self.0, peer, Operation::Read, ranges, notification)
    }

    /// Sends a message to a peer. Messages may arrive in any order.
    ///
    /// # Errors
    /// [`NixlError::Failed`]; [`Error::Forked`].
    pub fn notify(&self, peer: &Peer, message: &[u8]) -> Result<()> {
        let raw = self.0.raw()?;
        let data = message.as_ptr().cast();
        // SAFETY: the agent is live, and the pointers point to live values.
        unsafe {
            self.0.library().notify(raw, peer.raw_name().as_ptr(), data, message.len(), std::ptr::null_mut())
        }
        .map_err(|fault| self.0.failed(fault))?;
        Ok(())
    }

    /// Returns the messages that have arrived since the previous call, without waiting. Excludes messages between a
    /// [`PageClient`](super::PageClient) and a [`PageServer`](super::PageServer).
    ///
    /// # Errors
    /// [`NixlError::Failed`]; [`Error::Forked`].
    pub fn notifications(&self) -> Result<Vec<Notification>> {
        self.0.take(|message| !message.bytes.starts_with(&MAGIC))
    }

    /// Removes the requests to a page server that have arrived from the inbox, and returns them.
    pub(super) fn take_requests(&self) -> Result<Vec<Notification>> {
        self.0.take(|message| Message::is_request(&message.bytes))
    }

    /// Removes the answers of page server `server` that have arrived from the inbox, and returns them.
    pub(super) fn take_answers(&self, server: &Peer) -> Result<Vec<Notification>> {
        self.0.take(|message| {
            let is_answer = message.bytes.starts_with(&MAGIC) && !Message::is_request(&message.bytes);
            is_answer && message.peer == server.name()
        })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout()
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("name", &self.0.name()).finish_non_exhaustive()
    }
}
