//! Reads the bytes of one page.
//!
//! The calling thread reads pages in host memory. The thread copies a page in pieces under the memory's lock, and
//! checks after each piece that the page still has the same version. A batch installs its versions before the applier
//! changes a byte, so an unchanged version proves that no batch wrote to the page during the read. Pinned pages in a
//! store on a GPU are read in the same way while no command list in flight writes to them. The applier reads all other
//! pages between two batches. These are pages in GPU memory, and pages that batches change during every attempt.

use std::ops::ControlFlow;
use std::sync::Arc;

use remanent_format::{Lsn, PageId, PageInfo, Place, Width};

use super::Store;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::disk_pages::{DiskImage, DiskPage};
#[cfg(doc)]
use crate::options::PageLoad;

/// The number of bytes of a page that the calling thread copies at a time under the memory's lock.
const PIECE_LEN: usize = 64 << 10;
/// The number of attempts by the calling thread before the applier reads the page.
const TRIES: usize = 2;

impl Store {
    /// Fills `out` with the page's bytes starting at `offset`, and returns the newest batch that the bytes reflect.
    ///
    /// The returned batch is at least as new as every batch that any call had acknowledged as logged before this call
    /// began, as with [`Store::page`].
    ///
    /// The calling thread reads pages in host memory, and waits only for batches of this page that are logged but not
    /// yet applied. Pinned pages in a store with a single GPU are read in the same way, unless the GPU is writing to
    /// them. With several GPUs, all pages are read in batch order.
    ///
    /// Ranges of more than 64 KiB in GPU memory are first copied to a scratch buffer on the GPU, so that commits
    /// continue during the transfer to the host. Deltas wait for the whole transfer if the budget has no room for the
    /// scratch buffer, or if the scratch buffers in use on that GPU would exceed 1 GiB in total.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Damaged`] if the page was not loaded yet
    /// ([`PageLoad::OnDemand`]) and its image is damaged; [`Error::Poisoned`] if the device has failed, now or in an
    /// earlier batch. A store that was poisoned by its disk can still be read.
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<Lsn> {
        self.check_process()?;
        self.read_bytes(page, offset, out).map(|(_, lsn)| lsn)
    }

    /// Reads from the page with key `key` like [`Store::read`]. Returns the page's information.
    ///
    /// Key, information and bytes belong to the same state, even if the key is deleted or reused concurrently.
    ///
    /// ```
    /// use remanent::{Key, Place, Store};
    /// let store = Store::temporary()?;
    /// let key = Key::new("block/7").unwrap();
    /// let mut batch = store.batch();
    /// let page = batch.create(8, Place::Host).key(key.clone()).page();
    /// batch.write(page, 4, b"then");
    /// store.commit(batch)?;
    /// let mut bytes = [0; 4];
    /// let info = store.read_key(&key, 4, &mut bytes)?;
    /// assert_eq!((&bytes, info.len, info.epoch.0), (b"then", 8, 1));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownKey`]; the errors of [`Store::read`].
    pub fn read_key(&self, key: impl AsRef<[u8]>, offset: u64, out: &mut [u8]) -> Result<PageInfo> {
        self.read_by_key(key.as_ref(), |page| self.read_bytes(page, offset, out)).map(|(info, _)| info)
    }

    /// Calls `read` with the page that has the key `key`. If that page was deleted after the lookup, looks the key up
    /// again and retries, because another page may have the key by then.
    fn read_by_key<R>(&self, key: &[u8], mut read: impl FnMut(PageId) -> Result<R>) -> Result<R> {
        loop {
            match read(self.page_by_key(key)?.page) {
                Err(Error::UnknownPage { .. }) => {}
                result => return result,
            }
        }
    }

    /// Returns all bytes of the page with key `key`, or `None` if no page has this key.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// store.put("config", b"a = 1", Place::Host)?;
    /// assert_eq!(store.get("config")?.as_deref(), Some(&b"a = 1"[..]));
    /// assert_eq!(store.get("settings")?, None);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::read_to_vec`]; [`Error::Invalid`] if `key` is not a valid key.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        match self.read_by_key(key.as_ref(), |page| self.read_to_vec(page)) {
            Err(Error::UnknownKey { .. }) => Ok(None),
            read => read.map(Some),
        }
    }

    /// Returns all bytes of a page. Contents and length belong to the same state.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"page");
    /// let page = store.commit(batch)?.pages[0];
    /// assert_eq!(store.read_to_vec(page)?, b"page");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::read`]; [`Error::OutOfMemory`].
    pub fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.read_into(page, &mut bytes)?;
        Ok(bytes)
    }

    /// Replaces the contents of `buffer` with all bytes of a page, and reuses its allocation. Returns the page's
    /// information in the same state. After an error, the previous contents of `buffer` are lost.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// let (long, short) = (batch.create(1000, Place::Host).page(), batch.create(2, Place::Host).page());
    /// batch.fill(long, 0, 1000, &[7]).write(short, 0, b"ab");
    /// let pages = store.commit(batch)?.pages;
    /// let mut buffer = Vec::new();
    /// assert_eq!((store.read_into(pages[0], &mut buffer)?.len, buffer.len()), (1000, 1000));
    /// store.read_into(pages[1], &mut buffer)?;
    /// assert_eq!(buffer, b"ab");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`Store::read_to_vec`].
    pub fn read_into(&self, page: PageId, buffer: &mut Vec<u8>) -> Result<PageInfo> {
        self.check_process()?;
        self.engine().versions.used(page);
        for _ in 0..TRIES {
            let info = self.page(page)?;
            make_room(buffer, info.len)?;
            if self.read_version(&info, 0, buffer)?.is_some() {
                return Ok(info);
            }
        }
        let Engine { applier, device, staging, poison, .. } = self.engine();
        let read = applier.read(device, staging, page, buffer.len() as u64, |info| (0, info.len));
        let (info, _, bytes) = read.map_err(|error| poison.set_by_device(error))?;
        make_room(buffer, info.len)?;
        buffer.copy_from_slice(&bytes);
        staging.put(bytes.into_staging());
        Ok(info)
    }

    /// Fills `out` with bytes of a page. Returns the page's information in the same state, and the newest batch that
    /// the bytes reflect.
    fn read_bytes(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<(PageInfo, Lsn)> {
        let len = out.len() as u64;
        self.engine().versions.used(page);
        for _ in 0..TRIES {
            let info = self.page(page)?;
            if offset.checked_add(len).is_none_or(|end| end > info.len) {
                return Err(Error::OutOfBounds { page, offset, len, page_len: info.len });
            }
            if let Some(lsn) = self.read_version(&info, offset, out)? {
                return Ok((info, lsn));
            }
        }
        let Engine { applier, device, staging, poison, .. } = self.engine();
        let read = applier.read(device, staging, page, len, move |_| (offset, len));
        let (info, lsn, bytes) = read.map_err(|error| poison.set_by_device(error))?;
        out.copy_from_slice(&bytes);
        staging.put(bytes.into_staging());
        Ok((info, lsn))
    }

    /// Fills `out` with bytes of the page version `info`.
    ///
    /// # Errors
    /// `Overtaken` if the page has a newer version.
    pub(super) fn read_as_of(&self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<()> {
        let PageInfo { page, lsn, .. } = *info;
        let overtaken = || Error::Overtaken { lsn, snapshot: None };
        let Engine { versions, .. } = self.engine();
        for _ in 0..TRIES {
            if !versions.is_at(page, lsn) {
                return Err(overtaken());
            }
            if self.read_version(info, offset, out)?.is_some() {
                return Ok(());
            }
        }
        let len = out.len() as u64;
        let Engine { applier, device, staging, poison, .. } = self.engine();
        // If the page has another Lsn by now, it may be shorter, so nothing is read.
        let range = move |now: &PageInfo| if now.lsn == lsn { (offset, len) } else { (0, 0) };
        match applier.read(device, staging, page, len, range) {
            Ok((now, _, bytes)) => {
                let is_it = now.lsn == lsn;
                if is_it {
                    out.copy_from_slice(&bytes);
                }
                staging.put(bytes.into_staging());
                is_it.then_some(()).ok_or_else(overtaken)
            }
            Err(Error::UnknownPage { .. }) => Err(overtaken()),
            Err(error) => Err(poison.set_by_device(error)),
        }
    }

    /// Fills `out` with bytes of the page version `info` on the calling thread. Returns the newest batch that the bytes
    /// reflect.
    ///
    /// Returns `None`, with unspecified bytes in `out`, if the page has a newer version or the calling thread cannot
    /// read the page. On return, the applier has applied the batch that created this version, even if the result is
    /// `None`.
    pub(super) fn read_version(&self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<Option<Lsn>> {
        let Engine { applier, versions, device, .. } = self.engine();
        applier.unloaded().wait([info.page])?;
        if !applier.has_applied(info.lsn) {
            applier.wait_applied(info.lsn)?;
        }
        if info.place == Place::Disk {
            return self.read_on_disk(info, offset, out);
        }
        // After a command list has failed, page memory is not read. The applier reports the error.
        if !applier.has_applied(info.lsn) {
            return Ok(None);
        }
        let Some(reads) = device.abilities().direct_reads else { return Ok(None) };
        let Some(memory) = versions.memory(info.page) else { return Ok(None) };
        let lsn = versions.visible();
        let mut at = offset;
        for piece in out.chunks_mut(PIECE_LEN) {
            if !reads.read_now(memory, at, piece) || !versions.is_at(info.page, info.lsn) {
                return Ok(None);
            }
            at += piece.len() as u64;
        }
        Ok(applier.has_applied(info.lsn).then_some(lsn))
    }

    /// Reads a page on disk like [`read_version`](Self::read_version), directly into `out`.
    fn read_on_disk(&self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<Option<Lsn>> {
        let range = offset..offset + out.len() as u64;
        let Some((copy, lsn)) = self.on_disk(info, move |page| page.part(&range))? else { return Ok(None) };
        copy.read(offset, out)?;
        Ok(Some(lsn))
    }

    /// Calls `copy` with the page version `info` of a page on disk. Returns the result, and the newest batch that it
    /// reflects. Returns `None` if the page has a newer version.
    fn on_disk<T: Send + 'static>(
        &self,
        info: &PageInfo,
        copy: impl FnOnce(&DiskPage) -> T + Send + 'static,
    ) -> Result<Option<(T, Lsn)>> {
        let (page, lsn) = (info.page, info.lsn);
        self.engine().applier.turn(move |turn| {
            turn.intact()?;
            let is_it = turn.applied.table.get(page).is_some_and(|now| now.lsn == lsn);
            let found = turn.applied.on_disk.get(page).filter(|_| is_it);
            Ok(found.map(|page| (copy(page), turn.applied.point.lsn)))
        })
    }

    /// Returns the uncompressed image that contains the whole page version `info`. Returns `None` if there is no such
    /// image, because the page is in memory, or was written to since its image was made.
    fn raw_image(&self, info: &PageInfo) -> Result<Option<Arc<DiskImage>>> {
        if info.place != Place::Disk || info.len == 0 {
            return Ok(None);
        }
        if !self.engine().applier.has_applied(info.lsn) {
            self.engine().applier.wait_applied(info.lsn)?;
        }
        let found = self.on_disk(info, |page| page.only_image().cloned())?;
        Ok(found.and_then(|(image, _)| image).filter(|image| image.is_raw()))
    }

    /// Compares `bytes` with the part at `offset` of the page version `info`, without verifying the page's bytes.
    /// Returns the number of elements of `width` bytes that differ, or `None` if a verified read is as fast.
    ///
    /// Use the result only for choices that are correct whatever the page contains.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Poisoned`].
    #[doc(hidden)]
    pub fn estimate_difference(
        &self,
        info: &PageInfo,
        offset: u64,
        width: Width,
        bytes: &[u8],
    ) -> Result<Option<usize>> {
        let Some(image) = self.raw_image(info)? else { return Ok(None) };
        let mut before = Vec::new();
        make_room(&mut before, bytes.len() as u64)?;
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > info.len)
            || !image.peek(offset, &mut before)
        {
            return Ok(None);
        }
        let elements = before.chunks(width.bytes()).zip(bytes.chunks(width.bytes()));
        Ok(Some(elements.filter(|(before, after)| before != after).count()))
    }

    /// Passes the bytes of the page version `info` to `visit`, in order and in pieces, and reads each byte once.
    /// Returns whether all bytes are verified, which is not the case if `visit` ended the scan. Returns `None` without
    /// calling `visit` if the page has no uncompressed image of its own. Only an uncompressed image can be read in
    /// parts; any other long page must be read as a whole first.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Closed`], [`Error::Poisoned`].
    #[doc(hidden)]
    pub fn scan(
        &self,
        info: &PageInfo,
        visit: impl FnMut(u64, &[u8]) -> ControlFlow<()>,
    ) -> Result<Option<bool>> {
        self.raw_image(info)?.map(|image| image.scan(visit)).transpose()
    }
}

/// Sets the length of `buffer` to `len` bytes with unspecified contents, or returns an error if the memory cannot be
/// allocated.
pub(super) fn make_room(buffer: &mut Vec<u8>, len: u64) -> Result<()> {
    let refused = || Error::OutOfMemory { place: Place::Host, len };
    let wanted = usize::try_from(len).map_err(|_| refused())?;
    buffer.try_reserve_exact(wanted.saturating_sub(buffer.len())).map_err(|_| refused())?;
    buffer.resize(wanted, 0);
    Ok(())
}
