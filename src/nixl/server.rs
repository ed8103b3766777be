//! Sends the pages of a store to clients.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

use remanent_format::{Epoch, PageId, PageInfo};

use super::agent::Agent;
use super::endpoint::{Notification, Peer};
use super::message::{Message, PageName, Refusal};
use super::region::{HostBuffer, LocalRange, Region, RemoteRegion};
use super::state::{State, encode_page};
use super::transfer::{Transfer, pause};
use crate::applier::lease::Lease;
use crate::error::{Error, NixlError, Result};
use crate::store::Store;

/// Maximum number of pages in flight while a server answers requests.
const IN_FLIGHT_MAX: usize = 4;

/// Maximum length of a part of an encoded state, in bytes.
const PART_LEN_MAX: usize = 256 << 10;

/// Maximum number of checksums that a server caches.
const CHECKSUMS_MAX: usize = 1 << 16;

/// Sends the pages of a store to [`PageClient`](super::PageClient)s in other processes and on other hosts.
///
/// A client sends a request, and the server writes the page to the memory of the client. Clients do not read the memory
/// of the server, because a client that disappears during a read could crash the server. The server is only active in
/// calls of [`PageServer::serve`].
///
/// Pages in host memory are sent directly under a lease. Pages of a GPU, pinned pages and pages on disk are first
/// copied to another host buffer.
///
/// ```no_run
/// use std::time::Duration;
/// use remanent::nixl::{AgentOptions, Nixl, PageServer};
/// # fn send(_: Vec<u8>) {}
/// # let store = remanent::Store::temporary()?;
/// let agent = Nixl::load()?.agent(&AgentOptions::new("server").polled())?;
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
    /// The cached checksum of each page that was sent, with the version of the page.
    checksums: HashMap<PageId, (Epoch, u32)>,
}

struct Client {
    peer: Peer,
    target: RemoteRegion,
    /// The encoded state that the client is fetching. Empty before the first part and after the last one.
    state: Vec<u8>,
}

/// A page that is ready to be sent.
struct Source<'s> {
    range: Option<LocalRange<'s>>,
    /// The encoded description of the page.
    info: Vec<u8>,
    len: u64,
    crc: u32,
}

impl<'s> PageServer<'s> {
    /// Creates a server for the pages of `store`. An agent can be used by one server at a time. A
    /// [polled](super::AgentOptions::polled) agent is faster.
    #[must_use]
    pub fn new(agent: Agent, store: &'s Store) -> Self {
        Self { agent, store, clients: HashMap::new(), checksums: HashMap::new() }
    }

    /// Answers the requests that arrive within `time`, and returns the number of pages that were sent. Returns before
    /// `time` has passed only if an error occurs.
    ///
    /// If a client cannot be reached, the server disconnects it and continues. The client must then connect again.
    ///
    /// # Errors
    /// [`NixlError::Failed`] if the library cannot receive messages; [`Error::Forked`].
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
        let mut finish = |(name, transfer): (String, Transfer<'s>)| match transfer.wait() {
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
                Ok(Message::State { id, offset }) => self.state(&name, id, offset),
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
                finish(oldest);
            }
        }
        in_flight.into_iter().for_each(finish);
        for (name, error) in failed.into_iter().chain(unreachable) {
            tracing::warn!(%error, client = name, "disconnected a client of the page server");
            self.forget(&name);
        }
        sent
    }

    fn forget(&mut self, name: &str) {
        if let Some(client) = self.clients.remove(name)
            && let Err(error) = self.agent.forget_peer(&client.peer)
        {
            tracing::debug!(%error, client = name, "cannot unload the metadata of a client");
        }
    }

    fn client(&self, name: &str) -> Result<&Client> {
        Ok(self.clients.get(name).ok_or_else(|| NixlError::NotConnected { peer: name.to_owned() })?)
    }

    fn reply(&self, name: &str, message: &Message) -> Result<()> {
        self.agent.notify(&self.client(name)?.peer, &message.to_bytes())
    }

    /// Loads the metadata of a client that connects, and sends a reply to the client.
    fn welcome(&mut self, name: &str, id: u64, metadata: &[u8], target: &[u8]) -> Result<()> {
        let peer = self.agent.load_peer(metadata)?;
        let target = RemoteRegion::from_bytes(target)?;
        if peer.name() != name || target.agent() != name {
            return Err(
                NixlError::InvalidMetadata { reason: "they contain two different agent names" }.into()
            );
        }
        self.clients.insert(name.to_owned(), Client { peer, target, state: Vec::new() });
        self.reply(name, &Message::Welcome { id })
    }

    /// Sends the versions of pages to a client.
    fn versions(&self, name: &str, id: u64, pages: &[PageId]) -> Result<()> {
        let view = self.store.view()?;
        let epoch = |page: &PageId| view.page(*page).map_or(Epoch(0), |info| info.epoch);
        let epochs = pages.iter().map(epoch).collect();
        self.reply(name, &Message::Versions { id, lsn: view.lsn(), epochs })
    }

    /// Sends a part of the state to a client. All parts of one state are from the same batch.
    fn state(&mut self, name: &str, id: u64, offset: u64) -> Result<()> {
        let store = self.store;
        let client = self.clients.get_mut(name);
        let client = client.ok_or_else(|| NixlError::NotConnected { peer: name.to_owned() })?;
        let encoded =
            if offset == 0 { State::encode(store).map(|state| client.state = state) } else { Ok(()) };
        let rest = usize::try_from(offset).ok().and_then(|offset| client.state.get(offset..));
        let message = match (encoded, rest) {
            (Err(refusal), _) => Message::Refused { id, refusal },
            (Ok(()), None | Some([])) => {
                let reason = "the state was not requested from its start".to_owned();
                Message::Refused { id, refusal: Refusal::Failed(reason) }
            }
            (Ok(()), Some(rest)) => {
                let (len, part) = (client.state.len() as u64, rest[..rest.len().min(PART_LEN_MAX)].to_vec());
                if part.len() == rest.len() {
                    client.state = Vec::new();
                }
                Message::StatePart { id, len, part }
            }
        };
        self.reply(name, &message)
    }

    /// Starts sending a page to a client, or sends the reason why the page is not sent.
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
        let Source { range, info, len, crc } = source;
        let message = Message::Page { id, info, crc };
        let Some(range) = range else { return self.reply(name, &message).map(|()| None) };
        let Client { peer, target, .. } = self.client(name)?;
        let ranges = [(range, target.range(offset, len)?)];
        self.agent.write(peer, &ranges, Some(&message.to_bytes())).map(Some)
    }

    /// Prepares a page for sending: registers its bytes and computes their checksum. Refuses a page that is longer than
    /// `room` bytes.
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

    /// Returns a leased page, or `None` if its bytes are not in host memory or cannot be registered.
    fn leased(&mut self, lease: Lease<'s>) -> Option<Source<'s>> {
        let (info, len) = (encode_page(lease.info()).ok()?, lease.byte_len());
        let bytes = lease.bytes().ok()?;
        let crc = self.checksum(lease.info(), bytes);
        if len == 0 {
            return Some(Source { range: None, info, len, crc });
        }
        let range =
            self.agent.register(lease).and_then(|region: Region<Lease<'s>>| region.range(0, len)).ok()?;
        Some(Source { range: Some(range), info, len, crc })
    }

    /// Returns the checksum of `bytes`, the contents of a page. Uses the cached checksum if the cache contains this
    /// version of the page.
    fn checksum(&mut self, &PageInfo { page, epoch, .. }: &PageInfo, bytes: &[u8]) -> u32 {
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

    /// Returns a copy of a page in a host buffer.
    fn copied(&self, page: PageId, room: u64) -> Result<Result<Source<'s>, Refusal>> {
        let mut bytes = Vec::new();
        let info = self.store.read_into(page, &mut bytes)?;
        if info.len > room {
            return Ok(Err(Refusal::TooLong(info.len)));
        }
        let (len, crc) = (info.len, crc32fast::hash(&bytes));
        let info = match encode_page(&info) {
            Ok(info) => info,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let mut source = Source { range: None, info, len, crc };
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
