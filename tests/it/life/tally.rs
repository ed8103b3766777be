//! Counts of the events in a life.

use std::fmt;

/// Counts of the events in a life.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub steps: u64,
    pub commits: u64,
    pub snapshots: u64,
    pub restores: u64,
    pub reopenings: u64,
    pub kills: u64,
    pub forks: u64,
    /// Numbers of clock changes, of snapshots that were removed because of their age, and of giant pages.
    pub jumps: u64,
    pub aged: u64,
    pub giants: u64,
    /// Number of commands that failed for lack of open files, memory or disk space.
    pub refused: u64,
    /// Maximum size of the directory, in percent of its bound and in bytes.
    pub disk_percent_max: u64,
    pub disk_bytes_max: u64,
    pub memory_bytes_max: u64,
}

impl Tally {
    pub const HEADINGS: &str = " steps commits snapshots restores reopenings kills forks jumps aged giants refused  disk max  of bound  memory max";
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, commits, snapshots, restores, reopenings, kills, forks, refused, .. } = self;
        let Self { jumps, aged, giants, .. } = self;
        let [disk, memory] = [self.disk_bytes_max, self.memory_bytes_max].map(|bytes| bytes >> 20);
        write!(
            f,
            "{steps:>6} {commits:>7} {snapshots:>9} {restores:>8} {reopenings:>10} {kills:>5} {forks:>5} \
             {jumps:>5} {aged:>4} {giants:>6} {refused:>7} {disk:>5} MiB {:>7} % {memory:>7} MiB",
            self.disk_percent_max
        )
    }
}
