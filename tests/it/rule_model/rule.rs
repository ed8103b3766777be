//! The rule, and the wrong rules that the tests must catch.

/// The behaviour of the writer and of recovery. [`Rule::RIGHT`] is the rule; each field can be made wrong.
#[derive(Clone, Copy)]
pub struct Rule {
    pub newest: Newest,
    pub tail: Tail,
    pub order: Order,
    pub proven: Proven,
    pub batchless: Batchless,
    pub left_out: Option<Sync>,
}

/// The incarnation that is taken for the newest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Newest {
    /// That of the highest segment that opens one or holds a frame of its own position.
    ByEvidence,
    /// Wrong: segments made ahead name one too, and the highest name is believed.
    ByHeader,
}

/// The fate of the batches that were read but that no mark proves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// They are copied into the opening segment.
    Copied,
    /// Wrong: they were readable, so they are taken to be on the medium.
    Trusted,
    /// Wrong: they are synced where they lie. A sync after a failed one succeeds and writes nothing.
    SyncedInPlace,
}

/// The way in which the new incarnation takes its place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// First the next empty segment, then the rename.
    NextThenRename,
    /// Wrong: the other way round.
    RenameThenNext,
}

/// The end of the part that a new incarnation vouches for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Proven {
    /// After the last batch under a mark.
    EndOfBatch,
    /// Wrong: after the last frame whose Lsn is under a mark, although a seal repeats an older Lsn.
    EndOfFrame,
}

/// The fate of an incarnation that accepted no batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Batchless {
    /// Its successor takes its place on the line, and its segments go when that is durable.
    LeftOut,
    /// Wrong: its segments go while a power cut may still take the successor's name back.
    RemovedEarly,
    /// Wrong: one that copied batches is taken for one without any, because none is its own.
    WithCopies,
}

/// Every sync of the writer and of recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Recovery: the folder, before its names are believed.
    OpenFolder,
    /// Recovery: the opening segment, under its temporary name.
    OpeningFile,
    /// Recovery: the next empty segment, under its temporary name.
    NextFile,
    /// Recovery: the folder, once the next empty segment has its name.
    NextFolder,
    /// Recovery: the folder, after the rename that begins the incarnation.
    RenameFolder,
    /// Roll: the segment made ahead, under its temporary name.
    RollFile,
    /// Roll: the folder, once that segment has its name.
    RollFolder,
    /// Commit: the frames of a group.
    Group,
}

impl Rule {
    pub const RIGHT: Rule = Rule {
        newest: Newest::ByEvidence,
        tail: Tail::Copied,
        order: Order::NextThenRename,
        proven: Proven::EndOfBatch,
        batchless: Batchless::LeftOut,
        left_out: None,
    };

    pub fn without(sync: Sync) -> Rule {
        Rule { left_out: Some(sync), ..Rule::RIGHT }
    }
}
