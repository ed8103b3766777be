//! Digests of long ranges, computed from the digests of their chunks.

use super::digests::digest;
use super::{DIGEST_CHUNK_LEN, DIGEST_LEN, Digest};
use crate::base::allocation::make_room;
use crate::error::Result;

/// Returns the digest of a range, computed from the digests of its chunks. If there is one chunk, returns its digest.
/// Otherwise, returns the digest of all chunk digests as one range. Callers must compare the lengths of ranges too,
/// because ranges of different lengths may have the same digest.
///
/// # Errors
/// `OutOfMemory`.
pub(crate) fn digest_of_chunks(chunks: &[Digest], key: &[u8]) -> Result<Digest> {
    match chunks {
        [] => Ok(digest(&[], key)),
        [only] => Ok(*only),
        _ => digest_of_bytes(chunks.as_flattened(), key),
    }
}

/// Returns the digest of bytes in host memory, as [`digest_of_chunks`] defines it.
///
/// # Errors
/// `OutOfMemory`.
pub(crate) fn digest_of_bytes(bytes: &[u8], key: &[u8]) -> Result<Digest> {
    let mut chunks = Vec::new();
    make_room(&mut chunks, bytes.len() / DIGEST_CHUNK_LEN as usize + 1)?;
    chunks.extend(bytes.chunks(DIGEST_CHUNK_LEN as usize).map(|chunk| digest(chunk, key)));
    digest_of_chunks(&chunks, key)
}

const _: () = assert!(DIGEST_CHUNK_LEN as usize > DIGEST_LEN, "each level is shorter than the last");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::digest_key;

    #[test]
    fn digest_of_long_range_depends_on_every_chunk() {
        let key = digest_key(&std::array::from_fn(|at| (7 * at + 3) as u8)).unwrap();
        // Three levels: more than 4096 chunks.
        let mut bytes = vec![0; (DIGEST_CHUNK_LEN as usize / DIGEST_LEN + 3) * DIGEST_CHUNK_LEN as usize];
        let before = digest_of_bytes(&bytes, &key).unwrap();
        assert_eq!(digest_of_bytes(&bytes, &key).unwrap(), before);
        let last = bytes.len() - 1;
        for at in [0, DIGEST_CHUNK_LEN as usize, last / 2, last] {
            bytes[at] = 1;
            assert_ne!(digest_of_bytes(&bytes, &key).unwrap(), before, "{at}");
            bytes[at] = 0;
        }
        let chunk = digest(&bytes[..10], &key);
        assert_eq!(digest_of_bytes(&bytes[..10], &key).unwrap(), chunk);
        assert_eq!(digest_of_chunks(&[], &key).unwrap(), digest(&[], &key));
    }
}
