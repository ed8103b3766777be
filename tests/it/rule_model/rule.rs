//! The rule, and wrong rules that the tests must detect.

/// The behaviour of writer and recovery. [`Rule::RIGHT`] is the rule; a test can change each field to a wrong
/// value.
#[derive(Clone, Copy)]
pub struct Rule {
    pub newest: Newest,
    pub tail: Tail,
    pub order: Order,
    pub proven: Proven,
    pub batchless: Batchless,
    pub left_out: Option<Sync>,
}

/// Which incarnation is considered the newest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Newest {
    /// That of the highest segment that begins one or has a frame at its own position.
    ByEvidence,
    /// Wrong: prepared segments contain one too, and the highest segment decides.
    ByHeader,
}

/// What happens to batches that were read but that no mark proves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// They are copied into the opening segment.
    Copied,
    /// Wrong: they were readable, so they are assumed to be on the medium.
    Trusted,
    /// Wrong: they are synced in place. A sync after a failed one succeeds and writes nothing.
    SyncedInPlace,
}

/// The order of the steps that begin the new incarnation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// First the next empty segment is created, then the opening segment is renamed.
    NextThenRename,
    /// Wrong: in the reverse order.
    RenameThenNext,
}

/// The end of the part that a new incarnation records as proven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Proven {
    /// After the last batch covered by a mark.
    EndOfBatch,
    /// Wrong: after the last frame whose Lsn is covered by a mark, although a seal repeats an older Lsn.
    EndOfFrame,
}

/// What happens to an incarnation that accepted no batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Batchless {
    /// Its successor replaces it in the line, and its segments are removed when that is durable.
    LeftOut,
    /// Wrong: its segments are removed while a power cut may still undo the rename of the successor's
    /// segment.
    RemovedEarly,
    /// Wrong: one that copied batches is considered to have none, because none is its own.
    WithCopies,
}

/// Every sync of writer and recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Recovery: the folder, before its names are used.
    OpenFolder,
    /// Recovery: the opening segment, under its temporary name.
    OpeningFile,
    /// Recovery: the next empty segment, under its temporary name.
    NextFile,
    /// Recovery: the folder, after the next empty segment was renamed.
    NextFolder,
    /// Recovery: the folder, after the rename that begins the incarnation.
    RenameFolder,
    /// Next segment: the prepared segment, under its temporary name.
    RollFile,
    /// Next segment: the folder, after that segment was renamed.
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
