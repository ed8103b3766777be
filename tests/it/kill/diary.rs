//! The acts of a worker that the Lsn does not tell: one line each, complete or not there, because a kill
//! spares what was written.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use remanent::{Lsn, PageId};

/// One act of a worker, done or about to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It is about to submit the restore `lsn`, back to `target`. Of several entries for one `lsn` the last
    /// one holds: the other workers were killed before they submitted anything.
    Restore { lsn: Lsn, target: Lsn },
    /// It was told that this snapshot is taken.
    Named { name: String, end: Lsn },
    /// It is about to give a name up.
    GiveUp { name: String },
    /// It was told that a fork of the state at `lsn` is made.
    Forked { lsn: Lsn },
    /// The batch `lsn` was refused before it was taken, and its new pages begin with this one: the ids that
    /// it had then are a gap.
    Numbered { lsn: Lsn, first: PageId },
}

#[derive(Clone)]
pub struct Diary {
    path: PathBuf,
}

impl Diary {
    pub fn open(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Adds an entry, in one call of the system.
    pub fn write(&self, entry: &Entry) {
        let line = match entry {
            Entry::Restore { lsn, target } => format!("restore {lsn} {target}\n"),
            Entry::Named { name, end } => format!("named {name} {end}\n"),
            Entry::GiveUp { name } => format!("giveup {name} 0\n"),
            Entry::Forked { lsn } => format!("forked {lsn} 0\n"),
            Entry::Numbered { lsn, first } => format!("numbered {lsn} {first}\n"),
        };
        // The fault that a test puts before a thread's calls may strike here. It does so once.
        let open = || OpenOptions::new().append(true).create(true).open(&self.path);
        let mut file = open().or_else(|_| open()).unwrap();
        assert_eq!(file.write(line.as_bytes()).unwrap(), line.len());
    }

    /// All entries, the oldest first.
    pub fn read(&self) -> Vec<Entry> {
        let text = match File::open(&self.path) {
            Ok(file) => std::io::read_to_string(file).unwrap(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => panic!("{error}"),
        };
        text.lines().map(entry).collect()
    }

    /// The first new pages of batches that were refused before.
    pub fn numbered(&self) -> BTreeMap<Lsn, PageId> {
        let numbered = |entry| match entry {
            Entry::Numbered { lsn, first } => Some((lsn, first)),
            _ => None,
        };
        self.read().into_iter().filter_map(numbered).collect()
    }

    /// The batch to which the restore `lsn` went back, if a worker said so.
    pub fn restored(&self, lsn: Lsn) -> Option<Lsn> {
        self.read().into_iter().rev().find_map(|entry| match entry {
            Entry::Restore { lsn: of, target } if of == lsn => Some(target),
            _ => None,
        })
    }
}

fn entry(line: &str) -> Entry {
    let [kind, first, second] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line:?}") };
    let lsn = |text: &str| Lsn(text.parse().unwrap());
    match kind {
        "restore" => Entry::Restore { lsn: lsn(first), target: lsn(second) },
        "named" => Entry::Named { name: first.to_owned(), end: lsn(second) },
        "giveup" => Entry::GiveUp { name: first.to_owned() },
        "forked" => Entry::Forked { lsn: lsn(first) },
        "numbered" => Entry::Numbered { lsn: lsn(first), first: PageId(second.parse().unwrap()) },
        _ => panic!("{line:?}"),
    }
}
