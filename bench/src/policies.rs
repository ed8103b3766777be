//! Eviction policies, and their hits over a trace without a store.

use std::collections::HashSet;

use clap::ValueEnum;
use remanent::PageId;
use remanent::tiers::{EvictionPolicy, Lru, S3Fifo, Tiers};

/// An eviction policy of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The least recently used block is evicted first
    Lru,
    /// Blocks that were used once are evicted before blocks that were used again
    #[value(name = "s3-fifo")]
    S3Fifo,
}

impl Policy {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::S3Fifo => "s3-fifo",
        }
    }

    /// Sets the policy of `tiers`.
    pub fn of(self, tiers: Tiers) -> Tiers {
        match self {
            Policy::Lru => tiers.lru(),
            Policy::S3Fifo => tiers.policy(|_| Box::<S3Fifo>::default()),
        }
    }

    /// Returns the share of repeated requests for a block that find it in a list of `room` blocks.
    pub fn list_hit_share(self, room: usize, requests: &[Vec<u64>]) -> f64 {
        let mut policy: Box<dyn EvictionPolicy> = match self {
            Policy::Lru => Box::<Lru>::default(),
            Policy::S3Fifo => Box::<S3Fifo>::default(),
        };
        let (mut there, mut known) = (HashSet::new(), HashSet::new());
        let (mut hits, mut requested) = (0_u64, 0_u64);
        for page in requests.iter().flatten().map(|id| PageId(*id)) {
            requested += u64::from(!known.insert(page));
            if there.contains(&page) {
                hits += 1;
                policy.used(page);
                continue;
            }
            if there.len() >= room
                && let Some(victim) = policy.victim()
            {
                there.remove(&victim);
            }
            there.insert(page);
            policy.arrived(page, 1);
        }
        share(hits, requested)
    }
}

/// Returns `of / all`, or 0 if `all` is 0.
pub fn share(of: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { of as f64 / all as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unbounded_list_hits_every_repeat() {
        let requests = [vec![1, 2, 3], vec![1, 2, 4], vec![5, 1]];
        for policy in [Policy::Lru, Policy::S3Fifo] {
            assert_eq!(policy.list_hit_share(5, &requests), 1.0);
            assert_eq!(policy.list_hit_share(5, &[]), 0.0);
        }
        // The trace 1 2 3 1 2 3: each block left just before it is requested again.
        assert_eq!(Policy::Lru.list_hit_share(2, &[vec![1, 2, 3], vec![1, 2, 3]]), 0.0);
        assert_eq!(Policy::Lru.list_hit_share(2, &requests[..2]), 0.0);
        // The second 1 and 2 are found; the third 1 is not, because it was evicted for 5.
        assert_eq!(Policy::Lru.list_hit_share(3, &requests), 2.0 / 3.0);
    }
}
