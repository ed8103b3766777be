//! The image files of a store that was restored on demand. Their parts are fetched from the archive when they are read,
//! and all others in the background.
//!
//! A part is fetched, compared with its checksum, and written into its file. Only then is it read. Once a file is
//! complete, it is synced and read back from the medium (I7), and removed from UNFETCHED. An image file never changes
//! while it has its name, so after a crash, parts that have their checksum need not be fetched again. A file whose name
//! is removed or given to another file is removed from UNFETCHED first.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use remanent_archive::directory::UnfetchedParts;
use remanent_archive::line::{Archive, ListedPart, SystemNonces, fetch_part};
use remanent_archive::object::crc64;
use remanent_archive::remote::RemoteBucket;
use remanent_archive::rules::Rules;
use remanent_format::{Defect, FileName, Folder, StoreId};

use super::bucket::open_bucket;
use super::failures::error_of;
use crate::base::allocation::make_room;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::{Condvar, Instant, Mutex, threads};
use crate::catalog::publish::{publish, without_spare};
use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result};
use crate::options::ArchiveOptions;

/// Number of threads that fetch parts in the background.
const THREADS: usize = 4;
/// Pause after a part could not be fetched in the background.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Number of the temporary file. Others with lower numbers belong to STORE and ARCHIVE.
const TEMPORARY: u64 = 2;

/// The parts of image files that are not known to be durable in the directory.
pub(super) struct UnfetchedFiles {
    disk: Arc<dyn Disk>,
    url: String,
    bucket: RemoteBucket,
    store: StoreId,
    state: Mutex<State>,
    /// Signaled when the state of a part changes, and when the threads must stop.
    changed: Condvar,
    /// Held while UNFETCHED is written.
    publishing: Mutex<()>,
}

struct State {
    /// The parts of each file, by offset. A file is removed once UNFETCHED does not list it.
    files: BTreeMap<u64, BTreeMap<u64, Part>>,
    /// The parts to fetch in the background. Some may have been fetched already.
    waiting: VecDeque<(u64, u64)>,
    /// Complete files that are not read back yet.
    complete: Vec<u64>,
    is_stopped: bool,
}

struct Part {
    listed: ListedPart,
    status: PartStatus,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PartStatus {
    Missing,
    /// A thread fetches the part. Others wait for it.
    Fetching,
    Local,
}

/// The next work of a background thread.
enum Work {
    Part(u64, u64),
    File(u64),
}

impl UnfetchedFiles {
    /// Reads UNFETCHED. Returns `None` if the directory contains all parts.
    ///
    /// # Errors
    /// Damage if the file is invalid; the errors of opening the bucket.
    pub fn read(disk: Arc<dyn Disk>, options: &ArchiveOptions) -> Result<Option<Self>> {
        if !disk.list(Folder::Root)?.contains(&FileName::Unfetched.name()) {
            return Ok(None);
        }
        let file = disk.open(FileName::Unfetched, false)?;
        let (found, limit) = (file.len()?, UnfetchedParts::LEN_MAX);
        if found > limit {
            return Err(Defect::Limit { what: "bytes", found, limit }.at(FileName::Unfetched, 0).into());
        }
        let mut bytes = Vec::new();
        make_room(&mut bytes, found as usize)?;
        bytes.resize(found as usize, 0);
        file.read_at(0, &mut bytes)?;
        let unfetched = UnfetchedParts::decode(&bytes).map_err(|defect| defect.at(FileName::Unfetched, 0))?;
        let part = |(offset, listed)| (offset, Part { listed, status: PartStatus::Missing });
        let parts = |parts: BTreeMap<u64, ListedPart>| parts.into_iter().map(part).collect();
        let store = unfetched.store;
        let files: BTreeMap<u64, BTreeMap<u64, Part>> =
            unfetched.files.into_iter().map(|(file, listed)| (file, parts(listed))).collect();
        let waiting = files.iter().flat_map(|(file, parts)| parts.keys().map(|offset| (*file, *offset)));
        let waiting = waiting.collect();
        Ok(Some(Self {
            disk,
            url: options.url.clone(),
            bucket: open_bucket(options)?,
            store,
            state: Mutex::new(State { files, waiting, complete: Vec::new(), is_stopped: false }),
            changed: Condvar::new(),
            publishing: Mutex::new(()),
        }))
    }

    /// Returns the numbers of the files that may lack parts.
    pub fn numbers(&self) -> Vec<u64> {
        self.state.lock().files.keys().copied().collect()
    }

    /// Returns whether the file may lack parts.
    pub fn contains(&self, file: u64) -> bool {
        self.state.lock().files.contains_key(&file)
    }

    /// Fetches the parts of a range of a file that the directory lacks. Returns false if the file is complete and was
    /// read back from the medium.
    ///
    /// # Errors
    /// The error of the archive or of the local disk. A later call tries again.
    pub fn provide(&self, file: u64, range: Range<u64>) -> Result<bool> {
        let mut at = range.start;
        loop {
            let mut state = self.state.lock();
            let Some(parts) = state.files.get_mut(&file) else { return Ok(false) };
            // The last part that starts at or below `at`, then those after it.
            let first = parts.range(..=at).next_back().map_or(at, |(offset, _)| *offset);
            let next = parts.range_mut(first..).find(|(offset, part)| {
                **offset < range.end.max(range.start + 1) && part.status != PartStatus::Local
            });
            match next {
                None => return Ok(true),
                Some((_, Part { status: PartStatus::Fetching, .. })) => self.changed.wait(&mut state),
                Some((offset, part)) => {
                    part.status = PartStatus::Fetching;
                    let (offset, listed) = (*offset, part.listed);
                    drop(state);
                    self.fetch(&listed)?;
                    at = offset;
                }
            }
        }
    }

    /// Fetches a part whose status is `Fetching`.
    fn fetch(&self, listed: &ListedPart) -> Result<()> {
        let mut fetching = Fetching { files: self, listed, status: PartStatus::Missing };
        let part = &listed.entry.part;
        let file = self.disk.open(FileName::Pages(part.file), true)?;
        if !is_whole(&*file, listed, |file, offset, out| file.read_at(offset, out))? {
            let archive = Archive { bucket: &self.bucket, nonces: &SystemNonces, rules: Rules::default() };
            let fetched = self.bucket.block_on(fetch_part(archive, listed));
            let bytes = fetched.map_err(|failure| error_of(&self.url, &failure))?;
            file.write_at(part.offset, &bytes)?;
        }
        fetching.status = PartStatus::Local;
        Ok(())
    }

    /// Syncs a complete file and reads it back from the medium. Then removes it from UNFETCHED.
    fn prove(&self, number: u64) -> Result<()> {
        let listed: Vec<ListedPart> = match self.state.lock().files.get(&number) {
            Some(parts) => parts.values().map(|part| part.listed).collect(),
            None => return Ok(()),
        };
        let file = self.disk.open(FileName::Pages(number), false)?;
        file.sync()?;
        for listed in &listed {
            if !is_whole(&*file, listed, |file, offset, out| file.read_bypassing_cache(offset, out))? {
                tracing::warn!(file = %FileName::Pages(number), "fetched bytes changed on the medium");
                let mut state = self.state.lock();
                let offset = listed.entry.part.offset;
                if let Some(part) = state.files.get_mut(&number).and_then(|parts| parts.get_mut(&offset)) {
                    part.status = PartStatus::Missing;
                    state.waiting.push_back((number, offset));
                }
                return Ok(());
            }
        }
        self.forget(number)
    }

    /// Durably removes a file from UNFETCHED, before its name is removed or because it is complete.
    pub fn forget(&self, number: u64) -> Result<()> {
        let _one_at_a_time = self.publishing.lock();
        let left = {
            let state = self.state.lock();
            if !state.files.contains_key(&number) {
                return Ok(());
            }
            let others = state.files.iter().filter(|(file, _)| **file != number);
            let parts = others.flat_map(|(_, parts)| parts.values().map(|part| part.listed));
            UnfetchedParts::new(self.store, parts)
        };
        if left.files.is_empty() {
            self.disk.remove(FileName::Unfetched)?;
            self.disk.sync_folder(Folder::Root)?;
            tracing::info!(archive = self.url, "every page of the store was fetched from its archive");
        } else {
            publish(&self.disk, FileName::Unfetched, TEMPORARY, &[&left.encode()], &without_spare)?;
        }
        self.state.lock().files.remove(&number);
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the next work of a background thread. Waits while there is none. Returns `None` if nothing is left, or the
    /// threads must stop.
    fn next(&self) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            if state.is_stopped || state.files.is_empty() {
                return None;
            }
            if let Some(file) = state.complete.pop() {
                return Some(Work::File(file));
            }
            let State { files, waiting, .. } = &mut *state;
            while let Some((file, offset)) = waiting.pop_front() {
                let part = files.get_mut(&file).and_then(|parts| parts.get_mut(&offset));
                if part.is_some_and(|part| part.status == PartStatus::Missing) {
                    return Some(Work::Part(file, offset));
                }
            }
            self.changed.wait(&mut state);
        }
    }

    /// Fetches all parts in the background. If the failure may pass, the part is fetched again later. If the archive has
    /// lost the part, it is tried again only when it is read.
    fn fetch_all(&self) {
        while let Some(work) = self.next() {
            let done = match work {
                Work::Part(file, offset) => self.provide(file, offset..offset + 1).map(drop),
                Work::File(file) => self.prove(file),
            };
            let Err(error) = done else { continue };
            tracing::warn!(%error, "a part of an image file is not fetched");
            let mut state = self.state.lock();
            match work {
                Work::Part(..) if !error.is_passing_fetch() => continue,
                Work::Part(file, offset) => state.waiting.push_back((file, offset)),
                Work::File(file) => state.complete.push(file),
            }
            let until = Instant::now() + AGAIN_AFTER;
            while !state.is_stopped && Instant::now() < until {
                self.changed.wait_until(&mut state, until);
            }
        }
    }
}

/// Returns whether the bytes of a part are in a file, by their checksum.
fn is_whole(
    file: &dyn DiskFile,
    listed: &ListedPart,
    read: impl Fn(&dyn DiskFile, u64, &mut [u8]) -> Result<()>,
) -> Result<bool> {
    let part = &listed.entry.part;
    let mut bytes = vec![0; part.len as usize];
    read(file, part.offset, &mut bytes)?;
    Ok(crc64(&bytes) == part.crc)
}

/// A part that a thread fetches. Dropping the value sets the status of the part.
struct Fetching<'a> {
    files: &'a UnfetchedFiles,
    listed: &'a ListedPart,
    status: PartStatus,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let part = &self.listed.entry.part;
        let mut state = self.files.state.lock();
        let State { files, complete, .. } = &mut *state;
        if let Some(parts) = files.get_mut(&part.file) {
            if let Some(found) = parts.get_mut(&part.offset) {
                found.status = self.status;
            }
            if parts.values().all(|part| part.status == PartStatus::Local) {
                complete.push(part.file);
            }
        }
        self.files.changed.notify_all();
    }
}

/// The threads that fetch parts in the background. Dropping the value stops and joins them.
pub(crate) struct FetchThreads {
    files: Arc<UnfetchedFiles>,
    threads: Vec<JoinHandle<()>>,
}

impl FetchThreads {
    /// Starts the threads. `when_complete` is called once all files are complete.
    ///
    /// # Errors
    /// The error of the system if a thread cannot be started.
    pub(super) fn start(
        files: Arc<UnfetchedFiles>,
        when_complete: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        let when_complete = Arc::new(when_complete);
        let mut started = Self { files, threads: Vec::new() };
        for _ in 0..THREADS {
            let (files, when_complete) = (started.files.clone(), when_complete.clone());
            let thread = threads::start("remanent-fetch", move || {
                files.fetch_all();
                if files.numbers().is_empty() {
                    when_complete();
                }
            });
            let thread = thread.map_err(|error| Error::thread("a thread that fetches pages", error))?;
            started.threads.push(thread);
        }
        Ok(started)
    }
}

impl Drop for FetchThreads {
    fn drop(&mut self) {
        self.files.state.lock().is_stopped = true;
        self.files.changed.notify_all();
        // Ends pauses before further attempts of a request.
        self.files.bucket.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that fetches pages panicked");
            }
        }
    }
}
