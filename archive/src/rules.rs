//! The rules of the archive protocol.
//!
//! A name in italics is a variant of [`Rule`], a rule that a test can leave out. The documentation of the variant
//! states the failure that the rule prevents. The [crate documentation](crate) explains the terms.
//!
//! # Creating line objects
//!
//! 1. A writer creates one line object at a time. It uploads data objects concurrently, before the line object that
//!    lists them.
//! 2. Every object has a random nonce. If a create times out or reports that the object exists, the process reads the
//!    object back and compares the nonce (*nonce*). If the object does not exist, the process repeats the create
//!    (*reread*).
//! 3. The contents of an object do not change until the outcome of its create is known (*frozen*).
//! 4. A writer creates a fence before it uploads anything (*fence*). The fence contains the STORE file, the openings
//!    since the last archived batch, and a nonce that the directory has recorded durably.
//! 5. A directory may create a fence only if it has recorded the nonce of the newest fence, if it contains or contained
//!    every named snapshot of the archive, if the last archived batch is in its history (*lineage*), and if its next
//!    opening does not drop this batch (*pred*). A takeover waives the conditions on the nonce and on names, never
//!    those on batches. A restore, whose directory has no history yet, creates a fence first (a *claim*) and reads the
//!    state afterwards.
//! 6. If a writer finds another object at its position, it continues after a boundary, and is superseded after a fence.
//!    Any other object is damage.
//! 7. A run contains only frames that are durable (*durable*) and under a mark that is itself durable (*mark*).
//! 8. Only a user moves the end of the line back, with a fence that cuts the line.
//!
//! # Listing data
//!
//! 9. Data objects are stored before a line object lists them (*ifirst*).
//! 10. A manifest is appended after the run that contains its `end` (*mend*).
//! 11. A part counts as archived only if a kept object of the line lists it (*dedup*). An object that shares parts
//!     checks its list again after it finds the boundary of another process (*recheck*).
//! 12. The key of a data object is never used twice (*ukeys*).
//! 13. While files are uploaded, the directory keeps them from being removed and from being reused.
//!
//! # Deleting
//!
//! 14. A boundary is a line object (*bline*), created before anything is deleted (*bfirst*). A process without a fence
//!     may append one.
//! 15. Each boundary is copied to `bound/<k>`, so that the newest one is found by GET (*chain*). A process that finds a
//!     boundary without its copy creates the copy (*bcomp*).
//! 16. After each create on the line, and before it acknowledges a batch, a process checks whether the next boundary
//!     exists. If the boundary starts above the created position, the process is superseded (*check*).
//! 17. A boundary starts at the run that contains the `redo` of the kept manifest (*redo*). It repeats the newest fence
//!     below its start, and lists the named snapshots that are kept (*names*).
//! 18. A boundary is appended only over a manifest of which every part was read back, or was checked by the server.
//! 19. Creating a boundary deletes the objects that the boundary before it released (*lag*). A sweep applies the
//!     boundary that it was started for, not a newer one (*exact*).
//! 20. Data objects that no object lists are deleted only if their term is below that of the newest fence (*unnamed*).
//! 21. The engine archives a snapshot after at most 1,024 runs or 1 GiB of log or parts.
//!
//! # Reading
//!
//! 22. A reader finds the newest boundary first, then the end of the line from there, and then checks for a newer
//!     boundary. If one has passed the objects that were read, the reader starts again (*rcheck*). A restore, which
//!     creates its claim at the end, looks for a newer boundary after this create instead (*check*). Hints and listings
//!     save requests, but never decide.
//! 23. A missing object is reported as overtaken if a boundary has passed it, and as damage otherwise (*rcheck*). A
//!     failed request is neither.
//! 24. A restored directory has its own opening, with an incarnation above all others of the line. STORE is written
//!     last.
//! 25. A directory restored to the end keeps the store id. If the store is archived while it is open, the directory
//!     records the URL and cannot be opened without the archive.
//! 26. (Not used.)
//! 27. A read returns one state of the line. The chain hash is checked across objects.
//!
//! # Failures
//!
//! 28. If the log after the last archived batch was recycled, the archive continues with a manifest that follows a gap
//!     and that lists the frames from its `redo` to its `end` as data.
//! 29. An archive that is empty, or that ends below a fence which the directory has recorded, is rejected.
//! 30. An open probes the bucket: it must report an absent object as absent, and refuse a second create of one key.
//! 31. An open is refused if the bucket cannot be reached, unless the archive is optional.
//!
//! Without the feature `testing`, [`Rules`] has no fields, and every rule is followed. With the feature, a simulation
//! can leave out one rule, and must then detect a violation of a promise.

/// A rule that a test can leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// After a create of unknown outcome, the process reads the object back and compares its nonce (rule 2). Otherwise
    /// it acknowledges a batch although the object is another writer's.
    Nonce,
    /// If a create reports that the object exists but it cannot be read, the process repeats the create (rule 2).
    /// Otherwise a spurious conflict stops a healthy writer.
    Reread,
    /// The contents of a line object do not change until the outcome of its create is known (rule 3). Otherwise a retry
    /// with more frames finds the first attempt, and acknowledges batches that are not in it.
    Frozen,
    /// A writer creates a fence before it uploads anything (rule 4). Otherwise nothing decides which of two writers
    /// continues.
    Fence,
    /// The last archived batch is in the history of the directory (rule 5). Otherwise an old machine supersedes the
    /// healthy writer with frames that do not continue the line.
    Lineage,
    /// The last archived batch is at or below the predecessor of the directory's next opening (rule 5). Otherwise the
    /// opening of an older copy of the directory drops archived batches.
    Pred,
    /// Only frames that are durable in the directory are uploaded (rule 7). Otherwise the archive contains batches that
    /// the store loses in a power failure.
    Durable,
    /// Only frames under a mark that is itself durable are uploaded (rule 7). Otherwise the next opening may drop an
    /// archived batch.
    Mark,
    /// A part is stored before an object lists it (rule 9). Otherwise a crash leaves an object whose data does not
    /// exist.
    IFirst,
    /// A manifest follows the run that contains its end (rule 10). Otherwise a boundary over the manifest deletes the
    /// only state that can be restored.
    Mend,
    /// A part counts as archived only if a kept object of the line lists it (rule 11). Otherwise a manifest lists parts
    /// that were deleted.
    Dedup,
    /// A manifest checks its list again after the writer finds the boundary of another process (rule 11). Otherwise the
    /// manifest lists parts that the boundary released.
    Recheck,
    /// Keys of data objects are never used twice (rule 12). Otherwise a delayed delete removes a newer object.
    UKeys,
    /// A boundary is a line object (rule 14). Otherwise a stalled writer deletes parts that its successor lists.
    BLine,
    /// A boundary is created before anything is deleted (rule 14). Otherwise readers report the deleted objects as
    /// damage.
    BFirst,
    /// The newest boundary can be found by GET (rule 15). Otherwise a process in a hole does not detect that the line
    /// continues.
    Chain,
    /// A process that finds a boundary without its copy creates the copy (rule 15). Otherwise the number is used again
    /// for another boundary.
    BComp,
    /// After each create on the line, the process checks whether the next boundary exists (rule 16). Otherwise a
    /// stalled writer creates an object again at a deleted position, and acknowledges its batches.
    Check,
    /// A boundary starts at the run that contains the `redo` of the kept manifest (rule 17). Otherwise frames that the
    /// manifest needs are deleted.
    Redo,
    /// A sweep keeps the named snapshots that its boundary lists (rule 17). Otherwise they cannot be restored.
    Names,
    /// Deletes lag one boundary behind (rule 19). Otherwise a reader that stalls while one boundary is appended is
    /// overtaken. No promise depends on this rule.
    Lag,
    /// A sweep applies the boundary that it was started for, never a newer one (rule 19). Otherwise it deletes parts
    /// that are listed by a manifest which the process has not read.
    Exact,
    /// Unlisted data is deleted only if its term is below that of the newest fence (rule 20). Otherwise a prune deletes
    /// parts that a concurrent writer is about to list.
    Unnamed,
    /// A reader checks for a newer boundary at the end of the line, and before it reports a missing object (rules 22
    /// and 23). Otherwise a reader in a hole misses acknowledged batches.
    RCheck,
}

impl Rule {
    /// All rules.
    pub const ALL: [Rule; 24] = [
        Rule::Nonce,
        Rule::Reread,
        Rule::Frozen,
        Rule::Fence,
        Rule::Lineage,
        Rule::Pred,
        Rule::Durable,
        Rule::Mark,
        Rule::IFirst,
        Rule::Mend,
        Rule::Dedup,
        Rule::Recheck,
        Rule::UKeys,
        Rule::BLine,
        Rule::BFirst,
        Rule::Chain,
        Rule::BComp,
        Rule::Check,
        Rule::Redo,
        Rule::Names,
        Rule::Lag,
        Rule::Exact,
        Rule::Unnamed,
        Rule::RCheck,
    ];
}

/// The rules that a process follows: all rules, except those that a test leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    /// Bit set of the rules that are left out, by their position in [`Rule::ALL`].
    #[cfg(feature = "testing")]
    omitted: u32,
}

#[cfg(feature = "testing")]
impl Rules {
    /// Returns these rules without `rule`. A test that leaves out a rule must detect a violation of a promise.
    #[must_use]
    pub fn without(self, rule: Rule) -> Self {
        Self { omitted: self.omitted | 1 << rule as u32 }
    }

    /// Returns true if the rule is followed.
    #[inline]
    #[must_use]
    pub fn follow(self, rule: Rule) -> bool {
        self.omitted & 1 << rule as u32 == 0
    }
}

#[cfg(not(feature = "testing"))]
impl Rules {
    /// Returns true: every rule is followed.
    #[inline]
    #[must_use]
    pub const fn follow(self, _rule: Rule) -> bool {
        true
    }
}
