//! A writer is killed while a file grows, and files are truncated after a reader opened them. No other
//! process may end with SIGBUS, which a store through a mapping raises at a hole on a full disk or beyond the
//! end of the file.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};

use remanent::disk::dir::DirReader;
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::options::{Compression, ImageIo, ImageOptions, LogOptions, SnapshotSchedule};
use remanent::{DeviceChoice, Options, Place, Result};
use remanent_format::judge::{ImageProofs, judge};
use remanent_format::state::survey::Survey;

use super::*;
use crate::machine::filler::Filler;
use crate::machine::mounts::{self, Kind, Mount};
use crate::machine::strace::{self, Fault, Injection, Strace};
use crate::machine::{alone_for, skipped};

const GROWTH_TEST: &str = "kill::growth::kill_during_file_growth_causes_no_sigbus";
/// Environment variable for the role of a child and its directory.
const ROLE: &str = "REMANENT_GROWTH_ROLE";
const PAGE_LEN: u64 = 20_000;
const ROUNDS: u64 = 8;
/// Roles of the processes that must not be killed by a signal.
const OTHERS: [&str; 4] = ["view", "follow", "verify", "open"];
/// System calls that set the length of files, allocate their space and write their bytes.
const CALLS: [&str; 3] = ["ftruncate", "fallocate", "pwrite64"];
/// Numbers of the calls at which the writer is killed. Segments are written page by page.
const NTH: [u64; 8] = [1, 2, 3, 5, 9, 17, 40, 100];

fn options() -> Options {
    let images = ImageOptions::new().io(ImageIo::Mapped).compression(Compression::Off).chunk_len(4 << 10);
    let options = Options::new().device(DeviceChoice::Host).images(images);
    let options = options.log(LogOptions::new().segment_len(64 << 10).io(LogIo::Mapped));
    options.snapshots(SnapshotSchedule::never())
}

/// Commits a batch that fills the page with its number, and creates another page with an image file.
fn commit(store: &Store) -> Result<Lsn> {
    let number = store.lsn().0 + 1;
    let mut batch = store.batch();
    match store.page_by_key("page") {
        Ok(page) => _ = batch.fill(page.page, 0, PAGE_LEN, &[number as u8]),
        Err(_) => _ = batch.create_from(vec![1; PAGE_LEN as usize], Place::Host).key("page"),
    }
    if number.is_multiple_of(4) {
        batch.create_from(vec![number as u8; 5 * PAGE_LEN as usize], Place::Host);
    }
    store.commit(batch).map(|done| done.position.lsn)
}

/// Reports that this process is ready, and waits for a byte on standard input.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn pause() {
    println!("ready");
    std::io::stdin().read_exact(&mut [0]).unwrap();
}

/// Runs a child's role. Typed errors are accepted, because the disk may be full or a file truncated. A panic
/// is not accepted.
fn perform(role: &str, directory: &Path) -> Result<()> {
    match role {
        "write" => write(directory),
        "view" => {
            let view = Store::open_read_only(directory);
            pause();
            let view = view?;
            for page in view.pages() {
                view.read(page.page, 0, &mut vec![0; page.len as usize])?;
            }
            Ok(())
        }
        "follow" => {
            let follower = Follower::open(directory, FollowFrom::Beginning);
            let replica = Replica::from_snapshot(directory);
            pause();
            let position = replica.map(|replica| replica.position());
            for mut follower in
                [follower, position.and_then(|at| Follower::open(directory, at.into()))].into_iter().flatten()
            {
                while follower.next(Duration::ZERO)?.is_some() {}
            }
            Ok(())
        }
        "verify" => {
            let files = DirReader::new(directory);
            let survey = Survey::read(&files);
            pause();
            if let Ok(survey) = survey {
                let _verdict = judge(&survey, &files, &mut ImageProofs::new(&files));
            }
            Ok(())
        }
        "open" => {
            pause();
            let store = options().open(directory)?;
            for _ in 0..3 {
                for _ in 0..10 {
                    // The log uses the existing spares until none are left.
                    let _ = commit(&store);
                }
                let _ = store.snapshot();
            }
            store.close()
        }
        other => panic!("no role {other}"),
    }
}

#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn write(directory: &Path) -> Result<()> {
    pause();
    let store = options().open(directory)?;
    for round in 0..ROUNDS {
        for _ in 0..4 {
            println!("logged {}", commit(&store)?);
        }
        store.snapshot()?;
        if round == ROUNDS / 2 {
            store.wait_durable(store.lsn())?;
        }
    }
    Ok(())
}

/// A child process of this test that is ready and waiting.
struct Role {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Role {
    fn start(role: &str, directory: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", GROWTH_TEST]);
        command.env(ROLE, format!("{role} {}", directory.display()));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "ready"), "{role} ended early");
        Self { process, lines }
    }

    /// Lets the child continue to its end. Returns its exit status and its remaining output.
    fn ended(mut self) -> (std::process::ExitStatus, Vec<String>) {
        // A process that was killed while it waited does not receive the byte.
        let _ = self.process.stdin.as_mut().unwrap().write_all(b"!");
        let lines = self.lines.map_while(std::result::Result::ok).collect();
        (self.process.wait().unwrap(), lines)
    }
}

fn survives(role: Role, what: &str) {
    let (ended, lines) = role.ended();
    assert!(ended.success(), "{what}: {ended} (signal {:?})\n{}", ended.signal(), lines.join("\n"));
}

/// Returns the files in a store's folders whose names have one of these endings.
fn files(directory: &Path, ends: &[&str]) -> Vec<PathBuf> {
    let folders = ["log", "pages", "snapshots"].map(|folder| std::fs::read_dir(directory.join(folder)));
    let paths = folders.into_iter().flatten().flatten().map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|end| ends.iter().any(|wanted| end == *wanted)))
        .collect()
}

/// Extends unfinished and spare files with holes, as if their writer had been killed between setting the
/// length of a file and allocating its space.
fn add_holes(directory: &Path) -> usize {
    let grown = files(directory, &["tmp", "spare"]);
    for path in &grown {
        let file = File::options().write(true).open(path).unwrap();
        let len = file.metadata().unwrap().len();
        // First replace the bytes with unallocated zeros of the same length, then append more of them.
        file.set_len(4096.min(len)).unwrap();
        file.set_len(len.next_multiple_of(64 << 10)).unwrap();
    }
    grown.len()
}

/// Runs writers on a file system, each of which is killed at one system call. Returns the number of kills,
/// and the number of files with holes.
fn kills_in_growth(name: &str, root: &Path) -> (usize, usize) {
    let (mut kills, mut holes) = (0, 0);
    for (calls, nth) in
        CALLS.into_iter().flat_map(|calls| NTH.into_iter().step_by(sized(4, 1)).map(move |nth| (calls, nth)))
    {
        let directory = root.join("store");
        let what = format!("killed at call {nth} of {calls} on {name}");
        let writer = Role::start("write", &directory);
        let injection = Injection { fault: Fault { calls, fault: "signal=KILL" }, nth };
        let strace = Strace::attach(writer.process.id(), &injection, &root.join("strace")).unwrap();
        let (ended, lines) = writer.ended();
        drop(strace);
        assert!(ended.success() || ended.signal() == Some(9), "{what}: {ended}");
        kills += usize::from(ended.signal() == Some(9));
        let logged =
            lines.iter().rev().find_map(|line| line.strip_prefix("logged ")?.parse().ok()).unwrap_or(0);

        holes += add_holes(&directory);
        let filler = Filler::all(root);
        for role in OTHERS {
            survives(Role::start(role, &directory), &format!("{role}, {what}, on a full disk"));
        }
        drop(filler);
        let store = options().open(&directory).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(store.lsn().0 >= logged, "{what}: {logged} was logged, {} is there", store.lsn());
        if let Ok(page) = store.page_by_key("page") {
            assert_eq!(
                store.read_to_vec(page.page).unwrap(),
                vec![store.lsn().0 as u8; PAGE_LEN as usize],
                "{what}"
            );
        }
        for _ in 0..10 {
            commit(&store).unwrap();
        }
        store.snapshot().unwrap();
        drop(store);
        std::fs::remove_dir_all(&directory).unwrap();
    }
    (kills, holes)
}

#[test]
fn kill_during_file_growth_causes_no_sigbus() {
    if let Ok(told) = std::env::var(ROLE) {
        let (role, directory) = told.split_once(' ').unwrap();
        // Errors are typed. Relevant ones were printed.
        let _ = perform(role, Path::new(directory));
        std::process::exit(0);
    }
    alone_for(Duration::from_secs(300), || {
        if let Some(reason) = strace::missing() {
            return skipped("kills in growth", reason);
        }
        let folder = tempfile::tempdir().unwrap();
        let (in_memory, on_disk) = (folder.path().join("tmpfs"), folder.path().join("ext4"));
        let tmpfs = Mount::new(Path::new("tmpfs"), in_memory, &["-t", "tmpfs", "-o", "size=16m"]);
        let ext4 = mounts::make(Kind::Ext4, &folder.path().join("image"), 64 << 20);
        let ext4 = ext4.and_then(|image| Mount::new(&image, on_disk, &["-o", "loop"]));
        for (name, mount) in [("tmpfs", tmpfs), ("ext4", ext4)] {
            match mount {
                Ok(mount) => {
                    let (kills, holes) = kills_in_growth(name, &mount.path);
                    assert!(
                        kills >= sized(3, 12) && holes > kills,
                        "{name}: {kills} kills, {holes} files with holes"
                    );
                }
                Err(reason) => skipped(&format!("kills in growth on {name}"), &reason),
            }
        }
    });
}

/// The files are truncated after a view, a follower, `verify` and an open have opened them.
#[test]
fn files_truncated_under_readers_kill_no_process() {
    for len in [0, 10, 4096, 8192 + 100] {
        let directory = tempfile::tempdir().unwrap();
        let store = options().open(directory.path()).unwrap();
        for _ in 0..3 {
            (0..4).for_each(|_| _ = commit(&store).unwrap());
            store.snapshot().unwrap();
        }
        commit(&store).unwrap();
        drop(store);
        let others = OTHERS.map(|role| (role, Role::start(role, directory.path())));
        for path in files(directory.path(), &["log", "pages", "manifest", "spare"]) {
            let file = File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len().min(len)).unwrap();
        }
        for (role, other) in others {
            survives(other, &format!("{role}, files cut to {len} bytes"));
        }
    }
}
