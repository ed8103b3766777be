//! Compares two pages, element by element.
//!
//! If both pages are in the same place and kernels can access them, the device compares them. The device builds a
//! bitmap of the differing elements and counts its bits, with the same kernels that find the changes of a capture. Only
//! a count and an index are copied to the host. The applier runs the whole comparison between two batches, so both
//! pages belong to the same state.
//!
//! The calling thread compares all other pages in pieces. The thread looks up both pages in one view, and starts again
//! if a batch changes one of them during the comparison. The third attempt blocks batches, and so always completes.

use remanent_format::{Lsn, PageId, PageInfo, Place, Width};

use super::Store;
use super::bytes::make_room;
use crate::applier::Turn;
use crate::device::{Command, CommandList, Pending, Selection, Span, StagingSpan};
use crate::engine::Engine;
use crate::error::{Error, Invalid, Result};
use crate::memory::arena::PageMemory;
use crate::memory::staging::{StagingBuf, StagingPool};

/// The number of bytes of each page that the device compares with one pair of commands. The resulting bitmap occupies
/// at most 8 MiB.
const PART_LEN: u64 = 64 << 20;
/// The number of bytes of each page that the calling thread compares at a time, a multiple of every element width.
const PIECE_LEN: usize = 1 << 20;
/// The number of attempts by the calling thread to compare pages while batches continue. The next attempt blocks
/// batches.
const TRIES: usize = 2;
/// The size in bytes of a count or an index that the device returns.
const WORD_LEN: u64 = 4;

/// The number and position of differing elements, returned by [`Store::compare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// Whether all elements are equal.
    pub is_equal: bool,
    /// The number of elements that differ.
    pub differing: u64,
    /// The index of the first element that differs, or `None` if the pages are equal.
    pub first: Option<u64>,
    /// The newest batch that the compared contents of both pages reflect.
    pub lsn: Lsn,
}

impl Comparison {
    fn none(lsn: Lsn) -> Self {
        Self { is_equal: true, differing: 0, first: None, lsn }
    }

    /// Adds the result for one range: `differing` elements, the first of which has index `first`. Ranges must be added
    /// in ascending order.
    fn add(&mut self, differing: u64, first: u64) {
        if differing > 0 {
            self.is_equal = false;
            self.differing += differing;
            self.first.get_or_insert(first);
        }
    }
}

/// A comparison whose command list is in flight.
struct Comparing {
    pending: Pending,
    /// The memory of the bitmap, freed when the command list completes.
    scratch: Vec<PageMemory>,
    parts: Vec<Part>,
    lsn: Lsn,
}

/// A range of both pages that one pair of commands compares.
#[derive(Clone, Copy)]
struct Part {
    offset: u64,
    len: u64,
    width: Width,
}

impl Part {
    /// Divides pages of `len` bytes into parts. An incomplete last element becomes a separate part, compared byte by
    /// byte.
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

    /// Returns the length in bytes of the part's bitmap.
    fn bits_len(&self) -> u64 {
        (self.len / self.width.bytes() as u64).div_ceil(8)
    }

    /// Returns the span of this part within `page`.
    fn of(&self, page: Span) -> Span {
        Span { offset: page.offset + self.offset, len: self.len, ..page }
    }
}

impl Store {
    /// Compares two pages of equal length element by element, in the same state. An incomplete last element counts as
    /// one element.
    ///
    /// In a store on a GPU, two pages in the same place are compared on the GPU, in batch order, with a bitmap of up to
    /// 8 MiB in the place's budget. The calling thread compares the pages if the store has no GPU, if the pages are in
    /// different places or on disk, or if the budget has no room for the bitmap. If batches change the pages during the
    /// first two attempts of the calling thread, the third attempt blocks all batches until it is complete.
    ///
    /// ```
    /// use remanent::batch::Width;
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from(*b"weights, before", Place::Host);
    /// batch.create_from(*b"weights, behind", Place::Host);
    /// let pages = store.commit(batch)?.pages;
    /// let compared = store.compare(pages[0], pages[1], Width::W1)?;
    /// assert_eq!((compared.is_equal, compared.differing, compared.first), (false, 4, Some(11)));
    /// assert!(store.compare(pages[0], pages[0], Width::W4)?.is_equal);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Invalid`]; [`Error::OutOfMemory`]; the errors of [`Store::read`].
    pub fn compare(&self, left: PageId, right: PageId, width: Width) -> Result<Comparison> {
        self.of_device(|| match self.compare_on_device([left, right], width)? {
            Some(compared) => Ok(compared),
            None => self.compare_here([left, right], width),
        })
    }

    /// Compares pages on the device, or returns `None` if the device cannot compare them.
    fn compare_on_device(&self, pages: [PageId; 2], width: Width) -> Result<Option<Comparison>> {
        let Engine { applier, device, staging, arena, .. } = self.engine();
        applier.unloaded().wait(pages)?;
        let pool = staging.clone();
        let Some(comparing) = applier.turn(move |turn| begin(turn, &pool, pages, width))? else {
            return Ok(None);
        };
        let Comparing { pending, scratch, parts, lsn } = comparing;
        let fence = pending.fence();
        let mut returned = match device.finish(pending) {
            Ok(returned) => returned,
            // The command list may still use the bitmap.
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
                // A part of width 1 covers the incomplete last element of wider elements, which counts once.
                _ if part.width != width => compared.add(1, begin),
                count => compared.add(count, begin + word(parts.len() + number)),
            }
        }
        staging.put(found.into_staging());
        Ok(Some(compared))
    }

    /// Compares pages in pieces on the calling thread.
    fn compare_here(&self, pages: [PageId; 2], width: Width) -> Result<Comparison> {
        for _ in 0..TRIES {
            match self.compare_versions(pages, width) {
                Err(Error::Overtaken { .. }) => {}
                compared => return compared,
            }
        }
        // While this lock is held, no batch can be submitted. Batches submitted earlier become visible once they are
        // logged.
        let table = self.committer().lock();
        self.engine().log.wait_logged(table.lsn())?;
        self.compare_versions(pages, width)
    }

    /// Compares the newest versions of two pages.
    ///
    /// # Errors
    /// `Overtaken` if a batch changes one of the pages during the comparison.
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

/// Starts a comparison on the device, or returns `None` if the device cannot compare the pages.
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
    // All parts share the memory of one bitmap. The indices, one per part, follow it.
    let bits_len = parts.iter().map(Part::bits_len).max().unwrap_or(0).next_multiple_of(16);
    let indices_len = WORD_LEN * parts.len() as u64;
    let Some(scratch) = turn.arena.try_scratch(left.place, bits_len + indices_len)? else {
        return Ok(None);
    };
    let submitted = match &scratch[..] {
        [bitmap] => compare(turn, pool, [one, other], &parts, (bitmap, bits_len)).map(Some),
        // The pages are so long that the bitmap and the indices do not fit in one allocation of scratch memory.
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
        // The kernel stores a single index, and counts the remaining differing elements without storing them.
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

/// Returns the number of bytes that are copied to the host: one count per part, then one index per part.
fn found_len(parts: &[Part]) -> usize {
    2 * WORD_LEN as usize * parts.len()
}

fn check_lens(left: &PageInfo, right: &PageInfo) -> Result<()> {
    if left.len == right.len {
        return Ok(());
    }
    Err(Error::Invalid(Invalid::LengthsDiffer {
        pages: [left.page, right.page],
        lens: [left.len, right.len],
    }))
}

fn differing(left: &[u8], right: &[u8], width: Width) -> (u64, u64) {
    if left == right {
        return (0, 0);
    }
    let pairs = left.chunks(width.bytes()).zip(right.chunks(width.bytes()));
    let mut indices = (0_u64..).zip(pairs).filter(|(_, (left, right))| left != right).map(|(index, _)| index);
    let first = indices.next().unwrap_or(0);
    (1 + indices.count() as u64, first)
}
