//! The rules of the protocol that a test can leave out.
//!
//! Without the feature `testing`, [`Rules`] has no fields and every rule is followed. With it, a simulation leaves out one
//! rule and must then detect a violation of a promise.

/// A rule of the protocol. The names are those of the executable model of the design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// After an uncertain create, the object is read back and its nonce compared (rule 2).
    Nonce,
    /// If a create reports an object and none exists, the create is repeated (rule 2).
    Reread,
    /// The body of a position does not change until the outcome of its create is known (rule 3).
    Frozen,
    /// A writer creates a fence before it uploads anything (rule 4).
    Fence,
    /// The archived end is in the history of the directory (rule 5).
    Lineage,
    /// The archived end is at or below the predecessor of the directory's next opening (rule 5).
    Pred,
    /// Only frames that are durable in the directory are uploaded (rule 7).
    Durable,
    /// Only frames under a mark that is itself durable are uploaded (rule 7).
    Mark,
    /// Data is stored before an object lists it (rule 9).
    IFirst,
    /// A manifest follows the run that holds its end (rule 10).
    Mend,
    /// Data counts as archived only if a kept object of the line lists it (rule 11).
    Dedup,
    /// A manifest that meets a foreign boundary checks its list again (rule 11).
    Recheck,
    /// Keys of data objects are never used twice (rule 12).
    UKeys,
    /// A boundary is a line object (rule 14).
    BLine,
    /// A boundary exists before anything is deleted (rule 14).
    BFirst,
    /// Boundaries can be found by GET (rule 15).
    Chain,
    /// A boundary of the line without its copy gets the copy from whoever meets it (rule 15).
    BComp,
    /// After each create in the line, the next boundary is looked for (rule 16).
    Check,
    /// A boundary lies at the run that holds the kept manifest's `redo` (rule 17).
    Redo,
    /// A sweep keeps the named snapshots of the boundary that it carries out (rule 17). The model lacks named
    /// snapshots.
    Names,
    /// Deletes lag one boundary behind (rule 19). The model lacks this rule: without it, the others still hold the promises,
    /// but a reader that stalls for one boundary is overtaken.
    Lag,
    /// A sweep carries out the boundaries that it names, never a later one (rule 19).
    Exact,
    /// Unlisted data is swept only if its term is below that of the newest fence (rule 20).
    Unnamed,
    /// A reader looks for a newer boundary at its end, and before it reports a missing object (rules 22 and 23).
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

/// The rules that a process follows: all of them, unless a test leaves out some.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    /// Bit set of the rules that are left out, by their position in [`Rule::ALL`].
    #[cfg(feature = "testing")]
    omitted: u32,
}

#[cfg(feature = "testing")]
impl Rules {
    /// Returns the rules without `rule`, to show that a test detects the omission.
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
