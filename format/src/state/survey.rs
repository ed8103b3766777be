//! Surveys of a store directory. A survey contains the readable parts of STORE, the log, and the manifests.
//!
//! A [`Survey`] reads the files but does not decide whether the store can be opened. The `follow` module computes
//! states from a survey.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_limit};
use crate::ids::{Lsn, PageId, SnapshotId};
use crate::image::read::{CHECKED_AT_ONCE, read_range};
use crate::limits::CHAIN_LINKS_MAX;
use crate::log::LogMap;
use crate::manifest::{
    CopyHealth, Manifest, ManifestEntry, ManifestHeaderRaw, ManifestKind, check_link, merge, merged_entries,
};
use crate::names::{FileName, Folder, ReadAt};
use crate::store::StoreFile;

/// The readable parts of a store directory: the content of STORE, the segments of the log, and the manifests.
#[derive(Debug)]
pub struct Survey {
    /// The decoded content of STORE.
    pub store: StoreFile,
    /// The segments of the log, and the line of incarnations.
    pub log: LogMap,
    /// The manifests of all snapshots, which are the links of chains. [`Survey::snapshot`] merges the links of one
    /// snapshot.
    pub links: Links,
}

/// The manifests in the directory, keyed by snapshot number. A value contains the manifest and the defects of its
/// copies, or the damage if neither copy is valid. Some of these manifests may only be links of later snapshots.
pub type Links = BTreeMap<SnapshotId, Result<(Arc<Manifest>, CopyHealth), Damage>>;

/// A function that reads a manifest file. Returns the manifest and its header checksum, or `None` if either copy has a
/// defect.
pub type LinkReader<'a> = &'a dyn Fn(FileName) -> Option<(Manifest, u32)>;

/// A candidate for the start of recovery: the number of a snapshot and its merged manifest, or its damage. Both are
/// `None` for the beginning of the log.
pub(crate) type Candidate = (Option<SnapshotId>, Result<Option<Arc<Manifest>>, Damage>);

impl Survey {
    /// Reads STORE, all segment headers and all manifests.
    ///
    /// # Errors
    /// Returns [`Damage`] if STORE is missing or invalid, a folder cannot be listed, or the system lacks a resource.
    pub fn read(source: &dyn ReadAt) -> Result<Self, Damage> {
        Self::read_as(source, read_store(source)?)
    }

    /// Reads all segment headers and all manifests. `store` is the content of STORE. If STORE is lost, an inspector can
    /// pass a guess of the store's id.
    ///
    /// # Errors
    /// Returns [`Damage`] if a folder cannot be listed, or the system lacks a resource.
    pub fn read_as(source: &dyn ReadAt, store: StoreFile) -> Result<Self, Damage> {
        let log = LogMap::read(source, store.store)?;
        let links = read_links(source, &store, &|_| None)?;
        Ok(Self { store, log, links })
    }

    /// Returns the highest durable mark of the manifests, which is the highest `end`. A manifest is published only
    /// after the log is durable up to its `end` (I7).
    #[must_use]
    pub fn mark(&self) -> Lsn {
        self.readable().map(|manifest| manifest.end).max().unwrap_or_default()
    }

    /// Returns the readable manifests, oldest first. The links of a snapshot are not merged, so a change lists only the
    /// pages that changed.
    pub fn readable(&self) -> impl DoubleEndedIterator<Item = &Arc<Manifest>> + Clone {
        self.links.values().filter_map(|read| read.as_ref().ok()).map(|(manifest, _)| manifest)
    }

    /// Returns the links that form a snapshot, from the newest to the base (SPEC L1 and L2).
    ///
    /// # Errors
    /// Returns [`Damage`] if a link is missing or unreadable, if a link contradicts the change that names it, or if
    /// there are more than [`CHAIN_LINKS_MAX`] links.
    pub fn chain(&self, snapshot: SnapshotId) -> Result<Vec<&Arc<Manifest>>, Damage> {
        let (newest, _) = self.link(snapshot)?;
        let mut chain = vec![newest];
        // Numbers decrease from link to link, so this loop ends.
        while let Some(change) = chain.last()
            && let ManifestKind::Change { previous, .. } = change.kind
        {
            let at = |defect: Defect| defect.at(FileName::Manifest(change.snapshot.0), 0);
            check_limit("links of a snapshot", chain.len() as u64 + 1, CHAIN_LINKS_MAX as u64).map_err(at)?;
            let (link, health) = self.link(previous)?;
            check_link(change, link, health.header_crc).map_err(at)?;
            chain.push(link);
        }
        Ok(chain)
    }

    /// Returns the manifest of a snapshot, which lists all pages of the snapshot. Each call merges the links of the
    /// snapshot again, unless the snapshot is a base.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`Survey::chain`], or [`Damage`] if the merged manifest exceeds a limit.
    pub fn snapshot(&self, snapshot: SnapshotId) -> Result<Arc<Manifest>, Damage> {
        let chain = self.chain(snapshot)?;
        if let [base] = chain[..] {
            return Ok(base.clone());
        }
        let links: Vec<&Manifest> = chain.iter().map(AsRef::as_ref).collect();
        merge(&links).map(Arc::new).map_err(|defect| defect.at(FileName::Manifest(snapshot.0), 0))
    }

    /// Returns references to the entries of a snapshot, in the order of their page ids. This method copies no entries
    /// and is faster than [`Survey::snapshot`].
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`Survey::chain`].
    pub fn entries(&self, snapshot: SnapshotId) -> Result<impl Iterator<Item = &ManifestEntry>, Damage> {
        let links: Vec<&Manifest> = self.chain(snapshot)?.into_iter().map(AsRef::as_ref).collect();
        merged_entries(&links).map_err(|defect| defect.at(FileName::Manifest(snapshot.0), 0))
    }

    /// Returns the entry of a page in a snapshot, or `None` if the snapshot does not contain the page. This method merges
    /// no links, so its time does not depend on the number of pages.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`Survey::chain`].
    pub fn entry(&self, snapshot: SnapshotId, page: PageId) -> Result<Option<&ManifestEntry>, Damage> {
        // The newest link that names the page determines its entry.
        for link in self.chain(snapshot)? {
            if let Ok(at) = link.entries.binary_search_by_key(&page, |entry| entry.page) {
                return Ok(Some(&link.entries[at]));
            }
            if link.tombstones.binary_search_by_key(&page, |tombstone| tombstone.page).is_ok() {
                return Ok(None);
            }
        }
        Ok(None)
    }

    pub(crate) fn link(&self, snapshot: SnapshotId) -> Result<&(Arc<Manifest>, CopyHealth), Damage> {
        match self.links.get(&snapshot) {
            Some(read) => read.as_ref().map_err(Clone::clone),
            None => Err(Defect::Missing.at(FileName::Manifest(snapshot.0), 0)),
        }
    }

    /// Returns the candidates for the start of recovery (SPEC R1): the snapshots from the newest to the oldest, then
    /// `None` for the beginning of the log. The item for an unreadable snapshot is its damage. The iterator merges the
    /// links of a snapshot when it returns the snapshot.
    pub fn candidates(&self) -> impl Iterator<Item = Result<Option<Arc<Manifest>>, Damage>> + '_ {
        self.named_candidates().map(|(_, candidate)| candidate)
    }

    /// Returns the same candidates as [`Survey::candidates`], with the number of each snapshot.
    pub fn named_candidates(&self) -> impl Iterator<Item = Candidate> + '_ {
        let snapshots =
            self.links.keys().rev().map(|snapshot| (Some(*snapshot), self.snapshot(*snapshot).map(Some)));
        snapshots.chain(self.beginning().map(|beginning| (None, beginning)))
    }

    /// Returns the beginning of the log as a candidate for the start of recovery. Returns `None` if the beginning was
    /// recycled, or its damage if its header is invalid.
    pub(crate) fn beginning(&self) -> Option<Result<Option<Arc<Manifest>>, Damage>> {
        match (self.log.beginning(), self.log.chain_break()) {
            (Some(_), _) => Some(Ok(None)),
            (None, of_line) => of_line.cloned().map(Err),
        }
    }
}

/// Reads and decodes the STORE file.
///
/// # Errors
/// Returns [`Damage`] if the file is missing or invalid, or with [`Defect::Unfetched`] if the directory lacks parts of
/// image files that are only in the archive.
pub fn read_store(source: &dyn ReadAt) -> Result<StoreFile, Damage> {
    let unfetched = source.len(FileName::Unfetched).map_err(|error| Defect::of_read(&error));
    if unfetched.map_err(|defect| defect.at(FileName::Unfetched, 0))?.is_some() {
        return Err(Defect::Unfetched.at(FileName::Unfetched, 0));
    }
    let bytes = read_whole(source, FileName::Store)?;
    StoreFile::decode(&bytes).map_err(|defect| defect.at(FileName::Store, 0))
}

/// Reads the manifests of all snapshots. `faster` is called first for each file. If `faster` returns `None`,
/// [`read_manifest`] reads the file again and determines the defect.
///
/// # Errors
/// Returns [`Damage`] if the folder cannot be listed, or [`Damage`] with [`Defect::Shortage`] if the system lacks a
/// resource to read a file.
pub fn read_links(source: &dyn ReadAt, store: &StoreFile, faster: LinkReader<'_>) -> Result<Links, Damage> {
    let mut links = Links::new();
    let names = source
        .list(Folder::Snapshots)
        .map_err(|error| Defect::of_read(&error).at(FileName::Manifest(0), 0))?;
    for name in names {
        if let Some(FileName::Manifest(number)) = FileName::parse(Folder::Snapshots, &name) {
            let file = FileName::Manifest(number);
            let read = match faster(file) {
                Some((link, crc)) => check_file(&link, file, store).map(|()| (link, CopyHealth::whole(crc))),
                None => read_manifest(source, file, store),
            };
            match read {
                // A temporary failure must not be treated as damage, because an older snapshot would then be used.
                Err(damage @ Damage { defect: Defect::Shortage { .. }, .. }) => return Err(damage),
                // A writer removed the link after the folder was listed.
                Err(Damage { defect: Defect::Missing, .. }) => continue,
                _ => {}
            }
            links.insert(SnapshotId(number), read.map(|(manifest, health)| (Arc::new(manifest), health)));
        }
    }
    Ok(links)
}

/// Reads a manifest file. A change alone does not describe a state; [`Survey::snapshot`] merges the links of a
/// snapshot.
///
/// # Errors
/// Returns [`Damage`] if neither copy is valid, or if the manifest belongs to another store or another file.
pub fn read_manifest(
    source: &dyn ReadAt,
    file: FileName,
    store: &StoreFile,
) -> Result<(Manifest, CopyHealth), Damage> {
    let (manifest, health) = match read_copies(source, file) {
        Some(whole) => whole,
        None => Manifest::decode(&read_whole(source, file)?).map_err(|defect| defect.at(file, 0))?,
    };
    check_file(&manifest, file, store)?;
    Ok((manifest, health))
}

/// Checks that a manifest belongs to this store and has the number and kind that the file name requires (SPEC M8).
fn check_file(manifest: &Manifest, file: FileName, store: &StoreFile) -> Result<(), Damage> {
    if manifest.store != store.store {
        return Err(Defect::Foreign.at(file, 0));
    }
    let (number, is_table) = match file {
        FileName::Table(number) => (number, true),
        FileName::Manifest(number) => (number, false),
        _ => (manifest.snapshot.0, false),
    };
    if manifest.snapshot.0 != number {
        let (found, expected) = (manifest.snapshot.0, number);
        return Err(Defect::Mismatch { what: "manifest's number", found, expected }.at(file, 0));
    }
    if (manifest.kind == ManifestKind::Table) != is_table {
        let found = manifest.kind.to_raw().into();
        return Err(Defect::Field { what: "manifest kind", found }.at(file, 0));
    }
    Ok(())
}

/// Reads a manifest file whose two copies are equal. Memory for only one piece of the second copy is allocated at a
/// time. Returns `None` if the file has any defect. The caller then reads the whole file to determine the defect.
fn read_copies(source: &dyn ReadAt, file: FileName) -> Option<(Manifest, CopyHealth)> {
    let len = source.len(file).ok()??;
    let mut header = [0; ManifestHeaderRaw::LEN];
    source.read_at(file, 0, &mut header).ok()?;
    let half = Manifest::copy_len(&header).filter(|half| len == 2 * half)?;
    let first = read_range(source, file, 0, half).ok()?;
    let (manifest, header_crc) = Manifest::decode_first(&first)?;
    for (piece, at) in first.chunks(CHECKED_AT_ONCE as usize).zip((half..).step_by(CHECKED_AT_ONCE as usize))
    {
        let second = read_range(source, file, at, piece.len() as u64).ok()?;
        if piece != second {
            return None;
        }
    }
    Some((manifest, CopyHealth::whole(header_crc)))
}

fn read_whole(source: &dyn ReadAt, file: FileName) -> Result<Vec<u8>, Damage> {
    let unreadable = |error: std::io::Error| Defect::of_read(&error).at(file, 0);
    let len = source.len(file).map_err(unreadable)?.ok_or(Defect::Missing.at(file, 0))?;
    read_range(source, file, 0, len).map_err(|defect| defect.at(file, 0))
}
