//! Compact entries of pages. An entry is half the size of a [`PageInfo`], because an open store keeps several tables
//! with one entry per page.

use std::sync::Arc;

use crate::ids::{Epoch, Key, Lsn, PageId, Place};
use crate::limits::PAGE_LEN_MAX;
use crate::value::SharedMetadata;

use super::{PageInfo, Refusal};

/// The entry of a page in a table. Its position in the table determines the page's id.
#[derive(Clone, Debug)]
pub struct PageEntry {
    /// The epoch of the page, which is its version.
    pub epoch: Epoch,
    /// The batch that last changed or moved the page.
    pub lsn: Lsn,
    shape: PageShape,
}

/// The length, place, key and metadata of a page, in a compact form. Excludes the epoch and the Lsn.
#[derive(Clone, Debug)]
pub struct PageShape {
    /// Length of the page in the low bits, and its place in the high bits.
    len_and_place: u64,
    /// Key and metadata of the page, or `None` if it has neither.
    named: Option<Arc<NamedEntry>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct NamedEntry {
    key: Option<Key>,
    metadata: SharedMetadata,
}

/// Lowest bit of the place in `len_and_place`. The lower bits contain the length.
const PLACE_BIT: u32 = u64::BITS - u16::BITS;
const _: () = assert!(PAGE_LEN_MAX < 1 << PLACE_BIT);
const _: () = assert!(size_of::<PageEntry>() == 32);

fn pack(len: u64, place: Place) -> u64 {
    assert!(len <= PAGE_LEN_MAX, "a page of {len} bytes in place {place}");
    len | u64::from(place.to_bits()) << PLACE_BIT
}

impl PageShape {
    /// Returns the length of the page in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a page of no bytes is as good as any other")]
    pub fn len(&self) -> u64 {
        self.len_and_place & ((1 << PLACE_BIT) - 1)
    }

    /// Returns the place of the page.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::from_bits((self.len_and_place >> PLACE_BIT) as u16).expect("packed from a place")
    }

    /// Returns the key of the page, or `None` if the page has no key.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.named.as_ref()?.key.as_ref()
    }

    fn metadata(&self) -> SharedMetadata {
        self.named.as_ref().map(|named| named.metadata.clone()).unwrap_or_default()
    }

    /// Returns the description of the page, given its id, epoch and Lsn.
    #[must_use]
    pub fn info(&self, page: PageId, epoch: Epoch, lsn: Lsn) -> PageInfo {
        let (key, metadata) = (self.key().cloned(), self.metadata());
        PageInfo { page, key, len: self.len(), epoch, lsn, place: self.place(), metadata }
    }

    /// Replaces the shape with that of a newer version of the same page. Keeps the current reference to an equal key or
    /// metadata, because several threads that change one reference count slow each other down.
    pub fn become_newer(&mut self, newer: &PageInfo) {
        self.len_and_place = pack(newer.len, newer.place);
        let is_same = match &self.named {
            Some(named) => named.metadata.is_same(&newer.metadata),
            None => newer.metadata.is_same(&SharedMetadata::default()),
        };
        if !is_same {
            Arc::make_mut(self.named.get_or_insert_default()).metadata = newer.metadata.clone();
        }
    }

    /// Returns true if `newer` has the same length, key and metadata. The place may differ. The contents of the
    /// metadata are not compared, so the result is false if equal metadata is not shared.
    #[must_use]
    pub fn is_same_but_place(&self, newer: &PageInfo) -> bool {
        let is_same = match &self.named {
            Some(named) => named.key == newer.key && named.metadata.is_same(&newer.metadata),
            None => newer.key.is_none() && newer.metadata.is_same(&SharedMetadata::default()),
        };
        is_same && self.len() == newer.len
    }
}

impl From<&PageInfo> for PageShape {
    fn from(info: &PageInfo) -> Self {
        let PageInfo { key, len, place, metadata, .. } = info;
        let is_named = key.is_some() || !metadata.is_empty();
        let named = is_named.then(|| Arc::new(NamedEntry { key: key.clone(), metadata: metadata.clone() }));
        Self { len_and_place: pack(*len, *place), named }
    }
}

/// A shape without a key and metadata equals a shape with empty metadata.
impl PartialEq for PageShape {
    fn eq(&self, other: &Self) -> bool {
        self.len_and_place == other.len_and_place
            && self.key() == other.key()
            && (self.named.is_none() && other.named.is_none() || self.metadata() == other.metadata())
    }
}

impl PageEntry {
    /// Returns the length of the page in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a page of no bytes is as good as any other")]
    pub fn len(&self) -> u64 {
        self.shape.len()
    }

    /// Returns the place of the page.
    #[must_use]
    pub fn place(&self) -> Place {
        self.shape.place()
    }

    /// Returns the key of the page, or `None` if the page has no key.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.shape.key()
    }

    /// Returns the length, place, key and metadata of the page.
    #[must_use]
    pub fn shape(&self) -> &PageShape {
        &self.shape
    }

    /// Returns the description of the page, given its id.
    #[must_use]
    pub fn info(&self, page: PageId) -> PageInfo {
        self.shape.info(page, self.epoch, self.lsn)
    }

    /// Updates the entry to a newer version of the same page. The key must be equal.
    pub(super) fn become_newer(&mut self, newer: &PageInfo) {
        (self.epoch, self.lsn) = (newer.epoch, newer.lsn);
        self.shape.become_newer(newer);
    }

    /// Checks that a range is within the page.
    pub(super) fn check_range(&self, page: PageId, offset: u64, len: u64) -> Result<(), Refusal> {
        check_range(page, self.len(), offset, len)
    }
}

impl From<&PageInfo> for PageEntry {
    fn from(info: &PageInfo) -> Self {
        Self { epoch: info.epoch, lsn: info.lsn, shape: PageShape::from(info) }
    }
}

impl PartialEq for PageEntry {
    fn eq(&self, other: &Self) -> bool {
        (self.epoch, self.lsn) == (other.epoch, other.lsn) && self.shape == other.shape
    }
}

/// Checks that a range is within a page of length `page_len`.
pub(super) fn check_range(page: PageId, page_len: u64, offset: u64, len: u64) -> Result<(), Refusal> {
    match offset.checked_add(len) {
        Some(end) if end <= page_len => Ok(()),
        _ => Err(Refusal::OutOfBounds { page, offset, len, page_len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::DEVICE_ORDINAL_MAX;
    use crate::value::Value;

    #[test]
    fn entry_contains_all_page_info() {
        let named = |key: Option<&str>, name: Option<&str>| {
            let mut info = PageInfo::new(PageId(7), 9, Place::Host);
            info.key = key.map(|key| Key::new(key).unwrap());
            name.into_iter()
                .for_each(|name| _ = info.metadata.make_mut().insert(name.to_owned(), Value::Null));
            info
        };
        let places = [
            Place::Device(0),
            Place::Device(1),
            Place::Device(DEVICE_ORDINAL_MAX),
            Place::Pinned,
            Place::Host,
            Place::Unified,
            Place::Disk,
        ];
        for info in
            [named(None, None), named(Some("k"), None), named(None, Some("m")), named(Some("k"), Some("m"))]
        {
            for (place, len) in
                places.into_iter().flat_map(|place| [0, 1, PAGE_LEN_MAX].map(|len| (place, len)))
            {
                let (epoch, lsn) = (Epoch(u64::MAX), Lsn(u64::MAX - 1));
                let info = PageInfo { len, place, epoch, lsn, ..info.clone() };
                let entry = PageEntry::from(&info);
                assert_eq!((entry.info(info.page), entry.len()), (info.clone(), len));
                // The update produces this state from any earlier one.
                for metadata in [named(None, None), named(None, Some("other"))].map(|info| info.metadata) {
                    let before = PageInfo { metadata, len: 5, place: Place::Host, ..info.clone() };
                    let mut newer = PageEntry::from(&before);
                    newer.become_newer(&info);
                    assert_eq!((newer.info(info.page), &newer), (info.clone(), &entry));
                }
            }
        }
    }
}
