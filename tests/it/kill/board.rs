//! Memory that the worker and the parent share, and that the parent reads after the worker's death. It
//! consists of a few words of a mapped file. Stores to these words take nanoseconds, so observation disturbs
//! the worker as little as possible, and each acknowledgement is visible immediately.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use remanent::testing::phases::{Edge, Phase};
use remanent::{Ack, Lsn};

/// All phases in which the worker is killed.
pub const PHASES: [Phase; 9] = [
    Phase::Commit,
    Phase::GroupSync,
    Phase::SegmentRoll,
    Phase::SnapshotGather,
    Phase::Publish,
    Phase::Recycle,
    Phase::Recovery,
    Phase::WriteAhead,
    Phase::Move,
];

/// Words 1 to 9 count the threads in each phase. The other words follow.
const BEGUN: usize = 10;
const LOGGED: usize = 11;
const DURABLE: usize = 12;
const OPENED: usize = 13;
const READY: usize = 14;
const MOVED: usize = 15;
const WORDS: usize = 16;

pub struct Board {
    map: MmapRaw,
}

impl Board {
    /// Opens the board in a file, which is created if it does not exist.
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len((WORDS * size_of::<u64>()) as u64).unwrap();
        Self { map: MmapRaw::map_raw(&file).unwrap() }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS);
        // The index stays inside the mapping, which is WORDS words long.
        let word = self.map.as_mut_ptr().cast::<u64>().wrapping_add(index);
        // SAFETY: `word` points at eight mapped, writable bytes, which are aligned because a mapping begins
        // at a page. They stay mapped as long as `self`, which the reference borrows. Both processes access
        // them only through atomics.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// Records that a thread of the worker enters or leaves a phase.
    pub fn pass(&self, phase: Phase, edge: Edge) {
        match edge {
            Edge::Enter => self.word(phase as usize).fetch_add(1, Ordering::SeqCst),
            Edge::Leave => self.word(phase as usize).fetch_sub(1, Ordering::SeqCst),
        };
    }

    /// Returns true if a thread of the worker is in this phase, or was in it when the worker died.
    pub fn is_in(&self, phase: Phase) -> bool {
        self.word(phase as usize).load(Ordering::SeqCst) > 0
    }

    /// Records that the worker recovered the store up to this batch.
    pub fn set_opened(&self, lsn: Lsn) {
        self.word(OPENED).store(lsn.0 + 1, Ordering::SeqCst);
    }

    /// Returns the batch up to which the worker recovered the store, or `None` before that.
    pub fn opened(&self) -> Option<Lsn> {
        self.word(OPENED).load(Ordering::SeqCst).checked_sub(1).map(Lsn)
    }

    /// Records that the worker is waiting for the parent's signal.
    pub fn set_ready(&self) {
        self.word(READY).store(1, Ordering::SeqCst);
    }

    pub fn is_ready(&self) -> bool {
        self.word(READY).load(Ordering::SeqCst) == 1
    }

    /// Records that the worker is about to submit this batch.
    pub fn begin(&self, lsn: Lsn) {
        self.word(BEGUN).fetch_max(lsn.0, Ordering::SeqCst);
    }

    /// Returns the newest batch that may exist.
    pub fn begun(&self) -> Lsn {
        Lsn(self.word(BEGUN).load(Ordering::SeqCst))
    }

    /// Records that this batch and every earlier one were acknowledged to the worker.
    pub fn acknowledge(&self, ack: Ack, lsn: Lsn) {
        let word = if ack == Ack::Durable { DURABLE } else { LOGGED };
        self.word(word).fetch_max(lsn.0, Ordering::SeqCst);
    }

    /// Records that a call of the worker moved pages with batch `lsn` of the log.
    pub fn set_moved(&self, lsn: Lsn) {
        self.word(MOVED).fetch_max(lsn.0, Ordering::SeqCst);
    }

    /// Returns the newest batch that moved pages for a completed call of the worker.
    pub fn moved(&self) -> Lsn {
        Lsn(self.word(MOVED).load(Ordering::SeqCst))
    }

    /// Returns the newest batch acknowledged as durable, which a power cut preserves.
    pub fn durable(&self) -> Lsn {
        Lsn(self.word(DURABLE).load(Ordering::SeqCst))
    }

    /// Returns the newest batch acknowledged at either level, which a kill preserves.
    pub fn acknowledged(&self) -> Lsn {
        Lsn([LOGGED, DURABLE].map(|word| self.word(word).load(Ordering::SeqCst)).into_iter().max().unwrap())
    }

    /// Resets the board before a worker starts. The worker is in no phase and has opened no store.
    /// Acknowledgements to earlier workers are kept.
    pub fn start_over(&self) {
        for phase in PHASES {
            self.word(phase as usize).store(0, Ordering::SeqCst);
        }
        self.word(OPENED).store(0, Ordering::SeqCst);
        self.word(READY).store(0, Ordering::SeqCst);
    }
}
