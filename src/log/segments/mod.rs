//! Segment files. A segment file is written completely before it is renamed to its segment name, and reused when the
//! log no longer needs it.
//!
//! A crash here loses no frame. Recovery reads no temporary files, and spares contain no data. Before the first frame
//! is written to a segment, the following segment exists under its name, empty and synced (I8).
//!
//! A growing log creates its segments with [`SegmentPool::make`]. An open publishes its first segment separately. On a
//! full disk, requests for space have a fixed order of priority.
//!
//! | file | contents |
//! |---|---|
//! | `file` | writing, syncing and naming a segment |
//! | `spares` | the files that can become segments, by length |
//! | `reserve` | the order of priority for space on a full disk |
//! | `opening` | the segment that an open publishes |
//! | `closing` | freeing space when the log closes |
//!
//! Lock order: the log's `growth` lock, then `spares`. The log's state lock is never held while files are created, so a
//! committer whose frame fits does not wait for file creation.

mod file;
mod spares;
mod reserve;
mod opening;
mod closing;

use std::sync::Arc;

use remanent_format::frame::{FRAME_HEADER_LEN, frame_len};
use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{FileName, Folder, StoreId};

pub(crate) use self::closing::ClosedEnd;
pub(crate) use self::file::SegmentFile;
use self::file::header_block;
pub(crate) use self::reserve::SpacePurpose;
pub(crate) use self::spares::SegmentRules;
use self::spares::{FIRST_LEN, Spare, Spares};
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::atomic::AtomicUsize;
use crate::base::sync::{Mutex, Rank};
use crate::disk::Disk;
use crate::disk::image_spares::ImageSpares;
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The maximum length of a spare that becomes the log's next segment, as a multiple of the needed length.
const LONGER_MAX: u64 = 8;

/// The number of short spares that are kept for opens in addition to the reserve. Each open uses two short spares.
const FIRST_SPARES_MAX: usize = 4;

/// The offset of the payload of a segment's first frame.
const FIRST_PAYLOAD_AT: u64 = SEGMENT_HEADER_BLOCK + FRAME_HEADER_LEN;

/// The content of an empty segment after its header: an offset, and no bytes.
const NOTHING: (u64, &[u8]) = (SEGMENT_HEADER_BLOCK, &[]);

/// A new segment with room for a long frame, for a log whose next empty segment is too short for that frame. The
/// segment does not contain the frame yet.
pub(crate) struct LongSegment {
    pub segment: SegmentFile,
    /// Whether the file already contains the long frame's payload, at [`FIRST_PAYLOAD_AT`]. The log then writes only
    /// the frame's header.
    pub holds_payload: bool,
}

/// Creates the segments of a log, and keeps segments that are no longer needed as spares for new segments.
///
/// The first segments of an opening are short. Each later segment is twice as long as its predecessor, up to the
/// maximum length, so that the space used by a store is proportional to the bytes that it logs. Growth restarts with
/// each opening, because no state on disk records the reached length. Six steps reach 16 MiB.
pub(crate) struct SegmentPool {
    disk: Arc<dyn Disk>,
    store: StoreId,
    rules: SegmentRules,
    /// The mode in which segments are written. A direct window requires that the file's zeros are on the medium. A
    /// mapped window requires that the zeros are cached in small pages.
    io: LogIo,
    /// The spares. A thread holds the lock while it creates files, so that two threads never use the same spare.
    spares: Mutex<Spares>,
    /// The number of spares, for a lock-free check before each batch.
    count: Arc<AtomicUsize>,
    /// The spare image files. They are removed when the log needs space on a full disk.
    image_spares: Arc<ImageSpares>,
}

impl SegmentPool {
    /// Creates a pool with the spares that earlier opens left. Three kinds of spares are removed because they cannot be
    /// used:
    ///
    /// - Spares longer than the current maximum length of segments.
    /// - Spares with holes, for example copied spares. On a full disk, a store into a hole of a mapped file raises
    ///   SIGBUS.
    /// - Spares with a second name, because a hard-linked copy of the directory reads the same file.
    pub fn new(
        disk: Arc<dyn Disk>,
        store: StoreId,
        rules: SegmentRules,
        io: LogIo,
        image_spares: Arc<ImageSpares>,
    ) -> Result<Self> {
        let mut spares = Spares::new(rules);
        for name in disk.list(Folder::Log)? {
            if let Some(FileName::Spare(number)) = FileName::parse(Folder::Log, &name) {
                let spare = disk.open(FileName::Spare(number), false)?;
                let len = spare.len()?;
                // A length that this build would not create is rejected, because a later walk must find groups on whole
                // blocks (I9).
                let is_usable =
                    (SEGMENT_LEN_MIN..=rules.len).contains(&len) && len.is_multiple_of(GROUP_ALIGN);
                if is_usable && spare.is_without_holes()? && spare.has_one_name()? {
                    spares.add(Spare { number, len });
                } else {
                    disk.remove(FileName::Spare(number))?;
                }
            }
        }
        // These rules may allow fewer spares than those of an earlier open.
        while spares.are_too_many() {
            let reserve = spares.reserve();
            let at = if reserve.end < spares.files.len() {
                spares.files.len() - 1
            } else {
                spares.open_spare_count()
            };
            let spare = spares.take(at);
            disk.remove(FileName::Spare(spare.number))?;
        }
        let count = spares.count.clone();
        Ok(Self {
            disk,
            store,
            rules,
            io,
            spares: Mutex::of_rank(Rank::SEGMENT_SPARES, spares),
            count,
            image_spares,
        })
    }

    /// Returns the number of free bytes on the disk. The number is only a hint. Another process may use the space at
    /// any moment, so every caller also handles a failed write.
    fn free_bytes(&self) -> u64 {
        self.disk
            .free_bytes()
            .unwrap_or_else(|error| {
                tracing::debug!(%error, "the file system does not report its free space");
                None
            })
            .unwrap_or(u64::MAX)
    }

    /// Returns an error if another writer has opened the store after this writer.
    pub fn check_writer(&self) -> Result<()> {
        self.disk.check_writer()
    }

    pub fn image_spares(&self) -> &Arc<ImageSpares> {
        &self.image_spares
    }

    /// Returns the maximum length of segments in bytes.
    pub fn segment_len(&self) -> u64 {
        self.rules.len
    }

    fn first_len(&self) -> u64 {
        FIRST_LEN.min(self.rules.len)
    }

    /// Creates the empty segment `number`. The segment's file and name are durable on return. `empty` is the number of
    /// empty segments that the log already has.
    pub fn make(&self, number: u64, empty: usize, purpose: SpacePurpose) -> Result<SegmentFile> {
        let _phase = phases::enter(Phase::SegmentRoll);
        let mut spares = self.spares.lock();
        let wanted = if purpose == SpacePurpose::Open { self.first_len() } else { spares.next_len };
        let at_hand = match purpose {
            SpacePurpose::Open => {
                // A spare is preferred, because writing and syncing zeros for two new segments took a third of the time
                // of opening a small store.
                let at = spares.open_spare_count();
                spares.files.get(at).is_some_and(|spare| spare.len <= wanted).then_some(at)
            }
            SpacePurpose::User | SpacePurpose::Delete | SpacePurpose::Seal => {
                // A spare that is much too long now is kept for a later, longer segment.
                let fits = wanted..=wanted.saturating_mul(LONGER_MAX);
                let beyond = spares.reserve().end..spares.files.len();
                beyond.into_iter().find(|at| fits.contains(&spares.files[*at].len))
            }
        };
        let made = match at_hand {
            Some(at) => self.create_from_spare(&mut spares, at, number),
            None => self.make_for(&mut spares, number, wanted, purpose),
        };
        let made = match made {
            // The segment gets only the minimum length, which suffices for a seal or a few deletes, so that any spare
            // can be used.
            Err(Error::DiskFull { .. }) if self.may_take(&spares, empty, purpose) => {
                self.create_from_reserve(&mut spares, number, SEGMENT_LEN_MIN)?
            }
            made => made?,
        };
        // The two segments of an opening are always short, regardless of the length of the spares. They do not
        // determine the length of the next segment.
        if purpose != SpacePurpose::Open {
            spares.grown(made.len);
        }
        Ok(made)
    }

    /// Creates a segment of length `wanted` if there is space. Otherwise uses a spare beyond the reserve, or halves the
    /// length until the segment fits. An open tries the minimum length directly after `wanted`.
    fn make_for(
        &self,
        spares: &mut Spares,
        number: u64,
        wanted: u64,
        purpose: SpacePurpose,
    ) -> Result<SegmentFile> {
        let mut len = wanted;
        // A user's batch gets no segment shorter than the first segment of a log. The remaining space is for batches
        // that delete pages and for manifests, which lead to free space.
        let shortest = if purpose == SpacePurpose::Open { SEGMENT_LEN_MIN } else { self.first_len() };
        loop {
            let checked = match purpose {
                SpacePurpose::User => self.check_reserve_space(spares, number, len),
                SpacePurpose::Open | SpacePurpose::Delete | SpacePurpose::Seal => Ok(()),
            };
            match checked.and_then(|()| self.create_segment(number, len, NOTHING)) {
                Err(Error::DiskFull { .. }) if len > shortest => {
                    let longest = spares.files.len().checked_sub(1);
                    if purpose == SpacePurpose::User
                        && let Some(at) = longest.filter(|at| *at >= spares.reserve().end)
                    {
                        return self.create_from_spare(spares, at, number);
                    }
                    len = match purpose {
                        SpacePurpose::Open => shortest,
                        _ => align_up(len / 2, GROUP_ALIGN).max(shortest),
                    };
                }
                // The error states the originally wanted length, so that the user frees enough space.
                Err(Error::DiskFull { .. }) => {
                    return Err(Error::disk_full(FileName::Segment(number), wanted));
                }
                made => return made,
            }
        }
    }

    fn create_segment(&self, number: u64, len: u64, content: (u64, &[u8])) -> Result<SegmentFile> {
        let file = self.build(number, len, None, content)?;
        let temporary = FileName::Temporary(Folder::Log, number);
        // The window is opened before the rename (see `SegmentFile::new`). If either fails, the file is removed.
        let segment = SegmentFile::new(number, len, file, self.io);
        let segment = segment.and_then(|segment| self.publish(temporary, number).map(|()| segment));
        segment.inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Creates segment `number` from a spare. The order is header, sync, rename, sync of the folder, so that a segment
    /// never has an old header. A crash before the rename leaves a spare, and recovery does not read spares. The old
    /// frames in the spare state another position and are invalid (I3).
    fn create_from_spare(&self, spares: &mut Spares, at: usize, number: u64) -> Result<SegmentFile> {
        let Spare { number: spare, len } = spares.files[at];
        let file = self.disk.open(FileName::Spare(spare), true)?;
        file.write_at(0, &header_block(&self.header(number, len, None)))?;
        file.sync()?;
        let segment = SegmentFile::new(number, len, file, self.io)?;
        self.publish(FileName::Spare(spare), number)?;
        // The spare is removed from the list only after the rename, because it is still a spare if the rename fails.
        spares.take(at);
        Ok(segment)
    }

    /// Creates a segment of at least `needed` bytes from a spare of the reserve. If there is no space for the segment's
    /// name, another spare is removed. Without another spare, the chosen spare is removed, and a shorter new segment
    /// uses its space.
    fn create_from_reserve(&self, spares: &mut Spares, number: u64, needed: u64) -> Result<SegmentFile> {
        loop {
            // Long spares are used first. One of them is kept, because the next open may have to copy as many
            // bytes of batches.
            let kept = spares.open_spare_count();
            let from = if kept + 1 < spares.files.len() { kept } else { 0 };
            let fits = |at: &usize| spares.files[*at].len >= needed;
            let Some(at) = (from..spares.files.len()).chain(0..from).find(fits) else {
                return self.create_segment(number, needed, NOTHING);
            };
            match self.create_from_spare(spares, at, number) {
                Err(Error::DiskFull { .. }) => {
                    // XFS needs a block to extend the folder, and a removed spare frees a block.
                    let other = (0..spares.files.len()).rev().find(|other| *other != at);
                    self.give_up(spares, other.unwrap_or(at))?;
                }
                made => return made,
            }
        }
    }

    /// Creates a segment with room for the frame of `payload`. The new segment replaces the empty segment `number`
    /// through a rename. The caller must have ensured that the following segment exists (I8).
    ///
    /// A segment that is too long for later reuse is created with the payload in it, so that the payload's bytes are
    /// written once instead of after zeros. Without a header, the payload is not a frame (I3). A direct log creates the
    /// segment without the payload, because its window would write the payload a second time.
    pub fn make_long(
        &self,
        number: u64,
        payload: &[u8],
        empty: usize,
        purpose: SpacePurpose,
    ) -> Result<LongSegment> {
        let _phase = phases::enter(Phase::SegmentRoll);
        let mut spares = self.spares.lock();
        let needed = SEGMENT_HEADER_BLOCK + frame_len(payload.len() as u64);
        let needed = needed.next_multiple_of(GROUP_ALIGN);
        // More frames of this length are likely, so the segment gets space for several.
        let wanted = needed.next_power_of_two().saturating_mul(2).clamp(spares.next_len, self.rules.len);
        let len = needed.max(wanted);
        let holds_payload = len > self.rules.len && self.io != LogIo::Direct;
        let content = if holds_payload { (FIRST_PAYLOAD_AT, payload) } else { NOTHING };
        let made = match self.create_segment(number, len, content) {
            // On a full disk, the segment gets space for this frame only.
            Err(Error::DiskFull { .. }) if needed.max(self.first_len()) < len => {
                self.create_segment(number, needed.max(self.first_len()), NOTHING)
            }
            made => made,
        };
        let long = match made {
            Ok(segment) => LongSegment { holds_payload: holds_payload && segment.len == len, segment },
            Err(Error::DiskFull { .. }) if self.may_take(&spares, empty, purpose) => {
                let segment = self.create_from_reserve(&mut spares, number, needed)?;
                LongSegment { segment, holds_payload: false }
            }
            Err(error) => return Err(error),
        };
        spares.grown(long.segment.len);
        Ok(long)
    }

    /// Turns segments that are no longer needed into spares, as long as more spares are useful, and removes the others.
    /// `numbers` begins with the oldest segment, so that a crash leaves no gap among the needed segments (I8).
    ///
    /// Enough spares are kept for a log that grows from snapshot to snapshot without creating segments. A new segment
    /// costs as many bytes of zeros as it will contain frames, and the frames wait for these zeros. With a single spare
    /// beyond the reserve, 8 threads that each committed 64 KiB durably spent half of their time waiting for segments.
    pub fn recycle(&self, numbers: &[u64]) -> Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        let _phase = phases::enter(Phase::Recycle);
        let mut spares = self.spares.lock();
        for &number in numbers {
            let segment = FileName::Segment(number);
            let file = self.disk.open(segment, false)?;
            let len = file.len()?;
            // When a log is closed, frames that are not needed are replaced by a hole. Such a file cannot become a
            // spare: storing into a hole of a mapped file raises SIGBUS on a full disk.
            if self.is_wanted(&spares, len) && file.has_one_name()? && file.is_without_holes()? {
                let spare = spares.next_number();
                match self.rename(segment, FileName::Spare(spare)) {
                    Ok(()) => spares.add(Spare { number: spare, len }),
                    // On a full XFS there may be no block for the new name. Removing the segment still frees its space.
                    Err(Error::DiskFull { .. }) => self.disk.remove(segment)?,
                    Err(error) => return Err(error),
                }
            } else {
                self.disk.remove(segment)?;
            }
        }
        self.disk.sync_folder(Folder::Log)
    }

    /// Returns whether a segment of this length is useful as a spare.
    fn is_wanted(&self, spares: &Spares, len: u64) -> bool {
        // A segment that was created for one long frame does not become a spare, because the next open would remove it.
        let SegmentRules { len: len_max, spare_bytes, .. } = self.rules;
        if len > len_max || !len.is_multiple_of(GROUP_ALIGN) {
            return false;
        }
        // Spares for the reserve have priority, because without them the store rejects batches on a full disk.
        if spares.files.len() < self.rules.reserve || spares.lacking() > 0 && len <= FIRST_LEN {
            return true;
        }
        // A few short segments are kept for the next opens. A log that has grown uses longer segments.
        let short = spares.files.iter().filter(|spare| spare.len <= FIRST_LEN).count();
        if len <= FIRST_LEN
            && FIRST_LEN < len_max
            && short >= self.rules.reserved_spare_count() + FIRST_SPARES_MAX
        {
            return false;
        }
        let surplus = spares.surplus_bytes();
        spare_bytes > 0 && (surplus == 0 || surplus + len <= spare_bytes)
    }

    /// Notifies followers of the log that a batch was stored in segment `number` through a mapping.
    pub fn notify_followers(&self, number: u64) {
        self.disk.notify_watchers(FileName::Segment(number));
    }
}
