//! The writer lock of a store directory. The lock permits a single writer, in any process and through any handle.
//!
//! The writer lock combines three locks, because each of them alone is insufficient:
//!
//! 1. A lock of the open file description of `LOCK` (`F_OFD_SETLK`) excludes all other writers. The lock is held until
//!    its descriptor is closed, regardless of other descriptors that this process opens and closes. A forked child
//!    closes its copy of the descriptor ([`ClosedOnFork`]), so the lock ends with its owner.
//! 2. A lock of the process (`F_SETLK`) identifies the owner to a process that fails to acquire the writer lock. If the
//!    kernel or the file system does not support locks of open files, the lock of the process is the only lock. The
//!    system releases it as soon as any code in the process closes any descriptor of `LOCK`, for example while copying
//!    the directory.
//! 3. A registry in the process contains the device and inode of each locked directory, because locks of a process do
//!    not conflict within that process. The registry is checked before `LOCK` is opened.
//!
//! The lock of the open file and the lock of the process cover separate bytes, because a lock of a process
//! conflicts with the locks of its own open files. Earlier versions of Remanent use only the lock of the
//! process, on all bytes. That lock conflicts with both locks of this version, even after the system has
//! released this version's lock of the process.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remanent_format::{FileName, Folder};
use rustix::fs::OFlags;

use super::DiskLock;
use super::claim::{Claim, description};
use super::directory::{Directory, OpenDirectory};
use super::record_locks::{self, Mode, NO_END, Owner, is_lock_unsupported};
use crate::base::closed_on_fork::ClosedOnFork;
use crate::base::process::{ForkGuard, PerProcess};
use crate::base::sync::Mutex;
use crate::error::{Error, IoAction, Result};

/// The device number and the inode number of a directory. They identify the directory regardless of its path.
type DirectoryId = (u64, u64);

/// The directories that this process has locked. A forked child starts with an empty set, because it does not own its
/// parent's locks.
static LOCKED_HERE: PerProcess<Mutex<BTreeSet<DirectoryId>>> = PerProcess::new();

/// The byte of `LOCK` that the lock of the process covers.
const OF_PROCESS: Range<u64> = 0..1;
const OF_OPEN_FILE: Range<u64> = 1..NO_END;

/// The maximum time that an open waits for a lock of an open file if no living process owns the lock.
const CHILD_PATIENCE: Duration = Duration::from_secs(1);

/// Acquires the writer lock of a store directory. The directory stays open until the lock is dropped.
pub(super) fn acquire(directory: Arc<OpenDirectory>) -> Result<Box<dyn DiskLock>> {
    Ok(Box::new(lock_directory(directory)?))
}

fn lock_directory(open: Arc<OpenDirectory>) -> Result<DirLock> {
    let failed = |action| move |source| Error::io(action, FileName::Lock, None, source);
    let directory = Directory::Open(&open);
    // Step 1: check the registry before this process opens any descriptor of `LOCK`, whose close would release a lock.
    let entry = RegistryEntry::claim(id(directory).map_err(failed(IoAction::Inspect))?)?;
    // Step 2: lock the file. If a lock is refused, dropping `entry` removes the directory from the registry.
    let file = open_lock_file(directory, FileName::Lock)?;
    if !take_both(file.file()).map_err(failed(IoAction::Lock))? {
        return Err(Error::Locked { holder: holder(file.file()), store: None });
    }
    // Step 3: write the description, for processes that are refused later, and for earlier writers where locks do not
    // work. It need not survive a crash, and may be missing on a full disk, where a store must open so that pages can
    // be deleted.
    match describe(file.file()).map_err(failed(IoAction::Write)) {
        Err(error) if error.is_no_space() => {
            tracing::warn!(%error, "cannot describe this process in the lock file; others can report only its id");
        }
        described => described?,
    }
    let file = Arc::new(file);
    open.claim(Claim::of(file.clone()).map_err(failed(IoAction::Read))?);
    Ok(DirLock { file, _directory: open, _entry: ForkGuard::new(entry) })
}

/// Acquires the lock of the process and the lock of the open file. Returns `false` if another writer holds either lock.
#[expect(clippy::disallowed_methods, reason = "the system reports no event when a child closes a descriptor")]
fn take_both(file: &File) -> io::Result<bool> {
    // The process lock comes first: if another process is refused, the system reports the owner of the oldest lock, and
    // only this lock has an owner with a process id.
    if !record_locks::try_lock(file, Owner::Process, Mode::Exclusive, OF_PROCESS)? {
        return Ok(false);
    }
    let until = Instant::now() + CHILD_PATIENCE;
    loop {
        match record_locks::try_lock(file, Owner::OpenFile, Mode::Exclusive, OF_OPEN_FILE) {
            // The owner of the lock may have been killed while a child that it has just forked has not run yet. As soon
            // as the child runs, it closes its copy of the descriptor, and the lock ends.
            Ok(false) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Err(error) if is_lock_unsupported(&error) => {
                tracing::warn!(%error, "LOCK is held for as long as this process closes no descriptor of it");
                return Ok(true);
            }
            taken => return taken,
        }
    }
}

/// Opens a lock file, or creates it if it does not exist. The file's content is kept, because another process may have
/// written its description to the file.
pub(super) fn open_lock_file(directory: Directory<'_>, name: FileName) -> Result<ClosedOnFork> {
    ClosedOnFork::open(|| directory.open(name, OFlags::RDWR | OFlags::CREATE))
        .map_err(|source| Error::io(IoAction::Open, name, None, source))
}

fn id(directory: Directory<'_>) -> io::Result<DirectoryId> {
    directory.status(Folder::Root).map(|root| (root.st_dev, root.st_ino))
}

/// Returns whether any process holds the writer lock of the store directory. The registry is checked first, because in
/// the process that holds the lock, closing a descriptor of `LOCK` would release the lock of the process.
pub(super) fn is_locked(directory: Directory<'_>) -> Result<bool> {
    let failed = |action| move |source| Error::io(action, FileName::Lock, None, source);
    let id = match id(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        id => id.map_err(failed(IoAction::Open))?,
    };
    let registry = LOCKED_HERE.get().lock();
    if registry.contains(&id) {
        return Ok(true);
    }
    // The registry stays locked during the query: if another thread took the lock now, closing this descriptor would
    // release that thread's process lock.
    let file = match directory.open(FileName::Lock, OFlags::RDONLY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file.map_err(failed(IoAction::Open))?,
    };
    let conflict = record_locks::conflict(&file, 0..NO_END).map_err(failed(IoAction::Inspect))?;
    Ok(conflict.is_some())
}

/// The writer lock of a store directory, consisting of all three locks.
///
/// The fields drop in order. The file is closed while the registry still contains the directory. Otherwise this close
/// could release the lock of a thread that locks the directory next. A forked child closes nothing: it may have locked
/// the same file itself after its parent's death, and would release that lock.
struct DirLock {
    file: Arc<ClosedOnFork>,
    /// The directory in which the writer's names are resolved while the lock is held. The directory's claim also owns
    /// the lock file.
    _directory: Arc<OpenDirectory>,
    _entry: ForkGuard<RegistryEntry>,
}

impl DiskLock for DirLock {}

impl Drop for DirLock {
    fn drop(&mut self) {
        // A child created by a bare `clone` may have a copy of the descriptor, which would keep the lock.
        if self.file.is_own()
            && let Err(error) = record_locks::unlock(self.file.file(), OF_OPEN_FILE)
            && !is_lock_unsupported(&error)
        {
            tracing::warn!(%error, "cannot release the writer lock before its last descriptor");
        }
    }
}

/// The entry of a locked directory in the registry. Dropping the entry removes it.
struct RegistryEntry {
    directory: DirectoryId,
}

impl RegistryEntry {
    fn claim(directory: DirectoryId) -> Result<Self> {
        if !LOCKED_HERE.get().lock().insert(directory) {
            return Err(Error::Locked {
                holder: format!("this process ({})", HolderInfo::of_this_process()),
                store: None,
            });
        }
        Ok(Self { directory })
    }
}

impl Drop for RegistryEntry {
    fn drop(&mut self) {
        LOCKED_HERE.get().lock().remove(&self.directory);
    }
}

/// The description of the process that holds the lock, written to `LOCK`.
struct HolderInfo {
    process: u32,
    executable: String,
    /// The start time of the process in seconds since the Unix epoch. The start time distinguishes the process from a
    /// later process with the same id.
    started: Option<u64>,
}

impl HolderInfo {
    fn of_this_process() -> Self {
        let executable = std::env::current_exe().ok();
        let name = executable.as_deref().and_then(Path::file_name);
        Self {
            process: std::process::id(),
            executable: name.map_or_else(|| "unknown".to_owned(), |name| name.to_string_lossy().into_owned()),
            started: process_start(),
        }
    }
}

impl fmt::Display for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}, {}", self.process, self.executable)?;
        self.started.map_or(Ok(()), |started| write!(f, ", started {}", UtcTime(started)))
    }
}

/// A time in seconds since the Unix epoch, displayed as a date and a time of day in UTC.
struct UtcTime(u64);

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, second) = (self.0 / 86_400, self.0 % 86_400);
        // In years that begin in March, the leap day is the last day. 400 of them have 146,097 days.
        let days = days + 719_468;
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month + 2) / 5 + 1;
        let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
        let (year, minute) = (era * 400 + year + next, second / 60);
        write!(f, "{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", minute / 60, minute % 60, second % 60)
    }
}

/// Returns the start time of this process in seconds since the Unix epoch, or `None` if `/proc` does not provide it.
fn process_start() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The executable's name is in parentheses and may contain any character. The 22nd field is the 20th after the name.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let system = std::fs::read_to_string("/proc/stat").ok()?;
    let boot: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + ticks / rustix::param::clock_ticks_per_second())
}

/// Writes this process's description to `LOCK`, over an earlier description. The file is not truncated first, because
/// on a full disk the freed space may not be available again.
fn describe(file: &File) -> io::Result<()> {
    // A random second line distinguishes this open from others, because processes of two hosts or containers may have
    // the same number. Earlier versions read only the first line.
    let random = || RandomState::new().build_hasher().finish();
    let description = format!("{}\n{:016x}{:016x}\n", HolderInfo::of_this_process(), random(), random());
    file.write_all_at(description.as_bytes(), 0)
        .and_then(|()| file.set_len(description.len() as u64))
        // On failure, the description of an earlier owner is removed, because it would be wrong.
        .inspect_err(|_| _ = file.set_len(0))
}

/// Returns the description of the lock's holder from `LOCK`. If the holder has not written its description yet, returns
/// the holder's process id.
fn holder(file: &File) -> String {
    let text = description(file);
    // There is no process id if the owner has just released the lock, has lost its process lock, or is in a process
    // namespace that is not visible here.
    match record_locks::conflict(file, 0..NO_END).ok().flatten().and_then(|held| held.process) {
        Some(pid) if !text.starts_with(&format!("process {pid},")) => format!("process {pid}"),
        _ if text.is_empty() => "another process".to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Runs one test of this binary in another process on `directory`, with its standard input and output as pipes.
    fn run_in_child(test: &str, directory: &Path) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &format!("disk::lock::tests::{test}")])
            .env("REMANENT_TEST_ERRAND", directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Returns the directory passed to the child process, or `None` in the process that runs the tests.
    fn child_directory() -> Option<std::path::PathBuf> {
        std::env::var_os("REMANENT_TEST_ERRAND").map(Into::into)
    }

    /// Reads the child's output up to the line that ends with `word`.
    fn wait_for(child: &mut Child, word: &str) {
        let output = BufReader::new(child.stdout.as_mut().unwrap());
        assert!(output.lines().any(|line| line.unwrap().ends_with(word)), "the child ended before {word}");
    }

    fn acquire(directory: &Path) -> Result<Box<dyn DiskLock>> {
        super::acquire(opened(directory))
    }

    fn opened(directory: &Path) -> Arc<OpenDirectory> {
        Arc::new(OpenDirectory::new(directory).unwrap())
    }

    fn is_locked(directory: &Path) -> Result<bool> {
        super::is_locked(Directory::Path(directory))
    }

    fn holder_of(directory: &Path) -> Option<String> {
        match acquire(directory) {
            Ok(_) => None,
            Err(Error::Locked { holder, .. }) => Some(holder),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn times_are_formatted_as_dates() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (951_868_800, "2000-03-01 00:00:00 UTC"),
            (1_798_761_599, "2026-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(UtcTime(seconds).to_string(), expected, "{seconds}");
        }
    }

    #[test]
    fn second_lock_in_process_fails_and_keeps_first() {
        if let Some(directory) = child_directory() {
            println!("\n{}", if holder_of(&directory).is_some() { "refused" } else { "locked" });
            return;
        }
        let name = "second_lock_in_process_fails_and_keeps_first";
        let directory = tempfile::tempdir().unwrap();
        let lock = acquire(directory.path()).unwrap();
        let holder = holder_of(directory.path()).unwrap();
        assert!(holder.starts_with(&format!("this process (process {}, ", std::process::id())), "{holder}");
        // Another path to the same directory is refused, too.
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        assert!(holder_of(&link).is_some());
        // The refused attempts above have not released the process lock.
        let mut other = run_in_child(name, directory.path());
        wait_for(&mut other, "refused");
        assert!(other.wait().unwrap().success());
        drop(lock);
        let mut other = run_in_child(name, directory.path());
        wait_for(&mut other, "locked");
        assert!(other.wait().unwrap().success());
        assert_eq!(holder_of(directory.path()), None);
    }

    #[test]
    fn other_process_is_refused_until_holder_exits() {
        if let Some(directory) = child_directory() {
            let _lock = acquire(&directory).unwrap();
            println!("\nlocked");
            // Waits until the parent kills this process.
            std::io::stdin().lines().for_each(drop);
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let mut other = run_in_child("other_process_is_refused_until_holder_exits", directory.path());
        wait_for(&mut other, "locked");
        let holder = holder_of(directory.path()).unwrap();
        let executable = std::env::current_exe().unwrap();
        let expected =
            format!("process {}, {}", other.id(), executable.file_name().unwrap().to_str().unwrap());
        assert!(holder.starts_with(&expected), "{holder}");
        // A description in `LOCK` whose process id is not that of the lock's owner is ignored.
        std::fs::write(directory.path().join("LOCK"), "process 1, init\n").unwrap();
        assert_eq!(holder_of(directory.path()), Some(format!("process {}", other.id())));
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(holder_of(directory.path()), None);
    }

    #[test]
    fn querying_lock_does_not_acquire_it() {
        if let Some(directory) = child_directory() {
            println!("\n{}", if is_locked(&directory).unwrap() { "held" } else { "free" });
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        assert!(!is_locked(directory.path()).unwrap());
        assert!(!is_locked(&directory.path().join("nothing")).unwrap());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let lock = acquire(directory.path()).unwrap();
        // A query in the process that holds the lock does not release the lock.
        assert!(is_locked(directory.path()).unwrap());
        for (found, lock) in [("held", Some(lock)), ("free", None)] {
            let mut other = run_in_child("querying_lock_does_not_acquire_it", directory.path());
            wait_for(&mut other, found);
            assert!(other.wait().unwrap().success());
            drop(lock);
        }
        assert!(!is_locked(directory.path()).unwrap());
    }

    #[test]
    fn closing_other_descriptor_keeps_lock() {
        if let Some(directory) = child_directory() {
            println!("\n{}", holder_of(&directory).unwrap_or("nobody".to_owned()));
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let _lock = acquire(directory.path()).unwrap();
        // Simulates a program that copies the directory, which releases the process's lock.
        drop(File::open(directory.path().join("LOCK")).unwrap());
        let mut other = run_in_child("closing_other_descriptor_keeps_lock", directory.path());
        let output = BufReader::new(other.stdout.as_mut().unwrap());
        let expected = HolderInfo::of_this_process().to_string();
        assert!(output.lines().any(|line| line.unwrap() == expected), "not refused by {expected}");
        assert!(other.wait().unwrap().success());
    }

    /// An older version locks all bytes of `LOCK` for its process. Its lock and this version's locks exclude each
    /// other.
    #[test]
    fn whole_file_process_lock_excludes_both_ways() {
        if let Some(directory) = child_directory() {
            let file = File::options().write(true).open(directory.join("LOCK")).unwrap();
            let is_taken = record_locks::try_lock(&file, Owner::Process, Mode::Exclusive, 0..NO_END).unwrap();
            println!("\n{}", if is_taken { "taken" } else { "refused" });
            std::io::stdin().lines().for_each(drop);
            return;
        }
        let name = "whole_file_process_lock_excludes_both_ways";
        let directory = tempfile::tempdir().unwrap();
        let lock = acquire(directory.path()).unwrap();
        let drop_lock_of_process = || drop(File::open(directory.path().join("LOCK")).unwrap());
        for lose in [(&|| ()) as &dyn Fn(), &drop_lock_of_process] {
            lose();
            let mut old = run_in_child(name, directory.path());
            wait_for(&mut old, "refused");
            drop(old.stdin.take());
            assert!(old.wait().unwrap().success());
        }
        drop(lock);
        let mut old = run_in_child(name, directory.path());
        wait_for(&mut old, "taken");
        assert_eq!(holder_of(directory.path()), Some(format!("process {}", old.id())));
        drop(old.stdin.take());
        assert!(old.wait().unwrap().success());
        assert_eq!(holder_of(directory.path()), None);
    }

    #[test]
    fn a_directory_that_shares_the_lock_file_is_refused() {
        let above = tempfile::tempdir().unwrap();
        let [store, copy] = ["store", "copy"].map(|name| above.path().join(name));
        for path in [&store, &copy] {
            std::fs::create_dir(path).unwrap();
        }
        let lock = acquire(&store).unwrap();
        std::fs::hard_link(store.join("LOCK"), copy.join("LOCK")).unwrap();
        assert!(holder_of(&copy).is_some());
        assert!(holder_of(&store).is_some(), "the refusal dropped the lock");
        drop(lock);
        assert_eq!(holder_of(&copy), None);
    }

    #[test]
    fn dropping_a_lock_frees_it_despite_a_copied_descriptor() {
        let directory = tempfile::tempdir().unwrap();
        let lock = lock_directory(opened(directory.path())).unwrap();
        let _copy_of_a_child = lock.file.file().try_clone().unwrap();
        drop(lock);
        assert_eq!(holder_of(directory.path()), None);
    }
}
