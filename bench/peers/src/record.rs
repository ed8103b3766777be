//! The records that are written to every store, and their comparison with the records that are read.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A record: a key and a value.
pub type Record = (Vec<u8>, Vec<u8>);

/// The number of records.
pub const COUNT: u64 = 50;
/// The length of a record in bytes.
const LEN: u64 = 200;

/// Returns the bytes of record `number`. Any two records differ in each word of eight bytes.
pub fn bytes(number: u64) -> Vec<u8> {
    (0..LEN / 8).flat_map(|word| mix(number << 32 | word).to_le_bytes()).collect()
}

/// Returns the SplitMix64 hash of a number (Steele, Lea and Flood).
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The numbers of correct and wrong records among those that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Number of correct records.
    pub right: u64,
    /// Number of records that were never written.
    pub wrong: u64,
}

/// Compares the records that were read with the written ones, by key.
pub fn compare(found: &[Record]) -> Comparison {
    let is_right = |(key, value): &&Record| {
        let number = <[u8; 8]>::try_from(&key[..]).map(u64::from_be_bytes);
        number.is_ok_and(|number| number < COUNT && *value == bytes(number))
    };
    let (right, wrong): (Vec<_>, Vec<_>) = found.iter().partition(is_right);
    // Count a repeated record once, so that it does not replace a missing record.
    let right: BTreeSet<_> = right.into_iter().collect();
    Comparison { right: right.len() as u64, wrong: wrong.len() as u64 }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} right, {} wrong", self.right, self.wrong)
    }
}

impl FromStr for Comparison {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let refuse = || format!("a child said {line:?}");
        let (right, wrong) = line
            .trim()
            .strip_suffix(" wrong")
            .and_then(|rest| rest.split_once(" right, "))
            .ok_or_else(refuse)?;
        let number = |text: &str| text.parse().map_err(|_| refuse());
        Ok(Self { right: number(right)?, wrong: number(wrong)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_value_or_key_is_wrong() {
        let mut found: Vec<_> = (0..COUNT).map(|n| (n.to_be_bytes().to_vec(), bytes(n))).collect();
        assert_eq!(compare(&found), Comparison { right: COUNT, wrong: 0 });
        found[3].1[7] ^= 1;
        found[4].0[0] ^= 1;
        found[9] = found[8].clone();
        assert_eq!(compare(&found), Comparison { right: COUNT - 3, wrong: 2 });
        assert_eq!(compare(&found).to_string().parse(), Ok(compare(&found)));
    }
}
