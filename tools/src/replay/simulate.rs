//! Computes the state of a store after a replayed trace, without a store.
//!
//! Request *i*, counted from 0, is one batch. Its hash ids are processed in order. If the page exists, the access is a
//! hit: the page becomes the most recently used page, and its first 64 bytes are written. Otherwise the page is created
//! as the most recently used page. After the last id, the least recently used pages are deleted until no more than
//! `pages_max` pages exist. A page created in request *i* contains the words of SplitMix64 with the seed `hash_id ^ (i
//! << 32)`. A hit in request *j* overwrites the first eight words with words of the seed `hash_id ^ (j << 32)`. Two
//! numbers therefore determine the bytes of a page, and this module stores no bytes.
//!
//! `replay` drives a store with these steps. `replay --check` and the demo compare a store with the expected pages.

use std::collections::{BTreeMap, HashMap};

/// Number of bytes that a hit overwrites.
pub const HIT_LEN: usize = 64;

/// The rule of a replay: the length of pages, and the maximum number of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Length of every page in bytes.
    pub page_len: usize,
    /// Maximum number of pages after a request.
    pub pages_max: usize,
}

impl Rule {
    /// Checks that every request can be replayed with the rule. `longest` is the largest number of pages that one
    /// request names.
    pub fn check(self, longest: usize) -> Result<Self, String> {
        if self.page_len < HIT_LEN || !self.page_len.is_multiple_of(8) {
            return Err(format!("--page-len must be a multiple of 8 and at least {HIT_LEN}"));
        }
        if self.pages_max < longest {
            // Otherwise a request could evict one of its own pages.
            return Err(format!(
                "--pages-max {} is too small: the longest request names {longest} pages",
                self.pages_max
            ));
        }
        Ok(self)
    }
}

/// A step of a request. The value of each variant is the hash id of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Create the page and write all its bytes.
    Create(u64),
    /// Write the first bytes of the page.
    Hit(u64),
    /// Delete the page.
    Evict(u64),
}

/// The expected state of a page: the requests that determine its bytes, and its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The request that created the page.
    pub created: u64,
    /// The last request that hit the page, or `None` if no request hit the page.
    pub hit: Option<u64>,
    /// The expected epoch: 1 at creation, and 1 more for every later request that hits the page.
    pub epoch: u64,
    /// Number of the last use of the page. All uses of pages are numbered in order.
    used: u64,
}

impl Expected {
    /// Returns the expected bytes of the page.
    pub fn bytes(&self, hash_id: u64, page_len: usize) -> Vec<u8> {
        let mut bytes = stream(hash_id, self.created, page_len);
        if let Some(request) = self.hit {
            bytes[..HIT_LEN].copy_from_slice(&stream(hash_id, request, HIT_LEN));
        }
        bytes
    }
}

/// The expected pages after the requests that were processed so far.
#[derive(Clone, Debug)]
pub struct Simulation {
    rule: Rule,
    requests: u64,
    pages: HashMap<u64, Expected>,
    /// Hash ids of the existing pages, keyed by the number of their last use.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
}

impl Simulation {
    /// Returns the state before the first request. The rule must have been checked.
    pub fn new(rule: Rule) -> Self {
        Self { rule, requests: 0, pages: HashMap::new(), by_use: BTreeMap::new(), uses: 0 }
    }

    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// Returns the number of the last request, or `None` before the first request. The root entry `request` contains
    /// this number.
    pub fn last_request(&self) -> Option<u64> {
        self.requests.checked_sub(1)
    }

    /// Returns the number of the next request.
    pub fn next_request(&self) -> u64 {
        self.requests
    }

    /// Returns the existing pages, keyed by hash id.
    pub fn pages(&self) -> &HashMap<u64, Expected> {
        &self.pages
    }

    /// Processes the next request and returns its steps.
    pub fn request(&mut self, hash_ids: &[u64]) -> Vec<Step> {
        let request = self.requests;
        self.requests += 1;
        let mut steps: Vec<Step> = hash_ids.iter().map(|&hash_id| self.touch(hash_id, request)).collect();
        while self.pages.len() > self.rule.pages_max {
            let (_, hash_id) = self.by_use.pop_first().expect("every page has a last use");
            let gone = self.pages.remove(&hash_id).expect("every use belongs to a page");
            assert!(gone.hit.unwrap_or(gone.created) < request, "a request never evicts its own pages");
            steps.push(Step::Evict(hash_id));
        }
        steps
    }

    /// Makes a page the most recently used page. Returns the step: a hit if the page exists, otherwise a create.
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
        // An epoch counts batches, so another access in the same request does not change it.
        if page.hit.unwrap_or(page.created) != request {
            page.epoch += 1;
        }
        page.hit = Some(request);
        Step::Hit(hash_id)
    }

    /// Sets the expected epoch of a page. Used after a restore, which raises the epochs of changed pages above all
    /// earlier epochs.
    pub fn set_epoch(&mut self, hash_id: u64, epoch: u64) {
        if let Some(page) = self.pages.get_mut(&hash_id) {
            page.epoch = epoch;
        }
    }
}

/// Returns the first `len` bytes that request `request` writes to a page. `len` must be a multiple of 8.
pub fn stream(hash_id: u64, request: u64, len: usize) -> Vec<u8> {
    let mut words = SplitMix64::new(hash_id ^ (request << 32));
    let mut bytes = vec![0; len];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&words.next_word().to_le_bytes());
    }
    bytes
}

/// The SplitMix64 random number generator of Steele, Lea and Flood (OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator with a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64-bit word.
    pub fn next_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Fills `bytes` with random words in little-endian order.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next_word().to_le_bytes()[..word.len()]);
        }
    }

    /// Returns a random number below `bound`, which must not be 0. The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_word()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The replay rule in its simplest form: a list of pages from least to most recently used, with all their bytes.
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
                // Few distinct ids and long requests cause repeated ids, evictions, and pages that are created again.
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
