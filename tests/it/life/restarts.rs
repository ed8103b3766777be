//! Closes, opens and kills, and the state that the next open recovers.

use std::time::Duration;

use remanent::options::LogIo;

use super::ages::KEPT_FOR_MS;
use super::bounds::disk_bytes;
use super::process::Worker;
use super::text::{Command, Kind, OpenWith};
use super::{Life, SEGMENT_LENS};
use crate::kill::workload::Random;

/// Number of spare segments that a close may find already created or not.
const SPARES_MADE_MAX: u64 = 4;

impl Life {
    pub(super) fn reopen(&mut self) {
        self.ask(&Command::Close);
        self.with = open_with(&mut self.random, self.log_io);
        let lsn = self.open();
        self.model.reopen();
        if lsn != self.model.lsn() {
            self.fail(&format!("opened at batch {lsn}, closed at {}", self.model.lsn()));
        }
        self.tally.reopenings += 1;
        self.compare();
    }

    /// Opens without a commit leave the disk unchanged, except for spare segments, because a close may
    /// interrupt their creation. A snapshot is taken first, because this number of opens triggers a snapshot,
    /// which would write the images of changed pages.
    pub(super) fn open_and_close_often(&mut self) {
        self.reopen();
        self.ask(&Command::Snapshot(Kind::Fuzzy));
        self.tally.snapshots += 1;
        let before = self.disk_bytes_after_opens(4);
        let after = self.disk_bytes_after_opens(12);
        if after > before + SPARES_MADE_MAX * self.with.segment_len {
            self.fail(&format!("twelve opens that committed nothing took {} bytes", after - before));
        }
        // While a page is not loaded, no snapshot is removed. The check of the next prune does not take this
        // into account, so load all pages first.
        self.compare();
    }

    /// Returns the size of the closed store's directory after this number of additional opens and closes.
    fn disk_bytes_after_opens(&mut self, opens: usize) -> u64 {
        for _ in 0..opens {
            self.ask(&Command::Close);
            self.open();
        }
        self.ask(&Command::Close);
        let taken = disk_bytes(&self.store());
        self.open();
        taken
    }

    /// Kills the worker at a random time during a command, and checks the state that the next process
    /// recovers.
    pub(super) fn kill(&mut self) {
        let changes = self.draw_batch();
        let command = match self.random.below(5) {
            0..=1 => Command::Commit(changes.clone()),
            2 => Command::Snapshot(Kind::Fuzzy),
            3 => Command::Snapshot(Kind::Exact),
            _ => Command::Close,
        };
        self.send_command(&command);
        let pause = Duration::from_nanos(1 << self.random.below(26));
        std::thread::park_timeout(pause);
        self.worker.kill();
        self.told.push_back("(killed)".to_owned());
        self.tally.kills += 1;
        self.start_again();
        if self.random.below(3) == 0 {
            self.kill_an_opening();
        }
        let (lsn, before) = (self.open(), self.model.lsn());
        match (command, lsn.checked_sub(before)) {
            (_, Some(0)) => {}
            (Command::Commit(changes), Some(1)) => self.model.commit(&changes),
            _ => self.fail(&format!("opened at batch {lsn}, {before} was acknowledged")),
        }
        self.model.reopen();
        self.compare();
    }

    fn kill_an_opening(&mut self) {
        let with = self.with.clone();
        self.send_command(&Command::Open(with));
        let pause = Duration::from_nanos(1 << self.random.below(24));
        std::thread::park_timeout(pause);
        self.worker.kill();
        self.told.push_back("(killed)".to_owned());
        self.tally.kills += 1;
        self.start_again();
    }

    /// Starts a new process with the same clock.
    fn start_again(&mut self) {
        self.worker = Worker::start(self.ground.path());
        self.set_clock();
    }
}

/// Selects random options for an open.
pub fn open_with(random: &mut Random, log_io: LogIo) -> OpenWith {
    OpenWith {
        log_io: log_io.to_string(),
        segment_len: SEGMENT_LENS[random.below(4) as usize],
        on_demand: random.below(2) == 0,
        compressed: random.below(2) == 0,
        snapshot_log_bytes: [None, Some(128 << 10), Some(4 << 20)][random.below(3) as usize],
        kept_for_ms: KEPT_FOR_MS[random.below(4) as usize],
    }
}
