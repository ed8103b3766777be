//! Runs histories of a store with crashes at any point, and compares the results with the model of the
//! ordinary tests.
//!
//! The fuzzer adds two things to those tests. Code coverage guides the choice of inputs. The disk is
//! simulated, so a crash can happen before any disk event or tear the event, and a power cut keeps any subset
//! of the unsynced writes. The result must be the state after some batch, and no acknowledged batch may be
//! missing.

use std::sync::Arc;

use arbitrary::{Arbitrary, Unstructured};
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::options::{ImageIo, ImageOptions, LogIo, LogOptions};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::{CrashImage, CrashPlan, Moment, SimDisk, Tears};
use remanent::{Ack, Error, Options, StatePoint, Store, View};
use remanent_format::ReadAt;

use crate::model::history::Action;
use crate::model::run::{Floors, Ground, Left, Setting, Tally, run, with_tiers};

/// Maximum number of actions in a history. Longer histories find nothing more in the same time.
const ACTIONS_MAX: usize = 40;
/// Number of possible disk states after a power cut at one moment. One of them is chosen.
const IMAGES_MAX: usize = 8;

/// Options with which a store is opened.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Choices {
    log_io: u8,
    is_durable: bool,
    is_late: bool,
    in_background: bool,
}

/// Runs the history that an input encodes.
pub fn history(data: &[u8]) {
    let mut raw = Unstructured::new(data);
    let Ok(choices) = Choices::arbitrary(&mut raw) else { return };
    let actions: Vec<Action> = match raw.arbitrary_iter() {
        Ok(drawn) => drawn.map_while(Result::ok).take(ACTIONS_MAX).collect(),
        Err(_) => return,
    };
    live_through(&actions, choices);
}

/// Runs a history on simulated disks.
fn live_through(actions: &[Action], choices: Choices) -> Tally {
    let host = || Arc::new(HostDevice::new()) as Arc<dyn Device>;
    let late = || Arc::new(LateDevice::seeded(host(), u64::from(choices.log_io))) as Arc<dyn Device>;
    let log_io = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct][usize::from(choices.log_io % 3)];
    let image_io = [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct][usize::from(choices.log_io / 3 % 3)];
    let ack = if choices.is_durable { Ack::Durable } else { Ack::Logged };
    let setting = Setting {
        options: with_tiers(
            Options::new()
                .log(LogOptions::new().io(log_io))
                .images(ImageOptions::new().io(image_io))
                .ack(ack),
        ),
        in_background: choices.in_background,
        is_cramped: false,
        device: if choices.is_late { &late } else { &host },
    };
    let mut tally = Tally::default();
    run(actions, Simulation::default(), &setting, &mut tally);
    tally
}

/// A simulated disk, and the guarantees made on it before the current action began.
#[derive(Default)]
struct Simulation {
    disk: SimDisk,
    floors: Floors,
    /// Number of disk events before the current action.
    events: usize,
}

impl Ground for Simulation {
    fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(self.disk.clone())
    }

    fn files(&self) -> Box<dyn ReadAt + '_> {
        Box::new(self.disk.clone())
    }

    fn fork(&self, store: &Store, point: &StatePoint) -> Result<Self, Error> {
        let fork = Self::default();
        store.wait_durable(store.lsn())?;
        View::open_on(&self.disk(), Some(point))?.fork_on(&fork.disk())?;
        Ok(fork)
    }

    fn begin(&mut self, floors: Floors) {
        (self.floors, self.events) = (floors, self.disk.events());
    }

    /// Crashes at any disk event since the action began, or after the last event.
    fn crash(self, store: Store, pick: u64) -> Left<Self> {
        let floors_now = Floors::of(&store);
        let last = self.disk.events();
        let [kind, choice, at @ ..] = pick.to_le_bytes();
        let at = self.events + usize::from(u16::from_le_bytes([at[0], at[1]])) % (last - self.events + 1);
        let plan = CrashPlan { events: at..at + 1, tears: Tears::Few(2), images_max: IMAGES_MAX, seed: pick };
        let is_kill = kind % 2 == 0;
        let mut images: Vec<CrashImage> = Vec::new();
        if is_kill {
            self.disk.kill_images(&plan, |image| images.push(image));
        } else {
            self.disk.power_images(&plan, |image| images.push(image));
        }
        let image = images.swap_remove(usize::from(choice) % images.len());
        let is_last = image.moment == Moment { event: last, tear: None };
        let floors = if is_last { floors_now } else { self.floors };
        let floors = if is_kill { floors } else { Floors { logged: floors.durable, ..floors } };
        let ground = Self { disk: image.disk, floors, events: 0 };
        Left { ground, floors, is_between: false }
    }
}

/// Counts the crashes of random histories, and those that lost batches, for the test that proves that this
/// target can fail.
pub fn crashes(actions: &[Action]) -> (usize, usize) {
    let choices = Choices { log_io: 0, is_durable: false, is_late: false, in_background: false };
    let Tally { crashes, lost, .. } = live_through(actions, choices);
    (crashes, lost)
}
