//! Error messages, and their optional parts.

use std::fmt;

use remanent_format::Lsn;

use super::{Error, NoSuchState};
use crate::layout::BlockLayout;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_failure(f)?;
        match self {
            // The message for a misspelled name ends with a suggestion instead of advice.
            Error::NoSuchState(NoSuchState::Name { nearest: Some(_), .. }) => Ok(()),
            _ => write!(f, "; {}", self.advice()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

impl Error {
    /// Writes the message without the remedy.
    fn fmt_failure(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { action, object, store, source } => {
                write!(f, "cannot {action} {object}{}: {source}", StoreDisplay(store.as_deref()))
            }
            Error::DiskFull { file, needed, store } => {
                write!(f, "no space for {file}{} ({needed} bytes)", StoreDisplay(store.as_deref()))
            }
            Error::Damaged(damage) => {
                write!(f, "the store{} is damaged: {damage}", PathDisplay(damage.store.as_deref()))
            }
            Error::Locked { holder, store } => {
                write!(f, "the store{} is open in {holder}", PathDisplay(store.as_deref()))
            }
            Error::Superseded { holder, store } => {
                let store = PathDisplay(store.as_deref());
                write!(f, "the store{store} was opened by another writer: {holder}; this handle has stopped")
            }
            Error::Panicked { thread, store } => {
                write!(f, "{thread}{} panicked, and the store has stopped", StoreDisplay(store.as_deref()))
            }
            Error::Forked { opener } => {
                write!(f, "the store was opened by process {opener}, of which this is a forked child")
            }
            Error::NoStore { path, found: None } => write!(f, "there is no store in {path}"),
            Error::NoStore { path, found: Some(found) } => {
                write!(f, "no store can be created in {path}, which is not empty (it contains {found})")
            }
            Error::Mismatch(mismatch) => write!(f, "{mismatch}"),
            Error::Invalid(invalid) => write!(f, "{invalid}"),
            Error::Limit { what, found, limit } => {
                write!(f, "{what} is {}over the limit of {limit}", Size(*found))
            }
            Error::UnknownPage { page } => write!(f, "there is no page {page}"),
            Error::UnknownKey { key } => write!(f, "there is no page with key {key}"),
            Error::OutOfBounds { page, offset, len, page_len } => {
                write!(
                    f,
                    "bytes {offset}..{offset}+{len} are outside page {page}, which is {page_len} bytes long"
                )
            }
            Error::Taken(taken) => write!(f, "{taken}"),
            Error::Conflict { page, expected, found } => {
                write!(f, "page {page} is at epoch {found}, and the batch requires epoch {expected}")
            }
            Error::Leased { page } => write!(f, "page {page} is leased or pinned"),
            Error::Refused(refused) => write!(f, "{refused}"),
            Error::Unavailable(unavailable) => write!(f, "{unavailable}"),
            Error::OverBudget { place, requested, available, budget } => {
                write!(
                    f,
                    "{requested} bytes in place {place} are over the budget: {available} of {budget} left"
                )
            }
            Error::OutOfMemory { place, len } => write!(f, "cannot allocate {len} bytes in place {place}"),
            Error::NoSuchState(state) => write!(f, "{state}"),
            Error::Overtaken { lsn, .. } => write!(f, "batch {lsn} is not kept any more"),
            Error::Diverged { position, survived } => {
                let survived = LastSurvivingBatch(*survived);
                write!(f, "batch {position} is not in the store's history{survived}")
            }
            Error::Device { reason, .. } => write!(f, "device: {reason}"),
            Error::Nccl(error) => write!(f, "{error}"),
            Error::Nixl(error) => write!(f, "{error}"),
            Error::Archive(error) => write!(f, "{error}"),
            Error::Poisoned(cause) => {
                f.write_str("the store stopped after an earlier failure: ")?;
                cause.fmt_failure(f)
            }
            Error::Closed => f.write_str("the store is closed"),
        }
    }
}

/// Returns the end of the message for a state outside the retained range. The text lists the older states that are
/// still available.
pub(super) fn single_states(below: &[Lsn]) -> String {
    let batches: Vec<String> = below.iter().map(Lsn::to_string).collect();
    match batches.len() {
        0 => String::new(),
        1 => format!("; of the older states, that at batch {} is kept", batches[0]),
        _ => format!("; of the older states, those at batches {} are kept", batches.join(", ")),
    }
}

/// Displays the paths that were tried, with their errors.
pub(super) struct Attempts<'a>(pub &'a [(String, String)]);

impl fmt::Display for Attempts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (path, error)) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{path} ({error})")?;
        }
        Ok(())
    }
}

/// Displays an offset, if known.
pub(super) struct OffsetDisplay(pub Option<u64>);

impl fmt::Display for OffsetDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |offset| write!(f, " at offset {offset}"))
    }
}

/// Displays the suggested name, if any.
pub(super) struct NearestDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for NearestDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, "; did you mean {name:?}?"))
    }
}

/// Displays the store that contains a file, if known.
pub(super) struct StoreDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for StoreDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " of the store in {store}"))
    }
}

/// Displays the directory of a store, if known.
pub(super) struct PathDisplay<'a>(pub Option<&'a str>);

impl fmt::Display for PathDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " in {store}"))
    }
}

/// Displays a size, unless it is unknown (`u64::MAX`).
pub(super) struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX { Ok(()) } else { write!(f, "{}, ", self.0) }
    }
}

/// Displays the last surviving batch of an incarnation, if known.
pub(super) struct LastSurvivingBatch(pub Option<Lsn>);

impl fmt::Display for LastSurvivingBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |lsn| write!(f, ", where {lsn} is the last one of that incarnation"))
    }
}

/// Displays a layout fingerprint: as its block layout if it is one, otherwise as bytes.
pub(super) struct Fingerprint<'a>(pub Option<&'a [u8; 32]>);

impl fmt::Display for Fingerprint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bytes) = self.0 else { return f.write_str("none") };
        match BlockLayout::from_fingerprint(*bytes) {
            Ok(layout) => write!(f, "that of {layout}"),
            Err(_) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}
