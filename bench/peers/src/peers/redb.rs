//! redb. Each record has its own key and transaction. The integrity of the whole file is checked before the
//! records are read.

use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Commit, Found, Result};
use crate::record;

const RECORDS: TableDefinition<&[u8], &[u8]> = TableDefinition::new("records");

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let database = Database::create(directory.join("redb"))?;
    for number in 0..record::COUNT {
        let transaction = database.begin_write()?;
        transaction
            .open_table(RECORDS)?
            .insert(number.to_be_bytes().as_slice(), record::bytes(number).as_slice())?;
        transaction.commit()?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let mut database = Database::open(directory.join("redb"))?;
    let is_sound = database.check_integrity()?;
    let transaction = database.begin_read()?;
    let mut records = Vec::new();
    for entry in transaction.open_table(RECORDS)?.iter()? {
        let (key, value) = entry?;
        records.push((key.value().to_vec(), value.value().to_vec()));
    }
    let reported = (!is_sound).then(|| "the integrity check failed, and repaired what it could".to_owned());
    Ok(Found { records, reported })
}

pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    Ok(Box::new(Database::create(directory.join("redb"))?))
}

impl Commit for Database {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        let transaction = self.begin_write()?;
        transaction.open_table(RECORDS)?.insert(super::key(thread, count).as_slice(), record)?;
        Ok(transaction.commit()?)
    }
}
