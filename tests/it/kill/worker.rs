//! The process that is killed. It opens the store and commits the workload from several threads.
//! Concurrently, it uses the store as in production: it takes snapshots in the background or one after
//! another, takes named ones, prunes, forks and restores. It runs until it is killed.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use remanent::disk::{Disk, dir::DirDisk};
use remanent::error::NoSuchState;
use remanent::options::{Compression, ImageIo, LogIo, LogOptions, PageLoad, Retention, SnapshotSchedule};
use remanent::{
    Ack, Error, Lsn, Options, Position, Result, SnapshotOptions, StatePoint, Store, Ticket, WriteBatch,
};

use super::board::Board;
use super::diary::{Diary, Entry};
use super::model::PAST_MAX;
use super::tiers;
use super::workload::{Shape, changes, device, fill, is_restore, next, reshape, restore_target};
use crate::direct_io;
use crate::with_options::With;

/// A folder on a memory file system.
pub const IN_MEMORY: &str = "/dev/shm";
/// Number of batches between two named snapshots.
const NAME_EVERY: u64 = 83;
const FORK_EVERY: u64 = 131;
/// Number of names that are kept.
const NAMES_MAX: usize = 2;

/// The configuration of a worker.
#[derive(Clone, Copy, Default)]
pub struct Manner {
    pub log_io: Option<LogIo>,
    /// Whether the store takes snapshots in the background instead of the worker.
    pub background: bool,
    /// Whether the store has tiers, so that pages move constantly.
    pub has_tiers: bool,
}

impl Manner {
    /// Returns the options of a store in `directory`.
    pub fn options(self, directory: &Path) -> Options {
        let options = options(self.log_io, directory);
        if self.has_tiers { tiers::with_tiers(options) } else { options }
    }
}

/// Returns options with small segments, so that the store constantly changes the segment, takes snapshots and
/// recycles segments. `None` as `log_io` selects a mode that the file system supports. The log is kept long
/// enough for restoring any of the last few batches.
pub fn options(log_io: Option<LogIo>, directory: &Path) -> Options {
    let options = Options::new()
        .device(device())
        .log(LogOptions::new().segment_len(64 << 10))
        .retention(Retention::new().log_kept(256 << 10));
    let options = options.snapshots(SnapshotSchedule::never());
    match log_io {
        // On a memory file system, a device copies pages directly to image files, and short files are reused.
        None if lies_in_memory(directory) => options.with(|options| {
            options.images.io = ImageIo::Mapped;
            options.images.compression = Compression::Off;
            options.images.chunk_len = Some(4 << 10);
        }),
        Some(log_io) => options.with(|options| {
            options.log.io = Some(log_io);
            options.images.io = direct_io::image_io(log_io);
        }),
        None => options.with(|options| options.images.io = mapped_images(directory)),
    }
}

/// Returns the folder, or its nearest existing parent.
fn there(directory: &Path) -> &Path {
    directory.ancestors().find(|path| path.is_dir()).unwrap()
}

/// Returns true if the folder itself is on a memory file system, and not on another one that is mounted
/// there.
fn lies_in_memory(directory: &Path) -> bool {
    let device = |path: &Path| path.metadata().ok().map(|found| found.dev());
    directory.starts_with(IN_MEMORY) && device(there(directory)) == device(Path::new(IN_MEMORY))
}

/// Returns mapped image I/O if the file system supports it.
fn mapped_images(directory: &Path) -> ImageIo {
    match DirDisk::new(there(directory)).refuses_images(ImageIo::Mapped).unwrap() {
        None => ImageIo::Mapped,
        Some(_) => ImageIo::Buffered,
    }
}

/// The next batch, and the state that the batch depends on. Batches are built and submitted under a lock,
/// which determines their Lsn. Threads wait for batches without the lock, so that they share syncs.
struct Line {
    next: Lsn,
    shape: Shape,
    refused: Option<WriteBatch>,
}

/// A submitted batch with its number in the workload, which equals its Lsn unless the store has tiers.
pub struct Submitted {
    number: Lsn,
    ticket: Ticket,
}

/// The state that the threads of a worker share.
pub struct Work<'a> {
    directory: &'a Path,
    pub store: Store,
    pub board: Arc<Board>,
    has_tiers: bool,
    diary: Diary,
    line: Mutex<Line>,
    /// Whether a fork has failed, which must not affect the source.
    pub fork_failed: AtomicBool,
}

pub fn work(directory: &Path, manner: Manner) -> ! {
    end_with_the_parent();
    let board = Arc::new(Board::open(&directory.join("board")));
    let work = Work::open(directory, board, manner).unwrap();
    std::thread::scope(|scope| {
        for ack in [Ack::Logged, Ack::Durable, Ack::Durable] {
            let work = &work;
            scope.spawn(move || {
                loop {
                    work.commit(ack).unwrap();
                }
            });
        }
        if !manner.background {
            loop {
                work.store.snapshot().unwrap();
            }
        }
    });
    unreachable!("no thread ends before the kill");
}

/// Returns the pages of a store, with their lengths.
pub fn shape(store: &Store) -> Result<Shape> {
    Ok(store.pages()?.map(|info| (info.page, info.len)).collect())
}

impl<'a> Work<'a> {
    /// Opens the store, and records this on the board.
    pub fn open(directory: &'a Path, board: Arc<Board>, manner: Manner) -> Result<Self> {
        let hook = board.clone();
        remanent::testing::phases::on_phase(move |phase, edge| hook.pass(phase, edge));
        let path = directory.join("store");
        let options = manner.options(&path).with(|options| {
            options.snapshots.log_bytes = manner.background.then_some(64 << 10);
            options.memory.load = if manner.background { PageLoad::OnDemand } else { PageLoad::Eager };
        });
        let store = options.open(path)?;
        let has_tiers = manner.has_tiers;
        let newest = if has_tiers { tiers::number(&*store.root()?) } else { store.lsn() };
        board.set_opened(newest);
        let line = Mutex::new(Line { next: next(newest, has_tiers), shape: shape(&store)?, refused: None });
        let diary = Diary::open(&directory.join("diary"));
        Ok(Self { directory, store, board, has_tiers, diary, line, fork_failed: AtomicBool::new(false) })
    }

    /// Returns the number of the next batch.
    pub fn next(&self) -> Lsn {
        self.line.lock().unwrap().next
    }

    /// Returns the current pages. Another thread may change them at any time.
    pub fn shape(&self) -> Shape {
        self.line.lock().unwrap().shape.clone()
    }

    /// Closes the store, and reopens it.
    pub fn reopen(self, manner: Manner) -> Result<Self> {
        let Self { directory, store, board, .. } = self;
        store.close()?;
        Self::open(directory, board, manner)
    }

    /// Submits the next batch. Returns `None` for a restore, which needs no wait.
    pub fn submit(&self) -> Result<Option<Submitted>> {
        let mut line = self.line.lock().unwrap();
        let n = line.next;
        if is_restore(n) {
            self.restore(&mut line)?;
            return Ok(None);
        }
        let changes = changes(n, &line.shape);
        // If there was no space for the last batch, submit the same batch again.
        let refused = line.refused.take();
        let is_again = refused.is_some();
        let batch = refused.unwrap_or_else(|| {
            let mut batch = self.store.batch();
            fill(&mut batch, n, &changes);
            batch
        });
        self.board.begin(n);
        let submitted = self.store.submit(batch.clone());
        let ticket = submitted.inspect_err(|_| line.refused = Some(batch))?;
        assert!(self.has_tiers || ticket.position().lsn == n);
        // With tiers, a batch may fail several times before there is enough memory, each time with other page
        // ids.
        if let (true, Some(first)) = (is_again || self.has_tiers, ticket.pages().first()) {
            self.diary.write(&Entry::Numbered { lsn: n, first: *first });
        }
        reshape(&mut line.shape, &changes, ticket.pages());
        line.next = next(n, self.has_tiers);
        Ok(Some(Submitted { number: n, ticket }))
    }

    /// Waits for a batch, and takes the steps that are due after it.
    pub fn wait(&self, submitted: &Submitted, ack: Ack) -> Result<()> {
        let Submitted { number: lsn, ticket } = submitted;
        ticket.wait(ack)?;
        self.board.acknowledge(ack, *lsn);
        if self.has_tiers {
            return self.move_some(*lsn);
        }
        if lsn.0.is_multiple_of(NAME_EVERY) {
            self.name(*lsn)?;
        }
        if lsn.0.is_multiple_of(FORK_EVERY) {
            self.fork(*lsn)?;
        }
        Ok(())
    }

    /// Commits the next batch.
    pub fn commit(&self, ack: Ack) -> Result<()> {
        match self.submit()? {
            Some(submitted) => self.wait(&submitted, ack),
            None => Ok(()),
        }
    }

    /// Restores a kept snapshot, or an earlier batch.
    fn restore(&self, line: &mut Line) -> Result<()> {
        let n = line.next;
        let snapshots = self.store.snapshots();
        let remembered = snapshots.iter().filter(|snapshot| snapshot.end.0 + PAST_MAX as u64 >= n.0);
        let picked = remembered.collect::<Vec<_>>();
        let picked = picked.get(n.0 as usize % 7);
        let record_restore = |target| self.diary.write(&Entry::Restore { lsn: n, target });
        self.board.begin(n);
        let restored = picked.map(|snapshot| {
            record_restore(snapshot.end);
            self.store.restore(StatePoint::Snapshot(snapshot.id))
        });
        let position = match restored {
            Some(Ok(position)) => position,
            // No snapshot was selected, or the snapshot of another thread has replaced it.
            None | Some(Err(Error::NoSuchState(NoSuchState::Snapshot { .. }))) => {
                self.restore_to(n, restore_target(n))?
            }
            Some(Err(error)) => return Err(error),
        };
        assert_eq!(position.lsn, n);
        self.board.acknowledge(Ack::Durable, n);
        line.shape = shape(&self.store)?;
        line.next = n.next();
        Ok(())
    }

    /// Restores the state of batch `target`, or of the oldest batch that can be restored, because the seals
    /// of a hundred snapshots between two batches may fill the kept log.
    fn restore_to(&self, n: Lsn, mut target: Lsn) -> Result<Position> {
        loop {
            self.diary.write(&Entry::Restore { lsn: n, target });
            match self.store.restore(StatePoint::Lsn(target)) {
                Err(Error::NoSuchState(NoSuchState::OutsideWindow { oldest, .. })) if oldest > target => {
                    target = oldest
                }
                ended => return ended,
            }
        }
    }

    /// Takes a named snapshot, and releases the oldest names. Sometimes also releases the new name, which may
    /// be that of the newest snapshot.
    pub fn name(&self, lsn: Lsn) -> Result<()> {
        let turn = lsn.0 / NAME_EVERY % 4;
        let name = lsn.to_string();
        let options = SnapshotOptions::new().name(&name);
        let options = if turn < 2 { options.only_published() } else { options };
        let end = self.store.snapshot_with(options)?.end;
        self.diary.write(&Entry::Named { name: name.clone(), end });
        let mut names: Vec<String> =
            self.store.snapshots().into_iter().filter_map(|info| info.name).collect();
        names.truncate(names.len().saturating_sub(NAMES_MAX));
        names.extend((turn == 0).then_some(name));
        for name in &names {
            self.diary.write(&Entry::GiveUp { name: name.clone() });
            self.store.prune(&self.store.retention().give_up(name).names_only(turn.is_multiple_of(2)))?;
        }
        Ok(())
    }

    /// Forks the state at this batch.
    pub fn fork(&self, lsn: Lsn) -> Result<()> {
        let forks = self.directory.join("forks");
        // Create the folder only if it is missing, because the injected fault may hit this call.
        if !forks.is_dir() {
            std::fs::create_dir_all(&forks).unwrap();
        }
        let directory = forks.join(lsn.to_string());
        match self.store.fork(&directory, StatePoint::Lsn(lsn)) {
            Ok(_) => self.diary.write(&Entry::Forked { lsn }),
            // Other threads have committed in the meantime, and the batch can no longer be restored.
            Err(Error::NoSuchState(NoSuchState::OutsideWindow { oldest, .. })) if oldest > lsn => {}
            Err(error) => {
                self.fork_failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Ends the process when any thread fails, so that the parent detects the failure. Also ends the process when
/// the parent ends, which closes standard input, so that no worker remains.
pub fn end_with_the_parent() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
    std::thread::spawn(|| {
        // The end of the input and an error both mean that the parent has ended.
        let _ended = std::io::stdin().read(&mut [0]);
        std::process::abort();
    });
}
