//! Space kept back for a full disk: which purposes may take it, and how it is filled and given up.
//!
//! The order of claims is: the next open, then seals, then deletes, then other batches. Random lives on a
//! simulated full disk came to a store that could not be opened any more within forty steps, before spares
//! were kept for opens (`docs/decisions.md`).

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::{FileName, Folder};

use super::spares::{FIRST_LEN, KEPT_FOR_OPENS, Spare, Spares};
use super::{NOTHING, SegmentPool};
use crate::disk::DiskFile;
use crate::error::{Error, Result};

/// The purpose of a request for space. The reserve of a full disk is for purposes that free space or end a
/// log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpacePurpose {
    /// A batch of the user's that does more than delete pages.
    User,
    /// A batch that only deletes, so that a full disk can be emptied.
    Delete,
    /// A seal that ends the log, or records the snapshots that are verified.
    Seal,
    /// An open. It takes spares before it makes a segment; the maker fills the reserve again later.
    Open,
}

impl SpacePurpose {
    /// How many segments must be left, spares and empty ones of the log together, when this has been written.
    /// The log itself has at least one of them.
    fn leaves(self) -> usize {
        match self {
            // The spares are kept for opens, so an open may take the last one.
            SpacePurpose::Open => 0,
            // The manifest of a snapshot that gives space back may take the one that is held for it.
            SpacePurpose::Seal => KEPT_FOR_OPENS - 1,
            SpacePurpose::Delete => KEPT_FOR_OPENS + 1,
            // Two more than a delete leaves: the user must be able to delete on a disk that refuses other
            // batches, also after the next open, in which a spare may give way for a name.
            SpacePurpose::User => KEPT_FOR_OPENS + 3,
        }
    }
}

impl SegmentPool {
    /// Whether this purpose may take a spare that is kept back and still leave what an open needs.
    pub(super) fn may_take(&self, spares: &Spares, empty: usize, purpose: SpacePurpose) -> bool {
        purpose == SpacePurpose::Open || purpose != SpacePurpose::User && self.is_left(spares, empty, purpose)
    }

    /// Whether enough for an open is left when one spare is gone.
    fn is_left(&self, spares: &Spares, empty: usize, purpose: SpacePurpose) -> bool {
        self.rules.reserve == 0 || spares.files.len() + empty > purpose.leaves()
    }

    /// Whether a frame may be written while `empty` segments of the log are empty, and the store can still be
    /// opened again afterwards. One comparison a batch, without a lock.
    pub fn leaves_enough(&self, empty: usize, purpose: SpacePurpose) -> bool {
        self.rules.reserve == 0 || self.count.load(Ordering::Acquire) + empty >= purpose.leaves()
    }

    /// Makes sure of [`leaves_enough`](Self::leaves_enough) where that is possible. Where the disk has space,
    /// the maker fills the reserve soon, and no frame waits for it.
    ///
    /// # Errors
    /// [`Error::DiskFull`] with nothing changed.
    pub fn keep_back(&self, number: u64, empty: usize, purpose: SpacePurpose) -> Result<()> {
        while !self.leaves_enough(empty, purpose) {
            let needed = self.lacking_bytes();
            // There is space, so this frame waits for no file: the maker brings the reserve up.
            if self.free_bytes() >= needed {
                break;
            }
            match self.add_to_reserve() {
                Ok(false) => {}
                Ok(true) => break,
                // The maker may have filled the reserve first; then the full disk refused only the surplus.
                Err(Error::DiskFull { .. }) if self.leaves_enough(empty, purpose) => break,
                Err(Error::DiskFull { needed, .. }) => {
                    return Err(Error::disk_full(FileName::Segment(number), needed));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Refuses a segment for a user's batch where the disk has too little space for it and for the missing
    /// reserve. Space that comes back belongs to the reserve first; otherwise an open that follows finds
    /// none.
    pub(super) fn leave_the_reserve(&self, spares: &Spares, number: u64, len: u64) -> Result<()> {
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

    /// About how many bytes fill the reserve and the spares kept for opens. Doubled, because other files take
    /// space at the same time.
    fn lacking_bytes(&self) -> u64 {
        let lacking = self.rules.kept_back().saturating_sub(self.count.load(Ordering::Acquire)) as u64;
        2 * lacking * self.first_len()
    }

    /// Adds one spare to the reserve if it lacks one; returns whether it is full. One at a time, because a
    /// committer that needs a segment meanwhile, or a `close`, waits for one file only.
    pub fn add_to_reserve(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        if !spares.is_full() {
            // Two empty segments follow the one in use. While segments grow, half of the next one is twice
            // that length.
            let is_grown = spares.next_len == self.rules.len;
            let mut len = match spares.lacks_long() {
                false => SEGMENT_LEN_MIN,
                true if is_grown => self.rules.len,
                true => (spares.next_len / 2).max(self.first_len()),
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
            // A spare without a durable name would be lost with a power cut, and with it the promise that the
            // next open finds it.
            let temporary = FileName::Temporary(Folder::Log, number);
            self.rename(temporary, FileName::Spare(number))
                .inspect_err(|_| self.remove_unfinished(temporary))?;
            self.disk.sync_folder(Folder::Log)?;
            spares.add(Spare { number, len });
            // The new spare takes the place of a short one. Short ones stay for the next open, as far as they
            // may.
            let is_too_much = spares.are_too_many();
            let is_old =
                |spare: &Spare| spare.len < spares.reserve_len() && (spare.len > FIRST_LEN || is_too_much);
            let kept = spares.kept_for_opens();
            if let Some(at) = spares.files.iter().skip(kept).position(is_old)
                && spares.files.len() > self.rules.kept_back()
            {
                self.give_up(&mut spares, kept + at)?;
            }
        }
        Ok(spares.is_full())
    }

    /// Fills the reserve as far as there is space. Space that comes back to a full disk belongs to the
    /// reserve first: another writer that takes it may leave the next open none.
    pub fn fill(&self) -> Result<()> {
        loop {
            // On a disk with space the maker does this, and no caller waits for it.
            let lacking = self.lacking_bytes();
            if lacking == 0 || self.free_bytes() >= lacking {
                return Ok(());
            }
            match self.add_to_reserve() {
                Ok(_) => {}
                Err(Error::DiskFull { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Runs `make`; where it finds no space for its files, gives up the spares beyond the reserve and runs it
    /// once more. A `make` that fails for lack of space must have changed nothing.
    pub fn with_surplus<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(Error::DiskFull { .. }) if self.release_surplus()? => make(),
            made => made,
        }
    }

    /// Gives up the spares that are not kept back, and those of images. Returns whether there were any.
    pub fn release_surplus(&self) -> Result<bool> {
        let had_images = self.image_spares.release()?;
        let mut spares = self.spares.lock();
        let (kept, reserve) = (spares.kept_for_opens(), spares.reserve());
        let beyond = (kept.min(reserve.start)..reserve.start).chain(reserve.end..spares.files.len());
        let had_any = beyond.clone().count() > 0;
        // From the last one on, so that the indices of the others stay valid.
        for at in beyond.rev() {
            self.give_up(&mut spares, at)?;
        }
        Ok(had_any || had_images)
    }

    /// Makes the small file `temporary`, of `len` bytes, of a spare, if one can be spared while `empty`
    /// segments of the log are empty. Its bytes are old ones of the log. `None` if no spare can be had.
    ///
    /// A rename needs less space than a new file. XFS makes none, however short, where fewer than 188 KiB are
    /// free (Linux 6.18): it puts by the space for 64 inodes and for the blocks that lead to them.
    ///
    /// A crash leaves the spare, or a file under a temporary name, which the next open removes.
    pub fn make_small(
        &self,
        temporary: FileName,
        len: u64,
        empty: usize,
        purpose: SpacePurpose,
    ) -> Result<Option<Arc<dyn DiskFile>>> {
        let mut spares = self.spares.lock();
        loop {
            // The longest one: the space of its other bytes comes back.
            let longest = spares.files.len().checked_sub(1).filter(|at| spares.files[*at].len >= len);
            let longest = longest.filter(|_| self.is_left(&spares, empty, purpose));
            let Some(at) = longest else { return Ok(None) };
            match self.rename(FileName::Spare(spares.files[at].number), temporary) {
                Ok(()) => {
                    spares.take(at);
                    break;
                }
                // XFS needs a block to make the folder longer; a removed spare gives it one.
                Err(Error::DiskFull { .. }) if at > 0 => self.give_up(&mut spares, at - 1)?,
                Err(Error::DiskFull { .. }) => return Ok(None),
                // The log's folder may be a mount of its own.
                Err(Error::Io { source, .. }) if source.kind() == ErrorKind::CrossesDevices => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        // The file is no spare any more, durably, before it is written to. Otherwise a power cut could leave
        // it both names, and the log's frames would go into a manifest.
        let made = self.disk.sync_folder(Folder::Log).and_then(|()| {
            let file = self.disk.open(temporary, true)?;
            file.cut(len)?;
            Ok(Some(file))
        });
        made.inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Gives up one spare so that a small file finds space, if one can be spared while `empty` segments of
    /// the log are empty. Returns whether it did.
    pub fn release_one(&self, empty: usize, purpose: SpacePurpose) -> Result<bool> {
        if self.image_spares.release()? {
            return Ok(true);
        }
        let leaves = self.rules.reserve == 0 || self.count.load(Ordering::Acquire) + empty > purpose.leaves();
        if leaves { self.release_reserve() } else { Ok(false) }
    }

    /// Gives up one spare, whatever it is held for, because an open must find space. Returns whether there
    /// was one.
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

    /// Removes a spare for its space. The removal is not durable at once: a crash may bring the spare back,
    /// which costs only its space.
    pub(super) fn give_up(&self, spares: &mut Spares, at: usize) -> Result<()> {
        let spare = spares.take(at);
        self.disk.remove(FileName::Spare(spare.number))
    }
}
