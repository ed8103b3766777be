//! Pages that are still on disk only: an open that does not wait for them leaves them cold.
//!
//! A cold page has its memory and its entry in the table, but the applier has none of its bytes. Who needs it asks
//! here first, and waits; whoever loads takes what is asked for before what comes next in the files. A warm page
//! never becomes cold again: so who has waited for a page may go on without a look back, and the applier, whose
//! batches and turns were waited for by those who hand them over, never waits for the disk.
//!
//! A page that cannot be loaded stays cold, with the error for everybody who asks for it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use remanent_format::PageId;
use remanent_format::image::ImageRef;
use remanent_format::state::by_id::ById;

use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Instant, Mutex};
use crate::error::{Error, Result};
use crate::memory::arena::PageMemory;

/// A page that is to be loaded.
pub(crate) struct UnloadedPage {
    pub page: PageId,
    /// Exactly what the page is.
    pub image: ImageRef,
    /// Where its bytes go; as long as the page.
    pub memory: PageMemory,
}

/// The cold pages of a store. Shared by those who need them and those who load them.
#[derive(Default)]
pub(crate) struct UnloadedSet {
    /// How many are not warm: who finds none needs no lock.
    left: AtomicUsize,
    state: Mutex<LoadStates>,
    /// A page became warm, or never will.
    changed: Condvar,
}

#[derive(Default)]
struct LoadStates {
    /// In the order of their files; nothing where a page was taken to be loaded.
    waiting: Vec<Option<UnloadedPage>>,
    /// None before this one is waiting.
    next: usize,
    /// Pages that are neither warm nor failed, by their place in `waiting`.
    places: ById<PageId, usize>,
    /// Their bytes.
    bytes: u64,
    /// What is to be taken first, by its place in `waiting`.
    asked: VecDeque<usize>,
    failed: HashMap<PageId, Error>,
    /// Memory of those.
    given_up: Vec<PageMemory>,
    /// Why nobody loads any more, if so.
    over: Option<Error>,
}

impl LoadStates {
    /// Has these pages taken before others.
    fn ask(&mut self, pages: &[PageId]) {
        let Self { waiting, places, asked, .. } = self;
        asked.extend(pages.iter().filter_map(|page| places.get(*page)).filter(|at| waiting[**at].is_some()));
    }
}

impl UnloadedSet {
    /// These pages are cold.
    pub fn new(pages: Vec<UnloadedPage>) -> Self {
        let bytes = pages.iter().map(|unloaded| unloaded.memory.byte_len()).sum();
        let mut files: BTreeMap<u64, Vec<UnloadedPage>> = BTreeMap::new();
        pages.into_iter().for_each(|unloaded| files.entry(unloaded.image.file).or_default().push(unloaded));
        // Mostly they lie so already.
        files.values_mut().for_each(|of_file| of_file.sort_by_key(|unloaded| unloaded.image.offset));
        let waiting: Vec<Option<UnloadedPage>> = files.into_values().flatten().map(Some).collect();
        let state = LoadStates {
            places: waiting.iter().flatten().map(|unloaded| unloaded.page).zip(0..).collect(),
            bytes,
            waiting,
            ..LoadStates::default()
        };
        Self { left: AtomicUsize::new(state.places.len()), state: Mutex::new(state), ..Self::default() }
    }

    /// Whether any page is not warm.
    pub fn is_any(&self) -> bool {
        // Acquire: whoever finds a page warm finds its memory with the applier.
        self.left.load(Ordering::Acquire) > 0
    }

    /// How many pages are yet to be loaded, and their bytes.
    pub fn left(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.places.len() as u64, state.bytes)
    }

    /// Waits until these pages are warm. They are loaded before others, in this order.
    ///
    /// # Errors
    /// The one for which one of them cannot be loaded; `Closed`.
    pub fn wait(&self, pages: impl IntoIterator<Item = PageId>) -> Result<()> {
        if !self.is_any() {
            return Ok(());
        }
        let pages: Vec<PageId> = pages.into_iter().collect();
        let mut state = self.state.lock();
        state.ask(&pages);
        for page in pages {
            while state.places.contains(page) {
                if let Some(error) = &state.over {
                    return Err(error.clone());
                }
                self.changed.wait(&mut state);
            }
            if let Some(error) = state.failed.get(&page) {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    /// Waits until all pages are warm.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait), once all others are warm.
    pub fn wait_all(&self) -> Result<()> {
        let mut state = self.state.lock();
        while !state.places.is_empty() {
            if let Some(error) = &state.over {
                return Err(error.clone());
            }
            self.changed.wait(&mut state);
        }
        state.failed.values().next().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Takes pages to load, neighbours in one file: those that somebody asked for with what lies within
    /// `asked_bytes_max` from there on, else the next ones within `bytes_max`. A longer page comes alone. None when
    /// there is nothing left to take.
    pub fn take(&self, asked_bytes_max: u64, bytes_max: u64) -> Option<Vec<UnloadedPage>> {
        let mut state = self.state.lock();
        if state.over.is_some() {
            return None;
        }
        let LoadStates { waiting, next, asked, .. } = &mut *state;
        // Asked for twice, it was taken once.
        let is_waiting = |at: &usize| waiting[*at].is_some();
        let (first, bytes_max) = match std::iter::from_fn(|| asked.pop_front()).find(is_waiting) {
            Some(at) => (at, asked_bytes_max),
            None => {
                *next = (*next..waiting.len()).find(is_waiting)?;
                (*next, bytes_max)
            }
        };
        let start = waiting[first].as_ref().expect("looked at just now").image;
        let belongs = |unloaded: &UnloadedPage| {
            let end = unloaded.image.offset + unloaded.image.stored_len;
            unloaded.image.file == start.file && end <= start.offset + bytes_max.max(start.stored_len)
        };
        Some(waiting[first..].iter_mut().map_while(|at| at.take_if(|unloaded| belongs(unloaded))).collect())
    }

    /// The applier has these pages now, of so many bytes each.
    pub fn loaded(&self, pages: impl IntoIterator<Item = (PageId, u64)>) {
        let mut state = self.state.lock();
        for (page, len) in pages {
            state.places.remove(page);
            state.bytes -= len;
        }
        if state.places.is_empty() {
            state.waiting = Vec::new();
            state.asked = VecDeque::new();
        }
        self.left.store(state.places.len() + state.failed.len(), Ordering::Release);
        self.changed.notify_all();
    }

    /// A page that was taken cannot be loaded.
    pub fn fail(&self, unloaded: UnloadedPage, error: Error) {
        let mut state = self.state.lock();
        state.places.remove(unloaded.page);
        state.bytes -= unloaded.memory.byte_len();
        state.failed.insert(unloaded.page, error);
        state.given_up.push(unloaded.memory);
        self.changed.notify_all();
    }

    /// Nobody loads any more, for this reason: who waits for what is not warm is told.
    pub fn end(&self, error: Error) {
        self.state.lock().over.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Waits for so long; returns at once, with `true`, when no page is loaded any more.
    pub fn is_over_within(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while state.over.is_none() && Instant::now() < until {
            self.changed.wait_until(&mut state, until);
        }
        state.over.is_some()
    }

    /// Pages that were taken stay on disk: no page is loaded any more.
    pub fn give_up(&self, pages: Vec<UnloadedPage>) {
        self.state.lock().given_up.extend(pages.into_iter().map(|unloaded| unloaded.memory));
    }

    /// The memory of all pages that did not become warm.
    pub fn take_memory(&self) -> Vec<PageMemory> {
        let mut state = self.state.lock();
        let waiting =
            std::mem::take(&mut state.waiting).into_iter().flatten().map(|unloaded| unloaded.memory);
        let mut memory: Vec<PageMemory> = waiting.collect();
        memory.append(&mut state.given_up);
        memory
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::image::Codec;
    use remanent_format::{Defect, FileName, Place};

    use super::*;
    use crate::device::host::HostDevice;
    use crate::memory::arena::{Arena, Purpose};
    use crate::options::Budget;

    const LEN: u64 = 4096;

    /// Pages 0 to 9 of 4 KiB, five to a file, handed over in another order.
    fn ten(arena: &Arena) -> UnloadedSet {
        let unloaded = |number: u64| UnloadedPage {
            page: PageId(number),
            image: ImageRef {
                file: number / 5,
                offset: LEN * (number % 5),
                stored_len: LEN,
                codec: Codec::Raw,
                stored_crc: 0,
                raw_crc: 0,
            },
            memory: arena.allocate(Purpose::Page, Place::Host, LEN).unwrap(),
        };
        UnloadedSet::new([7, 3, 0, 9, 1, 4, 2, 8, 6, 5].into_iter().map(unloaded).collect())
    }

    fn arena() -> Arena {
        Arena::new(Arc::new(HostDevice::new()), Budget::default())
    }

    fn numbers(taken: &[UnloadedPage]) -> Vec<u64> {
        taken.iter().map(|unloaded| unloaded.page.0).collect()
    }

    /// As a loader does that meets no error.
    fn load(unloaded: &UnloadedSet, arena: &Arena, taken: Vec<UnloadedPage>) {
        unloaded.loaded(taken.iter().map(|unloaded| (unloaded.page, unloaded.memory.byte_len())));
        taken.into_iter().try_for_each(|unloaded| arena.discard(unloaded.memory)).unwrap();
    }

    #[test]
    fn what_is_asked_for_comes_before_what_lies_next_and_neighbours_come_together() {
        let arena = arena();
        let unloaded = ten(&arena);
        assert_eq!(unloaded.left(), (10, 10 * LEN));
        let take = |asked: &[u64], expected: &[u64]| {
            let asked: Vec<PageId> = asked.iter().copied().map(PageId).collect();
            unloaded.state.lock().ask(&asked);
            let taken = unloaded.take(2 * LEN, 3 * LEN).unwrap();
            assert_eq!(numbers(&taken), expected);
            load(&unloaded, &arena, taken);
        };
        take(&[], &[0, 1, 2]);
        take(&[6], &[6, 7]);
        // Not what is warm, nor what nobody knows, nor anything twice; and no file goes on in the next one.
        take(&[1, 99, 4, 4], &[4]);
        take(&[], &[3]);
        take(&[], &[5]);
        // What was asked for and came as a neighbour is not looked for again, nor when all is warm.
        take(&[8, 9], &[8, 9]);
        assert!(unloaded.take(LEN, LEN).is_none() && !unloaded.is_any());
        assert_eq!(unloaded.left(), (0, 0));
        unloaded.wait([PageId(0), PageId(99)]).unwrap();
        unloaded.wait_all().unwrap();
        assert!(unloaded.take_memory().is_empty());
    }

    #[test]
    fn who_waits_goes_on_when_all_that_he_needs_is_warm() {
        let arena = arena();
        let unloaded = ten(&arena);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| unloaded.wait([PageId(9), PageId(0)]));
            while let Some(taken) = unloaded.take(LEN, LEN) {
                assert!(
                    !waiter.is_finished() || !numbers(&taken).iter().any(|number| [0, 9].contains(number))
                );
                load(&unloaded, &arena, taken);
            }
            waiter.join().unwrap().unwrap();
        });
    }

    #[test]
    fn nobody_waits_for_what_never_comes() {
        let arena = arena();
        let unloaded = ten(&arena);
        let failed = unloaded.take(LEN, LEN).unwrap().pop().unwrap();
        let damage = Error::from(Defect::Missing.at(FileName::Pages(0), 0));
        unloaded.fail(failed, damage);
        // A page that cannot be loaded is nobody else's business, until all are waited for.
        assert!(matches!(unloaded.wait([PageId(0)]), Err(Error::Damaged(_))));
        let in_hand = unloaded.take(LEN, 2 * LEN).unwrap();
        assert_eq!(numbers(&in_hand), [1, 2]);
        std::thread::scope(|scope| {
            let waiters = [
                scope.spawn(|| unloaded.wait([PageId(1)])),
                scope.spawn(|| unloaded.wait([PageId(5)])),
                scope.spawn(|| unloaded.wait_all()),
            ];
            unloaded.end(Error::Closed);
            for waiter in waiters {
                assert!(matches!(waiter.join().unwrap(), Err(Error::Closed)));
            }
        });
        assert!(unloaded.take(LEN, LEN).is_none(), "nobody loads any more");
        // What was in hand may be loaded all the same.
        load(&unloaded, &arena, in_hand);
        unloaded.wait([PageId(2)]).unwrap();
        assert_eq!((unloaded.left(), unloaded.is_any()), ((7, 7 * LEN), true));
        let memory = unloaded.take_memory();
        assert_eq!(memory.len(), 8);
        memory.into_iter().try_for_each(|memory| arena.discard(memory)).unwrap();
        assert_eq!(arena.usage(Place::Host).used(), 0);
    }
}
