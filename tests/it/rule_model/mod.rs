//! The recovery rule, first in prose and then as a model that is checked for every crash.
//!
//! The model is small enough to be read as a whole, and shares no code with the engine. It consists of a disk
//! whose blocks and names become durable some time after they are written ([`disk`]), the log and its reader
//! ([`log`]), a process that recovers and commits ([`run`]), and the enumeration of all states that a crash
//! can leave ([`explore`]).
//!
//! # The rule
//!
//! **Writing.** A frame contains a hash of the previous frame (the chain hash), its own position, its
//! incarnation, its Lsn, and the newest Lsn that was durable when it was written: a *durable mark*. A batch
//! is acknowledged as logged when its frame is written, and as durable when its group is synced. No frame is
//! written to segment *s* before segment *s*+1 exists, is synced, and has a durable name. The highest segment
//! is therefore always empty, and a missing one is detected (I8).
//!
//! **Reading.** The folder is synced before its names are used. The newest incarnation is that of the highest
//! segment that begins an incarnation (its *opening segment*) or contains a frame written for its position.
//! Other empty segments prove nothing. Every opening segment records the point up to which its predecessor is
//! valid. Before that point, an invalid frame is corruption, and after it, no frame is read. In the newest
//! incarnation, the first invalid frame is corruption if a mark covers it. Otherwise, it is a torn tail and
//! is cut off (I4). The marks are those of the valid frames, the Lsn that the opening segment records as
//! accepted, and those of frames after the damage whose header checksum, incarnation and position are right
//! and whose Lsn is higher.
//!
//! **Recovering.** D is the last batch that a mark covers, and T is the last batch that was read. Batches
//! between them may exist only in the page cache, even after a successful sync, if an earlier sync failed
//! (I6). A new incarnation therefore begins with its own segment (I5):
//!
//! 1. remove temporary files;
//! 2. write the opening segment under a temporary name: D as predecessor, the batches after D up to T, a
//!    seal; sync it;
//! 3. create the next empty segment: temporary name, sync, rename, sync the folder;
//! 4. rename the opening segment over the highest, empty one: **the only commit point**;
//! 5. sync the folder; only now append and acknowledge;
//! 6. remove the segments between the predecessor's end and the opening.
//!
//! An incarnation that accepted no batch, not even a copied one, is omitted from the line. In step 2, its
//! successor records the predecessor of that incarnation, so step 6 removes the segments of the omitted
//! incarnation.
//!
//! # What the model covers
//!
//! A kill of the process keeps all writes, some of which are still pending, and tears at most the last frame
//! (its header without its payload). A power cut leaves any version since the durable one of each pending
//! block and each pending name, independently. After each crash, recovery must succeed with a prefix of the
//! commits that includes everything acknowledged at the level that the crash preserves, and must produce the
//! same state again, even if the power fails directly after it.

mod disk;
mod explore;
mod log;
mod rule;
mod run;

use crate::size::sized;
use disk::Name;
use explore::{Verdict, explore, first_images, recovered};
use rule::{Batchless, Newest, Order, Proven, Rule, Sync, Tail};
use run::{
    Promised, Run,
    Step::{self, FailedGroup, Group, Seal},
};

/// Segments have three frames, the first of which is a seal.
const SCENARIOS: &[&[Step]] = &[
    &[Group(1), Group(1)],
    &[Group(2)],
    &[Group(1), Group(2)],                     // the group lies on both sides of a roll
    &[Group(2), Group(1), Group(1)],           // commits after a roll
    &[Group(2), Group(1), Group(2), Group(1)], // commits in a segment that a roll made
    &[Group(1), Seal, Group(1)],
    &[Group(1), FailedGroup],
    &[],                 // an incarnation without a batch
    &[Seal, Seal, Seal], // whose seals fill two segments
];

fn explore_all(rule: Rule, after: &[Step], depth: u32) -> Verdict {
    let mut sum = Verdict::default();
    std::thread::scope(|scope| {
        let start = |&scenario| scope.spawn(move || explore(rule, scenario, after, depth));
        let explorers: Vec<_> = SCENARIOS.iter().map(start).collect();
        for explorer in explorers {
            sum.add(&explorer.join().expect("exploring does not panic"));
        }
    });
    sum
}

#[test]
fn the_rule_holds_two_nested_crashes_deep() {
    let depth = sized(1, 2);
    let verdict = explore_all(Rule::RIGHT, &[Group(1)], depth);
    assert_eq!(verdict.failures(), 0, "{verdict:?}");
    assert!(depth < 2 || verdict.images >= 90_000, "the enumeration has shrunk: {verdict:?}");
}

#[test]
fn the_rule_holds_when_commits_after_recovery_roll_and_crash() {
    let verdict = explore_all(Rule::RIGHT, &[Group(2), Group(1), Seal], 1);
    assert_eq!(verdict.failures(), 0, "{verdict:?}");
    assert!(verdict.images >= 10_000, "the enumeration has shrunk: {verdict:?}");
}

/// Each sync of the rule is necessary for at least one image that the model finds. Without the sync, an
/// acknowledged batch is lost, or the open of a store that only crashed fails, which is equivalent for its
/// owner.
#[test]
fn omitting_any_sync_breaks_the_rule() {
    #[derive(PartialEq)]
    enum Cost {
        Loss,
        Refusal,
    }
    let rows = [
        // Recovery uses a name that was visible only to the killed process. The name of its successor
        // survives without it, which is a gap.
        (Sync::OpenFolder, Cost::Refusal),
        // The name is durable, but the file's content is not.
        (Sync::OpeningFile, Cost::Loss),
        // Frames are durable in a segment whose header is not durable.
        (Sync::NextFile, Cost::Refusal),
        (Sync::RollFile, Cost::Refusal),
        // The rename is durable, but the next empty segment is not, so the newest segment seems to be
        // missing.
        (Sync::NextFolder, Cost::Refusal),
        (Sync::RollFolder, Cost::Refusal),
        // The power cut undoes the rename, and loses all frames that were appended and acknowledged
        // afterwards.
        (Sync::RenameFolder, Cost::Loss),
        (Sync::Group, Cost::Loss),
    ];
    for (sync, cost) in rows {
        let verdict = explore_all(Rule::without(sync), &[Group(1)], 1);
        let found = if cost == Cost::Loss { verdict.lost } else { verdict.refused };
        assert!(found > 0, "nothing shows that {sync:?} is needed: {verdict:?}");
    }
}

/// The segment that a recovery prepares survives a crash before the rename. If its header contained the
/// incarnation that never began, the frames of the valid incarnation would be considered stale.
#[test]
fn trusting_newest_header_loses_commits() {
    let verdict = explore_all(Rule { newest: Newest::ByHeader, ..Rule::RIGHT }, &[Group(1)], 1);
    assert!(verdict.lost > 0, "{verdict:?}");
}

#[test]
fn trusting_the_page_cache_with_the_tail_loses_commits() {
    let verdict = explore_all(Rule { tail: Tail::Trusted, ..Rule::RIGHT }, &[Group(1)], 0);
    assert!(verdict.lost + verdict.refused > 0, "{verdict:?}");
}

/// After a kill, syncing the tail in place is sufficient, but not after a failed sync, because the next sync
/// succeeds although the bytes exist only in the page cache.
#[test]
fn syncing_the_tail_in_place_loses_commits_after_a_failed_sync() {
    let rule = Rule { tail: Tail::SyncedInPlace, ..Rule::RIGHT };
    let killed = explore(rule, &[Group(1), Group(2)], &[Group(1)], 1);
    assert_eq!(killed.failures(), 0, "{killed:?}");
    let failed = explore(rule, &[Group(1), FailedGroup], &[Group(1)], 0);
    assert!(failed.lost + failed.refused > 0, "{failed:?}");
}

/// Until the folder is synced, a power cut may undo the rename of the opening segment. The previous
/// incarnation is then the newest again, and its segments must exist.
#[test]
fn early_incarnation_removal_rejects_sound_store() {
    let rule = Rule { batchless: Batchless::RemovedEarly, ..Rule::RIGHT };
    let verdict = explore_all(rule, &[], 1);
    assert!(verdict.refused + verdict.lost > 0, "{verdict:?}");
}

/// The batches that an incarnation copied may exist only in its segments. If these segments are removed, the
/// opening segment of the next incarnation records the batches as accepted although they are missing.
#[test]
fn skipping_incarnation_with_copied_batches_rejects_sound_store() {
    let verdict = explore_all(Rule { batchless: Batchless::WithCopies, ..Rule::RIGHT }, &[], 1);
    assert!(verdict.refused > 0, "{verdict:?}");
}

/// Explores opens without a commit, each crashed at every point.
#[test]
fn the_rule_holds_for_incarnations_without_a_batch() {
    for (after, depth) in [(&[][..], 2), (&[Seal][..], 1)] {
        let verdict = explore_all(Rule::RIGHT, after, depth);
        assert_eq!(verdict.failures(), 0, "{verdict:?}");
    }
}

#[test]
fn rename_before_next_segment_exists_rejects_sound_store() {
    let verdict = explore_all(Rule { order: Order::RenameThenNext, ..Rule::RIGHT }, &[Group(1)], 1);
    assert!(verdict.refused > 0, "{verdict:?}");
}

/// A seal repeats the Lsn of the previous batch, so a mark for that Lsn does not cover the seal. If the new
/// incarnation recorded the seal as proven and a power cut lost it, its absence would look like corruption.
#[test]
fn trusting_unsynced_seal_rejects_sound_store() {
    let rule = Rule { proven: Proven::EndOfFrame, ..Rule::RIGHT };
    let verdict = explore(rule, &[Group(1), Seal], &[Seal], 1);
    assert!(verdict.refused > 0, "{verdict:?}");
}

/// Tests the other half of I4: no mark ever covers a frame that is cut off as a torn tail.
#[test]
fn damage_under_mark_is_refused_and_other_damage_harmless() {
    let (mut refused, mut harmless) = (0, 0);
    for (crashed, promised) in SCENARIOS.iter().flat_map(|scenario| first_images(Rule::RIGHT, scenario)) {
        let mut run = Run::new(crashed, promised, Rule::RIGHT, 1);
        let writer = run.recover().expect("a crash alone is never refused");
        run.work(writer, &[Group(2), Group(1), Seal]);
        let Promised { line, durable, .. } = &run.promised;
        assert_eq!(*durable, line.len());
        let blocks = run.disk.list().flat_map(|(name, file)| (0..file.len()).map(move |block| (name, block)));
        for (name, block) in blocks.filter(|(name, _)| matches!(name, Name::Segment(_))) {
            let mut damaged = run.disk.clone();
            damaged.damage(name, block);
            match recovered(Rule::RIGHT, &damaged) {
                Err(_) => refused += 1,
                Ok((state, _)) => {
                    assert_eq!(&state, line, "damage was cut away as a torn tail");
                    harmless += 1;
                }
            }
        }
        let mut shorter = run.disk.clone();
        let (newest, _) =
            run.disk.list().filter(|(name, _)| matches!(name, Name::Segment(_))).last().unwrap();
        shorter.remove(newest);
        assert!(recovered(Rule::RIGHT, &shorter).is_err(), "a missing newest segment went unnoticed");
    }
    assert!(refused > 500 && harmless > 500, "{refused} refused, {harmless} harmless");
}
