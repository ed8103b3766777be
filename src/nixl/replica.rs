//! A copy of the state of a store in another process or on another host.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use remanent_format::{Lsn, Metadata, PageId, PageInfo, PageTable, Position, StoreId};

use super::client::{FetchedPage, PageClient};
use super::state::{Origin, State};
use crate::error::Result;

/// A copy of all pages and the root of a peer's store after one batch, in host memory. Returned by
/// [`PageClient::replica`], and updated by [`PeerReplica::refresh`].
///
/// Unlike a [`follow::Replica`](crate::follow::Replica), it needs no access to the directory of the store. It has no
/// [`FollowerPosition`](crate::follow::FollowerPosition), because a peer does not send the chain hash of its log, so no
/// follower can continue from it.
///
/// ```no_run
/// use remanent::nixl::{AgentOptions, Nixl, PageClient};
/// # fn receive() -> Vec<u8> { Vec::new() }
/// let agent = Nixl::load()?.agent(&AgentOptions::new("replica").polled())?;
/// let mut client = PageClient::connect(agent, &receive(), 2 << 20)?; // with the metadata of the server's agent
/// let mut replica = client.replica()?;
/// loop {
///     let fetched = replica.refresh(&mut client)?;
///     println!("batch {}: {fetched} pages were fetched", replica.lsn());
/// #   break;
/// }
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone)]
pub struct PeerReplica {
    origin: Origin,
    table: PageTable,
    contents: BTreeMap<PageId, Vec<u8>>,
}

impl PageClient {
    /// Loads the newest state of the server's store: all pages with their keys and metadata, and the root.
    ///
    /// # Errors
    /// Same as [`PeerReplica::refresh`].
    pub fn replica(&mut self) -> Result<PeerReplica> {
        let (state, fetched) = self.fetch_changed(|_, _| false)?;
        let mut replica =
            PeerReplica { origin: state.origin, table: PageTable::new(), contents: BTreeMap::new() };
        replica.install(state, fetched);
        Ok(replica)
    }

    /// Fetches the newest state, and those of its pages for which `is_known` returns false. All fetched pages have the
    /// versions of that state.
    fn fetch_changed(
        &mut self,
        is_known: impl Fn(&State, &PageInfo) -> bool,
    ) -> Result<(State, BTreeMap<PageId, FetchedPage>)> {
        let mut fetched: BTreeMap<PageId, FetchedPage> = BTreeMap::new();
        self.settle(|client| {
            let state = client.state()?;
            let is_fetched = |fetched: &BTreeMap<PageId, FetchedPage>, info: &PageInfo| {
                let page = fetched.get(&info.page);
                page.is_some_and(|page| page.epoch == info.epoch && page.bytes.len() as u64 == info.len)
            };
            let is_needed = |info: &PageInfo| !is_known(&state, info) && !is_fetched(&fetched, info);
            let needed: Vec<PageInfo> = state.table.pages().filter(is_needed).collect();
            let ids: Vec<PageId> = needed.iter().map(|info| info.page).collect();
            client.fetch_many(&ids, |_, page| {
                fetched.insert(page.page, page);
            })?;
            // A page with a newer version was changed by a later batch.
            let stale = needed.iter().filter(|info| !is_fetched(&fetched, info));
            match stale.count() {
                0 => Ok(Ok(state)),
                stale => Ok(Err(stale)),
            }
        })
        .map(|state| (state, fetched))
    }
}

impl PeerReplica {
    /// Updates the replica to the newest state of the server's store, and returns the number of pages that were
    /// fetched. Only pages with a new version are fetched. All pages are fetched if the store was opened again since
    /// the last refresh, or if `client` is connected to another store.
    ///
    /// Until the call ends, the fetched pages are in memory in addition to the pages of the replica.
    ///
    /// # Errors
    /// [`NixlError::Unsettled`] if pages change faster than they can be fetched; [`NixlError::Refused`] if a page
    /// is longer than the client accepts; [`NixlError::InvalidMetadata`] if the server sent an invalid state. Otherwise,
    /// the same as [`PageClient::fetch`]. The replica is then unchanged.
    ///
    /// [`NixlError::Unsettled`]: crate::error::NixlError::Unsettled
    /// [`NixlError::Refused`]: crate::error::NixlError::Refused
    /// [`NixlError::InvalidMetadata`]: crate::error::NixlError::InvalidMetadata
    pub fn refresh(&mut self, client: &mut PageClient) -> Result<u64> {
        let (state, fetched) = client.fetch_changed(|state, info| {
            state.origin == self.origin
                && self.table.entry(info.page).is_some_and(|entry| entry.epoch == info.epoch)
        })?;
        let count = fetched.len() as u64;
        self.install(state, fetched);
        Ok(count)
    }

    fn install(&mut self, state: State, fetched: BTreeMap<PageId, FetchedPage>) {
        self.table = state.table;
        self.origin = state.origin;
        self.contents.extend(fetched.into_iter().map(|(page, fetched)| (page, fetched.bytes)));
        self.contents.retain(|page, _| self.table.entry(*page).is_some());
    }

    /// Returns the id of the store.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.origin.store
    }

    /// Returns the position of the newest batch that the replica contains.
    #[must_use]
    pub fn position(&self) -> Position {
        Position { incarnation: self.origin.incarnation, lsn: self.table.lsn() }
    }

    /// Returns the newest batch that the replica contains.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.table.lsn()
    }

    /// Returns all pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.table.pages()
    }

    /// Returns the length, version, key and metadata of a page, or `None` if the page does not exist. The place is that
    /// in the server's store.
    #[must_use]
    pub fn page(&self, page: PageId) -> Option<PageInfo> {
        self.table.get(page)
    }

    /// Returns the information of the page with key `key`, or `None` if no page has this key.
    #[must_use]
    pub fn page_by_key(&self, key: impl AsRef<[u8]>) -> Option<PageInfo> {
        self.table.get_key(key)
    }

    /// Returns the bytes of a page, or `None` if the page does not exist.
    #[must_use]
    pub fn bytes(&self, page: PageId) -> Option<&[u8]> {
        self.contents.get(&page).map(Vec::as_slice)
    }

    /// Returns the names and values of the root.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        self.table.root()
    }
}

impl fmt::Debug for PeerReplica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerReplica")
            .field("store", &self.store())
            .field("lsn", &self.lsn())
            .field("pages", &self.contents.len())
            .finish_non_exhaustive()
    }
}
