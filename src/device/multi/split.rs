//! Translation of a list for several devices into steps. Each step runs on one device or copies bytes from one device
//! to another.

use super::DeviceAddress;
use crate::device::spans::{overlap, staged_spans};
use crate::device::{
    Command, DIGEST_LEN, IndexList, Payload, Piece, Selection, Span, StagingSpan, digest_count,
};
use crate::error::Result;

/// A range of the page memory of one part.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartSpan {
    pub part: usize,
    pub span: Span,
}

/// A step of a list. Consecutive steps of different parts run concurrently.
#[derive(Debug)]
pub(super) enum SplitStep {
    /// Runs a command on one part. The command's spans use the part's own ids; its staging uses the list's indices.
    Run(usize, Command),
    /// Waits until all bytes written to staging so far have arrived, because the next step reads them.
    Settle,
    /// Copies bytes from one part to another.
    Across { source: PartSpan, target: PartSpan },
}

/// Translates the commands of a list into steps.
pub(super) struct SplitPlanner<F, A> {
    /// A function that returns the part that contains an allocation, and the part's own id for it.
    pub address_of: F,
    /// A function that allocates scratch memory on one of the devices, which is freed when the command list ends.
    pub aside: A,
    pub steps: Vec<SplitStep>,
    /// Spans of staging written since the last [`SplitStep::Settle`], each with the part that wrote it. The part is
    /// `None` if its list has ended.
    pub written: Vec<(Option<usize>, StagingSpan)>,
}

impl<F: Fn(Span) -> DeviceAddress, A: FnMut(usize, u64) -> Result<Span>> SplitPlanner<F, A> {
    pub fn command(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Upload { source, target } => {
                let PartSpan { part, span } = self.local(target);
                self.run(part, Command::Upload { source, target: span });
            }
            Command::Download { source, target } => {
                let PartSpan { part, span } = self.local(source);
                self.run(part, Command::Download { source: span, target });
            }
            Command::Fill { target, pattern, width } => {
                let PartSpan { part, span } = self.local(target);
                self.run(part, Command::Fill { target: span, pattern, width });
            }
            Command::Apply { pieces } => {
                for piece in pieces {
                    self.apply(piece)?;
                }
            }
            Command::Copy { source, target } => self.copy(self.local(source), self.local(target)),
            Command::Gather { sources, target } => self.gather(sources, self.local(target)),
            Command::Scatter { source, targets } => self.scatter(self.local(source), targets),
            Command::Diff { left, right, width, target } => {
                let target = self.local(target);
                let (left, right) =
                    (self.local_span(target.part, left)?, self.local_span(target.part, right)?);
                self.run(target.part, Command::Diff { left, right, width, target: target.span });
            }
            Command::Select { bitmaps, target } => self.select(bitmaps, PendingWords(target))?,
            Command::Crc { sources, target } => self.crc(sources, PendingWords(target)),
            Command::Digest { sources, key, target } => self.digest(sources, key, target)?,
            Command::Pick { source, width, indices, target } => {
                let target = self.local(target);
                let source = self.local_span(target.part, source)?;
                self.run(target.part, Command::Pick { source, width, indices, target: target.span });
            }
            Command::Validate { lists, target } => self.validate(lists, PendingWords(target)),
        }
        Ok(())
    }

    /// Adds a command for the sources on the target's part, and a copy for each other source.
    fn gather(&mut self, sources: Vec<(Span, u64)>, target: PartSpan) {
        let mut near = Vec::new();
        for (source, offset) in sources {
            let source = self.local(source);
            if source.part == target.part {
                near.push((source.span, offset));
            } else {
                self.copy_across_parts(source, target.piece(offset, source.span.len));
            }
        }
        self.run(target.part, Command::Gather { sources: near, target: target.span });
    }

    /// Adds a command for the targets on the source's part, and a copy for each other target.
    fn scatter(&mut self, source: PartSpan, targets: Vec<(u64, Span)>) {
        let mut near = Vec::new();
        for (offset, target) in targets {
            let target = self.local(target);
            if source.part == target.part {
                near.push((offset, target.span));
            } else {
                self.copy_across_parts(source.piece(offset, target.span.len), target);
            }
        }
        self.run(source.part, Command::Scatter { source: source.span, targets: near });
    }

    /// Adds a command for each run of consecutive bitmaps whose indices are on one part.
    fn select(&mut self, bitmaps: Vec<Selection>, mut words: PendingWords) -> Result<()> {
        let mut local = Vec::with_capacity(bitmaps.len());
        for Selection { bits, indices } in bitmaps {
            let PartSpan { part, span } = self.local(indices);
            local.push((part, Selection { bits: self.local_span(part, bits)?, indices: span }));
        }
        for of_part in local.chunk_by(|one, next| one.0 == next.0) {
            let bitmaps = of_part.iter().map(|(_, bitmap)| *bitmap).collect();
            let target = words.next(of_part.len());
            self.run(of_part[0].0, Command::Select { bitmaps, target });
        }
        Ok(())
    }

    /// Adds a command for each run of consecutive sources on one part.
    fn crc(&mut self, sources: Vec<Span>, mut words: PendingWords) {
        let local: Vec<PartSpan> = sources.into_iter().map(|source| self.local(source)).collect();
        for of_part in local.chunk_by(|one, next| one.part == next.part) {
            let sources = of_part.iter().map(|source| source.span).collect();
            self.run(of_part[0].part, Command::Crc { sources, target: words.next(of_part.len()) });
        }
    }

    /// Adds a command for each run of consecutive sources on one part.
    fn digest(&mut self, sources: Vec<Span>, key: Span, mut target: StagingSpan) -> Result<()> {
        let local: Vec<PartSpan> = sources.into_iter().map(|source| self.local(source)).collect();
        for of_part in local.chunk_by(|one, next| one.part == next.part) {
            let sources: Vec<Span> = of_part.iter().map(|source| source.span).collect();
            let count: u64 = sources.iter().map(|source| digest_count(source.len)).sum();
            let digests = StagingSpan { len: DIGEST_LEN * count as usize, ..target };
            target.len = target.len.checked_sub(digests.len).expect("no more digests than room");
            target.offset += digests.len;
            let part = of_part[0].part;
            let key = self.local_span(part, key)?;
            self.run(part, Command::Digest { sources, key, target: digests });
        }
        Ok(())
    }

    /// Adds a command for each run of consecutive lists on one part.
    fn validate(&mut self, lists: Vec<IndexList>, mut words: PendingWords) {
        let local = |list: IndexList| (self.local(list.indices), list.bound);
        let local: Vec<(PartSpan, u64)> = lists.into_iter().map(local).collect();
        for of_part in local.chunk_by(|one, next| one.0.part == next.0.part) {
            let list =
                |(indices, bound): &(PartSpan, u64)| IndexList { indices: indices.span, bound: *bound };
            let lists = of_part.iter().map(list).collect();
            self.run(of_part[0].0.part, Command::Validate { lists, target: words.next(of_part.len()) });
        }
    }

    /// Adds a delta. Consecutive deltas of one part stay in one command, and so in one kernel launch.
    fn apply(&mut self, piece: Piece) -> Result<()> {
        let target = self.local(piece.target);
        let payload = match piece.payload {
            Payload::Device(span) => Payload::Device(self.local_span(target.part, span)?),
            staged @ Payload::Staging { .. } => staged,
        };
        let piece = Piece { target: target.span, payload, ..piece };
        let at_end = self.steps.last_mut().filter(|_| self.written.is_empty());
        if let Some(SplitStep::Run(part, Command::Apply { pieces })) = at_end
            && *part == target.part
        {
            pieces.push(piece);
        } else {
            self.run(target.part, Command::Apply { pieces: vec![piece] });
        }
        Ok(())
    }

    fn copy(&mut self, source: PartSpan, target: PartSpan) {
        if source.part == target.part {
            self.run(target.part, Command::Copy { source: source.span, target: target.span });
        } else {
            assert_eq!(source.span.len, target.span.len, "a copy between ranges of different lengths");
            self.copy_across_parts(source, target);
        }
    }

    fn copy_across_parts(&mut self, source: PartSpan, target: PartSpan) {
        self.steps.push(SplitStep::Across { source, target });
        // The next commands of each part form another list, which has its own staging.
        self.written.iter_mut().for_each(|(writer, _)| *writer = None);
    }

    /// Returns a span with the same bytes in memory of this part, after a copy if another part contains them.
    fn local_span(&mut self, part: usize, span: Span) -> Result<Span> {
        let source = self.local(span);
        if source.part == part {
            return Ok(source.span);
        }
        let span = (self.aside)(part, source.span.len)?;
        self.copy_across_parts(source, PartSpan { part, span });
        Ok(span)
    }

    fn run(&mut self, part: usize, command: Command) {
        let (read, written) = staged_spans(std::slice::from_ref(&command));
        let clashes = |span: &StagingSpan| {
            self.written.iter().any(|(writer, theirs)| *writer != Some(part) && overlap(*span, *theirs))
        };
        if read.iter().chain(&written).any(clashes) {
            self.steps.push(SplitStep::Settle);
            self.written.clear();
        }
        self.written.extend(written.into_iter().map(|span| (Some(part), span)));
        self.steps.push(SplitStep::Run(part, command));
    }

    fn local(&self, span: Span) -> PartSpan {
        let DeviceAddress { part, memory } = (self.address_of)(span);
        PartSpan { part, span: Span { memory, ..span } }
    }
}

impl PartSpan {
    /// Returns the sub-span of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If the sub-span exceeds the span.
    pub fn piece(self, offset: u64, len: u64) -> Self {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.span.len);
        assert!(within, "bytes {offset}..+{len} are not within {self:?}");
        Self { span: Span { offset: self.span.offset + offset, len, ..self.span }, ..self }
    }
}

/// Space in staging for four-byte words, from which commands obtain their ranges in order.
struct PendingWords(StagingSpan);

impl PendingWords {
    /// Returns the range for the next `count` words.
    ///
    /// # Panics
    /// If fewer words are left.
    fn next(&mut self, count: usize) -> StagingSpan {
        let words = StagingSpan { len: 4 * count, ..self.0 };
        self.0.len = self.0.len.checked_sub(words.len).expect("no more numbers than there is room for");
        self.0.offset += words.len;
        words
    }
}

/// Returns the fields of a command that contain an index into the list's staging.
pub(super) fn staging_indices(command: &mut Command) -> Vec<&mut usize> {
    match command {
        Command::Upload { source: span, .. }
        | Command::Download { target: span, .. }
        | Command::Select { target: span, .. }
        | Command::Crc { target: span, .. }
        | Command::Digest { target: span, .. }
        | Command::Pick { indices: span, .. }
        | Command::Validate { target: span, .. } => vec![&mut span.index],
        Command::Apply { pieces } => pieces
            .iter_mut()
            .filter_map(|piece| match &mut piece.payload {
                Payload::Staging { index, .. } => Some(index),
                Payload::Device(_) => None,
            })
            .collect(),
        Command::Copy { .. }
        | Command::Fill { .. }
        | Command::Diff { .. }
        | Command::Gather { .. }
        | Command::Scatter { .. } => Vec::new(),
    }
}
