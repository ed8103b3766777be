//! The protocol of a life: the commands from the test to its worker, one line each, and the batches that they
//! contain.
//!
//! Both sides of the pipe use these types, so a batch has the same meaning for the store and the model.

use std::fmt::{self, Display};
use std::str::FromStr;

use crate::kill::workload::Random;

/// Bytes that are computed from a seed and their offset in the page, so that they need not be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(pub u64);

impl Pattern {
    /// Zeros, the content of a new page.
    pub const ZEROS: Self = Self(0);

    /// Fills `out` with the pattern's bytes from `offset` of the page on. Odd seeds produce noise, even ones
    /// produce runs of equal bytes, which are compressible.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            let word = self.word(at / 8).to_le_bytes();
            let skip = (at % 8) as usize;
            let taken = rest.len().min(8 - skip);
            rest[..taken].copy_from_slice(&word[skip..skip + taken]);
            rest = &mut rest[taken..];
            at += taken as u64;
        }
    }

    fn word(self, index: u64) -> u64 {
        match self.0 {
            0 => 0,
            seed if seed % 2 == 1 => Random(seed ^ index.rotate_left(32)).next(),
            seed => (Random(seed ^ (index / 512)).next() & 0xff) * 0x0101_0101_0101_0101,
        }
    }

    /// Returns `len` bytes of the pattern, from `offset` of a page on.
    pub fn bytes(self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        self.fill(offset, &mut bytes);
        bytes
    }
}

/// An operation of a batch. Pages are identified by their ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Creates a page of zeros.
    Create {
        len: u64,
        key: Option<String>,
    },
    /// Creates a page with initial content.
    CreateFrom {
        len: u64,
        key: Option<String>,
        pattern: Pattern,
    },
    Write {
        page: u64,
        offset: u64,
        len: u64,
        pattern: Pattern,
    },
    /// Replaces all bytes of a page, and thereby its length.
    Replace {
        page: u64,
        len: u64,
        pattern: Pattern,
    },
    Resize {
        page: u64,
        len: u64,
    },
    Delete {
        page: u64,
    },
    SetRoot {
        value: u64,
    },
}

impl Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |key: &Option<String>| key.clone().unwrap_or_else(|| "-".to_owned());
        match self {
            Self::Create { len, key } => write!(f, "create {len} {}", name(key)),
            Self::CreateFrom { len, key, pattern } => write!(f, "from {len} {} {}", name(key), pattern.0),
            Self::Write { page, offset, len, pattern } => {
                write!(f, "write {page} {offset} {len} {}", pattern.0)
            }
            Self::Replace { page, len, pattern } => write!(f, "replace {page} {len} {}", pattern.0),
            Self::Resize { page, len } => write!(f, "resize {page} {len}"),
            Self::Delete { page } => write!(f, "delete {page}"),
            Self::SetRoot { value } => write!(f, "root {value}"),
        }
    }
}

impl FromStr for Change {
    type Err = std::num::ParseIntError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>();
        let key = |at: usize| (words[at] != "-").then(|| words[at].to_owned());
        Ok(match words[0] {
            "create" => Self::Create { len: number(1)?, key: key(2) },
            "from" => Self::CreateFrom { len: number(1)?, key: key(2), pattern: Pattern(number(3)?) },
            "write" => Self::Write {
                page: number(1)?,
                offset: number(2)?,
                len: number(3)?,
                pattern: Pattern(number(4)?),
            },
            "replace" => Self::Replace { page: number(1)?, len: number(2)?, pattern: Pattern(number(3)?) },
            "resize" => Self::Resize { page: number(1)?, len: number(2)? },
            "delete" => Self::Delete { page: number(1)? },
            "root" => Self::SetRoot { value: number(1)? },
            other => panic!("{other} is no operation"),
        })
    }
}

/// A command for the worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Open(OpenWith),
    Commit(Vec<Change>),
    Snapshot(Kind),
    Prune {
        snapshots_kept: usize,
        give_up: Option<String>,
    },
    RestoreTo(u64),
    Scrub,
    /// Lets the follower catch up with the store.
    Follow,
    /// Forks a child process that makes every call that must fail in a child.
    ForkProcess,
    /// Limits the number of additional files that the process may open from now on. `None` removes the limit.
    FilesLeft(Option<u64>),
    /// Limits the number of additional bytes that the process may map from now on, during a commit or a
    /// snapshot. `None` removes the limit.
    MemoryLeft(Option<u64>),
    /// Sets the worker's wall clock to this many milliseconds ahead of the machine's clock.
    Clock(i64),
    State,
    Snapshots,
    /// Returns the maximum memory that the process has used so far.
    Peak,
    Close,
}

/// The kind of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Fuzzy,
    Published,
    Exact,
    Named(String),
}

/// The options for opening a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenWith {
    pub log_io: String,
    pub segment_len: u64,
    pub on_demand: bool,
    pub compressed: bool,
    /// The length of the log after which the store takes a background snapshot.
    pub snapshot_log_bytes: Option<u64>,
    /// The age in milliseconds up to which every snapshot is kept.
    pub kept_for_ms: u64,
}

impl Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(with) => {
                let OpenWith { log_io, segment_len, on_demand, compressed, snapshot_log_bytes, kept_for_ms } =
                    with;
                let log_bytes = snapshot_log_bytes.unwrap_or(0);
                write!(f, "open {log_io} {segment_len} {on_demand} {compressed} {log_bytes} {kept_for_ms}")
            }
            Self::Commit(changes) => {
                let changes: Vec<String> = changes.iter().map(Change::to_string).collect();
                write!(f, "commit {}", changes.join(";"))
            }
            Self::Snapshot(Kind::Fuzzy) => f.write_str("snapshot fuzzy"),
            Self::Snapshot(Kind::Published) => f.write_str("snapshot published"),
            Self::Snapshot(Kind::Exact) => f.write_str("snapshot exact"),
            Self::Snapshot(Kind::Named(name)) => write!(f, "snapshot named {name}"),
            Self::Prune { snapshots_kept, give_up } => {
                write!(f, "prune {snapshots_kept} {}", give_up.as_deref().unwrap_or("-"))
            }
            Self::RestoreTo(lsn) => write!(f, "restore {lsn}"),
            Self::Scrub => f.write_str("scrub"),
            Self::Follow => f.write_str("follow"),
            Self::ForkProcess => f.write_str("fork"),
            Self::FilesLeft(Some(left)) => write!(f, "files {left}"),
            Self::FilesLeft(None) => f.write_str("files -"),
            Self::MemoryLeft(Some(left)) => write!(f, "memory {left}"),
            Self::MemoryLeft(None) => f.write_str("memory -"),
            Self::Clock(ahead) => write!(f, "clock {ahead}"),
            Self::State => f.write_str("state"),
            Self::Snapshots => f.write_str("snapshots"),
            Self::Peak => f.write_str("peak"),
            Self::Close => f.write_str("close"),
        }
    }
}

impl FromStr for Command {
    type Err = std::num::ParseIntError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = rest.split(' ').collect();
        Ok(match verb {
            "open" => Self::Open(OpenWith {
                log_io: words[0].to_owned(),
                segment_len: words[1].parse()?,
                on_demand: words[2] == "true",
                compressed: words[3] == "true",
                snapshot_log_bytes: Some(words[4].parse()?).filter(|bytes| *bytes > 0),
                kept_for_ms: words[5].parse()?,
            }),
            "commit" => Self::Commit(rest.split(';').map(str::parse).collect::<Result<_, _>>()?),
            "snapshot" => Self::Snapshot(match words[0] {
                "fuzzy" => Kind::Fuzzy,
                "published" => Kind::Published,
                "exact" => Kind::Exact,
                _ => Kind::Named(words[1].to_owned()),
            }),
            "prune" => Self::Prune {
                snapshots_kept: words[0].parse()?,
                give_up: (words[1] != "-").then(|| words[1].to_owned()),
            },
            "restore" => Self::RestoreTo(words[0].parse()?),
            "scrub" => Self::Scrub,
            "follow" => Self::Follow,
            "fork" => Self::ForkProcess,
            "files" => Self::FilesLeft(words[0].parse().ok()),
            "memory" => Self::MemoryLeft(words[0].parse().ok()),
            "clock" => Self::Clock(words[0].parse()?),
            "state" => Self::State,
            "snapshots" => Self::Snapshots,
            "peak" => Self::Peak,
            "close" => Self::Close,
            other => panic!("{other} is no command"),
        })
    }
}
