//! The interface to an object store.
//!
//! The protocol requires that [`Bucket::create`] and [`Bucket::get`] of one key are linearizable, and that only
//! [`Bucket::delete`] removes objects. Listings have no such requirement: the result of [`Bucket::list`] may be out of
//! date and in any order. A request may fail, be repeated, be delayed indefinitely, or take effect after its sender has
//! died.
//!
//! An implementation must not retry a create itself. Otherwise a retried request could report [`Creation::Exists`] for
//! the object that its first attempt created, and the protocol would not detect that the outcome is unknown.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use crate::object::{Folder, ObjectKey};

/// The answer of the bucket to a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creation {
    /// The object was created.
    Created,
    /// An object with this key exists. Some buckets also return this for a conflict in which nothing was written, and
    /// some clients return it for the object of an earlier attempt.
    Exists,
}

/// The class of a failed request. It determines the remedy, and whether the request is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureClass {
    /// The request timed out, or the server failed during the request. The request may have taken effect, or may still
    /// do so.
    InDoubt,
    /// The credential does not permit the request.
    Denied,
    /// The credential has expired.
    Expired,
    /// The clock of this machine differs too much from the clock of the bucket.
    ClockSkew,
    /// The bucket limits the request rate.
    Throttled,
    /// The bucket has no space left, or a quota is exceeded.
    Full,
    /// The bucket cannot be reached.
    Unreachable,
    /// The bucket does not implement the request.
    NotSupported,
    /// Any other failure.
    Other,
}

impl FailureClass {
    /// Returns the remedy for failures of this class.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            FailureClass::InDoubt => "the archive retries; check the connection if this persists",
            FailureClass::Denied => "grant get, put, list and delete on the archive's URL",
            FailureClass::Expired => "renew the credential",
            FailureClass::ClockSkew => "set the clock of this machine",
            FailureClass::Throttled => "the archive retries more slowly",
            FailureClass::Full => "free space in the bucket or raise its quota",
            FailureClass::Unreachable => "check the network and the URL",
            FailureClass::NotSupported => "use a bucket that supports conditional creates",
            FailureClass::Other => "see the bucket's message",
        }
    }
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FailureClass::InDoubt => "request in doubt",
            FailureClass::Denied => "access denied",
            FailureClass::Expired => "credential expired",
            FailureClass::ClockSkew => "clock skew",
            FailureClass::Throttled => "throttled",
            FailureClass::Full => "bucket full",
            FailureClass::Unreachable => "bucket unreachable",
            FailureClass::NotSupported => "request not supported",
            FailureClass::Other => "request failed",
        })
    }
}

/// A failed request. `message` never contains credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{class} ({message}); {}", .class.remedy())]
pub struct BucketError {
    /// The class of the failure.
    pub class: FailureClass,
    /// The message of the bucket or of the client.
    pub message: String,
}

/// An object store, or a folder in an object store, that contains one archive.
///
/// The futures need not be `Send`, because an uploader polls them on its own thread.
pub trait Bucket {
    /// Creates an object unless an object with this key exists.
    ///
    /// # Errors
    /// Returns the class and the message of the failed request. The protocol treats the outcome as unknown after any
    /// error, and repeats the create.
    fn create(&self, key: ObjectKey, bytes: &[u8]) -> impl Future<Output = Result<Creation, BucketError>>;

    /// Creates an object like [`create`](Bucket::create). An implementation may send `bytes` without copying them, and
    /// may keep its reference until the request has ended.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Bucket::create).
    fn create_shared(
        &self,
        key: ObjectKey,
        bytes: &Arc<Vec<u8>>,
    ) -> impl Future<Output = Result<Creation, BucketError>> {
        self.create(key, bytes)
    }

    /// Creates or replaces an object. The protocol uses this only for the hint.
    ///
    /// # Errors
    /// Returns the class and the message of the failed request.
    fn put(&self, key: ObjectKey, bytes: &[u8]) -> impl Future<Output = Result<(), BucketError>>;

    /// Returns the bytes of an object or of a range of it, or `None` if the object does not exist.
    ///
    /// # Errors
    /// Returns the class and the message of the failed request. A connection that ends before the last byte is a
    /// failure.
    fn get(
        &self,
        key: ObjectKey,
        range: Option<Range<u64>>,
    ) -> impl Future<Output = Result<Option<Vec<u8>>, BucketError>>;

    /// Returns the names of the objects in a folder, relative to the archive, in any order. The listing may be out of
    /// date.
    ///
    /// # Errors
    /// Returns the class and the message of the failed request.
    fn list(&self, folder: Folder) -> impl Future<Output = Result<Vec<String>, BucketError>>;

    /// Deletes an object. Succeeds if the object does not exist.
    ///
    /// # Errors
    /// Returns the class and the message of the failed request.
    fn delete(&self, key: ObjectKey) -> impl Future<Output = Result<(), BucketError>>;

    /// Waits before the next attempt of a failed request. Returns true after the wait, or false if the caller must make
    /// no further attempt. `attempt` is the number of failed attempts, starting at 1. The implementation chooses the
    /// duration of the pause and the number of attempts.
    fn pause(&self, attempt: u32, failure: &BucketError) -> impl Future<Output = bool>;
}
