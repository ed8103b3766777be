//! A child process that opens one store and reports the cost. A process that has done other work reuses the
//! memory of that work, so its opens would appear to need no memory.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Instant;

use remanent::disk::dir::DirDisk;
use remanent::error::Folder;
use remanent::{DeviceChoice, Store};
use remanent_tools::shared::engine::engine_failure;
use remanent_tools::shared::exit::{Ending, Failure, Outcome};
use remanent_tools::shared::output::Output;
use remanent_tools::shared::program;
use serde::{Deserialize, Serialize};

use crate::peak::{self, Watch};
use crate::room::{self, BenchStop};

/// Open the store in DIR and report the cost
#[derive(clap::Args)]
pub struct Opener {
    dir: PathBuf,
    #[arg(long)]
    device: DeviceChoice,
    /// Sample the peak memory, which slows the open down
    #[arg(long)]
    watched: bool,
}

/// The cost of an open, beyond the memory that the device already used.
#[derive(Serialize, Deserialize)]
pub struct OpenCost {
    pub seconds: f64,
    /// Host memory in use afterwards, in bytes.
    pub resident: u64,
    pub most: Option<PeakMemory>,
}

/// The peak use of host memory during an open, in bytes.
#[derive(Serialize, Deserialize)]
pub struct PeakMemory {
    pub all: u64,
    /// Peak use without mappings of the log. These mappings are part of the page cache, which the system reclaims
    /// under memory pressure.
    pub own: u64,
    pub windows: u64,
}

impl Opener {
    /// Opens the store and prints an [`OpenCost`].
    pub fn run(&self, out: &mut Output) -> Outcome {
        let unknown = |error| Failure::Environment(format!("cannot determine the memory in use: {error}"));
        let (device, _) = room::open_device(self.device)?;
        peak::forget().map_err(unknown)?;
        let before = peak::resident_bytes().map_err(unknown)?;
        let log = self.dir.join(Folder::Log.name());
        let watch = self.watched.then(|| Watch::begin(&log)).transpose().map_err(unknown)?;
        let started = Instant::now();
        let disk = Arc::new(DirDisk::new(&self.dir));
        let store = Store::open_on(disk, device, room::options()).map_err(engine_failure)?;
        let seconds = started.elapsed().as_secs_f64();
        let above = |bytes: u64| bytes.saturating_sub(before);
        let most = |watch: Watch| {
            let split = watch.end()?;
            Ok(PeakMemory { all: above(peak::peak_bytes()?), own: split.other, windows: split.mapped })
        };
        let most = watch.map(most).transpose().map_err(unknown)?;
        let opened = OpenCost { seconds, resident: above(peak::resident_bytes().map_err(unknown)?), most };
        out.line(format_args!("{}", serde_json::json!(opened)))?;
        store.close().map_err(engine_failure)?;
        Ok(Ending::Fine)
    }
}

/// Opens the store in `dir` in a child process.
pub fn open(dir: &Path, device: DeviceChoice, watched: bool) -> Result<OpenCost, BenchStop> {
    let mut opener = program::again()?;
    opener.args(["open", "--device", &device.to_string()]).args(watched.then_some("--watched"));
    let output = opener.arg(dir).stdin(Stdio::null()).output()?;
    let opened = serde_json::from_slice(&output.stdout).ok().filter(|_| output.status.success());
    opened.ok_or_else(|| {
        let why = String::from_utf8_lossy(&output.stderr);
        Failure::Environment(format!("cannot open {}: {}", dir.display(), why.trim())).into()
    })
}
