//! The simulated processes: writers, readers and pruners, which call the functions of [`line`](crate::line).

use remanent_format::SnapshotId;

use super::bucket::{SimBucket, reschedule};
use super::handle::SimStoreHandle;
use super::store::{Restored, SimStore};
use super::world::SharedWorld;
use crate::error::Error;
use crate::line::{Appended, Archive, Line, NamedParts, RestoredEnd, SnapshotParts, Takeover, Verified};
use crate::local::LocalStore;
use crate::object::KeptSnapshot;
use crate::rules::{Rule, Rules};

/// Maximum number of attempts of a reader. A boundary overtook each failed attempt.
const READ_ATTEMPTS: u32 = 6;

/// The reason why a process ended without success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The process stopped as the protocol requires, for this reason.
    Expected(String),
    /// This promise was violated.
    Violation(String),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Superseded { .. }
            | Error::Overtaken { .. }
            | Error::Diverged { .. }
            | Error::Busy { .. }
            | Error::Bucket { .. }
            | Error::Unknown { .. } => Stop::Expected(text),
            _ => Stop::Violation(text),
        }
    }
}

fn violation(text: impl ToString) -> Stop {
    Stop::Violation(text.to_string())
}

/// The task of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens the store of a machine, commits batches, archives them, takes snapshots and prunes.
    Writer,
    /// Restores the end of the line.
    Reader,
    /// Prunes the archive from a machine without the store.
    Pruner,
}

/// A simulated process.
#[derive(Clone, Debug)]
pub struct Process {
    /// Access to the bucket.
    pub bucket: SimBucket,
    /// The rules to follow.
    pub rules: Rules,
    /// The shared state.
    pub world: SharedWorld,
    /// The number of the machine.
    pub machine: usize,
    /// Whether the operator permits takeovers.
    pub takeover: Takeover,
}

/// A handle of a simulated process.
pub type SimLine<'a> = Line<'a, SimBucket, SimBucket>;

impl Process {
    /// Runs the process to its end.
    ///
    /// # Errors
    /// Returns the reason why the process stopped.
    pub async fn run(self, role: Role) -> Result<(), Stop> {
        match role {
            Role::Writer => self.write().await,
            Role::Reader => self.read().await.map(|_| ()),
            Role::Pruner => self.prune().await,
        }
    }

    /// Returns the archive, as this process accesses it.
    #[must_use]
    pub fn archive(&self) -> Archive<'_, SimBucket, SimBucket> {
        Archive { bucket: &self.bucket, nonces: &self.bucket, rules: self.rules }
    }

    fn record_event(&self, event: impl FnOnce() -> String) {
        let process = self.bucket.process;
        self.world.borrow_mut().record_event(|| format!("P{process} {}", event()));
    }

    fn chance(&self, probability: f64) -> bool {
        self.world.borrow_mut().rng.chance(probability)
    }

    /// Returns a handle to the directory of the machine.
    #[must_use]
    pub fn local(&self) -> SimStoreHandle {
        SimStoreHandle { world: self.world.clone(), machine: self.machine, rules: self.rules }
    }

    /// Restores the end of the line and checks the restored state.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the read failed.
    pub async fn read(&self) -> Result<Vec<u64>, Stop> {
        let began = self.world.borrow().now;
        let mut line = Line::new(self.archive());
        line.find().await?;
        let state = self.restore(&mut line).await?.map(|(state, _)| state).unwrap_or_default();
        let tokens = state.tokens();
        let named = state.named.iter().map(|named| (named.name.clone(), state.tokens_of(named))).collect();
        self.record_event(|| format!("restored {tokens:?}, named {named:?}"));
        let mut world = self.world.borrow_mut();
        world.check_restored(began, &tokens).map_err(Stop::Violation)?;
        world.check_named(began, &named).map_err(Stop::Violation)?;
        Ok(tokens)
    }

    /// Reads the state at the end that `find` found. Returns `None` if the archive is empty.
    async fn restore(&self, line: &mut SimLine<'_>) -> Result<Option<(Restored, RestoredEnd)>, Stop> {
        for _ in 0..READ_ATTEMPTS {
            if line.is_empty() {
                return Ok(None);
            }
            let mut state = Restored::default();
            match line.read_state(&mut state).await {
                Ok(end) => return Ok(Some((state, end))),
                Err(Error::Overtaken { .. }) => line.find().await?,
                Err(error) => return Err(error.into()),
            }
        }
        Err(Stop::Expected("overtaken again and again".to_owned()))
    }

    /// Prunes the archive from a machine without the store.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the prune failed.
    pub async fn prune(&self) -> Result<(), Stop> {
        let mut line = Line::new(self.archive());
        line.find().await?;
        let verified = match line.newest_manifest() {
            Some(manifest) if self.chance(0.7) => Some(Verified::by_server(manifest)),
            _ => line.verify_manifest().await?,
        };
        if let Some(verified) = verified {
            let pruned = line.prune(verified).await?;
            self.record_event(|| format!("pruned: {pruned:?}"));
        }
        Ok(())
    }

    async fn write(&self) -> Result<(), Stop> {
        let mut line = self.open().await?;
        self.work(&mut line, &self.local()).await
    }

    /// Opens the store of the machine for writing: finds the end of the line, restores the directory if the machine has
    /// none, and creates a fence.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the store was not opened.
    pub async fn open(&self) -> Result<SimLine<'_>, Stop> {
        let mut line = Line::new(self.archive());
        self.open_directory(&mut line).await?;
        let mut local = self.local();
        if self.takeover == Takeover::Permitted {
            let known = local.with(|store| store.known_names.clone());
            self.world.borrow_mut().takes_over.insert(self.bucket.process, known);
        }
        line.fence(&mut local, self.takeover).await.map_err(|error| self.refused(error))?;
        self.world.borrow_mut().takes_over.remove(&self.bucket.process);
        let newest = line.catalog().last().map_or(SnapshotId(0), |kept| kept.snapshot);
        local.with(|store| store.skip_number(newest));
        if !self.rules.follow(Rule::Fence) {
            self.world.borrow_mut().note_term(line.next(), self.bucket.process);
        }
        self.record_event(|| format!("opened the store in term {:?}", line.term()));
        Ok(line)
    }

    /// Opens the directory of the machine. Restores it first if the machine has none.
    async fn open_directory(&self, line: &mut SimLine<'_>) -> Result<(), Stop> {
        let is_absent = self.world.borrow().machines[self.machine].is_none();
        if is_absent {
            let mut reader = Line::new(self.archive());
            reader.find_to_claim().await?;
            let store = self.restore_directory(&mut reader).await?;
            self.world.borrow_mut().machines[self.machine] = Some(store);
        }
        line.find().await?;
        let local = self.local();
        let random = self.world.borrow_mut().draw();
        local.with(|store| store.plan_opening(random));
        // The check includes the opening that the directory will publish (rule 5).
        line.check_lineage(&local, self.takeover).map_err(|error| self.refused(error))?;
        local.with(SimStore::publish_opening);
        Ok(())
    }

    async fn restore_directory(&self, line: &mut SimLine<'_>) -> Result<SimStore, Stop> {
        use crate::line::Nonces;
        if line.is_empty() {
            let random = self.world.borrow_mut().draw();
            return Ok(SimStore::create(random));
        }
        let nonce = self.bucket.draw();
        let mut claim = None;
        if self.rules.follow(Rule::Fence) {
            claim = Some(line.claim(nonce).await?);
        }
        let Some((state, end)) = self.restore(line).await? else {
            return Err(violation("the archive is empty now"));
        };
        self.record_event(|| format!("restored its directory: {:?}", state.tokens()));
        Ok(SimStore::restored(state, &end, claim))
    }

    /// Handles a rejected open: the operator discards the directory, and a later open restores the archive.
    fn refused(&self, error: Error) -> Stop {
        let mut world = self.world.borrow_mut();
        let is_newest =
            world.machines[self.machine].as_ref().is_some_and(|store| world.is_newest_writer(store));
        match error {
            Error::Diverged { .. } | Error::IdentityMismatch { .. } => {
                world.machines[self.machine] = None;
                if is_newest && self.rules.follow(Rule::Fence) {
                    return violation(format!("a directory refuses an archive that only it wrote: {error}"));
                }
                Stop::Expected(error.to_string())
            }
            error => error.into(),
        }
    }

    /// Runs a writer: commits, syncs, archives runs, takes snapshots and prunes.
    async fn work(&self, line: &mut SimLine<'_>, local: &SimStoreHandle) -> Result<(), Stop> {
        loop {
            reschedule().await;
            let share = self.world.borrow_mut().rng.share();
            let token = self.world.borrow_mut().draw();
            match share {
                ..0.35 => local.with(|store| store.commit(token)),
                ..0.43 => local.with(SimStore::sync),
                ..0.48 => local.with(SimStore::seal),
                ..0.64 => self.append_run(line, local).await?,
                ..0.76 => self.snapshot(line, local).await?,
                ..0.80 => self.take_named(line, local).await?,
                ..0.83 => self.give_up_name(line, local).await?,
                ..0.93 => self.prune_as_writer(line).await?,
                ..0.94 => drop(line.write_hint().await), // Failures to write a hint have no effect.
                ..0.96 if !self.world.borrow().is_calm => return Err(Stop::Expected("closed".to_owned())),
                _ => {}
            }
        }
    }

    /// Appends the frames that are ready to be archived, and acknowledges their batches.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the writer stopped.
    pub async fn append_run(&self, line: &mut SimLine<'_>, local: &SimStoreHandle) -> Result<(), Stop> {
        let before = line.archived().lsn.0 as usize;
        match line.append_run(local).await {
            Ok(Some(appended)) => self.acknowledge(&appended, before),
            Ok(None) => Ok(()),
            Err(error) => self.retry_later(error),
        }
    }

    /// Ignores errors after which a writer may try again later, and returns any other error.
    fn retry_later(&self, error: Error) -> Result<(), Stop> {
        match error {
            Error::Bucket { .. }
            | Error::Unknown { .. }
            | Error::EndNotArchived { .. }
            | Error::AppendPending => {
                self.record_event(|| error.to_string());
                Ok(())
            }
            error => Err(error.into()),
        }
    }

    fn acknowledge(&self, appended: &Appended, before: usize) -> Result<(), Stop> {
        let tokens = self.local().with(|store| store.tokens(before, appended.archived.lsn.0 as usize));
        let mut world = self.world.borrow_mut();
        let process = self.bucket.process;
        world.record_event(|| format!("P{process} acknowledges {tokens:?} in {}", appended.position));
        world.acknowledge(process, appended.position, &tokens).map_err(Stop::Violation)
    }

    async fn snapshot(&self, line: &mut SimLine<'_>, local: &SimStoreHandle) -> Result<(), Stop> {
        let redo = local.with(|store| store.snapshot_redo());
        if redo == 0 {
            return Ok(());
        }
        let is_base = self.chance(0.4);
        let commits = self.world.borrow_mut().rng.below(3);
        for _ in 0..commits {
            let token = self.world.borrow_mut().draw();
            local.with(|store| store.commit(token));
            reschedule().await;
        }
        if line.archived().lsn.0 < redo as u64 && self.chance(0.2) {
            // The log below `redo` is no longer retained (rule 28).
            let rebased = local.with(|store| store.complete_rebase(redo));
            return self.append_manifest(line, local, &rebased).await;
        }
        let snapshot = local.with(|store| store.complete_snapshot(redo, is_base));
        // [mend] The run that contains the end of the snapshot is appended first.
        while self.rules.follow(Rule::Mend) && line.archived().lsn < snapshot.end.lsn {
            let before = line.archived();
            self.append_run(line, local).await?;
            if line.archived() == before {
                return Ok(()); // The bucket is unreachable; the next snapshot replaces this one.
            }
        }
        self.append_manifest(line, local, &snapshot).await
    }

    /// Appends the manifest of a snapshot.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the writer stopped.
    pub async fn append_manifest(
        &self,
        line: &mut SimLine<'_>,
        local: &dyn LocalStore,
        snapshot: &SnapshotParts,
    ) -> Result<(), Stop> {
        let before = line.archived().lsn.0 as usize;
        match line.append_manifest(local, snapshot).await {
            Ok(appended) => {
                self.record_event(|| {
                    format!("archived snapshot {} in {}", snapshot.snapshot, appended.position)
                });
                self.acknowledge(&appended, before)
            }
            Err(error) => self.retry_later(error),
        }
    }

    /// Takes a named snapshot and archives it.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the writer stopped.
    pub async fn take_named(&self, line: &mut SimLine<'_>, local: &SimStoreHandle) -> Result<(), Stop> {
        if local.with(|store| store.log.is_empty()) {
            return Ok(()); // The simulation has no file for an empty state.
        }
        let name = format!("name {}", self.world.borrow_mut().draw());
        let (named, tokens) =
            local.with(|store| (store.take_named(name.clone()), store.tokens(0, store.log.len())));
        self.world.borrow_mut().take_named(&name, &tokens);
        while self.rules.follow(Rule::Mend) && line.archived().lsn < named.batch.lsn {
            let before = line.archived();
            self.append_run(line, local).await?;
            if line.archived() == before {
                return Ok(()); // The bucket is unreachable; the snapshot is not archived.
            }
        }
        self.append_catalog(line, local, &[], Some(&named)).await
    }

    /// Gives up the name of a snapshot in the directory and in the archive.
    async fn give_up_name(&self, line: &mut SimLine<'_>, local: &SimStoreHandle) -> Result<(), Stop> {
        let count = local.with(|store| store.named.len());
        if count == 0 {
            return Ok(());
        }
        let at = self.world.borrow_mut().rng.below(count);
        let named = local.with(|store| store.named.remove(at));
        self.world.borrow_mut().give_up_name(&named.name, false);
        // If this snapshot was never archived, the archive may contain another snapshot with the same number.
        let is_same = |kept: &&KeptSnapshot| (kept.snapshot, &kept.name) == (named.snapshot, &named.name);
        let removed: Vec<SnapshotId> =
            line.catalog().iter().filter(is_same).map(|kept| kept.snapshot).collect();
        self.append_catalog(line, local, &removed, None).await?;
        if line.catalog().iter().all(|kept| kept.name != named.name) && !line.has_pending() {
            self.world.borrow_mut().give_up_name(&named.name, true);
        }
        Ok(())
    }

    /// Appends a catalog.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the writer stopped.
    pub async fn append_catalog(
        &self,
        line: &mut SimLine<'_>,
        local: &SimStoreHandle,
        removed: &[SnapshotId],
        new: Option<&NamedParts>,
    ) -> Result<(), Stop> {
        let before = line.archived().lsn.0 as usize;
        match line.append_catalog(local, removed, new).await {
            Ok(Some(appended)) => {
                self.acknowledge(&appended, before)?;
                if let Some(new) = new {
                    self.record_event(|| format!("archived {:?} in {}", new.name, appended.position));
                    self.world.borrow_mut().archive_named(&new.name);
                }
                Ok(())
            }
            Ok(None) | Err(Error::NotNewer { .. }) => Ok(()),
            Err(error) => self.retry_later(error),
        }
    }

    /// Prunes the archive as the current writer.
    ///
    /// # Errors
    /// Returns a violation, or the reason why the writer stopped.
    pub async fn prune_as_writer(&self, line: &mut SimLine<'_>) -> Result<(), Stop> {
        let Some(manifest) = line.newest_manifest() else { return Ok(()) };
        match line.prune(Verified::by_server(manifest)).await {
            Ok(pruned) => {
                self.record_event(|| format!("pruned: {pruned:?}"));
                Ok(())
            }
            Err(error) => self.retry_later(error),
        }
    }
}
