//! Options of the archive.

use std::fmt;
use std::time::Duration;

use super::invalid;
use crate::error::Result;

/// Options for archiving a store, with the feature `archive`. The thread `remanent-archive` copies every batch to an
/// object store: S3, Google Cloud Storage, Azure Blob Storage, a server with a compatible protocol, or a folder. A
/// store restored from the archive, on any machine, contains every batch that was acknowledged as
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
    /// The URL of the archive. Each store needs its own URL.
    pub url: String,
    /// Settings of the bucket, under their names in the crate `object_store`, such as `endpoint` and `region`. They
    /// take precedence over environment variables.
    pub settings: Vec<(String, String)>,
    /// The time for which batches are collected before they are archived. If a caller waits for a batch, it is archived
    /// immediately. Each interval with batches costs one PUT and one GET.
    pub interval: Duration,
    /// The maximum length in bytes of log that is kept for the archive while the bucket is slow or unreachable. If the
    /// log becomes longer, the archive continues with the next snapshot, and the states between the last archived batch
    /// and that snapshot cannot be restored from the archive.
    pub log_len_max: u64,
    /// Whether an open fails if the bucket is unreachable. Otherwise the archive is checked later, and archiving ends
    /// with an error if the archive does not belong to the directory.
    pub required: bool,
    /// Whether this directory may continue an archive that another directory of the same store has written. Use it if
    /// the other directory is lost. This directory must contain all batches of the archive in any case.
    pub takeover: bool,
    /// The maximum length in bytes of image data that a [`View`](crate::View) of the archive keeps in its temporary
    /// folder, at least 64 MiB. Data that was read before is fetched again if it is no longer kept.
    pub cache_len_max: u64,
}

impl ArchiveOptions {
    /// Returns options for the archive at `url`, with an interval of 1 second, up to 8 GiB of log, and a cache of 4 GiB
    /// for each view.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            settings: Vec::new(),
            interval: Duration::from_secs(1),
            log_len_max: 8 << 30,
            required: true,
            takeover: false,
            cache_len_max: 4 << 30,
        }
    }

    /// Adds a setting of the bucket.
    #[must_use]
    pub fn setting(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((key.into(), value.into()));
        self
    }

    /// Sets the time for which batches are collected before they are archived. Default: 1 second.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Sets the maximum length in bytes of log that is kept for the archive. Default: 8 GiB.
    #[must_use]
    pub fn log_len_max(mut self, bytes: u64) -> Self {
        self.log_len_max = bytes;
        self
    }

    /// Sets whether an open fails if the bucket is unreachable. Default: true.
    #[must_use]
    pub fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    /// Sets whether this directory may continue the archive of a lost directory. Default: false.
    #[must_use]
    pub fn takeover(mut self, takeover: bool) -> Self {
        self.takeover = takeover;
        self
    }

    /// Sets the maximum length in bytes of image data that a view of the archive keeps. Default: 4 GiB.
    #[must_use]
    pub fn cache_len_max(mut self, bytes: u64) -> Self {
        self.cache_len_max = bytes;
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
    /// Formats the settings without their values, which may be credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<&str> = self.settings.iter().map(|(key, _)| key.as_str()).collect();
        f.debug_struct("ArchiveOptions")
            .field("settings", &settings)
            .field("interval", &self.interval)
            .field("log_len_max", &self.log_len_max)
            .field("required", &self.required)
            .field("takeover", &self.takeover)
            .field("cache_len_max", &self.cache_len_max)
            .finish_non_exhaustive()
    }
}
