//! Followers of a writer that is killed and restarted repeatedly. Each delivered batch produces, byte for
//! byte, the workload's state at that Lsn, once and in order. The batches include restores and batches with
//! image files.
//!
//! The workers constantly take snapshots and recycle segments, so any follower may be overtaken. It then
//! restarts from the newest snapshot, as the error advises. A kill removes no batch that a follower may have
//! read, so no follower diverges, except one that continued with a fork.

use remanent::Error;
use remanent::batch::Op;
use remanent::follow::{FollowFrom, FollowedBatch, Follower, Replica};

use super::*;

const ROUNDS: usize = 8;

/// A follower with its pages and its position.
struct Seen {
    store: PathBuf,
    follower: Follower,
    replica: Replica,
    model: Model,
    batches: usize,
    restores: usize,
    images: usize,
    overtaken: usize,
}

impl Seen {
    fn new(ground: &Ground) -> Self {
        let store = ground.directory.join("store");
        let mut seen = Self {
            follower: Follower::open(&store, FollowFrom::Snapshot).unwrap(),
            store,
            replica: Replica::default(),
            model: Model::with_diary(&ground.directory.join("diary")),
            batches: 0,
            restores: 0,
            images: 0,
            overtaken: 0,
        };
        seen.go_on();
        seen
    }

    /// Replaces the follower with a new one at the same position, as if another process continued.
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

    /// Applies the next batch. Returns true if there was one.
    fn step(&mut self) -> bool {
        let applied = self.follower.next(Duration::ZERO).and_then(|batch| match batch {
            Some(batch) => self.replica.apply(&batch).map(|()| Some(self.count(&batch))),
            None => Ok(None),
        });
        match applied {
            Ok(Some(lsn)) => {
                assert_eq!(lsn, self.model.lsn.next(), "each batch once, in order");
                self.model.advance(lsn);
                self.check();
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.start_over(&error);
                true
            }
        }
    }

    fn count(&mut self, batch: &FollowedBatch) -> Lsn {
        self.batches += 1;
        self.restores += usize::from(batch.restored().is_some());
        let is_image = |op: &Op<'_>| matches!(op, Op::Image { .. });
        self.images += batch.operations().iter().filter(|op| is_image(op)).count();
        batch.lsn()
    }

    fn check(&self) {
        let at = format!("at {}", self.model.lsn);
        assert_eq!(self.replica.lsn(), self.model.lsn);
        let state = &self.model.state;
        assert!(
            self.replica.pages().eq(state.pages.values().map(|(info, _)| info.clone())),
            "another page table, {at}"
        );
        assert_eq!(**self.replica.root(), state.root, "{at}");
        for (info, bytes) in state.pages.values() {
            assert!(self.replica.bytes(info.page) == Some(bytes), "page {} differs, {at}", info.page);
        }
    }
}

#[test]
fn followers_see_every_batch_of_a_writer_that_is_killed() {
    for log_io in [None, Some(LogIo::Buffered)] {
        let mut ground = Ground::new(Manner { log_io, ..Manner::default() });
        let mut followers: Vec<Seen> = Vec::new();
        for round in 0..ROUNDS {
            let mut worker = ground.start_worker();
            worker.wait_until("opening", || ground.board.opened().is_some());
            if followers.is_empty() {
                // Start a follower that keeps running, one that resumes from its position in each round, and
                // a slow one.
                followers.extend((0..3).map(|_| Seen::new(&ground)));
            }
            let until = Lsn(ground.model.lsn.0 + 100 + ground.random.below(400));
            followers[1].go_on();
            let (quick, slow) = followers.split_at_mut(2);
            while ground.board.begun() < until {
                for seen in quick.iter_mut() {
                    seen.step();
                }
                worker.check();
            }
            slow[0].step();
            worker.kill();
            // All followers reach the state that the kill left, the slow one after the last round.
            ground.check_what_is_left("while followed");
            let arriving = if round + 1 == ROUNDS { 3 } else { 2 };
            for seen in &mut followers[..arriving] {
                while seen.step() {}
                assert_eq!(seen.replica.lsn(), ground.model.lsn);
            }
        }
        // The slow follower may have reached the state from a snapshot alone.
        assert!(followers[..2].iter().all(|seen| seen.batches > 0), "a follower that was handed nothing");
        for seen in &followers {
            assert!(seen.replica.lsn() == followers[0].replica.lsn());
        }
        assert!(followers[2].overtaken > 0, "the slow one was never overtaken");
        let [restores, images] = [|seen: &Seen| seen.restores, |seen: &Seen| seen.images]
            .map(|count| followers.iter().map(count).sum::<usize>());
        assert!(restores > 10 && images > 50, "{restores} restores, {images} images");
        check_fork(&ground.directory, &followers[0]);
        drop(followers);
        std::fs::remove_dir_all(&ground.directory).unwrap();
    }
}

/// A follower at the start of a fork can continue with either store. After that, it has diverged from the
/// other store.
fn check_fork(directory: &Path, seen: &Seen) {
    let fork = directory.join("fork");
    Store::open_read_only(&seen.store).unwrap().fork(&fork).unwrap();
    let position = seen.replica.position();
    let went_on = [&seen.store, &fork].map(|path| {
        let store = worker::options(None, path).open(path).unwrap();
        let mut batch = store.batch();
        batch.note("another batch of the same number");
        let lsn = store.commit(batch).unwrap().position.lsn;
        let mut follower = Follower::open(path, position.into()).unwrap();
        assert_eq!(follower.next(Duration::ZERO).unwrap().expect("it is logged").lsn(), lsn);
        follower.position()
    });
    assert_eq!(went_on[0].lsn, went_on[1].lsn);
    for (path, position) in [(&seen.store, went_on[1]), (&fork, went_on[0])] {
        let error = Follower::open(path, position.into()).map(drop).unwrap_err();
        assert!(matches!(error, Error::Diverged { .. }), "{error}");
    }
}
