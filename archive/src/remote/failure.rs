//! Classifies failures without a response of a server: transport errors and file system errors.

use std::error::Error as StdError;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};

use super::answer::Answer;
use crate::bucket::{BucketError, FailureClass};

/// Linux error numbers for which [`io::ErrorKind`] has no variant.
const EPERM: i32 = 1;
const EIO: i32 = 5;
const ENOSYS: i32 = 38;

/// Converts an error of `object_store`. The message contains only an HTTP status, an error code, and the text of an
/// operating system error.
pub(super) fn failure(error: &object_store::Error, answer: Option<&Answer>) -> BucketError {
    if let Some(transport) = find::<HttpError>(error) {
        return transport_failure(transport);
    }
    if let Some(answer) = answer {
        return BucketError { class: answer.class, message: answer.to_string() };
    }
    if let Some(source) = find::<io::Error>(error) {
        return io_failure(source);
    }
    use object_store::Error;
    let (class, message) = match error {
        Error::NotImplemented { .. } | Error::NotSupported { .. } => {
            (FailureClass::NotSupported, "the client does not implement the request")
        }
        Error::InvalidPath { .. } => {
            (FailureClass::Other, "an object has a name with an empty part, `.` or `..`")
        }
        Error::JoinError { .. } => (FailureClass::InDoubt, "the request ended early"),
        Error::NotFound { .. } => (FailureClass::Other, "not found"),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            (FailureClass::Denied, "no credential")
        }
        _ => (FailureClass::Other, "the answer or a credential is not valid"),
    };
    BucketError { class, message: message.to_owned() }
}

fn transport_failure(error: &HttpError) -> BucketError {
    // The connection may have ended after the request took effect. The error kind of `object_store` does not rule this
    // out.
    let class = if error.kind() == HttpErrorKind::Connect {
        FailureClass::Unreachable
    } else {
        FailureClass::InDoubt
    };
    let kind = match error.kind() {
        HttpErrorKind::Connect => "no connection",
        HttpErrorKind::Request => "the connection was closed before the answer",
        HttpErrorKind::Timeout => "time-out",
        HttpErrorKind::Interrupted => "the connection was interrupted",
        HttpErrorKind::Decode => "the answer is incomplete or invalid",
        _ => "no complete answer",
    };
    let message = match find::<io::Error>(error) {
        Some(source) => format!("{kind}: {}", io_text(source)),
        None => kind.to_owned(),
    };
    BucketError { class, message }
}

/// Converts an error of the file system.
pub(super) fn io_failure(error: &io::Error) -> BucketError {
    use io::ErrorKind as Kind;
    let class = match (error.kind(), error.raw_os_error()) {
        (Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge, _) => FailureClass::Full,
        // The file system does not support hard links, which a create needs.
        (Kind::Unsupported | Kind::CrossesDevices | Kind::TooManyLinks, _) | (_, Some(EPERM | ENOSYS)) => {
            FailureClass::NotSupported
        }
        (Kind::PermissionDenied | Kind::ReadOnlyFilesystem, _) => FailureClass::Denied,
        (
            Kind::StaleNetworkFileHandle
            | Kind::NotConnected
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable,
            _,
        ) => FailureClass::Unreachable,
        (Kind::TimedOut | Kind::Interrupted | Kind::ResourceBusy, _) | (_, Some(EIO)) => {
            FailureClass::InDoubt
        }
        _ => FailureClass::Other,
    };
    BucketError { class, message: io_text(error) }
}

/// Returns the message of the operating system error, or the name of its kind.
fn io_text(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(_) => error.to_string(),
        // Errors of host name resolution have no error number.
        None if error.to_string().starts_with("failed to lookup address") => {
            "the host name cannot be resolved".to_owned()
        }
        None => error.kind().to_string(),
    }
}

/// Returns the innermost source of the given type.
fn find<'e, E: StdError + 'static>(error: &'e (dyn StdError + 'static)) -> Option<&'e E> {
    let sources = std::iter::successors(Some(error), |error| (*error).source());
    sources.filter_map(|error| error.downcast_ref::<E>()).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_errors_are_classified() {
        let table = [
            (28, FailureClass::Full),
            (122, FailureClass::Full),
            (13, FailureClass::Denied),
            (30, FailureClass::Denied),
            (EPERM, FailureClass::NotSupported),
            (95, FailureClass::NotSupported),
            (EIO, FailureClass::InDoubt),
            (110, FailureClass::InDoubt),
            (116, FailureClass::Unreachable),
            (40, FailureClass::Other),
        ];
        for (number, class) in table {
            let error = io_failure(&io::Error::from_raw_os_error(number));
            assert_eq!(error.class, class, "{error}");
        }
    }
}
