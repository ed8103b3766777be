//! A file of a simulated disk, with its visible, durable and pending bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use remanent_format::limits::SECTOR_LEN;

use crate::base::sync::atomic::AtomicBool;

/// The identity of a file, independent of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FileId(pub(super) u64);

/// The bytes of a sector with their hash. With the hash, whole disks are compared without reading all bytes.
#[derive(Debug)]
pub(super) struct Sector {
    bytes: [u8; SECTOR_LEN],
    hash: u64,
}

impl Sector {
    fn new(bytes: [u8; SECTOR_LEN]) -> Arc<Self> {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        Arc::new(Self { bytes, hash: hasher.finish() })
    }

    /// Returns a hash of the contents.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn bytes(&self) -> &[u8; SECTOR_LEN] {
        &self.bytes
    }

    fn zero() -> Arc<Self> {
        static ZERO: LazyLock<Arc<Sector>> = LazyLock::new(|| Sector::new([0; SECTOR_LEN]));
        ZERO.clone()
    }
}

/// The length and bytes of a file. The bytes of the last sector beyond the length are zero.
#[derive(Clone, Debug, Default)]
pub(super) struct FileContent {
    len: u64,
    pub(super) sectors: Vec<Arc<Sector>>,
}

impl FileContent {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn sector_count(&self) -> usize {
        self.sectors.len()
    }

    /// Returns a sector of the content, or zeros past its end.
    pub(super) fn sector(&self, index: usize) -> Arc<Sector> {
        self.sectors.get(index).cloned().unwrap_or_else(Sector::zero)
    }

    /// Fills `out` with the bytes from `offset` on. Returns `false` if the content is too short. An empty read succeeds
    /// at any offset.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let end = offset.checked_add(out.len() as u64);
        if !out.is_empty() && end.is_none_or(|end| end > self.len) {
            return false;
        }
        for (index, within, piece) in pieces(offset, out.len()) {
            out[piece].copy_from_slice(&self.sectors[index].bytes[within]);
        }
        true
    }

    /// Truncates the content, or extends it with zeros.
    fn resize(&mut self, len: u64) {
        self.len = len;
        self.sectors.resize_with(len.div_ceil(SECTOR_LEN as u64) as usize, Sector::zero);
        let used = (len % SECTOR_LEN as u64) as usize;
        if used > 0
            && let Some(last) = self.sectors.last_mut()
            && last.bytes[used..].iter().any(|byte| *byte != 0)
        {
            let mut bytes = last.bytes;
            bytes[used..].fill(0);
            *last = Sector::new(bytes);
        }
    }
}

/// Returns the sectors that contain `len` bytes at `offset`. Each tuple contains the sector's index, the range within
/// the sector, and the range within the `len` bytes.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % SECTOR_LEN as u64) as usize;
        let count = (SECTOR_LEN - within).min(len - done);
        done += count;
        Some(((at / SECTOR_LEN as u64) as usize, within..within + count, done - count..done))
    })
}

/// Returns the indices of the sectors that contain `len` bytes at `offset`.
pub(super) fn sectors_of(offset: u64, len: u64) -> Range<usize> {
    let first = offset / SECTOR_LEN as u64;
    let end = if len == 0 { first } else { (offset + len).div_ceil(SECTOR_LEN as u64) };
    first as usize..end as usize
}

/// A pending version of a sector, a length or a name, with its creation time.
#[derive(Clone, Debug)]
pub(super) struct StampedVersion<T> {
    pub(super) stamp: u64,
    pub(super) value: T,
}

/// The visible and durable contents of a file, and the pending versions of its sectors and its length.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) visible: FileContent,
    pub(super) durable: FileContent,
    /// The versions of each sector since the last sync, oldest first. The last version is visible.
    pub(super) sectors: BTreeMap<usize, Vec<StampedVersion<Arc<Sector>>>>,
    /// The lengths since the last sync, oldest first. The last length is visible.
    pub(super) lengths: Vec<StampedVersion<u64>>,
    /// The sectors that a failed sync has marked as clean. No later sync writes them.
    pub(super) lost: BTreeSet<usize>,
    /// Whether a failed sync has marked the length as clean. No later sync writes the length.
    pub(super) length_lost: bool,
    /// Whether the medium contains bytes other than those that it reported as written.
    pub(super) differs_from_report: bool,
    /// Whether the file has or had a name on another disk. Such a file must not be written any more: the other
    /// simulated disk has a copy of the file, whereas both names would refer to the same file in a real file system.
    /// All versions of the file share this flag, because linking the file from another disk is not an event of this
    /// disk.
    pub(super) is_shared: Arc<AtomicBool>,
}

impl Node {
    pub(super) fn write(&mut self, stamp: u64, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len() as u64;
        if end > self.visible.len {
            self.set_len(stamp, end);
        }
        for (index, within, piece) in pieces(offset, bytes.len()) {
            let mut sector = self.visible.sectors[index].bytes;
            sector[within].copy_from_slice(&bytes[piece]);
            self.set_sector(stamp, index, Sector::new(sector));
        }
    }

    fn set_sector(&mut self, stamp: u64, index: usize, sector: Arc<Sector>) {
        self.visible.sectors[index] = sector.clone();
        self.sectors.entry(index).or_default().push(StampedVersion { stamp, value: sector });
        self.lost.remove(&index);
    }

    pub(super) fn set_len(&mut self, stamp: u64, len: u64) {
        // Removed bytes read as zeros when the file grows again, including those in the last sector.
        let kept = len.div_ceil(SECTOR_LEN as u64) as usize;
        for index in kept..self.visible.sectors.len() {
            self.set_sector(stamp, index, Sector::zero());
        }
        let last = kept.checked_sub(1).and_then(|last| self.visible.sectors.get(last).cloned());
        self.visible.resize(len);
        if let Some(before) = last
            && before.hash != self.visible.sectors[kept - 1].hash
        {
            self.set_sector(stamp, kept - 1, self.visible.sectors[kept - 1].clone());
        }
        self.lengths.push(StampedVersion { stamp, value: len });
        self.length_lost = false;
    }

    /// Makes the length and the sectors in `range` durable, which is all that the sync of a window guarantees.
    pub(super) fn sync(&mut self, range: Range<usize>) {
        if !self.length_lost {
            self.lengths.clear();
            self.durable.resize(self.visible.len);
        }
        let dirty = self.sectors.range(range).map(|(index, _)| *index);
        let synced: Vec<usize> = dirty.filter(|index| !self.lost.contains(index)).collect();
        for index in synced {
            let versions = self.sectors.remove(&index).unwrap_or_default();
            if let (Some(slot), Some(version)) = (self.durable.sectors.get_mut(index), versions.last()) {
                slot.clone_from(&version.value);
            }
        }
    }

    /// Marks the sectors in `range` and the length as lost by a failed sync, as described in `state.rs`.
    pub(super) fn drop_sectors(&mut self, range: Range<usize>) {
        self.lost.extend(self.sectors.range(range).map(|(index, _)| *index));
        self.length_lost = !self.lengths.is_empty();
    }

    /// Changes bytes to simulate a fault of the medium or another program. The change is immediately durable.
    pub(super) fn damage(&mut self, stamp: u64, offset: u64, bytes: &[u8]) {
        self.write(stamp, offset, bytes);
        self.sync(sectors_of(offset, bytes.len() as u64));
    }

    /// Returns whether all visible bytes are durable.
    pub(super) fn is_clean(&self) -> bool {
        self.sectors.is_empty() && self.lengths.is_empty() && !self.differs_from_report
    }

    /// Returns the sectors whose visible bytes equal those on the medium, whether or not they are in the page cache.
    pub(super) fn clean_sectors(&self) -> impl Iterator<Item = usize> {
        let both = self.visible.sectors.iter().zip(&self.durable.sectors).enumerate();
        let is_clean = |index: &usize| !self.sectors.contains_key(index);
        both.filter(|(_, (visible, durable))| visible.hash == durable.hash)
            .map(|(index, _)| index)
            .filter(is_clean)
    }

    /// Returns the sectors whose durable bytes differ from those in `before`.
    pub(super) fn newly_durable(&self, before: &Self) -> Vec<usize> {
        let sectors = self.durable.sectors.iter().enumerate();
        sectors
            .filter(|(index, sector)| sector.hash != before.durable.sector(*index).hash)
            .map(|found| found.0)
            .collect()
    }

    /// Returns a sector of the medium, or zeros past the end of the file.
    pub(super) fn durable_sector(&self, index: usize) -> Arc<Sector> {
        self.durable.sector(index)
    }

    /// Restores the bytes that a sector had in `before`, although a later write was reported as durable.
    pub(super) fn lose_write(&mut self, sector: usize, before: &Self) {
        self.durable.sectors[sector] = before.durable.sector(sector);
        self.differs_from_report = true;
    }

    /// Returns the file after a power cut that kept the chosen version of each sector and of the length. Version 0 is
    /// the durable version, and version n is the n-th version after the last sync.
    pub(super) fn after_power_cut(&self, length: usize, sector: impl Fn(usize) -> usize) -> Self {
        let mut content = self.durable.clone();
        let len = length.checked_sub(1).map_or(self.durable.len, |version| self.lengths[version].value);
        content.sectors.resize_with(len.div_ceil(SECTOR_LEN as u64) as usize, Sector::zero);
        for (index, versions) in &self.sectors {
            if let Some(slot) = content.sectors.get_mut(*index)
                && let Some(version) = sector(*index).checked_sub(1)
            {
                *slot = versions[version].value.clone();
            }
        }
        content.resize(len);
        let is_shared = self.is_shared.clone();
        Self { visible: content.clone(), durable: content, is_shared, ..Self::default() }
    }
}
