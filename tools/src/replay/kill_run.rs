//! A store whose replays are killed repeatedly, and the simulation with which the store is compared. `demo` prints the
//! results, and `torture` counts them.
//!
//! Each replay is a child process that runs `remanent replay`, as a user could. Between two child processes, the
//! directory is only read, without the engine.

use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;
use remanent::error::FileName;
use remanent_format::state::rebuild::RebuiltStore;

use crate::cli::exit::Failure;
use crate::cli::interrupt::Interrupt;
use crate::replay::check;
use crate::replay::check::{Epochs, hash_id, last_request};
use crate::replay::child::{ReplayParams, Replayer, WatchEnd};
use crate::replay::simulate::{Simulation, SplitMix64};
use crate::replay::trace::Trace;

/// A store, the parameters of its replays, and the expected content of the store.
pub struct KillRun {
    /// The parameters of every replay.
    pub params: ReplayParams,
    /// The generator of the random times at which replays are killed.
    pub random: SplitMix64,
    requests: Vec<Vec<u64>>,
    /// Expected content of the store at the last check.
    simulation: Simulation,
    interrupt: Interrupt,
    bar: ProgressBar,
    totals: KillRunTotals,
}

/// The totals of all replays in a run.
#[derive(Clone, Debug, Default)]
pub struct KillRunTotals {
    /// The total time for which replays ran.
    pub replaying: Duration,
    /// The number of replayed requests.
    pub replayed: u64,
    /// The times from the start of each child process to its first acknowledgement.
    pub first_ack_times: Vec<Duration>,
}

/// The result of checking the store after a replay, if the check found no difference.
#[derive(Debug)]
pub struct CheckReport {
    /// The time from the start of the replay to its end.
    pub lived: Duration,
    /// The last request that the replay acknowledged.
    pub acknowledged: Option<u64>,
    /// The last request that the store contains.
    pub found: Option<u64>,
    /// The state of the store, or `None` if the replay was killed before it created the store.
    pub rebuilt: Option<RebuiltStore>,
}

/// The reason why a run stopped before its end.
#[derive(Debug)]
pub enum KillRunStop {
    /// Ctrl-C was pressed.
    Interrupted,
    /// The store differs from its expected content. Each string describes one difference.
    Differs(Vec<String>),
    /// The run failed for another reason.
    Failed(Failure),
}

impl From<Failure> for KillRunStop {
    fn from(failure: Failure) -> Self {
        KillRunStop::Failed(failure)
    }
}

impl KillRun {
    /// Creates a run for a store that does not exist yet. `bar` counts requests.
    pub fn new(
        params: ReplayParams,
        random: SplitMix64,
        interrupt: Interrupt,
        bar: ProgressBar,
    ) -> Result<Self, Failure> {
        let requests = Trace::open(&params.trace, Some(params.limit))?.collect::<Result<Vec<_>, _>>()?;
        let simulation = Simulation::new(params.rule);
        Ok(Self {
            params: ReplayParams { limit: requests.len() as u64, ..params },
            random,
            requests,
            simulation,
            interrupt,
            bar,
            totals: KillRunTotals::default(),
        })
    }

    /// Returns the expected content of the store as of the last check.
    pub fn simulation(&self) -> &Simulation {
        &self.simulation
    }

    /// Returns the totals of all replays so far.
    pub fn totals(&self) -> &KillRunTotals {
        &self.totals
    }

    /// Runs a replay, kills it, and checks the store. `kill` is the number of this kill, and `kills` is the total
    /// number. Returns `None` if the replay ended before the kill.
    pub fn run_and_kill(&mut self, kill: u64, kills: u64) -> Result<Option<CheckReport>, KillRunStop> {
        let done = self.run_until_then_kill(kill, kills, |_| Ok(()))?;
        Ok(done.map(|((), checked)| checked))
    }

    /// Runs and kills a replay as [`run_and_kill`](Self::run_and_kill) does. Just before the kill, calls `before_kill`
    /// with the last acknowledged request.
    pub fn run_until_then_kill<T>(
        &mut self,
        kill: u64,
        kills: u64,
        before_kill: impl FnOnce(Option<u64>) -> Result<T, Failure>,
    ) -> Result<Option<(T, CheckReport)>, KillRunStop> {
        let from = self.simulation.next_request();
        let left = self.params.limit - from;
        // On average, the kills divide the remaining trace evenly. One in four kills occurs shortly after the start,
        // while the process opens the store.
        let target = from + self.random.below(2 * left / (kills - kill + 2) + 1);
        let early = (self.random.below(4) == 0).then(|| Duration::from_micros(self.random.below(60_000)));
        let late = Duration::from_micros(self.random.below(3_000));

        let mut replayer = self.params.start()?;
        let watched = self.watch(&mut replayer, |acknowledged, ran| match early {
            Some(early) => ran >= early,
            None => acknowledged >= Some(target),
        })?;
        if watched != WatchEnd::Reached {
            self.check(replayer.lived(), &replayer)?;
            return Ok(None);
        }
        replayer.run_on(late);
        let done = before_kill(replayer.last_ack())?;
        let lived = replayer.kill()?;
        Ok(Some((done, self.check(lived, &replayer)?)))
    }

    /// Runs a replay to the end of the trace, and checks the store.
    pub fn run_to_end(&mut self) -> Result<CheckReport, KillRunStop> {
        let mut replayer = self.params.start()?;
        self.watch(&mut replayer, |_, _| false)?;
        let checked = self.check(replayer.lived(), &replayer)?;
        if self.simulation.next_request() < self.params.limit {
            let ended = format!("the replay ended after request {:?}", self.simulation.last_request());
            return Err(KillRunStop::Differs(vec![ended]));
        }
        Ok(checked)
    }

    /// Waits until `reached` returns true or the replay ends, and updates the progress bar. Returns an error if the
    /// replay fails.
    pub fn watch(
        &self,
        replayer: &mut Replayer,
        reached: impl Fn(Option<u64>, Duration) -> bool,
    ) -> Result<WatchEnd, KillRunStop> {
        let before = self.simulation.next_request();
        let watched = replayer.watch(
            || self.interrupt.is_noted(),
            |acknowledged, ran| {
                self.bar.set_position(acknowledged.map_or(before, |request| request + 1));
                reached(acknowledged, ran)
            },
        )?;
        match watched {
            WatchEnd::Interrupted => Err(KillRunStop::Interrupted),
            WatchEnd::Ended(status) if !status.success() => {
                Err(KillRunStop::Failed(replayer.failure(status)))
            }
            WatchEnd::Ended(_) | WatchEnd::Reached => Ok(watched),
        }
    }

    /// Compares the store with the simulation after a replay ended. The store must contain all acknowledged requests.
    /// It may contain one more request, which was in progress.
    fn check(&mut self, lived: Duration, replayer: &Replayer) -> Result<CheckReport, KillRunStop> {
        let before = self.simulation.next_request();
        let acknowledged = replayer.last_ack();
        self.totals.first_ack_times.extend(replayer.first_ack_after());
        // Requests that an earlier check found must still exist, even if they were not acknowledged.
        let min = acknowledged.max(self.simulation.last_request());
        let in_flight = min.map_or(0, |request| request + 1);
        let (simulation, rebuilt) = self.check_at(&self.params.store, min, Some(in_flight))?;
        self.simulation = simulation;
        self.totals.replaying += lived;
        self.totals.replayed += self.simulation.next_request() - before;
        Ok(CheckReport { lived, acknowledged, found: self.simulation.last_request(), rebuilt })
    }

    /// Compares the state that recovery would find in a directory with the simulation, byte for byte. The last request
    /// in the store must be between `min` and `max`, inclusive. Returns the simulation of this state.
    pub fn check_at(
        &self,
        store: &Path,
        min: Option<u64>,
        max: Option<u64>,
    ) -> Result<(Simulation, Option<RebuiltStore>), KillRunStop> {
        // No request can be acknowledged before the store exists.
        let is_there = store.join(FileName::Store.name()).exists();
        let rebuilt = is_there.then(|| check::recovered(store)).transpose()?;
        let root = rebuilt.as_ref().map(|rebuilt| rebuilt.table.root().clone()).unwrap_or_default();
        let found = last_request(&root).map_err(Failure::Damage)?;
        if found < min || found > max {
            let number =
                |request: Option<u64>| request.map_or("none".to_owned(), |number| number.to_string());
            return Err(KillRunStop::Differs(vec![format!(
                "the last request in {} is {}, expected at least {} and at most {}",
                store.display(),
                number(found),
                number(min),
                number(max)
            )]));
        }
        let simulation = self.simulation_at(found);
        if let Some(rebuilt) = &rebuilt {
            hold(&simulation, Epochs::Exact, rebuilt)?;
        }
        Ok((simulation, rebuilt))
    }

    /// Returns the simulation after request `last`. Request `last` must not precede the creation or the last restore of
    /// the store.
    pub fn simulation_at(&self, last: Option<u64>) -> Simulation {
        // The simulation of the last check contains the epochs that a restore assigned.
        let is_ahead = last >= self.simulation.last_request();
        let mut simulation =
            if is_ahead { self.simulation.clone() } else { Simulation::new(self.simulation.rule()) };
        while simulation.last_request() < last {
            // If the request is not in the trace, the comparison reports the difference.
            let Some(request) = self.requests.get(simulation.next_request() as usize) else { break };
            simulation.request(request);
        }
        simulation
    }

    /// Updates the simulation after the caller restored the store, and compares the store with the simulation.
    pub fn restored(&mut self) -> Result<CheckReport, KillRunStop> {
        let rebuilt = check::recovered(&self.params.store)?;
        let request = last_request(rebuilt.table.root()).map_err(Failure::Damage)?;
        self.simulation = self.simulation_at(request);
        hold(&self.simulation, Epochs::AtLeast, &rebuilt)?;
        // The restore assigned new epochs, above all earlier ones, to the pages that it changed.
        for info in rebuilt.table.pages() {
            if let Some(hash_id) = info.key.as_ref().and_then(hash_id) {
                self.simulation.set_epoch(hash_id, info.epoch.0);
            }
        }
        Ok(CheckReport { lived: Duration::ZERO, acknowledged: None, found: request, rebuilt: Some(rebuilt) })
    }
}

/// Compares a rebuilt store with a simulation. Returns the differences as an error.
fn hold(simulation: &Simulation, epochs: Epochs, rebuilt: &RebuiltStore) -> Result<(), KillRunStop> {
    let differences = check::compare(simulation, epochs, rebuilt);
    if differences.is_empty() {
        return Ok(());
    }
    let mut lines: Vec<String> =
        differences.iter().take(DIFFERENCES_SHOWN).map(ToString::to_string).collect();
    lines.push(format!("{} differences", differences.len()));
    Err(KillRunStop::Differs(lines))
}

/// Maximum number of differences that are printed.
const DIFFERENCES_SHOWN: usize = 20;
