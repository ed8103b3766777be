//! A log of more than 4 GiB, whose writer is killed.

use remanent::options::{LogOptions, Retention};

use super::*;

const LOG_TEST: &str = "past_4_gib::long_log::log_past_4_gib_survives_a_kill";
const PAGE: u64 = 64 << 20;
/// Number of written bytes, fewer than the page has, so that the bytes are logged.
const WRITTEN: u64 = 48 << 20;

/// Returns the bytes that batch `number` writes. They are cheap to compute and differ at each offset.
fn written(number: u64) -> Vec<u8> {
    (0..WRITTEN / 8).flat_map(|at| (at ^ number << 40).to_le_bytes()).collect()
}

fn long_log_options() -> Options {
    options().log(LogOptions::new().segment_len(4 << 30)).retention(Retention::new().log_kept(u64::MAX))
}

#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn commit_until_killed(directory: &Path) -> ! {
    end_with_the_parent();
    let store = long_log_options().open(directory).unwrap();
    let page = commit(&store, |batch| _ = batch.create(PAGE, Place::Host).key("long"))[0];
    loop {
        let number = store.lsn().0 + 1;
        let mut batch = store.batch();
        batch.write(page, 4 * number, &written(number));
        let ticket = store.submit(batch).unwrap();
        ticket.wait(Ack::Logged).unwrap();
        println!("logged {}", ticket.position().lsn);
    }
}

/// Returns the total length of all segments in bytes.
fn log_len(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory.join("log")).unwrap().map(|entry| entry.unwrap());
    let logs = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "log"));
    logs.map(|entry| entry.metadata().unwrap().len()).sum()
}

#[test]
fn log_past_4_gib_survives_a_kill() {
    if let Ok(directory) = std::env::var(ERRAND) {
        commit_until_killed(Path::new(&directory));
    }
    if !is_long_form() {
        return skipped("a log past 4 GiB", "only with REMANENT_PAST_4_GIB");
    }
    alone_for(limit(), || {
        let directory = folder();
        let mut worker = Worker::start(LOG_TEST, &directory.path().display().to_string());
        let last = FOUR_GIB / WRITTEN + 4;
        worker.wait_for(&format!("logged {last}"));
        let lines = worker.kill();
        let logged = last_logged(&lines).unwrap_or(last);
        assert!(log_len(directory.path()) > FOUR_GIB);
        for _ in 0..2 {
            let store = long_log_options().open(directory.path()).unwrap();
            let lsn = store.lsn().0;
            assert!((logged..=logged + 1).contains(&lsn), "{logged} was logged, {lsn} is there");
            let mut expected = vec![0; PAGE as usize];
            (2..=lsn).for_each(|number| {
                expected[4 * number as usize..][..WRITTEN as usize].copy_from_slice(&written(number));
            });
            assert!(store.read_to_vec(long_page(&store)).unwrap() == expected);
        }
    });
}
