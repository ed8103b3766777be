//! Followers of a writer that is killed and started again, over and over: whatever they are handed is, byte for
//! byte, the workload's state at that Lsn, each batch once and in order.
//!
//! The workers snapshot and recycle without a pause, so any follower may be overtaken; then it starts over from
//! the newest snapshot, as it is told. A kill takes nothing that a follower may have read, so none ever diverges.

use remanent::{Error, FollowFrom, Follower, Replica};

use super::*;

const ROUNDS: usize = 12;

/// A follower with its pages, and how it came along.
struct Seen {
    store: PathBuf,
    follower: Follower,
    replica: Replica,
    model: Model,
    batches: usize,
    overtaken: usize,
}

impl Seen {
    fn new(store: &Path) -> Self {
        let mut seen = Self {
            store: store.to_owned(),
            follower: Follower::open(store, FollowFrom::Snapshot).unwrap(),
            replica: Replica::default(),
            model: Model::new(),
            batches: 0,
            overtaken: 0,
        };
        seen.go_on();
        seen
    }

    /// Another follower goes on from where this one was, as another process would.
    fn go_on(&mut self) {
        let text = self.replica.position().to_string();
        match Follower::open(&self.store, FollowFrom::Position(text.parse().unwrap())) {
            Ok(follower) => self.follower = follower,
            Err(error) => self.start_over(&error),
        }
    }

    fn start_over(&mut self, error: &Error) {
        let mut error = error.clone();
        while let Error::Overtaken { .. } = error {
            self.overtaken += 1;
            self.replica = Replica::from_snapshot(&self.store).unwrap();
            self.model.advance(self.replica.lsn());
            self.check();
            match Follower::open(&self.store, self.replica.position().into()) {
                Ok(follower) => {
                    self.follower = follower;
                    return;
                }
                Err(other) => error = other,
            }
        }
        panic!("{error}");
    }

    /// Takes a batch, if there is one; returns whether there was.
    fn step(&mut self) -> bool {
        let applied = self.follower.next(Duration::ZERO).and_then(|batch| match batch {
            Some(batch) => self.replica.apply(&batch).map(|()| Some(batch.lsn())),
            None => Ok(None),
        });
        match applied {
            Ok(Some(lsn)) => {
                assert_eq!(lsn, self.model.lsn.next(), "each batch once, in order");
                self.model.advance(lsn);
                self.check();
                self.batches += 1;
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.start_over(&error);
                true
            }
        }
    }

    fn check(&self) {
        let at = format!("at {}", self.model.lsn);
        assert_eq!(self.replica.lsn(), self.model.lsn);
        let infos = self.model.pages.values().map(|(info, _)| info);
        assert!(self.replica.pages().eq(infos), "another page table, {at}");
        assert_eq!(**self.replica.root(), self.model.root(), "{at}");
        for (info, bytes) in self.model.pages.values() {
            assert!(self.replica.bytes(info.page) == Some(bytes), "page {} differs, {at}", info.page);
        }
    }
}

#[test]
fn followers_see_every_batch_of_a_writer_that_is_killed() {
    for log_io in [None, Some(LogIo::Buffered)] {
        let mut ground = Ground::new(log_io);
        let store = ground.directory.join("store");
        let mut followers: Vec<Seen> = Vec::new();
        for round in 0..ROUNDS {
            ground.board.start_over();
            let mut worker = Worker::start(&ground.directory, log_io);
            worker.wait_until(|| ground.board.opened().is_some());
            if followers.is_empty() {
                // One that reads on, one that goes on from its position each round, and a slow one.
                followers.extend((0..3).map(|_| Seen::new(&store)));
            }
            let until = Lsn(ground.model.lsn.0 + 100 + ground.random.below(400));
            followers[1].go_on();
            let (quick, slow) = followers.split_at_mut(2);
            while ground.board.begun() < until {
                for seen in quick.iter_mut() {
                    seen.step();
                }
                worker.wait_until(|| true);
            }
            slow[0].step();
            worker.kill();
            // What the kill left is what they all arrive at, the slow one in the last round.
            ground.check_what_is_left(Phase::Commit);
            let arriving = if round + 1 == ROUNDS { 3 } else { 2 };
            for seen in &mut followers[..arriving] {
                while seen.step() {}
                assert_eq!(seen.replica.lsn(), ground.model.lsn);
            }
        }
        let slow = &followers[2];
        assert!(slow.overtaken > 0, "the slow one was never overtaken");
        assert!(followers.iter().all(|seen| seen.batches > 0), "a follower that was handed nothing");
        drop(followers);
        std::fs::remove_dir_all(&ground.directory).unwrap();
    }
}
