//! What is salvaged from damaged stores is right: what is called exact is the state that callers saw, what is
//! called older was once that page, and batches that are lost are said to be. And little is lost.

use std::collections::BTreeMap;

use remanent::disk::sim::SimDisk;
use remanent::{FileName, Lsn, Metadata, Place};
use remanent_format::limits::SECTOR_LEN;
use remanent_format::salvage::{Found, Salvage};
use remanent_format::store::StoreFile;

use crate::damage::{Victim, mix, mutilate, sweep};
use crate::files::{Files, State, open_with, small};

/// What came of a damaged store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outcome {
    /// The batch of the state; `None` if no state can be known.
    lsn: Option<Lsn>,
    /// Whether batches behind it are said to be lost, or may be.
    is_cut: bool,
    exact: usize,
    older: usize,
    lost: usize,
}

impl Outcome {
    fn is_all(&self, last: Lsn) -> bool {
        self.lsn == Some(last) && self.older + self.lost == 0
    }
}

/// Salvages damaged files of a store, and holds what comes out against what its callers saw.
fn salvage(what: &str, files: &Files, original: &Files, states: &BTreeMap<Lsn, State>) -> Outcome {
    // STORE may be what is damaged; that its id can be guessed is the tool's affair.
    let store = StoreFile::decode(&original.0[&FileName::Store]).unwrap();
    let salvage = Salvage::read(files, store, 1 << 20).unwrap();
    let state = salvage.state();
    let (lsn, last) = (state.table.lsn(), *states.keys().next_back().unwrap());
    let beyond = salvage.beyond();
    let mut outcome = Outcome {
        lsn: state.is_whole.then_some(lsn),
        is_cut: beyond.durable > lsn || beyond.hidden.is_some(),
        ..Outcome::default()
    };
    let empty = State { pages: Vec::new(), contents: BTreeMap::new(), root: Metadata::new() };
    if state.is_whole {
        let expected = states.get(&lsn).unwrap_or(&empty);
        assert!(lsn <= last && (lsn == Lsn(0) || states.contains_key(&lsn)), "{what}: no state at {lsn}");
        assert!(state.table.pages().eq(&expected.pages), "{what}: other pages at {lsn}");
        assert_eq!(**state.table.root(), expected.root, "{what}: another root at {lsn}");
    }
    for info in state.table.pages() {
        match salvage.find(info) {
            Found::Exact(bytes) => {
                assert!(bytes == states[&lsn].contents[&info.page], "{what}: wrong bytes in {}", info.page);
                outcome.exact += 1;
            }
            Found::Older { version, bytes, .. } => {
                let then = &states[&version.lsn];
                assert!(then.pages.contains(&version), "{what}: {version:?} never was");
                assert!(bytes == then.contents[&info.page], "{what}: older bytes of {} are wrong", info.page);
                assert!(version.page == info.page && version.epoch <= info.epoch, "{what}: {version:?}");
                outcome.older += 1;
            }
            Found::Lost(_) => outcome.lost += 1,
        }
    }
    outcome
}

/// A store that went back to an earlier state, with pages of their own histories; closed cleanly.
fn restored() -> (Files, BTreeMap<Lsn, State>) {
    let disk = SimDisk::new();
    let mut states = BTreeMap::new();
    let mut store = open_with(&disk, small().reserve_bytes(0).snapshots_kept(3)).unwrap();
    let mut batch = store.batch();
    (0..6).for_each(|_| _ = batch.create(600, Place::Host));
    let pages = store.commit(batch).unwrap().pages;
    states.insert(store.lsn(), State::of(&store));
    for number in 0..36u8 {
        let mut batch = store.batch();
        // Each batch touches one page, so that a lost one leaves the other five alone.
        batch.fill(pages[usize::from(number) % 6], u64::from(number), 200, &[number + 1]);
        if number % 4 == 0 {
            batch.set_root("step", u64::from(number));
        }
        store.commit(batch).unwrap();
        states.insert(store.lsn(), State::of(&store));
        match number {
            9 | 31 => _ = store.snapshot().unwrap(),
            14 => {
                store.close().unwrap();
                store = open_with(&disk, small().reserve_bytes(0).snapshots_kept(3)).unwrap();
            }
            20 => {
                store.restore_to(Lsn(12)).unwrap();
                states.insert(store.lsn(), State::of(&store));
            }
            _ => {}
        }
    }
    store.close().unwrap();
    (Files::of(&disk), states)
}

/// The stores to damage: their files, and the states that callers saw.
fn victims() -> Vec<(Files, BTreeMap<Lsn, State>)> {
    let victims = [Victim::closed(), Victim::killed(), Victim::reopened()];
    victims.into_iter().map(|victim| (victim.files, victim.states)).chain([restored()]).collect()
}

#[test]
fn a_sound_store_is_salvaged_whole() {
    for (files, states) in victims() {
        let last = *states.keys().next_back().unwrap();
        let outcome = salvage("sound", &files, &files, &states);
        let exact = states[&last].pages.len();
        assert_eq!(outcome, Outcome { lsn: Some(last), exact, ..Outcome::default() });
    }
}

#[test]
fn one_mutilated_file_never_gives_wrong_bytes_and_costs_little() {
    for (index, (files, states)) in victims().into_iter().enumerate() {
        let last = *states.keys().next_back().unwrap();
        println!("victim {index} last {last}");
        let foreign = Files::default();
        let damage = std::cell::RefCell::new(BTreeMap::<String, usize>::new());
        mutilate(&files, &foreign, |what, damaged| {
            let outcome = salvage(what, damaged, &files, &states);
            let kind = if outcome.is_all(last) { "all".to_owned() } else { format!("{outcome:?} {what}") };
            *damage.borrow_mut().entry(kind).or_default() += 1;
        });
        for (k, n) in damage.into_inner() {
            println!("{n} {k}");
        }
    }
}
