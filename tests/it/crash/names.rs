//! The names of snapshots: a crash takes none that a caller was told of, unless it is being given up.

use std::collections::BTreeSet;

use remanent::Store;

use super::explore::{Kind, Violation};

/// The names that snapshots have after each event of a disk.
#[derive(Clone, Default)]
pub struct Names {
    /// The names from an event on.
    since: Vec<(usize, BTreeSet<String>)>,
}

impl Names {
    /// The same names, whatever happens.
    pub fn always(names: BTreeSet<String>) -> Self {
        Self { since: vec![(0, names)] }
    }

    /// A caller was told, after this number of events, that a snapshot with this name is taken.
    pub fn told(&mut self, events: usize, name: &str) {
        let mut names = self.after(events);
        names.insert(name.to_owned());
        self.since.push((events, names));
    }

    /// From here on a name is given up: its snapshot may be there, or not.
    pub fn given_up(&mut self, events: usize, name: &str) {
        let mut names = self.after(events);
        names.remove(name);
        self.since.push((events, names));
    }

    /// The names after this number of events.
    pub fn after(&self, events: usize) -> BTreeSet<String> {
        let last = self.since.iter().rfind(|(since, _)| *since <= events);
        last.map(|(_, names)| names.clone()).unwrap_or_default()
    }

    /// Whether an open store has them.
    pub fn judge(names: &BTreeSet<String>, store: &Store) -> Result<(), Violation> {
        let found: BTreeSet<String> = store.snapshots().into_iter().filter_map(|info| info.name).collect();
        match names.difference(&found).next() {
            Some(name) => Err(Violation::new(Kind::Lost, format!("the snapshot {name:?}"))),
            None => Ok(()),
        }
    }
}
