//! `remanent demo`: a replay is killed at random moments, and every byte of what is left is checked.
//!
//! The work is done by `remanent replay` in processes of their own, which is also what an outsider would
//! run. Between them the demo only reads the directory, without the engine, and holds it against the
//! simulation.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use indicatif::ProgressBar;
use remanent::{Create, DeviceChoice, FileName, Options, Store};
use remanent_format::rebuild::Rebuilt;

use crate::check::{self, Epochs, hash_id, last_request};
use crate::child::{Errand, Replayer, Watched};
use crate::engine::engine_failure;
use crate::exit::{Ending, Failure, Outcome};
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::progress;
use crate::rule;
use crate::simulate::{Simulation, SplitMix64};
use crate::trace::Trace;

/// One hour of a production chat service; `data/README.md` says where it comes from.
const TRACE: &[u8] = include_bytes!("../data/mooncake_conversation_trace.jsonl.zst");

const EXAMPLES: &str = "\
The demo replays a real cache trace into a store, kills the process with SIGKILL again and again, and \
after each kill checks that exactly the acknowledged requests are there: every page, every epoch, every byte. \
Then it goes back to an earlier snapshot and forward again.

Examples:
  remanent demo                        in a directory of its own, removed at the end
  remanent demo store --kills 3        in `store`, kept for a look with the other commands
  remanent demo --seed 42              the same moments of death again, as far as a scheduler repeats itself";

/// Kill a store at random moments, and get everything back
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Demo {
    /// Where the store is made, and kept; without it a temporary directory is used, and removed
    dir: Option<PathBuf>,
    /// How often to kill
    #[arg(long, value_name = "N", default_value_t = 12)]
    kills: u64,
    /// How many requests of the trace to replay
    #[arg(long, value_name = "N", default_value_t = 4000)]
    requests: u64,
    /// Requests between snapshots
    #[arg(long, value_name = "N", default_value = "250")]
    snapshot_every: NonZeroU64,
    /// Where the store's pages live: `auto` (a GPU if there is one), `host`, `cuda:0`, `cuda:1`, …
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// The seed of the random moments [default: drawn from the clock]
    #[arg(long)]
    seed: Option<u64>,
}

/// A demo under way.
struct Show<'o> {
    errand: Errand,
    requests: Vec<Vec<u64>>,
    /// What the store should hold, at the last request that was checked.
    simulation: Simulation,
    random: SplitMix64,
    interrupt: Interrupt,
    bar: ProgressBar,
    out: &'o mut Output,
    /// Time that replays ran, and requests that they replayed.
    replaying: Duration,
    replayed: u64,
    /// From the start of each process to its first acknowledgement.
    back_after: Vec<Duration>,
}

/// The show is over before its end.
enum Stop {
    /// Ctrl-C.
    Interrupted,
    /// The store does not hold what it should; the differences are listed.
    Differs,
    /// Something else.
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

impl Demo {
    /// Shows.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let scratch = tempfile::Builder::new()
            .prefix("remanent-demo-")
            .tempdir()
            .map_err(|error| Failure::Environment(format!("cannot make a temporary directory: {error}")))?;
        let seed = self.seed.unwrap_or_else(seed_from_clock);
        let mut show = self.prepare(scratch.path(), seed, interrupt, out)?;
        let outcome = self.show(&mut show);
        show.bar.finish_and_clear();
        match outcome {
            Ok(()) => Ok(Ending::Fine),
            Err(Stop::Interrupted) => Ok(Ending::Interrupted),
            Err(Stop::Failed(failure)) => Err(failure),
            Err(Stop::Differs) => {
                // The evidence stays.
                let kept = self.dir.clone().unwrap_or_else(|| scratch.keep().join("store"));
                out.line(format_args!("the store is left in {}; the seed was {seed}", kept.display()))?;
                Ok(Ending::Difference)
            }
        }
    }

    fn prepare<'o>(
        &self,
        scratch: &Path,
        seed: u64,
        interrupt: Interrupt,
        out: &'o mut Output,
    ) -> Result<Show<'o>, Failure> {
        let store = self.dir.clone().unwrap_or_else(|| scratch.join("store"));
        if std::fs::read_dir(&store).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(Failure::Environment(format!("{} is not empty", store.display())));
        }
        let trace = scratch.join("trace.jsonl.zst");
        std::fs::write(&trace, TRACE)
            .map_err(|error| Failure::Environment(format!("cannot write {}: {error}", trace.display())))?;
        let requests = Trace::open(&trace, Some(self.requests))?.collect::<Result<Vec<_>, _>>()?;
        let limit = requests.len() as u64;
        out.line(format_args!("Replaying {limit} requests of a chat service's cache trace into a store,"))?;
        out.line(format_args!(
            "a snapshot every {}, {} kills at random moments (--seed {seed}).",
            self.snapshot_every, self.kills
        ))?;
        out.line("")?;
        out.flush()?;
        Ok(Show {
            errand: Errand {
                store: store.clone(),
                trace,
                limit,
                snapshot_every: self.snapshot_every.get(),
                device: self.device,
            },
            requests,
            simulation: Simulation::new(rule::choose(&store, None, None)?),
            random: SplitMix64::new(seed),
            interrupt,
            bar: progress::bar(limit, "replaying"),
            out,
            replaying: Duration::ZERO,
            replayed: 0,
            back_after: Vec::new(),
        })
    }

    /// The acts, in order.
    fn show(&self, show: &mut Show<'_>) -> Result<(), Stop> {
        show.heading()?;
        for kill in 1..=self.kills {
            if !show.run_and_kill(kill, self.kills)? {
                break;
            }
        }
        show.run_to_the_end("then, left alone")?;
        show.go_back()?;
        show.heading()?;
        show.run_and_kill(1, 1)?;
        show.run_to_the_end("then, left alone")?;
        show.conclude()
    }
}

/// One line of the report.
struct Row<'r> {
    what: &'r str,
    lived: Duration,
    acknowledged: Option<u64>,
    rebuilt: Option<&'r Rebuilt>,
}

impl Show<'_> {
    fn heading(&mut self) -> Result<(), Stop> {
        let line = format!(
            "{:<18} {:>8} {:>13} {:>7}  {:<29} CHECKED",
            "", "RAN", "ACKNOWLEDGED", "FOUND", "RECOVERED FROM"
        );
        self.say(line)
    }

    /// Lets a replay run and kills it. `false` if it reached its end first.
    fn run_and_kill(&mut self, kill: u64, kills: u64) -> Result<bool, Stop> {
        let from = self.simulation.next_request();
        let left = self.errand.limit - from;
        // On the average the kills share evenly what is left. One in four strikes at a moment counted from
        // the start instead, while the process opens the store.
        let target = from + self.random.below(2 * left / (kills - kill + 2) + 1);
        let early = (self.random.below(4) == 0).then(|| Duration::from_micros(self.random.below(60_000)));
        let late = Duration::from_micros(self.random.below(3_000));

        let mut replayer = self.errand.start()?;
        let watched = self.watch(&mut replayer, |acknowledged, ran| match early {
            Some(early) => ran >= early,
            None => acknowledged >= Some(target),
        })?;
        if watched == Watched::Reached {
            replayer.run_on(late);
            let lived = replayer.kill()?;
            self.check(&format!("kill {kill} of {kills}"), lived, &replayer)?;
        }
        Ok(watched == Watched::Reached)
    }

    /// Lets a replay run to the end of the trace.
    fn run_to_the_end(&mut self, what: &str) -> Result<(), Stop> {
        let mut replayer = self.errand.start()?;
        let started = Instant::now();
        self.watch(&mut replayer, |_, _| false)?;
        self.check(what, started.elapsed(), &replayer)?;
        if self.simulation.next_request() < self.errand.limit {
            self.say(format!("the replay ended after request {:?}", self.simulation.last_request()))?;
            return Err(Stop::Differs);
        }
        Ok(())
    }

    /// Watches a replay, and shows its progress, until the moment comes or it ends well.
    fn watch(
        &mut self,
        replayer: &mut Replayer,
        moment: impl Fn(Option<u64>, Duration) -> bool,
    ) -> Result<Watched, Stop> {
        let (interrupt, bar, before) = (&self.interrupt, &self.bar, self.simulation.next_request());
        let watched = replayer.watch(
            || interrupt.noted(),
            |acknowledged, ran| {
                bar.set_position(acknowledged.map_or(before, |request| request + 1));
                moment(acknowledged, ran)
            },
        )?;
        match watched {
            Watched::Interrupted => Err(Stop::Interrupted),
            Watched::Ended(status) if !status.success() => Err(Stop::Failed(replayer.failure(status))),
            Watched::Ended(_) | Watched::Reached => Ok(watched),
        }
    }

    /// Reads the directory and holds it against the simulation: all that was acknowledged, at most the one
    /// request in flight beside it, and nothing else.
    fn check(&mut self, what: &str, lived: Duration, replayer: &Replayer) -> Result<(), Stop> {
        let before = self.simulation.next_request();
        let acknowledged = replayer.last_ack();
        self.back_after.extend(replayer.first_ack_after());
        // Before there is a store, nothing can have been acknowledged.
        let is_there = self.errand.store.join(FileName::Store.name()).exists();
        let rebuilt = is_there.then(|| check::recovered(&self.errand.store)).transpose()?;
        let root = rebuilt.as_ref().map(|rebuilt| rebuilt.table.root().clone()).unwrap_or_default();
        let found = last_request(&root).map_err(Failure::Damage)?;
        self.report(&Row { what, lived, acknowledged, rebuilt: rebuilt.as_ref() }, found)?;

        // What an earlier check found must still be there, acknowledged or not.
        let certain = acknowledged.max(self.simulation.last_request());
        let in_flight = certain.map_or(0, |request| request + 1);
        if found < certain || found > Some(in_flight) {
            self.say(format!("found request {found:?}, but {certain:?} was certain"))?;
            return Err(Stop::Differs);
        }
        self.simulate_to(found);
        if let Some(rebuilt) = &rebuilt {
            self.hold(rebuilt, Epochs::Exact)?;
        }
        self.replaying += lived;
        self.replayed += self.simulation.next_request() - before;
        Ok(())
    }

    fn simulate_to(&mut self, last: Option<u64>) {
        while self.simulation.last_request() < last {
            let request = &self.requests[self.simulation.next_request() as usize];
            self.simulation.request(request);
        }
    }

    /// Stops the show if the store is not what the simulation says.
    fn hold(&mut self, rebuilt: &Rebuilt, epochs: Epochs) -> Result<(), Stop> {
        let differences = check::compare(&self.simulation, epochs, rebuilt);
        if differences.is_empty() {
            return Ok(());
        }
        for difference in differences.iter().take(DIFFERENCES_SHOWN) {
            self.say(difference.to_string())?;
        }
        self.say(format!("{} differences", differences.len()))?;
        Err(Stop::Differs)
    }

    /// Takes the store back to its oldest snapshot, and the simulation with it.
    fn go_back(&mut self) -> Result<(), Stop> {
        let started = Instant::now();
        let options = Options::default().create(Create::Never).device(self.errand.device);
        let store = Store::open(&self.errand.store, options).map_err(engine_failure)?;
        let Some(oldest) = store.snapshots().into_iter().min_by_key(|snapshot| snapshot.id) else {
            store.close().map_err(engine_failure)?;
            return self.say("There is no snapshot to go back to: too few requests for one.".to_owned());
        };
        store.restore_from_snapshot(oldest.id).map_err(engine_failure)?;
        store.close().map_err(engine_failure)?;
        let took = started.elapsed();

        let rebuilt = check::recovered(&self.errand.store)?;
        let request = last_request(rebuilt.table.root()).map_err(Failure::Damage)?;
        self.simulation = Simulation::new(self.simulation.rule());
        self.simulate_to(request);
        self.hold(&rebuilt, Epochs::AtLeast)?;
        // What the restore changed has epochs above all that were ever given; from here on they count on.
        for info in rebuilt.table.pages() {
            if let Some(hash_id) = info.key.as_ref().and_then(hash_id) {
                self.simulation.set_epoch(hash_id, info.epoch.0);
            }
        }
        self.say(format!(
            "\nBack to snapshot {} in {took:.0?}: the {} pages after request {} again, every byte of them. \
             Now forward.\n",
            oldest.id,
            rebuilt.table.pages().len(),
            request.unwrap_or_default()
        ))
    }

    fn report(&mut self, row: &Row<'_>, found: Option<u64>) -> Result<(), Stop> {
        let request = |request: Option<u64>| request.map_or("-".to_owned(), |request| request.to_string());
        let (from, checked) = match row.rebuilt {
            None => ("no store yet".to_owned(), "nothing is there".to_owned()),
            Some(rebuilt) => {
                let base = rebuilt.base.map_or("the beginning".to_owned(), |base| format!("snapshot {base}"));
                (format!("{base} + {} batches", rebuilt.batches), format!("{} pages", rebuilt.contents.len()))
            }
        };
        self.say(format!(
            "{:<18} {:>6} ms {:>13} {:>7}  {from:<29} {checked}",
            row.what,
            row.lived.as_millis(),
            request(row.acknowledged),
            request(found),
        ))
    }

    fn conclude(&mut self) -> Result<(), Stop> {
        self.back_after.sort_unstable();
        let median = self.back_after.get(self.back_after.len() / 2).copied().unwrap_or_default();
        let rate = self.replayed as f64 / self.replaying.as_secs_f64();
        self.say(format!(
            "\nEvery acknowledged request was found after every kill, with all its bytes.\n\
             {} requests in {:.1} s, starts and kills included: {rate:.0} requests/s. A new process had \
             its first request\nacknowledged {median:.0?} after its start, the median of {}.",
            self.replayed,
            self.replaying.as_secs_f64(),
            self.back_after.len(),
        ))
    }

    /// Prints a line of the report, above the bar.
    fn say(&mut self, line: String) -> Result<(), Stop> {
        let out = &mut *self.out;
        self.bar.suspend(|| out.line(line).and_then(|()| out.flush())).map_err(Stop::Failed)
    }
}

/// How many differences are listed; the rest is counted.
const DIFFERENCES_SHOWN: usize = 20;

fn seed_from_clock() -> u64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Short enough to be typed again.
    SplitMix64::new(since_epoch.as_nanos() as u64).below(1_000_000)
}
