//! Converts errors of the archive protocol to errors of the store.

use remanent_archive::Error as Failure;
use remanent_archive::remote::OpenError;

use crate::error::{ArchiveError, ArchiveErrorKind, Error};

/// Converts an error of the archive at `url` to an error of the store.
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
    let text = failure.to_string();
    let reason = match failure {
        Failure::Local(_) => text,
        // The remedy follows the last "; ". The bucket's message before the remedy may also contain "; ".
        _ => text.rsplit_once("; ").map_or(text.as_str(), |(reason, _)| reason).to_owned(),
    };
    ArchiveError { url: url.to_owned(), kind, reason }.into()
}

/// Converts the error of a failed open of a bucket to an error of the store.
pub(super) fn error_of_open(failure: &OpenError) -> Error {
    let reason = failure.to_string();
    ArchiveError { url: String::new(), kind: ArchiveErrorKind::Settings, reason }.into()
}

/// Returns true if the failure is transient, such as an unreachable bucket or an unreadable file. A later attempt may
/// then succeed: either the line is unchanged, or the next append determines whether the object was created.
pub(super) fn is_passing(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Bucket { .. } | Failure::Unknown { .. } | Failure::Local(_) | Failure::Overtaken { .. }
    )
}

/// Returns true if the local disk has no space for the ARCHIVE file.
pub(super) fn is_no_space(failure: &Failure) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(failure, Failure::Local(error) if matches!(error.kind(), StorageFull | QuotaExceeded))
}
