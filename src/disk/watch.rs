//! Waits for changes in a folder, using inotify.
//!
//! A user may have a few hundred inotify instances. Therefore all followers of a folder in this process share one
//! instance and one thread that reads from the instance ([`Hub`]). A forked child has no such thread, and starts
//! without hubs.
//!
//! Notifications are best effort. Stores into a mapping cause no event, so their writer causes one
//! ([`super::Disk::notify_watchers`]). Some file systems provide no events at all. If the system cannot add another
//! watch, a wait lasts for its full timeout.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::{SleepOnlyWatch, Watch};
use crate::base::process::{ForkGuard, PerProcess};
use crate::base::sync::threads;
use crate::base::sync::{Condvar, Instant, Mutex};

/// The inotify events of writes. They include the event that a writer causes to report stores into a mapping.
const WRITES: ReadFlags = ReadFlags::MODIFY.union(ReadFlags::CLOSE_WRITE);

/// The size in bytes of the buffer for events, sufficient for a few dozen events.
const EVENTS_LEN: usize = 4096;

/// The device number and the inode number of a folder. They identify the folder regardless of its path.
type FolderId = (u64, u64);

/// The hubs of the folders that this process watches, by folder.
static HUBS: PerProcess<Mutex<HashMap<FolderId, Weak<ForkGuard<Hub>>>>> = PerProcess::new();

/// Watches the folder at `path`. If the folder cannot be watched, each wait lasts for its full timeout.
pub(super) fn watch(path: &Path) -> Box<dyn Watch> {
    match subscribe(path) {
        Ok(hub) => {
            let seen = hub.news.count.lock().clone();
            Box::new(Subscription { hub, seen })
        }
        Err(error) => {
            tracing::debug!(%error, path = %path.display(), "cannot watch the folder; polling for changes");
            Box::new(SleepOnlyWatch)
        }
    }
}

/// Returns the hub of the folder at `path`, and starts the hub if it does not exist.
fn subscribe(path: &Path) -> io::Result<Arc<ForkGuard<Hub>>> {
    let metadata = std::fs::metadata(path)?;
    let folder = (metadata.dev(), metadata.ino());
    let mut hubs = HUBS.get().lock();
    hubs.retain(|_, hub| hub.strong_count() > 0);
    if let Some(hub) = hubs.get(&folder).and_then(Weak::upgrade)
        && !hub.news.count.lock().is_over
    {
        return Ok(hub);
    }
    let hub = Arc::new(ForkGuard::new(Hub::start(path)?));
    hubs.insert(folder, Arc::downgrade(&hub));
    Ok(hub)
}

/// The inotify instance and thread that watch one folder, shared by all subscribers in this process.
struct Hub {
    inotify: Arc<OwnedFd>,
    watch: i32,
    news: Arc<WatchState>,
}

/// The number of events in a folder so far, and a condition variable that reports new events.
#[derive(Default)]
struct WatchState {
    count: Mutex<Count>,
    changed: Condvar,
}

#[derive(Clone, Default)]
struct Count {
    /// The number of writes, creations, renames and removals of files in the folder so far.
    events: u64,
    /// The number of events so far that created, renamed or removed a name.
    names: u64,
    /// Whether no more events will arrive, because the folder was removed or the system cannot report events.
    is_over: bool,
}

impl Hub {
    fn start(path: &Path) -> io::Result<Self> {
        let inotify = Arc::new(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?);
        let names = WatchFlags::CREATE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO | WatchFlags::DELETE;
        let writes = WatchFlags::MODIFY | WatchFlags::CLOSE_WRITE;
        let watch = inotify::add_watch(&*inotify, path, names | writes | WatchFlags::ONLYDIR)?;
        let news = Arc::new(WatchState::default());
        let (source, state) = (inotify.clone(), news.clone());
        threads::start("remanent-watch", move || report(&source, &state))?;
        Ok(Self { inotify, watch, news })
    }
}

impl Drop for Hub {
    /// Removes the inotify watch. The removal causes an event, which ends the hub's thread.
    fn drop(&mut self) {
        if let Err(errno) = inotify::remove_watch(&*self.inotify, self.watch) {
            tracing::debug!(%errno, "cannot remove the watch of a folder");
        }
    }
}

/// Runs the thread of a hub: counts events, and wakes subscribers.
fn report(inotify: &OwnedFd, news: &WatchState) {
    loop {
        let found = match poll(&mut [PollFd::new(inotify, PollFlags::IN)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => drain(inotify),
            Err(errno) => Err(errno),
        };
        let mut count = news.count.lock();
        count.events += 1;
        match found {
            Ok(WatchEvents { names, is_over }) => {
                count.names += u64::from(names);
                count.is_over = is_over;
            }
            Err(errno) => {
                tracing::warn!(%errno, "cannot read change notifications of a folder");
                count.names += 1;
                count.is_over = true;
            }
        }
        let is_over = count.is_over;
        drop(count);
        news.changed.notify_all();
        if is_over {
            return;
        }
    }
}

/// The kinds of events that one read of the inotify instance returned.
struct WatchEvents {
    names: bool,
    is_over: bool,
}

/// Reads all pending events and returns their kinds.
fn drain(inotify: &OwnedFd) -> rustix::io::Result<WatchEvents> {
    let mut found = WatchEvents { names: false, is_over: false };
    let mut room = [MaybeUninit::uninit(); EVENTS_LEN];
    let mut events = inotify::Reader::new(inotify, &mut room);
    loop {
        match events.next() {
            Ok(event) => {
                found.names |= !WRITES.contains(event.events());
                found.is_over |= event.events().contains(ReadFlags::IGNORED);
            }
            Err(rustix::io::Errno::INTR) => {}
            // No more events are pending.
            Err(rustix::io::Errno::AGAIN) => return Ok(found),
            Err(errno) => return Err(errno),
        }
    }
}

/// A subscription to the events of a folder. It contains the counts at the end of its last wait.
struct Subscription {
    hub: Arc<ForkGuard<Hub>>,
    seen: Count,
}

impl Watch for Subscription {
    fn has_notifications(&self) -> bool {
        !self.seen.is_over
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        let until = Instant::now().checked_add(timeout);
        let WatchState { count, changed } = &*self.hub.news;
        let mut count = count.lock();
        // If no more events will arrive, a wait lasts for its full timeout.
        while count.events == self.seen.events || (count.is_over && self.seen.is_over) {
            match until {
                Some(until) if changed.wait_until(&mut count, until).timed_out() => return false,
                Some(_) => {}
                None => changed.wait(&mut count),
            }
        }
        let names = count.names != self.seen.names;
        self.seen = count.clone();
        names
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::{FileName, Folder};

    use super::super::Disk;
    use super::super::dir::DirDisk;
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn watchers_of_folder_share_hub_and_all_wake() {
        let directory = tempfile::tempdir().unwrap();
        let hubs: Vec<_> = (0..3).map(|_| subscribe(directory.path()).unwrap()).collect();
        assert!(hubs.iter().all(|hub| Arc::ptr_eq(hub, &hubs[0])));
        let mut watches: Vec<_> = (0..3).map(|_| watch(directory.path())).collect();
        drop(hubs);
        std::fs::write(directory.path().join("new"), b"").unwrap();
        assert!(watches.iter_mut().all(|watch| watch.has_notifications() && watch.wait(LONG)));
        // Dropping a subscriber does not affect the others.
        watches.pop();
        std::fs::remove_file(directory.path().join("new")).unwrap();
        assert!(watches.iter_mut().all(|watch| watch.wait(LONG)));
        assert!(!watches[0].wait(Duration::ZERO), "what was heard is not heard again");
    }

    #[test]
    fn notify_wakes_follower_without_changes() {
        let directory = tempfile::tempdir().unwrap();
        let disk = DirDisk::new(directory.path());
        let file = FileName::Temporary(Folder::Root, 1);
        disk.create(file).unwrap().write_at(0, b"bytes").unwrap();
        let path = directory.path().join(file.name());
        let metadata = || std::fs::metadata(&path).unwrap();
        let (modified, hub) = (metadata().modified().unwrap(), subscribe(directory.path()).unwrap());
        disk.notify_watchers(file);
        let mut count = hub.news.count.lock();
        while count.events == 0 {
            let until = Instant::now() + LONG;
            assert!(!hub.news.changed.wait_until(&mut count, until).timed_out(), "nothing is heard");
        }
        assert_eq!((count.names, metadata().len(), metadata().modified().unwrap()), (0, 5, modified));
        // The file does not exist, and is not created.
        disk.notify_watchers(FileName::Temporary(Folder::Root, 2));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn hub_ends_with_last_watcher_or_removed_folder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("folder");
        std::fs::create_dir(&path).unwrap();
        let hub = subscribe(&path).unwrap();
        let news = hub.news.clone();
        drop(hub);
        let mut count = news.count.lock();
        while !count.is_over {
            let until = Instant::now() + LONG;
            assert!(!news.changed.wait_until(&mut count, until).timed_out(), "its thread lives on");
        }
        drop(count);
        let mut watch = watch(&path);
        std::fs::remove_dir(&path).unwrap();
        assert!(watch.wait(LONG) && !watch.has_notifications());
        assert!(!watch.wait(Duration::ZERO));
    }

    #[test]
    fn missing_folder_is_polled() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!watch(&directory.path().join("none")).has_notifications());
    }
}
