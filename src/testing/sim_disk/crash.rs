//! The enumeration of all states of a disk that a crash could have left.
//!
//! A *kill* leaves all changes visible, and pending changes pending. A subsequent power cut may drop pending changes,
//! so the images of an image are nested crashes. After a *power cut*, every pending sector and length has one of its
//! versions, and some of the pending changes of names were kept.
//!
//! If there are few combinations, all of them are tried. Otherwise, revealing combinations are tried first, up to a
//! limit (nothing, everything, only names, only data, everything up to some time, all but one, only one), then seeded
//! random combinations.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::Folder;

use super::SimDisk;
use super::event::{DiskEvent, Moment, Tear, Tears};
use super::node::FileId;
use super::state::DiskState;

/// The kind of a crash, which determines the states that the crash may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Crash {
    /// The process dies. Bytes in the page cache stay visible.
    Kill,
    /// The power fails. Bytes that were not synced may be lost.
    Power,
}

/// Options for the enumeration of crash images.
#[derive(Clone, Debug)]
pub struct CrashPlan {
    /// The events before or during which crashes are tried. The end of the range represents the moment after the last
    /// event. By default, crashes are tried at all events.
    pub events: Range<usize>,
    /// The positions at which writes and puts are torn. By default, up to 4 sector borders and a few bytes.
    pub tears: Tears,
    /// The maximum number of images per moment. By default 64.
    pub images_max: usize,
    /// The seed for choosing images if there are more than `images_max`. By default 0.
    pub seed: u64,
}

impl Default for CrashPlan {
    fn default() -> Self {
        Self { events: 0..usize::MAX, tears: Tears::Few(4), images_max: 64, seed: 0 }
    }
}

/// A disk in a state that a crash could have left.
#[derive(Debug)]
pub struct CrashImage {
    /// The disk after the crash, unlocked and without faults and recorded events.
    pub disk: SimDisk,
    /// The kind of crash.
    pub crash: Crash,
    /// The moment of the crash.
    pub moment: Moment,
    /// The values that were acknowledged before the crash, in order.
    pub acks: Arc<[u64]>,
    /// A hash of the image. Equal images have equal hashes.
    pub hash: u64,
    /// A description of the crash: the event that was torn or did not occur, the stored part of that event, and the
    /// pending changes that were kept.
    story: String,
}

/// Describes the image for the message of a failing test.
impl fmt::Display for CrashImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at event {} ({})", self.crash, self.moment.event, self.story)
    }
}

impl SimDisk {
    /// Returns the moments at which a crash could occur. A moment before a recorded acknowledgement is omitted, because
    /// the following moment has the same disk and stricter requirements.
    #[must_use]
    pub fn moments(&self, events: Range<usize>, tears: Tears) -> Vec<Moment> {
        moments_of(&self.shared.lock().events, events, tears)
    }

    /// Returns the disk after the process was killed at `moment`.
    ///
    /// # Panics
    /// If the history contains no such moment.
    #[must_use]
    pub fn after_kill(&self, moment: Moment) -> SimDisk {
        let mut walk = Walk::new(self);
        walk.go_to(moment.event);
        SimDisk::from_state(walk.state_at(moment))
    }

    /// Returns the disk after a power cut at the current moment that discards all pending changes.
    #[must_use]
    pub fn after_power_cut(&self) -> SimDisk {
        SimDisk::from_state(self.shared.lock().now.after_power_cut(|_, _| false, |_| 0, |_, _| 0))
    }

    /// Calls `each` with the images that a kill of the process could have left, in the order of moments.
    pub fn kill_images(&self, plan: &CrashPlan, each: impl FnMut(CrashImage)) {
        self.images(Crash::Kill, plan, each);
    }

    /// Calls `each` with the images that a power cut could have left, in the order of moments.
    pub fn power_images(&self, plan: &CrashPlan, each: impl FnMut(CrashImage)) {
        self.images(Crash::Power, plan, each);
    }

    /// Calls `each` with every image. Equal images with equal acknowledgements are passed only once.
    fn images(&self, crash: Crash, plan: &CrashPlan, mut each: impl FnMut(CrashImage)) {
        // A store's threads may still run during the enumeration. Events that they add are not included.
        let mut walk = Walk::new(self);
        let mut seen = HashSet::new();
        for moment in moments_of(&walk.events, plan.events.clone(), plan.tears) {
            walk.go_to(moment.event);
            let state = walk.state_at(moment);
            let images = match crash {
                Crash::Kill => vec![(state, String::new())],
                Crash::Power => power_images(&state, plan.images_max, plan.seed ^ moment.event as u64),
            };
            let next =
                walk.events.get(moment.event).map_or_else(|| "the end".to_owned(), ToString::to_string);
            let tear = match moment.tear {
                None => String::new(),
                Some(Tear::Head(len)) => format!("; its first {len} bytes were stored"),
                Some(Tear::Tail(len)) => format!("; its last {len} bytes were stored"),
            };
            for (state, choice) in images {
                let hash = state.hash();
                if seen.insert((hash, walk.acks.len())) {
                    let disk = SimDisk::from_state(state);
                    let story = format!("{next}{tear}{choice}");
                    each(CrashImage { disk, crash, moment, acks: walk.acks.as_slice().into(), hash, story });
                }
            }
        }
    }
}

fn moments_of(history: &[DiskEvent], events: Range<usize>, tears: Tears) -> Vec<Moment> {
    let last = history.len().min(events.end);
    let mut moments = Vec::new();
    for event in events.start..=last {
        match history.get(event) {
            Some(DiskEvent::Ack(_)) if event < last => continue,
            Some(next) if event < last => {
                moments.push(Moment { event, tear: None });
                let torn = next.tears(tears).into_iter();
                moments.extend(torn.map(|tear| Moment { event, tear: Some(tear) }));
            }
            _ => moments.push(Moment { event, tear: None }),
        }
    }
    moments
}

/// Replays the history of a disk once, event by event.
pub(super) struct Walk {
    pub(super) events: Vec<DiskEvent>,
    /// The state of the disk before event `next`.
    pub(super) state: DiskState,
    next: usize,
    acks: Vec<u64>,
}

impl Walk {
    pub(super) fn new(disk: &SimDisk) -> Self {
        let shared = disk.shared.lock();
        Self { events: shared.events.clone(), state: shared.start.clone(), next: 0, acks: Vec::new() }
    }

    pub(super) fn go_to(&mut self, event: usize) {
        for event in &self.events[self.next..event] {
            self.state.apply(event);
            if let DiskEvent::Ack(value) = event {
                self.acks.push(*value);
            }
        }
        self.next = event;
    }

    fn state_at(&self, moment: Moment) -> DiskState {
        let mut state = self.state.clone();
        if let Some(tear) = moment.tear {
            let torn = self.events[moment.event].torn(tear);
            state.apply(&torn.expect("only writes and puts are torn"));
        }
        state
    }
}

/// A pending change. A power cut keeps one of its versions.
struct Item {
    what: ItemKind,
    /// The creation time of each version except version 0, which is the durable version.
    stamps: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ItemKind {
    Length(FileId),
    Sector(FileId, usize),
    /// A change of names, given by its folder and its index in the folder's list of pending changes.
    Name(Folder, usize),
}

impl ItemKind {
    fn is_name(self) -> bool {
        matches!(self, ItemKind::Name(..))
    }
}

/// The kept version of each pending change, in the order of the changes.
type Pick = Vec<usize>;

/// The pending changes of a disk, and the dependencies between changes of names.
struct PendingChanges<'a> {
    state: &'a DiskState,
    items: Vec<Item>,
    /// The index of each item in `items`.
    indices: HashMap<ItemKind, usize>,
    /// Pairs of items (earlier, later) that change the same name, ordered by the later item.
    needs: Vec<(usize, usize)>,
}

/// A choice of versions that is more likely to reveal errors than a random choice.
#[derive(Clone, Copy)]
enum RevealingChoice {
    /// Keeps the names and the data that were written up to the given times.
    UpTo { names: u64, data: u64 },
    /// Keeps one item at a version, and all other items at their first or their last version.
    One { item: usize, version: usize, others_last: bool },
}

impl<'a> PendingChanges<'a> {
    fn of(state: &'a DiskState) -> Self {
        let mut items = Vec::new();
        let mut needs = Vec::new();
        for (folder, names) in &state.folders {
            let first = items.len();
            for (index, change) in names.pending.iter().enumerate() {
                let earlier = names.pending[..index].iter().enumerate();
                let needed = earlier.filter(|(_, earlier)| earlier.value.meets(&change.value));
                needs.extend(needed.map(|(earlier, _)| (first + earlier, first + index)));
                items.push(Item { what: ItemKind::Name(*folder, index), stamps: vec![change.stamp] });
            }
        }
        for id in state.reachable() {
            let node = state.node(id);
            if !node.lengths.is_empty() {
                let stamps = node.lengths.iter().map(|version| version.stamp).collect();
                items.push(Item { what: ItemKind::Length(id), stamps });
            }
            for (index, versions) in &node.sectors {
                let stamps = versions.iter().map(|version| version.stamp).collect();
                items.push(Item { what: ItemKind::Sector(id, *index), stamps });
            }
        }
        let indices = items.iter().enumerate().map(|(index, item)| (item.what, index)).collect();
        Self { state, items, indices, needs }
    }

    /// Returns an upper bound on the number of combinations, computed as if changes of names were independent. The
    /// maximum is `usize::MAX`.
    fn choices(&self) -> usize {
        self.items.iter().fold(1, |product, item| item.stamps.len().saturating_add(1).saturating_mul(product))
    }

    /// Removes changes from `pick` that depend on a change which is not kept.
    fn drop_unmet_dependencies(&self, pick: &mut Pick) {
        for (earlier, later) in &self.needs {
            if pick[*earlier] == 0 {
                pick[*later] = 0;
            }
        }
    }

    /// Adds to `pick` the changes on which kept changes depend.
    fn add_needed(&self, pick: &mut Pick) {
        for (earlier, later) in self.needs.iter().rev() {
            if pick[*later] == 1 {
                pick[*earlier] = 1;
            }
        }
    }

    fn state(&self, pick: &Pick) -> DiskState {
        let chosen = |what| self.indices.get(&what).map_or(0, |index| pick[*index]);
        self.state.after_power_cut(
            |folder, index| chosen(ItemKind::Name(folder, index)) == 1,
            |id| chosen(ItemKind::Length(id)),
            |id, index| chosen(ItemKind::Sector(id, index)),
        )
    }

    fn pick(&self, revealing: RevealingChoice) -> Pick {
        let last = || self.items.iter().map(|item| item.stamps.len());
        match revealing {
            RevealingChoice::UpTo { names, data } => {
                let versions = self.items.iter().map(|item| {
                    let time = if item.what.is_name() { names } else { data };
                    item.stamps.partition_point(|stamp| *stamp <= time)
                });
                versions.collect()
            }
            RevealingChoice::One { item, version, others_last: true } => {
                let mut pick: Pick = last().collect();
                pick[item] = version;
                self.drop_unmet_dependencies(&mut pick);
                pick
            }
            RevealingChoice::One { item, version, others_last: false } => {
                let mut pick = vec![0; self.items.len()];
                pick[item] = version;
                self.add_needed(&mut pick);
                pick
            }
        }
    }

    /// Returns all combinations. The caller must ensure that there are few.
    fn every_pick(&self) -> Vec<Pick> {
        let mut picks: Vec<Pick> = vec![Vec::new()];
        for item in &self.items {
            let extended = picks.iter().flat_map(|pick| {
                (0..=item.stamps.len()).map(move |version| {
                    let mut longer = pick.clone();
                    longer.push(version);
                    longer
                })
            });
            picks = extended.collect();
        }
        picks.retain(|pick| self.needs.iter().all(|(earlier, later)| pick[*earlier] >= pick[*later]));
        picks
    }

    /// Returns at most `picks_max` combinations: first combinations that are likely to reveal faults, then random
    /// combinations.
    fn some_picks(&self, picks_max: usize, seed: u64) -> Vec<Pick> {
        let mut random = SplitMix(seed);
        let edges = [(0, 0), (u64::MAX, u64::MAX), (u64::MAX, 0), (0, u64::MAX)];
        let mut revealing: Vec<RevealingChoice> =
            edges.into_iter().map(|(names, data)| RevealingChoice::UpTo { names, data }).collect();
        let certain = revealing.len();
        let mut times: Vec<u64> = self.items.iter().flat_map(|item| item.stamps.iter().copied()).collect();
        times.sort_unstable();
        times.dedup();
        for time in times {
            let pairs = [(time, time), (time, 0), (time, u64::MAX), (0, time), (u64::MAX, time)];
            revealing.extend(pairs.into_iter().map(|(names, data)| RevealingChoice::UpTo { names, data }));
        }
        for (item, Item { stamps, .. }) in self.items.iter().enumerate() {
            revealing.extend((0..stamps.len()).map(|version| RevealingChoice::One {
                item,
                version,
                others_last: true,
            }));
            revealing.extend((1..=stamps.len()).map(|version| RevealingChoice::One {
                item,
                version,
                others_last: false,
            }));
        }
        // If there are too many revealing choices, a random part of them is used. A quarter of the limit is reserved
        // for random choices.
        let room = (picks_max - picks_max / 4).max(certain);
        for index in certain..revealing.len().min(room) {
            let other = index + random.below(revealing.len() - index);
            revealing.swap(index, other);
        }
        revealing.truncate(room);
        let mut picks: Vec<Pick> = revealing.into_iter().map(|revealing| self.pick(revealing)).collect();
        while picks.len() < picks_max {
            // The random choices lose few, half or most of the pending writes.
            let kept_of_8 = [1, 4, 7][random.below(3)];
            let versions = self.items.iter().map(|item| match item.stamps.len() {
                1 => usize::from(random.below(8) < kept_of_8),
                _ if random.below(8) >= kept_of_8 => 0,
                versions => 1 + random.below(versions),
            });
            let mut pick: Pick = versions.collect();
            self.drop_unmet_dependencies(&mut pick);
            picks.push(pick);
        }
        picks.truncate(picks_max);
        picks
    }

    /// Describes a combination by the number of pending changes that it keeps at their last version.
    fn describe(&self, pick: &Pick) -> String {
        let count = |names: bool| {
            let of_kind = self.items.iter().zip(pick).filter(move |(item, _)| item.what.is_name() == names);
            let last = of_kind.clone().filter(|(item, version)| **version == item.stamps.len()).count();
            format!("{last}/{}", of_kind.count())
        };
        format!("; kept {} names and {} sectors and lengths", count(true), count(false))
    }
}

/// Returns the disks that a power cut could leave, each with a description of the kept changes.
fn power_images(state: &DiskState, images_max: usize, seed: u64) -> Vec<(DiskState, String)> {
    let pending = PendingChanges::of(state);
    let picks = if pending.choices() <= images_max {
        pending.every_pick()
    } else {
        pending.some_picks(images_max, seed)
    };
    picks.into_iter().map(|pick| (pending.state(&pick), pending.describe(&pick))).collect()
}

/// The SplitMix64 generator by Steele, Lea and Flood, which is small, seeded, and identical on all platforms.
pub(super) struct SplitMix(pub(super) u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number below `bound`, which must be above 0. The slight bias does not affect the tests.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
