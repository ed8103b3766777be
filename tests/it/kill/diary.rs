//! A record of those actions of the worker that cannot be derived from the Lsn, in a file with one line per
//! action. A line is complete or absent, because a kill preserves written bytes.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use remanent::{Lsn, PageId};

/// An action of a worker, completed or about to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The worker is about to submit the restore `lsn` of the state at `target`. If there are several entries
    /// for one `lsn`, the last one is valid, because earlier workers were killed before they submitted the
    /// restore.
    Restore { lsn: Lsn, target: Lsn },
    /// A snapshot with this name was reported as taken.
    Named { name: String, end: Lsn },
    /// The worker is about to release a name.
    GiveUp { name: String },
    /// A fork of the state at `lsn` was reported as complete.
    Forked { lsn: Lsn },
    /// The batch `lsn` failed once before. Its new pages begin with the id `first`, because the ids of the
    /// first attempt are skipped.
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

    /// Appends an entry with one system call.
    pub fn write(&self, entry: &Entry) {
        let line = match entry {
            Entry::Restore { lsn, target } => format!("restore {lsn} {target}\n"),
            Entry::Named { name, end } => format!("named {name} {end}\n"),
            Entry::GiveUp { name } => format!("giveup {name} 0\n"),
            Entry::Forked { lsn } => format!("forked {lsn} 0\n"),
            Entry::Numbered { lsn, first } => format!("numbered {lsn} {first}\n"),
        };
        // The fault that is injected into the worker's thread may hit this call, but only once.
        let open = || OpenOptions::new().append(true).create(true).open(&self.path);
        let mut file = open().or_else(|_| open()).unwrap();
        assert_eq!(file.write(line.as_bytes()).unwrap(), line.len());
    }

    /// Returns all entries, oldest first.
    pub fn read(&self) -> Vec<Entry> {
        let text = match File::open(&self.path) {
            Ok(file) => std::io::read_to_string(file).unwrap(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => panic!("{error}"),
        };
        text.lines().map(entry).collect()
    }

    /// Returns the first new page of each batch that failed before.
    pub fn numbered(&self) -> BTreeMap<Lsn, PageId> {
        let numbered = |entry| match entry {
            Entry::Numbered { lsn, first } => Some((lsn, first)),
            _ => None,
        };
        self.read().into_iter().filter_map(numbered).collect()
    }

    /// Returns the target of the restore `lsn`, if a worker recorded it.
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
