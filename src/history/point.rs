//! Points in a store's history: the earlier state that a caller means.

use std::fmt;
use std::str::FromStr;

use remanent_format::{Lsn, SnapshotId};

use crate::error::{Error, Result};

/// A state of a store that is asked for: by its batch, by a snapshot, or by a snapshot's name.
///
/// Its text is what the tool's `--at` takes.
///
/// ```
/// use remanent::{Lsn, StatePoint};
/// let point: StatePoint = "lsn:12".parse()?;
/// assert_eq!(point, StatePoint::Lsn(Lsn(12)));
/// assert_eq!("name:before tuning".parse::<StatePoint>()?.to_string(), "name:before tuning");
/// assert!("yesterday".parse::<StatePoint>().is_err());
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StatePoint {
    /// `lsn:N`: the state right after a batch.
    Lsn(Lsn),
    /// `snapshot:N`: the state at a snapshot's end.
    Snapshot(SnapshotId),
    /// `name:S`: the state at the end of the snapshot of that name.
    Name(String),
}

impl FromStr for StatePoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refused = || Error::InvalidOption {
            option: "restore point",
            reason: format!("{text:?} is none of lsn:N, snapshot:N and name:S"),
        };
        let (kind, rest) = text.split_once(':').ok_or_else(refused)?;
        let number = || rest.parse().map_err(|_| refused());
        match kind {
            "lsn" => Ok(Self::Lsn(Lsn(number()?))),
            "snapshot" => Ok(Self::Snapshot(SnapshotId(number()?))),
            "name" if !rest.is_empty() => Ok(Self::Name(rest.to_owned())),
            _ => Err(refused()),
        }
    }
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
    fn points_read_back_as_they_are_written() {
        let points = [
            StatePoint::Lsn(Lsn(0)),
            StatePoint::Lsn(Lsn(u64::MAX)),
            StatePoint::Snapshot(SnapshotId(7)),
            StatePoint::Name("step:120".to_owned()),
        ];
        for point in points {
            assert_eq!(point.to_string().parse::<StatePoint>().unwrap(), point);
        }
    }

    #[test]
    fn anything_else_is_refused_with_what_would_do() {
        for text in ["", "12", "lsn:", "lsn:-1", "lsn:1x", "snapshot:", "name:", "Lsn:1", "lsn 1"] {
            let error = text.parse::<StatePoint>().unwrap_err();
            assert!(error.to_string().contains("lsn:N, snapshot:N and name:S"), "{text}: {error}");
        }
    }
}
