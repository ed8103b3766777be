//! Checks every kept state of a store against every kind of damage. `judge` reports no damage only if a view
//! of each state reads correctly, and reports a state as lost only if no view of it does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use remanent::disk::Disk;
use remanent::error::{FileName, NoSuchState};
use remanent::options::{Compression, ImageIo};
use remanent::{Error, Lsn, Place, Retention, SnapshotOptions, StatePoint, View};
use remanent_format::judge::{ImageProofs, Start, Verdict, judge};
use remanent_format::limits::SECTOR_LEN;
use remanent_format::state::reach::Role;
use remanent_format::state::survey::Survey;

use super::sweeps::{is_long, sweep_all};
use super::verdicts::{Subject, Work, options};
use super::{flip, mix};
use crate::files::{Files, State};
use crate::with_options::With;

/// Returns a store with a named snapshot between two others, one of which a prune keeps. Some later states
/// can be reached only from the named snapshot.
fn named_before_others() -> Subject {
    let mut work = Work::new(ImageIo::Buffered);
    work.store.snapshot().unwrap();
    work.commit(1);
    work = work.reopen();
    work.store.snapshot_with(SnapshotOptions::new().name("x")).unwrap();
    work.commit(1);
    work = work.reopen();
    work.commit(1);
    work.store.snapshot().unwrap();
    work.store.prune(&Retention::default().snapshots_kept(2)).unwrap();
    work.commit(1);
    work.close("a named snapshot, and the log after it")
}

/// Returns a store that was never pruned, so that its log is kept from the beginning.
fn from_the_beginning() -> Subject {
    let mut work = Work::new(ImageIo::Mapped);
    work.commit(2);
    work = work.reopen();
    work.store.snapshot().unwrap();
    work.commit(2);
    work.store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    work.commit(1);
    work.close("all of the log")
}

/// Returns a store that contains images of batches, and tables and images of restores, all superseded by later
/// batches.
fn replaced_since() -> Subject {
    let options = options(ImageIo::Direct).with(|options| {
        options.images.chunk_len = Some(4096);
        options.images.compression = Compression::Off;
    });
    let mut work = Work::with_pages(&[3000, 2900, 2800], Place::Disk, options);
    work.store.snapshot().unwrap();
    let pages = work.pages.clone();
    let whole = |work: &mut Work, seed: u8| {
        let mut batch = work.store.batch();
        batch.delete(pages[0]).create_from(vec![seed; 3000], Place::Disk);
        batch.fill(pages[1], 7, 90, &[seed]);
        work.store.commit(batch).unwrap();
        work.note();
        work.store.lsn()
    };
    let good = whole(&mut work, 1);
    let mut batch = work.store.batch();
    let last = work.store.pages().unwrap().last().unwrap().page;
    batch.delete(last);
    work.store.commit(batch).unwrap();
    work.note();
    work.store.restore(StatePoint::Lsn(good)).unwrap();
    work.note();
    work.commit(1);
    work.close("images and tables that were replaced")
}

/// Compares the state that a view of a batch reads with the expected state. Returns false if the state is
/// damaged.
fn state_at(what: &str, disk: &Arc<dyn Disk>, lsn: Lsn, expected: &State) -> bool {
    let is_damage = |error: &Error| {
        matches!(
            error,
            Error::Damaged(_) | Error::NoSuchState(NoSuchState::OutsideWindow { .. }) | Error::NoStore { .. }
        )
    };
    let view = match View::open_on(disk, Some(&StatePoint::Lsn(lsn))) {
        Ok(view) => view,
        Err(error) if is_damage(&error) => return false,
        Err(error) => panic!("{what}: {lsn}: {error}"),
    };
    assert!(view.pages().eq(expected.pages.iter().cloned()), "{what}: wrong pages at {lsn}");
    expected.contents.iter().all(|(page, bytes)| {
        let mut found = vec![0; bytes.len()];
        match view.read(*page, 0, &mut found) {
            Ok(()) => assert!(found == *bytes, "{what}: wrong bytes of page {page} at {lsn}"),
            Err(error) if is_damage(&error) => return false,
            Err(error) => panic!("{what}: {lsn}: {error}"),
        }
        true
    })
}

/// Returns the states of an intact store for which a view can be opened.
fn kept(subject: &Subject) -> Vec<Lsn> {
    let disk: Arc<dyn Disk> = Arc::new(subject.files.disk());
    let states = subject.states.iter();
    let kept = states.filter(|(lsn, state)| state_at(subject.name, &disk, **lsn, state));
    kept.map(|(lsn, _)| *lsn).collect()
}

fn is_clean(verdict: &Verdict) -> bool {
    let is_whole = |start: &Start| {
        start.blocked_by.is_empty()
            && start.damaged_pages.is_empty()
            && start.lost_by.is_empty()
            && start.gaps.is_empty()
    };
    verdict.opens_from.is_some()
        && verdict.lost.is_empty()
        && verdict.lost_beginning.is_none()
        && verdict.starts.iter().all(is_whole)
}

/// Compares the verdict with views of all kept states.
fn check(what: &str, subject: &Subject, kept: &[Lsn], files: &Files, [clean, lost]: &[AtomicUsize; 2]) {
    let disk: Arc<dyn Disk> = Arc::new(files.disk());
    let readable: BTreeMap<Lsn, bool> =
        kept.iter().map(|lsn| (*lsn, state_at(what, &disk, *lsn, &subject.states[lsn]))).collect();
    let Ok(survey) = Survey::read(files) else {
        assert!(readable.values().any(|is_readable| !is_readable), "{what}");
        return;
    };
    let verdict = judge(&survey, files, &mut ImageProofs::new(files));
    if is_clean(&verdict) {
        clean.fetch_add(1, Ordering::Relaxed);
        let first = readable.iter().find(|(_, is_readable)| !**is_readable);
        assert_eq!(first, None, "{what}: nothing is called damaged, but the state is lost");
    }
    // The state of an exact snapshot needs no log.
    let is_complete = |start: &Start| start.role != Role::Link && start.lost_by.is_empty();
    let complete =
        verdict.starts.iter().filter(|start| is_complete(start)).filter_map(|start| start.snapshot);
    let ends: Vec<Lsn> = complete.map(|id| survey.snapshot(id).unwrap().end).collect();
    for gap in verdict.starts.iter().flat_map(|start| &start.gaps) {
        lost.fetch_add(1, Ordering::Relaxed);
        for (lsn, is_readable) in readable.range(gap.first..=gap.last) {
            assert!(
                !is_readable || ends.contains(lsn),
                "{what}: {} is said to cost the state at {lsn}",
                gap.damage
            );
        }
    }
}

#[test]
fn clean_verdict_implies_readable_states() {
    for subject in [named_before_others(), from_the_beginning(), replaced_since()] {
        let kept = kept(&subject);
        assert!(kept.len() > 3 && kept.last() == subject.states.keys().last(), "{}: {kept:?}", subject.name);
        let files: Vec<FileName> = subject.files.0.keys().copied().collect();
        let lines: Vec<(FileName, usize)> = subject
            .files
            .0
            .iter()
            .flat_map(|(file, bytes)| {
                let is_written = |at: &usize| bytes[*at..].iter().take(64).any(|byte| *byte != 0);
                (0..bytes.len()).step_by(64).filter(is_written).map(move |at| (*file, at))
            })
            .collect();
        let sectors: Vec<(FileName, usize)> = {
            let mut all: Vec<_> = lines.iter().map(|(file, at)| (*file, at - at % SECTOR_LEN)).collect();
            all.dedup();
            all
        };
        let flips = if is_long() { lines.len() } else { 40 };
        let step = if is_long() { 1 } else { 1 + sectors.len() / 60 };
        let counts = [(); 2].map(|()| AtomicUsize::new(0));
        sweep_all(
            &subject.files,
            1 + files.len() + sectors.len().div_ceil(step) + flips,
            |scratch, number| {
                let (what, changed) = if number == 0 {
                    ("nothing".to_owned(), None)
                } else if let Some(file) = files.get(number - 1) {
                    scratch.0.remove(file);
                    (format!("{file} removed"), Some(*file))
                } else if let Some((file, at)) = sectors.get((number - 1 - files.len()) * step) {
                    let bytes = scratch.0.get_mut(file).unwrap();
                    let end = bytes.len().min(at + SECTOR_LEN);
                    bytes[*at..end].fill(0);
                    (format!("sector at {at} of {file} zeroed"), Some(*file))
                } else {
                    let (file, line) = lines[mix(number as u64) as usize % lines.len()];
                    let len = subject.files.0[&file].len();
                    let place = (file, len.min(line + 64 - mix(number as u64 + 1) as usize % 64) - 1);
                    flip(scratch, place, mix(number as u64 + 7) % 8);
                    (format!("bit of {place:?} flipped"), Some(file))
                };
                check(&format!("{}: {what}", subject.name), &subject, &kept, scratch, &counts);
                if let Some(file) = changed {
                    scratch.0.insert(file, subject.files.0[&file].clone());
                }
            },
        );
        let [clean, lost] = counts.map(AtomicUsize::into_inner);
        assert!(clean > 3 && lost > 3, "{}: {clean} clean, {lost} gaps", subject.name);
    }
}

/// The newest seal records the role of each snapshot. Recovery can start from a named snapshot like from any
/// other.
#[test]
fn states_after_named_snapshot_are_restorable_from_it() {
    let subject = named_before_others();
    let survey = Survey::read(&subject.files).unwrap();
    let verdict = judge(&survey, &subject.files, &mut ImageProofs::new(&subject.files));
    assert!(is_clean(&verdict), "{verdict:?}");
    let named = verdict.starts.iter().find(|start| {
        let link = start.snapshot.and_then(|id| survey.links[&id].as_ref().ok());
        link.is_some_and(|(link, _)| link.name.is_some() && link.redo.lsn == link.end)
    });
    assert_eq!(named.map(|start| start.role), Some(Role::Start), "named, exact, and a start");
}
