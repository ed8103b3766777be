//! `remanent doctor` reports how a store would work in a directory on this machine, and why.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remanent::Options;
use remanent::disk::{Disk, dir::DirDisk};
use remanent::options::{ImageIo, LogOptions};
use rustix::fs::OFlags;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::cli::aligned_buf::{ALIGN, Aligned};
use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::SCHEMA;
use crate::cli::memory::available;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
Creates a small store in the directory and removes it. The report contains the log and the device that this store \
chose. Times are measured once, on one thread.

Examples:
  remanent doctor
  remanent doctor /mnt/fast --json";

/// Report how a store would work in a directory on this machine
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Doctor {
    /// Existing directory in which to create a temporary store
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Print the report as a JSON object
    #[arg(long)]
    json: bool,
}

/// One line of the report, which describes one property of the machine or the directory.
struct DoctorFinding {
    name: &'static str,
    /// Value for the JSON output.
    value: Value,
    /// Value for the text output.
    text: String,
}

fn finding(name: &'static str, value: impl Into<Value>, text: impl Into<String>) -> DoctorFinding {
    DoctorFinding { name, value: value.into(), text: text.into() }
}

impl Doctor {
    pub fn run(&self, out: &mut Output) -> Outcome {
        // Ctrl-C waits for the probe, which is short and removes its files.
        let interrupt = Interrupt::listen()?;
        let findings = self.findings()?;
        if interrupt.is_noted() {
            return Ok(Ending::Interrupted);
        }
        if self.json {
            let fields = findings.into_iter().map(|finding| (finding.name.to_owned(), finding.value));
            let object: serde_json::Map<_, _> =
                std::iter::once(("schema".to_owned(), SCHEMA.into())).chain(fields).collect();
            out.line(Value::Object(object))?;
        } else {
            for DoctorFinding { name, text, .. } in findings {
                out.line(format_args!("{:<17} {text}", name.replace('_', " ")))?;
            }
        }
        Ok(Ending::Fine)
    }

    fn findings(&self) -> Result<Vec<DoctorFinding>, Failure> {
        let dir = &self.dir;
        let cannot = |what: &str, error: io::Error| {
            Failure::Environment(format!("cannot {what} {}: {error}", dir.display()))
        };
        let whole = fs::canonicalize(dir).map_err(|error| cannot("open", error))?;
        let space =
            rustix::fs::statvfs(dir).map_err(|errno| cannot("get the free space of", errno.into()))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let kind = file_system_of(dir);

        let probe = tempfile::tempdir_in(dir).map_err(|error| cannot("write in", error))?;
        let chosen = choices(probe.path())?;
        let direct = direct_works(probe.path());
        let sync = sync_times(probe.path()).map_err(|error| cannot("sync in", error))?;

        let mut findings = vec![
            finding("directory", whole.display().to_string(), whole.display().to_string()),
            finding("file_system", kind.clone(), kind),
            finding("free_bytes", free, format!("{free} bytes on the file system")),
            finding("log", chosen.log.clone(), format!("written {}", chosen.log)),
            finding(
                "images",
                chosen.images.clone(),
                format!("written {}; {}", chosen.images, chosen.other_images),
            ),
            match &direct {
                Ok(()) => finding("direct_io", true, "works; verification reads bypass the page cache"),
                Err(error) => finding("direct_io", false, format!("does not work: {error}")),
            },
            finding(
                "sync_us",
                json!({ "median": micros(sync.median), "longest": micros(sync.longest) }),
                format!(
                    "median {} us for 4 KiB, longest of {SYNCS} {} us",
                    micros(sync.median),
                    micros(sync.longest)
                ),
            ),
        ];
        findings.extend(machine());
        findings.push(finding("device", chosen.device.clone(), chosen.device));
        findings.push(driver());
        Ok(findings)
    }
}

/// The methods that a store in the directory uses by default.
struct Choices {
    log: String,
    images: String,
    /// The methods of writing images that the store does not use. If the file system does not support a method, the
    /// text contains the reason.
    other_images: String,
    device: String,
}

/// Creates a store in `dir` and returns the methods that the store uses.
fn choices(dir: &Path) -> Result<Choices, Failure> {
    let options = Options::new().log(LogOptions::new().segment_len(64 << 10));
    let store = options.open(dir.join("store")).map_err(engine_failure)?;
    let recovered = store.recovered();
    let disk = DirDisk::new(dir.join("store"));
    let mut other_images = Vec::new();
    for io in [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct] {
        if io.to_string() != recovered.image_io {
            let refusal = disk.refuses_images(io).map_err(engine_failure)?;
            other_images
                .push(refusal.map_or(format!("{io} is possible"), |reason| format!("not {io}: {reason}")));
        }
    }
    let choices = Choices {
        log: recovered.log_io.clone(),
        images: recovered.image_io.clone(),
        other_images: other_images.join("; "),
        device: recovered.device.clone(),
    };
    store.close().map_err(engine_failure)?;
    Ok(choices)
}

/// Writes a block with direct I/O and reads it back. Returns an error if the file system does not support direct I/O.
fn direct_works(dir: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let file = options.custom_flags(OFlags::DIRECT.bits() as i32).open(dir.join("direct"))?;
    let mut bytes = Aligned::new(ALIGN);
    file.write_all_at(&bytes, 0)?;
    file.read_exact_at(&mut bytes, 0)
}

/// Number of syncs that are timed.
const SYNCS: usize = 20;

/// The measured durations of syncs.
struct SyncTimes {
    median: Duration,
    longest: Duration,
}

/// Measures syncs of small overwrites, like those of a log.
fn sync_times(dir: &Path) -> io::Result<SyncTimes> {
    let file = File::create(dir.join("synced"))?;
    file.write_all_at(&[0; ALIGN * SYNCS], 0)?;
    file.sync_all()?;
    let mut times = Vec::new();
    for index in 0..SYNCS {
        let started = Instant::now();
        file.write_all_at(&[index as u8; ALIGN], (index * ALIGN) as u64)?;
        file.sync_data()?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(SyncTimes { median: times[SYNCS / 2], longest: times[SYNCS - 1] })
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// Returns the resource limits of the process and the machine.
fn machine() -> Vec<DoctorFinding> {
    let limit = |resource| getrlimit(resource).current;
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let (files, locked) = (limit(Resource::Nofile), limit(Resource::Memlock));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (page, memory) = (rustix::param::page_size(), available());
    vec![
        finding("cpus", threads, threads.to_string()),
        finding("memory_bytes", memory, format!("{memory} bytes available for host pages and for commands")),
        finding("page_size", page, format!("{page} bytes")),
        finding("open_files_max", files, shown(files)),
        finding("locked_bytes_max", locked, format!("{} bytes of pinned host memory", shown(locked))),
    ]
}

/// Returns the version of the GPU driver, or the reason why no driver was found.
fn driver() -> DoctorFinding {
    const VERSION: &str = "/proc/driver/nvidia/version";
    match fs::read_to_string(VERSION) {
        Ok(text) => {
            let line = text.lines().next().unwrap_or_default().to_owned();
            finding("gpu_driver", line.clone(), line)
        }
        Err(error) => finding("gpu_driver", Value::Null, format!("none: {VERSION}: {error}")),
    }
}

/// Returns the name of the file system that contains a directory.
pub fn file_system_of(dir: &Path) -> String {
    let system = match rustix::fs::statfs(dir) {
        Ok(system) => system,
        Err(errno) => return format!("unknown: {errno}"),
    };
    // The field is signed on some platforms, and magic numbers have 32 bits.
    let magic = system.f_type as u64 & 0xffff_ffff;
    file_system(magic).map_or(format!("{magic:#x}"), str::to_owned)
}

/// Returns the name of the file system with this magic number, or `None` if it is unknown.
fn file_system(magic: u64) -> Option<&'static str> {
    Some(match magic {
        0xef53 => "ext4, ext3 or ext2",
        0x0102_1994 => "tmpfs",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x2fc1_2fc1 => "zfs",
        0xf2f5_2010 => "f2fs",
        0x794c_7630 => "overlayfs",
        0x6573_5546 => "fuse",
        0x6969 => "nfs",
        0xfe53_4d42 | 0xff53_4d42 => "smb",
        0x0102_1997 => "9p",
        _ => return None,
    })
}
