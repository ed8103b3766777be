//! A bucket that shows progress and repeated requests, and converts errors of its archive.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::path::Path;

use indicatif::ProgressBar;
use remanent_archive::Error;
use remanent_archive::bucket::{Bucket, BucketError, Creation, FailureClass};
use remanent_archive::error::Divergence;
use remanent_archive::line::{Archive, SystemNonces};
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::remote::{RemoteBucket, RemoteOptions};
use remanent_archive::rules::Rules;

use crate::cli::exit::Failure;
use crate::cli::progress;

const DETACH: &str =
    "`remanent fork DIR NEWDIR` detaches a directory: the new store has its own id and no archive";

/// The bucket at a URL. Settings and credentials come from the environment.
pub struct WatchedBucket {
    remote: RemoteBucket,
    url: String,
    /// Counts objects that were created or read completely.
    bar: RefCell<ProgressBar>,
    /// The class of the last failure that was printed.
    shown: Cell<Option<FailureClass>>,
}

impl WatchedBucket {
    /// Opens the bucket. Sends no request.
    pub fn open(url: &str) -> Result<Self, Failure> {
        let remote = RemoteBucket::open(url, RemoteOptions::default())
            .map_err(|error| Failure::Environment(error.to_string()))?;
        // A URL that can be opened contains no credentials.
        let bar = RefCell::new(ProgressBar::hidden());
        Ok(Self { remote, url: url.to_owned(), bar, shown: Cell::new(None) })
    }

    /// Returns the archive in the bucket.
    pub fn archive(&self) -> Archive<'_, Self, SystemNonces> {
        Archive { bucket: self, nonces: &SystemNonces, rules: Rules::default() }
    }

    /// Replaces the progress bar with `bar`, which counts objects.
    pub fn show_progress(&self, bar: ProgressBar) {
        self.bar.replace(bar).finish_and_clear();
    }

    /// Runs `calls` to completion. `dir` is the directory of the store if they use one, for error messages.
    pub fn run<T>(
        &self,
        dir: Option<&Path>,
        calls: impl Future<Output = remanent_archive::Result<T>>,
    ) -> Result<T, Failure> {
        let result = self.remote.block_on(calls);
        self.bar.borrow().finish_and_clear();
        result.map_err(|error| self.failure(dir, error))
    }

    /// Converts an error of the archive to a failure, which determines the exit code.
    fn failure(&self, dir: Option<&Path>, error: Error) -> Failure {
        let url = &self.url;
        match &error {
            Error::Local(source) => local_failure(dir, source),
            Error::Damaged { .. } | Error::ArchiveLost { .. } => Failure::Damage(format!("{url}: {error}")),
            Error::Diverged { reason: Divergence::UnknownFence, .. } => Failure::Environment(format!(
                "{url}: {error}; if the directory that created this fence is lost, use --takeover; {DETACH}"
            )),
            Error::Diverged { .. } | Error::Superseded { .. } => {
                Failure::Environment(format!("{url}: {error}; {DETACH}"))
            }
            _ => Failure::Environment(format!("{url}: {error}")),
        }
    }

    fn note_progress(&self) {
        self.bar.borrow().inc(1);
    }

    /// Prints why a request is repeated, unless the previous note has the same reason.
    fn note_delay(&self, failure: &BucketError) {
        let is_repeated = matches!(
            failure.class,
            FailureClass::InDoubt | FailureClass::Throttled | FailureClass::Unreachable
        );
        if !is_repeated
            || self.shown.replace(Some(failure.class)) == Some(failure.class)
            || progress::is_quiet()
        {
            return;
        }
        self.bar.borrow().suspend(|| {
            // Errors are ignored, because standard error may be closed.
            let _ = writeln!(io::stderr(), "remanent: {}: {failure}; trying again", self.url);
        });
    }
}

/// Converts an I/O error of a directory to a failure. Errors of kind `InvalidData` are damage.
pub fn local_failure(dir: Option<&Path>, error: &io::Error) -> Failure {
    let message = match dir {
        Some(dir) => format!("{}: {error}", dir.display()),
        None => error.to_string(),
    };
    match error.kind() {
        ErrorKind::InvalidData => Failure::Damage(message),
        _ => Failure::Environment(message),
    }
}

impl Bucket for WatchedBucket {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        let created = self.remote.create(key, bytes).await?;
        self.note_progress();
        Ok(created)
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        self.remote.put(key, bytes).await
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        let is_whole = range.is_none();
        let found = self.remote.get(key, range).await?;
        if is_whole && found.is_some() {
            self.note_progress();
        }
        Ok(found)
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        self.remote.list(folder).await
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        self.remote.delete(key).await
    }

    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        self.note_delay(failure);
        self.remote.pause(attempt, failure).await
    }
}
