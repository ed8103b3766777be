//! Commits batches, and moves pages between places.

use std::collections::BTreeMap;

use remanent_format::{Key, LogPoint, Lsn, PageId, PageInfo, Place, Position};

use super::Store;
use super::ticket::{CommitReceipt, Ticket, wait};
use crate::error::{Error, Invalid, NoSuchState, Result, Taken};
use crate::tiers::Tiers;
use crate::tiers::{Prefetch, ReadAhead};
use crate::write::batch::{PageRef, WriteBatch};

#[cfg(doc)]
use crate::options::{LogIo, Options};

impl Store {
    /// Returns an empty batch. Equivalent to `WriteBatch::default()`.
    pub fn batch(&self) -> WriteBatch {
        WriteBatch::default()
    }

    /// Logs `batch` and returns a [`Ticket`] without waiting for durability.
    ///
    /// When this returns, the batch is [`Logged`](crate::Ack::Logged) and survives the death of the process.
    /// The exception is [`LogIo::Direct`], where the batch is logged only once a [`Ticket::wait`] for it has
    /// returned.
    ///
    /// # Errors
    /// These leave the store unchanged: [`Error::UnknownPage`], [`Error::UnknownKey`], [`Error::OutOfBounds`],
    /// [`Error::Conflict`], [`Error::Taken`], [`Error::Invalid`], [`Error::Limit`], [`Error::OverBudget`],
    /// [`Error::DiskFull`], and [`Error::Damaged`] as for [`Store::read`]. [`Error::Poisoned`] if the store has failed.
    pub fn submit(&self, batch: impl Into<WriteBatch>) -> Result<Ticket> {
        let committed = self.log_batch(batch.into())?;
        Ok(Ticket::new(committed, self.parts.engine.0.clone()))
    }

    /// Submits `batch` and waits for the acknowledgement set by [`Options::ack`].
    ///
    /// # Errors
    /// Same as [`Store::submit`]; [`Error::Poisoned`] if the store fails during the wait.
    pub fn commit(&self, batch: impl Into<WriteBatch>) -> Result<CommitReceipt> {
        // No ticket is created: a ticket would increment the engine's reference count, a word that all threads contend
        // for.
        let committed = self.log_batch(batch.into())?;
        wait(self.parts.options.ack, committed.position.lsn, self.engine())?;
        Ok(committed)
    }

    fn log_batch(&self, mut batch: WriteBatch) -> Result<CommitReceipt> {
        self.check_process()?;
        let submitted = match batch.has_keys() {
            true => self.submit_by_keys(&mut batch),
            false => self.parts.mover.submit(&batch),
        };
        let (point, pages) = self.in_store(submitted)?;
        Ok(CommitReceipt { position: Position { incarnation: point.incarnation, lsn: point.lsn }, pages })
    }

    /// Submits a batch that names pages by keys.
    ///
    /// A page keeps its key until it is deleted. A lookup is therefore still correct if the page exists when the batch
    /// is checked under the submission lock. Otherwise the batch fails because the page is unknown. The keys are then
    /// looked up again, because another page may have the key.
    fn submit_by_keys(&self, batch: &mut WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        batch.check_copies()?;
        let look_up = |batch: &mut WriteBatch| {
            let table = self.committer().lock();
            batch.look_up_keys(|key| table.get_key(key).map(|info| info.page))
        };
        look_up(batch)?;
        loop {
            match self.parts.mover.submit(batch) {
                Err(Error::UnknownPage { .. }) if look_up(batch)? => {}
                submitted => return submitted,
            }
        }
    }

    /// Sets the contents of the page with key `key` to `bytes`, creating the page in `place` if it does not exist.
    /// Returns the page and the batch's position in the log.
    ///
    /// An existing page keeps its place and metadata. The change is one batch, and the call waits for the
    /// acknowledgement set by [`Options::ack`]. Other threads may put, resize or delete the same key concurrently.
    /// Their batches take effect entirely before or after this batch.
    ///
    /// ```
    /// use remanent::{Key, Place, Store};
    /// let store = Store::temporary()?;
    /// let key = Key::new("config")?;
    /// let (first, _) = store.put(&key, b"a = 1", Place::Host)?;
    /// let (second, _) = store.put(&key, b"a = 1, b = 2", Place::Host)?;
    /// assert_eq!(first, second);
    /// assert_eq!(store.read_to_vec(first)?, b"a = 1, b = 2");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::commit`], except that conflicts with concurrent batches to the same key are retried.
    pub fn put<K>(&self, key: K, bytes: impl AsRef<[u8]>, place: Place) -> Result<(PageId, Position)>
    where
        K: TryInto<Key, Error: Into<Error>>,
    {
        self.put_with(key, bytes, place, |_, _, _| {})
    }

    /// Sets the contents of a page like [`Store::put`], and adds further operations to the same batch.
    ///
    /// The closure `more` receives the batch, the page, and the page's current information if the page exists. The
    /// closure is called again each time a concurrent batch to the page causes a retry.
    ///
    /// ```
    /// use remanent::{Key, Place, Store};
    /// let store = Store::temporary()?;
    /// let key = Key::new("weights")?;
    /// let (page, _) = store.put_with(&key, [0; 8], Place::Host, |batch, page, _| {
    ///     batch.set_metadata(page, "dtype", "F32");
    /// })?;
    /// assert_eq!(store.page(page)?.metadata["dtype"].as_str(), Some("F32"));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::put`]; any error that the added operations cause.
    pub fn put_with<K>(
        &self,
        key: K,
        bytes: impl AsRef<[u8]>,
        place: Place,
        mut more: impl FnMut(&mut WriteBatch, PageRef, Option<&PageInfo>),
    ) -> Result<(PageId, Position)>
    where
        K: TryInto<Key, Error: Into<Error>>,
    {
        let key = key.try_into().map_err(Into::into)?;
        let bytes = bytes.as_ref();
        loop {
            let mut batch = self.batch();
            let known = match self.page_by_key(&key) {
                Ok(info) => {
                    // The epoch is checked under the submission lock. If the page changed in between, the loop looks
                    // the page up again.
                    batch.expect_epoch(info.page, info.epoch);
                    if info.len != bytes.len() as u64 {
                        batch.resize(info.page, bytes.len() as u64);
                    }
                    batch.write(info.page, 0, bytes);
                    more(&mut batch, info.page.into(), Some(&info));
                    Some(info.page)
                }
                Err(Error::UnknownKey { .. }) => {
                    let page = batch.create_from(bytes, place).key(&key).page();
                    more(&mut batch, page.into(), None);
                    None
                }
                Err(error) => return Err(error),
            };
            match self.commit(batch) {
                Err(Error::Conflict { .. } | Error::UnknownPage { .. } | Error::Taken(Taken::Key { .. })) => {
                    // The conflicting batch is submitted, but lookups find it only after it is logged. With a direct
                    // log, that requires a sync.
                    let newest = self.committer().lock().lsn();
                    self.engine().log.wait_logged(newest)?;
                }
                committed => {
                    let CommitReceipt { position, pages } = committed?;
                    let page = known.or_else(|| pages.first().copied()).expect("known, or created just now");
                    return Ok((page, position));
                }
            }
        }
    }

    /// Moves `pages` to `place` and waits for the acknowledgement set by [`Options::ack`].
    ///
    /// Pages already at `place` are unchanged. If all pages are at `place`, nothing is logged. The other pages move in
    /// one batch, as with [`WriteBatch::move_to`]. More than 4,096 pages or 256 MiB move in several batches, provided
    /// that `place` has room for all of them. With [`Tiers`], other pages are evicted from `place` first if it lacks
    /// room.
    ///
    /// Returns the position of the last batch in the log, or `None` if nothing was logged. Concurrent batches may move
    /// the pages elsewhere afterwards.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create(8, Place::Host);
    /// batch.create(8, Place::Pinned);
    /// let pages = store.commit(batch)?.pages;
    /// assert!(store.ensure(&pages, Place::Pinned)?.is_some());
    /// assert_eq!(store.page(pages[0])?.place, Place::Pinned);
    /// assert!(store.ensure(&pages, Place::Pinned)?.is_none(), "all are there");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`], with nothing moved; [`Error::OverBudget`], [`Error::OutOfMemory`],
    /// [`Error::Unavailable`] and [`Error::Leased`] as for a move; the errors of [`Store::commit`]. A batch that fails
    /// moves none of its pages, but other batches of the same call may already have moved their pages.
    pub fn ensure(&self, pages: &[PageId], place: Place) -> Result<Option<Position>> {
        self.check_process()?;
        let _span = tracing::debug_span!("ensure", %place, pages = pages.len()).entered();
        let Some(point) = self.in_store(self.parts.mover.move_to_place(pages, place))? else {
            return Ok(None);
        };
        wait(self.parts.options.ack, point.lsn, self.engine())?;
        Ok(Some(Position { incarnation: point.incarnation, lsn: point.lsn }))
    }

    /// Starts moving `pages` to `place` in the background and returns immediately. The pages move in batches,
    /// in the given order, after the pages of earlier calls.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Io`] if the background thread cannot be started; [`Error::Closed`] if
    /// that thread has failed. [`Prefetch::wait`] returns all other errors.
    pub fn prefetch(&self, pages: &[PageId], place: Place) -> Result<Prefetch> {
        self.check_process()?;
        self.in_store(self.parts.prefetcher.prefetch(pages, place))
    }

    /// Creates a [`ReadAhead`], which prefetches pages to `place` for a caller that uses pages in a known sequence of
    /// steps. The number of steps to prefetch adapts to the time that pages take to arrive.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn read_ahead(&self, place: Place) -> Result<ReadAhead<'_>> {
        self.check_process()?;
        Ok(ReadAhead::new(&self.parts.mover, &self.parts.prefetcher, place))
    }

    /// Moves pages to the first place of the [`Tiers`], like [`Store::ensure`].
    ///
    /// # Errors
    /// Same as [`Store::ensure`]; [`Error::Invalid`] if the store was opened without tiers.
    pub fn promote(&self, pages: &[PageId]) -> Result<Option<Position>> {
        let first = self.tiers()?.places()[0];
        let _span = tracing::debug_span!("promote").entered();
        self.ensure(pages, first)
    }

    /// Moves each page from its current place to the next place of the [`Tiers`]. Use this for pages that
    /// will not be needed soon. Pages in the last place, or in a place that is not a tier, are unchanged.
    ///
    /// ```
    /// use remanent::options::MemoryOptions;
    /// use remanent::tiers::Tiers;
    /// use remanent::{Options, Place};
    /// let store = Options::new()
    ///     .memory(MemoryOptions::new().budget(Place::Pinned, 1 << 20))
    ///     .tiers(Tiers::new([Place::Pinned, Place::Disk]))
    ///     .open_temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from([1; 4096], Place::Pinned);
    /// let pages = store.commit(batch)?.pages;
    /// store.demote(&pages)?;
    /// assert_eq!(store.page(pages[0])?.place, Place::Disk);
    /// store.promote(&pages)?;
    /// assert_eq!(store.page(pages[0])?.place, Place::Pinned);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::promote`].
    pub fn demote(&self, pages: &[PageId]) -> Result<()> {
        let places = self.tiers()?.places();
        let _span = tracing::debug_span!("demote", pages = pages.len()).entered();
        let mut going: BTreeMap<Place, Vec<PageId>> = BTreeMap::new();
        for &page in pages {
            let place = self.page(page)?.place;
            let below = places.iter().zip(&places[1..]).find(|(of_tier, _)| **of_tier == place);
            below.iter().for_each(|(_, below)| going.entry(**below).or_default().push(page));
        }
        going.into_iter().try_for_each(|(below, pages)| self.ensure(&pages, below).map(drop))
    }

    /// Returns the tiers that the store was opened with, or an error if there are none.
    fn tiers(&self) -> Result<&Tiers> {
        self.check_process()?;
        let none =
            || Error::Invalid(Invalid::Option { option: "tiers", reason: "the store has none".to_owned() });
        self.parts.options.tiers.as_ref().ok_or_else(none)
    }

    /// Waits until batch `lsn` and every earlier batch survive a power cut.
    ///
    /// # Errors
    /// [`Error::NoSuchState`] if the batch is not committed yet; [`Error::Poisoned`].
    pub fn wait_durable(&self, lsn: Lsn) -> Result<()> {
        self.check_process()?;
        let newest = self.parts.committer.lock().lsn();
        if lsn > newest {
            return Err(Error::NoSuchState(NoSuchState::NotCommitted { requested: lsn, newest }));
        }
        self.engine().log.wait_durable(lsn)
    }

    /// Returns the number of the newest logged batch, or 0 in a forked child.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        if self.check_process().is_err() {
            return Lsn(0);
        }
        self.engine().versions.visible()
    }
}
