//! The set of pages that are still only on disk, because the open did not wait for them.
//!
//! An unloaded page has memory and an entry in the table, but its bytes have not been read from disk. A caller that
//! needs the page requests it from this set and waits. The loader loads requested pages first, and then continues with
//! the pages that follow them in the files. Thus a caller that reads its pages in order finds the next pages loaded. A
//! loaded page never becomes unloaded again, so a caller needs to wait only once for each page. Callers wait for their
//! pages before they pass work to the applier, so the applier never waits for the disk.
//!
//! A page that cannot be loaded stays unloaded, and every caller that requests it receives the error. A page that cannot
//! be loaded at present, because an archive that contains it is unavailable, is loaded later: only the callers that wait
//! for it receive the error.

use std::collections::BTreeMap;
use std::time::Duration;

use remanent_format::PageId;
use remanent_format::image::ImageRef;
use remanent_format::state::id_map::IdMap;

use crate::base::allocation::{collected, make_room};
use crate::base::queue::Queue;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Instant, Mutex};
use crate::error::{Error, Result};
use crate::memory::arena::PageMemory;

/// The maximum number of pages that the loader takes at a time, which also bounds the number of commands per command
/// list.
const TAKEN_MAX: usize = 2048;
/// The number of pages that the loader takes together if memory for a longer list is unavailable.
const TAKEN_MIN: usize = 256;

/// A page to load.
pub(crate) struct UnloadedPage {
    pub page: PageId,
    /// The image that contains exactly the page's bytes.
    pub image: ImageRef,
    /// The memory that receives the page's bytes.
    pub memory: PageMemory,
}

/// The unloaded pages of a store, shared by callers that need them and the threads that load them.
#[derive(Default)]
pub(crate) struct UnloadedSet {
    /// The number of pages that are not loaded. A caller that finds 0 need not lock `state`.
    left: AtomicUsize,
    state: Mutex<LoadStates>,
    /// A condition variable that is notified when a page was loaded, or when loading a page failed.
    changed: Condvar,
}

#[derive(Default)]
struct LoadStates {
    /// All pages in the order of their files. An entry becomes `None` when the loader takes its page.
    waiting: Vec<Option<UnloadedPage>>,
    /// For each index of `waiting`, the next index with a page, or an earlier index from which the search continues.
    /// The last entry represents the end of the list.
    following: Vec<usize>,
    /// The index at which loading continues, after the pages that were taken last.
    next: usize,
    /// The index in `waiting` of each page that is neither loaded nor failed.
    indices: IdMap<PageId, usize>,
    /// The total length in bytes of the pages in `indices`.
    bytes: u64,
    /// The indices in `waiting` of the requested pages. The loader takes these pages first.
    requested: Queue<usize>,
    failed: BTreeMap<PageId, Error>,
    /// The number of times that pages were put back.
    put_back: u64,
    /// For pages that were put back: the value of `put_back` at that time, and the error.
    setbacks: BTreeMap<PageId, (u64, Error)>,
    /// The memory of pages that were taken before loading stopped, and will not be loaded.
    abandoned: Queue<PageMemory>,
    /// The error that stopped loading, or `None` while pages are being loaded.
    end_error: Option<Error>,
}

impl LoadStates {
    /// Requests pages, so that the loader takes them before other pages.
    fn ask(&mut self, pages: &[PageId]) {
        let Self { waiting, indices, requested, .. } = self;
        let wanted = pages.iter().filter_map(|page| indices.get(*page)).filter(|at| waiting[**at].is_some());
        wanted.for_each(|at| requested.push_back(*at));
    }

    /// Returns the first index at or after `at` whose page has not been taken, if any.
    fn waiting_from(&mut self, mut at: usize) -> Option<usize> {
        let Self { waiting, following, .. } = self;
        while following[at] != at {
            // Shortens the chain of indices that the next call follows.
            following[at] = following[following[at]];
            at = following[at];
        }
        (at < waiting.len()).then_some(at)
    }
}

impl UnloadedSet {
    /// Creates a set of unloaded pages.
    ///
    /// # Errors
    /// `OutOfMemory`, together with the pages.
    pub fn new(pages: Vec<UnloadedPage>) -> Result<Self, (Error, Vec<UnloadedPage>)> {
        let bytes = pages.iter().map(|unloaded| unloaded.memory.byte_len()).sum();
        // All allocations precede the first change, because an error must return all pages: dropping a page does not
        // free its memory.
        let (mut files, mut waiting, mut following) = match Self::room_for(&pages) {
            Ok(room) => room,
            Err(error) => return Err((error, pages)),
        };
        for unloaded in pages {
            files.get_mut(&unloaded.image.file).expect("counted before").push(unloaded);
        }
        // The pages are usually in this order already, and sorting is then fast.
        files.values_mut().for_each(|of_file| of_file.sort_unstable_by_key(|unloaded| unloaded.image.offset));
        waiting.extend(files.into_values().flatten().map(Some));
        following.extend(0..=waiting.len());
        let state = LoadStates {
            indices: waiting.iter().flatten().map(|unloaded| unloaded.page).zip(0..).collect(),
            bytes,
            waiting,
            following,
            ..LoadStates::default()
        };
        Ok(Self { left: AtomicUsize::new(state.indices.len()), state: Mutex::new(state), ..Self::default() })
    }

    /// Allocates the lists that [`new`](Self::new) fills: the pages of each file, `waiting`, and `following`.
    #[expect(clippy::type_complexity, reason = "three lists, named where they are used")]
    fn room_for(
        pages: &[UnloadedPage],
    ) -> Result<(BTreeMap<u64, Vec<UnloadedPage>>, Vec<Option<UnloadedPage>>, Vec<usize>)> {
        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        pages.iter().for_each(|unloaded| *counts.entry(unloaded.image.file).or_default() += 1);
        let (mut files, mut waiting, mut following) = (BTreeMap::new(), Vec::new(), Vec::new());
        for (file, count) in counts {
            make_room(files.entry(file).or_insert_with(Vec::new), count)?;
        }
        make_room(&mut waiting, pages.len())?;
        make_room(&mut following, pages.len() + 1)?;
        Ok((files, waiting, following))
    }

    /// Returns whether any page is not loaded yet.
    pub fn is_any(&self) -> bool {
        // Acquire: a caller that finds a page loaded also finds the applier's memory for the page.
        self.left.load(Ordering::Acquire) > 0
    }

    /// Returns the number of pages that remain to be loaded, and their total length in bytes.
    pub fn left(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.indices.len() as u64, state.bytes)
    }

    /// Waits until `pages` are loaded. The loader loads these pages first, in the given order.
    ///
    /// # Errors
    /// The error that prevents one of the pages from being loaded; `Closed`.
    pub fn wait(&self, pages: impl IntoIterator<Item = PageId>) -> Result<()> {
        if !self.is_any() {
            return Ok(());
        }
        let pages = collected(pages)?;
        let mut state = self.state.lock();
        let seen = state.put_back;
        state.ask(&pages);
        for page in pages {
            while state.indices.contains(page) {
                if let Some(error) = &state.end_error {
                    return Err(error.clone());
                }
                if let Some((_, error)) = state.setbacks.get(&page).filter(|(number, _)| *number > seen) {
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

    /// Waits until all pages are loaded.
    ///
    /// # Errors
    /// Same as [`wait`](Self::wait), once all other pages are loaded.
    pub fn wait_all(&self) -> Result<()> {
        let mut state = self.state.lock();
        let seen = state.put_back;
        while !state.indices.is_empty() {
            if let Some(error) = &state.end_error {
                return Err(error.clone());
            }
            if let Some((_, error)) = state.setbacks.values().find(|(number, _)| *number > seen) {
                return Err(error.clone());
            }
            self.changed.wait(&mut state);
        }
        state.failed.values().next().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Takes pages to load, all adjacent in one file. Returns `None` if there are no more pages to take.
    ///
    /// - If a page was requested, takes this page and the pages after it in the file, up to `asked_bytes_max` bytes.
    /// - Otherwise, takes up to `bytes_max` bytes of pages after the pages that were taken last. After the last page of
    ///   the set, continues with the first page.
    ///
    /// A page that is longer than the maximum is the only page in the result.
    pub fn take(&self, asked_bytes_max: u64, bytes_max: u64) -> Option<Vec<UnloadedPage>> {
        let mut state = self.state.lock();
        if state.end_error.is_some() {
            return None;
        }
        let LoadStates { waiting, requested, .. } = &mut *state;
        // A page that was requested twice is taken once.
        let is_waiting = |at: &usize| waiting[*at].is_some();
        let (first, bytes_max) = match std::iter::from_fn(|| requested.pop_front()).find(is_waiting) {
            Some(at) => (at, asked_bytes_max),
            None if waiting.is_empty() => return None,
            None => {
                let next = state.next;
                (state.waiting_from(next).or_else(|| state.waiting_from(0))?, bytes_max)
            }
        };
        let LoadStates { waiting, following, next, .. } = &mut *state;
        let start = waiting[first].as_ref().expect("looked at just now").image;
        let belongs = |unloaded: &UnloadedPage| {
            let end = unloaded.image.offset + unloaded.image.stored_len;
            unloaded.image.file == start.file && end <= start.offset + bytes_max.max(start.stored_len)
        };
        let belong = waiting[first..].iter().take_while(|at| at.as_ref().is_some_and(belongs));
        let count = belong.take(TAKEN_MAX).count();
        let mut taken = Vec::new();
        // If there is no memory for a list of all of them, the remaining pages are taken later.
        let count = if taken.try_reserve_exact(count).is_ok() { count } else { count.min(TAKEN_MIN) };
        taken.extend(waiting[first..first + count].iter_mut().filter_map(Option::take));
        *next = first + count;
        following[first..*next].fill(*next);
        Some(taken)
    }

    /// Records that pages are loaded. Each page is given with its length in bytes.
    pub fn loaded(&self, pages: impl IntoIterator<Item = (PageId, u64)>) {
        let mut state = self.state.lock();
        for (page, len) in pages {
            state.indices.remove(page);
            state.setbacks.remove(&page);
            state.bytes -= len;
        }
        if state.indices.is_empty() {
            (state.waiting, state.following) = (Vec::new(), Vec::new());
            state.requested = Queue::default();
        }
        self.left.store(state.indices.len() + state.failed.len(), Ordering::Release);
        self.changed.notify_all();
    }

    /// Records that a taken page cannot be loaded.
    pub fn fail(&self, unloaded: UnloadedPage, error: Error) {
        let mut state = self.state.lock();
        state.indices.remove(unloaded.page);
        state.bytes -= unloaded.memory.byte_len();
        state.failed.insert(unloaded.page, error);
        state.abandoned.push_back(unloaded.memory);
        self.changed.notify_all();
    }

    /// Puts taken pages back that cannot be loaded at present. Callers that wait for them receive `error`. A later call
    /// requests them again.
    pub fn put_back(&self, pages: Vec<UnloadedPage>, error: &Error) {
        let mut state = self.state.lock();
        let LoadStates { waiting, following, indices, put_back, setbacks, .. } = &mut *state;
        *put_back += 1;
        for unloaded in pages {
            let page = unloaded.page;
            let at = *indices.get(page).expect("a taken page has an index");
            setbacks.insert(page, (*put_back, error.clone()));
            waiting[at] = Some(unloaded);
        }
        // The search for the next page finds these pages again.
        for (at, next) in following.iter_mut().enumerate() {
            *next = if waiting.get(at).is_none_or(Option::is_some) { at } else { at + 1 };
        }
        self.changed.notify_all();
    }

    /// Stops loading. Callers that wait for unloaded pages receive `error`.
    pub fn end(&self, error: Error) {
        self.state.lock().end_error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Waits for at most `time` until loading has stopped, and returns whether it has stopped.
    pub fn is_over_within(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while state.end_error.is_none() && Instant::now() < until {
            self.changed.wait_until(&mut state, until);
        }
        state.end_error.is_some()
    }

    /// Accepts taken pages that will not be loaded because loading has stopped, and keeps their memory for
    /// [`take_memory`](Self::take_memory).
    pub fn give_up(&self, pages: Vec<UnloadedPage>) {
        let mut state = self.state.lock();
        pages.into_iter().for_each(|unloaded| state.abandoned.push_back(unloaded.memory));
    }

    /// Removes and returns the memory of all pages that were not loaded.
    pub fn take_memory(&self) -> impl Iterator<Item = PageMemory> + use<> {
        let mut state = self.state.lock();
        let waiting = std::mem::take(&mut state.waiting).into_iter().flatten();
        let mut abandoned = std::mem::take(&mut state.abandoned);
        waiting.map(|unloaded| unloaded.memory).chain(std::iter::from_fn(move || abandoned.pop_front()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::image::Codec;
    use remanent_format::{Defect, FileName, Place};

    use super::*;
    use crate::device::EngineDevice;
    use crate::device::host::HostDevice;
    use crate::memory::arena::{Arena, Purpose};
    use crate::options::Budget;

    const LEN: u64 = 4096;

    /// Returns a set of pages 0 to 9 of 4 KiB, five in each file. The pages are passed in another order.
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
            .map_err(|(error, _)| error)
            .unwrap()
    }

    fn arena() -> Arena {
        Arena::new(EngineDevice::new(Arc::new(HostDevice::new())), Budget::default())
    }

    fn numbers(taken: &[UnloadedPage]) -> Vec<u64> {
        taken.iter().map(|unloaded| unloaded.page.0).collect()
    }

    /// Loads pages like a loader that encounters no errors.
    fn load(unloaded: &UnloadedSet, arena: &Arena, taken: Vec<UnloadedPage>) {
        unloaded.loaded(taken.iter().map(|unloaded| (unloaded.page, unloaded.memory.byte_len())));
        taken.into_iter().try_for_each(|unloaded| arena.discard(unloaded.memory)).unwrap();
    }

    #[test]
    fn requested_pages_load_first_then_their_followers() {
        let arena = arena();
        let unloaded = ten(&arena);
        assert_eq!(unloaded.left(), (10, 10 * LEN));
        let take = |requested: &[u64], expected: &[u64]| {
            let requested: Vec<PageId> = requested.iter().copied().map(PageId).collect();
            unloaded.state.lock().ask(&requested);
            let taken = unloaded.take(2 * LEN, 2 * LEN).unwrap();
            assert_eq!(numbers(&taken), expected);
            load(&unloaded, &arena, taken);
        };
        take(&[], &[0, 1]);
        take(&[6], &[6, 7]);
        // Pages that are loaded, unknown or requested twice are skipped, and the pages taken together end with the
        // file.
        take(&[1, 99, 4, 4], &[4]);
        take(&[], &[5]);
        // After the last page, loading continues with the first.
        take(&[9], &[9]);
        take(&[], &[2, 3]);
        // A requested page that was taken together with another one is not taken again.
        take(&[8, 9], &[8]);
        assert!(unloaded.take(LEN, LEN).is_none() && !unloaded.is_any());
        assert_eq!(unloaded.left(), (0, 0));
        unloaded.wait([PageId(0), PageId(99)]).unwrap();
        unloaded.wait_all().unwrap();
        assert_eq!(unloaded.take_memory().count(), 0);
    }

    #[test]
    fn waiter_resumes_when_all_pages_are_loaded() {
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
    fn pages_that_were_put_back_are_loaded_later() {
        let arena = arena();
        let unloaded = ten(&arena);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| unloaded.wait([PageId(7)]));
            while !waiter.is_finished() {
                let taken = unloaded.take(2 * LEN, 2 * LEN).unwrap();
                unloaded.put_back(taken, &Error::Closed);
            }
            assert!(matches!(waiter.join().unwrap(), Err(Error::Closed)));
        });
        assert_eq!(unloaded.left(), (10, 10 * LEN));
        let taken = unloaded.take(2 * LEN, 2 * LEN).unwrap();
        let before = numbers(&taken);
        unloaded.put_back(taken, &Error::Closed);
        unloaded.state.lock().ask(&[PageId(before[0])]);
        let mut loaded = Vec::new();
        while let Some(taken) = unloaded.take(2 * LEN, 2 * LEN) {
            loaded.extend(numbers(&taken));
            load(&unloaded, &arena, taken);
        }
        assert_eq!(loaded[..before.len()], before);
        loaded.sort_unstable();
        assert_eq!(loaded, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        unloaded.wait_all().unwrap();
    }

    #[test]
    fn waiters_end_when_page_cannot_load() {
        let arena = arena();
        let unloaded = ten(&arena);
        let failed = unloaded.take(LEN, LEN).unwrap().pop().unwrap();
        let damage = Error::from(Defect::Missing.at(FileName::Pages(0), 0));
        unloaded.fail(failed, damage);
        // A page that cannot be loaded affects only callers that wait for this page or for all pages.
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
        assert!(unloaded.take(LEN, LEN).is_none(), "no page is loaded any more");
        // A page that was taken before loading stopped may still be loaded.
        load(&unloaded, &arena, in_hand);
        unloaded.wait([PageId(2)]).unwrap();
        assert_eq!((unloaded.left(), unloaded.is_any()), ((7, 7 * LEN), true));
        let memory: Vec<PageMemory> = unloaded.take_memory().collect();
        assert_eq!(memory.len(), 8);
        memory.into_iter().try_for_each(|memory| arena.discard(memory)).unwrap();
        assert_eq!(arena.usage(Place::Host).used(), 0);
    }
}
