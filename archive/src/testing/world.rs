//! The state that all simulated processes share, and the checks of the promises.

use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use super::rng::Rng;
use super::store::{SimStore, Token};
use crate::object::{Kind, ObjectKey, decode_header};

/// The number of a process.
pub type ProcessId = u32;

/// The number of simulated machines.
pub const MACHINES: usize = 3;

/// A reference to the shared state.
pub type SharedWorld = Rc<RefCell<World>>;

/// The effect of a request on the bucket. The effect may take place later than the request.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Creates an object unless one exists.
    Create(ObjectKey, Rc<[u8]>, ProcessId),
    /// Creates or replaces an object.
    Put(ObjectKey, Rc<[u8]>),
    /// Deletes an object.
    Delete(ObjectKey),
}

/// The bucket, the machines, and the record of acknowledgements for the checks.
#[derive(Debug)]
pub struct World {
    /// Source of all random decisions.
    pub rng: Rng,
    /// The objects of the bucket.
    pub objects: BTreeMap<ObjectKey, Rc<[u8]>>,
    /// All creates (true) and deletes (false) in order. Listings that are out of date omit the last of them.
    changes: Vec<(ObjectKey, bool)>,
    /// The effects of requests whose sender died or stopped waiting. These effects may still take place.
    pub zombies: Vec<Effect>,
    /// For each process, the effect of its current request, if it has not taken place yet.
    pub in_flight: HashMap<ProcessId, Effect>,
    /// The directory of each machine, or `None`.
    pub machines: [Option<SimStore>; MACHINES],
    /// An earlier copy of a directory, with which a machine may continue.
    pub old_copy: Option<SimStore>,
    /// The time: the number of scheduled steps.
    pub now: u64,
    /// Whether all requests succeed.
    pub is_calm: bool,
    /// Whether the bucket refuses to delete data objects.
    pub locks_data: bool,
    /// The recorded events, or `None` if they are not recorded.
    pub trace: Option<Vec<String>>,
    /// The acknowledged batches, with the times of their acknowledgements.
    pub acknowledged: HashMap<Token, u64>,
    /// For each position of the line, the process that first created an object there.
    creators: BTreeMap<u64, ProcessId>,
    /// The positions at which a process became the newest writer.
    terms: BTreeMap<u64, ProcessId>,
    /// The longest restored state.
    longest: Vec<Token>,
    /// The named snapshots that were taken.
    named: BTreeMap<String, Named>,
    /// The processes that are starting a takeover, with the names that their directories know.
    pub takes_over: HashMap<ProcessId, HashSet<String>>,
    drawn: u64,
}

/// A named snapshot.
#[derive(Clone, Debug)]
struct Named {
    tokens: Vec<Token>,
    /// The time at which the snapshot was acknowledged as archived, if it was.
    archived: Option<u64>,
    /// Whether the name of the snapshot was given up.
    is_given_up: bool,
    /// The time at which the removal from the archive was acknowledged, if it was.
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
            locks_data: false,
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

    /// Adds an event to the trace, if events are recorded.
    pub fn record_event(&mut self, event: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:4} {}", event()));
        }
    }

    /// Returns a new unique number.
    pub fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.drawn
    }

    /// Applies an effect. Returns false for a create if the object exists.
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
                    self.record_event(|| format!("  removed {key}"));
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

    /// Records the first object at a position of the line.
    fn note_created(&mut self, key: ObjectKey, bytes: &[u8], process: ProcessId) {
        let header = decode_header(bytes).expect("the protocol creates valid objects");
        self.record_event(|| format!("  P{process} created {key}: {}", header.kind.name()));
        let ObjectKey::Line(position) = key else { return };
        let Entry::Vacant(first) = self.creators.entry(position) else { return };
        first.insert(process);
        if header.kind == Kind::Catalog
            && let Some(known) = self.takes_over.get(&process)
        {
            // The first catalog of a takeover removes the names that the directory never had.
            let unknown = self.named.iter_mut().filter(|(name, _)| !known.contains(*name));
            unknown.for_each(|(_, named)| named.is_given_up = true);
        }
        if header.kind == Kind::Fence {
            self.terms.insert(position, process);
        }
    }

    /// Records a writer that starts without a fence.
    pub fn note_term(&mut self, position: u64, process: ProcessId) {
        self.terms.insert(position, process);
    }

    /// Returns true if `process` is the newest writer.
    #[must_use]
    pub fn is_newest_writer(&self, store: &SimStore) -> bool {
        let newest = self.terms.iter().next_back();
        newest.is_some_and(|(position, _)| store.is_fence_of(*position))
    }

    /// Returns the keys in the bucket as a listing reports them, which may be out of date.
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

    /// Checks that `process` may acknowledge the batches of the object that it created at `position`, and records them.
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

    /// Checks a restored state. `began` is the time at which the restore began.
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

    /// Records a named snapshot of a state.
    pub fn take_named(&mut self, name: &str, tokens: &[Token]) {
        let named = Named { tokens: tokens.to_vec(), archived: None, is_given_up: false, removed: None };
        self.named.insert(name.to_owned(), named);
    }

    /// Records that a named snapshot is archived.
    pub fn archive_named(&mut self, name: &str) {
        let now = self.now;
        if let Some(named) = self.named.get_mut(name) {
            named.archived.get_or_insert(now);
        }
    }

    /// Records that a name was given up, and whether the archive was changed accordingly.
    pub fn give_up_name(&mut self, name: &str, is_archived: bool) {
        let now = self.now;
        if let Some(named) = self.named.get_mut(name) {
            named.is_given_up = true;
            named.removed = named.removed.or(is_archived.then_some(now));
        }
    }

    /// Checks the named snapshots of a restore that began at time `began`.
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

    /// Permits later restores to differ from earlier ones, because the line was cut.
    pub fn forget_restores(&mut self) {
        self.longest.clear();
        self.acknowledged.clear();
        self.named.clear();
    }

    /// Cuts the power of a machine. Its directory loses the frames that were not synced.
    pub fn cut_power(&mut self, machine: usize) {
        let Some(store) = &mut self.machines[machine] else { return };
        let least = store.durable.min(store.log.len());
        let kept = least + self.rng.below(store.log.len() - least + 1);
        store.log.truncate(kept);
        self.record_event(|| format!("  by a power cut; {kept} batches are left"));
    }
}
