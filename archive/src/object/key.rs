//! Names of the objects of an archive.

use std::fmt;

use remanent_format::limits::NUMBER_MAX;

/// A folder of an archive: the part of a name before the last slash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Folder {
    /// The folder `line`, which contains fences, runs, manifests and boundaries.
    Line,
    /// The folder `bound`, which contains the copies of boundaries.
    Bound,
    /// The folder `data`, which contains parts of files and of long runs.
    Data,
}

impl Folder {
    /// Returns the name of the folder within the archive.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Folder::Line => "line",
            Folder::Bound => "bound",
            Folder::Data => "data",
        }
    }
}

/// The key of a data object. Keys are never used twice (rule 12): a term belongs to one fence, and a writer counts its
/// data objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataKey {
    /// Term of the writer: the position of its fence.
    pub term: u64,
    /// Random number of the writer's incarnation.
    pub random: u64,
    /// Counter of the writer, from 1.
    pub index: u64,
}

/// The key of an object of an archive, which determines its name.
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
    /// A position of the line, from 1.
    Line(u64),
    /// The number of a boundary, from 1.
    Bound(u64),
    /// A data object.
    Data(DataKey),
    /// The hint, which may be missing, old or wrong.
    Newest,
    /// An object with which a probe tests the bucket. The number is random.
    Probe(u64),
}

impl ObjectKey {
    /// Parses the name of an object. Returns `None` for a name that no object of an archive has. Such a name is ignored
    /// and reported.
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

    /// Returns the numbers that represent the key in an object's header: term, random number, and number.
    #[must_use]
    pub(super) fn numbers(self) -> [u64; 3] {
        match self {
            ObjectKey::Line(number) | ObjectKey::Bound(number) | ObjectKey::Probe(number) => [0, 0, number],
            ObjectKey::Data(key) => [key.term, key.random, key.index],
            ObjectKey::Newest => [0; 3],
        }
    }
}

/// Parses exactly sixteen lower-case hexadecimal digits of a number that is not above `NUMBER_MAX`.
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
