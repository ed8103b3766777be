//! Closes, each crashed anywhere: spares are cut and removed, empty segments go, the last segment is replaced
//! by a shorter one, with and without the frames that a snapshot made superfluous. A crash leaves one or the
//! other.

use remanent::{Ack, Error, LogIo, Options, Store};

use super::work::{Driver, Writer};
use super::{Lives, options, suite};

/// Longer than a few batches need, so that there is something to give back, and a reserve.
fn options_of(log_io: LogIo) -> Options {
    options().log_io(log_io).segment_len(64 << 10).reserve_bytes(64 << 10).snapshots_kept(1)
}

/// Two lives that commit and are closed, the second one after a snapshot whose replay begins within its
/// segment.
fn closes(log_io: LogIo) {
    suite(options_of(log_io), 400, |driver, random| {
        let store = driver.open()?;
        let mut writer = Writer::new("a", random.next());
        commit(&driver, &store, &mut writer, 3)?;
        driver.close(store)?;
        let store = driver.open()?;
        let mut writer = Writer::new("b", random.next()).over(&driver.line());
        commit(&driver, &store, &mut writer, 4)?;
        driver.snapshot(&store)?;
        driver.check(&store);
        driver.close(store)?;
        let store = driver.open()?;
        driver.check(&store);
        commit(&driver, &store, &mut writer, 1)?;
        driver.close(store)?;
        Ok(Lives::from(driver))
    });
}

fn commit(driver: &Driver, store: &Store, writer: &mut Writer, count: usize) -> Result<(), Error> {
    (0..count).try_for_each(|_| driver.commit(store, writer, Ack::Durable).map(drop))
}

#[test]
fn closes_of_a_mapped_log_survive() {
    closes(LogIo::Mapped);
}

#[test]
fn closes_of_a_buffered_log_survive() {
    closes(LogIo::Buffered);
}

#[test]
fn closes_of_a_direct_log_survive() {
    closes(LogIo::Direct);
}
