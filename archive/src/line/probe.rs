//! Probes a bucket (rule 30).

use futures_util::future::join;
use remanent_format::StoreId;

use super::request::Body;
use super::{Archive, Line, Nonces};
use crate::bucket::{Bucket, Creation, FailureClass};
use crate::error::{Error, Result};
use crate::object::{ObjectKey, encode_probe};

/// Maximum number of attempts to send the second create.
const ATTEMPTS: u32 = 8;

/// Checks that the bucket reports an absent object as absent, and that it refuses a second create of one key and leaves
/// the first object unchanged. Uses a new key, and deletes the object afterwards.
///
/// The probe cannot detect a server that violates these conditions only under concurrency. Such a violation is later
/// reported as damage, because each line object contains the nonce of the object before it.
///
/// # Errors
/// Returns [`Error::NotSupported`] if a check fails, and [`Error::Bucket`] if the bucket cannot be reached.
pub async fn probe<B: Bucket, N: Nonces>(archive: Archive<'_, B, N>, store: StoreId) -> Result<()> {
    let line = Line::new(archive);
    let drawn = archive.nonces.draw().0;
    let number = u64::from_le_bytes(std::array::from_fn(|at| drawn[at])) >> 2;
    let key = ObjectKey::Probe(number);
    match line.get(key).await {
        Ok(None) => {}
        Ok(Some(_)) => {
            return Err(Error::NotSupported { reason: "it returns an object that was never created" });
        }
        // S3 reports an absent object as denied if the credentials lack the permission to list.
        Err(Error::Bucket { source, .. }) if source.class == FailureClass::Denied => {
            return Err(Error::NotSupported {
                reason: "an absent object is reported as denied; grant ListBucket",
            });
        }
        Err(error) => return Err(error),
    }
    let first = encode_probe(store, number, archive.nonces.draw());
    let nonce = crate::object::decode_header(&first).map_err(|defect| Error::invalid(key, defect))?.nonce;
    line.create(key, Body::Borrowed(&first), nonce).await?;
    let refused = second_is_refused(&line, key, &encode_probe(store, number, archive.nonces.draw())).await;
    let found = line.get(key).await;
    line.delete(key).await;
    if !refused? {
        return Err(Error::NotSupported { reason: "a second create of one key succeeds" });
    }
    if found?.is_none_or(|found| found != first) {
        return Err(Error::NotSupported { reason: "a refused create changed the object" });
    }
    Ok(())
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Probes the bucket and concurrently [finds](Line::find) the end of the line, before a writer opens.
    ///
    /// # Errors
    /// Returns the errors of [`probe`] and of [`find`](Line::find).
    pub async fn probe_and_find(&mut self, store: StoreId) -> Result<()> {
        let (probed, found) = join(probe(self.archive, store), self.find()).await;
        probed?;
        found
    }
}

/// Returns true if the bucket refuses to create an object that already exists.
async fn second_is_refused<B: Bucket, N: Nonces>(
    line: &Line<'_, B, N>,
    key: ObjectKey,
    bytes: &[u8],
) -> Result<bool> {
    let bucket = line.archive.bucket;
    let mut attempt = 1;
    loop {
        match bucket.create(key, bytes).await {
            Ok(creation) => return Ok(creation == Creation::Exists),
            Err(source) if source.class == FailureClass::NotSupported => {
                return Err(Error::NotSupported { reason: "it does not implement conditional creates" });
            }
            Err(source) if attempt == ATTEMPTS || !bucket.pause(attempt, &source).await => {
                return Err(Error::Bucket { action: "create", key, source });
            }
            Err(_) => attempt += 1,
        }
    }
}
