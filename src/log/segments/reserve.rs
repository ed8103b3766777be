//! The reserve: space that is kept for a full disk, and the purposes that may use it.
//!
//! The order of priority is: the next open, seals, deletes, other batches. Before spares were kept for opens,
//! random tests on a simulated full disk produced, within forty steps, a store that could no longer be opened
//! (`docs/decisions.md`).

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::{FileName, Folder};

use super::spares::{FIRST_LEN, SPARES_FOR_OPENS, Spare, Spares};
use super::{NOTHING, SegmentPool};
use crate::disk::DiskFile;
use crate::error::{Error, Result};

/// The purpose of a request for space. On a full disk, only purposes that free space or end a log may use the reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpacePurpose {
    /// A batch that does more than delete pages.
    User,
    /// A batch that only deletes pages, and thus frees space.
    Delete,
    /// A seal that ends the log or records verified snapshots.
    Seal,
    /// An open of the store. An open uses spares before it creates a segment, and the maker thread refills the reserve
    /// later.
    Open,
}

impl SpacePurpose {
    /// Returns the minimum number of segments that must remain after a write for this purpose, counting spares and the
    /// log's empty segments. The log itself has at least one empty segment.
    fn leaves(self) -> usize {
        match self {
            // These spares are kept for opens, so an open may use all of them.
            SpacePurpose::Open => 0,
            // The manifest of a snapshot that frees space may use the spare that is kept for it.
            SpacePurpose::Seal => SPARES_FOR_OPENS - 1,
            SpacePurpose::Delete => SPARES_FOR_OPENS + 1,
            // Two more than for a delete. A user must be able to delete pages on a disk that is too full for other
            // batches, even after another open, which may have to remove a spare to create a file name.
            SpacePurpose::User => SPARES_FOR_OPENS + 3,
        }
    }
}

impl SegmentPool {
    /// Returns whether a request for `purpose` may use a reserved spare and still leave enough segments for an open.
    pub(super) fn may_take(&self, spares: &Spares, empty: usize, purpose: SpacePurpose) -> bool {
        purpose == SpacePurpose::Open || purpose != SpacePurpose::User && self.is_left(spares, empty, purpose)
    }

    /// Returns whether enough segments for an open remain after one spare is used.
    fn is_left(&self, spares: &Spares, empty: usize, purpose: SpacePurpose) -> bool {
        self.rules.reserve == 0 || spares.files.len() + empty > purpose.leaves()
    }

    /// Returns whether the store can still be opened after a frame is written for `purpose`, if the log has `empty`
    /// empty segments. The check is one comparison per batch, without a lock.
    pub fn leaves_enough(&self, empty: usize, purpose: SpacePurpose) -> bool {
        self.rules.reserve == 0 || self.count.load(Ordering::Acquire) + empty >= purpose.leaves()
    }

    /// Adds spares until [`leaves_enough`](Self::leaves_enough) returns `true`. If the disk has enough free space,
    /// returns immediately, and leaves this to the maker thread.
    ///
    /// # Errors
    /// [`Error::DiskFull`], without any change.
    pub fn hold_reserve(&self, number: u64, empty: usize, purpose: SpacePurpose) -> Result<()> {
        while !self.leaves_enough(empty, purpose) {
            let needed = self.lacking_bytes();
            // There is space, so the maker fills the reserve, and this frame does not wait for a file.
            if self.free_bytes() >= needed {
                break;
            }
            match self.add_to_reserve() {
                Ok(false) => {}
                Ok(true) => break,
                // The maker thread has filled the reserve in the meantime, so the failure to create another spare does
                // not matter.
                Err(Error::DiskFull { .. }) if self.leaves_enough(empty, purpose) => break,
                Err(Error::DiskFull { needed, .. }) => {
                    return Err(Error::disk_full(FileName::Segment(number), needed));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns an error if the disk lacks the space for both the missing reserve and a segment for a user's batch.
    /// Freed space is first used for the reserve, because otherwise a later open may find no space.
    pub(super) fn check_reserve_space(&self, spares: &Spares, number: u64, len: u64) -> Result<()> {
        let lacking = spares.lacking() as u64;
        if lacking == 0 {
            return Ok(());
        }
        let needed = len.saturating_add(lacking.saturating_mul(self.first_len()));
        if self.free_bytes() < needed && !(self.image_spares.release()? && self.free_bytes() >= needed) {
            return Err(Error::disk_full(FileName::Segment(number), needed));
        }
        Ok(())
    }

    /// Estimates the number of bytes that the reserve and the spares for opens still need. The estimate is doubled,
    /// because other files need space at the same time.
    fn lacking_bytes(&self) -> u64 {
        let lacking =
            self.rules.reserved_spare_count().saturating_sub(self.count.load(Ordering::Acquire)) as u64;
        2 * lacking * self.first_len()
    }

    /// Adds one spare if the reserve is not full, and returns whether the reserve is full. A call adds only one spare,
    /// so that a concurrent `close` or a committer waits for at most one file.
    pub fn add_to_reserve(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        if !spares.is_full() {
            // There are two empty segments after the current one. While segments grow, half of the next segment's
            // length is twice the length of the current one.
            let is_grown = spares.next_len == self.rules.len;
            let mut len = match spares.is_short_of_long_spares() {
                false => SEGMENT_LEN_MIN,
                true if is_grown => self.rules.len,
                true => align_up(spares.next_len / 2, GROUP_ALIGN).max(self.first_len()),
            };
            let number = spares.next_number();
            loop {
                match self.build(number, len, None, NOTHING) {
                    // On a nearly full disk a short spare is better than none.
                    Err(Error::DiskFull { .. }) if spares.lacking() > 0 && len > SEGMENT_LEN_MIN => {
                        len = align_up(len / 2, GROUP_ALIGN).max(SEGMENT_LEN_MIN);
                    }
                    built => {
                        built?;
                        break;
                    }
                }
            }
            // The next open relies on the spare, so the spare's name must survive a power cut.
            let temporary = FileName::Temporary(Folder::Log, number);
            self.rename(temporary, FileName::Spare(number))
                .inspect_err(|_| self.remove_unfinished(temporary))?;
            self.disk.sync_folder(Folder::Log)?;
            spares.add(Spare { number, len });
            // The new spare replaces a short one. Short spares are kept for the next open, within the limit.
            let is_too_much = spares.are_too_many();
            let is_old =
                |spare: &Spare| spare.len < spares.reserve_len() && (spare.len > FIRST_LEN || is_too_much);
            let kept = spares.open_spare_count();
            if let Some(at) = spares.files.iter().skip(kept).position(is_old)
                && spares.files.len() > self.rules.reserved_spare_count()
            {
                self.give_up(&mut spares, kept + at)?;
            }
        }
        Ok(spares.is_full())
    }

    /// Fills the reserve as much as disk space permits, before a caller writes about `bytes` bytes to other files. On a
    /// full disk, freed space is first used for the reserve, because another program could use the space before the
    /// next open.
    pub fn fill(&self, bytes: u64) -> Result<()> {
        loop {
            // If the disk has space for both, the maker thread creates the spares, and the caller does not wait.
            // The maker may be slower than the caller, whose files would then take the space of the reserve.
            let lacking = self.lacking_bytes();
            let needed = lacking.saturating_add(bytes.saturating_mul(2));
            if lacking == 0 || self.free_bytes() >= needed {
                return Ok(());
            }
            match self.add_to_reserve() {
                Ok(_) => {}
                Err(Error::DiskFull { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Runs `make`. If `make` fails because the disk is full, removes the spares beyond the reserve and runs `make`
    /// once more. A `make` that fails for lack of space must have changed nothing.
    pub fn with_surplus<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(Error::DiskFull { .. }) if self.release_surplus()? => make(),
            made => made,
        }
    }

    /// Removes the spares beyond the reserve and all spare image files. Returns whether any file was removed.
    pub fn release_surplus(&self) -> Result<bool> {
        let had_images = self.image_spares.release()?;
        let mut spares = self.spares.lock();
        let (kept, reserve) = (spares.open_spare_count(), spares.reserve());
        let beyond = (kept.min(reserve.start)..reserve.start).chain(reserve.end..spares.files.len());
        let had_any = beyond.clone().count() > 0;
        // Removal starts with the last spare, so that the other indices stay valid.
        for at in beyond.rev() {
            self.give_up(&mut spares, at)?;
        }
        Ok(had_any || had_images)
    }

    /// Creates the small file `temporary` of `len` bytes from a spare. The file contains old bytes of the log. Returns
    /// `None` if an open needs all spares while the log has `empty` empty segments.
    ///
    /// A rename needs less space than a new file. XFS creates no file, however short, if fewer than 188 KiB are free
    /// (Linux 6.18), because it allocates space for 64 inodes and for the blocks that lead to them.
    ///
    /// A crash leaves the spare, or a file under a temporary name that the next open removes.
    pub fn make_small(
        &self,
        temporary: FileName,
        len: u64,
        empty: usize,
        purpose: SpacePurpose,
    ) -> Result<Option<Arc<dyn DiskFile>>> {
        let mut spares = self.spares.lock();
        loop {
            // The longest spare is used, because truncating it frees the most space.
            let longest = spares.files.len().checked_sub(1).filter(|at| spares.files[*at].len >= len);
            let longest = longest.filter(|_| self.is_left(&spares, empty, purpose));
            let Some(at) = longest else { return Ok(None) };
            match self.rename(FileName::Spare(spares.files[at].number), temporary) {
                Ok(()) => {
                    spares.take(at);
                    break;
                }
                // XFS needs a block to extend the folder, and a removed spare frees a block.
                Err(Error::DiskFull { .. }) if at > 0 => self.give_up(&mut spares, at - 1)?,
                Err(Error::DiskFull { .. }) => return Ok(None),
                // The log's folder may be a separate mount.
                Err(Error::Io { source, .. }) if source.kind() == ErrorKind::CrossesDevices => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        // The file must durably lose its spare name before it is written to. Otherwise a power cut could leave it both
        // names, and frames of the log would be written to a manifest.
        let made = self.disk.sync_folder(Folder::Log).and_then(|()| {
            let file = self.disk.open(temporary, true)?;
            file.cut(len)?;
            Ok(Some(file))
        });
        made.inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Removes one spare to make space for a small file, unless an open needs the spare while the log has `empty` empty
    /// segments. Returns whether a spare was removed.
    pub fn release_one(&self, empty: usize, purpose: SpacePurpose) -> Result<bool> {
        if self.image_spares.release()? {
            return Ok(true);
        }
        let leaves = self.rules.reserve == 0 || self.count.load(Ordering::Acquire) + empty > purpose.leaves();
        if leaves { self.release_reserve() } else { Ok(false) }
    }

    /// Removes one spare, even a spare of the reserve, so that an open finds space. Returns whether a spare was
    /// removed.
    pub fn release_reserve(&self) -> Result<bool> {
        if self.image_spares.release()? {
            return Ok(true);
        }
        let mut spares = self.spares.lock();
        match spares.files.len() {
            0 => Ok(false),
            count => self.give_up(&mut spares, count - 1).map(|()| true),
        }
    }

    /// Removes a spare to free its space. The removal is not durable on return. After a crash the spare may exist
    /// again, at no cost except its space.
    pub(super) fn give_up(&self, spares: &mut Spares, at: usize) -> Result<()> {
        let spare = spares.take(at);
        self.disk.remove(FileName::Spare(spare.number))
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::{Folder, StoreId};

    use super::*;
    use crate::disk::Disk;
    use crate::disk::image_spares::ImageSpares;
    use crate::log::SegmentRules;
    use crate::options::LogIo;
    use crate::testing::sim_disk::SimDisk;

    #[test]
    fn reserve_is_filled_before_files_that_would_take_its_space() {
        let disk = SimDisk::new();
        disk.make_folder(Folder::Log).unwrap();
        let (shared, store): (Arc<dyn Disk>, _) = (Arc::new(disk.clone()), StoreId([1; 16]));
        let rules = SegmentRules { len: FIRST_LEN, reserve: 2, spare_bytes: 0 };
        let image_spares = Arc::new(ImageSpares::none(shared.clone(), store));
        let pool = SegmentPool::new(shared, store, rules, LogIo::Mapped, image_spares).unwrap();
        let free = pool.lacking_bytes() + (1 << 20);
        disk.set_capacity(Some(disk.used_bytes() + free));
        // There is space for the reserve and for a short file.
        pool.fill(64 << 10).unwrap();
        assert_eq!(pool.spares.lock().lacking(), rules.reserved_spare_count());
        pool.fill(2 << 20).unwrap();
        assert_eq!(pool.spares.lock().lacking(), 0);
    }
}
