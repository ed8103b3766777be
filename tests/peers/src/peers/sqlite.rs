//! SQLite with a write-ahead log and `synchronous = FULL`: a row a record, a transaction each; read behind
//! `integrity_check`.

use std::path::Path;

use rusqlite::Connection;

use super::{Found, Result};
use crate::record;

fn open(directory: &Path) -> Result<Connection> {
    let connection = Connection::open(directory.join("sqlite"))?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    Ok(connection)
}

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let connection = open(directory)?;
    connection.execute("create table records (key blob primary key, value blob not null)", ())?;
    for number in 0..record::COUNT {
        let row = (number.to_be_bytes(), record::bytes(number));
        connection.execute("insert into records values (?1, ?2)", row)?;
    }
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    let connection = open(directory)?;
    let verdict: String = connection.query_row("pragma integrity_check", (), |row| row.get(0))?;
    let mut select = connection.prepare("select key, value from records")?;
    let records =
        select.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<rusqlite::Result<_>>()?;
    Ok(Found { records, told: (verdict != "ok").then_some(verdict) })
}
