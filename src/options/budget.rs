//! Byte limits for places, checked before anything is allocated (I10).

use std::collections::BTreeMap;

use remanent_format::Place;

use crate::error::{Error, Result};

/// Memory limits in bytes, one per place. A place without a limit is unbounded, except [`Place::Disk`].
///
/// Pages on disk have no memory. The limit of [`Place::Disk`] applies to the host memory that contains the bytes that
/// batches wrote to these pages since their newest images. Default: 128 MiB. At half the limit, a snapshot is
/// triggered. At the full limit, a commit that writes to pages on disk waits for the snapshot, or fails if no thread
/// takes snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    limits: BTreeMap<Place, u64>,
}

impl Budget {
    /// Sets the limit of `place` to `bytes`.
    pub(crate) fn with(mut self, place: Place, bytes: u64) -> Self {
        self.limits.insert(place, bytes);
        self
    }

    /// Returns the limit of a place in bytes; `u64::MAX` if none is set.
    #[must_use]
    pub fn limit(&self, place: Place) -> u64 {
        self.limits.get(&place).copied().unwrap_or(u64::MAX)
    }

    /// Returns an error if the given pages (place and length in bytes) exceed the limit of any place (I10).
    pub(crate) fn check(&self, pages: impl IntoIterator<Item = (Place, u64)>) -> Result<()> {
        let mut wanted: BTreeMap<Place, u64> = BTreeMap::new();
        for (place, len) in pages {
            let sum = wanted.entry(place).or_default();
            *sum = sum.saturating_add(len);
        }
        for (place, requested) in wanted {
            let budget = self.limit(place);
            if requested > budget {
                return Err(Error::OverBudget { place, requested, available: budget, budget });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_limits_total_of_place() {
        let pages = |place, lens: [u64; 2]| lens.map(|len| (place, len));
        let budget = Budget::default().with(Place::Device(0), 100);
        assert!(budget.check(pages(Place::Device(0), [60, 40])).is_ok());
        assert!(budget.check(pages(Place::Host, [u64::MAX, u64::MAX])).is_ok());
        for (lens, sum) in [([60, 41], 101), ([u64::MAX, 2], u64::MAX)] {
            let refused = budget.check(pages(Place::Device(0), lens)).unwrap_err();
            assert!(
                matches!(refused, Error::OverBudget { requested, budget: 100, .. } if requested == sum),
                "{refused}"
            );
        }
    }
}
