//! Opens every disk state that a crash could leave, and checks the recovered store.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::testing::sim_disk::{CrashImage, CrashPlan, SimDisk, Tears};
use remanent::{Ack, Lsn, Metadata, Options, StatePoint, Store, View};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use super::followers::Followers;
use super::model::{Act, Line, State, Target, looked_at, read, rebuilt};
use super::names::Names;
use super::work::{Driver, Floors, open};

/// How thoroughly crashes are explored at one depth. Level 0 covers the crashes of the workload itself, level
/// 1 those of the recoveries from these crashes, and so on.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    pub tears: Tears,
    /// Maximum number of images for one power cut.
    pub images_max: usize,
    /// For one in this number of images, the store is opened twice more, with a commit in between.
    pub closely_of: usize,
    /// For one in this number of images, the recovery is crashed as well, if there is a next level.
    pub nest_of: usize,
}

impl Level {
    /// Returns the level with its numbers of images multiplied by `effort`.
    pub fn times(self, effort: u64) -> Self {
        let effort = usize::try_from(effort).expect("a small number");
        let tears = match self.tears {
            Tears::Few(count) => Tears::Few(count * effort),
            other => other,
        };
        let nest_of = (self.nest_of / effort).max(1);
        Self { tears, images_max: self.images_max * effort, nest_of, ..self }
    }
}

/// The kind of a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An acknowledged batch is missing.
    Lost,
    /// The recovered state differs from the expected state of the reported Lsn.
    Wrong,
    /// The open fails although no file is damaged.
    Refused,
    /// The recovered state does not survive the next crash, or the next commit fails.
    Fleeting,
    /// The pure `rebuild` computes a different state.
    Disagreement,
}

/// A violation, with the crashes that led to it.
#[derive(Debug)]
pub struct Violation {
    pub kind: Kind,
    what: String,
    /// Descriptions of the preceding crashes, the last one first.
    crashes: Vec<String>,
}

impl Violation {
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), crashes: Vec::new() }
    }

    /// Adds the name of the workload to the violation.
    pub fn of(self, finder: impl fmt::Display) -> Self {
        Self { what: format!("{finder}: {}", self.what), ..self }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}: {}", self.kind, self.what)?;
        self.crashes.iter().try_for_each(|crash| writeln!(f, "after {crash}"))
    }
}

/// Explores the crashes of a workload.
pub struct Explorer<'a> {
    pub options: &'a Options,
    pub levels: &'a [Level],
    pub seed: u64,
    /// Crashes before this event of the workload are skipped.
    pub from: usize,
    /// The index of the part of the workload's crashes that this explorer handles, and the number of parts.
    /// Each part also explores the nested crashes of its own images.
    pub part: (usize, usize),
    /// Number of opened images per level.
    pub images: RefCell<Vec<usize>>,
    /// Number of enumerated images per level, including images of other parts, which are not opened.
    pub numbers: RefCell<Vec<usize>>,
}

impl<'a> Explorer<'a> {
    pub fn new(options: &'a Options, levels: &'a [Level], seed: u64) -> Self {
        let none = || RefCell::new(vec![0; levels.len()]);
        Self { options, levels, seed, from: 0, part: (0, 1), images: none(), numbers: none() }
    }

    /// Checks every crash image of a driver's disk.
    pub fn explore(&self, driver: &Driver) -> Result<(), Violation> {
        let followers = Followers::of(driver, self.options);
        self.explore_at(0, &driver.disk, &driver.line(), driver.floors, &followers, &driver.names())
    }

    fn explore_at(
        &self,
        depth: usize,
        disk: &SimDisk,
        line: &Line,
        floors: Floors,
        followers: &Followers,
        names: &Names,
    ) -> Result<(), Violation> {
        let level = self.levels[depth];
        let plan = CrashPlan {
            tears: level.tears,
            images_max: level.images_max,
            seed: self.seed ^ depth as u64,
            events: if depth == 0 { self.from..usize::MAX } else { 0..usize::MAX },
        };
        let mut verdict = Ok(());
        let mut each = |image: CrashImage| {
            let number = self.numbers.borrow()[depth] + 1;
            self.numbers.borrow_mut()[depth] = number;
            if verdict.is_ok() && (depth > 0 || self.is_mine(number)) {
                let judged = self.judge(depth, number, &image, line, floors, followers, names);
                verdict = judged.map_err(|mut violation| {
                    violation.crashes.push(describe(disk, &image));
                    violation
                });
            }
        };
        disk.kill_images(&plan, &mut each);
        disk.power_images(&plan, &mut each);
        verdict
    }

    /// Returns true if this explorer handles an image. The number is hashed, so that images that are examined
    /// at a fixed interval are distributed over all parts.
    fn is_mine(&self, number: usize) -> bool {
        let (part, parts) = self.part;
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % parts == part
    }

    /// Checks one image. `number` is its number within its level.
    #[expect(clippy::too_many_arguments, reason = "all that was promised by then")]
    fn judge(
        &self,
        depth: usize,
        number: usize,
        image: &CrashImage,
        line: &Line,
        floors: Floors,
        followers: &Followers,
        names: &Names,
    ) -> Result<(), Violation> {
        self.images.borrow_mut()[depth] += 1;
        let level = self.levels[depth];
        let floors = floors.with(&image.acks).after(image.crash);
        followers.judge(image, line, number)?;
        let nest = depth + 1 < self.levels.len() && number.is_multiple_of(level.nest_of);
        let names = names.after(image.moment.event);
        let closely = number.is_multiple_of(level.closely_of);
        let line = self.examine(&image.disk, line, floors, &names, closely, nest)?;
        // The workload's followers have not read the batches that a recovery commits.
        let none = Followers::default();
        if !nest {
            return Ok(());
        }
        self.explore_at(depth + 1, &image.disk, &line, floors, &none, &Names::always(names))
    }

    /// Opens the files that a crash left, and checks the result. Returns the history of states of this disk
    /// from then on.
    fn examine(
        &self,
        disk: &SimDisk,
        line: &Line,
        floors: Floors,
        names: &BTreeSet<String>,
        closely: bool,
        go_on: bool,
    ) -> Result<Line, Violation> {
        let pure = rebuild(disk, &RebuildOptions::default());
        let store = open(disk, self.options).map_err(|error| {
            Violation::new(Kind::Refused, format!("{error} (rebuild: {:?})", pure.as_ref().err()))
        })?;
        let (lsn, created) = (store.recovered().position.lsn.0, store.recovered().created);
        let is_short = lsn < floors.logged || !created && lsn < line.first();
        if is_short || created && floors.exists {
            let what = format!("{floors:?}, recovered {lsn}, created {created}");
            return Err(Violation::new(Kind::Lost, what));
        }
        let found = same(line, lsn, &store)?;
        Names::judge(names, &store)?;
        // Compare with the state that the pure rebuild computed from the same image before the open.
        match &pure {
            Err(_) if created => {}
            Err(damage) => {
                return Err(Violation::new(Kind::Disagreement, format!("rebuild refuses: {damage}")));
            }
            Ok(pure) => agree(&found, lsn, pure)?,
        }

        // The state that an open returned is durable. It survives a power cut that discards all pending
        // writes.
        let driver = Driver::new(disk.clone(), self.options.clone(), line.clone(), floors);
        driver.adopt(&store);
        let cut = disk.after_power_cut();
        let pure = rebuild(&cut, &RebuildOptions::default())
            .map_err(|damage| Violation::new(Kind::Fleeting, format!("after the open: {damage}")))?;
        agree(&found, lsn, &pure).map_err(fleeting)?;
        if closely {
            self.build_on(cut, &driver.line()).map_err(fleeting)?;
        }
        if go_on {
            for ack in [Ack::Logged, Ack::Durable, Ack::Logged] {
                commit_another(&driver, &store, ack)?;
            }
        }
        drop(store);
        Ok(driver.line())
    }

    /// Reopens the store, commits, and opens it once more.
    fn build_on(&self, disk: SimDisk, line: &Line) -> Result<(), Violation> {
        let refused = |error: remanent::Error| Violation::new(Kind::Refused, error.to_string());
        let lsn = line.last();
        let store = open(&disk, self.options).map_err(refused)?;
        same(line, store.recovered().position.lsn.0, &store)?;
        if store.recovered().position.lsn.0 != lsn {
            return Err(Violation::new(Kind::Lost, format!("{} of {lsn}", store.recovered().position.lsn)));
        }
        let driver = Driver::new(disk.clone(), self.options.clone(), line.clone(), Floors::default());
        driver.adopt(&store);
        commit_another(&driver, &store, Ack::Durable)?;
        same(&driver.line(), lsn + 1, &store)?;
        let cut = disk.after_power_cut();
        let store = open(&cut, self.options).map_err(refused)?;
        if store.recovered().position.lsn.0 != lsn + 1 {
            return Err(Violation::new(Kind::Lost, format!("the commit after {lsn}")));
        }
        same(&driver.line(), lsn + 1, &store)?;
        let line = driver.line();
        // A named snapshot is exact and is kept without the log after it, so only its own batch can be
        // viewed.
        let snapshots = store.snapshots();
        let (named, others): (Vec<_>, Vec<_>) = snapshots.iter().partition(|kept| kept.name.is_some());
        let oldest = others.first().or(named.last()).map_or(0, |snapshot| snapshot.end.0);
        let moments = [oldest, (oldest + lsn) / 2, lsn];
        let mut moments = named.iter().map(|snapshot| snapshot.end.0).chain(moments);
        moments.try_for_each(|lsn| check_view(&cut, &line, lsn))
    }
}

/// Checks a view of an earlier state while the store is open.
fn check_view(disk: &SimDisk, line: &Line, lsn: u64) -> Result<(), Violation> {
    let refused =
        |error: remanent::Error| Violation::new(Kind::Refused, format!("a look at batch {lsn}: {error}"));
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    let old = View::open_on(&disk, Some(&StatePoint::Lsn(Lsn(lsn)))).map_err(refused)?;
    match line.at(lsn).difference(&looked_at(&old).map_err(refused)?) {
        None => Ok(()),
        Some(difference) => {
            Err(Violation::new(Kind::Disagreement, format!("a look at batch {lsn}, {difference}")))
        }
    }
}

/// Commits a batch that differs from those of the workload, and checks the ids that it is assigned.
pub fn commit_another(driver: &Driver, store: &Store, ack: Ack) -> Result<(), Violation> {
    let lsn = driver.line().last();
    let page = Target::New(0);
    let acts = vec![
        Act::Create { len: 40, key: None, metadata: Metadata::new() },
        Act::Write { page, offset: 8, bytes: format!("after batch {lsn:>20}").into_bytes() },
        Act::SetRoot { name: "another".to_owned(), value: lsn },
    ];
    let committed = driver.commit_acts(store, acts, ack);
    let (_, new) =
        committed.map_err(|error| Violation::new(Kind::Fleeting, format!("no commit: {error}")))?;
    let line = driver.line();
    let used = |page| (0..=lsn).any(|lsn| line.at(lsn).pages.contains_key(page));
    match new.iter().find(|page| used(page)) {
        Some(page) => Err(Violation::new(Kind::Wrong, format!("page id {page} was given again"))),
        None => Ok(()),
    }
}

/// Compares an open store with the model. Returns the state of the store.
pub fn same(line: &Line, lsn: u64, store: &Store) -> Result<State, Violation> {
    let wrong = |what| Violation::new(Kind::Wrong, what);
    if lsn > line.last() {
        return Err(wrong(format!("recovered batch {lsn}, and {} is the last one", line.last())));
    }
    let found = read(store).map_err(|error| wrong(error.to_string()))?;
    match line.at(lsn).difference(&found) {
        None => Ok(found),
        Some(difference) => Err(wrong(format!("at batch {lsn}, {difference}"))),
    }
}

fn agree(
    found: &State,
    lsn: u64,
    pure: &remanent_format::state::rebuild::RebuiltStore,
) -> Result<(), Violation> {
    let disagreement = |what| Err(Violation::new(Kind::Disagreement, what));
    if pure.table.lsn().0 != lsn {
        return disagreement(format!("rebuild reaches {}, the engine {lsn}", pure.table.lsn()));
    }
    match found.difference(&rebuilt(pure)) {
        None => Ok(()),
        Some(difference) => disagreement(format!("rebuild at batch {lsn}, {difference}")),
    }
}

fn fleeting(violation: Violation) -> Violation {
    let what = format!("once more: {:?}: {}", violation.kind, violation.what);
    Violation { kind: Kind::Fleeting, what, ..violation }
}

/// Describes a crash image, with the events around the crash.
fn describe(disk: &SimDisk, image: &CrashImage) -> String {
    let history = disk.history();
    let at = image.moment.event;
    let around = at.saturating_sub(30)..history.len().min(at + 4);
    let lines: Vec<String> = around
        .map(|event| format!("  {} {event}: {}", if event == at { ">" } else { " " }, history[event]))
        .collect();
    format!("{image}\n{}", lines.join("\n"))
}
