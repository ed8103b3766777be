//! Fetches pages from the server of another process or host.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Instant;

use remanent_format::{Epoch, Key, Lsn, PageId, SharedMetadata};

use super::agent::Agent;
use super::endpoint::{Peer, random};
use super::message::{Message, PageName, Refusal};
use super::region::{HostBuffer, Region};
use super::state::{Parts, State, decode_page};
use super::transfer::pause;
use crate::base::allocation::make_room;
use crate::error::{Error, NixlError, Result};

/// Maximum number of pages in flight. Each of them has a slot in the buffer.
const SLOTS: u64 = 4;
/// Number of bytes that are copied at a time. The bytes are then verified while they are in the processor cache.
const PIECE: usize = 256 << 10;
/// Maximum number of attempts to fetch a page whose bytes do not match the checksum.
const ATTEMPTS: u32 = 3;
/// Maximum number of rounds in which pages that changed are fetched again.
const ROUNDS: u32 = 16;

/// A page that was fetched and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FetchedPage {
    /// Id of the page in the store of the server.
    pub page: PageId,
    /// Version of the page.
    pub epoch: Epoch,
    /// Lsn of the batch that last changed or moved the page.
    pub lsn: Lsn,
    /// Key of the page, or `None` if the page has no key.
    pub key: Option<Key>,
    /// Metadata of the page.
    pub metadata: SharedMetadata,
    /// Contents of the page.
    pub bytes: Vec<u8>,
}

/// Fetches pages from a [`PageServer`](super::PageServer) of another process or host.
///
/// An agent can be used by one client at a time. A [polled](super::AgentOptions::polled) agent is faster. Each page
/// arrives with its epoch and checksum. If the bytes do not match the checksum, the client fetches the page again.
///
/// ```no_run
/// use remanent::PageId;
/// use remanent::nixl::{AgentOptions, Nixl, PageClient};
/// # fn receive() -> Vec<u8> { Vec::new() }
/// let agent = Nixl::load()?.agent(&AgentOptions::new("client").polled())?;
/// let mut client = PageClient::connect(agent, &receive(), 2 << 20)?; // with the metadata of the server's agent
/// if let Some(weights) = client.fetch_key("weights")? {
///     println!("epoch {} of {} bytes", weights.epoch, weights.bytes.len());
/// }
/// let (lsn, pages) = client.fetch_state(&[PageId(1), PageId(2)])?;
/// println!("{} pages as of batch {lsn}", pages.len());
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct PageClient {
    agent: Agent,
    server: Peer,
    buffer: HostBuffer,
    target: Region<HostBuffer>,
    /// Maximum length of a page in bytes.
    page_len_max: u64,
    /// Number of the newest request. The first number is random, so that late answers to an earlier client do not match
    /// a request.
    newest: u64,
    /// Whether the client no longer uses the server, because a call failed or timed out.
    is_lost: bool,
    /// Whether a call that fetches pages has begun and not ended. While true, bytes may arrive anywhere in the buffer.
    is_fetching: bool,
}

/// A request that the server has not answered yet.
struct Pending {
    /// Index of the page in the caller's list.
    index: usize,
    /// Slot of the buffer to which the server writes.
    slot: u64,
    attempt: u32,
}

impl PageClient {
    /// Connects to the server whose agent returned `metadata`, and waits for its answer. Pages may be up to
    /// `page_len_max` bytes long. The client allocates memory for four pages of this length.
    ///
    /// # Errors
    /// [`NixlError::InvalidMetadata`], [`NixlError::OtherPeerVersion`]; [`NixlError::TimedOut`] if the server does not
    /// answer within the agent's time limit; [`NixlError::Failed`]; [`Error::OutOfMemory`], [`Error::Forked`].
    pub fn connect(agent: Agent, metadata: &[u8], page_len_max: u64) -> Result<Self> {
        let len = page_len_max.saturating_mul(SLOTS);
        let short = Error::OutOfMemory { place: remanent_format::Place::Host, len };
        let len = page_len_max.max(1).checked_mul(SLOTS).and_then(|len| usize::try_from(len).ok());
        let buffer = HostBuffer::new(len.ok_or(short)?)?;
        let server = agent.load_peer(metadata)?;
        let target = agent.register(buffer.clone())?;
        let mut client = Self {
            agent,
            server,
            buffer,
            target,
            page_len_max,
            newest: random()?,
            is_lost: false,
            is_fetching: false,
        };
        let hello = Message::Hello {
            id: client.number(),
            metadata: client.agent.metadata()?,
            target: client.target.describe().to_bytes(),
        };
        match client.exchange(&hello)? {
            Message::Welcome { .. } => Ok(client),
            other => Err(client.unexpected(&other)),
        }
    }

    /// Fetches the newest version of a page.
    ///
    /// # Errors
    /// [`Error::UnknownPage`] if the page does not exist in the store of the server; [`NixlError::Refused`],
    /// [`NixlError::Corrupted`], [`NixlError::UnexpectedAnswer`], [`NixlError::TimedOut`], [`NixlError::Lost`],
    /// [`NixlError::Failed`]; [`Error::OutOfMemory`], [`Error::Forked`].
    pub fn fetch(&mut self, page: PageId) -> Result<FetchedPage> {
        let mut fetched = None;
        self.fetch_named(&[PageName::Id(page)], &mut |_, page| fetched = Some(page))?;
        fetched.ok_or(Error::UnknownPage { page })
    }

    /// Fetches the newest version of the page with key `key`. Returns `None` if the page does not exist.
    ///
    /// # Errors
    /// Same as [`PageClient::fetch`].
    pub fn fetch_key(&mut self, key: impl AsRef<[u8]>) -> Result<Option<FetchedPage>> {
        let mut fetched = None;
        self.fetch_named(&[PageName::Key(key.as_ref().to_vec())], &mut |_, page| fetched = Some(page))?;
        Ok(fetched)
    }

    /// Fetches the newest version of each page in `pages`, and calls `each` with the index of the page in `pages` and
    /// the fetched page. The order is unspecified, and the versions may belong to different batches. Pages that do not
    /// exist in the store of the server are skipped.
    ///
    /// The next pages are requested before `each` is called. Return from `each` soon: with a
    /// [polled](super::AgentOptions::polled) agent, the server may have to wait until then to send them.
    ///
    /// # Errors
    /// Same as [`PageClient::fetch`].
    pub fn fetch_many(&mut self, pages: &[PageId], mut each: impl FnMut(usize, FetchedPage)) -> Result<()> {
        let names: Vec<_> = pages.iter().map(|page| PageName::Id(*page)).collect();
        self.fetch_named(&names, &mut each)
    }

    /// Fetches `pages`, all in their versions after one batch, and returns the Lsn of that batch. Pages that change
    /// during the call are detected by their epochs and fetched again.
    ///
    /// # Errors
    /// [`NixlError::Unsettled`] if the pages change faster than they can be fetched. Otherwise, the same as
    /// [`PageClient::fetch`].
    pub fn fetch_state(&mut self, pages: &[PageId]) -> Result<(Lsn, Vec<FetchedPage>)> {
        let mut fetched: Vec<Option<FetchedPage>> = vec![None; pages.len()];
        let mut stale: Vec<usize> = (0..pages.len()).collect();
        let lsn = self.settle(|client| {
            let names: Vec<_> = stale.iter().map(|index| PageName::Id(pages[*index])).collect();
            stale.iter().for_each(|index| fetched[*index] = None);
            client.fetch_named(&names, &mut |index, page| fetched[stale[index]] = Some(page))?;
            let (lsn, epochs) = client.versions(pages)?;
            let epoch_of = |page: &Option<FetchedPage>| page.as_ref().map_or(Epoch(0), |page| page.epoch);
            stale = (0..pages.len()).filter(|index| epoch_of(&fetched[*index]) != epochs[*index]).collect();
            Ok(if stale.is_empty() { Ok(lsn) } else { Err(stale.len()) })
        })?;
        let missing = fetched.iter().position(Option::is_none);
        match missing {
            Some(index) => Err(Error::UnknownPage { page: pages[index] }),
            None => Ok((lsn, fetched.into_iter().flatten().collect())),
        }
    }

    /// Calls `round` repeatedly until it returns a result. If pages change during a round, `round` instead returns the
    /// number of these pages.
    pub(super) fn settle<T>(
        &mut self,
        mut round: impl FnMut(&mut Self) -> Result<Result<T, usize>>,
    ) -> Result<T> {
        let mut pages = 0;
        for _ in 0..ROUNDS {
            match round(self)? {
                Ok(settled) => return Ok(settled),
                Err(changed) => pages = changed,
            }
            tracing::debug!(pages, "pages changed while they were fetched");
        }
        let peer = self.server.name().to_owned();
        Err(NixlError::Unsettled { peer, pages, rounds: ROUNDS }.into())
    }

    /// Returns the newest state of the server's store, without the contents of pages.
    pub(super) fn state(&mut self) -> Result<State> {
        let mut parts = Parts::default();
        loop {
            let request = Message::State { id: self.number(), offset: parts.offset() };
            let answer = self.exchange(&request)?;
            let (len, part) = match &answer {
                Message::StatePart { len, part, .. } => (*len, part),
                Message::Refused { refusal, .. } => return Err(self.refused(refusal)),
                other => return Err(self.unexpected(other)),
            };
            match parts.add(len, part) {
                Ok(None) => {}
                Ok(Some(state)) => return State::decode(self.server.name(), state),
                Err(Some(error)) => return Err(error),
                Err(None) => return Err(self.unexpected(&answer)),
            }
        }
    }

    /// Returns the newest versions of pages in the server's store, and the Lsn of the batch after which the pages have
    /// these versions.
    fn versions(&mut self, pages: &[PageId]) -> Result<(Lsn, Vec<Epoch>)> {
        let request = Message::Ask { id: self.number(), pages: pages.to_vec() };
        match self.exchange(&request)? {
            Message::Versions { lsn, epochs, .. } if epochs.len() == pages.len() => Ok((lsn, epochs)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Fetches the named pages. Skips pages that do not exist.
    fn fetch_named(&mut self, names: &[PageName], each: &mut dyn FnMut(usize, FetchedPage)) -> Result<()> {
        if std::mem::replace(&mut self.is_fetching, true) {
            self.abandon_server();
        }
        let mut todo: VecDeque<(usize, u32)> = (0..names.len()).map(|index| (index, 1)).collect();
        let mut slots: Vec<u64> = (0..SLOTS).collect();
        let mut pending: BTreeMap<u64, Pending> = BTreeMap::new();
        let mut answers: VecDeque<Message> = VecDeque::new();
        let (mut verified, mut failure) = (None, None);
        loop {
            while failure.is_none()
                && let Some(slot) = slots.pop()
            {
                let Some((index, attempt)) = todo.pop_front() else {
                    slots.push(slot);
                    break;
                };
                let (id, offset) = (self.number(), slot * self.page_len_max);
                let name = names[index].clone();
                // The request may have been sent even if the call fails, so the client waits for its answer.
                pending.insert(id, Pending { index, slot, attempt });
                self.send(&Message::Fetch { id, name, offset, len: self.page_len_max })?;
            }
            if let Some((index, page)) = verified.take() {
                each(index, page);
            }
            if pending.is_empty() {
                self.is_fetching = false;
                return failure.map_or(Ok(()), Err);
            }
            // Answers are handled one by one. The next request for a slot is sent before the caller gets the page in
            // that slot. Thus the server writes pages while the client copies, verifies and uses other pages.
            if answers.is_empty() {
                answers.extend(self.answers(|answer| pending.contains_key(&answer.id()))?);
            }
            let Some(answer) = answers.pop_front() else { continue };
            let Some(Pending { index, slot, attempt }) = pending.remove(&answer.id()) else { continue };
            slots.push(slot);
            match self.arrived(&answer, slot, &names[index]) {
                Ok(page) => verified = page.map(|page| (index, page)),
                Err(Error::Nixl(error))
                    if matches!(*error, NixlError::Corrupted { .. }) && attempt < ATTEMPTS =>
                {
                    tracing::warn!(%error, attempt, "fetching a page again");
                    todo.push_back((index, attempt + 1));
                }
                // The client still waits for the other answers, because their bytes arrive in any case.
                Err(error) => failure = failure.or(Some(error)),
            }
        }
    }

    /// Verifies a page that has arrived. Returns `None` if the page does not exist.
    fn arrived(&self, answer: &Message, slot: u64, name: &PageName) -> Result<Option<FetchedPage>> {
        let (info, crc) = match answer {
            Message::Page { info, crc, .. } => (decode_page(info)?, *crc),
            Message::Refused { refusal: Refusal::Unknown, .. } => return Ok(None),
            Message::Refused { refusal, .. } => return Err(self.refused(refusal)),
            other => return Err(self.unexpected(other)),
        };
        let is_requested = match name {
            PageName::Id(page) => info.page == *page,
            PageName::Key(key) => info.key.as_ref().is_some_and(|found| found.as_bytes() == key),
        };
        if !is_requested || info.len > self.page_len_max {
            return Err(self.unexpected(answer));
        }
        // Each piece is copied before it is verified, so that a later write of the peer cannot change it.
        let (len, mut bytes, mut computed) = (info.len as usize, Vec::new(), crc32fast::Hasher::new());
        make_room(&mut bytes, len)?;
        while bytes.len() < len {
            let start = bytes.len();
            let piece = (len - start).min(PIECE);
            self.buffer.append(slot * self.page_len_max + start as u64, piece, &mut bytes)?;
            computed.update(&bytes[start..]);
        }
        if computed.finalize() != crc {
            let peer = self.server.name().to_owned();
            return Err(NixlError::Corrupted { peer, page: info.page, attempts: ATTEMPTS }.into());
        }
        let (page, epoch, lsn) = (info.page, info.epoch, info.lsn);
        Ok(Some(FetchedPage { page, epoch, lsn, key: info.key, metadata: info.metadata, bytes }))
    }

    /// Returns the error for a refused request.
    fn refused(&self, refusal: &Refusal) -> Error {
        let reason = match refusal {
            Refusal::Unknown => "it does not exist".to_owned(),
            Refusal::TooLong(len) => {
                let limit = self.page_len_max;
                format!("it is {len} bytes long, but the client accepts at most {limit} bytes")
            }
            Refusal::Failed(reason) => reason.clone(),
        };
        NixlError::Refused { peer: self.server.name().to_owned(), reason }.into()
    }

    /// Returns a number for a new request.
    fn number(&mut self) -> u64 {
        self.newest = self.newest.wrapping_add(1);
        self.newest
    }

    /// Sends a request and waits for its answer.
    fn exchange(&mut self, request: &Message) -> Result<Message> {
        self.send(request)?;
        let mut answers = self.answers(|answer| answer.id() == request.id())?;
        Ok(answers.swap_remove(0))
    }

    fn send(&mut self, request: &Message) -> Result<()> {
        if self.is_lost {
            return Err(NixlError::Lost { peer: self.server.name().to_owned() }.into());
        }
        let sent = self.agent.notify(&self.server, &request.to_bytes());
        sent.inspect_err(|_| self.abandon_server())
    }

    /// Waits for at least one expected answer. Discards other answers, which belong to calls that have failed.
    fn answers(&mut self, is_expected: impl Fn(&Message) -> bool) -> Result<Vec<Message>> {
        let (started, limit) = (Instant::now(), self.agent.timeout());
        loop {
            let mut answers = Vec::new();
            let received = self.agent.take_answers(&self.server);
            for received in received.inspect_err(|_| self.abandon_server())? {
                let answer = Message::from_bytes(&received.peer, &received.bytes);
                let answer = answer.inspect_err(|_| self.abandon_server())?;
                answers.extend(Some(answer).filter(|answer| is_expected(answer)));
            }
            if !answers.is_empty() {
                return Ok(answers);
            }
            let waited = started.elapsed();
            if waited >= limit {
                self.abandon_server();
                let (agent, peer) = (self.agent.name().to_owned(), self.server.name().to_owned());
                return Err(NixlError::TimedOut { agent, peer, waited: limit }.into());
            }
            pause(waited);
        }
    }

    /// Stops using the server. If bytes may still arrive in the buffer, the buffer stays registered for the lifetime of
    /// the process.
    fn abandon_server(&mut self) {
        if !std::mem::replace(&mut self.is_lost, true)
            && self.is_fetching
            && let Ok(range) = self.target.range(0, 1)
        {
            std::mem::forget(range);
        }
    }

    fn unexpected(&self, answer: &Message) -> Error {
        tracing::debug!(?answer, server = self.server.name(), "received an unexpected answer");
        NixlError::UnexpectedAnswer { peer: self.server.name().to_owned() }.into()
    }
}

impl Drop for PageClient {
    fn drop(&mut self) {
        if self.is_fetching {
            self.abandon_server();
        }
        let goodbye = Message::Goodbye { id: self.number() };
        if !self.is_lost
            && let Err(error) = self.send(&goodbye)
        {
            tracing::debug!(%error, "cannot notify a server of the end of its client");
        }
        // In a forked child, this call fails, because the child must not change the agent.
        if let Err(error) = self.agent.forget_peer(&self.server) {
            tracing::debug!(%error, "cannot unload the metadata of a server");
        }
    }
}

impl fmt::Debug for PageClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageClient").field("server", &self.server.name()).finish_non_exhaustive()
    }
}
