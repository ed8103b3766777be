//! The interface to an object store.
//!
//! The protocol assumes that [`Bucket::create`] and [`Bucket::get`] of one key are linearizable, and that objects are
//! removed only by [`Bucket::delete`]. It assumes nothing about listings: [`Bucket::list`] may lag and may have any
//! order. Each request may fail, be repeated, be delayed without bound, or take effect after its sender died.
//!
//! An implementation must not retry a create on its own: a retried request may report [`Creation::Exists`] for its own
//! object, which the protocol must know to be in doubt.

use std::fmt;
use std::future::Future;
use std::ops::Range;

use crate::object::{Folder, ObjectKey};

/// The outcome of a create that the bucket answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creation {
    /// The object was created.
    Created,
    /// The bucket reports an existing object. Some buckets report this for a conflict in which nothing was written, and
    /// some clients for an earlier attempt of the same request.
    Exists,
}

/// The reason why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureClass {
    /// The request timed out, or the server failed while it ran: the request may have taken effect, or may still.
    InDoubt,
    /// The credential does not permit the request.
    Denied,
    /// The credential has expired.
    Expired,
    /// The clock of this machine differs too much from that of the bucket.
    ClockSkew,
    /// The bucket limits the rate of requests.
    Throttled,
    /// The bucket has no space, or a quota is used up.
    Full,
    /// The bucket cannot be reached.
    Unreachable,
    /// The bucket does not implement the request.
    NotSupported,
    /// Any other answer.
    Other,
}

impl FailureClass {
    /// Returns the remedy for a failure of this class.
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

/// A failed request. `message` contains no credential.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{class} ({message}); {}", .class.remedy())]
pub struct BucketError {
    /// The reason.
    pub class: FailureClass,
    /// The bucket's answer, for a person.
    pub message: String,
}

/// An object store, or a folder of one.
///
/// The futures need not be `Send`: an uploader polls them on its own thread.
pub trait Bucket {
    /// Creates an object unless one exists under this key.
    fn create(&self, key: ObjectKey, bytes: &[u8]) -> impl Future<Output = Result<Creation, BucketError>>;

    /// Creates or replaces an object. Only the hint is written in this way.
    fn put(&self, key: ObjectKey, bytes: &[u8]) -> impl Future<Output = Result<(), BucketError>>;

    /// Returns the bytes of an object, or of a range of it, or `None` if there is no such object. Returns an error if the
    /// connection ends before the last byte.
    fn get(
        &self,
        key: ObjectKey,
        range: Option<Range<u64>>,
    ) -> impl Future<Output = Result<Option<Vec<u8>>, BucketError>>;

    /// Returns the names of objects in a folder, relative to the archive, in any order. The names may be out of date.
    fn list(&self, folder: Folder) -> impl Future<Output = Result<Vec<String>, BucketError>>;

    /// Removes an object. Succeeds if there is none.
    fn delete(&self, key: ObjectKey) -> impl Future<Output = Result<(), BucketError>>;

    /// Waits before a failed request is tried again, and returns false to give up. `attempt` counts from 1. The
    /// implementation decides how long to wait, and for how long to try.
    fn pause(&self, attempt: u32, failure: &BucketError) -> impl Future<Output = bool>;
}
