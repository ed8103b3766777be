//! Changing pages: batches on their way in.

use std::collections::BTreeMap;

use remanent_format::{Key, Lsn, PageId, PageInfo, Place, Position};

use super::Store;
use super::ticket::{CommitReceipt, Ticket, wait};
use crate::error::{Error, Result};
use crate::options::Tiers;
use crate::tiers::{Prefetch, ReadAhead};
use crate::write::batch::{PageRef, WriteBatch};

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
        let (point, pages) = self.in_store(self.parts.mover.submit(batch))?;
        Ok(CommitReceipt { position: Position { incarnation: point.incarnation, lsn: point.lsn }, pages })
    }

    /// Lets the page that has this key hold exactly these bytes, in one batch. If no page has it, one is
    /// created in `place`; one that is there stays where it is, with its metadata. Waits for the
    /// acknowledgement that [`Options::ack`] names. Returns the page, and where the batch lies in the log.
    ///
    /// Other threads may put, resize or delete the same key meanwhile: each call is one batch, before or
    /// after theirs.
    ///
    /// ```
    /// use remanent::{Key, Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let key = Key::new("config")?;
    /// let (first, _) = store.put(&key, b"a = 1", Place::Host)?;
    /// let (second, _) = store.put(&key, b"a = 1, b = 2", Place::Host)?;
    /// assert_eq!(first, second);
    /// assert_eq!(store.read_to_vec(first)?, b"a = 1, b = 2");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Store::commit`], except for what another thread's batch to this key would make it fail with.
    pub fn put(&self, key: &Key, bytes: impl AsRef<[u8]>, place: Place) -> Result<(PageId, Position)> {
        self.put_with(key, bytes, place, |_, _, _| {})
    }

    /// Sets the contents of a page as [`Store::put`] does, with further operations in the same batch: `more`
    /// gets the batch, the page, and what is known of the page if it exists. It is called again where another
    /// thread's batch to the page came first.
    ///
    /// ```
    /// use remanent::{Key, Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let key = Key::new("weights")?;
    /// let (page, _) = store.put_with(&key, [0; 8], Place::Host, |batch, page, _| {
    ///     batch.set_metadata(page, "dtype", "F32");
    /// })?;
    /// assert_eq!(store.page(page)?.metadata["dtype"].as_str(), Some("F32"));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Store::put`]; what the further operations fail with.
    pub fn put_with(
        &self,
        key: &Key,
        bytes: impl AsRef<[u8]>,
        place: Place,
        mut more: impl FnMut(&mut WriteBatch, PageRef, Option<&PageInfo>),
    ) -> Result<(PageId, Position)> {
        let bytes = bytes.as_ref();
        loop {
            let mut batch = self.batch();
            let known = match self.page_by_key(key) {
                Ok(info) => {
                    // Checked under the submission lock: a page that changes before is looked up again.
                    batch.expect_epoch(info.page, info.epoch);
                    if info.len != bytes.len() as u64 {
                        batch.resize(info.page, bytes.len() as u64);
                    }
                    batch.write(info.page, 0, bytes);
                    more(&mut batch, info.page.into(), Some(&info));
                    Some(info.page)
                }
                Err(Error::UnknownKey { .. }) => {
                    let page = batch.create_from(bytes, place).key(key).page();
                    more(&mut batch, page.into(), None);
                    None
                }
                Err(error) => return Err(error),
            };
            match self.commit(batch) {
                Err(Error::Conflict { .. } | Error::UnknownPage { .. } | Error::KeyTaken { .. }) => {
                    // The other batch is submitted. Lookups see it once it is logged, which takes a sync
                    // where the log is written directly.
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

    /// Lets all these pages live in one place. Those that are there already stay as they are; if all are,
    /// nothing is logged. The others move there as by [`WriteBatch::move_to`]: in one batch, or in several of
    /// 4,096 pages and 256 MiB where they are more and the place has room for all of them. Waits for the
    /// acknowledgement that [`Options::ack`] names. Returns where the last batch lies in the log, if there is
    /// one. Where there are [`Tiers`], other pages leave the place first if it has no room.
    ///
    /// Batches of other threads may move pages elsewhere after this one.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::PlaceUnavailable`] and [`Error::Leased`] as for a move; as for [`Store::commit`]. A batch
    /// that is refused moves none of its pages; others of the same call may have moved theirs.
    pub fn ensure(&self, pages: &[PageId], place: Place) -> Result<Option<Position>> {
        self.check_process()?;
        let _span = tracing::debug_span!("ensure", %place, pages = pages.len()).entered();
        let Some(point) = self.in_store(self.parts.mover.bring(pages, place))? else { return Ok(None) };
        wait(self.parts.options.ack, point.lsn, self.engine())?;
        Ok(Some(Position { incarnation: point.incarnation, lsn: point.lsn }))
    }

    /// As [`Store::ensure`], ahead of the caller and by another thread: returns at once. The pages move some
    /// at a time, in the order given, after those of earlier calls.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Thread`] if there is no thread to be had; [`Error::Closed`] if that thread
    /// failed. Everything else is told by [`Prefetch::wait`].
    pub fn prefetch(&self, pages: &[PageId], place: Place) -> Result<Prefetch> {
        self.check_process()?;
        self.in_store(self.parts.prefetcher.prefetch(pages, place))
    }

    /// Brings pages to a place ahead of a caller that uses them step by step: as many steps ahead as pages
    /// take to come. [`ReadAhead`] has an example.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn read_ahead(&self, place: Place) -> Result<ReadAhead<'_>> {
        self.check_process()?;
        Ok(ReadAhead::new(&self.parts.mover, &self.parts.prefetcher, place))
    }

    /// Moves pages to the first place of the [`Tiers`], as [`Store::ensure`] does.
    ///
    /// # Errors
    /// As for [`Store::ensure`]; [`Error::InvalidOption`] if the store was opened without tiers.
    pub fn promote(&self, pages: &[PageId]) -> Result<Option<Position>> {
        let first = self.tiers()?.places()[0];
        let _span = tracing::debug_span!("promote").entered();
        self.ensure(pages, first)
    }

    /// Moves pages to the next place of the [`Tiers`], each from where it is, for a caller that knows that it
    /// will not need them soon. Pages in the last place, and in a place that is none of them, stay.
    ///
    /// ```
    /// use remanent::{Budget, Options, Place, Store, Tiers};
    /// let options = Options::default()
    ///     .budget(Budget::default().with(Place::Pinned, 1 << 20))
    ///     .tiers(Tiers::new([Place::Pinned, Place::Disk]));
    /// let store = Store::temporary(options)?;
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
    /// As for [`Store::promote`].
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

    /// The tiers that the store was opened with.
    fn tiers(&self) -> Result<&Tiers> {
        self.check_process()?;
        let none = || Error::InvalidOption { option: "tiers", reason: "the store has none".to_owned() };
        self.parts.options.tiers.as_ref().ok_or_else(none)
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
