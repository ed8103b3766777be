//! The encoding of a page's description, and of a store's state without the contents of its pages.

use std::sync::Arc;

use remanent_format::limits::{DEVICE_ORDINAL_MAX, METADATA_LEN_MAX, NUMBER_MAX, PAGE_LEN_MAX, ROOT_LEN_MAX};
use remanent_format::value::{decode_metadata, encode_metadata};
use remanent_format::{
    Epoch, Incarnation, Key, Lsn, Metadata, PageId, PageInfo, PageTable, Place, SharedMetadata, StoreId,
};

use super::message::Refusal;
use super::wire::{Reader, Writer};
use crate::base::allocation::{make_room, push};
use crate::error::{Error, NixlError, Result};
use crate::store::Store;

/// The magic number and the version of an encoded state.
const MAGIC: [u8; 4] = *b"RMNs";
const VERSION: u8 = 1;

/// The origin of a state: a store, and an open of the store. Within one origin, the epoch of a page identifies its
/// bytes. A batch that a crash lost belongs to another incarnation, and thus to another origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub store: StoreId,
    pub incarnation: Incarnation,
}

/// The pages, their keys and metadata, and the root of a store after one batch.
#[derive(Debug)]
pub(super) struct State {
    pub origin: Origin,
    pub table: PageTable,
}

const fn invalid(reason: &'static str) -> NixlError {
    NixlError::InvalidMetadata { reason }
}

/// Encodes the description of a page.
///
/// # Errors
/// A [`Refusal`] if the metadata of the page cannot be encoded.
pub(super) fn encode_page(info: &PageInfo) -> Result<Vec<u8>, Refusal> {
    let (kind, ordinal) = info.place.to_raw();
    let metadata = match info.metadata.is_empty() {
        true => Vec::new(),
        false => encoded(&info.metadata, METADATA_LEN_MAX)?,
    };
    let key = info.key.as_ref().map_or(&[][..], Key::as_bytes);
    let numbers = [info.page.0, info.epoch.0, info.lsn.0, info.len, ordinal.into()];
    let writer = numbers.into_iter().fold(Writer::part(), Writer::u64);
    Ok(writer.u8(kind).bytes(key).bytes(&metadata).into_bytes())
}

/// Decodes the description of a page.
///
/// # Errors
/// `InvalidMetadata`.
pub(super) fn decode_page(bytes: &[u8]) -> Result<PageInfo, NixlError> {
    let mut reader = Reader::part(bytes);
    let [page, epoch, lsn, len, ordinal] = reader.numbers()?;
    let ordinal = u32::try_from(ordinal).ok().filter(|ordinal| *ordinal <= DEVICE_ORDINAL_MAX);
    let kind = reader.u8()?;
    let place = ordinal.and_then(|ordinal| Place::from_raw(kind, ordinal));
    let place = place.ok_or(invalid("the place of a page is unknown"))?;
    if page == 0 || [page, epoch, lsn].into_iter().any(|number| number > NUMBER_MAX) || len > PAGE_LEN_MAX {
        return Err(invalid("a number of a page exceeds its limit"));
    }
    let key = match reader.bytes()? {
        [] => None,
        key => Some(Key::new(key).map_err(|_| invalid("a key is too long"))?),
    };
    let metadata = match reader.bytes()? {
        [] => SharedMetadata::default(),
        metadata => decoded(metadata, METADATA_LEN_MAX)?.into(),
    };
    reader.finish()?;
    let mut info = PageInfo::new(PageId(page), len, place);
    (info.key, info.metadata, info.epoch, info.lsn) = (key, metadata, Epoch(epoch), Lsn(lsn));
    Ok(info)
}

fn encoded(metadata: &Metadata, limit: usize) -> Result<Vec<u8>, Refusal> {
    encode_metadata(metadata, limit).map_err(|defect| Refusal::Failed(defect.to_string()))
}

fn decoded(bytes: &[u8], limit: usize) -> Result<Metadata, NixlError> {
    match decode_metadata(bytes, limit) {
        Ok((metadata, len)) if len == bytes.len() => Ok(metadata),
        _ => Err(invalid("the metadata of a page or the root is damaged")),
    }
}

impl State {
    /// Encodes the newest state of a store.
    ///
    /// # Errors
    /// A [`Refusal`] if the state cannot be encoded.
    pub fn encode(store: &Store) -> Result<Vec<u8>, Refusal> {
        let failed = |error: Error| Refusal::Failed(error.to_string());
        let view = store.view().map_err(failed)?;
        let incarnation = store.recovered().position.incarnation;
        let pages = view.pages();
        let numbers =
            [incarnation.number.into(), incarnation.random.into(), view.lsn().0, pages.len() as u64];
        let writer = Writer::new(MAGIC, VERSION).bytes(&store.id().0);
        let mut writer = numbers.into_iter().fold(writer, Writer::u64);
        for info in pages {
            writer = writer.try_bytes(&encode_page(&info)?).map_err(failed)?;
        }
        let root = encoded(&view.root(), ROOT_LEN_MAX)?;
        Ok(writer.try_bytes(&root).map_err(failed)?.finish())
    }

    /// Decodes a state. Allocates memory only for the pages that `bytes` contains, not for a larger stated number of
    /// pages.
    ///
    /// # Errors
    /// `InvalidMetadata`, `OtherPeerVersion`, `OutOfMemory`.
    pub fn decode(peer: &str, bytes: &[u8]) -> Result<Self> {
        let (version, mut reader) = Reader::open(bytes, MAGIC)?;
        if version != VERSION {
            return Err(super::metadata::other_message_version(peer, version, VERSION).into());
        }
        let store =
            reader.bytes()?.try_into().map_err(|_| invalid("the id of the store has another length"))?;
        let [number, random, lsn, count] = reader.numbers()?;
        let (Ok(number), Ok(random)) = (u32::try_from(number), u32::try_from(random)) else {
            return Err(invalid("the incarnation of the store exceeds its limit").into());
        };
        let mut pages: Vec<PageInfo> = Vec::new();
        for _ in 0..count {
            let info = decode_page(reader.bytes()?)?;
            if pages.last().is_some_and(|before| before.page >= info.page) || info.lsn.0 > lsn {
                return Err(invalid("the pages are not in the order of their ids, or are too new").into());
            }
            push(&mut pages, info)?;
        }
        let root = Arc::new(decoded(reader.bytes()?, ROOT_LEN_MAX)?);
        reader.finish()?;
        let mut table = PageTable::from_parts(pages, root, 0, Epoch(0), Lsn(lsn));
        table.index_keys().map_err(|_| invalid("two pages have the same key"))?;
        let origin = Origin { store: StoreId(store), incarnation: Incarnation { number, random } };
        Ok(Self { origin, table })
    }
}

/// The parts of an encoded state that have arrived.
#[derive(Default)]
pub(super) struct Parts {
    /// The length of the whole state in bytes, as stated with the first part.
    len: Option<u64>,
    bytes: Vec<u8>,
}

impl Parts {
    /// Returns the offset of the next part in bytes.
    pub fn offset(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Appends a part of a state of `len` bytes. Returns the encoded state once it is complete. Memory is allocated
    /// only for bytes that have arrived.
    ///
    /// # Errors
    /// `OutOfMemory`, or `None` if the part is inconsistent with the earlier parts.
    pub fn add(&mut self, len: u64, part: &[u8]) -> Result<Option<&[u8]>, Option<Error>> {
        let left = len.checked_sub(self.offset()).ok_or(None)?;
        if *self.len.get_or_insert(len) != len || part.is_empty() || part.len() as u64 > left {
            return Err(None);
        }
        make_room(&mut self.bytes, part.len()).map_err(Some)?;
        self.bytes.extend_from_slice(part);
        Ok((part.len() as u64 == left).then_some(&self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remanent_format::Value;

    fn page(id: u64, key: Option<&str>) -> PageInfo {
        let mut info = PageInfo::new(PageId(id), 4096, Place::Device(3));
        info.key = key.map(|key| Key::new(key).unwrap());
        info.metadata = Metadata::from([("kind".to_owned(), Value::from("block"))]).into();
        (info.epoch, info.lsn) = (Epoch(5), Lsn(6));
        info
    }

    fn state(pages: &[PageInfo], count: u64, lsn: u64) -> Vec<u8> {
        let writer = Writer::new(MAGIC, VERSION).bytes(&[7; 16]);
        let writer = [1, 2, lsn, count].into_iter().fold(writer, Writer::u64);
        let add = |writer: Writer, page: &PageInfo| writer.bytes(&encode_page(page).unwrap());
        let root = encode_metadata(&Metadata::from([("step".to_owned(), Value::from(9u64))]), ROOT_LEN_MAX);
        pages.iter().fold(writer, add).bytes(&root.unwrap()).finish()
    }

    fn reason(bytes: &[u8]) -> &'static str {
        match State::decode("a-1", bytes) {
            Err(Error::Nixl(error)) => match *error {
                NixlError::InvalidMetadata { reason } => reason,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn page_round_trips_and_wrong_numbers_are_refused() {
        for info in [page(1, Some("key")), page(NUMBER_MAX, None), PageInfo::new(PageId(2), 0, Place::Disk)] {
            let bytes = encode_page(&info).unwrap();
            assert_eq!(decode_page(&bytes), Ok(info));
            for len in 0..bytes.len() {
                assert!(decode_page(&bytes[..len]).is_err(), "{len} bytes");
            }
        }
        let good = encode_page(&page(1, Some("key"))).unwrap();
        // The id, the epoch, the Lsn, the length, the ordinal, and the kind of the place.
        for at in [0, 8, 16, 24, 32, 40] {
            let mut wrong = good.clone();
            wrong[at..(at + 8).min(41)].fill(0xFF);
            assert!(decode_page(&wrong).is_err(), "offset {at}");
        }
        let mut nobody = good;
        nobody[..8].fill(0);
        assert!(decode_page(&nobody).is_err());
    }

    #[test]
    fn state_round_trips_and_damage_is_detected() {
        let pages = [page(1, Some("one")), page(2, None), page(9, Some("nine"))];
        let bytes = state(&pages, 3, 6);
        let decoded = State::decode("a-1", &bytes).unwrap();
        assert_eq!(decoded.table.pages().collect::<Vec<_>>(), pages);
        assert_eq!(decoded.table.get_key("nine").unwrap().page, PageId(9));
        assert_eq!((decoded.table.lsn(), decoded.table.root()["step"].as_u64()), (Lsn(6), Some(9)));
        let incarnation = Incarnation { number: 1, random: 2 };
        assert_eq!(decoded.origin, Origin { store: StoreId([7; 16]), incarnation });
        for len in 0..bytes.len() {
            assert!(State::decode("a-1", &bytes[..len]).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert!(State::decode("a-1", &flipped).is_err(), "byte {at}");
        }
    }

    #[test]
    fn contradicting_state_is_refused() {
        let (one, two) = (page(1, Some("one")), page(2, Some("one")));
        assert_eq!(reason(&state(&[one.clone(), two.clone()], 2, 6)), "two pages have the same key");
        let order = "the pages are not in the order of their ids, or are too new";
        assert_eq!(reason(&state(&[two.clone(), one.clone()], 2, 6)), order);
        assert_eq!(reason(&state(&[one.clone(), one.clone()], 2, 6)), order);
        assert_eq!(reason(&state(std::slice::from_ref(&one), 1, 5)), order);
        // The decoder does not trust the count: it reads the root as a page, and finds no further bytes.
        assert!(State::decode("a-1", &state(&[one], u64::MAX, 6)).is_err());
        let newer = State::decode("a-1", &Writer::new(MAGIC, 2).finish()).unwrap_err();
        assert!(newer.to_string().contains("peer a-1 uses version 2"), "{newer}");
    }

    #[test]
    fn parts_that_contradict_each_other_are_refused() {
        let mut parts = Parts::default();
        assert_eq!(parts.add(5, b"ab").unwrap(), None);
        assert_eq!(parts.offset(), 2);
        for (len, part) in [(6, &b"c"[..]), (5, b""), (5, b"cdef"), (1, b"c")] {
            assert!(matches!(parts.add(len, part), Err(None)), "{len} {part:?}");
        }
        assert_eq!(parts.add(5, b"cde").unwrap(), Some(&b"abcde"[..]));
        assert!(matches!(Parts::default().add(0, b""), Err(None)));
        // A stated length that exceeds all memory causes no allocation.
        assert_eq!(Parts::default().add(u64::MAX, b"a").unwrap(), None);
    }
}
