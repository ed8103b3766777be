//! The interface of the protocol to the simulated directory of a machine.

use std::io;

use remanent_format::segment::SegmentHeader;
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{Incarnation, Lsn, StoreId};

use super::store::SimStore;
use super::world::SharedWorld;
use crate::local::{FenceRecord, LocalStore, SealedFrames};
use crate::object::{BatchPoint, KeptSnapshot, Part};
use crate::rules::{Rule, Rules};

/// A process's access to the directory of its machine.
#[derive(Clone, Debug)]
pub struct SimStoreHandle {
    /// The shared state.
    pub world: SharedWorld,
    /// The number of the machine.
    pub machine: usize,
    /// The rules to follow.
    pub rules: Rules,
}

impl SimStoreHandle {
    /// Calls a function with the directory of the machine.
    ///
    /// # Panics
    /// Panics if the machine has no directory.
    pub fn with<T>(&self, call: impl FnOnce(&mut SimStore) -> T) -> T {
        let mut world = self.world.borrow_mut();
        call(world.machines[self.machine].as_mut().expect("a writer has a directory"))
    }
}

impl LocalStore for SimStoreHandle {
    fn store(&self) -> StoreId {
        self.with(|store| store.id)
    }

    fn store_file(&self) -> Vec<u8> {
        let store = self.store();
        let file = StoreFile { store, features: Features::default(), record: StoreRecord::default() };
        file.encode().expect("an empty record can be encoded")
    }

    fn random(&self) -> u64 {
        self.with(|store| store.incarnation().random.into())
    }

    fn knows_name(&self, kept: &KeptSnapshot) -> bool {
        self.with(|store| store.known_names.contains(&kept.name))
    }

    fn newest(&self) -> BatchPoint {
        self.with(|store| store.point(store.log.len()))
    }

    fn openings(&self) -> Vec<SegmentHeader> {
        self.with(|store| store.openings.clone())
    }

    fn chain_of(&self, incarnation: Incarnation, lsn: Lsn) -> io::Result<Option<u32>> {
        Ok(self.with(|store| store.chain_of(incarnation, lsn)))
    }

    fn fences(&self) -> Vec<FenceRecord> {
        self.with(|store| store.fences.clone())
    }

    fn record_fences(&mut self, fences: &[FenceRecord]) -> io::Result<()> {
        self.with(|store| store.record_fences(fences));
        Ok(())
    }

    fn sealed_frames(&self, archived: &BatchPoint) -> io::Result<Option<SealedFrames>> {
        let end = |store: &SimStore| {
            if !self.rules.follow(Rule::Durable) {
                store.log.len()
            } else if !self.rules.follow(Rule::Mark) {
                store.durable
            } else {
                store.mark // [durable] [mark]
            }
        };
        Ok(self.with(|store| store.frames(archived.lsn.0 as usize, end(store))))
    }

    fn read_part(&self, part: &Part) -> io::Result<Vec<u8>> {
        let bytes = self.with(|store| store.read_part(part));
        bytes.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such image file"))
    }
}
