//! Options of the archive.

use std::fmt;
use std::time::Duration;

use super::invalid;
use crate::error::Result;

/// The archive of a store, with the feature `archive`. The thread `remanent-archive` copies every batch to an
/// object store: S3, Google Cloud Storage, Azure Blob Storage, a server with one of their protocols, or a folder. A store
/// that is restored from there, on any machine, contains every batch that was acknowledged as
/// [`Ack::Archived`](crate::Ack::Archived).
///
/// ```
/// use remanent::options::ArchiveOptions;
/// use remanent::{Ack, Options};
/// # let directory = tempfile::tempdir()?;
/// # let (store, archive) = (directory.path().join("store"), directory.path().join("archive"));
/// # std::fs::create_dir(&archive)?;
/// let url = format!("file://{}", archive.display());
/// let store = Options::new().archive(ArchiveOptions::new(url)).open(&store)?;
/// let ticket = store.submit(store.batch().set_root("step", 1u64))?;
/// ticket.wait(Ack::Archived)?;
/// assert_eq!(store.stats().archive.unwrap().archived, ticket.position().lsn);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct ArchiveOptions {
    /// The URL of the archive. Each store has a URL of its own.
    pub url: String,
    /// Settings of the bucket by their names in `object_store`, such as `endpoint` and `region`. They replace variables of
    /// the environment.
    pub settings: Vec<(String, String)>,
    /// The time that a batch waits until it is archived, unless a caller waits for it. Each interval with batches costs one
    /// PUT and one GET.
    pub interval: Duration,
    /// The length in bytes of log that is kept for the archive while the bucket is slow or cannot be reached. Beyond that, the archive
    /// continues with the next snapshot, and states in between cannot be restored from it.
    pub log_len_max: u64,
    /// Whether an open fails if the bucket cannot be reached. Otherwise the archive is checked later, and ends with an
    /// error if it does not belong to the directory.
    pub required: bool,
    /// Whether the directory may continue an archive that another directory of the store has written to, because that one
    /// is lost. The batches of the archive must be in this directory in any case.
    pub takeover: bool,
}

impl ArchiveOptions {
    /// The URL of the archive, with an interval of 1 second and up to 8 GiB of log.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            settings: Vec::new(),
            interval: Duration::from_secs(1),
            log_len_max: 8 << 30,
            required: true,
            takeover: false,
        }
    }

    /// Adds a setting of the bucket.
    #[must_use]
    pub fn setting(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((key.into(), value.into()));
        self
    }

    /// Sets the time that a batch waits until it is archived. Default: 1 second.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Sets the length in bytes of log that is kept for the archive. Default: 8 GiB.
    #[must_use]
    pub fn log_len_max(mut self, bytes: u64) -> Self {
        self.log_len_max = bytes;
        self
    }

    /// Sets whether an open fails if the bucket cannot be reached. Default: true.
    #[must_use]
    pub fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    /// Sets whether the directory may continue the archive of a directory that is lost. Default: false.
    #[must_use]
    pub fn takeover(mut self, takeover: bool) -> Self {
        self.takeover = takeover;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.interval > Duration::from_secs(24 * 3600) {
            return invalid("archive.interval", "longer than a day".to_owned());
        }
        Ok(())
    }
}

impl fmt::Debug for ArchiveOptions {
    /// Formats the names of the settings. The values may be credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<&str> = self.settings.iter().map(|(key, _)| key.as_str()).collect();
        f.debug_struct("ArchiveOptions")
            .field("settings", &settings)
            .field("interval", &self.interval)
            .field("log_len_max", &self.log_len_max)
            .field("required", &self.required)
            .field("takeover", &self.takeover)
            .finish_non_exhaustive()
    }
}
