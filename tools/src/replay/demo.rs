//! `remanent demo` kills a replay at random times and checks every byte of the store.
//!
//! `kill_run.rs` runs, kills and checks the replays, and this file prints the results.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use indicatif::ProgressBar;
use remanent::options::Create;
use remanent::{DeviceChoice, Options, StatePoint};

use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::replay::child::ReplayParams;
use crate::replay::kill_run::{CheckReport, KillRun, KillRunStop, KillRunTotals};
use crate::replay::replay_params;
use crate::replay::simulate::SplitMix64;
use crate::replay::trace;

const EXAMPLES: &str = "\
Replays a real cache trace into a store in a child process, and kills the process repeatedly with SIGKILL. After each \
kill, the demo checks every page, epoch and byte: the store must contain all acknowledged requests, at most one more, \
and nothing else. Then the demo restores an earlier snapshot and continues from there.

Examples:
  remanent demo                        use a temporary directory
  remanent demo store --kills 3        use the directory `store` and keep it
  remanent demo --seed 42              kill at the same times again, as far as scheduling allows";

/// Kill a store at random times, and check that everything is recovered
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Demo {
    /// Store directory, which is kept [default: a temporary directory, which is removed]
    dir: Option<PathBuf>,
    /// Number of times to kill the store
    #[arg(long, value_name = "N", default_value_t = 12)]
    kills: u64,
    /// Number of trace requests to replay
    #[arg(long, value_name = "N", default_value_t = 4000)]
    requests: u64,
    /// Take a snapshot after every N requests
    #[arg(long, value_name = "N", default_value = "250")]
    snapshot_every: NonZeroU64,
    /// Device for the pages: `auto` (a GPU if available), `host` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Seed for the random times [default: derived from the clock]
    #[arg(long)]
    seed: Option<u64>,
}

/// A running demo: its replays, and the output to which it prints.
struct DemoRun<'o, 'w> {
    course: KillRun,
    bar: ProgressBar,
    out: &'o mut Output<'w>,
}

impl Demo {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let scratch = tempfile::Builder::new()
            .prefix("remanent-demo-")
            .tempdir()
            .map_err(|error| Failure::Environment(format!("cannot create a temporary directory: {error}")))?;
        let seed = self.seed.unwrap_or_else(seed_from_clock);
        let mut show = self.prepare(scratch.path(), seed, interrupt, out)?;
        let outcome = self.show(&mut show);
        show.bar.finish_and_clear();
        match outcome {
            Ok(()) => Ok(Ending::Fine),
            Err(KillRunStop::Interrupted) => Ok(Ending::Interrupted),
            Err(KillRunStop::Failed(failure)) => Err(failure),
            Err(KillRunStop::Differs(differences)) => {
                for difference in differences {
                    out.line(difference)?;
                }
                // Keep the store as evidence.
                let kept = self.dir.clone().unwrap_or_else(|| scratch.keep().join("store"));
                out.line(format_args!("the store is kept in {}; the seed was {seed}", kept.display()))?;
                Ok(Ending::Difference)
            }
        }
    }

    fn prepare<'o, 'w>(
        &self,
        scratch: &Path,
        seed: u64,
        interrupt: Interrupt,
        out: &'o mut Output<'w>,
    ) -> Result<DemoRun<'o, 'w>, Failure> {
        let store = self.dir.clone().unwrap_or_else(|| scratch.join("store"));
        if std::fs::read_dir(&store).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(Failure::Environment(format!(
                "{} is not empty; use a new or empty directory",
                store.display()
            )));
        }
        let trace = trace::bundled(scratch)?;
        let bar = progress::bar(self.requests, "replaying");
        let params = ReplayParams {
            rule: replay_params::choose(&store, None, None)?,
            store,
            trace,
            limit: self.requests,
            snapshot_every: self.snapshot_every.get(),
            device: self.device,
            durable: false,
            log_io: None,
        };
        let course = KillRun::new(params, SplitMix64::new(seed), interrupt, bar.clone())?;
        let limit = course.params.limit;
        bar.set_length(limit);
        out.line(format_args!("Replaying {limit} requests of a chat service's cache trace into a store,"))?;
        out.line(format_args!(
            "with a snapshot every {} requests and {} kills at random times (--seed {seed}).",
            self.snapshot_every, self.kills
        ))?;
        out.line("")?;
        out.flush()?;
        Ok(DemoRun { course, bar, out })
    }

    /// Runs the steps of the demo in order.
    fn show(&self, show: &mut DemoRun<'_, '_>) -> Result<(), KillRunStop> {
        show.heading()?;
        for kill in 1..=self.kills {
            if !show.run_and_kill(kill, self.kills)? {
                break;
            }
        }
        show.run_to_end()?;
        show.restore_oldest()?;
        show.heading()?;
        show.run_and_kill(1, 1)?;
        show.run_to_end()?;
        show.conclude()
    }
}

impl DemoRun<'_, '_> {
    fn heading(&mut self) -> Result<(), KillRunStop> {
        let line = format!(
            "{:<18} {:>8} {:>13} {:>7}  {:<29} CHECKED",
            "", "RAN", "ACKNOWLEDGED", "FOUND", "RECOVERED FROM"
        );
        self.print_line(line)
    }

    /// Runs a replay, kills it, and prints the result of the check. Returns `false` if the replay ended before the
    /// kill.
    fn run_and_kill(&mut self, kill: u64, kills: u64) -> Result<bool, KillRunStop> {
        let Some(checked) = self.course.run_and_kill(kill, kills)? else { return Ok(false) };
        self.report(&format!("kill {kill} of {kills}"), &checked)?;
        Ok(true)
    }

    fn run_to_end(&mut self) -> Result<(), KillRunStop> {
        let checked = self.course.run_to_end()?;
        self.report("without a kill", &checked)
    }

    /// Restores the oldest snapshot of the store, and sets the simulation to the restored state.
    fn restore_oldest(&mut self) -> Result<(), KillRunStop> {
        let started = Instant::now();
        let options = Options::new().create(Create::Never).device(self.course.params.device);
        let store = options.open(&self.course.params.store).map_err(engine_failure)?;
        let Some(oldest) = store.snapshots().into_iter().min_by_key(|snapshot| snapshot.id) else {
            store.close().map_err(engine_failure)?;
            return self.print_line(
                "There is no snapshot to restore, because there were too few requests.".to_owned(),
            );
        };
        store.restore(StatePoint::Snapshot(oldest.id)).map_err(engine_failure)?;
        store.close().map_err(engine_failure)?;
        let took = started.elapsed();

        let CheckReport { found, .. } = self.course.restored()?;
        self.print_line(format!(
            "\nRestored snapshot {} in {took:.0?}: all {} pages are as they were after request {}. Continuing \
             from there.\n",
            oldest.id,
            self.course.simulation().pages().len(),
            found.unwrap_or_default()
        ))
    }

    fn report(&mut self, what: &str, checked: &CheckReport) -> Result<(), KillRunStop> {
        let request = |request: Option<u64>| request.map_or("-".to_owned(), |request| request.to_string());
        let (from, seen) = match &checked.rebuilt {
            None => ("no store yet".to_owned(), "no store yet".to_owned()),
            Some(rebuilt) => {
                let base = rebuilt.base.map_or("the beginning".to_owned(), |base| format!("snapshot {base}"));
                (format!("{base} + {} batches", rebuilt.batches), format!("{} pages", rebuilt.contents.len()))
            }
        };
        self.print_line(format!(
            "{what:<18} {:>6} ms {:>13} {:>7}  {from:<29} {seen}",
            checked.lived.as_millis(),
            request(checked.acknowledged),
            request(checked.found),
        ))
    }

    fn conclude(&mut self) -> Result<(), KillRunStop> {
        let KillRunTotals { replaying, replayed, mut first_ack_times } = self.course.totals().clone();
        first_ack_times.sort_unstable();
        let median = first_ack_times.get(first_ack_times.len() / 2).copied().unwrap_or_default();
        let rate = replayed as f64 / replaying.as_secs_f64();
        self.print_line(format!(
            "\nEvery acknowledged request was found after every kill, with all its bytes.\n\
             {replayed} requests in {:.1} s, including starts and kills: {rate:.0} requests/s. A new process took \
             {median:.0?} from\nits start to its first acknowledgement (median of {}).",
            replaying.as_secs_f64(),
            first_ack_times.len(),
        ))
    }

    /// Prints a line of the report above the progress bar.
    fn print_line(&mut self, line: String) -> Result<(), KillRunStop> {
        let out = &mut *self.out;
        self.bar.suspend(|| out.line(line).and_then(|()| out.flush())).map_err(KillRunStop::Failed)
    }
}

/// Returns a seed that is derived from the clock, for runs without `--seed`.
pub fn seed_from_clock() -> u64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Short enough to be typed.
    SplitMix64::new(since_epoch.as_nanos() as u64).below(1_000_000)
}
