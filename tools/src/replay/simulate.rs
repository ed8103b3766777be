//! The state of a store after a replayed trace, computed without a store.
//!
//! Request *i*, counted from 0, is one batch. Its hash ids are processed in order. If the page exists, it is
//! a hit: the page becomes the most recently used one, and its first 64 bytes are written. Otherwise the page
//! is created as the most recently used one. After the last id the least recently used pages are deleted
//! until no more than `pages_max` are left. A page created in request *i* holds the words of SplitMix64
//! seeded with `hash_id ^ (i << 32)`; a hit in request *j* overwrites the first eight words with words of the
//! seed `hash_id ^ (j << 32)`. A page's bytes therefore follow from two numbers, and none are stored here.
//!
//! `replay` drives the store with the steps from this file; `replay --check` and the demo compare a store
//! with the pages that it expects.

use std::collections::{BTreeMap, HashMap};

/// Bytes of a page that a hit overwrites.
pub const HIT_LEN: usize = 64;

/// The parameters of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The length of every page, in bytes.
    pub page_len: usize,
    /// The maximum number of pages after a request.
    pub pages_max: usize,
}

impl Rule {
    /// Returns the rule, or an error if some request could not be replayed under it.
    pub fn check(self, longest: usize) -> Result<Self, String> {
        if self.page_len < HIT_LEN || !self.page_len.is_multiple_of(8) {
            return Err(format!("--page-len must be a multiple of 8 and at least {HIT_LEN}"));
        }
        if self.pages_max < longest {
            // Otherwise a request would evict one of its own pages.
            return Err(format!(
                "--pages-max {} is too small: the longest request names {longest} pages",
                self.pages_max
            ));
        }
        Ok(self)
    }
}

/// One step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The page is created with all its bytes.
    Create(u64),
    /// The page's first bytes are written.
    Hit(u64),
    /// The page is deleted.
    Evict(u64),
}

/// The expected state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The request that created it.
    pub created: u64,
    /// The last request that hit it.
    pub hit: Option<u64>,
    /// 1 for its creation, plus 1 for every later request that hit it.
    pub epoch: u64,
    /// Its position in the order of use.
    used: u64,
}

impl Expected {
    /// Returns the page's bytes.
    pub fn bytes(&self, hash_id: u64, page_len: usize) -> Vec<u8> {
        let mut bytes = stream(hash_id, self.created, page_len);
        if let Some(request) = self.hit {
            bytes[..HIT_LEN].copy_from_slice(&stream(hash_id, request, HIT_LEN));
        }
        bytes
    }
}

/// The expected pages after some request.
#[derive(Clone, Debug)]
pub struct Simulation {
    rule: Rule,
    requests: u64,
    pages: HashMap<u64, Expected>,
    /// Hash ids in the order of their last use.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
}

impl Simulation {
    /// Returns the state before the first request. The rule must have been checked.
    pub fn new(rule: Rule) -> Self {
        Self { rule, requests: 0, pages: HashMap::new(), by_use: BTreeMap::new(), uses: 0 }
    }

    /// Returns the parameters.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// Returns the number of the last request, which is the value of the root entry `request`; `None` before
    /// the first.
    pub fn last_request(&self) -> Option<u64> {
        self.requests.checked_sub(1)
    }

    /// Returns the number of the next request.
    pub fn next_request(&self) -> u64 {
        self.requests
    }

    /// Returns the existing pages by hash id.
    pub fn pages(&self) -> &HashMap<u64, Expected> {
        &self.pages
    }

    /// Processes the next request and returns its steps.
    pub fn request(&mut self, hash_ids: &[u64]) -> Vec<Step> {
        let request = self.requests;
        self.requests += 1;
        let mut steps: Vec<Step> = hash_ids.iter().map(|&hash_id| self.touch(hash_id, request)).collect();
        while self.pages.len() > self.rule.pages_max {
            let (_, hash_id) = self.by_use.pop_first().expect("every page has a time of its last use");
            let gone = self.pages.remove(&hash_id).expect("every time of use is a page's");
            assert!(gone.hit.unwrap_or(gone.created) < request, "the rule keeps a request's own pages");
            steps.push(Step::Evict(hash_id));
        }
        steps
    }

    /// Makes a page the most recently used one, and returns whether it existed.
    fn touch(&mut self, hash_id: u64, request: u64) -> Step {
        self.uses += 1;
        self.by_use.insert(self.uses, hash_id);
        let Some(page) = self.pages.get_mut(&hash_id) else {
            let page = Expected { created: request, hit: None, epoch: 1, used: self.uses };
            self.pages.insert(hash_id, page);
            return Step::Create(hash_id);
        };
        self.by_use.remove(&page.used);
        page.used = self.uses;
        // An epoch counts batches, not writes: a second access in the same request adds nothing.
        if page.hit.unwrap_or(page.created) != request {
            page.epoch += 1;
        }
        page.hit = Some(request);
        Step::Hit(hash_id)
    }

    /// Sets the epoch of a page: restoring a snapshot raises the epochs of changed pages above all earlier
    /// ones.
    pub fn set_epoch(&mut self, hash_id: u64, epoch: u64) {
        if let Some(page) = self.pages.get_mut(&hash_id) {
            page.epoch = epoch;
        }
    }
}

/// Returns `len` bytes, a multiple of 8, of the stream for a page and a request.
pub fn stream(hash_id: u64, request: u64, len: usize) -> Vec<u8> {
    let mut words = SplitMix64::new(hash_id ^ (request << 32));
    let mut bytes = vec![0; len];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&words.next_word().to_le_bytes());
    }
    bytes
}

/// The generator of Steele, Lea and Flood (OOPSLA 2014): a counter and a mixer.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next word.
    pub fn next_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Returns a number below `bound`, which must not be 0. The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_word()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule in its simplest form: a list from least to most recently used, with all bytes stored.
    #[derive(Default)]
    struct Naive {
        pages: Vec<(u64, u64, Vec<u8>)>,
        request: u64,
    }

    impl Naive {
        fn words(seed: u64, count: usize) -> Vec<u8> {
            let mut generator = SplitMix64::new(seed);
            (0..count).flat_map(|_| generator.next_word().to_le_bytes()).collect()
        }

        fn request(&mut self, rule: Rule, hash_ids: &[u64]) {
            let mut touched = Vec::new();
            for &hash_id in hash_ids {
                let seed = hash_id ^ (self.request << 32);
                let mut page = match self.pages.iter().position(|page| page.0 == hash_id) {
                    Some(index) => {
                        let mut page = self.pages.remove(index);
                        page.2[..64].copy_from_slice(&Self::words(seed, 8));
                        page
                    }
                    None => (hash_id, 0, Self::words(seed, rule.page_len / 8)),
                };
                if !touched.contains(&hash_id) {
                    touched.push(hash_id);
                    page.1 += 1;
                }
                self.pages.push(page);
            }
            while self.pages.len() > rule.pages_max {
                self.pages.remove(0);
            }
            self.request += 1;
        }
    }

    fn rule(page_len: usize, pages_max: usize) -> Rule {
        Rule { page_len, pages_max }
    }

    #[test]
    fn generator_matches_published_values() {
        let mut zero = SplitMix64::new(0);
        assert_eq!(zero.next_word(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(zero.next_word(), 0x6e78_9e6a_a1b9_65f4);
        assert_eq!(SplitMix64::new(1_234_567).next_word(), 6_457_827_717_110_365_317);
    }

    #[test]
    fn random_traces_match_literal_rule() {
        for seed in 0..200 {
            let mut random = SplitMix64::new(seed);
            let rule = rule(64 + 8 * random.below(4) as usize, 6 + random.below(10) as usize);
            let (mut simulation, mut naive) = (Simulation::new(rule), Naive::default());
            for request in 0..60 {
                // Few distinct ids and long requests produce repeats within a request, evictions and
                // returning pages.
                let hash_ids: Vec<u64> = (0..random.below(7)).map(|_| random.below(24)).collect();
                simulation.request(&hash_ids);
                naive.request(rule, &hash_ids);
                assert_eq!(simulation.last_request(), Some(request), "seed {seed}");
                assert_eq!(simulation.pages().len(), naive.pages.len(), "seed {seed}, request {request}");
                for (hash_id, epoch, bytes) in &naive.pages {
                    let page = &simulation.pages()[hash_id];
                    assert_eq!(page.epoch, *epoch, "seed {seed}, request {request}, id {hash_id}");
                    assert_eq!(&page.bytes(*hash_id, rule.page_len), bytes, "seed {seed}, id {hash_id}");
                }
            }
        }
    }

    #[test]
    fn repeated_id_in_request_is_created_once_then_hit() {
        let mut simulation = Simulation::new(rule(64, 2));
        assert_eq!(simulation.request(&[5, 5]), [Step::Create(5), Step::Hit(5)]);
        assert_eq!(simulation.pages()[&5].epoch, 1);
        assert_eq!(simulation.request(&[5, 5]), [Step::Hit(5), Step::Hit(5)]);
        assert_eq!(simulation.pages()[&5].epoch, 2);
        assert_eq!(simulation.pages()[&5].bytes(5, 64), stream(5, 1, 64));
    }

    #[test]
    fn lru_page_is_evicted_and_recreated_as_new() {
        let mut simulation = Simulation::new(rule(128, 2));
        simulation.request(&[1, 2]);
        assert_eq!(simulation.request(&[1, 3]), [Step::Hit(1), Step::Create(3), Step::Evict(2)]);
        assert_eq!(simulation.request(&[2]), [Step::Create(2), Step::Evict(1)]);
        assert_eq!(simulation.pages()[&2].epoch, 1);
        assert_eq!(simulation.pages()[&2].bytes(2, 128), stream(2, 2, 128));
        assert_eq!(simulation.request(&[]), []);
        assert_eq!(simulation.last_request(), Some(3));
    }

    #[test]
    fn rule_violated_by_request_is_refused() {
        assert!(rule(64, 3).check(3).is_ok());
        assert!(rule(64, 2).check(3).unwrap_err().contains("3 pages"));
        assert!(rule(63, 3).check(3).is_err());
        assert!(rule(56, 3).check(3).is_err());
    }
}
