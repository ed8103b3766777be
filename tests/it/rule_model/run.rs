//! One run of a process on the disk: recovery, then commits. There is a crash point before each step.

use super::disk::{Disk, Name};
use super::log::{self, Batch, Block, Frame, Incarnation, Kind, Point, Refused};
use super::rule::{Batchless, Newest, Order, Rule, Sync, Tail};

/// Number of blocks of a segment: its header and three frames, so that a few commits fill several segments.
const SEGMENT_BLOCKS: usize = 4;

/// The guarantees that were given to callers.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Promised {
    /// All batches that were written to the surviving log, in order.
    pub line: Vec<Batch>,
    /// The number of batches that a kill of the process must preserve.
    pub logged: usize,
    /// The number of batches that a power cut must preserve.
    pub durable: usize,
}

/// A step of a writer.
#[derive(Clone, Copy)]
pub enum Step {
    /// Commits a group of this number of batches that share a sync.
    Group(usize),
    /// Commits a batch whose sync fails, after which the process ends.
    FailedGroup,
    /// Writes and syncs a seal, as after a busy period.
    Seal,
}

/// A process, and the disk and the guarantees at each crash point.
pub struct Run {
    pub disk: Disk,
    pub promised: Promised,
    pub crashes: Vec<(Disk, Promised)>,
    /// Whether crash points are recorded.
    pub recording: bool,
    rule: Rule,
    number: u32,
}

/// The position at which the log continues.
pub struct Writer {
    incarnation: Incarnation,
    segment: u64,
    position: usize,
    len: usize,
    lsn: u64,
    durable: u64,
    chain: u64,
}

impl Run {
    /// Returns a process on this disk. `number` identifies the run, for which a real process uses a random
    /// number.
    pub fn new(disk: Disk, promised: Promised, rule: Rule, number: u32) -> Self {
        Self { disk, promised, crashes: Vec::new(), recording: true, rule, number }
    }

    /// Creates a store. Its first incarnation begins like every other one, but has no predecessor.
    pub fn create(rule: Rule) -> (Self, Writer) {
        let mut run = Self::new(Disk::default(), Promised::default(), Rule { left_out: None, ..rule }, 0);
        let incarnation = Incarnation { number: 1, random: 0 };
        let writer = run.build_opening(incarnation, 1, Point::default(), 0, &[]);
        run.make_segment(2, incarnation, Sync::NextFile, Sync::NextFolder);
        run.rename(Name::Temporary(0), Name::Segment(1));
        run.sync_folder(Sync::RenameFolder);
        run.crashes.clear();
        run.rule = rule;
        (run, writer)
    }

    /// Executes the steps of I5 and I6. Only after the last step may a batch be appended or acknowledged.
    pub fn recover(&mut self) -> Result<Writer, Refused> {
        // 1. Make names durable before they are used. Temporary files do not belong to the store.
        self.sync_folder(Sync::OpenFolder);
        let temporary = |(name, _)| matches!(name, Name::Temporary(_)).then_some(name);
        for name in self.disk.list().filter_map(temporary).collect::<Vec<_>>() {
            self.crash_point();
            self.disk.remove(name);
        }
        let log = log::read(&self.disk, self.rule)?;
        let incarnation = Incarnation { number: log.incarnation.number + 1, random: self.number };
        // An incarnation that accepted no batch is omitted. The new incarnation records the predecessor of
        // the omitted one as its own.
        let predecessor = match self.rule.tail {
            Tail::Copied if log.is_batchless => log.opening.0,
            Tail::Copied => log.proven,
            Tail::Trusted => log.accepted,
            Tail::SyncedInPlace => {
                log.read.iter().for_each(|&segment| self.disk.sync_file(Name::Segment(segment)));
                log.accepted
            }
        };
        let tail = &log.batches[usize::try_from(predecessor.lsn).unwrap()..];
        let tail = if log.is_batchless { &[] } else { tail };
        let opening = log.newest;
        let accepted = if log.is_batchless { log.opening.1 } else { log.accepted.lsn };

        // 2. Complete and sync the opening segment before it gets a name under which it can be read.
        let writer = self.build_opening(incarnation, opening, predecessor, accepted, tail);
        // 3. Create the segment after the opening before the opening has its name, because the opening
        //    contains frames (I8). 4. The rename is the commit point. Before it, the old incarnation is
        //    valid.
        if self.rule.order == Order::NextThenRename {
            self.make_segment(opening + 1, incarnation, Sync::NextFile, Sync::NextFolder);
            self.rename(Name::Temporary(0), Name::Segment(opening));
        } else {
            self.rename(Name::Temporary(0), Name::Segment(opening));
            self.make_segment(opening + 1, incarnation, Sync::NextFile, Sync::NextFolder);
        }
        // 5. Until this sync, a power cut may undo the rename and lose every frame appended after it.
        if self.rule.batchless == Batchless::RemovedEarly {
            self.remove_between(predecessor.segment, opening);
        }
        self.sync_folder(Sync::RenameFolder);
        self.crash_point();
        // 6. Segments between the predecessor's end and the opening belong to no incarnation on the line.
        self.remove_between(predecessor.segment, opening);

        let count = log.batches.len();
        self.promised = Promised { line: log.batches, logged: count, durable: count };
        Ok(writer)
    }

    pub fn work(&mut self, mut writer: Writer, steps: &[Step]) {
        for step in steps {
            let first = writer.segment;
            match *step {
                Step::Group(count) => (0..count).for_each(|_| self.put_batch(&mut writer)),
                Step::FailedGroup => self.put_batch(&mut writer),
                Step::Seal => self.put(&mut writer, Kind::Seal),
            }
            for segment in first..=writer.segment {
                self.crash_point();
                match step {
                    Step::FailedGroup => self.disk.fail_sync(Name::Segment(segment)),
                    _ => self.sync_file(Name::Segment(segment), Sync::Group),
                }
            }
            if matches!(step, Step::FailedGroup) {
                break;
            }
            writer.durable = writer.lsn;
            self.promised.durable = self.promised.line.len();
        }
        self.crash_point();
    }

    fn put_batch(&mut self, writer: &mut Writer) {
        writer.lsn += 1;
        let batch = (self.number, writer.lsn);
        self.promised.line.push(batch);
        self.put(writer, Kind::Batch(batch));
        self.promised.logged = self.promised.line.len();
    }

    /// Appends a frame. The header is written before the payload, so a crash can tear the frame.
    fn put(&mut self, writer: &mut Writer, kind: Kind) {
        if writer.position + 1 == writer.len {
            // I8: no frame is written to the next segment before the segment after it is durable.
            let next = writer.segment + 1;
            self.make_segment(next + 1, writer.incarnation, Sync::RollFile, Sync::RollFolder);
            (writer.segment, writer.position, writer.len) = (next, 0, SEGMENT_BLOCKS);
        }
        let frame = writer.frame(kind);
        for whole in [false, true] {
            self.crash_point();
            let block = Block::Frame(Frame { whole, ..frame });
            self.disk.write(Name::Segment(frame.segment), frame.position, block);
        }
    }

    fn build_opening(
        &mut self,
        incarnation: Incarnation,
        segment: u64,
        predecessor: Point,
        accepted: u64,
        tail: &[Batch],
    ) -> Writer {
        let name = Name::Temporary(0);
        let len = SEGMENT_BLOCKS.max(tail.len() + 2);
        let (lsn, chain) = (predecessor.lsn, predecessor.chain);
        let mut writer = Writer { incarnation, segment, position: 0, len, lsn, durable: lsn, chain };
        self.crash_point();
        self.disk.create(name, len);
        self.disk.write(name, 0, Block::Opening { segment, incarnation, predecessor, accepted });
        for &batch in tail {
            writer.lsn += 1;
            let frame = writer.frame(Kind::Batch(batch));
            self.disk.write(name, frame.position, Block::Frame(frame));
        }
        // The opening was synced before it got its name, so the mark of its seal is correct for every reader,
        // although the seal is written first.
        writer.lsn = accepted;
        writer.durable = accepted;
        let seal = writer.frame(Kind::Seal);
        self.disk.write(name, seal.position, Block::Frame(seal));
        self.crash_point();
        self.sync_file(name, Sync::OpeningFile);
        writer
    }

    fn make_segment(&mut self, segment: u64, maker: Incarnation, file: Sync, folder: Sync) {
        let name = Name::Temporary(1);
        let incarnation = (self.rule.newest == Newest::ByHeader).then_some(maker);
        self.crash_point();
        self.disk.create(name, SEGMENT_BLOCKS);
        self.disk.write(name, 0, Block::Ahead { segment, incarnation });
        self.crash_point();
        self.sync_file(name, file);
        self.rename(name, Name::Segment(segment));
        self.sync_folder(folder);
    }

    /// Removes the segments between two others, without a sync.
    fn remove_between(&mut self, last: u64, opening: u64) {
        let between = |(name, _)| matches!(name, Name::Segment(number) if last < number && number < opening);
        let names: Vec<Name> =
            self.disk.list().filter(|entry| between((entry.0, ()))).map(|entry| entry.0).collect();
        for name in names {
            self.crash_point();
            self.disk.remove(name);
        }
    }

    fn rename(&mut self, source: Name, target: Name) {
        self.crash_point();
        self.disk.rename(source, target);
    }

    fn sync_file(&mut self, name: Name, which: Sync) {
        if self.rule.left_out != Some(which) {
            self.disk.sync_file(name);
        }
    }

    fn sync_folder(&mut self, which: Sync) {
        self.crash_point();
        if self.rule.left_out != Some(which) {
            self.disk.sync_folder();
        }
    }

    fn crash_point(&mut self) {
        if self.recording {
            self.crashes.push((self.disk.clone(), self.promised.clone()));
        }
    }
}

impl Writer {
    fn frame(&mut self, kind: Kind) -> Frame {
        self.position += 1;
        let frame = Frame {
            incarnation: self.incarnation,
            segment: self.segment,
            position: self.position,
            lsn: self.lsn,
            durable: self.durable,
            chain_prev: self.chain,
            kind,
            whole: true,
        };
        self.chain = frame.chain();
        frame
    }
}
