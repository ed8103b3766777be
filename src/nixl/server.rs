//! Sending the pages of a store to clients.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

use remanent_format::{Epoch, Lsn, PageId};

use super::agent::Agent;
use super::endpoint::{Notification, Peer};
use super::message::{Message, PageName, PageVersion, Refusal};
use super::region::{HostBuffer, LocalRange, Region, RemoteRegion};
use super::transfer::{Transfer, pause};
use crate::applier::lease::Lease;
use crate::error::{Error, NixlError, Result};
use crate::store::Store;

/// The number of pages that may be in flight to one client.
const IN_FLIGHT_MAX: usize = 4;

/// The number of checksums that a server keeps.
const CHECKSUMS_MAX: usize = 1 << 16;

/// Sends the pages of a store to [`PageClient`](super::PageClient)s of other processes and hosts.
///
/// A client asks by a message, and the server writes the page to the client's memory: a server whose memory clients
/// read could crash if one of them disappears. The server works only in calls of [`PageServer::serve`].
///
/// On the host, pages are sent from page memory under a lease. Pages of a GPU, pinned pages and pages on disk are first
/// read to host memory.
///
/// ```no_run
/// use std::time::Duration;
/// use remanent::nixl::{AgentOptions, Nixl, PageServer};
/// # fn send(_: Vec<u8>) {}
/// # let store = remanent::Store::temporary()?;
/// let agent = Nixl::load()?.agent(&AgentOptions::new("server"))?;
/// send(agent.metadata()?); // to clients
/// let mut server = PageServer::new(agent, &store);
/// loop {
///     server.serve(Duration::from_secs(1))?;
/// }
/// # #[allow(unreachable_code)]
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct PageServer<'s> {
    agent: Agent,
    store: &'s Store,
    clients: HashMap<String, Client>,
    /// The checksums of pages that were sent, each of one version.
    checksums: HashMap<PageId, (Epoch, u32)>,
}

struct Client {
    peer: Peer,
    target: RemoteRegion,
}

/// A page that is ready to be sent.
struct Source<'s> {
    range: Option<LocalRange<'s>>,
    version: PageVersion,
    lsn: Lsn,
    len: u64,
    crc: u32,
}

impl<'s> PageServer<'s> {
    /// Creates a server of the pages of `store`. One server may use an agent at a time.
    #[must_use]
    pub fn new(agent: Agent, store: &'s Store) -> Self {
        Self { agent, store, clients: HashMap::new(), checksums: HashMap::new() }
    }

    /// Answers the requests that arrive within `time`, and returns the number of pages that were sent. Returns earlier
    /// only after an error.
    ///
    /// A client that cannot be reached is forgotten, and must connect again. This is no error of the server.
    ///
    /// # Errors
    /// [`NixlError::Failed`] if the library returns no messages; [`Error::Forked`].
    pub fn serve(&mut self, time: Duration) -> Result<u64> {
        let started = Instant::now();
        let (mut sent, mut idle) = (0, Instant::now());
        loop {
            let requests = self.agent.take_requests()?;
            if !requests.is_empty() {
                sent += self.answer(requests);
                idle = Instant::now();
            }
            if started.elapsed() >= time {
                return Ok(sent);
            }
            pause(idle.elapsed().min(time));
        }
    }

    /// Answers requests, and returns the number of pages that were sent.
    fn answer(&mut self, requests: Vec<Notification>) -> u64 {
        let (mut sent, mut failed) = (0, Vec::new());
        let mut in_flight: VecDeque<(String, Transfer<'s>)> = VecDeque::new();
        let mut settle = |(name, transfer): (String, Transfer<'s>)| match transfer.wait() {
            Ok(()) => sent += 1,
            Err(error) => failed.push((name, error)),
        };
        let mut unreachable = Vec::new();
        for Notification { peer: name, bytes } in requests {
            let message = Message::from_bytes(&name, &bytes);
            let answered = match message {
                Ok(Message::Hello { id, metadata, target }) => self.welcome(&name, id, &metadata, &target),
                Ok(Message::Fetch { id, name: page, offset, len }) => {
                    self.send(&name, id, &page, offset, len).map(|transfer| {
                        in_flight.extend(transfer.map(|transfer| (name.clone(), transfer)));
                    })
                }
                Ok(Message::Ask { id, pages }) => self.versions(&name, id, &pages),
                Ok(Message::Goodbye { .. }) => {
                    self.forget(&name);
                    Ok(())
                }
                Ok(_) => Ok(()),
                Err(error) => Err(error.into()),
            };
            if let Err(error) = answered {
                unreachable.push((name, error));
            }
            if in_flight.len() >= IN_FLIGHT_MAX
                && let Some(oldest) = in_flight.pop_front()
            {
                settle(oldest);
            }
        }
        in_flight.into_iter().for_each(settle);
        for (name, error) in failed.into_iter().chain(unreachable) {
            tracing::warn!(%error, client = name, "a client of pages is given up");
            self.forget(&name);
        }
        sent
    }

    fn forget(&mut self, name: &str) {
        if let Some(client) = self.clients.remove(name)
            && let Err(error) = self.agent.forget_peer(&client.peer)
        {
            tracing::debug!(%error, client = name, "the metadata of a client stay loaded");
        }
    }

    fn client(&self, name: &str) -> Result<&Client> {
        let reason = "the client has not introduced itself";
        Ok(self.clients.get(name).ok_or(NixlError::InvalidMetadata { reason })?)
    }

    fn reply(&self, name: &str, message: &Message) -> Result<()> {
        self.agent.notify(&self.client(name)?.peer, &message.to_bytes())
    }

    /// Loads the metadata of a client.
    fn welcome(&mut self, name: &str, id: u64, metadata: &[u8], target: &[u8]) -> Result<()> {
        let peer = self.agent.load_peer(metadata)?;
        let target = RemoteRegion::from_bytes(target)?;
        if peer.name() != name || target.agent() != name {
            return Err(NixlError::InvalidMetadata { reason: "they contain two names" }.into());
        }
        self.clients.insert(name.to_owned(), Client { peer, target });
        self.reply(name, &Message::Welcome { id })
    }

    /// Sends the versions of pages.
    fn versions(&self, name: &str, id: u64, pages: &[PageId]) -> Result<()> {
        let view = self.store.view()?;
        let epoch = |page: &PageId| view.page(*page).map_or(Epoch(0), |info| info.epoch);
        let epochs = pages.iter().map(epoch).collect();
        self.reply(name, &Message::Versions { id, lsn: view.lsn(), epochs })
    }

    /// Starts to send a page, or sends the reason for not sending it.
    fn send(
        &mut self,
        name: &str,
        id: u64,
        page: &PageName,
        offset: u64,
        room: u64,
    ) -> Result<Option<Transfer<'s>>> {
        self.client(name)?;
        let source = match self.source(page, room) {
            Ok(source) => source,
            Err(refusal) => return self.reply(name, &Message::Refused { id, refusal }).map(|()| None),
        };
        let Source { range, version, lsn, len, crc } = source;
        let message = Message::Page { id, version, lsn, len, crc };
        let Some(range) = range else { return self.reply(name, &message).map(|()| None) };
        let Client { peer, target } = self.client(name)?;
        let ranges = [(range, target.range(offset, len)?)];
        self.agent.write(peer, &ranges, Some(&message.to_bytes())).map(Some)
    }

    /// Registers the bytes of a page of at most `room` bytes, and computes their checksum.
    fn source(&mut self, page: &PageName, room: u64) -> Result<Source<'s>, Refusal> {
        let info = match page {
            PageName::Id(page) => self.store.page(*page),
            PageName::Key(key) => self.store.page_by_key(key),
        };
        let info = info.map_err(refusal)?;
        if info.len > room {
            return Err(Refusal::TooLong(info.len));
        }
        if let Some(source) = self.store.lease(info.page).ok().and_then(|lease| self.leased(lease)) {
            return if source.len > room { Err(Refusal::TooLong(source.len)) } else { Ok(source) };
        }
        self.copied(info.page, room).map_err(refusal)?
    }

    /// Returns a leased page if its bytes are in host memory.
    fn leased(&mut self, lease: Lease<'s>) -> Option<Source<'s>> {
        let version = PageVersion { page: lease.info().page, epoch: lease.epoch() };
        let (lsn, len) = (lease.info().lsn, lease.byte_len());
        let bytes = lease.bytes().ok()?;
        let crc = self.checksum(version, bytes);
        if len == 0 {
            return Some(Source { range: None, version, lsn, len, crc });
        }
        let range =
            self.agent.register(lease).and_then(|region: Region<Lease<'s>>| region.range(0, len)).ok()?;
        Some(Source { range: Some(range), version, lsn, len, crc })
    }

    /// Returns the checksum of a version of a page with these bytes.
    fn checksum(&mut self, PageVersion { page, epoch }: PageVersion, bytes: &[u8]) -> u32 {
        if let Some((_, crc)) = self.checksums.get(&page).filter(|(known, _)| *known == epoch) {
            return *crc;
        }
        let crc = crc32fast::hash(bytes);
        if self.checksums.len() >= CHECKSUMS_MAX {
            self.checksums.clear();
        }
        self.checksums.insert(page, (epoch, crc));
        crc
    }

    /// Returns a copy of a page.
    fn copied(&self, page: PageId, room: u64) -> Result<Result<Source<'s>, Refusal>> {
        let mut bytes = Vec::new();
        let info = self.store.read_into(page, &mut bytes)?;
        if info.len > room {
            return Ok(Err(Refusal::TooLong(info.len)));
        }
        let version = PageVersion { page, epoch: info.epoch };
        let (len, crc) = (info.len, crc32fast::hash(&bytes));
        let mut source = Source { range: None, version, lsn: info.lsn, len, crc };
        if len > 0 {
            let buffer = HostBuffer::new(bytes.len())?;
            buffer.write(0, &bytes)?;
            source.range = Some(self.agent.register(buffer)?.range(0, len)?);
        }
        Ok(Ok(source))
    }
}

fn refusal(error: Error) -> Refusal {
    match error {
        Error::UnknownPage { .. } | Error::UnknownKey { .. } => Refusal::Unknown,
        other => Refusal::Failed(other.to_string()),
    }
}

impl fmt::Debug for PageServer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageServer")
            .field("agent", &self.agent)
            .field("clients", &self.clients.len())
            .finish_non_exhaustive()
    }
}
