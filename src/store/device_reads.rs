//! Reads pages directly into device memory.

use remanent_format::{Lsn, PageId};

use crate::base::allocation::{make_room, push};
use crate::device::{Command, CommandList, DeviceBytes, Span};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPage;
use crate::store::Store;

/// A range of a page on disk, and the device memory that receives its bytes.
struct DiskRead {
    page: DiskPage,
    offset: u64,
    target: Span,
}

impl Store {
    /// Fills device memory with ranges of pages, all from the same state, and returns the newest batch of that state.
    ///
    /// Each entry consists of a page, an offset in the page, and the memory to fill. The length of the memory
    /// determines the number of bytes. All ranges are copied by one command list, so pages in GPU memory are copied at
    /// the speed of that memory. Pages on disk are read through the store's pinned memory.
    ///
    /// The memory ranges must not overlap. After an error, each range may be partly or completely filled.
    ///
    /// ```
    /// use remanent::{DeviceChoice, Options, Place};
    /// let store = Options::new().device(DeviceChoice::Host).open_temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"keys".to_vec(), Place::Device(0));
    /// batch.create_from(b"and values".to_vec(), Place::Disk);
    /// let pages = store.commit(batch)?.pages;
    ///
    /// let tensor = store.device_bytes(10, Place::Device(0))?;
    /// let (first, last) = (tensor.part(0..4)?, tensor.part(4..10)?);
    /// store.read_device(&[(pages[0], 0, &first), (pages[1], 4, &last)])?;
    /// let mut bytes = [0; 10];
    /// tensor.read(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"keysvalues");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Refused`] for memory of another device, memory that
    /// overlaps other memory in the call, memory that a stream is using, and memory that contains a page;
    /// [`Error::Damaged`] as for [`Store::read`]; [`Error::Poisoned`] if the device has failed, now or in an earlier
    /// batch.
    pub fn read_device(&self, ranges: &[(PageId, u64, &DeviceBytes)]) -> Result<Lsn> {
        ranges.iter().for_each(|(page, ..)| self.engine().versions.used(*page));
        self.of_device(|| self.fill_memory(ranges))
    }

    fn fill_memory(&self, ranges: &[(PageId, u64, &DeviceBytes)]) -> Result<Lsn> {
        let Engine { applier, device, staging, .. } = self.engine();
        let (mut wanted, mut in_use) = (Vec::new(), Vec::new());
        for (page, offset, bytes) in ranges {
            bytes.check_process()?;
            bytes.check_device(device)?;
            // These guards are held until all bytes have arrived.
            let (use_of_range, target) = bytes.begin_write()?;
            push(&mut in_use, use_of_range)?;
            push(&mut wanted, (*page, *offset, target))?;
        }
        DeviceBytes::check_apart(ranges.iter().map(|(.., bytes)| *bytes))?;
        applier.unloaded().wait(ranges.iter().map(|(page, ..)| *page))?;
        let (lsn, pending, on_disk) = applier.turn(move |turn| {
            turn.intact()?;
            let (mut commands, mut on_disk) = (Vec::new(), Vec::new());
            make_room(&mut commands, wanted.len())?;
            for (page, offset, target) in wanted {
                let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
                let end = offset.checked_add(target.len).filter(|end| *end <= info.len);
                let Some(end) = end else {
                    return Err(Error::OutOfBounds { page, offset, len: target.len, page_len: info.len });
                };
                if let Some(copy) = turn.applied.on_disk.get(page) {
                    let page = copy.part(&(offset..end));
                    push(&mut on_disk, DiskRead { page, offset, target })?;
                } else if target.len > 0 {
                    let source = turn.applied.memory[page].part(offset, target.len);
                    commands.push(Command::Copy { source, target });
                }
            }
            let list = CommandList { commands, staging: Vec::new() };
            Ok((turn.applied.point.lsn, turn.submit(list)?, on_disk))
        })?;
        // Even after a failed read, the command list must finish before the caller may use the memory again.
        let read = on_disk.iter().try_for_each(|read| read.page.upload(read.offset, staging, read.target));
        device.finish(pending)?;
        read.map(|()| lsn)
    }
}
