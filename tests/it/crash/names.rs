//! Names of snapshots. A crash removes no name whose snapshot was reported as complete, unless the name was
//! being released.

use std::collections::BTreeSet;

use remanent::Store;

use super::explore::{Kind, Violation};

/// The snapshot names that must exist after each event of a disk.
#[derive(Clone, Default)]
pub struct Names {
    /// Event numbers, with the names from that event on.
    since: Vec<(usize, BTreeSet<String>)>,
}

impl Names {
    /// Returns a record of names that must exist after every event.
    pub fn always(names: BTreeSet<String>) -> Self {
        Self { since: vec![(0, names)] }
    }

    /// Records that a snapshot with this name was reported as complete after `events` events.
    pub fn told(&mut self, events: usize, name: &str) {
        let mut names = self.after(events);
        names.insert(name.to_owned());
        self.since.push((events, names));
    }

    /// Records that a name is being released from this event on, so that its snapshot may or may not exist.
    pub fn given_up(&mut self, events: usize, name: &str) {
        let mut names = self.after(events);
        names.remove(name);
        self.since.push((events, names));
    }

    /// Returns the names that must exist after this number of events.
    pub fn after(&self, events: usize) -> BTreeSet<String> {
        let last = self.since.iter().rfind(|(since, _)| *since <= events);
        last.map(|(_, names)| names.clone()).unwrap_or_default()
    }

    /// Checks that an open store has these names.
    pub fn judge(names: &BTreeSet<String>, store: &Store) -> Result<(), Violation> {
        let found: BTreeSet<String> = store.snapshots().into_iter().filter_map(|info| info.name).collect();
        match names.difference(&found).next() {
            Some(name) => Err(Violation::new(Kind::Lost, format!("the snapshot {name:?}"))),
            None => Ok(()),
        }
    }
}
