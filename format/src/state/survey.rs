//! A survey of a store directory, as far as it can be read: STORE, the log, the links of snapshots.
//!
//! A [`Survey`] looks at every file and judges none. `follow` goes on from it to a state.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_limit};
use crate::ids::{Lsn, SnapshotId};
use crate::image::read::{CHECKED_AT_ONCE, read_range};
use crate::limits::CHAIN_LINKS_MAX;
use crate::log::LogMap;
use crate::manifest::{
    CopyHealth, Manifest, ManifestEntry, ManifestHeaderRaw, ManifestKind, check_link, merge, merged_entries,
};
use crate::names::{FileName, Folder, ReadAt};
use crate::store::StoreFile;

/// The readable parts of a store directory.
#[derive(Debug)]
pub struct Survey {
    /// The store's identity.
    pub store: StoreFile,
    /// The map of the log.
    pub log: LogMap,
    /// The links of snapshots. [`Survey::snapshot`] puts a snapshot together from them.
    pub links: Links,
}

/// The links of snapshots, one a file: the manifest with the health of its copies, or why it cannot be read.
/// A link may be there for the snapshots that follow it only.
pub type Links = BTreeMap<SnapshotId, Result<(Arc<Manifest>, CopyHealth), Damage>>;

/// Reads a link whose copies are both good, and returns its header checksum too. `None` if anything is not as
/// it should be.
pub type LinkReader<'a> = &'a dyn Fn(FileName) -> Option<(Manifest, u32)>;

/// A place to start from: a snapshot, whole, or the log's beginning, which is `None`.
pub(crate) type Candidate = (Option<SnapshotId>, Result<Option<Arc<Manifest>>, Damage>);

impl Survey {
    /// Looks at every file.
    ///
    /// # Errors
    /// [`Damage`] if STORE is missing or unreadable, or a folder cannot be listed.
    pub fn read(source: &dyn ReadAt) -> Result<Self, Damage> {
        Self::read_as(source, read_store(source)?)
    }

    /// Looks at every file but STORE, whose content is given: an inspector that guesses the store's id goes
    /// on where STORE is lost.
    ///
    /// # Errors
    /// [`Damage`] if a folder cannot be listed.
    pub fn read_as(source: &dyn ReadAt, store: StoreFile) -> Result<Self, Damage> {
        let log = LogMap::read(source, store.store)?;
        let links = read_links(source, &store, &|_| None)?;
        Ok(Self { store, log, links })
    }

    /// The highest durable mark that manifests give: a manifest is published only when the log is durable
    /// up to its end (I7).
    #[must_use]
    pub fn mark(&self) -> Lsn {
        self.readable().map(|manifest| manifest.end).max().unwrap_or_default()
    }

    /// The links that can be read, oldest first, each as it is on disk: a change names only what changed.
    pub fn readable(&self) -> impl DoubleEndedIterator<Item = &Arc<Manifest>> + Clone {
        self.links.values().filter_map(|read| read.as_ref().ok()).map(|(manifest, _)| manifest)
    }

    /// The links that make up a snapshot: its own first, its base last (SPEC L1 and L2).
    ///
    /// # Errors
    /// [`Damage`] to one of them: it is missing, unreadable, or not the one that is followed; or there are
    /// more than [`CHAIN_LINKS_MAX`].
    pub fn chain(&self, snapshot: SnapshotId) -> Result<Vec<&Arc<Manifest>>, Damage> {
        let (newest, _) = self.link(snapshot)?;
        let mut chain = vec![newest];
        // Numbers fall from link to link, so this ends.
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

    /// A whole snapshot: its chain of links merged. A base is given as it is. A merged one is made anew with
    /// each call, as large as all of its links together at most.
    ///
    /// # Errors
    /// As for [`Survey::chain`].
    pub fn snapshot(&self, snapshot: SnapshotId) -> Result<Arc<Manifest>, Damage> {
        let chain = self.chain(snapshot)?;
        if let [base] = chain[..] {
            return Ok(base.clone());
        }
        let links: Vec<&Manifest> = chain.iter().map(AsRef::as_ref).collect();
        merge(&links).map(Arc::new).map_err(|defect| defect.at(FileName::Manifest(snapshot.0), 0))
    }

    /// The pages of a whole snapshot, in the order of their ids, for a caller that needs nothing else of
    /// [`Survey::snapshot`]. No entry is copied.
    ///
    /// # Errors
    /// As for [`Survey::chain`].
    pub fn entries(&self, snapshot: SnapshotId) -> Result<impl Iterator<Item = &ManifestEntry>, Damage> {
        let links: Vec<&Manifest> = self.chain(snapshot)?.into_iter().map(AsRef::as_ref).collect();
        merged_entries(&links).map_err(|defect| defect.at(FileName::Manifest(snapshot.0), 0))
    }

    pub(crate) fn link(&self, snapshot: SnapshotId) -> Result<&(Arc<Manifest>, CopyHealth), Damage> {
        match self.links.get(&snapshot) {
            Some(read) => read.as_ref().map_err(Clone::clone),
            None => Err(Defect::Missing.at(FileName::Manifest(snapshot.0), 0)),
        }
    }

    /// The candidates that a recovery may start from (SPEC R1), best first: the newest snapshot, older ones,
    /// the log's beginning, which is `None`. A snapshot that cannot be read is there as its damage; each is
    /// merged when it is asked for.
    pub fn candidates(&self) -> impl Iterator<Item = Result<Option<Arc<Manifest>>, Damage>> + '_ {
        self.named_candidates().map(|(_, candidate)| candidate)
    }

    /// The same, with the number of each; also of one that cannot be read.
    pub fn named_candidates(&self) -> impl Iterator<Item = Candidate> + '_ {
        let snapshots =
            self.links.keys().rev().map(|snapshot| (Some(*snapshot), self.snapshot(*snapshot).map(Some)));
        snapshots.chain(self.beginning().map(|beginning| (None, beginning)))
    }

    /// The log's beginning as a candidate, unless it was recycled.
    pub(crate) fn beginning(&self) -> Option<Result<Option<Arc<Manifest>>, Damage>> {
        match (self.log.beginning(), self.log.break_of_line()) {
            (Some(_), _) => Some(Ok(None)),
            (None, of_line) => of_line.cloned().map(Err),
        }
    }
}

/// Reads the STORE file.
///
/// # Errors
/// [`Damage`] if it is missing or unreadable.
pub fn read_store(source: &dyn ReadAt) -> Result<StoreFile, Damage> {
    let bytes = read_whole(source, FileName::Store)?;
    StoreFile::decode(&bytes).map_err(|defect| defect.at(FileName::Store, 0))
}

/// Reads the links of all snapshots. `faster` may read one in which nothing is wrong; if it returns `None`,
/// the link is read the ordinary way, which names the defect.
///
/// # Errors
/// [`Damage`] if their folder cannot be listed; [`Defect::Shortage`] of any of them.
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
                // A link that could not be read now must not be taken for a damaged one: an older snapshot
                // would take its place.
                Err(damage @ Damage { defect: Defect::Shortage { .. }, .. }) => return Err(damage),
                // A writer removed it after the folder was listed.
                Err(Damage { defect: Defect::Missing, .. }) => continue,
                _ => {}
            }
            links.insert(SnapshotId(number), read.map(|(manifest, health)| (Arc::new(manifest), health)));
        }
    }
    Ok(links)
}

/// Reads one link of a snapshot, or a table of the same form. A change alone is no state:
/// [`Survey::snapshot`] follows the chain.
///
/// # Errors
/// [`Damage`] if neither copy is whole, or it is another store's or another file's.
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

/// Refuses another store's or another file's manifest (SPEC M8).
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

/// The manifest of a file of two equal copies, as nearly every one is. Only one piece of the second copy is
/// held at a time. `None` if anything is not as it should be: then reading the whole file gives the defect.
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
