//! Commands during a shortage of open files, memory or disk space. Each command succeeds, or fails without
//! effect on the store.

use super::Life;
use super::text::{Command, Kind};
use crate::machine::filler::Filler;

/// Maximum number of free bytes on a full disk.
const LEFT_MAX: u64 = 256 << 10;
/// Minimum amount of additional memory for a process with a memory limit. It suffices for small allocations
/// and a thread's stack, whose failure cannot be handled.
const MEMORY_LEFT_MIN: u64 = 4 << 20;
const MEMORY_LEFT_MAX: u64 = 20 << 20;
/// Maximum number of commands during a shortage.
const TRIES_MAX: u64 = 8;

impl Life {
    /// Runs commands in a process that can open only a few more files. Each command succeeds, or fails
    /// without effect on the store.
    pub(super) fn run_short_of_files(&mut self) {
        // An access to a page that is not loaded waits until the shortage ends.
        self.compare();
        let left = self.random.below(6);
        self.ask(&Command::FilesLeft(Some(left)));
        self.try_while_short();
        self.ask(&Command::FilesLeft(None));
        self.commit();
        self.compare();
    }

    /// Runs commands in a process that can get only a little more memory.
    pub(super) fn run_short_of_memory(&mut self) {
        self.compare();
        let left = MEMORY_LEFT_MIN + self.random.below(MEMORY_LEFT_MAX - MEMORY_LEFT_MIN);
        self.ask(&Command::MemoryLeft(Some(left)));
        self.try_while_short();
        self.ask(&Command::MemoryLeft(None));
        self.commit();
        self.compare();
    }

    /// Runs commands on a full disk. Each command succeeds, or fails without effect on the store. Opens and
    /// closes succeed.
    pub(super) fn run_short_of_space(&mut self) {
        if self.ground.mount.is_none() {
            return;
        }
        let left = 4096 * self.random.below(LEFT_MAX / 4096);
        let filler = Filler::but(self.ground.path(), left);
        self.told.push_back(format!("(the disk has {left} bytes left)"));
        for _ in 0..=self.random.below(TRIES_MAX) {
            let changes = self.draw_batch();
            let command = match self.random.below(6) {
                0..=2 => Command::Commit(changes.clone()),
                3 => Command::Snapshot(Kind::Fuzzy),
                4 => Command::Prune { snapshots_kept: 1, give_up: None },
                _ => {
                    self.reopen();
                    continue;
                }
            };
            match (&command, self.try_ask(&command)) {
                (Command::Commit(changes), Ok(_)) => self.model.commit(changes),
                (_, Ok(_)) => {}
                (command, Err(refusal)) if refusal.starts_with("refused DiskFull") => self.refused(command),
                (_, Err(refusal)) => self.fail(&refusal),
            }
            self.compare();
        }
        drop(filler);
        self.told.push_back("(the disk has space again)".to_owned());
        self.commit();
    }

    fn try_while_short(&mut self) {
        for _ in 0..=self.random.below(TRIES_MAX) {
            let changes = self.draw_batch();
            let command = match self.random.below(3) {
                0..=1 => Command::Commit(changes.clone()),
                _ => Command::Snapshot(Kind::Fuzzy),
            };
            match (&command, self.try_ask(&command)) {
                (Command::Commit(changes), Ok(_)) => self.model.commit(changes),
                (_, Ok(_)) => {}
                (_, Err(refusal)) if refusal.starts_with("refused Poisoned") => self.fail(&refusal),
                (command, Err(_)) => self.refused(command),
            }
        }
    }

    fn refused(&mut self, command: &Command) {
        if let Command::Commit(changes) = command {
            self.model.refuse(changes);
        }
        self.tally.refused += 1;
    }
}
