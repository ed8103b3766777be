//! A cache of recently read windows of past pages. The cache also chooses the length of the next window.
//!
//! A short page is one window. In a long page, a window contains the requested bytes and adjacent bytes. A window
//! directly after another window is twice as long. The reason is that each window examines all operations of the page,
//! and reads operations that set scattered elements again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::PageId;

/// The maximum number of cached bytes, including the window being read.
const KEPT_BYTES: u64 = 64 << 20;
/// The length in bytes of the first window of a long page. A window that is not adjacent to the previous window has the
/// same length.
pub(crate) const WINDOW_LEN_MIN: u64 = 1 << 20;
/// The maximum length of a window in bytes.
const WINDOW_LEN_MAX: u64 = 32 << 20;
/// The maximum length in bytes of a page that is read as one window. With several windows, the page's image would be
/// read twice: once to verify it, and once for the windows.
pub(crate) const WHOLE_LEN_MAX: u64 = 4 << 20;

const _: () = assert!(2 * WINDOW_LEN_MAX <= KEPT_BYTES && WHOLE_LEN_MAX <= WINDOW_LEN_MAX);

/// The page of a window, and the offset at which the window begins.
type WindowKey = (PageId, u64);

/// A cache of windows with a limit in bytes. The cache evicts the least recently used windows.
#[derive(Default)]
pub(crate) struct Windows {
    /// The cached windows by page and offset, each with the time of its last use.
    kept: BTreeMap<WindowKey, (u64, Arc<Vec<u8>>)>,
    /// The cached windows by the time of their last use, oldest first.
    used: BTreeMap<u64, (PageId, u64)>,
    now: u64,
    bytes: u64,
}

/// The result of looking up a byte of a page in the cache of windows.
pub(crate) enum Lookup {
    /// A cached window that contains the byte, and the offset at which the window begins.
    Held(u64, Arc<Vec<u8>>),
    /// The range to read, because no cached window contains the byte. The cache has already evicted windows to make
    /// room.
    Missing(Range<u64>),
}

impl Windows {
    /// Returns the cached window that contains the byte at `offset`, or the range to read. `page_len` is the length of
    /// the page, and `wanted` is the number of bytes that the caller reads from `offset` on.
    pub fn get(&mut self, page: PageId, page_len: u64, offset: u64, wanted: u64) -> Lookup {
        let before = self.kept.range(..=(page, offset)).next_back();
        let before = before.filter(|((of, _), _)| *of == page);
        let before = before.map(|((_, from), (_, bytes))| *from..from + bytes.len() as u64);
        if let Some(held) = before.clone().filter(|window| window.contains(&offset)) {
            return Lookup::Held(held.start, self.touch((page, held.start)));
        }
        let window = if page_len <= WHOLE_LEN_MAX {
            0..page_len
        } else {
            let from = offset - offset % WINDOW_LEN_MIN;
            let follows = before.filter(|before| before.end == from);
            let doubled = follows.map_or(0, |before| 2 * (before.end - before.start));
            let wanted = (offset - from).saturating_add(wanted).min(page_len);
            let len = doubled.max(wanted.next_multiple_of(WINDOW_LEN_MIN)).min(WINDOW_LEN_MAX);
            from..page_len.min(from + len)
        };
        self.shrink(KEPT_BYTES.saturating_sub(window.end - window.start));
        Lookup::Missing(window)
    }

    /// Adds a window to the cache.
    pub fn insert(&mut self, page: PageId, from: u64, bytes: Arc<Vec<u8>>) {
        self.remove((page, from));
        self.shrink(KEPT_BYTES.saturating_sub(bytes.len() as u64));
        self.bytes += bytes.len() as u64;
        self.kept.insert((page, from), (0, bytes));
        self.touch((page, from));
    }

    fn touch(&mut self, window: (PageId, u64)) -> Arc<Vec<u8>> {
        self.now += 1;
        let (used, bytes) = self.kept.get_mut(&window).expect("it is kept");
        self.used.remove(used);
        *used = self.now;
        self.used.insert(self.now, window);
        bytes.clone()
    }

    /// Evicts the least recently used windows until the cache contains at most `bytes_max` bytes.
    fn shrink(&mut self, bytes_max: u64) {
        while self.bytes > bytes_max {
            let (_, oldest) = self.used.first_key_value().expect("each window was used once");
            self.remove(*oldest);
        }
    }

    fn remove(&mut self, window: (PageId, u64)) {
        if let Some((used, bytes)) = self.kept.remove(&window) {
            self.used.remove(&used);
            self.bytes -= bytes.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Looks up a byte, and reads its window if the window is not cached. Returns the range that was read.
    fn read(windows: &mut Windows, page: u64, page_len: u64, offset: u64, wanted: u64) -> Option<Range<u64>> {
        match windows.get(PageId(page), page_len, offset, wanted) {
            Lookup::Held(from, bytes) => {
                assert!((from..from + bytes.len() as u64).contains(&offset));
                None
            }
            Lookup::Missing(window) => {
                assert!(windows.bytes + (window.end - window.start) <= KEPT_BYTES, "there is room for it");
                let len = (window.end - window.start) as usize;
                windows.insert(PageId(page), window.start, Arc::new(vec![0; len]));
                Some(window)
            }
        }
    }

    #[test]
    fn recently_used_entries_are_kept_within_bound() {
        let mut windows = Windows::default();
        let count = KEPT_BYTES / WHOLE_LEN_MAX;
        for page in 1..=count {
            assert_eq!(read(&mut windows, page, WHOLE_LEN_MAX, 5, 1), Some(0..WHOLE_LEN_MAX));
        }
        assert_eq!(read(&mut windows, 1, WHOLE_LEN_MAX, 5, 1), None);
        assert!(read(&mut windows, count + 1, WHOLE_LEN_MAX, 5, 1).is_some());
        assert_eq!((windows.bytes, windows.kept.len()), (KEPT_BYTES, count as usize));
        assert_eq!(read(&mut windows, 1, WHOLE_LEN_MAX, 0, 1), None);
        assert!(read(&mut windows, 2, WHOLE_LEN_MAX, 0, 1).is_some(), "what was not used longest goes first");
        // Inserting the same window again replaces it.
        windows.insert(PageId(2), 0, Arc::new(vec![0; 20]));
        assert_eq!(windows.kept.len(), windows.used.len());
        assert_eq!(windows.bytes, KEPT_BYTES - WHOLE_LEN_MAX + 20);
    }

    #[test]
    fn sequential_windows_of_long_page_grow() {
        let (mut windows, len) = (Windows::default(), 200 * MIB + 7);
        let mut at = |offset, wanted| read(&mut windows, 1, len, offset, wanted);
        assert_eq!(at(5 * MIB + 9, 100), Some(5 * MIB..6 * MIB));
        assert_eq!(at(5 * MIB, 1), None);
        assert_eq!(at(6 * MIB, 1), Some(6 * MIB..8 * MIB));
        assert_eq!(at(8 * MIB + 100, 1), Some(8 * MIB..12 * MIB));
        // A window that does not follow the previous one is short again, unless the caller requests more bytes.
        assert_eq!(at(100 * MIB, 1), Some(100 * MIB..101 * MIB));
        assert_eq!(at(110 * MIB + 1, 4 * MIB), Some(110 * MIB..115 * MIB));
        assert_eq!(at(150 * MIB, u64::MAX), Some(150 * MIB..182 * MIB));
        assert_eq!(at(182 * MIB, 1), Some(182 * MIB..len));
        assert_eq!(at(len - 1, 1), None);
        assert_eq!(read(&mut windows, 2, len, 12 * MIB, 1), Some(12 * MIB..13 * MIB), "of another page");
    }
}
