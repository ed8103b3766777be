//! The image files of a store that was restored on demand. Parts of these files are fetched from the archive when they
//! are read, and all other parts are fetched in the background.
//!
//! A part is fetched, compared with its checksum, and written into its file. Only then is it read. Once a file is
//! complete, it is synced and read back from the medium (I7), and removed from UNFETCHED. An image file never changes
//! while it has its name, so after a crash, parts that have their checksum need not be fetched again. A file whose name
//! is removed or given to another file is removed from UNFETCHED first, and no part is written to it afterwards: its
//! space may contain other images by then.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use remanent_archive::directory::UnfetchedParts;
use remanent_archive::line::{Archive, ListedPart, SystemNonces, fetch_part};
use remanent_archive::object::{Part as ArchivedPart, crc64};
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
/// Number of the temporary file. The lower numbers belong to STORE and ARCHIVE.
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
    /// The file that is being removed from UNFETCHED, or `None`. No further part is written to this file.
    leaving: Option<u64>,
    is_stopped: bool,
}

struct Part {
    listed: ListedPart,
    status: PartStatus,
    /// Whether the medium returned bytes that differ from the written bytes. The page cache may still contain the right
    /// bytes.
    is_bad: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PartStatus {
    Missing,
    /// A thread fetches the part. Other threads wait for this thread.
    Fetching,
    /// The same thread writes the part to its file, which must keep its name in the meantime.
    Writing,
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
        let part = |(offset, listed)| (offset, Part { listed, status: PartStatus::Missing, is_bad: false });
        let parts = |parts: BTreeMap<u64, ListedPart>| parts.into_iter().map(part).collect();
        let store = unfetched.store;
        let files: BTreeMap<u64, BTreeMap<u64, Part>> =
            unfetched.files.into_iter().map(|(file, listed)| (file, parts(listed))).collect();
        // On a full disk, files are removed that UNFETCHED still lists. They only have to be removed from the list.
        let present: BTreeSet<String> = disk.list(Folder::Pages)?.into_iter().collect();
        let (here, complete): (Vec<u64>, Vec<u64>) =
            files.keys().partition(|file| present.contains(&FileName::Pages(**file).name()));
        let offsets = |file: u64| files[&file].keys().map(move |offset| (file, *offset));
        let waiting = here.into_iter().flat_map(offsets).collect();
        Ok(Some(Self {
            disk,
            url: options.url.clone(),
            bucket: open_bucket(options)?,
            store,
            state: Mutex::new(State { files, waiting, complete, leaving: None, is_stopped: false }),
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
                Some((_, Part { status: PartStatus::Fetching | PartStatus::Writing, .. })) => {
                    self.changed.wait(&mut state);
                }
                Some((offset, part)) => {
                    part.status = PartStatus::Fetching;
                    let (offset, listed, is_bad) = (*offset, part.listed, part.is_bad);
                    drop(state);
                    self.fetch(&listed, is_bad)?;
                    at = offset;
                }
            }
        }
    }

    /// Fetches a part whose status is `Fetching`. `is_bad` is the part's field.
    fn fetch(&self, listed: &ListedPart, is_bad: bool) -> Result<()> {
        let mut fetching = Fetching { files: self, listed, status: PartStatus::Missing };
        let part = &listed.entry.part;
        let file = self.disk.open(FileName::Pages(part.file), true)?;
        if is_bad || !is_whole(&*file, listed, |file, offset, out| file.read_at(offset, out))? {
            let archive = Archive { bucket: &self.bucket, nonces: &SystemNonces, rules: Rules::default() };
            let fetched = self.bucket.block_on(fetch_part(archive, listed));
            let bytes = fetched.map_err(|failure| error_of(&self.url, &failure))?;
            if !self.begin_write(part) {
                // The part is no longer needed, and the open file may already contain other images.
                return Ok(());
            }
            file.write_at(part.offset, &bytes)?;
        }
        fetching.status = PartStatus::Local;
        Ok(())
    }

    /// Sets the status of a part to `Writing`. Returns false if the file was removed from UNFETCHED.
    fn begin_write(&self, part: &ArchivedPart) -> bool {
        let mut state = self.state.lock();
        while state.leaving == Some(part.file) {
            self.changed.wait(&mut state);
        }
        let found = state.files.get_mut(&part.file).and_then(|parts| parts.get_mut(&part.offset));
        found.map(|found| found.status = PartStatus::Writing).is_some()
    }

    /// Syncs a complete file and reads it back from the medium. Then removes it from UNFETCHED. Returns false if parts
    /// must be fetched again.
    fn prove(&self, number: u64) -> Result<bool> {
        let listed: Vec<ListedPart> = match self.state.lock().files.get(&number) {
            Some(parts) => parts.values().map(|part| part.listed).collect(),
            None => return Ok(true),
        };
        if !self.disk.list(Folder::Pages)?.contains(&FileName::Pages(number).name()) {
            return self.forget(number).map(|()| true);
        }
        let file = self.disk.open(FileName::Pages(number), false)?;
        file.sync()?;
        for listed in &listed {
            if !is_whole(&*file, listed, |file, offset, out| file.read_bypassing_cache(offset, out))? {
                tracing::warn!(file = %FileName::Pages(number), "fetched bytes changed on the medium");
                let mut state = self.state.lock();
                let offset = listed.entry.part.offset;
                if let Some(part) = state.files.get_mut(&number).and_then(|parts| parts.get_mut(&offset)) {
                    (part.status, part.is_bad) = (PartStatus::Missing, true);
                    state.waiting.push_back((number, offset));
                }
                return Ok(false);
            }
        }
        self.forget(number).map(|()| true)
    }

    /// Durably removes a file from UNFETCHED, before its name is given to another file or because it is complete.
    pub fn forget(&self, number: u64) -> Result<()> {
        self.leave(number, |left| self.publish(left))
    }

    /// Removes an image file, and before that removes it from UNFETCHED. On a full disk, only the file is removed: the
    /// next open finds that it does not exist.
    pub fn remove(&self, number: u64) -> Result<()> {
        let mut is_removed = false;
        let mut remove = || {
            is_removed = true;
            self.disk.remove(FileName::Pages(number))
        };
        self.leave(number, |left| match self.publish(left) {
            Err(error) if error.is_no_space() => {
                tracing::debug!(%error, "UNFETCHED still lists a file that is removed");
                remove()
            }
            published => published.and_then(|()| remove()),
        })?;
        if is_removed { Ok(()) } else { self.disk.remove(FileName::Pages(number)) }
    }

    /// Removes a file from the list. First calls `act` with the list without the file. After `act` has begun, no part
    /// is written to the file. Does nothing if the list does not contain the file.
    fn leave(&self, number: u64, act: impl FnOnce(&UnfetchedParts) -> Result<()>) -> Result<()> {
        let _one_at_a_time = self.publishing.lock();
        let left = {
            let mut state = self.state.lock();
            state.leaving = Some(number);
            let is_written = |state: &State| {
                let parts = state.files.get(&number).into_iter().flat_map(BTreeMap::values);
                parts.into_iter().any(|part| part.status == PartStatus::Writing)
            };
            while is_written(&state) {
                self.changed.wait(&mut state);
            }
            let others = state.files.iter().filter(|(file, _)| **file != number);
            let parts = others.flat_map(|(_, parts)| parts.values().map(|part| part.listed));
            state.files.contains_key(&number).then(|| UnfetchedParts::new(self.store, parts))
        };
        let acted = left.map_or(Ok(()), |left| act(&left));
        let mut state = self.state.lock();
        state.leaving = None;
        if acted.is_ok() {
            state.files.remove(&number);
        }
        drop(state);
        self.changed.notify_all();
        acted
    }

    fn publish(&self, left: &UnfetchedParts) -> Result<()> {
        if !left.files.is_empty() {
            return publish(&self.disk, FileName::Unfetched, TEMPORARY, &[&left.encode()], &without_spare);
        }
        // An earlier call may have removed the file and then failed.
        if self.disk.list(Folder::Root)?.contains(&FileName::Unfetched.name()) {
            self.disk.remove(FileName::Unfetched)?;
        }
        self.disk.sync_folder(Folder::Root)?;
        tracing::info!(archive = self.url, "every page that the store needs was fetched from its archive");
        Ok(())
    }

    /// Returns the next work of a background thread, after waiting for it if necessary. Returns `None` if no work
    /// remains or the threads must stop.
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

    /// Fetches all parts in the background. After a temporary failure, the part is fetched again later. If the archive
    /// has lost the part, the next attempt is made only when the part is read.
    fn fetch_all(&self) {
        while let Some(work) = self.next() {
            let done = match work {
                Work::Part(file, offset) => self.provide(file, offset..offset + 1).map(|_| true),
                Work::File(file) => self.prove(file),
            };
            let mut state = self.state.lock();
            match (done, work) {
                (Ok(true), _) => continue,
                (Ok(false), _) => {}
                (Err(error), work) => {
                    tracing::warn!(%error, "an image file cannot be fetched from the archive now");
                    match work {
                        Work::Part(..) if !error.is_passing_fetch() => continue,
                        Work::Part(file, offset) => state.waiting.push_back((file, offset)),
                        Work::File(file) => state.complete.push(file),
                    }
                }
            }
            let until = Instant::now() + AGAIN_AFTER;
            while !state.is_stopped && Instant::now() < until {
                self.changed.wait_until(&mut state, until);
            }
        }
    }
}

/// Returns whether a file contains the bytes of a part, by comparing checksums.
fn is_whole(
    file: &dyn DiskFile,
    listed: &ListedPart,
    read: impl Fn(&dyn DiskFile, u64, &mut [u8]) -> Result<()>,
) -> Result<bool> {
    let part = &listed.entry.part;
    let mut bytes = Vec::new();
    make_room(&mut bytes, part.len as usize)?;
    bytes.resize(part.len as usize, 0);
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
        // Ends the pauses between the attempts of a request.
        self.files.bucket.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that fetches pages panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use remanent_archive::object::{DataKey, DataRef, Role};

    use super::*;
    use crate::testing::sim_disk::SimDisk;

    /// Creates a disk whose image files 1 and 2 lack one part each.
    fn incomplete() -> (SimDisk, UnfetchedParts) {
        let disk = SimDisk::new();
        [Folder::Root, Folder::Pages].iter().for_each(|folder| disk.make_folder(*folder).unwrap());
        let store = StoreId([5; 16]);
        let part = |file| {
            disk.create(FileName::Pages(file)).unwrap().write_at(0, &[0; 100]).unwrap();
            let part = ArchivedPart { role: Role::Images, file, offset: 0, len: 100, crc: 7 };
            let key = DataKey { term: 1, random: 2, index: file };
            ListedPart { entry: DataRef { key, part }, store, lister: 3 }
        };
        let listed = UnfetchedParts::new(store, [part(1), part(2)]);
        disk.create(FileName::Unfetched).unwrap().write_at(0, &listed.encode()).unwrap();
        (disk, listed)
    }

    fn read(disk: &SimDisk, bucket: &tempfile::TempDir) -> UnfetchedFiles {
        let options = ArchiveOptions::new(format!("file://{}", bucket.path().display()));
        UnfetchedFiles::read(Arc::new(disk.clone()), &options).unwrap().unwrap()
    }

    /// The file may have a new name and contain other images.
    #[test]
    fn no_part_is_written_to_file_that_has_left() {
        let bucket = tempfile::tempdir().unwrap();
        let (disk, listed) = incomplete();
        let files = read(&disk, &bucket);
        let part = |file: u64| listed.files[&file][&0].entry.part;
        let set = |file: u64, status| {
            files.state.lock().files.get_mut(&file).unwrap().get_mut(&0).unwrap().status = status
        };
        // The bytes of a part arrive after its file has left.
        set(1, PartStatus::Fetching);
        files.forget(1).unwrap();
        assert!(!files.begin_write(&part(1)));
        assert!(files.begin_write(&part(2)), "the other file has not left");
        // A file leaves only after a write to it has ended.
        std::thread::scope(|scope| {
            let leaves = scope.spawn(|| files.forget(2));
            while files.state.lock().leaving.is_none() && !leaves.is_finished() {
                std::thread::yield_now();
            }
            assert!(files.contains(2) && !leaves.is_finished());
            set(2, PartStatus::Local);
            files.changed.notify_all();
            leaves.join().unwrap().unwrap();
        });
        assert!(disk.bytes(FileName::Unfetched).is_none() && files.numbers().is_empty());
        files.forget(2).unwrap();
    }

    #[test]
    fn file_can_be_removed_on_full_disk() {
        let bucket = tempfile::tempdir().unwrap();
        let (disk, listed) = incomplete();
        let files = read(&disk, &bucket);
        disk.set_capacity(Some(disk.used_bytes()));
        files.forget(1).unwrap_err();
        assert!(files.contains(1));
        files.remove(1).unwrap();
        assert!(disk.bytes(FileName::Pages(1)).is_none() && files.numbers() == [2]);
        let left = || UnfetchedParts::decode(&disk.bytes(FileName::Unfetched).unwrap()).unwrap();
        assert_eq!(left(), listed, "there was no space for another list");
        drop(files);
        // After the next open, the file only has to be removed from the list.
        disk.set_capacity(None);
        let files = read(&disk, &bucket);
        assert!(matches!(files.next(), Some(Work::File(1))));
        assert!(files.prove(1).unwrap());
        assert_eq!(left().files.keys().collect::<Vec<_>>(), [&2]);
        files.remove(2).unwrap();
        assert!(disk.bytes(FileName::Unfetched).is_none() && disk.bytes(FileName::Pages(2)).is_none());
    }

    /// The page cache may contain the right bytes although the medium does not.
    #[test]
    fn part_that_the_medium_lost_is_written_again() {
        let bucket = tempfile::tempdir().unwrap();
        let (disk, _) = incomplete();
        let files = read(&disk, &bucket);
        files.state.lock().files.get_mut(&1).unwrap().get_mut(&0).unwrap().status = PartStatus::Local;
        assert!(!files.prove(1).unwrap());
        let state = files.state.lock();
        let part = &state.files[&1][&0];
        assert!(part.status == PartStatus::Missing && part.is_bad && state.waiting.contains(&(1, 0)));
    }
}
