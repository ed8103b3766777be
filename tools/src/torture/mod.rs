//! `remanent torture`: stores on this disk, with pages on this device, are killed, damaged and cut off from
//! power, and every byte that is left is checked.
//!
//! `kills.rs`, `damage.rs` and `power.rs` are the three tortures. `mounts.rs` has the file systems that the
//! last one needs, and `loop_mounts.rs` mounts them. A simulation computes what a store must hold; that is
//! never read from the store.

mod kills;
mod damage;
mod loop_mounts;
mod mounts;
mod power;

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use remanent::options::LogIo;
use remanent::{DeviceChoice, Options, Store};
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
Kills: a process that replays a cache trace is killed with SIGKILL, again and again, with each way to write \
the log that the file system allows. After each kill every acknowledged request must be there, at most one more \
that was in flight, and every byte must be right.
Damage: a bit, a sector, an end or a whole file of a store's copy is destroyed. The store must be right \
nevertheless, or be refused with file and offset; if the log had not reached the disk yet, the end may be cut.
Power cuts: the store lies on an ext4 of its own, on a loop device over a file here. The device's content at \
one moment is mounted and must hold every durable request. Needs root, mkfs.ext4 and mkfs.xfs, and is skipped \
if they are missing. It cuts off the file system, not the disk: whether a disk lies about a sync shows only \
when its plug is pulled.

Everything happens in a folder of its own in DIR, which is removed at the end; if something is found, it stays.

Examples:
  remanent torture /mnt/nvme                               a minute or two
  remanent torture /mnt/nvme --kills 10000 --damages 20000 --power-cuts 500
  remanent torture /mnt/nvme --device cuda:0 --json        with pages in GPU memory, for a machine to read";

/// Kill, damage and cut off stores on your disk, and check every byte that is left
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Torture {
    /// A directory on the disk in question; made if it does not exist
    dir: PathBuf,
    /// How often to kill, all ways to write the log together
    #[arg(long, value_name = "N", default_value_t = 60)]
    kills: u64,
    /// How often to damage something
    #[arg(long, value_name = "N", default_value_t = 600)]
    damages: u64,
    /// How often to cut the power
    #[arg(long, value_name = "N", default_value_t = 12)]
    power_cuts: u64,
    /// How many requests of the trace make a store's life
    #[arg(long, value_name = "N", default_value_t = 1000)]
    requests: u64,
    /// Where the stores' pages live: `auto` (a GPU if there is one), `host`, `cuda:0`, `cuda:1`, …
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// The seed of everything random [default: drawn from the clock]
    #[arg(long)]
    seed: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The settings and tools that all tortures share.
struct TortureContext<'t> {
    /// A folder for the tortures alone.
    folder: PathBuf,
    trace: PathBuf,
    /// Distinct pages that the longest request names.
    longest: usize,
    requested: &'t Torture,
    interrupt: Interrupt,
    bar: ProgressBar,
    random: SplitMix64,
}

/// A table of a torture's report: the attempts, and their results.
struct TortureTable {
    name: &'static str,
    /// The counts of a row, in the order of its columns.
    columns: &'static [&'static str],
    rows: Vec<(String, Vec<u64>)>,
    /// The attempts that were left out, with the reason.
    skipped: Vec<String>,
    /// Violations, each in a sentence. It is empty if all went well.
    wrong: Vec<String>,
}

impl Torture {
    /// Runs `remanent torture`.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let cannot = |what: &str, error: std::io::Error| {
            Failure::Environment(format!("cannot {what} {}: {error}", self.dir.display()))
        };
        std::fs::create_dir_all(&self.dir).map_err(|error| cannot("make", error))?;
        let scratch = tempfile::Builder::new()
            .prefix("remanent-torture-")
            .tempdir_in(&self.dir)
            .map_err(|error| cannot("make a folder in", error))?;
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
            out.line(format_args!("Stores in {}, --seed {seed}.", scratch.path().display()))?;
            out.line(format_args!("Pages in the memory of {device}."))?;
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
                Err(KillRunStop::Failed(Failure::Damage(told))) => report.wrong.push(told),
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
            out.line(format_args!("\nThe evidence is left in {}; the seed was {seed}.", kept.display()))?;
        } else {
            out.line("\nNothing acknowledged was lost, and nothing wrong was served.")?;
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
    /// A course of replays in a store of its own, with small or large pages.
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
        let errand = ReplayParams {
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
        KillRun::new(errand, random, self.interrupt.clone(), ProgressBar::hidden())
    }

    /// The name of the device that the stores' pages lie in.
    fn device(&self) -> Result<String, Failure> {
        let folder = self.folder.join("asks");
        let store =
            Store::open(&folder, Options::default().device(self.requested.device)).map_err(engine_failure)?;
        let device = store.recovered().device.clone();
        store.close().map_err(engine_failure)?;
        remove(&folder)?;
        Ok(device)
    }

    /// Nothing more is wanted.
    fn check_interrupt(&self) -> Result<(), KillRunStop> {
        if self.interrupt.noted() { Err(KillRunStop::Interrupted) } else { Ok(()) }
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

/// The failure of an operation on a file or folder.
fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::Environment(format!("cannot {what} {}: {error}", path.display()))
}

/// Makes a folder.
fn make(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(|error| cannot("make", folder, &error))
}

/// Removes a folder, if there is one.
fn remove(folder: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(cannot("remove", folder, &error)),
        _ => Ok(()),
    }
}

/// Removes a file.
fn remove_file(file: &Path) -> Result<(), Failure> {
    std::fs::remove_file(file).map_err(|error| cannot("remove", file, &error))
}

/// Copies a folder and all in it, in place of any earlier copy.
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
