//! Idle followers cost little, and the next batch still reaches them.

use remanent::Ack;

use super::*;
use crate::machine::alone;
use crate::with_options::With;

/// How long the followers are idle.
const IDLE: Duration = Duration::from_millis(1500);
/// Maximum number of checks of one follower in that time. The usual interval causes 40 checks. An interval of
/// 10 ms would cause 150.
const CHECKS_MAX: u64 = 75;

/// Returns the number of times that each of `count` idle followers of a store checks for new batches.
fn checks(disk: &Arc<dyn Disk>, options: Options, count: usize) -> Vec<u64> {
    let mut writer = Writer::open(disk, options.with(|options| options.log.segment_len = 64 << 10));
    writer.commit(1);
    let mut followers: Vec<Follower> =
        (0..count).map(|_| Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap()).collect();
    for follower in &mut followers {
        assert_eq!(follower.next(Duration::from_secs(60)).unwrap().unwrap().lsn(), Lsn(1));
    }
    let checks = std::thread::scope(|scope| {
        let waits: Vec<_> = followers
            .iter_mut()
            .map(|follower| {
                scope.spawn(|| {
                    let before = follower.checks();
                    assert!(follower.next(IDLE).unwrap().is_none());
                    follower.checks() - before
                })
            })
            .collect();
        waits.into_iter().map(|wait| wait.join().unwrap()).collect()
    });
    // Each follower receives the next batch.
    writer.commit(1);
    for follower in &mut followers {
        assert_eq!(follower.next(Duration::from_secs(60)).unwrap().unwrap().lsn(), Lsn(2));
    }
    checks
}

#[test]
fn three_hundred_idle_followers_poll_rarely() {
    alone(|| {
        let (_, untold) = sim();
        let directory = tempfile::tempdir().unwrap();
        let told = |name: &str| -> Arc<dyn Disk> { Arc::new(DirDisk::new(directory.path().join(name))) };
        for (name, disk, log_io) in [
            ("past the limit, where nothing tells", untold, LogIo::Mapped),
            ("mapped", told("mapped"), LogIo::Mapped),
            ("buffered", told("buffered"), LogIo::Buffered),
            ("direct", told("direct"), crate::direct_io::log_io()),
        ] {
            let checks = checks(&disk, options().with(|options| options.log.io = Some(log_io)), 300);
            let (least, most) = (checks.iter().min().unwrap(), checks.iter().max().unwrap());
            assert!(*least > 1 && *most < CHECKS_MAX, "{name}: {least} to {most} looks");
        }
    });
}

/// Stores to a mapping cause no file event, so the writer causes one explicitly when followers may be asleep.
#[test]
fn mapped_log_notifies_followers_after_idle() {
    for (log_io, told) in [(LogIo::Mapped, 1), (LogIo::Buffered, 0), (LogIo::Direct, 0)] {
        let (sim, disk) = sim();
        let mut writer =
            Writer::open(&disk, options().ack(Ack::Logged).with(|options| options.log.io = Some(log_io)));
        let mut follower = Follower::open_on(disk, FollowFrom::Beginning).unwrap();
        for lsn in 1..=3 {
            // No batch is committed for longer than the time after which followers sleep.
            assert!(follower.next(Duration::from_millis(10)).unwrap().is_none());
            let before = sim.notifications();
            writer.commit(1);
            assert_eq!(sim.notifications() - before, told, "{log_io}");
            assert_eq!(follower.next(Duration::from_secs(60)).unwrap().unwrap().lsn(), Lsn(lsn));
        }
    }
}
