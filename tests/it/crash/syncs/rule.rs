//! The choice of the sync that is left out.

use remanent::error::{FileName, Folder};
use remanent::testing::sim_disk::SyncPoint;

/// A kind of sync.
#[derive(Clone, Copy, Debug)]
pub enum Sync {
    /// A sync of a window of the log.
    Window,
    /// A sync of an image file.
    Images,
    /// A spare segment, by its own name.
    Spare,
    /// The names in a folder.
    Folder(Folder),
    /// A file of a folder under its temporary name.
    Temporary(Folder),
    /// A segment of that number under its temporary name; those of spares are number 0.
    TemporarySegment(u64),
}

impl Sync {
    fn is(self, point: SyncPoint) -> bool {
        match (self, point) {
            (Sync::Window, SyncPoint::Window(_))
            | (Sync::Images, SyncPoint::File(FileName::Pages(_)))
            | (Sync::Spare, SyncPoint::File(FileName::Spare(_))) => true,
            (Sync::Folder(folder), SyncPoint::Folder(of)) => of == folder,
            (Sync::Temporary(folder), SyncPoint::File(FileName::Temporary(of, _))) => of == folder,
            (Sync::TemporarySegment(number), SyncPoint::File(file)) => {
                file == FileName::Temporary(Folder::Log, number)
            }
            _ => false,
        }
    }
}

/// One sync of a work: the n-th of its kind, counted once a number of another kind have been.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    nth: usize,
    sync: Sync,
    after: Option<(usize, Sync)>,
}

/// The `n`-th sync of a kind, from 1.
pub fn nth(n: usize, sync: Sync) -> Rule {
    Rule { nth: n, sync, after: None }
}

/// The first sync of a kind after the `n`-th of another.
pub fn after(n: usize, other: Sync, sync: Sync) -> Rule {
    Rule { nth: 1, sync, after: Some((n, other)) }
}

impl Rule {
    /// A predicate that is asked of each sync in turn: whether it is the one.
    pub fn chooses(self) -> impl FnMut(SyncPoint) -> bool + Send + 'static {
        let (mut to_wait_for, mut seen) = (self.after.map_or(0, |(count, _)| count), 0);
        move |point| {
            let is_it = to_wait_for == 0 && self.sync.is(point) && {
                seen += 1;
                seen == self.nth
            };
            if self.after.is_some_and(|(_, other)| other.is(point)) {
                to_wait_for = to_wait_for.saturating_sub(1);
            }
            is_it
        }
    }
}
