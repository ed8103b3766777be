//! The scheduler, which polls, starts, stalls and kills the processes in an order that a seed determines.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::bucket::SimBucket;
use super::process::{Process, Role, Stop};
use super::world::{MACHINES, ProcessId, SharedWorld, World};
use crate::line::Takeover;
use crate::rules::Rules;

/// Number of random steps in a schedule.
const STEPS: u64 = 360;
/// Maximum number of processes at a time.
const PROCESSES_MAX: usize = 5;
/// Number of steps after which the schedule fails because the last restore or the last writer has not ended.
const FINAL_STEPS: u64 = 4000;

/// The result of a schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The violated promise, or `None` if all promises held.
    pub violation: Option<String>,
    /// Number of acknowledged batches.
    pub acknowledged: usize,
    /// The recorded events. Empty if no trace was requested.
    pub trace: Vec<String>,
}

/// A process that the scheduler polls.
struct Task {
    future: Pin<Box<dyn Future<Output = Result<(), Stop>>>>,
    machine: usize,
    role: Role,
}

/// A bucket, machines and processes. A random schedule or a test runs the processes.
pub struct Simulation {
    /// The shared state.
    pub world: SharedWorld,
    rules: Rules,
    tasks: BTreeMap<ProcessId, Task>,
    weights: BTreeMap<ProcessId, usize>,
    started: ProcessId,
}

impl std::fmt::Debug for Simulation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulation").field("tasks", &self.tasks.keys()).finish_non_exhaustive()
    }
}

/// Runs the schedule of a seed, and returns its outcome. Records a trace if `is_traced` is true.
#[must_use]
pub fn run(seed: u64, rules: Rules, is_traced: bool) -> Outcome {
    let mut simulation = Simulation::new(seed, rules);
    if is_traced {
        simulation.world.borrow_mut().trace = Some(Vec::new());
    }
    let played = simulation.play().and_then(|()| simulation.finish());
    let mut world = simulation.world.borrow_mut();
    Outcome {
        violation: played.err(),
        acknowledged: world.acknowledged.len(),
        trace: world.trace.take().unwrap_or_default(),
    }
}

impl Simulation {
    /// Creates a simulation without processes.
    #[must_use]
    pub fn new(seed: u64, rules: Rules) -> Self {
        let world = Rc::new(RefCell::new(World::new(seed)));
        Self { world, rules, tasks: BTreeMap::new(), weights: BTreeMap::new(), started: 0 }
    }

    /// Creates a process on a machine. Does not start it.
    pub fn process(&mut self, machine: usize) -> Process {
        self.started += 1;
        let world = self.world.clone();
        let takeover =
            if world.borrow_mut().rng.chance(0.5) { Takeover::Permitted } else { Takeover::Refused };
        let bucket = SimBucket {
            world: world.clone(),
            process: self.started,
            machine: Some(machine),
            ignores_condition: false,
        };
        Process { bucket, rules: self.rules, world, machine, takeover }
    }

    /// Starts a process.
    pub fn start(&mut self, role: Role, machine: usize) -> ProcessId {
        let mut process = self.process(machine);
        if role != Role::Writer {
            process.bucket.machine = None;
        }
        let id = process.bucket.process;
        self.world.borrow_mut().record_event(|| format!("P{id} starts: {role:?} on machine {machine}"));
        self.tasks.insert(id, Task { future: Box::pin(process.run(role)), machine, role });
        id
    }

    /// Runs a process until it yields. Returns false if it has ended.
    ///
    /// # Errors
    /// Returns the violated promise.
    pub fn step(&mut self, id: ProcessId) -> Result<bool, String> {
        let Some(task) = self.tasks.get_mut(&id) else { return Ok(false) };
        match task.future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => return Ok(true),
            Poll::Ready(Ok(())) => self.world.borrow_mut().record_event(|| format!("P{id} ends")),
            Poll::Ready(Err(Stop::Expected(reason))) => {
                self.world.borrow_mut().record_event(|| format!("P{id} stops: {reason}"));
            }
            Poll::Ready(Err(Stop::Violation(promise))) => {
                self.world.borrow_mut().record_event(|| format!("P{id} VIOLATION: {promise}"));
                return Err(promise);
            }
        }
        self.tasks.remove(&id);
        Ok(false)
    }

    fn has_writer(&self, machine: usize) -> bool {
        self.tasks.values().any(|task| task.machine == machine && task.role == Role::Writer)
    }

    /// Runs random steps.
    fn play(&mut self) -> Result<(), String> {
        for now in 0..STEPS {
            self.world.borrow_mut().now = now;
            let share = self.world.borrow_mut().rng.share();
            match share {
                ..0.05 => self.wake_zombie(),
                ..0.09 if self.tasks.len() < PROCESSES_MAX => self.start_any(),
                ..0.105 => self.kill_any(),
                ..0.108 => self.copy_directory(),
                ..0.12 => self.stall(),
                _ => self.step_any()?,
            }
        }
        Ok(())
    }

    /// Applies the effect of a random earlier request.
    fn wake_zombie(&mut self) {
        let mut world = self.world.borrow_mut();
        if world.zombies.is_empty() {
            return;
        }
        let at = world.zombies.len();
        let at = world.rng.below(at);
        let effect = world.zombies.swap_remove(at);
        world.record_event(|| "a late request takes effect".to_owned());
        world.apply(&effect);
    }

    fn start_any(&mut self) {
        let (machine, role) = {
            let rng = &mut self.world.borrow_mut().rng;
            let roles = [Role::Writer, Role::Writer, Role::Writer, Role::Reader, Role::Reader, Role::Pruner];
            (rng.choice(&[0, 0, 0, 1, 2]), rng.choice(&roles))
        };
        if role != Role::Writer || !self.has_writer(machine) {
            self.start(role, machine);
        }
    }

    fn kill_any(&mut self) {
        let ids: Vec<ProcessId> = self.tasks.keys().copied().collect();
        if ids.is_empty() {
            return;
        }
        let id = self.world.borrow_mut().rng.choice(&ids);
        self.kill(id);
    }

    /// Kills a random process, and in some cases cuts the power of its machine. Its current request may take effect
    /// later.
    pub fn kill(&mut self, id: ProcessId) {
        let Some(task) = self.tasks.remove(&id) else { return };
        let mut world = self.world.borrow_mut();
        world.record_event(|| format!("P{id} is killed"));
        if let Some(effect) = world.in_flight.remove(&id)
            && world.rng.chance(0.5)
        {
            world.zombies.push(effect);
        }
        if task.role != Role::Writer {
            return;
        }
        match world.rng.share() {
            ..0.25 => world.cut_power(task.machine),
            ..0.45 => {
                world.machines[task.machine] = None;
                world.record_event(|| "  with its machine".to_owned());
            }
            _ => {}
        }
    }

    /// Copies a directory, or replaces the directory of a machine with an earlier copy, possibly of another machine.
    fn copy_directory(&mut self) {
        let machine = self.world.borrow_mut().rng.below(MACHINES);
        let is_free = !self.has_writer(machine);
        let mut world = self.world.borrow_mut();
        if world.old_copy.is_some() && is_free && world.rng.chance(0.6) {
            world.machines[machine] = world.old_copy.take();
            world.record_event(|| format!("an old copy of a directory comes back on machine {machine}"));
        } else if let Some(store) = &world.machines[machine] {
            let mut copy = store.clone();
            copy.is_old_copy = true;
            world.old_copy = Some(copy);
        }
    }

    /// Makes some processes slow and others fast.
    fn stall(&mut self) {
        let rng = &mut self.world.borrow_mut().rng;
        self.weights = self.tasks.keys().map(|id| (*id, rng.choice(&[0, 1, 1, 4]))).collect();
    }

    fn step_any(&mut self) -> Result<(), String> {
        let weight = |id: &ProcessId| self.weights.get(id).copied().unwrap_or(1);
        let mut ids: Vec<ProcessId> =
            self.tasks.keys().flat_map(|id| std::iter::repeat_n(*id, weight(id))).collect();
        if ids.is_empty() {
            ids = self.tasks.keys().copied().collect();
        }
        if ids.is_empty() {
            return Ok(());
        }
        let id = self.world.borrow_mut().rng.choice(&ids);
        self.step(id).map(|_| ())
    }

    /// Ends all faults, and checks that a restore then succeeds and that a new machine can take over.
    fn finish(&mut self) -> Result<(), String> {
        self.tasks.clear();
        {
            let mut world = self.world.borrow_mut();
            world.is_calm = true;
            world.in_flight.clear();
            world.now += 1;
            for effect in std::mem::take(&mut world.zombies) {
                if world.rng.chance(0.5) {
                    world.apply(&effect);
                }
            }
            world.machines[0] = None;
        }
        self.run_to_end("the last restore", Role::Reader)?;
        let before = self.world.borrow().acknowledged.len();
        let writer = self.start(Role::Writer, 0);
        for _ in 0..FINAL_STEPS {
            if self.world.borrow().acknowledged.len() > before {
                break;
            }
            self.world.borrow_mut().now += 1;
            if !self.step(writer)? {
                return Err("the last writer stops".to_owned());
            }
        }
        if self.world.borrow().acknowledged.len() == before {
            return Err("the last writer archives nothing".to_owned());
        }
        self.world.borrow_mut().now += 1;
        self.run_to_end("the restore after the last writer", Role::Reader)
    }

    fn run_to_end(&mut self, name: &str, role: Role) -> Result<(), String> {
        let process = self.process(0);
        let mut future = Box::pin(process.run(role));
        for _ in 0..FINAL_STEPS {
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => return Ok(()),
                Poll::Ready(Err(Stop::Expected(reason))) => return Err(format!("{name} stops: {reason}")),
                Poll::Ready(Err(Stop::Violation(promise))) => return Err(promise),
            }
        }
        Err(format!("{name} does not end"))
    }
}
