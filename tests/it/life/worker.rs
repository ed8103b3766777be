//! The process that has the store open. It executes commands, one line each, and answers each with one line.
//!
//! The worker does not know the expected content, so the test loses no information when it kills the worker.

use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::options::{Compression, ImageOptions, LogIo, LogOptions, PageLoad};
use remanent::{
    Ack, Error, Key, Lsn, Options, PageId, PageInfo, Place, SnapshotOptions, StatePoint, Store, Ticket, Value,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::ages::SNAPSHOTS_KEPT;
use super::text::{Change, Command, Kind, OpenWith};
use crate::direct_io;
use crate::with_options::With;

/// The prefix of an answer, which distinguishes it from output of the test runner.
pub const ANSWER: &str = "answer: ";
/// The entry of the root that the test changes.
const ROOT_ENTRY: &str = "step";
/// Number of bytes of a page that are read and compared at a time.
const READ_LEN: u64 = 1 << 20;

/// Returns the options of a store in a life.
pub fn options(with: &OpenWith) -> Options {
    let log_io = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct].into_iter();
    let log_io = log_io.clone().find(|io| io.to_string() == with.log_io).expect("a way to write the log");
    let options = Options::new()
        .log(LogOptions::new().io(log_io))
        .images(ImageOptions::new().io(direct_io::image_io(log_io)));
    options.ack(Ack::Durable).with(|options| {
        options.log.segment_len = with.segment_len;
        options.snapshots.log_bytes = with.snapshot_log_bytes;
        options.snapshots.interval = None;
        options.retention.snapshots_kept = SNAPSHOTS_KEPT;
        options.retention.snapshots_kept_for = Duration::from_millis(with.kept_for_ms);
        options.memory.load = if with.on_demand { PageLoad::OnDemand } else { PageLoad::Eager };
        options.images.compression = if with.compressed { Compression::Zstd } else { Compression::Off };
    })
}

struct Worker {
    directory: PathBuf,
    store: Option<Arc<Store>>,
    /// The replica, which keeps its position across reopens of the store.
    replica: Replica,
    last_ticket: Option<Ticket>,
    /// Number of additional bytes that the process may map during commits and snapshots.
    memory_left: Option<u64>,
}

/// Executes commands from standard input until its end.
pub fn work(directory: &Path) -> ! {
    let mut worker = Worker {
        directory: directory.to_owned(),
        store: None,
        replica: Replica::default(),
        last_ticket: None,
        memory_left: None,
    };
    for line in std::io::stdin().lock().lines() {
        let answer = match worker.perform(line.unwrap().parse().unwrap()) {
            Ok(answer) => format!("ok {answer}"),
            Err(error) => {
                let debug = format!("{error:?}");
                let kind = debug.split([' ', '{']).next().unwrap();
                format!("refused {kind} {error}").replace('\n', " ")
            }
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{ANSWER}{answer}").and_then(|()| out.flush()).unwrap();
    }
    std::process::exit(0);
}

impl Worker {
    fn store(&self) -> &Store {
        self.store.as_ref().expect("the store is open")
    }

    fn perform(&mut self, command: Command) -> Result<String, Error> {
        match command {
            Command::Open(with) => {
                let store = options(&with).open(&self.directory)?;
                let lsn = store.lsn();
                self.store = Some(Arc::new(store));
                Ok(lsn.to_string())
            }
            Command::Commit(changes) => self.commit(&changes),
            Command::Snapshot(kind) => {
                let store = self.store();
                let take = || match kind {
                    Kind::Fuzzy => store.snapshot(),
                    Kind::Published => {
                        store.snapshot_with(SnapshotOptions::new().only_published()).and_then(|info| {
                            store.wait_verified()?;
                            Ok(info)
                        })
                    }
                    Kind::Exact => store.snapshot_with(SnapshotOptions::new().exact()),
                    Kind::Named(name) => store.snapshot_with(SnapshotOptions::new().name(&name)),
                };
                with_memory(self.memory_left, take).map(|snapshot| snapshot.id.to_string())
            }
            Command::Prune { snapshots_kept, give_up } => {
                let mut retention = self.store().retention().snapshots_kept(snapshots_kept);
                if let Some(name) = give_up {
                    retention = retention.give_up(name);
                }
                self.store().prune(&retention).map(|_| String::new())
            }
            Command::RestoreTo(lsn) => {
                self.store().restore(StatePoint::Lsn(Lsn(lsn))).map(|at| at.lsn.to_string())
            }
            Command::Scrub => {
                let scrubbed = self.store().scrub()?;
                assert!(scrubbed.damage.is_empty(), "{scrubbed:?}");
                Ok(String::new())
            }
            Command::Follow => self.follow(),
            Command::ForkProcess => {
                self.fork_process();
                Ok(String::new())
            }
            Command::FilesLeft(left) => {
                limit_files(left);
                Ok(String::new())
            }
            Command::MemoryLeft(left) => {
                // Do not limit the memory if a GPU driver is loaded, because the driver maps an unpredictable
                // amount of address space, and a list that gets no pinned memory stops the store.
                let has_driver = std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda.so");
                self.memory_left = left.filter(|_| !has_driver);
                Ok(String::new())
            }
            Command::Clock(ahead_ms) => {
                remanent::testing::wall_clock_jump_to(ahead_ms);
                Ok(String::new())
            }
            Command::State => state(self.store()),
            Command::Snapshots => {
                let list = self.store().snapshots().into_iter().map(|info| {
                    let name = info.name.unwrap_or_else(|| "-".to_owned());
                    format!("{}:{}:{name}:{}:{}", info.redo, info.end, info.id, info.created_unix_ms)
                });
                Ok(list.collect::<Vec<_>>().join(" "))
            }
            Command::Peak => Ok(peak_bytes().to_string()),
            Command::Close => {
                self.last_ticket = None;
                let store = Arc::into_inner(self.store.take().expect("the store is open"));
                store.expect("nothing else holds it").close().map(|()| String::new())
            }
        }
    }

    fn commit(&mut self, changes: &[Change]) -> Result<String, Error> {
        let store = self.store();
        let mut batch = store.batch();
        for change in changes {
            match change {
                Change::Create { len, key } => {
                    let key = key.as_deref().map(|key| Key::new(key).unwrap());
                    batch.create(*len, Place::Host).optional_key(key);
                }
                Change::CreateFrom { len, key, pattern } => {
                    let key = key.as_deref().map(|key| Key::new(key).unwrap());
                    batch.create_from(pattern.bytes(0, *len), Place::Host).optional_key(key);
                }
                Change::Write { page, offset, len, pattern } => {
                    batch.write(PageId(*page), *offset, &pattern.bytes(*offset, *len));
                }
                Change::Replace { page, len, pattern } => {
                    batch.resize(PageId(*page), *len).write(PageId(*page), 0, &pattern.bytes(0, *len));
                }
                Change::Resize { page, len } => {
                    batch.resize(PageId(*page), *len);
                }
                Change::Delete { page } => {
                    batch.delete(PageId(*page));
                }
                Change::SetRoot { value } => {
                    batch.set_root(ROOT_ENTRY, Value::from(*value));
                }
            }
        }
        let submit = || {
            let ticket = store.submit(batch)?;
            ticket.wait(Ack::Durable)?;
            Ok::<_, Error>(ticket)
        };
        let ticket = with_memory(self.memory_left, submit)?;
        let pages: Vec<String> = ticket.pages().iter().map(ToString::to_string).collect();
        let answer = format!("{} {}", ticket.position().lsn, pages.join(","));
        self.last_ticket = Some(ticket);
        Ok(answer)
    }

    /// Advances the replica to the store's newest batch, and compares every byte of the replica with the
    /// store.
    fn follow(&mut self) -> Result<String, Error> {
        let newest = self.store().lsn();
        if self.replica.lsn() == newest {
            return Ok("there".to_owned());
        }
        let mut answer = "went on";
        let position = FollowFrom::Position(self.replica.position());
        let mut follower = match Follower::open(&self.directory, position) {
            Ok(follower) => follower,
            Err(Error::Overtaken { .. } | Error::Diverged { .. }) => {
                answer = "started over";
                self.start_over()?
            }
            Err(error) => return Err(error),
        };
        while self.replica.lsn() < newest {
            let step = follower.next(Duration::from_secs(60)).and_then(|batch| {
                let batch = batch.expect("the batch is logged");
                self.replica.apply(&batch)
            });
            match step {
                Ok(()) => {}
                Err(Error::Overtaken { .. }) => {
                    answer = "started over";
                    follower = self.start_over()?;
                }
                Err(error) => return Err(error),
            }
        }
        let store = self.store.as_ref().expect("the store is open");
        let pages: Vec<PageInfo> = self.replica.pages().collect();
        assert_eq!(pages, all_pages(store)?, "the replica's pages are the store's");
        for info in &pages {
            let read = |offset: u64, out: &mut [u8]| store.read(info.page, offset, out).map(drop);
            let (ours, theirs) =
                (checksum(info.len, read)?, crc32fast::hash(self.replica.bytes(info.page).unwrap()));
            assert_eq!(ours, theirs, "page {} of the replica", info.page);
        }
        Ok(answer.to_owned())
    }

    fn start_over(&mut self) -> Result<Follower, Error> {
        self.replica = Replica::from_snapshot(&self.directory)?;
        Follower::open(&self.directory, FollowFrom::Position(self.replica.position()))
    }

    /// Forks a child that makes calls which only the opening process may make, including a wait for a ticket
    /// of the parent.
    fn fork_process(&self) {
        let (ticket, page) = (self.last_ticket.clone(), PageId(1));
        let store = self.store.clone().expect("the store is open");
        let refusals = move || {
            let refused = |result: Result<(), Error>| matches!(result, Err(Error::Forked { .. }));
            let is_refused = refused(store.read(page, 0, &mut []).map(drop))
                && refused(store.wait_durable(Lsn(1)))
                && refused(store.submit(store.batch()).map(drop))
                && refused(store.snapshot().map(drop))
                && ticket.as_ref().is_none_or(|ticket| refused(ticket.wait(Ack::Durable)));
            // `spawn` returns this value in the parent.
            if is_refused { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
        };
        let mut command = std::process::Command::new("true");
        // SAFETY: each of these calls first checks the process id and then returns an error that owns no
        // memory. No lock is taken, and no memory is allocated.
        unsafe { command.pre_exec(refusals) };
        assert!(command.status().expect("the child is refused everything").success());
    }
}

fn all_pages(store: &Store) -> Result<Vec<PageInfo>, Error> {
    Ok(store.pages()?.collect())
}

/// Returns the whole state in one line: the newest batch, the root's entry, and the checksum of every page.
fn state(store: &Store) -> Result<String, Error> {
    let root = store.root()?.get(ROOT_ENTRY).cloned();
    let root = match root {
        None => 0,
        Some(Value::U64(value)) => value,
        Some(other) => panic!("{other:?} in the root"),
    };
    let mut line = format!("{} {root}", store.lsn());
    for info in all_pages(store)? {
        let sum = checksum(info.len, |offset, out| store.read(info.page, offset, out).map(drop))?;
        let key = info.key.map_or_else(|| "-".to_owned(), |key| key.to_string());
        line += &format!(" {}:{}:{key}:{sum:08x}", info.page, info.len);
    }
    Ok(line)
}

/// Returns the CRC-32 of `len` bytes that are read in pieces.
pub fn checksum<E>(len: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>) -> Result<u32, E> {
    let mut sum = crc32fast::Hasher::new();
    let mut piece = vec![0; usize::try_from(READ_LEN.min(len)).unwrap()];
    let mut offset = 0;
    while offset < len {
        let taken = &mut piece[..usize::try_from(READ_LEN.min(len - offset)).unwrap()];
        read(offset, taken)?;
        sum.update(taken);
        offset += taken.len() as u64;
    }
    Ok(sum.finalize())
}

/// Returns the CRC-32 of a pattern, computed with pieces of the same length.
pub fn checksum_of(len: u64, fill: impl Fn(u64, &mut [u8])) -> u32 {
    let read = |offset: u64, out: &mut [u8]| {
        fill(offset, out);
        Ok::<(), std::convert::Infallible>(())
    };
    checksum(len, read).unwrap_or_else(|never| match never {})
}

/// Limits the number of additional files that the process may open.
fn limit_files(left: Option<u64>) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = match left {
        None => maximum,
        Some(left) => {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
            Some(open + left)
        }
    };
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

/// Runs `work` while the process may map only this number of additional bytes.
fn with_memory<T>(left: Option<u64>, work: impl FnOnce() -> T) -> T {
    let Some(left) = left else { return work() };
    let Rlimit { maximum, .. } = getrlimit(Resource::As);
    let current = Some(status_bytes("VmSize:") + left);
    setrlimit(Resource::As, Rlimit { current, maximum }).unwrap();
    let done = work();
    setrlimit(Resource::As, Rlimit { current: maximum, maximum }).unwrap();
    done
}

/// Returns the maximum memory of this process so far, without the page cache of mapped files.
fn peak_bytes() -> u64 {
    status_bytes("VmHWM:")
}

fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).expect("the kernel counts it");
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}
