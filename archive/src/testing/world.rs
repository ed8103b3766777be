//! The state that all simulated processes share, and the checks of the promises.

use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use super::rng::Rng;
use super::store::{SimStore, Token};
use crate::object::{Kind, ObjectKey, decode_header};

/// Number of a process.
pub type ProcessId = u32;

/// Number of machines.
pub const MACHINES: usize = 3;

/// The shared state.
pub type SharedWorld = Rc<RefCell<World>>;

/// An effect of a request on the bucket, which may happen later than the request.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Creates an object unless one exists.
    Create(ObjectKey, Rc<[u8]>, ProcessId),
    /// Replaces an object.
    Put(ObjectKey, Rc<[u8]>),
    /// Removes an object.
    Delete(ObjectKey),
}

/// The bucket, the machines, and the promises so far.
#[derive(Debug)]
pub struct World {
    /// Source of all random decisions.
    pub rng: Rng,
    /// The objects of the bucket.
    pub objects: BTreeMap<ObjectKey, Rc<[u8]>>,
    /// Creates and deletes in their order, for listings that lag.
    changes: Vec<(ObjectKey, bool)>,
    /// Requests whose sender died or gave up, and which may take effect.
    pub zombies: Vec<Effect>,
    /// The effect of the request that each process has sent, if it has not happened yet.
    pub in_flight: HashMap<ProcessId, Effect>,
    /// The directory of each machine.
    pub machines: [Option<SimStore>; MACHINES],
    /// A copy of a directory that may come back.
    pub old_copy: Option<SimStore>,
    /// Time: the number of scheduled steps.
    pub now: u64,
    /// Whether requests always succeed.
    pub is_calm: bool,
    /// Descriptions of what happened, if they are recorded.
    pub trace: Option<Vec<String>>,
    /// The acknowledged batches, with the times.
    pub acknowledged: HashMap<Token, u64>,
    /// The creator of the first object at each position of the line.
    creators: BTreeMap<u64, ProcessId>,
    /// Positions from which a writer is the newest one.
    terms: BTreeMap<u64, ProcessId>,
    /// The longest state that was restored.
    longest: Vec<Token>,
    /// The named snapshots that were taken.
    named: BTreeMap<String, Named>,
    /// The processes that begin a takeover, with the names that their directories know.
    pub takes_over: HashMap<ProcessId, HashSet<String>>,
    drawn: u64,
}

/// A named snapshot.
#[derive(Clone, Debug)]
struct Named {
    tokens: Vec<Token>,
    /// When it was acknowledged.
    archived: Option<u64>,
    /// Whether its name was given up, and when that was acknowledged.
    is_given_up: bool,
    removed: Option<u64>,
}

impl World {
    /// Creates an empty bucket and machines without directories.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            rng: Rng::new(seed),
            objects: BTreeMap::new(),
            changes: Vec::new(),
            zombies: Vec::new(),
            in_flight: HashMap::new(),
            machines: [const { None }; MACHINES],
            old_copy: None,
            now: 0,
            is_calm: false,
            trace: None,
            acknowledged: HashMap::new(),
            creators: BTreeMap::new(),
            terms: BTreeMap::new(),
            longest: Vec::new(),
            named: BTreeMap::new(),
            takes_over: HashMap::new(),
            drawn: 0,
        }
    }

    /// Records an event if events are recorded.
    pub fn say(&mut self, event: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:4} {}", event()));
        }
    }

    /// Returns a number that was not returned before.
    pub fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.drawn
    }

    /// Applies an effect. Returns false for a create of an object that exists.
    pub fn apply(&mut self, effect: &Effect) -> bool {
        match effect {
            Effect::Create(key, _, _) if self.objects.contains_key(key) => return false,
            Effect::Create(key, bytes, process) => {
                self.store(*key, bytes);
                self.note_created(*key, bytes, *process);
            }
            Effect::Put(key, bytes) => self.store(*key, bytes),
            Effect::Delete(key) => {
                if self.objects.remove(key).is_some() {
                    self.changes.push((*key, false));
                    self.say(|| format!("  removed {key}"));
                }
            }
        }
        true
    }

    fn store(&mut self, key: ObjectKey, bytes: &Rc<[u8]>) {
        if self.objects.insert(key, bytes.clone()).is_none() {
            self.changes.push((key, true));
        }
    }

    /// Notes the first object at a position of the line.
    fn note_created(&mut self, key: ObjectKey, bytes: &[u8], process: ProcessId) {
        let header = decode_header(bytes).expect("the protocol creates valid objects");
        self.say(|| format!("  P{process} created {key}: {}", header.kind.name()));
        let ObjectKey::Line(position) = key else { return };
        let Entry::Vacant(first) = self.creators.entry(position) else { return };
        first.insert(process);
        if header.kind == Kind::Catalog
            && let Some(known) = self.takes_over.get(&process)
        {
            // The catalog with which a takeover begins gives up names that the directory never had.
            let unknown = self.named.iter_mut().filter(|(name, _)| !known.contains(*name));
            unknown.for_each(|(_, named)| named.is_given_up = true);
        }
        if header.kind == Kind::Fence {
            self.terms.insert(position, process);
        }
    }

    /// Notes a writer that begins without a fence.
    pub fn note_term(&mut self, position: u64, process: ProcessId) {
        self.terms.insert(position, process);
    }

    /// Returns true if `process` is the newest writer that began a term.
    #[must_use]
    pub fn is_newest_writer(&self, store: &SimStore) -> bool {
        let newest = self.terms.iter().next_back();
        newest.is_some_and(|(position, _)| store.is_fence_of(*position))
    }

    /// Returns the keys in the bucket, as a listing that may lag reports them.
    pub fn listing(&mut self) -> Vec<ObjectKey> {
        let lag = if self.is_calm { 0 } else { self.rng.choice(&[0, 0, 0, 1, 3, 10, 30]) };
        let mut keys: BTreeMap<ObjectKey, ()> = self.objects.keys().map(|key| (*key, ())).collect();
        for (key, is_created) in self.changes.iter().rev().take(lag) {
            if *is_created {
                keys.remove(key);
            } else {
                keys.insert(*key, ());
            }
        }
        keys.into_keys().collect()
    }

    /// Checks that `process` may acknowledge batches in the object that it created at `position`, and notes them.
    ///
    /// # Errors
    /// Returns the violated promise.
    pub fn acknowledge(&mut self, process: ProcessId, position: u64, tokens: &[Token]) -> Result<(), String> {
        if self.creators.get(&position) != Some(&process) {
            return Err(format!("acknowledged in an object that is not of the line (position {position})"));
        }
        let term = self.terms.range(..=position).next_back();
        if term.is_none_or(|(_, writer)| *writer != process) {
            return Err(format!("a superseded writer acknowledges (position {position})"));
        }
        for token in tokens {
            self.acknowledged.insert(*token, self.now);
        }
        Ok(())
    }

    /// Checks a state that was restored by a process that began at `began`.
    ///
    /// # Errors
    /// Returns the violated promise.
    pub fn check_restored(&mut self, began: u64, state: &[Token]) -> Result<(), String> {
        let contained: HashSet<&Token> = state.iter().collect();
        let lost = self.acknowledged.iter().find(|(token, at)| **at < began && !contained.contains(token));
        if let Some((token, _)) = lost {
            return Err(format!("an acknowledged batch is lost by a restore (batch {token})"));
        }
        let common = state.len().min(self.longest.len());
        if state[..common] != self.longest[..common] {
            return Err("two restores disagree".to_owned());
        }
        if state.len() > common {
            self.longest = state.to_vec();
        }
        Ok(())
    }

    /// Notes a named snapshot of a state.
    pub fn take_named(&mut self, name: &str, tokens: &[Token]) {
        let named = Named { tokens: tokens.to_vec(), archived: None, is_given_up: false, removed: None };
        self.named.insert(name.to_owned(), named);
    }

    /// Notes that a named snapshot is archived.
    pub fn archive_named(&mut self, name: &str) {
        let now = self.now;
        if let Some(named) = self.named.get_mut(name) {
            named.archived.get_or_insert(now);
        }
    }

    /// Notes that a name is given up, and perhaps that the archive contains this.
    pub fn give_up_name(&mut self, name: &str, is_archived: bool) {
        let now = self.now;
        if let Some(named) = self.named.get_mut(name) {
            named.is_given_up = true;
            named.removed = named.removed.or(is_archived.then_some(now));
        }
    }

    /// Checks the named snapshots that were restored by a process that began at `began`.
    ///
    /// # Errors
    /// Returns the violated promise.
    pub fn check_named(&self, began: u64, restored: &BTreeMap<String, Vec<Token>>) -> Result<(), String> {
        for (name, named) in &self.named {
            let is_promised = named.archived.is_some_and(|at| at < began) && !named.is_given_up;
            match restored.get(name) {
                None if is_promised => return Err(format!("an archived named snapshot is lost ({name})")),
                Some(_) if named.removed.is_some_and(|at| at < began) => {
                    return Err(format!("a removed named snapshot is back ({name})"));
                }
                Some(tokens) if *tokens != named.tokens => {
                    return Err(format!("a named snapshot has another state ({name})"));
                }
                _ => {}
            }
        }
        let unknown = restored.keys().find(|name| !self.named.contains_key(*name));
        unknown.map_or(Ok(()), |name| Err(format!("nobody took the named snapshot {name}")))
    }

    /// Allows restores to differ from earlier ones after a cut of the line.
    pub fn forget_restores(&mut self) {
        self.longest.clear();
        self.acknowledged.clear();
        self.named.clear();
    }

    /// Cuts the power of a machine: its directory loses frames that were not synced.
    pub fn cut_power(&mut self, machine: usize) {
        let Some(store) = &mut self.machines[machine] else { return };
        let least = store.durable.min(store.log.len());
        let kept = least + self.rng.below(store.log.len() - least + 1);
        store.log.truncate(kept);
        self.say(|| format!("  by a power cut; {kept} batches are left"));
    }
}
