//! Failures of NIXL, the library that moves pages between processes and hosts.

use std::time::Duration;

use remanent_format::PageId;

use super::display::Attempts;

/// A failure of NIXL, of an agent or of a peer, for [`Error::Nixl`](super::Error::Nixl).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// The library was not found, or could not be loaded from any of the paths.
    #[error("could not load the NIXL library: {}", Attempts(tried))]
    NotFound {
        /// The names, paths and folders that were tried, in order, each with the reason for the failure.
        tried: Vec<(String, String)>,
    },
    /// The library lacks a function.
    #[error("{library} has no function {symbol}")]
    MissingSymbol {
        /// The path or name of the library.
        library: String,
        /// The name of the missing function.
        symbol: &'static str,
    },
    /// The library is of a version whose calls differ.
    #[error("{library} is NIXL {found}, but {supported} is required")]
    OtherVersion {
        /// The path or name of the library.
        library: String,
        /// The version of the library, or its relation to the supported version.
        found: String,
        /// The supported version.
        supported: &'static str,
    },
    /// A name or a parameter is empty, too long, or contains a zero byte.
    #[error("{what} {found:?} is empty, longer than {limit} bytes, or contains a zero byte")]
    InvalidName {
        /// The kind of name.
        what: &'static str,
        /// The given name.
        found: String,
        /// The longest permitted name in bytes.
        limit: usize,
    },
    /// A call of the library failed. The library writes the reason to standard error and returns only a few statuses.
    #[error("agent {agent}: {call}: {meaning} ({status})")]
    Failed {
        /// The name of the agent.
        agent: String,
        /// The name of the function.
        call: &'static str,
        /// The library's status.
        status: i32,
        /// The meaning of the status.
        meaning: &'static str,
    },
    /// Memory of this kind cannot be registered.
    #[error("{kind} memory cannot be registered")]
    UnsupportedMemory {
        /// The kind of memory.
        kind: String,
    },
    /// A range exceeds its region, or is empty.
    #[error("bytes {offset}..{offset}+{len} are empty or outside the region of {region_len} bytes")]
    OutOfRegion {
        /// The offset of the first byte of the range.
        offset: u64,
        /// The number of bytes.
        len: u64,
        /// The length of the region in bytes.
        region_len: u64,
    },
    /// The ranges of a transfer do not match each other, the agent or the peer.
    #[error("the transfer is invalid: {reason}")]
    InvalidTransfer {
        /// The condition that is not met.
        reason: &'static str,
    },
    /// The received bytes are not a valid description of an agent or a region.
    #[error("the bytes received from a peer are invalid: {reason}")]
    InvalidMetadata {
        /// The defect.
        reason: &'static str,
    },
    /// The answer of a peer does not match the request.
    #[error("peer {peer} sent an answer that does not match the request")]
    UnexpectedAnswer {
        /// The name of the server's agent.
        peer: String,
    },
    /// A server received a request from a client that is not connected, or that was disconnected after a failure.
    #[error("peer {peer} is not connected to this server of pages")]
    NotConnected {
        /// The name of the client's agent.
        peer: String,
    },
    /// The peer uses another version of NIXL or of this crate's messages.
    #[error("peer {peer} uses {found}, but this agent uses {own}")]
    OtherPeerVersion {
        /// The name of the peer.
        peer: String,
        /// The peer's version.
        found: String,
        /// This agent's version.
        own: String,
    },
    /// A transfer was not complete within the time limit. Its memory stays registered for the lifetime of the process,
    /// because bytes may still arrive.
    #[error("agent {agent}: a transfer with {peer} was not complete after {} s", waited.as_secs_f32())]
    TimedOut {
        /// The name of the agent.
        agent: String,
        /// The name of the peer.
        peer: String,
        /// The time limit.
        waited: Duration,
    },
    /// The server of pages did not send a page.
    #[error("peer {peer} did not send the page: {reason}")]
    Refused {
        /// The name of the server's agent.
        peer: String,
        /// The server's reason.
        reason: String,
    },
    /// The bytes of a page did not match their checksum in several attempts.
    #[error("page {page} of peer {peer} did not match its checksum in {attempts} attempts")]
    Corrupted {
        /// The name of the server's agent.
        peer: String,
        /// The id of the page.
        page: PageId,
        /// The number of attempts.
        attempts: u32,
    },
    /// Pages changed before all of them had arrived, in several rounds.
    #[error("{pages} pages of peer {peer} changed while they were fetched, in {rounds} rounds")]
    Unsettled {
        /// The name of the server's agent.
        peer: String,
        /// The number of pages that changed in the last round.
        pages: usize,
        /// The number of rounds.
        rounds: u32,
    },
    /// The client gave the server up in an earlier call. Its memory stays registered for the lifetime of the process,
    /// because bytes may still arrive.
    #[error("peer {peer} was given up after an earlier failure")]
    Lost {
        /// The name of the server's agent.
        peer: String,
    },
}
