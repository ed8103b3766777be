//! Reading pages' bytes.
//!
//! Where pages lie in memory of the host, the caller's thread reads them itself: piece by piece under the
//! memory's lock, with a look after each piece whether the page is still at its version. A batch installs its
//! versions before the applier touches a byte, so a page that still is at its version had its bytes to
//! itself. Pinned pages beside a GPU are read so, too, while no list that writes to them is under way. A page
//! that changes again and again is read by the applier, between two batches, and so is every page in a GPU's
//! memory.

use remanent_format::{Key, Lsn, PageId, PageInfo, Place};

use super::Store;
use crate::engine::Engine;
use crate::error::{Error, Result};
#[cfg(doc)]
use crate::options::PageLoad;

/// How much of a page is copied under its lock at a time.
const PIECE_LEN: usize = 64 << 10;
/// How often a caller's thread tries before the applier reads.
const TRIES: usize = 2;

impl Store {
    /// Fills `out` with the page's bytes from `offset` on, all of them as of the batch returned. That is at
    /// least every batch that any call was told is logged before this one began; see [`Store::page`].
    ///
    /// Pages in the host's own memory are read by the calling thread, which waits for batches of this page
    /// that are logged and not yet applied, and for nothing else. So are pinned pages beside one GPU, unless
    /// the GPU is just writing to them; beside several GPUs all pages are read in the order of batches.
    ///
    /// More than 64 KiB of a GPU's memory are copied aside there first, so that commits go on while the bytes
    /// come to the host. Where the budget has no room for that, where the reads under way have copied 1 GiB
    /// together, or where this one alone is longer, deltas are applied when the read is done.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Damaged`] if the page was unloaded
    /// ([`PageLoad::OnDemand`]) and its image does not hold; [`Error::Poisoned`] if the device failed, now or
    /// with a batch before. A store that is poisoned by its disk goes on being read.
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<Lsn> {
        self.check_process()?;
        self.read_bytes(page, offset, out).map(|(_, lsn)| lsn)
    }

    /// As [`Store::read`], of the page that has this key: key and bytes are of one moment, so that no other
    /// thread's delete or new page comes between a lookup and a read. Returns the page as it is at these
    /// bytes.
    ///
    /// ```
    /// use remanent::{Key, Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::UnknownKey`], and as for [`Store::read`].
    pub fn read_key(&self, key: &Key, offset: u64, out: &mut [u8]) -> Result<PageInfo> {
        loop {
            let page = self.page_by_key(key)?.page;
            match self.read_bytes(page, offset, out) {
                // It went meanwhile. The key is another page's, or no page's.
                Err(Error::UnknownPage { .. }) => {}
                read => return read.map(|(info, _)| info),
            }
        }
    }

    /// A whole page. Its length need not be known before, and bytes and length are of one moment.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"page");
    /// let page = store.commit(batch)?.pages[0];
    /// assert_eq!(store.read_to_vec(page)?, b"page");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Store::read`]; [`Error::OutOfMemory`].
    pub fn read_to_vec(&self, page: PageId) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.read_into(page, &mut bytes)?;
        Ok(bytes)
    }

    /// As [`Store::read_to_vec`], into a buffer whose memory is used again. The buffer is made as long as the
    /// page; what it held is gone, also if the read fails. Returns the page as it is at these bytes.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// As for [`Store::read_to_vec`].
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
        let read = applier.read(&**device, staging, page, buffer.len() as u64, |info| (0, info.len));
        let (info, _, bytes) = read.map_err(|error| poison.set_by_device(error))?;
        make_room(buffer, info.len)?;
        buffer.copy_from_slice(&bytes);
        staging.give(bytes.into_staging());
        Ok(info)
    }

    /// The bytes of a page, and the page as it is at these bytes.
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
        let read = applier.read(&**device, staging, page, len, move |_| (offset, len));
        let (info, lsn, bytes) = read.map_err(|error| poison.set_by_device(error))?;
        out.copy_from_slice(&bytes);
        staging.give(bytes.into_staging());
        Ok((info, lsn))
    }

    /// The bytes of a version of a page, if it is the newest one.
    ///
    /// # Errors
    /// `Overtaken` if it is not.
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
        // It may be shorter by now, or gone: either way it is another version.
        let range = move |now: &PageInfo| if now.lsn == lsn { (offset, len) } else { (0, 0) };
        match applier.read(&**device, staging, page, len, range) {
            Ok((now, _, bytes)) => {
                let is_it = now.lsn == lsn;
                if is_it {
                    out.copy_from_slice(&bytes);
                }
                staging.give(bytes.into_staging());
                is_it.then_some(()).ok_or_else(overtaken)
            }
            Err(Error::UnknownPage { .. }) => Err(overtaken()),
            Err(error) => Err(poison.set_by_device(error)),
        }
    }

    /// Bytes of a page as its newest version has them, read by this thread; as of which batch. `None`, with
    /// anything in `out`, if the page has another version by then, or a thread of the caller's cannot read
    /// it.
    ///
    /// In any case the applier has come to this version when this returns.
    pub(super) fn read_version(&self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<Option<Lsn>> {
        let Engine { applier, versions, device, .. } = self.engine();
        applier.unloaded().wait([info.page])?;
        if !applier.has_applied(info.lsn) {
            applier.wait_applied(info.lsn)?;
        }
        if info.place == Place::Disk {
            return self.read_on_disk(info, offset, out);
        }
        // Where a list was lost nothing is read from memory, whatever is in it: the applier says why.
        if !device.reads_now() || !applier.has_applied(info.lsn) {
            return Ok(None);
        }
        let Some(memory) = versions.memory(info.page) else { return Ok(None) };
        let lsn = versions.visible();
        let mut at = offset;
        for piece in out.chunks_mut(PIECE_LEN) {
            if !device.read_now(memory, at, piece) || !versions.is_at(info.page, info.lsn) {
                return Ok(None);
            }
            at += piece.len() as u64;
        }
        Ok(applier.has_applied(info.lsn).then_some(lsn))
    }

    /// As [`read_version`](Self::read_version), for a page on disk: straight to the caller's memory, however
    /// long the range is.
    fn read_on_disk(&self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<Option<Lsn>> {
        let (page, lsn, range) = (info.page, info.lsn, offset..offset + out.len() as u64);
        let caught = self.engine().applier.turn(move |turn| {
            turn.intact()?;
            let is_it = turn.applied.table.get(page).is_some_and(|now| now.lsn == lsn);
            let copy = turn.applied.on_disk.get(page).filter(|_| is_it).map(|page| page.part(&range));
            Ok(copy.map(|copy| (copy, turn.applied.point.lsn)))
        })?;
        let Some((copy, lsn)) = caught else { return Ok(None) };
        copy.read(offset, out)?;
        Ok(Some(lsn))
    }
}

/// Makes a buffer `len` bytes long. What its bytes are is not said.
pub(super) fn make_room(buffer: &mut Vec<u8>, len: u64) -> Result<()> {
    let refused = || Error::OutOfMemory { place: Place::Host, len };
    let wanted = usize::try_from(len).map_err(|_| refused())?;
    buffer.try_reserve_exact(wanted.saturating_sub(buffer.len())).map_err(|_| refused())?;
    buffer.resize(wanted, 0);
    Ok(())
}
