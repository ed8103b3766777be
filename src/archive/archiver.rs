//! Starts and stops the thread that archives an open store.

use std::sync::Arc;

use remanent_archive::remote::RemoteBucket;
use remanent_format::FileName;

use super::bucket::open_bucket;
use super::uploader::{self, OpenedStore, UploaderStart};
use crate::base::sync::mpsc;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::disk::Disk;
use crate::engine::Engine;
use crate::error::{ArchiveError, ArchiveErrorKind, Error, Result};
use crate::log::ArchiveProgress;
use crate::options::ArchiveOptions;
use crate::recovery::RecoveryReport;
use crate::snapshot::Snapshots;

/// An archive that the directory may continue. The store is still being opened.
pub(crate) struct CheckedArchive {
    // Declared before `thread` and therefore dropped first, so that the thread stops waiting for the open store.
    opened: mpsc::Sender<OpenedStore>,
    answers: mpsc::Receiver<Result<()>>,
    thread: ArchiveThread,
}

/// The running archive of an open store. Dropping it archives the remaining batches and stops the thread.
pub(crate) struct Archiver {
    thread: ArchiveThread,
    engine: Arc<Engine>,
    snapshots: Arc<Snapshots>,
}

/// The archive thread. Dropping it stops and joins the thread.
struct ArchiveThread {
    progress: Arc<ArchiveProgress>,
    bucket: Arc<RemoteBucket>,
    thread: Option<JoinHandle<()>>,
}

impl CheckedArchive {
    /// Checks that the directory may continue the archive. Changes nothing.
    ///
    /// # Errors
    /// Returns [`Error::Archive`] if it may not, and [`Error::Io`] if the thread cannot be started.
    pub fn new(options: &ArchiveOptions, disk: &dyn Disk) -> Result<Self> {
        let bucket = Arc::new(open_bucket(options)?);
        let path = disk.directory()?.ok_or_else(|| {
            let reason = "only a store in a file system can be archived".to_owned();
            ArchiveError { url: options.url.clone(), kind: ArchiveErrorKind::Settings, reason }
        })?;
        // Resolves symbolic links, because their targets may change while the store is open.
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        let progress = Arc::new(ArchiveProgress::new());
        let (opened, receives_opened) = mpsc::channel();
        let (sends_answers, answers) = mpsc::channel();
        let thread = {
            let (options, bucket, progress) = (options.clone(), bucket.clone(), progress.clone());
            threads::start("remanent-archive", move || {
                let _guard = PanicGuard(&progress);
                uploader::run(UploaderStart {
                    options,
                    path: &path,
                    bucket: &bucket,
                    progress: &progress,
                    opened: receives_opened,
                    answers: sends_answers,
                });
            })
        };
        let thread = thread.map_err(|error| Error::thread("the thread for the archive", error))?;
        let thread = ArchiveThread { progress, bucket, thread: Some(thread) };
        let checked = Self { opened, answers, thread };
        checked.answer()?;
        Ok(checked)
    }

    pub fn progress(&self) -> &Arc<ArchiveProgress> {
        &self.thread.progress
    }

    /// Creates the fence and starts archiving. Call this before the first snapshot of this open is taken.
    ///
    /// # Errors
    /// Returns [`Error::Archive`] if the fence cannot be created.
    pub fn connect(
        self,
        engine: Arc<Engine>,
        snapshots: Arc<Snapshots>,
        recovered: &RecoveryReport,
    ) -> Result<Archiver> {
        let lost = recovered.harmless.iter().any(|damage| matches!(damage.file, FileName::Manifest(_)));
        let opened =
            OpenedStore { engine: engine.clone(), snapshots: snapshots.clone(), has_lost_snapshots: lost };
        // A send fails only if the thread has ended. `answer` then returns the error.
        let _ = self.opened.send(opened);
        self.answer()?;
        let watching = engine.clone();
        snapshots.catalog.watch(Box::new(move || {
            if let Some(archive) = &watching.archive {
                archive.note_snapshots();
                watching.log.wake_archiver();
            }
        }));
        Ok(Archiver { thread: self.thread, engine, snapshots })
    }

    fn answer(&self) -> Result<()> {
        self.answers.recv().unwrap_or_else(|_| Err(Error::panicked("the thread for the archive")))
    }
}

impl Drop for Archiver {
    /// Archives the remaining batches and stops the thread. If a request fails, these batches are not archived.
    fn drop(&mut self) {
        self.thread.progress.stop();
        // Cancels a snapshot that the thread is taking for the archive.
        self.snapshots.pace.call_off();
        self.engine.log.wake_archiver();
    }
}

impl Drop for ArchiveThread {
    fn drop(&mut self) {
        self.progress.stop();
        // Ends the pauses between the attempts of a request.
        self.bucket.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for the archive panicked");
        }
    }
}

/// Ends the archive if the thread panics, so that no caller waits forever.
struct PanicGuard<'a>(&'a ArchiveProgress);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end(Error::panicked("the thread for the archive"));
        }
    }
}
