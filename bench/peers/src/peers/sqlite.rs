//! SQLite with a write-ahead log and `synchronous = FULL`. Each record is a row with its own transaction.
//! `integrity_check` runs before the records are read.

use std::path::Path;
use std::sync::Mutex;

use rusqlite::Connection;

use super::{Commit, Found, Result};
use crate::record;

const TABLE: &str = "create table records (key blob primary key, value blob not null)";

fn connect(directory: &Path) -> Result<Connection> {
    let connection = Connection::open(directory.join("sqlite"))?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    Ok(connection)
}

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let connection = connect(directory)?;
    connection.execute(TABLE, ())?;
    for number in 0..record::COUNT {
        let row = (number.to_be_bytes(), record::bytes(number));
        connection.execute("insert into records values (?1, ?2)", row)?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let connection = connect(directory)?;
    let verdict: String = connection.query_row("pragma integrity_check", (), |row| row.get(0))?;
    let mut select = connection.prepare("select key, value from records")?;
    let records =
        select.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<rusqlite::Result<_>>()?;
    Ok(Found { records, reported: (verdict != "ok").then_some(verdict) })
}

/// Opens one connection for all threads. Separate connections would wait for each other by sleeping.
pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    let connection = connect(directory)?;
    connection.execute(TABLE, ())?;
    Ok(Box::new(Mutex::new(connection)))
}

impl Commit for Mutex<Connection> {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        let connection = self.lock().expect("no panic");
        let mut insert = connection.prepare_cached("insert or replace into records values (?1, ?2)")?;
        insert.execute((super::key(thread, count), record))?;
        Ok(())
    }
}
