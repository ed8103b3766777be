//! The STORE file. It contains the identity of a store, and the features that a build must support to open the store.
//!
//! The file contains a 64-byte header and a record encoded with serde and bincode. The layout of the header is the same
//! in all future versions, so that an old build can always state why it cannot open a store:
//!
//! | found in STORE | effect on the build |
//! |---|---|
//! | a version above its own, or an unknown incompatible feature | opening fails with [`Defect::Version`] |
//! | an unknown read-compatible feature | may read but not write: [`StoreFile::is_writable`] |
//! | an unknown compatible feature | ignores the bit, and keeps it |
//!
//! STORE is the last file that the creation of a store writes, so its presence proves that creation completed.
//!
//! A new store has all features that its build writes. A writer that opens an older store adds its own features to
//! STORE and syncs the file before it writes anything else ([`Features::with_written`]). A new feature requires one
//! entry in [`INCOMPATIBLE`] and one row in the table of SPEC.md.

use serde::{Deserialize, Serialize};

use crate::defect::{Defect, array, check_crc, check_equal, check_limit, check_zeros, slice};
use crate::ids::StoreId;
use crate::layout::layout;
use crate::limits::{ANCESTORS_MAX, IDENTITY_LEN_MAX, STORE_RECORD_LEN_MAX};
use crate::segment::FORMAT_VERSION;
use crate::value::{bincode_config, decode_all};

/// Magic bytes at the start of the STORE file.
pub const STORE_MAGIC: [u8; 8] = *b"RMNTSTOR";

/// The incompatible features that this build supports and writes. Each entry is a bit number and a name, as in SPEC.md.
pub const INCOMPATIBLE: &[(u32, &str)] = &[(0, "floor"), (1, "thin"), (2, "overlays")];

/// Bit set of the read-compatible features that this build supports. None exist yet.
const KNOWN_READ_COMPATIBLE: u32 = 0;
/// Bit set of the features in [`INCOMPATIBLE`].
const KNOWN_INCOMPATIBLE: u32 = bits(INCOMPATIBLE);

const fn bits(features: &[(u32, &str)]) -> u32 {
    let (mut bits, mut at) = (0, 0);
    while at < features.len() {
        let bit = 1 << features[at].0;
        assert!(bits & bit == 0); // Two features must not share a bit.
        bits |= bit;
        at += 1;
    }
    bits
}

layout! {
    /// The encoded header of STORE.
    pub struct StoreHeaderRaw: 64 {
        /// Magic bytes, always `RMNTSTOR`.
        0 => magic: [u8; 8],
        /// Format version; always 1.
        8 => version: u32,
        /// Bit set of the features that a build can ignore.
        12 => compatible: u32,
        /// Bit set of the features that a build can ignore if it only reads.
        16 => read_compatible: u32,
        /// Bit set of the features that a build must support.
        20 => incompatible: u32,
        /// The id of the store.
        24 => store: StoreId,
        /// Length in bytes of the record, which follows the header.
        40 => record_len: u32,
        /// CRC-32 of the record.
        44 => record_crc: u32,
        /// Reserved, always zero.
        48 => reserved: [u8; 12],
        /// CRC-32 of the preceding bytes.
        60 => header_crc: u32,
    }
}

/// The features that a store uses, as three sets of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Bit set of the features that a build can ignore when it reads or writes.
    pub compatible: u32,
    /// Bit set of the features that a build can ignore when it only reads.
    pub read_compatible: u32,
    /// Bit set of the features that a build must support to open the store.
    pub incompatible: u32,
}

impl Features {
    /// All features that this build writes.
    pub const WRITTEN: Self =
        Self { compatible: 0, read_compatible: KNOWN_READ_COMPATIBLE, incompatible: KNOWN_INCOMPATIBLE };

    /// Returns the union of these features and the features of this build. The caller must write the result to STORE
    /// before the caller writes any other file.
    #[must_use]
    pub const fn with_written(self) -> Self {
        Self {
            compatible: self.compatible | Self::WRITTEN.compatible,
            read_compatible: self.read_compatible | Self::WRITTEN.read_compatible,
            incompatible: self.incompatible | Self::WRITTEN.incompatible,
        }
    }

    /// Returns true if the store uses the incompatible feature with this bit number.
    #[must_use]
    pub const fn has(self, bit: u32) -> bool {
        self.incompatible & (1 << bit) != 0
    }
}

/// The part of STORE that the creator of the store supplies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRecord {
    /// Fingerprint of the layout of the caller's data within pages, or `None` if the creator supplied no fingerprint.
    /// An open compares this value with the fingerprint in its options.
    pub layout_fingerprint: Option<[u8; 32]>,
    /// Bytes that identify the application. Only the caller interprets them.
    #[serde(
        serialize_with = "crate::value::serialize_bytes",
        deserialize_with = "crate::value::deserialize_bytes"
    )]
    pub identity: Vec<u8>,
    /// Time at which the store was created, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Ids of the stores that this store was forked from. This store may use their image files.
    pub ancestors: Vec<StoreId>,
}

impl StoreRecord {
    fn check(&self) -> Result<(), Defect> {
        check_limit("identity length", self.identity.len() as u64, IDENTITY_LEN_MAX as u64)?;
        check_limit("number of ancestors", self.ancestors.len() as u64, ANCESTORS_MAX as u64)
    }
}

/// The decoded content of a STORE file.
///
/// ```
/// use remanent_format::StoreId;
/// use remanent_format::store::{Features, StoreFile, StoreRecord};
/// let record = StoreRecord { identity: b"llama".to_vec(), ..StoreRecord::default() };
/// let file = StoreFile { store: StoreId([7; 16]), features: Features::default(), record };
/// assert_eq!(StoreFile::decode(&file.encode()?)?, file);
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFile {
    /// The id of the store.
    pub store: StoreId,
    /// The features that the store uses.
    pub features: Features,
    /// The record that the creator of the store supplied.
    pub record: StoreRecord,
}

impl StoreFile {
    /// Encodes the file.
    ///
    /// # Errors
    /// Returns [`Defect::Limit`] if the identity blob is too long or there are too many ancestors.
    pub fn encode(&self) -> Result<Vec<u8>, Defect> {
        self.record.check()?;
        let record = bincode::serde::encode_to_vec(&self.record, bincode_config())
            .map_err(|error| Defect::Metadata(error.to_string()))?;
        let mut raw = StoreHeaderRaw {
            magic: STORE_MAGIC,
            version: FORMAT_VERSION,
            compatible: self.features.compatible,
            read_compatible: self.features.read_compatible,
            incompatible: self.features.incompatible,
            store: self.store,
            record_len: u32::try_from(record.len()).expect("the identity's limit bounds the record"),
            record_crc: crc32fast::hash(&record),
            reserved: [0; 12],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        let mut out = raw.to_bytes().to_vec();
        out.extend_from_slice(&record);
        Ok(out)
    }

    /// Decodes and checks the file.
    ///
    /// # Errors
    /// Returns [`Defect::Version`] if this build is too old for the store, or another [`Defect`] if the file is
    /// damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, Defect> {
        let header: &[u8; StoreHeaderRaw::LEN] = array(bytes, 0)?;
        let raw = StoreHeaderRaw::from_bytes(header);
        if raw.magic != STORE_MAGIC {
            return Err(Defect::Magic { expected: "STORE file" });
        }
        check_crc("STORE header", raw.header_crc, &header[..60])?;
        let unknown = raw.incompatible & !KNOWN_INCOMPATIBLE;
        if raw.version > FORMAT_VERSION || unknown != 0 {
            return Err(Defect::Version { version: raw.version, features: unknown });
        }
        if raw.version == 0 {
            return Err(Defect::Field { what: "format version", found: 0 });
        }
        check_zeros("reserved STORE bytes", &raw.reserved)?;
        check_limit("STORE record length", raw.record_len.into(), STORE_RECORD_LEN_MAX as u64)?;
        let record = slice(bytes, StoreHeaderRaw::LEN, raw.record_len as usize)?;
        check_equal("STORE length", bytes.len() as u64, (StoreHeaderRaw::LEN + record.len()) as u64)?;
        check_crc("STORE record", raw.record_crc, record)?;
        let record: StoreRecord = decode_all(std::marker::PhantomData, record)?;
        record.check()?;
        let features = Features {
            compatible: raw.compatible,
            read_compatible: raw.read_compatible,
            incompatible: raw.incompatible,
        };
        Ok(Self { store: raw.store, features, record })
    }

    /// Returns true if `store` is this store or one of its ancestors. Image files of these stores may be in the
    /// directory of this store.
    #[must_use]
    pub fn shares_images_of(&self, store: StoreId) -> bool {
        store == self.store || self.record.ancestors.contains(&store)
    }

    /// Returns true if this build may write to the store, which requires support for all read-compatible features.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.features.read_compatible & !KNOWN_READ_COMPATIBLE == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> StoreFile {
        StoreFile {
            store: StoreId([0x5a; 16]),
            features: Features::default(),
            record: StoreRecord {
                layout_fingerprint: Some([9; 32]),
                identity: b"mine".to_vec(),
                created_unix_ms: 1_700_000_000_123,
                ancestors: vec![StoreId([1; 16]), StoreId([2; 16])],
            },
        }
    }

    /// Encodes the sample with a modified header and the checksum of that header.
    fn with_header(change: impl FnOnce(&mut StoreHeaderRaw)) -> Vec<u8> {
        let mut bytes = sample().encode().unwrap();
        let mut raw = StoreHeaderRaw::from_bytes(bytes[..64].try_into().unwrap());
        change(&mut raw);
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        bytes[..64].copy_from_slice(&raw.to_bytes());
        bytes
    }

    /// Encodes the sample with another record and matching checksums.
    fn with_record(record: &[u8]) -> Vec<u8> {
        let mut bytes = with_header(|raw| {
            raw.record_len = record.len() as u32;
            raw.record_crc = crc32fast::hash(record);
        });
        bytes.truncate(64);
        bytes.extend_from_slice(record);
        bytes
    }

    #[test]
    fn store_round_trips_to_the_same_bytes() {
        let ancestors = vec![StoreId([3; 16]); ANCESTORS_MAX];
        let longest = StoreRecord { identity: vec![1; IDENTITY_LEN_MAX], ancestors, ..sample().record };
        for record in [sample().record, StoreRecord::default(), longest] {
            let file = StoreFile { record, ..sample() };
            let bytes = file.encode().unwrap();
            let decoded = StoreFile::decode(&bytes).unwrap();
            assert_eq!(decoded, file);
            assert_eq!(decoded.encode().unwrap(), bytes);
        }
    }

    #[test]
    fn every_truncation_and_bit_flip_of_store_file_is_refused() {
        let bytes = sample().encode().unwrap();
        for len in 0..bytes.len() {
            let found = StoreFile::decode(&bytes[..len]);
            assert!(matches!(found, Err(Defect::Truncated { .. })), "cut to {len}: {found:?}");
        }
        for bit in (0..8 * bytes.len()).step_by(crate::CASES_STEP) {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let found = StoreFile::decode(&damaged);
            assert!(
                matches!(found, Err(Defect::Magic { .. } | Defect::Checksum { .. })),
                "bit {bit}: {found:?}"
            );
        }
        let longer = [bytes, vec![0]].concat();
        assert!(matches!(StoreFile::decode(&longer), Err(Defect::Mismatch { what: "STORE length", .. })));
    }

    #[test]
    fn features_and_version_restrict_reading_and_writing() {
        let compatible = StoreFile::decode(&with_header(|raw| raw.compatible = 1)).unwrap();
        assert!(compatible.is_writable());
        assert_eq!(compatible.features.compatible, 1);
        assert!(!StoreFile::decode(&with_header(|raw| raw.read_compatible = 4)).unwrap().is_writable());
        assert_eq!(
            StoreFile::decode(&with_header(|raw| raw.incompatible = 3 << 30)),
            Err(Defect::Version { version: 1, features: 3 << 30 })
        );
        // The error lists only the unsupported features.
        assert_eq!(
            StoreFile::decode(&with_header(|raw| raw.incompatible = u32::MAX)),
            Err(Defect::Version { version: 1, features: !KNOWN_INCOMPATIBLE })
        );
        assert_eq!(
            StoreFile::decode(&with_header(|raw| raw.version = 2)),
            Err(Defect::Version { version: 2, features: 0 })
        );
        assert_eq!(
            StoreFile::decode(&with_header(|raw| raw.version = 0)),
            Err(Defect::Field { what: "format version", found: 0 })
        );
    }

    #[test]
    fn adding_written_features_keeps_existing_features() {
        let old = Features { compatible: 5, ..Features::default() };
        let new = old.with_written();
        assert_eq!(new, Features { compatible: 5, ..Features::WRITTEN });
        assert_eq!(new.with_written(), new);
        for (bit, name) in INCOMPATIBLE {
            assert!(new.has(*bit) && !old.has(*bit), "{name}");
        }
        let file = StoreFile { features: new, ..sample() };
        assert_eq!(StoreFile::decode(&file.encode().unwrap()), Ok(file.clone()));
        assert!(file.is_writable());
    }

    #[test]
    fn invalid_fields_with_valid_checksums_are_refused() {
        let record = &sample().encode().unwrap()[64..];
        let mut option_of_2 = record.to_vec();
        option_of_2[0] = 2;
        let mut identity_too_long = record.to_vec();
        identity_too_long[33..41].copy_from_slice(&u64::MAX.to_le_bytes());
        for (why, bytes) in [
            ("reserved bytes", with_header(|raw| raw.reserved[11] = 1)),
            ("an option tag of 2", with_record(&option_of_2)),
            ("an identity longer than the record", with_record(&identity_too_long)),
            ("bytes after the record", with_record(&[record, &[0]].concat())),
            ("a record too short", with_record(&record[..record.len() - 1])),
        ] {
            let found = StoreFile::decode(&bytes);
            assert!(matches!(found, Err(Defect::Field { .. } | Defect::Metadata(_))), "{why}: {found:?}");
        }
        let found = StoreFile::decode(&with_header(|raw| raw.record_len = u32::MAX));
        assert!(matches!(found, Err(Defect::Limit { what: "STORE record length", .. })), "{found:?}");
        let too_long = StoreRecord { identity: vec![0; IDENTITY_LEN_MAX + 1], ..sample().record };
        let found = StoreFile { record: too_long, ..sample() }.encode();
        assert!(matches!(found, Err(Defect::Limit { what: "identity length", .. })), "{found:?}");
        let too_many =
            StoreRecord { ancestors: vec![StoreId([0; 16]); ANCESTORS_MAX + 1], ..sample().record };
        let found = StoreFile { record: too_many, ..sample() }.encode();
        assert!(matches!(found, Err(Defect::Limit { what: "number of ancestors", .. })), "{found:?}");
    }
}
