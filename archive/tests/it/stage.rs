//! A stage for schedules that a test defines step by step: a bucket without faults, and processes that the test stalls.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use remanent_archive::line::{SnapshotParts, Takeover};
use remanent_archive::object::ObjectKey;
use remanent_archive::rules::Rules;
use remanent_archive::testing::Simulation;
use remanent_archive::testing::handle::SimStoreHandle;
use remanent_archive::testing::process::{Process, SimLine, Stop};
use remanent_archive::testing::store::SimStore;
use remanent_archive::testing::world::{Effect, SharedWorld};

/// A bucket and machines without random faults.
pub struct Stage {
    simulation: Simulation,
    pub world: SharedWorld,
}

impl Stage {
    pub fn new(rules: Rules) -> Self {
        let simulation = Simulation::new(1, rules);
        let world = simulation.world.clone();
        world.borrow_mut().is_calm = true;
        Self { simulation, world }
    }

    /// Returns a process on `machine` with permission to take over.
    pub fn process(&mut self, machine: usize) -> Process {
        let mut process = self.simulation.process(machine);
        process.takeover = Takeover::Permitted;
        process
    }

    /// Restores the end of the line, and checks it against the promises.
    pub fn read(&mut self) -> Result<Vec<u64>, Stop> {
        self.tick();
        block_on(self.process(0).read())
    }

    /// Advances the time, so that a reader that starts now must find everything that was acknowledged before.
    pub fn tick(&self) {
        self.world.borrow_mut().now += 1;
    }

    /// Returns true if `process` has sent a create of a line object that has not taken effect yet.
    pub fn is_creating_in_line(&self, process: &Process) -> bool {
        let world = self.world.borrow();
        let request = world.in_flight.get(&process.bucket.process);
        matches!(request, Some(Effect::Create(ObjectKey::Line(_), _, _)))
    }

    /// Returns true if the bucket contains an object.
    pub fn has(&self, key: ObjectKey) -> bool {
        self.world.borrow().objects.contains_key(&key)
    }

    /// Copies a directory to another machine.
    pub fn put_copy(&self, copy: &SimStore, machine: usize) {
        let mut copy = copy.clone();
        copy.is_old_copy = true;
        self.world.borrow_mut().machines[machine] = Some(copy);
    }
}

/// Runs a future to completion.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}

/// Polls a future until `condition` returns true. The future is then stalled until the caller polls it again.
pub fn stall_when<T>(future: &mut Pin<Box<dyn Future<Output = T> + '_>>, condition: impl Fn() -> bool) {
    while !condition() {
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "the process ended before the condition held");
    }
}

/// Commits `count` batches and seals them.
pub fn commit(local: &SimStoreHandle, count: u64) {
    for _ in 0..count {
        let token = local.world.borrow_mut().draw();
        local.with(|store| store.commit(token));
    }
    local.with(SimStore::seal);
}

/// Takes a snapshot of the current state.
pub fn snapshot(local: &SimStoreHandle, is_base: bool) -> SnapshotParts {
    local.with(|store| {
        let redo = store.snapshot_redo();
        store.complete_snapshot(redo, is_base)
    })
}

/// Commits a batch, archives it, and archives a snapshot.
pub fn archive_snapshot(process: &Process, line: &mut SimLine<'_>, is_base: bool) -> Result<(), Stop> {
    let local = process.local();
    block_on(process.append_run(line, &local))?;
    let snapshot = snapshot(&local, is_base);
    block_on(process.append_manifest(line, &local, &snapshot))
}
