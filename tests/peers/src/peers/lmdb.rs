//! LMDB as it syncs by default: a key a record, a transaction each.

use std::path::Path;

use heed::types::Bytes;
use heed::{Database, Env, EnvOpenOptions};

use super::{Commit, Found, Result};
use crate::record;

/// A map of this length is also as long as the file can become.
fn map(directory: &Path) -> Result<Env> {
    let mut options = EnvOpenOptions::new();
    options.map_size(64 << 20);
    // SAFETY: no other process has the directory's files open, and none changes them while this process maps
    // them.
    Ok(unsafe { options.open(directory)? })
}

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let env = map(directory)?;
    let mut transaction = env.write_txn()?;
    let records = env.create_database::<Bytes, Bytes>(&mut transaction, None)?;
    transaction.commit()?;
    for number in 0..record::COUNT {
        let mut transaction = env.write_txn()?;
        records.put(&mut transaction, &number.to_be_bytes(), &record::bytes(number))?;
        transaction.commit()?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let env = map(directory)?;
    let transaction = env.read_txn()?;
    let records = env.open_database::<Bytes, Bytes>(&transaction, None)?.ok_or("there is no database")?;
    let mut found = Vec::new();
    for entry in records.iter(&transaction)? {
        let (key, value) = entry?;
        found.push((key.to_vec(), value.to_vec()));
    }
    Ok(found.into())
}

pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    let env = map(directory)?;
    let mut transaction = env.write_txn()?;
    let records = env.create_database::<Bytes, Bytes>(&mut transaction, None)?;
    transaction.commit()?;
    Ok(Box::new((env, records)))
}

impl Commit for (Env, Database<Bytes, Bytes>) {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        let mut transaction = self.0.write_txn()?;
        self.1.put(&mut transaction, &super::key(thread, count), record)?;
        Ok(transaction.commit()?)
    }
}
