//! Runs a history on a store and on the model, in any environment.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::with_options::With;
use remanent::batch::{InitialCopy, Shadow, Width};
use remanent::device::Device;
use remanent::disk::Disk;
use remanent::error::{NoSuchState, Taken};
use remanent::options::{MemoryOptions, SnapshotSchedule};
use remanent::snapshot::SnapshotInfo;
use remanent::tiers::Tiers;
use remanent::{
    Error, Key, Lsn, Options, PageId, PageInfo, Place, Position, SnapshotOptions, StatePoint, Store, View,
};
use remanent_format::ReadAt;
use remanent_format::state::rebuild::{RebuildOptions, RebuiltStore, rebuild};

use super::history::{Action, KEYS, MoveCall, SNAPSHOT_NAMES, Step, TIERS};
use super::plain::{Draft, Model, Page, Refusal, is_there_or_lower};

/// Number of snapshots that a store keeps by default.
const SNAPSHOTS_KEPT: usize = 2;

/// Counts of the actions of histories.
#[derive(Debug, Default)]
pub struct Tally {
    pub commits: usize,
    pub refusals: HashSet<Refusal>,
    pub crashes: usize,
    /// Number of crashes that lost batches.
    pub lost: usize,
    pub restores: usize,
    pub views: usize,
    pub forks: usize,
    pub names: usize,
    /// Number of snapshots that were not verified when the call returned.
    pub published: usize,
    /// Number of snapshots that were removed with their names.
    pub given_up: usize,
    /// Number of names that were released alone, because their snapshot is the newest and stays.
    pub names_of_newest: usize,
    /// Number of snapshots that were removed because fewer were to be kept.
    pub pruned: usize,
    pub scrubs: usize,
    /// Number of pages that were written whole.
    pub images: usize,
    /// Number of pages that moved with a separate call.
    pub moves: usize,
    /// Number of pages that the store demoted itself.
    pub evictions: u64,
    /// Number of calls that failed for lack of memory.
    pub without_room: usize,
    pub captures: usize,
    /// Number of background snapshots.
    pub background: u64,
    /// Number of pages that were not loaded when an open returned.
    pub unloaded: u64,
    /// The index of the current action, which shows where a history failed.
    pub under_way: String,
}

/// The environment in which a history runs.
pub trait Ground: Sized {
    /// Returns the disk for a store, or for a view while the store is open.
    fn disk(&self) -> Arc<dyn Disk>;

    /// Returns the files, as a process sees them.
    fn files(&self) -> Box<dyn ReadAt + '_>;

    /// Forks an earlier state to another location.
    fn fork(&self, store: &Store, point: &StatePoint) -> Result<Self, Error>;

    /// Called before an action or an open that a simulated crash may interrupt. `floors` must survive that
    /// crash.
    fn begin(&mut self, floors: Floors);

    /// Returns the environment after a crash. The store is not used again. `pick` selects one of the possible
    /// states.
    fn crash(self, store: Store, pick: u64) -> Left<Self>;
}

/// The newest batches that a crash of each kind must preserve.
#[derive(Clone, Copy, Debug, Default)]
pub struct Floors {
    /// The newest batch that survives a kill of the process.
    pub logged: Lsn,
    /// The newest batch that survives a power cut.
    pub durable: Lsn,
}

impl Floors {
    /// Returns the floors of an open store.
    pub fn of(store: &Store) -> Self {
        Self { durable: store.stats().durable, logged: store.lsn() }
    }
}

/// The environment after a crash.
pub struct Left<G> {
    pub ground: G,
    /// The batches that must survive. After a power cut, only durable batches count as logged.
    pub floors: Floors,
    /// Whether the crash came between two actions, in which case no batch may be lost or torn.
    pub is_between: bool,
}

/// The settings with which the store of a history is opened.
pub struct Setting<'a> {
    pub options: Options,
    /// Whether the store takes background snapshots.
    pub in_background: bool,
    /// Whether the tiers of the store are smaller than its pages.
    pub is_cramped: bool,
    /// Creates a new device for each open.
    pub device: &'a dyn Fn() -> Arc<dyn Device>,
}

impl Setting<'_> {
    fn open(&self, ground: &impl Ground) -> Store {
        let background = self.in_background.then_some(12 << 10);
        let schedule = SnapshotSchedule::new().log_bytes(background).interval(None);
        let options = self.options.clone().snapshots(schedule).with(|options| {
            options.log.segment_len = 16 << 10;
        });
        Store::open_on(ground.disk(), (self.device)(), options)
            .unwrap_or_else(|error| panic!("an open: {error}"))
    }
}

/// Runs a history, and compares the store with the model after each action.
pub fn run<G: Ground>(actions: &[Action], mut ground: G, setting: &Setting, tally: &mut Tally) {
    let in_background = setting.in_background;
    let mut model = Model::default();
    (model.in_background, model.is_cramped) = (in_background, setting.is_cramped);
    let mut by_hand = 0;
    tally.under_way = "the first opening".to_owned();
    ground.begin(Floors::default());
    let mut store = setting.open(&ground);
    let mut names_before = BTreeMap::new();
    for (number, action) in actions.iter().enumerate() {
        tally.under_way = format!("action {number}, {action:?}, after batch {}", model.lsn);
        if model.in_background {
            model.adopt(&store.snapshots());
        }
        if matches!(action, Action::Reopen | Action::Crash(_)) {
            tally.evictions += evictions(&store);
        }
        if !matches!(action, Action::Crash(_)) {
            names_before = model.names.clone();
            ground.begin(Floors::of(&store));
        }
        match action {
            Action::Commit(steps) => {
                let mut draft = Draft::new(&model);
                let refusal = steps.iter().find_map(|step| draft.step(step));
                let (batch, changed) = draft.finish(refusal);
                let result = store.commit(batch);
                match (result, refusal) {
                    (Ok(committed), None) => {
                        tally.commits += 1;
                        tally.images +=
                            steps.iter().filter(|step| matches!(step, Step::Replace { .. })).count();
                        let lsn = model_lsn(&model, committed.position, "the batch's number");
                        model.install(lsn, changed, &committed.pages);
                        let incarnation = store.recovered().position.incarnation;
                        assert_eq!(committed.position.incarnation, incarnation, "the batch's incarnation");
                    }
                    (Err(Error::OverBudget { .. }), _) if setting.is_cramped => {
                        tally.without_room += 1;
                        compare_table(&store, &model);
                    }
                    (Err(error), Some(refusal)) => {
                        tally.refusals.insert(refusal);
                        assert!(refusal.is(&error), "expected {refusal:?}: {error}");
                        compare_table(&store, &model);
                    }
                    (Ok(_), Some(refusal)) => panic!("expected {refusal:?}, and it was committed"),
                    (Err(error), None) => panic!("a good batch was refused: {error}"),
                }
            }
            Action::Snapshot { exact, is_published } => {
                let options = SnapshotOptions::new();
                let options = if *exact { options.exact() } else { options };
                let options = if *is_published { options.only_published() } else { options };
                let snapshot = match store.snapshot_with(options) {
                    // The memory for the copies of an exact snapshot exceeds the budget.
                    Err(Error::OverBudget { .. }) if setting.is_cramped && *exact => {
                        tally.without_room += 1;
                        continue;
                    }
                    snapshot => snapshot.unwrap_or_else(|error| panic!("a snapshot: {error}")),
                };
                assert_snapshot(&snapshot, &model);
                assert_eq!(snapshot.pages, model.pages.len() as u64, "{snapshot:?}");
                by_hand += 1;
                verified(&store, &snapshot, &model, tally);
                model.keep(snapshot.id, None, SNAPSHOTS_KEPT);
            }
            Action::Name { name, is_published } => {
                let name = SNAPSHOT_NAMES[*name];
                let options = SnapshotOptions::new().name(name);
                let options = if *is_published { options.only_published() } else { options };
                let holder = model.names.iter().find(|(_, held)| *held == name).map(|(id, _)| *id);
                match (store.snapshot_with(options), holder) {
                    (Ok(snapshot), None) => {
                        tally.names += 1;
                        by_hand += 1;
                        assert_snapshot(&snapshot, &model);
                        assert_eq!(snapshot.name.as_deref(), Some(name), "{snapshot:?}");
                        verified(&store, &snapshot, &model, tally);
                        model.keep(snapshot.id, Some(name), SNAPSHOTS_KEPT);
                    }
                    (Err(Error::Taken(Taken::Name { snapshot, .. })), Some(holder)) => {
                        assert_eq!(snapshot, holder, "the snapshot named {name:?}");
                    }
                    (result, holder) => panic!("{name:?}, which {holder:?} has: {result:?}"),
                }
            }
            Action::GiveUp { pick, is_alone } => {
                let name = model.named(*pick).unwrap_or(SNAPSHOT_NAMES[0].to_owned());
                let pruned = store.prune(&store.retention().give_up(&name).names_only(*is_alone));
                let went = pruned.unwrap_or_else(|error| panic!("a prune: {error}")).snapshots;
                let named = went.iter().filter_map(|info| info.name.as_deref()).collect::<Vec<_>>();
                assert!(named.iter().all(|gone| *gone == name), "{named:?} went with {name:?}");
                assert!(!is_alone || went.len() == named.len(), "{went:?} went with the name {name:?} alone");
                tally.given_up += named.len();
                match (model.in_background, is_alone) {
                    (true, _) => model.names.retain(|id, _| went.iter().all(|info| info.id != *id)),
                    (false, true) => tally.names_of_newest += usize::from(!model.give_up(&name)),
                    (false, false) => model.retain(SNAPSHOTS_KEPT, Some(&name)),
                }
            }
            Action::Prune(pick) => {
                let count = usize::from(pick % 3) + 1;
                let pruned = store.prune(&store.retention().snapshots_kept(count));
                let went = pruned.unwrap_or_else(|error| panic!("a prune: {error}")).snapshots;
                assert!(went.iter().all(|info| info.name.is_none()), "{went:?} went, and none was given up");
                tally.pruned += went.len();
                model.retain(count, None);
            }
            Action::Scrub => {
                let scrubbed = store.scrub().unwrap_or_else(|error| panic!("a scrub: {error}"));
                assert_eq!(scrubbed.damage, [], "found by a scrub");
                tally.scrubs += 1;
            }
            Action::Restore(pick) => {
                let Some(snapshot) = model.snapshot(*pick) else { continue };
                let position = match store.restore(StatePoint::Snapshot(snapshot)) {
                    Ok(position) => position,
                    Err(Error::NoSuchState(NoSuchState::Snapshot { .. })) if model.in_background => continue,
                    Err(Error::OverBudget { .. }) if setting.is_cramped => {
                        tally.without_room += 1;
                        continue;
                    }
                    Err(error) => panic!("a restore of {snapshot}: {error}"),
                };
                tally.restores += 1;
                by_hand += 1;
                let end = model.snapshots[&snapshot];
                restored(&store, &mut model, position, end);
            }
            Action::RestoreTo(pick) => {
                let beyond = Lsn(model.lsn + if setting.is_cramped { 1 << 30 } else { 1 });
                let refused = store.restore(StatePoint::Lsn(beyond));
                let Err(Error::NoSuchState(NoSuchState::OutsideWindow { requested, newest, .. })) = refused
                else {
                    panic!("a restore of batch {beyond}, which is yet to come: {refused:?}")
                };
                assert_eq!(requested, beyond, "asked");
                assert_lsn(newest, &model, "newest");
                let lsn = in_window(&model, *pick);
                let position = match store.restore(StatePoint::Lsn(Lsn(lsn))) {
                    Ok(position) => position,
                    Err(Error::NoSuchState(NoSuchState::OutsideWindow { oldest, .. }))
                        if model.in_background && oldest > Lsn(lsn) =>
                    {
                        continue;
                    }
                    Err(Error::OverBudget { .. }) if setting.is_cramped => {
                        tally.without_room += 1;
                        continue;
                    }
                    Err(error) => panic!("a restore of batch {lsn}: {error}"),
                };
                tally.restores += 1;
                by_hand += 1;
                restored(&store, &mut model, position, lsn);
            }
            Action::Fork(pick) => {
                let lsn = in_window(&model, *pick);
                let fork = match ground.fork(&store, &StatePoint::Lsn(Lsn(lsn))) {
                    Ok(fork) => fork,
                    Err(Error::NoSuchState(NoSuchState::OutsideWindow { oldest, .. }))
                        if model.in_background && oldest > Lsn(lsn) =>
                    {
                        continue;
                    }
                    Err(error) => panic!("a fork of batch {lsn}: {error}"),
                };
                tally.forks += 1;
                compare(&setting.open(&fork), &model.at(lsn));
                compare_rebuilt(&fork, &model.at(lsn));
            }
            Action::Look(pick) => {
                tally.views += 1;
                check_view(&ground.disk(), &model, *pick as u64 % (model.lsn + 1));
            }
            Action::Read(pick, from, to) => read_part(&store, &model, *pick, *from, *to),
            Action::Call(pick, call) => {
                let Some(page) = model.page(*pick) else { continue };
                if setting.is_cramped {
                    let moved = move_page(&store, &mut model, page, *call);
                    (tally.moves, tally.without_room) =
                        (tally.moves + usize::from(moved), tally.without_room + usize::from(!moved));
                } else {
                    tally.moves += usize::from(move_by(&store, &mut model, page, *call));
                }
            }
            Action::Capture { page, is_digest, at, count } => {
                let Some(page) = model.page(*page) else { continue };
                match capture(&store, &mut model, page, *is_digest, [*at, *count]) {
                    Ok(there_was) => tally.captures += usize::from(there_was),
                    Err(Error::OverBudget { .. }) if setting.is_cramped => tally.without_room += 1,
                    Err(error) => panic!("a capture of page {page}: {error}"),
                }
            }
            Action::Reopen => {
                tally.background += store.stats().snapshots.taken.saturating_sub(by_hand);
                by_hand = 0;
                compare_late(&store, &model);
                store.close().unwrap_or_else(|error| panic!("a close: {error}"));
                compare_rebuilt(&ground, &model);
                store = setting.open(&ground);
                compare_reopened(&store, &model, tally);
            }
            Action::Crash(pick) => {
                tally.crashes += 1;
                tally.background += store.stats().snapshots.taken.saturating_sub(by_hand);
                by_hand = 0;
                compare_late(&store, &model);
                let left = ground.crash(store, *pick);
                ground = left.ground;
                if left.is_between {
                    compare_rebuilt(&ground, &model);
                    store = setting.open(&ground);
                    compare_reopened(&store, &model, tally);
                    continue;
                }
                let rebuilt = rebuild(&*ground.files(), &RebuildOptions::default());
                ground.begin(left.floors);
                store = setting.open(&ground);
                let recovered = store.recovered();
                let lsn = recovered.position.lsn;
                assert!(!setting.is_cramped, "the model has not all batches, and cannot lose some");
                let expected = left.floors.logged..=Lsn(model.lsn);
                assert!(expected.contains(&lsn), "batch {lsn} is the last one, of {expected:?}");
                tally.lost += usize::from(lsn < Lsn(model.lsn));
                // A snapshot that was being named or released may or may not have its name.
                model.names.retain(|id, _| names_before.contains_key(id));
                model.lose(lsn.0, &store.snapshots());
                match rebuilt {
                    Ok(rebuilt) => compare_state(&rebuilt, &model),
                    Err(damage) => {
                        assert!(recovered.created, "what was opened could not be rebuilt: {damage}")
                    }
                }
                compare(&store, &model);
            }
        }
    }
    tally.under_way = "the end, after all actions".to_owned();
    compare(&store, &model);
    tally.evictions += evictions(&store);
    store.close().unwrap_or_else(|error| panic!("a close: {error}"));
    compare_rebuilt(&ground, &model);
    compare_opened(&setting.open(&ground), &model);
}

/// Waits until a published snapshot is verified. The snapshots that it replaces are then removed. If the
/// store takes background snapshots, its list is adopted.
fn verified(store: &Store, snapshot: &SnapshotInfo, model: &Model, tally: &mut Tally) {
    if snapshot.verified {
        return;
    }
    tally.published += 1;
    if !model.in_background {
        store.wait_verified().unwrap_or_else(|error| panic!("snapshot {}: {error}", snapshot.id));
    }
}

/// Applies a restore of the state after batch `lsn` to the model.
fn restored(store: &Store, model: &mut Model, position: Position, lsn: u64) {
    let position = model_lsn(model, position, "a restore is one batch more");
    model.restore(lsn, position);
    // The snapshot of a restore removes no other snapshot.
    let newest = store.snapshots().last().unwrap().id;
    model.keep(newest, None, usize::MAX);
    compare(store, model);
}

/// Returns options with tiers, each of which is large enough for all pages.
pub fn with_tiers(options: Options) -> Options {
    let upper = TIERS[..3].iter().fold(MemoryOptions::new(), |budget, tier| budget.budget(*tier, 1 << 30));
    options.memory(upper).tiers(Tiers::new(TIERS))
}

/// Returns options with tiers for a dozen pages of usual length, and for none of the longest pages.
pub fn with_cramped_tiers(options: Options) -> Options {
    let room = [(TIERS[0], 6 << 10), (TIERS[1], 2 << 10), (TIERS[2], 1536)];
    let budget = room.iter().fold(MemoryOptions::new(), |budget, (tier, bytes)| budget.budget(*tier, *bytes));
    options.memory(budget).tiers(Tiers::new(TIERS).free_part(4))
}

/// Returns the number of pages that were evicted since the store was opened.
fn evictions(store: &Store) -> u64 {
    store.stats().tiers.iter().map(|tier| tier.evictions).sum()
}

/// Returns the Lsn of the model's next batch. This is the Lsn after the newest one, or a later one if the
/// store moves pages itself.
fn model_lsn(model: &Model, position: Position, what: &str) -> u64 {
    let (found, next) = (position.lsn.0, model.lsn + 1);
    assert!(found == next || model.is_cramped && found > next, "{what}: {found} after {}", model.lsn);
    found
}

/// Asserts that the newest batch is the model's, or a later batch with which the store moved pages.
fn assert_lsn(found: Lsn, model: &Model, what: &str) {
    let expected = Lsn(model.lsn);
    assert!(found == expected || model.is_cramped && found > expected, "{what}: {found}, not {expected}");
}

/// Asserts that a snapshot is of the newest batch.
fn assert_snapshot(snapshot: &SnapshotInfo, model: &Model) {
    assert_lsn(snapshot.redo, model, "a snapshot's first batch");
    assert_lsn(snapshot.end, model, "a snapshot's last batch");
    assert!(model.is_cramped || snapshot.redo == snapshot.end, "{snapshot:?}");
    assert_eq!(snapshot.pages, model.pages.len() as u64, "{snapshot:?}");
}

/// Moves a page in a store with small tiers. Returns true if there was enough memory.
fn move_page(store: &Store, model: &mut Model, page: PageId, call: MoveCall) -> bool {
    let rank = TIERS.iter().position(|tier| *tier == model.pages[&page].place);
    // One tier below the current place, which is at least as low as the requested place.
    let below = rank.map(|rank| TIERS[(rank + 1).min(TIERS.len() - 1)]);
    let told = match call {
        MoveCall::Ensure(place) => store.ensure(&[page], place).map(|_| Some(place)),
        MoveCall::Promote => store.promote(&[page]).map(|_| Some(TIERS[0])),
        MoveCall::Prefetch(place) => {
            store.prefetch(&[page], place).and_then(|coming| coming.wait()).map(|()| Some(place))
        }
        MoveCall::Demote => store.demote(&[page]).map(|()| below),
    };
    let place = match told {
        Ok(place) => place,
        Err(Error::OverBudget { .. }) => return false,
        Err(error) => panic!("a move of page {page}: {error}"),
    };
    if let Some(place) = place {
        model.told_to(page, place, store.lsn().0);
    }
    compare_table(store, model);
    true
}

/// Moves a page with a separate call. Returns true if the page was in another place.
fn move_by(store: &Store, model: &mut Model, page: PageId, call: MoveCall) -> bool {
    let rank = TIERS.iter().position(|tier| *tier == model.pages[&page].place);
    let place = match call {
        MoveCall::Ensure(place) | MoveCall::Prefetch(place) => Some(place),
        MoveCall::Promote => Some(TIERS[0]),
        MoveCall::Demote => rank.and_then(|rank| TIERS.get(rank + 1)).copied(),
    };
    let has_moved = place.is_some_and(|place| model.move_to(page, place));
    let told = match call {
        MoveCall::Ensure(place) => store.ensure(&[page], place).map(Some),
        MoveCall::Promote => store.promote(&[page]).map(Some),
        MoveCall::Prefetch(place) => {
            store.prefetch(&[page], place).and_then(|coming| coming.wait()).map(|()| None)
        }
        MoveCall::Demote => store.demote(&[page]).map(|()| None),
    };
    let told = told.unwrap_or_else(|error| panic!("a move of page {page}: {error}"));
    if let Some(position) = told {
        let expected = has_moved.then_some(Lsn(model.lsn));
        assert_eq!(position.map(|position| position.lsn), expected, "the batch of a move");
    }
    compare_table(store, model);
    has_moved
}

/// Captures a working copy of a page in which some bytes were changed. Returns false for an empty page.
fn capture(
    store: &Store,
    model: &mut Model,
    page: PageId,
    is_digest: bool,
    [at, count]: [u16; 2],
) -> Result<bool, Error> {
    let mut bytes = model.pages[&page].bytes.clone();
    if bytes.is_empty() {
        return Ok(false);
    }
    let at = usize::from(at) % bytes.len();
    let end = bytes.len().min(at + 1 + usize::from(count));
    let tensor = store.device_bytes(bytes.len() as u64, Place::Device(0))?;
    let shadow = if is_digest { Shadow::Digest } else { Shadow::Kept(Place::Host) };
    let copy = store.working_copy_in(page, &tensor, Width::W1, shadow, InitialCopy::Load)?;
    bytes[at..end].iter_mut().for_each(|byte| *byte = !*byte);
    copy.bytes().write(0, &bytes)?;
    let mut batch = store.batch();
    batch.capture(&copy);
    let position = store.commit(batch)?.position;
    let lsn = model_lsn(model, position, "the batch of a capture");
    model.capture(lsn, page, bytes);
    Ok(true)
}

/// Selects a batch that can be restored.
fn in_window(model: &Model, pick: usize) -> u64 {
    let oldest = model.oldest().min(model.lsn);
    oldest + pick as u64 % (model.lsn - oldest + 1)
}

/// Checks a view of an earlier state while the store is open.
fn check_view(disk: &Arc<dyn Disk>, model: &Model, lsn: u64) {
    match View::open_on(disk, Some(&StatePoint::Lsn(Lsn(lsn)))) {
        Ok(old) => compare_snapshot(&old, &model.at(lsn)),
        // A state older than the guaranteed window may still exist.
        Err(Error::NoSuchState(NoSuchState::OutsideWindow { requested, oldest, newest, .. })) => {
            assert_eq!(requested, Lsn(lsn), "asked");
            assert_lsn(newest, model, "newest");
            assert!(Lsn(lsn) < oldest, "batch {lsn} was refused, and the window begins at {oldest}");
            // A background snapshot may have moved the window.
            if !model.in_background {
                assert!(lsn < model.oldest(), "batch {lsn} is in the window from {}", model.oldest());
                assert!(oldest <= Lsn(model.oldest()), "{oldest} instead of {}", model.oldest());
            }
        }
        Err(error) => panic!("the state at {lsn}: {error}"),
    }
    let newest = View::open_on(disk, None).unwrap_or_else(|error| panic!("the newest state: {error}"));
    compare_snapshot(&newest, model);
}

/// Compares all results of a view of a state.
fn compare_snapshot(old: &View, model: &Model) {
    assert_lsn(old.lsn(), model, "the batch of a view");
    assert_eq!(**old.root(), model.root, "the root of a view");
    compare_infos(&old.pages().collect::<Vec<_>>(), model);
    for (page, expected) in &model.pages {
        let mut bytes = vec![0xEE; expected.bytes.len()];
        let read = old.read(*page, 0, &mut bytes);
        read.unwrap_or_else(|error| panic!("a read of page {page} at {}: {error}", model.lsn));
        assert_bytes(&bytes, expected, &format!("page {page} at {}", model.lsn));
        if let Some(key) = &expected.key {
            let holder = old.page_by_key(key).map(|info| info.page);
            assert!(matches!(holder, Ok(holder) if holder == *page), "{key}: {holder:?} instead of {page}");
        }
    }
}

/// Compares the state after an open in which no batch was lost, cut off or damaged.
fn compare_opened(store: &Store, model: &Model) {
    compare_recovered(store, model);
    compare(store, model);
}

fn compare_recovered(store: &Store, model: &Model) {
    let recovered = store.recovered();
    assert_lsn(recovered.position.lsn, model, "the batch reached");
    // A crash may happen while a store that moves pages itself is logging such a batch.
    let torn =
        recovered.torn.as_ref().filter(|torn| !model.is_cramped || torn.first <= recovered.position.lsn);
    assert_eq!((torn, &recovered.harmless[..]), (None, &[][..]), "a torn tail, or damage");
}

/// Compares the state after an open in the middle of a history. The bytes of unloaded pages are compared
/// later, so that the history continues with unloaded pages.
fn compare_reopened(store: &Store, model: &Model, tally: &mut Tally) {
    tally.unloaded += store.recovered().unloaded_pages;
    compare_recovered(store, model);
    compare_table(store, model);
    if store.recovered().unloaded_pages == 0 {
        compare(store, model);
    }
}

/// Compares the bytes that [`compare_reopened`] omitted.
fn compare_late(store: &Store, model: &Model) {
    if store.recovered().unloaded_pages > 0 {
        compare(store, model);
    }
}

/// Compares all results of a store.
fn compare(store: &Store, model: &Model) {
    compare_table(store, model);
    for (page, expected) in &model.pages {
        let mut bytes = vec![0xEE; expected.bytes.len()];
        let read = store.read(*page, 0, &mut bytes);
        let lsn = read.unwrap_or_else(|error| panic!("a read of page {page}: {error}"));
        assert_lsn(lsn, model, "the batch that a read saw");
        assert_bytes(&bytes, expected, &format!("page {page}"));
    }
    for key in KEYS.map(|key| Key::new(key).unwrap()) {
        let holder = model.pages.iter().find(|(_, page)| page.key.as_ref() == Some(&key));
        match (store.page_by_key(&key), holder) {
            (Ok(info), Some((page, _))) => assert_eq!(info.page, *page, "holder of {key}"),
            (Err(Error::UnknownKey { .. }), None) => {}
            (found, expected) => panic!("key {key}: {found:?} instead of {expected:?}"),
        }
    }
    for page in &model.gone {
        let found = store.page(*page);
        assert!(matches!(found, Err(Error::UnknownPage { .. })), "page {page} is gone, but: {found:?}");
    }
}

/// Compares all results that do not depend on the bytes of pages.
fn compare_table(store: &Store, model: &Model) {
    assert_lsn(store.lsn(), model, "the newest batch");
    let (root, pages) = (store.root(), store.pages());
    assert_eq!(*root.unwrap_or_else(|error| panic!("the root: {error}")), model.root, "the root");
    let pages = pages.unwrap_or_else(|error| panic!("the pages: {error}"));
    compare_infos(&pages.collect::<Vec<_>>(), model);
    if model.in_background {
        return;
    }
    let snapshots: Vec<_> = store.snapshots().iter().map(|snapshot| snapshot.id).collect();
    assert_eq!(snapshots, model.snapshots.keys().copied().collect::<Vec<_>>(), "snapshots kept");
}

fn compare_infos(found: &[PageInfo], model: &Model) {
    let ids: Vec<_> = found.iter().map(|info| info.page).collect();
    assert_eq!(ids, model.pages.keys().copied().collect::<Vec<_>>(), "pages");
    for (info, (page, expected)) in found.iter().zip(&model.pages) {
        let Page { key, epoch, lsn, place, metadata, bytes } = expected;
        assert_eq!((info.epoch.0, &info.key), (*epoch, key), "page {page}");
        if model.is_cramped {
            assert!(is_there_or_lower(*place, info.place), "page {page} is in {}, not {place}", info.place);
        } else {
            assert_eq!((info.lsn.0, info.place), (*lsn, *place), "page {page}");
        }
        assert_eq!(info.len, bytes.len() as u64, "length of page {page}");
        assert_eq!(*info.metadata, *metadata, "metadata of page {page}");
    }
}

/// Compares the pure rebuild of the files, none of which may be damaged.
fn compare_rebuilt(ground: &impl Ground, model: &Model) {
    let rebuilt = rebuild(&*ground.files(), &RebuildOptions::default());
    let rebuilt = rebuilt.unwrap_or_else(|damage| panic!("a rebuild of whole files: {damage}"));
    compare_state(&rebuilt, model);
    assert_eq!(rebuilt.skipped, [], "passed over by the rebuild");
}

/// Compares a rebuilt state with the model.
fn compare_state(rebuilt: &RebuiltStore, model: &Model) {
    assert_lsn(rebuilt.table.lsn(), model, "the batch of the rebuild");
    assert_eq!(**rebuilt.table.root(), model.root, "the root of the rebuild");
    compare_infos(&rebuilt.table.pages().collect::<Vec<_>>(), model);
    for (page, expected) in &model.pages {
        assert_bytes(&rebuilt.contents[page], expected, &format!("page {page} of the rebuild"));
    }
}

/// Compares the bytes of a page, and reports the first difference.
fn assert_bytes(found: &[u8], expected: &Page, label: &str) {
    let differs = found.iter().zip(&expected.bytes).position(|(found, expected)| found != expected);
    assert!(
        found == expected.bytes,
        "{label}, bytes from {differs:?} on, last changed by batch {}: found {found:?}, expected {:?}",
        expected.lsn,
        expected.bytes
    );
}

/// Reads a range of one page, and a range beyond its end.
fn read_part(store: &Store, model: &Model, pick: usize, from: u16, to: u16) {
    let Some((page, expected)) = model.pages.iter().nth(pick % model.pages.len().max(1)) else { return };
    let len = expected.bytes.len();
    let (from, to) = (usize::from(from) % (len + 1), usize::from(to) % (len + 1));
    let range = from.min(to)..from.max(to);
    let mut out = vec![0; range.len()];
    let read = store.read(*page, range.start as u64, &mut out);
    read.unwrap_or_else(|error| panic!("bytes {range:?} of page {page}, {len} bytes long: {error}"));
    assert_eq!(out, expected.bytes[range.clone()], "bytes {range:?} of page {page}");
    let past_end = store.read(*page, range.start as u64, &mut vec![0; len - range.start + 1]);
    assert!(
        matches!(past_end, Err(Error::OutOfBounds { .. })),
        "one byte past the end of page {page}, from {} on, {len} bytes long: {past_end:?}",
        range.start
    );
}
