//! A page as the table holds it: half the size of a [`PageInfo`], because each table of an open store has one
//! a page.

use std::sync::Arc;

use crate::ids::{Epoch, Key, Lsn, PageId, Place};
use crate::limits::PAGE_LEN_MAX;
use crate::value::SharedMetadata;

use super::{PageInfo, Refusal};

/// The table's entry of a page, without its id: its place in the table gives that.
#[derive(Clone, Debug)]
pub struct PageEntry {
    /// The page's version.
    pub epoch: Epoch,
    /// The batch that changed the page last, or moved it.
    pub lsn: Lsn,
    shape: PageShape,
}

/// All that a table says of a page besides its numbers: length, place, key and metadata.
#[derive(Clone, Debug)]
pub struct PageShape {
    /// The length, and where that cannot reach the place.
    len_and_place: u64,
    /// The parts that few pages have.
    named: Option<Arc<NamedEntry>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct NamedEntry {
    key: Option<Key>,
    metadata: SharedMetadata,
}

/// The length takes the bits below this one, the place those from there on.
const PLACE_BIT: u32 = u64::BITS - u16::BITS;
const _: () = assert!(PAGE_LEN_MAX < 1 << PLACE_BIT);
const _: () = assert!(size_of::<PageEntry>() == 32);

fn pack(len: u64, place: Place) -> u64 {
    assert!(len <= PAGE_LEN_MAX, "a page of {len} bytes in place {place}");
    len | u64::from(place.to_bits()) << PLACE_BIT
}

impl PageShape {
    /// The page's length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a page of no bytes is as good as any other")]
    pub fn len(&self) -> u64 {
        self.len_and_place & ((1 << PLACE_BIT) - 1)
    }

    /// The page's place.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::from_bits((self.len_and_place >> PLACE_BIT) as u16).expect("packed from a place")
    }

    /// The user's name for the page.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.named.as_ref()?.key.as_ref()
    }

    fn metadata(&self) -> SharedMetadata {
        self.named.as_ref().map(|named| named.metadata.clone()).unwrap_or_default()
    }

    /// The page as a [`PageInfo`], with these numbers.
    #[must_use]
    pub fn info(&self, page: PageId, epoch: Epoch, lsn: Lsn) -> PageInfo {
        let (key, metadata) = (self.key().cloned(), self.metadata());
        PageInfo { page, key, len: self.len(), epoch, lsn, place: self.place(), metadata }
    }

    /// Becomes a newer shape of the same page, with the same key. Parts that both share are left alone:
    /// others share them too, and their reference counts are dear to change if several threads do it at once.
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

    /// Whether a newer state of the page differs by its numbers and its place alone, as far as that is known
    /// without a look at the metadata.
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

/// A shape without named parts equals one whose name and metadata are empty.
impl PartialEq for PageShape {
    fn eq(&self, other: &Self) -> bool {
        self.len_and_place == other.len_and_place
            && self.key() == other.key()
            && (self.named.is_none() && other.named.is_none() || self.metadata() == other.metadata())
    }
}

impl PageEntry {
    /// The page's length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a page of no bytes is as good as any other")]
    pub fn len(&self) -> u64 {
        self.shape.len()
    }

    /// The page's place.
    #[must_use]
    pub fn place(&self) -> Place {
        self.shape.place()
    }

    /// The user's name for the page.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.shape.key()
    }

    /// All that it says besides the numbers.
    #[must_use]
    pub fn shape(&self) -> &PageShape {
        &self.shape
    }

    /// The page as a [`PageInfo`].
    #[must_use]
    pub fn info(&self, page: PageId) -> PageInfo {
        self.shape.info(page, self.epoch, self.lsn)
    }

    /// Becomes a newer state of the same page, with the same key.
    pub(super) fn become_newer(&mut self, newer: &PageInfo) {
        (self.epoch, self.lsn) = (newer.epoch, newer.lsn);
        self.shape.become_newer(newer);
    }

    /// The range of a change of bytes must lie within the page.
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

/// The range of a change of bytes must lie within its page.
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
    fn an_entry_is_all_that_is_known_of_its_page() {
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
                // It becomes the state that it was made from, whatever it was before.
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
