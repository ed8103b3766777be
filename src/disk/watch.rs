//! Floor 3. Hearing of changes in a folder from the system (inotify), and waiting for them.
//!
//! Only a help: stores into a mapping make no event, some file systems make none at all, and where the system
//! has no more watches to give, a wait takes its whole time.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::{Nap, Watch};

/// Room for a few dozen events at a time.
const EVENTS_LEN: usize = 4096;

/// Watches the folder at `path`, or naps.
pub(super) fn watch(path: &Path) -> Box<dyn Watch> {
    match Inotify::new(path) {
        Ok(inotify) => Box::new(inotify),
        Err(error) => {
            tracing::debug!(%error, path = %path.display(), "nobody tells of changes here");
            Box::new(Nap)
        }
    }
}

struct Inotify(OwnedFd);

impl Inotify {
    fn new(path: &Path) -> rustix::io::Result<Self> {
        let descriptor = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        let names = WatchFlags::CREATE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO | WatchFlags::DELETE;
        inotify::add_watch(&descriptor, path, names | WatchFlags::MODIFY | WatchFlags::ONLYDIR)?;
        Ok(Self(descriptor))
    }

    /// Takes all events that are there; returns whether one is about a name.
    fn drain(&self) -> bool {
        let mut names = false;
        let mut room = [MaybeUninit::uninit(); EVENTS_LEN];
        let mut events = inotify::Reader::new(&self.0, &mut room);
        loop {
            match events.next() {
                Ok(event) => names |= event.events() != ReadFlags::MODIFY,
                Err(rustix::io::Errno::INTR) => {}
                // There are no more.
                Err(rustix::io::Errno::AGAIN) => return names,
                Err(error) => {
                    tracing::warn!(%error, "cannot hear of changes");
                    return true;
                }
            }
        }
    }
}

impl Watch for Inotify {
    fn tells(&self) -> bool {
        true
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => false,
            // A signal ends a wait early, and costs one look.
            Ok(_) | Err(_) => self.drain(),
        }
    }
}
