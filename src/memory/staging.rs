//! A pool of staging buffers. Allocating staging is expensive, because a GPU pins memory at 1.5 GB/s. The pool
//! therefore keeps returned buffers for reuse, up to a limit.
//!
//! Staging is allocated in size classes, so that returned buffers fit later requests. The lengths of the classes are
//! powers of two. Between the powers of two of long classes there are three more lengths, because otherwise a request
//! just above a power of two would use twice its length. A request returns a [`StagingBuf`] of exactly the requested
//! length. Command lists own the underlying [`Staging`], and their commands name ranges of it.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use remanent_format::Defect;
use remanent_format::op::PayloadBytes;

use crate::base::allocation::{collected, make_room, push};
use crate::base::cache_padded::CachePadded;
use crate::base::huge_pages;
use crate::base::sync::Mutex;
use crate::device::sums::{sum_each, sums_in, sums_len, transfer_corrupted};
use crate::device::{Command, CommandList, EngineDevice, Lane, Span, Staging, StagingSpan};
use crate::error::{Error, Result};

/// The length in bytes of the smallest class, which fits the payloads of small batches. A smallest class of 4 KiB was
/// slower, because the system zeroes each page of memory on first access.
const CLASS_LEN_MIN: usize = 512;
/// The length in bytes above which there are four classes per power of two.
const LONG_CLASS_LEN: usize = 1 << 20;
/// The length in bytes of the largest class, which equals the maximum length of all idle staging that a store keeps.
///
/// A longer buffer is allocated with its exact length and not kept. One example is a buffer for the chunk of a 64 MiB
/// page, which also has a header. If such buffers had a class, they would still be freed on every return.
const CLASS_LEN_MAX: usize = 64 << 20;

/// The idle staging buffers of one device, shared by threads and kept for reuse.
///
/// The limit applies to idle staging only. Staging in use is limited by its users. If the pool limited it, one user
/// might wait for another user that waits for the first.
pub struct StagingPool {
    device: Arc<EngineDevice>,
    idle_bytes_max: usize,
    idle: CachePadded<Mutex<IdleStagings>>,
}

#[derive(Default)]
struct IdleStagings {
    bytes: usize,
    classes: BTreeMap<usize, Vec<Staging>>,
}

/// A staging buffer of exactly the requested length. Its contents are unspecified until they are written.
#[derive(Debug)]
pub struct StagingBuf {
    staging: Staging,
    len: usize,
}

/// A buffer to which bytes are appended. Its bytes are usually in staging, so that they are copied only once. Small
/// contents, and contents longer than the longest buffer that the pool keeps, are in ordinary memory.
#[derive(Debug)]
pub struct GrowingStaging(GrowthState);

#[derive(Debug)]
enum GrowthState {
    Staged {
        staging: Staging,
        len: usize,
    },
    /// The bytes are in ordinary, zeroed memory, because they are longer than the longest buffer that the pool keeps.
    /// Appending zeros only increases the length.
    Zeroed {
        bytes: Vec<u8>,
        len: usize,
    },
    Owned {
        bytes: Vec<u8>,
        outgrown: Option<Staging>,
    },
}

/// The bytes of a [`GrowingStaging`] after the last byte was appended.
#[derive(Debug)]
pub enum GrownBytes {
    /// The bytes are in staging, which command lists can use.
    Staged(StagingBuf),
    /// The bytes are in ordinary memory, which command lists cannot use.
    Plain(Vec<u8>),
}

impl StagingPool {
    /// Creates an empty pool that keeps at most `idle_bytes_max` bytes of idle staging.
    #[must_use]
    pub fn new(device: Arc<EngineDevice>, idle_bytes_max: usize) -> Self {
        Self { device, idle_bytes_max, idle: CachePadded::default() }
    }

    /// Returns a staging buffer of `len` bytes with unspecified contents. The pool does not zero reused buffers,
    /// because every user overwrites the bytes before it reads them.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn take(&self, len: usize) -> Result<StagingBuf> {
        let class = class_of(len);
        let idle = class.and_then(|class| self.idle.lock().pop(class));
        let staging = match idle {
            Some(staging) => staging,
            None => self.device.staging(class.unwrap_or(len))?,
        };
        Ok(StagingBuf { staging, len })
    }

    /// Returns a growing buffer for about `len` bytes. Staging that the pool would not keep is allocated only when it
    /// is needed. Until then, the bytes are in ordinary memory.
    ///
    /// The bytes of a small buffer are in ordinary memory, too. Staging was last read by another core, so reading the
    /// bytes back, for example for a checksum, waits for the cache lines to arrive from that core. Because of this
    /// wait, a commit of 256 bytes took a twentieth longer than with a copy.
    ///
    /// # Errors
    /// Same as [`take`](Self::take).
    pub fn take_growing(&self, len: usize) -> Result<GrowingStaging> {
        Ok(GrowingStaging(match class_of(len) {
            Some(CLASS_LEN_MIN) => {
                let mut bytes = Vec::new();
                make_room(&mut bytes, len)?;
                GrowthState::Owned { bytes, outgrown: None }
            }
            None => {
                let bytes = huge_pages::allocate(len).map_err(|_| Error::no_memory(len as u64))?;
                GrowthState::Zeroed { bytes, len: 0 }
            }
            Some(_) => GrowthState::Staged { staging: self.take(len)?.into_staging(), len: 0 },
        }))
    }

    /// Returns the bytes of a growing buffer in staging, after the last byte was appended.
    ///
    /// # Errors
    /// Same as [`take`](Self::take).
    pub fn grown(&self, growing: GrowingStaging) -> Result<StagingBuf> {
        match self.grown_plain(growing) {
            GrownBytes::Staged(staged) => Ok(staged),
            GrownBytes::Plain(bytes) => {
                let mut staged = self.take(bytes.len())?;
                staged.copy_from_slice(&bytes);
                Ok(staged)
            }
        }
    }

    /// Returns the bytes of a growing buffer without moving them, after the last byte was appended.
    pub fn grown_plain(&self, growing: GrowingStaging) -> GrownBytes {
        match growing.0 {
            GrowthState::Staged { staging, len } => GrownBytes::Staged(StagingBuf { staging, len }),
            GrowthState::Zeroed { mut bytes, len } => {
                bytes.truncate(len);
                GrownBytes::Plain(bytes)
            }
            GrowthState::Owned { bytes, outgrown } => {
                self.put_all(outgrown);
                GrownBytes::Plain(bytes)
            }
        }
    }

    /// Returns the staging of `grown` to the pool, if the bytes are in staging.
    pub fn put_grown(&self, grown: GrownBytes) {
        if let GrownBytes::Staged(staged) = grown {
            self.put(staged.into_staging());
        }
    }

    /// Appends a command to `list` that checksums `ranges` into a new staging buffer. The new buffer becomes the list's
    /// last buffer.
    ///
    /// # Errors
    /// Same as [`take`](Self::take). The list is then unchanged.
    pub fn add_sums(&self, list: &mut CommandList, ranges: Vec<Span>) -> Result<()> {
        let sums = self.take(sums_len(ranges.len()))?;
        push(&mut list.commands, sum_each(ranges, list.staging.len()))?;
        push(&mut list.staging, sums.into_staging())
    }

    /// Copies bytes to device memory and waits until they have arrived. If the bytes cross a bus, the device checksums
    /// the arrived bytes (I12). On a mismatch, the bytes are sent a second time, because a single flipped bit must not
    /// fail the caller.
    ///
    /// # Errors
    /// `OutOfMemory`; a device error, including the case that wrong bytes arrived twice.
    pub fn upload(&self, lane: Lane, target: Span, bytes: &[u8]) -> Result<()> {
        self.upload_each(lane, &[(target, bytes)])
    }

    /// Copies bytes to several ranges with one command list, like [`upload`](Self::upload).
    ///
    /// # Errors
    /// Same as [`upload`](Self::upload).
    pub fn upload_each(&self, lane: Lane, parts: &[(Span, &[u8])]) -> Result<()> {
        let once = || {
            let mut staged = self.take(parts.iter().map(|(_, bytes)| bytes.len()).sum())?;
            let mut list = CommandList::default();
            let mut offset = 0;
            for (target, bytes) in parts {
                let source = StagingSpan { index: 0, offset, len: bytes.len() };
                staged[offset..][..bytes.len()].copy_from_slice(bytes);
                push(&mut list.commands, Command::Upload { source, target: *target })?;
                offset += bytes.len();
            }
            push(&mut list.staging, staged.into_staging())?;
            if self.device.crosses_bus() {
                self.add_sums(&mut list, collected(parts.iter().map(|(target, _)| *target))?)?;
            }
            let returned = self.device.finish(self.device.submit(lane, list)?)?;
            let as_sent = |sums: &Staging| {
                let sent = parts.iter().map(|(_, bytes)| crc32fast::hash(bytes));
                sums_in(&sums[..sums_len(parts.len())]).eq(sent)
            };
            let is_proven = returned.get(1).is_none_or(as_sent);
            self.put_all(returned);
            Ok::<_, Error>(is_proven)
        };
        if once()? || once()? { Ok(()) } else { Err(transfer_corrupted(&self.device, "pages")) }
    }

    /// Copies bytes of device memory to the host and waits until they have arrived. If the bytes cross a bus, the
    /// device checksums the bytes that it sends (I12). On a mismatch, the bytes are sent a second time, because a
    /// single flipped bit must not fail the caller. No list may write to the bytes during the call.
    ///
    /// # Errors
    /// `OutOfMemory`; a device error, including the case that wrong bytes arrived twice.
    pub fn download(&self, lane: Lane, source: Span, out: &mut [u8]) -> Result<()> {
        let mut once = || {
            let target = StagingSpan { index: 0, offset: 0, len: out.len() };
            let mut list = CommandList {
                commands: vec![Command::Download { source, target }],
                staging: vec![self.take(out.len())?.into_staging()],
            };
            if self.device.crosses_bus() {
                self.add_sums(&mut list, vec![source])?;
            }
            let returned = self.device.finish(self.device.submit(lane, list)?)?;
            out.copy_from_slice(&returned[0][..out.len()]);
            let sent = returned.get(1).and_then(|sums| sums_in(sums).next());
            self.put_all(returned);
            Ok::<_, Error>(sent.is_none_or(|sum| sum == crc32fast::hash(out)))
        };
        if once()? || once()? { Ok(()) } else { Err(transfer_corrupted(&self.device, "bytes of a page")) }
    }

    /// Returns a buffer of `len` bytes. Reuses `staged` if it is long enough, and otherwise returns it to the pool and
    /// takes another buffer.
    ///
    /// # Errors
    /// Same as [`take`](Self::take).
    pub fn shorten(&self, staged: StagingBuf, len: usize) -> Result<StagingBuf> {
        let staging = staged.into_staging();
        if len <= staging.len() {
            return Ok(StagingBuf::new(staging, len));
        }
        self.put(staging);
        self.take(len)
    }

    /// Returns a staging buffer to the pool. If the idle bytes then exceed the limit, frees buffers of the class with
    /// the most idle bytes first, so that an unused class does not fill the pool permanently.
    pub fn put(&self, staging: Staging) {
        self.put_all([staging]);
    }

    /// Returns several staging buffers to the pool together, such as the buffers of a completed list.
    pub fn put_all(&self, staging: impl IntoIterator<Item = Staging>) {
        // Buffers are sorted before the lock is acquired, and freed after it is released, so that other threads do not
        // wait: unpinning memory takes time.
        let mut freed = Vec::new();
        let mut given = IdleStagings::default();
        for staging in staging {
            if class_of(staging.len()) == Some(staging.len()) {
                given.push(staging);
            } else {
                freed.push(staging);
            }
        }
        let mut idle = self.idle.lock();
        idle.append(given);
        while idle.bytes > self.idle_bytes_max {
            freed.extend(idle.pop_fullest());
        }
        drop(idle);
    }

    /// Frees all idle staging, and returns the number of bytes freed.
    pub fn trim(&self) -> usize {
        // The buffers are freed after the lock is released, because unpinning takes time.
        let idle = std::mem::take(&mut *self.idle.lock());
        idle.bytes
    }

    /// Returns the total length of idle staging in bytes.
    #[must_use]
    pub fn idle_bytes(&self) -> usize {
        self.idle.lock().bytes
    }
}

impl IdleStagings {
    fn push(&mut self, staging: Staging) {
        self.bytes += staging.len();
        self.classes.entry(staging.len()).or_default().push(staging);
    }

    fn append(&mut self, other: Self) {
        self.bytes += other.bytes;
        for (class, mut kept) in other.classes {
            self.classes.entry(class).or_default().append(&mut kept);
        }
    }

    fn pop(&mut self, class: usize) -> Option<Staging> {
        let staging = self.classes.get_mut(&class)?.pop()?;
        self.bytes -= class;
        Some(staging)
    }

    fn pop_fullest(&mut self) -> Option<Staging> {
        let (class, _) = self.classes.iter().max_by_key(|(class, kept)| *class * kept.len())?;
        self.pop(*class)
    }
}

impl GrowingStaging {
    /// Returns whether the buffer has more bytes than the pool would keep in staging.
    #[must_use]
    pub fn is_long(&self) -> bool {
        class_of(self.byte_len()).is_none()
    }

    /// Ensures that `count` more bytes can be appended. After an error the buffer is empty.
    fn make_room(&mut self, count: usize) -> Result<&mut GrowthState, Defect> {
        let is_full = match &self.0 {
            GrowthState::Staged { staging, len } => count > staging.len() - len,
            GrowthState::Zeroed { bytes, len } => count > bytes.len() - len,
            GrowthState::Owned { .. } => false,
        };
        if is_full {
            let nothing = GrowthState::Owned { bytes: Vec::new(), outgrown: None };
            let (bytes, outgrown) = match std::mem::replace(&mut self.0, nothing) {
                GrowthState::Staged { staging, len } => {
                    let needed = 2 * (len + count);
                    let mut bytes = Vec::new();
                    bytes.try_reserve_exact(needed).map_err(|_| Defect::Memory { needed: needed as u64 })?;
                    bytes.extend_from_slice(&staging[..len]);
                    (bytes, Some(staging))
                }
                GrowthState::Zeroed { mut bytes, len } => {
                    bytes.truncate(len);
                    (bytes, None)
                }
                GrowthState::Owned { bytes, outgrown } => (bytes, outgrown),
            };
            self.0 = GrowthState::Owned { bytes, outgrown };
        }
        Ok(&mut self.0)
    }
}

impl PayloadBytes for GrowingStaging {
    fn byte_len(&self) -> usize {
        match &self.0 {
            GrowthState::Staged { len, .. } | GrowthState::Zeroed { len, .. } => *len,
            GrowthState::Owned { bytes, .. } => bytes.len(),
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Defect> {
        match self.make_room(bytes.len())? {
            GrowthState::Staged { staging, len } => {
                staging[*len..][..bytes.len()].copy_from_slice(bytes);
                *len += bytes.len();
                Ok(())
            }
            GrowthState::Zeroed { bytes: grown, len } => {
                grown[*len..][..bytes.len()].copy_from_slice(bytes);
                *len += bytes.len();
                Ok(())
            }
            GrowthState::Owned { bytes: grown, .. } => PayloadBytes::append(grown, bytes),
        }
    }

    fn append_zeros(&mut self, count: usize) -> Result<(), Defect> {
        match self.make_room(count)? {
            GrowthState::Staged { staging, len } => {
                staging[*len..][..count].fill(0);
                *len += count;
                Ok(())
            }
            GrowthState::Zeroed { len, .. } => {
                *len += count;
                Ok(())
            }
            GrowthState::Owned { bytes, .. } => bytes.append_zeros(count),
        }
    }
}

impl AsMut<[u8]> for GrowingStaging {
    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            GrowthState::Staged { staging, len } => &mut staging[..*len],
            GrowthState::Zeroed { bytes, len } => &mut bytes[..*len],
            GrowthState::Owned { bytes, .. } => bytes,
        }
    }
}

impl From<StagingBuf> for GrownBytes {
    fn from(staged: StagingBuf) -> Self {
        Self::Staged(staged)
    }
}

impl Deref for GrownBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Staged(staged) => staged,
            Self::Plain(bytes) => bytes,
        }
    }
}

impl StagingBuf {
    /// Creates a buffer from the first `len` bytes of `staging`, for example of staging that a completed list returned.
    ///
    /// # Panics
    /// If the staging is shorter.
    #[must_use]
    pub fn new(staging: Staging, len: usize) -> Self {
        assert!(len <= staging.len(), "{len} bytes of a staging of {}", staging.len());
        Self { staging, len }
    }

    /// Returns the underlying staging, for use in a list or to return it to the pool. The staging may be longer than
    /// requested.
    #[must_use]
    pub fn into_staging(self) -> Staging {
        self.staging
    }
}

impl Deref for StagingBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.staging[..self.len]
    }
}

impl DerefMut for StagingBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.staging[..self.len]
    }
}

impl AsRef<[u8]> for StagingBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for StagingBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Returns the length of the class for a staging buffer of `len` bytes, or `None` if the buffer gets its exact length.
fn class_of(len: usize) -> Option<usize> {
    let step = if len > LONG_CLASS_LEN { len.next_power_of_two() / 8 } else { len.next_power_of_two() };
    (len <= CLASS_LEN_MAX).then(|| len.next_multiple_of(step).max(CLASS_LEN_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::HostDevice;

    fn pool(idle_bytes_max: usize) -> StagingPool {
        StagingPool::new(EngineDevice::new(Arc::new(HostDevice::new())), idle_bytes_max)
    }

    #[test]
    fn staging_has_exactly_the_requested_length() {
        let pool = pool(1 << 20);
        for len in [0, 1, 4095, 4096, 4097, 100_000, CLASS_LEN_MAX + 1] {
            let staging = pool.take(len).unwrap();
            assert_eq!(staging.len(), len);
            pool.put(staging.into_staging());
        }
    }

    #[test]
    fn size_class_wastes_little() {
        for len in [
            1,
            4097,
            65_537,
            LONG_CLASS_LEN,
            LONG_CLASS_LEN + 1,
            (2 << 20) + 8192,
            (7 << 20) + 1,
            CLASS_LEN_MAX,
        ] {
            let class = class_of(len).unwrap();
            assert!(class >= len && class_of(class) == Some(class), "{len}: {class}");
            assert!(len < LONG_CLASS_LEN || class - len < class / 4, "{len}: {class}");
        }
        assert_eq!([5000, (2 << 20) + 8192].map(class_of), [Some(8192), Some(5 << 19)]);
        assert_eq!(class_of(CLASS_LEN_MAX + 1), None);
    }

    #[test]
    fn returned_staging_is_reused_in_its_class() {
        let pool = pool(1 << 20);
        let mut first = pool.take(5000).unwrap();
        first.fill(7);
        pool.put(first.into_staging());
        assert_eq!(pool.idle_bytes(), 8192);
        let second = pool.take(8000).unwrap();
        assert_eq!((pool.idle_bytes(), second[4999]), (0, 7), "the same bytes, as they were left");
        assert_eq!(second[7999], 0);
    }

    #[test]
    fn idle_bytes_stay_within_limit_and_fullest_class_shrinks() {
        let pool = pool(16 << 10);
        let taken: Vec<StagingBuf> =
            [4096, 4096, 4096, 8192, 8192].map(|len| pool.take(len).unwrap()).into_iter().collect();
        for staging in taken {
            pool.put(staging.into_staging());
            assert!(pool.idle_bytes() <= 16 << 10);
        }
        // There were 12 KiB in three buffers. The first 8 KiB buffer caused a 4 KiB buffer to be freed, and the second
        // caused an 8 KiB buffer to be freed.
        assert_eq!(pool.idle_bytes(), 16 << 10);
        pool.put(pool.device.staging(32 << 10).unwrap());
        assert_eq!(pool.idle_bytes(), 16 << 10, "larger than the limit: not kept");
        assert_eq!((pool.trim(), pool.idle_bytes(), pool.trim()), (16 << 10, 0, 0));
    }

    /// Reused staging contains the bytes of its last user. These bytes must not appear in a growing buffer.
    #[test]
    fn grown_bytes_are_equal_in_staging_and_heap() {
        let pool = pool(1 << 20);
        for (about, lens, is_staged) in [
            (0, [0, 0, 0], true),
            (100, [10, 20, 482], true),
            (100, [10, 20, 483], false),
            (600, [10, 20, 994], true),
            (5000, [4096, 4096, 1], false),
            (CLASS_LEN_MAX + 1, [1, 2, 3], false),
            // More bytes than requested are appended.
            (CLASS_LEN_MAX + 1, [1, CLASS_LEN_MAX, 3], false),
        ] {
            pool.trim();
            let mut used = pool.take(about.min(CLASS_LEN_MAX)).unwrap();
            used.fill(9);
            let at = used.as_ptr();
            pool.put(used.into_staging());
            let mut growing = pool.take_growing(about).unwrap();
            growing.append(&vec![1; lens[0]]).unwrap();
            growing.append_zeros(lens[1]).unwrap();
            growing.append(&vec![3; lens[2]]).unwrap();
            if let Some(first) = growing.as_mut().first_mut() {
                *first = 7;
            }
            assert_eq!(growing.byte_len(), lens.iter().sum::<usize>());
            let grown = pool.grown(growing).unwrap();
            let mut expected = [vec![1; lens[0]], vec![0; lens[1]], vec![3; lens[2]]].concat();
            expected.iter_mut().take(1).for_each(|first| *first = 7);
            assert!(*grown == expected, "{lens:?}");
            // The pool keeps no buffer as long as the longest class, so its address may now belong to other memory.
            if about <= CLASS_LEN_MAX {
                assert_eq!(grown.as_ptr() == at, is_staged, "{lens:?}");
            }
            let is_outgrown = !is_staged && about <= CLASS_LEN_MAX;
            assert_eq!(pool.idle_bytes() > 0, is_outgrown, "outgrown staging is idle again");
        }
    }

    #[test]
    fn foreign_staging_is_not_pooled() {
        let pool = pool(1 << 20);
        pool.put(pool.device.staging(5000).unwrap());
        pool.put(pool.take(CLASS_LEN_MAX + 1).unwrap().into_staging());
        assert_eq!(pool.idle_bytes(), 0);
    }
}
