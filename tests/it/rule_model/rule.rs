//! The rule, and wrong rules that the tests must detect.

/// The behavior of the writer and of recovery. [`Rule::RIGHT`] is the rule. A test can set each field to a
/// wrong value.
#[derive(Clone, Copy)]
pub struct Rule {
    pub newest: Newest,
    pub tail: Tail,
    pub order: Order,
    pub proven: Proven,
    pub batchless: Batchless,
    pub left_out: Option<Sync>,
}

/// Determines which incarnation is considered the newest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Newest {
    /// The incarnation of the highest segment that begins one or has a frame at its own position.
    ByEvidence,
    /// Wrong: the incarnation in the header of the highest segment. Prepared segments also contain one.
    ByHeader,
}

/// The treatment of batches that were read but that no mark proves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// They are copied into the opening segment.
    Copied,
    /// Wrong: they could be read, so they are assumed to be on the medium.
    Trusted,
    /// Wrong: they are synced in place. A sync after a failed sync succeeds and writes nothing.
    SyncedInPlace,
}

/// The order of the steps that begin the new incarnation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The next empty segment is created first, and then the opening segment is renamed.
    NextThenRename,
    /// Wrong: the steps are done in the reverse order.
    RenameThenNext,
}

/// The end of the part that a new incarnation records as proven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Proven {
    /// After the last batch that a mark covers.
    EndOfBatch,
    /// Wrong: after the last frame whose Lsn a mark covers. This may be a seal, which repeats the Lsn of an
    /// earlier batch.
    EndOfFrame,
}

/// The treatment of an incarnation that accepted no batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Batchless {
    /// Its successor replaces it on the line, and its segments are removed once that is durable.
    LeftOut,
    /// Wrong: its segments are removed while a power cut may still undo the rename of the successor's
    /// segment.
    RemovedEarly,
    /// Wrong: an incarnation that copied batches is treated as if it had none, because none is its own.
    WithCopies,
}

/// The syncs of the writer and of recovery.
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
