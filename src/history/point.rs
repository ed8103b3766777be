//! Identifiers of states in a store's history, and their text form.

use std::fmt;
use std::str::FromStr;

use remanent_format::{Lsn, SnapshotId};

use crate::error::{Error, Invalid, Result};

/// An earlier state of a store, identified by its batch, a snapshot, or the name of a snapshot.
///
/// The Rust API, the Python package and the command parse the same text:
///
/// | text | state |
/// |---|---|
/// | `lsn:12` | after batch 12 |
/// | `snapshot:3` | at the end of snapshot 3 |
/// | `name:tuned` | at the end of the snapshot named `tuned` |
/// | any other text, such as `tuned` or `step:120` | at the end of the snapshot of that name |
///
/// A name that consists only of digits or starts like another form must be written with `name:`.
///
/// ```
/// use remanent::{Lsn, StatePoint};
/// let point: StatePoint = "lsn:12".parse()?;
/// assert_eq!(point, StatePoint::Lsn(Lsn(12)));
/// let named: StatePoint = "before tuning".parse()?;
/// assert_eq!(named.to_string(), "name:before tuning");
/// assert_eq!(named.to_string().parse::<StatePoint>()?, named);
/// assert!("12".parse::<StatePoint>().is_err());
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StatePoint {
    /// `lsn:N`: the state right after batch N.
    Lsn(Lsn),
    /// `snapshot:N`: the state at the end of snapshot N.
    Snapshot(SnapshotId),
    /// `name:S` or the name alone: the state at the end of the snapshot with that name.
    Name(String),
}

impl From<Lsn> for StatePoint {
    fn from(lsn: Lsn) -> Self {
        Self::Lsn(lsn)
    }
}

impl From<SnapshotId> for StatePoint {
    fn from(snapshot: SnapshotId) -> Self {
        Self::Snapshot(snapshot)
    }
}

impl From<&StatePoint> for StatePoint {
    fn from(point: &StatePoint) -> Self {
        point.clone()
    }
}

impl TryFrom<&str> for StatePoint {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for StatePoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refused = || Error::Invalid(Invalid::StatePoint { found: text.to_owned() });
        let (kind, rest) = text.split_once(':').unwrap_or(("", text));
        let number = || rest.parse().map_err(|_| refused());
        match kind {
            "lsn" => Ok(Self::Lsn(Lsn(number()?))),
            "snapshot" => Ok(Self::Snapshot(SnapshotId(number()?))),
            "name" if !rest.is_empty() => Ok(Self::Name(rest.to_owned())),
            _ if is_like_another_form(kind, text) => Err(refused()),
            _ => Ok(Self::Name(text.to_owned())),
        }
    }
}

/// Returns whether `text` was probably not intended as a snapshot name.
fn is_like_another_form(kind: &str, text: &str) -> bool {
    let kinds = ["lsn", "snapshot", "name"];
    // `all` is also true for the empty text.
    text.bytes().all(|byte| byte.is_ascii_digit())
        || kinds.iter().any(|known| kind.eq_ignore_ascii_case(known))
}

impl fmt::Display for StatePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lsn(lsn) => write!(f, "lsn:{}", lsn.0),
            Self::Snapshot(id) => write!(f, "snapshot:{}", id.0),
            Self::Name(name) => write!(f, "name:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_parse_as_they_are_displayed() {
        let names =
            ["step:120", "12", "lsn:3", "Snapshot:x", "name:"].map(|name| StatePoint::Name(name.to_owned()));
        let numbers =
            [StatePoint::Lsn(Lsn(0)), StatePoint::Lsn(Lsn(u64::MAX)), StatePoint::Snapshot(SnapshotId(7))];
        for point in numbers.into_iter().chain(names) {
            assert_eq!(point.to_string().parse::<StatePoint>().unwrap(), point);
        }
    }

    #[test]
    fn bare_text_is_a_name() {
        for name in ["warm", "step:120", "step 12", "lsn", "a:b:c", "12x", "lsn 1", "-1"] {
            assert_eq!(name.parse::<StatePoint>().unwrap(), StatePoint::Name(name.to_owned()));
        }
    }

    #[test]
    fn ambiguous_state_text_is_refused() {
        for text in ["", "12", "lsn:", "lsn:-1", "lsn:1x", "snapshot:", "name:", "Lsn:1", "NAME:a"] {
            let error = text.parse::<StatePoint>().unwrap_err();
            let expected = format!("expected lsn:N, snapshot:N or the name of a snapshot, found {text:?}; ");
            assert!(error.to_string().starts_with(&expected), "{error}");
        }
    }
}
