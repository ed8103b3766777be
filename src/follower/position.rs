//! The position of a follower in a store's history. A follower in another process can resume from a position, and
//! detects if the position's batch was lost in a crash.

use std::fmt;
use std::str::FromStr;

use remanent_format::{Incarnation, Lsn, Position};

/// The position of a follower after a batch. The incarnation and the chain hash identify the batch even if it was lost
/// in a crash and another batch now has its Lsn.
///
/// A position can be stored as text or as [`FollowerPosition::LEN`] bytes.
///
/// ```
/// use remanent::follow::FollowerPosition;
/// let position: FollowerPosition = "3-0badcafe:17:5eedf00d".parse()?;
/// assert_eq!(position.lsn.0, 17);
/// assert_eq!(position.to_string(), "3-0badcafe:17:5eedf00d");
/// assert_eq!(FollowerPosition::from_bytes(&position.to_bytes()), position);
/// # Ok::<(), remanent::follow::ParsePositionError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FollowerPosition {
    /// The incarnation in which the batch was read.
    pub incarnation: Incarnation,
    /// The Lsn of the batch.
    pub lsn: Lsn,
    /// The chain hash of the batch's frame.
    pub chain: u32,
}

/// The error for a text that is not a position of the form `<number>-<random>:<lsn>:<chain>`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a position is <incarnation>-<8 hex digits>:<lsn>:<8 hex digits>, not {text:?}")]
pub struct ParsePositionError {
    /// The text that was parsed.
    pub text: String,
}

impl FollowerPosition {
    /// The position before the first batch of any store.
    pub const BEGINNING: Self =
        Self { incarnation: Incarnation { number: 0, random: 0 }, lsn: Lsn(0), chain: 0 };

    /// The length of an encoded position in bytes.
    pub const LEN: usize = 20;

    /// Encodes the position as little-endian bytes, in the order number and random part of the incarnation, Lsn, chain
    /// hash.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&self.incarnation.number.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.incarnation.random.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.lsn.0.to_le_bytes());
        bytes[16..].copy_from_slice(&self.chain.to_le_bytes());
        bytes
    }

    /// Decodes a position. Any bytes are a valid position. Opening a follower checks whether the position is in the
    /// store's history.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let lsn = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        let incarnation = Incarnation { number: u32_at(0), random: u32_at(4) };
        Self { incarnation, lsn: Lsn(lsn), chain: u32_at(16) }
    }

    /// Returns the batch's position in the log, without the chain hash.
    #[must_use]
    pub fn batch(self) -> Position {
        Position { incarnation: self.incarnation, lsn: self.lsn }
    }
}

impl fmt::Display for FollowerPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{:08x}", self.incarnation, self.lsn, self.chain)
    }
}

impl FromStr for FollowerPosition {
    type Err = ParsePositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let position = || {
            let (incarnation, rest) = text.split_once(':')?;
            let (number, random) = incarnation.split_once('-')?;
            let (lsn, chain) = rest.split_once(':')?;
            Some(Self {
                incarnation: Incarnation {
                    number: number.parse().ok()?,
                    random: u32::from_str_radix(random, 16).ok()?,
                },
                lsn: Lsn(lsn.parse().ok()?),
                chain: u32::from_str_radix(chain, 16).ok()?,
            })
        };
        // Each position has exactly one valid text.
        position()
            .filter(|position| position.to_string() == text)
            .ok_or_else(|| ParsePositionError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_has_one_encoding() {
        let position = FollowerPosition {
            incarnation: Incarnation { number: 7, random: 0x0102_0304 },
            lsn: Lsn(u64::MAX),
            chain: 0xa,
        };
        let text = "7-01020304:18446744073709551615:0000000a";
        assert_eq!(position.to_string(), text);
        assert_eq!(text.parse(), Ok(position));
        assert_eq!(FollowerPosition::from_bytes(&position.to_bytes()), position);
        assert_eq!(FollowerPosition::BEGINNING.to_string().parse(), Ok(FollowerPosition::BEGINNING));
        for wrong in [
            "",
            "7",
            "7:1:0000000a",
            "7-1020304:1:0000000a",
            "7-01020304:+1:0000000a",
            "7-01020304:1:0000000A",
            "7-01020304:1:0000000a ",
            "7-01020304:18446744073709551616:0000000a",
        ] {
            let error = wrong.parse::<FollowerPosition>().unwrap_err();
            assert!(error.to_string().contains(&format!("{wrong:?}")), "{error}");
        }
    }
}
