//! Reads and checks every object that a restore of the end and of the named snapshots needs, and continues after damage
//! (rules 22 and 23).

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use remanent_format::StoreId;

use super::{Archive, Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Damage, Error, Result};
use crate::object::{
    BatchPoint, Bound, Content, DataKey, DataRef, Folder, Hint, Kind, LineObject, Links, Manifest, Nonce,
    ObjectKey, Role, decode_data,
};

/// Maximum number of attempts to audit the archive. An attempt fails if a boundary overtakes it.
const AUDIT_ATTEMPTS: u32 = 4;
/// Maximum number of positions in one gap of a listing that are checked.
const GAP_MAX: usize = 64;

/// An object that is missing or invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {damage}")]
pub struct DamagedObject {
    /// Key of the object.
    pub key: ObjectKey,
    /// The kind of damage.
    pub damage: Damage,
}

/// The result of an audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Audited {
    /// Each damaged object, in the order in which it was found.
    pub damaged: Vec<DamagedObject>,
    /// Number of objects that were read completely.
    pub objects: u64,
    /// Total length of these objects in bytes.
    pub bytes: u64,
    /// Number of data objects that were skipped, because only a share of them was read.
    pub left_out: u64,
    /// The last archived batch that was read.
    pub archived: BatchPoint,
}

/// Reads every object that a restore of the end needs, and checks all checksums. These objects are the copies of
/// boundaries by which the newest boundary is found, the line from its start to the end, the data objects of the newest
/// manifest and of later runs, and the catalogs and data objects of the kept named snapshots. Continues after damage,
/// so that the result lists each damaged object.
///
/// `share` is the probability with which each data object is read. At 1 or above, all are read.
///
/// # Errors
/// Returns [`Error::Empty`] if the archive is empty, [`Error::Overtaken`] if a boundary overtook every attempt, and
/// [`Error::Bucket`] if a request failed.
pub async fn audit<B: Bucket, N: Nonces>(archive: Archive<'_, B, N>, share: f64) -> Result<Audited> {
    let mut overtaken = Error::Empty;
    for _ in 0..AUDIT_ATTEMPTS {
        let mut audit = Audit::new(archive, share);
        audit.read().await?;
        let position = audit.lowest;
        // [rcheck] If the range that was read has become a hole, missing or foreign objects in it are not damage.
        let is_overtaken = match audit.line.is_overtaken(position).await {
            Err(Error::Damaged { .. } | Error::IdentityMismatch { .. }) => false,
            passed => passed?,
        };
        if audit.audited.damaged.is_empty() || !is_overtaken {
            return Ok(audit.audited);
        }
        overtaken = Error::Overtaken { position };
    }
    Err(overtaken)
}

/// The progress of an audit.
struct Audit<'a, B, N> {
    line: Line<'a, B, N>,
    share: f64,
    audited: Audited,
    /// The lowest position of the line that is checked.
    lowest: u64,
    /// Position, nonce and last archived batch of the previous object, if it is intact.
    before: Option<(u64, Nonce, BatchPoint)>,
    /// The links that the object after the last intact object must contain.
    links: Links,
    manifests: BTreeMap<u64, Manifest>,
    /// Lists of data objects of runs, manifests and catalogs, by position.
    lists: BTreeMap<u64, (Kind, Vec<DataRef>)>,
}

impl<'a, B: Bucket, N: Nonces> Audit<'a, B, N> {
    fn new(archive: Archive<'a, B, N>, share: f64) -> Self {
        Self {
            line: Line::new(archive),
            share,
            audited: Audited::default(),
            lowest: 1,
            before: None,
            links: Links::default(),
            manifests: BTreeMap::new(),
            lists: BTreeMap::new(),
        }
    }

    async fn read(&mut self) -> Result<()> {
        let is_start_known = self.read_bounds().await?;
        let (found, listed) = self.window(is_start_known).await?;
        let start = if found.is_empty() { listed.first().copied() } else { Some(found.start) };
        let start = start.unwrap_or(self.line.view.start);
        if found.is_empty() && listed.is_empty() {
            if start > 1 {
                self.note(ObjectKey::Line(start), Damage::Missing);
            }
            return if self.audited.damaged.is_empty() { Err(Error::Empty) } else { Ok(()) };
        }
        self.lowest = start;
        for position in found.chain(listed) {
            self.read_line(position).await?;
        }
        let named = self.named().await?;
        let newest = self.manifests.get(&self.links.manifest).map(|newest| (self.links.manifest, *newest));
        match newest {
            Some((position, manifest)) if self.audited.archived.lsn < manifest.end.lsn => {
                let damage = Damage::EndNotReached { end: manifest.end, found: self.audited.archived };
                self.note(ObjectKey::Line(position), damage);
            }
            None if start > 1 && self.audited.damaged.is_empty() => {
                self.note(ObjectKey::Line(start), Damage::NoStart);
            }
            _ => {}
        }
        self.read_data(newest, &named).await
    }

    /// Reads the catalogs that are below the line. Returns the positions of the catalogs of all kept snapshots.
    async fn named(&mut self) -> Result<Vec<u64>> {
        let mut positions = Vec::new();
        for kept in self.line.view.catalog.clone() {
            if kept.position < self.lowest {
                let key = ObjectKey::Line(kept.position);
                let found = self.get(key).await?;
                let store = self.line.view.store;
                let object = found.map(|bytes| LineObject::decode(&bytes, kept.position, store)).transpose();
                match object {
                    Ok(Some(object)) if object.nonce == kept.nonce => {
                        self.lists.insert(kept.position, (Kind::Catalog, object.data));
                    }
                    Ok(_) => self.note(key, Damage::Missing),
                    Err(defect) => self.note(key, Damage::Bytes(defect)),
                }
            }
            positions.push(kept.position);
        }
        Ok(positions)
    }

    fn note(&mut self, key: ObjectKey, damage: Damage) {
        self.audited.damaged.push(DamagedObject { key, damage });
    }

    /// Reads an object completely. Returns `None` if it does not exist.
    async fn get(&mut self, key: ObjectKey) -> Result<Option<Vec<u8>>> {
        let found = self.line.get(key).await?;
        if let Some(bytes) = &found {
            self.audited.objects += 1;
            self.audited.bytes += bytes.len() as u64;
        }
        Ok(found)
    }

    /// Reads the copies of boundaries that a search for the newest boundary reads. Returns false if the copy of the
    /// newest boundary is damaged.
    async fn read_bounds(&mut self) -> Result<bool> {
        let (mut low, mut step) = (0, 1);
        while self.read_bound(low + step).await? {
            low += step;
            step *= 2;
        }
        let mut high = low + step;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.read_bound(middle).await? { low = middle } else { high = middle }
        }
        // If a copy is missing, the search ends below it. Only a listing shows that later copies exist.
        for number in above(low, &self.listed(Folder::Bound).await?) {
            if !self.read_bound(number).await? {
                self.note(ObjectKey::Bound(number), Damage::Missing);
            }
            low = number;
        }
        Ok(self.line.view.bound == low)
    }

    /// Returns the sorted numbers of the objects that a listing of `folder` contains. The listing may be out of date.
    async fn listed(&self, folder: Folder) -> Result<Vec<u64>> {
        let names = self.line.list(folder).await?;
        let number = |name: &String| match ObjectKey::parse(name)? {
            ObjectKey::Line(number) | ObjectKey::Bound(number) => Some(number),
            _ => None,
        };
        let mut numbers: Vec<u64> = names.iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Reads and checks the copy of a boundary. Returns false if it does not exist.
    async fn read_bound(&mut self, number: u64) -> Result<bool> {
        let key = ObjectKey::Bound(number);
        let Some(bytes) = self.get(key).await? else { return Ok(false) };
        match Bound::decode(&bytes, number, self.line.view.store) {
            Ok(bound) => self.line.apply_bound(&bound),
            Err(defect) => self.note(key, Damage::Bytes(defect)),
        }
        Ok(true)
    }

    /// Returns the positions to check: the range up to the end that a search finds, and later positions that a listing
    /// contains.
    async fn window(&mut self, is_start_known: bool) -> Result<(Range<u64>, Vec<u64>)> {
        let start = self.line.view.start;
        let mut listed = self.listed(Folder::Line).await?;
        if !is_start_known {
            // Objects below the unknown start may have been deleted.
            listed.retain(|position| *position >= start);
            let newest_gap = listed.windows(2).rposition(|pair| pair[1] > pair[0] + 1);
            return Ok((start..start, listed.split_off(newest_gap.map_or(0, |gap| gap + 1))));
        }
        let mut last = start - 1;
        if self.line.exists(ObjectKey::Line(start)).await? {
            last = self.line.end_after(start, Hint::PROBES).await?;
        }
        // If an object is missing, the search ends below it. Only a listing shows that later objects exist.
        Ok((start..last + 1, above(last, &listed)))
    }

    /// Reads and checks the object at a position of the line.
    async fn read_line(&mut self, position: u64) -> Result<()> {
        let key = ObjectKey::Line(position);
        let before = self.before.take().filter(|(at, ..)| at + 1 == position);
        let Some(bytes) = self.get(key).await? else {
            self.note(key, Damage::Missing);
            return Ok(());
        };
        let object = match LineObject::decode(&bytes, position, self.line.view.store) {
            Ok(object) => object,
            Err(defect) => {
                self.note(key, Damage::Bytes(defect));
                return Ok(());
            }
        };
        self.line.view.store.get_or_insert(object.store);
        if let Some((_, nonce, archived)) = before {
            if object.nonce_before != nonce {
                self.note(key, Damage::NotNext);
            } else if let Content::Run(run) = &object.content
                && run.before != archived
            {
                self.note(key, Damage::Gap { found: run.before, expected: archived });
            }
        }
        self.before = Some((position, object.nonce, object.archived));
        self.links = object.links.after(&object);
        self.audited.archived = object.archived;
        let kind = object.content.kind();
        let snapshots = match object.content {
            Content::Boundary(boundary) => Some(boundary.snapshots),
            Content::Catalog(catalog) => Some(catalog.snapshots),
            Content::Fence(fence) => {
                self.line.view.cut_catalog(&fence);
                None
            }
            Content::Manifest(manifest) => {
                self.manifests.insert(position, manifest);
                None
            }
            Content::Run(_) => None,
        };
        if let Some(snapshots) = snapshots {
            self.line.view.catalog = snapshots;
        }
        if matches!(kind, Kind::Manifest | Kind::Run | Kind::Catalog) && !object.data.is_empty() {
            self.lists.insert(position, (kind, object.data));
        }
        Ok(())
    }

    /// Reads and checks the data objects that a restore needs. `named` contains the positions of the catalogs of kept
    /// snapshots.
    async fn read_data(&mut self, newest: Option<(u64, Manifest)>, named: &[u64]) -> Result<()> {
        let Some(store) = self.line.view.store else { return Ok(()) };
        let (position, lowest) = newest.map_or((0, 0), |(position, manifest)| (position, manifest.start));
        let lists = std::mem::take(&mut self.lists);
        let mut files: HashSet<(Role, u64)> = HashSet::new();
        if let Some((_, data)) = lists.get(&position) {
            files.extend(data.iter().map(|entry| (entry.part.role, entry.part.file)));
        }
        let mut read: HashSet<DataKey> = HashSet::new();
        for (at, (kind, data)) in &lists {
            for entry in data {
                let is_needed = match kind {
                    Kind::Catalog => named.contains(at),
                    _ if *at < lowest => false,
                    Kind::Manifest => *at == position,
                    _ => *at > position || !files.contains(&(entry.part.role, entry.part.file)),
                };
                if is_needed && read.insert(entry.key) {
                    self.read_part(entry, store).await?;
                }
            }
        }
        Ok(())
    }

    async fn read_part(&mut self, entry: &DataRef, store: StoreId) -> Result<()> {
        if !self.is_chosen() {
            self.audited.left_out += 1;
            return Ok(());
        }
        let key = ObjectKey::Data(entry.key);
        match self.get(key).await? {
            None => self.note(key, Damage::Missing),
            Some(bytes) => {
                if let Err(defect) = decode_data(&bytes, entry, store) {
                    self.note(key, Damage::Bytes(defect));
                }
            }
        }
        Ok(())
    }

    /// Returns true with probability `share`.
    fn is_chosen(&self) -> bool {
        if self.share >= 1.0 {
            return true;
        }
        let drawn = self.line.archive.nonces.draw().0;
        let number = u64::from_le_bytes(std::array::from_fn(|at| drawn[at]));
        (number as f64) < self.share * u64::MAX as f64
    }
}

/// Returns the numbers in the sorted slice `listed` that are above `last`, and up to `GAP_MAX` missing numbers before
/// each.
fn above(mut last: u64, listed: &[u64]) -> Vec<u64> {
    let mut found = Vec::new();
    let start = listed.partition_point(|number| *number <= last);
    for &number in &listed[start..] {
        found.extend((last + 1..number).take(GAP_MAX));
        found.push(number);
        last = number;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_gaps_are_cut_off() {
        assert_eq!(above(2, &[1, 2, 3, 6]), [3, 4, 5, 6]);
        assert_eq!(above(0, &[1 << 60]).len(), 65);
        assert_eq!(above(7, &[1, 7]), [0; 0]);
    }
}
