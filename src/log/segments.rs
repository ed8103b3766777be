//! Segment files: made whole before they get their name, reused when nothing needs them.
//!
//! A crash here loses nothing. Recovery reads no temporary file, and a spare holds nothing. A segment that
//! has its name is empty, synced and in its folder before the first frame enters its predecessor (I8).
//!
//! On a full disk the order of claims is: the next open, then seals, then deletes, then other batches. Random
//! lives on a simulated full disk came to a store that could not be opened any more within forty steps,
//! before spares were held for opens (`docs/decisions.md`).
//!
//! Lock order: the log's `growth` lock, then `spares`. The log's state lock is never held while files are
//! made, so a committer that finds room does not wait for them.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::{FileName, Folder, StoreId};

use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::AtomicUsize;
use crate::disk::{Disk, DiskFile, Window};
use crate::error::{Error, Result};
use crate::options::LogIo;

/// The length of a log's first segments, unless segments are shorter anyway. A log of 16 MiB segments takes
/// 80 MB before anything is written; with this length a young store, or an opening that commits little, takes
/// little.
const FIRST_LEN: u64 = 256 << 10;

/// The log's next segment is made of a spare only if the spare is at most this many times as long as it
/// needs.
const LONGER_MAX: u64 = 8;

/// Short spares that wait for opens, beyond the reserve; an open takes two of them.
const FIRST_SPARES_MAX: usize = 4;

/// Spares of any length that are held in addition to the reserve, so that a store on a full disk can be
/// opened again.
///
/// An open takes two segments: its own, and an empty one after it. It gets back the empty one that the log
/// ended with. It gets back the other one only if the store committed nothing since it was opened; otherwise
/// the log has grown by one segment. So two must be left after the next open, for the opens that follow, and
/// the next open itself takes two more. The fifth is for the manifest of a snapshot that gives back the space
/// of deleted pages, also if the store is opened between the delete and the snapshot.
const HELD_FOR_OPENS: usize = 5;

/// While segments grow, a spare is long enough for the reserve if it has this part of the next segment's
/// length. So the reserve is not made anew at each step.
const RESERVE_SHARE: u64 = 4;

/// The bytes by which a folder grows for a name that it has no room for. XFS refuses a rename where they are
/// not free.
const FOLDER_BLOCK: u64 = 4096;

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
            SpacePurpose::Seal => HELD_FOR_OPENS - 1,
            SpacePurpose::Delete => HELD_FOR_OPENS + 1,
            // Two more than a delete leaves: the user must be able to delete on a disk that refuses other
            // batches, also after the next open, in which a spare may give way for a name.
            SpacePurpose::User => HELD_FOR_OPENS + 3,
        }
    }
}

/// A segment file that is wholly written, and the window through which frames go to it.
pub(crate) struct SegmentFile {
    pub number: u64,
    pub len: u64,
    pub file: Arc<dyn DiskFile>,
    pub window: Arc<dyn Window>,
}

impl SegmentFile {
    /// Maps a segment, before it gets its name. If the window were refused after the rename, the log would go
    /// on with the segment that this one has replaced, and its frames would lie in a file without a name.
    fn new(number: u64, len: u64, file: Arc<dyn DiskFile>, io: LogIo) -> Result<Self> {
        let window = Arc::from(file.window(io)?);
        Ok(Self { number, len, file, window })
    }
}

/// How long segments are, and how many spares wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentRules {
    /// The length in bytes up to which a log's segments grow.
    pub len: u64,
    /// Number of spares that are kept back for a full disk.
    pub reserve: usize,
    /// Bytes of spares that are kept in addition to those. One spare is kept in any case, unless this is 0.
    /// They give way to every caller that finds the disk full.
    pub spare_bytes: u64,
}

impl SegmentRules {
    /// Number of spares that are held for opens: none if nothing is kept back at all.
    fn held_for_opens(&self) -> usize {
        if self.reserve == 0 { 0 } else { HELD_FOR_OPENS }
    }

    /// Number of spares that are kept back in all.
    fn held(&self) -> usize {
        self.reserve.saturating_add(self.held_for_opens())
    }
}

/// Makes segments and takes them back.
///
/// The first segments of an opening are short. Each later one is twice as long as the one before, up to the
/// usual length. So the space that a store takes follows from the bytes that it logs. Growth begins anew with
/// each opening, because no state on disk says how far it had come; six steps lead to 16 MiB.
pub(crate) struct SegmentPool {
    disk: Arc<dyn Disk>,
    store: StoreId,
    rules: SegmentRules,
    /// How segments will be written; a direct window wants its zeros on the medium, a mapped one in small
    /// pages.
    io: LogIo,
    /// Held while files are made, so that two makers never take the same spare.
    spares: Mutex<Spares>,
    /// How many spares there are, for a check before each batch that takes no lock.
    count: Arc<AtomicUsize>,
}

/// A file that is ready to become a segment: preallocated, synced, under a name that recovery does not read.
#[derive(Clone, Copy, Debug)]
struct Spare {
    number: u64,
    len: u64,
}

/// The spares by length, and how long the next segment is.
struct Spares {
    /// The spares, from the shortest to the longest.
    files: Vec<Spare>,
    /// The length of the next segment that is made because the log grows.
    next_len: u64,
    rules: SegmentRules,
    /// How many spares there are, for readers that hold no lock.
    count: Arc<AtomicUsize>,
}

impl Spares {
    fn new(rules: SegmentRules) -> Self {
        Self { files: Vec::new(), next_len: FIRST_LEN.min(rules.len), rules, count: Arc::default() }
    }

    /// How long a spare of the reserve must be: as long as the segment that takes frames. After a crash an
    /// open copies the batches that no mark proves, and on a full disk it has only the reserve for them.
    fn reserve_len(&self) -> u64 {
        // While segments grow, the one in use is at most a quarter as long as the next one that is made.
        if self.next_len == self.rules.len { self.rules.len } else { self.next_len / RESERVE_SHARE }
    }

    /// How many spares are held for opens now; they are the shortest ones.
    fn held_for_opens(&self) -> usize {
        self.rules.held_for_opens().min(self.files.len())
    }

    /// The places of the reserve among the spares: the shortest that are long enough, otherwise the longest.
    fn reserve(&self) -> Range<usize> {
        let count = self.rules.reserve;
        let long = self.files.partition_point(|spare| spare.len < self.reserve_len());
        let start = long.max(self.held_for_opens()).min(self.files.len().saturating_sub(count));
        start..(start + count).min(self.files.len())
    }

    /// Whether fewer spares are long enough for the reserve than it should have.
    fn lacks_long(&self) -> bool {
        let short = self.files.partition_point(|spare| spare.len < self.reserve_len());
        self.files.len() - short < self.rules.reserve
    }

    /// How many spares are missing, of the reserve and of those held for opens.
    fn lacking(&self) -> usize {
        self.rules.held().saturating_sub(self.files.len())
    }

    fn is_full(&self) -> bool {
        self.lacking() == 0 && !self.lacks_long()
    }

    fn add(&mut self, spare: Spare) {
        let at = self.files.partition_point(|other| other.len <= spare.len);
        self.files.insert(at, spare);
        self.count.store(self.files.len(), Ordering::Release);
    }

    fn take(&mut self, at: usize) -> Spare {
        let spare = self.files.remove(at);
        self.count.store(self.files.len(), Ordering::Release);
        spare
    }

    fn next_number(&self) -> u64 {
        self.files.iter().map(|spare| spare.number + 1).max().unwrap_or(0)
    }

    /// Bytes of the spares that are neither held for opens nor the reserve's.
    fn surplus_bytes(&self) -> u64 {
        let (held, reserve) = (self.held_for_opens(), self.reserve());
        let surplus = self.files.iter().enumerate().filter(|(at, _)| *at >= held && !reserve.contains(at));
        surplus.map(|(_, spare)| spare.len).sum()
    }

    /// Whether more bytes of spares lie beyond the reserve than may. The allowance is at least the longest
    /// spare.
    fn are_too_many(&self) -> bool {
        let longest = self.files.last().map_or(0, |spare| spare.len);
        let allowed = if self.rules.spare_bytes == 0 { 0 } else { self.rules.spare_bytes.max(longest) };
        self.surplus_bytes() > allowed
    }

    /// Notes that the log has got a segment of this length because it grew.
    fn grown(&mut self, len: u64) {
        self.next_len = (2 * self.next_len).max(len).min(self.rules.len);
    }
}

impl SegmentPool {
    /// Makes a pool with the spares of earlier runs. It removes spares that are longer than segments are now.
    /// It also removes spares that were copied with holes, because a hole in a mapped file turns a full disk
    /// into SIGBUS.
    pub fn new(disk: Arc<dyn Disk>, store: StoreId, rules: SegmentRules, io: LogIo) -> Result<Self> {
        let mut spares = Spares::new(rules);
        for name in disk.list(Folder::Log)? {
            if let Some(FileName::Spare(number)) = FileName::parse(Folder::Log, &name) {
                let spare = disk.open(FileName::Spare(number), false)?;
                let len = spare.len()?;
                // A length that this build would not make: a later walk must find groups on whole blocks
                // (I9).
                let is_usable =
                    (SEGMENT_LEN_MIN..=rules.len).contains(&len) && len.is_multiple_of(GROUP_ALIGN);
                if is_usable && spare.is_without_holes()? {
                    spares.add(Spare { number, len });
                } else {
                    disk.remove(FileName::Spare(number))?;
                }
            }
        }
        // The rules of this run may allow fewer spares than those of an earlier run.
        while spares.are_too_many() {
            let reserve = spares.reserve();
            let at = if reserve.end < spares.files.len() {
                spares.files.len() - 1
            } else {
                spares.held_for_opens()
            };
            let spare = spares.take(at);
            disk.remove(FileName::Spare(spare.number))?;
        }
        let count = spares.count.clone();
        Ok(Self { disk, store, rules, io, spares: Mutex::new(spares), count })
    }

    /// How much space is free, as far as the system says. Only a hint: another process may take the space at
    /// any moment, so every caller also handles a write that finds none.
    fn free_bytes(&self) -> u64 {
        self.disk
            .free_bytes()
            .unwrap_or_else(|error| {
                tracing::debug!(%error, "the file system does not say how much space is free");
                None
            })
            .unwrap_or(u64::MAX)
    }

    fn first_len(&self) -> u64 {
        FIRST_LEN.min(self.rules.len)
    }

    /// Makes the empty segment `number`; file and name are durable when this returns.
    ///
    /// `ahead` is the number of segments of the log that are empty.
    pub fn make(&self, number: u64, ahead: usize, purpose: SpacePurpose) -> Result<SegmentFile> {
        let _phase = phases::enter(Phase::SegmentRoll);
        let mut spares = self.spares.lock();
        let wanted = if purpose == SpacePurpose::Open { self.first_len() } else { spares.next_len };
        let at_hand = match purpose {
            SpacePurpose::Open => {
                // Zeros and syncs of two new segments were a third of the time that a small store took to
                // open.
                let at = spares.held_for_opens();
                spares.files.get(at).is_some_and(|spare| spare.len <= wanted).then_some(at)
            }
            SpacePurpose::User | SpacePurpose::Delete | SpacePurpose::Seal => {
                // A spare that is much longer is left for a log that has grown.
                let fits = wanted..=wanted.saturating_mul(LONGER_MAX);
                let beyond = spares.reserve().end..spares.files.len();
                beyond.into_iter().find(|at| fits.contains(&spares.files[*at].len))
            }
        };
        if at_hand.is_none() && purpose == SpacePurpose::User {
            self.leave_the_reserve(&spares, number, wanted)?;
        }
        let made = match at_hand {
            Some(at) => self.make_of_spare(&mut spares, at, number),
            None => self.make_for(number, wanted, purpose),
        };
        let made = match made {
            // As short as segments are: a spare of any length will do for a seal or for a few deletes.
            Err(Error::DiskFull { .. }) if self.may_take(&spares, ahead, purpose) => {
                self.make_of_reserve(&mut spares, number, SEGMENT_LEN_MIN)?
            }
            made => made?,
        };
        // An opening begins with short segments whatever the spare was, so its two segments do not count as
        // growth.
        if purpose != SpacePurpose::Open {
            spares.grown(made.len);
        }
        Ok(made)
    }

    /// Whether this purpose may take a spare that is kept back and still leave what an open needs.
    fn may_take(&self, spares: &Spares, ahead: usize, purpose: SpacePurpose) -> bool {
        purpose == SpacePurpose::Open || purpose != SpacePurpose::User && self.is_left(spares, ahead, purpose)
    }

    /// Whether enough for an open is left when one spare is gone.
    fn is_left(&self, spares: &Spares, ahead: usize, purpose: SpacePurpose) -> bool {
        self.rules.reserve == 0 || spares.files.len() + ahead > purpose.leaves()
    }

    /// Whether a frame may be written while `ahead` segments of the log are empty, and the store can still be
    /// opened again afterwards. One comparison a batch, without a lock.
    pub fn is_held(&self, ahead: usize, purpose: SpacePurpose) -> bool {
        self.rules.reserve == 0 || self.count.load(Ordering::Acquire) + ahead >= purpose.leaves()
    }

    /// Makes sure of [`is_held`](Self::is_held) where that is possible. Where the disk has space, the maker
    /// fills the reserve soon, and no frame waits for it.
    ///
    /// # Errors
    /// [`Error::DiskFull`] with nothing changed.
    pub fn hold(&self, number: u64, ahead: usize, purpose: SpacePurpose) -> Result<()> {
        while !self.is_held(ahead, purpose) {
            let needed = self.lacking_bytes();
            // There is space, so this frame waits for no file: the maker brings the reserve up.
            if self.free_bytes() >= needed {
                break;
            }
            match self.add_to_reserve() {
                Ok(false) => {}
                Ok(true) => break,
                // The maker may have filled the reserve first; then the full disk refused only the surplus.
                Err(Error::DiskFull { .. }) if self.is_held(ahead, purpose) => break,
                Err(Error::DiskFull { needed, .. }) => {
                    return Err(Error::disk_full(FileName::Segment(number), needed));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// About how many bytes fill the reserve and the spares held for opens. Doubled, because other files take
    /// space at the same time.
    fn lacking_bytes(&self) -> u64 {
        let lacking = self.rules.held().saturating_sub(self.count.load(Ordering::Acquire)) as u64;
        2 * lacking * self.first_len()
    }

    /// Makes a new segment. Where an open finds no space for one, the shortest possible segment is enough for
    /// it.
    fn make_for(&self, number: u64, wanted: u64, purpose: SpacePurpose) -> Result<SegmentFile> {
        match self.make_anew(number, wanted) {
            Err(Error::DiskFull { .. }) if purpose == SpacePurpose::Open && wanted > SEGMENT_LEN_MIN => {
                self.make_anew(number, SEGMENT_LEN_MIN)
            }
            made => made,
        }
    }

    fn make_anew(&self, number: u64, len: u64) -> Result<SegmentFile> {
        let file = self.build(number, len, None, &[])?;
        let temporary = FileName::Temporary(Folder::Log, number);
        // Window first, name second (see `SegmentFile::new`). A failure of either takes the file with it.
        let segment = SegmentFile::new(number, len, file, self.io);
        let segment = segment.and_then(|segment| self.publish(temporary, number).map(|()| segment));
        segment.inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Refuses a segment for a user's batch where the disk has too little space for it and for the missing
    /// reserve. Space that comes back belongs to the reserve first; otherwise an open that follows finds
    /// none.
    fn leave_the_reserve(&self, spares: &Spares, number: u64, len: u64) -> Result<()> {
        let lacking = spares.lacking() as u64;
        if lacking == 0 {
            return Ok(());
        }
        let needed = len.saturating_add(lacking.saturating_mul(self.first_len()));
        if self.free_bytes() < needed {
            return Err(Error::disk_full(FileName::Segment(number), needed));
        }
        Ok(())
    }

    /// Makes segment `number` of a spare: header, sync, name, folder, in this order, so that a segment is
    /// never seen with an old header. A crash in between leaves a spare, which recovery does not read. Its
    /// stale frames name another position and prove nothing (I3).
    fn make_of_spare(&self, spares: &mut Spares, at: usize, number: u64) -> Result<SegmentFile> {
        let Spare { number: spare, len } = spares.files[at];
        let file = self.disk.open(FileName::Spare(spare), true)?;
        file.write_at(0, &header_block(&self.header(number, len, None)))?;
        file.sync()?;
        let segment = SegmentFile::new(number, len, file, self.io)?;
        self.publish(FileName::Spare(spare), number)?;
        // Only now: after a failed rename the file is still the spare that the list says.
        spares.take(at);
        Ok(segment)
    }

    /// Makes a segment of at least `needed` bytes of the reserve. Where there is no space for its name,
    /// another spare gives way. The last spare gives way to a segment that is shorter than it.
    fn make_of_reserve(&self, spares: &mut Spares, number: u64, needed: u64) -> Result<SegmentFile> {
        loop {
            // The long spares first, except one: the next open may have to copy that length of batches.
            let held = spares.held_for_opens();
            let from = if held + 1 < spares.files.len() { held } else { 0 };
            let fits = |at: &usize| spares.files[*at].len >= needed;
            let Some(at) = (from..spares.files.len()).chain(0..from).find(fits) else {
                return self.make_anew(number, needed);
            };
            match self.make_of_spare(spares, at, number) {
                Err(Error::DiskFull { .. }) => {
                    // XFS needs a block to make the folder longer; a removed spare gives it one.
                    let other = (0..spares.files.len()).rev().find(|other| *other != at);
                    self.give_up(spares, other.unwrap_or(at))?;
                }
                made => return made,
            }
        }
    }

    /// Removes a spare for its space. The removal is not durable at once: a crash may bring the spare back,
    /// which costs only its space.
    fn give_up(&self, spares: &mut Spares, at: usize) -> Result<()> {
        let spare = spares.take(at);
        self.disk.remove(FileName::Spare(spare.number))
    }

    /// Makes a segment with room for `frame_len` bytes, which replaces the empty segment `number` by a
    /// rename. The caller made sure that the segment after it exists (I8).
    pub fn make_long(
        &self,
        number: u64,
        frame_len: u64,
        ahead: usize,
        purpose: SpacePurpose,
    ) -> Result<SegmentFile> {
        let _phase = phases::enter(Phase::SegmentRoll);
        let mut spares = self.spares.lock();
        let needed = (SEGMENT_HEADER_BLOCK + frame_len).next_multiple_of(GROUP_ALIGN);
        // More frames of this length will probably come, so the segment has room for more than one.
        let wanted = needed.next_power_of_two().saturating_mul(2).clamp(spares.next_len, self.rules.len);
        let len = needed.max(wanted);
        let long = match self.make_anew(number, len) {
            Err(Error::DiskFull { .. }) if self.may_take(&spares, ahead, purpose) => {
                self.make_of_reserve(&mut spares, number, needed)?
            }
            made => made?,
        };
        spares.grown(long.len);
        Ok(long)
    }

    fn header(&self, segment: u64, segment_len: u64, opening: Option<Opening>) -> SegmentHeader {
        SegmentHeader { store: self.store, segment, segment_len, opening }
    }

    /// Writes a whole segment under a temporary name, and syncs it. A lack of space is a clean failure.
    fn build(
        &self,
        number: u64,
        len: u64,
        opening: Option<Opening>,
        frames: &[u8],
    ) -> Result<Arc<dyn DiskFile>> {
        assert!(len.is_multiple_of(GROUP_ALIGN)); // I5: the last group of a segment ends on a block, too.
        assert!(SEGMENT_HEADER_BLOCK + frames.len() as u64 <= len); // I3: a frame lies within its segment.
        let make = |temporary| self.disk.create(temporary);
        self.written(number, len, make, |file| {
            file.write_at(0, &header_block(&self.header(number, len, opening)))?;
            file.write_at(SEGMENT_HEADER_BLOCK, frames)?;
            // Every byte is written before the file is mapped: a hole would turn a full disk into SIGBUS. The
            // size alone (`ftruncate`) would make one.
            let end = SEGMENT_HEADER_BLOCK + frames.len() as u64;
            // Of a direct log's segment the zeros go past the page cache too: over zeros in the cache, 256
            // KiB took 212 to 252 us to write instead of 189 to 215.
            file.write_zeros(end, len, self.io)?;
            file.sync()?;
            Ok(file)
        })
    }

    /// Writes the opening segment `number` under a temporary name, and syncs it.
    ///
    /// It goes into a short spare where there is one. An open must work on a full disk. There the segment is
    /// as short as its frames allow, or it takes any spare that is long enough. The last spare gives way for
    /// its space, which is also room for the segment after the opening.
    pub fn build_opening(&self, number: u64, opening: Opening, frames: &[u8]) -> Result<SegmentFile> {
        let mut spares = self.spares.lock();
        let needed = align_up(SEGMENT_HEADER_BLOCK + frames.len() as u64, GROUP_ALIGN);
        // The segment after the opening needs space as well. Where the disk has space for neither and one
        // spare is left, it is not taken whole: its space is enough for two shorter segments.
        let free = self.free_bytes();
        let is_cramped = free < self.first_len() && spares.files.len() < 2;
        let is_short = |spare: &Spare| (needed..=self.first_len()).contains(&spare.len);
        let len_min = needed.max(SEGMENT_LEN_MIN);
        let mut len = if free < 2 * self.first_len() { len_min } else { needed.max(self.first_len()) };
        loop {
            let held = spares.held_for_opens();
            let short = spares.files.iter().skip(held).position(is_short).filter(|_| !is_cramped);
            let short = short.map(|at| held + at);
            let built = match short {
                Some(at) => self.open_spare(&mut spares, at, number, opening, frames),
                None => {
                    let file = self.build(number, len, Some(opening), frames);
                    file.and_then(|file| self.opened(number, len, file))
                }
            };
            let Err(Error::DiskFull { .. }) = built else { return built };
            if short.is_none() && len > len_min {
                len = len_min;
                continue;
            }
            let long = spares.files.iter().position(|spare| spare.len >= needed);
            if let Some(at) = long.filter(|_| spares.files.len() > 1) {
                let opened = self.open_spare(&mut spares, at, number, opening, frames);
                let Err(Error::DiskFull { .. }) = opened else { return opened };
            }
            match spares.files.len() {
                0 => return built,
                count => self.give_up(&mut spares, count - 1)?,
            }
        }
    }

    fn open_spare(
        &self,
        spares: &mut Spares,
        at: usize,
        number: u64,
        opening: Opening,
        frames: &[u8],
    ) -> Result<SegmentFile> {
        let Spare { number: spare, len } = spares.files[at];
        // 1. The file is no spare any more, durably, before it is written to. Otherwise a power cut could
        //    keep the new frames and undo the rename: frames of a place that is yet to be written would lie
        //    in a spare, which may become the segment of that place.
        self.rename(FileName::Spare(spare), FileName::Temporary(Folder::Log, number))?;
        spares.take(at);
        let file = self.written(number, len, Ok, |temporary| {
            self.disk.sync_folder(Folder::Log)?;
            // 2. The stale frames in the file name other places, so none of them is valid after the new ones
            //    (I3).
            let file = self.disk.open(temporary, true)?;
            file.write_at(0, &header_block(&self.header(number, len, Some(opening))))?;
            file.write_at(SEGMENT_HEADER_BLOCK, frames)?;
            file.sync().map(|()| file)
        })?;
        self.opened(number, len, file)
    }

    fn opened(&self, number: u64, len: u64, file: Arc<dyn DiskFile>) -> Result<SegmentFile> {
        let temporary = FileName::Temporary(Folder::Log, number);
        SegmentFile::new(number, len, file, self.io).inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Takes back an opening segment that got no name: it is a spare again, for the next try.
    pub fn take_back(&self, opening: &SegmentFile) {
        let mut spares = self.spares.lock();
        let temporary = FileName::Temporary(Folder::Log, opening.number);
        let number = spares.next_number();
        // Its frames name a position that nothing follows, and recovery does not read a spare.
        match self.disk.rename(temporary, FileName::Spare(number)) {
            Ok(()) => spares.add(Spare { number, len: opening.len }),
            Err(error) if error.is_no_space() => self.remove_unfinished(temporary),
            Err(error) => {
                tracing::warn!(%error, "cannot take an opening segment back; the next open removes it")
            }
        }
    }

    /// Makes a file and writes a segment to it. A file that was made and not wholly written is removed, so
    /// that a full disk does not lose its space to it.
    fn written<T>(
        &self,
        number: u64,
        len: u64,
        make: impl FnOnce(FileName) -> Result<T>,
        write: impl FnOnce(T) -> Result<Arc<dyn DiskFile>>,
    ) -> Result<Arc<dyn DiskFile>> {
        let temporary = FileName::Temporary(Folder::Log, number);
        // Only of a file that was made: a `make` that failed left none, and its removal would fail as well.
        let remove = |_: &Error| self.remove_unfinished(temporary);
        make(temporary).and_then(|made| write(made).inspect_err(remove)).map_err(|error| {
            if error.is_no_space() { Error::disk_full(FileName::Segment(number), len) } else { error }
        })
    }

    fn remove_unfinished(&self, temporary: FileName) {
        if let Err(error) = self.disk.remove(temporary) {
            tracing::warn!(%error, "cannot remove an unfinished segment; the next open will");
        }
    }

    /// Renames a file of the log. A lack of space for the name is a clean failure: nothing has changed.
    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        self.disk
            .rename(source, target)
            .map_err(|error| if error.is_no_space() { Error::disk_full(target, FOLDER_BLOCK) } else { error })
    }

    /// Gives the opening segment `number`, which is wholly written and synced, its name, durably. This is the
    /// commit point of an open (I5). A spare gives way where there is no space for the name.
    pub fn publish_opening(&self, number: u64) -> Result<()> {
        let mut spares = self.spares.lock();
        let temporary = FileName::Temporary(Folder::Log, number);
        loop {
            match self.publish(temporary, number) {
                Err(Error::DiskFull { .. }) if !spares.files.is_empty() => self.give_up(&mut spares, 0)?,
                published => return published,
            }
        }
    }

    /// Gives a file that is wholly written and synced its name as a segment, durably. Without the folder's
    /// sync a power cut could take the name and leave frames in the segment before it (I8).
    fn publish(&self, source: FileName, number: u64) -> Result<()> {
        self.rename(source, FileName::Segment(number))?;
        self.disk.sync_folder(Folder::Log)
    }

    /// Takes back segments that nothing needs any more: as spares as far as more of them are useful,
    /// otherwise they are removed. Oldest first, so that a crash leaves no gap among those that are needed
    /// (I8).
    ///
    /// Enough spares are useful that a log which grows from snapshot to snapshot makes no new segment. A new
    /// segment costs as many bytes of zeros as it will hold of frames, and the frames wait for them. With a
    /// single spare beyond the reserve, 8 threads that each committed 64 KiB durably waited for segments half
    /// of their time.
    pub fn recycle(&self, numbers: &[u64]) -> Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        let _phase = phases::enter(Phase::Recycle);
        let mut spares = self.spares.lock();
        for &number in numbers {
            let segment = FileName::Segment(number);
            let len = self.disk.open(segment, false)?.len()?;
            if self.is_wanted(&spares, len) {
                let spare = spares.next_number();
                match self.rename(segment, FileName::Spare(spare)) {
                    Ok(()) => spares.add(Spare { number: spare, len }),
                    // On a full XFS there may be no block for the new name; the space comes back all the
                    // same.
                    Err(Error::DiskFull { .. }) => self.disk.remove(segment)?,
                    Err(error) => return Err(error),
                }
            } else {
                self.disk.remove(segment)?;
            }
        }
        self.disk.sync_folder(Folder::Log)
    }

    /// Whether a segment of this length is useful as a spare.
    fn is_wanted(&self, spares: &Spares, len: u64) -> bool {
        // A segment that was made long for one frame is no spare: the pool of the next run would remove it.
        let SegmentRules { len: len_max, spare_bytes, .. } = self.rules;
        if len > len_max || !len.is_multiple_of(GROUP_ALIGN) {
            return false;
        }
        // What is kept back comes first: without it a full disk refuses batches.
        if spares.files.len() < self.rules.reserve || spares.lacking() > 0 && len <= FIRST_LEN {
            return true;
        }
        // A few short segments wait for the next opens. A log that has grown takes longer ones.
        let short = spares.files.iter().filter(|spare| spare.len <= FIRST_LEN).count();
        if len <= FIRST_LEN && FIRST_LEN < len_max && short >= self.rules.held() + FIRST_SPARES_MAX {
            return false;
        }
        let surplus = spares.surplus_bytes();
        spare_bytes > 0 && (surplus == 0 || surplus + len <= spare_bytes)
    }

    /// Adds one spare to the reserve if it lacks one; returns whether it is full. One at a time, because a
    /// committer that needs a segment meanwhile, or a `close`, waits for one file only.
    pub fn add_to_reserve(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        if !spares.is_full() {
            // Two segments are ahead of the one in use. While segments grow, half of the next one is twice
            // that length.
            let is_grown = spares.next_len == self.rules.len;
            let mut len = match spares.lacks_long() {
                false => SEGMENT_LEN_MIN,
                true if is_grown => self.rules.len,
                true => (spares.next_len / 2).max(self.first_len()),
            };
            let number = spares.next_number();
            loop {
                match self.build(number, len, None, &[]) {
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
            let held = spares.held_for_opens();
            if let Some(at) = spares.files.iter().skip(held).position(is_old)
                && spares.files.len() > self.rules.held()
            {
                self.give_up(&mut spares, held + at)?;
            }
        }
        Ok(spares.is_full())
    }

    /// Runs `make`; where it finds no space for its files, gives up the spares beyond the reserve and runs it
    /// once more. A `make` that fails for lack of space must have changed nothing.
    pub fn with_surplus<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(Error::DiskFull { .. }) if self.release_surplus()? => make(),
            made => made,
        }
    }

    /// Gives up the spares that are not kept back; returns whether there were any.
    pub fn release_surplus(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        let (held, reserve) = (spares.held_for_opens(), spares.reserve());
        let beyond = (held.min(reserve.start)..reserve.start).chain(reserve.end..spares.files.len());
        let had_any = beyond.clone().count() > 0;
        // From the last one on, so that the indices of the others stay valid.
        for at in beyond.rev() {
            self.give_up(&mut spares, at)?;
        }
        Ok(had_any)
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

    /// Wakes the followers of the log: a batch came to segment `number` by stores into a mapping.
    pub fn tell_followers(&self, number: u64) {
        self.disk.tell_watchers(FileName::Segment(number));
    }

    /// Makes the small file `temporary`, of `len` bytes, of a spare, if one can be spared while `ahead`
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
        ahead: usize,
        purpose: SpacePurpose,
    ) -> Result<Option<Arc<dyn DiskFile>>> {
        let mut spares = self.spares.lock();
        loop {
            // The longest one: the space of its other bytes comes back.
            let longest = spares.files.len().checked_sub(1).filter(|at| spares.files[*at].len >= len);
            let longest = longest.filter(|_| self.is_left(&spares, ahead, purpose));
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

    /// Gives up one spare so that a small file finds space, if one can be spared while `ahead` segments of
    /// the log are empty. Returns whether it did.
    pub fn release_one(&self, ahead: usize, purpose: SpacePurpose) -> Result<bool> {
        let leaves = self.rules.reserve == 0 || self.count.load(Ordering::Acquire) + ahead > purpose.leaves();
        if leaves { self.release_reserve() } else { Ok(false) }
    }

    /// Gives up one spare, whatever it is held for, because an open must find space. Returns whether there
    /// was one.
    pub fn release_reserve(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        match spares.files.len() {
            0 => Ok(false),
            count => self.give_up(&mut spares, count - 1).map(|()| true),
        }
    }
}

/// The header block of a segment. Zeros fill it, because the block of a spare has an older header's bytes.
fn header_block(header: &SegmentHeader) -> Vec<u8> {
    let mut block = header.encode().to_vec();
    block.resize(SEGMENT_HEADER_BLOCK as usize, 0);
    block
}
