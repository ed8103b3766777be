//! Selects the sync to omit.

use remanent::error::{FileName, Folder};
use remanent::testing::sim_disk::SyncPoint;

/// A kind of sync.
#[derive(Clone, Copy, Debug)]
pub enum Sync {
    /// A sync of a range of the log.
    Window,
    /// A sync of an image file.
    Images,
    /// A sync of a spare segment under its own name.
    Spare,
    /// A sync of a folder, which makes its names durable.
    Folder(Folder),
    /// A sync of a file in a folder under its temporary name.
    Temporary(Folder),
    /// A sync of this segment under its temporary name. Spare segments have number 0.
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

/// One sync of a workload: the n-th of its kind, optionally counted from the n-th sync of another kind on.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    nth: usize,
    sync: Sync,
    after: Option<(usize, Sync)>,
}

/// Selects the `n`-th sync of a kind, counted from 1.
pub fn nth(n: usize, sync: Sync) -> Rule {
    Rule { nth: n, sync, after: None }
}

/// Selects the first sync of a kind after the `n`-th of another kind.
pub fn after(n: usize, other: Sync, sync: Sync) -> Rule {
    Rule { nth: 1, sync, after: Some((n, other)) }
}

impl Rule {
    /// Returns a predicate that is called for each sync in order and returns true for the selected sync.
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
