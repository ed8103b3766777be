//! The host memory that this process uses, and its peak.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The interval of a [`Watch`]. A sample takes some milliseconds of one core, and may delay a thread that
/// maps memory meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Returns the host memory that the process uses, in bytes.
pub fn resident_bytes() -> io::Result<u64> {
    status_bytes("VmRSS:")
}

/// Returns the maximum number of bytes that the process has used since [`forget`].
pub fn peak_bytes() -> io::Result<u64> {
    status_bytes("VmHWM:")
}

/// Resets the value of [`peak_bytes`].
pub fn forget() -> io::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5")
}

fn status_bytes(what: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(what));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other(format!("/proc/self/status has no {what}")))
}

/// The host memory in use by content, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Mapped files of one folder.
    pub mapped: u64,
    /// All other memory.
    pub other: u64,
}

impl Split {
    fn read(folder: &Path) -> io::Result<Self> {
        Ok(Self::of(&std::fs::read_to_string("/proc/self/smaps")?, folder))
    }

    /// Parses the system's list of the process's mappings. The first line of a mapping ends with the path of the
    /// mapped file.
    fn of(smaps: &str, folder: &Path) -> Self {
        let mut split = Self::default();
        let mut is_in_folder = false;
        for line in smaps.lines() {
            if let Some(rss) = line.strip_prefix("Rss:") {
                let kib: u64 = rss.trim().trim_end_matches("kB").trim_end().parse().unwrap_or(0);
                *(if is_in_folder { &mut split.mapped } else { &mut split.other }) += kib << 10;
            } else if line.starts_with(|first: char| first.is_ascii_digit() || first.is_ascii_lowercase()) {
                is_in_folder = line.find('/').is_some_and(|at| Path::new(&line[at..]).starts_with(folder));
            }
        }
        split
    }

    fn max(self, other: Self) -> Self {
        Self { mapped: self.mapped.max(other.mapped), other: self.other.max(other.other) }
    }
}

/// Samples the memory in use by content, until [`Watch::end`]. The system itself records only a peak of the sum.
pub struct Watch {
    sample: Arc<MemorySample>,
    start: Split,
    end: Sender<()>,
    thread: JoinHandle<io::Result<()>>,
}

struct MemorySample {
    folder: PathBuf,
    /// The maximum of each kind so far.
    most: Mutex<Split>,
}

impl MemorySample {
    fn again(&self) -> io::Result<Split> {
        let now = Split::read(&self.folder)?;
        let mut most = self.most.lock().unwrap_or_else(PoisonError::into_inner);
        *most = most.max(now);
        Ok(*most)
    }
}

impl Watch {
    /// Starts sampling. Mapped files of `folder`, which must exist, are counted separately.
    pub fn begin(folder: &Path) -> io::Result<Self> {
        let sample = Arc::new(MemorySample { folder: folder.canonicalize()?, most: Mutex::default() });
        let start = sample.again()?;
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("bench-peak".to_owned()).spawn({
            let sample = sample.clone();
            move || {
                while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                    sample.again()?;
                }
                Ok(())
            }
        })?;
        Ok(Self { sample, start, end, thread })
    }

    /// Returns the peak of each kind above its use at the start.
    pub fn end(self) -> io::Result<Split> {
        let most = self.sample.again()?;
        drop(self.end);
        self.thread.join().map_err(|_| io::Error::other("the sampling thread panicked"))??;
        Ok(Split { mapped: most.mapped - self.start.mapped, other: most.other - self.start.other })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use remanent::options::LogOptions;
    use remanent::{Options, Place};

    /// Long enough that the memory of other tests does not matter.
    const LEN: usize = 256 << 20;

    /// Locks out other tests that use this much memory.
    fn alone() -> impl Drop {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const SMAPS: &str = "\
5581a000-5582c000 r-xp 00002000 08:01 263 /usr/bin/remanent
Size:                 72 kB
Rss:                  40 kB
VmFlags: rd ex mr mw me sd
7f10a000-7f20a000 rw-s 00000000 08:01 991 /mnt/a b/store/log/000000000004.log
Size:              16384 kB
Rss:                 512 kB
AnonHugePages:         0 kB
7f20a000-7f30a000 rw-s 00000000 08:01 992 /mnt/a b/store/log/000000000001.spare (deleted)
Rss:                   8 kB
7f30a000-7f40a000 r--s 00000000 08:01 993 /mnt/a b/store/logs
Rss:                   4 kB
7f40a000-7f50a000 rw-p 00000000 00:00 0
Rss:                 100 kB
";

    #[test]
    fn mappings_of_the_folder_are_separated() {
        let split = |folder: &str| Split::of(SMAPS, Path::new(folder));
        assert_eq!(split("/mnt/a b/store/log"), Split { mapped: 520 << 10, other: 144 << 10 });
        assert_eq!(split("/nowhere"), Split { mapped: 0, other: 664 << 10 });
    }

    #[test]
    fn mapped_log_is_not_counted_as_own_memory() {
        const PAGE_LEN: usize = 64 << 10;
        const SEGMENT_LEN: u64 = 16 << 20;
        const MAPPED: u64 = 4 << 20;
        // On a file system in memory, every log can be mapped.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = Options::new().log(LogOptions::new().segment_len(SEGMENT_LEN)).open(dir.path()).unwrap();
        let mut batch = store.batch();
        batch.create(PAGE_LEN as u64, Place::Host);
        let page = store.commit(batch).unwrap().pages[0];
        let watch = Watch::begin(&dir.path().join("log")).unwrap();
        // Full segments may be unmapped at any time, but the current one is not. The segments of a new log
        // grow until one has room for this much.
        let (mut segment, mut logged, mut before_segment) = (store.stats().segment, 0, 0);
        while logged - before_segment < MAPPED {
            let mut batch = store.batch();
            batch.write(page, 0, &[1; PAGE_LEN - 1]);
            store.commit(batch).unwrap();
            logged += PAGE_LEN as u64;
            if store.stats().segment != segment {
                (segment, before_segment) = (store.stats().segment, logged);
            }
        }
        let split = watch.end().unwrap();
        // A busy log prefaults memory in advance, but not beyond its next segment.
        let brought_in = MAPPED / 2..=logged + 2 * SEGMENT_LEN;
        assert!(brought_in.contains(&split.mapped), "{split:?} of {logged} bytes of log");
    }

    #[test]
    fn watch_records_memory_freed_meanwhile() {
        let _alone = alone();
        let dir = tempfile::tempdir().unwrap();
        let watch = Watch::begin(dir.path()).unwrap();
        let held = std::hint::black_box(vec![1_u8; LEN]);
        while watch.sample.most.lock().unwrap().other < watch.start.other + LEN as u64 / 2 {
            assert!(!watch.thread.is_finished(), "the watch has ended");
            thread::yield_now();
        }
        drop(held);
        let split = watch.end().unwrap();
        assert!((split.mapped, split.other >= LEN as u64 / 2) == (0, true), "{split:?}");
    }

    #[test]
    fn peak_includes_freed_bytes_until_reset() {
        let _alone = alone();
        forget().unwrap();
        let before = peak_bytes().unwrap();
        drop(std::hint::black_box(vec![1_u8; LEN]));
        assert!(peak_bytes().unwrap() >= before + LEN as u64 / 2);
        forget().unwrap();
        assert!(peak_bytes().unwrap() < before + LEN as u64 / 2);
    }
}
