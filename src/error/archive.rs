//! Failures of the archive of a store.

use std::fmt;

use remanent_format::SnapshotId;

/// A failure of the archive of a store, for [`Error::Archive`](super::Error::Archive).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveError {
    /// The URL of the archive, without credentials, or an empty text if there is no archive or `reason` names the URL.
    pub url: String,
    /// The kind of failure.
    pub kind: ArchiveErrorKind,
    /// The details of the failure, in words.
    pub reason: String,
}

/// The kinds of failures of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArchiveErrorKind {
    /// The call needs an archive, but the store was opened without one.
    NoArchive,
    /// The URL or a setting cannot be used.
    Settings,
    /// Another directory of the store has taken over the archive. The store is poisoned and acknowledges no more
    /// batches.
    Superseded,
    /// The end of the archive is not in the history of this directory. The archive was not changed.
    Diverged,
    /// The archive is empty, or lacks batches that this directory has archived before. The archive was not changed.
    Lost,
    /// The archive belongs to another store. The archive was not changed.
    OtherStore,
    /// A request to the bucket failed.
    Bucket,
    /// The bucket lacks an ability that an archive needs.
    Unsupported,
    /// An object of the archive is damaged or missing.
    Damaged,
    /// An object would exceed a limit of archives.
    Limit,
    /// The directory of the store could not be read for the archive.
    Directory,
    /// The call needs a named snapshot, because an archive keeps only named snapshots permanently.
    Unnamed,
    /// The store is archived while it is open, but this open does not specify the archive. Nothing was changed.
    NotGiven,
}

impl ArchiveError {
    /// Returns the error for a snapshot without a name. An archive keeps such a snapshot only until it contains a newer
    /// one.
    pub(crate) fn unnamed(snapshot: SnapshotId) -> Self {
        let reason = format!("snapshot {snapshot} has no name");
        Self { url: String::new(), kind: ArchiveErrorKind::Unnamed, reason }
    }

    /// Returns the error for an open without the archive that follows the store.
    pub(crate) fn not_given(url: String) -> Self {
        let reason = "it follows this store, but the open does not name it".to_owned();
        Self { url, kind: ArchiveErrorKind::NotGiven, reason }
    }

    /// Returns the error for a store that has no archive.
    pub(crate) fn absent() -> Self {
        let reason = "the store has no archive".to_owned();
        Self { url: String::new(), kind: ArchiveErrorKind::NoArchive, reason }
    }
}

impl fmt::Display for ArchiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.url.as_str() {
            "" => f.write_str(&self.reason),
            url => write!(f, "the archive {url}: {}", self.reason),
        }
    }
}
