//! Crashes at every step of a close, which truncates and removes spare segments, removes empty segments, and
//! replaces the last segment by a shorter one.

use crate::with_options::With;
use remanent::options::{LogIo, Retention};
use remanent::testing::sim_disk::Tears;
use remanent::{Ack, Error, Options, Store};

use super::work::{Driver, Random, Writer};
use super::{Level, Lives, options, suite_at};

/// Options with growing segments and a reserve, so that a close can free space.
fn options_of(log_io: LogIo) -> Options {
    options().retention(Retention::new().snapshots_kept(1)).with(|options| {
        options.log.io = Some(log_io);
        options.log.segment_len = 1 << 20;
        options.log.reserve_bytes = Some(1 << 20);
    })
}

/// Opens the store, extends the log and closes the store, twice. The second time, a snapshot precedes the
/// close.
fn closes(log_io: LogIo) {
    let levels = [
        Level { tears: Tears::Few(2), images_max: 5, closely_of: 16, nest_of: 300 },
        Level { tears: Tears::None, images_max: 3, closely_of: 16, nest_of: 1 },
    ];
    suite_at(&levels, options_of(log_io), 100, |driver, random| {
        let store = driver.open()?;
        lengthen(&driver, &store, random)?;
        driver.close(store)?;
        let store = driver.open()?;
        lengthen(&driver, &store, random)?;
        driver.snapshot(&store)?;
        let mut writer = Writer::new("a", random.next());
        driver.commit(&store, &mut writer, Ack::Durable)?;
        driver.check(&store);
        driver.close(store)?;
        let store = driver.open()?;
        driver.check(&store);
        driver.commit(&store, &mut writer, Ack::Durable)?;
        driver.close(store)?;
        let history = driver.disk.history();
        let is_short = |event: &String| event.starts_with("rename log/") && event.contains(".tmp to log/");
        assert!(history.iter().filter(|event| is_short(event)).count() > 2, "{history:#?}");
        Ok(Lives::from(driver))
    });
}

/// Commits batches to segments that are longer than their frames.
fn lengthen(driver: &Driver, store: &Store, random: &mut Random) -> Result<(), Error> {
    driver.create_pages(store, random, 1, 90_000).map(drop)
}

#[test]
fn mapped_log_survives_crashes_at_close() {
    closes(LogIo::Mapped);
}

#[test]
fn buffered_log_survives_crashes_at_close() {
    closes(LogIo::Buffered);
}

#[test]
fn direct_log_survives_crashes_at_close() {
    closes(LogIo::Direct);
}
