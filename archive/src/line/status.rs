//! Summarizes an archive with few requests (rule 22).

use remanent_format::StoreId;

use super::{Archive, Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Error, Result};
use crate::object::{BatchPoint, KeptSnapshot, Manifest};

/// A summary of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Id of the store.
    pub store: StoreId,
    /// Position of the newest fence, which is the term of the current writer.
    pub term: u64,
    /// The lowest position that is kept.
    pub start: u64,
    /// Position of the last object of the line.
    pub end: u64,
    /// The last archived batch.
    pub archived: BatchPoint,
    /// Number of the newest boundary, or 0 if there is none.
    pub boundary: u64,
    /// The newest manifest, or `None` if there is none.
    pub manifest: Option<ManifestStatus>,
    /// The named snapshots that the archive keeps, oldest first.
    pub named: Vec<KeptSnapshot>,
}

/// The newest manifest of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ManifestStatus {
    /// Position of the manifest.
    pub position: u64,
    /// The manifest.
    pub manifest: Manifest,
    /// Number of data objects that the manifest lists.
    pub data_objects: u64,
    /// Total length of their payloads in bytes.
    pub data_bytes: u64,
}

impl Status {
    /// Returns the number of line objects that a restore of the end reads.
    #[must_use]
    pub fn line_objects(&self) -> u64 {
        let first = self.manifest.as_ref().map_or(self.start, |newest| newest.manifest.start);
        (self.end + 1).saturating_sub(first)
    }

    /// Returns the number of line objects after the newest manifest: runs, fences, boundaries and catalogs.
    #[must_use]
    pub fn after_manifest(&self) -> u64 {
        self.end - self.manifest.as_ref().map_or(self.start - 1, |newest| newest.position)
    }
}

/// Reads a summary of an archive. The number of requests is logarithmic in the number of objects.
///
/// # Errors
/// Returns [`Error::Empty`] if the archive is empty, [`Error::Damaged`] with the key of an object that is missing or
/// invalid, and [`Error::Bucket`] if the bucket cannot be reached.
pub async fn status<B: Bucket, N: Nonces>(archive: Archive<'_, B, N>) -> Result<Status> {
    let mut line = Line::new(archive);
    line.find_to_read().await?;
    let view = &line.view;
    let store = view.store.filter(|_| view.next > 1).ok_or(Error::Empty)?;
    let manifest = view.manifest.map(|(position, manifest)| {
        let listed = view.listings.get(&position).map_or(&[][..], Vec::as_slice);
        let data_bytes = listed.iter().map(|entry| entry.part.len).sum();
        ManifestStatus { position, manifest, data_objects: listed.len() as u64, data_bytes }
    });
    Ok(Status {
        store,
        term: view.links.fence,
        start: view.start,
        end: view.next - 1,
        archived: view.archived,
        boundary: view.boundary_number.max(view.bound),
        manifest,
        named: view.catalog.clone(),
    })
}
