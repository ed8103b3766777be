//! Buckets in S3, Google Cloud Storage, Azure Blob Storage and local folders. Requires the feature `object_store`,
//! whose dependencies need Rust 1.89.
//!
//! ```
//! use remanent_archive::bucket::{Bucket, Creation};
//! use remanent_archive::object::ObjectKey;
//! use remanent_archive::remote::{RemoteBucket, RemoteOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let url = format!("file://{}", folder.path().display());
//! let bucket = RemoteBucket::open(&url, RemoteOptions::default())?;
//! let key = ObjectKey::Line(1);
//! bucket.block_on(async {
//!     assert_eq!(bucket.create(key, b"first").await?, Creation::Created);
//!     assert_eq!(bucket.create(key, b"second").await?, Creation::Exists);
//!     assert_eq!(bucket.get(key, None).await?, Some(b"first".to_vec()));
//!     bucket.delete(key).await
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Runtime
//!
//! A bucket owns a Tokio runtime with one thread, on which all requests run. Callers do not need a Tokio runtime: any
//! executor, or [`RemoteBucket::block_on`], can poll the futures. Requests run concurrently. Dropping a future does not
//! cancel its request, which may still take effect.
//!
//! # URLs
//!
//! | URL | bucket |
//! |---|---|
//! | `s3://BUCKET/PATH`, `https://s3.REGION.amazonaws.com/BUCKET/PATH` | S3, and servers with its protocol by the setting `endpoint` |
//! | `gs://BUCKET/PATH` | Google Cloud Storage |
//! | `az://CONTAINER/PATH`, `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH`, `https://ACCOUNT.blob.core.windows.net/CONTAINER/PATH` | Azure Blob Storage |
//! | `file:///FOLDER` | an existing local folder; every object is synced before it is reported as created |
//!
//! A URL is rejected if it contains `//` in its path, `.` or `..` as a name, a password, a query or a fragment.
//! Symbolic links in a local folder are rejected.
//!
//! # Failures
//!
//! Creates and puts are sent once, because a repeated create may report its own object as an existing one. Reads,
//! listings and deletes are repeated up to three times. After HTTP status 401 or 403, the environment variables and
//! settings are read again. Messages contain the HTTP status and the server's error code, but not the server's text,
//! which may repeat parts of a credential.

mod address;
mod answer;
mod backoff;
mod connect;
mod failure;
mod folder;
mod options;

use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResultPayload, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use crate::bucket::{Bucket, BucketError, Creation, FailureClass};
use crate::object::{DATA_OBJECT_LEN_MAX, Folder, ObjectKey};
use address::{Address, Place};
use answer::{Answer, observe};
use connect::Clients;
use failure::failure;
use folder::LocalFolder;

pub use options::{RemoteOptions, Settings};

/// Minimum time between two reads of the credentials, so that a sweep over a thousand locked objects does not read them
/// for each object.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);

/// The error of opening a bucket. Contains no credentials.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL is not valid for an archive.
    #[error("{url} is not a valid URL of an archive: {reason}")]
    Address {
        /// The URL, without user name, password, query and fragment.
        url: String,
        /// The reason.
        reason: &'static str,
    },
    /// The setting does not exist.
    #[error("the setting {key} is unknown for {url}; remove it, or see the settings of object_store")]
    Setting {
        /// Name of the setting.
        key: String,
        /// The URL.
        url: String,
    },
    /// A setting is missing or invalid.
    #[error("the settings for {url} are invalid: {message}")]
    Settings {
        /// The URL.
        url: String,
        /// The reason, without the values of settings.
        message: String,
    },
    /// The local folder does not exist or cannot be read.
    #[error("cannot open the folder {}: {source}; create it first", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The thread for requests cannot be started.
    #[error("the thread for requests cannot be started: {0}")]
    Runtime(io::Error),
}

/// A bucket at a URL. The [module documentation](self) describes the supported URLs.
pub struct RemoteBucket {
    shared: Arc<Shared>,
    /// `Some` until the bucket is dropped.
    runtime: Option<Runtime>,
}

/// The body of a request, which shares its memory with the caller.
struct SharedBytes(Arc<Vec<u8>>);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Wakes a thread that waits in [`RemoteBucket::block_on`].
struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The state that all requests of a bucket share.
struct Shared {
    address: Address,
    options: RemoteOptions,
    folder: Option<LocalFolder>,
    clients: Mutex<Access>,
    /// Whether the credentials were read again and no attempt has used them yet.
    has_new_credentials: AtomicBool,
    stopped: watch::Sender<bool>,
}

/// The clients with the current credentials.
struct Access {
    clients: Arc<Clients>,
    /// The time when the credentials were last read again.
    read: Option<Instant>,
}

impl RemoteBucket {
    /// Opens the bucket at a URL. Sends no request; use [`probe`](crate::line::probe) to check the bucket.
    ///
    /// # Errors
    /// Returns [`OpenError`] if the URL or the settings are invalid, if a local folder cannot be opened, or if the
    /// thread cannot be started.
    pub fn open(url: &str, options: RemoteOptions) -> Result<Self, OpenError> {
        let mut address = Address::parse(url)?;
        let mut folder = None;
        if let Place::Folder(path) = &address.place {
            let failed = |source| OpenError::Folder { path: path.clone(), source };
            let opened = LocalFolder::open(path).map_err(failed)?;
            address.place = Place::Folder(opened.root().to_owned());
            folder = Some(opened);
        }
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).thread_name("remanent-bucket").enable_all().build();
        let runtime = runtime.map_err(OpenError::Runtime)?;
        let access = Access { clients: Arc::new(Clients::connect(&address, &options.read())?), read: None };
        let shared = Shared {
            address,
            options,
            folder,
            clients: Mutex::new(access),
            has_new_credentials: AtomicBool::new(false),
            stopped: watch::Sender::new(false),
        };
        Ok(Self { shared: Arc::new(shared), runtime: Some(runtime) })
    }

    /// Runs a future of this bucket to completion and returns its output. Blocks the calling thread: in an asynchronous
    /// context, the other tasks of the thread wait.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let waker = Waker::from(Arc::new(ThreadWaker(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            std::thread::park();
        }
    }

    /// Cancels all current and later pauses between attempts, so that a failed request returns its error. Any thread
    /// may call this.
    pub fn stop(&self) {
        self.shared.stopped.send_replace(true);
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("only a drop takes the runtime")
    }

    /// Runs a request on the thread of the bucket, and returns its result.
    async fn run<T, F>(&self, request: F) -> Result<T, BucketError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, BucketError>> + Send + 'static,
    {
        match self.runtime().spawn(request).await {
            Ok(result) => result,
            Err(_) => {
                let message = "the request ended early".to_owned();
                Err(BucketError { class: FailureClass::InDoubt, message })
            }
        }
    }
}

impl Drop for RemoteBucket {
    fn drop(&mut self) {
        // The shutdown does not wait for requests, so that the bucket can be dropped in an asynchronous context.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for RemoteBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = self.shared.address.display();
        f.debug_struct("RemoteBucket").field("url", &url).field("options", &self.shared.options).finish()
    }
}

impl Shared {
    fn clients(&self) -> Arc<Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).clients.clone()
    }

    /// Returns the path of an object in the bucket. For a local folder, first checks the folder.
    fn locate(&self, key: ObjectKey) -> Result<Path, BucketError> {
        let name = key.to_string();
        if let Some(folder) = &self.folder {
            folder.check(&name)?;
        }
        Ok(self.path_of(&name))
    }

    fn path_of(&self, name: &str) -> Path {
        self.address.prefix.parts().chain(Path::from(name).parts()).collect()
    }

    /// Converts the failure of a request to a [`BucketError`]. If the bucket denied the request, reads the credentials
    /// again.
    fn fail(&self, error: &object_store::Error, answer: Option<&Answer>) -> BucketError {
        let failure = failure(error, answer);
        if matches!(failure.class, FailureClass::Denied | FailureClass::Expired) && self.folder.is_none() {
            self.read_credentials();
        }
        failure
    }

    /// Replaces the clients with new ones for the current environment variables and settings, at most once per
    /// [`REREAD_INTERVAL`]. Keeps the old clients if the settings are invalid.
    fn read_credentials(&self) {
        let mut access = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if access.read.is_some_and(|read| read.elapsed() < REREAD_INTERVAL) {
            return;
        }
        access.read = Some(Instant::now());
        if let Ok(clients) = Clients::connect(&self.address, &self.options.read()) {
            access.clients = Arc::new(clients);
            self.has_new_credentials.store(true, Ordering::Relaxed);
        }
    }

    async fn create(&self, key: ObjectKey, payload: PutPayload) -> Result<Creation, BucketError> {
        let path = self.locate(key)?;
        let clients = self.clients();
        let request = clients.writes.put_opts(&path, payload, PutOptions::from(PutMode::Create));
        match observe(request).await {
            (Ok(_), _) => Ok(Creation::Created),
            (Err(error @ object_store::Error::AlreadyExists { .. }), answer) => {
                if let Some(answer) = answer.filter(Answer::is_conflict) {
                    return Err(self.fail(&error, Some(&answer)));
                }
                if let Some(folder) = &self.folder {
                    folder.sync_folder_of(&key.to_string())?;
                }
                Ok(Creation::Exists)
            }
            (Err(error), answer) => Err(self.fail(&error, answer.as_ref())),
        }
    }

    async fn put(&self, key: ObjectKey, payload: PutPayload) -> Result<(), BucketError> {
        let path = self.locate(key)?;
        let clients = self.clients();
        let (result, answer) = observe(clients.writes.put_opts(&path, payload, PutOptions::default())).await;
        result.map(drop).map_err(|error| self.fail(&error, answer.as_ref()))
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        let path = self.locate(key)?;
        let clients = self.clients();
        let options = GetOptions { range: range.clone().map(GetRange::Bounded), ..GetOptions::default() };
        let read = async {
            let found = clients.others.get_opts(&path, options).await?;
            let len = found.range.end.saturating_sub(found.range.start);
            // Another program may have written an object of any length.
            if len > DATA_OBJECT_LEN_MAX as u64 {
                return Ok::<_, object_store::Error>(Err(len));
            }
            if let GetResultPayload::File(file, _) = found.payload {
                return read_file(file, found.range).await.map(|bytes| Ok((bytes, len)));
            }
            let mut stream = found.into_stream();
            let mut bytes = Vec::with_capacity(len as usize);
            while let Some(piece) = stream.try_next().await? {
                bytes.extend_from_slice(&piece[..piece.len().min(len as usize - bytes.len())]);
            }
            Ok(Ok((bytes, len)))
        };
        let other = |class, message| BucketError { class, message };
        match observe(read).await {
            (Ok(Ok((bytes, len))), _) if bytes.len() as u64 == len => Ok(Some(bytes)),
            (Ok(Ok((bytes, len))), _) => {
                let message = format!("the connection ended after {} of {len} bytes", bytes.len());
                Err(other(FailureClass::InDoubt, message))
            }
            (Ok(Err(len)), _) => {
                let message = format!(
                    "the object has {len} bytes, and no object of an archive has more than {DATA_OBJECT_LEN_MAX}"
                );
                Err(other(FailureClass::Other, message))
            }
            (Err(object_store::Error::NotFound { .. }), answer) if !is_absent_bucket(&answer) => Ok(None),
            // The range starts at or after the end of the object.
            (Err(_), Some(Answer { status: 416, .. })) => Ok(Some(Vec::new())),
            (Err(_), None) if self.is_beyond_end(key, &range) => Ok(Some(Vec::new())),
            (Err(error), answer) => Err(self.fail(&error, answer.as_ref())),
        }
    }

    /// Returns true if a failed request read a range beyond the end of an object in a local folder.
    fn is_beyond_end(&self, key: ObjectKey, range: &Option<Range<u64>>) -> bool {
        let (Some(folder), Some(range)) = (&self.folder, range) else { return false };
        folder.ends_before(&key.to_string(), range.start)
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        if let Some(local) = &self.folder {
            return local.list(folder);
        }
        let prefix = self.path_of(folder.name());
        let clients = self.clients();
        let names = clients.others.list(Some(&prefix)).map(|found| {
            let location = found?.location;
            let within: Vec<_> = location.prefix_match(&self.address.prefix).into_iter().flatten().collect();
            let names: Vec<&str> = within.iter().map(|part| part.as_ref()).collect();
            Ok::<_, object_store::Error>(names.join("/"))
        });
        let (result, answer) = observe(names.try_collect()).await;
        result.map_err(|error| self.fail(&error, answer.as_ref()))
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        let path = self.locate(key)?;
        let clients = self.clients();
        match observe(clients.others.delete(&path)).await {
            (Ok(()), _) => Ok(()),
            (Err(object_store::Error::NotFound { .. }), answer) if !is_absent_bucket(&answer) => Ok(()),
            (Err(error), answer) => Err(self.fail(&error, answer.as_ref())),
        }
    }

    /// Waits before the next attempt. Returns false if there is no further attempt or if the bucket was stopped.
    async fn pause(&self, attempt: u32, class: FailureClass) -> bool {
        let is_denial = matches!(class, FailureClass::Denied | FailureClass::Expired);
        let has_new = is_denial && self.has_new_credentials.swap(false, Ordering::Relaxed);
        let Some(longest) = backoff::delay(&self.options, attempt, class, has_new) else { return false };
        let mut stopped = self.stopped.subscribe();
        let is_stopped = stopped.wait_for(|stopped| *stopped);
        tokio::time::timeout(backoff::jitter(longest), is_stopped).await.is_err()
    }
}

/// Reads a range of a file with one read, because `object_store` would read it in small pieces.
async fn read_file(file: File, range: Range<u64>) -> Result<Vec<u8>, object_store::Error> {
    let read = move || {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        (&file).seek(SeekFrom::Start(range.start))?;
        file.take(range.end - range.start).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let failed =
        |source: io::Error| object_store::Error::Generic { store: "LocalFileSystem", source: source.into() };
    match tokio::task::spawn_blocking(read).await {
        Ok(bytes) => bytes.map_err(failed),
        Err(error) => Err(failed(io::Error::other(error))),
    }
}

fn is_absent_bucket(answer: &Option<Answer>) -> bool {
    answer.as_ref().is_some_and(Answer::is_absent_bucket)
}

impl Bucket for RemoteBucket {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        let (shared, payload) = (self.shared.clone(), PutPayload::from(bytes.to_vec()));
        self.run(async move { shared.create(key, payload).await }).await
    }

    async fn create_shared(&self, key: ObjectKey, bytes: &Arc<Vec<u8>>) -> Result<Creation, BucketError> {
        let payload = PutPayload::from(Bytes::from_owner(SharedBytes(bytes.clone())));
        let shared = self.shared.clone();
        self.run(async move { shared.create(key, payload).await }).await
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        let (shared, payload) = (self.shared.clone(), PutPayload::from(bytes.to_vec()));
        self.run(async move { shared.put(key, payload).await }).await
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        let shared = self.shared.clone();
        self.run(async move { shared.get(key, range).await }).await
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        let shared = self.shared.clone();
        self.run(async move { shared.list(folder).await }).await
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        let shared = self.shared.clone();
        self.run(async move { shared.delete(key).await }).await
    }

    /// Waits for a random delay that grows with `attempt`, within the limits of [`RemoteOptions`]. The delay is longer
    /// after a throttled request. Returns false after the last attempt and after [`RemoteBucket::stop`]. Failures that
    /// are rarely temporary have fewer attempts.
    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        let (shared, class) = (self.shared.clone(), failure.class);
        self.run(async move { Ok(shared.pause(attempt, class).await) }).await.unwrap_or(false)
    }
}
