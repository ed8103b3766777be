//! Reads and writes the file UNFETCHED: the parts of image files that a restore on demand left in the archive.
//!
//! The restore publishes the file before STORE, and creates the image files with holes. While the file exists, only an
//! open with the archive accepts the directory; all other readers return an error. That open fetches the parts, and
//! removes the file once all parts are durable.

use std::collections::BTreeMap;

use remanent_format::layout::layout;
use remanent_format::limits::NUMBER_MAX;
use remanent_format::{Defect, StoreId};

use crate::line::ListedPart;
use crate::object::{DataKey, DataRef, PART_LEN_MAX, Part, Role};

const MAGIC: [u8; 8] = *b"RMNTUNFE";
const VERSION: u32 = 1;
/// Maximum number of parts in the file.
const PARTS_MAX: usize = 1 << 24;

layout! {
    /// The encoded header of UNFETCHED.
    pub struct UnfetchedFileRaw: 48 {
        /// Magic bytes, always `RMNTUNFE`.
        0 => magic: [u8; 8],
        /// Version of the file; always 1.
        8 => version: u32,
        /// Number of parts.
        12 => parts: u32,
        /// The id of the store.
        16 => store: StoreId,
        /// CRC-32 of the parts.
        32 => body_crc: u32,
        /// Reserved, always zero.
        36 => reserved: u64,
        /// CRC-32 of the preceding bytes.
        44 => header_crc: u32,
    }
}

layout! {
    /// A part in UNFETCHED.
    pub struct UnfetchedPartRaw: 64 {
        /// Term in the key of the data object that contains the part.
        0 => term: u64,
        /// Random number in the key.
        8 => random: u64,
        /// Number in the key.
        16 => index: u64,
        /// Length of the part in bytes.
        24 => len: u64,
        /// CRC-64 of the part.
        32 => crc: u64,
        /// Number of the image file.
        40 => file: u64,
        /// Offset of the part in the file.
        48 => offset: u64,
        /// A position of the line. The data object is not deleted while the archive keeps the line from this position
        /// on.
        56 => lister: u64,
    }
}

/// The parts of image files that only the archive contains, by file number and offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnfetchedParts {
    /// Id of the store.
    pub store: StoreId,
    /// The parts of each file.
    pub files: BTreeMap<u64, BTreeMap<u64, ListedPart>>,
}

impl UnfetchedParts {
    /// Maximum length of the file in bytes.
    pub const LEN_MAX: u64 = (UnfetchedFileRaw::LEN + PARTS_MAX * UnfetchedPartRaw::LEN) as u64;

    /// Creates the list from `parts`, which are in the order in which the archive lists them. If two parts of a file
    /// have the same offset, the later one is kept.
    #[must_use]
    pub fn new(store: StoreId, parts: impl IntoIterator<Item = ListedPart>) -> Self {
        let mut files: BTreeMap<u64, BTreeMap<u64, ListedPart>> = BTreeMap::new();
        for listed in parts {
            let part = listed.entry.part;
            files.entry(part.file).or_default().insert(part.offset, listed);
        }
        Self { store, files }
    }

    /// Returns the length of an image file in bytes, which is the end of its last part.
    #[must_use]
    pub fn len_of(parts: &BTreeMap<u64, ListedPart>) -> u64 {
        parts.values().map(|listed| listed.entry.part.offset + listed.entry.part.len).max().unwrap_or(0)
    }

    /// Returns the content of the file UNFETCHED.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let parts = || self.files.values().flat_map(BTreeMap::values);
        let mut body = Vec::with_capacity(parts().count() * UnfetchedPartRaw::LEN);
        for ListedPart { entry: DataRef { key, part }, lister, .. } in parts() {
            let (term, random, index) = (key.term, key.random, key.index);
            let (len, crc, file, offset) = (part.len, part.crc, part.file, part.offset);
            let raw = UnfetchedPartRaw { term, random, index, len, crc, file, offset, lister: *lister };
            body.extend_from_slice(&raw.to_bytes());
        }
        let mut raw = UnfetchedFileRaw {
            magic: MAGIC,
            version: VERSION,
            parts: parts().count() as u32,
            store: self.store,
            body_crc: crc32fast::hash(&body),
            reserved: 0,
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..44]);
        let mut bytes = raw.to_bytes().to_vec();
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Decodes the content of the file.
    ///
    /// # Errors
    /// Returns a [`Defect`] that names the first invalid field.
    pub fn decode(bytes: &[u8]) -> Result<Self, Defect> {
        let field = |what| Defect::Field { what, found: 0 };
        let (header, body) = bytes.split_first_chunk::<{ UnfetchedFileRaw::LEN }>().ok_or(field("length"))?;
        let raw = UnfetchedFileRaw::from_bytes(header);
        let count = raw.parts as usize;
        for (is_right, what) in [
            (raw.magic == MAGIC, "magic number"),
            (raw.header_crc == crc32fast::hash(&header[..44]), "header checksum"),
            (raw.version == VERSION, "version"),
            (raw.reserved == 0, "reserved bytes"),
            (count <= PARTS_MAX && body.len() == count * UnfetchedPartRaw::LEN, "number of parts"),
            (raw.body_crc == crc32fast::hash(body), "checksum"),
        ] {
            if !is_right {
                return Err(field(what));
            }
        }
        let store = raw.store;
        let mut parts = Vec::with_capacity(count);
        for entry in body.chunks_exact(UnfetchedPartRaw::LEN) {
            let raw = UnfetchedPartRaw::from_bytes(entry.try_into().map_err(|_| field("length"))?);
            let numbers = [raw.term, raw.random, raw.index, raw.file, raw.offset, raw.lister];
            if numbers.iter().any(|number| *number > NUMBER_MAX) || raw.len > PART_LEN_MAX as u64 {
                return Err(field("part"));
            }
            let key = DataKey { term: raw.term, random: raw.random, index: raw.index };
            let (file, offset, len, crc) = (raw.file, raw.offset, raw.len, raw.crc);
            let part = Part { role: Role::Images, file, offset, len, crc };
            parts.push(ListedPart { entry: DataRef { key, part }, store, lister: raw.lister });
        }
        let decoded = Self::new(store, parts);
        let ends = |listed: &ListedPart| listed.entry.part.offset + listed.entry.part.len;
        let overlap = |parts: &BTreeMap<u64, ListedPart>| {
            parts.values().zip(parts.keys().skip(1)).any(|(listed, next)| ends(listed) > *next)
        };
        if decoded.files.values().any(overlap) {
            return Err(field("parts that overlap"));
        }
        Ok(decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> UnfetchedParts {
        let store = StoreId([5; 16]);
        let part = |file, offset, index| {
            let part = Part { role: Role::Images, file, offset, len: 1000, crc: 7 * index };
            let key = DataKey { term: 3, random: 4, index };
            ListedPart { entry: DataRef { key, part }, store, lister: 9 + index }
        };
        UnfetchedParts::new(store, [part(2, 1000, 1), part(2, 0, 2), part(8, 0, 3)])
    }

    #[test]
    fn spec_tables_match_code() {
        let spec = include_str!("../../../format/SPEC.md");
        let section = spec.split_once("\n### UNFETCHED\n").unwrap().1.split_once("\n## ").unwrap().0;
        let cells = |line: &str| -> Vec<String> {
            line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
        };
        let mut rows: Vec<Vec<String>> =
            section.lines().filter(|line| line.starts_with('|')).map(cells).collect();
        rows.retain(|row| row[0].parse::<usize>().is_ok());
        let tables = [UnfetchedFileRaw::TABLE, UnfetchedPartRaw::TABLE];
        let fields = tables.iter().flat_map(|table| table.fields);
        let code =
            fields.map(|field| [field.offset.to_string(), field.size.to_string(), field.name.to_owned()]);
        assert_eq!(rows.iter().map(|row| &row[..3]).collect::<Vec<_>>(), code.collect::<Vec<_>>());
    }

    #[test]
    fn unfetched_file_round_trips() {
        let (sample, none) = (sample(), UnfetchedParts::new(StoreId([1; 16]), []));
        assert_eq!(UnfetchedParts::decode(&sample.encode()), Ok(sample));
        assert_eq!(UnfetchedParts::decode(&none.encode()), Ok(none));
    }

    #[test]
    fn later_part_at_an_offset_counts() {
        let mut parts: Vec<ListedPart> = sample().files[&2].values().copied().collect();
        let mut longer = parts[1];
        longer.entry.part.len = 5000;
        parts.push(longer);
        let unfetched = UnfetchedParts::new(parts[0].store, parts);
        assert_eq!(UnfetchedParts::len_of(&unfetched.files[&2]), 6000);
    }

    #[test]
    fn overlapping_parts_are_refused() {
        let mut parts: Vec<ListedPart> = sample().files[&2].values().copied().collect();
        parts[0].entry.part.len += 1;
        let overlapping = UnfetchedParts::new(parts[0].store, parts);
        UnfetchedParts::decode(&overlapping.encode()).unwrap_err();
    }

    #[test]
    fn every_truncation_and_bit_flip_of_unfetched_is_refused() {
        let bytes = sample().encode();
        for len in 0..bytes.len() {
            UnfetchedParts::decode(&bytes[..len]).unwrap_err();
        }
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            UnfetchedParts::decode(&damaged).unwrap_err();
        }
    }
}
