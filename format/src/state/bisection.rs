//! Bisection, a binary search for the first bad version.

use std::collections::BTreeSet;

use crate::ids::Lsn;

/// The result of testing one version in a bisection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BisectVerdict {
    /// The version does not have the fault.
    Good,
    /// The version has the fault.
    Bad,
    /// The version cannot be tested.
    Skip,
}

/// A search for the first bad version between a good and a bad version.
///
/// ```
/// use remanent_format::Lsn;
/// use remanent_format::state::bisection::{BisectVerdict, Bisection};
/// let mut search = Bisection::new(Lsn(1), Lsn(100)).unwrap();
/// while let Some(lsn) = search.next() {
///     search.record(lsn, if lsn < Lsn(42) { BisectVerdict::Good } else { BisectVerdict::Bad });
/// }
/// assert_eq!((search.good(), search.bad()), (Lsn(41), Lsn(42)));
/// ```
#[derive(Clone, Debug)]
pub struct Bisection {
    good: u64,
    bad: u64,
    skipped: BTreeSet<u64>,
}

impl Bisection {
    /// Starts a search between a good and a bad version. Returns `None` unless the good version is older.
    #[must_use]
    pub fn new(good: Lsn, bad: Lsn) -> Option<Self> {
        (good < bad).then(|| Self { good: good.0, bad: bad.0, skipped: BTreeSet::new() })
    }

    /// Returns the version to test next, or `None` when the search is complete. Versions near the middle are tested
    /// first, and skipped versions are not tested.
    #[must_use]
    pub fn next(&self) -> Option<Lsn> {
        let middle = self.good + (self.bad - self.good) / 2;
        let untried = (self.good + 1..self.bad).filter(|lsn| !self.skipped.contains(lsn));
        untried.min_by_key(|lsn| lsn.abs_diff(middle)).map(Lsn)
    }

    /// Records the verdict on a version, which narrows the search.
    pub fn record(&mut self, lsn: Lsn, verdict: BisectVerdict) {
        match verdict {
            BisectVerdict::Good => self.good = lsn.0,
            BisectVerdict::Bad => self.bad = lsn.0,
            BisectVerdict::Skip => {
                self.skipped.insert(lsn.0);
            }
        }
    }

    /// Returns the newest version that is known to be good.
    #[must_use]
    pub fn good(&self) -> Lsn {
        Lsn(self.good)
    }

    /// Returns the oldest version that is known to be bad. When the search is complete, this version is the first bad
    /// version, unless skipped versions directly precede it.
    #[must_use]
    pub fn bad(&self) -> Lsn {
        Lsn(self.bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a search in which all versions from `first_bad` on are bad. Returns the number of tested versions, and the
    /// good and the bad version that were found.
    fn search(bad: u64, first_bad: u64, skipped: &[u64]) -> (usize, u64, u64) {
        let mut search = Bisection::new(Lsn(0), Lsn(bad)).unwrap();
        let mut tried = 0;
        while let Some(lsn) = search.next() {
            tried += 1;
            let verdict = match lsn.0 {
                lsn if skipped.contains(&lsn) => BisectVerdict::Skip,
                lsn if lsn < first_bad => BisectVerdict::Good,
                _ => BisectVerdict::Bad,
            };
            search.record(lsn, verdict);
        }
        (tried, search.good, search.bad)
    }

    #[test]
    fn bisection_finds_every_first_bad_version() {
        assert!(Bisection::new(Lsn(3), Lsn(3)).is_none());
        for first_bad in 1..=100 {
            let (tried, good, bad) = search(100, first_bad, &[]);
            assert_eq!((good, bad), (first_bad - 1, first_bad));
            assert!(tried <= 7, "{tried} tries");
            let skipped = [50, 51, 25, 99, 1];
            let (_, good, bad) = search(100, first_bad, &skipped);
            assert!(good < first_bad && first_bad <= bad);
            assert!((good + 1..bad).all(|lsn| skipped.contains(&lsn)), "{good} to {bad}");
        }
    }
}
