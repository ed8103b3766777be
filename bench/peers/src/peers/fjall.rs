//! fjall. Each record has its own key and is persisted with `fsync`.

use std::path::Path;

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};

use super::{Commit, Found, Result};
use crate::record;

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let database = Database::builder(directory).open()?;
    let records = database.keyspace("records", KeyspaceCreateOptions::default)?;
    for number in 0..record::COUNT {
        records.insert(number.to_be_bytes(), record::bytes(number))?;
        database.persist(PersistMode::SyncAll)?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let database = Database::builder(directory).open()?;
    let records = database.keyspace("records", KeyspaceCreateOptions::default)?;
    let mut found = Vec::new();
    for guard in records.iter() {
        let (key, value) = guard.into_inner()?;
        found.push((key.to_vec(), value.to_vec()));
    }
    Ok(found.into())
}

pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    let database = Database::builder(directory).open()?;
    let records = database.keyspace("records", KeyspaceCreateOptions::default)?;
    Ok(Box::new((database, records)))
}

impl Commit for (Database, Keyspace) {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        self.1.insert(super::key(thread, count), record)?;
        Ok(self.0.persist(PersistMode::SyncAll)?)
    }
}
