//! The environment of a benchmark: a temporary directory in the user's directory, a device, and Ctrl-C.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use remanent::device::Device;
use remanent::device::cuda::CudaDevice;
use remanent::device::host::HostDevice;
use remanent::disk::dir::DirDisk;
use remanent::error::Unavailable;
use remanent::options::{Compression, ImageOptions, ScrubSchedule, SnapshotSchedule};
use remanent::{DeviceChoice, Error, Options, Place, Store};
use remanent_tools::shared::engine::engine_failure;
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::file_system_of;
use remanent_tools::shared::interrupt::Interrupt;
use remanent_tools::shared::progress;
use remanent_tools::shared::size::Size;
use rustix::fs::statvfs;
use tempfile::TempDir;

use crate::Common;

/// Number of bytes that must stay free in addition to those of the benchmark, because a nearly full disk is slower.
const SPARE_BYTES: u64 = 256 << 20;

/// The reason why a benchmark stopped early.
pub enum BenchStop {
    /// Ctrl-C was pressed.
    Interrupted,
    Failed(Failure),
}

impl From<Failure> for BenchStop {
    fn from(failure: Failure) -> Self {
        BenchStop::Failed(failure)
    }
}

impl From<Error> for BenchStop {
    fn from(error: Error) -> Self {
        BenchStop::Failed(engine_failure(error))
    }
}

impl From<std::io::Error> for BenchStop {
    fn from(error: std::io::Error) -> Self {
        BenchStop::Failed(Failure::Environment(format!("cannot measure in the directory: {error}")))
    }
}

/// The environment of a benchmark. Dropping this value removes its files.
pub struct Room {
    dir: TempDir,
    pub device: Arc<dyn Device>,
    /// The place of pages.
    pub place: Place,
    /// The duration of opening the device. On a GPU, this includes the creation of the context and loading the kernels.
    pub device_took: Duration,
    interrupt: Interrupt,
    bar: ProgressBar,
}

impl Room {
    /// Creates the temporary directory and opens the device. Fails if the disk has less than `bytes` of free
    /// space. `steps` is the number of calls of [`Room::step`] to come.
    pub fn new(common: &Common, interrupt: Interrupt, bytes: u64, steps: u64) -> Result<Self, Failure> {
        let Common { dir, device, .. } = common;
        let shown = dir.display();
        let space = statvfs(dir)
            .map_err(|error| Failure::Environment(format!("cannot measure in {shown}: {error}")))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let needed = bytes.saturating_add(SPARE_BYTES);
        if free < needed {
            return Err(Failure::Environment(format!(
                "{shown} has {} MiB free, but the benchmark needs up to {} MiB; use smaller options or another \
                 directory",
                free >> 20,
                needed >> 20
            )));
        }
        let started = Instant::now();
        let (device, place) = open_device(*device)?;
        let device_took = started.elapsed();
        let dir = tempfile::Builder::new().prefix("remanent-bench-").tempdir_in(dir).map_err(|error| {
            Failure::Environment(format!("cannot create a directory in {shown}: {error}"))
        })?;
        let bar = progress::bar(steps, "measuring");
        bar.enable_steady_tick(Duration::from_millis(200));
        Ok(Self { dir, device, place, device_took, interrupt, bar })
    }

    /// Returns a path in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Opens the store `name` in the benchmark's directory, on the device under test.
    pub fn open(&self, name: &str, options: Options) -> Result<Store, BenchStop> {
        Ok(Store::open_on(Arc::new(DirDisk::new(self.path(name))), self.device.clone(), options)?)
    }

    /// Returns whether pages are on a GPU.
    pub fn is_gpu(&self) -> bool {
        matches!(self.place, Place::Device(_))
    }

    /// Returns whether Ctrl-C was pressed.
    pub fn interrupted(&self) -> bool {
        self.interrupt.is_noted()
    }

    /// Fails if Ctrl-C was pressed.
    pub fn check(&self) -> Result<(), BenchStop> {
        if self.interrupted() { Err(BenchStop::Interrupted) } else { Ok(()) }
    }

    /// Starts the next step, named `what`. Fails if Ctrl-C was pressed.
    pub fn step(&self, what: &str) -> Result<(), BenchStop> {
        self.check()?;
        self.bar.set_message(what.to_owned());
        self.bar.inc(1);
        Ok(())
    }

    /// Returns the settings that describe the machine and the run.
    pub fn settings(&self, common: &Common) -> Vec<(&'static str, String)> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        vec![
            ("directory", common.dir.display().to_string()),
            ("device", self.device.label()),
            ("cpus", format!("{cpus}, {}", cpu_model())),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("date", utc(SystemTime::now())),
            ("command", std::env::args().collect::<Vec<_>>().join(" ")),
            ("kernel", kernel()),
            ("file system", file_system_of(&common.dir)),
        ]
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Returns the options of a store without background work, whose images are as long as its pages.
pub fn options() -> Options {
    Options::new()
        .snapshots(SnapshotSchedule::never())
        .scrubs(ScrubSchedule::new().interval(None))
        .images(ImageOptions::new().compression(Compression::Off))
}

/// Opens the device, and returns it with the place of its pages.
pub fn open_device(choice: DeviceChoice) -> Result<(Arc<dyn Device>, Place), Failure> {
    let gpu =
        |ordinal| CudaDevice::open(ordinal).map(|gpu| (Arc::new(gpu) as Arc<dyn Device>, Place::Device(0)));
    let host = || (Arc::new(HostDevice::new()) as Arc<dyn Device>, Place::Host);
    match choice {
        DeviceChoice::Cuda(ordinal) => gpu(ordinal).map_err(engine_failure),
        DeviceChoice::Auto => match gpu(0) {
            Err(Error::Unavailable(Unavailable::Device { .. })) => Ok(host()),
            opened => opened.map_err(engine_failure),
        },
        _ => Ok(host()),
    }
}

/// Returns the kernel's name and version.
fn kernel() -> String {
    let uname = rustix::system::uname();
    format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy())
}

/// Formats a time as date and time of day.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Uses eras of 400 years that begin on the first of March: Hinnant, chrono-compatible low-level date
    // algorithms.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", second / 3600, second / 60 % 60)
}

/// Returns the processor's model name.
fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    line.and_then(|line| line.split_once(':')).map_or("unknown model", |(_, name)| name.trim()).to_owned()
}

/// Returns every file in these folders of a store, with its length.
pub fn files(store: &Path, folders: &[&str]) -> std::io::Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(store.join(folder))? {
            let entry = entry?;
            files.push((entry.path(), entry.metadata()?.len()));
        }
    }
    files.sort();
    Ok(files)
}

/// Formats a number of bytes for a title.
pub fn size(bytes: u64) -> String {
    Size(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_is_formatted_as_date() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59 UTC"),
            (4_102_444_800, "2100-01-01 00:00 UTC"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
