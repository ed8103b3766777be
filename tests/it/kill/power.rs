//! Power cuts on real file systems. The worker uses its own file system. A clone of its device at some
//! instant is mounted and opened while the worker continues. Batches acknowledged as durable before that
//! instant must exist, no batch may exist that was not submitted, and the worker must not be affected.
//!
//! More batches are committed to the opened store, and then its power is cut as well. Its durable batches
//! must exist.

use super::*;
use crate::machine::mounts::{self, Kind, Medium};
use crate::machine::skipped;

/// The file system of a worker, and its configuration.
struct Plan {
    kind: Kind,
    log_io: Option<LogIo>,
    /// The expected value of [`remanent::store::RecoveryReport::log_io`].
    says: &'static str,
    /// Number of power cuts in the short form.
    cuts: usize,
    /// This plan's share of the power cuts in the long form, out of [`SHARES`].
    share: usize,
}

const SHARES: usize = 12;
/// Maximum number of power cuts in the life of one store. Then another store is created.
const CUTS_MAX: usize = 25;

fn plans() -> [Plan; 6] {
    let plan = |kind, log_io, says, cuts, share| Plan { kind, log_io, says, cuts, share };
    [
        plan(Kind::Ext4, None, "mapped", 4, 3),
        plan(Kind::Ext4, Some(LogIo::Buffered), "buffered, as asked for", 4, 3),
        plan(Kind::Ext4, Some(LogIo::Direct), "direct, as asked for", 4, 3),
        plan(Kind::Xfs, None, "buffered: XFS with reflinks", 3, 1),
        plan(Kind::XfsWithoutReflinks, None, "mapped", 3, 1),
        plan(Kind::Btrfs, None, "buffered: btrfs", 3, 1),
    ]
}

/// Counts of the events under one plan.
#[derive(Default)]
struct Cuts {
    cuts: usize,
    /// Number of power cuts of stores that were opened after a power cut.
    again: usize,
    /// Number of missing batches that were submitted. None of them was acknowledged as durable.
    gone: u64,
    /// Number of named snapshots that passed their check.
    names: usize,
}

#[test]
fn nothing_durable_is_lost_by_a_power_cut_on_a_real_file_system() {
    let plans = plans();
    let long = effort("REMANENT_POWER_CUTS");
    let mut jobs = Vec::new();
    for (index, plan) in plans.iter().enumerate() {
        if let Some(reason) = mounts::missing(plan.kind) {
            skipped(&format!("power cuts on {:?}", plan.kind), reason);
            continue;
        }
        let mut left = long.map_or(plan.cuts, |cuts| (cuts * plan.share).div_ceil(SHARES));
        while left > 0 {
            let cuts = left.min(CUTS_MAX);
            jobs.push((index, jobs.len() as u64, cuts));
            left -= cuts;
        }
    }
    let done = in_parallel(&jobs, |(plan, seed, cuts)| plans[*plan].cut_power(*seed, *cuts));
    let mut sums = plans.each_ref().map(|_| Cuts::default());
    for ((plan, ..), done) in jobs.iter().zip(done) {
        let sum = &mut sums[*plan];
        sum.cuts += done.cuts;
        sum.again += done.again;
        sum.gone += done.gone;
        sum.names += done.names;
    }
    println!(
        "{:<22}{:<26}{:>6}{:>7}{:>16}{:>7}",
        "power cuts", "", "cuts", "again", "not yet durable", "names"
    );
    for (plan, Cuts { cuts, again, gone, names }) in plans.iter().zip(&sums) {
        let kind = format!("{:?}", plan.kind);
        println!("{kind:<22}{:<26}{cuts:>6}{again:>7}{gone:>16}{names:>7}", plan.says);
    }
    println!("{} power cuts", sums.iter().map(|sum| sum.cuts + sum.again).sum::<usize>());
    for (plan, _, _) in jobs {
        assert!(sums[plan].gone > 0, "no cut of {:?} took anything", plans[plan].kind);
    }
}

impl Plan {
    /// Cuts the power of one worker at `cuts` random times.
    fn cut_power(&self, seed: u64, cuts: usize) -> Cuts {
        let mut ground = Ground::new(Manner { log_io: self.log_io, ..Manner::default() });
        ground.random = Random(seed);
        let mut medium = Medium::new(self.kind, ground.directory.join("store")).unwrap();
        let mut worker = ground.start_worker();
        let mut done = Cuts::default();
        for cut in 0..cuts {
            // The first power cut may come before the store exists.
            let from = Lsn(ground.board.begun().0 + ground.random.below(60));
            worker.wait_until("its batches", || ground.board.begun() >= from);
            spin(Duration::from_nanos(1 << ground.random.below(22)));
            self.cut(&mut ground, &mut medium, &mut done, &format!("{:?}, cut {cut} of {seed}", self.kind));
        }
        worker.kill();
        drop(medium);
        std::fs::remove_dir_all(&ground.directory).unwrap();
        Cuts { names: ground.names, ..done }
    }

    fn cut(&self, ground: &mut Ground, medium: &mut Medium, done: &mut Cuts, at: &str) {
        // Names and forks that were reported before the power cut must exist. Later ones may exist.
        let (durable, mut told) = (ground.board.durable(), ground.diary.read());
        let cut = medium.cut();
        let begun = ground.board.begun();
        told.extend(ground.diary.read().into_iter().filter(|entry| matches!(entry, Entry::GiveUp { .. })));

        let mount = cut.mount();
        let store = ground.check_opening(&mount.path, durable..=begun, at);
        assert!(store.recovered().log_io.starts_with(self.says), "{}", store.recovered().log_io);
        ground.check_names(&told, &store.snapshots(), &mount.path, at);
        done.cuts += 1;
        done.gone += begun.0 - store.lsn().0;

        let mut model = ground.model.clone();
        go_on(&store, &mut model);
        let again = medium.cut_again(&cut);
        let mount_again = again.mount();
        let store_again = worker::options(self.log_io, &mount_again.path).open(&mount_again.path).unwrap();
        assert_eq!(store_again.lsn(), model.lsn, "{at}, once more");
        leftovers::check_open(&model.state, &store_again, &format!("{at}, once more"));
        done.again += 1;
        drop((store, store_again));
    }
}

/// Commits some durable batches, or no batch if the next one would be a restore.
fn go_on(store: &Store, model: &mut Model) {
    let mut shape = worker::shape(store).unwrap();
    for _ in 0..3 {
        let n = store.lsn().next();
        if workload::is_restore(n) {
            return;
        }
        let changes = workload::changes(n, &shape);
        let mut batch = store.batch();
        workload::fill(&mut batch, n, &changes);
        let committed = store.commit(batch).unwrap();
        store.wait_durable(n).unwrap();
        workload::reshape(&mut shape, &changes, &committed.pages);
        model.advance(n);
    }
}
