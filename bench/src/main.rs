//! `remanent-bench`: measures stores on this machine, and compares most figures with the machine's speed without
//! a store.
//!
//! Read these files first: `figures.rs` (the results of a run), `room.rs` (where a run takes place), and
//! `raw.rs`, `memory.rs` and `transfer.rs` (the ceilings). Each benchmark has one more file. Measurements
//! that are compared take turns, round by round.

mod latency;
mod figures;
mod room;
mod raw;
mod memory;
mod transfer;
mod chart;
mod report;
mod peak;
mod opener;
mod ceilings;
mod commit;
mod sizes;
mod snapshot;
mod restore;
mod replay;
mod create;
mod growth;
mod follow;
mod archive;
mod archived_snapshot;
mod steady;
mod lookup;
mod capture;
mod policies;
mod block_cache;
mod tier_ceilings;
mod tier_moves;
mod tiers;
mod allocation_trace;
mod allocators;
mod allocations;
mod ranks;
mod nixl;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use remanent::DeviceChoice;
use remanent_tools::shared::aligned_buf;
use remanent_tools::shared::exit::{self, Ending, Failure, Outcome};
use remanent_tools::shared::interrupt::Interrupt;
use remanent_tools::shared::output::Output;
use remanent_tools::shared::verbosity::Verbosity;

use self::figures::Findings;
use self::report::HtmlReport;
use self::room::{BenchStop, Room};

const EXAMPLES: &str = "\
Measures the file system and disk of DIR: all files are created in a temporary directory inside DIR and removed at the \
end, also after Ctrl-C. Most figures have a ceiling, the speed of a loop on the same machine that does only the \
necessary work. Both are measured in turn, and the ratio is the median over the rounds, so a machine that slows down \
slows both down. Compare ratios rather than absolute figures between runs.

Examples:
  remanent-bench commit /mnt/fast
  remanent-bench snapshot /mnt/fast --report snapshot.html
  remanent-bench ceilings /mnt/fast --device cuda:0";

/// Measure stores, and compare them with the speed of the machine without a store
#[derive(Parser)]
#[command(name = "remanent-bench", version, after_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    what: BenchKind,
    #[command(flatten)]
    verbosity: Verbosity,
}

#[derive(Subcommand)]
enum BenchKind {
    Commit(commit::CommitBench),
    Snapshot(snapshot::SnapshotBench),
    Restore(restore::RestoreBench),
    Replay(replay::ReplayBench),
    Create(create::CreateBench),
    Growth(growth::GrowthBench),
    Follow(follow::FollowBench),
    Archive(archive::ArchiveBench),
    Steady(steady::SteadyBench),
    Lookup(lookup::LookupBench),
    Capture(capture::CaptureBench),
    Tiers(tiers::TiersBench),
    Allocations(allocations::AllocationsBench),
    Ranks(ranks::RanksBench),
    Nixl(nixl::NixlBench),
    Ceilings(ceilings::CeilingsBench),
    #[command(hide = true)]
    Open(opener::Opener),
    #[command(hide = true)]
    Rank(ranks::RankWorker),
    #[command(hide = true)]
    PageServer(nixl::PageServerWorker),
}

/// The options common to all benchmarks.
#[derive(clap::Args)]
struct Common {
    /// Existing directory on the disk to measure
    dir: PathBuf,
    /// Device for the pages: `auto` (a GPU if available), `host` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object per figure, then one for the run
    #[arg(long)]
    json: bool,
    /// Also write a self-contained HTML page with charts
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// A benchmark of the command.
trait Measure {
    /// Returns the common options.
    fn common(&self) -> &Common;
    /// Returns the maximum number of bytes that the benchmark writes to disk.
    fn bytes_needed(&self) -> u64;
    /// Returns the number of calls of [`Room::step`].
    fn steps(&self) -> u64;
    /// Rejects invalid options, before any file is created.
    fn check(&self) -> Result<(), Failure>;
    /// Runs the measurement in a directory and on a device, which `room` provides.
    fn measure(&self, room: &Room) -> Result<Findings, BenchStop>;
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.verbosity.begin(false);
    let mut out = Output::stdout();
    let outcome = cli.what.run(&mut out);
    exit::code(out.flush().and(outcome))
}

impl BenchKind {
    fn run(&self, out: &mut Output) -> Outcome {
        match self {
            BenchKind::Commit(what) => run(what, out),
            BenchKind::Snapshot(what) => run(what, out),
            BenchKind::Restore(what) => run(what, out),
            BenchKind::Replay(what) => run(what, out),
            BenchKind::Create(what) => run(what, out),
            BenchKind::Growth(what) => run(what, out),
            BenchKind::Follow(what) => run(what, out),
            BenchKind::Archive(what) => run(what, out),
            BenchKind::Steady(what) => run(what, out),
            BenchKind::Lookup(what) => run(what, out),
            BenchKind::Capture(what) => run(what, out),
            BenchKind::Tiers(what) => run(what, out),
            BenchKind::Allocations(what) => run(what, out),
            BenchKind::Ranks(what) => run(what, out),
            BenchKind::Nixl(what) => run(what, out),
            BenchKind::Ceilings(what) => run(what, out),
            BenchKind::Open(what) => what.run(out),
            BenchKind::Rank(what) => what.run(out),
            BenchKind::PageServer(what) => what.run(out),
        }
    }
}

/// Rejects a duration that is too short to measure or too long to wait for.
fn check_seconds(flag: &str, seconds: f64) -> Result<(), Failure> {
    if (0.001..=3600.0).contains(&seconds) {
        return Ok(());
    }
    Err(Failure::Environment(format!("{flag} must be between 0.001 and 3600")))
}

/// Rejects numbers of threads that no machine can run.
fn check_threads(threads: &[usize]) -> Result<(), Failure> {
    if threads.iter().all(|threads| (1..=1024).contains(threads)) {
        return Ok(());
    }
    Err(Failure::Environment("--threads must be between 1 and 1024".to_owned()))
}

fn run(what: &impl Measure, out: &mut Output) -> Outcome {
    let interrupt = Interrupt::listen()?;
    what.check()?;
    let common = what.common();
    let report = common.report.as_deref().map(HtmlReport::begin).transpose()?;
    let room = Room::new(common, interrupt, what.bytes_needed(), what.steps())?;
    let findings = match what.measure(&room) {
        Ok(findings) => findings,
        Err(BenchStop::Interrupted) => return Ok(Ending::Interrupted),
        Err(BenchStop::Failed(failure)) => return Err(failure),
    };
    drop(room);
    if let Some(report) = report {
        report.write(&findings)?;
    }
    if common.json {
        findings.print_json(out)?;
    } else {
        findings.print(out)?;
    }
    Ok(Ending::Fine)
}
