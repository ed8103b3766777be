//! Comparing two pages, element by element.
//!
//! Where kernels reach the pages and both lie in one place, the device compares them there. It makes a bitmap
//! of the elements that differ, and counts its bits: the kernels are those by which a capture finds its
//! changes. A count and an index come to the host. All of it is one turn of the applier, so that both pages
//! are as of one batch.
//!
//! All other pages are read in pieces and compared by the caller's thread. The pages are looked up together,
//! and a page that a batch changes meanwhile has the comparison begin anew. The third time it holds up
//! batches instead, so that it ends.
//!
//! Nothing is written, so a crash loses nothing.

use remanent_format::{Lsn, PageId, PageInfo, Place, Width};

use super::Store;
use super::bytes::make_room;
use crate::applier::Turn;
use crate::device::{Command, CommandList, Pending, Selection, Span, StagingSpan};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::arena::PageMemory;
use crate::memory::staging::{StagingBuf, StagingPool};

/// Bytes that the device compares by one pair of commands: their bitmap takes 8 MiB at most.
const PART_LEN: u64 = 64 << 20;
/// Bytes of each page that a thread compares at a time; a whole number of elements of any width.
const PIECE_LEN: usize = 1 << 20;
/// How often a thread begins anew before it holds up batches.
const TRIES: usize = 2;
/// How many bytes a count or an index takes.
const WORD_LEN: u64 = 4;

/// The outcome of comparing two pages.
///
/// Made by [`Store::compare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// Whether no element differs.
    pub equal: bool,
    /// The number of elements that differ.
    pub differing: u64,
    /// The index of the first element that differs.
    pub first: Option<u64>,
    /// The batch as of which both pages were compared.
    pub lsn: Lsn,
}

impl Comparison {
    fn none(lsn: Lsn) -> Self {
        Self { equal: true, differing: 0, first: None, lsn }
    }

    /// Counts elements that differ; they come after those counted before.
    fn add(&mut self, differing: u64, first: u64) {
        if differing > 0 {
            self.equal = false;
            self.differing += differing;
            self.first.get_or_insert(first);
        }
    }
}

/// A comparison that the device is working on.
struct Comparing {
    pending: Pending,
    /// The bitmap; given back when the list is done.
    scratch: Vec<PageMemory>,
    parts: Vec<Part>,
    lsn: Lsn,
}

/// A range of both pages that is compared by one pair of commands.
#[derive(Clone, Copy)]
struct Part {
    offset: u64,
    len: u64,
    width: Width,
}

impl Part {
    /// Cuts pages of this length. A last element that is not whole is a part of its own, compared by bytes.
    fn all(len: u64, width: Width) -> Vec<Self> {
        let whole = len - len % width.bytes() as u64;
        let parts = (0..whole).step_by(PART_LEN as usize);
        let mut parts: Vec<Self> =
            parts.map(|offset| Self { offset, len: PART_LEN.min(whole - offset), width }).collect();
        if len > whole {
            parts.push(Self { offset: whole, len: len - whole, width: Width::W1 });
        }
        parts
    }

    /// The length of its bitmap.
    fn bits_len(&self) -> u64 {
        (self.len / self.width.bytes() as u64).div_ceil(8)
    }

    /// The range of a page that it covers.
    fn of(&self, page: Span) -> Span {
        Span { offset: page.offset + self.offset, len: self.len, ..page }
    }
}

impl Store {
    /// Compares two pages of equal length, element by element, as of one batch. A last element that is not
    /// whole counts as one.
    ///
    /// Pages in one place of a GPU's store are compared on the GPU, in the order of batches, with up to 8 MiB
    /// of the place's budget for the bitmap. Where the budget has no room for that, where pages live in
    /// memory of the host, and where the two lie in different places, the calling thread reads and compares
    /// them. Batches of these pages that keep changing them wait while it does so for the third time.
    ///
    /// ```
    /// use remanent::{Options, Place, Store, Width};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// batch.create_from(*b"weights, before", Place::Host);
    /// batch.create_from(*b"weights, behind", Place::Host);
    /// let pages = store.commit(batch)?.pages;
    /// let compared = store.compare(pages[0], pages[1], Width::W1)?;
    /// assert_eq!((compared.equal, compared.differing, compared.first), (false, 4, Some(11)));
    /// assert!(store.compare(pages[0], pages[0], Width::W4)?.equal);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::LengthsDiffer`]; [`Error::OutOfMemory`]; as for [`Store::read`].
    pub fn compare(&self, left: PageId, right: PageId, width: Width) -> Result<Comparison> {
        self.of_device(|| match self.compare_on_device([left, right], width)? {
            Some(compared) => Ok(compared),
            None => self.compare_here([left, right], width),
        })
    }

    /// Compares pages where they lie; `None` if the device cannot.
    fn compare_on_device(&self, pages: [PageId; 2], width: Width) -> Result<Option<Comparison>> {
        let Engine { applier, device, staging, arena, .. } = self.engine();
        applier.unloaded().wait(pages)?;
        let pool = staging.clone();
        let Some(comparing) = applier.turn(move |turn| begin(turn, &pool, pages, width))? else {
            return Ok(None);
        };
        let Comparing { pending, scratch, parts, lsn } = comparing;
        let fence = pending.fence();
        let mut returned = match pending.finish(&**device) {
            Ok(returned) => returned,
            // The list may still use the bitmap.
            Err(error) => {
                scratch.into_iter().for_each(|piece| arena.retire(piece, fence));
                return Err(error);
            }
        };
        scratch.into_iter().try_for_each(|piece| arena.discard(piece))?;
        let len = found_len(&parts);
        let found = StagingBuf::new(returned.pop().expect("one staging went in"), len);
        let word =
            |at: usize| u64::from(u32::from_le_bytes(std::array::from_fn(|byte| found[4 * at + byte])));
        let mut compared = Comparison::none(lsn);
        for (number, part) in parts.iter().enumerate() {
            let begin = part.offset / width.bytes() as u64;
            match word(number) {
                0 => {}
                // The element that is not whole.
                _ if part.width != width => compared.add(1, begin),
                count => compared.add(count, begin + word(parts.len() + number)),
            }
        }
        staging.give(found.into_staging());
        Ok(Some(compared))
    }

    /// Compares pages in pieces, on this thread.
    fn compare_here(&self, pages: [PageId; 2], width: Width) -> Result<Comparison> {
        for _ in 0..TRIES {
            match self.compare_versions(pages, width) {
                Err(Error::Overtaken { .. }) => {}
                compared => return compared,
            }
        }
        // No batch comes while the lock is held. One that is submitted is seen once it is logged.
        let table = self.committer().lock();
        self.engine().log.wait_logged(table.lsn())?;
        self.compare_versions(pages, width)
    }

    /// Compares the newest versions of two pages.
    ///
    /// # Errors
    /// `Overtaken` if a batch changes one of them meanwhile.
    fn compare_versions(&self, pages: [PageId; 2], width: Width) -> Result<Comparison> {
        let view = self.view()?;
        let [left, right] = [view.page(pages[0])?, view.page(pages[1])?];
        check_lens(&left, &right)?;
        let mut compared = Comparison::none(view.lsn());
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for offset in (0..left.len).step_by(PIECE_LEN) {
            let len = (PIECE_LEN as u64).min(left.len - offset);
            for (info, piece) in [(&left, &mut one), (&right, &mut other)] {
                make_room(piece, len)?;
                self.read_as_of(info, offset, piece)?;
            }
            let (count, first) = differing(&one, &other, width);
            compared.add(count, offset / width.bytes() as u64 + first);
        }
        Ok(compared)
    }
}

/// Begins a comparison on the device; `None` if it cannot do it.
fn begin(
    turn: &mut Turn<'_>,
    pool: &StagingPool,
    pages: [PageId; 2],
    width: Width,
) -> Result<Option<Comparing>> {
    turn.intact()?;
    let info = |page| turn.applied.table.get(page).ok_or(Error::UnknownPage { page });
    let [left, right] = [info(pages[0])?, info(pages[1])?];
    check_lens(&left, &right)?;
    if [&left, &right].iter().any(|info| info.place == Place::Disk) {
        return Ok(None);
    }
    let [one, other] = [&left, &right].map(|info| turn.applied.memory[info.page].span());
    if left.place != right.place || left.len == 0 || !turn.is_reached_by_kernels(one) {
        return Ok(None);
    }
    let parts = Part::all(left.len, width);
    // The bitmap of one part takes the place of that of the part before; an index for each part follows them.
    let bits_len = parts.iter().map(Part::bits_len).max().unwrap_or(0).next_multiple_of(16);
    let indices_len = WORD_LEN * parts.len() as u64;
    let Some(scratch) = turn.arena.scratch_if_there_is_room(left.place, bits_len + indices_len)? else {
        return Ok(None);
    };
    let submitted = match &scratch[..] {
        [bitmap] => compare(turn, pool, [one, other], &parts, (bitmap, bits_len)).map(Some),
        // A page so long that its indices take more than a piece of scratch.
        _ => Ok(None),
    };
    match submitted {
        Ok(Some(pending)) => Ok(Some(Comparing { pending, scratch, parts, lsn: turn.applied.point.lsn })),
        Ok(None) => scratch.into_iter().try_for_each(|piece| turn.arena.discard(piece)).map(|()| None),
        Err(error) => {
            scratch.into_iter().try_for_each(|piece| turn.arena.discard(piece))?;
            Err(error)
        }
    }
}

/// Submits the commands that compare all parts.
fn compare(
    turn: &Turn<'_>,
    pool: &StagingPool,
    [left, right]: [Span; 2],
    parts: &[Part],
    (bitmap, bits_len): (&PageMemory, u64),
) -> Result<Pending> {
    let staged = pool.take(found_len(parts))?;
    let mut commands = Vec::with_capacity(2 * parts.len() + 1);
    for (number, part) in parts.iter().enumerate() {
        let bits = bitmap.part(0, part.bits_len());
        // Room for one index: the others are counted, and left out.
        let indices = bitmap.part(bits_len + WORD_LEN * number as u64, WORD_LEN);
        let count = StagingSpan { index: 0, offset: WORD_LEN as usize * number, len: WORD_LEN as usize };
        let (left, right) = (part.of(left), part.of(right));
        commands.push(Command::Diff { left, right, width: part.width, target: bits });
        commands.push(Command::Select { bitmaps: vec![Selection { bits, indices }], target: count });
    }
    let len = WORD_LEN * parts.len() as u64;
    let target = StagingSpan { index: 0, offset: len as usize, len: len as usize };
    commands.push(Command::Download { source: bitmap.part(bits_len, len), target });
    turn.submit(CommandList { commands, staging: vec![staged.into_staging()] })
}

/// The length of what comes to the host: a count a part, then an index a part.
fn found_len(parts: &[Part]) -> usize {
    2 * WORD_LEN as usize * parts.len()
}

fn check_lens(left: &PageInfo, right: &PageInfo) -> Result<()> {
    if left.len == right.len {
        return Ok(());
    }
    Err(Error::LengthsDiffer { pages: [left.page, right.page], lens: [left.len, right.len] })
}

/// The number of elements that differ, and the index of the first one.
fn differing(left: &[u8], right: &[u8], width: Width) -> (u64, u64) {
    if left == right {
        return (0, 0);
    }
    let pairs = left.chunks(width.bytes()).zip(right.chunks(width.bytes()));
    let mut indices = (0_u64..).zip(pairs).filter(|(_, (left, right))| left != right).map(|(index, _)| index);
    let first = indices.next().unwrap_or(0);
    (1 + indices.count() as u64, first)
}
