//! Memory of files that the device copies to: registered within the budget of pinned memory, and given up for
//! any other use of it.
//!
//! A file's memory goes in this order: lists that name it have passed their fences, the device lets go of it,
//! the mapping ends. Only then may the file be cut or removed. Where it is not known that the last list has
//! ended, the memory stays with the device, which ends it with itself.

use std::sync::{Arc, Weak};

use remanent_format::Place;

use super::{Arena, Purpose};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::device::{Fence, Lane, MemoryId, Span};
use crate::disk::DiskFile;
use crate::error::{Error, Result};

/// The files that are registered.
#[derive(Default)]
pub(super) struct RegisteredFiles {
    files: Mutex<Vec<Weak<RegisteredFile>>>,
    /// Whether the device has refused a file: it would refuse the next one, too.
    is_refused: AtomicBool,
}

/// A file whose memory the device copies to, until it is dropped or given up.
pub(crate) struct RegisteredFile {
    arena: Arc<Arena>,
    len: u64,
    state: Mutex<FileState>,
}

struct FileState {
    /// The device's name for it; `None` once it is given up.
    memory: Option<MemoryId>,
    /// Writers that use it now.
    users: usize,
    /// The last list of each lane that names it; 0 where there is none.
    last_uses: [Fence; FILE_LANES.len()],
    /// Whether a list may have been queued that has no fence.
    is_end_unknown: bool,
}

/// The lane that copies to files, and the one that reads back what lies there. Both ways of the bus are in
/// use: no copy stands in a lane after a read-back, where it would hold the queue of long copies.
pub(crate) const FILE_LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// The right to copy to a file's memory. While it lives the memory is not given up.
pub(crate) struct FileTarget {
    file: Arc<RegisteredFile>,
    memory: MemoryId,
}

impl Arena {
    /// Registers the memory of a file, if the file has any that a mapping shares, the device takes it, and
    /// the budget of pinned memory has room for it. All else is no error: the bytes go by way of staging.
    pub(crate) fn register(self: &Arc<Self>, file: &dyn DiskFile) -> Option<Arc<RegisteredFile>> {
        if self.files.is_refused.load(Ordering::Relaxed) {
            return None;
        }
        match self.try_register(file) {
            Ok(registered) => registered,
            Err(error) => {
                tracing::debug!(%error, "an image file stays without registered memory");
                if matches!(error, Error::MemoryRefused { .. }) {
                    self.files.is_refused.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    fn try_register(self: &Arc<Self>, file: &dyn DiskFile) -> Result<Option<Arc<RegisteredFile>>> {
        let Some(mapping) = file.memory()? else { return Ok(None) };
        let (len, account) = (mapping.byte_len(), self.account(Place::Pinned));
        // Before the device is asked (I10).
        account.claim(len)?;
        let memory = self.device.register(mapping).inspect_err(|_| account.unclaim(len))?;
        account.allocated(Purpose::Image, 1, len);
        let last_uses = FILE_LANES.map(|lane| Fence { lane, value: 0 });
        let state = FileState { memory: Some(memory), users: 0, last_uses, is_end_unknown: false };
        let registered = Arc::new(RegisteredFile { arena: self.clone(), len, state: Mutex::new(state) });
        let mut files = self.files.files.lock();
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(&registered));
        Ok(Some(registered))
    }

    /// Gives up files that no writer uses, the oldest first, until `needed` bytes of pinned memory have come
    /// back. Returns whether any have.
    pub(super) fn give_up_files(&self, needed: u64) -> bool {
        let files: Vec<Arc<RegisteredFile>> =
            self.files.files.lock().iter().filter_map(Weak::upgrade).collect();
        let mut given_up = 0;
        for file in files {
            if given_up >= needed {
                break;
            }
            if file.give_up_unused() {
                given_up += file.len;
            }
        }
        given_up > 0
    }
}

impl RegisteredFile {
    /// The right to copy to it; `None` once it is given up.
    pub fn target(self: &Arc<Self>) -> Option<FileTarget> {
        let mut state = self.state.lock();
        let memory = state.memory?;
        state.users += 1;
        Some(FileTarget { file: self.clone(), memory })
    }

    /// Whether a file of this length is registered as a whole, and not given up.
    pub fn is_registered(&self, len: u64) -> bool {
        self.len == len && self.state.lock().memory.is_some()
    }

    fn give_up_unused(&self) -> bool {
        let mut state = self.state.lock();
        state.users == 0 && self.give_up(&mut state)
    }

    /// Gives the memory up, under the lock: a writer that finds none may cut the file.
    fn give_up(&self, state: &mut FileState) -> bool {
        let Some(memory) = state.memory.take() else { return false };
        let device = &self.arena.device;
        if state.is_end_unknown {
            tracing::warn!("a file's memory stays registered: its last use is not known to be over");
            return false;
        }
        let ended = state.last_uses.into_iter().try_for_each(|fence| device.wait(fence));
        match ended.and_then(|()| device.unregister(memory)) {
            Ok(()) => {
                let account = self.arena.account(Place::Pinned);
                account.retired(Purpose::Image, 1, self.len);
                account.released(self.len);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "a file's memory stays mapped until the process ends");
                false
            }
        }
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        let state = &mut *state;
        // No target is left: each of them holds the file.
        self.give_up(state);
    }
}

impl FileTarget {
    /// Bytes of the file, from its start.
    pub fn byte_len(&self) -> u64 {
        self.file.len
    }

    /// A range of the file, for commands.
    pub fn part(&self, offset: u64, len: u64) -> Span {
        Span { memory: self.memory, offset, len }
    }

    /// Notes a list that names the file: its fence, or that the device may have begun it without one.
    pub fn note(&self, queued: Result<Fence, &Error>) {
        let mut state = self.file.state.lock();
        match queued {
            Err(_) => state.is_end_unknown = true,
            Ok(fence) => {
                let last = state.last_uses.iter_mut().find(|last| last.lane == fence.lane);
                let last = last.expect("a lane that copies to files");
                last.value = last.value.max(fence.value);
            }
        }
    }
}

impl Drop for FileTarget {
    fn drop(&mut self) {
        self.file.state.lock().users -= 1;
    }
}
