//! A writer that acts between any two reads of a follower. It recycles the segments that the follower has
//! just listed, or it is killed and recovers. The follower continues or is overtaken, and never reports
//! damage.

use std::sync::Mutex;

use remanent::error::{FileName, Folder};
use remanent::options::Retention;

use super::*;
use crate::interrupted_reads::InterruptedDisk;
use crate::size::sized;

/// An action of the writer between two reads.
type Strike = fn(&mut Option<Writer>, &SimDisk);

const STRIKES: [(&str, Strike); 4] = [
    ("recycles", |writer, _| recycle(writer, 1)),
    // No earlier snapshot remains after this action.
    ("recycles all", |writer, _| recycle(writer, 3)),
    ("restarts", |writer, disk| restart(writer, disk)),
    ("restarts and recycles", |writer, disk| {
        restart(writer, disk);
        recycle(writer, 2);
    }),
];

fn recycle(writer: &mut Option<Writer>, times: usize) {
    let writer = writer.as_mut().expect("it is open");
    for _ in 0..times {
        writer.commit(12);
        writer.store.snapshot().unwrap();
    }
}

fn restart(writer: &mut Option<Writer>, disk: &SimDisk) {
    writer.as_mut().expect("it is open").commit(2);
    drop(writer.take());
    *writer = Some(Writer::open(&(Arc::new(disk.clone()) as Arc<dyn Disk>), options()));
    writer.as_mut().expect("just opened").commit(2);
}

/// The work of the follower during the actions. Returns the follower if it reached the end.
type Doing = fn(Reader, &Arc<dyn Disk>) -> Result<Reader, Error>;

const DOINGS: [(&str, Doing); 2] = [
    ("goes on", |mut reader, disk| {
        reader.reopen(disk)?;
        reader.catch_up()?;
        Ok(reader)
    }),
    ("starts", |_, disk| {
        let mut reader = Reader::try_from_snapshot(disk)?;
        reader.catch_up()?;
        Ok(reader)
    }),
];

/// Returns the disk state after a kill of a store with several segments, two snapshots, and later batches.
fn left_by_a_kill() -> SimDisk {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    for _ in 0..3 {
        writer.commit(12);
        writer.store.snapshot().unwrap();
    }
    writer.commit(7);
    sim.after_kill(Moment { event: sim.events(), tear: None })
}

#[test]
fn write_between_two_reads_is_not_reported_as_damage() {
    let left = left_by_a_kill();
    let (mut all_overtaken, mut all_went_on) = (0, 0);
    for (what, strike) in STRIKES {
        for (doing, follow) in DOINGS {
            let (mut overtaken, mut went_on) = (0, 0);
            for at in (0..).step_by(sized(5, 1)) {
                let sim = left.after_kill(Moment { event: left.events(), tear: None });
                let disk: Arc<dyn Disk> = Arc::new(sim.clone());
                let writer = Arc::new(Mutex::new(Some(Writer::open(&disk, options()))));
                let reader = Reader::from_snapshot(&disk);
                let striking = (writer.clone(), sim.clone());
                let interrupted = Arc::new(InterruptedDisk::new(&sim, at, move || {
                    strike(&mut striking.0.lock().unwrap(), &striking.1);
                }));
                // The next read finds batches that were written after the last read.
                let outcome = follow(reader, &(interrupted.clone() as Arc<dyn Disk>))
                    .and_then(|mut reader| reader.catch_up().map(|_| reader));
                if interrupted.reads() <= at {
                    assert!(outcome.is_ok(), "{doing}, with a writer at rest");
                    break;
                }
                let outcome = outcome.and_then(|mut reader| reader.catch_up().map(|_| reader));
                let lsn = writer.lock().unwrap().as_ref().expect("it is open").store.lsn();
                match outcome {
                    Ok(reader) => {
                        assert_eq!(reader.replica.lsn(), lsn, "{doing}, {what} before read {at}");
                        went_on += 1;
                    }
                    Err(Error::Overtaken { .. }) => {
                        assert_eq!(Reader::from_snapshot(&disk).catch_up().unwrap(), lsn);
                        overtaken += 1;
                    }
                    Err(error) => panic!("it {doing}, the writer {what} before read {at}: {error}"),
                }
            }
            println!("{doing}, {what}: {went_on} went on, {overtaken} were overtaken");
            (all_overtaken, all_went_on) = (all_overtaken + overtaken, all_went_on + went_on);
        }
    }
    // The test would prove nothing if the actions changed nothing, or if no follower continued after them.
    let enough = sized(20, 200);
    assert!(all_overtaken > enough && all_went_on > enough, "{all_overtaken} {all_went_on}");
}

/// A power cut may remove the segment after a follower's own segment but not that segment itself. Neither
/// segment is needed any more. The follower gets an error immediately, even while a writer frees space.
#[test]
fn removed_segment_after_position_is_reported() {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options().retention(Retention::new().snapshots_kept(4)));
    writer.commit(12);
    writer.store.snapshot().unwrap();
    writer.commit(1);
    let mut reader = Reader::from_snapshot(&disk);
    reader.catch_up().unwrap();
    // A segment that was prepared but not used yet.
    let names = disk.list(Folder::Log).unwrap();
    let segments = names.iter().filter_map(|name| FileName::parse(Folder::Log, name));
    let ahead = segments.filter(|file| matches!(file, FileName::Segment(_))).max().unwrap();
    for _ in 0..3 {
        writer.commit(12);
        writer.store.snapshot().unwrap();
    }
    writer.store.close().unwrap();
    disk.remove(ahead).unwrap();
    for at in 0.. {
        let sim = sim.after_kill(Moment { event: sim.events(), tear: None });
        let striking = sim.clone();
        let interrupted = Arc::new(InterruptedDisk::new(&sim, at, move || {
            Disk::create(&striking, FileName::Spare(99)).unwrap();
        }));
        let disk: Arc<dyn Disk> = interrupted.clone();
        let mut follower = Follower::open_on(disk, FollowFrom::Position(reader.follower.position())).unwrap();
        let end = loop {
            match follower.next(Duration::ZERO) {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        assert!(matches!(end, Err(Error::Overtaken { .. })), "a name came before read {at}: {end:?}");
        if interrupted.reads() <= at {
            assert!(at > 20, "{at} reads are no more than a beginning");
            return;
        }
    }
}
