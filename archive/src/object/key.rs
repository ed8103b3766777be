//! Keys of the objects of an archive.

use std::fmt;

use remanent_format::limits::NUMBER_MAX;

/// A folder of an archive: the part of a key before the last slash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Folder {
    /// The folder `line`, which contains fences, runs, manifests, catalogs and boundaries.
    Line,
    /// The folder `bound`, which contains the copies of boundaries.
    Bound,
    /// The folder `data`, which contains parts of files and of long runs.
    Data,
}

impl Folder {
    /// Returns the name of the folder, relative to the archive.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Folder::Line => "line",
            Folder::Bound => "bound",
            Folder::Data => "data",
        }
    }
}

/// The key of a data object. Keys are never used twice (rule 12): each term belongs to one fence, and the writer that
/// created the fence numbers its data objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataKey {
    /// Term of the writer: the position of its fence.
    pub term: u64,
    /// Random number of the directory's open; see [`LocalStore::random`](crate::local::LocalStore::random).
    pub random: u64,
    /// Number of the data object, starting at 1 for each writer.
    pub index: u64,
}

/// The key of an object of an archive.
///
/// ```
/// use remanent_archive::object::ObjectKey;
/// let key = ObjectKey::Line(26);
/// assert_eq!(key.to_string(), "line/000000000000001a");
/// assert_eq!(ObjectKey::parse("line/000000000000001a"), Some(key));
/// assert_eq!(ObjectKey::parse("line/1A"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKey {
    /// The line object at this position. Positions start at 1.
    Line(u64),
    /// The copy of the boundary with this number. Numbers start at 1.
    Bound(u64),
    /// A data object.
    Data(DataKey),
    /// The hint, which may be missing, old or wrong.
    Newest,
    /// An object that a probe of the bucket creates. Its number is random.
    Probe(u64),
}

impl ObjectKey {
    /// Parses a key relative to the archive. Returns `None` for a name that is not the key of an object of an archive.
    /// Listings skip and report such names.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        if name == "newest" {
            return Some(ObjectKey::Newest);
        }
        let (folder, rest) = name.split_once('/')?;
        match folder {
            "line" => number(rest).filter(|number| *number > 0).map(ObjectKey::Line),
            "bound" => number(rest).filter(|number| *number > 0).map(ObjectKey::Bound),
            "probe" => number(rest).map(ObjectKey::Probe),
            "data" => {
                let mut parts = rest.split('-');
                let mut part = || parts.next().and_then(number);
                let key = DataKey { term: part()?, random: part()?, index: part()? };
                parts.next().is_none().then_some(ObjectKey::Data(key))
            }
            _ => None,
        }
    }

    /// Returns the numbers that an object's header states for its key: term, random number, and number.
    #[must_use]
    pub(super) fn numbers(self) -> [u64; 3] {
        match self {
            ObjectKey::Line(number) | ObjectKey::Bound(number) | ObjectKey::Probe(number) => [0, 0, number],
            ObjectKey::Data(key) => [key.term, key.random, key.index],
            ObjectKey::Newest => [0; 3],
        }
    }
}

/// Parses exactly 16 lower-case hexadecimal digits. Returns `None` for a number above `NUMBER_MAX`.
fn number(text: &str) -> Option<u64> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != 16 || !text.bytes().all(is_digit) {
        return None;
    }
    u64::from_str_radix(text, 16).ok().filter(|number| *number <= NUMBER_MAX)
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ObjectKey::Line(number) => write!(f, "line/{number:016x}"),
            ObjectKey::Bound(number) => write!(f, "bound/{number:016x}"),
            ObjectKey::Data(key) => {
                write!(f, "data/{:016x}-{:016x}-{:016x}", key.term, key.random, key.index)
            }
            ObjectKey::Newest => f.write_str("newest"),
            ObjectKey::Probe(number) => write!(f, "probe/{number:016x}"),
        }
    }
}
