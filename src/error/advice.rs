//! The remedy of each error in words.

use std::borrow::Cow;

use super::remedy::remedy_of_poisoned;
use super::{
    ArchiveErrorKind, Error, INCARNATION, Invalid, LayoutError, Mismatch, NcclError, NixlError, NoSuchState,
    Refused, Remedy, Taken, Unavailable,
};

impl Error {
    /// Returns the remedy as an instruction to the caller.
    ///
    /// ```
    /// use remanent::{Error, PageId};
    /// let error = Error::OutOfBounds { page: PageId(7), offset: 6, len: 4, page_len: 8 };
    /// assert_eq!(error.advice(), "give a range within 0..8, or resize the page first");
    /// ```
    #[must_use]
    pub fn advice(&self) -> Cow<'static, str> {
        match self {
            Error::OutOfBounds { page_len, .. } => {
                format!("give a range within 0..{page_len}, or resize the page first").into()
            }
            Error::Taken(Taken::Key { holder, .. }) => {
                format!("write to page {holder}, delete it first, or give another key").into()
            }
            Error::Taken(Taken::Name { snapshot, .. }) => {
                format!("give another name, or give up the name of snapshot {snapshot} by a prune first")
                    .into()
            }
            Error::Conflict { page, .. } => {
                format!("read page {page} again, and commit a new batch that is based on it").into()
            }
            Error::Leased { page } => format!("end the lease or pin of page {page}, then try again").into(),
            Error::Refused(Refused::MemoryInUse { page, .. }) => {
                format!("give other memory, or delete, move or release page {page} first").into()
            }
            Error::Invalid(invalid) => advice_on_invalid(invalid),
            Error::NoSuchState(state) => advice_on_state(state),
            // Every open for writing uses an incarnation number, and a fork continues with the next one.
            Error::Limit { what: INCARNATION, .. } => {
                "open the store read-only, and copy its pages to a new store".into()
            }
            Error::Limit { what, limit, .. } => {
                format!("keep {what} at or below {limit}, or split it").into()
            }
            Error::OverBudget { place, .. } => {
                format!("delete pages of place {place} or move them elsewhere, or open with a larger budget")
                    .into()
            }
            Error::OutOfMemory { place, .. } => {
                format!("free memory of place {place}, then try again").into()
            }
            Error::Overtaken { snapshot: Some(snapshot), .. } => {
                format!("start over from snapshot {snapshot}").into()
            }
            Error::Forked { opener } => {
                format!("open the store in this process, or use the object in process {opener}").into()
            }
            _ => self.fixed_advice().into(),
        }
    }

    /// Returns the advice for errors whose values do not affect the advice.
    fn fixed_advice(&self) -> &'static str {
        match self {
            Error::UnknownPage { .. } => {
                "list the pages that exist: the id of a deleted page is not given again"
            }
            Error::UnknownKey { .. } => "create the page first, or list the keys that exist",
            Error::Unavailable(Unavailable::Place { .. }) => {
                "give a place that the error does not exclude, such as host"
            }
            Error::Unavailable(Unavailable::Device { .. }) => {
                "install what is missing, or open the store with device host"
            }
            Error::Refused(Refused::Stream { .. }) => {
                "give a stream of the store's device that captures no graph"
            }
            Error::Refused(Refused::Memory { .. }) => "give memory that meets the condition in the error",
            Error::Refused(Refused::Hint { .. }) => {
                "leave out the hint, or open the store with memory that takes hints"
            }
            Error::NoStore { found: None, .. } => {
                "check the path; to make a new store there, open it with permission to create one"
            }
            Error::NoStore { .. } => "give an empty directory, or a path that does not exist yet",
            Error::Mismatch(Mismatch::Identity { .. }) => {
                "open the store with the identity that it was created with, or give another directory"
            }
            Error::Mismatch(Mismatch::Layout { .. }) => {
                "open the store with the layout that it was created with, or give another directory"
            }
            Error::Locked { .. } => "read it with a View, or close it there",
            Error::Closed => "open the store again",
            Error::DiskFull { .. } => "free some space or delete pages, then try again",
            Error::Overtaken { .. } => "start over from the newest snapshot",
            Error::Diverged { .. } => "discard what was read, and start over from the newest snapshot",
            Error::Superseded { .. } => "stop one of the two writers, and let one at a time open the store",
            Error::Panicked { .. } => "report the panic, close the store, and open it again",
            Error::Device { context_lost: false, .. } => {
                "close the store, if it is open, and open it again once the device works"
            }
            Error::Damaged(_) => "run `remanent verify`, which lists all damage and what can be saved",
            Error::Nccl(error) => advice_on_nccl(error),
            Error::Nixl(error) => advice_on_nixl(error),
            Error::Archive(error) => advice_on_archive(error.kind),
            Error::Poisoned(cause) => advice_of_poisoned(cause),
            _ => advice_of(self.remedy()),
        }
    }
}

/// Returns the advice for a failure of an archive.
fn advice_on_archive(kind: ArchiveErrorKind) -> &'static str {
    match kind {
        ArchiveErrorKind::NoArchive => "open the store with `Options::archive`",
        ArchiveErrorKind::Settings => "correct the URL or the setting",
        ArchiveErrorKind::Superseded | ArchiveErrorKind::Diverged => {
            "restore the archive into an empty directory, and continue there"
        }
        ArchiveErrorKind::Lost => {
            "check the URL and the lifecycle rules of the bucket; `remanent archive status` shows what is there"
        }
        ArchiveErrorKind::OtherStore => "give each store a URL of its own",
        ArchiveErrorKind::Bucket => "check the network, the credential and the URL",
        ArchiveErrorKind::Unsupported => "use a bucket with create-if-absent requests",
        ArchiveErrorKind::Damaged => "run `remanent archive verify`, which lists all damage",
        ArchiveErrorKind::Limit => "use longer pages, so that a snapshot has fewer files, or shorter batches",
        ArchiveErrorKind::Directory => "run `remanent verify` on the directory of the store",
        ArchiveErrorKind::Unnamed => "take a snapshot with a name",
        ArchiveErrorKind::NotGiven => {
            "open the store with `Options::archive`, or make a store of its own with `remanent fork`"
        }
    }
}

/// Returns the advice for a failure of NCCL.
fn advice_on_nccl(error: &NcclError) -> &'static str {
    match error {
        NcclError::NotFound { .. } | NcclError::MissingSymbol { .. } | NcclError::TooOld { .. } => {
            "install NCCL, for example by `pip install nvidia-nccl-cu12`, and set REMANENT_NCCL to the path of \
             libnccl.so.2 if it is elsewhere"
        }
        NcclError::NoSuchRank { .. } => "number the ranks from 0, each below the number of ranks",
        NcclError::RankTaken { .. } => "give each process its own rank, and each communicator a new id",
        NcclError::Unlike { .. } => "call the operation on all ranks, with stores of the same pages",
        NcclError::Failed { .. }
        | NcclError::JoinTimedOut { .. }
        | NcclError::TimedOut { .. }
        | NcclError::Aborted { .. } => {
            "restart the ranks that are missing, and join again with a new id; NCCL_DEBUG=WARN prints details"
        }
    }
}

/// Returns the advice for a failure of NIXL.
fn advice_on_nixl(error: &NixlError) -> &'static str {
    match error {
        NixlError::NotFound { .. } | NixlError::MissingSymbol { .. } | NixlError::OtherVersion { .. } => {
            "install NIXL, for example by `pip install --no-deps nixl-cu12==1.5.1`, and set REMANENT_NIXL to the \
             path of libnixl_capi.so if it is elsewhere"
        }
        NixlError::InvalidName { .. } => "give a name that meets the condition in the error",
        NixlError::UnsupportedMemory { .. } => "give device, pinned or host memory, or a file",
        NixlError::OutOfRegion { .. } => "give a range within the region",
        NixlError::InvalidTransfer { .. } => "give ranges that meet the condition in the error",
        NixlError::InvalidMetadata { .. } => "give the bytes that the peer's agent returned, without changes",
        NixlError::OtherPeerVersion { .. } => "install the same version on both hosts",
        NixlError::UnexpectedAnswer { .. } => {
            "check that the peer is a page server of the same release of Remanent, then connect to it again"
        }
        NixlError::NotConnected { .. } => "connect the client to the server again",
        NixlError::Refused { .. } => "ask for pages that the server can send, with room for their length",
        NixlError::Corrupted { .. } => "check the network and the memory of both hosts, then try again",
        NixlError::Unsettled { .. } => "fetch fewer pages at a time, or while fewer batches change them",
        NixlError::Lost { .. } => "connect to the server again",
        NixlError::Failed { .. } | NixlError::TimedOut { .. } => {
            "check that the peer is running and exchange metadata again; NIXL_LOG_LEVEL=DEBUG prints details"
        }
    }
}

/// Returns the advice for system failures, whose messages contain the details.
fn advice_of(remedy: Remedy) -> &'static str {
    match remedy {
        Remedy::Retry => "close files, threads or processes that are not needed, then try again",
        Remedy::Permit => "correct the path or the permissions that the error names, then try again",
        Remedy::FreeSpace => "free some space, then try again",
        Remedy::NewProcess => "open the store in a new process",
        Remedy::StartOver => "start over from the newest snapshot",
        Remedy::Inspect => "run `remanent verify`, which lists all damage and what can be saved",
        // The variants with these remedies have their own advice.
        Remedy::ChangeCall | Remedy::Reopen => "close the store, if it is open, and open it again",
    }
}

/// Returns the advice for a store that was stopped by `cause`.
fn advice_of_poisoned(cause: &Error) -> &'static str {
    advice_of(remedy_of_poisoned(cause))
}

fn advice_on_invalid(error: &Invalid) -> Cow<'static, str> {
    match error {
        Invalid::Option { option, .. } => {
            format!("give option {option} a value that the error permits").into()
        }
        Invalid::StatePoint { found } => {
            format!("write name:{found} if that is the name of a snapshot; list the snapshots for the others")
                .into()
        }
        Invalid::Key(_) => "give a key of 1 to 64 bytes".into(),
        Invalid::Layout(layout) => advice_on_layout(layout).into(),
        Invalid::Operation { index, .. } => {
            format!("correct operation {index} as the error says, and commit the batch again").into()
        }
        Invalid::LengthsDiffer { .. } => "give two pages of one length, or resize one of them first".into(),
        Invalid::OutOfOrder { expected, .. } => {
            format!("apply batch {expected} first, or start over from the newest snapshot").into()
        }
    }
}

fn advice_on_state(error: &NoSuchState) -> Cow<'static, str> {
    match error {
        NoSuchState::Name { nearest: Some(name), .. } => {
            format!("give {name:?}, or list the snapshots that are kept").into()
        }
        NoSuchState::Snapshot { .. } => "list the snapshots that are kept, and give the id of one".into(),
        NoSuchState::Name { nearest: None, .. } => "list the names of the snapshots that are kept".into(),
        NoSuchState::OutsideWindow { oldest, newest, below, .. } => match below.last() {
            Some(_) => {
                format!("give a batch from {oldest} to {newest}, or one of the older ones named above")
            }
            None => format!("give a batch from {oldest} to {newest}"),
        }
        .into(),
        NoSuchState::NotCommitted { requested, newest } => {
            format!("commit batch {requested} first, or give a batch up to {newest}").into()
        }
    }
}

fn advice_on_layout(error: &LayoutError) -> &'static str {
    match error {
        LayoutError::Zero { .. } => "give each dimension a length of at least 1",
        LayoutError::Align { .. } => "give a power of two, such as 256",
        LayoutError::TooLong { .. } => "give smaller dimensions",
        LayoutError::OutOfRange { .. } => "give an index below the dimension's length",
        LayoutError::OtherShape { .. } => "give two layouts with blocks of one shape",
        LayoutError::OtherLayout { .. } => "create the pages with the layout of the tensors",
        LayoutError::RegionCount { .. } => "give one region for each region of the layout",
        LayoutError::RegionLen { .. } => "give a region of at least the length that the layout needs",
        LayoutError::Fingerprint { .. } => "give the fingerprint that a block layout returned",
    }
}
