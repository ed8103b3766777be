//! Errors of the protocol as errors of the store.

use remanent_archive::Error as Failure;
use remanent_archive::remote::OpenError;

use crate::error::{ArchiveError, ArchiveErrorKind, Error};

/// Returns the error of the store for a failure of the archive at `url`.
pub(super) fn error_of(url: &str, failure: &Failure) -> Error {
    let kind = match failure {
        Failure::Superseded { .. } => ArchiveErrorKind::Superseded,
        Failure::Diverged { .. } => ArchiveErrorKind::Diverged,
        Failure::ArchiveLost { .. } | Failure::Empty => ArchiveErrorKind::Lost,
        Failure::IdentityMismatch { .. } => ArchiveErrorKind::OtherStore,
        Failure::NotSupported { .. } => ArchiveErrorKind::Unsupported,
        Failure::Local(_) => ArchiveErrorKind::Directory,
        Failure::Bucket { .. } | Failure::Unknown { .. } => ArchiveErrorKind::Bucket,
        Failure::TooLarge { .. } => ArchiveErrorKind::Limit,
        _ => ArchiveErrorKind::Damaged,
    };
    // The message of the protocol ends with a remedy for its own callers.
    let text = failure.to_string();
    let reason = text.split_once("; ").map_or(text.as_str(), |(reason, _)| reason).to_owned();
    ArchiveError { url: url.to_owned(), kind, reason }.into()
}

/// Returns the error of the store for a bucket that cannot be opened.
pub(super) fn error_of_open(failure: &OpenError) -> Error {
    let reason = failure.to_string();
    ArchiveError { url: String::new(), kind: ArchiveErrorKind::Settings, reason }.into()
}

/// Returns true if a later attempt may succeed: the bucket could not be reached, or a file could not be read. The line is
/// unchanged then, or its next call completes the object whose outcome is unknown.
pub(super) fn is_passing(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Bucket { .. } | Failure::Unknown { .. } | Failure::Local(_) | Failure::Overtaken { .. }
    )
}

/// Returns true if the disk of the store has no space for a file of the archive.
pub(super) fn is_no_space(failure: &Failure) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(failure, Failure::Local(error) if matches!(error.kind(), StorageFull | QuotaExceeded))
}
