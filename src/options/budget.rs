//! Byte limits a place, checked before anything is allocated (I10).

use std::collections::BTreeMap;

use remanent_format::Place;

use crate::error::{Error, Result};

/// Limits in bytes, one per place. A place that is not named is unlimited, but for [`Place::Disk`].
///
/// Pages on disk have no memory. The limit of [`Place::Disk`] is for the host memory that holds what batches
/// have written to such pages since their newest images: 128 MiB if it is not named. At half of it a snapshot
/// is due. At all of it a commit that writes to such pages waits for the snapshot; it is refused where no
/// thread takes snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    limits: BTreeMap<Place, u64>,
}

impl Budget {
    /// The budget with `bytes` as the limit of `place`.
    #[must_use]
    pub fn with(mut self, place: Place, bytes: u64) -> Self {
        self.limits.insert(place, bytes);
        self
    }

    /// The limit of a place in bytes; `u64::MAX` if it has none.
    #[must_use]
    pub fn limit(&self, place: Place) -> u64 {
        self.limits.get(&place).copied().unwrap_or(u64::MAX)
    }

    /// Refuses pages, each by its place and its length in bytes, that together take more than there may be
    /// (I10).
    pub(crate) fn check(&self, pages: impl IntoIterator<Item = (Place, u64)>) -> Result<()> {
        let mut wanted: BTreeMap<Place, u64> = BTreeMap::new();
        for (place, len) in pages {
            let sum = wanted.entry(place).or_default();
            *sum = sum.saturating_add(len);
        }
        for (place, asked) in wanted {
            let budget = self.limit(place);
            if asked > budget {
                return Err(Error::OverBudget { place, asked, available: budget, budget });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_holds_for_all_pages_of_a_place_together() {
        let pages = |place, lens: [u64; 2]| lens.map(|len| (place, len));
        let budget = Budget::default().with(Place::Device(0), 100);
        assert!(budget.check(pages(Place::Device(0), [60, 40])).is_ok());
        assert!(budget.check(pages(Place::Host, [u64::MAX, u64::MAX])).is_ok());
        for (lens, sum) in [([60, 41], 101), ([u64::MAX, 2], u64::MAX)] {
            let refused = budget.check(pages(Place::Device(0), lens)).unwrap_err();
            assert!(
                matches!(refused, Error::OverBudget { asked, budget: 100, .. } if asked == sum),
                "{refused}"
            );
        }
    }
}
