//! `remanent torture` kills stores on this disk and device, damages them, cuts their power, and checks all their bytes.
//!
//! `kills.rs`, `damage.rs` and `power.rs` contain the three tests. `mounts.rs` creates the file systems for the power
//! test, and `loop_mounts.rs` mounts them. A simulation computes the expected content of a store. The expected content
//! is never read from the store.

mod kills;
mod damage;
mod loop_mounts;
mod mounts;
mod power;

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use remanent::options::LogIo;
use remanent::{DeviceChoice, Options};
use serde_json::json;

use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::replay::child::ReplayParams;
use crate::replay::demo::seed_from_clock;
use crate::replay::kill_run::{KillRun, KillRunStop};
use crate::replay::simulate::{Rule, SplitMix64};
use crate::replay::trace;
use crate::replay::trace::Trace;

const EXAMPLES: &str = "\
Kills: a process that replays a cache trace is killed repeatedly with SIGKILL, with each method of writing the log \
that the file system supports. After each kill, the store must contain every acknowledged request, at most one request \
that was in flight, and only correct bytes.

Damage: a bit, a sector, the end or all of a file in a copy of a store is destroyed. The store must still be correct, \
or be refused with an error that names the file and the offset. Requests at the end may be cut off if their part of \
the log was not yet synced.

Power cuts: the store is on its own ext4 file system, on a loop device over a file in DIR. The content of the device \
is copied during writes, and the copy must contain every durable request. This test requires root, mkfs.ext4 and \
mkfs.xfs, and is skipped without them. It tests the file system and not the disk. Only a real power cut shows whether \
a disk keeps the data that it has synced.

All files are created in a temporary folder in DIR, which is removed at the end unless a violation was found.

Examples:
  remanent torture /mnt/nvme                               takes one to two minutes
  remanent torture /mnt/nvme --kills 10000 --damages 20000 --power-cuts 500
  remanent torture /mnt/nvme --device cuda:0 --json        with pages in GPU memory, as JSON";

/// Kill stores on your disk, damage them, cut their power, and check all their bytes
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Torture {
    /// Directory on the disk to test, which is created if it does not exist
    dir: PathBuf,
    /// Total number of kills, divided among the methods of writing the log
    #[arg(long, value_name = "N", default_value_t = 60)]
    kills: u64,
    /// Number of store copies to damage
    #[arg(long, value_name = "N", default_value_t = 600)]
    damages: u64,
    /// Number of power cuts to simulate
    #[arg(long, value_name = "N", default_value_t = 12)]
    power_cuts: u64,
    /// Number of trace requests to replay into each store
    #[arg(long, value_name = "N", default_value_t = 1000)]
    requests: u64,
    /// Device for the pages: `auto` (a GPU if available), `host` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Seed for all random choices [default: derived from the clock]
    #[arg(long)]
    seed: Option<u64>,
    /// Print the results as a JSON object
    #[arg(long)]
    json: bool,
}

/// The parameters and resources that the three tests share.
struct TortureContext<'t> {
    /// A folder that only this run uses.
    folder: PathBuf,
    trace: PathBuf,
    /// Largest number of distinct pages that one request names.
    longest: usize,
    requested: &'t Torture,
    interrupt: Interrupt,
    bar: ProgressBar,
    random: SplitMix64,
}

/// The results of one test: a row of counts for each kind of kill, damage or power cut.
struct TortureTable {
    name: &'static str,
    /// Names of the counts in a row.
    columns: &'static [&'static str],
    rows: Vec<(String, Vec<u64>)>,
    /// Parts of the test that were skipped, and the reason for each.
    skipped: Vec<String>,
    /// Violations that the test found, one sentence each.
    wrong: Vec<String>,
}

impl Torture {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let cannot = |what: &str, error: std::io::Error| {
            Failure::Environment(format!("cannot {what} {}: {error}", self.dir.display()))
        };
        std::fs::create_dir_all(&self.dir).map_err(|error| cannot("create", error))?;
        let scratch = tempfile::Builder::new()
            .prefix("remanent-torture-")
            .tempdir_in(&self.dir)
            .map_err(|error| cannot("create a folder in", error))?;
        let trace = trace::bundled(scratch.path())?;
        let seed = self.seed.unwrap_or_else(seed_from_clock);
        let mut chamber = TortureContext {
            folder: scratch.path().to_owned(),
            longest: Trace::survey(&trace, Some(self.requests))?.longest,
            trace,
            requested: self,
            interrupt,
            bar: progress::bar(self.kills + self.damages + self.power_cuts, "torturing"),
            random: SplitMix64::new(seed),
        };
        let device = chamber.device()?;
        if !self.json {
            out.line(format_args!("Stores are in {} (--seed {seed}).", scratch.path().display()))?;
            out.line(format_args!("Pages are in the memory of {device}."))?;
            out.flush()?;
        }
        let mut reports = Vec::new();
        type Torturer<'t> = fn(&mut TortureContext<'t>, &mut TortureTable) -> Result<(), KillRunStop>;
        let tortures: [(_, Torturer<'_>); 3] = [
            ("kills", TortureContext::kills),
            ("damage", TortureContext::damages),
            ("power cuts", TortureContext::power_cuts),
        ];
        for (name, torture) in tortures {
            let mut report = TortureTable::new(name);
            match torture(&mut chamber, &mut report) {
                Ok(()) => {}
                Err(KillRunStop::Interrupted) => return Ok(Ending::Interrupted),
                Err(KillRunStop::Failed(Failure::Damage(message))) => report.wrong.push(message),
                Err(KillRunStop::Failed(failure)) => return Err(failure),
                Err(KillRunStop::Differs(differences)) => report.wrong.extend(differences),
            }
            if !self.json {
                let bar = chamber.bar.clone();
                bar.suspend(|| report.print(out).and_then(|()| out.flush()))?;
            }
            reports.push(report);
        }
        chamber.bar.finish_and_clear();
        let is_right = reports.iter().all(|report| report.wrong.is_empty());
        let kept = (!is_right).then(|| scratch.keep());
        if self.json {
            out.line(Self::json(seed, &device, &reports, kept.as_deref()))?;
        } else if let Some(kept) = kept {
            out.line(format_args!("\nThe evidence is kept in {}; the seed was {seed}.", kept.display()))?;
        } else {
            out.line("\nNo acknowledged request was lost, and no wrong byte was served.")?;
        }
        Ok(if is_right { Ending::Fine } else { Ending::Difference })
    }

    fn json(seed: u64, device: &str, reports: &[TortureTable], kept: Option<&Path>) -> serde_json::Value {
        let tortures: serde_json::Map<_, _> =
            reports.iter().map(|report| (report.name.to_owned(), report.json())).collect();
        object! {
            "seed": seed,
            "device": device,
            "right": kept.is_none(),
            "tortures": tortures,
            "evidence": kept.map(|kept| kept.display().to_string()),
        }
    }
}

impl TortureContext<'_> {
    /// Creates a store with a random page length, and returns the run that replays into the store.
    fn course(&mut self, name: &str, log_io: Option<LogIo>, durable: bool) -> Result<KillRun, Failure> {
        self.course_in(self.folder.join(name), log_io, durable)
    }

    fn course_in(
        &mut self,
        store: PathBuf,
        log_io: Option<LogIo>,
        durable: bool,
    ) -> Result<KillRun, Failure> {
        let page_len = [256, 4096, 20_480][self.random.below(3) as usize];
        let params = ReplayParams {
            store,
            trace: self.trace.clone(),
            rule: Rule { page_len, pages_max: self.longest.max(400) },
            limit: self.requested.requests,
            snapshot_every: 40 + self.random.below(100),
            device: self.requested.device,
            durable,
            log_io,
        };
        let random = SplitMix64::new(self.random.next_word());
        KillRun::new(params, random, self.interrupt.clone(), ProgressBar::hidden())
    }

    /// Returns the name of the device whose memory contains the pages of the stores.
    fn device(&self) -> Result<String, Failure> {
        let folder = self.folder.join("asks");
        let store = Options::new().device(self.requested.device).open(&folder).map_err(engine_failure)?;
        let device = store.recovered().device.clone();
        store.close().map_err(engine_failure)?;
        remove(&folder)?;
        Ok(device)
    }

    /// Returns an error if Ctrl-C was pressed.
    fn check_interrupt(&self) -> Result<(), KillRunStop> {
        if self.interrupt.is_noted() { Err(KillRunStop::Interrupted) } else { Ok(()) }
    }
}

impl TortureTable {
    fn new(name: &'static str) -> Self {
        Self { name, columns: &[], rows: Vec::new(), skipped: Vec::new(), wrong: Vec::new() }
    }

    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        out.line("")?;
        if !self.rows.is_empty() {
            let columns: String = self.columns.iter().map(|column| format!("{column:>10}")).collect();
            out.line(format_args!("{:<34}{columns}", self.name.to_uppercase()))?;
        }
        for (name, counts) in &self.rows {
            let counts: String = counts.iter().map(|count| format!("{count:>10}")).collect();
            out.line(format_args!("{name:<34}{counts}"))?;
        }
        for skipped in &self.skipped {
            out.line(format_args!("SKIPPED: {skipped}"))?;
        }
        for wrong in &self.wrong {
            out.line(format_args!("WRONG, {}: {wrong}", self.name))?;
        }
        Ok(())
    }

    fn json(&self) -> serde_json::Value {
        let row = |(name, counts): &(String, Vec<u64>)| {
            let counts = self.columns.iter().zip(counts);
            let counts: serde_json::Map<_, _> = counts
                .map(|(column, count)| (column.to_lowercase().replace(' ', "_"), json!(count)))
                .collect();
            (name.clone(), json!(counts))
        };
        let rows: serde_json::Map<_, _> = self.rows.iter().map(row).collect();
        json!({ "rows": rows, "skipped": self.skipped, "wrong": self.wrong })
    }
}

/// Returns the failure of an operation on a file or folder.
fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::Environment(format!("cannot {what} {}: {error}", path.display()))
}

fn make(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(|error| cannot("create", folder, &error))
}

/// Removes a folder if it exists.
fn remove(folder: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(cannot("remove", folder, &error)),
        _ => Ok(()),
    }
}

fn remove_file(file: &Path) -> Result<(), Failure> {
    std::fs::remove_file(file).map_err(|error| cannot("remove", file, &error))
}

/// Copies a folder recursively. Replaces an earlier copy.
fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    remove(to)?;
    make(to)?;
    for entry in std::fs::read_dir(from).map_err(|error| cannot("list", from, &error))? {
        let entry = entry.map_err(|error| cannot("list", from, &error))?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target)?;
        } else {
            std::fs::copy(&path, &target).map_err(|error| cannot("copy", &path, &error))?;
        }
    }
    Ok(())
}
