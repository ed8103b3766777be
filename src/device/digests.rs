//! Digests: sixteen bytes that show whether a chunk of memory changed, without a copy of its old contents.
//!
//! Digests are compared within one process only, with a key drawn at random for that process. A digest proves
//! nothing about bytes chosen with knowledge of the key, and is never stored. Bytes whose digest is unchanged
//! are not written, so two contents with the same digest would mean a lost change. A CRC is linear: two
//! flipped signs can cancel out in it, and a plain sum does not detect words that change places. For any two
//! contents of a chunk that were chosen without the key, the probability of equal digests is below 2^-100.
//!
//! # Definition
//!
//! A chunk has up to [`DIGEST_CHUNK_LEN`] bytes: vectors of two little-endian 64-bit words, the last one
//! padded with zeros. Vector number `v` is in row `v / 256` of column `v % 256`. There are two passes, `n` =
//! 0 and 1:
//!
//! 1. *NH* of each column, modulo 2^128: the sum over its rows `i` of `(a + K[2(i + n)]) × (b + K[2(i + n) +
//!    1])`, where `a` and `b` are the vector's words and the sums within the product are modulo 2^64.
//! 2. The number of each column in limbs of 60, 60 and 8 bits, as coefficients of a polynomial modulo p =
//!    2^61 − 1 that is evaluated at `R[n]`: limb `l` of column `t` belongs to the power 3t + 1 + l, and the
//!    chunk's length in bytes to the power 0.
//!
//! The digest is the two values below p, little-endian.
//!
//! # Probability of a collision
//!
//! Two different chunks of the same length differ in some column. For that column, one pass of NH gives equal
//! results with a probability of at most 2^-64, and both passes, whose keys are the same words shifted by
//! two, with at most 2^-128 (Black, Halevi, Krawczyk, Krovetz, Rogaway: *UMAC*, CRYPTO 1999, theorems 4.2 and
//! 4.3). If the columns differ, so do the polynomials, whose degree is at most 768. They have equal values at
//! no more than 768 of 2^61 points, that is, with a probability below 2^-51. `R[0]` and `R[1]` are
//! independent of each other and of `K`, so both values are equal with a probability below 2^-102 + 2 × 2^-64
//! × 2^-51 + 2^-128, which is below 2^-101. Chunks of different lengths differ in the constant term.

use super::{Span, StagingSpan};
use crate::base::allocation::make_room;
use crate::error::Result;

/// The length of a chunk, in bytes. Only the last chunk of a range may be shorter.
pub const DIGEST_CHUNK_LEN: u64 = 64 << 10;

/// The length of a chunk's digest, in bytes.
pub const DIGEST_LEN: usize = 16;

/// The length, in bytes, of a key in the format that devices read. A key consists of little-endian 64-bit words: the
/// words of `K`, and then, for each pass, the point `R[n]` and its power 3t + 1 for each column t.
pub const DIGEST_KEY_LEN: u64 = 8 * (WORDS + PASSES * (1 + COLUMNS)) as u64;

const COLUMNS: usize = 256;
const PASSES: usize = 2;
/// The number of vectors in a column.
const DEPTH: usize = DIGEST_CHUNK_LEN as usize / VECTOR_LEN / COLUMNS;
const WORDS: usize = 2 * DEPTH + 2 * (PASSES - 1);
const VECTOR_LEN: usize = 16;
const PRIME: u64 = (1 << 61) - 1;
const LIMB: u64 = (1 << 60) - 1;

/// The digest of a chunk.
pub type Digest = [u8; DIGEST_LEN];

/// The number of random bytes from which a key is derived.
pub const DIGEST_SEED_LEN: usize = 8 * (WORDS + PASSES);

/// Returns the number of digests for a range of `len` bytes.
#[must_use]
pub fn digest_count(len: u64) -> u64 {
    len.div_ceil(DIGEST_CHUNK_LEN)
}

/// Derives a key for digest commands from a random seed, in the format that devices read.
///
/// # Errors
/// `OutOfMemory`.
pub fn digest_key(seed: &[u8; DIGEST_SEED_LEN]) -> Result<Vec<u8>> {
    let mut key = Vec::new();
    make_room(&mut key, DIGEST_KEY_LEN as usize)?;
    let (words, points) = seed.split_at(8 * WORDS);
    key.extend_from_slice(words);
    for point in points.chunks_exact(8).map(word) {
        let point = folded(point & PRIME);
        key.extend_from_slice(&point.to_le_bytes());
        let cubed = times(times(point, point), point);
        let mut power = point;
        for _ in 0..COLUMNS {
            key.extend_from_slice(&power.to_le_bytes());
            power = times(power, cubed);
        }
    }
    Ok(key)
}

/// Computes the digest of a chunk as defined in the module documentation. Every device produces the same digest.
///
/// # Panics
/// If `chunk` exceeds [`DIGEST_CHUNK_LEN`] or the key has the wrong length.
pub(super) fn digest(chunk: &[u8], key: &[u8]) -> Digest {
    assert!(chunk.len() as u64 <= DIGEST_CHUNK_LEN, "a chunk of {} bytes", chunk.len());
    assert_eq!(key.len() as u64, DIGEST_KEY_LEN, "the length of a digest's key");
    let (words, passes) = key.split_at(8 * WORDS);
    let words: [u64; WORDS] = std::array::from_fn(|index| word(&words[8 * index..]));
    let mut sums = [[0_u128; COLUMNS]; PASSES];
    let mut rows = chunk.chunks(VECTOR_LEN * COLUMNS).enumerate();
    for (row, vectors) in &mut rows {
        let key_of = |pass: usize| [words[2 * (row + pass)], words[2 * (row + pass) + 1]];
        let (first, second) = (key_of(0), key_of(1));
        let (whole, rest) = vectors.as_chunks::<VECTOR_LEN>();
        let mut last = [0; VECTOR_LEN];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        let [firsts, seconds] = &mut sums;
        for ((vector, one), other) in whole.iter().chain(last).zip(firsts).zip(seconds) {
            let (left, right) = (word(vector), word(&vector[8..]));
            let product = |key: [u64; 2]| {
                u128::from(left.wrapping_add(key[0])) * u128::from(right.wrapping_add(key[1]))
            };
            *one = one.wrapping_add(product(first));
            *other = other.wrapping_add(product(second));
        }
    }
    let mut digest = [0; DIGEST_LEN];
    let passes = passes.chunks_exact(8 * (1 + COLUMNS));
    for ((sums, key), out) in sums.iter().zip(passes).zip(digest.chunks_exact_mut(8)) {
        let point = word(key);
        let powers = key[8..].chunks_exact(8).map(word);
        let columns = sums.iter().zip(powers).map(|(sum, power)| {
            let (low, high) = (*sum as u64, (*sum >> 64) as u64);
            let limbs = [low & LIMB, (low >> 60 | high << 4) & LIMB, high >> 56];
            let inner = folded(times(limbs[2], point) + limbs[1]);
            times(folded(times(inner, point) + limbs[0]), power)
        });
        let value = columns.fold(chunk.len() as u64, |sum, column| folded(sum + column));
        let value = folded(value);
        let value = if value >= PRIME { value - PRIME } else { value };
        out.copy_from_slice(&value.to_le_bytes());
    }
    digest
}

/// Checks that a digest command follows its documented rules. For implementations of devices.
///
/// # Panics
/// If the command violates a rule.
pub(super) fn check_digests(sources: &[Span], key: Span, target: StagingSpan) {
    let count: u64 = sources.iter().map(|source| digest_count(source.len)).sum();
    assert_eq!(target.len as u64, DIGEST_LEN as u64 * count, "the length of a digest command's target");
    assert!(target.offset.is_multiple_of(8), "digests off their boundary: {target:?}");
    assert!(key.len == DIGEST_KEY_LEN && key.offset.is_multiple_of(8), "a whole key: {key:?}");
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("whole words"))
}

/// Returns a number below 2^62 that is congruent to `number` modulo p.
fn folded(number: u64) -> u64 {
    (number & PRIME) + (number >> 61)
}

/// Returns the product modulo p, below 2^62. Both factors must be below 2^62.
fn times(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    folded((product as u64 & PRIME) + (product >> 61) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Vec<u8> {
        let mut state = u64::from(number) + 1;
        let seed = std::array::from_fn(|_| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 33) as u8
        });
        digest_key(&seed).unwrap()
    }

    #[test]
    fn digest_detects_changes_that_cancel_in_plain_sums() {
        let key = key(2);
        let of = |chunk: &[u8]| digest(chunk, &key);
        let chunk: Vec<u8> = (0..DIGEST_CHUNK_LEN).map(|at| (at / 7) as u8).collect();
        let len = chunk.len();
        let sound = of(&chunk);
        // Flips two float signs, for every width, at the same distance in several positions.
        for width in [2, 4, 8] {
            for at in [0, 16, 4096, len - 2 * width] {
                let mut flipped = chunk.clone();
                flipped[at + width - 1] ^= 0x80;
                flipped[at + 2 * width - 1] ^= 0x80;
                assert_ne!(of(&flipped), sound, "{width} bytes at {at}");
            }
        }
        // Swaps words, vectors and columns.
        for distance in [1, 2, 4, 8, 16, 4096, len / 2] {
            let mut swapped = chunk.clone();
            let (one, other) = (1000 / distance * distance, 1000 / distance * distance + distance);
            for at in 0..distance.min(len - other) {
                swapped.swap(one.min(len - distance) + at, other.min(len - distance) + at);
            }
            if swapped != chunk {
                assert_ne!(of(&swapped), sound, "{distance} apart");
            }
        }
        // Trailing zeros: only the lengths differ.
        let zeros = vec![0; len];
        let lens = [0, 1, 8, 15, 16, 17, 4096, len - 1, len];
        let mut found = lens.map(|len| of(&zeros[..len]));
        found.sort_unstable();
        assert!(found.windows(2).all(|pair| pair[0] != pair[1]));
        // Flips each single bit at the boundaries of vectors, rows and columns.
        let mut changed = chunk.clone();
        for at in [0, 7, 8, 15, 16, 4095, 4096, len - 16, len - 1] {
            for bit in 0..8 {
                changed[at] ^= 1 << bit;
                assert_ne!(of(&changed), sound, "bit {bit} of byte {at}");
                changed[at] ^= 1 << bit;
            }
        }
        assert_ne!(of(&chunk), digest(&chunk, &self::key(3)), "another key");
    }
}
